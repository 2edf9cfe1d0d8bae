"""Every measurement of this folder, each in a process of its own, as a table and as rows of data/reports/bench.json.

bench_history.jsonl beside it keeps the records of before; the table shows the value of the last one, if a processor of
the same name gave it.

A measurement is a script that prints one JSON list of rows: what, value, unit, and a note. Run it on an idle machine:
the load at its start is part of the record. `python tests/bench/run.py fold.py` repeats one of them.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from clinrl.artifacts import canonical_json, write_json
from clinrl.runtime import determinism

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REPORT = ROOT / "data/reports/bench.json"
HISTORY = ROOT / "data/reports/bench_history.jsonl"
"""Every record that was ever measured, oldest first, with the commit that was measured."""
ROW = ("what", "value", "unit", "note")
"""What a script prints a row of."""
SCRIPTS = (
    "commands.py",
    "cases.py",
    "sources.py",
    "exam.py",
    "serve.py",
    "registry.py",
    "fold.py",
    "grpo_loss.py",
    "grpo_step.py",
    "threads.py",
    "rewards.py",
    "audit_env.py",
    "overhead.py",
    "demo.py",
)


PARTS = tuple(
    f"repro.py audit {part}" for part in ("ba*", "*@audit-v[123]*", "*@audit-v4*", "*@audit-v5*", "*@audit-v6*")
)
BY_NAME = ("arms.py", "repro.py audit", *PARTS, "repro.py esi", "repro.py imaging")
"""Those that are run by their names alone: they need servers that are no libraries, or hours."""


def main(names: list[str]) -> int:
    """Run the named scripts, or all, and renew their rows in the report; those of other scripts stay."""
    determinism.pin()
    if unknown := [name for name in names if name not in SCRIPTS + BY_NAME]:
        print(f"no measurement {unknown[0]!r}; there are {', '.join(SCRIPTS + BY_NAME)}", file=sys.stderr)
        return 2
    kept = recorded()
    for script in names or SCRIPTS:
        print(f"{script} ...", file=sys.stderr)
        found = machine()
        file, *words = script.split()
        command = [sys.executable, str(HERE / file), *words]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
        last = kept.get(script, {"machine": {}, "rows": ()})
        is_same = last["machine"].get("processor") == found["processor"]  # else it tells of machines
        before = {row["what"]: row["value"] for row in last["rows"] if is_same}
        printed = json.loads(done.stdout.splitlines()[-1])
        kept[script] = {"machine": found, "rows": [dict(zip(ROW, row, strict=True)) for row in printed]}
        write_json(REPORT, {name: kept[name] for name in SCRIPTS + BY_NAME if name in kept})
        with HISTORY.open("a", encoding="utf-8") as stream:
            stream.write(canonical_json({"script": script, "revision": revision(), **kept[script]}) + "\n")
        table = Table("what", "value", "before", "unit", "note", title=f"load {found['load_1_min_at_start']}")
        for row in kept[script]["rows"]:
            old = f"{before[row['what']]:g}" if row["what"] in before else ""
            table.add_row(row["what"], f"{row['value']:g}", old, row["unit"], row["note"])
        Console().print(table)
    return 0


def recorded() -> dict[str, Any]:
    """What was measured before, by script."""
    found: dict[str, Any] = json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else {}
    return found


def revision() -> str:
    """The commit that is measured, with -dirty if a tracked file differs, reports aside."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True).stdout
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!data/reports"], check=False).returncode
    return head.strip() + "-dirty" * bool(changed)


def machine() -> dict[str, Any]:
    """What a measurement ran on, and how busy that was when it began."""
    return {
        "processor": processor(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "load_1_min_at_start": round(os.getloadavg()[0], 2),
        "settings": determinism.record(),
    }


def processor() -> str:
    """The processor's name as the kernel knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
