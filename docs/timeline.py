"""The simulated year as a page and as a picture, from data/reports/year.json."""

import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from clinrl.reports.render import render
from clinrl.site.charts import COLOURS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/year"))
import world

TEMPLATES = Path(__file__).with_name("templates")
BLUE, RED, GREEN, PINK, YELLOW, SKY = COLOURS
INK, PALE = "#555555", "0.96"
INCIDENTS = {
    "broken sensor": YELLOW, "new complaints": YELLOW, "other wordings": YELLOW, "shifted vital signs": YELLOW,
    "poisoned labels": PINK, "full disk": INK, "server away": INK,
}  # fmt: skip
"""Kinds of events in the order of their lines: what patients and notes do, what people do, what machines do."""
LANES = {"served": 8, "harm": 22, "drafts": 17, "budget": 11, "alarms": 9, "events": 24}
"""Heights of the lanes, from above, in 0.08 inches: whole, since Python 3.12 and later sum fractions otherwise."""


def page(year: Mapping[str, Any], picture: str) -> str:
    """The page in Markdown. `picture` is where its picture lies."""
    return render("year", TEMPLATES, picture=picture, world=world, **year)


def runs(year: Mapping[str, Any], of: Any) -> Iterator[tuple[int, int, Any]]:
    """First and last week of each stretch in which something stays the same, and what."""
    for value, weeks in groupby(year["weeks"], of):
        held = [week["week"] for week in weeks]
        yield held[0], held[-1], value


