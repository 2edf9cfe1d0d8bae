"""Counts of the server's requests, in a thread of its own, and the candidate's answers in shadow.

A text is in memory until it is counted, and nowhere else. Requests that are too many to be counted are left out. A
shadow answer is written while no client waits, one at a time; a request interrupts it, and it is begun anew.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from clinrl.analysis.exam import column
from clinrl.errors import Refused, echo
from clinrl.models.chat import Completion, read_turn
from clinrl.registry.pyfunc import Served
from clinrl.serving.backends import Backend, Dropped, Job
from clinrl.serving.live import ALIASES, Live, Version
from clinrl.serving.protocol import ChatRequest, TemplateOptions
from clinrl.tasks.base import get_task
from clinrl.types import Message, transcript_of
from clinrl.watching import counts, store
from clinrl.watching.counts import Counts, Reader
from clinrl.watching.standing import settings_of

LEAST = 20
"""The least number of requests whose counts are stored together, so that the moment points at none; a bucket may hold
one. Fewer are lost at the end. Answers that wait for a label are stored at once."""
FLUSH_S = 5.0
WAITING = 512
"""The most answers that wait to be counted; an eighth as many wait for the candidate's answer."""
MOST = 100_000
"""The most answers of a version that wait while storing fails, as on a full disk. The oldest are lost."""
IDLE_S = 0.05
"""Seconds between two checks whether a client waits for an answer."""
AGAIN_S = 300.0
"""Seconds after which an exam is looked for again."""


@dataclass(frozen=True)
class Seen:
    """A request that was answered."""

    ident: str
    """The id of the response."""
    ask: ChatRequest
    version: Version
    mode: str
    turn: Message
    is_as_examined: bool
    """Whether it was decoded as in the exam, and neither cut off by the client nor longer than there."""

    @property
    def answer(self) -> str:
        """The bucket of the answer."""
        return column(get_task(self.version.served.task).parse(transcript_of(self.turn)))


