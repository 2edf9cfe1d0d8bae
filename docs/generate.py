"""Write what the documentation takes from elsewhere: two reference pages, what was measured, and two pictures.

`make docs` runs it before it builds the pages. Equal code and equal reports give equal bytes.
"""

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal, Union, get_args, get_origin

import timeline
from hardware import hardware
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from clinrl.analysis.compared import ALL, Compared
from clinrl.cli.arguments import Command
from clinrl.cli.commands import GROUPS
from clinrl.cli.parser import parser
from clinrl.config.params import Params, load_params
from clinrl.data import dataset
from clinrl.evaluation.record import Record
from clinrl.reports import numbers, render, results
from clinrl.signing.keys import Key
from clinrl.tasks.base import get_task, task_names
from clinrl.tasks.esi.words import wordings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from flows import __main__ as flows  # noqa: E402

SCALARS = {int: "whole number", float: "number", str: "text", Key: "text"}
SCALARS |= {bool: "true or false", type(None): "null", Any: "anything"}
EXACT, DANGEROUS, NEUTRAL = "#0072B2", "#D55E00", "#555555"
"""Of Okabe and Ito's colours, which colour-blind readers tell apart: a colour has one meaning."""


def page(name: str, **records: Any) -> str:
    """The page of `docs/templates/NAME.md.j2`."""
    return render.render(name, ROOT / "docs/templates", **records)


def configuration() -> str:
    """The page about every key of params.yaml, from the schema and the docstrings below its fields."""
    return page("configuration", params=blocks(Params), rewards={n: blocks(get_task(n).Reward) for n in task_names()})


def blocks(whole: type[BaseModel]) -> list[dict[str, Any]]:
    """Each model in a model, with its path: what it is about, and a row for each key."""
    places = {model: path for path, model in sections(whole, "")}
    return [
        {"path": path, "about": sentence(inspect.getdoc(model) or ""), "fields": fields(model, path, places)}
        for model, path in places.items()
    ]


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
    if kind in SCALARS:
        return
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        method = get_args(kind.model_fields["method"].annotation) if "method" in kind.model_fields else ()
        yield (*steps[:-1], f"{steps[-1]} ({method[0]})") if len(method) == 1 else steps, kind
    held = get_args(kind)
    if get_origin(kind) is dict:
        yield from models(held[1], (*steps, "SCALE" if get_args(held[0]) == ("embedded", "full") else "NAME"))
    elif get_origin(kind) is not Literal:
        for part in held:
            yield from models(part, steps)


def fields(model: type[BaseModel], path: str, places: dict[type[BaseModel], str]) -> list[list[str]]:
    """For each key: its name, what it takes and where that is described, its default and its meaning."""
    rows, notes = [], docstrings(model)
    for name, field in model.model_fields.items():
        found = [held for _, held in models(field.annotation)]
        elsewhere = {places[held] for held in found if not places[held].startswith(f"{path}.{name}".lstrip("."))}
        kind = "".join([takes(field.annotation), *(f", as `{place}`" for place in sorted(elsewhere))])
        inner = [inspect.getdoc(held) or "" for held in found]
        meaning = sentence(field.description or notes.get(name) or (inner[0].split("\n\n")[0] if inner else ""))
        rows.append([f"`{name}`", kind, default(field), meaning])
    return rows


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
    """A docstring as one line, none of which is read as HTML."""
    return " ".join(text.split()).replace("<", "&lt;").replace(">", "&gt;")


def commands() -> str:
    """The page about the command line: what `--help` says of each command."""
    return page(
        "commands",
        groups={group: described(parser(), members) for group, members in GROUPS.items()},
        flows=described(flows.parser(), flows.FLOWS),
    )


