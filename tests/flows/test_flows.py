"""The flows over a project whose stages are scripted: real DVC, real Prefect, real MLflow."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
import scripted

import examined
import laid
from clinrl import artifacts as artefacts
from clinrl import paths
from clinrl.artifacts import write_json
from clinrl.config.params import Params, load_params
from clinrl.errors import Busy, GateError, Refused
from clinrl.pipeline.propose import Draft
from clinrl.provenance.stages import FIRST
from clinrl.registry import versions
from clinrl.release import audit_log, decisions
from clinrl.release import promotion as releases
from clinrl.signing import approval as approvals
from clinrl.signing.keys import keyring, signer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("prefect", "impatient")


@pytest.fixture
def impatient(prefect: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused run looks for its answer more often than it does for people."""
    monkeypatch.setattr("flows.release.POLL_S", 0.5)


def ended(flow: Any, of: str, approver: str | None = None) -> Any:
    """Run a flow, approved beforehand as on the command line or by nobody, and return its last state."""
    if approver is not None:
        flow = import_module(flow.fn.__module__).approved_by(approver)
    return flow(of, return_state=True)


def edit(change: Callable[[Any], None]) -> None:
    """Change the parameters of the working directory."""
    laid.edit(Path(), change)


def worked() -> list[str]:
    """The trainings, exams and merges that ran, in order."""
    log = Path("worked.jsonl")
    lines = log.read_text().splitlines() if log.exists() else []
    return [" ".join(json.loads(line)["words"]) for line in lines]


def kinds() -> list[str]:
    return [line.kind for line in audit_log.read(paths.AUDIT_LOG, keyring())]


def champion() -> str | None:
    held = versions.holder("esi", "champion")
    return held and held.name


@pytest.fixture
def params(project: Path) -> Params:
    return load_params()


@pytest.mark.long
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_order_of_a_flow_is_an_order_of_the_graph(params: Params, version: str) -> None:
    from dvc.repo import Repo
    from flows.release import folds
    from flows.reproduce import order

    laid.edit(Path(), add_resit)
    params = load_params()
    assert order(params, "v1")[-3:] == ["dataset@x9", "validate@x9", "resit@v1"]
    with Repo(".") as repo:
        graph = repo.index.graph
        stages = {stage.addressing: stage for stage in graph}
        done = {f"evaluate@{name}" for name in params.lineage(version)[:-1]}
        for name in params.lineage(version):
            lines = [
                *order(params, name),
                *(address for fold in folds(params, name) for address in order(params, fold)),
            ]
            done.difference_update(lines)
            for address in lines:
                needed = {before.addressing for before in graph.successors(stages[address])} - {
                    FIRST
                }  # as `repro` does
                assert needed <= done | {"evaluate@v1", "train@v1"} if name != "v1" else needed <= done, address
                done.add(address)


def add_resit(content: Any) -> None:
    """v1 takes a second exam."""
    exam = content["versions"]["v1"]["exam"]
    content["datasets"]["x9"] = {**content["datasets"][exam], "seed": 99}
    content["resits"] = {"v1": {"task": "esi", "data": "x9"}}


def add_v3(content: Any) -> None:
    """Another child of v2, which is the newest then."""
    content["versions"]["v3"] = {**content["versions"]["v2"], "parent": "v2", "seed": 9}


@pytest.mark.long
def test_a_version_made_of_a_draft_is_newer_than_the_draft(params: Params) -> None:
    """Versions of params/drafts.yaml come last, also one that is champion since long."""
    from flows.retrain import of_task

    v2 = params.versions["v2"]
    by_hand, draft = v2.model_copy(update={"parent": "esi-v3"}), v2.model_copy(update={"parent": "v2"})
    with_both = params.model_copy(update={"versions": {**params.versions, "esi-v4": by_hand, "esi-v3": draft}})
    assert of_task(with_both, "esi") == ["v1", "v2", "esi-v3", "esi-v4"]


def promoted(version: str, approver: str = "Ada Lovelace") -> None:
    """Make a registered version the champion without a flow."""
    decision = decisions.decide(load_params(), version)
    examined.promote(load_params(), version, approver, decision)


