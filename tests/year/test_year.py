"""The simulated year: its plan, its page, and a few weeks of it."""

import errno
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
for folder in (ROOT, ROOT / "docs", HERE):
    sys.path.insert(0, str(folder))

import disk  # noqa: E402
import timeline  # noqa: E402
import world  # noqa: E402

import champions  # noqa: E402
import examined  # noqa: E402
import forks  # noqa: E402
from clinrl.config.files import read_files  # noqa: E402
from clinrl.config.params import Params, load_params  # noqa: E402
from clinrl.registry import versions  # noqa: E402
from clinrl.release import promotion  # noqa: E402
from clinrl.watching import counts, store  # noqa: E402


def sections() -> dict[str, Any]:
    base = read_files(ROOT / "params.yaml")[ROOT / "params/esi.yaml"]["bases"]["esi"]
    return {**world.sections({"Grace Hopper": ""}, base), "approvers": {}}


@pytest.mark.parametrize("is_toy", [False, True])
def test_every_draft_of_the_year_has_parameters_that_are_valid(is_toy: bool) -> None:
    whole = world.toy(sections()) if is_toy else sections()
    for draft in map(world.toy_draft, world.DRAFTS) if is_toy else world.DRAFTS:
        block = {"task": "esi", "parent": draft.parent, "data": f"{draft.name}-data", "exam": "x1"}
        whole["datasets"][f"{draft.name}-data"] = dict(draft.dataset)
        whole["profiles"][draft.name] = dict(draft.profile)
        whole["versions"][draft.name] = block | {"profile": draft.name, "seed": draft.week}
    params = Params.model_validate(whole)
    assert [draft.week for draft in world.DRAFTS] == sorted(draft.week for draft in world.DRAFTS)
    planted = [draft for draft in world.DRAFTS if draft.is_planted]
    assert len(planted) == len({json.dumps([dict(draft.profile), dict(draft.dataset)]) for draft in planted}) == 6
    assert all(not draft.profile.get("waiver") for draft in world.DRAFTS)
    assert {params.versions[draft.name].parent for draft in world.DRAFTS} <= {*params.versions}


def test_every_kind_of_event_has_its_line_in_the_picture() -> None:
    assert {event.kind for event in world.EVENTS} == {*timeline.INCIDENTS}
    assert all(1 <= event.first <= event.last <= world.WEEKS for event in world.EVENTS)


def test_patients_follow_from_week_and_seed_and_one_a_week_has_the_canary() -> None:
    once = world.requests(3, 7, 20)
    assert once == world.requests(3, 7, 20) != world.requests(4, 7, 20)
    assert [world.CANARY in one.text for one in once].count(True) == 1


def test_a_sensor_changes_what_is_written_and_a_heat_wave_who_is_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    for kind in ("", world.SENSOR, world.SHIFT, world.WORDINGS):
        monkeypatch.setattr(world, "EVENTS", (world.Event(5, 5, kind, "as usual"),))
        asked[kind] = world.requests(5, 7, 60)
    levels = {kind: [one.level for one in of] for kind, of in asked.items()}
    texts = {kind: [one.text for one in of] for kind, of in asked.items()}
    assert levels[world.SENSOR] == levels[world.WORDINGS] == levels[""] != levels[world.SHIFT]
    assert len({tuple(of) for of in texts.values()}) == 4
    assert sum("84" in one for one in texts[world.SENSOR]) > 30 > sum("84" in one for one in texts[""])


def test_poisoned_labels_are_all_the_same_and_those_of_other_weeks_are_right() -> None:
    (week,) = (event.last for event in world.EVENTS if event.kind == world.POISON)
    asked = [world.Request("", level, "", True) for level in (1, 2, 5)]
    assert [world.label(one, week) for one in asked] == [1, 1, 1]
    assert [world.label(one, week + 1) for one in asked] == [1, 2, 5]


def test_a_disk_that_is_full_is_full_for_one_process_alone(tmp_path: Path) -> None:
    def program() -> int | None:
        try:
            disk.fill(tmp_path / "full")
        except OSError:
            return None
        try:
            (tmp_path / "full/file").write_bytes(bytes(1 << 20))
        except OSError as error:
            return error.errno
        return 0

    ended = forks.fork(program, limit_s=60)
    if ended.value is None:
        pytest.skip("this kernel lets nobody mount")
    assert ended.value == errno.ENOSPC
    (tmp_path / "full/file").write_bytes(bytes(1 << 20))


def week(number: int, *audit: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "week": number, "monday": world.monday(number).isoformat(), "events": [], "proposed": [], "asked": 20,
        "answered": 20, "served": {"v1": 20}, "exact": 15, "critical": 10, "under": 1, "rollback": {},
        "labels": {"given": 20, "refused_file": False}, "watch": {"ended": "Completed", "alarms": [], "acted": []},
        "retraining": {"ended": "Nothing to do", "says": ""}, "audit": [*audit], "champion": "v1",
    } | changes  # fmt: skip


