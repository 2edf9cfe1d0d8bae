"""The README tells the truth: its tree, its commands and its table."""

import argparse
import json
import re
import subprocess
from pathlib import Path

import pytest

from clinrl.cli.parser import parser
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


def test_every_module_is_in_the_tree() -> None:
    modules = {
        f"src/clinrl/{path.name}" for path in (ROOT / "src/clinrl").glob("*.py") if path.stem.strip("_") == path.stem
    }
    assert modules <= set(tree())


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)\b", README, re.MULTILINE)) <= targets


def test_every_subcommand_exists() -> None:
    commands = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)).choices
    named = set(re.findall(r"\bclinrl ([a-z]+)\b(?= [a-z]+[-@]|  |`)", README))
    assert named
    assert named <= set(commands)


def test_every_version_it_names_exists() -> None:
    assert set(re.findall(r"\besi-v\d+\b", README.split(series.END)[1])) <= set(
        load_params(ROOT / "params.yaml").versions
    )


def test_continuous_integration_runs_the_test_command() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert script.splitlines()[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in script
    assert script.rstrip().splitlines()[-1] == "make test"


def test_make_alone_lists_the_targets() -> None:
    listed = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    assert {"demo", "test", "check", "bench"} <= set(re.findall(r"^make ([a-z]+)", listed, re.MULTILINE))


def test_the_table_is_that_of_the_committed_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert series.spliced(README, series.table(load_params(), "esi")) == README, (
        "run `python -m clinrl.pipeline.series --write`"
    )


def test_splicing_replaces_what_stands_between_the_markers() -> None:
    page = f"a\n{series.BEGIN}\nold\n{series.END}\nb\n"
    once = series.spliced(page, "new")
    assert once == f"a\n{series.BEGIN}\nnew\n{series.END}\nb\n"
    assert series.spliced(once, "new") == once


@pytest.mark.parametrize("page", ["", series.BEGIN, f"{series.END}{series.BEGIN}", f"{series.BEGIN}{series.END}" * 2])
def test_a_page_without_its_markers_is_refused(page: str) -> None:
    with pytest.raises(ArtefactError, match="README"):
        series.spliced(page, "new")


def test_what_it_says_of_three_seeds_is_what_was_measured() -> None:
    """The sentence below the table rests on the committed replication."""
    result = json.loads((ROOT / "data/reports/seeds/esi-v49.json").read_text(encoding="utf-8"))
    assert "data/reports/seeds/esi-v49.md" in README
    assert len(result["runs"]) == 3
    for run in result["runs"]:
        for mode in ("think", "direct"):
            exact = [run["metrics"][version][mode]["exact"]["value"] for version in result["lineage"]]
            assert exact == sorted(exact)
            tests = {
                (test["other"], test["metric"]): test
                for test in run["tests"]
                if (test["version"], test["mode"]) == ("esi-v49", mode)
            }
            better = tests["esi-v43", "exact"], tests["bag of words", "exact"]
            safer = tests["esi-v43", "dangerous"]
            assert all(test["b"] > test["c"] and test["p"] < 0.05 for test in better)
            assert safer["b"] < safer["c"]
            assert safer["p"] < 0.05
        agreement = [run["mode_agreement"][version]["value"] for version in ("esi-v43", "esi-v49")]
        assert agreement == sorted(agreement)


LEVELS = ("easy", "medium", "hard")


def levels_of(sat: dict, level: str) -> str:
    found = sat["levels"][level]["quality"]
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def audit_rows() -> list[str]:
    """The README's rows of the audit, from the committed reports on the protocol."""
    reports = {
        name: json.loads((ROOT / f"data/reports/protocol/{name}.json").read_text(encoding="utf-8"))
        for name in ("audit-base", "audit-v1", "audit-v2")
    }
    found = []
    for decoding, shown in (("as examined", "greedy"), ("sampled", "sampled")):
        for name, report in reports.items():
            (sat,) = (
                row for row in report["sat"] if (row["who"], row["mode"], row["decoding"]) == (name, "think", decoding)
            )
            found.append((name, shown, sat))
    idle = [row for row in reports["audit-base"]["sat"] if not row["mode"]]
    found += [
        (row["who"], "", row) for row in idle if row["who"] in ("text_coin", "flag_all_diligent", "coin_diligent")
    ]
    return [f"| {who} | {how} | {' | '.join(levels_of(sat, level) for level in LEVELS)} |" for who, how, sat in found]


def test_the_table_of_the_audit_is_that_of_the_committed_reports() -> None:
    block = README.split("| who | decoding | easy | medium | hard |\n| --- | --- | --- | --- | --- |\n")[1]
    assert block.split("\n\n")[0].splitlines() == audit_rows()
