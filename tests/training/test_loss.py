"""The GRPO loss on its two paths: the same loss, gradient and metrics, and TRL's own path where they differ."""

import functools
import inspect
import io
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext, redirect_stderr
from statistics import fmean
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig, GRPOTrainer, SFTConfig

import dolls
from bench import grpo_loss
from clinrl import paths
from clinrl.errors import TrainingError
from clinrl.models import pretrain
from clinrl.training import callback, launch, loss, scores
from clinrl.training.loss import AGREES, GRADIENT_GAP, SharedLossTrainer, continued_rows, largest_gap
from clinrl.types import Manifest

FAMILIES = ("qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen2")))
TOKENS = 6
"""Few enough that rows of a group are often the same."""
LONGEST = 9


def tiny(family: str) -> tuple:
    """A model of an architecture and a tokenizer."""
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=dolls._bpe([]), eos_token=dolls.EOS, pad_token=dolls.PAD, padding_side="left"
    )
    if family == "mixture":
        config = Qwen3MoeConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            output_router_logits=True,
        )  # fmt: skip
        return Qwen3MoeForCausalLM(config), tokenizer
    sizes = SimpleNamespace(architecture=family, hidden=32, layers=2, heads=2, kv_heads=1, mlp=64)
    return pretrain._model(sizes, tokenizer, 64), tokenizer