@pytest.mark.long
@pytest.mark.parametrize("done", [pytest.param((), marks=pytest.mark.slow), ("probe", "train")])
def test_a_version_is_built_registered_and_shown(
    project: Path, monkeypatch: pytest.MonkeyPatch, done: tuple[str, ...]
) -> None:
    from dvc.repo import Repo
    from flows.reproduce import reproduce

    edit(add_v3)
    monkeypatch.setattr(sys, "argv", ["scripted.py"])
    for stage in done:  # here, which is faster than a DVC and a process for each
        scripted.run(load_params(), stage, "v3")
        with Repo() as repo:
            repo.commit(f"{stage}@v3", force=True)
    before = worked()
    assert ended(reproduce, "v3").message == f"v3 is built and registered; {3 - len(done)} stages ran"
    assert worked()[len(before) :] == ([] if "train" in done else ["train v3"]) + ["evaluate v3"]
    assert versions.find("esi", "candidate").name == "v3"
    page = artifacts()
    assert page["comparison-v3"].type == "table"
    assert {row["mode"] for row in json.loads(page["comparison-v3"].data)} == {"think", "direct"}
    assert page["curves-v3"].data.startswith("data:image/png;base64,")
    assert len(versions.entries("esi")) == 3


@pytest.mark.long
def test_a_retraining_releases_the_newest_and_the_next_one_has_nothing_to_do(project: Path) -> None:
    from flows.retrain import retrain

    said, before = "v2 is the champion of esi; v2-full is the champion of esi-merged", worked()
    assert ended(retrain, "esi", "Ada Lovelace").message == said
    assert (champion(), worked()) == ("v2", before)
    assert len(versions.entries("esi")) == 2
    (full,) = versions.entries("esi-merged")
    assert (full.name, full.aliases, full.tags["approver"]) == ("v2-full", ("champion",), "Ada Lovelace")
    assert kinds() == ["decision", "approval", "promotion"] * 2
    assert "may be promoted" in artifacts()["decision-v2"].data
    state = ended(retrain, "esi")
    assert (state.name, state.is_completed()) == ("Nothing to do", True)
    assert "v2 is the champion" in state.message
    assert (worked(), kinds()) == (before, ["decision", "approval", "promotion"] * 2)


@pytest.mark.slow
def test_a_retraining_with_nothing_to_do_drafts_builds_and_releases_the_next_version(project: Path) -> None:
    from flows.retrain import retrain

    promoted("v2")
    ended(retrain, "esi", approver="Ada Lovelace")
    edit(scripted.with_drafts)
    before = Path("params.yaml").read_bytes(), Path("params/esi.yaml").read_bytes()
    state = ended(retrain, "esi", approver="Ada Lovelace")
    assert state.message == "esi-v3 is the champion of esi"
    made = load_params().versions["esi-v3"]
    assert (made.parent, made.exam, made.profile) == ("v2", "x1", "esi-v3")
    assert load_params().datasets[made.data].emphasis == {"severe_pain": 3.0}
    assert load_params().reward("esi-v3").modifiers.severe_pain_miss == -0.5
    assert champion() == "esi-v3"
    record = json.loads(paths.draft("esi-v3").read_text())
    assert (record["outcome"], record["lever"], record["drafts_on_exam"]) == ("promoted", "modifiers", 1)
    assert "look 1 of at most 1 at this exam" in artifacts()["decision-esi-v3"].data
    state = ended(retrain, "esi", approver="Ada Lovelace")
    assert (state.name, "no draft, since the error budget of x1 is used up" in state.message) == ("Nothing to do", True)
    assert (Path("params.yaml").read_bytes(), Path("params/esi.yaml").read_bytes()) == before
    assert {"draft-esi-v3", "comparison-esi-v3", "decision-esi-v3"} <= artifacts().keys()


@pytest.mark.slow
def test_a_draft_without_a_gain_is_dropped_and_the_next_pulls_another_lever(project: Path) -> None:
    from flows.retrain import retrain

    promoted("v2")
    ended(retrain, "esi", approver="Ada Lovelace")
    edit(scripted.with_drafts)
    Path("no-better").touch()
    before, levers = load_params(), []
    for number in (3, 4, 5, 6):
        state = ended(retrain, "esi", approver="Ada Lovelace")
        assert (state.name, champion()) == ("Dropped", "v2")
        assert (
            f"esi-v{number} is dropped: its gain in exact over v2 on m1, averaged over think and direct, has "
            "a one-sided p of 1; " in state.message
        )
        assert load_params() == before
        record = json.loads(paths.draft(f"esi-v{number}").read_text())
        assert record["outcome"] == "dropped"
        assert record["drafts_on_exam"] == number - 2
        assert paths.report(f"esi-v{number}").is_dir()
        assert versions.holder("esi", "candidate") is None
        levers.append(record["lever"])
    assert levers == ["modifiers", "data", "lower-rate", "higher-rate"]
    assert not any("budget" in line.body for line in audit_log.read(paths.AUDIT_LOG, keyring())), (
        "no exam was looked at"
    )
    state = ended(retrain, "esi", approver="Ada Lovelace")
    assert (state.name, "every lever was pulled from v2" in state.message) == ("Nothing to do", True)


