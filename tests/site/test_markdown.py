"""Markdown as pages: where links lead, what is left out, and that nothing in it is markup."""

from pathlib import Path

import pytest
from markupsafe import Markup

from clinrl.site import markdown

TARGETS = {"docs/other.md": "docs/other.html", "README.md": "project/readme.html", "docs/images/a.svg": "files/a.svg"}


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that reads a text as docs/page.md."""
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()

    def read(text: str, **options: object) -> markdown.Page:
        path = Path("docs/page.md")
        path.write_text(text, encoding="utf-8")
        return markdown.read(path, "docs/page.html", TARGETS, **options)

    return read


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](other.md)", '<p><a href="other.html">a</a></p>\n'),
        ("[a](other.md#x)", '<p><a href="other.html#x">a</a></p>\n'),
        ("[a](../README.md)", '<p><a href="../project/readme.html">a</a></p>\n'),
        ("[a](#x)", '<p><a href="#x">a</a></p>\n'),
        ("[a](https://e.org)", '<p><a href="https://e.org" rel="noreferrer">a</a></p>\n'),
        ("[a](../src/x.py)", "<p>a</p>\n"),
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>\n"),
        ("![a](images/a.svg)", '<p><img src="../files/a.svg" alt="a" /></p>\n'),
        ("b ![a](gone.png)", "<p>b </p>\n"),
        ("<script>x</script>", "<p>&lt;script&gt;x&lt;/script&gt;</p>\n"),
        ("<!-- a: begin -->\nb\n<!-- a: end -->", "<p>b</p>\n"),
        (
            '!!! warning "Only"\n    One\n    two.\n',
            "<blockquote>\n<p><strong>Only.</strong> One two.</p>\n</blockquote>\n",
        ),
        ('--8<-- "part.md:2"', "<p>second</p>\n"),
    ],
)
def test_what_a_text_becomes(read, text: str, expected: str) -> None:
    Path("part.md").write_text("first\nsecond\n", encoding="utf-8")
    assert read(text).body == expected


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("data/reports/v1/report.md", '--8<-- "part.md"'),
        ("docs/page.md", '--8<-- ".clinrl/keys/signing.pem"'),
        ("docs/page.md", '--8<-- "../part.md"'),
        ("docs/page.md", '--8<-- "/etc/hostname"'),
    ],
)
def test_no_report_brings_another_file_and_no_page_one_that_is_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, line: str
) -> None:
    """A report may quote what a model or a stranger wrote, and the search holds its text."""
    monkeypatch.chdir(tmp_path)
    for name in ("part.md", ".clinrl/keys/signing.pem", path):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"# t\n\n```\n{line}\n```\n\n{line}\n" if name == path else "secret", encoding="utf-8")
    page = markdown.read(Path(path), "page.html", TARGETS)
    assert "secret" not in f"{page.body}{page.sections}"
    assert str(page.body).count("--8&lt;--") == 2


def test_a_figure_stands_for_a_picture_that_git_ignores(read) -> None:
    page = read("# T\n\n![a](figure.png)\n", pictures={"docs/figure.png": Markup("<figure></figure>")})
    assert page.body.endswith("<figure></figure>")
    assert "<p>" not in page.body


def test_sections_are_known_to_the_search_by_the_anchors_of_mkdocs(read) -> None:
    page = read("# Title\n\nOne *two*.\n\n## It's `a` b\n\nThree.\n\n## It's `a` b\n\n| x |\n| --- |\n| y |\n")
    assert page.title == "Title"
    assert page.sections == (
        ("title", "Title", "One two."),
        ("its-a-b", "It's a b", "Three."),
        ("its-a-b_1", "It's a b", "x y"),
    )
    assert '<h2 id="its-a-b_1">' in page.body
    assert '<table tabindex="0">' in page.body
