"""`clinrl try`: a model answers one drawn case in each mode, in a checkout or from an installed wheel alone.

A wheel of `make wheel` contains a small project with the paths of a checkout, which is read and verified like one.
"""

import json
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

from clinrl import paths
from clinrl.analysis.exam import Estimates, EvalReport, row_metrics
from clinrl.artifacts import digest
from clinrl.config.model import Model
from clinrl.config.params import Params, load_params
from clinrl.data.dataset import draw
from clinrl.errors import ArtefactError, ParamsError, did_you_mean, format_value
from clinrl.evaluation.answers import load_report, run_of
from clinrl.evaluation.evaluate import answer_exam
from clinrl.evaluation.record import answers_of, load_record
from clinrl.models.bases import made_of
from clinrl.models.judges import Judges
from clinrl.reports import tables
from clinrl.reports.episode import answer_text, episode_of, write
from clinrl.reports.numbers import percent
from clinrl.tasks.base import EXACT

FOLDER = Path(__file__).parents[1] / "shipped"
"""The project inside a wheel. A checkout does not have this folder: there, the working directory is the project."""


def stage(name: str, *, seed: int, as_json: bool = False) -> None:
    """Draw a case of the mine pool, which no training and no exam uses, and print a version's answer in each mode.

    `name` is a version or a task. Raises ParamsError for any other name, and ArtefactError if the model is missing or
    altered.
    """
    with chdir(FOLDER if FOLDER.is_dir() else Path()):
        if not Path("params.yaml").exists():
            raise ArtefactError(
                "no models are here; install the wheel that `make wheel` writes, or start in the root of a checkout"
            )
        params = load_params()
        model = params.model(_version(params, name))
        task, digests = model.task, made_of(model.task, model.folder)
        (case,) = task.cases(1, seed, pool="mine", mix=task.checks.mixes[0])
        examined = replace(model, exam=f"a case drawn with seed {seed}", variants=())
        run = run_of(params, examined, [case], digest([case.id]))
        run = answer_exam(params, replace(run, adapter_digest=digests["adapter"]), Judges(paths.base(task.name)))
        episodes = [episode_of(examined, case, run.graded[mode][0], number=1, of=1) for mode in params.modes]
        reports = [load_report(model.name, mode) for mode in params.modes]
        if {report.adapter_digest for report in reports} != {digests["adapter"]}:
            raise ArtefactError(f"{model.folder} is not what the reports of {model.name} are about; run `dvc checkout`")
        rows = [row for report in reports for row in _rows(params, model, report)]
    rule, right = episodes[0].traits.get("rule", ""), task.label(case)
    if as_json:
        shown = {"version": model.name, **digests, "seed": seed, "rule": rule, "right": right, "note": reports[0].note}
        dumped = {one.mode: one.model_dump(mode="json") for one in episodes}
        print(json.dumps(shown | {"modes": dumped, "exam": model.exam, "rows": rows}, indent=2, ensure_ascii=False))
        return
    end = f"Right is {answer_text(right)}" + (f", by the rule {rule}.\n" if rule else ".\n")
    beside = "beside the best rivals"
    if model.compared:
        beside = "beside its parent, the best way to ask the parent, and the best rivals"
    head = f"{model.name} on its exam {model.exam}, {beside}. {reports[0].note}"
    print("\n".join([*(write(one, is_again=one != episodes[0]) for one in episodes), end, head]))
    tables.show([*rows[0]], rows, as_json=False)


def _version(params: Params, name: str) -> str:
    """The version with this name, or the last one in params.yaml of the task with this name, among those in this
    project."""
    here = [version for version in params.versions if paths.adapter(version).is_dir()]
    if found := [version for version in here if name in (version, params.versions[version].task)]:
        return found[-1]
    if wanted := [version for version, spec in params.versions.items() if name in (version, spec.task)]:
        do = f"name one of {', '.join(here)}, or " if here else ""
        raise ArtefactError(f"no trained version of {name} is here; {do}run `dvc repro evaluate@{wanted[0]}`")
    if name in params.bases:
        raise ArtefactError(f"{name} has no version yet that could be asked")
    known = [*params.bases, *params.versions]
    raise ParamsError(f"{format_value(name)} is neither a version nor a task; {did_you_mean(name, known)}")


def _rows(params: Params, model: Model, report: EvalReport) -> Iterator[dict[str, Any]]:
    """Table rows for the model, its parent, the parent's best input variant, the best other row, and all rivals."""
    rows = {row.name: row.metrics for row in report.rows}
    kin = [name for name in rows if model.compared and name.startswith(model.compared) and name != model.name]
    others = [name for name in rows if name not in (model.name, *kin)]
    best = [max(some, key=lambda name: rows[name][EXACT].value) for some in (kin, others) if some]
    chosen = {name: rows[name] for name in (model.name, model.compared, *best) if name is not None}
    for name, metrics in (chosen | _rivals(params, model, report)).items():
        shares = {metric: percent(metrics[metric]) for metric in model.task.compared if metric in metrics}
        yield {"mode": report.mode, "answered by": name, "n": report.n, **shares}


def _rivals(params: Params, model: Model, report: EvalReport) -> dict[str, Estimates]:
    """The metrics of the rivals in params.yaml with the same exam, from their records."""
    took = [name for name, rival in params.rivals.items() if rival.exam == model.exam]
    names = [name for name in took if paths.exam_record(params.rivals[name].task, name).exists()]
    if not names or model.exam not in params.datasets:
        return {}
    run = run_of(params, model, [*draw(params.datasets[model.exam])], report.exam_digest)
    answers = {name: answers_of(run, report.mode, load_record(run, name, "rival")) for name in names}
    return {name: row_metrics(run, given.answers) for name, given in answers.items()}