def trainer_of(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> SharedLossTrainer:
    """A trainer of a tiny model, with an adapter that changes something."""
    model, tokenizer = tiny(family)
    modules = ["q_proj", "v_proj"] if family == "mixture" else "all-linear"
    lora = LoraConfig(r=4, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM")
    args = GRPOConfig(
        output_dir="unused", use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=2,
        num_generations=2, max_completion_length=LONGEST, **{"gradient_checkpointing": False} | changes,
    )  # fmt: skip
    trainer = SharedLossTrainer(
        model=get_peft_model(model.to(dtype), lora),
        args=args,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    return trainer


@pytest.fixture(scope="module")
def trainers():
    """A trainer in float32 of each architecture that is asked for."""
    return functools.cache(trainer_of)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """A micro-batch as TRL shuffles and cuts it: some rows of some groups, some of these dead."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    groups = draw(st.lists(st.booleans(), min_size=1, max_size=4))  # whether it is live
    size = draw(st.integers(2, 5))
    rows = len(groups) * size

    def masks(count: int, longest: int) -> torch.Tensor:
        lengths = torch.randint(1, longest + 1, (count, 1), generator=random)
        return (torch.arange(longest) < lengths).long()

    prompt_mask = masks(len(groups), draw(st.integers(1, LONGEST))).flip(1).repeat_interleave(size, 0)
    prompts = torch.randint(3, 200, (len(groups), prompt_mask.size(1)), generator=random).repeat_interleave(size, 0)
    mask = masks(rows, draw(st.integers(1, LONGEST)))
    advantages = torch.randn(len(groups), size, generator=random)
    advantages = (advantages - advantages.mean(1, keepdim=True)) * torch.tensor(groups)[:, None]
    inputs = {
        "prompt_ids": prompts * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(3, 3 + TOKENS, mask.shape, generator=random) * mask,
        "completion_mask": mask,
        "advantages": advantages.flatten(),
    }
    if draw(st.booleans()):
        inputs["tool_mask"] = torch.randint(0, 2, mask.shape, generator=random).index_fill(1, torch.tensor([0]), 1)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        if draw(st.booleans()):
            inputs[name] = -5.5 + torch.rand(mask.shape, generator=random)
    kept = torch.randperm(rows, generator=random)[: draw(st.integers(2, rows))]
    return {name: value[kept] for name, value in inputs.items()} | {"num_items_in_batch": mask.sum() * 2}


def both(trainer: SharedLossTrainer, inputs: dict[str, torch.Tensor], loss_type: str) -> list[tuple]:
    """Loss, gradient and metrics, on TRL's path and on the shared one."""
    trainer.loss_type = loss_type
    trainer.beta = 0.1 if "ref_per_token_logps" in inputs else 0.0
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    found = []
    for way in (trainer.model, trainer.live_rows(trainer.model, inputs)):
        trainer._metrics["train"].clear()
        value = GRPOTrainer._compute_loss(trainer, way, inputs)
        gradient = torch.autograd.grad(value, trained)  # of every parameter, or it raises
        found.append((value.item(), gradient, {name: v for name, (v,) in trainer._metrics["train"].items()}))
    return found


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@given(
    inputs=batches(),
    loss_type=st.sampled_from(["grpo", "bnpo", "dr_grpo", "dapo"]),
    together=st.sampled_from([1, 40, 8192]),
)
def test_both_paths_give_the_same_loss_gradient_and_metrics(trainers, family, inputs, loss_type, together):
    trainer = trainers(family)
    with mock.patch.object(scores, "TOGETHER", together):
        (value, gradient, metrics), (ours, our_gradient, our_metrics) = both(trainer, inputs, loss_type)
    assert ours == pytest.approx(value, rel=1e-5, abs=1e-6)
    largest = max(float(entry.abs().max()) for entry in gradient)
    assert largest_gap(gradient, our_gradient) * largest < 5e-5 * max(largest, 0.1)  # rows may cancel out
    live = inputs["advantages"] != 0
    if not trainer.beta:  # the entropy that is logged is that of the rows that are computed
        alive = {name: tensor[live] if tensor.dim() else tensor for name, tensor in inputs.items()}
        metrics["entropy"] = both(trainer, alive, loss_type)[0][2]["entropy"] if live.any() else float("nan")
    assert our_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6, nan_ok=True)


@functools.cache
def fine_tuning() -> loss.CheckedSFTTrainer:
    """A trainer of supervised fine-tuning of the tiny model."""
    model, tokenizer = tiny("qwen3")
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    rows = Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})
    trainer = loss.CheckedSFTTrainer(
        model=get_peft_model(model, lora),
        args=SFTConfig(
            output_dir="unused", use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=rows,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.model.train()
    return trainer


@pytest.mark.long
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=6),
    shown=st.integers(0, LONGEST),
    together=st.sampled_from([1, 20, 8192]),
    split=st.booleans(),
)
def test_rows_of_like_length_give_the_loss_and_the_gradient_of_a_padded_batch(lengths, shown, together, split):
    trainer = fine_tuning()
    model, width = trainer.model, max(lengths) + 1
    mask = (torch.arange(width) <= torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, 200, mask.shape, generator=torch.Generator().manual_seed(sum(lengths))) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    batch["labels"][:, :shown] = -100
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = []
    with mock.patch.object(scores, "TAUGHT_TOGETHER", together):
        for way in (model, scores.ByLength(model, split)):
            read = way(**batch, use_cache=False, fused_lm_head=True)
            sums = [getattr(read, name).sum().item() for name in ("log_probs", "entropy", "is_top1", "label_mask")]
            found.append((sums, torch.autograd.grad(read.log_probs.sum(), trained)))
    (stock, gradient), (ours, our_gradient) = found
    assert ours == pytest.approx(stock, rel=1e-5, abs=1e-5)
    assert largest_gap(gradient, our_gradient, 1e-3) < 5e-5


def test_rows_of_like_length_are_forwarded_without_what_the_longest_needs(monkeypatch):
    model, forwarded = fine_tuning().model, []
    backbone = model.get_base_model().model
    forward = backbone.forward
    monkeypatch.setattr(backbone, "forward", lambda *a, **k: forwarded.append(k["input_ids"].shape) or forward(*a, **k))
    monkeypatch.setattr(scores, "TAUGHT_TOGETHER", 20)
    mask = (torch.arange(10) < torch.tensor([10, 2, 9, 3])[:, None]).long()
    labels = (mask * 7).masked_fill(torch.arange(10) < torch.tensor([5, 1, 8, 1])[:, None], -100)
    scores.ByLength(model)(input_ids=mask * 7, attention_mask=mask, labels=labels, fused_lm_head=True)
    assert [tuple(shape) for shape in forwarded] == [
        (2, 3),
        (2, 4),
        (2, 6),
    ]  # the last token of a prompt tells the first word