def decision(version: str, *, promote: bool) -> dict[str, Any]:
    return {"kind": "decision", "version": version, "promote": promote, "look": 1, "level": 0.03, "left": 0.02}


def moved(kind: str, version: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "version": version, "approver": "Ada Lovelace", **more}


def promised(weeks: list[dict[str, Any]], **lost: int) -> dict[str, Any]:
    import year

    drafts = {draft.name: {} for draft in world.DRAFTS if draft.week <= len(weeks)}
    found: dict[str, Any] = year.promises(weeks, drafts, Counter(lost), {"patient": 0})
    return found | {"kept": year.is_kept(found)}


def test_nothing_is_counted_before_the_server_has_written_anything_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import year

    monkeypatch.chdir(tmp_path)
    day = store.today()
    assert not year.are_counted(["a"], day, 0)
    seen = Counter({(counts.shadow("v2", "0123") + "think", counts.SAME): 2, (counts.TEXT, "likely"): 2})
    store.add("esi", "v1", seen, {"a": ("think", "2")}, keep_days=7)
    assert year.are_counted(["a"], day, 2)
    assert not year.are_counted(["a", "b"], day, 2)
    assert not year.are_counted(["a"], day, 1)
    assert not year.are_counted(["a"], day - 1, 2)


@pytest.mark.long
def test_a_person_brings_back_what_was_rolled_back_for_poisoned_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import people

    examined.copy(champions.built(), tmp_path)
    monkeypatch.chdir(tmp_path)
    promotion.rollback(load_params(), "esi", approver=people.GRACE)
    people.bring_back()
    assert versions.find("esi", "champion").name == "v1"


def test_the_promises_are_counted_from_the_weeks() -> None:
    begun = week(1, decision("v1", promote=True), moved("promotion", "v1"))
    harmful = week(2, decision("v2", promote=True), moved("promotion", "v2"), served={"v2": 20})
    back = [week(number) for number in (3, 4)]
    rolled = week(5, moved("rollback", "v1", **{"from": "v2"}))
    assert promised([begun, week(2)])["kept"]
    assert not promised([begun, harmful, *back, week(5)])["kept"]
    assert not promised([begun, harmful, *back, rolled])["kept"]
    assert promised([begun, harmful, *back[:1], rolled | {"week": 4}])["kept"]
    assert promised([begun, week(2, served={"v2": 1})])["served_without_decision_or_approver"] == 1
    assert not promised([begun, week(2, served={"v2": 1})])["kept"]
    assert not promised([begun, week(2, answered=19)])["kept"]
    assert not promised([begun], lost=1)["kept"]


@pytest.mark.long
def test_the_page_and_its_picture_follow_from_the_report_alone() -> None:
    line = moved("promotion", "v2")
    weeks = [week(1, decision("v2", promote=True), line, champion="v2"), week(2, events=[{"kind": "full disk"}])]
    drafts = {"v2": {"week": 1, "says": "a | b", "planted": False, "exam": {"think": {"exact": 0.5,
              "critical_under": 0.25}}, "outcome": "dropped", "says_why": "no gain"}}  # fmt: skip
    report = {
        "weeks": weeks,
        "drafts": drafts,
        "limit": 0.2,
        "alpha": 0.05,
        "is_toy": False,
        "promises": promised(weeks),
    }
    text = timeline.page(report, "year.svg")
    assert "This is the report of a trial: the first 2 weeks. It" in text
    assert "| 1 | v2 | a \\| b | no | 50.0% | 25.0% | dropped: no gain |" in text
    assert "| 2 | 2026-01-12 | full disk | Nothing to do | 20 of 20 | 15 | 1 of 10 |  | v1 |" in text
    assert timeline.picture(report) == timeline.picture(json.loads(json.dumps(report)))


@pytest.mark.slow
def test_four_weeks_are_lived_and_the_first_of_them_twice_to_the_same_bytes(tmp_path: Path) -> None:
    reports = []
    for weeks in (4, 2):
        out = tmp_path / f"{weeks}.json"
        command = [sys.executable, str(HERE / "year.py"), "--toy", "--weeks", str(weeks), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        reports.append(json.loads(out.read_text()))
    whole, part = reports
    assert whole["weeks"][:2] == part["weeks"]
    assert whole["drafts"]["v2"] == part["drafts"]["v2"]
    assert [one["champion"] for one in whole["weeks"]] == ["v1", "v1", "v1", "v3"]
    assert (whole["promises"]["promoted"], whole["drafts"]["v2"]["outcome"]) == (1, "dropped")
    assert not whole["drafts"]["v2"]["exam"], "a draft outside its plan is dropped before it trains"
    assert (tmp_path / "4.md").read_text().startswith("# A year of operation")
