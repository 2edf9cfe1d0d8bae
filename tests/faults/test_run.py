"""A part of every attack, within `make test`; nothing may get through. And each attack counts what it is meant to find.

The second half takes a guard away, and sees that the attack says so: a harness that finds nothing proves nothing else.
"""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import fuzz
import hostile
import httpx
import kills
import knocks
import mutations
import pytest
import races
import run
import scripted
from attempts import HUNG, RAISED, REFUSED, WENT_ON, forked

import models
from clinrl.errors import Refused
from clinrl.evaluation.error_analysis import MIN_CASES, POOL
from clinrl.provenance import lock
from clinrl.tasks.base import get_task

SEED = run.SEED
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("few_draws")]  # with which the released project is made


def through(records: list[dict[str, Any]], fine: Callable[[dict[str, Any]], bool]) -> list[str]:
    """What got through, in words."""
    return [f"{record['what']}: {record['outcome']}" for record in records if not fine(record)]


# Nothing gets through


def bare(folder: Path) -> None:
    """A project in which nothing is built."""
    folder.mkdir(parents=True)
    kills.projects.write_params(folder)


ALONE = kills.Chain("alone", bare, (kills._clinrl("dataset", "d1", kills=60),))
"""A stage without its DVC, whose kills `tests/runtime/test_starter.py` tells."""


@pytest.mark.parametrize(("times", "chain"), [pytest.param(3, *kills.QUICK, marks=pytest.mark.slow), (1, ALONE)])
def test_kills(tmp_path: Path, times: int, chain: kills.Chain) -> None:
    records = list(kills.attack(tmp_path, times, SEED, [chain]))
    assert len({record["killed"] for record in records} & {kills.GROUP, kills.PARENT, kills.CHILD}) == times
    assert through(records, lambda record: record["outcome"] == kills.FINE) == []
    assert {name: kills.counted(records)[name] for name in ("differing", "doubled", "lost", "orphans")} == {
        "differing": 0, "doubled": 0, "lost": 0, "orphans": 0,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("chain", kills.CHAINS, ids=lambda chain: chain.name)
def test_each_command_that_is_killed_ends_well_when_nobody_kills_it(tmp_path: Path, chain: kills.Chain) -> None:
    assert list(kills.attack(tmp_path, 0, SEED, [chain])) == []


def test_the_mine_data_of_a_released_project_has_what_a_draft_is_about() -> None:
    mined = kills.projects.MINED
    cases = get_task("esi").cases(mined["cases"], mined["seed"], pool=POOL, mix=mined["mix"])
    assert sum(case.key.rule == scripted.MISSED for case in cases) >= MIN_CASES


@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow), False], ids=["every-use", "one-use"])
def test_mutations(released: Path, monkeypatch: pytest.MonkeyPatch, every: bool) -> None:
    if not every:  # every fourth area, by one use; the files' own tests alter each kind of file
        for area in {*mutations.AREAS} - {*[*mutations.AREAS][::4]}:
            monkeypatch.delitem(mutations.AREAS, area)
    records = list(mutations.attack(released, 16 if every else len(mutations.AREAS), SEED, one_use=not every))
    assert len({record["area"] for record in records}) >= len(mutations.AREAS) - 2  # not every file can be altered so
    assert [f"{r['area']} {r['where']} {r['what']}: {r['outcome']}" for r in records if r["outcome"] != "seen"] == []


def test_fuzz() -> None:
    records = list(fuzz.attack(4_000, SEED))
    assert fuzz.counted(records)["n"] >= 4_000
    assert [fault for record in records for fault in record["faults"]] == []


@pytest.mark.parametrize("every", [pytest.param(3, marks=pytest.mark.slow), 19])
def test_hostile_inputs(released: Path, every: int) -> None:
    inputs = list(hostile.inputs())
    assert len(inputs) >= 150
    records = list(hostile.attack(released, SEED, only=inputs[::every]))
    assert {record["what"].split(":")[0] for record in records} == {one.kind for one in inputs}
    assert through(records, lambda record: record["outcome"] in hostile.FINE) == []


@pytest.mark.slow
def test_a_race(tmp_path: Path) -> None:
    records = list(races.attack(tmp_path, 3, SEED, [race for race in races.RACES if race.what == "clinrl register"]))
    assert through(records, lambda record: record["outcome"] == races.FINE) == []


# What got through is counted


def test_the_ends_of_a_call_are_told_apart() -> None:
    def refuses() -> None:
        raise Refused("no")

    def breaks() -> None:
        raise KeyError("x")

    assert [forked(call).kind for call in (lambda: 7, refuses, breaks)] == [WENT_ON, REFUSED, RAISED]
    assert forked(signal.pause, 0.2).kind == HUNG
    assert forked(lambda: 7).value == 7


def test_kills_that_leave_something_are_counted(tmp_path: Path) -> None:
    """A command that starts what outlives it, and writes another file whenever it is run again."""
    program = (
        "import subprocess, sys, time, pathlib\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "kept = pathlib.Path('data'); kept.mkdir(exist_ok=True)\n"
        "runs = len(list(kept.iterdir())); (kept / f'run-{runs}').write_text('x')\n"
        "time.sleep(1)\n"
    )
    command = kills.Command("sloppy", [kills.PYTHON, "-c", program], 60)
    chain = kills.Chain("sloppy", lambda folder: folder.mkdir(parents=True), (command,))
    (record,) = kills.attack(tmp_path, 1, 3, [chain])
    assert record["orphans"] >= 1
    assert record["differing"] == 1


