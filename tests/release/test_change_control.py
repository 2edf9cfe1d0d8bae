"""What a plan says before an exam is looked at; `test_promotion` has what the gate makes of it."""

from dataclasses import replace

import pytest

import dolls
import examined
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, write_json
from clinrl.data import dataset
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation import answers, evaluate
from clinrl.registry import versions
from clinrl.release.change_control import screened_out
from clinrl.types import Message, Transcript

pytestmark = pytest.mark.usefixtures("few_draws")

PLAN = {
    "changes": {"ancestors": ["esi-base"], "exam": "x1", "most_cases": 30, "recipes": ["imitate", "reward"]},
    "protocol": {"screen": 0.05},
    "budget": {"alpha": 0.05, "spend": 0.6, "looks": 6},
    "impact": "A worse model under-triages more patients.",
}
MINED = {"m1": {**examined.DATASETS["x1"], "use": "mine", "mix": "reporting"}}


def planned(**changes):
    """The project's params with mine data of v1 and v2, and a plan."""
    sections = examined.SECTIONS | {"datasets": examined.DATASETS | MINED, "plans": {"esi": PLAN}}
    mining = {name: {"task": "esi", "data": "m1"} for name in ("v1", "v2")}
    return dolls.params(**(sections | {"mining": mining} | changes))


@pytest.fixture
def params(tmp_path, monkeypatch):
    """A project whose champion is v2, with mine data that nobody has answered."""
    examined.copy(examined.registered(), tmp_path)
    monkeypatch.chdir(tmp_path)
    params = planned()
    dataset.stage(params, "m1")
    named = {"name": "m1", "identity": identity(read_manifest(paths.cases("m1")))}
    write_json(paths.data_proof("m1"), {"data": named})
    versions.point("esi", "champion", versions.find("esi", "v2"))
    return params


def mine(params, name, wrong, modes=("think", "direct"), adapter=None):
    """Let a version answer its mine data, so many cases wrongly in some of the modes."""
    model = replace(params.model(name), exam="m1", variants=())
    run = answers.open_run(params, model)
    graded = {}
    for mode in run.modes:
        errs = wrong if mode in modes else 0
        levels = [6 - gold if i < errs and gold != 3 else gold for i, gold in enumerate(run.golds)]
        turns = [Message(role="assistant", content=f"ANSWER: ESI {level}") for level in levels]
        transcripts = [Transcript(messages=(turn,), stop="answered") for turn in turns]
        graded[mode] = evaluate.grade(model.task, mode, run.cases, transcripts, model.reward)
    adapter = adapter or identity(read_manifest(model.folder))
    run = replace(run, adapter_digest=adapter, graded=graded)
    evaluate.keep(paths.mined(name), run, {"adapter": adapter, "data": run.exam_digest})


def test_a_draft_asks_the_gate_only_if_it_is_ahead_on_average(params, monkeypatch):
    mine(params, "v2", wrong=20)
    mine(params, "v1", wrong=0)
    assert screened_out(params, "v1") is None
    for mode in ("think", "direct"):
        mine(params, "v1", wrong=20, modes=(mode,))
        assert screened_out(params, "v1") is None
    mine(params, "v1", wrong=20)
    said = screened_out(params, "v1")
    assert said == (
        "its gain in exact over v2 on m1, averaged over think and direct, has a one-sided p of 1; the plan asks for at "
        "most 0.05 before the gate looks at the exam"
    )
    monkeypatch.setattr("clinrl.release.change_control.gain", lambda *_: None)  # no case of the kind that it is about
    assert "could not be measured" in screened_out(params, "v1")


def test_without_a_plan_or_a_champion_nothing_is_screened(params):
    assert screened_out(planned(plans={}), "v1") is None
    versions.point("esi", "champion", None)
    assert screened_out(params, "v1") is None


def test_answers_of_another_adapter_and_errors_that_nobody_mines_screen_nothing(params):
    mine(params, "v1", wrong=0)
    mine(params, "v2", wrong=20, adapter="f" * 64)
    with pytest.raises(ArtefactError, match=r"data/mined/v2 is of another adapter than v2; run `dvc repro mine@v2`"):
        screened_out(params, "v1")
    with pytest.raises(ParamsError, match=r"mines no errors of v2; add mining\.v2"):
        screened_out(planned(mining={"v1": {"task": "esi", "data": "m1"}}), "v1")
    without = {name: spec for name, spec in params.versions.items() if name != "v2"}
    with pytest.raises(ParamsError, match=r"mines no errors of v2; bring versions\.v2 back and add mining\.v2"):
        screened_out(params.model_copy(update={"versions": without, "mining": {"v1": params.mining["v1"]}}), "v1")
    mine(params, "v1", wrong=0, adapter="f" * 64)
    with pytest.raises(ArtefactError, match=r"data/mined/v1 is of another adapter than v1; run `dvc repro mine@v1`"):
        screened_out(params, "v1")


def test_answers_to_other_mine_data_are_not_compared(params):
    mine(params, "v2", wrong=20)
    mine(params, "v1", wrong=0)
    mining = {"v1": {"task": "esi", "data": "m1"}, "v2": {"task": "esi", "data": "m2"}}
    other = planned(mining=mining, datasets=examined.DATASETS | MINED | {"m2": MINED["m1"] | {"seed": 99}})
    with pytest.raises(ParamsError, match="v1 is mined on m1 and v2 on m2; give both the same in `mining`"):
        screened_out(other, "v1")


def test_a_champion_that_is_a_merge_screens_every_draft_out(params, monkeypatch):
    held = versions.find("esi", "v2").model_copy(update={"name": "v1-v2"})
    monkeypatch.setattr(versions, "holder", lambda *_: held)
    assert screened_out(params, "v1") == "the champion v1-v2 is a merge, whose errors nobody mines"