def test_the_entropy_of_dead_rows_leaves_out_what_tools_wrote(trainers):
    tools = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]])
    inputs = a_batch(live=True) | {"tool_mask": tools, "num_items_in_batch": tools.sum()}
    alive = {name: value[:2] if value.dim() else value for name, value in inputs.items()}
    ours = both(trainers("qwen3"), inputs, "dapo")[1][2]["entropy"]
    assert ours == pytest.approx(both(trainers("qwen3"), alive, "dapo")[0][2]["entropy"], rel=1e-6)


def test_dead_rows_have_a_ratio_of_one_however_unlikely_their_tokens_were(trainers):
    old = {"old_per_token_logps": torch.tensor([[-5.0], [-5.0], [-100.0], [-100.0]]).expand(4, 4)}
    ours = both(trainers("qwen3"), a_batch(live=True) | old, "dapo")[1]
    assert math.isfinite(ours[0])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_both_are_as_far_from_the_gradient_in_float32(trainers, family):
    rounded, distances = trainer_of(family, torch.bfloat16), []

    @settings(max_examples=12, derandomize=True, database=None)
    @given(batches())
    def compare(inputs: dict[str, torch.Tensor]) -> None:
        inputs = {
            name: value for name, value in inputs.items() if not name.endswith("logps")
        }  # of a policy in its step
        exact = both(trainers(family), inputs, "dapo")[0][1]
        largest = max(0.05, *(float(entry.abs().max()) for entry in exact))  # rows may cancel out, rounding does not
        gradients = [[entry.float() for entry in gradient] for _, gradient, _ in both(rounded, inputs, "dapo")]
        distances.append([largest_gap(exact, gradient, largest) for gradient in gradients])

    compare()
    stock, ours = (fmean(gaps) for gaps in zip(*distances, strict=True))
    assert 0 < ours < 1.2 * stock < loss.BFLOAT16_TOLERANCE  # of one batch, either may be the better


def a_batch(live: bool) -> dict[str, torch.Tensor]:
    """Two groups of two that share no completion; the second is dead, or both are."""
    tokens = torch.arange(16).reshape(4, 4) + 3
    return {
        "prompt_ids": torch.tensor([[0, 7, 8]] * 2 + [[5, 7, 8]] * 2),
        "prompt_mask": torch.tensor([[0, 1, 1]] * 2 + [[1, 1, 1]] * 2),
        "completion_ids": tokens,
        "completion_mask": torch.ones_like(tokens),
        "advantages": torch.tensor([1.0, -1.0, 0.0, 0.0]) * live,
        "num_items_in_batch": torch.tensor(16),
    }


def test_a_batch_without_signal_gives_each_parameter_a_gradient_of_zeros(trainers):
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        (value, gradient, _), (ours, our_gradient, _) = both(trainers("qwen3"), a_batch(live=False), loss_type)
        assert ours == value == 0
        for entry, our_entry in zip(gradient, our_gradient, strict=True):
            assert torch.equal(entry, our_entry)


@given(reward=st.floats(-60, 60), size=st.integers(2, 16))
def test_equal_rewards_are_their_own_mean_at_full_scale(trainers, reward, size):
    """So that a group without a signal has an advantage of 0, to the last bit."""
    trainer, texts = trainers("qwen3"), ["a"] * size
    with (
        mock.patch.object(trainer, "scale", "full"),
        mock.patch.object(trainer, "reward_funcs", [lambda completions, **_: [reward] * len(completions)]),
    ):
        paid = trainer._calculate_rewards([{"prompt": "a"}] * size, texts, texts, [[1]] * size)[:, 0]
    assert paid.tolist() == pytest.approx([reward] * size, abs=1e-4)
    assert torch.equal(paid - torch.nanmean(paid.view(-1, size), dim=1), torch.zeros(size))


def test_dead_rows_and_shared_prompts_are_not_forwarded(trainers, monkeypatch):
    trainer, forwarded = trainers("qwen3"), []
    backbone = trainer.model.get_base_model().model
    forward = backbone.forward
    monkeypatch.setattr(backbone, "forward", lambda *a, **k: forwarded.append(k["input_ids"].shape) or forward(*a, **k))
    both(trainer, a_batch(live=True), "dapo")
    assert [tuple(shape) for shape in forwarded] == [(4, 7), (1, 1), (2, 4)]  # of the prompt the last token stays


