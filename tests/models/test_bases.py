"""Bases: what is recorded about them, and what loading refuses."""

import shutil

import pytest
from transformers import AutoTokenizer

import dolls
from clinrl import paths
from clinrl.artifacts import read_manifest, seal, write_json
from clinrl.errors import ArtefactError, Refused
from clinrl.models import bases, hub, pretrain
from clinrl.models.chat import render
from clinrl.runtime import gpus
from clinrl.tasks.base import get_task
from clinrl.types import Message


@pytest.fixture
def project(tmp_path, monkeypatch):
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def full(repo: str, quantize: str, revision: str = "main"):
    changed = {**dolls.PARAMS["bases"]["esi"], "full": {"repo": repo, "revision": revision, "quantize": quantize}}
    return dolls.params(scale="full", bases={"esi": changed})


def test_a_tokenizer_pads_left_with_a_token_that_ends_nothing(project):
    model, tokenizer = bases.load(dolls.params(), "esi", for_training=True)
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert model.training
    assert str(model.dtype) == "torch.float32"


def test_a_chat_template_that_trl_lacks_is_refused_with_the_nearest_one(tmp_path):
    spec = dolls.params().bases["esi"].embedded.model_copy(update={"template": "qwen33"})
    with pytest.raises(Refused, match="'qwen33' is not a chat template of TRL; did you mean qwen3"):
        pretrain.build(get_task("esi"), spec, tmp_path / "out", tmp_path / "scratch")


def test_an_altered_base_is_refused(project):
    with (paths.base("esi") / "model.safetensors").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(ArtefactError, match="was altered"):
        bases.load(dolls.params(), "esi", for_training=False)


def test_a_base_of_another_scale_is_refused(project):
    with pytest.raises(ArtefactError, match="was not built at scale full"):
        bases.load(full("Qwen/Qwen3.5-9B", "nf4"), "esi", for_training=False)


def test_a_tokenizer_whose_pad_ends_a_turn_is_refused(project):
    folder = paths.base("esi")
    text = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(text.replace('"<|endoftext|>"', '"<|im_end|>"'))
    before = read_manifest(folder).model_dump(exclude={"files"})
    seal(folder, **before)
    with pytest.raises(ArtefactError, match="no pad token of its own"):
        bases.load(dolls.params(), "esi", for_training=False)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_local_checkpoint_serves_as_a_hub_base(project, quantize):
    checkpoint = project / "checkpoint"
    shutil.copytree(paths.base("esi"), checkpoint)
    params = full(str(checkpoint), quantize)
    bases.stage(params, "esi")
    manifest = read_manifest(paths.base("esi"))
    assert set(manifest.files) == {"base.json"}
    assert read_manifest(paths.adapter("esi-base")).inputs["base"]
    model, _ = bases.load(params, "esi", for_training=False)
    assert bool(getattr(model, "is_loaded_in_4bit", False)) == (quantize == "nf4")
    write_json(checkpoint / "config.json", {})
    with pytest.raises(ArtefactError, match="is not the checkpoint"):
        bases.load(params, "esi", for_training=False)


def test_a_gpu_that_torch_cannot_use_is_not_left_idle_in_silence(project, monkeypatch):
    """As with torch's build for the CPU, which `make demo` has installed, or with an old driver."""
    monkeypatch.setattr(gpus, "visible", lambda: [gpus.Gpu(3, "A", 1 << 40, 1 << 40)])
    bases.load(dolls.params(), "esi", for_training=False)  # an embedded one is computed by the CPU
    checkpoint = project / "checkpoint"
    shutil.copytree(paths.base("esi"), checkpoint)
    params = full(str(checkpoint), "none")
    bases.stage(params, "esi")
    with pytest.raises(Refused, match="torch cannot use GPU 3, which nvidia-smi lists, so the model would be"):
        bases.load(params, "esi", for_training=False)


