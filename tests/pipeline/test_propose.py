"""Drafts: what is missed decides what is changed, nothing is tried twice, and params.yaml is never half written."""

import json
import shutil
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest

import dolls
import laid
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, write_json
from clinrl.cli.main import main
from clinrl.config.files import merge_files, read_files
from clinrl.config.params import load_params
from clinrl.data import dataset
from clinrl.errors import ArtefactError, ParamsError, Refused
from clinrl.evaluation import error_analysis, evaluate
from clinrl.evaluation.error_analysis import MineReport
from clinrl.pipeline import propose
from clinrl.pipeline.propose import LEVERS, NothingToDraft
from clinrl.release import lineage
from clinrl.tasks.base import get_task
from clinrl.types import Message, Transcript

pytestmark = pytest.mark.usefixtures("few_draws")

TASK = get_task("esi")
DRAFTS = Path("params/drafts.yaml")
MINE = {"task": "esi", "task_version": 2, "use": "mine", "mix": "reporting", "cases": 120, "seed": 5,
        "emphasis": {"danger_vitals": 2.0, "severe_pain": 6.0}}  # fmt: skip
COMMENT = "# This line is by a person.\n"


def sections():
    return {
        **dolls.PARAMS,
        "datasets": {**dolls.PARAMS["datasets"], "m1": MINE},
        "versions": {name: dolls.PARAMS["versions"][name] for name in ("v1", "v2")},
        "mining": {"v2": {"task": "esi", "data": "m1"}},
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The doll with a version v2, whose adapter is the base's own, validated mine data, and what v2 misses of them."""
    root = tmp_path_factory.mktemp("drafted")
    shutil.copytree(dolls.built(), root, dirs_exist_ok=True)
    with chdir(root):
        laid.lay(root, sections(), COMMENT)
        params = load_params()
        dataset.stage(params, "m1")
        named = {"data": {"name": "m1", "identity": identity(read_manifest(paths.cases("m1")))}}
        write_json(paths.data_proof("m1"), named)
        shutil.copytree(paths.adapter("esi-base"), paths.adapter("v2"))
        with pytest.MonkeyPatch.context() as patch:
            mined(patch, "severe_pain", "done_intervention")
    return root


@pytest.fixture
def project(built, tmp_path, monkeypatch):
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return load_params()


def mined(monkeypatch, *missed, name="v2"):
    """The mining report of a reader that knows everything but these rules."""

    def answer_exam(_params, run, *_):
        turns = [TASK.gold(case, thinking=False, omit=frozenset(missed)).messages[-1] for case in run.cases]
        said = [Transcript(messages=(Message(role="assistant", content=t.content),), stop="answered") for t in turns]
        graded = {mode: evaluate.grade(run.task, mode, run.cases, said, run.model.reward) for mode in run.modes}
        return replace(run, graded=graded)

    monkeypatch.setattr(error_analysis, "answer_exam", answer_exam)
    error_analysis.stage(load_params(), name)


def test_the_missed_rules_are_found_without_being_told(project):
    made = propose.stage(project, "esi", parent="v2")
    assert {target.rule for target in made.targets} == {"severe_pain", "done_intervention"}
    params = load_params()
    version, data = params.versions["esi-v3"], params.datasets["esi-v3-data"]
    assert (version.parent, version.data, version.exam, version.profile) == ("v2", "esi-v3-data", "x1", "esi-v3")
    assert data.emphasis == {"severe_pain": 3.0, "done_intervention": 3.0}
    assert data.seed not in {spec.seed for name, spec in params.datasets.items() if name != "esi-v3-data"}
    modifiers = params.reward("esi-v3").modifiers
    assert (modifiers.severe_pain_miss, modifiers.done_intervention_hit, modifiers.done_intervention_miss) == (
        -0.5, 0.5, -0.5,
    )  # fmt: skip
    assert modifiers.open_injury_miss == 0
    assert params.reward("esi-v3").unreadable_is_worst
    assert params.mining["esi-v3"] == params.mining["v2"]
    assert "severe_pain" in version.why


@pytest.mark.parametrize("most_cases", [30, 29])
@pytest.mark.parametrize(("also", "lever"), [(("reward.modifiers",), "modifiers"), ((), "data")])
def test_a_lever_whose_draft_no_plan_admits_is_passed_over_and_not_used_up(project, most_cases, also, lever):
    fields = {key: {"min": -1e9, "max": 1e9} for key in ("trainer", *also)}
    plan = {
        "changes": {"ancestors": ["v2"], "exam": "x1", "most_cases": most_cases, "recipes": ["reward"]},
        "protocol": {"screen": 0.05}, "budget": {"alpha": 0.05, "spend": 0.6, "looks": 6},
        "impact": "A worse model under-triages more patients.",
    }  # fmt: skip
    gate = {"least_cases": 10, "limits": {"critical_under": {"max": {"embedded": 0.5, "full": 0.5}}}}
    laid.edit(Path(), lambda content: content.update(plans={"esi": plan}, gates={"esi": gate}))
    before = laid.held(Path())
    with pytest.raises(
        NothingToDraft, match=r"no lever is left whose draft is in the plan: esi-v3 is outside plans.esi"
    ):
        propose.stage(load_params(), "esi", parent="v2", is_planned=True)
    assert (laid.held(Path()), propose.records()) == (before, [])
    laid.edit(Path(), lambda content: content["plans"]["esi"]["changes"].update(most_cases=30, fields=fields))
    assert propose.stage(load_params(), "esi", parent="v2", is_planned=True).lever == lever


def test_a_rule_that_may_cost_nothing_is_no_target(project):
    report = propose.read_report(project, "v2")
    by_chance = [
        group.model_copy(update={"cost": group.cost.model_copy(update={"low": 0.0})}) for group in report.groups
    ]
    assert propose.find_missed(report)
    assert not propose.find_missed(report.model_copy(update={"groups": tuple(by_chance)}))


def test_no_file_of_a_person_is_touched(project):
    before = laid.held(Path())
    propose.stage(project, "esi", parent="v2")
    after = laid.held(Path())
    assert {file for file in after if after[file] != before[file]} == {DRAFTS}
    assert after[Path("params.yaml")].startswith(COMMENT.encode())


def test_a_refinement_takes_no_larger_steps_than_its_parent(project):
    propose.stage(project, "esi", parent="v2")
    params = load_params()
    for scale in ("embedded", "full"):
        now, before = (params.profiles[name].trainer[scale] for name in ("esi-v3", "reward"))
        assert now.lr <= before.lr
        assert now.steps == round(before.steps * 1.5)
        assert (now.group, now.max_completion, now.on_alarm) == (before.group, before.max_completion, before.on_alarm)


def test_a_draft_of_a_promoted_draft_trains_as_long_as_its_parent(project):
    first = propose.stage(project, "esi", parent="v2")
    params = load_params()
    report = propose.read_report(params, "v2").model_copy(update={"name": first.name, "adapter_digest": "f" * 64})
    second = propose.propose(params, report, propose.records())
    for scale in ("embedded", "full"):
        assert second.profile["trainer"][scale]["steps"] == first.profile["trainer"][scale]["steps"]


def test_no_lever_is_pulled_twice(project):
    levers = [propose.stage(load_params(), "esi", parent="v2").lever for _ in LEVERS]
    assert levers == [lever.name for lever in LEVERS]
    profiles = [load_params().profiles[f"esi-v{n}"].model_dump_json() for n in (3, 4, 5, 6)]
    assert len(set(profiles)) == len(LEVERS)
    before = laid.held(Path())
    with pytest.raises(NothingToDraft, match="every lever was pulled from v2 already"):
        propose.stage(load_params(), "esi", parent="v2")
    assert laid.held(Path()) == before


def test_a_lever_that_was_pulled_is_named(project):
    propose.stage(project, "esi", parent="v2", lever="data")
    with pytest.raises(NothingToDraft, match="the lever data was pulled from v2 already; name another, or none"):
        propose.stage(load_params(), "esi", parent="v2", lever="data")


def test_a_draft_that_was_concluded_waits_for_nothing(project):
    made = propose.stage(project, "esi", parent="v2")
    assert propose.find_untrained(load_params(), "esi", "v2") is not None
    propose.conclude(made, "refused", "nobody approved it")  # its adapter is not here, as in a clone
    assert propose.find_untrained(load_params(), "esi", "v2") is None


def test_dropping_a_draft_leaves_its_record_and_nothing_else(project):
    before = laid.held(Path())
    made = propose.stage(project, "esi", parent="v2")
    propose.drop(made, "it brought nothing")
    assert laid.held(Path()) == before
    record = json.loads(paths.draft("esi-v3").read_text())
    assert (record["outcome"], record["says"]) == ("dropped", "it brought nothing")
    again = propose.stage(load_params(), "esi", parent="v2")
    assert (again.name, again.lever, again.drafts_on_exam) == ("esi-v4", "data", 2)


def test_a_draft_that_was_cut_short_while_it_was_made_is_made_again(project):
    before = laid.held(Path())
    propose.stage(project, "esi", parent="v2")
    DRAFTS.write_bytes(before[DRAFTS])
    assert (propose.stage(load_params(), "esi", parent="v2").name, len(propose.records())) == ("esi-v3", 1)


@pytest.mark.parametrize("suffix", [".json", ".failed.json"])
def test_a_draft_that_was_cut_short_while_it_was_dropped_is_dropped(project, suffix):
    before = laid.held(Path())
    propose.stage(project, "esi", parent="v2")
    write_json(paths.probe_proof("esi-v3").with_suffix(suffix), {})
    DRAFTS.write_bytes(before[DRAFTS])
    assert (again := propose.stage(load_params(), "esi", parent="v2")).name == "esi-v4"
    assert again.lever == "data"
    assert [made.outcome for made in propose.records()] == ["dropped", "open"]


def test_a_draft_that_something_builds_on_is_not_dropped(project):
    made = propose.stage(project, "esi", parent="v2")
    child = {"task": "esi", "parent": "esi-v3", "data": "d1", "exam": "x1", "profile": "reward", "seed": 9}
    laid.edit(Path(), lambda content: content["versions"].update(v9=child))
    before = laid.held(Path())
    with pytest.raises(ParamsError, match=r"versions\.v9\.parent"):
        propose.drop(made, "it brought nothing")
    assert laid.held(Path()) == before


def test_a_draft_that_a_person_moved_to_their_own_file_is_taken_out_by_hand(project):
    made = propose.stage(project, "esi", parent="v2")
    moved, _ = merge_files(read_files(Path("params.yaml")))
    laid.lay(Path(), moved, COMMENT)
    DRAFTS.write_text("{}\n")
    before = laid.held(Path())
    with pytest.raises(ParamsError, match=r"versions\.esi-v3 is not in params/drafts\.yaml"):
        propose.drop(made, "it brought nothing")
    assert laid.held(Path()) == before


def test_a_lever_that_changes_nothing_is_left_out(project, monkeypatch):
    mined(monkeypatch, "danger_vitals")
    assert propose.stage(project, "esi", parent="v2").lever == "data"


def test_a_reader_without_a_gap_gives_no_draft(project, monkeypatch):
    mined(monkeypatch)
    with pytest.raises(NothingToDraft, match="no rule is surely missed by v2 on m1"):
        propose.stage(project, "esi", parent="v2")


def test_an_imitation_is_followed_by_the_first_recipe_with_a_reward(project, monkeypatch):
    shutil.copytree(paths.adapter("esi-base"), paths.adapter("v1"))
    laid.edit(Path(), lambda content: content.update(mining={"v1": {"task": "esi", "data": "m1"}}))
    mined(monkeypatch, "severe_pain", name="v1")
    propose.stage(load_params(), "esi", parent="v1")
    assert load_params().profiles["esi-v3"].method == "grpo"


def test_an_imitation_above_a_base_of_four_bits_is_followed_by_a_recipe_of_the_same(project):
    def change(content):
        content["profiles"]["imitate"]["qlora"] = True
        content["profiles"]["own"] = {**content["profiles"]["reward"], "qlora": True}
        content["versions"]["v2"]["parent"] = "esi-base"

    report = propose.read_report(project, "v2").model_copy(update={"name": "v1"})
    laid.edit(Path(), change)
    with pytest.raises(Refused, match="esi has no recipe with a reward and the lora and qlora of v1 yet"):
        propose.propose(load_params(), report, [])
    version = {**sections()["versions"]["v2"], "profile": "own"}
    laid.edit(Path(), lambda content: content["versions"].update(v9=version))
    assert propose.propose(load_params(), report, []).profile["qlora"] is True


def test_what_follows_a_control_is_paid_by_the_score(project):
    control = {"placebo": "random", "waiver": "A control."}
    laid.edit(Path(), lambda content: content["profiles"]["reward"].update(control))
    propose.stage(load_params(), "esi", parent="v2")
    drafted = load_params().profiles["esi-v3"]
    assert (drafted.placebo, drafted.waiver) == ("", "")


def edited(change):
    report = json.loads(paths.mine_report("v2").read_text())
    change(report)
    write_json(paths.mine_report("v2"), report)


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda: paths.mine_report("v2").unlink(), "v2.json does not exist: run `dvc repro mine@v2`"),
        (lambda: paths.mine_report("v2").write_text("{}"), "is no mining report: run `dvc repro mine@v2`"),
        (lambda: edited(lambda r: r.update(adapter_digest="0" * 64)), "is about another adapter than v2 now is"),
        (lambda: edited(lambda r: r.update(data="x1")), "is about other cases than m1 of the mine pool now holds"),
        (lambda: edited(lambda r: r.update(data_digest="0" * 64)), "is about other cases than m1"),
        (lambda: edited(lambda r: r.update(pool="exam")), "is about other cases than m1 of the mine pool"),
        (lambda: shutil.rmtree(paths.adapter("v2")), "v2 is not here; run `dvc repro mine@v2`, which makes it"),
        (lambda: paths.draft("x").parent.mkdir() or paths.draft("x").write_text("{"), "is no record of a draft"),
    ],
)
def test_what_a_draft_follows_from_must_be_what_it_says(project, break_it, sentence):
    before = laid.held(Path())
    break_it()
    with pytest.raises(ArtefactError) as refused:
        propose.stage(project, "esi", parent="v2")
    assert sentence in str(refused.value)
    assert laid.held(Path()) == before


