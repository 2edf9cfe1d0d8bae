"""Ten of the same command at once: one does it, and the others are told that it is being done.

Exit code 75 is that another is at work. 0 is for who did it, and for who came so late that it was done.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attempts
import kills
import projects
from attempts import Record
from projects import APPROVER

from clinrl.errors import Busy

DONE, BUSY = 0, Busy.exit_code
TRAINING_S = 20
"""How long the scripted training takes at least, so that all are at work before it ends."""
LIMIT_S = 900.0


class Race(NamedTuple):
    """One command that is given many times at once."""

    what: str
    words: Sequence[str]
    lay: Callable[[Path], None]
    """Makes the project in which it has something to do."""
    done: Callable[[Path], int]
    """How often it was done; right is once."""
    trains: bool


def _doll(folder: Path) -> None:
    projects.doll(folder)
    for address in ("dataset@d1", "dataset@x1", "validate@d1", "validate@x1", "probe@v1"):
        kills.undisturbed(folder, kills._stage(address, 0))


def _flows(folder: Path) -> None:
    projects.scripted_project(folder, [stage for stage in projects.BUILT if stage[1] != "v2"])
    (folder / "slow").write_text(str(TRAINING_S))


def _examined(folder: Path) -> None:
    projects.scripted_project(folder, [*(stage for stage in projects.BUILT if stage[0] != "mine"), ("evaluate", "v2")])


def _registered(folder: Path) -> None:
    _examined(folder)
    kills.undisturbed(folder, kills._clinrl("register", "v2", kills=0))


def _worked(folder: Path) -> int:
    """Trainings of v2 in the script's own diary."""
    diary = folder / "worked.jsonl"
    lines = [json.loads(line) for line in diary.read_text().splitlines()] if diary.exists() else []
    return sum(line["words"] == ["train", "v2"] for line in lines)


def _trained(folder: Path) -> int:
    return sum("trains from step" in path.read_text(errors="replace") for path in folder.glob("race-*"))


def _versions(folder: Path) -> int:
    """Versions of v2 in the registry."""
    return sum(count for what, count in kills._registry(folder).items() if what.endswith("version v2"))


def _promotions(folder: Path) -> int:
    return sum(count for what, count in kills._decisions(folder).items() if what.startswith("promotion"))


PYTHON = sys.executable
RACES = (
    Race(
        "flows.retrain", [PYTHON, "-m", "flows", "retrain", "esi", "--approver", APPROVER], _flows, _worked, trains=True
    ),
    Race("clinrl train", [PYTHON, "-m", "clinrl", "train", "v1"], _doll, _trained, trains=True),
    Race("clinrl register", [PYTHON, "-m", "clinrl", "register", "v2"], _examined, _versions, trains=False),
    Race(
        "clinrl promote", [PYTHON, "-m", "clinrl", "promote", "v2", "--approver", APPROVER], _registered, _promotions,
        trains=False,
    ),
)  # fmt: skip


def attack(folder: Path, at_once: int, seed: int, races: Sequence[Race] = RACES) -> Iterator[Record]:
    """Run each race in a project of its own below `folder`. Nothing is drawn: who comes first is the machine's."""
    for race in attempts.each(races, "races", len(races)):
        project = folder / race.what.replace(" ", "-")
        race.lay(project)
        codes = Counter(_at_once(project, race.words, at_once))
        done = race.done(project)
        fine = done == 1 and codes[DONE] >= 1 and codes.keys() <= {DONE, BUSY}
        others = [code for code in codes if code not in (DONE, BUSY)]
        yield {
            "what": race.what,
            "at_once": at_once,
            "seed": seed,
            "done": done,
            "trains": race.trains,
            "codes": {str(code): count for code, count in sorted(codes.items())},
            "outcome": FINE if fine else f"done {done} times" if done != 1 else f"others ended with {others}",
        }


def _at_once(project: Path, words: Sequence[str], at_once: int) -> list[int]:
    """The exit codes of a command that is started so many times at once."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(projects.ROOT), str(projects.ROOT / "src")])
    env["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{env['PATH']}"
    running = []
    for number in range(at_once):
        with (project / f"race-{number}").open("wb") as said:
            running.append(subprocess.Popen(words, cwd=project, env=env, stdout=said, stderr=said))
    try:
        return [process.wait(LIMIT_S) for process in running]
    finally:
        for process in running:
            process.kill()


FINE = "once"


def counted(records: Sequence[Record]) -> dict[str, Any]:
    """What the report says of races: how many at once, and how often the same was trained by them."""
    trained = [record["done"] for record in records if record["trains"]]
    return {
        "n": max((record["at_once"] for record in records), default=0),
        "trained": max(trained, default=0),
        "attempts": list(records),
    }