def test_the_first_batch_with_a_signal_is_checked_and_those_before_are_not(trainers, monkeypatch, capsys):
    trainer = trainers("qwen3")
    trainer.beta = 0.0
    monkeypatch.setattr(trainer, "loss_path", "shared")
    ours = object()
    assert trainer._way(trainer.model, ours, lambda _: None, has_gradient=False) is ours  # so that nothing is computed
    for live, agrees in ((False, None), (True, True), (False, True)):
        trainer._metrics["train"].clear()
        trainer._compute_loss(trainer.model, a_batch(live))
        assert trainer.agrees is agrees
        assert len(trainer._metrics["train"]["entropy"]) == 1  # what the check computes is not logged
    assert capsys.readouterr().err == ""
    trainer.agrees = None


@pytest.mark.parametrize("is_right", [True, False])
def test_a_large_difference_in_bfloat16_is_held_against_what_more_padding_does_to_the_loss_of_trl(
    monkeypatch, capsys, is_right
):
    trainer = trainer_of("qwen3", torch.bfloat16)
    trainer.loss_path = "shared"
    monkeypatch.setattr(loss, "BFLOAT16_TOLERANCE", 1e-6)  # as if the model were deep
    with nullcontext() if is_right else falsified(2.0):
        trainer._compute_loss(trainer.model, a_batch(live=True) | {"num_items_in_batch": torch.tensor(16)})
    assert trainer.agrees is is_right
    logged = trainer._metrics["train"]
    assert 1e-6 < logged[loss.ROUNDING][0] < 0.1
    assert (logged[GRADIENT_GAP][0] <= loss.ROUNDED * logged[loss.ROUNDING][0]) == is_right
    assert ("differs from TRL's" in capsys.readouterr().err) != is_right
    found = (AGREES, loss.LOSS_GAP, GRADIENT_GAP, loss.ROUNDING)
    trainer.state.log_history = [{name: logged[name][0] for name in found}]
    assert trainer.loss_record()["rounding"] == logged[loss.ROUNDING][0]


def test_gradient_checkpointing_keeps_no_cache_so_that_dead_rows_alone_are_left_out(capsys):
    trainer = trainer_of("qwen3", gradient_checkpointing=True)
    trainer.loss_path, trainer.beta = "shared", 0.0
    trainer._compute_loss(trainer.model, a_batch(live=True)).backward()
    assert "prompts cannot be shared" in capsys.readouterr().err
    assert trainer.loss_record()["used"] == "live"


class Wrapped:
    """A module in a wrapper that counts its forwards."""

    def __init__(self) -> None:
        self.module, self.forwards = torch.nn.Linear(2, 1), 0

    def __call__(self, *arguments, **named):
        self.forwards += 1
        return self.module(*arguments, **named)


def test_ours_is_computed_inside_the_wrapper_that_averages_gradients():
    wrapped, rows = Wrapped(), torch.ones(1, 2)
    found = loss.inside(wrapped, lambda rows, *, times: sum(wrapped.module(rows) for _ in range(times)), rows, times=3)
    assert torch.equal(found, 3 * wrapped.module(rows))
    assert wrapped.forwards == 1
    with pytest.raises(ZeroDivisionError):
        loss.inside(wrapped, lambda _: 1 / 0, rows)
    assert torch.equal(wrapped(rows), wrapped.module(rows))


@pytest.mark.parametrize(
    ("gaps", "agrees"),
    [([], None), ([(0.0, 1e-5)], True), ([(0.0, 0.0), (0.0, 1.0)], False), ([(0.0, 0.0), (0.0, math.nan)], False)],
)
def test_all_processes_take_the_way_that_agrees_for_each(trainers, monkeypatch, gaps, agrees):
    trainer = trainers("qwen3")
    monkeypatch.setattr(trainer, "agrees", None)
    world = SimpleNamespace(size=2, is_main=False, any=bool, gathered=lambda _: gaps)
    monkeypatch.setattr(trainer, "world", world)
    inputs = a_batch(live=True) | {"num_items_in_batch": torch.tensor(16)}
    ours = trainer.live_rows(trainer.model, inputs)
    taken = trainer._way(trainer.model, ours, lambda way: GRPOTrainer._compute_loss(trainer, way, inputs))
    assert trainer.agrees is agrees
    assert (taken is trainer.model) != bool(agrees)
    # A process without a live row leaves its entropy to TRL where the others do.
    dead = trainer._way(trainer.model, ours, lambda _: None, has_gradient=False)
    assert (dead is trainer.model) == (agrees is False)


