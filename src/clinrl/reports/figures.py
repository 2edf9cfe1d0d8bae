"""Plots for reports: confusion matrices, error groups, rows of comparisons, and training curves.

Plots use Agg and matplotlib's own font and defaults, regardless of the machine's settings, and hold no software stamp:
equal numbers give equal bytes.
"""

import csv
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl.analysis import alerts
from clinrl.analysis.exam import Confusion
from clinrl.errors import ArtefactError
from clinrl.types import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from clinrl.analysis import compared
    from clinrl.reports.results import Curves

DPI = 110
PANELS: tuple[tuple[str, str, str], ...] = (
    ("Reward", "mean total, points", r"reward(?:/(.+))?"),
    ("Loss", "cross-entropy, nats a token", r"(loss)"),
    ("Served", "share of rows", r"served/(.+)"),
    ("Reward terms", "mean contribution, points", r"terms/(.+)"),
    ("Answers", "share of completions", r"answer/(.+)"),
    ("Unreadable", "share of completions", r"(?:parse_fail|not_submitted)/(.+)"),
    ("Out of tokens", "share of completions", r"clipped/(.+)"),
    ("Entropy", "nats a token", r"(entropy)"),
    ("Held-out cases", "share of exact answers", r"held_out/(exact)"),
    ("Over-called", "answered less right, share", r"held_out/excess/(.+)"),
    ("Distance from the parent", "nats a token, held-out cases", r"held_out/(kl)"),
)
"""Title, axis label and pattern of the log entries. The pattern's group is a line's label: a term, an answer or a mode;
an entry without a group gets the label TOTAL."""
TOTAL = "all"
SHARES = ("Served", "Answers", "Unreadable", "Out of tokens", "Held-out cases")
"""Panels whose axis is a share, from 0 to 1."""

DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))
"""Styles of the lines for baselines that do not read the case."""

History = list[dict[str, float]]


def read_history(path: Path) -> History:
    """The training log, a line a step: `step` and the numbers of that step. Raises ArtefactError naming a bad line."""
    return [{key: value for key, value in line.items() if isinstance(value, int | float)} for line in alerts.read(path)]


def read_table(path: Path) -> History:
    """A training log from a CSV table: one row a step, one column a quantity, empty where it was not logged.

    Raises ArtefactError for a table that is cut short or malformed.
    """
    try:
        text = path.read_text(encoding="utf-8")
        names, *rows = csv.reader(text.splitlines() if text.endswith("\n") else ())  # a line without its end was cut
        return [{key: float(value) for key, value in zip(names, row, strict=True) if value} for row in rows]
    except ValueError:
        raise ArtefactError(f"{path} is cut short or no training log; restore it with `git checkout {path}`") from None


def history_columns(history: History) -> list[str]:
    """Columns for all quantities of a log: `step` first, then plotted quantities, then the others by name."""
    names = {key for entry in history for key in entry} - {"step"}
    plotted = [key for keys in panels(history, ()).values() for key in keys.values()]
    # `loss` and `reward` for every method, so that one plot of dvc.yaml serves SFT and GRPO.
    first = ["loss", "reward", *(key for key in plotted if key not in ("loss", "reward"))]
    return ["step", *first, *sorted(names - set(first))]


def confusion(counts: Confusion, title: str, path: Path, *, counted: str = "cases") -> None:
    """Write a confusion matrix as a PNG: counts as text, shares of each gold row as shade, unreadable answers apart.

    `counted` names the unit of the counts, for the axis label.
    """
    with _drawn(path, 5.2, 4.2) as figure:
        axes = figure.add_subplot()
        levels = len(counts.columns) - 1
        # A gap before the last column: an unreadable answer is not one more level.
        left = [*range(levels), levels + 0.4]
        for r, row in enumerate(counts.counts):
            total = sum(row)
            for c, count in enumerate(row):
                depth = count / total if total else 0.0
                axes.add_patch(_cell(left[c], r, depth, apart=c == levels))
                ink = "white" if depth > 0.55 else "0.15" if count else "0.7"
                axes.text(left[c] + 0.5, r + 0.5, f"{count}", ha="center", va="center", color=ink)
        axes.set(xlim=(0, levels + 1.4), ylim=(len(counts.rows), 0), xlabel="predicted", ylabel=f"gold ({counted})")
        below = [_lines(name) for name in counts.columns]
        longest = max(len(line) for label in below for line in label.splitlines())
        axes.set_xticks([x + 0.5 for x in left], below, size="medium" if longest < 12 else "x-small")
        labels = [f"{_lines(name)} ({sum(row)})" for name, row in zip(counts.rows, counts.counts, strict=True)]
        axes.set_yticks([r + 0.5 for r in range(len(labels))], labels)
        axes.set_title(title, pad=10)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_aspect("equal")


