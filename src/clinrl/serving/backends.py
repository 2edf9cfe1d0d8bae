"""The backends that write answers: models in this process, which one thread owns, or a vLLM server.

A version is opened under its digest, beside the versions that are already open. The version that got a request answers
it, even after another version took its name.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Event, Lock, Thread
from typing import Any, TypeVar

from clinrl import paths
from clinrl.artifacts import identity_of, verified
from clinrl.config.base import Scale
from clinrl.config.machine import Vllm
from clinrl.errors import EngineError, OutOfMemory, Refused
from clinrl.models import bases, engine, memory, opening
from clinrl.models.chat import Completion, decode, end_tokens
from clinrl.models.generate import Prompt, Sampler, shares
from clinrl.models.vllm_client import Call
from clinrl.registry.pyfunc import ADAPTER, BASE, MERGED, Served

T = TypeVar("T")
WINDOW_S = 0.005
"""Seconds that a request waits for others, to be answered with them."""
FAILURES = 5
"""Failed batches of a version in a row after which this process counts as broken, as by a lasting error of CUDA."""


class Dropped(Exception):
    """Nobody waits for any of these answers any more."""


@dataclass(eq=False)
class Job:
    """A prompt whose answer a client waits for, and the queue of its results.

    The queue gets the tokens so far, each time there are more, then the completion or an exception.
    """

    digest: str
    ids: tuple[int, ...]
    budget: int
    temperature: float
    top_p: float
    seed: int
    is_streamed: bool
    is_dropped: bool = False
    call: Call = field(default_factory=Call)
    """The request that a vLLM server is sent for it."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    pieces: asyncio.Queue[tuple[int, ...] | Completion | Exception] = field(default_factory=asyncio.Queue)

    def send(self, what: tuple[int, ...] | Completion | Exception) -> None:
        with suppress(RuntimeError):  # the server has ended, and nobody waits
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, what)

    def drop(self) -> None:
        """Say that nobody waits any more, and end the request to a vLLM server."""
        self.is_dropped = True
        self.call.end()

    def can_join(self, other: "Job") -> bool:
        """Whether both may be in one batch. Sampled tokens depend on the rest of their batch; greedy ones do not."""
        return self is other or (self.digest == other.digest and self.temperature == other.temperature == 0.0)


