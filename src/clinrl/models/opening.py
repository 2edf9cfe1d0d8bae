"""Open models and adapters that somebody else may have made, or refuse them in one sentence.

Libraries raise errors of any kind for a damaged or hostile file. Here they become a refusal that names the folder.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clinrl.artifacts import write_json
from clinrl.errors import REFUSALS, ArtefactError, Refused, format_value, number_of
from clinrl.models import hub, memory

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
"""The prefix that PEFT puts before the name of a module."""
READ = {
    "alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern",
    "use_rslora",
}  # fmt: skip
"""Fields of an adapter's config that decide what it changes, and that a merge reads."""
WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
}  # fmt: skip
"""Fields that say how the adapter was made or where; its tensors say the rest. Any other field must be unset."""
MODULES = re.compile(r"\^?(?:[^\\()\[\]{}*+?|^$]|\\\W)*(?:\.\*(?:[^\\()\[\]{}*+?|^$]|\\\W)*)?")
"""What a pattern may be: a module's name, escaped or not, `^` and one `.*`. PEFT takes any regular expression, and some
of those match without end."""
KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base's weights alone; PiSSA, OLoRA and others subtract from them."""


@contextmanager
def refused(folder: Path | str, what: str) -> Iterator[None]:
    """Turn a library's error in this block into an ArtefactError that names the folder; a full disk or memory stays."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:  # a hostile file can make each library raise any of its own errors
        if memory.is_exhausted(error) or number_of(error) in REFUSALS:  # not the file's fault
            raise
        message = " ".join(str(error).split())[:160]
        reason = f"{type(error).__name__}: {message}" if message.isprintable() else type(error).__name__
        raise ArtefactError(
            f"{folder} holds no {what} that can be opened ({reason}); restore or rebuild it, or take another"
        ) from error


def adapted(model: Any, folder: Path, *, is_trainable: bool = False, name: str = "default") -> Any:
    """Add the LoRA adapter in a folder to a model, under a name, beside the adapters that the model already has.

    Raises ArtefactError if the folder holds no LoRA adapter, if it does not fit the model, or if a weight is not
    finite: with such an adapter a model gives no answer, slowly. Raises Refused as `check_effect` does.
    """
    check(folder)
    with refused(folder, "adapter"):
        from peft import PeftModel

        if not isinstance(model, PeftModel):
            return PeftModel.from_pretrained(model, str(folder), adapter_name=name, is_trainable=is_trainable)
        try:
            model.load_adapter(str(folder), adapter_name=name)
        except Exception:
            if name in model.peft_config:  # a part of it may have been added
                model.delete_adapter(name)
            raise
        return model


def check(folder: Path) -> None:
    """Raise ArtefactError if a folder holds no LoRA adapter of finite weights, and Refused as `check_effect` does.

    No model is needed, so this check comes first.
    """
    import torch
    from safetensors import safe_open

    with refused(folder, "adapter"):
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict) or config.get("peft_type") != "LORA" or config.get("auto_mapping"):
            raise ValueError(f"{CONFIG} is not that of a LoRA adapter")
        rank = config.get("r")
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank <= 4096:
            raise ValueError(f"the rank r in {CONFIG} is no whole number from 1 to 4096")
        ranks, alphas = (config.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
        named = [config.get(key) or [] for key in ("target_modules", "exclude_modules", "layers_pattern")]
        patterns = [*ranks, *alphas, *(text for one in named for text in ([one] if isinstance(one, str) else one))]
        if not (isinstance(ranks, dict) and isinstance(alphas, dict) and all(map(MODULES.fullmatch, patterns))):
            raise ValueError(f"a pattern in {CONFIG} is more than the name of modules with one .*; list their names")
        for alpha in (config.get("lora_alpha", 8), *alphas.values()):
            if not isinstance(alpha, int | float) or not abs(alpha) < 1e9:
                raise ValueError(f"an alpha in {CONFIG} is no number below a billion")
        if not (folder / WEIGHTS).is_file():
            raise ValueError(f"{WEIGHTS} is missing")
        with safe_open(folder / WEIGHTS, framework="pt") as tensors:
            check_effect(folder, config, tensors.keys())
            for name in tensors.keys():  # noqa: SIM118  it is no mapping
                if not bool(torch.isfinite(tensors.get_tensor(name)).all()):
                    raise ValueError(f"tensor {name[:80]} holds a value that is not finite")


def check_effect(folder: Path, config: Mapping[str, Any], tensors: Iterable[str]) -> None:
    """Raise Refused for an adapter that does more than add the products of its factors to linear layers.

    PEFT would write such a change into the base, which other adapters share; and no merge would be exact.
    """
    if (start := config.get("init_lora_weights", True)) not in KEEPS_BASE:
        raise Refused(
            f"{folder} was started by {start!r}, which alters the base's weights, and other adapters share them; train "
            "it with another init_lora_weights"
        )
    if (bias := config.get("bias", "none")) != "none":
        raise Refused(f"{folder} has trained biases (bias={bias!r}), which is not supported; train it with bias='none'")
    for key in sorted(config.keys() - READ - WITHOUT_EFFECT):
        if config[key]:
            raise Refused(
                f"{folder} uses {format_value(key)}, which is not supported: it changes more than LoRA's factors; "
                "train without it"
            )
    for name in tensors:
        if factor_of(name) is None:
            raise Refused(
                f"{folder} holds {format_value(name)}, which is not a LoRA factor of a linear layer; it is not "
                "supported"
            )


def factor_of(tensor: str) -> tuple[str, str] | None:
    """The module and the factor, A or B, that an adapter's tensor belongs to; None for any other tensor."""
    found = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight", tensor)
    return None if found is None else (found[1], found[2])