def groups(rows: Sequence[tuple[str, float, Estimate, int]], title: str, path: Path) -> None:
    """Write a bar chart of error groups as a PNG: each bar is the clinical cost of a group for every 100 answers.

    A row holds the group's name, that cost, the mean cost of one of its answers, and its count of cases. The interval
    of the mean is scaled to the bar. The first row is on top.
    """
    with _drawn(path, 7.5, 0.9 + 0.32 * max(1, len(rows))) as figure:
        axes = figure.add_subplot()
        for place, (_, total, mean, _n) in enumerate(rows):
            axes.barh(place, total, color="tab:blue", height=0.65)
            if mean.value:
                low, high = (total * edge / mean.value for edge in (mean.low, mean.high))
                axes.plot([low, high], [place, place], color="0.15", linewidth=1.1)
        axes.set_yticks(range(len(rows)), [f"{name} (n = {n})" for name, _, _, n in rows])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("clinical cost for every 100 answers, with 95% interval")
        axes.grid(visible=False, axis="y")
        axes.set_title(title, pad=10)


def arms(
    panels: Sequence[tuple[str, Sequence[tuple[str, str, "compared.Figure"]]]],
    lines: Mapping[str, float], title: str, path: Path,
    curves: "Curves | tuple[()]" = (),
) -> None:  # fmt: skip
    """Write rows of a comparison as a PNG: a panel for each measure, a dot with its 95% interval for each row.

    A row holds a name, a kind that gives its colour, and its number; the first row is on top. Small dots are single
    seeds. `lines` are drawn in the first panel: the numbers of baselines. `curves` are panels below: a name, the labels
    of both axes, and the name and two series of shares of each line, whose first point is drawn as a marker apart.
    """
    names = list(dict.fromkeys(name for _, rows in panels for name, _, _ in rows))
    whole: Any
    width, height = 5.6 + 3.2 * (len(panels) - 1) + 1.4, 1.3 + 0.36 * len(names)
    with _drawn(path, max(width, 9.0 if curves else 0.0), height + (4.8 if curves else 0.0)) as whole:
        figure = whole
        if curves:
            figure, lower = whole.subfigures(2, 1, height_ratios=(height, 4.8))
            grid = lower.subplots(1, len(curves), sharey=True, squeeze=False)[0]
            for axes, (name, labels, series) in zip(grid, curves, strict=True):
                _curves(axes, name, labels, series)
            grid[0].set_ylim(bottom=0)  # only now: the panels share this axis
            lower.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True).flatten()
        for axes, (what, rows) in zip(grid, panels, strict=True):
            for name, kind, spread in rows:
                place, color = names.index(name), "tab:blue" if kind == "arm" else "0.35"
                if spread.low is not None:
                    axes.plot([spread.low, spread.high], [place, place], color=color, linewidth=1.6)
                axes.plot(spread.value, place, "o", color=color, markersize=6)
                if len(spread.seeds) > 1:
                    below = [place + 0.24] * len(spread.seeds)
                    axes.plot(spread.seeds, below, "o", color="0.45", markersize=2.8, markeredgewidth=0)
            axes.set_title(what)
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
        grid[0].set_yticks(range(len(names)), names)
        grid[0].set_ylim(len(names) - 0.4, -0.6)
        for (name, value), style in zip(lines.items(), DASHES, strict=False):
            grid[0].axvline(value, color="tab:red", linewidth=1.0, linestyle=style, label=f"{name}: {value:.3f}")
        if lines:
            figure.legend(loc="outside lower center", ncols=len(lines))
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def _curves(axes: "Axes", name: str, labels: Sequence[str], series: Sequence[tuple[str, list[list[float]]]]) -> None:
    """Draw one panel of curves, each with the exam's own answers as a diamond."""
    for place, (row, points) in enumerate(series):
        (own, *xs), (height, *ys) = ([100 * share for share in shares] for shares in points)
        color = f"C{place % 10}"
        axes.plot(xs, ys, color=color, marker=".", markersize=4)
        axes.plot(own, height, "D", color=color, markersize=7, markeredgecolor="white", zorder=3, label=row)
    axes.set_title(f"{name}; diamonds: the exam's own answers")
    axes.set_xlabel(f"{labels[0]}, % of cases, by threshold")
    axes.set_ylabel(f"{labels[1]}, % of cases")
    axes.set_xlim(left=0)