@pytest.mark.slow
def test_a_draft_that_an_alarm_stops_is_dropped_and_any_other_failure_is_not(project: Path) -> None:
    from flows.retrain import retrain

    promoted("v2")
    ended(retrain, "esi", approver="Ada Lovelace")
    edit(scripted.with_drafts)
    Path("fail").write_text("train")
    before = load_params()
    state = ended(retrain, "esi", approver="Ada Lovelace")
    assert state.is_failed()
    assert "esi-v3" in load_params().versions
    Path("fail").write_text("train 4")
    state = ended(retrain, "esi", approver="Ada Lovelace")
    assert (state.name, champion()) == ("Dropped", "v2")
    assert "esi-v3 is dropped: it cannot be trained: train@esi-v3 failed: train of esi-v3 fails today" in state.message
    assert load_params() == before
    refused = paths.probe_proof("esi-v4").with_suffix(".failed.json")
    refused.parent.mkdir(parents=True, exist_ok=True)
    refused.write_text("{}")
    Path("fail").write_text("probe")
    state = ended(retrain, "esi", approver="Ada Lovelace")
    assert (state.name, "esi-v4 is dropped: it cannot be trained: probe@" in state.message) == ("Dropped", True)


@pytest.mark.slow
def test_a_draft_whose_run_was_cut_short_is_concluded_by_the_next(project: Path) -> None:
    from flows.drafting import draft_next
    from flows.retrain import retrain
    from prefect import flow

    from clinrl.pipeline import propose as drafts

    promoted("v2")
    ended(retrain, "esi", approver="Ada Lovelace")
    edit(scripted.with_drafts)
    begun = flow(lambda: draft_next(load_params(), "esi"), name="cut-short")()
    left = drafts.find("esi-v3")
    assert left is not None
    assert (begun.name, left.outcome) == ("esi-v3", "open")
    shutil.rmtree(paths.mined("v2"))  # a champion that a rollback brings back may never have been mined here
    assert ended(retrain, "esi", approver="Ada Lovelace").message == "esi-v3 is the champion of esi"