class Local:
    """Models in this process. Requests that wait for the same version are answered as one batch of at most `rows`."""

    def __init__(self, scale: Scale, rows: int) -> None:
        self._scale, self._rows = scale, rows
        self._bases: dict[tuple[str, bool], tuple[Any, Any]] = {}
        """Model and tokenizer by the base's digest, and by whether it is held in four bits."""
        self._samplers: dict[str, Sampler] = {}
        self._failures = Counter[str]()
        """Batches that failed since the last answer of any version, by digest."""
        self._todo: deque[Job | Callable[[], None]] = deque()
        self._changed = Condition()
        Thread(target=self._work, name="models", daemon=True).start()

    def open(self, served: Served, folder: Path) -> Sampler:
        """Load a version from a checked folder that stays. The returned sampler encodes its prompts.

        Weights are read in this thread while other versions answer, since that may take a minute and draws no random
        number. torch's default type changes meanwhile, but no tensor of an answer depends on it. An adapter is put on
        its base between two batches: PEFT draws random numbers for that, and the base may be answering.
        """
        if served.form == "merged":
            sampler = Sampler(*bases.open_base(folder / MERGED, for_training=False), scale=self._scale)
            return self._between(lambda: self._samplers.setdefault(served.digest, sampler))
        spec = verified(folder / ADAPTER).spec
        qlora = bool(spec.get("qlora", False))  # as in its exam
        base = served.base_digest, qlora
        model, tokenizer = self._bases.get(base) or bases.open_base(folder / BASE, for_training=False, qlora=qlora)

        def adapt() -> Sampler:
            with memory.place("loading an adapter", memory.larger(self._scale)):
                adapted = opening.adapted(model, folder / ADAPTER, name=served.digest).eval()
            self._bases[base] = adapted, tokenizer  # kept only once the adapter is on it
            sampler = Sampler(adapted, tokenizer, shared=shares(spec), scale=self._scale, place="an answer")
            return self._samplers.setdefault(served.digest, sampler)

        return self._between(adapt)

    def close(self, digest: str) -> None:
        """Unload a version that gets no requests any more."""
        self._between(lambda: self._close(digest))

    def submit(self, what: Job | Callable[[], None]) -> None:
        """Queue a prompt, or a call that is to run between two batches."""
        with self._changed:
            self._todo.append(what)
            self._changed.notify()

    def rest(self, within_s: float) -> None:
        """Wait until nothing is computed. A thread that is inside torch when Python ends would abort the process."""
        done = Event()
        self.submit(done.set)
        done.wait(within_s)

    def is_failing(self, digest: str) -> bool:
        """Whether the last FAILURES batches of a version failed, and no version has answered since."""
        return self._failures[digest] >= FAILURES

    def _between(self, call: Callable[[], T]) -> T:
        done = Future[T]()

        def run() -> None:
            try:
                done.set_result(call())
            except Exception as error:  # noqa: BLE001  the waiting caller gets it
                done.set_exception(error)

        self.submit(run)
        return done.result()

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
            same = [one for one in self._todo if isinstance(one, Job) and one.can_join(first)]
            given_up = [job for job in same if job.is_dropped]  # they take no place of those who wait
            batch = given_up + [job for job in same if job not in given_up][: self._rows]
            for job in batch:
                self._todo.remove(job)
            return batch

    def _write(self, jobs: Sequence[Job]) -> None:
        dropped = [job for job in jobs if job.is_dropped]  # asked once: a client may go at any moment
        for job in dropped:
            job.send(Dropped())
        jobs = [job for job in jobs if job not in dropped]
        if not jobs:
            return
        first, sampler = jobs[0], self._samplers[jobs[0].digest]
        waiting, is_too_large = [*jobs], False
        try:
            if first.digest in getattr(sampler.model, "peft_config", ()):
                sampler.model.set_adapter(first.digest)
            sampler.watch = [TokenStream(jobs, waiting, sampler)]  # type: ignore[list-item]  # it is called
            written = sampler.sample(
                [Prompt("the request", (), job.ids, job.budget) for job in jobs],
                thinking=False,  # prompts are spelt already
                temperature=first.temperature, top_p=first.top_p, seed=first.seed,
                budget=max(job.budget for job in jobs),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001  the clients get it, and the others are served
            if len(waiting) < len(jobs):
                self._failures.clear()
            is_too_large = isinstance(error, OutOfMemory) and len(jobs) > 1
            # A refusal, as of a request that needs more memory than there is, is no fault of this process.
            self._failures[first.digest] += not isinstance(error, Dropped | Refused)
            for job in () if is_too_large else waiting:
                job.send(error)
        else:
            self._failures.clear()
            for job, one in zip(jobs, written, strict=True):
                if job in waiting:
                    job.send(within(sampler, one, job))
        finally:
            sampler.watch = ()  # requests are not kept
        for job in waiting if is_too_large else ():  # only here: the error held what the batch had allocated
            self._write([job])


class TokenStream:
    """Sends the tokens of a batch to clients with streamed answers, and every answer as soon as it is whole.

    It takes those who have their answer out of `waiting`, and ends the batch when no client is left.
    """

    def __init__(self, jobs: Sequence[Job], waiting: list[Job], sampler: Sampler) -> None:
        self._jobs, self._waiting, self._sampler = jobs, waiting, sampler
        self._pad = sampler.tokenizer.pad_token_id
        self._ends = end_tokens(sampler.model.generation_config, sampler.tokenizer)
        self._rows: dict[tuple[int, ...], list[Job]] = {}
        self._first, self._last = 0, dict[Job, list[int]]()

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the scores (B, V) unchanged. `input_ids` (B, T) are the tokens so far, with padding anywhere."""
        if all(job.is_dropped for job in self._waiting):
            raise Dropped
        if len(self._jobs) > 1 or self._jobs[0].is_streamed:
            rows = [tuple(row) for row in input_ids.tolist()]
            if all(row[:-1] in self._rows for row in rows):  # each has a token more; some may have been taken out
                self._rows = {row: self._rows[row[:-1]] for row in rows}
            else:  # the prompts of a part of the batch, to which nothing is written yet
                self._rows = {row: [job for job in self._jobs if self._is_prompt(row, job)] for row in rows}
                self._first = len(rows[0])
            found = {job: [*row[self._first :]] for row, jobs in self._rows.items() for job in jobs}
            for job in [*self._waiting]:
                self._tell(job, found.get(job))
        return scores

    def _is_prompt(self, row: Sequence[int], job: Job) -> bool:
        return [one for one in row if one != self._pad] == [one for one in job.ids if one != self._pad]

    def _tell(self, job: Job, tokens: list[int] | None) -> None:
        if tokens is None:  # before its first token, or its row was taken out of the batch after an end token
            last = self._last.get(job)
            if last is None or len(last) + 1 >= max(one.budget for one in self._jobs):
                return
            tokens = [*last, min(self._ends)]
        self._last[job] = tokens
        if len(tokens) >= job.budget or not self._ends.isdisjoint(tokens):
            self._waiting.remove(job)
            job.send(within(self._sampler, decode(self._sampler.tokenizer, tokens, self._ends), job))
        elif job.is_streamed:
            job.send(tuple(tokens))


def within(sampler: Sampler, one: Completion, job: Job) -> Completion:
    """A completion, cut at the budget of its own job: a batch has the largest of its budgets."""
    return one if one.tokens <= job.budget else sampler.cut(one, job.budget)


class Remote:
    """The vLLM server of `clinrl engine`, which batches by itself. A streamed answer comes from it in one piece."""

    def __init__(self, task: str, settings: Vllm) -> None:
        self._task, self._settings = task, settings
        self._engines: dict[str, engine.Engine] = {}
        self._wanted: dict[str, tuple[Served, Path]] = {}
        """The versions that are open, or are being opened, by digest."""
        self._changing = Lock()
        self._pool = ThreadPoolExecutor(settings.at_once)

    def open(self, served: Served, folder: Path) -> Sampler:
        self._wanted[served.digest] = served, folder  # before it is open: `_reopen` may be about to close it
        return self._connected(served, folder)

    def close(self, digest: str) -> None:
        """Leave a version's adapter: the next change of adapters unloads it, if no other process uses it."""
        self._wanted.pop(digest, None)
        if (connected := self._engines.pop(digest, None)) is not None:
            connected.let_go()

    def submit(self, job: Job) -> None:
        self._pool.submit(self._write, job)

    def is_failing(self, _: str) -> bool:
        """Never: a server that is away is asked again, and a restart of this process would not bring it back."""
        return False

    def _write(self, job: Job) -> None:
        if job.is_dropped:
            job.send(Dropped())
            return
        try:
            connected = self._engines[job.digest]
            (one,) = connected.sample(
                [Prompt("the request", (), job.ids, job.budget)], thinking=False, temperature=job.temperature,
                top_p=job.top_p, budget=job.budget, seed=job.seed, call=job.call,
            )  # fmt: skip
            job.send(one)
        except Exception as error:  # noqa: BLE001  the client gets it, and the others are served
            is_given_up = job.is_dropped  # asked first, since a client that is told is gone
            job.send(Dropped() if is_given_up else error)
            if isinstance(error, EngineError) and not is_given_up:  # else it was ended here, and the server is well
                self._reopen(job.digest, connected)

    def _connected(self, served: Served, folder: Path) -> engine.Engine:
        if served.form == "merged":
            raise EngineError("a full model is not served by `clinrl engine`; set sampler to transformers")
        base = paths.base(served.task)
        if identity_of(base) != served.base_digest:
            raise EngineError(f"{served.name} is for another base than {base}, which the vLLM server has")
        opening.check(folder / ADAPTER)
        connected = engine.connect(self._task, self._settings)
        connected.adopt(folder / ADAPTER)
        connected.check_adopted()
        former, self._engines[served.digest] = self._engines.get(served.digest), connected
        if former is not None:
            former.let_go()
        return connected

    def _reopen(self, digest: str, failed: engine.Engine) -> None:
        """Connect again: a server that was restarted has no adapter, and that of `clinrl engine` has another key.

        One failed request does this, and no other waits for it. If the server is away, the next one that fails tries.
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
"""A backend that writes answers."""
