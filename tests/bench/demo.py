"""`make demo` as a new user runs it, in a fresh clone of the last commit, by stage: on the shared paths and on TRL's.

On the shared paths the recipes of the chain differ from those that are committed, so DVC would prove them first: that
is done before the clock starts. Nothing else of the clone is there: the environment is installed, data is drawn.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from clinrl.config.params import load_params

ROOT = Path(__file__).parents[2]
COMMAND = ("make", "demo")
MEASURED = "esi-v49"
PATHS = {"loss_path": "shared", "generation_path": "shared"}
BEGINS, SKIPPED, SETUP, END = "Running stage '", "Stage '", "set-up", "DVC and the table"


def share(folder: Path, version: str) -> None:
    """Have the recipes of a version and its ancestors take the shared paths, and make their proofs anew."""
    params = load_params(folder / "params.yaml")
    lineage = params.lineage(version)
    file = folder / f"params/{params.versions[version].file}.yaml"
    yaml = YAML()
    content = yaml.load(file.read_text(encoding="utf-8"))
    for name in lineage:
        content["profiles"][params.versions[name].profile]["trainer"]["embedded"] |= PATHS
    with file.open("w", encoding="utf-8") as stream:
        yaml.dump(content, stream)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    prove = [sys.executable, "-m", "dvc", "repro", "--quiet", "params", *(f"probe@{name}" for name in lineage)]
    subprocess.run(prove, cwd=folder, env=env | {"PYTHONPATH": str(folder / "src")}, check=True, stdout=sys.stderr)
    for made in ("data/cases", ".clinrl", ".dvc/cache"):
        shutil.rmtree(folder / made, ignore_errors=True)
    subprocess.run(["git", "-C", folder, "checkout", "--quiet", "--", ".clinrl"], check=True)


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


def rows(seconds: dict[str, float], way: str) -> list[tuple[Any, ...]]:
    """A row for the whole and one for each part."""
    whole = (f"make demo, fresh clone, {way}", round(sum(seconds.values()), 1), "s", "with its set-up")
    parts = [(f"make demo, {way}, {name}", round(value, 1), "s", "") for name, value in seconds.items()]
    return [whole, *parts]


def main() -> None:
    """Print the rows."""
    found = []
    for way in ("shared paths", "TRL's paths"):
        with tempfile.TemporaryDirectory(prefix="clinrl-demo-") as temporary:
            folder = Path(temporary) / "clinrl"
            subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
            if way == "shared paths":
                share(folder, MEASURED)
            found += rows(by_stage(said(folder)), way)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
