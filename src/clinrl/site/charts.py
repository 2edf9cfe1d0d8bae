"""The layout of charts: positions of lines, dots and ticks. `templates/charts.html.j2` draws them as SVG.

An SVG takes its colours from the page's style sheet, also in dark mode; its text can be read aloud, its marks can be
links, and a hundred pages are drawn in a second. Colours are those of Okabe and Ito, which colour-blind readers can
tell apart.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product

from clinrl.analysis.alerts import Alarm
from clinrl.reports import figures

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
"""The margins of a chart, which hold its ticks."""
FRAME = LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM
"""Left, top, right and bottom edge of the area for the lines."""
ROW = 26
"""Height of a row of a picture of intervals."""
MOST_POINTS = 200
"""Most points of a line; further ones would lie on the same pixels."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The palette. It lacks black, which is hard to see on a dark page, and yellow, which is hard to see on a white one."""
DASHES = ("none", "6 3", "2 2", "8 3 2 3")
"""Values of SVG's stroke-dasharray: solid, dashed, dotted, dash-dotted."""

Points = Sequence[tuple[float, float]]
Styles = Mapping[str, tuple[int, int]]
"""Name to the indices of its colour and its dash. `styles` makes it."""


@dataclass(frozen=True)
class Tick:
    """A number on an axis, and its position."""

    at: float
    text: str


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    colour: int | str
    """An index of the palette, or `ink` for a name without a style: a line that sums others up."""
    dash: int
    path: str
    """Points of an SVG polyline."""
    mark: tuple[float, float] | None
    """A point that is drawn apart from the line."""
    first: float
    last: float
    low: float
    high: float


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis."""

    title: str
    across: str
    """Label of the horizontal axis."""
    upward: str
    """Label of the vertical axis."""
    lines: tuple[Line, ...]
    x: tuple[Tick, ...]
    y: tuple[Tick, ...]
    spans: tuple[tuple[float, float], ...] = ()
    """Left edge and width of each shaded part: every other phase of a training."""
    alarms: tuple[tuple[float, Alarm], ...] = ()
    frame: tuple[int, int, int, int] = FRAME


@dataclass(frozen=True)
class Dot:
    """A number with its interval and the numbers of single seeds, or the positions of all these on an axis."""

    at: float
    low: float | None
    high: float | None
    seeds: tuple[float, ...]
    colour: int
    says: str

    def placed(self, place: Callable[[float], float]) -> "Dot":
        """The dot with positions on an axis. A single seed is left out, since it is the number itself."""
        low, high = (None if edge is None else place(edge) for edge in (self.low, self.high))
        seeds = tuple(map(place, self.seeds)) if len(self.seeds) > 1 else ()
        return replace(self, at=place(self.at), low=low, high=high, seeds=seeds)


@dataclass(frozen=True)
class Intervals:
    """Rows of dots with intervals over one axis."""

    title: str
    unit: str
    rows: Mapping[str, Sequence[Dot]]
    """The dots of each row, by its name."""
    ticks: tuple[Tick, ...]
    label: int
    """Width of the column of names."""
    width: int
    row: int = ROW

    @property
    def height(self) -> int:
        """Height of the whole picture."""
        return ROW * len(self.rows) + 30


def styles(names: Iterable[str]) -> Styles:
    """The indices of a colour and a dash for each name, in the order of the names. A repeated name counts once.

    After as many names as there are colours, the colours start again with the next dash. After all pairs of colour and
    dash, the pairs start again.
    """
    free = product(range(len(DASHES)), range(len(COLOURS)))
    return {name: (colour, dash) for name, (dash, colour) in zip(dict.fromkeys(names), cycle(free), strict=False)}


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two ends, about `most` of them or fewer."""
    raw = (high - low or 1.0) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 10) + 0.0 for number in range(first, last + 1)]


def ends(values: Iterable[float], *, share: bool = False) -> tuple[float, float]:
    """The ends of an axis that holds all values with a margin; for a share, 0 and 1."""
    found = [value for value in values if math.isfinite(value)]
    if share or not found:
        return 0.0, 1.0
    low, high = min(found), max(found)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def place(value: float, axis: tuple[float, float], start: float, end: float) -> float:
    """The position of a value between two edges of a picture, rounded to a tenth of a pixel."""
    return round(start + (value - axis[0]) / (axis[1] - axis[0]) * (end - start), 1) + 0.0