def test_versions_and_decisions_are_compared() -> None:
    def standing(files: dict[str, str], registry: str, decisions: str) -> dict[str, Any]:
        return {"files": files, "registry": kills.Counter(registry), "decisions": kills.Counter(decisions)}

    before, after = standing({"a": "1", "b": "2"}, "xy", "d"), standing({"a": "1", "b": "3", "c": "4"}, "xyy", "")
    assert kills.compared(before, after) == (["b", "c"], ["y"], ["d"])
    assert kills.compared(before, before) == ([], [], [])


def test_a_mutation_is_unseen_without_what_sees_it(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each use that a guard was taken from is named."""
    place = mutations.Place("probe proof", "data/reports/probe/v2.json", "edit", 7)
    monkeypatch.setattr(mutations, "planned", lambda *_: [place, place])
    records = mutations.attack(released, 2, SEED, one_use=True)
    assert next(records)["outcome"] == mutations.FINE
    facts = lock.facts
    monkeypatch.setattr(
        lock, "facts", lambda *words: [fact.model_copy(update={"state": "holds"}) for fact in facts(*words)]
    )
    (record,) = records
    assert record["outcome"].startswith("unseen: ")
    assert "promote went on" in record["outcome"]


def test_a_parser_that_raises_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    task = fuzz.readings()["esi"].task
    monkeypatch.setattr(type(task), "parse", lambda _self, transcript: int(transcript.messages[-1].content[-1:] or 0))
    (record,) = fuzz._block(fuzz.readings()["esi"], "bites", 200)
    assert record["faults"]
    assert record["outcome"].endswith("exceptions")


def test_a_pattern_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "LIMIT_S", 0.2)
    monkeypatch.setattr(fuzz, "completion", lambda _text, _random: "a" * 40 + "!")
    task = fuzz.readings()["esi"].task
    monkeypatch.setattr(type(task), "parse", lambda _self, turns: re.match("(a+)+$", turns.messages[-1].content))
    before = fuzz.signal.signal(fuzz.signal.SIGVTALRM, fuzz._give_up)
    try:
        reading = fuzz.readings()["esi"]._replace(golds=[[("x", False)]] * fuzz.CASES)
        (record,) = fuzz._block(reading, "bites", 1)
    finally:
        fuzz.signal.signal(fuzz.signal.SIGVTALRM, before)
    assert [fault["what"][:7] for fault in record["faults"]] == ["TooSlow"]


@pytest.mark.parametrize(
    ("does", "outcome"),
    [
        (lambda: {}["x"], "traceback"),
        (lambda: 0, "accepted"),
        (lambda: Path(models.PWNED).touch(), "executed"),
    ],
)
def test_hostile_input_that_gets_through_is_counted(
    released: Path, monkeypatch: pytest.MonkeyPatch, does: Callable[[], Any], outcome: str
) -> None:
    def command(_words: list[str]) -> int:
        does()
        return 0

    monkeypatch.setattr(hostile.cli, "main", command)
    one = hostile.Input("params", "anything", lambda: None, ("dataset", "d1"))
    (record,) = hostile.attack(released, SEED, only=[one])
    assert record["outcome"] == outcome


@pytest.mark.parametrize(
    ("answer", "seconds", "outcome"),
    [
        ({"status_code": 500}, 0.1, "traceback"),
        ({"status_code": 422, "text": "no"}, 0.1, "no sentence"),
        ({"status_code": 422, "json": {"detail": "no"}}, 1.5, "slow"),
        ({"status_code": 422, "json": {"detail": "no"}}, 0.1, "refused"),
        ({"status_code": 200}, 0.1, "left out"),
    ],
)
def test_a_request_that_breaks_the_environment_is_counted(answer: Any, seconds: float, outcome: str) -> None:
    assert knocks.played(httpx.Response(**answer), seconds) == outcome


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({"status_code": 200}, "let in"),
        ({"status_code": 401, "headers": {"Access-Control-Allow-Origin": "*"}}, "let in"),
        ({"status_code": 500}, "traceback"),
        ({"status_code": 401}, "refused"),
    ],
)
def test_a_request_that_a_guarded_server_answers_is_counted(answer: Any, outcome: str) -> None:
    assert knocks.guarded(httpx.Response(**answer), 0.1) == outcome


def test_two_winners_of_a_race_are_counted(tmp_path: Path) -> None:
    words = [races.PYTHON, "-c", "open('done', 'a').write('x')"]

    def done(folder: Path) -> int:
        return len((folder / "done").read_text())

    race = races.Race("careless", words, lambda folder: folder.mkdir(parents=True), done, trains=True)
    (record,) = races.attack(tmp_path, 2, SEED, [race])
    assert record["outcome"] == "done 2 times"
    assert races.counted([record])["trained"] == 2


# The program


def test_the_same_seed_attacks_the_same_places(released: Path) -> None:
    plan = mutations.planned(released, 50, 1)
    assert plan == mutations.planned(released, 50, 1) != mutations.planned(released, 50, 2)
    texts = [[fuzz.completion("ANSWER: ESI 2", Random(seed)) for _ in range(3)] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_report_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [{"what": "a", "outcome": "fine"}, {"what": "b", "outcome": "worse"}]
    part = run.Part(
        lambda _folder, n, seed: iter(found[:n]),
        lambda records: {"n": len(records)},
        lambda r: r["outcome"] == "fine",
        2,
        1,
    )
    monkeypatch.setattr(run, "parts", lambda *, quick: {"kills": part})
    out = tmp_path / "faults.json"
    assert run.main(["--out", str(out), "--seed", "5"]) == 1
    assert json.loads(out.read_text()) == {"seed": 5, "kills": {"n": 2}}
    assert "kills: b : worse" in capsys.readouterr().out
    assert run.main(["--quick"]) == 0
