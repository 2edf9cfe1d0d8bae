"""The README tells the truth and is short. `test_docs` checks its commands and links, as those of every page."""

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from clinrl.config.params import load_params
from clinrl.errors import ArtefactError
from clinrl.pipeline import series

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def tree() -> list[str]:
    """The paths that the README's tree names."""
    block = README.split("```text\n")[1].split("```")[0]
    paths, folder = [], ""
    for line in block.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
            paths.append(name)
        else:
            paths.append(folder + name)
    return paths


@pytest.mark.parametrize("path", tree())
def test_what_the_tree_names_exists(path: str) -> None:
    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file()


def sentences(page: str) -> list[str]:
    """The sentences of a page: what stands in code, tables and headings is none. A point of a list may hold several."""
    prose = re.sub(r"```.*?```|<!--.*?-->|!\[[^]]*\]\([^)]*\)", "", page, flags=re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "#"))]
    parts = re.split(r"\n\s*\n|\n(?=- |\d+\. )", "\n".join(lines))
    found = [said for part in parts for said in re.split(r"(?<=[.!?])\**\s+(?=[A-Z`*\[])", " ".join(part.split()))]
    return [said for said in found if re.search(r"[a-z]", said)]


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 200
    lengths = [len(said.split()) for said in sentences(README)]
    assert sum(lengths) / len(lengths) < 18
    assert max(lengths) < 40


def test_a_sentence_is_told_from_the_next() -> None:
    page = "# A title\n\nOne `make test`. Two:\n\n- Three, which\n  goes on. Four\n\n| no | row |\n```\nno code\n```\n"
    assert sentences(page) == ["One `make test`.", "Two:", "- Three, which goes on.", "Four"]


def test_continuous_integration_runs_the_test_command() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert script.splitlines()[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in script
    assert script.rstrip().splitlines()[-2:] == ["make test", "make long"]


def test_make_alone_lists_the_targets() -> None:
    listed = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    assert {"demo", "test", "check", "bench"} <= set(re.findall(r"^make ([a-z]+)", listed, re.MULTILINE))


def test_the_table_is_that_of_the_committed_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert series.splice(README, series.table(load_params(), "esi")) == README, (
        "run `python -m clinrl.pipeline.series esi --write`"
    )


def test_the_lineage_of_one_machine_names_the_exam_of_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    report = series.load_report
    monkeypatch.setattr(
        series, "load_report",
        lambda name, mode: report(name, mode).model_copy(update={"exam": "esi-x4"} if name == "esi-v49" else {}),
    )  # fmt: skip
    rows = series.lines(load_params(), "esi").splitlines()
    assert [row.split(" | ")[1] for row in rows[2:]] == ["esi-x3", "esi-x3", "esi-x4"]


def test_splicing_replaces_what_stands_between_the_markers() -> None:
    page = f"a\n{series.BEGIN}\nold\n{series.END}\nb\n"
    once = series.splice(page, "new")
    assert once == f"a\n{series.BEGIN}\nnew\n{series.END}\nb\n"
    assert series.splice(once, "new") == once


def test_a_full_disk_leaves_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"{series.BEGIN}\nold\n{series.END}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(series, "load_params", lambda: SimpleNamespace(bases={"esi": None}))
    monkeypatch.setattr(series, "table", lambda *_: "new")
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
        assert series.main(["esi", "--write"]) == 1
    assert "old" in page.read_text()
    assert series.main(["esi", "--write"]) == 0
    assert "new" in page.read_text()


@pytest.mark.parametrize("page", ["", series.BEGIN, f"{series.END}{series.BEGIN}", f"{series.BEGIN}{series.END}" * 2])
def test_a_page_without_its_markers_is_refused(page: str) -> None:
    with pytest.raises(ArtefactError, match="README"):
        series.splice(page, "new")


def test_the_results_that_it_leads_with_are_what_was_measured() -> None:
    """The sentences below the table rest on the committed comparison of five seeds, registered before its runs."""
    report = json.loads((ROOT / "data/reports/comparisons/esi-series.json").read_text(encoding="utf-8"))
    assert "data/reports/comparisons/esi-series.md" in README
    assert all(len(row["versions"]) == 5 for row in report["sections"][0]["rows"] if row["kind"] == "arm")
    for test in report["primary"]["tests"]:
        value, low, high = (100 * test["difference"][key] for key in ("value", "low", "high"))
        assert f"{value:+.1f} points [{low:+.1f}, {high:+.1f}] ({test['mode']})" in " ".join(README.split())
        assert test["adjusted"] < 0.05
    whole = [section for section in report["sections"] if section["part"] == "all"]
    assert {section["mode"] for section in whole} == {"think", "direct"}
    for section in whole:
        pooled = {
            (one["first"], one["second"], one["measure"]): one for one in section["contrasts"] if not one["versions"]
        }
        for rival in ("rejection sampling", "bare labels", "weighted labels"):
            shown = section["mode"] == "direct" or rival != "rejection sampling"
            assert (pooled["v49", rival, "critical_under"]["adjusted"] < 0.05) == shown
            assert pooled["v49", rival, "critical_under"]["difference"]["high"] < 0
        assert pooled["v49", "boosted trees", "critical_under"]["adjusted"] >= 0.05
        assert pooled["v49", "boosted trees", "critical_under"]["difference"]["low"] > 0
        assert pooled["v49", "gold reasoning", "critical_under"]["adjusted"] >= 0.05
        rows = {row["name"]: row["metrics"] for row in section["rows"]}
        assert rows["v49"]["exact"]["value"] >= 0.85
