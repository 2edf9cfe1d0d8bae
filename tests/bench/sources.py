"""Importing MIMIC-IV-ED: time and memory for as many rows as the published file has, on one processor."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fold import peak

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import esi_sources as synthetic
from clinrl.config.params import load_params
from clinrl.config.schema import ImportSpec
from clinrl.data import dataset
from clinrl.runtime import determinism

ROWS = 425_000


def measure(folder: Path) -> None:
    """Import a source in a folder; print wall time (s), processor time (s) and this process's peak memory (MiB)."""
    spec = ImportSpec(task="esi", task_version=2, use="train", source=str(folder / "source"))
    params = load_params().model_copy(update={"imports": {"bench": spec}})
    os.chdir(folder)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    started, worked = time.perf_counter(), time.process_time()
    dataset.stage(params, "bench")
    taken, busy = time.perf_counter() - started, time.process_time() - worked
    print(json.dumps([round(taken, 2), round(busy, 2), round(peak(), 1)]))


def main() -> None:
    """Write the source, import it in a process of its own, and print the rows."""
    with tempfile.TemporaryDirectory(prefix="clinrl-bench-") as folder:
        synthetic.mimic_iv_ed(Path(folder) / "source", ROWS, 1)
        done = subprocess.run([sys.executable, __file__, folder], check=True, stdout=subprocess.PIPE)
    taken, busy, memory = json.loads(done.stdout.splitlines()[-1])
    what = f"import, {ROWS:,} triage rows with stays and patients"
    rows = [(what, taken, "s", f"one processor, {busy:g} s of its time")]
    print(json.dumps([*rows, (f"{what}, peak memory", memory, "MiB", "with libraries")]))


if __name__ == "__main__":
    determinism.pin()
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]))
    else:
        main()