@pytest.mark.long
def test_a_params_yaml_that_is_edited_meanwhile_stops_the_release(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import release

    def answer(*_: Any) -> tuple[str, str]:
        edit(lambda content: content["versions"]["v2"].update(seed=99))
        return "Ada Lovelace", ""

    monkeypatch.setattr(release, "answer", answer)
    state = ended(release.release, "v2")
    assert state.is_failed()
    assert "params.yaml was edited while this ran: versions.v2 has changed" in state.message
    assert champion() is None


@pytest.mark.long
def test_a_stage_that_fails_ends_the_flow_with_its_own_words(project: Path) -> None:
    from flows.reproduce import reproduce

    edit(add_v3)
    Path("fail").write_text("probe")
    error = ended(reproduce, "v3").result(raise_on_failure=False)
    assert isinstance(error, Refused)
    assert str(error) == "probe@v3 failed: probe of v3 fails today"
    assert len(versions.entries("esi")) == 2


@pytest.mark.long
def test_a_refused_version_is_registered_and_the_champion_stays(project: Path) -> None:
    from flows.release import release
    from flows.retrain import retrain

    promoted("v1")
    edit(lambda content: content["gates"]["esi"]["limits"]["exact"]["min"].update(embedded=0.99))
    state = ended(release, "v2", "Ada Lovelace")
    assert (state.name, state.is_completed()) == ("Refused", True)
    assert "exact (direct) is 0.9" in state.message
    assert (champion(), versions.find("esi", "v2").tags["gate"]) == ("v1", "refused")
    assert "may **not** be promoted" in artifacts()["decision-v2"].data
    again = ended(retrain, "esi", "Ada Lovelace")
    assert (again.name, "refused by its gate" in again.message) == ("Nothing to do", True)


@pytest.mark.long
def test_a_full_model_that_its_gate_refuses_stays_what_it_was(project: Path) -> None:
    from flows.release import release
    from flows.retrain import retrain

    promoted("v2")
    edit(lambda content: content["gates"]["esi"].update(least_cases=41))
    state = ended(release, "v2")
    assert state.message == "v2 is the champion of esi; v2-full was refused by its gate"
    assert (champion(), versions.holder("esi-merged", "champion")) == ("v2", None)
    assert "asks for 41 or more" in artifacts()["decision-v2-full"].data
    again = ended(retrain, "esi")
    assert (again.name, again.message.endswith("v2 is the champion of esi")) == ("Nothing to do", True)


@pytest.mark.slow
def test_a_merge_is_built_registered_and_released_by_its_name(project: Path) -> None:
    from flows.release import release
    from flows.reproduce import reproduce

    promoted("v2")
    assert ended(reproduce, "v2-full").message == "v2-full is built and registered; 0 stages ran"
    assert versions.find("esi-merged", "candidate").name == "v2-full"
    assert ended(release, "v2-full", "Ada Lovelace").message == "v2-full is the champion of esi-merged"
    edit(lambda content: content["merges"]["folds"].update(again={**content["merges"]["folds"]["v2-full"]}))
    assert ended(reproduce, "again").message == "again is built and registered; 2 stages ran"


@pytest.mark.long
def test_what_was_rolled_back_is_not_promoted_again_by_itself(project: Path) -> None:
    from flows.release import release
    from flows.retrain import retrain

    edit(lambda content: content["merges"]["folds"].clear())  # other tests release full models
    promoted("v1")
    promoted("v2")
    releases.rollback(load_params(), "esi", approver="Grace Hopper")
    (paths.report("v1") / "think.json").unlink()  # an older version is examined anew
    state = ended(retrain, "esi", "Ada Lovelace")
    assert (state.name, champion()) == ("Not released", "v1")
    assert "everything is up to date and registered; v2 was rolled back by Grace Hopper" in state.message
    state = ended(retrain, "esi", "Ada Lovelace")
    assert (state.name, champion()) == ("Nothing to do", "v1")
    assert "v2 was rolled back by Grace Hopper" in state.message
    version = {**load_params().versions["v2"].model_dump(mode="json"), "file": "drafts"}
    made = Draft(
        name="v2", task="esi", parent="v1", parent_digest="a", mining_digest="a", lever="data", targets=(),
        drafts_on_exam=1, dataset=None, profile={}, version=version,
    )  # fmt: skip
    write_json(paths.draft("v2"), made.model_dump(mode="json"))  # a draft that a person released by hand
    state = ended(retrain, "esi", "Ada Lovelace")
    assert (state.name, state.message, champion()) == ("Not released", "v2 was rolled back by Grace Hopper", "v1")
    assert json.loads(paths.draft("v2").read_text())["outcome"] == "refused"
    assert ended(release, "v2", "Ada Lovelace").is_completed()
    assert champion() == "v2"


@pytest.mark.long
def test_nobody_to_ask_is_said_and_nothing_is_promoted(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.release import release

    from flows import servers

    monkeypatch.setenv(servers.PRIVATE, "1")
    error = ended(release, "v2").result(raise_on_failure=False)
    assert isinstance(error, GateError)
    assert "nobody can be asked" in str(error)
    assert (champion(), kinds()) == (None, ["decision"])


def test_a_release_that_was_cancelled_while_it_waited_writes_down_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.exceptions import FlowPauseTimeout
    from prefect.states import Cancelled, Running

    from flows import release

    states, forced = [Running(), Cancelled()], list[Any]()

    def given_up(*_: Any, **__: Any) -> None:
        raise FlowPauseTimeout("nobody answered")

    client = SimpleNamespace(
        read_flow_run=lambda _: SimpleNamespace(state=states.pop(0)),
        set_flow_run_state=lambda *words, **_: forced.append(words),
    )
    monkeypatch.setattr(release, "get_client", lambda **_: nullcontext(client))
    monkeypatch.setattr(release, "get_run_logger", lambda: SimpleNamespace(info=lambda *_: None))
    monkeypatch.setattr(release, "flow_run", SimpleNamespace(ui_url="", get_id=uuid4))
    monkeypatch.setattr(release.pages, "approval_page", lambda *_: "")
    monkeypatch.setattr(release, "pause_flow_run", given_up)
    decision: Any = SimpleNamespace(task="esi", digest="d", candidate="v2")
    with pytest.raises(Refused, match="this release was cancelled"):
        release._ask(decision, 60, "")
    states[:] = [Running(), Running()]
    assert (release._ask(decision, 60, ""), len(forced)) == (None, 1), "nobody answered"


def test_a_yes_counts_with_the_name_of_a_person_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import release

    asked, decision = list[str](), SimpleNamespace(task="esi", digest="d", candidate="v2")
    answers = iter(release.Approval(approve=True, approver=name, token="t") for name in ("", " Ada Lovelace "))
    monkeypatch.setattr(release, "_ask", lambda _decision, _s, wrong: asked.append(wrong) or next(answers))
    monkeypatch.setattr(release, "get_run_logger", lambda: SimpleNamespace(warning=lambda *_: None))
    monkeypatch.setattr(approvals, "check_token", lambda _params, *signed: signed)
    params: Any = SimpleNamespace(schedules={})
    assert release.answer(params, decision, None) == (("d", "t", "Ada Lovelace"), "")
    assert [wrong.startswith("the last answer was yes, but a promotion needs the name") for wrong in asked] == [0, 1]
    with pytest.raises(GateError, match="needs the name of the person"):
        release.answer(params, decision, "")
    monkeypatch.setattr(release, "PREFECT_API_URL", SimpleNamespace(value=lambda: None))
    with pytest.raises(GateError, match="nobody can be asked"):
        release.answer(params, decision, None)


def answering(*first: dict[str, Any], **said: Any) -> threading.Thread:
    """Answer the next run that pauses, from another thread, as a person does on its page; with `signed`, as one who has
    a key here. Each of `first` is an answer after which it is asked again."""
    from prefect.client.schemas.objects import StateType
    from prefect.flow_runs import resume_flow_run

    def wait_and_answer() -> None:
        for one in first:
            resume_flow_run(wait_for_run(StateType.PAUSED), run_input=one)
        run = wait_for_run(StateType.PAUSED)
        resume_flow_run(run, run_input=said | ({"token": token(said["approver"])} if said.pop("signed", False) else {}))

    thread = threading.Thread(target=wait_and_answer)
    thread.start()
    return thread


def token(approver: str) -> str:
    """What `clinrl approve` prints for the last decision."""
    told = [line.body for line in audit_log.read(paths.AUDIT_LOG, keyring()) if line.kind == "decision"]
    return approvals.token(artefacts.digest(told[-1]), approver, signer("embedded"))


def wait_for_run(kind: Any) -> Any:
    """The id of the newest flow run in a state, as soon as there is one."""
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.sorting import FlowRunSort

    chosen = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[kind])))
    deadline = time.monotonic() + 60
    with get_client(sync_client=True) as client:
        while not (runs := client.read_flow_runs(flow_run_filter=chosen, sort=FlowRunSort.START_TIME_DESC)):
            assert time.monotonic() < deadline, f"no run became {kind}"
            time.sleep(0.3)
    return runs[0].id


