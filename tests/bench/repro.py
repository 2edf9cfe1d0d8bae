"""`dvc repro` of all that a task has, from nothing: base, data, and each version with its exam and comparisons.

It takes hours. An interrupt ends it, and the same command goes on with what was begun, in build/repro-<task>: the time
between is not counted. How many files `dvc.lock` records too is a row: on a processor of another maker than the
committed versions were trained on, those of GRPO differ (docs/concepts.md says why).

  python tests/bench/run.py "repro.py imaging"
"""

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.demo import TOOK
from clinrl.provenance import lock

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "clinrl.runtime.dvc_command", "--side-by-side", "repro", "--no-run-cache")


def begun(folder: Path, source: Path = ROOT) -> None:
    """Clone a project's last commit into a folder, without anything that a stage has made."""
    subprocess.run(["git", "clone", "--quiet", source, folder], check=True)
    for path in lock.outputs(lock.read(folder / lock.LOCK)):
        made = folder / path
        if made.is_dir():
            shutil.rmtree(made)
        made.unlink(missing_ok=True)
    (folder / lock.LOCK).unlink()


def targets(recorded: lock.Lock, task: str) -> list[str]:
    """The stages that come from a task's base, and the base."""
    return [stage for stage in recorded if f"base@{task}" in lock.ancestors(recorded, stage)]


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


def rows(task: str, lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The whole, and what the stages of a kind took together."""
    spent = Counter[str]()
    for line in lines:
        if "stage" in line:
            spent[line["stage"].split("@")[0]] += line["took_s"]
    count = Counter(line["stage"].split("@")[0] for line in lines if "stage" in line)
    whole = sum(line["since_s"] for line in lines)
    pauses = sum("stage" not in line for line in lines) - 1
    note = f"{count.total()} stages, two at once" + f"; interrupts: {pauses}" * bool(pauses)
    parts = (
        (f"dvc repro, {task}, {kind}", round(time_s, 1), "s", f"{count[kind]} stages")
        for kind, time_s in spent.most_common()
    )
    return [(f"dvc repro, {task}, from nothing", round(whole / 60, 1), "min", note), *parts]


def equal(task: str, made: lock.Lock, recorded: lock.Lock) -> tuple[Any, ...]:
    """How many outputs are as the committed lock records them."""
    stages = targets(recorded, task)
    wanted, found = lock.outputs(recorded, stages), lock.outputs(made)
    same = sum(found.get(path) == digest for path, digest in wanted.items())
    return (f"dvc repro, {task}, outputs as dvc.lock records them", same, "outputs", f"of {len(wanted)}")


def main(task: str) -> None:
    """Print the rows."""
    folder = ROOT / f"build/repro-{task}"
    journal = folder.with_suffix(".jsonl")
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        journal.unlink(missing_ok=True)
        begun(folder)
    recorded = lock.read(ROOT / lock.LOCK)
    spend(folder, targets(recorded, task), journal)
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    print(json.dumps([*rows(task, lines), equal(task, lock.read(folder / lock.LOCK), recorded)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
