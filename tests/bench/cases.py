"""Drawing and validating data sets: time for ten thousand cases, and whether memory grows with their number."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fold import peak

from clinrl.config.params import Params, load_params
from clinrl.config.schema import DatasetSpec
from clinrl.data import dataset, validate
from clinrl.runtime import determinism

SIZES = (10_000, 40_000)


def project(cases: int) -> Params:
    """The project's params with one more data set, `bench`, of a given size."""
    params = load_params()
    task = "esi"
    like = next(spec for spec in params.datasets.values() if spec.task == task and spec.use == "train")
    spec = DatasetSpec(**{**like.model_dump(), "cases": cases})
    return params.model_copy(update={"datasets": {**params.datasets, "bench": spec}})


def measure(stage: str, cases: int, folder: Path) -> None:
    """Run one stage in a folder and print its wall time (s) and this process's peak memory (MiB)."""
    params = project(cases)
    os.chdir(folder)
    started = time.perf_counter()
    {"dataset": dataset, "validate": validate}[stage].stage(params, "bench")
    taken = time.perf_counter() - started
    print(json.dumps([round(taken, 2), round(peak(), 1)]))


def main() -> None:
    """Measure each stage at each size in a process of its own; print the rows."""
    rows = []
    for cases in SIZES:
        with tempfile.TemporaryDirectory(prefix="clinrl-bench-") as folder:
            for stage in ("dataset", "validate"):
                command = [sys.executable, __file__, stage, str(cases), folder]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
                taken, peak = json.loads(done.stdout.splitlines()[-1])
                what = f"{stage}, {cases:,} cases"
                rows.append((what, taken, "s", f"{cases / taken:,.0f} cases/s"))
                rows.append((f"{what}, peak memory", peak, "MiB", "with libraries"))
    print(json.dumps(rows))


if __name__ == "__main__":
    determinism.pin()
    if len(sys.argv) > 1:
        measure(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