def artifacts() -> dict[str, Any]:
    """The newest artifact of each key."""
    from prefect import get_client

    with get_client(sync_client=True) as client:
        found = client.read_artifacts(limit=200)
    return {artifact.key: artifact for artifact in sorted(found, key=lambda artifact: artifact.created)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            {"approve": False, "approver": "Ada Lovelace", "note": "not this week"},
            "somebody in the name of Ada Lovelace said no: not this week",
        ),
        ({}, "somebody said no"),
    ],
)
def test_a_no_changes_nothing(project: Path, said: dict[str, Any], why: str) -> None:
    from flows.release import release

    thread = answering(**said)
    state = ended(release, "v2")
    thread.join()
    assert (state.name, state.is_completed()) == ("Not approved", True)
    assert state.message == f"v2 was not approved: {why}"
    assert (champion(), kinds()) == (None, ["decision", "refusal"])


@pytest.mark.long
def test_a_person_approves_on_the_page_and_a_yes_without_a_name_or_a_token_is_asked_for_again(project: Path) -> None:
    from flows.release import release

    nobody, stranger = {"approve": True, "approver": " "}, {"approve": True, "approver": "Drive By", "token": "c2ln"}
    thread = answering(nobody, stranger, approve=True, approver="Ada Lovelace", signed=True)
    assert ended(release, "v2").message == "v2 is the champion of esi; v2-full is the champion of esi-merged"
    thread.join()
    assert versions.find("esi", "champion").tags["approver"] == "Ada Lovelace"
    assert "refusal" not in kinds()


