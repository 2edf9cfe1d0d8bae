"""Backends: what `test_server` cannot bring about by asking."""

import asyncio
from typing import Any

from clinrl.serving.backends import Dropped, Job, Local


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


def test_a_client_that_goes_between_two_looks_gets_an_answer_all_the_same() -> None:
    async def ask() -> object:
        local = Local("embedded", 1)
        local._samplers["v1"] = Sampler()  # type: ignore[assignment]
        job = Leaving("v1", (1,), 1, 0.0, 1.0, 1, is_streamed=False)
        local._write([job])
        return await asyncio.wait_for(job.pieces.get(), 5)

    assert isinstance(asyncio.run(ask()), Exception), "and is not forgotten"
