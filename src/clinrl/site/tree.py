"""The tree of a task's versions as a picture: a row for each recipe, its seeds side by side, each mark a link."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from clinrl.config.params import Params
from clinrl.pipeline.plan import children, kind_of
from clinrl.site.charts import Dot, Tick, place

ROW, INDENT = 30, 20
TOP = 46
LETTER, STEP, GATE, MEASURE = 7.0, 15, 80, 190
"""Widths in pixels: of a letter of a name, of a seed, of the gate's verdict, and of a measure."""


@dataclass(frozen=True)
class Node:
    """A row of the picture: a base, a merge, or the versions that are seeds of one recipe."""

    names: tuple[str, ...]
    kind: str
    depth: int
    parent: int | None
    """Number of its parent's row."""


@dataclass(frozen=True)
class Drawn:
    """A row with its positions in the picture."""

    node: Node
    name: str
    label: str
    x: int
    y: int
    parent_y: int | None
    seeds: tuple[tuple[int, str], ...]
    """Position and name of each further seed."""
    values: tuple[tuple[Dot, ...], ...]
    """For each measure, a dot for each mode."""


@dataclass(frozen=True)
class Tree:
    """The whole picture."""

    rows: tuple[Drawn, ...]
    measures: tuple[tuple[str, int, tuple[Tick, ...]], ...]
    """Name, position and ticks of each measure."""
    width: int
    height: int
    gate: int
    """Position of the gate's verdicts."""


def nodes(params: Params, task: str) -> list[Node]:
    """The rows, depth first. Versions that are seeds of one recipe share a row, at the place of the first seed."""
    found: list[Node] = []

    def visit(name: str, depth: int, parent: int | None) -> None:
        names = params.seeds_of(name) if name in params.versions else ()
        found.append(Node(names or (name,), kind_of(params, name), depth, parent))
        number = len(found) - 1
        for child in children(params, name):
            seeds = params.seeds_of(child) if child in params.versions else ()
            if child not in params.rivals and (not seeds or seeds[0] == child):
                visit(child, depth + 1, number)

    visit(f"{task}-base", 0, None)
    drawn = {name for node in found for name in node.names}
    # Versions that no row holds yet, such as the children of a further seed, get rows of their own.
    rest = [name for name in _below(params, f"{task}-base") if name not in drawn]
    return [*found, *(Node((name,), kind_of(params, name), 1, 0) for name in rest)]


def _below(params: Params, name: str) -> Iterator[str]:
    for child in children(params, name):
        if child not in params.rivals:
            yield child
            yield from _below(params, child)


def layout(
    task: str, rows: Sequence[Node], measures: Sequence[str], values: Callable[[Node, str], Sequence[Dot]]
) -> Tree:
    """The picture of all rows. `values` gives a row's dots for a measure, one for each mode, as shares."""

    def label(node: Node) -> str:
        return node.names[0].removeprefix(f"{task}-")

    def placed(dot: Dot, start: int) -> Dot:
        return dot.placed(lambda share: _at(100 * share, start))

    seeds = round(max(38 + INDENT * node.depth + LETTER * len(label(node)) for node in rows))
    gate = seeds + STEP * (max(len(node.names) for node in rows) - 1) + 4
    places = {measure: gate + GATE + MEASURE * column for column, measure in enumerate(measures)}
    drawn = []
    for number, node in enumerate(rows):
        y = TOP + ROW * number
        bars = tuple(tuple(placed(dot, start) for dot in values(node, measure)) for measure, start in places.items())
        drawn.append(Drawn(
            node, node.names[0], label(node), 14 + INDENT * node.depth, y,
            None if node.parent is None else TOP + ROW * node.parent,
            tuple((seeds + STEP * place, name) for place, name in enumerate(node.names[1:])), bars,
        ))  # fmt: skip
    shares = (0, 25, 50, 75, 100)
    axes = [
        (name, start, tuple(Tick(_at(share, start), f"{share}") for share in shares)) for name, start in places.items()
    ]
    width = gate + GATE + MEASURE * len(measures)
    return Tree(tuple(drawn), tuple(axes), width, TOP + ROW * len(drawn) + 6, gate)


def _at(percent: float, start: int) -> float:
    return place(percent, (0.0, 100.0), start, start + MEASURE - 28)
