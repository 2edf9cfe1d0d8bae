"""Full models as folders: where a base's weights lie, what is copied beside them, and what is no full model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from clinrl.artifacts import digest, digests, write_json
from clinrl.errors import ArtefactError, Refused
from clinrl.merging import merge
from clinrl.models import bases


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_json(folder / "config.json", {"model_type": "qwen3"})
    write_json(folder / "tokenizer.json", {})
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    return folder


def reference(folder: Path, repo: object, commit: str) -> Path:
    write_json(folder / "base.json", {"repo": str(repo), "commit": commit, "quantize": "nf4"})
    return folder


def test_a_checkpoint_has_its_tensors_by_name(checkpoint):
    assert merge.tensors_of(checkpoint).keys() == {"w"}


def test_a_base_may_name_a_local_checkpoint_which_must_not_change(checkpoint, tmp_path):
    base = reference(tmp_path / "base", checkpoint, "local-" + digest(digests(checkpoint)))
    assert bases.locate(bases.reference(base), base) == checkpoint
    write_json(checkpoint / "config.json", {})
    with pytest.raises(ArtefactError, match="is not the checkpoint that"):
        bases.locate(bases.reference(base), base)
    shutil.rmtree(checkpoint)
    with pytest.raises(ArtefactError, match="is not the checkpoint that"):
        bases.locate(bases.reference(base), base)


def test_a_hub_checkpoint_is_found_where_the_hub_keeps_it(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit = "a" * 40
    cached = tmp_path / "hub/models--Qwen--Qwen2.5-3B/snapshots" / commit
    shutil.copytree(checkpoint, cached)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    base = reference(tmp_path / "base", "Qwen/Qwen2.5-3B", commit)
    assert bases.locate(bases.reference(base), base) == cached


def test_a_hub_that_does_not_deliver_is_a_refusal_with_advice(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    base = reference(tmp_path / "base", "Qwen/Qwen2.5-3B", "a" * 40)
    with pytest.raises(Refused, match=r"Qwen/Qwen2.5-3B@a{12} is not in the cache, and HF_HUB_OFFLINE"):
        bases.locate(bases.reference(base), base)


@pytest.mark.parametrize("config", [None, "{", "[]"])
def test_a_folder_without_a_config_is_no_model(checkpoint, config):
    (checkpoint / "config.json").unlink()
    if config is not None:
        (checkpoint / "config.json").write_text(config)
    with pytest.raises(ArtefactError, match=r"config.json is missing or malformed"):
        merge.tensors_of(checkpoint)


@pytest.mark.parametrize("where", ["top", "text"])
def test_quantised_weights_are_refused(checkpoint, where):
    part = {"quantization_config": {"quant_method": "bitsandbytes"}}
    write_json(checkpoint / "config.json", part if where == "top" else {"text_config": part})
    with pytest.raises(Refused, match="holds quantised weights"):
        merge.tensors_of(checkpoint)


def test_the_tokenizer_is_the_adapters_if_it_has_one(checkpoint, tmp_path):
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    for folder in (adapter, out):
        folder.mkdir()
    for folder, text in ((checkpoint, "base"), (adapter, "adapter")):
        (folder / "tokenizer_config.json").write_text(text)
    (checkpoint / "chat_template.jinja").write_text("base")
    (checkpoint / "pytorch_model.bin").write_bytes(b"never copied")
    merge.complete(checkpoint, adapter, out)
    assert {path.name for path in out.iterdir()} == {"config.json", "tokenizer_config.json"}
    assert (out / "tokenizer_config.json").read_text() == "adapter"
    (adapter / "tokenizer_config.json").unlink()
    merge.complete(checkpoint, adapter, out)
    assert (out / "tokenizer_config.json").read_text() == (out / "chat_template.jinja").read_text() == "base"
    assert json.loads((out / "config.json").read_text()) == {"model_type": "qwen3"}
