"""What a change plan allows: each field of a version that leaves it is named, and nothing else is refused."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.config.change_plan import Allowed, outside
from clinrl.config.params import Params
from valid_params import VALID


def with_draft(*, profile: dict[str, Any] | None = None, **version: Any) -> Params:
    """The valid file with a version `draft`: v3 with another recipe, or with other fields."""
    mapping = copy.deepcopy(VALID)
    recipe = copy.deepcopy(mapping["profiles"]["grpo"])
    for path, value in (profile or {}).items():
        *parents, last = path.split("/")
        place: Any = recipe
        for key in parents:
            place = place.setdefault(int(key) if key.isdigit() else key, {})
        place[int(last) if last.isdigit() else last] = value
    mapping["profiles"]["draft"] = recipe
    mapping["versions"]["draft"] = {**mapping["versions"]["v3"], "profile": "draft", **version}
    mapping["datasets"]["esi-x2"] = {**mapping["datasets"]["esi-x1"], "seed": 2}
    return Params.model_validate(mapping)


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
def test_what_the_plan_names_is_inside(version):
    assert outside(Params.model_validate(VALID), version) is None


@pytest.mark.parametrize(
    "profile",
    [
        {},
        {"trainer/embedded/lr": 5.0e-3},
        {"reward/unreadable": -1.0},
        {"reward/modifiers": {"severe_pain_miss": -1.0}},
        {"stream/cap/1": 0.5},
    ],
)
def test_a_field_of_the_plan_may_change_within_its_range(profile):
    assert outside(with_draft(profile=profile), "draft") is None


@pytest.mark.parametrize(
    ("profile", "names"),
    [
        (
            {"trainer/embedded/lr": 5.1e-3},
            "profiles.draft.trainer.embedded.lr is 0.0051, and must be at least 0.0001 and",
        ),
        ({"trainer/embedded/lr": 9.9e-5}, "profiles.draft.trainer.embedded.lr is 9.9e-05"),
        ({"reward/modifiers": {"severe_pain_miss": -1.5}}, "profiles.draft.reward.modifiers.severe_pain_miss is -1.5"),
        ({"stream/cap/1": 0.4}, "profiles.draft.stream.cap.1 is 0.4, and must be one of 0.33, 0.5"),
        ({"trainer/embedded/steps": 41}, "profiles.draft.trainer.embedded.steps is 41, not 40 as in grpo, and is none"),
        ({"stream/repeat/2": 3}, "profiles.draft.stream.repeat.2 is 3, not None as in grpo"),
        ({"modes": ["think"]}, "profiles.draft.modes is ['think'], not ['think', 'direct'] as in grpo"),
    ],
)
def test_a_field_that_leaves_the_plan_is_named(profile, names):
    said = outside(with_draft(profile=profile), "draft")
    assert said is not None
    assert said.startswith(f"draft is outside plans.esi.changes: {names}")
    assert said.endswith("; change the plan, or the version")


def test_a_default_that_is_spelt_out_changes_no_reward_of_a_recipe_that_samples():
    mapping = copy.deepcopy(VALID)
    trainer = {"lr": 1.0e-3, "steps": 10, "batch": 4, "prompts": 8, "group": 2, "temperature": 1.0}
    trainer["max_completion"] = 96
    own = mapping["profiles"]["grpo"] | {"method": "rejection", "trainer": {"embedded": trainer, "full": trainer}}
    mapping["profiles"] |= {"plain": own, "spelt": {**own, "reward": {**own["reward"], "floor": -1.75}}}
    mapping["comparisons"] = {}
    mapping["versions"]["v2"]["profile"] = "plain"
    mapping["versions"]["v3"]["profile"] = "spelt"
    mapping["plans"]["esi"]["changes"] |= {"recipes": ["sft", "plain"], "fields": {"reward.floor": {"min": -2.0}}}
    assert outside(Params.model_validate(mapping), "v3") is None
    mapping["plans"]["esi"]["changes"]["fields"] = {}
    assert outside(Params.model_validate(mapping), "v3") is None


@pytest.mark.parametrize("first", ["trainer.embedded", "trainer.embedded.lr"])
def test_a_field_is_held_to_its_own_range_and_not_to_that_of_the_mapping_around_it(first):
    allowed = {"trainer.embedded": {"max": 200}, "trainer.embedded.lr": {"max": 4.0e-3}}
    params = with_draft(profile={"trainer/embedded/lr": 5.0e-3, "trainer/embedded/steps": 41})
    plan = params.plans["esi"]
    fields = {path: Allowed(**allowed[path]) for path in sorted(allowed, key=lambda path: path != first)}
    changed = plan.model_copy(update={"changes": plan.changes.model_copy(update={"fields": fields})})
    said = outside(params.model_copy(update={"plans": {"esi": changed}}), "draft")
    assert "profiles.draft.trainer.embedded.lr is 0.005, and must be at most 0.004; change" in said


def test_what_is_no_recipe_has_its_field_too():
    assert "versions.draft.exam is 'esi-x2', and releases are decided on esi-x1" in str(
        outside(with_draft(exam="esi-x2"), "draft")
    )
    assert "versions.draft.parent is 'esi-base', which leads to none of v1" in str(
        outside(with_draft(parent="esi-base"), "draft")
    )
    many = {**VALID["datasets"], "esi-d1": {**VALID["datasets"]["esi-d1"], "cases": 4001}}
    assert "versions.v3.data is 'esi-d1' with 4001 cases, and most_cases is 4000" in str(
        outside(Params.model_validate(VALID | {"datasets": many}), "v3")
    )


def test_once_releases_are_decided_on_a_fresh_exam_those_before_may_have_taken_another():
    params = with_draft(exam="esi-x2")
    plan = params.plans["esi"]
    moved = plan.model_copy(update={"changes": plan.changes.model_copy(update={"exam": "esi-x2"})})
    fresh = params.model_copy(update={"plans": {"esi": moved}})
    assert (fresh.versions[fresh.versions["draft"].parent].exam, outside(fresh, "draft")) == ("esi-x1", None)
    assert "versions.v3.exam is 'esi-x1', and releases are decided on esi-x2" in str(outside(fresh, "v3"))
    assert (fresh.model("draft").parent, fresh.model("draft").compared) == (fresh.model("v3").parent, None)
    assert fresh.model("v3").compared == fresh.model("v3").parent


def test_a_version_is_outside_if_one_that_it_starts_from_is():
    params = with_draft(profile={"trainer/embedded/steps": 41})
    child = params.versions["v3"].model_copy(update={"parent": "draft"})
    heir = params.model_copy(update={"versions": {**params.versions, "heir": child}})
    assert "heir is outside plans.esi.changes: profiles.draft.trainer.embedded.steps is 41" in outside(heir, "heir")
    many = params.datasets["esi-d1"].model_copy(update={"cases": 4001})
    params = Params.model_validate(VALID)
    heir = params.versions["v3"].model_copy(update={"parent": "v2"})
    versions = {**params.versions, "v3": heir}
    params = params.model_copy(update={"datasets": {**params.datasets, "esi-d1": many}, "versions": versions})
    assert "v3 is outside plans.esi.changes: versions.v2.data is 'esi-d1' with 4001 cases" in outside(params, "v3")


def test_imported_cases_are_counted_of_every_version_after_the_plan_s():
    imported = {"task": "esi", "task_version": VALID["datasets"]["esi-d1"]["task_version"], "use": "train"}
    versions = {name: {**VALID["versions"][name], "data": f"from-{name}"} for name in ("v1", "v2", "v3")}
    versions["v3"]["parent"] = "v2"
    sources = {spec["data"]: {**imported, "source": "records.csv"} for spec in versions.values()}
    params = Params.model_validate(VALID | {"imports": sources, "versions": versions, "comparisons": {}})
    cases = {"from-v2": 4001, "from-v3": 4000}  # v1 is the plan's own
    assert "versions.v2.data is 'from-v2' with 4001 cases" in outside(params, "v3", cases.__getitem__)
    assert outside(params, "v3", (cases | {"from-v2": 4000}).__getitem__) is None
    assert outside(params, "v3") is None  # before they are read
    drawn = Params.model_validate(VALID)
    assert "versions.v3.data is 'esi-d1' with 4001 cases" in str(outside(drawn, "v3", lambda data: 4001))


def test_without_a_plan_everything_is_inside():
    params = with_draft(profile={"trainer/embedded/steps": 41}).model_copy(update={"plans": {}})
    assert outside(params, "draft") is None


@given(low=st.floats(-1, 1), high=st.floats(-1, 1), value=st.floats(-2, 2))
def test_a_range_holds_what_lies_in_it(low, high, value):
    low, high = sorted((low, high))
    assert Allowed(min=low, max=high).holds(value) == (low <= value <= high)
    assert Allowed(max=high).holds(value) == (value <= high)
    assert not Allowed(min=low).holds(str(value))


def test_true_is_no_number():
    assert not Allowed(min=0.0).holds(True)
    assert not Allowed(one_of=[1.0]).holds(True)
    assert Allowed(one_of=[True]).holds(True)
