"""Every refusal of params.yaml, by editing a valid file in one place."""

import copy
import json
import math
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from ruamel.yaml import YAML

import contest
from clinrl.config.base import check_known
from clinrl.config.files import read_files
from clinrl.config.params import HubBase, Params, SftTrainer, load_params, parse
from clinrl.config.recipes import GrpoProfile, GrpoTrainer
from clinrl.errors import ParamsError, did_you_mean
from clinrl.tasks.base import get_task
from valid_params import LORA, TRAINER, VALID

ROOT = Path(__file__).parents[2]

KEYS = [
    ec.derive_private_key(number, ec.SECP256R1())
    .public_key()
    .public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    .decode()
    for number in (1, 2)
]
"""Public keys of nobody."""

REMOVED = type("Removed", (), {"__repr__": lambda _: "removed"})()


def edited(path: str, value: object) -> dict[str, Any]:
    """The valid mapping with one place set, or removed. Parts of the path are joined by a slash."""
    mapping = copy.deepcopy(VALID)
    *parents, last = path.split("/")
    place: Any = mapping
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    if value is REMOVED:
        del place[last]
    else:
        place[last] = value
    return mapping


def refusal(mapping: object, folder: Path) -> str:
    """What `load_params` says of a mapping that it must refuse."""
    path = folder / "params.yaml"
    with path.open("w", encoding="utf-8") as stream:
        writer = YAML(typ="safe")  # in C
        writer.default_flow_style = False  # in flow style it leaves some keys unquoted that it cannot read again
        writer.dump(mapping, stream)
    with pytest.raises(ParamsError) as refused:
        load_params(path)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert sentence.startswith(f"{path}: ")
    return sentence.removeprefix(f"{path}: ")


def test_the_projects_own_file_loads():
    params = load_params(str(ROOT / "params.yaml"))
    for version in params.versions:
        assert params.lineage(version)[-1] == version
        assert params.trainer(params.versions[version].profile).steps >= 1


@pytest.mark.parametrize("scale", ["embedded", "full"])
@pytest.mark.parametrize(
    ("judge", "by"),
    [("second_judge", "the measure second_opinion of every exam"), ("judge", r"profiles\..*\.reward")],
)
def test_a_base_without_a_judge_that_is_asked_is_refused(scale, judge, by):
    contents = read_files(ROOT / "params.yaml")
    contents[ROOT / "params.yaml"]["scale"] = scale
    base = contents[ROOT / "params/imaging.yaml"]["bases"]["imaging"]
    base["embedded" if scale == "full" else "full"].pop("judges")  # at the other scale none is asked
    parse(contents)
    base[scale]["judges"].pop(judge)
    with pytest.raises(ParamsError, match=rf"bases\.imaging\.{scale}\.judges has no {judge}, which {by} asks"):
        parse(contents)


def test_lookups_follow_the_scale():
    embedded, full = Params.model_validate(VALID), Params.model_validate(edited("scale", "full"))
    assert (embedded.base("esi").hidden, full.base("esi").repo) == (128, "Qwen/Qwen3.5-9B")
    assert (embedded.budget("direct", "esi"), full.budget("direct", "esi")) == (100, 1024)
    assert (embedded.trainer("grpo").steps, full.trainer("grpo").steps) == (40, 500)
    assert isinstance(embedded.trainer("sft"), SftTrainer)
    assert isinstance(full.trainer("grpo"), GrpoTrainer)
    assert full.trainer("sft").micro_batch == 4
    assert isinstance(full.base("esi"), HubBase)


def test_lineage_is_root_first_without_the_base():
    assert Params.model_validate(VALID).lineage("v3") == ("v1", "v3")


def test_reward_is_the_tasks_own_object():
    reward = Params.model_validate(VALID).reward("v2")
    assert isinstance(reward, get_task("esi").Reward)
    assert reward.unreadable == -2.0


def test_a_reward_may_hold_lists_of_numbers(monkeypatch):
    rewards = get_task("esi").Reward
    monkeypatch.setattr(
        type(get_task("esi")), "Reward", type("R", (rewards,), {"__annotations__": {"costs": "tuple[float, ...]"}})
    )
    mapping = edited("profiles/grpo/reward/costs", [0.0, 1.0])
    assert Params.model_validate(mapping).reward("v2").costs == (0.0, 1.0)
    mapping["profiles"]["grpo"]["reward"]["costs"] = ["1"]
    with pytest.raises(ParamsError, match="costs"):
        Params.model_validate(mapping)


def test_labels_that_are_digits_as_text_need_quotes():
    with pytest.raises(ParamsError, match="cap: 0 is not a label; write it with quotes"):
        check_known("cap", 0, ("0", "1"), "a label")


def test_an_sft_version_has_no_reward():
    with pytest.raises(ParamsError, match=r"versions\.v1\.profile is 'sft', an sft recipe: it has no reward"):
        Params.model_validate(VALID).reward("v1")


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("base", ["imaging"]),
        ("trainer", ["grop"]),
        ("budget", ["thnk", "esi"]),
        ("lineage", ["v9"]),
        ("reward", ["v9"]),
    ],
)
def test_an_unknown_name_is_refused_by_every_lookup(method, names):
    with pytest.raises(ParamsError, match=f"'{names[0]}'.*allowed: "):
        getattr(Params.model_validate(VALID), method)(*names)


def test_a_base_may_have_its_own_budget():
    own = Params.model_validate(edited("bases/esi/embedded/max_new_tokens", 900))
    assert (own.budget("think", "esi"), own.budget("direct", "esi")) == (900, 900)
    assert "max_new_tokens" not in Params.model_validate(VALID).bases["esi"].embedded.model_dump()


def test_omit_stream_and_optional_fields_have_defaults():
    mapping = edited("profiles/sft/omit", REMOVED)
    del mapping["profiles"]["sft"]["stream"]
    params = Params.model_validate(mapping)
    profile = params.profiles["sft"]
    assert (profile.omit, profile.stream.repeat, profile.stream.cap) == ({}, {}, {})
    assert params.trainer("sft").micro_batch is None
    assert params.trainer("grpo").vllm is False


def test_a_rejection_recipe_samples_no_more_completions_than_a_training_may_have_rows():
    with pytest.raises(ValueError, match="is 100000; prompts x group is 10,000,000,000, and may be 10,000,000 at most"):
        Params.model_validate(edited("profiles/own", rejection(prompts=10**5, group=10**5)))


def test_a_rejection_recipe_has_a_reward_and_follows_any_parent():
    mapping = edited("profiles/own", rejection())
    mapping["versions"]["v4"] = {**VALID["versions"]["v3"], "parent": "v3", "profile": "own"}
    params = Params.model_validate(mapping)
    assert params.reward("v4") == params.reward("v3")
    assert (params.trainer("own").threshold, params.trainer("own").keep) == (None, 4)
    mapping["versions"]["v5"] = {**mapping["versions"]["v4"], "parent": "v4", "profile": "sft"}
    with pytest.raises(ParamsError, match="an sft recipe after the rejection version v4"):
        Params.model_validate(mapping)


