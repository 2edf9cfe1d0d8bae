"""Every measurement of this folder, each in a process of its own, as one table and as data/reports/bench.json.

A measurement is a script that prints one JSON list of rows: what, value, unit, and a note. Run it on an idle machine:
the load at the start is part of the record.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from clinrl import determinism
from clinrl.artefacts import write_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPTS = ("commands.py", "cases.py", "sources.py", "exam.py", "registry.py", "fold.py", "grpo_step.py", "flows.py")


def main(names: list[str]) -> int:
    """Run the named scripts, or all. Only a run of all of them is written down."""
    determinism.pin()
    machine = {
        "processor": processor(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "load_1_min_at_start": round(os.getloadavg()[0], 2),
    }
    rows = []
    for script in names or SCRIPTS:
        print(f"{script} ...", file=sys.stderr)
        done = subprocess.run([sys.executable, str(HERE / script)], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    table = Table("what", "value", "unit", "note", title=", ".join(f"{key} {value}" for key, value in machine.items()))
    for row in rows:
        table.add_row(row["what"], f"{row['value']:g}", row["unit"], row["note"])
    Console().print(table)
    if not names:
        write_json(
            ROOT / "data/reports/bench.json", {"machine": machine, "rows": rows, "settings": determinism.record()}
        )
    return 0


def processor() -> str:
    """The processor's name as the kernel knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
