"""Registering a version with a history of 40 metrics by 300 steps, again, and looking an alias up."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clinrl.runtime import determinism

METRICS, STEPS = 40, 300
STORES = ("tracking", "model_registry")


def timed(what: str, note: str, call: Callable[[], Any]) -> tuple[Any, ...]:
    """A row with the time of one call."""
    started = time.perf_counter()
    call()
    return (what, round(time.perf_counter() - started, 3), "s", note)


def load() -> None:
    """Import what MLflow would import on its first call."""
    for module in ("mlflow.models", *(f"mlflow.store.{kind}.sqlalchemy_store" for kind in STORES)):
        import_module(module)


def look_up() -> None:
    """Look an alias up in the working directory's registry, twice, and print the rows."""
    from clinrl.registry import versions

    load()
    rows = [
        timed("look an alias up, first", "opens the store", lambda: versions.find("esi", "candidate")),
        timed("look an alias up", "", lambda: versions.find("esi", "candidate")),
    ]
    print(json.dumps(rows))


def main() -> None:
    """Build a doll's project with a long history, import MLflow, measure, and print the rows."""
    import dolls
    import exhibits
    from clinrl.registry import versions

    names = ["reward", *(f"metric/{n}" for n in range(1, METRICS))]
    lines = [{"step": step, **dict.fromkeys(names, step / 7)} for step in range(1, STEPS + 1)]
    with (
        tempfile.TemporaryDirectory(prefix="clinrl-bench-") as folder,
        chdir(folder),
        dolls.few_draws(),  # as the versions are examined with
        mock.patch.object(exhibits, "history", return_value=lines),
    ):
        exhibits.build()
        load()
        size = f"{METRICS} metrics x {STEPS} steps"
        params = exhibits.params()
        rows = [
            timed("register, new store", f"{size}; makes MLflow's tables", lambda: versions.register(params, "v1")),
            timed("register", size, lambda: versions.register(params, "v2")),
            timed("register again", f"{size}; nothing is missing", lambda: versions.register(params, "v2")),
        ]
        look_up = [sys.executable, __file__, "look up"]
        done = subprocess.run(look_up, check=True, stdout=subprocess.PIPE)
        rows += json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(rows))


if __name__ == "__main__":
    determinism.pin()
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    main() if len(sys.argv) == 1 else look_up()
