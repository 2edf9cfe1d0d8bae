"""Rows for people and for scripts: a table on a terminal, tab-separated lines otherwise, JSON where it is asked for."""

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
"""Colours of the words that say how something stands."""
LAST = 24
"""What the last column, which may be folded, needs at least."""


def show(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    as_json: bool,
    narrow: Sequence[str] = (),
    content: Any = None,
) -> None:
    """Print rows, each a mapping of the columns. JSON keeps all keys of a row; the others show the columns only.

    `narrow` are the columns for a terminal on which the others would not fit. JSON is `content`, if that is given.
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
        whole = sum(widths[:2]) <= console.width // 2  # names that leave room for the rest
        for number, column in enumerate(columns):
            drawn.add_column(column, overflow="fold", no_wrap=whole and number < 2)  # the first two name the row
        for row in rows:
            cells = [_cell(row[column]) for column in columns]
            drawn.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in cells))
        return drawn

    fits = not narrow or sum(width + 2 for width in widths) + LAST <= console.width
    console.print(table(columns if fits else narrow))


def _cell(value: Any) -> str:
    """One cell's text: a tab or a line break would end it."""
    return "" if value is None else " ".join(str(value).split())
