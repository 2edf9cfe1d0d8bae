"""The folder of a full model in full precision: its tensors, and what it holds beside its weights."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from clinrl.errors import ArtefactError, Refused
from clinrl.merging.safetensors_io import Stored, read_index
from clinrl.models import hub


def tensors(source: Path) -> dict[str, Stored]:
    """The tensors of a full model by name. Raises Refused if they are quantised, ArtefactError if it is no model."""
    config = source / "config.json"
    try:
        declared = json.loads(config.read_bytes())
        parts = [declared, *(part for part in declared.values() if isinstance(part, dict))]
    except (FileNotFoundError, ValueError, AttributeError):
        raise ArtefactError(f"{config} is missing or malformed, so {source} is not a model; fetch it again") from None
    if any("quantization_config" in part for part in parts):
        raise Refused(
            f"{source} holds quantised weights (quantization_config in config.json), and an adapter is never folded "
            "into those; use the checkpoint that it was made of"
        )
    return read_index(source)


def complete(source: Path, adapter: Path, out: Path) -> None:
    """Copy what a full model needs beside its weights: the base's configs, the adapter's tokenizer or the base's."""
    copy(source, out, hub.CONFIGS)
    copy(adapter if (adapter / "tokenizer_config.json").exists() else source, out, hub.TOKENIZER)


def copy(source: Path, out: Path, names: Sequence[str]) -> None:
    """Copy those of the named files that there are."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
