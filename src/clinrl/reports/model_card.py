"""Model cards in the Hugging Face form: of an adapter as it was trained, and of one that has sat its exam.

Both are written from records alone, the first from what the manifest holds, the second from that and the reports.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from clinrl.analysis.exam import VIEW, EvalReport
from clinrl.types import Estimate

WORST = 5
"""Slices that a card names as those with the most dangerous errors."""


def write(manifest: Mapping[str, Any], *, lineage: Sequence[str]) -> str:
    """The card's text. `manifest` holds a manifest's fields but `files`; `lineage` names the versions, root first."""
    spec, name, task = manifest["spec"], manifest["name"], manifest["task"]
    chain = " → ".join([f"{task}-base", *lineage])
    digests = "\n".join(f"| {key} | `{value}` |" for key, value in sorted(manifest["inputs"].items()))
    recipe = {key: spec[key] for key in ("method", "lora", "trainer", "stream", "modes")}
    recipe |= {"reward": spec["reward"]} if spec["method"] == "grpo" else {"omit": spec["omit"]}
    method = (
        "GRPO (group-relative policy optimisation) on the task's reward"
        if spec["method"] == "grpo"
        else "supervised fine-tuning on gold answers, with the gaps declared under `omit`"
    )
    return f"""---
library_name: peft
base_model: data/bases/{task}
pipeline_tag: text-generation
language: en
tags:
- lora
- {spec["method"]}
- trl
- clinical
- synthetic-data
- research-only
---

# {name}

A LoRA adapter for the clinrl task `{task}` (version {manifest["task_version"]}), trained by {method} at scale
`{spec["scale"]}`.

**Research only.** Trained and examined on synthetic cases; no patient's data were used and no clinician has
validated it. It must not inform the care of any person.

## Intended use

Reproducible research on rewards, warm starts and dual-mode evaluation of clinical reasoning.

## Out of scope

Any clinical use: triage, diagnosis, treatment, billing, or advice to patients or staff. Real notes differ from the
synthetic ones in language, length and case mix; no result on them is known.

## Lineage

{chain}

`{name}` starts from the weights of `{spec["parent"]}` and was trained on the data set `{spec["data"]}` with the
recipe `{spec["profile"]}` and seed {spec["seed"]}.

| input | digest |
| --- | --- |
{digests}

## Recipe

```json
{json.dumps(recipe, indent=2, sort_keys=True, ensure_ascii=False)}
```

## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("data/bases/{task}")
model = PeftModel.from_pretrained(base, "data/adapters/{name}")
tokenizer = AutoTokenizer.from_pretrained("data/adapters/{name}")
```

`history.jsonl` holds one line of training metrics a step; `manifest.json` the digest of every file.
"""


def examined(card: str, reports: Sequence[EvalReport], agreement: Mapping[str, Any]) -> str:
    """A trained adapter's card with its exam: results for machines in the front matter, tables for people below.

    `card` is what `write` wrote, `reports` has one report a mode, `agreement` is what `between_modes` says.
    """
    front, body = card.removeprefix("---\n").split("---\n", 1)
    first = reports[0]
    results = "".join(_result(report) for report in reports)
    index = f"model-index:\n- name: {first.name}\n  results:\n{results}"
    agreed = agreement.get("mode_agreement")
    said = f"\nThe modes agree in {_share(agreed)} cases.\n" if agreed else ""
    return f"""---
{front}{index}---
{body}
## Exam

{first.exam}, n = {first.n}; brackets hold 95% intervals. {first.note}

{_metrics(reports)}
{said}
Answers of others to the same exam:

{_rows(reports)}

## Failures

{_failures(reports)}
"""


def _result(report: EvalReport) -> str:
    """One entry of a model index: the dataset, and the metrics as plain numbers."""
    lines = [
        "  - task:",
        "      type: text-generation",
        "    dataset:",
        f"      name: {report.exam}, mode {report.mode}",
        f"      type: synthetic-{report.task}",
        "    metrics:",
    ]
    for name, estimate in report.metrics.items():
        lines += [f"    - type: {name}", f"      value: {estimate.value:g}"]
    return "\n".join(lines) + "\n"


def _metrics(reports: Sequence[EvalReport]) -> str:
    names = list(dict.fromkeys(name for report in reports for name in report.metrics))
    lines = [["metric", *(report.mode for report in reports)], ["---"] * (len(reports) + 1)]
    lines += [[name, *(_number(report.metrics.get(name)) for report in reports)] for name in names]
    return _table(lines)


def _rows(reports: Sequence[EvalReport]) -> str:
    """Everybody's exact and dangerous answers, in each mode: what a good number is good against."""
    names = list(dict.fromkeys(row.name for report in reports for row in report.rows))
    shown = ("exact", "dangerous")
    lines = [["answers of", *(f"{what}, {report.mode}" for report in reports for what in shown)]]
    lines.append(["---"] * len(lines[0]))
    for name in names:
        cells = [name]
        for report in reports:
            metrics = next((row.metrics for row in report.rows if row.name == name), {})
            cells += [_number(metrics.get(what)) for what in shown]
        lines.append(cells)
    return _table(lines)


def _failures(reports: Sequence[EvalReport]) -> str:
    """Unreadable and clipped answers by mode, and the slices with the highest share of dangerous errors."""
    lines = [["mode", "unreadable", "clipped", "slices with the most dangerous errors"], ["---"] * 4]
    for report in reports:
        slices = [
            (estimates["dangerous"].value, f"{what} {value}: {_share(estimates['dangerous'])}")
            for what, values in report.slices.items()
            if what != VIEW
            for value, estimates in values.items()
            if "dangerous" in estimates and estimates["dangerous"].value > 0
        ]
        worst = "; ".join(text for _, text in sorted(slices, key=lambda pair: (-pair[0], pair[1]))[:WORST])
        reasons = ", ".join(f"{reason} ({count})" for reason, count in sorted(report.unreadable.items()))
        silent = sum(report.unreadable.values())
        lines.append(
            [
                report.mode,
                f"{silent}: {reasons}" if silent else "0",
                str(report.stops.get("max_tokens", 0)),
                worst or "none",
            ]
        )
    return _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(estimate: Estimate | None) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]" if estimate else ""


def _share(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f}% [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}] of {estimate.n}"