def test_a_child_keeps_the_numbers_of_its_parent_s_base():
    mapping = edited("profiles/own", {**VALID["profiles"][VALID["versions"]["v3"]["profile"]], "qlora": True})
    mapping["versions"]["v4"] = {**VALID["versions"]["v3"], "parent": "v3", "profile": "own"}
    with pytest.raises(ParamsError, match=r"'own', whose qlora \(true\) is not that of its parent v3"):
        Params.model_validate(mapping)


def test_a_model_knows_the_placebo_of_its_recipe():
    params = Params.model_validate(
        edited("profiles/grpo", {**VALID["profiles"]["grpo"], "placebo": "format", "waiver": "why"})
    )
    assert {name: params.model(name).placebo for name in ("v1", "v2", "v3-full", "esi-base")} == {
        "v1": "", "v2": "format", "v3-full": "format", "esi-base": "",
    }  # fmt: skip


def test_what_older_recipes_do_not_have_is_not_recorded_of_them():
    profiles = Params.model_validate(VALID).profiles
    assert "labels_only" not in profiles["sft"].model_dump()
    assert "placebo" not in profiles["grpo"].model_dump()


def test_stream_labels_stay_integers():
    assert Params.model_validate(VALID).profiles["grpo"].stream.cap == {1: 0.33}


def test_lora_targets_may_be_named_in_any_order():
    mapping = copy.deepcopy(VALID)
    mapping["profiles"]["sft"]["lora"] = {**LORA, "targets": ["q_proj", "k_proj"]}
    mapping["profiles"]["grpo"]["lora"] = {**LORA, "targets": ["k_proj", "q_proj"]}
    assert Params.model_validate(mapping).profiles["grpo"].lora.targets == ("k_proj", "q_proj")


def test_no_versions_is_a_valid_start():
    mapping = edited("versions", {})
    for section in ("merges", "mining", "comparisons", "plans"):
        del mapping[section]
    assert Params.model_validate(mapping).versions == {}


def test_a_schedule_that_drafts_needs_a_change_plan(tmp_path):
    mapping = edited("schedules/esi/draft", True)
    assert Params.model_validate(mapping).schedules["esi"].draft
    del mapping["plans"]
    assert "schedules.esi.draft is true, but plans has no esi" in refusal(mapping, tmp_path)


def test_merges_mining_gates_and_schedules_may_be_absent():
    mapping = copy.deepcopy(VALID)
    for key in ("merges", "mining", "comparisons", "gates", "plans", "schedules"):
        del mapping[key]
    params = Params.model_validate(mapping)
    assert params.comparisons == {}
    assert (params.merges.folds, params.merges.blends, params.mining, params.gates, params.schedules) == ({},) * 5


def test_approvers_and_rebuilders_are_listed_with_their_keys():
    mapping = edited("gates/esi/rebuilt", {"least": 2})
    mapping |= {"approvers": {"Ada Lovelace": KEYS[0] + " ada@home"}, "rebuilders": {"b1": KEYS[0], "b2": KEYS[1]}}
    params = Params.model_validate(mapping)
    assert params.approvers["Ada Lovelace"].line == KEYS[0]
    assert [key.line for key in params.rebuilders.values()] == KEYS
    assert params.gates["esi"].rebuilt.least == 2


def test_a_comparison_knows_each_version_once():
    comparison = Params.model_validate(VALID).comparisons["recipes"]
    assert comparison.versions == ("v2", "v3", "v1")


def test_a_comparison_is_of_one_exam_and_its_rows_may_have_other_numbers_of_seeds(tmp_path):
    mapping = edited("versions/v4", {**VALID["versions"]["v3"], "seed": 48})
    mapping["comparisons"]["recipes"]["arms"]["other"] = ["v2", "v3", "v4"]
    mapping["comparisons"]["recipes"]["tests"] = [{"first": "plain", "second": "other", "says": "a seed"}]
    assert Params.model_validate(mapping).comparisons["recipes"].arms["other"] == ("v2", "v3", "v4")
    mapping["datasets"]["esi-x2"] = {**VALID["datasets"]["esi-x1"], "seed": 5}
    mapping["versions"]["v4"]["exam"] = "esi-x2"
    assert "'other': the exam of v4: 'esi-x2' is not the exam that the base takes" in refusal(mapping, tmp_path)


def test_a_primary_measure_names_its_rows_and_takes_the_parents_errors():
    mapping = edited(ARMS + "primary", PRIMARY | {"second": "other", "discordant": None})
    mapping["versions"] |= {
        f"v{seed}": {**VALID["versions"]["v3"], "parent": "v2", "seed": seed} for seed in range(4, 8)
    }
    mapping["comparisons"]["recipes"]["arms"] = {"plain": ["v4", "v5"], "other": ["v6", "v7"]}
    mapping["comparisons"]["recipes"]["tests"] = []
    comparison = Params.model_validate(mapping).comparisons["recipes"]  # of v2, the parent of all, errors are mined
    assert comparison.primary_rows == {"plain": ("v4", "v5"), "other": ("v6", "v7")}
    assert comparison.primary.alpha == 0.05
    mapping["comparisons"]["recipes"]["primary"]["measure"] = "dangerous"
    with pytest.raises(ParamsError, match=r"primary.discordant is missing; give it, or, for exact, let `mining` have"):
        Params.model_validate(mapping)


def test_cases_in_clusters_need_a_design_effect(tmp_path):
    mapping = contest.mapping()
    primary = {key: value for key, value in contest.PRIMARY.items() if key != "design_effect"}
    mapping["comparisons"]["recipes"] = contest.COMPARISON | {"primary": primary}
    assert "primary.design_effect is missing, but cases of imaging come in clusters" in refusal(mapping, tmp_path)


def test_a_folder_that_exists_is_a_base(tmp_path):
    base = Params.model_validate(edited("bases/esi/full/repo", str(tmp_path))).bases["esi"].full
    assert base.repo == str(tmp_path)


def test_params_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Params.model_validate(VALID).scale = "full"


def test_a_profile_dumps_and_parses_again():
    profile = Params.model_validate(VALID).profiles["grpo"]
    assert GrpoProfile.model_validate(profile.model_dump()) == profile


EMBEDDED, FULL = "bases/esi/embedded/", "bases/esi/full/"
SFT, GRPO = "profiles/sft/", "profiles/grpo/"
PHASE = {"share": 1.0, "slice": "level", "values": ["1"]}
ARMS = "comparisons/recipes/"
PRIMARY: dict[str, object] = {
    "measure": "exact", "modes": ["think"], "first": "plain", "second": "base", "effect": 2.0, "discordant": 0.1,
    "seed_sd": 1.0,
}  # fmt: skip

