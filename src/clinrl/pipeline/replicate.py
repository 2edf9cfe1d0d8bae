"""Replication: the lineage of a version, trained again with other seeds on the same base and data, and tested again.

One seed shows that a recipe worked once. Each replicate is a project folder of its own under `.clinrl/replicates`, with
the seeds of the lineage moved and everything else linked, so the same stages run there and a killed run continues.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl import paths
from clinrl.analysis.exam import NOTE
from clinrl.analysis.paired import Answers, compare
from clinrl.artifacts import digest, dump_yaml, read_manifest, write_json, write_text
from clinrl.config.files import merge_files, read_files
from clinrl.config.params import load_params
from clinrl.config.recipes import recipe_of
from clinrl.data.dataset import read_cases
from clinrl.errors import ParamsError, TrainingError
from clinrl.evaluation.answers import BETWEEN_MODES, load_answers, load_report, run_of
from clinrl.reports.render import render
from clinrl.runtime import child
from clinrl.tasks.base import EXACT, get_task

if TYPE_CHECKING:
    from clinrl.config.params import Params

STRIDE = 1000
"""Replicate k adds k times this to every seed of the lineage; replicate 0 is the version of params.yaml itself."""
UNREAD = "no_parse"
"""The shares of each exam that the report keeps."""


def stage(params: "Params", version: str, *, seeds: int, source: Path = Path("params.yaml")) -> None:
    """Train and examine `seeds` replicates (the first is params.yaml's own) and write `data/reports/seeds/<version>.*`.

    `source` is the file that `params` were read from. Raises ParamsError for an unknown version or fewer than two
    seeds, ArtefactError if params.yaml's own lineage was not examined yet, and TrainingError if a stage of a replicate
    fails; what finished stays, and the same command goes on from there.
    """
    if seeds < 2:
        raise ParamsError(f"--seeds is {seeds}; replication needs at least 2, params.yaml's own seed included")
    lineage = params.lineage(version)
    # Before the expensive part: an own lineage without an exam is found out now.
    runs = [_results(params, lineage)]
    for k in range(1, seeds):
        folder = replicated(params, lineage, k, source)
        with chdir(folder):
            runs.append(_results(load_params(), lineage))
    result = {
        "version": version,
        "lineage": list(lineage),
        "modes": list(params.modes),
        "exam": params.versions[version].exam,
        "note": NOTE,
        "runs": runs,
    }
    write_json(paths.seeds_report(version), result)
    write_pages(paths.seeds_report(version))


def write_pages(target: Path) -> None:
    """Write the page of a report beside it."""
    write_text(target.with_suffix(".md"), page(json.loads(target.read_bytes())))


def prepare(params: "Params", lineage: Sequence[str], k: int, source: Path) -> Path:
    """The project folder of replicate `k`, with its params.yaml and its links; what is built there already stays."""
    folder = _folder(params, lineage, k)
    for target in _shared_files(params, lineage).values():
        link = folder / target
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(target.absolute())
    write_text(folder / "params.yaml", shift_seeds(source, lineage, k * STRIDE))
    return folder


def _folder(params: "Params", lineage: Sequence[str], k: int) -> Path:
    """Keyed by everything that determines a replicate: what another recipe or other data made is never found again."""
    shared = _shared_files(params, lineage).items()
    key = digest(
        {
            "inputs": {name: read_manifest(folder).files for name, folder in shared if folder.is_dir()},
            "task_version": get_task(params.versions[lineage[-1]].task).version,
            "scale": params.scale,
            "modes": {name: mode.model_dump(mode="json") for name, mode in params.modes.items()},
            "versions": {v: params.versions[v].model_dump(mode="json", exclude={"why"}) for v in lineage},
            "recipes": [recipe_of(params.profiles[params.versions[v].profile], params.scale) for v in lineage],
        }
    )
    return Path(".clinrl/replicates") / f"{lineage[-1]}-{k}-{key[:16]}"


def shift_seeds(source: Path, lineage: Sequence[str], by: int) -> str:
    """All parameters as one params.yaml with `by` added to the seeds of the lineage; no other value changes."""
    whole, _ = merge_files(read_files(source))
    seeds = {name: {**whole["versions"][name], "seed": whole["versions"][name]["seed"] + by} for name in lineage}
    return dump_yaml({**whole, "versions": {**whole["versions"], **seeds}})


def replicated(params: "Params", lineage: Sequence[str], k: int, source: Path) -> Path:
    """The finished project folder of replicate `k`: built now, or found as an earlier call left it."""
    folder = prepare(params, lineage, k, source)
    for name in lineage:
        if (folder / paths.graded(name) / "manifest.json").exists():
            continue
        for command in ("probe", "train", "evaluate"):
            print(f"clinrl: replicate {k}: {command} {name}", file=sys.stderr, flush=True)
            process = child.start([sys.executable, "-m", "clinrl", command, name], cwd=folder)
            try:
                code = process.wait()
            finally:
                child.end(process)
            if code != 0:
                raise TrainingError(f"replicate {k}: `clinrl {command} {name}` in {folder} ended with code {code}")
    return folder


def _shared_files(params: "Params", lineage: Sequence[str]) -> dict[str, Path]:
    """What a replicate takes from the project as it is, by name."""
    task = params.versions[lineage[0]].task
    shared = {
        "base": paths.base(task),
        "root": paths.adapter(f"{task}-base"),
        "root answers": paths.graded(f"{task}-base"),
    }
    for data in sorted({d for v in lineage for d in (params.versions[v].data, params.versions[v].exam)}):
        shared |= {data: paths.cases(data), f"{data} proof": paths.data_proof(data)}
    return shared


def answers_of(params: "Params", lineage: Sequence[str]) -> dict[tuple[str, str], Answers]:
    """What the versions of a lineage answered in the exam of the last, by version and mode, in the current project."""
    model = params.model(lineage[-1])
    cases = list(read_cases(paths.cases(model.exam), model.task))
    run = run_of(params, model, cases, load_report(model.name, next(iter(params.modes))).exam_digest)
    return {(name, mode): load_answers(run, mode, name) for name in lineage for mode in params.modes}


def _results(params: "Params", lineage: Sequence[str]) -> dict[str, Any]:
    """Headline numbers of each version, and paired tests between every two of the lineage, in the current project."""
    task = get_task(params.versions[lineage[0]].task)
    reports = {(name, mode): load_report(name, mode) for name in lineage for mode in params.modes}
    answers = answers_of(params, lineage)
    tests = []
    for mode in params.modes:
        for before, after in itertools.combinations(lineage, 2):
            paired = compare(answers[after, mode], answers[before, mode], task.compared)
            tests += [{"version": after, "mode": mode, **test.model_dump(mode="json")} for test in paired]
        rivals = [test for test in reports[lineage[-1], mode].paired if test.other not in lineage]
        tests += [{"version": lineage[-1], "mode": mode, **test.model_dump(mode="json")} for test in rivals]
    return {
        "seeds": {name: params.versions[name].seed for name in lineage},
        "metrics": {
            name: {
                mode: {
                    metric: reports[name, mode].metrics[metric].model_dump(mode="json")
                    for metric in (*task.compared, UNREAD)
                }
                for mode in params.modes
            }
            for name in lineage
        },
        "mode_agreement": {name: _agreement(name) for name in lineage},
        "tests": tests,
    }


def _agreement(name: str) -> Any:
    return json.loads((paths.report(name) / BETWEEN_MODES).read_text(encoding="utf-8")).get("mode_agreement")


def page(result: dict[str, Any]) -> str:
    """The replication as Markdown: a row for each seed and version, then a row for each paired test."""
    lineage, modes = result["lineage"], result["modes"]
    known = result["runs"][0]["metrics"][lineage[0]][modes[0]]
    compared = sorted(known.keys() - {UNREAD}, key=EXACT.__ne__)
    rows = [
        (
            run["seeds"][name],
            name,
            [run["metrics"][name][mode][what] for mode in modes for what in compared] + [run["mode_agreement"][name]],
        )
        for run in result["runs"]
        for name in lineage
    ]
    return render("replication", **result, rows=rows, compared=compared, n=rows[0][2][0]["n"])
