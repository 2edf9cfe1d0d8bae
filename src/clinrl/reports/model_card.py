"""Model cards in the Hugging Face form: one for a trained adapter, and one that adds the results of its exam.

The first is written from the manifest alone, the second from that card and the reports.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from clinrl.analysis.exam import VARIANTS, EvalReport
from clinrl.reports.numbers import percent
from clinrl.reports.render import render
from clinrl.tasks.base import Task, get_task

if TYPE_CHECKING:
    from huggingface_hub import EvalResult


class Trained(NamedTuple):
    """The training data of one version of a lineage."""

    version: str
    data: str
    is_imported: bool
    """Whether the cases are imported records; other cases are drawn from templates."""
    omitted: Mapping[str, float]
    """Rule to the share of its cases whose label ignores the rule on purpose."""


REFERENCE, OTHER, UNKNOWN_LICENCE = "LicenseRef-", "other", "unknown"
"""SPDX's prefix of a licence that is not on its list; the hub's words for such a licence, and for an unknown one."""
WORST = 5
"""Most slices that a card names as those with the highest shares of safety errors."""


def write(
    manifest: Mapping[str, Any], *, lineage: Sequence[str], records: str = "none",
    base: Mapping[str, Any] = MappingProxyType({}),
) -> str:  # fmt: skip
    """The card's text. `manifest` holds a manifest's fields except `files`; `lineage` names versions, root first.

    `records` says where imported records are, as `Params.records_of` does. `base`: as `bases.reference` returns it.
    """
    spec = manifest["spec"]
    recipe = {key: spec[key] for key in ("method", "lora", "trainer", "stream", "modes")}
    recipe |= {"omit": spec["omit"]} if spec["method"] == "sft" else {"reward": spec["reward"]}
    recipe |= {key: spec[key] for key in ("labels_only", "placebo") if key in spec}
    return render(
        "adapter_card", **manifest, lineage=list(lineage), how=_how(spec), records=records,
        recipe=json.dumps(recipe, indent=2, sort_keys=True, ensure_ascii=False), quantize=base.get("quantize", ""),
        base=base.get("repo", f"data/bases/{manifest['task']}"), commit=base.get("commit", ""),
    )  # fmt: skip


def with_results(
    card: str,
    reports: Sequence[EvalReport],
    agreement: Mapping[str, Any],
    *,
    training: Sequence[Trained],
    missing: Sequence[str],
    licence: str,
    waiver: str = "",
    alarms: str = "",
) -> str:
    """A trained adapter's card with its exam: results for machines in the front matter, tables for people below.

    `card` is the text from `write`, `reports` has one report for each mode, `agreement` is the record of
    `between_modes`. `training` has one record for each version of the lineage; `missing` names what was not measured.
    `licence` is the base's licence in SPDX's terms, which binds the adapter; empty if it is not known.
    `waiver` and `alarms` are those of a registered version's tags.
    """
    from huggingface_hub import ModelCard

    task = get_task(reports[0].task)
    read = ModelCard(card)
    own = licence.startswith(REFERENCE)
    data: Any = read.data
    data.license = OTHER if own else licence.lower() or UNKNOWN_LICENCE
    data.license_name = licence.removeprefix(REFERENCE).lower() if own else None
    data.datasets = [*dict.fromkeys(one.data for one in training)] or None
    data.model_name, data.eval_results = reports[0].name, [*_results(reports)]
    others = dict.fromkeys(row.name for report in reports for row in report.rows)
    return render(
        "exam_card", front=str(data), body=read.text.lstrip("\n"), reports=reports,
        agreement=agreement.get("mode_agreement"),
        names=dict.fromkeys(name for report in reports for name in report.metrics),
        others={name: [_row(one, name).get(what) for one in reports for what in task.compared] for name in others},
        failures=[(one.mode, _unreadable(one), one.stops.get("max_tokens", 0), _worst(task, one)) for one in reports],
        compared=[*task.compared], errors=task.noun_of(task.safety.metric), training=training, missing=missing,
        waiver=waiver, alarms=alarms,
        slices=[
            # A mode may have no case of a value.
            (what, value, [one.slices.get(what, {}).get(value, {}).get(name)
                           for name in task.compared for one in reports])
            for what, values in reports[0].slices.items()
            for value in values
        ],
    )  # fmt: skip


def _results(reports: Sequence[EvalReport]) -> "Iterator[EvalResult]":
    """Every metric of every mode, to the last digit, with its interval and its n."""
    from huggingface_hub import EvalResult

    for report in reports:
        for name, one in report.metrics.items():
            yield EvalResult(
                task_type="text-generation", dataset_type=report.exam, dataset_config=report.mode, dataset_split="exam",
                dataset_name=f"{report.exam}, mode {report.mode}", dataset_revision=report.exam_digest,
                metric_type=name, metric_value=one.value, metric_args={"low": one.low, "high": one.high, "n": one.n},
            )  # fmt: skip


def _how(spec: Mapping[str, Any]) -> str:
    """How a version was trained, in one clause."""
    if spec["method"] == "grpo":
        paid = f"a placebo reward ({spec['placebo']})" if "placebo" in spec else "the task's reward"
        return f"GRPO (group-relative policy optimisation) on {paid}"
    if spec["method"] == "rejection":
        return "supervised fine-tuning on completions of its parent that the task's reward kept (rejection sampling)"
    taught = "gold labels without reasons" if "labels_only" in spec else "gold answers"
    return f"supervised fine-tuning on {taught}, with the gaps declared under `omit`"


def _row(report: EvalReport, name: str) -> Mapping[str, Any]:
    """The metrics of another row of the exam, such as a baseline; empty if the report does not have it."""
    return next((row.metrics for row in report.rows if row.name == name), {})


def _unreadable(report: EvalReport) -> str:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in sorted(report.unreadable.items()))
    return f"{sum(report.unreadable.values())}: {reasons}" if reasons else "0"


def _worst(task: Task, report: EvalReport) -> str:
    """The slices with the highest shares of the task's safety metric, or `none`."""
    metric = task.safety.metric
    found = [
        (estimates[metric], f"{what} {value}")
        for what, values in report.slices.items()
        if what != VARIANTS
        for value, estimates in values.items()
        if metric in estimates and estimates[metric].value > 0
    ]
    found.sort(key=lambda pair: (-pair[0].value, pair[1]))
    return "; ".join(f"{name}: {percent(share)} of {share.n}" for share, name in found[:WORST]) or "none"
