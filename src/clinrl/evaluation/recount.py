"""Checks written reports against their graded answers, and these against their transcripts.

Every number that needs no model is computed again, since numbers in a report can be edited as in any file.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from clinrl import paths
from clinrl.analysis.exam import Estimates, EvalReport, build, summary
from clinrl.analysis.paired import between_modes, compare
from clinrl.analysis.run import Run
from clinrl.artifacts import verified
from clinrl.config.params import Params
from clinrl.data.dataset import to_text
from clinrl.errors import ArtefactError
from clinrl.evaluation.answers import (
    BETWEEN_MODES,
    SUMMARY,
    load_graded,
    load_parent,
    load_report,
    load_variants,
    open_run,
    rows_of,
)
from clinrl.evaluation.evaluate import grade, seen_by
from clinrl.tasks.importing import is_imported

TOLERANCE = 1e-6
"""Bootstrap intervals may differ in their last digits on another machine; no page shows a difference as small."""


def reports(params: Params, name: str) -> dict[str, EvalReport]:
    """The reports of a version, a merge or a base, by mode, after a check that their numbers follow from the answers.

    Not computed again are measures by judges, the results of thresholds on a model's probabilities, the rows of simple
    policies, which the gate computes itself, and what compares it with a parent whose answers are not here. Raises
    ArtefactError naming the report and the number that does not follow, or the answer that differs from its transcript.
    """
    run = open_run(params, params.model(name))
    folder = paths.graded(name)
    manifest = verified(folder)
    found, answers = {}, {}
    seen = seen_by(params, run)
    for mode in run.modes:
        page = f"{paths.report(name) / mode}.json"
        given, lines = load_graded(run, mode, name)
        answers[mode] = given.answers
        report = load_report(name, mode)
        under = load_variants(run, mode, folder, run.model.variants)
        graded = {mode: lines} | {f"{mode}.{variant}": some for variant, some in under.items()}
        read = replace(run, adapter_digest=report.adapter_digest, graded=graded, sampler=given.sampler)
        _check_scores(read, mode, folder / f"{mode}.jsonl")
        if report.adapter_digest != manifest.inputs["adapter"]:
            raise ArtefactError(f"{page} is about another model than {folder}; {_again(name)}")
        written = report.model_copy(update={"costs": None}).model_dump(mode="json")
        _check_same(page, _count(read, mode, seen), written, name)
        found[mode] = report
    written = {file: _json(name, file) for file in (SUMMARY, BETWEEN_MODES)}
    ordered = {mode: answers[mode] for mode in _order(answers, written[BETWEEN_MODES])}
    agreement = between_modes(run.task, run.golds, ordered, run.clusters)
    for file, counted in ((SUMMARY, summary(list(found.values()), agreement)), (BETWEEN_MODES, agreement)):
        _check_same(str(paths.report(name) / file), to_jsonable_python(counted), written[file], name)
    return found


def _order(modes: Iterable[str], written: Any) -> Sequence[str]:
    """The modes in the order in which the report compares them: that in params.yaml may have changed since."""
    tests = written.get("between_modes") or {} if isinstance(written, Mapping) else {}
    orders = list(permutations(modes))
    return next((order for order in orders if {f"{a}_{b}" for a, b in combinations(order, 2)} == set(tests)), orders[0])


def _check_scores(run: Run, mode: str, path: Path) -> None:
    """Refuse scores that differ from the reward's. Skipped if the reward needs a model, or the text was not kept."""
    model = run.model
    if run.task.asks.models(model.reward) or any(map(is_imported, run.cases)):
        return
    lines = run.graded[mode]
    anew = grade(run.task, mode, run.shown, [line.transcript for line in lines], model.reward)
    for number, (line, other) in enumerate(zip(lines, anew, strict=True), start=1):
        if line.score != other.score:
            raise ArtefactError(
                f"{path} line {number} has another score than its transcript earns; {_again(model.name)}"
            )


def _count(run: Run, mode: str, seen: Estimates) -> dict[str, Any]:
    """The report computed from the answers, without measures by judges and without the rows of simple policies."""
    others, tests = {}, []
    if run.model.compared is not None and paths.graded(run.model.compared).exists():
        parent = load_parent(run, mode)
        assert parent is not None
        others, tests = rows_of(run, parent), list(compare(run.answers(mode), parent))
    measures = run.task.reporting.qualities.items()
    qualities = {name: quality for name, quality in measures if not quality.asks}
    return build(run, mode, others=others, tests=tests, qualities=qualities, seen=seen).model_dump(mode="json")


def _check_same(page: str, counted: Any, written: Any, name: str) -> None:
    """Raise ArtefactError if a written number differs from the computed one."""
    for place, right, wrong in _differences(counted, written):
        raise ArtefactError(
            f"{page} says that {place} is {to_text(wrong)}, but its answers give {to_text(right)}: it was edited; "
            f"{_again(name)}"
        )


def _differences(counted: Any, written: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The places where a written record differs from the computed one, with both values.

    Values that were not computed are skipped: rows and tests are compared by name, and judges' measures are only in
    the written mapping of metrics.
    """
    if at in ("rows", "paired") and isinstance(counted, list):
        counted, written = _named(counted), _named(written)
        written = {key: written.get(key) for key in counted}
    if at == "metrics" and isinstance(counted, Mapping):
        written = {key: written.get(key) for key in counted}
    if isinstance(counted, Mapping) and isinstance(written, Mapping):
        for key in sorted(counted.keys() | written.keys()):
            place = f"{at}.{key}" if at else key
            yield from _differences(counted.get(key), written.get(key), place)
    elif isinstance(counted, list) and isinstance(written, list) and len(counted) == len(written):
        for number, (one, other) in enumerate(zip(counted, written, strict=True)):
            yield from _differences(one, other, f"{at}.{number}")
    elif not _equal(counted, written):
        yield at, counted, written


def _named(rows: Any) -> dict[str, Any]:
    return {"/".join(str(row[key]) for key in ("name", "metric", "other") if key in row): row for row in rows}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float | int) and isinstance(b, float | int) and not isinstance(a, bool):
        return math.isclose(a, b, rel_tol=0, abs_tol=TOLERANCE)
    return bool(a == b)


def _json(name: str, file: str) -> Any:
    path = paths.report(name) / file
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ArtefactError(f"{path} is missing or is no JSON; {_again(name)}") from None


def _again(name: str) -> str:
    return f"restore it with `git checkout {paths.report(name)}` and `dvc checkout`, or evaluate {name} again"