PARTITION = {"parent": "bas", "random": "plain", "majority": "plain", "labels": "plain"}


def rejection(*, stream: object = None, reward: object = None, **changes: object) -> dict[str, Any]:
    """The recipe `grpo` as one of rejection sampling, with settings of its trainer changed."""
    trainer = {key: TRAINER[key] for key in ("lr", "steps", "group", "temperature", "max_completion")}
    trainer |= {"batch": 4, "prompts": 40} | changes
    recipe = {**VALID["profiles"]["grpo"], "method": "rejection", "trainer": {"embedded": trainer, "full": trainer}}
    return recipe | ({"stream": stream} if stream else {}) | ({"reward": reward} if reward else {})


PLAN = "plans/esi/"

REFUSALS: list[tuple[str, object, tuple[str, ...]]] = [
    # structure
    ("scale", "laptop", ("scale is 'laptop'", "'embedded' or 'full'")),
    ("scale", REMOVED, ("scale is missing",)),
    ("versions", None, ("versions is None", "mapping")),
    ("datasets", [1], ("datasets is [1]", "mapping")),
    ("profiles/sft", "x", ("profiles.sft is 'x'", "mapping")),
    ("bases/esi", 3, ("bases.esi is 3", "mapping")),
    (
        "verions",
        {},
        ("verions is not a key here", "did you mean versions?", "allowed: approvers, bases, comparisons, datasets"),
    ),
    ("datasets/esi-d1/sede", 7, ("datasets.esi-d1.sede is not a key here", "did you mean seed?")),
    ("datasets/esi-d1/seed", REMOVED, ("datasets.esi-d1.seed is missing", "0 to 2^32 - 1")),
    # merges
    (
        "merges/folds/v3-full/version",
        "v9",
        ("merges.folds.v3-full.version: 'v9' is not a version of esi", "v1, v2, v3"),
    ),
    ("merges/folds/v3-full/task", "ekg", ("merges.folds.v3-full.task: 'ekg'", "allowed: esi")),
    ("merges/folds/v3-full/exam", "esi-m1", ("merges.folds.v3-full.exam: 'esi-m1'", "allowed: esi-x1")),
    ("merges/folds/v3", {"task": "esi", "version": "v3", "exam": "esi-x1"}, ("merges.folds.v3 is a name in use",)),
    ("merges/folds/v2-v3", {"task": "esi", "version": "v3", "exam": "esi-x1"}, ("v2-v3 names a fold and a blend",)),
    ("merges/blends/v2-v3/second", "v2", ("merges.blends.v2-v3.second is 'v2', as is first",)),
    ("merges/blends/v2-v3/method", "slerp", ("merges.blends.v2-v3.method is 'slerp'", "'cat', 'svd'")),
    ("merges/blends/v2-v3/method", "cat", ("merges.blends.v2-v3.density is 0.5, but cat drops nothing",)),
    ("merges/blends/v2-v3/density", 0.0, ("merges.blends.v2-v3.density is 0.0",)),
    ("mining/v9", {"task": "esi", "data": "esi-m1"}, ("mining: 'v9' is not a version", "v1, v2, v3")),
    ("mining/v2/data", "esi-x1", ("mining.v2.data: 'esi-x1' is not mine data of esi but exam data of esi", "esi-m1")),
    ("mining/v2/task", "ekg", ("mining.v2.task: 'ekg' is not the task of v2",)),
    ("resits", {"v9": {"task": "esi", "data": "esi-x2"}}, ("resits: 'v9' is not a version or a merge",)),
    ("resits", {"v2": {"task": "esi", "data": "esi-m1"}}, ("resits.v2.data: 'esi-m1' is not exam data of esi",)),
    ("resits", {"v2": {"task": "esi", "data": "esi-x1"}}, ("resits.v2.data is esi-x1, which v2 takes as its exam",)),
    ("merges/blends/v2-v3/weights", [1.0], ("merges.blends.v2-v3.weights",)),
    # comparisons
    (ARMS + "task", "ekg", ("comparisons.recipes.task: 'ekg'", "allowed: esi")),
    (ARMS + "columns", [], ("comparisons.recipes.columns is empty",)),
    (ARMS + "columns", ["exakt"], ("comparisons.recipes.columns: 'exakt' is not a metric", "did you mean exact?")),
    (ARMS + "quality", "recall", ("comparisons.recipes.quality: 'recall' is not a quality of esi",)),
    (ARMS + "parts", "levels", ("comparisons.recipes.parts: 'levels' is not a slice of esi", "did you mean level?")),
    (ARMS + "arms", {}, ("comparisons.recipes.arms",)),
    (ARMS + "arms/plain", [], ("comparisons.recipes.arms.plain is empty",)),
    (ARMS + "arms/plain", ["v9"], ("comparisons.recipes, 'plain': 'v9' is not a version of esi", "v1, v2, v3")),
    (ARMS + "arms/plain", ["v2", "v2"], ("each may be named once",)),
    (ARMS + "arms/plain", ["v1", "v2"], ("'plain': v1 and v2, or their parents, differ in profile or data",)),
    ("versions/v3/seed", 46, ("'plain': v2 and v3 have one parent and one seed, so they are one model",)),
    ("versions/v3/parent", "v2", ("'plain': v2 and v3, or their parents, differ in profile or data",)),
    (ARMS + "arms/a | b", ["v2"], ("comparisons.recipes.arms.a | b is 'a | b'", "printable")),
    (ARMS + "arms/base", ["v2"], ("'base' is the name of another row",)),
    *(
        (f"{ARMS}arms/{row}", ["v2"], (f"comparisons.recipes: '{row}' is the name of another row",))
        for row in ("random", "prior-matched", "bag of words", "always 5")  # of policies that every comparison shows
    ),
    (ARMS + "controls", {"labels": ["v1"]}, ("comparisons.recipes.controls is not a key here",)),
    (ARMS + "tests/0/first", "plan", ("comparisons.recipes.tests.0.first: 'plan' is not a row", "did you mean plain?")),
    (ARMS + "tests/0/second", "plain", ("comparisons.recipes.tests.0.second is 'plain', as is first",)),
    (
        ARMS + "tests",
        [{"first": "plain", "second": "labels", "says": "a"}, {"first": "labels", "second": "plain", "says": "b"}],
        ("comparisons.recipes.tests names a pair of rows twice",),
    ),
    (
        ARMS + "partition",
        {"parent": "labels", "random": "plain", "majority": "base", "labels": "labels"},
        ("comparisons.recipes.partition has one row in two places",),
    ),
    (ARMS + "tests/0/says", "", ("comparisons.recipes.tests.0.says is ''",)),
    (ARMS + "tests/0/third", "x", ("comparisons.recipes.tests.0.third is not a key here",)),
    (ARMS + "partition", PARTITION, ("comparisons.recipes.partition.parent: 'bas' is not a row", "did you mean base?")),
    (ARMS + "published", {"plan": {}}, ("comparisons.recipes.published: 'plan' is not an arm",)),
    (ARMS + "published", {"plain": {"kapa": 1.0}}, ("comparisons.recipes.published.plain: 'kapa'", "kappa")),
    (ARMS + "published_parts", {"known": {"plan": {}}}, ("comparisons.recipes.published: 'plan'",)),
    (ARMS + "primary", PRIMARY | {"measure": "kappa"}, ("primary.measure: 'kappa' is not a share among the metrics",)),
    (ARMS + "primary", PRIMARY | {"modes": ["thnk"]}, ("primary.modes: 'thnk' is not a mode", "did you mean think?")),
    (ARMS + "primary", PRIMARY | {"first": "plan"}, ("primary.first: 'plan' is not an arm", "did you mean plain?")),
    (ARMS + "primary", PRIMARY | {"second": "plain"}, ("primary.second is 'plain', as is first",)),
    (ARMS + "primary", PRIMARY | {"second": "labels"}, ("primary names 'labels', which has one version; two or more",)),
    (ARMS + "primary", PRIMARY | {"effect": 0.0}, ("comparisons.recipes.primary.effect is 0.0",)),
    (ARMS + "primary", PRIMARY | {"efect": 1.0}, ("primary.efect is not a key here", "did you mean effect?")),
    (ARMS + "primary", PRIMARY | {"discordant": 0.01}, ("primary.discordant is 0.01, too few for an effect of 2 ",)),
    (ARMS + "primary", PRIMARY | {"discordant": None}, ("primary.discordant is missing; give it",)),
    (ARMS + "primary", PRIMARY | {"alpha": 0.5}, ("comparisons.recipes.primary.alpha is 0.5",)),
    ("versions/comparisons", VALID["versions"]["v1"], ("versions.comparisons is a reserved name",)),
    ("versions/retraining", VALID["versions"]["v1"], ("versions.retraining is a reserved name",)),
    # gates and schedules
    ("gates/ekg", VALID["gates"]["esi"], ("gates: 'ekg' is not a task with a base", "allowed: esi")),
    ("gates/esi/limits/exakt", {"may_fall": 0.0}, ("gates.esi.limits: 'exakt'", "did you mean exact?")),
    ("gates/esi/limits/critical_under", REMOVED, ("gates.esi.limits has no limit on `critical_under`",)),
    *(
        ("gates/esi/limits/critical_under", limit, ("gates.esi.limits.critical_under.max is", "below 1"))
        for limit in ({"max": {"embedded": 5, "full": 5}}, {"min": {"embedded": 0.0, "full": 0.0}}, {"may_fall": 1.0})
    ),
    *(
        (f"gates/esi/limits/{metric}", {"may_fall": 0.0, "paired": True}, (f"{metric}.paired is true, but", "no share"))
        for metric in ("kappa", "mode_agreement")
    ),
    ("gates/esi/limits/exact", {}, ("gates.esi.limits.exact limits nothing",)),
    (
        "gates/esi/limits/critical_under/min",
        {"embedded": 0.02, "full": 0.1},
        ("gates.esi.limits.critical_under.min.full is 0.1, above max (0)",),
    ),
    ("gates/esi/limits/exact/may_fall", REMOVED, ("gates.esi.limits.exact",)),
    ("gates/esi/limits/exact/may_fall", -0.1, ("gates.esi.limits.exact.may_fall is -0.1",)),
    (
        "gates/esi/limits/critical_under/max",
        {"embedded": 0.1},
        ("gates.esi.limits.critical_under.max.full is missing",),
    ),
    ("gates/esi/rebuilt", {"least": 1}, ("gates.esi.rebuilt.least is 1, but rebuilders lists 0",)),
    ("gates/esi/rebuilt", {"least": 0}, ("gates.esi.rebuilt.least is 0",)),
    ("approvers", {"A": KEYS[0]}, ("approvers.A", "2 characters or more")),
    ("approvers", {"this checkout": KEYS[0]}, ("approvers.this checkout", "is not 'this checkout'")),
    ("approvers", {"Ada\n": KEYS[0]}, ("approvers", "printable characters")),
    ("approvers", {"Ada": "ssh-ed25519 AAAA"}, ("approvers.Ada is 'ssh-ed25519 AAAA'; this is no public key",)),
    ("approvers", {"Ada": KEYS[0][:-9]}, ("approvers.Ada is 'ecdsa-sha2-nistp256 AAAA", "holds no P-256 key")),
    ("approvers", {"Ada": None}, ("approvers.Ada is None; it must be a public key",)),
    ("approvers", {"Ada": KEYS[0], "Alan": KEYS[0] + " home"}, ("approvers.Alan has the key of Ada too",)),
    ("rebuilders", [KEYS[0]], ("rebuilders is [", "must be a mapping")),
    ("gates/esi/limits/kappa", {"min": {"embedded": 0.5, "full": 0.5}, "paired": True}, ("there is no change",)),
    ("schedules/esi/cron", "at noon", ("schedules.esi.cron is 'at noon'", "five fields")),
    ("schedules/esi/cron", "61 3 * * 1", ("schedules.esi.cron is '61 3 * * 1': bad minute",)),
    ("schedules/esi/cron", "0 3 30 2 *", ("schedules.esi.cron is '0 3 30 2 *': bad day-of-month",)),
    ("schedules/esi/timezone", "Mars/Olympus", ("schedules.esi.timezone is 'Mars/Olympus'", "'UTC'")),
    ("schedules/esi/timezone", "Etc", ("schedules.esi.timezone is 'Etc'", "'UTC'")),
    ("schedules/esi/answer_within_s", 0, ("schedules.esi.answer_within_s is 0",)),
    ("gates", {}, ("schedules: 'esi' is not a task with a gate",)),
    # change plans
    ("plans/ekg", VALID["plans"]["esi"], ("plans: 'ekg' is not a task with a gate", "allowed: esi")),
    (PLAN + "impcat", "", ("plans.esi.impcat is not a key here", "did you mean impact?")),
    (PLAN + "impact", "none", ("plans.esi.impact is 'none'", "at least 20 characters")),
    (
        PLAN + "changes/ancestors",
        ["v9"],
        ("plans.esi.changes.ancestors: 'v9' is not a version or a blend of esi, or its base",),
    ),
    (PLAN + "changes/exam", "esi-d1", ("plans.esi.changes.exam: 'esi-d1' is not exam data of esi", "esi-x1")),
    (PLAN + "changes/recipes", ["grop"], ("plans.esi.changes.recipes: 'grop' is not a profile", "did you mean grpo?")),
    (PLAN + "changes/recipes", [], ("plans.esi.changes.recipes is empty",)),
    (
        PLAN + "changes/fields/trainer.embedded.rl",
        {"max": 1.0},
        ("'trainer.embedded.rl' is not a field", "trainer.embedded.lr"),
    ),
    (PLAN + "changes/fields/seed", {"max": 1.0}, ("plans.esi.changes.fields: 'seed' is not a field of one",)),
    (PLAN + "changes/fields/lora.rank", {}, ("plans.esi.changes.fields.lora.rank must have either min or max, or",)),
    (PLAN + "changes/fields/lora.rank", {"max": 1.0, "one_of": [1]}, ("must have either min or max, or one_of",)),
    (PLAN + "changes/fields/lora.rank", {"min": 2.0, "max": 1.0}, ("lora.rank.min is 2, above max (1)",)),
    (PLAN + "protocol/superior", "kappa", ("plans.esi.protocol.superior: 'kappa' is not a share of esi",)),
    (PLAN + "protocol/not_worse", {"exact": 0.01}, ("plans.esi.protocol.not_worse: 'exact' is not another share",)),
    (PLAN + "protocol/not_worse", {"dangerous": 0.0}, ("plans.esi.protocol.not_worse.dangerous is 0.0",)),
    (PLAN + "protocol/screen", 0.0, ("plans.esi.protocol.screen is 0.0",)),
    (PLAN + "budget/alpha", 0.3, ("plans.esi.budget.alpha is 0.3", "less than or equal to 0.2")),
    (PLAN + "budget/spend", 1.0, ("plans.esi.budget.spend is 1.0",)),
    (PLAN + "budget/looks", 0, ("plans.esi.budget.looks is 0",)),
    # names
    ("datasets/Esi_D1", VALID["datasets"]["esi-d1"], ("datasets.Esi_D1 is not a name", "must match")),
    ("modes/summary", VALID["modes"]["think"], ("modes.summary is a reserved name",)),
    ("modes/../x", VALID["modes"]["think"], ("not a name",)),
    ("versions/v", VALID["versions"]["v1"], ("versions.v is not a name",)),
    ("versions/" + "v" * 42, VALID["versions"]["v1"], ("is not a name",)),
    ("versions/my-base", VALID["versions"]["v1"], ("versions.my-base is a reserved name",)),
    ("versions/data", VALID["versions"]["v1"], ("versions.data is a reserved name",)),
    ("versions/retrain-esi", VALID["versions"]["v1"], ("versions.retrain-esi is a reserved name", "schedules.esi")),
    (
        "comparisons/retrain-esi",
        next(iter(VALID["comparisons"].values())),
        ("comparisons.retrain-esi is a reserved name", "built/retrain-esi"),
    ),
    # bases
    ("bases/esl", VALID["bases"]["esi"], ("'esl'", "not a task", "did you mean esi?")),
    ("bases/esi/exam", "esi-x9", ("bases.esi.exam: 'esi-x9' is not ", "did you mean esi-x1?")),
    ("bases/esi/exam", "esi-d1", ("bases.esi.exam: 'esi-d1' is not ", "not exam data of esi but train data of esi")),
    ("bases/esi", {}, ("bases.esi.exam is missing",)),
    (EMBEDDED + "hidden", 130, ("bases.esi.embedded.heads is 4", "divide hidden (130)")),
    (EMBEDDED + "hidden", 132, ("bases.esi.embedded.heads is 4", "even widths")),
    (EMBEDDED + "kv_heads", 3, ("bases.esi.embedded.kv_heads is 3", "divide heads (4)")),
    (EMBEDDED + "vocab", 100, ("bases.esi.embedded.vocab is 100", "greater than or equal to 300")),
    (EMBEDDED + "forget", 1.5, ("bases.esi.embedded.forget is 1.5", "less than or equal to 1")),
    (EMBEDDED + "lr", 0, ("bases.esi.embedded.lr is 0", "greater than 0")),
    (EMBEDDED + "template", "../x", ("bases.esi.embedded.template is '../x'", "must match")),
    (EMBEDDED + "layers", 0, ("bases.esi.embedded.layers is 0",)),
    (FULL + "repo", "no-such-folder", ("bases.esi.full.repo is 'no-such-folder'", "owner/name", "absolute path of")),
    (FULL + "repo", "./models/qwen", ("bases.esi.full.repo is './models/qwen'", "absolute path of")),
    (FULL + "revision", 1234567, ("bases.esi.full.revision is 1234567", "valid string")),
    (FULL + "revision", "--x", ("bases.esi.full.revision is '--x'", "must match")),
    (FULL + "quantize", "int8", ("bases.esi.full.quantize is 'int8'", "'nf4' or 'none'")),
    # modes
    ("modes/think/thinking", 1, ("modes.think.thinking is 1", "valid boolean")),
    ("modes/think/thinking", "yes", ("modes.think.thinking is 'yes'", "valid boolean")),
    ("modes/think/temperature", -0.1, ("modes.think.temperature is -0.1", "greater than or equal to 0")),
    ("modes/think/temperature", math.nan, ("modes.think.temperature is nan", "finite number")),
    ("modes/think/max_new_tokens", 120, ("modes.think.max_new_tokens is 120", "mapping")),
    ("modes/think/max_new_tokens/full", REMOVED, ("modes.think.max_new_tokens.full is missing",)),
    ("modes/think/max_new_tokens/ful", 3, ("modes.think.max_new_tokens.ful is not a key", "did you mean full?")),
    ("modes/think/max_new_tokens/full", 0, ("modes.think.max_new_tokens.full is 0", "greater than or equal to 1")),
    # data sets
    ("datasets/esi-d1/task", "esl", ("datasets.esi-d1.task: 'esl' is not ", "did you mean esi?")),
    ("datasets/esi-d1/task_version", 0, ("datasets.esi-d1.task_version is 0",)),
    ("datasets/esi-d1/task_version", "1", ("datasets.esi-d1.task_version is '1'", "valid integer")),
    ("datasets/esi-d1/use", "base", ("datasets.esi-d1.use is 'base'", "'train', 'mine' or 'exam'")),
    (
        "datasets/esi-d1/mix",
        "natrual",
        ("datasets.esi-d1.mix: 'natrual' is not ", "did you mean natural?", "reporting"),
    ),
    ("datasets/esi-d1/cases", 0, ("datasets.esi-d1.cases is 0",)),
    ("datasets/esi-d1/cases", True, ("datasets.esi-d1.cases is True", "valid integer")),
    ("datasets/esi-d1/seed", -1, ("datasets.esi-d1.seed is -1",)),
    ("datasets/esi-d1/seed", 2**32, ("datasets.esi-d1.seed is 4294967296", "less than 4294967296")),
    # profiles
    (SFT + "method", "ppo", ("profiles.sft.method is 'ppo'", "allowed: grpo, rejection, sft")),
    (SFT + "method", "stf", ("profiles.sft.method is 'stf'", "did you mean sft?")),
    (SFT + "method", REMOVED, ("profiles.sft.method is missing", "allowed: grpo, rejection, sft")),
    (SFT + "modes", [], ("profiles.sft.modes is empty", "at least one")),
    (SFT + "modes", ["thnk"], ("profiles.sft.modes: 'thnk' is not ", "did you mean think?", "direct")),
    (SFT + "modes", "think", ("profiles.sft.modes is 'think'", "must be a list")),
    (SFT + "reward", {}, ("profiles.sft.reward is not a key here", "omit")),
    (GRPO + "omit", {}, ("profiles.grpo.omit is not a key here", "reward")),
    (GRPO + "reward", REMOVED, ("profiles.grpo.reward is missing",)),
    (GRPO + "reward/unreadible", -1.0, ("profiles.grpo.reward.unreadible is not a key", "did you mean unreadable?")),
    (GRPO + "reward/kind", "kind", ("profiles.grpo.reward.kind is 'kind'", "'asymmetric'")),
    (GRPO + "reward/unreadable", "-1", ("profiles.grpo.reward.unreadable is '-1'", "valid number")),
    (
        GRPO + "reward/modifiers",
        {"severe_pain_mis": -0.5},
        ("profiles.grpo.reward.modifiers.severe_pain_mis is not a key", "did you mean severe_pain_miss?"),
    ),
    (SFT + "omit/severe_pains", 0.5, ("profiles.sft.omit: 'severe_pains' is not ", "did you mean severe_pain?")),
    (SFT + "omit/severe_pain", 1.1, ("profiles.sft.omit.severe_pain is 1.1", "less than or equal to 1")),
    (SFT + "lora/rank", 0, ("profiles.sft.lora.rank is 0",)),
    (SFT + "lora/alpha", 0, ("profiles.sft.lora.alpha is 0", "greater than 0")),
    (SFT + "lora/targets", "all_linear", ("profiles.sft.lora.targets is 'all_linear'", "all-linear or a list")),
    (SFT + "lora/targets", [], ("profiles.sft.lora.targets is []", "all-linear or a list")),
    (SFT + "lora/targets", ["a", "a"], ("profiles.sft.lora.targets is ['a', 'a']", "distinct")),
    (GRPO + "stream/repeat", {6: 2}, ("profiles.grpo.stream.repeat: 6 is not ", "a label of esi", "1, 2, 3, 4, 5")),
    (GRPO + "stream/repeat", {"1": 2}, ("profiles.grpo.stream.repeat: '1' is not ", "a label of esi")),
    (GRPO + "stream/repeat", {1: 10**6}, ("profiles.grpo.stream.repeat.1 is 1000000", "less than or equal to 1000")),
    (GRPO + "stream/repeat", {1: 0}, ("profiles.grpo.stream.repeat.1 is 0", "greater than or equal to 1")),
    (GRPO + "stream/repeat", {1: 1.5}, ("profiles.grpo.stream.repeat.1 is 1.5", "valid integer")),
    (GRPO + "stream/cap", {6: 0.5}, ("profiles.grpo.stream.cap: 6 is not ", "a label of esi")),
    (GRPO + "stream/cap", {"2": 0.5}, ("profiles.grpo.stream.cap: '2' is not ", "write it without quotes")),
    (GRPO + "stream/cap", {1: 0.0}, ("profiles.grpo.stream.cap.1 is 0.0", "greater than 0")),
    (GRPO + "stream/cap", {1: 1.1}, ("profiles.grpo.stream.cap.1 is 1.1", "less than or equal to 1")),
    (GRPO + "stream/cap", dict.fromkeys(range(1, 6), 0.1), ("profiles.grpo.stream.cap", "sums to 0.5")),
    (GRPO + "stream/phases", [{**PHASE, "share": 0.5}], ("profiles.grpo.stream.phases have shares that sum to 0.5",)),
    (
        GRPO + "stream/phases",
        [{**PHASE, "share": 0.0}],
        ("profiles.grpo.stream.phases.0.share is 0.0", "greater than 0"),
    ),
    (GRPO + "stream/phases", [{**PHASE, "values": []}], ("profiles.grpo.stream.phases.0.values is empty",)),
    (GRPO + "stream/phases", [{**PHASE, "of": 1}], ("profiles.grpo.stream.phases.0.of is not a key here", "share")),
    (
        GRPO + "stream/phases",
        [{**PHASE, "slice": "levle"}],
        ("profiles.grpo.stream.phases.0.slice: 'levle' is not a slice of esi", "did you mean level?"),
    ),
    (
        GRPO + "stream/phases",
        [{**PHASE, "share": 0.5}, {**PHASE, "share": 0.5, "slice": "rule"}],
        ("profiles.grpo.stream.phases name the slices level, rule; all phases must name one",),
    ),
    (
        GRPO + "stream/phases",
        [{**PHASE, "share": 0.99}, {**PHASE, "share": 0.01}],
        ("profiles.grpo.stream.phases.1.share is 0.01, less than half a step of the 40 at embedded scale",),
    ),
    # trainers
    (SFT + "trainer/full", REMOVED, ("profiles.sft.trainer.full is missing",)),
    (SFT + "trainer/embedded/group", 8, ("profiles.sft.trainer.embedded.group is not a key here", "batch")),
    (SFT + "trainer/embedded/stpes", 8, ("profiles.sft.trainer.embedded.stpes is not a key", "did you mean steps?")),
    (SFT + "trainer/embedded/micro_batch", 5, ("profiles.sft.trainer.embedded.micro_batch is 5", "batch (32)")),
    (SFT + "trainer/embedded/checkpoint_every", 0, ("profiles.sft.trainer.embedded.checkpoint_every is 0",)),
    (SFT + "trainer/embedded/lr", 1.0, ("profiles.sft.trainer.embedded.lr is 1.0", "less than 1")),
    (SFT + "trainer/embedded/lr", math.inf, ("profiles.sft.trainer.embedded.lr is inf",)),
    (GRPO + "trainer/embedded/lr", 0.0, ("profiles.grpo.trainer.embedded.lr is 0.0", "greater than 0")),
    *(
        (f"{recipe}trainer/embedded/optimizer", "adamw_8bit", ("trainer.embedded.optimizer is 'adamw_8bit', which",))
        for recipe in (SFT, GRPO)
    ),
    (GRPO + "trainer/embedded/steps", 0, ("profiles.grpo.trainer.embedded.steps is 0",)),
    *(
        (f"{block}{key}", 10**12, (f"{key} is 1000000000000; it must be less than or equal to 1000000",))
        for block, keys in (
            (EMBEDDED, ("steps", "batch", "cases")),
            (SFT + "trainer/embedded/", ("steps", "batch")),
            (GRPO + "trainer/embedded/", ("steps", "prompts")),
            ("datasets/esi-d1/", ("cases",)),
        )
        for key in keys
    ),
    (EMBEDDED + "batch", 10**6, ("bases.esi.embedded.steps is ", "; steps x batch is ", "may be 10,000,000 at most")),
    (SFT + "trainer/embedded/batch", 10**6, ("profiles.sft.trainer.embedded.steps is ", "; steps x batch is ")),
    (GRPO + "trainer/full/group", 10**12, ("profiles.grpo.trainer.full.steps is ", "; steps x prompts x group is ")),
    (GRPO + "trainer/embedded/prompts", 0, ("profiles.grpo.trainer.embedded.prompts is 0",)),
    (GRPO + "trainer/embedded/group", 1, ("profiles.grpo.trainer.embedded.group is 1", "greater than or equal to 2")),
    (GRPO + "trainer/embedded/temperature", 0.0, ("profiles.grpo.trainer.embedded.temperature is 0.0",)),
    (GRPO + "trainer/embedded/beta", -0.1, ("profiles.grpo.trainer.embedded.beta is -0.1",)),
    (GRPO + "trainer/embedded/max_completion", 7, ("profiles.grpo.trainer.embedded.max_completion is 7",)),
    (GRPO + "trainer/full/micro_batch", 5, ("profiles.grpo.trainer.full.micro_batch is 5", "prompts x group (32)")),
    (
        GRPO + "trainer/full/vllm",
        True,
        ("profiles.grpo.trainer.full.vllm is true", "but machine.yaml sets the sampler"),
    ),
    (GRPO + "trainer/full/vllm", "true", ("profiles.grpo.trainer.full.vllm is 'true'", "valid boolean")),
    # versions
    ("versions/v1/task", "audit", ("versions.v1.task: 'audit' is not ", "a task with a base", "allowed: esi")),
    (
        "versions/v1/data",
        "esi-x1",
        ("versions.v1.data: 'esi-x1' is not ", "not train data of esi but exam data of esi"),
    ),
    ("versions/v1/data", "esi-m1", ("versions.v1.data: 'esi-m1' is not ", "but mine data of esi", "allowed: esi-d1")),
    ("versions/v1/data", "esi-d2", ("versions.v1.data: 'esi-d2' is not ", "did you mean esi-d1?")),
    ("versions/v1/exam", "esi-d1", ("versions.v1.exam: 'esi-d1' is not ", "not exam data of esi but train data")),
    ("versions/v1/profile", "stf", ("versions.v1.profile: 'stf' is not ", "did you mean sft?")),
    ("versions/v2/parent", "v11", ("versions.v2.parent: 'v11' is not ", "did you mean v1?", "esi-base")),
    ("versions/v2/parent", "imaging-base", ("versions.v2.parent: 'imaging-base' is not ", "allowed: esi-base, v1, v3")),
    ("versions/v2/parent", "v2", ("versions.v2.parent: 'v2' is not ", "another version of esi")),
    ("versions/v2/parent", None, ("versions.v2.parent is None", "valid string")),
    (
        "versions/v4",
        {**VALID["versions"]["v3"], "parent": "v2", "profile": "sft"},
        ("versions.v4.profile is 'sft'", "after the grpo version v2"),
    ),
    (
        GRPO + "placebo",
        "random",
        ("profiles.grpo.placebo is 'random', a control that is never released; say in waiver",),
    ),
    (GRPO + "placebo", "radnom", ("profiles.grpo.placebo is 'radnom'", "'shuffled', 'format' or 'majority'")),
    ("profiles/grpo", rejection(stream={"phases": [PHASE]}), ("profiles.grpo.stream.phases are set, but",)),
    ("profiles/grpo", rejection(threshold=1.1), ("trainer.embedded.threshold is 1.1, but", "earns more than 1;")),
    ("profiles/grpo", rejection(temperature=0.0), ("profiles.grpo.trainer.embedded.temperature is 0.0",)),
    ("profiles/grpo", rejection(batch=3, micro_batch=2), ("trainer.embedded.micro_batch is 2", "batch (3)")),
    ("profiles/grpo", rejection(reward={"kinds": 1}), ("profiles.grpo.reward.kinds is not a key here",)),
    ("versions/v1/why", 3, ("versions.v1.why is 3", "valid string")),
    (GRPO + "lora", {**LORA, "rank": 8}, ("versions.v2.profile is 'grpo'", "rank 8", "rank 16", "parent v1")),
    (GRPO + "lora", {**LORA, "alpha": 16}, ("versions.v2.profile is 'grpo'", "alpha 16", "alpha 32")),
    (GRPO + "lora", {**LORA, "targets": ["q_proj"]}, ("versions.v2.profile is 'grpo'", "q_proj", "all-linear")),
]


