"""Adapters and checkpoints that somebody else may have made: opened, or refused in a sentence that names the folder."""

import json
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
from clinrl.artifacts import read_manifest, seal
from clinrl.errors import ArtefactError
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
        (lambda folder: (folder / opening.CONFIG).write_text("[]"), "not that of a LoRA adapter"),
        (lambda folder: (folder / opening.CONFIG).write_text("{"), "JSONDecodeError"),
        (lambda folder: (folder / opening.WEIGHTS).unlink(), "missing"),
        (lambda folder: (folder / opening.WEIGHTS).write_bytes(struct.pack("<Q", 2**63)), "SafetensorError"),
        (_weights(lambda tensor: tensor * torch.nan), "no finite number"),
        (_weights(lambda tensor: tensor + torch.inf), "no finite number"),
    ],
)
def test_what_is_no_adapter_is_refused(copy: Path, change: Callable[[Path], None], why: str) -> None:
    change(copy)
    with pytest.raises(ArtefactError, match=why) as refusal:
        opening.check(copy)
    assert str(refusal.value).startswith(f"{copy} holds no adapter that can be opened (")
    assert str(refusal.value).isprintable()


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
