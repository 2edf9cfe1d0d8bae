"""Who writes the answers: models that are loaded here, one thread of which owns them all, or a vLLM server.

A version is opened under its digest beside those that are open. What was asked of a version is answered by it, also
after another took its name.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any, TypeVar

from clinrl import paths
from clinrl.artifacts import identity, read_manifest, verified
from clinrl.config.base import Scale
from clinrl.config.machine import Vllm
from clinrl.errors import EngineError, Refused
from clinrl.models import bases, engine, memory, opening
from clinrl.models.chat import Completion, end_tokens
from clinrl.models.generate import SHARED, Prompt, Sampler
from clinrl.registry.pyfunc import ADAPTER, BASE, MERGED, Served

T = TypeVar("T")
WINDOW_S = 0.005
"""How long the first of several requests waits for others, to be answered together."""
FAILURES = 5
"""Batches of a version in a row that fail until this process counts as broken, as after an error of CUDA that stays."""


class Dropped(Exception):
    """Nobody waits for any of these answers any more."""


@dataclass(eq=False)
class Job:
    """A prompt that somebody waits for, and where its tokens go: those so far, then the completion or an exception."""

    digest: str
    ids: tuple[int, ...]
    budget: int
    temperature: float
    top_p: float
    seed: int
    is_streamed: bool
    is_dropped: bool = False
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    pieces: asyncio.Queue[tuple[int, ...] | Completion | Exception] = field(default_factory=asyncio.Queue)

    def tell(self, what: tuple[int, ...] | Completion | Exception) -> None:
        with suppress(RuntimeError):  # the server has ended, and nobody waits
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, what)

    def goes_with(self, other: "Job") -> bool:
        """Whether both may be written at once. Drawn tokens depend on what they are drawn beside; likeliest do not."""
        return self is other or (self.digest == other.digest and self.temperature == other.temperature == 0.0)


class Local:
    """Models of this process. Requests that wait for the same version are written at once, `rows` at most."""

    def __init__(self, scale: Scale, rows: int) -> None:
        self._scale, self._rows = scale, rows
        self._bases: dict[tuple[str, bool], tuple[Any, Any]] = {}
        """By digest, and whether in four bits."""
        self._samplers: dict[str, Sampler] = {}
        self._failures = Counter[str]()
        """Batches that failed since the last answer of any version, by digest."""
        self._todo: deque[Job | Callable[[], None]] = deque()
        self._changed = Condition()
        Thread(target=self._work, name="models", daemon=True).start()

    def open(self, served: Served, folder: Path) -> Sampler:
        """Make a version ready, of a checked folder that stays. Its sampler says how prompts are spelt.

        Weights are read here while other versions answer, since that may take a minute and draws no random number.
        torch's default type is another meanwhile, on which no tensor of an answer depends. An adapter is put on its
        base between two batches: PEFT draws for that, and the base may be one that answers.
        """
        if served.form == "merged":
            sampler = Sampler(*bases.open_base(folder / MERGED, for_training=False), scale=self._scale)
            return self._between(lambda: self._keep(served.digest, sampler))
        spec = verified(folder / ADAPTER).spec
        qlora = bool(spec.get("qlora", False))  # as in its exam
        base = served.base_digest, qlora
        model, tokenizer = self._bases.get(base) or bases.open_base(folder / BASE, for_training=False, qlora=qlora)

        def adapt() -> Sampler:
            with memory.place("loading an adapter", memory.larger(self._scale)):
                adapted = opening.adapted(model, folder / ADAPTER, name=served.digest).eval()
            self._bases[base] = adapted, tokenizer  # a base is not kept that an adapter has failed to get on
            is_shared = spec.get("trainer", {}).get("generation_path") == SHARED  # as in its exam
            sampler = Sampler(adapted, tokenizer, shared=is_shared, scale=self._scale, place="an answer")
            return self._keep(served.digest, sampler)

        return self._between(adapt)

    def close(self, digest: str) -> None:
        """Let a version go that nobody asks any more."""
        self._between(lambda: self._close(digest))

    def submit(self, what: Job | Callable[[], None]) -> None:
        """Have a prompt written, or something done between two batches."""
        with self._changed:
            self._todo.append(what)
            self._changed.notify()

    def room(self, sampler: Sampler) -> int | None:
        """Tokens that prompt and completion may have together; None: any number."""
        return sampler.window

    def is_failing(self, digest: str) -> bool:
        """Whether nothing but failures came of the last FAILURES batches of a version, and no other has answered."""
        return self._failures[digest] >= FAILURES

    def _between(self, call: Callable[[], T]) -> T:
        done = Future[T]()

        def run() -> None:
            try:
                done.set_result(call())
            except Exception as error:  # noqa: BLE001  whoever waits for it gets it
                done.set_exception(error)

        self.submit(run)
        return done.result()

    def _keep(self, digest: str, sampler: Sampler) -> Sampler:
        self._samplers[digest] = sampler
        return sampler

    def _close(self, digest: str) -> None:
        model = self._samplers.pop(digest).model
        del self._failures[digest]
        others = [name for name in getattr(model, "peft_config", ()) if name != digest]
        if others:  # the last adapter goes with its base
            model.set_adapter(others[0])
            model.delete_adapter(digest)
        used = [sampler.model for sampler in self._samplers.values()]
        self._bases = {base: held for base, held in self._bases.items() if held[0] in used}

    def _work(self) -> None:
        while True:
            what = self._next()
            if isinstance(what, list):
                self._write(what)
            else:
                what()

    def _next(self) -> list[Job] | Callable[[], None]:
        with self._changed:
            self._changed.wait_for(lambda: self._todo)
            first = self._todo[0]
            if not isinstance(first, Job):
                return self._todo.popleft()  # type: ignore[return-value]  # it is the first
            if len(self._todo) == 1:
                self._changed.wait(WINDOW_S)
            batch = [one for one in self._todo if isinstance(one, Job) and one.goes_with(first)][: self._rows]
            for job in batch:
                self._todo.remove(job)
            return batch

    def _write(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.is_dropped:
                job.tell(Dropped())
        jobs = [job for job in jobs if not job.is_dropped]
        if not jobs:
            return
        first, sampler = jobs[0], self._samplers[jobs[0].digest]
        try:
            if first.digest in getattr(sampler.model, "peft_config", ()):
                sampler.model.set_adapter(first.digest)
            sampler.watch = [Telling(jobs, sampler)]  # type: ignore[list-item]  # it is called
            written = sampler.sample(
                [Prompt("the request", (), job.ids, job.budget) for job in jobs],
                thinking=False,  # prompts are spelt already
                temperature=first.temperature, top_p=first.top_p, seed=first.seed,
                budget=max(job.budget for job in jobs),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001  whoever asked is told, and the others are served
            # A request that no memory is enough for is refused, and says nothing of this process.
            self._failures[first.digest] += not isinstance(error, Dropped | Refused)
            for job in jobs:
                job.tell(error)
            return
        finally:
            sampler.watch = ()  # what was asked is not kept
        self._failures.clear()
        for job, one in zip(jobs, written, strict=True):
            job.tell(one if one.tokens <= job.budget else sampler.cut(one, job.budget))


class Telling:
    """Tells those whose answers are streamed each token, while a batch is written; ends it when nobody listens."""

    def __init__(self, jobs: Sequence[Job], sampler: Sampler) -> None:
        self._jobs = sorted(jobs, key=lambda job: -len(job.ids))
        self._pad, self._ends = sampler.tokenizer.pad_token_id, end_tokens(sampler.model, sampler.tokenizer)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """The scores (B, V) as they are, given the tokens before them (B, T), padding anywhere."""
        if all(job.is_dropped for job in self._jobs):
            raise Dropped
        if any(job.is_streamed for job in self._jobs):
            for row in input_ids.tolist():
                tokens = tuple(token for token in row if token != self._pad)
                prompt = next((job.ids for job in self._jobs if tokens[: len(job.ids)] == job.ids), None)
                for job in self._jobs if prompt and tokens[-1] not in self._ends else ():
                    if job.is_streamed and job.ids == prompt:
                        job.tell(tokens[len(prompt) :][: job.budget])
        return scores


class Remote:
    """The vLLM server of `clinrl engine`, which batches by itself. A stream is one piece, since it is asked whole."""

    def __init__(self, task: str, settings: Vllm) -> None:
        self._task, self._settings = task, settings
        self._engines: dict[str, engine.Engine] = {}
        self._wanted: dict[str, tuple[Served, Path]] = {}
        """What is open, or is to be, by digest."""
        self._changing = Lock()
        self._pool = ThreadPoolExecutor(settings.at_once)

    def open(self, served: Served, folder: Path) -> Sampler:
        self._wanted[served.digest] = served, folder  # before it is open: `_reopen` may be about to close it
        return self._connected(served, folder)

    def close(self, digest: str) -> None:
        """Have the server forget a version. Raises EngineError if it is away; here it is forgotten then too."""
        self._wanted.pop(digest, None)
        if (asked := self._engines.pop(digest, None)) is not None:
            asked.release(str(asked.adapter))

    def submit(self, job: Job) -> None:
        self._pool.submit(self._write, job)

    def room(self, sampler: Sampler) -> int | None:
        assert isinstance(sampler, engine.Engine)
        return min(filter(None, (sampler.window, sampler.client.max_length)))

    def is_failing(self, _: str) -> bool:
        """Never: a server that is away is asked again, and starting this process anew would not bring it back."""
        return False

    def _write(self, job: Job) -> None:
        if job.is_dropped:
            job.tell(Dropped())
            return
        try:
            asked = self._engines[job.digest]
            (one,) = asked.sample(
                [Prompt("the request", (), job.ids, job.budget)], thinking=False, temperature=job.temperature,
                top_p=job.top_p, budget=job.budget, seed=job.seed,
            )  # fmt: skip
            job.tell(one)
        except EngineError as error:
            job.tell(error)
            self._reopen(job.digest, asked)
        except Exception as error:  # noqa: BLE001  whoever asked is told, and the others are served
            job.tell(error)

    def _connected(self, served: Served, folder: Path) -> engine.Engine:
        if served.form == "merged":
            raise EngineError("a full model is not served by `clinrl engine`; set sampler to transformers")
        base = paths.base(served.task)
        if identity(read_manifest(base)) != served.base_digest:
            raise EngineError(f"{served.name} is for another base than {base}, which the vLLM server has")
        opening.check(folder / ADAPTER)
        asked = engine.connect(self._task, self._settings)
        asked.adopt(folder / ADAPTER)
        asked.check_adopted()
        self._engines[served.digest] = asked
        return asked

    def _reopen(self, digest: str, failed: engine.Engine) -> None:
        """Connect anew: a server that was started again has no adapter, and that of `clinrl engine` has another key.

        One request tries it, and no other waits for that. Where the server is away, the next that fails tries again.
        """
        if not self._changing.acquire(blocking=False):
            return
        try:
            with suppress(Refused):
                if self._engines.get(digest) is failed and (known := self._wanted.get(digest)):
                    self._connected(*known)
                    if digest not in self._wanted:  # closed meanwhile
                        self.close(digest)
        finally:
            self._changing.release()


Backend = Local | Remote
"""What writes."""