@pytest.mark.parametrize(
    ("path", "value", "fragments"), REFUSALS, ids=[f"{path}={value!r:.30}" for path, value, _ in REFUSALS]
)
def test_one_wrong_place_gives_one_sentence_that_names_it(path, value, fragments, tmp_path):
    if path == "modes/../x":  # a slash in a key
        mapping = copy.deepcopy(VALID)
        mapping["modes"]["../x"] = value
    else:
        mapping = edited(path, value)
    sentence = refusal(mapping, tmp_path)
    for fragment in fragments:
        assert fragment in sentence


@pytest.mark.parametrize("length", [2, 3])
def test_a_circle_of_parents_is_refused(length, tmp_path):
    mapping = copy.deepcopy(VALID)
    names = ["v1", "v2", "v3"][:length]
    for name, parent in zip(names, names[1:] + names[:1], strict=True):
        mapping["versions"][name].update(parent=parent, profile="grpo")
    sentence = refusal(mapping, tmp_path)
    assert "closes a circle (" in sentence
    assert all(name in sentence for name in names)


def test_a_name_that_differs_by_a_line_break_is_refused(tmp_path):
    assert "is not a name" in refusal(edited("datasets/esi-d1\n", VALID["datasets"]["esi-d1"]), tmp_path)


def test_a_version_of_a_task_without_a_base_is_refused(tmp_path):
    assert "allowed: none" in refusal(edited("bases", {}), tmp_path)