def described(top: argparse.ArgumentParser, commands: Mapping[str, Command]) -> dict[str, dict[str, Any]]:
    """What the page about the command line says of each command of a parser."""
    (parsers,) = (action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction))
    return {
        name: {
            "help": command.help,
            "about": textwrap.fill(sentence(command.description), 118, break_long_words=False),
            "arguments": arguments(parsers[name]),
            "actions": {
                action: (does, arguments(words))
                for one in parsers[name]._actions
                if isinstance(one, argparse._SubParsersAction)
                for (action, words), (does, _, _) in zip(one.choices.items(), command.actions.values(), strict=True)
            },
            "examples": command.examples,
        }
        for name, command in commands.items()
    }


def arguments(words: argparse.ArgumentParser) -> list[list[str]]:
    """Each argument of a command, or of one of its actions, with its meaning."""
    return [
        [f"`{' '.join(filter(None, [*one.option_strings, word(one)]))}`", sentence(one.help or "")]
        for one in words._actions
        if one.dest not in ("help", "params", "action")
    ]


def word(action: argparse.Action) -> str:
    """The word that stands for what an argument takes; empty for a flag."""
    if action.nargs == 0:
        return ""
    chosen = f"{{{','.join(action.choices)}}}" if action.choices else action.dest
    metavar = action.metavar if isinstance(action.metavar, str) else chosen
    ways = {"?": f"[{metavar}]", "*": f"[{metavar} ...]", "+": f"{metavar} [{metavar} ...]"}
    return ways.get(str(action.nargs), metavar)


def lineage(new_figure: type[Any], task: str = "esi") -> Any:
    """The recipes of a task's series as a tree, with exact answers and under-triaged critical patients by mode.

    Means over seeds with intervals over seeds and cases, then the classifiers.
    """
    params, report = load_params(ROOT / "params.yaml"), report_in(f"comparisons/{task}-series")
    modes = list(params.modes)
    held = {section["mode"]: {row["name"]: row for row in section["rows"]} for section in report["sections"]
            if section["part"] == "all"}  # fmt: skip
    arms = {row["versions"][0]: name for name, row in held[modes[0]].items() if row["kind"] == "arm"}
    parents = {version: params.versions[version].parent for version in arms}
    drawn = [(arms.get(name, "base"), depth) for name, depth in tree(f"{task}-base", parents)]
    rivals = [name for name, row in held[modes[0]].items() if row["kind"] == "rival" or name == "bag of words"]
    rows = [*drawn, *((name, 0) for name in rivals)]
    height = 0.4 * (len(rows) + 1) + 1.7
    figure = new_figure(figsize=(8.6, height))
    names, exact, missed = figure.subplots(1, 3, sharey=True, width_ratios=[1.7, 2, 1.6])
    figure.subplots_adjust(left=0.01, right=0.985, top=1 - 1.15 / height, bottom=0.55 / height, wspace=0.1)
    places = {name: place for place, (name, _) in enumerate(rows)}
    for name, depth in rows:
        place, is_rival = places[name], name in rivals
        names.text(
            0.03 + 0.09 * depth, place, name, va="center", style="italic" if is_rival else "normal",
            color=NEUTRAL if is_rival else "black", weight="bold" if re.fullmatch(r"v\d+", name) else "normal",
        )  # fmt: skip
        if depth:
            parent = parents[held[modes[0]][name]["versions"][0]]
            back, top = 0.05 + 0.09 * (depth - 1), places[arms.get(parent, "base")]
            names.plot([back, back, back + 0.06], [top + 0.32, place, place], color=NEUTRAL, lw=1)
        for mode, shift in [(modes[0], 0.0)] if is_rival else zip(modes, (-0.14, 0.14), strict=True):
            metrics = held[mode][name]["metrics"]
            draw(exact, metrics["exact"], place + shift, EXACT, mode == modes[0])
            draw(missed, metrics["critical_under"], place + shift, DANGEROUS, mode == modes[0])
    names.set(xlim=(0, 1.02), ylim=(len(rows) - 0.4, -0.6))
    exact.set(xlim=(-1, 101), xlabel="% of exam cases, more is better")
    missed.set(xlim=(-1, 62), xlabel="% of exam cases, less is better")
    exact.set_title("Exact answers", color=EXACT, size=11, weight="bold", loc="left")
    missed.set_title("Critical under-triage", color=DANGEROUS, size=11, weight="bold", loc="left")
    for axes in (names, exact, missed):
        axes.axhspan(len(drawn) - 0.5, len(rows) - 0.5, color="0.95", lw=0, zorder=-1)
        axes.tick_params(left=False, labelleft=False, bottom=axes is not names, labelbottom=axes is not names)
        axes.spines[:].set_visible(False)
        axes.set_axisbelow(True)
        if axes is not names:
            axes.grid(axis="x", color="0.88", lw=0.7)
    seeds = max(len(row["versions"]) for row in held[modes[0]].values())
    figure.text(0.012, 1 - 0.27 / height, f"{task}: each row starts from its parent's weights", size=12, weight="bold")
    legend = (
        f"Filled: mode {modes[0]}. Hollow: mode {modes[1]}. Means of {seeds} seeds; the base and the classifiers "
        f"(grey) are one each.\nBars: 95% intervals over seeds and {report['sections'][0]['n']} synthetic cases."
    )
    figure.text(0.012, 1 - 0.7 / height, legend, size=9, color=NEUTRAL)
    return figure