def svg(draw: Callable[[type[Any]], Any], size: float = 10) -> bytes:
    """The figure that a function makes of matplotlib's `Figure`, as SVG. `size` is that of its text, in points.

    Equal figures give equal bytes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {"svg.hashsalt": "clinrl", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": size}
    out = io.BytesIO()
    with mpl.rc_context(mpl.rcParamsDefault), mpl.rc_context(style):
        draw(Figure).savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(rb"[ \t]+\n", b"\n", out.getvalue())


def picture(year: Mapping[str, Any]) -> bytes:
    """The weeks from left to right as SVG, a lane each for what the page tells."""

    def draw(new_figure: type[Any]) -> Any:
        figure = new_figure(figsize=(10.4, sum(LANES.values()) * 0.08 + 0.9))
        axes = dict(
            zip(LANES, figure.subplots(len(LANES), 1, sharex=True, height_ratios=[*LANES.values()]), strict=True)
        )
        figure.subplots_adjust(left=0.145, right=0.985, top=0.945, bottom=0.055, hspace=0.1)
        last = len(year["weeks"])
        for name, lane in axes.items():
            lane.set(xlim=(0.4, last + 0.6))
            lane.set_axisbelow(True)
            lane.spines[:].set_visible(False)
            lane.tick_params(length=0, labelbottom=name == "events")
            for week in range(1, last + 1, 2):
                lane.axvspan(week - 0.5, week + 0.5, color=PALE, lw=0, zorder=-2)
        _served(axes["served"], year)
        _harm(axes["harm"], year)
        _drafts(axes["drafts"], year)
        _budget(axes["budget"], year)
        _alarms(axes["alarms"], year)
        _events(axes["events"], year)
        figure.text(0.012, 0.965, f"{last} weeks of operation, simulated", size=12, weight="bold")
        return figure

    return svg(draw, 8.5)


def _served(lane: Any, year: Mapping[str, Any]) -> None:
    colours: dict[str, str] = {}
    for first, last, name in runs(year, lambda week: week["champion"]):
        colour = colours.setdefault(name, (GREEN, BLUE, RED, SKY)[len(colours) % 4])
        lane.barh(0, last - first + 0.94, left=first - 0.47, height=0.7, color=colour, alpha=0.85)
        lane.text((first + last) / 2, 0, name, ha="center", va="center", color="white", weight="bold")
    lane.set(ylim=(-0.5, 0.5), yticks=[0], yticklabels=["champion"])


def _harm(lane: Any, year: Mapping[str, Any]) -> None:
    weeks = [week for week in year["weeks"] if week["answered"]]
    share = [100 * week["under"] / week["answered"] for week in weeks]
    lane.plot([week["week"] for week in weeks], share, "-o", color=RED, ms=3.2, lw=1.2)
    limit = 100 * year["limit"]
    lane.axhline(limit, color=INK, lw=1, ls=(0, (4, 2)))
    lane.text(len(year["weeks"]) + 0.5, limit + 2, f"limit {limit:g}%", ha="right", color=INK, size=7.5)
    top = max([*share, limit]) * 1.15
    lane.set(ylim=(-0.03 * top, top), yticks=[0, limit, *([50] if top > 50 else [])])
    lane.set_yticklabels([f"{tick:g}%" for tick in lane.get_yticks()])
    lane.set_ylabel("critical_under,\nof the answered", rotation=0, ha="right", va="center", labelpad=4)


def _drafts(lane: Any, year: Mapping[str, Any]) -> None:
    rows = {"rolled back": 0, "kept out": 1, "promoted": 2}
    looks = {"rolled back": ("<", RED), "kept out": ("X", INK), "promoted": ("^", GREEN)}
    for week in year["weeks"]:
        for line in week["audit"]:
            if line["kind"] in ("promotion", "rollback"):
                row = "promoted" if line["kind"] == "promotion" else "rolled back"
                _mark(lane, week["week"], rows[row], *looks[row], line.get("from", line["version"]))
    for name, draft in year["drafts"].items():
        if draft["outcome"] != "promoted":
            _mark(lane, draft["week"], rows["kept out"], *looks["kept out"], name)
    lane.set(ylim=(-0.6, 2.6), yticks=[*rows.values()], yticklabels=[*rows])


def _mark(lane: Any, week: int, row: int, marker: str, colour: str, name: str) -> None:
    lane.plot(week, row, marker, color=colour, ms=6.5)
    lane.text(week + 0.55, row, name, va="center", size=8, color=colour)


def _budget(lane: Any, year: Mapping[str, Any]) -> None:
    left, held = year["alpha"], []
    for week in year["weeks"]:
        for line in week["audit"]:
            left = line["left"] if line["kind"] == "decision" and line["left"] is not None else left
        held.append(100 * left)
    places = [week["week"] for week in year["weeks"]]
    lane.step(places, held, where="mid", color=BLUE, lw=1.5)
    lane.fill_between(places, held, step="mid", color=BLUE, alpha=0.12, lw=0)
    lane.set(ylim=(0, 115 * year["alpha"]), yticks=[0, 100 * year["alpha"]], yticklabels=["0", f"{year['alpha']:g}"])
    lane.set_ylabel("error\nbudget", rotation=0, ha="right", va="center", labelpad=4)


def _alarms(lane: Any, year: Mapping[str, Any]) -> None:
    for row, (kind, colour) in enumerate({"safety": RED, "drift": YELLOW}.items()):
        at = [week["week"] for week in year["weeks"] if kind in week["watch"]["alarms"]]
        lane.plot(at, [row] * len(at), "s", color=colour, ms=6)
    lane.set(ylim=(-0.6, 1.6), yticks=[0, 1], yticklabels=["alarm: safety", "alarm: drift"])


def _events(lane: Any, year: Mapping[str, Any]) -> None:
    kinds = [*INCIDENTS]
    for row, kind in enumerate(kinds):
        for first, last, is_on in runs(year, lambda week, kind=kind: kind in [one["kind"] for one in week["events"]]):
            if is_on:
                lane.barh(row, last - first + 0.9, left=first - 0.45, height=0.62, color=INCIDENTS[kind])
    ticks = [week["week"] for week in year["weeks"] if week["week"] % 4 == 1]
    days = {week["week"]: week["monday"][5:] for week in year["weeks"]}
    lane.set(ylim=(len(kinds) - 0.4, -0.6), yticks=range(len(kinds)), yticklabels=kinds, xticks=ticks)
    lane.set_xticklabels([f"{tick}\n{days[tick]}" for tick in ticks])