def test_a_long_lineage_loads():
    mapping = copy.deepcopy(VALID)
    for index in range(4, 300):
        mapping["versions"][f"v{index}"] = {**VALID["versions"]["v3"], "parent": f"v{index - 1}"}
    assert len(Params.model_validate(mapping).lineage("v299")) == 298


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("scale: embedded\nscale: full\n", 'line 2, column 1: found duplicate key "scale"'),
        ("modes: {think: {thinking: true, thinking: false}}", 'found duplicate key "thinking"'),
        ("modes: [1", "line 2, column 1: did not find expected"),
        ("a: 1\n---\nb: 2\n", "found another document"),
        ("scale: !!python/object/apply:os.getcwd []", "line 1: has the tag 'tag:yaml.org,2002:python/object/apply"),
        ("scale: \x00", "line 1: U+0000 does not show"),
        ("", "the file is None; it must be a mapping"),
        ("- 1", "the file is [1]; it must be a mapping"),
    ],
)
def test_a_file_that_is_not_a_mapping_of_yaml_is_refused(text, fragment, tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ParamsError) as refused:
        load_params(path)
    assert fragment in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"scale: \xe9")
    for name, fragment in [("none.yaml", "does not exist"), (".", "is a folder"), ("latin.yaml", "not UTF-8")]:
        with pytest.raises(ParamsError, match=fragment):
            load_params(tmp_path / name)


