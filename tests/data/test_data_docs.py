"""Pages that stand alone: whatever a page holds, nothing of it loads or runs."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.data import data_docs

FOUND = """<!DOCTYPE html><html><head><title>x</title><link rel=stylesheet href=https://cdn.example/a.css>
<style>body { background: url(https://cdn.example/b.png) }</style></head><body onload="go()">
<script src="//cdn.example/c.js"></script><script>if (1 < 2) go("</p>")</script>
<nav><a href="../index.html">Home</a> <a href="https://ads.example">news</a><img src="https://cdn.example/l.png"></nav>
<table><tr><td class="x" style="background: url(//cdn.example/d)"
onclick="go()">1 &lt; 2 &amp; <b>so</b></td></tr></table>
<footer>Subscribe</footer></body></html>"""


@pytest.fixture
def page(tmp_path: Path) -> str:
    (tmp_path / "static/fonts").mkdir(parents=True)
    (tmp_path / "expectations").mkdir()
    (tmp_path / "expectations/rows.html").write_text(FOUND, encoding="utf-8")
    data_docs.detach(tmp_path, "esi-d3")
    assert not (tmp_path / "static").exists()
    once = (tmp_path / "expectations/rows.html").read_text(encoding="utf-8")
    data_docs.detach(tmp_path, "esi-d3")
    assert (tmp_path / "expectations/rows.html").read_text(encoding="utf-8") == once
    assert 'href="expectations/rows.html"' in (tmp_path / "index.html").read_text(encoding="utf-8")
    return once


def test_what_is_to_be_read_stays_and_what_loads_goes(page: str) -> None:
    for kept in ('<a href="../index.html">Home</a>', '<td class="x">1 &lt; 2 &amp; <b>so</b></td>', "<a>news</a>"):
        assert kept in page
    for gone in ("example", "go(", "Subscribe", "<script", "<img", "onclick", "url("):
        assert gone not in page


class Loads(HTMLParser):
    """Fails on anything that a browser would load, run or submit."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in data_docs.KEPT
        for name, value in attrs:
            assert name in data_docs.ATTRIBUTES or name == "href"
            if name == "href":
                assert ":" not in (value or "").split("/")[0].split("#")[0].split("?")[0]
                assert not (value or "").strip().startswith(("/", "\\"))


PARTS = st.sampled_from(
    ["<", ">", "</", "/>", "script", "img", "a", "div", "svg", "style", "<!--", "-->", "<![CDATA[", "]]>", "<?", "&lt;",
     "&#60;", " href=", " src=", " onerror=", '"', "'", "//x.example", "https://x.example", "java\nscript:go()",
     "javascript:go()", " ", "\n", "\x00", "=", "`", "data:text/html,x", "\\\\x.example", " //x.example", "text"]
)  # fmt: skip


@given(st.lists(PARTS, max_size=40).map("".join))
def test_nothing_that_loads_is_kept_of_any_text(text: str) -> None:
    Loads().feed(data_docs._kept(text))
