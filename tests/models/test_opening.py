"""Adapters and checkpoints that somebody else may have made: opened, or refused in a sentence that names the folder."""

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jinja2 import TemplateError
from safetensors.torch import load_file, save_file

import exhibits
from clinrl import paths
from clinrl.artifacts import digest, digests, read_manifest, seal
from clinrl.errors import ArtefactError, Refused
from clinrl.models import bases, opening


@pytest.fixture(scope="module")
def adapter() -> Path:
    """A real adapter of the doll's base."""
    return exhibits.built() / paths.adapter("v1")


@pytest.fixture
def copy(adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter, tmp_path / "v1"))


def test_a_sound_adapter_is_opened(adapter: Path) -> None:
    model, _ = bases.open_base(exhibits.built() / paths.base("esi"), for_training=False)
    opened = opening.adapted(model, adapter)
    saved = load_file(adapter / opening.WEIGHTS)
    assert sum("lora_" in name for name, _ in opened.named_parameters()) == len(saved)


def _config(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / opening.CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def _weights(of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / opening.WEIGHTS
        save_file({name: of(tensor) for name, tensor in load_file(path).items()}, path)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_config(peft_type="PWNED"), "not that of a LoRA adapter"),
        (_config(auto_mapping={"base_model_class": "system", "parent_library": "os"}), "not that of a LoRA adapter"),
        (_config(r="four"), "rank"),
        (_config(r=10**9), "rank"),
        (_config(r=True), "rank"),
        (_config(rank_pattern={"(": 2}), r"a pattern in .* is more than the name of modules"),
        (_config(rank_pattern=[1]), r"a pattern in .* is more than the name of modules"),
        (_config(alpha_pattern={"(.*.*.*.*.*.*.*.*)*x": 2}), r"a pattern in .* is more than the name of modules"),
        (_config(alpha_pattern={".*.*x": 2}), r"a pattern in .* is more than the name of modules"),
        (_config(target_modules="(([a-z0-9_.])*)*!"), r"a pattern in .* is more than the name of modules"),
        (_config(exclude_modules="(([a-z0-9_.])*)*!"), r"a pattern in .* is more than the name of modules"),
        (_config(layers_pattern=["(([a-z0-9_.])*)*!"]), r"a pattern in .* is more than the name of modules"),
        (_config(alpha_pattern={"q_proj": "x"}), r"an alpha in .* is no number"),
        (_config(lora_alpha="x"), r"an alpha in .* is no number"),
        (_config(lora_alpha=math.nan), r"an alpha in .* is no number"),
        (lambda folder: (folder / opening.CONFIG).write_text("[]"), "not that of a LoRA adapter"),
        (lambda folder: (folder / opening.CONFIG).write_text("{"), "JSONDecodeError"),
        (lambda folder: (folder / opening.CONFIG).unlink(), "FileNotFoundError"),
        (lambda folder: (folder / opening.WEIGHTS).unlink(), "missing"),
        (lambda folder: (folder / opening.WEIGHTS).write_bytes(struct.pack("<Q", 2**63)), "SafetensorError"),
        (_weights(lambda tensor: tensor * torch.nan), "a value that is not finite"),
        (_weights(lambda tensor: tensor + torch.inf), "a value that is not finite"),
    ],
)
def test_what_is_no_adapter_is_refused(copy: Path, change: Callable[[Path], None], why: str) -> None:
    change(copy)
    with pytest.raises(ArtefactError, match=why) as refusal:
        opening.check(copy)
    assert str(refusal.value).startswith(f"{copy} holds no adapter that can be opened (")
    assert str(refusal.value).isprintable()


def _also(name: str, *shape: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        save_file(load_file(folder / opening.WEIGHTS) | {name: torch.zeros(shape)}, folder / opening.WEIGHTS)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            _also("base_model.model.lm_head.weight", 1200, 32),
            "holds 'base_model.model.lm_head.weight', which is not a LoRA",
        ),
        (
            _also("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight", 32, 32),
            r"layers.0.self_attn.q_proj.base_la\.\.\., which",
        ),
        (_config(init_lora_weights="pissa"), "started by 'pissa', which alters the base's weights"),
        (_config(layer_replication=[[0, 2], [0, 2]]), "uses 'layer_replication', which is not supported"),
    ],
)
def test_an_adapter_that_would_change_the_base_is_refused_before_it_does(
    adapter: Path, copy: Path, change: Callable[[Path], None], why: str
) -> None:
    """All adapters of a server share the base: one of them could change what the champion answers."""
    model, _ = bases.open_base(exhibits.built() / paths.base("esi"), for_training=False)
    opened, ids = opening.adapted(model, adapter, name="champion").eval(), torch.arange(5, 25).unsqueeze(0)
    with torch.inference_mode():
        before = opened(ids).logits
        change(copy)
        with pytest.raises(Refused, match=why):
            opening.adapted(opened, copy, name="candidate")
        assert torch.equal(opened(ids).logits, before)