def audits(**changes: Any) -> dict[str, Any]:
    """The valid mapping with audits in the place of triage, and its grpo recipe changed."""
    text = json.dumps({key: VALID[key] for key in ("scale", "bases", "modes", "datasets", "profiles", "versions")})
    mapping = json.loads(text.replace('"esi"', '"audit"').replace('"esi-base"', '"audit-base"'))
    for data in mapping["datasets"].values():
        data["mix"] = get_task("audit").checks.mixes[0]
    mapping["profiles"]["sft"] |= {"omit": {}, "stream": {}}
    mapping["profiles"]["grpo"] |= {"modes": ["direct"], "stream": {}, "reward": {}, **changes}
    return mapping


def test_a_recipe_of_episodes_has_no_held_out_looks_and_no_labels_alone(tmp_path):
    phases = [
        {"share": 0.5, "slice": "level", "values": ["easy"]},
        {"share": 0.5, "slice": "level", "values": ["easy", "hard"]},
    ]
    params = Params.model_validate(audits(stream={"phases": phases}))
    assert [phase.values for phase in params.profiles["grpo"].stream.phases] == [("easy",), ("easy", "hard")]
    trainer = VALID["profiles"]["grpo"]["trainer"]
    looking = trainer["full"] | {"held_out": {"cases": 4, "every": 2}}
    sentence = refusal(audits(trainer={"embedded": trainer["embedded"], "full": looking}), tmp_path)
    assert sentence.startswith("profiles.grpo.trainer.full.held_out is set, but a held-out check is one turn")
    mapping = audits()
    mapping["profiles"]["sft"]["labels_only"] = True
    assert "profiles.sft.labels_only is true, but a case of audit is an episode" in refusal(mapping, tmp_path)


