"""What adapters change: the algebra against dense matrices, TIES and DARE against their definitions, odd adapters."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file, save_file

from clinrl.errors import ArtefactError, Refused
from clinrl.merging import lora_delta, safetensors_io
from clinrl.merging.lora_delta import Delta

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9))
SEEDS = st.integers(0, 10_000)
WEIGHTS = st.floats(-2, 2, width=32)


def drawn(seed: int, shape: tuple[int, int], rank: int, scale: float = 1.5) -> Delta:
    source = torch.Generator().manual_seed(seed)
    return Delta(torch.randn(shape[0], rank, generator=source), torch.randn(rank, shape[1], generator=source), scale)


def dense(delta: Delta) -> torch.Tensor:
    return (delta.left.double() @ delta.right.double()) * delta.scale


def summed(changes, weights) -> torch.Tensor:
    return sum(weight * dense(delta) for delta, weight in zip(changes, weights, strict=True))


@given(SHAPES, st.lists(st.tuples(SEEDS, st.integers(1, 4), WEIGHTS), min_size=1, max_size=3))
def test_a_stack_is_the_weighted_sum(shape, parts):
    changes = [drawn(seed, shape, rank) for seed, rank, _ in parts]
    weights = [weight for *_, weight in parts]
    found = lora_delta.stack(changes, weights)
    assert found.left.shape[1] == sum(rank for _, rank, _ in parts)
    torch.testing.assert_close(dense(found), summed(changes, weights), atol=1e-12, rtol=1e-12)


@given(SHAPES, SEEDS, st.integers(1, 6), st.integers(1, 8))
def test_truncation_loses_what_the_dense_svd_would_lose(shape, seed, rank, kept):
    delta = drawn(seed, shape, rank)
    found = lora_delta.truncate(delta, kept)
    values = torch.linalg.svdvals(dense(delta))
    assert found.left.shape[1] == found.right.shape[0] <= kept
    lost = torch.linalg.norm(dense(found) - dense(delta))
    assert float(lost) == pytest.approx(float(values[kept:].square().sum().sqrt()), abs=1e-9)


@given(SHAPES, SEEDS, st.integers(1, 6))
def test_the_norm_needs_no_dense_matrix(shape, seed, rank):
    delta = drawn(seed, shape, rank, -0.7)
    assert lora_delta.norm(delta) == pytest.approx(float(torch.linalg.norm(dense(delta))), rel=1e-9)


@given(SHAPES, SEEDS, st.integers(1, 4), WEIGHTS)
def test_a_change_blended_with_itself_is_itself(shape, seed, rank, weight):
    delta = drawn(seed, shape, rank)
    for blended in (
        lora_delta.stack([delta] * 2, [0.5, 0.5]),
        lora_delta.truncate(lora_delta.stack([delta] * 2, [0.5, 0.5]), rank),
    ):
        torch.testing.assert_close(dense(blended), dense(delta), atol=1e-12, rtol=1e-9)
    rows = delta.rows(0, shape[0])
    generators = [lora_delta.generator(0, place) for place in range(2)]
    for blended in (
        lora_delta.linear([rows] * 2, [0.5, 0.5]),
        lora_delta.ties([rows] * 2, [0.5, 0.5], [0.0, 0.0]),
        lora_delta.dare([rows] * 2, [0.5, 0.5], 1.0, generators),
    ):
        assert torch.equal(blended, rows)


@given(SHAPES, st.lists(st.tuples(SEEDS, WEIGHTS), min_size=1, max_size=3))
def test_dare_that_keeps_all_is_the_weighted_sum(shape, parts):
    rows = [drawn(seed, shape, 2).rows(0, shape[0]) for seed, _ in parts]
    weights = [weight for _, weight in parts]
    generators = [lora_delta.generator(0, place) for place in range(len(parts))]
    assert torch.equal(lora_delta.dare(rows, weights, 1.0, generators), lora_delta.linear(rows, weights))


def test_dare_drops_by_the_density_and_keeps_the_mean():
    ones = torch.ones(400, 500)
    found = lora_delta.dare([ones], [1.0], 0.25, [lora_delta.generator(3, "w")])
    assert set(found.unique().tolist()) == {0.0, 4.0}
    assert float(found.mean()) == pytest.approx(1.0, abs=0.02)
    again = lora_delta.generator(3, "w")
    halves = [lora_delta.dare([part], [1.0], 0.25, [again]) for part in ones.split(150)]
    assert torch.equal(torch.cat(halves), found), "the draw does not depend on how the rows are cut"
    other = lora_delta.dare([ones], [1.0], 0.25, [lora_delta.generator(3, "v")])
    assert not torch.equal(other, found)


def test_ties_by_hand():
    first = torch.tensor([[4.0, -3.0, 0.1, 2.0, 1.0]])
    second = torch.tensor([[2.0, 5.0, -6.0, -2.0, 1.0]])
    found = lora_delta.ties([first, second], [0.5, 0.5], [1.0, 1.0])
    # agree: mean; conflict: the larger; trimmed against kept: the kept; even conflict: nothing; agree
    assert found.tolist() == [[3.0, 5.0, -6.0, 0.0, 1.0]]
    found = lora_delta.ties([first, second], [3.0, 1.0], [1.0, 1.0])
    assert found.tolist() == [[14.0, -12.0, -24.0, 8.0, 4.0]]
    negative = lora_delta.ties([first, second], [1.0, -1.0], [0.0, 0.0])
    assert torch.equal(negative, lora_delta.ties([first, -second], [1.0, 1.0], [0.0, 0.0]))


@given(SHAPES, SEEDS, st.tuples(st.floats(0.0, 2, width=32), st.floats(0.0, 2, width=32)))
def test_ties_without_conflict_or_trimming_is_the_weighted_sum(shape, seed, weights):
    first = drawn(seed, shape, 2).rows(0, shape[0])
    second = first * torch.rand(shape, generator=torch.Generator().manual_seed(seed)).add(0.1)
    found = lora_delta.ties([first, second], weights, [0.0, 0.0])
    torch.testing.assert_close(found, lora_delta.linear([first, second], weights), atol=1e-5, rtol=1e-4)


@given(
    arrays.arrays(
        "float32",
        st.tuples(st.integers(1, 12), st.integers(1, 12)),
        elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    ),
    st.data(),
)
def test_a_threshold_is_the_kth_largest_magnitude(matrix, data):
    values = torch.from_numpy(matrix)
    keep = data.draw(st.integers(1, values.numel()))
    expected = values.abs().flatten().sort(descending=True).values[keep - 1] if keep < values.numel() else 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_io, "BLOCK_BYTES", data.draw(st.integers(1, 4 * values.numel())))
        found = lora_delta.threshold(Delta(values, torch.eye(values.shape[1])), keep / values.numel())
    assert found == float(expected)


def test_ties_trims_to_the_density(monkeypatch):
    monkeypatch.setattr(safetensors_io, "BLOCK_BYTES", 7 * 30 * 4)
    delta = drawn(1, (40, 30), 3)
    rows, threshold = torch.cat([delta.rows(first, 7) for first in range(0, 40, 7)]), lora_delta.threshold(delta, 0.1)
    found = lora_delta.ties([rows], [1.0], [threshold])
    assert int((found != 0).sum()) == 120
    assert float(found.abs()[found != 0].min()) >= float(rows.abs()[found == 0].max())


CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}
FACTORS = {
    "base_model.model.q.lora_A.weight": torch.ones(2, 3),
    "base_model.model.q.lora_B.weight": torch.ones(4, 2),
}


def written(folder, config=CONFIG, factors=FACTORS):
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_read_with_its_scale(tmp_path):
    adapter = lora_delta.read_adapter(written(tmp_path))
    assert adapter.scale("q") == 2.0
    assert dense(adapter.delta("q")).tolist() == [[4.0] * 3] * 4
    adapter = lora_delta.read_adapter(written(tmp_path, {**CONFIG, "use_rslora": True}))
    assert adapter.scale("q") == 4 / math.sqrt(2)


def test_scales_and_ranks_are_those_of_peft(tmp_path):
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=12, num_attention_heads=2)
    )
    config = LoraConfig(
        r=4, lora_alpha=6, use_rslora=True, target_modules="all-linear", task_type="CAUSAL_LM",
        rank_pattern={r"layers\.1\..*proj": 2, "^model.layers.3.self_attn.q_proj": 3},
        alpha_pattern={"down_proj": 5, r"layers\.1\.mlp\.up_proj": 7},
    )  # fmt: skip
    model = get_peft_model(model, config)
    model.save_pretrained(tmp_path)
    adapter = lora_delta.read_adapter(tmp_path)
    layers = {
        name.removeprefix("base_model.model."): m for name, m in model.named_modules() if isinstance(m, LoraLayer)
    }
    assert adapter.factors.keys() == layers.keys()
    assert {module: adapter.scale(module) for module in layers} == {
        module: layer.scaling["default"] for module, layer in layers.items()
    }


REFUSED = {
    "DoRA": ({"use_dora": True}, "uses 'use_dora', which is not supported"),
    "biases": ({"bias": "lora_only"}, "has trained biases"),
    "modules to save": ({"modules_to_save": ["lm_head"]}, "uses 'modules_to_save'"),
    "parameters": ({"target_parameters": ["experts.w"]}, "uses 'target_parameters'"),
    "token rows": ({"trainable_token_indices": [1]}, "uses 'trainable_token_indices'"),
    "biases of LoRA": ({"lora_bias": True}, "uses 'lora_bias'"),
    "QA-LoRA": ({"use_qalora": True}, "uses 'use_qalora'"),
    "repeated layers": ({"layer_replication": [[0, 1]]}, "uses 'layer_replication'"),
    "something of tomorrow": ({"use_novelty": {"rank": 3}}, "uses 'use_novelty'"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "was started by 'pissa', which alters the base"),
    "weights as GPT-2's": ({"fan_in_fan_out": True}, "weights that lie as"),
    "another kind": ({"peft_type": "IA3"}, "is not that of a LoRA adapter"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_adapter_that_does_more_than_its_factors_is_refused(tmp_path, what):
    change, sentence = REFUSED[what]
    with pytest.raises(Refused, match=sentence) as caught:
        lora_delta.read_adapter(written(tmp_path, {**CONFIG, **change}))
    assert str(tmp_path) in str(caught.value)


def test_fields_without_effect_are_no_reason_to_refuse(tmp_path):
    harmless = {
        "use_dora": False, "lora_dropout": 0.1, "peft_version": "1", "modules_to_save": None, "loftq_config": {},
        "megatron_core": "megatron.core", "qalora_group_size": 16, "inference_mode": True,
        "trainable_token_indices": None,
    }  # fmt: skip
    assert lora_delta.read_adapter(written(tmp_path, {**CONFIG, **harmless})).factors


UNFIT = {
    "an embedding": ({"base_model.model.e.lora_embedding_A": torch.ones(2, 3)}, "not a LoRA factor of a linear layer"),
    "a saved module": ({"base_model.model.lm_head.weight": torch.ones(2, 3)}, "not a LoRA factor of a linear layer"),
    "one factor": ({"base_model.model.k.lora_A.weight": torch.ones(2, 3)}, "one of the two factors of 'k' only"),
    "another rank": (
        {"base_model.model.k.lora_A.weight": torch.ones(3, 3), "base_model.model.k.lora_B.weight": torch.ones(4, 3)},
        "whose rank by adapter_config.json is 2",
    ),
    "a convolution": (
        {
            "base_model.model.k.lora_A.weight": torch.ones(2, 3, 1, 1),
            "base_model.model.k.lora_B.weight": torch.ones(4, 2, 1, 1),
        },
        "has factors of shape",
    ),
}


def test_a_module_s_name_is_quoted_without_what_a_terminal_obeys(tmp_path):
    for name in ("base_model.model.\x1b[2J.lora_A.weight", "\x1b[2J"):
        with pytest.raises(Refused) as refused:
            lora_delta.read_adapter(written(tmp_path, factors=FACTORS | {name: torch.ones(2, 3)}))
        assert str(refused.value).isprintable()


@pytest.mark.parametrize("what", UNFIT)
def test_tensors_that_are_not_pairs_of_factors_are_refused(tmp_path, what):
    more, sentence = UNFIT[what]
    with pytest.raises(Refused, match=sentence):
        lora_delta.read_adapter(written(tmp_path, factors=FACTORS | more))


def test_a_folder_that_is_no_adapter_is_refused(tmp_path):
    with pytest.raises(ArtefactError, match=r"FileNotFoundError.*adapter_config.json"):
        lora_delta.read_adapter(tmp_path)
    written(tmp_path, factors={})
    with pytest.raises(ArtefactError, match="holds no tensors"):
        lora_delta.read_adapter(tmp_path)


def test_a_blended_config_gives_every_module_its_rank_at_scale_one(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        written(folder)
    adapters = [lora_delta.read_adapter(folder) for folder in folders]
    config = lora_delta.blended_config(adapters, {"a.q": 4, "b.q": 4, "c.q": 2})
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 4, False)
    assert config["rank_pattern"] == config["alpha_pattern"] == {r"c\.q": 2}
    assert config["target_modules"] == ["q"]
    written(folders[1], {**CONFIG, "layers_to_transform": [1]})
    adapters = [lora_delta.read_adapter(folder) for folder in folders]
    config = lora_delta.blended_config(adapters, {"a.q": 4, "b.q": 4})
    assert config["target_modules"] == ["a.q", "b.q"]
    assert config["layers_to_transform"] is None


def test_factors_stay_what_was_written(tmp_path):
    adapter = lora_delta.read_adapter(written(tmp_path))
    assert torch.equal(adapter.delta("q").right, load_file(tmp_path / "adapter_model.safetensors")[next(iter(FACTORS))])