@pytest.mark.parametrize(
    ("break_it", "state"),
    [
        (lambda: None, "holds"),
        (lambda: edited(lambda r: r.update(pool="exam")), "broken"),
        (lambda: edited(lambda r: r.update(adapter_digest="0" * 64)), "broken"),
        (lambda: shutil.rmtree(paths.cases("m1")), "absent"),
        (lambda: paths.mine_report("v2").unlink(), "open"),
    ],
)
def test_the_lineage_of_a_version_holds_its_report_to_the_same(project, break_it, state):
    break_it()
    assert [link.state for link in lineage.walk(project, "v2") if link.link == "mining"] == [state]


def test_a_params_yaml_that_changed_since_it_was_read_is_not_touched(project):
    path = Path("params/esi.yaml")
    path.write_text(path.read_text().replace("seed: 5", "seed: 6"))
    before = path.read_bytes()
    with pytest.raises(ParamsError, match="was edited while the draft was made"):
        propose.stage(project, "esi", parent="v2")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"parent": "v7"}, "'v7' is not a version"),
        ({"parent": "v2", "lever": "luck"}, "'luck' is not a lever"),
        ({"parent": "v2", "name": "v1"}, "v1 was drafted or trained already"),
        ({"parent": "v2", "name": "Not A Name"}, "is not a name"),
        ({"parent": "v1"}, "params.yaml mines no errors of v1"),
        ({}, "esi has no champion to draft from"),
    ],
)
def test_names_that_do_not_fit_are_refused(project, options, sentence):
    before = laid.held(Path())
    with pytest.raises((ParamsError, NothingToDraft)) as refused:
        propose.stage(project, "esi", **options)
    assert sentence in str(refused.value)
    assert laid.held(Path()) == before
    assert not paths.draft("esi-v3").exists()