def test_a_base_may_leave_the_think_block_to_the_model(project):
    checkpoint = project / "checkpoint"
    shutil.copytree(paths.base("esi"), checkpoint)
    block = {"repo": str(checkpoint), "revision": "main", "quantize": "none", "prefill": False}
    params = dolls.params(scale="full", bases={"esi": {**dolls.PARAMS["bases"]["esi"], "full": block}})
    bases.stage(params, "esi")
    with pytest.raises(ArtefactError, match="leaves the think block to the model, but the chat template writes the"):
        bases.load(params, "esi", for_training=False)
    shutil.copy(dolls.TEMPLATE.parent / "llama3_1.jinja", checkpoint / "chat_template.jinja")
    bases.stage(params, "esi")
    _, tokenizer = bases.load(params, "esi", for_training=False)
    asked = [Message(role="user", content="?")]
    assert render(tokenizer, asked, True).endswith("assistant<|end_header_id|>\n\n")
    assert render(tokenizer, asked, False).endswith("<think>\n\n</think>\n\n")
    tokenizer.save_pretrained(project / "saved")  # as an adapter has it, for whoever serves it
    again = AutoTokenizer.from_pretrained(project / "saved")
    assert render(again, asked, True) == render(tokenizer, asked, True)


@pytest.mark.parametrize("scale", ["embedded", "full"])
def test_four_bits_are_computed_alike_on_every_machine(project, monkeypatch, scale):
    """With AVX-512 BF16 bitsandbytes packs weights anew at the first forward of an exam; here any machine claims it."""
    import torch
    from bitsandbytes.nn import Linear4bit

    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    assert Linear4bit(8, 8).support_avx512bf16_for_cpu
    params = dolls.params()
    if scale == "full":
        params = full(str(shutil.copytree(paths.base("esi"), project / "checkpoint")), "nf4")
        bases.stage(params, "esi")
    model, _ = bases.load(params, "esi", for_training=False, qlora=True)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear4bit)]
    assert layers
    ids = torch.arange(5, 25).unsqueeze(0)
    with torch.inference_mode():
        examined = model.eval()(ids).logits
        assert not any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers)
        assert torch.equal(examined, model.train()(ids).logits)  # the base has no dropout


def test_a_commit_in_the_cache_is_pinned_and_opened_without_a_network(project, monkeypatch):
    commit = "c" * 40
    shutil.copytree(paths.base("esi"), project / "hub/models--owner--name/snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(project / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._http.http_backoff", pytest.fail)
    monkeypatch.setattr("httpx2.Client.send", pytest.fail)
    params = full("owner/name", "none", commit)
    bases.stage(params, "esi")
    assert bases.reference(paths.base("esi"))["commit"] == commit
    model, _ = bases.load(params, "esi", for_training=False)
    assert commit in model.config.name_or_path


def test_an_unreachable_hub_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Refused, match=r"Qwen/Qwen3.5-9B@main is not in the cache, and HF_HUB_OFFLINE forbids"):
        hub.commit_of("Qwen/Qwen3.5-9B", "main")


NAMED = {"repo": "owner/name", "commit": "a" * 40}


def test_a_local_checkpoint_that_is_not_here_is_refused_when_the_base_is_built(project):
    with pytest.raises(Refused, match=r"nowhere, a checkpoint of params\.yaml, is no folder here"):
        bases.stage(full(str(project / "nowhere"), "none"), "esi")


def test_a_folder_here_with_a_name_of_the_hub_is_not_taken_for_either(project):
    (project / "models/qwen").mkdir(parents=True)
    with pytest.raises(Refused, match="models/qwen is a folder here and a name on the hub; for the folder, give its"):
        bases.stage(full("models/qwen", "none"), "esi")


def test_a_folder_named_like_a_hub_checkpoint_does_not_take_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for folder in (tmp_path / "owner/name", kept := tmp_path / "hub/models--owner--name/snapshots" / NAMED["commit"]):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("")
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text("{}")
    assert bases.locate(NAMED, tmp_path) == kept


@pytest.mark.parametrize("commit", ["main", "a" * 39, "A" * 40, "", "a" * 40 + "\n"])
def test_a_hub_checkpoint_has_a_whole_commit(tmp_path, commit):
    with pytest.raises(ArtefactError, match="which is not 40 hex digits"):
        bases.locate(NAMED | {"commit": commit}, tmp_path)
