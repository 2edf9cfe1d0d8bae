"""Reads the pages of `clinrl site` as a browser would: what they link to, what they load, and what their data hold."""

import base64
import gzip
import json
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote


class Read(HTMLParser):
    """One page: its links, what is loaded, its anchors, its scripts' text and its policy."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.inline: list[str] = []
        self.policy = ""
        self.text: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.inline += [f"{tag} {name}" for name in given if name.startswith("on") or name == "style"]
        if tag in ("iframe", "object", "embed", "style"):
            self.inline.append(tag)
        if tag == "script" and "src" not in given:
            self.inline.append("script")
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        for name in ("href", "src", "action", "srcset", "data", "poster"):
            if name in given:
                (self.links if tag == "a" else self.loads).append(given[name])

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(folder: Path) -> dict[str, Read]:
    """Every page of a site, by its URL."""
    return {path.relative_to(folder).as_posix(): Read(path) for path in sorted(folder.rglob("*.html"))}


def dead(folder: Path) -> list[str]:
    """Links and loads that lead to nothing in the folder, anchors too. Those to other hosts are not followed."""
    pages, found = read(folder), []
    for url, page in pages.items():
        for link in [*page.links, *page.loads]:
            if re.match(r"https?://|mailto:", link):
                continue
            path, _, anchor = link.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(url), unquote(path))) if path else url
            is_lost = anchor and "=" not in anchor and target in pages and unquote(anchor) not in pages[target].ids
            if is_lost or not (folder / target).is_file():
                found.append(f"{url}: {link}")
    return found


def data(folder: Path, name: str) -> Any:
    """What a file of answers hands to its page."""
    text = (folder / f"answers/data/{name}.js").read_text(encoding="ascii")
    found = re.fullmatch(r'clinrl\.put\("([^"]+)","([A-Za-z0-9+/=]+)"\)\n', text)
    assert found, name
    assert found[1] == name
    return json.loads(gzip.decompress(base64.b64decode(found[2])))


def unpacked(folder: Path) -> str:
    """All text of a site, that of its packed data included."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*")) if path.is_file()]
    held = [data(folder, path.stem) for path in sorted(folder.glob("answers/data/*.js"))]
    return "\n".join([*texts, json.dumps(held, ensure_ascii=False)])