def report_in(name: str) -> dict[str, Any]:
    """The committed report `data/reports/NAME.json`."""
    found: dict[str, Any] = json.loads((ROOT / f"data/reports/{name}.json").read_text(encoding="utf-8"))
    return found


MARKED = re.compile(r"(<!-- ([\w-]+), (\w+): begin -->\n).*?(<!-- \2, \3: end -->)", re.DOTALL)
"""A table on a page of a task, between markers that name the comparison and the table."""


def task_page(name: str) -> bytes:
    """The page of a task with the tables that comparisons give, each between its markers."""
    page = (ROOT / f"docs/tasks/{name}.md").read_text(encoding="utf-8")
    named = {found[1] for found in MARKED.findall(page)}
    reports = {one: Compared.model_validate(report_in(f"comparisons/{one}")) for one in named}
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[3]](reports[found[2]])}\n{found[4]}", page).encode()


def questions(report: Compared) -> str:
    """Test by test: what differs, the two rows, and what the main measure shows in each mode."""
    modes = [section.mode for section in report.sections if section.part == ALL]
    lines = [
        [says, f"{first} - {second}", *cells]
        for says, first, second, *cells, _ in results.answered(get_task(report.task), report)
    ]
    return render.table(["what differs", "rows", *(f"{report.columns[0]}, {mode}" for mode in modes)], lines)


def parts(report: Compared) -> str:
    """Exact answers of every row in each part of the exam, and of the simple policy that is best in one."""
    held = [section for section in report.sections if section.part != ALL]
    best = {
        max(simple, key=lambda row: row.metrics["exact"].value).name
        for section in held
        if (simple := [row for row in section.rows if row.kind == "baseline" and row.name.startswith("always")])
    }
    every = [row for row in report.sections[0].rows if ", " not in row.name]
    rows = [row.name for row in every if row.kind != "baseline" or row.name in best]
    task = get_task(report.task)
    cells = [
        {row.name: numbers.figure(row.metrics["exact"], task, "exact") for row in section.rows} for section in held
    ]
    return render.table(
        ["row", *(f"{section.part} (n = {section.n}), {section.mode}" for section in held)],
        [[name, *(asked.get(name, "") for asked in cells)] for name in rows],
    )


def partition(report: Compared) -> str:
    """What a reward is worth, mode by mode: on all cases, then part by part."""
    head = ["mode", "cases", "null", "elicitation", "reward", "total"]
    return render.table(head, [list(line) for line in results.partition(get_task(report.task), report)])


def rows(report: Compared) -> str:
    """Every row but the simple policies: seeds, the main measure mode by mode, and the reasoning."""
    task, modes = get_task(report.task), [section.mode for section in report.sections if section.part == ALL]
    head = ["row", "seeds", *(f"{report.columns[0]}, {mode}" for mode in modes), *filter(None, [report.quality])]
    lines = [
        [row.name, len(row.versions) if row.kind == "arm" else "", *results.across(task, report, row.name)]
        for row in report.sections[0].rows
        if row.kind != "baseline"
    ]
    return render.table(head, lines)


