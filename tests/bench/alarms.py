"""How soon a failure raises its alarm, and how often a sound training raises one: each version with further seeds.

Every version of a task is trained again from its own parent, on its own data, with other seeds; a version with a
waiver is a failure that must be noticed, any other one is sound. Writes data/reports/alarms.json and .md. The same
command goes on where it was stopped.

    python tests/bench/alarms.py esi --seeds 5
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clinrl import paths
from clinrl.analysis import alerts
from clinrl.artifacts import digest, dump_yaml, read_manifest, write_json, write_text
from clinrl.config.files import merge_files, read_files
from clinrl.config.params import Params, load_params
from clinrl.evaluation.answers import HISTORY
from clinrl.intervals import wilson
from clinrl.reports.render import table
from clinrl.runtime import determinism

REPORT = Path("data/reports/alarms.json")
STRIDE = 1000
"""Run k of a version has k times this added to its seed."""
WITHIN = 1 / 3
"""The share of its run within which a failure has to raise its alarm."""


def train(params: Params, version: str, k: int) -> list[dict[str, Any]]:
    """The history of a version whose seed is moved by k strides: its own for 0, else trained now or found."""
    if k == 0:
        return list(alerts.read(paths.adapter(version) / HISTORY))
    block = params.versions[version]
    shared = [paths.base(block.task), paths.adapter(block.parent)]
    shared += [paths.cases(block.data), paths.data_proof(block.data)]
    inputs = [read_manifest(folder).files for folder in shared if folder.is_dir()]
    tree = moved(params, version, k)
    key = digest([inputs, version, tree["profiles"][block.profile]])
    folder = Path(".clinrl/alarms") / f"{version}-{k}-{key[:16]}"
    log = folder / paths.adapter(version) / HISTORY
    if not log.exists():
        for target in shared:
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            if not (folder / target).is_symlink():
                (folder / target).symlink_to(target.absolute())
        write_text(folder / "params.yaml", dump_yaml(tree))
        for command in ("probe", "train"):
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run(
                [sys.executable, "-m", "clinrl", command, version],
                cwd=folder, env=environment, check=True, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        print(f"{version}, seed {block.seed + k * STRIDE}: trained", file=sys.stderr, flush=True)
    return list(alerts.read(log))


def moved(params: Params, version: str, k: int) -> dict[str, Any]:
    """All parameters with the version's seed moved by k strides, and each run seen to its end whatever its alarms."""
    tree, _ = merge_files(read_files(Path("params.yaml")))
    tree["versions"][version]["seed"] += k * STRIDE
    for profile in tree["profiles"].values():
        profile["trainer"][params.scale]["on_alarm"] = "warn"
    return tree


def row(params: Params, version: str, k: int, history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one run raised: the first alarm of all, and every one."""
    raised = alerts.alarms(history)
    return {
        "version": version,
        "seed": params.versions[version].seed + k * STRIDE,
        "kept_failure": bool(params.profiles[params.versions[version].profile].waiver),
        "steps": len(history),
        "first": raised[0].step if raised else None,
        "alarms": [f"{alarm.level} {alarm.name} {alarm.about}".strip() + f" at {alarm.step}" for alarm in raised],
    }


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The runs as Markdown, failures first, then the shares that they add up to."""
    parts = [
        "# Alarms over several seeds",
        "Research only, synthetic data. Each version trained from its own parent with other seeds. A kept failure "
        "should raise an alarm within the first third of its run, a sound version none. Brackets hold 95% Wilson "
        "intervals; runs of one version share parent and data.",
    ]
    for failure, title in ((True, "Kept failures"), (False, "Sound versions")):
        some = [row for row in rows if row["kept_failure"] is failure]
        if not some:
            continue
        parts.append(f"## {title}")
        for version in dict.fromkeys(row["version"] for row in some):
            runs = [row for row in some if row["version"] == version]
            if failure:
                hits = sum(row["first"] is not None and row["first"] <= row["steps"] * WITHIN for row in runs)
                what = "raised an alarm within the first third"
            else:
                hits, what = sum(row["first"] is not None for row in runs), "raised a false alarm"
            share = wilson(hits, len(runs))
            parts.append(f"**{version}**: {hits} of {len(runs)} runs {what} [{share.low:.2f}, {share.high:.2f}].")
            cells = [[r["seed"], r["steps"], r["first"] or "none", "; ".join(r["alarms"]) or "none"] for r in runs]
            parts.append(table(["seed", "steps", "first alarm", "alarms"], cells))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Train what is missing, two runs at a time on a thread each, and write the report."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("task", help="a task of params.yaml")
    top.add_argument("--seeds", type=int, default=5, help="runs of each version, its own included; default: 5")
    top.add_argument("--versions", nargs="*", metavar="VERSION", help="default: all of the task")
    arguments = top.parse_args()
    params = load_params()
    versions = arguments.versions or [name for name, spec in params.versions.items() if spec.task == arguments.task]
    jobs = [(version, k) for k in range(arguments.seeds) for version in versions]  # so that an early stop has them all
    with ThreadPoolExecutor(2) as pool:
        histories = list(pool.map(lambda job: train(params, *job), jobs))
    rows = [row(params, *job, history) for job, history in zip(jobs, histories, strict=True)]
    rows.sort(key=lambda row: (not row["kept_failure"], row["version"], row["seed"]))
    print(page(rows))
    write_json(REPORT, rows)
    write_text(REPORT.with_suffix(".md"), page(rows))


if __name__ == "__main__":
    determinism.pin()
    main()
