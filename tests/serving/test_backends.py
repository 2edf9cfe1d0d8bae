"""Backends: what `test_server` cannot bring about by asking."""

import asyncio
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
from answering import Running, prompts

from clinrl.errors import OutOfMemory
from clinrl.models.chat import Completion
from clinrl.serving.backends import Dropped, Job, Local
from clinrl.types import Message


class Leaving(Job):
    """A client that goes after the first look at whether it is there."""

    looks = 0

    @property
    def is_dropped(self) -> bool:  # type: ignore[override]
        self.looks += 1
        return self.looks > 1

    @is_dropped.setter
    def is_dropped(self, _: bool) -> None: ...


class Sampler:
    """A sampler that asks, before it writes, whether anybody is there, as the real one does at each token."""

    model, watch = None, ()

    def sample(self, *_: Any, **__: Any) -> Any:
        raise Dropped


def test_the_end_waits_for_what_is_computed_and_not_for_ever() -> None:
    local, may_end, ended = Local("embedded", 1), Event(), Event()

    def compute() -> None:
        may_end.wait()
        ended.set()

    local.submit(compute)
    local.rest(0.01)
    assert not ended.is_set()
    may_end.set()
    local.rest(60)
    assert ended.is_set()


def test_a_client_that_goes_between_two_looks_gets_an_answer_all_the_same() -> None:
    async def ask() -> object:
        local = Local("embedded", 1)
        local._samplers["v1"] = Sampler()  # type: ignore[assignment]
        job = Leaving("v1", (1,), 1, 0.0, 1.0, 1, is_streamed=False)
        local._write([job])
        return await asyncio.wait_for(job.pieces.get(), 5)

    assert isinstance(asyncio.run(ask()), Exception), "and is not forgotten"


TOLD = list[tuple[int, object]]


class Telling(Job):
    """A client that writes down what it is sent, with its number."""

    number: int
    told: TOLD

    def send(self, what: Any) -> None:
        self.told.append((self.number, what))


def jobs(served: Running, budgets: list[int]) -> tuple[list[Telling], TOLD]:
    """The first half are asked without thinking, the others think; each is another case."""
    version, told, found = served.live.names["v2"], TOLD(), []
    for number, (turns, budget) in enumerate(zip(prompts(len(budgets)), budgets, strict=True)):
        ids = version.sampler.opening([Message(**turn) for turn in turns], (), number >= len(budgets) / 2)
        one = Telling(version.served.digest, tuple(ids), budget, 0.0, 1.0, 1, is_streamed=True, loop=None)  # type: ignore[arg-type]
        one.number, one.told = number, told
        found.append(one)
    return found, told


def answers(told: TOLD) -> dict[int, tuple[int, object]]:
    """The last that each was sent, and when."""
    return {number: (at, what) for at, (number, what) in enumerate(told)}


@pytest.mark.long
@pytest.mark.parametrize("shared", [True, False])
def test_an_answer_is_sent_when_it_is_whole_while_others_of_its_batch_go_on(served: Running, shared: bool) -> None:
    local, sampler = Local("embedded", 8), served.live.names["v2"].sampler
    local._samplers[served.live.names["v2"].served.digest] = sampler
    before, sampler._is_shared = sampler._is_shared, shared
    try:
        alone = {}
        for budgets in ([64] * 6, [64, 64, 1, 64, 2, 64]):
            for job in jobs(served, budgets)[0]:
                local._write([job])
                alone[job.number] = answers(job.told)[job.number][1]
            together, told = jobs(served, budgets)
            local._write(together)
            sent = answers(told)
            assert {number: what for number, (_, what) in sent.items()} == alone
            assert sum(isinstance(what, Completion) for _, what in told) == len(budgets), "each once"
            for number, (at, what) in sent.items():  # nobody else is sent more tokens than it has itself, but one
                before_it = [len(piece) for _, piece in told[:at] if isinstance(piece, tuple)]
                assert max(before_it) <= what.tokens + 1, number
        assert len({what.tokens for what in alone.values()}) > 2
    finally:
        sampler._is_shared = before


@pytest.mark.long
@pytest.mark.parametrize("shared", [True, False])
def test_an_answer_that_goes_on_as_another_prompt_of_its_batch_does_is_not_taken_for_it(
    served: Running, shared: bool
) -> None:
    """As a model in mode think that writes an empty think block, which the prompt of the other mode has."""
    local, sampler = Local("embedded", 8), served.live.names["v2"].sampler
    local._samplers[served.live.names["v2"].served.digest] = sampler
    before, sampler._is_shared = sampler._is_shared, shared
    try:
        asked, told = jobs(served, [64, 64])
        for job in asked:
            local._write([job])
        whole, written = answers(told)[0][1], [what for number, what in told if number == 0 and isinstance(what, tuple)]
        other = replace(asked[1], ids=asked[0].ids + written[2])
        other.number, other.told = 1, told
        local._write([other])
        rest = answers(told)[1][1]
        told.clear()
        local._write([asked[0], other])
        assert {number: what for number, (_, what) in answers(told).items()} == {0: whole, 1: rest}
    finally:
        sampler._is_shared = before


@pytest.mark.long
def test_of_a_batch_without_room_each_is_answered_alone_and_who_has_no_room_even_so_is_told(served: Running) -> None:
    local, sampler = Local("embedded", 8), served.live.names["v2"].sampler
    local._samplers[served.live.names["v2"].served.digest] = sampler
    asked, told = jobs(served, [4] * 4)
    write, calls = sampler.sample, []

    def small(given: Any, **how: Any) -> Any:
        calls.append(len(given))
        if len(given) > 1 or tuple(given[0].ids) == asked[2].ids:
            raise OutOfMemory("out of memory in an answer")
        return write(given, **how)

    sampler.sample = small  # type: ignore[method-assign]
    try:
        local._write(asked)
    finally:
        del sampler.sample
    kinds = {number: type(what).__name__ for number, (_, what) in answers(told).items()}
    assert kinds == {0: "Completion", 1: "Completion", 2: "OutOfMemory", 3: "Completion"}
    assert calls == [4, 1, 1, 1, 1]