def check_checkpoint(folder: Path) -> None:
    """Raise ArtefactError if a folder could make a library read other files than the weights and settings in it, or if
    it has no tokenizer.

    transformers follows an adapter's configuration to another base, and an index to a file of any name.
    """
    with refused(folder, "checkpoint"):
        if not (folder / "config.json").is_file():
            raise ValueError("config.json is missing")
        if (folder / CONFIG).exists():
            raise ValueError(f"it holds {CONFIG}, which names another base")
        if not hub.has_tokenizer(folder):
            raise ValueError(f"it has no tokenizer, which is one of {', '.join(hub.VOCABULARY)}")
        for index in folder.rglob("*.safetensors.index.json"):
            parts = json.loads(index.read_bytes()).get("weight_map", {}).values()
            if odd := [part for part in parts if not re.fullmatch(r"[\w.-]+\.safetensors", str(part))]:
                raise ValueError(f"{index.name} names {str(odd[0])[:80]!r}, which is no safetensors file beside it")


def stored_names(checkpoint: Path, stored: Iterable[str]) -> dict[str, str]:
    """A map from the names that a model has for its tensors to those in its checkpoint.

    A checkpoint with images has other names for the tensors of its text part; transformers knows them. Tensors are left
    out if they are not in `stored`, the checkpoint's own names.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    transforms = get_model_conversion_mapping(model)
    renamings = [step for step in transforms if isinstance(step, WeightRenaming)]
    converters = [step for step in transforms if isinstance(step, WeightConverter)]
    state = model.state_dict()
    names = {}
    for name in stored:
        target, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if converter is None and target in state:
            names[target] = name
    return names


def rename_modules(adapter: Path, names: Mapping[str, str], out: Path) -> None:
    """Copy an adapter to the existing folder `out`, with its modules renamed after the tensors of a checkpoint.

    `names` is the map that `stored_names` returns. Raises ArtefactError for a module that the checkpoint does not have.
    """
    from safetensors.torch import load_file, save_file

    def stored(module: str) -> str:
        return names[f"{module}.weight"].removesuffix(".weight")

    with refused(adapter, "adapter for this base"):
        tensors = {}
        for name, tensor in load_file(adapter / WEIGHTS).items():
            module, factor = factor_of(name) or (name, "")
            tensors[f"{PREFIX}{stored(module)}.lora_{factor}.weight"] = tensor
        save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
        config = json.loads((adapter / CONFIG).read_bytes())
        targets = config.get("target_modules")
        if isinstance(targets, list):  # ends of names, or whole names
            config["target_modules"] = [stored(one) if f"{one}.weight" in names else one for one in targets]
        write_json(out / CONFIG, config)