def test_equal_completions_that_cancel_out_decide_nothing(trainers, monkeypatch):
    trainer = trainers("qwen3")
    monkeypatch.setattr(trainer, "loss_path", "shared")
    monkeypatch.setattr(trainer, "beta", 0.0)
    monkeypatch.setattr(trainer, "agrees", None)
    trainer._metrics["train"].clear()
    inputs = a_batch(live=True) | {"num_items_in_batch": torch.tensor(16)}
    equal = inputs | {"completion_ids": inputs["completion_ids"][:1].expand(4, 4)}
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    ours, stock = (
        torch.autograd.grad(of._compute_loss(trainer, trainer.model, equal), trained)
        for of in (SharedLossTrainer, GRPOTrainer)
    )
    assert trainer.agrees is None
    assert all(map(torch.equal, ours, stock))  # TRL's own path, until it is known that ours is as good
    assert not {AGREES, GRADIENT_GAP} & trainer._metrics["train"].keys()
    trainer._compute_loss(trainer.model, inputs)
    assert trainer.agrees is True


@pytest.mark.long
def test_the_benchmark_compares_four_ways_to_one_gradient():
    found = grpo_loss.ways(*tiny("qwen3"), groups=3, live=1, size=2, prompt=5, completion=4)
    stock = found["stock"]()
    assert len(found) == 4
    for way in found.values():
        assert largest_gap(stock, way()) < 1e-5
    rows = grpo_loss.rows(grpo_loss.seconds(found, 1), "toy")
    assert [unit for _, _, unit, _ in rows] == ["s", "ratio", "ratio", "ratio"]


def test_a_gap_is_relative_and_no_number_hides_another():
    one, two = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -3.0])
    assert largest_gap([one, one], [one, two]) == 0.25
    assert largest_gap([one * 0], [one * 0]) == 0
    assert largest_gap([one * 0], [one]) == float("inf")
    assert largest_gap([one * 0], [one], 8.0) == 0.5
    for stock, ours in (
        ([one, one / 0 * 0], [one, one]),
        ([one, one], [one, one / 0 * 0]),
        ([one, one], [two / 0, one]),
    ):
        assert not largest_gap(stock, ours) < loss.TOLERANCE


def test_the_loss_of_trl_calls_a_model_as_it_did():
    scored = inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)
    assert "outputs = model(**model_inputs, labels=labels, fused_lm_head=True)" in scored
    for read in ("outputs.log_probs[:, -logits_to_keep:]", "outputs.entropy[:, -logits_to_keep:]"):
        assert read in scored
    assert inspect.getsource(GRPOTrainer._compute_loss).count("model,\n") == 1
    assert list(inspect.signature(GRPOTrainer._compute_loss).parameters) == ["self", "model", "inputs"]


def params_of(profile: str = "reward", **trainer: object):
    """The doll's params with few steps and other settings of a recipe's trainer."""
    profiles = json.loads(json.dumps(dolls.PARAMS["profiles"]), object_hook=dolls._integer_keys)
    profiles[profile]["trainer"]["embedded"] |= {"steps": 2, "checkpoint_every": 1} | trainer
    return dolls.params(profiles=profiles)


def train(version: str = "v3", profile: str = "reward", **trainer: object) -> dict[str, bytes]:
    """Train a version of the project in the working directory with these settings; the files of its adapter."""
    shutil.rmtree(paths.adapter(version), ignore_errors=True)
    with dolls.in_process():
        launch.stage(params_of(profile, **trainer), version)
    return dolls.files(paths.adapter(version))


