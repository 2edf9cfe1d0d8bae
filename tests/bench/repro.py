"""`dvc repro` of all that a task has, from nothing: base, data, and each version with its exam and comparisons.

It takes hours. An interrupt ends it, and the same command goes on with what was begun, in build/repro-<task>: the time
between is not counted. A pattern of stages takes these alone: a task may need more hours than a machine is there for.
How many files `dvc.lock` records too is a row: on a processor of another maker than the committed versions were trained
on, those of GRPO differ (docs/concepts.md says why).

  python tests/bench/run.py "repro.py imaging"
  python tests/bench/run.py "repro.py audit *@audit-v[123]*"
"""

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.demo import TOOK
from clinrl.provenance import lock

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "clinrl.runtime.dvc_command", "--side-by-side", "repro", "--no-run-cache")


def begun(folder: Path, stages: list[str] | None, source: Path = ROOT) -> None:
    """Clone a project's last commit into a folder, without what some stages have made, or anything that a stage has."""
    subprocess.run(["git", "clone", "--quiet", source, folder], check=True)
    for path in lock.outputs(lock.read(folder / lock.LOCK), stages):
        made = folder / path
        if made.is_dir():
            shutil.rmtree(made)
        made.unlink(missing_ok=True)
    if stages is None:
        (folder / lock.LOCK).unlink()


def targets(recorded: lock.Lock, task: str, pattern: str) -> list[str]:
    """The stages that come from a task's base, and the base, as far as their addresses match the pattern."""
    found = (stage for stage in recorded if fnmatchcase(stage, pattern))
    return [stage for stage in found if f"base@{task}" in lock.ancestors(recorded, stage)]


def spend(folder: Path, stages: list[str], journal: Path) -> None:
    """Reproduce stages, and write into the journal how long each took and how long before it the last had ended (s).

    Raises SystemExit if DVC fails or is interrupted.
    """
    last = time.perf_counter()
    with (
        journal.open("a", encoding="utf-8", buffering=1) as told,
        subprocess.Popen([*COMMAND, *stages], cwd=folder, text=True, stdout=subprocess.PIPE) as dvc,
    ):
        assert dvc.stdout is not None
        try:
            for line in dvc.stdout:
                print(line, end="", file=sys.stderr)
                if took := TOOK.match(line):
                    last, since = time.perf_counter(), time.perf_counter() - last
                    told.write(json.dumps({"stage": took[1], "took_s": float(took[2]), "since_s": since}) + "\n")
        finally:
            dvc.wait()
            told.write(json.dumps({"since_s": time.perf_counter() - last}) + "\n")
    if dvc.returncode:
        raise SystemExit(f"dvc repro ended with {dvc.returncode}; the same command goes on with it")


def rows(what: str, all_of_it: str, lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """All of it, and what the stages of a kind took together."""
    spent = Counter[str]()
    for line in lines:
        if "stage" in line:
            spent[line["stage"].split("@")[0]] += line["took_s"]
    count = Counter(line["stage"].split("@")[0] for line in lines if "stage" in line)
    whole = sum(line["since_s"] for line in lines)
    pauses = sum("stage" not in line for line in lines) - 1
    note = f"{count.total()} stages, two at once" + f"; interrupts: {pauses}" * bool(pauses)
    parts = (
        (f"{what}, {kind}", round(time_s, 1), "s", f"{count[kind]} stages") for kind, time_s in spent.most_common()
    )
    return [(all_of_it, round(whole / 60, 1), "min", note), *parts]


def equal(what: str, wanted: dict[str, str], found: dict[str, str]) -> tuple[Any, ...]:
    """How many outputs are as the committed lock records them."""
    same = sum(found.get(path) == digest for path, digest in wanted.items())
    return (f"{what}, outputs as dvc.lock records them", same, "outputs", f"of {len(wanted)}")


def main(task: str, pattern: str = "*") -> None:
    """Print the rows."""
    recorded = lock.read(ROOT / lock.LOCK)
    stages = targets(recorded, task, pattern)
    what = f"dvc repro, {task}" if (is_whole := pattern == "*") else f"dvc repro, {pattern.strip('*')}"
    folder = ROOT / "build" / re.sub(r"\W+", "-", f"repro {task} {pattern}").strip("-")
    journal = folder.with_suffix(".jsonl")
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        journal.unlink(missing_ok=True)
        begun(folder, None if is_whole else stages)
    spend(folder, stages, journal)
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    made = lock.outputs(lock.read(folder / lock.LOCK))
    found = rows(what, f"{what}, from nothing" if is_whole else what, lines)
    print(json.dumps([*found, equal(what, lock.outputs(recorded, stages), made)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