def test_the_command_prints_what_it_drafted(project, capsys):
    assert main(["draft", "esi", "--from", "v2", "--name", "v2-b", "--lever", "data"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split("\t")[:4] == ["version", "parent", "lever", "rule"]
    assert out.splitlines()[1].split("\t")[:3] == ["v2-b", "v2", "data"]
    assert "`clinrl plan v2-b` says what it would train" in err
    assert main(["draft", "esi", "--from", "v2", "--lever", "modifiers", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lever"] == "modifiers"


def test_the_same_command_prints_a_draft_that_waits_and_makes_no_other(project, capsys):
    assert main(["draft", "esi", "--from", "v2", "--json"]) == 0
    first, before = json.loads(capsys.readouterr().out), laid.held(Path())
    assert main(["draft", "esi", "--from", "v2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert (laid.held(Path()), len(propose.records())) == (before, 1)
    paths.adapter("esi-v3").mkdir(parents=True)
    assert main(["draft", "esi", "--from", "v2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "esi-v4"


@pytest.mark.long
def test_more_cases_of_a_rule_are_drawn_where_it_is_emphasised():
    def share(emphasis):
        cases = list(TASK.cases(1500, 3, pool="train", mix="natural", emphasis=emphasis))
        return sum(case.key.rule == "severe_pain" for case in cases) / len(cases)

    plain, more = share({}), share({"severe_pain": 4.0})
    expected = 4 * plain / (1 + 3 * plain)
    assert more == pytest.approx(expected, abs=0.03)


def test_a_report_is_read_back_as_it_was_written(project):
    text = paths.mine_report("v2").read_text()
    assert json.loads(MineReport.model_validate_json(text).model_dump_json()) == json.loads(text)


def recorded(change):
    """The record of a draft that was cut short, changed by somebody, in place of the sound one."""
    made = propose.stage(load_params(), "esi", parent="v2").model_dump(mode="json")
    change(made)
    write_json(paths.draft("esi-v3"), made)


@pytest.mark.parametrize("probed", [True, False])
@pytest.mark.parametrize("name", ["{outside}", "../mine/v2", "v2", "../../../params"])
def test_a_record_that_names_another_file_touches_none(project, tmp_path_factory, name, probed):
    outside = tmp_path_factory.mktemp("home") / "config"
    name = name.format(outside=outside)
    before = laid.held(Path())
    recorded(lambda made: made.update(name=name))
    DRAFTS.write_bytes(before[DRAFTS])
    files = [outside.with_suffix(".json"), paths.mine_report("v2"), Path("params.json")]
    for file in (files[0], files[2]):
        file.write_text("precious")
    held = [file.read_bytes() for file in files]
    if probed:
        paths.probe_proof(name).parent.mkdir(parents=True, exist_ok=True)
        paths.probe_proof(name).touch()
    with pytest.raises(ArtefactError, match=r"data/reports/drafts/esi-v3\.json is .*restore it with `git checkout"):
        propose.stage(load_params(), "esi", parent="v2")
    assert [file.read_bytes() for file in files] == held


@pytest.mark.parametrize("key", ["task", "parent", "data", "exam", "profile"])
def test_a_record_whose_version_has_no_names_is_refused(project, key):
    for change in (lambda made: made["version"].update({key: "../x"}), lambda made: made["version"].pop(key)):
        before = laid.held(Path())
        recorded(change)
        with pytest.raises(ArtefactError, match=r"esi-v3\.json is no record of a draft"):
            propose.records()
        DRAFTS.write_bytes(before[DRAFTS])
        paths.draft("esi-v3").unlink()
