"""Markdown files of the checkout as pages, with links and images that point to files of the site."""

import posixpath
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from markupsafe import Markup

from clinrl.reports.render import reader_of_markdown

if TYPE_CHECKING:
    from markdown_it.token import Token

LONGEST = 1_500
"""Characters of a section that the search index holds: of a long table, only the beginning."""


@dataclass(frozen=True)
class Page:
    """A Markdown file as HTML."""

    title: str
    body: Markup
    sections: tuple[tuple[str, str, str], ...]
    """Anchor, heading and text of each, for the search."""


def read(path: Path, url: str, targets: Mapping[str, str], pictures: Mapping[str, Markup] | None = None) -> Page:
    """The page of a Markdown file at a URL of the site.

    `targets` has the URL of every file that the site holds; a link to any other file becomes plain text. `pictures` has
    figures for image files that git ignores; any other image that the site lacks is left out.
    """
    folder = posixpath.dirname(path.as_posix())
    tokens = reader_of_markdown().parse(_plain(path))
    title, sections, anchor, heading, text = path.stem, [], "", "", [""]
    taken: dict[str, int] = {}
    for place, token in enumerate(tokens):
        if token.type == "heading_open":
            sections.append((anchor, heading, " ".join(text)))
            heading, text = _text(tokens[place + 1]), []
            anchor = _slug(heading, taken)
            if len(sections) == 1:
                title = heading
            token.attrSet("id", anchor)
        if token.type in ("table_open", "fence", "code_block"):  # a wide one scrolls: let the keyboard focus it
            token.attrSet("tabindex", "0")
        if token.type in ("inline", "fence") and tokens[place - 1].type != "heading_open":
            text.append(_text(token))
        if token.type == "inline":
            figure = _resolve(token, folder, url, targets, pictures or {})
            if figure is not None:  # a figure must not lie in a paragraph
                tokens[place - 1].hidden = tokens[place + 1].hidden = True
                token.type, token.content, token.children = "html_block", figure, None
    sections.append((anchor, heading, " ".join(text)))
    reader = reader_of_markdown()
    html = reader.renderer.render(tokens, reader.options, {})
    kept = tuple((at, name, " ".join(found.split())[:LONGEST]) for at, name, found in sections if name or found)
    return Page(title, Markup(html), kept)


def _plain(path: Path) -> str:
    """The text in common Markdown: without comments, and with the syntax of MkDocs' extensions replaced.

    Only the documentation may include other files, since a report may quote text from a model or a stranger.
    """
    text = re.sub(r"^<!--.*?-->\n?", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    if path.parts[0] == "docs":
        text = re.sub(r'^--8<-- "(\w[\w/-]*\.md)(?::(\d+))?"$', _included, text, flags=re.MULTILINE)
    text = re.sub(r'^!!! \w+ "([^"\n]+)"\n((?: {4}.*\n?)+)', _quoted, text, flags=re.MULTILINE)
    notes = "|".join(re.findall(r"^\[\^([\w-]+)\]: ", text, flags=re.MULTILINE))  # `[^a-z]` in code is none
    if not notes:
        return text
    text = re.sub(rf"^\[\^({notes})\]: ", r"\n[\1] ", text, flags=re.MULTILINE)
    return re.sub(rf"\[\^({notes})\](:?)", r"[\1]\2", text)


def _included(found: re.Match[str]) -> str:
    path = Path(found[1])
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return "\n".join(lines[int(found[2] or 1) - 1 :])


def _quoted(found: re.Match[str]) -> str:
    return f"> **{found[1]}.** " + " ".join(found[2].split()) + "\n"


def _text(token: "Token") -> str:
    """The plain text of a token, without markup."""
    if token.children is None:
        return token.content
    return "".join(" " if child.type in ("softbreak", "hardbreak") else child.content for child in token.children)


def _slug(heading: str, taken: dict[str, int]) -> str:
    """The anchor of a heading, made as MkDocs does, so that the documentation's links work."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()) or "section"
    taken[slug] = taken.get(slug, -1) + 1
    return f"{slug}_{taken[slug]}" if taken[slug] else slug


def _resolve(
    token: "Token", folder: str, url: str, targets: Mapping[str, str], pictures: Mapping[str, Markup]
) -> str | None:
    """Point a paragraph's links and images to files of the site. Returns the figure that replaces it, if any."""
    kept, dead = [], 0
    for child in token.children or ():
        if child.type == "link_open":
            href = _href(str(child.attrGet("href")), folder, url, targets)
            if href is None:
                dead += 1
                continue
            child.attrSet("href", href)
            if href.startswith("http"):
                child.attrSet("rel", "noreferrer")
        elif child.type == "link_close" and dead:
            dead -= 1
            continue
        elif child.type == "image":
            source = posixpath.normpath(posixpath.join(folder, unquote(str(child.attrGet("src")))))
            if source in pictures:
                return str(pictures[source])
            if source not in targets:
                continue
            child.attrSet("src", posixpath.relpath(targets[source], posixpath.dirname(url) or "."))
        kept.append(child)
    token.children = kept
    return None


def _href(link: str, folder: str, url: str, targets: Mapping[str, str]) -> str | None:
    """The URL of a link's target, relative to a page of the site; None if the site does not have the target."""
    if link.startswith("#") or re.match(r"https?://|mailto:", link, re.IGNORECASE):
        return link
    path, _, anchor = link.partition("#")
    target = targets.get(posixpath.normpath(posixpath.join(folder, unquote(path))))
    if target is None:
        return None
    return posixpath.relpath(target, posixpath.dirname(url) or ".") + (f"#{anchor}" if anchor else "")


def files() -> Iterator[Path]:
    """The Markdown files that become pages: documentation, files in the project's root, and reports except exams."""
    yield from sorted(Path("docs").rglob("*.md"))
    yield from sorted(Path().glob("*.md"))
    yield from sorted(path for path in Path("data/reports").rglob("*.md") if path.name != "report.md")
