"""Out of memory, as one sentence: at which place, how much more was wanted, and what to set in machine.yaml."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from clinrl.config.base import Scale
from clinrl.config.machine import FILE
from clinrl.errors import OutOfMemory

TEXTS = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|(?:CUBLAS|CUDNN)_STATUS_ALLOC_FAILED|"
    r"Cuda failure (?:\d+ )?'out of memory'|DefaultCPUAllocator: (?:can't|not enough)|Error .*out of memory at line"
)
"""Messages of CUDA, cuBLAS, cuDNN, NCCL, torch's CPU allocator and bitsandbytes, which raise a RuntimeError."""
WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?(?:[KMGT]?i?B|bytes)\b)")
FREE = "close what else uses this machine's memory, or use a machine with more"
LARGER = f"set gpu in {FILE} to a GPU with more free memory (for a server: CUDA_VISIBLE_DEVICES)"


def is_exhausted(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the host."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and TEXTS.search(str(error)) is not None


def cuda() -> str:
    """The version of CUDA that torch is built for, or `none`."""
    import torch

    return str(torch.version.cuda or "none")


@contextmanager
def place(name: str, do: str) -> Iterator[None]:
    """Raise OutOfMemory, with place and remedy, if memory runs out in this block; if nested, from the inner block."""
    try:
        yield
    except Exception as error:
        if not is_exhausted(error):
            raise
        found = WANTED.search(str(error))
        wanted = f" ({found[1]} more were wanted)" if found else ""
        raise OutOfMemory(f"out of memory in {name}{wanted}; {do}") from error


def larger(scale: Scale) -> str:
    """The remedy where a smaller batch does not help."""
    return LARGER if scale == "full" else FREE


def fewer_tokens(scale: Scale, rows: int, width: int) -> str:
    """The remedy for a batch of completions: `rows` of at most `width` tokens each, prompts included."""
    if scale == "full" and rows > 1:
        return f"set exam_tokens in {FILE} to {rows // 2 * width}"
    return larger(scale)


def fewer_rows(scale: Scale, rows: int, loss_type: str = "") -> str:
    """The remedy for a loss of `rows` sequences at once."""
    if scale == "embedded" or rows == 1:
        return larger(scale)
    if loss_type == "bnpo":  # it weighs tokens by micro-batch: another size trains another adapter
        return f"{LARGER}, or lower micro_batch in the recipe, which starts anew since its loss bnpo depends on it"
    return f"set micro_batch in {FILE} to {rows // 2}"