@pytest.fixture
def project(tmp_path, monkeypatch):
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@functools.cache
def trained(**trainer: object) -> dict[str, bytes]:
    """The files of v3 of the doll's project, trained once with these settings."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        shutil.copytree(dolls.built(), folder, dirs_exist_ok=True)
        return train(**trainer)


def history_of(files: dict[str, bytes]) -> list[dict]:
    return [json.loads(line) for line in files["history.jsonl"].splitlines()]


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"version": "v1", "profile": "imitate"},
        pytest.param({"beta": 0.0, "micro_batch": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_training_on_the_shared_path_has_the_history_of_one_on_the_stock_path(settings):
    stock, shared = trained(**settings), trained(loss_path="shared", **settings)
    assert "loss_path.json" not in stock
    for before, after in zip(history_of(stock), history_of(shared), strict=True):
        added = {name: after.pop(name) for name in list(after) if name.startswith("loss_path/")}
        assert added[AGREES] == 1.0
        if "beta" in settings:  # without a reference model the entropy is that of the live rows
            del before["entropy"], after["entropy"]
        assert after == pytest.approx(before, rel=1e-3, abs=1e-5)
    record = json.loads(shared["loss_path.json"])
    assert (record["requested"], record["used"]) == ("shared", "shared")
    assert record["gradient_gap"] < loss.TOLERANCE
    manifest = Manifest.model_validate_json(shared["manifest.json"])
    assert "loss_path.json" in manifest.files
    assert manifest.spec["trainer"]["loss_path"] == "shared"


@pytest.mark.long
def test_a_training_on_the_shared_path_of_generation_writes_its_own_completions_again():
    with mock.patch.object(loss, "complete", wraps=loss.complete) as complete:
        shared = trained.__wrapped__(generation_path="shared")
    assert complete.call_count == len(history_of(shared))
    assert Manifest.model_validate_json(shared["manifest.json"]).spec["trainer"]["generation_path"] == "shared"
    stock, ours = history_of(trained())[0], history_of(shared)[0]
    prompts = [line["num_tokens"] - line["completions/mean_length"] * 8 for line in (stock, ours)]
    assert prompts[0] == prompts[1]
    assert trained.__wrapped__(generation_path="shared") == shared


@torch.inference_mode()
def test_completions_stand_behind_their_prompts_as_trl_reads_them():
    ids = torch.tensor([[0, 0, 7, 8], [9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    config = mock.Mock(pad_token_id=0)
    with mock.patch.object(loss, "complete", return_value=[[3], [4, 5]]) as complete:
        trainer = mock.Mock(tools=None)
        found = SharedLossTrainer._generated(
            trainer, "model", input_ids=ids, attention_mask=mask, generation_config=config
        )
    complete.assert_called_once_with("model", [[7, 8], [9, 10, 11, 12]], config, numbers=None)
    assert found.tolist() == [[0, 0, 7, 8, 3, 0], [9, 10, 11, 12, 4, 5]]


def test_episodes_go_on_from_their_turn_before_and_a_step_from_none(monkeypatch):
    trainer = trainer_of("qwen3")
    trainer.tools, trainer.generation_path = ["look up"], "shared"
    given, rows = [], iter("abc")
    monkeypatch.setattr(loss, "complete_turn", lambda *found, **_: given.append(found[3]) or ([[1]], next(rows)))

    def two_turns(self, prompts):
        for _ in range(2):
            self._generate_single_turn([[5, 6]], None, {}, 1)
        if prompts is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(GRPOTrainer, "_generate", two_turns)
    with pytest.raises(KeyboardInterrupt):
        trainer._generate(None)
    assert trainer._turn is None
    with pytest.raises(StopIteration):
        trainer._generate([])
    assert given == [None, "a", None, "c"]


def test_rows_go_on_in_the_order_of_the_turn_before():
    before = [(0, [1, 2]), (1, [1, 3]), (2, [1, 4])]
    assert continued_rows(before, [[1, 2, 9], [1, 4, 9]]) == [before[0], before[2]]
    assert continued_rows(before, []) == []
    for prompts in ([[1, 5, 9]], [[1, 4, 9], [1, 2, 9]], [[1, 2, 9], [1, 2, 9]]):
        with pytest.raises(TrainingError, match="does not continue the one before"):
            continued_rows(before, prompts)


def test_a_turn_has_the_room_that_the_longest_left_episode_has():
    trainer = trainer_of("qwen3")
    assert trainer.turn_budget([[5, 6]]) == trainer.max_completion_length
    trainer.tools, trainer.scale, trainer.max_completion_length = ["look up"], "full", 10
    assert trainer.turn_budget([[5, 6], [7, 8, 9]]) == 10
    assert trainer.turn_budget([[5, 6, 1, 1, 1, 1], [7, 8, 9, 1, 1, 1]]) == 7
    trainer.turn_tokens = 3
    assert trainer.turn_budget([[5, 6, 1, 1, 1, 1], [7, 8, 9, 1, 1, 1]]) == 3
    assert trainer.turn_budget([[5, 6, *[1] * 12]]) == 1


def test_no_more_tokens_are_written_at_once_than_fit_and_the_parts_are_joined(monkeypatch):
    trainer = trainer_of("qwen3")
    sizes = []

    def part(numbers, prompts, **_):
        sizes.append(len(prompts))
        return [[prompt[0]] for prompt in prompts], None

    monkeypatch.setattr(trainer, "_generate_part", part)
    prompts = [[number, 1] for number in range(5)]
    width = 2 + trainer.max_completion_length
    for fit, expected in ((2 * width, [2, 2, 1]), (width - 1, [1] * 5), (5 * width, [5])):
        trainer.most_tokens = fit
        assert trainer._in_parts(prompts) == ([[0], [1], [2], [3], [4]], None)
        assert sizes == expected
        sizes.clear()


@contextmanager
def falsified(times: float = 1.01) -> Iterator[None]:
    """The shared path's log-probabilities are wrong, by a hundredth."""
    right = scores.score

    def wrong(*arguments: object, **named: object) -> scores.Scores:
        found = right(*arguments, **named)
        return scores.Scores(found.log_probs * times, found.entropy)

    with mock.patch.object(scores, "score", wrong):
        yield