def curves(history: History, title: str, path: Path, labels: Sequence[Any] = ()) -> None:
    """Write the training curves as a PNG, a panel for each quantity in the log, over optimiser steps.

    `labels` are the task's: lines about answers keep their order. Reward terms and answers that stay zero are left out.
    If cases were served in phases, every other phase is shaded. Raises ArtefactError if the log has nothing to show.
    """
    shown = panels(history, [str(label) for label in labels])
    if not shown:
        raise ArtefactError(f"{title}: its log holds none of the quantities that a curve shows")
    rows = (len(shown) + 1) // 2
    with _drawn(path, 10.0, 0.5 + 2.3 * rows) as figure:
        grid = figure.subplots(rows, 2, squeeze=False).flatten()
        for place, (axes, (name, keys)) in enumerate(zip(grid, shown.items(), strict=False)):
            _panel(axes, name, keys, history)
            for number, (start, end) in enumerate(phases(history)):
                axes.axvspan(start, end, color="0.95" if number % 2 else "white", linewidth=0, zorder=0)
                if number:
                    axes.axvline(start, color="0.75", linewidth=0.8, zorder=0.5)
            if place >= len(shown) - 2:
                axes.set_xlabel("optimiser step")
        for axes in grid[len(shown) :]:
            axes.set_visible(False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def phases(history: History) -> list[tuple[float, float]]:
    """Start and end of each phase of a log, in optimiser steps; empty for a log without phases.

    Steps are drawn at their numbers, so phases meet half way between two steps, and the first one begins half a step
    before its first step.
    """
    known = [(entry["step"], entry["phase"]) for entry in history if "phase" in entry]
    if not known:
        return []
    starts = [step - 0.5 for (_, before), (step, now) in pairwise([(0.0, 0.0), *known]) if now != before]
    return list(pairwise([*starts, known[-1][0] + 0.5]))


def _panel(axes: "Axes", name: str, keys: Mapping[str, str], history: History) -> None:
    axes.set_title(name)
    axes.set_ylabel(next(label for panel, label, _ in PANELS if panel == name))
    for line, color in zip(keys, _colors(name, list(keys)), strict=True):
        points = [(entry["step"], entry[keys[line]]) for entry in history if keys[line] in entry]
        axes.plot(*zip(*points, strict=True), label=line, color=color, marker="o" if len(points) == 1 else "")
    if name in SHARES:
        axes.set_ylim(-0.02, 1.02)
    if len(keys) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _first(history: History, key: str) -> int:
    """Index of the first entry in which a quantity is not zero; the length of the log if there is none."""
    return next((place for place, entry in enumerate(history) if entry.get(key)), len(history))


def panels(history: History, labels: Sequence[str]) -> dict[str, dict[str, str]]:
    """Panel title to its lines (label to log entry). Reward terms and answers that are zero throughout are left out."""
    alive = sorted({key for entry in history for key, value in entry.items() if value})
    logged = {key for entry in history for key in entry}
    found = {}
    for title, _, pattern in PANELS:
        # A single quantity is shown even at zero: a flat line says that nothing was clipped.
        shown = alive if title in ("Reward terms", "Answers") else sorted(logged)
        keys = {match[1] or TOTAL: key for key in shown if (match := re.fullmatch(pattern, key))}
        keys = {label: keys[label] for label in labels if label in keys} | keys
        if title == "Served":
            keys = dict(sorted(keys.items(), key=lambda item: _first(history, item[1])))
        # Where modes take turns, the mean of a step is that of one mode, and a line through all of them jumps.
        if len(keys) > 1 and not any(entry.keys() >= set(keys.values()) for entry in history):
            keys.pop(TOTAL, None)
        if keys:
            found[title] = keys
    # A GRPO loss is an artefact of the estimator and says nothing about progress.
    if "Reward" in found:
        found.pop("Loss", None)
    return found


def _colors(name: str, labels: list[str]) -> list[Any]:
    """Colours of a panel's lines: an ordered scale for answers, a fixed colour for each mode, black for TOTAL."""
    import matplotlib

    if name in ("Answers", "Over-called"):
        return [matplotlib.colormaps["plasma"](0.9 * i / max(1, len(labels) - 1)) for i in range(len(labels))]
    parts = [label for label in labels if label != TOTAL]
    return ["0.15" if label == TOTAL else matplotlib.colormaps["tab10"](parts.index(label) % 10) for label in labels]


def _cell(x: float, y: float, depth: float, *, apart: bool) -> Any:
    import matplotlib
    from matplotlib.patches import Rectangle

    shade = matplotlib.colormaps["Greys" if apart else "Blues"](0.04 + 0.86 * depth)
    return Rectangle((x, y), 1, 1, facecolor=shade, edgecolor="white", linewidth=1.5)


def _lines(label: str) -> str:
    """A label with its words on several lines, so that it does not run into its neighbour."""
    return textwrap.fill(label.replace("_", " "), 12, break_long_words=False)


@contextmanager
def _drawn(path: Path, width: float, height: float) -> "Iterator[Figure]":
    """A new figure of this size in inches, without a window or global state, which is saved when the block ends."""
    from matplotlib import rc_context, rc_params_from_file, rcParamsDefault
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style = rc_params_from_file(Path(__file__).with_suffix(".mplstyle"), use_default_template=False)
    with rc_context({**rcParamsDefault, **style, "backend": "agg"}):
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.07, w_pad=0.07))
        FigureCanvasAgg(figure)
        yield figure
        _save(figure, path)


def _save(figure: "Figure", path: Path) -> None:
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
