"""A trained adapter's folder."""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from clinrl import paths
from clinrl.artifacts import write_json
from clinrl.models import bases, hub, opening
from clinrl.training.trl import adapter_state


def write_adapter(model: Any, tokenizer: Any, spec: dict[str, Any], folder: Path) -> None:
    """The adapter's weights and configuration and the tokenizer, the same bytes for the same weights.

    PEFT writes a set, whose order the hash seed decides, and the base's path on this machine; the tokenizer writes
    whether HF_HUB_OFFLINE was set. All three are replaced. A checkpoint of the hub is named by repository and commit.
    """
    write_weights(model, spec, folder)
    tokenizer.init_kwargs["local_files_only"] = False
    tokenizer.save_pretrained(folder)


def write_weights(model: Any, spec: Mapping[str, Any], folder: Path) -> None:
    """The adapter's weights and configuration, as `write_adapter` writes them."""
    save_file(adapter_state(model), folder / opening.WEIGHTS, metadata={"format": "pt"})
    config = model.peft_config["default"].to_dict()
    config["inference_mode"] = True
    named = bases.reference(paths.base(spec["task"]))  # others have no base folder, and ask the hub
    config["base_model_name_or_path"] = named.get("repo", str(paths.base(spec["task"])))
    config["revision"] = hub.COMMIT.fullmatch(named.get("commit", "")) and named["commit"]
    write_json(folder / opening.CONFIG, {key: _plain(value) for key, value in config.items()})


def _plain(value: Any) -> Any:
    """What JSON can hold, in one order: sets sorted, enums as their values."""
    if isinstance(value, set):
        return sorted(value)
    return value.value if isinstance(value, Enum) else value
