"""Print rows for people and scripts: a table on a terminal, tab-separated lines otherwise, or JSON on request."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

STYLES = {
    **dict.fromkeys(("up to date", "holds", "passed", "equal"), "green"),
    **dict.fromkeys(("stale", "open"), "yellow"),
    **dict.fromkeys(("missing", "broken", "refused", "differs", "extra"), "red"),
    "unknown": "dim",
}
"""Colours of the words for a state."""
LAST = 24
"""Least width of the last column, which may be folded."""


def show(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    as_json: bool,
    narrow: Sequence[str] = (),
    content: Any = None,
) -> None:
    """Print rows, each a mapping from columns to values. JSON has all keys of a row, a table only the columns.

    `narrow` are the columns for a terminal that is too narrow for all. `content`, if given, is printed as JSON instead
    of the rows.
    """
    if as_json:
        print(json.dumps(list(rows) if content is None else content, indent=2, ensure_ascii=False))
        return
    if not sys.stdout.isatty():
        for line in (columns, *([_cell(row[column]) for column in columns] for row in rows)):
            print("\t".join(line))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    widths = [max(len(column), *(len(_cell(row[column])) for row in rows), 0) for column in columns[:-1]]

    def table(columns: Sequence[str]) -> Table:
        drawn = Table(box=None, pad_edge=False, header_style="bold")
        whole = sum(widths[:2]) <= console.width // 2  # the names of rows leave room for the other columns
        for number, column in enumerate(columns):
            drawn.add_column(column, overflow="fold", no_wrap=whole and number < 2)  # the first two name the row
        for row in rows:
            cells = [_cell(row[column]) for column in columns]
            drawn.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in cells))
        return drawn

    fits = not narrow or sum(width + 2 for width in widths) + LAST <= console.width
    console.print(table(columns if fits else narrow))


def _cell(value: Any) -> str:
    """One cell's text, with runs of white space as one space: a tab or a line break would end the cell."""
    return "" if value is None else plain(" ".join(str(value).split()))


def plain(text: str) -> str:
    """The text with unprintable characters escaped: a model or a registry may hold what a terminal obeys."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
