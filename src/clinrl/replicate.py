"""Replication: the lineage of a version, trained again with other seeds on the same base and data, and tested again.

One seed shows that a recipe worked once. Each replicate is a project folder of its own under `.clinrl/replicates`, with
the seeds of the lineage moved and everything else linked, so the same stages run there and a killed run continues.
"""

import io
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl import paths
from clinrl.artefacts import digest, read_manifest, write_json, write_text
from clinrl.dataset import read_cases
from clinrl.errors import ParamsError, TrainingError
from clinrl.evaluate import examinee, load_report, load_sitting, sitting_of
from clinrl.params import load_params
from clinrl.report import COMPARED, NOTE, compare
from clinrl.statistics import Paired
from clinrl.task import get_task

if TYPE_CHECKING:
    from clinrl.params import Params

STRIDE = 1000
"""Replicate k adds k times this to every seed of the lineage; replicate 0 is the version of params.yaml itself."""
SHOWN = ("exact", "dangerous", "no_parse")


def stage(params: "Params", version: str, *, seeds: int) -> None:
    """Train and examine `seeds` replicates (the first is params.yaml's own) and write `data/reports/seeds/<version>.*`.

    Raises ParamsError for fewer than two seeds, ArtefactError if params.yaml's own lineage was not examined yet, and
    TrainingError if a stage of a replicate fails; what finished stays, and the same command goes on from there.
    """
    if seeds < 2:
        raise ParamsError(f"--seeds is {seeds}; replication needs at least 2, params.yaml's own seed included")
    lineage = params.lineage(version)
    own = Path.cwd()
    folders = [own, *(_replicate(params, lineage, own, k) for k in range(1, seeds))]
    runs = []
    for folder in folders:
        with chdir(folder):
            runs.append(_results(load_params(), lineage))
    result = {
        "version": version,
        "lineage": list(lineage),
        "exam": params.versions[version].exam,
        "note": NOTE,
        "runs": runs,
    }
    write_json(own / paths.seeds_report(version), result)
    write_text(own / paths.seeds_report(version).with_suffix(".md"), page(result))


def _replicate(params: "Params", lineage: Sequence[str], own: Path, k: int) -> Path:
    """The finished project folder of replicate `k`: built now, or found as an earlier call left it."""
    inputs = {name: read_manifest(folder).files for name, folder in _shared(params, lineage).items() if folder.is_dir()}
    key = digest([inputs, {v: params.versions[v].model_dump(mode="json", exclude={"why"}) for v in lineage}, k])
    folder = own / ".clinrl" / "replicates" / f"{lineage[-1]}-{k}-{key[:16]}"
    for target in _shared(params, lineage).values():
        link = folder / target
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(own / target)
    write_text(folder / "params.yaml", _moved(own / "params.yaml", lineage, k * STRIDE))
    for name in lineage:
        if (folder / paths.graded(name) / "manifest.json").exists():
            continue
        for command in ("probe", "train", "evaluate"):
            print(f"clinrl: replicate {k}: {command} {name}", file=sys.stderr, flush=True)
            code = subprocess.run([sys.executable, "-m", "clinrl", command, name], cwd=folder, check=False).returncode
            if code != 0:
                raise TrainingError(f"replicate {k}: `clinrl {command} {name}` in {folder} ended with code {code}")
    return folder


def _shared(params: "Params", lineage: Sequence[str]) -> dict[str, Path]:
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


def _moved(source: Path, lineage: Sequence[str], by: int) -> str:
    """params.yaml with the seeds of the lineage moved; nothing else changes."""
    from ruamel.yaml import YAML

    yaml = YAML()
    tree = yaml.load(source)
    for name in lineage:
        tree["versions"][name]["seed"] += by
    text = io.StringIO()
    yaml.dump(tree, text)
    return text.getvalue()


def _results(params: "Params", lineage: Sequence[str]) -> dict[str, Any]:
    """Headline numbers of each version, and paired tests between every two of the lineage, in the current project."""
    task = get_task(params.versions[lineage[0]].task)
    reports = {(name, mode): load_report(name, mode) for name in lineage for mode in params.modes}
    cases = list(read_cases(paths.cases(params.versions[lineage[-1]].exam), task))
    tests = []
    for mode in params.modes:
        sittings = {}
        for name in lineage:
            like = sitting_of(examinee(params, name), mode, params, reports[name, mode].exam_digest, cases)
            sittings[name] = load_sitting(name, like, cases)
        for before, after in itertools.combinations(lineage, 2):
            for test in compare(sittings[after], sittings[before], task.metrics):
                tests.append({"version": after, "mode": mode, **test.model_dump(mode="json")})
        rivals = [test for test in reports[lineage[-1], mode].paired if test.other not in lineage]
        tests += [{"version": lineage[-1], "mode": mode, **test.model_dump(mode="json")} for test in rivals]
    return {
        "seeds": {name: params.versions[name].seed for name in lineage},
        "metrics": {
            name: {
                mode: {metric: reports[name, mode].metrics[metric].model_dump(mode="json") for metric in SHOWN}
                for mode in params.modes
            }
            for name in lineage
        },
        "mode_agreement": {name: _agreement(name) for name in lineage},
        "tests": tests,
    }


def _agreement(name: str) -> Any:
    return json.loads((paths.report(name) / "summary.json").read_text(encoding="utf-8")).get("mode_agreement")


def page(result: dict[str, Any]) -> str:
    """The replication as Markdown: a row a seed and version, then the paired tests against the root."""
    return "\n".join([*_numbers(result), "", *_tests(result)]) + "\n"


def _numbers(result: dict[str, Any]) -> Iterator[str]:
    lineage, runs = result["lineage"], result["runs"]
    modes = list(runs[0]["metrics"][lineage[0]])
    n = runs[0]["metrics"][lineage[0]][modes[0]]["exact"]["n"]
    yield f"# {result['version']} with {len(runs)} seeds"
    yield ""
    yield f"{result['note']} Exam {result['exam']}, n = {n}; 95% Wilson intervals. Base, data and exam are the same in every row."
    yield ""
    yield (
        "| seed | version | "
        + " | ".join(f"{mode} {what}" for mode in modes for what in ("exact", "dangerous"))
        + " | modes agree |"
    )
    yield "|---" * (3 + 2 * len(modes)) + "|"
    for run in runs:
        for name in lineage:
            cells = [_shown(run["metrics"][name][mode][what]) for mode in modes for what in COMPARED]
            yield (
                f"| {run['seeds'][name]} | {name} | " + " | ".join([*cells, _shown(run["mode_agreement"][name])]) + " |"
            )


def _tests(result: dict[str, Any]) -> Iterator[str]:
    yield "Exact McNemar tests on the same cases, not adjusted for their number; gained and lost are discordant cases."
    yield ""
    yield "| seed | comparison | mode | metric | gained | lost | difference | p |"
    yield "|---|---|---|---|---|---|---|---|"
    for run in result["runs"]:
        for raw in run["tests"]:
            test = Paired.model_validate({key: value for key, value in raw.items() if key not in ("version", "mode")})
            yield (
                f"| {run['seeds'][raw['version']]} | {raw['version']} against {test.other} | {raw['mode']} | {test.metric} | "
                f"{test.b} | {test.c} | {_shown(raw['difference'])} | {test.p:.2g} |"
            )


def _shown(estimate: dict[str, float]) -> str:
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"