@functools.cache
def trained_on_a_wrong_path() -> tuple[dict[str, bytes], str]:
    """The files of v3 whose shared path is wrong, and what its training wrote to stderr."""
    with falsified(), redirect_stderr(io.StringIO()) as stderr:
        return trained.__wrapped__(loss_path="shared"), stderr.getvalue()


@pytest.mark.long
def test_a_path_that_differs_is_left_with_a_sentence_and_the_training_is_the_stock_one():
    stock = trained()
    shared, errors = trained_on_a_wrong_path()
    assert "the shared loss path differs from TRL's at step 1" in errors
    assert shared["adapter_model.safetensors"] == stock["adapter_model.safetensors"]
    assert json.loads(shared["loss_path.json"])["used"] == "stock"
    history = history_of(shared)
    assert history[0][GRADIENT_GAP] == pytest.approx(0.01, rel=0.3)
    assert [entry["loss"] for entry in history] == [entry["loss"] for entry in history_of(stock)]
    assert {entry[AGREES] for entry in history} == {0.0}


@pytest.mark.long
@pytest.mark.parametrize("is_right", [True, False])
def test_a_killed_run_goes_on_on_the_path_it_was_on(project, monkeypatch, is_right):
    untouched = trained(loss_path="shared") if is_right else trained_on_a_wrong_path()[0]
    log = callback.RunCallback.on_log

    def cut(self, args, state, control, **given):
        log(self, args, state, control, **given)
        if state.global_step == 2:
            raise KeyboardInterrupt

    with nullcontext() if is_right else falsified():
        with monkeypatch.context() as patch:
            patch.setattr(callback.RunCallback, "on_log", cut)
            with pytest.raises(KeyboardInterrupt):
                train(loss_path="shared")
        with dolls.in_process():
            launch.stage(params_of(loss_path="shared"), "v3")
    assert dolls.files(paths.adapter("v3")) == untouched


def test_a_mixture_keeps_the_loss_of_trl_which_balances_its_experts():
    torch.manual_seed(0)
    trainer = trainer_of("mixture")
    trainer.loss_path = "shared"
    ids = torch.arange(12).view(2, 6) + 3
    sides = {"prompt_ids": ids, "completion_ids": ids, "prompt_mask": ids > 0, "completion_mask": ids > 0}
    counted = {"advantages": torch.tensor([1.0, -1.0]), "num_items_in_batch": torch.tensor(12)}
    value = trainer._compute_loss(trainer.model, {name: mask.long() for name, mask in sides.items()} | counted)
    assert value.requires_grad
    assert trainer._metrics["train"]["aux_loss"][0] > 0
    assert trainer.loss_record()["used"] == "stock"
