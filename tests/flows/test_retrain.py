"""The order of a retraining, without stages: what stops a draft, what is left, handed over, and promoted."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flows.steps import StageFailed
from prefect.states import Completed

from clinrl import paths
from clinrl.errors import Alarmed, GateError, Refused
from flows import release, retrain

DRAFT: Any = SimpleNamespace(name="v3")
Noted = Callable[..., None]


@pytest.fixture
def calls() -> list[Any]:
    return []


@pytest.fixture
def noted(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Put a result in place of a function of the module, and note that it was called."""

    def put(name: str, result: Any = None) -> None:
        monkeypatch.setattr(f"flows.retrain.{name}", lambda *_, **__: calls.append(name.split(".")[-1]) or result)

    monkeypatch.setattr(retrain, "get_run_logger", lambda: SimpleNamespace(info=lambda *_: None))
    return put


LOOK = ["outside_plan", "bring_up_to_date", "screened_out", "decide"]


@pytest.mark.parametrize(
    ("reasons", "made"),
    [
        ({"plan": "outside"}, [*LOOK[:1], "drop"]),
        ({"screen": "no gain"}, [*LOOK[:3], "drop"]),
        ({"gate": "too small"}, [*LOOK, "show_decision", "drop"]),
        ({}, [*LOOK, "carry_out", "promoted"]),
        ({"person": "no"}, [*LOOK, "carry_out", "refused"]),
        ({"champion": "since long"}, ["carry_out", "promoted"]),
    ],
)
def test_a_draft_is_dropped_at_the_first_reason_and_looks_at_the_exam_last(
    reasons: dict[str, str], made: list[str], calls: list[Any], noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = SimpleNamespace(promote="gate" not in reasons, reasons=[reasons.get("gate")])
    for one, result in (
        *(("outside_plan", reasons.get("plan")), ("steps.bring_up_to_date", None), ("steps.drop", None)),
        *(("screened_out", reasons.get("screen")), ("steps.decide", decision), ("pages.show_decision", None)),
        ("carry_out", Completed(message="done")),
    ):
        noted(one, result)
    monkeypatch.setattr(
        retrain, "is_champion", lambda *_: "champion" in reasons or ("carry_out" in calls and "person" not in reasons)
    )
    monkeypatch.setattr(retrain.drafts, "conclude", lambda _draft, ended, _says: calls.append(ended))
    state = retrain.conclude(SimpleNamespace(), DRAFT, None)  # type: ignore[arg-type]
    assert calls == made
    if "drop" in made:
        assert (state.name, *reasons.values()) == (retrain.DROPPED, str(state.message).split(": ")[-1])
    else:
        assert state.message == "done"


@pytest.mark.parametrize(
    ("failing", "code", "draft", "probed", "is_dropped"),
    [
        ("v3", Alarmed.exit_code, DRAFT, False, True),
        ("v3", 1, DRAFT, True, True),
        ("v3", 1, DRAFT, False, False),
        ("v2", Alarmed.exit_code, DRAFT, False, False),
        ("v3", Alarmed.exit_code, None, False, False),
    ],
)
def test_a_draft_that_cannot_be_trained_is_dropped_and_nothing_else(
    failing: str, code: int, draft: Any, probed: bool, is_dropped: bool, noted: Noted, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def build(_params: object, version: str) -> None:
        if version == failing:
            raise StageFailed("it failed", code)

    monkeypatch.chdir(tmp_path)
    if probed:
        (proof := paths.probe_proof("v3").with_suffix(".failed.json")).parent.mkdir(parents=True)
        proof.touch()
    for one, result in (("of_task", ["v2", "v3"]), ("unfinished", ["train@v3"]), ("drafts.find", draft)):
        noted(one, result)
    noted("steps.drop")
    monkeypatch.setattr(retrain, "build", build)
    with nullcontext() if is_dropped else pytest.raises(StageFailed):
        assert retrain.renew(SimpleNamespace(), "esi", None).name == retrain.DROPPED  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedules", "no_look", "says"),
    [
        ({}, None, "nothing to do: every version of esi is up to date and registered, and v2 is the champion"),
        ({"esi": False}, None, "v2 is the champion"),
        ({"esi": True}, "the budget is used up", "no draft, since the budget is used up"),
        ({"esi": True}, None, "no draft, since nothing is missed"),
    ],
)
def test_nothing_is_drafted_unless_the_schedule_says_so_and_the_exam_allows_a_look(
    schedules: dict[str, bool], no_look: str | None, says: str, calls: list[Any], noted: Noted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def draft_next(*_: object) -> None:
        calls.append("draft")
        raise retrain.drafts.NothingToDraft("nothing is missed")

    for one, result in (("of_task", ["v2"]), ("unfinished", []), ("drafts.find", None)):
        noted(one, result)
    noted("outcome", "v2 is the champion")
    noted("no_look_left", no_look)
    monkeypatch.setattr(retrain, "draft_next", draft_next)
    params: Any = SimpleNamespace(schedules={task: SimpleNamespace(draft=draft) for task, draft in schedules.items()})
    state = retrain.renew(params, "esi", None)
    assert (state.name, str(state.message).endswith(says)) == (retrain.NOTHING_TO_DO, True)
    assert ("draft" in calls) == ("missed" in says)


@pytest.mark.parametrize(
    ("open_", "is_champion", "left"),
    [
        (["train@v1", "register v1", "release v2"], False, ["train@v1"]),
        (["register v1", "release v2"], False, ["register v1"]),
        (["release v2", "train@full"], False, ["release v2"]),
        (["train@full", "register full", "release full"], False, []),
        (["train@full", "register full", "release full"], True, ["train@full"]),
        (["register full", "release full"], True, ["register full"]),
        (["release full"], True, ["release full"]),
        ([], True, []),
    ],
)
def test_what_is_left_is_told_step_by_step(
    open_: list[str], is_champion: bool, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full models of the newest version count once that is champion."""
    for name, instead in (
        ("folds", lambda *_: ["full"]),
        ("order", lambda _, name: [f"train@{name}"]),
        ("dvc_states", lambda some: {one: "stale" if one in open_ else "up to date" for one in some}),
        ("is_registered", lambda _, name: f"register {name}" not in open_),
        ("outcome", lambda _, name: None if f"release {name}" in open_ else "settled"),
        ("is_champion", lambda *_: is_champion),
    ):
        monkeypatch.setattr(retrain, name, instead)
    assert retrain.unfinished(SimpleNamespace(), ["v1", "v2"]) == left  # type: ignore[arg-type]


@pytest.mark.parametrize("has_changed", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_scheduled_run_hands_over_what_it_changed_also_if_it_fails_and_approves_nothing(
    has_changed: bool, fails: bool, calls: list[Any], noted: Noted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier run left is handed over first. Files are sent before the branch that names them."""

    @contextmanager
    def at(commit: str, name: str, left: Callable[[], None]) -> Any:
        assert (commit, name) == ("c0", "retrain-esi")
        left()
        yield

    def renew(_params: object, _task: str, approver: str | None) -> Any:
        calls.append(approver)
        if fails:
            raise Refused("it failed")
        return Completed()

    def git(*words: str) -> str:
        return {"rev-parse": "c0", "status": " M dvc.lock" * has_changed * (words[-1] == "--porcelain")}[words[0]]

    to, handed = "built/retrain-esi", list[Any]()
    monkeypatch.chdir(tmp_path)
    names = (
        "clone.share clone.share_cache clone.begin_here clone.pull clone.push branches.go_on records.link note_drift"
    )
    for name in (*names.split(), "runs.begin"):
        noted(name)
    noted("addresses", [])
    noted("load_params", SimpleNamespace(scale="embedded"))
    noted("turns.is_overtaken", False)
    noted("runs.in_turn", nullcontext())
    monkeypatch.setattr(retrain.clone, "at", at)
    monkeypatch.setattr(retrain.clone, "git", git)
    monkeypatch.setattr(retrain, "renew", renew)
    monkeypatch.setattr(retrain.branches, "hand_over_rest", lambda to, _, only: handed.append((to, only)))
    monkeypatch.setattr(retrain.branches, "hand_over", lambda to, _, **how: handed.append((to, how)))
    with pytest.raises(Refused, match="it failed") if fails else nullcontext():
        retrain.scheduled.fn("esi")
    now = [(to, {"only": retrain.WRITTEN, "replaces": False})] * has_changed
    assert handed == [(to, retrain.WRITTEN), *now]
    wanted = ("push", "go_on", "begin_here", "pull", None)
    assert [one for one in calls if one in wanted] == [*wanted, *["push"] * has_changed]


@pytest.mark.parametrize(
    ("settled", "standing", "passes", "is_refused", "asked", "says"),
    [
        ("v2-full", None, True, False, [], "its outcome"),
        (None, "is the champion by a key that was revoked", True, False, ["decide", "promote"], "its outcome"),
        (False, "was refused by its gate", True, False, [], "its outcome"),
        (False, None, False, False, ["decide"], "its outcome"),
        (False, None, True, False, ["decide", "promote"], "its outcome"),
        (False, None, True, True, ["decide", "promote"], "v2-full is not promoted: not of this version"),
    ],
)
def test_a_full_model_is_decided_upon_once_and_promoted_on_the_approval_of_its_version(
    settled: str | bool | None, standing: str | None, passes: bool, is_refused: bool, asked: list[str], says: str,
    calls: list[Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`settled` is False for a full model that is no champion."""
    outcomes = iter([standing] * (settled is False) + ["its outcome"])

    def promote(*given: object) -> None:
        calls.append("promote")
        assert given == ("v2-full", decision, "signed", "of v2")
        if is_refused:
            raise GateError("not of this version")

    decision = SimpleNamespace(promote=passes)
    for name, instead in (
        ("build", lambda *_: None),
        ("releases.settle", lambda *_: settled),
        ("is_champion", lambda *_: settled is not False),
        ("outcome", lambda *_: next(outcomes)),
        ("steps.decide", lambda _: calls.append("decide") or decision),
        ("pages.show_decision", lambda _: None),
        ("champion_of", lambda _, version: version),
        ("approval_of", lambda _, champion: {"v2": ("signed", "of v2")}[champion]),
        ("steps.promote", promote),
    ):
        monkeypatch.setattr(f"flows.release.{name}", instead)
    assert release.full_model(SimpleNamespace(), "v2-full", "v2") == says  # type: ignore[arg-type]
    assert calls == asked
