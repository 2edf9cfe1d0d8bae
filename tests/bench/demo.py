"""`make demo` as a new user runs it, in a fresh clone of the last commit, by stage.

Nothing else of the clone is there: the environment is installed, data is drawn.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMAND = ("make", "demo")
BEGINS, SKIPPED, SETUP, END = "Running stage '", "Stage '", "set-up", "DVC and the table"


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
    """Seconds of the set-up before the first stage, of each stage that ran, and of the rest."""
    found: dict[str, float] = {}
    stage, since, now = SETUP, 0.0, 0.0
    for now, line in lines:
        if line.startswith((BEGINS, SKIPPED)) or (stage not in (SETUP, END) and line.startswith(("Use `dvc", "| "))):
            found[stage] = found.get(stage, 0.0) + now - since
            name = line.removeprefix(BEGINS).partition("'")[0] if line.startswith(BEGINS) else END
            stage, since = name, now
    found[stage] = found.get(stage, 0.0) + now - since
    rest = found.pop(END, 0.0)
    return {**found, END: rest}


def rows(seconds: dict[str, float]) -> list[tuple[Any, ...]]:
    """A row for the whole and one for each part."""
    whole = ("make demo, fresh clone", round(sum(seconds.values()), 1), "s", "with its set-up")
    return [whole, *((f"make demo, {name}", round(value, 1), "s", "") for name, value in seconds.items())]


def main() -> None:
    """Print the rows."""
    with tempfile.TemporaryDirectory(prefix="clinrl-demo-") as temporary:
        folder = Path(temporary) / "clinrl"
        subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        print(json.dumps(rows(by_stage(said(folder)))))


if __name__ == "__main__":
    main()
