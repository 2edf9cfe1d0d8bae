"""Great Expectations' pages made to stand alone: no script, nothing loaded from anywhere, readable without a network.

As they are written they load styles, scripts and images from seven hosts when opened, and show an empty index without.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from clinrl import artifacts, paths

if TYPE_CHECKING:
    from jinja2 import Template

INDEX: Final = "index.html"
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may load for a page: nothing, should anything be left in it that asks."""
KEPT: Final = frozenset((
    "a", "b", "br", "code", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "li", "nav", "ol", "p", "pre",
    "small", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
))  # fmt: skip
"""Elements that are kept. Of any other, only what it holds is."""
DROPPED: Final = frozenset(
    ("button", "footer", "form", "head", "iframe", "label", "object", "script", "select", "style", "svg", "template")
)
"""Elements that are dropped with all that they hold."""
VOID: Final = frozenset(("br", "hr"))
ATTRIBUTES: Final = frozenset(("class", "colspan", "hidden", "id", "rowspan"))


@contextmanager
def written(name: str) -> Iterator[Path]:
    """A private folder for the pages of a data set, which become `paths.data_docs(name)` if the block ends well.

    They stand alone by then. A block that raises, or that is killed, leaves the pages that were there before.
    """
    with artifacts.staged(paths.data_docs(name)) as folder:
        yield folder
        detach(folder, name)


def detach(folder: Path, name: str) -> None:
    """Rewrite the pages of a data set to stand alone, and write the index that links them.

    Doing it twice is doing it once.
    """
    from markupsafe import Markup

    shutil.rmtree(folder / "static", ignore_errors=True)
    pages = sorted(page for page in folder.rglob("*.html") if page != folder / INDEX)
    for page in pages:
        kept = Markup(_kept(page.read_text(encoding="utf-8")))
        page.write_text(_template().render(title=f"{name}: {page.stem}", policy=POLICY, body=kept), encoding="utf-8")
    paths = [page.relative_to(folder) for page in pages]
    names = ["/".join(path.parts[:3]).removesuffix(".html") for path in paths]  # such as expectations/rows
    listed = [(path, called, _verdict(page)) for path, called, page in zip(paths, names, pages, strict=True)]
    index = _template().render(title=f"{name}: data docs", policy=POLICY, name=name, pages=listed)
    (folder / INDEX).write_text(index, encoding="utf-8")


def _verdict(page: Path) -> str:
    """Of a page: `rules`, or whether what it checked `holds` or `fails`."""
    if "validations" not in page.parts:
        return "rules"
    return "fails" if "text-danger" in page.read_text(encoding="utf-8").split("</head>")[-1] else "holds"


@cache
def _template() -> "Template":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    here = Path(__file__)
    return Environment(
        loader=FileSystemLoader(here.parent), undefined=StrictUndefined, autoescape=True,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    ).get_template(here.with_suffix(".html.j2").name)  # fmt: skip


def _kept(page: str) -> str:
    """What is kept of a page's body."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    return "".join(reader.kept).strip()


class _Reader(HTMLParser):
    """Keeps text, and the elements and attributes that can load nothing. What it does not know, it does not keep."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.kept: list[str] = []
        self._within: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in DROPPED:
            self._within.append(tag)
        elif not self._within and tag in KEPT:
            kept = "".join(f' {name}="{escape(value or "")}"' for name, value in attrs if _is_harmless(name, value))
            self.kept.append(f"<{tag}{kept}>")

    def handle_endtag(self, tag: str) -> None:
        if self._within:
            if tag == self._within[-1]:
                self._within.pop()
        elif tag in KEPT - VOID:
            self.kept.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if not self._within:
            self.kept.append(escape(data, quote=False) if data.strip() else "\n" if "\n" in data else " ")


def _is_harmless(name: str, value: str | None) -> bool:
    """Whether an attribute is kept: nothing but links to pages of the same folder leads anywhere."""
    if name != "href":
        return name in ATTRIBUTES
    parts = urlsplit(value or "")
    return not parts.scheme and not parts.netloc and not parts.path.startswith("/")
