"""The probe on real data: the sound recipes pass, the published failures are refused before a model is touched."""

import json
import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import dolls
import laid
from clinrl import artifacts, paths
from clinrl.config.params import Params
from clinrl.config.recipes import Phase, Stream
from clinrl.data import dataset, reward_audit
from clinrl.data.sampling import draw
from clinrl.errors import ArtefactError, ProbeError
from clinrl.models.judges import Judges
from clinrl.tasks.base import get_task

ROOT = Path(__file__).parents[2]
TASK = get_task("esi")
NAIVE = {"kind": "naive", "unreadable": 0.0}
"""The reward of the published v45c: 1 for the exact level, 0 for everything else."""
OMIT = {"severe_pain": 0.65, "danger_vitals": 0.3, "torsion": 0.5}
"""No case of esi-d3, as it is drawn here, is a torsion."""


@cache
def committed() -> dict[str, Any]:
    return laid.content(ROOT)


def params(data: str = "esi-d3", reward: dict[str, Any] | None = None, stream: dict[str, Any] | None = None) -> Params:
    """The project's parameters with small data sets, one of either mix, and a GRPO version esi-v99 of this recipe."""
    source = deepcopy(committed())
    source["datasets"]["esi-d3"]["cases"] = 200
    source["datasets"]["esi-r1"] = source["datasets"]["esi-d3"] | {"mix": "reporting"}
    trainer = {
        "lr": 1e-3,
        "steps": 10,
        "prompts": 16,
        "group": 4,
        "temperature": 1.0,
        "beta": 0.0,
        "max_completion": 96,
    }
    source["profiles"]["probed"] = {
        "method": "grpo",
        "modes": ["think", "direct"],
        "lora": {"rank": 16, "alpha": 32, "targets": "all-linear"},
        "stream": stream or {"repeat": {1: 5}, "cap": {1: 0.33}},
        "reward": reward or {"kind": "asymmetric", "valve": 0.0, "unreadable": -1.5},
        "trainer": {"embedded": trainer, "full": trainer},
    }
    for section in ("merges", "mining", "comparisons", "protocols", "plans", "schedules"):
        del source[section]
    source["profiles"]["esi-distilled"]["omit"] = OMIT
    root = source["versions"]["esi-v43"]
    source["versions"] = {"esi-v43": root, "esi-v99": root | {"data": data, "profile": "probed", "seed": 46}}
    return Params.model_validate(source)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two training sets, with what the probe reads of the proof of a validation; and the probe of a sound recipe."""
    place = tmp_path_factory.mktemp("probe")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name in ("esi-d3", "esi-r1"):
            dataset.stage(params(), name)
            named = {"name": name, "identity": artifacts.identity(artifacts.read_manifest(paths.cases(name)))}
            artifacts.write_json(paths.data_proof(name), {"data": named})
        reward_audit.stage(params(), "esi-v99")
        paths.probe_proof("esi-v99").rename("sound.json")
    return place


@pytest.fixture(autouse=True)
def at_work(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)


def proof(version: str) -> dict[str, Any]:
    return json.loads(paths.probe_proof(version).read_text(encoding="utf-8"))


def refusal(given: Params, version: str = "esi-v99") -> str:
    """Why the probe refuses; checks that an older proof is gone and the report of the failure stands."""
    place = paths.probe_proof(version)
    artifacts.write_json(place, {"an": "old proof"})
    with pytest.raises(ProbeError) as error:
        reward_audit.stage(given, version)
    assert not place.exists()
    failed = json.loads(place.with_suffix(".failed.json").read_text(encoding="utf-8"))
    assert failed["refused"] in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_asymmetric_recipe_passes() -> None:
    found = json.loads(Path("sound.json").read_text(encoding="utf-8"))
    earned = {name: entry["mean"] for name, entry in found["policies"].items()}
    assert (
        earned["gold"]
        > earned["mediocre"]
        > max(mean for name, mean in earned.items() if name not in ("gold", "mediocre"))
    )
    assert earned["empty"] == earned["truncated"] == earned["hedge"] == found["outcomes"]["best_unreadable"] == -1.5
    assert found["outcomes"]["worst_readable"] == -1.25
    assert found["outcomes"]["gold_beaten"] == 0
    assert 0 <= found["zero_spread"] < 0.3
    assert found["stream"]["rows"] == 160
    assert found["stream"]["shares"]["1"] <= 0.33 + 1 / 160
    assert found["stream"]["modes"] == {"direct": 0.5, "think": 0.5}
    assert found["data"]["identity"] == artifacts.identity(artifacts.read_manifest(paths.cases("esi-d3")))


def test_a_proof_is_the_same_every_time() -> None:
    reward_audit.stage(params(), "esi-v99")
    assert paths.probe_proof("esi-v99").read_bytes() == Path("sound.json").read_bytes()


def test_the_collapse_of_v45c_is_refused() -> None:
    """Naive reward, ESI 1 repeated 20 times, on balanced data: answering ESI 1 to everything pays best."""
    message = refusal(params(data="esi-r1", reward=NAIVE, stream={"repeat": {1: 20}, "cap": {}}))
    assert message.startswith("esi-v99 would learn the wrong thing: the lazy policy 'always_1' earns 0.9")
    assert "a mediocre reader 0." in message


def test_v45c_is_refused_on_the_natural_mix_too() -> None:
    assert "the lazy policy" in refusal(params(reward=NAIVE, stream={"repeat": {1: 20}, "cap": {}}))


def test_a_placebo_needs_a_waiver_however_sound_the_score_is() -> None:
    source = params().model_dump(mode="json")
    source["profiles"]["probed"] |= {"placebo": "majority", "waiver": "A control."}
    source = json.loads(json.dumps(source), object_hook=dolls._integer_keys)
    reward_audit.stage(Params.model_validate(source), "esi-v99")
    found = proof("esi-v99")
    assert found["refused"] == "its placebo reward (majority) is paid in place of what the task's score says"
    assert (found["placebo"], found["waiver"]) == ("majority", "A control.")
    sound = json.loads(Path("sound.json").read_text(encoding="utf-8"))
    assert {key: found[key] for key in sound} == sound


def test_rejection_sampling_is_audited_as_grpo_is() -> None:
    trainer = {
        "lr": 1e-3,
        "steps": 10,
        "batch": 4,
        "prompts": 160,
        "group": 4,
        "temperature": 1.0,
        "max_completion": 96,
    }
    assert audited(params(), "rejection", trainer) | {"method": "grpo"} == json.loads(Path("sound.json").read_text())
    with pytest.raises(ProbeError, match="the lazy policy 'always_1'"):
        audited(params(data="esi-r1", reward=NAIVE, stream={"repeat": {1: 20}, "cap": {}}), "rejection", trainer)


def audited(given: Params, method: str, trainer: dict[str, Any]) -> dict[str, Any]:
    """The proof of the recipe by another method."""
    source = json.loads(json.dumps(given.model_dump(mode="json")), object_hook=dolls._integer_keys)
    source["profiles"]["probed"] |= {"method": method, "trainer": {"embedded": trainer, "full": trainer}}
    reward_audit.stage(Params.model_validate(source), "esi-v99")
    return proof("esi-v99")


def test_no_reward_survives_a_flooded_stream() -> None:
    reward = {"kind": "asymmetric", "unreadable": -2.0}
    message = refusal(params(data="esi-r1", reward=reward, stream={"repeat": {1: 20}, "cap": {}}))
    assert "the lazy policy 'always_1'" in message


def test_paid_silence_is_refused() -> None:
    """The published v46 and v48 paid -0.5 for no answer, more than for a wrong one."""
    message = refusal(params(reward={"kind": "asymmetric", "valve": 0.0, "unreadable": -0.5}))
    assert "saying nothing earns -0.500, not less than the worst readable answer, -1.250" in message


@pytest.mark.parametrize(
    ("plain", "is_best"),
    [
        ([(1, 0.5), (2, 0.4)], True),  # a right answer may earn as much
        ([(1, 0.6)], False),
        ([(2, 0.5)], False),
        ([(2, 0.4), (3, 0.7)], False),
    ],
)
def test_gold_is_best_if_no_wrong_answer_earns_as_much(plain: list[tuple[int, float]], is_best: bool) -> None:
    assert reward_audit.gold_is_best(1, [1.0, 0.5], plain) is is_best


def test_gold_that_is_not_the_only_best_is_refused() -> None:
    earned = {"mediocre": {"mean": 0.5}, "gold": {"mean": 1.0}, "always_1": {"mean": 0.1}}
    extremes = {"best_unreadable": -2.0, "worst_readable": -1.0, "gold_beaten": 3, "gold_beaten_first": "esi-a"}
    assert "on 3 cases, first esi-a, another answer earns as much as gold" in (
        reward_audit.judge(earned, extremes) or ""
    )
    assert reward_audit.judge(earned, extremes | {"gold_beaten": 0, "gold_beaten_first": None}) is None


def test_a_tie_with_the_mediocre_reader_is_refused() -> None:
    earned = {"mediocre": {"mean": 0.5}, "gold": {"mean": 1.0}, "always_1": {"mean": 0.5}}
    extremes = {"best_unreadable": -2.0, "worst_readable": -1.0, "gold_beaten": 0, "gold_beaten_first": None}
    assert "'always_1' earns 0.500" in (reward_audit.judge(earned, extremes) or "")


def test_a_task_may_name_readers_that_are_not_lazy() -> None:
    earned = {"mediocre": {"mean": 0.5}, "gold": {"mean": 1.0}, "always_1": {"mean": 0.1}, "signs": {"mean": 0.6}}
    extremes = {"best_unreadable": -2.0, "worst_readable": -1.0, "gold_beaten": 0, "gold_beaten_first": None}
    assert "'signs' earns 0.600" in (reward_audit.judge(earned, extremes) or "")
    assert reward_audit.judge(earned, extremes, ["signs"]) is None


@pytest.mark.parametrize("unreadable", [-2.0, 0.0, 1.0])
def test_outcomes_are_computed_over_all_labels(unreadable: float) -> None:
    cases = list(TASK.cases(20, 1, pool="train", mix="reporting"))
    found = reward_audit.outcomes(
        cases, TASK, TASK.Reward(kind="naive", unreadable=unreadable), Judges(paths.base("esi"))
    )
    expected = {"best_unreadable": unreadable, "worst_readable": 0.0, "gold_beaten": 0, "gold_beaten_first": None}
    assert found == expected


def test_the_phases_of_a_stream_are_described_and_only_if_there_are_any() -> None:
    cases = list(TASK.cases(60, 1, pool="train", mix="reporting"))
    phases = (
        Phase(share=0.25, slice="level", values=("level_1",)),
        Phase(share=0.75, slice="level", values=("level_2", "level_3")),
    )
    rows = draw(cases, task=TASK, modes=["think"], stream=Stream(phases=phases), rows=80, seed=1, each=4)
    found = reward_audit.describe(rows, TASK, phases, steps=20)
    plain = reward_audit.describe(rows, TASK)
    first, second = found["phases"]
    assert first == {"slice": "level", "share": 0.25, "shares": {"level_1": 1.0}}
    assert (second["slice"], second["share"], list(second["shares"])) == ("level", 0.75, ["level_2", "level_3"])
    assert sum(second["shares"].values()) == pytest.approx(1.0)
    assert {key: value for key, value in found.items() if key != "phases"} == plain


def test_declared_omissions_show_in_the_stream() -> None:
    reward_audit.stage(params(), "esi-v43")
    found = proof("esi-v43")
    rules = found["omissions"]["rules"]
    assert set(rules) == set(OMIT)
    assert rules.pop("torsion") == {"declared": 0.5, "triggered": 0.0, "affected": None}
    for rule, entry in rules.items():
        assert entry["declared"] == OMIT[rule]
        assert 0 < entry["triggered"] < 0.3
        assert entry["affected"] == pytest.approx(OMIT[rule], abs=0.25)
    taught_wrong = sum(entry["triggered"] * entry["affected"] for entry in rules.values())
    assert 0 < found["omissions"]["relabelled"] == pytest.approx(taught_wrong, abs=1e-5)
    assert "policies" not in found


def test_without_a_proof_of_the_data_nothing_is_probed() -> None:
    place = paths.data_proof("esi-d3")
    kept = place.read_text(encoding="utf-8")
    for text, message in (
        (None, r"data/reports/data/esi-d3.json does not exist.*dvc repro validate@esi-d3"),
        ("{", "is not the proof of a validation"),
        ('{"data": {"identity": "0"}}', "is for other data than data/cases/esi-d3 now holds"),
    ):
        place.unlink() if text is None else place.write_text(text, encoding="utf-8")
        artifacts.write_json(paths.probe_proof("esi-v99"), {"of": "before"})
        try:
            with pytest.raises(ArtefactError, match=message):
                reward_audit.stage(params(), "esi-v99")
        finally:
            place.write_text(kept, encoding="utf-8")
        assert paths.probe_proof("esi-v99").exists()  # what was examined once stays proven
        paths.probe_proof("esi-v99").unlink()


def test_the_probe_loads_no_heavy_library() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import clinrl.data.reward_audit, clinrl.data.validate, clinrl.tasks.esi\n"
        "heavy = ('torch', 'trl', 'transformers', 'pandas', 'great_expectations')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(ROOT / "src")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "[]"
