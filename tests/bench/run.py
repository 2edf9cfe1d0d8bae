"""Every measurement of this folder, each in a process of its own, as a table and as rows of data/reports/bench.json.

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

from clinrl.artifacts import write_json
from clinrl.runtime import determinism

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REPORT = ROOT / "data/reports/bench.json"
SCRIPTS = (
    "commands.py",
    "cases.py",
    "sources.py",
    "exam.py",
    "registry.py",
    "fold.py",
    "grpo_loss.py",
    "grpo_step.py",
    "threads.py",
    "rewards.py",
    "audit_env.py",
    "flows.py",
)


def main(names: list[str]) -> int:
    """Run the named scripts, or all, and renew their rows in the report; those of other scripts stay."""
    determinism.pin()
    if unknown := [name for name in names if name not in SCRIPTS]:
        print(f"no measurement {unknown[0]!r}; there are {', '.join(SCRIPTS)}", file=sys.stderr)
        return 2
    kept = json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else {}
    for script in names or SCRIPTS:
        print(f"{script} ...", file=sys.stderr)
        found = machine()
        done = subprocess.run([sys.executable, str(HERE / script)], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        kept[script] = {"machine": found, "rows": json.loads(done.stdout.splitlines()[-1])}
        write_json(REPORT, {name: kept[name] for name in SCRIPTS if name in kept})
        table = Table("what", "value", "unit", "note", title=f"load {found['load_1_min_at_start']}")
        for row in kept[script]["rows"]:
            table.add_row(row["what"], f"{row['value']:g}", row["unit"], row["note"])
        Console().print(table)
    return 0


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