def words(report: Compared) -> str:
    """What v49 reaches in mode think under each vocabulary, and the range of its seeds."""
    views = {view.view: view.metrics for view in report.sections[0].views if view.name == "v49"}
    shown = ("exact", report.columns[0])
    lines = [[says, *(ranging(views[view][metric].seeds) for metric in shown)] for view, says in WORDS.items()]
    return render.table(["words", *(f"{metric}, v49, think" for metric in shown)], lines)


def complaints(report: Compared) -> str:
    """What the seeds of v49 reach on complaints that are in training data and on those that are in none, by mode."""
    shown = ("exact", report.columns[0])
    modes = [section.mode for section in report.sections if section.part == ALL]
    found = {mode: [report_in(f"{version}/{mode}") for version in seeds(report, "v49")] for mode in modes}
    lines = []
    for family in ("complaint in training", "complaint not in training"):
        held = {mode: [one["slices"]["family"][family] for one in some] for mode, some in found.items()}
        cells = [ranging([one[metric]["value"] for one in held[mode]]) for mode in modes for metric in shown]
        lines.append([family.replace(" in training", " in training data"), held[modes[0]][0]["exact"]["n"], *cells])
    return render.table(["complaints", "n", *(f"{metric}, {mode}" for mode in modes for metric in shown)], lines)


def handbook(report: Compared) -> str:
    """The registered measure of its two rows with and without the cases whose label stands in no handbook."""
    plan = report.primary.registration
    return by_kind(report, labelled, (plan.second, plan.first), {"all but these": {""}})


def onset(report: Compared) -> str:
    """The main measure in critical patients whose note names a sudden onset, and in those whose note does not."""
    return by_kind(report, begun, ("v43", "v49", "boosted trees"), {})


def by_kind(report: Compared, of_case: Any, shown: Sequence[str], some: Mapping[str, set[str]]) -> str:
    """The main measure of some rows in all cases, in some kinds together, and in each kind; "" is in no kind."""
    task, params = get_task(report.task), load_params(ROOT / "params.yaml")
    cases = list(dataset.draw(params.datasets[report.exam]))
    harm, kinds = task.metrics[report.columns[0]], [of_case(case) for case in cases]
    modes = [section.mode for section in report.sections if section.part == ALL]
    groups = {"all": set(kinds), **some} | {kind: {kind} for kind in sorted({*kinds} - {""})}
    lines = []
    for says, group in groups.items():
        of = [place for place, kind in enumerate(kinds) if kind in group]
        cells = [
            ranging([
                mean(harm.of(task.label(cases[place]), answers[place]) for place in of)
                for answers in (answered(report.task, version, mode) for version in seeds(report, row))
            ])
            for mode in modes for row in shown
        ]  # fmt: skip
        lines.append([says, len(of), *cells])
    return render.table(["cases", "n", *(f"{row}, {mode}" for mode in modes for row in shown)], lines)


def begun(case: Any) -> str:
    """Whether the note on a critical patient of triage has a phrase for a sudden onset; empty for other patients."""
    if get_task("esi").label(case) > 2:
        return ""
    own = set(wordings("styles/sudden_onset", "base_only")) - {"since this morning"}  # a slow onset may have it too
    return f"level 1 or 2, {'one' if any(phrase in case.facts.narrative for phrase in own) else 'none'} of the phrases"


def labelled(case: Any) -> str:
    """What labels a case of triage by a rule of the published series alone; empty where a rule of the handbook does."""
    findings = case.key.presentation.findings
    if case.key.rule == "done_intervention" and "intubated" not in findings:
        return "chest tube or central line"
    return "open fracture" if case.key.rule == "open_injury" and "penetrating" not in findings else ""