class Watch:
    """Counts of one registered model."""

    def __init__(self, model: str, live: Live, backend: Backend, shadow: float, least: int = LEAST) -> None:
        """`shadow`: the share of the champion's requests, 0 to 1, that the candidate answers too. `least`: the least
        number of requests that are stored together."""
        self._model, self._live, self._backend = model, live, backend
        self._shadow, self._least = shadow, least
        self._counts: dict[str, Counts] = {}
        self._answers: dict[str, dict[str, tuple[str, str]]] = {}
        self._todo: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._job: Job | None = None
        self._shadows: asyncio.Queue[Seen] = asyncio.Queue(WAITING // 8)
        self._following: asyncio.Task[None] | None = None
        self._readers, self._reported = dict[str, Reader](), set[str]()
        self._again = dict[str, float]()
        self._thread = threading.Thread(target=self._work, name="counts", daemon=True)
        self._thread.start()

    def answered(
        self, seen: Seen, is_idle: Callable[[], bool], job: Callable[[ChatRequest, Version], tuple[Job, bool]]
    ) -> None:
        """Queue an answer for counting. `is_idle` says whether no client waits, `job` makes the prompt of a request."""
        self._enqueue(partial(self._count, seen))
        champion, candidate = (self._live.names.get(f"{self._model}@{alias}") for alias in ALIASES)
        is_shown = seen.is_as_examined and int(seen.ident[-8:], 16) < self._shadow * 2**32
        if champion is seen.version and candidate and is_shown:
            self._following = self._following or asyncio.create_task(self._follow(is_idle, job))
            with suppress(asyncio.QueueFull):
                self._shadows.put_nowait(seen)

    def make_way(self) -> None:
        """Interrupt the shadow answer, since a request came. No other one begins before the request is answered."""
        if self._job is not None:
            self._job.drop()

    def end(self) -> None:
        """Count the waiting answers, store the counts of enough requests, and end the thread."""
        self._todo.put(None)
        self._thread.join()

    async def _follow(
        self, is_idle: Callable[[], bool], job: Callable[[ChatRequest, Version], tuple[Job, bool]]
    ) -> None:
        while True:
            seen = await self._shadows.get()
            while not is_idle():
                await asyncio.sleep(IDLE_S)
            candidate = self._live.names.get(f"{self._model}@{ALIASES[1]}")
            if candidate is None:
                continue
            outcome = counts.FAILED
            try:
                options = TemplateOptions(enable_thinking=seen.version.served.modes[seen.mode].thinking)
                own = dict.fromkeys(("max_tokens", "max_completion_tokens", "temperature", "top_p"))  # as in its exam
                ask = seen.ask.model_copy(update={**own, "stream": False, "chat_template_kwargs": options})
                self._job, is_opened = job(ask, candidate)
                self._backend.submit(self._job)
                piece = await self._job.pieces.get()
                if isinstance(piece, Dropped):
                    with suppress(asyncio.QueueFull):
                        self._shadows.put_nowait(seen)
                    continue
                if isinstance(piece, Exception):
                    raise piece
                assert isinstance(piece, Completion)  # no stream was asked for
                theirs = replace(seen, version=candidate, turn=read_turn(piece.text, is_opened))
                outcome = counts.SAME if theirs.answer == seen.answer else counts.OTHER
            except Exception as fault:  # noqa: BLE001  a candidate that fails is counted, and harms nobody
                echo(f"a shadow failed: {type(fault).__name__}")
            finally:
                self.make_way()  # in case the server ends
                self._job = None
            where = counts.shadow(candidate.served.name, candidate.served.digest) + seen.mode, outcome
            self._enqueue(partial(self._add, seen.version.served, [where]))

    def _enqueue(self, what: Callable[[], None]) -> None:
        with suppress(queue.Full):
            self._todo.put_nowait(what)

    def _work(self) -> None:
        """Count until the end. No error with a request, or with storing, ends this thread."""
        flushed, is_ended, failing = time.monotonic(), False, ""
        while not is_ended:
            try:
                with suppress(queue.Empty):
                    what = self._todo.get(timeout=FLUSH_S)
                    is_ended = what is None
                    if what is not None:
                        what()
                if is_ended or time.monotonic() - flushed >= FLUSH_S:
                    flushed = time.monotonic()
                    self._flush()
                    failing = ""
            except Exception as fault:  # noqa: BLE001  its message may quote the request
                if failing != (failing := type(fault).__name__):  # not every few seconds, while the disk is full
                    echo(f"a count failed: {failing}")

    def _add(self, served: Served, where: Iterable[tuple[str, str]], text: str | None = None) -> None:
        """Count, and the text too, by the buckets of the version's exam; without an exam, nothing is counted."""
        if (reader := self._learned(served.name, served.digest)) is not None:
            found = self._counts.setdefault(counts.key(served.digest, reader.exam), Counts())
            found.update([*where, *(reader.read(text) if text is not None else ())])

    def _count(self, seen: Seen) -> None:
        served = seen.version.served
        text = "\n".join(turn.message.content for turn in seen.ask.messages if turn.role == "user")
        if not seen.is_as_examined:  # the exam says nothing of its answer
            self._add(served, (), text)
            return
        answers = self._answers.setdefault(served.digest, {})
        answers[seen.ident] = seen.mode, seen.answer
        if len(answers) > MOST:
            del answers[next(iter(answers))]
        where = counts.ANSWER + seen.mode, seen.answer
        self._add(served, [where], text)

    def _learned(self, name: str, digest: str) -> Reader | None:
        """The reader of a version's exam; None without an exam, which is reported once. Labels count all the same.

        An exam may be newer than this server, and a version may take another, so it is looked for every few minutes.
        """
        if time.monotonic() >= self._again.get(digest, 0.0):
            self._again[digest], known = time.monotonic() + AGAIN_S, self._readers.get(digest)
            try:
                if known is None or known.exam != counts.exam_digest(self._live.params, name):
                    self._readers[digest] = counts.reference(self._live.params, name, digest)[0]
            except Exception as fault:  # noqa: BLE001  whatever is wrong with an exam, the version is served
                reason = fault if isinstance(fault, Refused) else type(fault).__name__
                says = f"{name} is not watched for drift: {reason}"
                if says not in self._reported:
                    echo(says)
                self._reported.add(says)
        return self._readers.get(digest)

    def _flush(self) -> None:
        """Store counts of enough requests. Nothing changes them meanwhile, since the same thread counts."""
        for digest in {**self._counts, **self._answers}:  # of counts with the exam's: see `counts.key`
            found = self._counts.get(digest, Counts())
            requests = sum(n for (feature, _), n in found.items() if feature == counts.TEXT)
            enough = found if requests >= self._least else Counts()
            days = settings_of(self._live.params, self._model).keep_days
            store.add(self._model, digest, enough, self._answers.get(digest, {}), days)
            self._answers.pop(digest, None)  # only now: what could not be written is written next time
            if enough:
                self._counts.pop(digest, None)
