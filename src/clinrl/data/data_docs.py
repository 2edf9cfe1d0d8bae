"""Great Expectations' pages made to stand alone: no script, nothing loaded from anywhere, readable without a network.

As they are written they load styles, scripts and images from seven hosts when opened, and show an empty index without.
"""

import shutil
from collections.abc import Iterable
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

INDEX: Final = "index.html"
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may load for a page: nothing, should anything be left in it that asks."""
KEPT: Final = frozenset(
    (
        *("a", "b", "br", "code", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "li", "nav", "ol", "p"),
        *("pre", "small", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"),
    )
)
"""Elements that are kept. Of any other, only what it holds is."""
DROPPED: Final = frozenset(
    ("button", "footer", "form", "head", "iframe", "label", "object", "script", "select", "style", "svg", "template")
)
"""Elements that are dropped with all that they hold."""
VOID: Final = frozenset(("br", "hr"))
ATTRIBUTES: Final = frozenset(("class", "colspan", "hidden", "id", "rowspan"))


def detach(folder: Path, name: str) -> None:
    """Rewrite the pages of a data set, if there are any, to stand alone, and write the index that links them.

    Doing it twice is doing it once.
    """
    if not folder.exists():
        return
    shutil.rmtree(folder / "static", ignore_errors=True)
    pages = sorted(page for page in folder.rglob("*.html") if page != folder / INDEX)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        page.write_text(_page(f"{name}: {page.stem}", _kept(text)), encoding="utf-8")
    (folder / INDEX).write_text(_page(f"{name}: data docs", _index(folder, name, pages)), encoding="utf-8")


def _index(folder: Path, name: str, pages: Iterable[Path]) -> str:
    rows = "".join(
        f'<tr><td><a href="{escape(str(page.relative_to(folder)))}">{_called(page.relative_to(folder))}</a></td>'
        f"<td>{_verdict(page)}</td></tr>"
        for page in pages
    )
    return (
        f"<h1>{escape(name)}</h1><p>What was expected of this data set, and what was found, as Great Expectations "
        f"renders it. Synthetic data or counts alone; research only.</p>"
        f"<table><thead><tr><th>Page</th><th>Outcome</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _called(page: Path) -> str:
    """A page's name for people: `expectations/rows`, `validations/rows/rows-from-1`."""
    return escape("/".join(page.parts[:3]).removesuffix(".html"))


def _verdict(page: Path) -> str:
    if "validations" not in page.parts:
        return "the rules"
    failed = "text-danger" in page.read_text(encoding="utf-8").split("</head>")[-1]
    return '<i class="text-danger"></i>some fail' if failed else '<i class="text-success"></i>all hold'


def _page(title: str, body: str) -> str:
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="UTF-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


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
