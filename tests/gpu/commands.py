"""The commands of a release at full scale, as a user gives them; one training is killed and given again.

The checkpoint is this repository's small base of esi in 4 bits. It answers, so that rewards differ and steps have
gradients. The recipes are those of esi-v43 and esi-v46, with the numbers of the embedded scale.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import shaped

sys.path.insert(0, str(shaped.ROOT / "tests"))
import laid
from clinrl import paths
from clinrl.artifacts import sha256_file
from clinrl.runtime import determinism

BASE, FIRST, SECOND, FOLD = "esi-base", "esi-v43", "esi-v46", "esi-v46-full"
DATA = ("esi-d3", "esi-d4", "esi-x3")
SHORT = {"embedded": 96, "full": 96}
"""Tokens of an answer; the window of the small base has no room for those of a hub checkpoint."""
PROJECT = "project"
"""The folder of the project; what an earlier call made in it is not made again."""


def content(*, tiny: bool) -> dict[str, Any]:
    """The parameters of two versions of esi above a checkpoint in a folder."""
    whole = laid.content(shaped.ROOT)
    versions = {name: whole["versions"][name] for name in (FIRST, SECOND)}
    profiles = {block["profile"]: whole["profiles"][block["profile"]] for block in versions.values()}
    for profile in profiles.values():
        trainer = profile["trainer"]
        trainer["full"] = {**trainer["embedded"], "checkpoint_every": 2 if tiny else 20}
        if tiny:
            few = {"batch": 4} if "batch" in trainer["full"] else {"prompts": 2, "group": 2}
            trainer["full"] |= {"steps": 4, **few}
            trainer["full"].pop("held_out", None)
    datasets = {name: whole["datasets"][name] | ({"cases": 40} if tiny else {}) for name in DATA}
    checkpoint = {"repo": str(shaped.ROOT / paths.base("esi")), "revision": "main", "quantize": "nf4"}
    return {
        "scale": "full",
        "modes": {name: {**mode, "max_new_tokens": SHORT} for name, mode in whole["modes"].items()},
        "bases": {"esi": {**whole["bases"]["esi"], "full": checkpoint}},
        "datasets": datasets,
        "profiles": profiles,
        "versions": versions,
        "merges": {"folds": {FOLD: {"task": "esi", "version": SECOND, "exam": versions[SECOND]["exam"]}}, "blends": {}},
    }


def given(project: Path, *arguments: str) -> float:
    """Give a command of clinrl in a project; how long it took (s). Raises CalledProcessError if it fails."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "clinrl", *arguments], cwd=project, stdout=sys.stderr, check=True)
    return time.perf_counter() - began


def killed(project: Path, version: str) -> str:
    """Kill a training once its first checkpoint is there; the name of that checkpoint."""
    command = [sys.executable, "-m", "clinrl", "train", version]
    running = subprocess.Popen(command, cwd=project, stdout=sys.stderr)
    while not (found := [*(project / ".clinrl/checkpoints").glob(f"{version}-*/trainer/checkpoint-*/complete.json")]):
        if running.poll() is not None:
            sys.exit(f"the training that was to be killed ended with {running.returncode}, before its first checkpoint")
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    return found[0].parent.name


def prepared(tiny: bool) -> Path:
    """The project, up to its first training."""
    project = Path(os.environ.get(shaped.MODELS) or tempfile.mkdtemp(prefix="clinrl-gpu-")) / PROJECT
    if not (project / "params").is_dir():
        project.mkdir(parents=True)
        laid.lay(project, content(tiny=tiny))
    made = [(("base", "esi"), paths.base("esi")), *((("dataset", name), paths.cases(name)) for name in DATA)]
    made += [(("validate", name), paths.data_proof(name)) for name in DATA]
    made += [(("probe", name), paths.probe_proof(name)) for name in (FIRST, SECOND)]
    for command, result in made:
        if not (project / result).exists():
            given(project, *command)
    return project


def main(arguments: list[str] | None = None) -> None:
    """Print the rows."""
    asked = shaped.options().parse_args(arguments)
    project = prepared(asked.tiny)
    rows: list[tuple[Any, ...]] = [
        (f"clinrl train {version}", round(given(project, "train", version), 1), "s", "imports included")
        for version in (FIRST, SECOND)
    ]
    again = project.with_name("again")
    shutil.copytree(project, again, symlinks=True)
    shutil.rmtree(again / paths.adapter(SECOND))
    checkpoint = killed(again, SECOND)
    while True:
        rest = subprocess.run([sys.executable, "-m", "clinrl", "train", SECOND], cwd=again, stdout=sys.stderr)
        if rest.returncode != 75:  # the worker that was killed with its parent may still hold the lock
            break
        time.sleep(0.5)
    rest.check_returncode()
    same = [sha256_file(folder / paths.adapter(SECOND) / "adapter_model.safetensors") for folder in (project, again)]
    note = f"killed at {checkpoint}; 1: equal hashes"
    rows.append((f"{SECOND}, killed and given again, as if it never was", int(same[0] == same[1]), "", note))
    for name in (BASE, FIRST, SECOND):
        taken_s = given(project, "evaluate", name)
        answers = sum(len(file.read_text().splitlines()) for file in (project / paths.graded(name)).glob("*.jsonl"))
        rows.append((f"clinrl evaluate {name}", round(60 * answers / taken_s, 1), "cases/min", "both modes, imports"))
        for mode in ("think", "direct"):
            found = json.loads((project / paths.report(name) / f"{mode}.json").read_text(encoding="utf-8"))["metrics"]
            for measure in ("exact", "critical_under"):
                one = found[measure]
                note = f"{one['n']} cases, one seed"
                rows.append((f"{name}, {mode}, {measure}", one["value"], "", note, one["low"], one["high"]))
    rows.append((f"clinrl merge {FOLD}", round(given(project, "merge", FOLD), 1), "s", "fold and its comparison"))
    print(json.dumps(rows))


if __name__ == "__main__":
    determinism.pin()
    main()
