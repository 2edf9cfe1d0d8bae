"""Alarms as events, and the rollback that follows: with evidence and an approval alone, and once."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import scripted
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from prefect.client.schemas.filters import DeploymentFilter
from ruamel.yaml import YAML

import champions
import dolls
import examined
import laid
from clinrl import paths
from clinrl.config.params import load_params
from clinrl.errors import GateError
from clinrl.registry import versions
from clinrl.release import audit_log, decisions, promotion
from clinrl.signing import keys
from clinrl.tracking.mlflow_store import connect
from clinrl.watching import counts, store
from clinrl.watching.counts import Counts
from clinrl.watching.standing import DRIFT, SAFETY, note, was_acted_on
from processes import eventually, free_port

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The project of `champions`, watched, and Ada approved rollbacks beforehand."""
    examined.copy(champions.built(), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settle(champions.ADA)
    return


def settle(approver: str, **sections: object) -> None:
    watches = {"esi": {"approver": approver}}
    YAML().dump(dolls.PARAMS | champions.SECTIONS | {"watches": watches} | sections, Path("params.yaml"))


def harm(name: str, n: int = 40) -> None:
    """Labels come: so many critical patients of a version were under-triaged."""
    digest, ids = versions.find("esi", name).digest, [f"{name}-{number}" for number in range(n)]
    store.add("esi", digest, Counts(), dict.fromkeys(ids, ("think", "4")), 90)
    assert store.match("esi", dict.fromkeys(ids, "1")) == n


def champion() -> str:
    found = versions.holder("esi", "champion")
    assert found is not None
    return found.name


def raise_(error: BaseException) -> None:
    raise error


def run(flow: Any) -> str:
    return str(flow("esi", return_state=True).message)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The events that the flow hands to Prefect, which get there too."""
    from flows import watch

    events, emit = list[tuple[str, str]](), watch.emit_event

    def noting(event: str, resource: dict[str, str], **how: Any) -> Any:
        events.append((event, resource["prefect.resource.id"]))
        return emit(event, resource, **how)

    monkeypatch.setattr(watch, "emit_event", noting)
    return events


def test_an_alarm_is_one_event_and_the_champion_is_rolled_back_once(released: None, prefect: None, sent: Any) -> None:
    from flows.watch import rollback, watch

    assert run(watch) == "esi was never served from this machine, so nothing is watched here"
    with pytest.raises(
        GateError, match="rollbacks run where `clinrl serve esi` does"
    ):  # another machine has the counts
        rollback("esi")
    store.add("esi", versions.find("esi", "v1").digest, Counts(), {}, 90)
    assert run(watch) == "v1: 0 requests; no new alarm"
    assert run(rollback).startswith("nothing to do")
    harm("v1")
    assert run(watch) == "v1: 0 requests; safety new alarm"
    shutil.rmtree(paths.cases("x1"))  # labels need no exam
    assert run(watch).startswith("v1: 0 requests; safety new alarm; drift was not looked at: data/cases/x1")
    assert sent == [("clinrl.safety", "clinrl.served.esi")] * 2  # until something has followed
    assert run(rollback) == "v2 is the champion of esi again, approved beforehand by Ada Lovelace"
    line = audit_log.read(paths.AUDIT_LOG, keys.keyring())[-1]
    assert (line.kind, line.body["to"]["version"], line.body["approver"]) == ("rollback", "v2", champions.ADA)
    assert line.body["beforehand"] is True
    assert run(rollback).startswith("nothing to do")  # a second event does not bring v1 back
    assert champion() == "v2"


def test_drift_is_sent_once_a_day_until_a_retraining_has_begun(
    released: None, prefect: None, sent: Any, monkeypatch: Any
) -> None:
    """An event may be lost, and a retraining may fail before its turn has come."""
    from flows.watch import note_drift, watch

    entry, day = versions.find("esi", "v1"), store.today()
    note_drift(champions.params(), "esi")  # nothing was served
    reader, _ = counts.reference(load_params(), "v1", entry.digest, [])
    store.add("esi", entry.digest, Counts(), {}, 90)
    note_drift(champions.params(), "esi")  # a retraining by the schedule answers no drift that comes later
    assert not was_acted_on(entry, DRIFT)
    strange = (ROOT / "tests/strangers.txt").read_text(encoding="utf-8").splitlines()
    store.add("esi", counts.key(entry.digest, reader.exam), sum(map(reader.read, strange * 10), Counts()), {}, 90)
    for days, events in ((0, 1), (0, 1), (1, 2)):
        monkeypatch.setattr(store, "today", lambda day=day + days: day)
        assert "drift new alarm" in run(watch)
        assert len(sent) == events
    note_drift(champions.params(), "esi")
    assert was_acted_on(entry, DRIFT)
    monkeypatch.setattr(store, "today", lambda: day + 2)
    assert "no new alarm" in run(watch)
    assert sent == [("clinrl.drift", "clinrl.served.esi")] * 2


@pytest.mark.parametrize("looks", [(0, 2, 3, 4, 5), (0, 7, 14, 21, 28)])
def test_drift_that_no_retraining_answers_is_sent_on_three_days(
    released: None, prefect: None, sent: Any, monkeypatch: Any, looks: tuple[int, ...]
) -> None:
    """As where another machine retrains, which does not know the counts of this one; also if the watch runs weekly."""
    from flows.watch import DAYS, watch

    entry, day = versions.find("esi", "v1"), store.today()
    reader, _ = counts.reference(load_params(), "v1", entry.digest, [])
    strange = (ROOT / "tests/strangers.txt").read_text(encoding="utf-8").splitlines()
    store.add("esi", counts.key(entry.digest, reader.exam), sum(map(reader.read, strange * 10), Counts()), {}, 90)
    for days in looks:
        monkeypatch.setattr(store, "today", lambda day=day + days: day)
        run(watch)
    assert len(sent) == DAYS == 3
    assert was_acted_on(entry, DRIFT)


@pytest.mark.parametrize("was_rolled_back", [False, True])
def test_nobody_rolls_back_to_what_harmed_before_or_without_an_approval(
    released: None, prefect: None, was_rolled_back: bool
) -> None:
    from flows.watch import rollback

    harm("v1")
    settle("")
    with pytest.raises(GateError, match=r"params.yaml names nobody in watches.esi.approver"):
        rollback("esi")
    settle(champions.ADA)
    if was_rolled_back:  # and later labels of it, after it was promoted anew, were better
        note(champions.params(), versions.find("esi", "v2"), SAFETY)
    else:
        harm("v2")
    with pytest.raises(GateError, match="v1 is above its limit, and so was v2; a person must decide"):
        rollback("esi")
    assert champion() == "v1"


def test_harm_that_a_person_has_to_decide_on_is_sent_once_a_day(
    released: None, prefect: None, sent: Any, monkeypatch: Any
) -> None:
    """Each event starts a rollback that fails."""
    from flows.watch import watch

    harm("v1")
    settle("")
    day = store.today()
    for days, events in ((0, 1), (0, 1), (1, 2), (9, 3)):
        monkeypatch.setattr(store, "today", lambda day=day + days: day)
        assert "safety new alarm" in run(watch)
        assert sent == [("clinrl.safety", "clinrl.served.esi")] * events
    settle(champions.ADA)
    for events in (4, 5):  # somebody may answer it now
        run(watch)
        assert len(sent) == events


def test_a_champion_of_meanwhile_is_not_rolled_back(released: None, prefect: None, monkeypatch: Any) -> None:
    from flows import watch

    def left(*given: Any) -> str:
        promotion.rollback(champions.params(), "esi", approver="Grace Hopper")
        return str(decided(*given))

    decided = watch.left_to_a_person
    monkeypatch.setattr(watch, "left_to_a_person", left)
    harm("v1")
    with pytest.raises(GateError, match=r"v2, number \d, is the champion of esi; nothing was rolled back"):
        watch.rollback("esi")
    assert champion() == "v2"


@pytest.mark.parametrize("is_promoted_anew", [False, True])
def test_what_a_person_rolled_back_does_not_come_back_by_itself(
    released: None, prefect: None, is_promoted_anew: bool
) -> None:
    from flows.watch import rollback

    given = champions.params()
    promotion.rollback(given, "esi", approver="Grace Hopper")
    if is_promoted_anew:  # as after a change of keys
        digest = versions.find("esi", "v2").digest
        lines = audit_log.lines(given)
        body = next(line.body for line in lines if line.kind == "promotion" and line.body["digest"] == digest)
        audit_log.write(given, "promotion", body)
    harm("v2")
    with pytest.raises(GateError, match="v2 is above its limit, and Grace Hopper rolled v1 back; a person must decide"):
        rollback("esi")
    assert champion() == "v2"


def test_what_a_person_rolled_back_and_promoted_anew_is_rolled_back_by_itself(released: None, prefect: None) -> None:
    from flows.watch import rollback

    promotion.rollback(champions.params(), "esi", approver="Grace Hopper")
    with dolls.few_draws():
        examined.promote(champions.params(), "v1", champions.ADA, decisions.decide(champions.params(), "v1"))
    harm("v1")
    assert run(rollback).startswith("v2 is the champion of esi again")


def test_a_rollback_that_was_cut_short_is_completed(released: None, prefect: None, monkeypatch: Any) -> None:
    from flows.watch import rollback, watch

    harm("v1")
    given, digest = champions.params(), versions.find("esi", "v1").digest
    with monkeypatch.context() as patch:
        patch.setattr(audit_log, "write", lambda *_, **__: raise_(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            promotion.rollback(given, "esi", approver=champions.ADA, of=digest, beforehand=True)
    assert champion() == "v2"
    assert run(watch).startswith("v1: 0 requests; safety new alarm")
    assert run(rollback).startswith("v2 is the champion of esi again")
    assert audit_log.read(paths.AUDIT_LOG, keys.keyring())[-1].kind == "rollback"
    assert run(watch) == "v2: 0 requests; no new alarm"


@pytest.mark.parametrize("is_killed", [False, True])
def test_who_makes_a_version_champion_again_has_decided(
    released: None, prefect: None, monkeypatch: Any, is_killed: bool
) -> None:
    """Though the flow was killed before it noted what it did: the audit log tells."""
    from flows.watch import rollback, watch

    harm("v1")
    with monkeypatch.context() as patch:
        if is_killed:
            patch.setattr("flows.watch.note", lambda *_: raise_(KeyboardInterrupt()))
        with contextlib.suppress(KeyboardInterrupt):
            run(rollback)
    promotion.rollback(champions.params(), "esi", approver=champions.ADA, of=versions.find("esi", "v2").digest)
    assert champion() == "v1"
    assert run(watch) == "v1: 0 requests; safety new alarm", "once a day, until a person acts"
    assert run(rollback) == "nothing to do: a person chose v1 after a rollback, and has to decide again"
    assert champion() == "v1"


def test_where_no_champion_came_before_a_person_has_to_decide(released: None, prefect: None) -> None:
    from flows.watch import left_to_a_person

    settle(champions.ADA)
    with connect() as client:
        client.delete_model_version("esi", str(versions.find("esi", "v2").number))
    says = left_to_a_person(load_params(), "esi", versions.find("esi", "v1"))
    assert says == "v1 is above its limit, and no champion before it is registered; a person must decide"


def test_an_approver_whose_key_is_elsewhere_has_to_give_the_command_there(
    released: None, prefect: None, monkeypatch: Any
) -> None:
    """A rollback that nothing here can sign would fail at each check."""
    from flows.watch import left_to_a_person, rollback

    grace = keys._signer_of(generate_private_key(SECP256R1()))
    settle(champions.ADA, approvers={champions.ADA: grace.key.line, "Grace Hopper": keys.keyring()[keys.OURS].line})
    says = "v1 is above its limit, and no key of this machine is that of Ada Lovelace; give `clinrl rollback esi --ap"
    assert left_to_a_person(load_params(), "esi", versions.find("esi", "v1")).startswith(says)
    harm("v1")
    with pytest.raises(GateError, match="no key of this machine is that of Ada Lovelace"):
        rollback("esi")
    monkeypatch.setattr(keys, "signer", lambda _: grace)  # as if CLINRL_SIGNING_KEY held hers
    assert left_to_a_person(load_params(), "esi", versions.find("esi", "v1")) == ""


def test_a_last_line_that_another_approver_signed_counts(released: None, prefect: None) -> None:
    from flows.watch import rollback, watch

    grace = keys._signer_of(generate_private_key(SECP256R1()))
    ours = keys.keyring()
    settle(champions.ADA, approvers={champions.ADA: ours[keys.OURS].line, "Grace Hopper": grace.key.line})
    counting = {**ours, "Grace Hopper": grace.key}
    audit_log.append(paths.AUDIT_LOG, "review", {"reason": "read", "revoked": []}, signer=grace, keys=counting)
    harm("v1")
    assert run(watch) == "v1: 0 requests; safety new alarm"
    assert run(rollback) == "v2 is the champion of esi again, approved beforehand by Ada Lovelace"


@pytest.mark.parametrize("harmed", [["v2"], ["v2", "v1"]])
def test_where_a_promotion_was_killed_between_the_names_the_audit_file_says_who_was_before(
    released: None, prefect: None, monkeypatch: Any, harmed: list[str]
) -> None:
    from flows.watch import rollback

    given, point = champions.params(), versions.point
    promotion.rollback(given, "esi", approver=champions.ADA)
    with monkeypatch.context() as patch, dolls.few_draws():
        decision = decisions.decide(given, "v1")
        patch.setattr(versions, "point", lambda *a: raise_(KeyboardInterrupt()) if a[1] == "champion" else point(*a))
        with pytest.raises(KeyboardInterrupt):
            examined.promote(given, "v1", champions.ADA, decision)
    assert versions.holder("esi", "previous") == versions.holder("esi", "champion")
    for name in harmed:
        harm(name)
    if "v1" in harmed:
        with pytest.raises(GateError, match="v2 is above its limit, and so was v1; a person must decide"):
            rollback("esi")
    else:
        assert run(rollback).startswith("v1 is the champion of esi again")
    assert champion() == ("v2" if "v1" in harmed else "v1")


@contextmanager
def served() -> Iterator[tuple[Any, Any]]:
    """`python -m flows serve --servers` in the working directory.

    Yields a client of its Prefect server, and what waits for the deployment of a flow.
    """
    from prefect import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    from flows import credentials

    ports = [str(free_port()) for _ in range(2)]
    clear = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_TRACKING"))}
    env = clear | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src", "PREFECT_RUNNER_POLL_FREQUENCY": "2"}
    words = ["serve", "--servers", "--prefect-port", ports[0], "--mlflow-port", ports[1]]
    log = Path(".clinrl/serve.log")
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen([sys.executable, "-m", "flows", *words], stderr=said, env=env)
    try:
        eventually(lambda: "Prefect " in log.read_text(encoding="utf-8"), 300)
        kept = credentials.load_credentials()
        known = {
            PREFECT_API_URL: f"http://127.0.0.1:{ports[0]}/api",
            PREFECT_API_AUTH_STRING: kept.PREFECT_API_AUTH_STRING,
        }
        with temporary_settings(known), get_client(sync_client=True) as client:

            def find(flow: str) -> Any:
                return {client.read_flow(one.flow_id).name: one for one in client.read_deployments()}.get(flow)

            yield client, lambda flow: eventually(lambda: find(flow), 300)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.slow
def test_an_automation_of_a_real_server_rolls_the_champion_back(released: None) -> None:
    harm("v1")
    with served() as (client, deployment):
        deployment("rollback")
        client.create_flow_run_from_deployment(deployment("watch").id)
        eventually(lambda: champion() == "v2", 300)
    assert audit_log.read(paths.AUDIT_LOG, keys.keyring())[-1].kind == "rollback"


@pytest.mark.slow
def test_drift_starts_the_scheduled_retraining_which_hands_over_a_branch(project: Path, monkeypatch: Any) -> None:
    """On a real server, by its own automation: alarm, event, run of the deployment, clone, branch."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(project.parent / "none"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    examined.promote(load_params(), "v2", champions.ADA, decisions.decide(load_params(), "v2"))

    def change(content: Any) -> None:
        content["versions"]["v3"] = {**content["versions"]["v2"], "parent": "v2", "seed": 9}  # what is to be built
        content["schedules"]["esi"]["answer_within_s"] = 1
        content["watches"] = {"esi": {}}

    laid.edit(project, change)
    scripted.commit()
    digest = versions.find("esi", "v2").digest
    reader, _ = counts.reference(load_params(), "v2", digest, [])
    strange = (ROOT / "tests/strangers.txt").read_text(encoding="utf-8").splitlines()
    store.add("esi", counts.key(digest, reader.exam), sum(map(reader.read, strange * 10), Counts()), {}, 90)
    before = scripted.git("status", "--porcelain"), scripted.git("rev-parse", "HEAD")

    with served() as (client, deployment):
        retraining = deployment("retrain")
        client.create_flow_run_from_deployment(deployment("watch").id)

        def ended() -> Any:
            runs = client.read_flow_runs(deployment_filter=DeploymentFilter(id={"any_": [retraining.id]}))
            started = [run for run in runs if "auto-scheduled" not in run.tags]
            assert len(started) < 2  # drift is said once
            # The server says Failed when nobody has answered in time, and the run goes on and says how it ended.
            return next((run for run in started if run.state.is_final() and run.state.name != "Failed"), None)

        run = eventually(ended, 900)
    assert run.state.name == "Not approved", run.state
    assert run.created_by.type == "AUTOMATION"
    assert "train@v3:" in scripted.git("show", "built/retrain-esi:dvc.lock")
    assert before == (scripted.git("status", "--porcelain"), scripted.git("rev-parse", "HEAD"))
    assert was_acted_on(versions.find("esi", "v2"), DRIFT)