def chart(
    title: str, across: str, upward: str, lines: Mapping[str, Points], styles: Styles, *,
    share: bool = False, marks: Mapping[str, tuple[float, float]] | None = None,
    spans: Sequence[tuple[float, float]] = (), alarms: Sequence[Alarm] = (), beside: Points = (),
) -> Chart:  # fmt: skip
    """A chart of named lines. `marks` are points apart from the lines, `spans` are parts of the axis to be shaded.

    The axes hold the points `beside` too: those of charts that are compared with this one.
    """
    marks = marks or {}
    every = [point for points in (*lines.values(), list(marks.values()), beside) for point in points]
    wide = [x for x, _ in every]
    x_axis = (min(wide), max(wide)) if len(set(wide)) > 1 else ends(wide)
    y_axis = ends((y for _, y in every), share=share)
    left, top, right, bottom = FRAME

    def x(value: float) -> float:
        return place(value, x_axis, left, right)

    def y(value: float) -> float:
        return place(min(max(value, y_axis[0]), y_axis[1]), y_axis, bottom, top)

    shaded = [(x(max(low, x_axis[0])), x(min(high, x_axis[1]))) for low, high in spans]
    drawn = []
    for name, points in lines.items():
        values = [value for _, value in points] or [marks[name][1]]
        kept = [*points[:: math.ceil(len(points) / MOST_POINTS) or 1], *points[-1:]]
        colour, dash = styles.get(name, ("ink", 0))
        path = " ".join(f"{x(at):g},{y(value):g}" for at, value in dict.fromkeys(kept))
        mark = (x(marks[name][0]), y(marks[name][1])) if name in marks else None
        drawn.append(Line(name, colour, dash, path, mark, values[0], values[-1], min(values), max(values)))
    return Chart(
        title, across, upward, tuple(drawn),
        tuple(Tick(x(value), f"{value:g}") for value in ticks(*x_axis)),
        tuple(Tick(y(value), f"{value:g}") for value in ticks(*y_axis, most=4)),
        tuple((low, round(high - low, 1)) for low, high in shaded),
        tuple((x(alarm.step), alarm) for alarm in alarms),
    )  # fmt: skip


def training(history: figures.History, labels: Sequence[str], alarms: Sequence[Alarm], styles: Styles) -> list[Chart]:
    """The curves of a training: one chart for each quantity of its log, with the steps at which an alert was raised."""
    units = {title: unit for title, unit, _ in figures.PANELS}
    spans = figures.phases(history)[1::2]
    found = []
    for title, keys in figures.panels(history, labels).items():
        lines = {name: [(line["step"], line[key]) for line in history if key in line] for name, key in keys.items()}
        found.append(chart(
            title, "optimiser step", units[title], lines, styles,
            share=title in figures.SHARES, spans=spans, alarms=alarms,
        ))  # fmt: skip
    return found


def intervals(title: str, unit: str, rows: Mapping[str, Sequence[Dot]], *, share: bool = True) -> Intervals | None:
    """A picture of numbers with their intervals. A share is drawn in per cent. None if no row has a number."""
    factor = 100.0 if share else 1.0
    dots = [dot for found in rows.values() for dot in found]
    if not dots:
        return None
    known = [value for dot in dots for value in (dot.at, dot.low, dot.high, *dot.seeds) if value is not None]
    low, high = ends([factor * value for value in known])
    axis = (max(low, 0.0), min(high, 100.0)) if share else (low, high)
    label = min(230, 14 + round(6.6 * max(len(name) for name in rows)))
    width = label + 330

    def at(value: float) -> float:
        return place(factor * value, axis, label + 8, width - 14)

    drawn = {name: [dot.placed(at) for dot in found] for name, found in rows.items()}
    shown = tuple(Tick(place(value, axis, label + 8, width - 14), f"{value:g}") for value in ticks(*axis))
    return Intervals(title, unit, drawn, shown, label, width)
