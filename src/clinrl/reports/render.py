"""Render pages from templates and records. All Markdown is written here."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import TypeAdapter

from clinrl.analysis.exam import UNREADABLE
from clinrl.errors import ArtefactError
from clinrl.reports import numbers, results
from clinrl.tasks.base import GIVEN, Task, get_task

if TYPE_CHECKING:
    from jinja2 import Environment
    from markdown_it import MarkdownIt

T = TypeVar("T")
KEPT: Final = "\x00"
"""Placeholder for a line break in free text while a page is rendered."""


TEMPLATES: Final = Path(__file__).with_name("templates")


def render(template: str, folder: Path = TEMPLATES, /, **records: Any) -> str:
    """The page of `<template>.md.j2` in a folder. Raises jinja2.UndefinedError for a name that no record has."""
    text = environment(folder).get_template(f"{template}.md.j2").render(records)
    # Templates may leave several empty lines where a part is missing; those in `fenced` text are kept.
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n").replace(KEPT, "\n") + "\n"


def page(parts: Mapping[str, str], **records: Any) -> str:
    """One HTML page of several Markdown texts, each with its name as an anchor, by `templates/page.html.j2`.

    The page loads no other file. Only links to anchors work, and links to `NAME.md`, which lead to the text NAME. HTML
    in a text is shown as text.
    """
    from markupsafe import Markup

    reader = reader_of_markdown()
    anchors = {f"{name}.md": f"#{name}" for name in parts}
    reader.validateLink = lambda url: url.startswith("#")  # type: ignore[method-assign]
    reader.normalizeLink = lambda url: anchors.get(url, url)  # type: ignore[method-assign]
    bodies = {name: Markup(reader.render(text)) for name, text in parts.items()}
    return environment(TEMPLATES).get_template("page.html.j2").render(records, parts=bodies)


def reader_of_markdown() -> "MarkdownIt":
    """A new Markdown parser with tables, which shows HTML as text."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable("table")


def row(cells: Iterable[object]) -> str:
    """A line of a Markdown table. No text in it can end a cell or the line."""
    texts = [" ".join(str(cell).splitlines()).replace("|", "\\|") for cell in _flat(cells)]
    return f"| {' | '.join(texts)} |"


def head(columns: Iterable[object]) -> str:
    """The first two lines of a Markdown table."""
    names = list(_flat(columns))
    return f"{row(names)}\n{row(['---'] * len(names))}"


def table(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A whole Markdown table."""
    return "\n".join([head(columns), *map(row, rows)])


def _flat(cells: Iterable[object]) -> Iterator[object]:
    for cell in cells:
        if isinstance(cell, Iterable) and not isinstance(cell, str):
            yield from _flat(cell)
        else:
            yield cell


def each(values: Iterable[object], pattern: str) -> list[str]:
    """The format string filled with each value, or with each tuple of values."""
    return [pattern.format(*value) if isinstance(value, tuple) else pattern.format(value) for value in values]


def cells(found: Mapping[str, T], names: Iterable[str], shown: Callable[[T], str]) -> list[str]:
    """A cell for each name; empty for names that the mapping lacks."""
    return [shown(found[name]) if name in found else "" for name in names]


def quoted(text: str) -> str:
    """Free text as a quotation."""
    return "\n".join(f"> {line}" if line else ">" for line in text.splitlines())


def fenced(text: str) -> str:
    """Free text as a block of code, unchanged. The fence is longer than any in the text, so none ends the block."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}".replace("\n", KEPT)


def load(path: Path, task: Task, modes: Iterable[str], form: type[T]) -> T:
    """A report on a task, of this form, with the keys of each mapping in the order of pages.

    Reports are written with sorted keys. Pages have the order in which params.yaml names modes, and the task its
    metrics, input variants, levels and labels; any other key comes after these. Raises ArtefactError for a file that
    is not there, was cut short, or was edited into something else.
    """
    modes = list(modes)
    pairs = [f"{first}_{second}" for first, second in combinations(modes, 2)]
    headline = [name for name in task.reporting.headline if name in task.metrics]
    levels = task.benchmark.levels if task.benchmark else ()
    names = [
        *modes, *pairs, *task.compared, *headline, *task.metrics, *task.reporting.qualities,
        GIVEN, *task.reporting.variants, *levels, *map(str, task.labels), UNREADABLE,
    ]  # fmt: skip
    places = {name: place for place, name in reversed(list(enumerate(names)))}
    try:
        return TypeAdapter(form).validate_python(_arranged(json.loads(path.read_bytes()), places))
    except FileNotFoundError:
        raise ArtefactError(f"{path} is not here; restore it with `git checkout {path}`, or examine anew") from None
    except ValueError:
        raise ArtefactError(f"{path} is no report; restore it with `git checkout {path}`") from None


def _arranged(value: Any, places: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [_arranged(item, places) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _arranged(value[key], places) for key in sorted(value, key=lambda key: places.get(key, len(places)))}


@cache
def environment(folder: Path) -> "Environment":
    """The templates of a folder, with filters and functions for numbers and tables. HTML templates escape values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Markdown is not HTML: it is not escaped, except by `row`.
    environment = Environment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined,
        autoescape=lambda name: str(name).endswith((".html.j2", ".css.j2")),
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {
        "row": row, "head": head, "each": each, "cells": cells, "quoted": quoted, "fenced": fenced,
        "percent": numbers.percent, "decimal": numbers.decimal, "counted": numbers.counted, "points": numbers.points,
        "p_value": numbers.p_value, "p_is": numbers.p_is, "ranged": numbers.ranged, "metric": numbers.metric,
    }  # fmt: skip
    environment.globals |= {
        "get_task": get_task, "results": results, "product": product,
        "percent": numbers.percent, "decimal": numbers.decimal, "plain": numbers.plain, "metrics": numbers.metrics,
        "figure": numbers.figure, "figures": numbers.figures, "with_n": numbers.with_n, "present": numbers.present,
        "left_out": left_out,
    }  # fmt: skip
    return environment


def left_out(task: str, names: Iterable[str]) -> str:
    """The end of a sentence about unreadable answers: the metrics among `names` that do not count them."""
    metrics = get_task(task).metrics
    found = [name.replace("_", " ") for name in names if getattr(metrics.get(name), "readable_only", False)]
    return f"; {', '.join(found)} leave{'s' if len(found) == 1 else ''} it out" if found else ""
