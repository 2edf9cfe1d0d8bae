"""Write what the documentation takes from elsewhere: two reference pages, what was measured, and two pictures.

`make docs` runs it before it builds the pages. Equal code and equal reports give equal bytes.
"""

import argparse
import ast
import inspect
import io
import json
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from clinrl import paths
from clinrl.cli.commands import GROUPS
from clinrl.cli.parser import parser
from clinrl.config.params import Params, load_params
from clinrl.tasks.base import get_task, task_names

ROOT = Path(__file__).resolve().parents[1]
SCALARS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null", Any: "mapping"}
EXACT, DANGEROUS, NEUTRAL = "#0072B2", "#D55E00", "#555555"
"""Of Okabe and Ito's colours, which colour-blind readers tell apart: a colour has one meaning."""


def configuration() -> str:
    """The page about every key of params.yaml, from the schema and the docstrings below its fields."""
    parts = [
        "# Configuration\n",
        "Every key of `params.yaml` and of the files of `params/` beside it, which are read as one mapping. Written by",
        "`docs/generate.py` from `src/clinrl/config`. `clinrl check` reads",
        "all of it, and refuses an unknown key with the nearest one. Words in capitals stand for your names.\n",
    ]
    for path, model in sections(Params, ""):
        parts.append(f"## {path or 'The top level'}\n")
        parts.append(f"{sentence(inspect.getdoc(model) or '')}\n")
        parts.append(table(model))
    parts.append("## Rewards\n\nWhat `profiles.NAME.reward` may hold, for each task.\n")
    for task in task_names():
        for path, model in sections(get_task(task).Reward, ""):
            parts.append(f"### {task}: {path or 'reward'}\n")
            parts.append(f"{sentence(inspect.getdoc(model) or '')}\n")
            parts.append(table(model))
    return "\n".join(parts).rstrip() + "\n"


def sections(model: type[BaseModel], at: str, seen: set[type] | None = None) -> Iterator[tuple[str, type[BaseModel]]]:
    """A model and those in its fields, depth first, each once, with the key path that leads there first."""
    seen = set() if seen is None else seen
    if model in seen:
        return
    seen.add(model)
    yield at, model
    for name, field in model.model_fields.items():
        for steps, inner in models(field.annotation):
            yield from sections(inner, ".".join(filter(None, [at, name, *steps])), seen)


