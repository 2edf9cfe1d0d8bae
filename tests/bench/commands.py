"""How long the commands take that a person waits for: help, a plan, and a `dvc repro` with nothing to do.

The last is measured where the chain of esi-v49 has been built, as `make demo` does it.
"""

import json
import statistics
import subprocess
import sys
import time

TIMES = 5
REPRO = ("dvc", "repro", "evaluate@esi-v49")


def seconds(*command: str) -> float:
    """Median wall time of a command in seconds, after one run that warms the file cache."""
    taken = []
    for _ in range(TIMES + 1):
        started = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        taken.append(time.perf_counter() - started)
    return round(statistics.median(taken[1:]), 3)


def main() -> None:
    """Print the rows."""
    rows = [(f"clinrl {word}", seconds("-m", "clinrl", word), "s", "") for word in ("--help", "plan")]
    training = seconds("-c", "import clinrl.training.worker, clinrl.training.trl")
    rows.append(("imports of a training", training, "s", "a stage in a fork has them already"))
    dry = subprocess.run([sys.executable, "-m", *REPRO, "--dry"], capture_output=True, text=True)
    if dry.returncode == 0 and "Running stage" not in dry.stdout:  # otherwise it would train
        rows.append(("dvc repro, nothing to do", seconds("-m", *REPRO), "s", "the chain of esi-v49"))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