def seeds(report: Compared, name: str) -> tuple[str, ...]:
    """The versions of a row, or the rival that it is."""
    rivals = load_params(ROOT / "params.yaml").comparisons[report.name].rivals
    return next(row.versions or (rivals[name],) for row in report.sections[0].rows if row.name == name)


def answered(task: str, version: str, mode: str) -> tuple[Any, ...]:
    """The committed answers to an exam, in its order."""
    record = (ROOT / f"data/reports/exams/{task}/{version}.json").read_text(encoding="utf-8")
    return Record.model_validate_json(record).given[mode].answers


def ranging(of_seeds: Sequence[float]) -> str:
    """A mean over seeds, and the least and the greatest of them."""
    return f"{100 * mean(of_seeds):.1f}%, {100 * min(of_seeds):.1f} to {100 * max(of_seeds):.1f}"


TABLES = {
    "questions": questions, "parts": parts, "partition": partition, "rows": rows, "words": words,
    "complaints": complaints, "handbook": handbook, "onset": onset,
}  # fmt: skip
"""What a marker may ask for."""
WORDS = {
    "given": "known to the base alone: the exam",
    "words_of_training": "of the training data",
    "words_never_read": "never read by any model",
}


STEP = {
    "GRPO step, bare TRL": "bare TRL",
    "GRPO step, clinrl train": "clinrl, paths of TRL",
    "GRPO step, clinrl train, shared paths": "clinrl, shared paths",
    "GRPO step, arithmetic limit": "matrix products alone",
}
"""The bars of the figure: row of the report to label."""


def performance() -> str:
    """The page on performance, with every row that was measured."""
    rows = []
    for record in report_in("bench").values():
        machine = f"{record['machine']['processors']} x {record['machine']['processor'].replace('(R)', '')}"
        rows += [row | {"machine": machine} for row in record["rows"]]
    return page("performance", rows=rows)


def step(new_figure: type[Any]) -> Any:
    """Seconds of a GRPO step, bar by bar."""
    values = {row["what"]: row["value"] for row in report_in("bench")["grpo_step.py"]["rows"]}
    figure = new_figure(figsize=(7.2, 2.2), layout="constrained")
    axes = figure.subplots()
    shown = [values[what] for what in STEP]
    bars = axes.barh(list(STEP.values()), shown, height=0.62, color=[NEUTRAL, NEUTRAL, EXACT, "0.8"])
    axes.bar_label(bars, [f"{value:.2g} s" for value in shown], padding=4)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.12 * max(shown)), xlabel="seconds a step, less is better")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    return figure


def tree(root: str, parents: dict[str, str], depth: int = 0) -> Iterator[tuple[str, int]]:
    """A model and all that start from it, depth first, in the order of params.yaml, with their depth."""
    yield root, depth
    for name, parent in parents.items():
        if parent == root:
            yield from tree(name, parents, depth + 1)


def draw(axes: Any, estimate: dict[str, Any], place: float, colour: str, is_filled: bool) -> None:
    """One estimate with its interval."""
    ends = [estimate["value"] if estimate[end] is None else estimate[end] for end in ("low", "high")]
    axes.plot([100 * end for end in ends], [place, place], color=colour, lw=1.6, zorder=2)
    face = colour if is_filled else "white"
    axes.plot(100 * estimate["value"], place, "o", ms=5, mfc=face, mec=colour, mew=1.3, zorder=3)


WRITTEN = {
    "configuration.md": lambda: configuration().encode(),
    "commands.md": lambda: commands().encode(),
    "images/lineage.svg": lambda: timeline.svg(lineage),
    "tasks/audit.md": lambda: task_page("audit"),
    "tasks/esi.md": lambda: task_page("esi"),
    "tasks/imaging.md": lambda: task_page("imaging"),
    "hardware.md": lambda: page("hardware", **hardware()).encode(),
    "performance.md": lambda: performance().encode(),
    "images/step.svg": lambda: timeline.svg(step),
    "year.md": lambda: timeline.page(report_in("year"), "images/year.svg").encode(),
    "images/year.svg": lambda: timeline.picture(report_in("year")),
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
