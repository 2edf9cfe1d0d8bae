"""Models and adapters that somebody else may have made: opened, or refused in one sentence.

What libraries raise on a damaged or a hostile file is of any kind; here it becomes a refusal that names the folder.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clinrl.errors import ArtefactError, Refused
from clinrl.models import memory

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
KIND = "LORA"


@contextmanager
def refused(folder: Path | str, what: str) -> Iterator[None]:
    """Raise ArtefactError, naming the folder, for whatever a library raises in this block. A full disk stays one."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:  # each library has kinds of its own, and a hostile file meets any of them
        if memory.is_exhausted(error):  # which says nothing of the file
            raise
        if isinstance(error, OSError) and error.errno is not None:
            raise
        message = " ".join(str(error).split())[:160]
        reason = f"{type(error).__name__}: {message}" if message.isprintable() else type(error).__name__
        raise ArtefactError(
            f"{folder} holds no {what} that can be opened ({reason}); restore or rebuild it, or take another"
        ) from error


def adapted(model: Any, folder: Path, *, is_trainable: bool = False, name: str = "default") -> Any:
    """A model with the LoRA adapter of a folder on it, under a name and beside those that it has already.

    Raises ArtefactError if the folder holds no LoRA adapter, if it does not fit the model, or if a weight is no finite
    number: such an adapter answers nothing, and takes its time for that.
    """
    check(folder)
    with refused(folder, "adapter"):
        from peft import PeftModel

        if not isinstance(model, PeftModel):
            return PeftModel.from_pretrained(model, str(folder), adapter_name=name, is_trainable=is_trainable)
        try:
            model.load_adapter(str(folder), adapter_name=name)
        except Exception:
            if name in model.peft_config:  # a part of it may be there
                model.delete_adapter(name)
            raise
        return model


def check(folder: Path) -> None:
    """Raise ArtefactError if a folder holds no LoRA adapter of finite weights. Needs no model, so it comes first."""
    with refused(folder, "adapter"):
        _check(folder)


def _check(folder: Path) -> None:
    from safetensors import safe_open

    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(config, dict) or config.get("peft_type") != KIND or config.get("auto_mapping"):
        raise ValueError(f"{CONFIG} is not that of a LoRA adapter")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank <= 4096:
        raise ValueError(f"the rank r in {CONFIG} is no whole number from 1 to 4096")
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{WEIGHTS} is missing")
    import torch

    with safe_open(folder / WEIGHTS, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  it is no mapping
            if not bool(torch.isfinite(tensors.get_tensor(name)).all()):
                raise ValueError(f"tensor {name[:80]} holds what is no finite number")