@pytest.mark.long
def test_a_server_that_is_away_meanwhile_costs_no_question_and_no_answer(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx
    from flows.release import release
    from prefect.client.orchestration import SyncPrefectClient

    read, failed, is_back = SyncPrefectClient.read_flow_run, list[Any](), threading.Event()

    def away_at_first(self: Any, flow_run_id: Any) -> Any:
        run = read(self, flow_run_id)
        if threading.current_thread() is threading.main_thread() and run.state.is_paused() and not is_back.is_set():
            failed.append(run.id)
            if len(failed) == 2:
                is_back.set()
            raise httpx.ConnectError("away")
        return run

    def answer() -> None:
        assert is_back.wait(60)
        answering(approve=True, approver="Ada Lovelace", signed=True).join()

    monkeypatch.setattr(SyncPrefectClient, "read_flow_run", away_at_first)
    thread = threading.Thread(target=answer)
    thread.start()
    assert ended(release, "v2").message == "v2 is the champion of esi; v2-full is the champion of esi-merged"
    thread.join()
    assert len(failed) == 2


@pytest.mark.long
def test_a_yes_that_stays_without_a_token_is_none(project: Path) -> None:
    from flows.release import release

    edit(lambda content: content["schedules"]["esi"].update(answer_within_s=6))
    thread = answering(approve=True, approver="Drive By", token="c2ln")
    state = ended(release, "v2")
    thread.join()
    assert "nobody answered within 0:00:06; the last answer was yes, but this token is no approval" in state.message
    assert (champion(), kinds()) == (None, ["decision", "refusal"])


@pytest.mark.long
def test_silence_is_no_and_an_answer_after_it_is_refused(project: Path) -> None:
    from flows.release import release
    from flows.retrain import retrain
    from prefect import get_client
    from prefect.client.schemas.objects import StateType
    from prefect.exceptions import NotPausedError
    from prefect.flow_runs import resume_flow_run

    edit(lambda content: content["schedules"]["esi"].update(answer_within_s=2))
    states: list[Any] = []
    thread = threading.Thread(target=lambda: states.append(wait_for_run(StateType.PAUSED)))
    thread.start()
    state = ended(release, "v2")
    thread.join()
    assert state.message == "v2 was not approved: nobody answered within 0:00:02"
    assert (champion(), kinds()) == (None, ["decision", "refusal"])
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(states[0]).state.name == "Not approved"
    with pytest.raises(NotPausedError, match="Cannot resume a run that isn't paused"):
        resume_flow_run(states[0], run_input={"approve": True, "approver": "Ada Lovelace"})
    assert champion() is None
    again = ended(retrain, "esi")
    assert (again.name, "was not approved (nobody answered" in again.message) == ("Nothing to do", True)


@pytest.mark.long
def test_a_champion_of_meanwhile_stays(project: Path) -> None:
    from flows.release import release

    def promote_another() -> None:
        from prefect.client.schemas.objects import StateType
        from prefect.flow_runs import resume_flow_run

        run = wait_for_run(StateType.PAUSED)
        signed = token("Ada Lovelace")
        promoted("v1")
        resume_flow_run(run, run_input={"approve": True, "approver": "Ada Lovelace", "token": signed})

    thread = threading.Thread(target=promote_another)
    thread.start()
    state = ended(release, "v2")
    thread.join()
    assert isinstance(state.result(raise_on_failure=False), GateError)
    assert "became the champion of esi after the decision" in state.message
    assert champion() == "v1"


INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
)
"""A program that becomes another one, which hears Ctrl-C even where these tests run in the background."""


