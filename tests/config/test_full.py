"""What a hub checkpoint decides at full: the shape of adapters, the numbers of recipes, and how exams are decoded."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.config import change_plan
from clinrl.config.params import Params, load_params, parse
from clinrl.config.recipes import GrpoTrainer
from clinrl.errors import ParamsError
from clinrl.evaluation.answers import decoding
from valid_params import VALID

ROOT = Path(__file__).resolve().parents[2]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPE = {"rank": 32, "alpha": 32, "targets": SEVEN}


def params(scale: str = "full", **block: Any) -> Params:
    """The valid parameters with more in the block of the checkpoint."""
    mapping = copy.deepcopy(VALID) | {"scale": scale}
    mapping["bases"]["esi"]["full"] |= block
    return parse({Path("params.yaml"): mapping})


def test_the_block_of_a_checkpoint_is_for_the_full_scale_alone() -> None:
    block = {
        "lora": SHAPE,
        "recipes": {"grpo": {"scheduler": "cosine", "warmup": 50}},
        "temperature": 0.2,
        "top_p": 0.95,
    }
    at_full, embedded, plain = params(**block), params("embedded", **block), params("embedded")
    assert at_full.lora("v2").rank == 32
    assert at_full.lora("v2").targets == tuple(sorted(SEVEN))
    assert (at_full.trainer("grpo").scheduler, at_full.trainer("grpo").warmup) == ("cosine", 50)
    assert at_full.trainer("grpo").steps == 500
    assert at_full.trainer("sft") == at_full.profiles["sft"].trainer["full"]
    assert (at_full.mode("think", "esi").temperature, at_full.mode("think", "esi").top_p) == (0.2, 0.95)
    assert decoding(at_full, "think", "esi") == {
        "thinking": True, "temperature": 0.2, "top_p": 0.95, "max_new_tokens": 1024
    }  # fmt: skip
    for version in embedded.versions:
        assert embedded.lora(version) == plain.lora(version)
    assert embedded.trainer("grpo") == plain.trainer("grpo")
    assert decoding(embedded, "think", "esi") == {"thinking": True, "temperature": 0.0, "max_new_tokens": 120}


def test_an_imitation_does_not_spend_its_time_on_checkpoints() -> None:
    """A step of it takes less time than a checkpoint of hundreds of megabytes."""
    at_full = load_params(ROOT / "params.yaml").model_copy(update={"scale": "full"})
    imitations = [name for name, recipe in at_full.profiles.items() if recipe.method in ("sft", "rejection")]
    assert {at_full.trainer(name).checkpoint_every for name in imitations} == {100}


def test_what_a_block_leaves_out_is_in_no_record() -> None:
    new = {"lora", "recipes", "prefill", "temperature", "top_p"}
    assert not new & params().bases["esi"].full.model_dump().keys()
    settings = params().trainer("grpo").model_dump().keys()
    assert (
        not {"scheduler", "warmup", "optimizer", "adam_beta2", "weight_decay", "max_grad_norm", "loss_type"} & settings
    )
    assert params().modes["think"].model_dump().keys() == {"thinking", "temperature", "max_new_tokens"}


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.floats(1e-8, 0.5),
        "steps": st.integers(40, 900),
        "scheduler": st.sampled_from(["linear", "cosine"]),
        "warmup": st.integers(0, 39),
        "optimizer": st.sampled_from(["adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"]),
        "adam_beta2": st.floats(0, 0.9999),
        "weight_decay": st.floats(0, 1),
        "max_grad_norm": st.floats(1e-3, 10),
        "loss_type": st.sampled_from(["dapo", "bnpo", "grpo", "dr_grpo"]),
    },
)
OWN = params().profiles["grpo"].trainer["full"]


@given(SETTINGS)
def test_settings_take_the_place_of_the_recipes_own_and_of_nothing_else(settings: dict[str, Any]) -> None:
    found = params(recipes={"grpo": settings}).trainer("grpo")
    assert dict(found) == dict(OWN) | settings
    assert GrpoTrainer.model_validate(found.model_dump()) == found
    defaults = {key: field.default for key, field in GrpoTrainer.model_fields.items() if field.exclude_if}
    assert found.model_dump().keys() == {key for key, value in found if key not in defaults or value != defaults[key]}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("scheduler", {"scheduler": "cosin"}, r"\.scheduler is 'cosin'; it must be 'linear' or 'cosine'"),
    ("warm-up", {"warmup": -1}, r"\.warmup is -1; it must be greater than or equal to 0"),
    ("warm-up of all steps", {"warmup": 500}, r"\.warmup is 500; it must be less than steps \(500\)"),
    ("warm-up as a share", {"warmup": 0.1}, r"\.warmup is 0\.1; it must be a valid integer"),
    ("optimizer", {"optimizer": "adam"}, r"\.optimizer is 'adam'; it must be 'adamw_torch_fused', "),
    ("beta 2", {"adam_beta2": 1.0}, r"\.adam_beta2 is 1\.0; it must be less than 1"),
    ("weight decay", {"weight_decay": -0.1}, r"\.weight_decay is -0\.1; it must be greater than or equal to 0"),
    ("gradient norm", {"max_grad_norm": 0.0}, r"\.max_grad_norm is 0\.0; it must be greater than 0"),
    ("loss type", {"loss_type": "ppo"}, r"\.loss_type is 'ppo'; it must be 'dapo', 'bnpo', 'grpo' or 'dr_grpo'"),
    ("unknown", {"warm_up": 5}, r"\.warm_up is not a key here; did you mean warmup\?"),
    ("micro-batch", {"prompts": 1, "micro_batch": 3}, r"\.micro_batch is 3; it must divide prompts x group \(8\)"),
]


@pytest.mark.parametrize(("settings", "says"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
@pytest.mark.parametrize("scale", ["embedded", "full"])
def test_a_wrong_setting_is_refused_at_either_scale(scale: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ParamsError, match=r"^params.yaml: bases\.esi\.full\.recipes\.grpo" + says):
        params(scale, recipes={"grpo": settings})


@pytest.mark.parametrize(("settings", "says"), [case[1:] for case in WRONG[:9]], ids=[case[0] for case in WRONG[:9]])
def test_a_recipe_itself_refuses_the_same(settings: dict[str, Any], says: str) -> None:
    mapping = copy.deepcopy(VALID)
    mapping["profiles"]["grpo"]["trainer"]["full"] |= settings
    with pytest.raises(ParamsError, match=r"profiles\.grpo\.trainer\.full" + says):
        parse({Path("params.yaml"): mapping})


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"lora": SHAPE | {"rank": 0}}, r"\.lora\.rank is 0; it must be greater than or equal to 1"),
        ({"lora": SHAPE | {"targets": []}}, r"\.lora\.targets is \[\]; it must be all-linear or a list"),
        ({"temperature": 2.5}, r"\.temperature is 2\.5; it must be less than or equal to 2"),
        ({"top_p": 0.0}, r"\.top_p is 0\.0; it must be greater than 0"),
        ({"prefill": "no"}, r"\.prefill is 'no'; it must be a valid boolean"),
        ({"recipes": {"grop": {}}}, r"\.recipes: 'grop' is not a recipe of esi; did you mean grpo\?"),
    ],
)
def test_a_wrong_block_of_a_checkpoint_is_refused(block: dict[str, Any], says: str) -> None:
    with pytest.raises(ParamsError, match=r"^params.yaml: bases\.esi\.full" + says):
        params(**block)


def test_a_recipe_of_another_task_is_refused() -> None:
    mapping = copy.deepcopy(VALID)
    mapping["datasets"]["a-x1"] = {
        "task": "audit",
        "task_version": 1,
        "use": "exam",
        "mix": "natural",
        "cases": 9,
        "seed": 1,
    }
    mapping["bases"]["audit"] = copy.deepcopy(mapping["bases"]["esi"]) | {"exam": "a-x1"}
    mapping["bases"]["audit"]["full"]["recipes"] = {"grpo": {"warmup": 1}}
    with pytest.raises(ParamsError, match=r"bases\.audit\.full\.recipes: 'grpo' is not a recipe of audit"):
        parse({Path("params.yaml"): mapping})


def test_a_change_plan_sees_the_numbers_that_are_trained_with() -> None:
    """The plan names two recipes; a third is like one of them but for a setting in the block of the checkpoint."""
    mapping = copy.deepcopy(VALID)
    mapping["profiles"]["hot"] = copy.deepcopy(mapping["profiles"]["grpo"])
    mapping["versions"]["v3"]["profile"] = "hot"
    del mapping["comparisons"]  # its rows are of one recipe
    assert change_plan.outside(parse({Path("params.yaml"): mapping}), "v3") is None
    mapping["bases"]["esi"]["full"]["recipes"] = {"hot": {"max_grad_norm": 9.0}}
    found = change_plan.outside(parse({Path("params.yaml"): mapping}), "v3")
    assert found is not None
    assert "profiles.hot.trainer.full.max_grad_norm is 9.0, not None as in grpo" in found
