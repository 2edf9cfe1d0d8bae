"""Out of memory: recognised in what libraries raise, and told once, by the innermost place."""

from typing import Any

import pytest
import torch

from clinrl.artifacts import seal, write_text
from clinrl.errors import ArtefactError, OutOfMemory
from clinrl.models import memory, opening
from clinrl.models.judges import Judges
from clinrl.tasks.parts import Request

TEXT = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB"


def test_the_host_s_own_end_of_memory_is_told_with_its_size() -> None:
    with pytest.raises(OutOfMemory) as ended, memory.place("the loss", "buy more"):
        torch.empty(1 << 50, dtype=torch.uint8)
    assert str(ended.value) == "out of memory in the loss (1125899906842624 bytes more were wanted); buy more"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(TEXT),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
        torch.distributed.DistBackendError(
            "NCCL error in: /src/ProcessGroupNCCL.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), "
            "NCCL version 2.29.3\nLast error:\nCuda failure 2 'out of memory'"
        ),
        RuntimeError("Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp"),
    ],
)
def test_what_libraries_raise_is_recognised(error: Exception) -> None:
    with pytest.raises(OutOfMemory, match="out of memory in an exam"), memory.place("an exam", "do"):
        raise error


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"), memory.place("the loss", "do"):
        torch.zeros(2) + torch.zeros(3)


def test_the_innermost_place_tells_it() -> None:
    outer, inner = memory.place("the loss", "outer"), memory.place("the judge", "inner")
    with pytest.raises(OutOfMemory, match="in the judge"), outer, inner:
        raise torch.OutOfMemoryError(TEXT)


def test_a_model_that_does_not_fit_is_not_called_damaged() -> None:
    place = memory.place("loading", memory.larger("full"))
    words = r"loading \(2.50 GiB more were wanted\); set gpu in machine.yaml"
    with pytest.raises(OutOfMemory, match=words), place, opening.refused("folder", "model"):
        raise torch.OutOfMemoryError(TEXT)
    with pytest.raises(ArtefactError, match="holds no model"), opening.refused("folder", "model"):
        raise RuntimeError("header too large")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (memory.fewer_tokens("full", 8, 100), "set exam_tokens in machine.yaml to 400"),
        (memory.fewer_tokens("full", 1, 100), memory.LARGER),
        (memory.fewer_tokens("embedded", 8, 100), memory.FREE),
        (memory.fewer_rows("full", 8), "set micro_batch in machine.yaml to 4"),
        (memory.fewer_rows("full", 1), memory.LARGER),
        (memory.fewer_rows("embedded", 8), memory.FREE),
    ],
)
def test_the_advice_is_one_that_helps(found: str, expected: str) -> None:
    assert found == expected


def test_a_loss_that_depends_on_the_micro_batch_keeps_it() -> None:
    assert "micro_batch in the recipe, which starts anew" in memory.fewer_rows("full", 8, "bnpo")


def test_a_judge_is_a_place(tmp_path: Any) -> None:
    def full(_: Any) -> Any:
        raise torch.OutOfMemoryError(TEXT)

    write_text(tmp_path / "config.json", "{}")
    seal(tmp_path, kind="base", name="esi", task="esi", task_version=2, spec={}, inputs={})
    judges = Judges(tmp_path)
    judges._models["judge"] = full
    with pytest.raises(OutOfMemory, match=r"out of memory in the judge \(2.50 GiB"):
        judges.answer([Request(model="judge", text="Is it right?")])
