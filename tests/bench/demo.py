"""`make demo` as a new user runs it, in a fresh clone of the last commit, as a whole and by stage.

Nothing else of the clone is there: the environment is installed, data is drawn. Stages run side by side, so their times
add up to more than the whole. Nothing that git holds may change. By itself: `.venv/bin/python tests/bench/demo.py`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMAND = ("make", "demo")
FIRST = ("Running stage '", "Stage '")
"""How DVC's first line about a stage begins."""
TOOK = re.compile(r"(\S+) took (\S+) s$")
SETUP, END = "set-up", "after the last stage"


def said(folder: Path) -> Iterator[tuple[float, str]]:
    """The lines of the demo, each with the seconds from the start to it, and an empty one at the end."""
    env = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    env["PATH"] = os.pathsep.join(part for part in env["PATH"].split(os.pathsep) if ".venv" not in part)
    started = time.perf_counter()
    with subprocess.Popen(
        COMMAND, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            print(line, end="", file=sys.stderr)
            yield time.perf_counter() - started, line
    if demo.returncode:
        raise SystemExit(f"{' '.join(COMMAND)} ended with {demo.returncode}")
    yield time.perf_counter() - started, ""


def by_stage(lines: Iterable[tuple[float, str]]) -> dict[str, float]:
    """Seconds of the whole, of the set-up before the first stage, of each stage that ran, and after the last."""
    found: dict[str, float] = {}
    since = now = 0.0
    for now, line in lines:
        if SETUP not in found and line.startswith(FIRST):
            found[SETUP] = now
        if took := TOOK.match(line):
            found[took[1]], since = float(took[2]), now
    return {"": now, **found, END: now - since}


def rows(seconds: dict[str, float]) -> list[tuple[Any, ...]]:
    """A row for the whole and one for each part."""
    whole, *parts = seconds.items()
    first = ("make demo, fresh clone", round(whole[1], 1), "s", "with its set-up; stages run side by side")
    return [first, *((f"make demo, {name}", round(value, 1), "s", "") for name, value in parts)]


def check_unchanged(folder: Path) -> None:
    """End with what git sees as changed in a clone, if anything."""
    status = subprocess.run(["git", "status", "--porcelain"], cwd=folder, check=True, capture_output=True, text=True)
    if status.stdout:
        raise SystemExit(f"{' '.join(COMMAND)} changed what git holds:\n{status.stdout}")


def main() -> None:
    """Print the rows."""
    with tempfile.TemporaryDirectory(prefix="clinrl-demo-") as temporary:
        folder = Path(temporary) / "clinrl"
        subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        found = by_stage(said(folder))
        check_unchanged(folder)
        print(json.dumps(rows(found)))


if __name__ == "__main__":
    main()