def models(kind: Any, steps: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """The models in a type, with the words that stand for keys of mappings on the way."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        method = get_args(kind.model_fields["method"].annotation) if "method" in kind.model_fields else ()
        yield (*steps[:-1], f"{steps[-1]} ({method[0]})") if len(method) == 1 else steps, kind
    held = get_args(kind)
    if get_origin(kind) is dict:
        yield from models(held[1], (*steps, "SCALE" if get_args(held[0]) == ("embedded", "full") else "NAME"))
    elif get_origin(kind) is not Literal:
        for part in held:
            yield from models(part, steps)


def table(model: type[BaseModel]) -> str:
    """A row for each key: what it takes, its default and its meaning."""
    lines = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    notes = docstrings(model)
    for name, field in model.model_fields.items():
        inner = [inspect.getdoc(held) or "" for _, held in models(field.annotation)]
        meaning = sentence(field.description or notes.get(name) or (inner[0].split("\n\n")[0] if inner else ""))
        lines.append(f"| `{name}` | {takes(field.annotation)} | {default(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings below the fields of a model and of those that it inherits from."""
    found: dict[str, str] = {}
    for cls in reversed([cls for cls in model.__mro__ if issubclass(cls, BaseModel) and cls is not BaseModel]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, note in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(note, ast.Expr):
                found[field.target.id] = inspect.cleandoc(str(getattr(note.value, "value", "")))
    return found


def takes(kind: Any) -> str:
    """A type in words."""
    held, origin = get_args(kind), get_origin(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if origin is Literal:
        return " or ".join(f"`{value}`" if value else "nothing" for value in held)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(takes(part) for part in held))
    if origin in (tuple, list):
        return f"list of {takes(held[0])}" if len(set(held) - {...}) == 1 else "list"
    if origin is dict:
        is_scale = get_args(held[0]) == ("embedded", "full")
        return f"for each scale: {takes(held[1])}" if is_scale else f"by name: {takes(held[1])}"
    if origin is not None:  # Annotated
        return takes(held[0])
    return "a block"


def default(field: FieldInfo) -> str:
    """What stands for a key that is left out."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "needed"
    if isinstance(value, BaseModel) or value in ({}, (), ""):
        return "none" if not isinstance(value, BaseModel) else "its defaults"
    return f"`{json.dumps(value)}`"


def sentence(text: str) -> str:
    """A docstring as one line of a table."""
    flat = " ".join(text.split())
    return flat.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def commands() -> str:
    """The page about the command line: what `--help` says of each command."""
    parts = [
        "# Command line\n",
        "What `clinrl COMMAND --help` says, written by `docs/generate.py` from `src/clinrl/cli`.\n",
    ]
    (parsers,) = (action.choices for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    for group, members in GROUPS.items():
        parts.append(f"## {group.capitalize()}\n")
        for name, command in members.items():
            arguments = [
                f"| `{' '.join(filter(None, [*one.option_strings, word(one)]))}` | {sentence(one.help or '')} |"
                for one in parsers[name]._actions
                if one.dest not in ("help", "params")
            ]
            parts.append(f"### clinrl {name}\n\n{command.help[:1].upper()}{command.help[1:]}.\n")
            parts.append(f"{textwrap.fill(sentence(command.description), 118, break_long_words=False)}\n")
            if arguments:
                parts.append("\n".join(["| argument | meaning |", "| --- | --- |", *arguments]) + "\n")
            parts.append(f"```sh\n{command.examples}\n```\n")
    return "\n".join(parts).rstrip() + "\n"


def word(action: argparse.Action) -> str:
    """The word that stands for what an argument takes; empty for a flag."""
    if action.nargs == 0:
        return ""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    return f"[{metavar}]" if action.nargs == "?" else metavar


def lineage(task: str = "esi") -> bytes:
    """The versions of a task as a tree, with exact answers and under-triaged critical patients by mode, as SVG.

    Of a recipe with several seeds the first is drawn.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    params = load_params(ROOT / "params.yaml")
    more = {seed for arm in params.comparisons[f"{task}-series"].arms.values() for seed in arm[1:]}
    family = {name: spec for name, spec in params.versions.items() if spec.task == task and name not in more}
    rows = list(tree(f"{task}-base", {name: spec.parent for name, spec in family.items()}))
    rival = "bag of words"
    modes = list(params.modes)
    style = {"svg.hashsalt": "clinrl", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 10}
    with mpl.rc_context(mpl.rcParamsDefault), mpl.rc_context(style):
        figure = Figure(figsize=(8.4, 0.46 * (len(rows) + 1) + 1.3))
        names, exact, missed = figure.subplots(1, 3, sharey=True, width_ratios=[1.7, 2, 1.4])
        figure.subplots_adjust(left=0.01, right=0.985, top=0.84, bottom=0.09, wspace=0.06)
        places = {name: place for place, (name, _) in enumerate(rows)}
        for name, depth in rows:
            place, spec = places[name], family.get(name)
            kept = bool(spec and params.profiles[spec.profile].waiver)
            names.text(
                0.03 + 0.11 * depth, place, name, va="center", color="black", weight="normal" if kept else "bold"
            )
            if kept:
                names.text(
                    1.0, place, "failure, kept", va="center", ha="right", size=8.5, style="italic", color=NEUTRAL
                )
                for axes in (names, exact, missed):
                    axes.axhspan(place - 0.5, place + 0.5, color="0.92", lw=0)
            if spec:
                back, top = 0.06 + 0.11 * (depth - 1), places[spec.parent]
                names.plot([back, back, back + 0.07], [top + 0.32, place, place], color=NEUTRAL, lw=1)
            for mode, shift in zip(modes, (-0.14, 0.14), strict=True):
                report = json.loads((ROOT / paths.report(name) / f"{mode}.json").read_text(encoding="utf-8"))
                draw(exact, report["metrics"]["exact"], place + shift, EXACT, mode == modes[0])
                draw(missed, report["metrics"]["critical_under"], place + shift, DANGEROUS, mode == modes[0])
        (found,) = (row for row in report_rows(task, modes[0], rows[1][0]) if row["name"] == rival)
        names.text(0.03, len(rows), rival, va="center", style="italic", color=NEUTRAL)
        draw(exact, found["metrics"]["exact"], len(rows), EXACT, True)
        draw(missed, found["metrics"]["critical_under"], len(rows), DANGEROUS, True)
        exact.axvline(100 * found["metrics"]["exact"]["value"], color=NEUTRAL, lw=0.9, ls=(0, (3, 3)), zorder=0)
        missed.axvline(
            100 * found["metrics"]["critical_under"]["value"], color=NEUTRAL, lw=0.9, ls=(0, (3, 3)), zorder=0
        )
        names.set(xlim=(0, 1.02), ylim=(len(rows) + 0.6, -0.6))
        exact.set(xlim=(30, 101), xlabel="% of exam cases, more is better")
        missed.set(xlim=(-1, 62), xlabel="% of exam cases, less is better")
        exact.set_title("Exact answers", color=EXACT, size=11, weight="bold", loc="left")
        missed.set_title("Critical under-triage", color=DANGEROUS, size=11, weight="bold", loc="left")
        for axes in (names, exact, missed):
            axes.tick_params(left=False, labelleft=False, bottom=axes is not names, labelbottom=axes is not names)
            axes.spines[:].set_visible(False)
            axes.set_axisbelow(True)
            if axes is not names:
                axes.grid(axis="x", color="0.88", lw=0.7)
        n = report["n"]
        figure.text(0.012, 0.955, f"{task}: each version starts from its parent's weights", size=12, weight="bold")
        legend = f"Filled: mode {modes[0]}. Hollow: mode {modes[1]}. Bars: 95% intervals, {n} synthetic exam cases."
        figure.text(0.012, 0.905, legend, size=9.5, color=NEUTRAL)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(rb"[ \t]+\n", b"\n", out.getvalue())


PERFORMANCE = """# Performance

What `make bench` measured last, from `data/reports/bench.json`; `bench_history.jsonl` beside it keeps every
record with its commit. Times are of one machine ({machine}). Ratios were measured in one run, by turns.

## A GRPO step

![Seconds of a GRPO step](images/step.svg)

The recipe and the parent are those of esi-v49. Bare TRL is a script as its manual shows it, with the same
prompts and seeds, in the environment of a shell. clinrl adds its reward, checks, checkpoints and looks at
held-out cases, and gives the process an allocator that keeps its memory.

- Groups whose completions all earn the same have an advantage of exactly 0. `loss_path: shared` leaves them out
  of forward and backward, and computes a group's prompt once. The first step of each run compares loss and
  gradient with TRL's.
- `generation_path: shared` reads what all prompts of a step begin with once, then each prompt once. Completions
  that have ended are left out of what follows. In float32 the adapter lies in the weights while tokens are
  written: that saves two of three matrix products.
- There, one random number draws a token. transformers draws one for each word of the vocabulary, a seventh of the
  time of its generation here. So the tokens are others for the same seed, of the same distribution.
- Episodes go on from what was read and written in their turns before.
- In supervised fine-tuning, `loss_path: shared` computes rows of like length together and no words of prompts.
- Keys and values lie in room that grows by blocks, here and in every exam. transformers copies all of them for
  each token.
- The limit counts matrix products alone: each prompt once, each completion written, live groups forward and
  backward.

Both keys are off by default: another order of sums rounds differently, and committed versions keep their bytes.

The rows "exact answers" below compare models that both paths trained, seed by seed, on the same exam.

## On a machine that others use

A thread of OpenMP that has nothing to do looks for work for milliseconds, on a processor that the thread it
waits for may need. clinrl bounds that search. A line of progress says when a fifth of the time or more is spent
waiting for a processor.

## All measurements

| what | value | unit | note |
| --- | ---: | --- | --- |
{rows}
"""
STEP = {
    "GRPO step, bare TRL": "bare TRL",
    "GRPO step, clinrl train": "clinrl, paths of TRL",
    "GRPO step, clinrl train, shared paths": "clinrl, shared paths",
    "GRPO step, arithmetic limit": "matrix products alone",
}
"""The bars of the figure: row of the report to label."""


def measurements() -> dict[str, Any]:
    """data/reports/bench.json."""
    found: dict[str, Any] = json.loads((ROOT / "data/reports/bench.json").read_text(encoding="utf-8"))
    return found


def performance() -> str:
    """The page on performance, with every row that was measured."""
    found = measurements()
    rows = [row for record in found.values() for row in record["rows"]]
    lines = "\n".join(f"| {row['what']} | {row['value']:g} | {row['unit']} | {row['note']} |" for row in rows)
    machine = found["grpo_step.py"]["machine"]
    return PERFORMANCE.format(machine=f"{machine['processor']}, {machine['processors']} processors", rows=lines)


def step() -> bytes:
    """Seconds of a GRPO step, bar by bar, as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    values = {row["what"]: row["value"] for row in measurements()["grpo_step.py"]["rows"]}
    style = {"svg.hashsalt": "clinrl", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 10}
    with mpl.rc_context(mpl.rcParamsDefault), mpl.rc_context(style):
        figure = Figure(figsize=(7.2, 2.2), layout="constrained")
        axes = figure.subplots()
        shown = [values[what] for what in STEP]
        bars = axes.barh(list(STEP.values()), shown, height=0.62, color=[NEUTRAL, NEUTRAL, EXACT, "0.8"])
        axes.bar_label(bars, [f"{value:.2g} s" for value in shown], padding=4)
        axes.invert_yaxis()
        axes.set(xlim=(0, 1.12 * max(shown)), xlabel="seconds a step, less is better")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(rb"[ \t]+\n", b"\n", out.getvalue())


def tree(root: str, parents: dict[str, str], depth: int = 0) -> Iterator[tuple[str, int]]:
    """A model and all that start from it, depth first, in the order of params.yaml, with their depth."""
    yield root, depth
    for name, parent in parents.items():
        if parent == root:
            yield from tree(name, parents, depth + 1)


def report_rows(task: str, mode: str, name: str) -> list[dict[str, Any]]:
    """The rows of a version's report, baselines included."""
    found = json.loads((ROOT / paths.report(name) / f"{mode}.json").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def draw(axes: Any, estimate: dict[str, float], place: float, colour: str, is_filled: bool) -> None:
    """One estimate with its interval."""
    axes.plot([100 * estimate["low"], 100 * estimate["high"]], [place, place], color=colour, lw=1.6, zorder=2)
    face = colour if is_filled else "white"
    axes.plot(100 * estimate["value"], place, "o", ms=5, mfc=face, mec=colour, mew=1.3, zorder=3)


WRITTEN = {
    "configuration.md": lambda: configuration().encode(),
    "commands.md": lambda: commands().encode(),
    "images/lineage.svg": lineage,
    "performance.md": lambda: performance().encode(),
    "images/step.svg": step,
}
"""What is written below docs/, and by which function."""


def main() -> None:
    """Write everything."""
    for path, make in WRITTEN.items():
        target = ROOT / "docs" / path
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(make())


if __name__ == "__main__":
    main()
