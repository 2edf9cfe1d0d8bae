"""The folder of a full model in full precision: where a base's lies, and what such a folder holds beside its weights.

An adapter that was trained above 4-bit weights belongs to the checkpoint that those were made of; that one is fetched.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from clinrl.errors import ArtefactError, Refused
from clinrl.merging.safetensors_io import Stored, read_index
from clinrl.models.bases import REFERENCE
from clinrl.models.bases import locate as pinned

CONFIGS = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "LICENSE", "LICENSE.txt", "NOTICE",
)  # fmt: skip
"""Files beside the weights that a full model takes from its base."""
TOKENIZER = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
"""Files of a tokenizer, which come from the adapter if it has one."""


def locate(base: Path) -> Path:
    """The folder with a base's weights in full precision: its own, or the hub checkpoint that it names, fetched.

    Raises Refused when the hub does not deliver it, and ArtefactError as `bases.locate` does.
    """
    if not (base / REFERENCE).exists():
        return base
    reference = json.loads((base / REFERENCE).read_text(encoding="utf-8"))
    repo, commit = reference["repo"], reference["commit"]
    if "revision" not in pinned(reference, base):
        return Path(repo)
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["model*.safetensors", "model*.safetensors.index.json", *CONFIGS, *TOKENIZER]
    try:
        return Path(snapshot_download(repo, revision=commit, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise Refused(
            f"the hub did not deliver {repo}@{commit} ({type(error).__name__}); check the network and HF_TOKEN, and "
            "start the same command again: what was fetched is kept"
        ) from error


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
    copy(source, out, CONFIGS)
    copy(adapter if (adapter / "tokenizer_config.json").exists() else source, out, TOKENIZER)


def copy(source: Path, out: Path, names: Sequence[str]) -> None:
    """Copy those of the named files that there are."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