def sections(mapping: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all mappings whose keys are fixed; those of names, labels and rules are free."""
    if not isinstance(mapping, dict):
        return []
    names = {("bases",), ("modes",), ("datasets",), ("profiles",), ("versions",), ("mining",)}
    names |= {("comparisons",), ("gates",), ("plans",), ("schedules",)}
    free = path in names or path[-1:] in {
        ("omit",), ("repeat",), ("cap",), ("folds",), ("blends",), ("limits",), ("arms",),
        ("fields",), ("not_worse",),
    } or "published" in path  # fmt: skip
    found = [] if free else [path]
    for key, value in mapping.items():
        found += sections(value, (*path, str(key)))
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.sampled_from(sections(VALID)),
    key=st.text(string.ascii_letters + string.digits + "_-. é", min_size=1, max_size=12) | st.integers(),
    value=st.none() | st.integers() | st.text(string.ascii_letters, max_size=5) | st.just({}),
)
def test_an_unknown_key_anywhere_is_refused_and_named(place, key, value, tmp_path):
    mapping = copy.deepcopy(VALID)
    section: Any = mapping
    for part in place:
        section = section[part]
    known = {
        *section, "omit", "reward", "micro_batch", "checkpoint_every", "on_alarm", "held_out", "waiver", "vllm", "why",
        "stream",
        "modifiers", "floor", "kind", "valve", "unreadable", "folds", "blends", "seed", "density", "max", "min",
        "may_rise", "may_fall", "paired", "quality", "published_parts", "approvers", "rebuilders", "rebuilt",
            "fields", "superior", "not_worse", "one_of",
    }  # fmt: skip
    if key in known:
        return
    section[key] = value
    sentence = refusal(mapping, tmp_path)
    assert ".".join([*place, str(key)]) + " is not a key here; " in sentence
    assert "allowed: " in sentence


def test_a_refusal_lists_the_names_of_the_task_alone():
    names = ["esi-v46", "esi-v49", "imaging-v1", "audit-v1"]
    assert did_you_mean("esi-v94", names) == "did you mean esi-v49? allowed: esi-v46, esi-v49"
    assert did_you_mean("v94", names).endswith("allowed: audit-v1, esi-v46, esi-v49, imaging-v1")
    assert did_you_mean("ekg-v1", names).endswith("allowed: audit-v1, esi-v46, esi-v49, imaging-v1")


def test_a_refusal_lists_of_many_names_those_that_begin_alike():
    names = [f"esi-gold-{n}" for n in range(80)] + ["esi-v46", "esi-v49"]
    sentence = did_you_mean("esi-v94", names)
    assert sentence.startswith("did you mean esi-v49? allowed: esi-v46, esi-v49, esi-gold-0, ")
    assert sentence.endswith(" and 62 more")


def test_a_version_is_not_offered_the_recipes_of_other_tasks(tmp_path):
    shutil.copytree(ROOT / "params", tmp_path / "params")
    shutil.copyfile(ROOT / "params.yaml", tmp_path / "params.yaml")
    own = tmp_path / "params/esi.yaml"
    own.write_text(own.read_text(encoding="utf-8").replace("profile: esi-fifth-rule-aware", "profile: rule-aware"))
    with pytest.raises(ParamsError, match="profile: 'rule-aware' is not a profile") as refused:
        load_params(tmp_path / "params.yaml")
    listed = str(refused.value).split("allowed: ")[1].split(", ")
    assert "esi-fifth-rule-aware" in listed
    assert all(name.startswith("esi-") for name in listed)


def test_a_schedule_with_drafts_and_a_gate_with_rebuilds_exclude_each_other():
    mapping = copy.deepcopy(VALID) | {"rebuilders": {"b1": KEYS[0]}}
    mapping["schedules"]["esi"]["draft"] = True
    Params.model_validate(mapping)
    mapping["gates"]["esi"]["rebuilt"] = {"least": 1}
    with pytest.raises(ParamsError, match="before a draft is decided; take one of the two away"):
        Params.model_validate(mapping)


@pytest.mark.parametrize(
    ("approver", "listed", "says"),
    [
        ("Ada Lovelacee", {"Ada Lovelace": KEYS[0]}, "watches.esi.approver: 'Ada Lovelacee' is not a name that"),
        ("A", {}, "watches.esi.approver is 'A'; a name has 2 to 80 characters"),
    ],
)
def test_who_is_to_approve_a_rollback_is_checked_before_one_is_needed(approver, listed, says):
    watch = {"cron": "0 * * * *", "limit": 0.05, "approver": approver}
    with pytest.raises(ParamsError, match=says):
        Params.model_validate({**VALID, "approvers": listed, "watches": {"esi": watch}})
