"""Templates: text from elsewhere stays in its cell or block, a missing name is an error, and cards keep their bytes."""

import ast
import hashlib
import re
import tomllib
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from clinrl.reports import model_card, numbers
from clinrl.reports.render import each, fenced, head, left_out, quoted, render, row, table
from clinrl.types import Estimate

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "src/clinrl/reports/templates"
HOSTILE = "a | b\n\n## A heading\r\n| x |"


def test_no_text_ends_a_cell_or_a_row():
    assert row(["n", HOSTILE]) == "| n | a \\| b  ## A heading \\| x \\| |"
    text = table(["name"], [[HOSTILE], ["{{ name }}"]])
    assert len(text.splitlines()) == 4
    assert text.endswith("| {{ name }} |")


def test_a_row_takes_lists_of_cells():
    assert row(["a", ["b", (1, 2)], (cell for cell in "cd"), {"e": 0}]) == "| a | b | 1 | 2 | c | d | e |"
    assert head(["a", ["b", "c"]]) == "| a | b | c |\n| --- | --- | --- |"
    assert each([("a", 1), "b"], "{}!") == ["a!", "b!"]


@pytest.mark.parametrize("text", ["```\n# Free\n```", "````", "plain", "a\n\n\n\nb"])
def test_no_text_ends_its_block(text):
    fence = fenced(text).split("text")[0]
    assert fence not in text
    assert fenced(text).endswith(fence)


def test_a_quotation_stays_one():
    assert quoted("a\n\n# b") == "> a\n>\n> # b"


def alarm(**changes):
    return {"step": 1, "level": "warn", "name": "x", "says": "y", "helps": "z"} | changes


MARKUP = re.compile(
    r"</(?:a|body|div|h[1-6]|html|li|p|span|table|td|th|tr|ul)>|\|[ :]*---|^#{2,6} \w|^\*\*\w", re.MULTILINE
)


def test_no_code_puts_a_page_together():
    """Markdown and HTML are written by templates alone, in flows and in the documentation's scripts too."""
    found = []
    for file in (file for folder in ("src", "flows", "docs") for file in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            f"{file.relative_to(ROOT)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes
            if MARKUP.search(node.value)
        ]
    assert not found


def test_free_text_is_no_template_and_no_html():
    text = render("alarms", alarms=[alarm(says="{{ 7 * 7 }} <b>&</b> | {% raw %}")])
    assert "| {{ 7 * 7 }} <b>&</b> \\| {% raw %} |" in text


def test_a_name_that_no_record_has_is_an_error():
    with pytest.raises(UndefinedError):
        render("alarms")
    with pytest.raises(UndefinedError, match="helps"):
        render("alarms", alarms=[{key: value for key, value in alarm().items() if key != "helps"}])


@pytest.mark.parametrize(
    ("method", "digest"),
    [
        ("grpo", "5c171de01bef0b19a96cc68e5fe68f5a5ac0900867b81452c7bd0fa193121dc0"),
        ("sft", "c8f369f6197ebf56d0f587398f2d6c77900761956a1366c7eb739019f32aa8db"),
    ],
)
def test_the_card_of_an_adapter_keeps_its_bytes(method, digest):
    """It lies in the adapter's folder and so in its digest: an altered template would make other adapters."""
    spec = {"method": method, "lora": {"rank": 8}, "trainer": {"steps": 3}, "stream": {}, "modes": ["think"],
            "reward": {"unreadable": -2.0}, "omit": ["a | b"], "scale": "embedded", "parent": "v1", "data": "d1",
            "profile": "p1", "seed": 3}  # fmt: skip
    fields = {"name": "v2", "task": "esi", "task_version": 1, "inputs": {"base": "b" * 64, "Parent": "p" * 64}}
    card = model_card.write(fields | {"spec": spec}, lineage=["v1", "v2"])
    assert hashlib.sha256(card.encode()).hexdigest() == digest


def test_templates_and_tables_are_part_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["clinrl"]
    files = [path for path in (ROOT / "src/clinrl").rglob("*.*") if path.is_file() and "__pycache__" not in path.parts]
    assert not [path for path in files if path.suffix != ".py" and not any(map(path.match, declared))]
    assert all(path.name.endswith((".md.j2", ".html.j2")) for path in TEMPLATES.iterdir())


CITED = re.compile(
    r"^#+ .*$|^\| \d+[a-g]? \||\b[Ii]tem \d+[a-g]?|\b[Pp]oint \d|Article \d+|\(EU\) 2024/1689|December 2024|SHA-256|"
    r"doi:10\.1038/s41591-024-03425-5|\.j2\b",
    re.MULTILINE,
)
"""Where a digit may stand in a template of a dossier: headings, numbers of items, and what is cited."""


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("dossier_*")), ids=lambda path: path.name)
def test_no_number_of_a_dossier_is_typed_by_hand(path):
    """Digits in expressions are none either: a value is looked up by its key."""
    typed = [line for line in CITED.sub("", path.read_text(encoding="utf-8")).splitlines() if re.search(r"\d", line)]
    assert typed == []


def test_an_interval_of_no_width_is_none_on_a_page():
    flat, wide = (Estimate(value=1.0, low=low, high=1.0, n=140) for low in (1.0, 0.9))
    assert [numbers.percent(flat), numbers.decimal(flat)] == ["100.0%, no interval", "1.000, no interval"]
    assert numbers.counted(flat, 100) == "1.000, no interval, n 140"
    assert [numbers.percent(wide), numbers.decimal(wide)] == ["100.0% [90.0, 100.0]", "1.000 [0.900, 1.000]"]


def test_a_p_value_is_never_shown_as_the_limit_that_it_misses():
    assert [numbers.p_value(p) for p in (0.05, 0.0502, 0.04996, 0.0499999, 0.2, 0.0004)] == [
        "0.050", "0.0502", "0.04996", "0.0499999", "0.200", "< 0.001",
    ]  # fmt: skip


def test_what_leaves_unreadable_answers_out_is_named():
    assert left_out("esi", ["exact", "kappa"]) == "; kappa leaves it out"
    assert left_out("imaging", ["exact", "macro_f1"]) == ""