def _adapter_beside(folder: Path) -> None:
    (folder / opening.CONFIG).write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}))


def _index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": "vocab.txt"}}))


def _deeper(folder: Path) -> None:
    (folder / "1_Transformer").mkdir()
    _index(folder / "1_Transformer")


def _no_tokens(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


LEADS = [
    (_adapter_beside, "adapter_config.json, which names another base"),
    (_index, "names 'vocab.txt', which is no safetensors file"),
    (_deeper, "names 'vocab.txt', which is no safetensors file"),
    (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    (_no_tokens, "named holds no checkpoint .*it has no tokenizer, which is one of tokenizer.json, tokenizer.model"),
]
FETCHED = (_index, _no_tokens)
"""What the hub is asked for anew."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder as a hub has one."""
    folder = Path(shutil.copytree(exhibits.built() / paths.base("esi"), tmp_path / "named"))
    (folder / "manifest.json").unlink()
    return folder


@pytest.mark.parametrize(("change", "why"), LEADS)
def test_a_checkpoint_that_leads_elsewhere_is_refused(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path], None], why: str
) -> None:
    change(checkpoint)
    named = {"repo": str(checkpoint), "commit": "local-" + digest(digests(checkpoint))}
    with pytest.raises(ArtefactError, match=why):
        bases.locate(named, tmp_path)


@pytest.mark.parametrize(("change", "why"), [one for one in LEADS if one[0] not in FETCHED])
def test_so_is_one_that_a_cache_has_of_the_hub(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], why: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    change(checkpoint)
    commit = "a" * 40
    shutil.copytree(checkpoint, tmp_path / "hub/models--owner--name/snapshots" / commit)
    with pytest.raises(ArtefactError, match=why):
        bases.locate({"repo": "owner/name", "commit": commit}, tmp_path)


def test_so_is_a_base_that_was_built_here_or_a_merged_model(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exhibits.built() / paths.base("esi"), tmp_path / "base"))
    _adapter_beside(folder)
    seal(folder, **read_manifest(folder).model_dump(exclude={"files"}))
    with pytest.raises(ArtefactError, match="which names another base"):
        bases.open_base(folder, for_training=False)


def test_what_sound_checkpoints_bring_is_no_reason_to_refuse(checkpoint: Path) -> None:
    for name, content in {
        "pytorch_model.bin.index.json": {"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}},
        "openvino.index.json": {},
        "model.safetensors.index.json": {"weight_map": {"a": "model-00001-of-00002.safetensors"}},
    }.items():
        (checkpoint / name).write_text(json.dumps(content))
    opening.check_checkpoint(checkpoint)


def test_an_adapter_of_another_shape_is_refused(copy: Path) -> None:
    _weights(lambda _tensor: torch.zeros(3, 3))(copy)
    model, _ = bases.open_base(exhibits.built() / paths.base("esi"), for_training=False)
    with pytest.raises(ArtefactError, match="RuntimeError: Error"):
        opening.adapted(model, copy)


@pytest.mark.parametrize(
    "template", ["{% for", "{{ ''.__class__.__mro__ }}", "{% for a in range(99999999) %}{{ a }}{% endfor %}"]
)
def test_a_base_whose_template_does_harm_is_refused(tmp_path: Path, template: str) -> None:
    folder = Path(shutil.copytree(exhibits.built() / paths.base("esi"), tmp_path / "esi"))
    (folder / "chat_template.jinja").write_text(template)
    seal(folder, **read_manifest(folder).model_dump(exclude={"files"}))
    with pytest.raises(ArtefactError, match="holds no model that can be opened"):
        bases.open_base(folder, for_training=False)


def test_a_full_disk_and_our_own_refusals_stay_what_they_are() -> None:
    with pytest.raises(OSError, match="disk"), opening.refused("x", "model"):
        raise OSError(28, "disk")
    with pytest.raises(ArtefactError, match="own words"), opening.refused("x", "model"):
        raise ArtefactError("own words")
    with pytest.raises(ArtefactError, match="TemplateError: no"), opening.refused("x", "model"):
        raise TemplateError("no")