def command(*words: str) -> "subprocess.Popen[str]":
    """A flow as a person starts it, in a process of its own, recorded by the server of these tests."""
    from prefect.settings import PREFECT_API_URL

    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src", "PREFECT_API_URL": str(PREFECT_API_URL.value())}
    program = [sys.executable, "-c", INTERRUPTIBLE, sys.executable, "-m", "flows", *words]
    return subprocess.Popen(program, env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_of_two_retrainings_that_a_server_records_one_trains(empty: Path) -> None:
    Path("slow").write_text("0.5")
    processes = [command("retrain", "esi", "--approver", name) for name in ("Ada Lovelace", "Grace Hopper")]
    said = [process.communicate(timeout=180)[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, Busy.exit_code], said
    trained = [json.loads(line)["words"] for line in Path("worked.jsonl").read_text().splitlines()]
    assert len(trained) == len({tuple(words) for words in trained})
    assert champion() == "v2"
    assert [entry.name for entry in versions.entries("esi")] == ["v1", "v2"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_was_ended_leaves_nothing_running_and_is_continued(empty: Path, number: int) -> None:
    from flows.retrain import retrain
    from prefect import get_client
    from prefect.client.schemas.objects import StateType

    Path("slow").write_text("30")
    process = command("reproduce", "v1")
    run = wait_for_run(StateType.RUNNING)
    deadline = time.monotonic() + 60
    with get_client(sync_client=True) as client:
        while not any(tag.startswith("slot-") for tag in client.read_flow_run(run).tags):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
        Path("slow").unlink()
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert said.splitlines()[-1] == "clinrl: interrupted; give the same command again"
        else:
            assert process.returncode == -number
        assert ended(retrain, "esi", "Ada Lovelace").is_completed()
        assert client.read_flow_run(run).state.type == StateType.CRASHED
        states = {task.state.type for task in client.read_task_runs()}
        assert StateType.RUNNING not in states
    assert champion() == "v2"


def test_runs_of_dead_processes_are_found_however_many_wait(prefect: None) -> None:
    from flows.reproduce import reproduce
    from prefect import get_client
    from prefect.client.schemas.objects import StateType
    from prefect.states import Pending

    from clinrl.runtime import processes
    from flows import runs

    class OneByOne:
        """A client of a server that lists one run at a time."""

        def read_flow_runs(self, **given: Any) -> Any:
            return client.read_flow_runs(**given, limit=1)

        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

    host, number, _ = processes.identity().rsplit(":", 2)
    ended, ours = f"process:{host}:{number}:ended", f"process:{processes.identity()}"
    tags = [[ended], [ours], [], [ended, ours], [ended]]
    with get_client(sync_client=True) as client:
        made = [client.create_flow_run(reproduce, tags=some, state=Pending()).id for some in tags]
        assert {made[0], made[-1]} <= {*runs.sweep(OneByOne())}
        states = [client.read_flow_run(run).state.type for run in made]
        for run in made[1:-1]:
            client.delete_flow_run(run)
    assert states == [StateType.CRASHED, *[StateType.PENDING] * 3, StateType.CRASHED]


@pytest.mark.parametrize("last", ["Pending", "Running", "Cancelling"])
def test_runs_that_a_killed_server_of_deployments_accepted_are_ended_later(
    last: str, prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they died between Prefect's state Running and `begin`, and by the server's clock alone."""
    import time

    from flows.reproduce import reproduce
    from prefect import get_client, states

    from flows import runs

    with get_client(sync_client=True) as client:
        of = client.create_flow(reproduce)
        ours, foreign = (
            client.create_flow_run_from_deployment(
                client.create_deployment(of, name=f"of-{tag}", entrypoint="flows/reproduce.py:reproduce", tags=[tag]),
                state=getattr(states, last)(),
            ).id
            for tag in (runs.OURS, "others")
        )
        fast = time.time() + 2 * runs.PENDING_S
        monkeypatch.setattr(time, "time", lambda: fast)
        assert not {ours, foreign} & {*runs.sweep(client)}, "it may begin yet"
        monkeypatch.setattr(runs, "PENDING_S", -60.0)  # HTTP gives whole seconds, and a busy server old ones
        assert {ours, foreign} & {*runs.sweep(client)} == {ours}
        assert client.read_flow_run(ours).state.is_cancelled(), "so that it cannot begin later"
        client.delete_flow_run(foreign)


def test_a_run_that_holds_two_slots_says_so_while_it_holds_them(prefect: None) -> None:
    from prefect import flow, get_client, task
    from prefect.runtime import flow_run

    from flows import runs

    found = list[list[str]]()

    def look() -> None:
        with get_client(sync_client=True) as client:
            found.append([tag for tag in client.read_flow_run(flow_run.get_id()).tags if tag.startswith("slot-")])

    @task
    def trains() -> None:
        with runs.slot("training"):
            look()

    @flow
    def retrains() -> None:
        with runs.slot("retrain"):
            trains()
            look()
        look()

    retrains()
    assert found == [["slot-retrain:", "slot-training:"], ["slot-retrain:"], []]


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the slots that a run was refused; it tries again at once."""
    from flows import runs

    refused, taken = list[str](), runs._taken

    def counted(client: Any, name: str, tag: str) -> bool:
        if found := taken(client, name, tag):
            return found
        refused.append(name)
        assert len(refused) < 20
        return found

    monkeypatch.setattr(runs, "WAIT_S", 0.05)
    monkeypatch.setattr(runs, "_taken", counted)
    return refused


@pytest.mark.parametrize("ends", ["by itself", "killed", "deleted"])
def test_a_slot_is_free_when_the_run_that_holds_it_has_ended(prefect: None, waiting: list[str], ends: str) -> None:
    """Also that of a killed run, at once."""
    from prefect import flow, get_client, states

    from clinrl.runtime import processes
    from flows import runs

    host, number, _ = processes.identity().rsplit(":", 2)
    name = f"ended {ends}"
    look = runs.time.sleep

    @flow
    def waits() -> None:
        with get_client(sync_client=True) as client:
            tags = [f"slot-{name}:", f"process:{processes.identity()}"]
            holder = client.create_flow_run(waits, tags=tags, state=states.Running()).id

            def later(seconds: float) -> None:
                if len(waiting) == 3:
                    if ends == "by itself":
                        client.set_flow_run_state(holder, states.Completed(), force=True)
                    elif ends == "killed":
                        client.update_flow_run(holder, tags=[tags[0], f"process:{host}:{number}:ended"])
                    else:
                        client.delete_flow_run(holder)
                look(seconds)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(runs, "time", SimpleNamespace(sleep=later))  # of this module alone
                with runs.slot(name):
                    pass

    waits()
    assert waiting == [name] * 3


def test_two_runs_that_take_the_last_slot_at_once_leave_it_and_try_again(
    prefect: None, waiting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import flow, get_client, states

    from flows import runs

    retag, name = runs._tag, "contested"

    @flow
    def takes() -> None:
        with get_client(sync_client=True) as client:

            def beside(*words: str, **named: Any) -> None:
                if f"slot-{name}:" in words and not waiting:  # another run looked before this one's tag was there
                    other.append(client.create_flow_run(takes, tags=[f"slot-{name}:"], state=states.Running()).id)
                elif other:
                    client.set_flow_run_state(other.pop(), states.Completed(), force=True)
                retag(*words, **named)

            other = list[Any]()
            monkeypatch.setattr(runs, "_tag", beside)
            with runs.slot(name):
                assert not other

    takes()
    assert waiting == [name]


def test_as_many_runs_hold_a_slot_as_the_limit_says(prefect: None, waiting: list[str]) -> None:
    from prefect import flow, get_client, states
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

    from flows import runs

    @flow
    def takes() -> None:
        with get_client(sync_client=True) as client:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="room for two", limit=2))
            first, _ = (
                client.create_flow_run(takes, tags=["slot-room for two:"], state=states.Running()).id for _ in range(2)
            )
            with pytest.raises(AssertionError), runs.slot("room for two"):
                pass
            client.set_flow_run_state(first, states.Failed(), force=True)
            with runs.slot("room for two"):
                pass

    takes()


@pytest.mark.parametrize("look", [1, 2])
def test_a_run_that_waits_outlasts_an_absence_of_the_server_and_leaves_no_tag(
    look: int, prefect: None, waiting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that waited with a tag each would wait for each other for ever."""
    from prefect import flow, get_client, states
    from prefect.runtime import flow_run

    from flows import runs

    tagged, looks, name = runs._tagged, list[int](), f"away at look {look}"

    @flow
    def takes() -> None:
        with get_client(sync_client=True) as client:

            def away(*words: Any) -> Any:
                looks.append(1)
                if len(looks) == look:
                    other.append(client.create_flow_run(takes, tags=[f"slot-{name}:"], state=states.Running()).id)
                    raise httpx.ConnectError("refused")
                if len(waiting) == 2 and other:
                    run = client.read_flow_run(flow_run.get_id())
                    assert not [tag for tag in run.tags if tag.startswith("slot-")]
                    client.set_flow_run_state(other.pop(), states.Completed(), force=True)
                return tagged(*words)

            other = list[Any]()
            monkeypatch.setattr(runs, "_tagged", away)
            with runs.slot(name):
                pass

    takes()
    assert len(waiting) == 2


def test_a_run_that_the_server_has_ended_takes_no_slot(prefect: None) -> None:
    """It would not be counted: another could work beside it."""
    from prefect import flow, get_client, states
    from prefect.runtime import flow_run

    from flows import runs

    @flow
    def takes() -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.get_id(), states.Crashed(message="silent"), force=True)
        with runs.slot("of the living"):
            pytest.fail("it has it")

    assert "the Prefect server counts this run as ended" in str(takes(return_state=True).message)


def test_a_run_that_is_tried_again_begins_without_the_slots_that_it_had(prefect: None) -> None:
    from prefect import flow, get_client
    from prefect.runtime import flow_run

    from clinrl.runtime import processes
    from flows import runs

    found = list[str]()

    @flow
    def again() -> None:
        runs.begin()
        with get_client(sync_client=True) as client:
            found.extend(client.read_flow_run(flow_run.get_id()).tags)

    with get_client(sync_client=True) as client:
        from prefect.flow_engine import run_flow
        from prefect.states import Pending

        run = client.create_flow_run(again, tags=["clinrl", "slot-a:", "process:elsewhere:1:x"], state=Pending())
    run_flow(again, flow_run=run, return_type="state")
    assert sorted(found) == ["clinrl", f"process:{processes.identity()}"]
