"""The check of merged models: it passes what rounding explains, and nothing else."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from clinrl.errors import Refused
from clinrl.merging import check, merge
from clinrl.merging.safetensors_io import FLOATS

PROMPTS = ["ab", "bca", "cabbage" * 12]


@pytest.fixture(scope="module", params=FLOATS)
def folded(request, tmp_path_factory):
    """A base of each type with a tokenizer, its adapter, and the fold."""
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, initializer_range=0.1,
        )
    )  # fmt: skip
    model.to(getattr(torch, FLOATS[request.param])).save_pretrained(folder / "base")
    backend = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(26)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="z").save_pretrained(folder / "base")
    config = LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model.float(), config).save_pretrained(folder / "adapter")
    merge.blend("fold", folder / "base", [(folder / "adapter", 1.0)], folder / "out")
    return request.param, folder


def test_a_model_of_several_types_has_that_of_its_largest_tensor(tmp_path):
    save_file({"a": torch.zeros(9), "w": torch.zeros(8, 8).half()}, tmp_path / "model.safetensors")
    assert check._dtype(tmp_path) == ("F16", 4 * (9 + 64))


def checked(folder, merged="out"):
    return check.check(folder / "base", [(folder / "adapter", 1.0)], folder / merged, PROMPTS)


@pytest.mark.long
def test_a_fold_passes_well_within_the_tolerance(folded):
    kind, folder = folded
    found = checked(folder)
    assert found.logits.difference < found.logits.tolerance == check.LOGITS[kind]
    assert found.logits.compared == 2 + 3 + check.LAST
    assert found.weights.difference <= found.weights.tolerance
    assert found.agreement > 0.9


def test_a_base_without_its_adapter_does_not_pass_by_its_weights(folded):
    _, folder = folded
    with pytest.raises(Refused, match="units of the last place away"):
        checked(folder, "base")


def test_a_base_without_its_adapter_does_not_pass_by_its_logits(folded, monkeypatch):
    _, folder = folded
    monkeypatch.setattr(check, "_compare_weights", lambda *_: None)
    with pytest.raises(Refused, match="of the largest logit away from those of base and adapter"):
        checked(folder, "base")


def spoiled(folder, out, value):
    """A copy of the fold's project in which one weight is another."""
    for name in ("base", "adapter"):
        shutil.copytree(folder / name, out / name)
    shutil.copytree(folder / "out", out / "off")
    tensors = load_file(out / "off/model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name][0, 0] = value(tensors[name][0, 0])
    save_file(tensors, out / "off/model.safetensors", metadata={"format": "pt"})
    return out


def test_one_weight_a_few_places_off_is_seen(folded, tmp_path):
    kind, folder = folded
    places = 200 if kind == "F32" else 4  # sums in float32 are allowed for
    project = spoiled(folder, tmp_path, lambda weight: weight * (1 + places * torch.finfo(weight.dtype).eps))
    with pytest.raises(Refused, match="units of the last place"):
        checked(project, "off")


def test_a_weight_that_is_not_a_number_is_seen_both_ways(folded, tmp_path, monkeypatch):
    _, folder = folded
    project = spoiled(folder, tmp_path, lambda weight: weight * float("nan"))
    with pytest.raises(Refused, match="nan units of the last place"):
        checked(project, "off")
    monkeypatch.setattr(check, "_compare_weights", lambda *_: None)
    with pytest.raises(Refused, match="logits are nan of the largest"):
        checked(project, "off")


def test_a_model_that_does_not_fit_the_memory_is_compared_by_its_weights(folded, monkeypatch):
    _, folder = folded
    monkeypatch.setattr(check, "HEADROOM", 1e12)
    found = checked(folder)
    assert found.logits is None
    assert found.agreement is None
    assert found.weights.compared > 1000


def test_a_method_that_departs_from_the_sum_is_measured_and_not_judged(folded):
    _, folder = folded
    found = check.check(folder / "base", [(folder / "adapter", 1.0)], folder / "base", PROMPTS, exact=False)
    assert found.logits.tolerance is None
    assert found.logits.difference > 0.01
    assert found.weights is None
