"""The documentation tells the truth: its links, its commands, its quotations, and what is generated."""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from html.parser import HTMLParser
from pathlib import Path
from statistics import stdev
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from flows.__main__ import parser as flows_parser

from clinrl.cli.parser import parser
from clinrl.config.params import load_params
from clinrl.tasks.base import Task, get_task
from clinrl.tasks.esi.measured import BOUNDS, MIN_PULSE_PRESSURE_MMHG

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import generate  # noqa: E402

SPINE = 2_800
"""Lines that a reader of the whole story reads, by the list in docs/design.md."""
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WRITTEN = [page for page in PAGES if page.name not in ("CHANGELOG.md", "DECISIONS.md", *generate.WRITTEN)]
"""Pages that a person wrote and keeps up to date."""


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.long
@pytest.mark.parametrize("path", generate.WRITTEN)
def test_what_is_generated_is_up_to_date(path: str) -> None:
    assert (ROOT / "docs" / path).read_bytes() == generate.WRITTEN[path](), "run `make docs`"


def test_every_key_of_the_configuration_has_a_meaning() -> None:
    rows = [line.split(" | ") for line in generate.configuration().splitlines() if line.startswith("| `")]
    assert len(rows) > 220
    silent = [row[0] for row in rows if row[-1].strip(" |") == ""]
    assert not silent, "write a docstring below the field"


def links(text: str) -> Iterator[str]:
    """The relative links of a page, images included."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not re.match(r"[a-z]+:", target):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in links(page.read_text(encoding="utf-8")):
        path = unquote(target.split("#")[0])
        assert not path or (page.parent / path).exists(), target


def quoted(text: str) -> Iterator[str]:
    """The shell's lines of a page, without comments, and whatever else stands between backticks."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", text, flags=re.DOTALL)
    prose = re.sub(r"```\w*\n", "", re.sub(r"```(?:sh|bash|python)\n.*?```", "", text, flags=re.DOTALL))
    for line in [*"\n".join(blocks).splitlines(), *re.findall(r"`([^`\n]+)`", prose)]:
        yield line.split("  #")[0].split(" # ")[0].replace("-n clinrl ", "").strip()  # a namespace of Kubernetes


def subcommands(program: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (group,) = (action for action in program._actions if isinstance(action, argparse._SubParsersAction))
    return dict(group.choices)


def options(program: argparse.ArgumentParser) -> set[str]:
    """The options of a command, and of the commands below it."""
    below = [action.choices for action in program._actions if isinstance(action, argparse._SubParsersAction)]
    return {*program._option_string_actions}.union(*(options(one) for group in below for one in group.values()))


PROGRAMS = {"clinrl": subcommands(parser()), "python -m flows": subcommands(flows_parser())}


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_every_command_that_is_quoted_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    known = {
        r"make ([a-z]+)": targets,
        **{f"{program} ([a-z]+(?:-[a-z]+)*)": set(commands) for program, commands in PROGRAMS.items()},
    }
    for line in quoted(page.read_text(encoding="utf-8")):
        for pattern, allowed in known.items():
            for name in re.findall(rf"(?<![\w./-]){pattern}(?![\w.@/])", line):
                assert name in allowed, line


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_every_stage_that_is_quoted_exists(page: Path) -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    for line in quoted(page.read_text(encoding="utf-8")):
        for name in re.findall(r"\bdvc repro ([a-z][a-z-]*)", line):
            assert name in stages, line


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_every_option_that_is_quoted_exists(page: Path) -> None:
    for line in quoted(page.read_text(encoding="utf-8")):
        for program, commands in PROGRAMS.items():
            for name, rest in re.findall(rf"(?<![\w./-]){program} ([a-z]+(?:-[a-z]+)*)((?: [^|;&$`]*)?)", line):
                if name in commands:
                    assert set(re.findall(r"(?<= )--[a-z-]+", rest)) <= options(commands[name]), line


def test_every_version_that_a_command_names_exists() -> None:
    """In commands of one line; the errors are about names that do not exist."""
    params = load_params(ROOT / "params.yaml")
    names = {*params.versions, *params.merges.folds, *params.merges.blends, *(f"{task}-base" for task in params.bases)}
    for page in WRITTEN:
        for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            assert set(re.findall(r"\b(?:esi|audit)-(?:v\d\w*|base)\b(?!-)", block)) <= names, page


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_every_path_that_is_quoted_exists(page: Path) -> None:
    """Paths in git: what is built, and what only some machine has, may be away."""
    away = (
        *("data/cases", "data/adapters", "data/graded", "data/merged", "data/mined", "data/resits", "data/docs"),
        *("data/attestations", "data/exports", "data/dossiers", "data/preregistrations"),
        *("data/sources/mi", "data/reports/external", "data/reports/decisions", "data/reports/probe/esi-v51"),
        *("src/clinrl/tasks/qsofa", "params/qsofa"),  # which the tutorial adds
    )
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path in re.findall(r"`((?:src|tests|docs|flows|data|params)/[\w./@-]+)`", prose):
        assert path.startswith(away) or (ROOT / path).exists(), path


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=named)
def test_every_report_that_is_named_exists(page: Path) -> None:
    """Wherever it is named, in a command too; but for placeholders, and for what only some machine has."""
    away = ("external/", "decisions.jsonl", "seeds/", "probe/esi-v51")
    for path in re.findall(r"data/reports/([\w./@<-]*[\w/])", page.read_text(encoding="utf-8")):
        if not path.startswith(away) and not re.search(r"<|[A-Z]{4}", path):
            assert (ROOT / "data/reports" / path).exists(), path


Template = tuple[str | None, ...]
"""The fixed parts of a text of the code, in order; None: what is put in."""


def templates() -> Iterator[Template]:
    """Every text of the code that is long enough for a sentence."""
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "flows").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            fixed = [getattr(part, "value", None) if isinstance(part, ast.Constant) else None for part in parts]
            if len("".join(part for part in fixed if isinstance(part, str))) >= 12:
                yield tuple(part if isinstance(part, str) else None for part in fixed)


def is_said(sentence: str, known: Collection[Template]) -> bool:
    """Whether a text of the code is this sentence, with a name or a few in its gaps. A key may stand in front."""
    for template in known:
        if all(part is None or part in sentence for part in template):
            fixed = [part for part in template if part]
            pattern = "(?:[^ ]+ )?" + "".join("(.+)" if part is None else re.escape(part) for part in template)
            found = re.fullmatch(pattern, sentence)
            if found and all(len(gap) <= 5 * len("".join(fixed)) for gap in found.groups()):
                return True
    return False


def test_every_error_that_is_quoted_is_one_of_the_code() -> None:
    known = set(templates())
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    quotations = re.findall(r"```text\n(.*?)\n```", page, flags=re.DOTALL)
    assert len(quotations) >= 20
    forms = {said: (said, f"clinrl: {said}", re.split("; did you mean|; to say", said)[0]) for said in quotations}
    assert not [said for said, parts in forms.items() if not any(is_said(part, known) for part in parts)]
    assert not is_said("esi-v51 would learn something wrong, and nobody knows what it is", known)
    assert not is_said("training of esi-v46 was halted; the same command continues from step 12 of 16", known)


class Loaded(HTMLParser):
    """What a browser fetches when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Links that a reader may click are not fetched."""
        if tag != "a":
            self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "poster")]


@pytest.mark.long
def test_the_pages_build_and_load_nothing_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strictly: a dead link, a page outside of the navigation or an anchor that does not exist ends the build."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path)))
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(list((ROOT / "docs").rglob("*.md")))
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert loaded.found
        assert not [target for target in loaded.found if re.match(r"(https?:)?//", target)], page
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_the_design_names_every_package_and_the_spine_is_short() -> None:
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "src/clinrl").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `src/clinrl/(\w+)/`", page, re.MULTILINE)) == packages
    spine = re.findall(r"^\| \d+ \| `([^`]+)`", page, re.MULTILINE)
    assert len(spine) >= 10
    assert sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in spine) <= SPINE


RETIRED = re.compile(r"\b(?:sat|sits?|sitting|examinees?|ledger|mined errors)\b", re.IGNORECASE)
"""Words that docs/glossary.md retired."""


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_no_page_uses_a_retired_word(page: Path) -> None:
    text = page.read_text(encoding="utf-8").split("## Retired words")[0]
    assert not RETIRED.findall(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL))


def test_no_command_uses_a_retired_word() -> None:
    for program, commands in PROGRAMS.items():
        assert not {f"{program} {name}": RETIRED.findall(one.format_help()) for name, one in commands.items()
                    if RETIRED.search(one.format_help())}  # fmt: skip


INTERVAL = re.compile(r"([+-]?\d+\.\d+)(?:%| points)? \[([+-]?\d+\.\d+), ([+-]?\d+\.\d+)\]")
"""An estimate as pages print it."""


def estimates(node: Any) -> Iterator[tuple[float, float, float]]:
    """Every number of a report that has an interval, with it."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    if isinstance(node, dict) and isinstance(node.get("low"), float) and "value" in node:
        yield node["value"], node["low"], node["high"]
    for one in inner:
        yield from estimates(one)


def printed(number: float, scale: int, digits: int) -> str:
    """A number as pages print it, without a plus sign, and without a sign where nothing but zeros is left."""
    return f"{round(scale * number, digits) + 0.0:.{digits}f}"


def forms(file: Path) -> set[tuple[str, ...]]:
    """Every estimate of a report: as a share in per cent, or as a number."""
    found = set(estimates(json.loads(file.read_text(encoding="utf-8"))))
    scales = ((100, 1), (1, 2), (1, 3), (1, 4))
    return {tuple(printed(number, *scale) for number in numbers) for numbers in found for scale in scales}


def named_reports(page: str) -> Iterator[Path]:
    """The JSON behind every report that a page names. A placeholder names all of its kind; a folder, what it holds."""
    for path in re.findall(r"data/reports/([\w./@<>-]*[\w>])", page):
        pattern = re.sub(r"<[^>]+>", "*", path)
        for found in (ROOT / "data/reports").glob(pattern):
            yield from found.rglob("*.json") if found.is_dir() else [found.with_suffix(".json")]


@pytest.mark.long
@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_every_interval_on_a_page_is_one_of_a_report_that_the_page_names(page: Path) -> None:
    """So nobody types a number, none outlives the report that it came from, and a reader can look it up."""
    text = page.read_text(encoding="utf-8")
    found = INTERVAL.findall(text)
    written = {tuple(printed(float(one), 1, len(one.partition(".")[2])) for one in numbers) for numbers in found}
    files = {file for file in named_reports(text) if written and file.is_file()}
    assert not written - {estimate for file in files for estimate in forms(file)}


@pytest.mark.parametrize(
    "report", sorted((ROOT / "data/reports/comparisons").glob("*.json")), ids=lambda file: file.stem
)
def test_shares_of_labels_are_of_all_that_is_decided(report: Path) -> None:
    """Of each decision of an episode, too."""
    for section in json.loads(report.read_text(encoding="utf-8"))["sections"]:
        for shares in (section["right"], *(row["answered"] for row in section["rows"])):
            assert sum(shares.values()) == pytest.approx(1.0, abs=1e-5)
        assert section["right"][section["commonest"]] == max(section["right"].values())


def test_a_draft_of_the_year_has_its_figures_by_mode() -> None:
    page = (ROOT / "docs/year.md").read_text(encoding="utf-8")
    drafts = json.loads((ROOT / "data/reports/year.json").read_text(encoding="utf-8"))["drafts"]
    for name, draft in drafts.items():
        if exam := draft["exam"]:
            row = next(line for line in page.splitlines() if line.startswith(f"| {draft['week']} | {name} |"))
            for measure in ("exact", "critical_under"):
                assert f"| {exam['think'][measure]:.1%}, {exam['direct'][measure]:.1%} |" in row


def test_the_results_of_triage_are_those_of_the_committed_comparison() -> None:
    """What its sentences say; its tables are generated."""
    report = json.loads((ROOT / "data/reports/comparisons/esi-series.json").read_text(encoding="utf-8"))
    page = " ".join((ROOT / "docs/tasks/esi.md").read_text(encoding="utf-8").split())
    for test in report["primary"]["tests"]:
        value, low, high = (100 * test["difference"][key] for key in ("value", "low", "high"))
        assert f"{value:+.1f} points [{low:+.1f}, {high:+.1f}] ({test['mode']})" in page
    assert "adjusted p = {:.3f} and {:.3f}".format(*(test["adjusted"] for test in report["primary"]["tests"])) in page
    held = {(section["mode"], section["part"]): section for section in report["sections"]}
    rows = {part: {row["name"]: row for row in held["think", part]["rows"]} for _, part in held}
    differ = [100 * rows["v4 and v5 differ"][name]["metrics"]["exact"]["value"] for name in ("v43", "v49")]
    assert "Exact answers rise there from {:.0f}% to {:.0f}% (think)".format(*differ) in page
    think, direct = (
        one
        for mode in ("think", "direct")
        for one in held[mode, "one level in v4 and v5"]["contrasts"]
        if (one["first"], one["second"], one["measure"], one["versions"]) == ("v49", "v43", "critical_under", None)
    )
    for price, mode in ((think, "(think)"), (direct, "(direct)")):
        value, low, high = (100 * price["difference"][key] for key in ("value", "low", "high"))
        assert f"{value:+.1f} points [{low:+.1f}, {high:+.1f}], p = {price['adjusted']:.3f} {mode}" in page
    assert f"Before it, p is {think['p']:.3f} and {direct['p']:.3f}." in page
    seeds = rows["all"]["v49"]["metrics"]["critical_under"]["seeds"]
    assert max(seeds) == seeds[4]
    assert f"The fifth of v49 under-triages {100 * seeds[4]:.1f}% in mode think" in page
    every = [{row["name"]: row for row in held[mode, "all"]["rows"]} for mode in ("think", "direct")]
    apart = [100 * stdev(found["v49"]["metrics"]["critical_under"]["seeds"]) for found in every]
    assert "that of v49 is {:.1f} and {:.1f}, by mode".format(*apart) in page
    least = [100 * test["detectable"] for test in report["primary"]["tests"]]
    assert "the test shows {:.1f} and {:.1f} points with 80%".format(*least) in page
    for mode in ("think", "direct"):
        exam = json.loads((ROOT / f"data/reports/esi-v49/{mode}.json").read_text(encoding="utf-8"))
        assert f"{100 * exam['metrics']['critical_under']['value']:.1f}% ({mode})" in page


def shown_of_seeds(comparison: str, mode: str, part: str) -> Counter[tuple[str, str, str, str]]:
    """In how many seeds the first row is shown to have more, or fewer, answers of a share than the second."""
    report = json.loads((ROOT / f"data/reports/comparisons/{comparison}.json").read_text(encoding="utf-8"))
    (section,) = (one for one in report["sections"] if (one["mode"], one["part"]) == (mode, part))
    return Counter(
        (test["first"], test["second"], test["measure"], "more" if test["b"] > test["c"] else "fewer")
        for test in section["contrasts"]
        if test["versions"] and test["adjusted"] < 0.05
    )


def test_what_the_pages_say_seed_by_seed_is_in_the_reports() -> None:
    """Of shares that no test over all seeds is about."""
    esi, imaging = (
        " ".join((ROOT / f"docs/tasks/{task}.md").read_text(encoding="utf-8").split()) for task in ("esi", "imaging")
    )
    found = [shown_of_seeds("esi-series", mode, "all") for mode in ("think", "direct")]
    assert [[few["v49", "v43", "exact", way] for way in ("fewer", "more")] for few in found] == [[1, 0], [0, 1]]
    assert "v49 has fewer than v43 in one of five in mode think, and more in one in mode direct" in esi
    direct, held_out = (shown_of_seeds("imaging-arms", *of) for of in (("direct", "all"), ("think", "held_out")))
    arms = ("citations", "llm eval", "baseline", "custom embedding")
    assert [direct[arm, f"{arm}, as published", "exact", "fewer"] for arm in arms] == [3, 2, 1, 1]
    assert [direct[arm, f"{arm}, as published", "dangerous", "more"] for arm in arms] == [0, 0, 1, 1]
    assert "in three of five seeds of citations, two of llm eval, and one each of the baseline and of custom" in imaging
    former = ("baseline", "baseline, as published")
    assert (held_out[*former, "exact", "fewer"], held_out[*former, "dangerous", "more"]) == (3, 1)
    assert "the corrected baseline has fewer exact answers in three, and more `dangerous` ones in one" in imaging
    labels = [(arm, "labels alone (SFT)") for arm in ("baseline", "citations")]
    assert [(direct[*rows, "dangerous", "more"], direct[*rows, "exact", "fewer"]) for rows in labels] == [
        (4, 2),
        (3, 5),
    ]
    assert "the baseline has more `dangerous` answers than they in four of five, and fewer exact ones in two" in imaging
    assert "citations have more `dangerous` ones in three, and fewer exact ones in all five" in imaging


def test_what_readme_and_page_say_of_equal_completions_is_in_the_report() -> None:
    report = json.loads((ROOT / "data/reports/comparisons/esi-completions.json").read_text(encoding="utf-8"))
    readme, page = (
        " ".join((ROOT / at).read_text(encoding="utf-8").split()) for at in ("README.md", "docs/tasks/esi.md")
    )
    p = {}
    for section in report["sections"]:
        if section["part"] == "all":
            mode, of = section["mode"], ("critical_under", None)
            (test,) = (one for one in section["contrasts"] if (one["measure"], one["versions"]) == of)
            value, low, high = (100 * test["difference"][key] for key in ("value", "low", "high"))
            p[mode] = f"p = {test['adjusted']:.3f}"
            assert f"{value:+.1f} points [{low:+.1f}, {high:+.1f}] ({mode}), {p[mode]}" in readme
    said = f"better in direct by an exploratory test, {p['direct']}, and not shown to be in think, {p['think']}"
    assert said in " ".join(page.split())


def test_the_glossary_has_every_measure_of_the_reports_on_triage() -> None:
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    known = {
        *re.findall(r"^\| `?(\w+)`? \|", page, re.MULTILINE),
        *re.findall(r"\| `(\w+)`[^|]*\|$", page, re.MULTILINE),
    }
    reporting = get_task("esi").reporting
    assert {*reporting.headline, *reporting.external, "over_use", "under_use"} <= known


def test_the_page_about_data_names_the_limits_that_refuse_a_row() -> None:
    page = " ".join((ROOT / "docs/data.md").read_text(encoding="utf-8").split())
    hr, sbp, spo2, temp = (BOUNDS[name][0] for name in ("hr_bpm", "sbp_mmhg", "spo2_pct", "temp_c"))
    assert f"a heart rate below {hr} bpm, a systolic pressure below {sbp} mmHg or less than" in page
    assert f"less than {MIN_PULSE_PRESSURE_MMHG} mmHg above the diastolic, an SpO2 below {spo2}%" in page
    assert f"a temperature below {temp} °C" in page
    assert f"a pain score above {BOUNDS['pain'][1]}" in page


def test_the_concepts_name_the_members_of_a_task() -> None:
    page = (ROOT / "docs/concepts.md").read_text(encoding="utf-8").split("## Task")[1].split("\n## ")[0]
    first, second = (part.split("\n\n")[0] for part in page.split("| --- | --- |")[1:])
    required, parts = (
        {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
        for table in (first, second)
    )
    members = {name for name in Task.__annotations__ if not hasattr(Task, name)} | set(Task.__abstractmethods__)
    assert required == members
    assert len(members) <= 12
    assert parts == {name for name in Task.__annotations__ if hasattr(Task, name)}


LEVELS = ("easy", "medium", "hard")


def levels_of(sat: dict, level: str) -> str:
    found = sat["levels"][level]["quality"]
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def audit_rows() -> list[str]:
    """The page's rows of the audit, from the committed reports on the protocol."""
    reports = {
        name: json.loads((ROOT / f"data/reports/protocol/{name}.json").read_text(encoding="utf-8"))
        for name in ("audit-base", "audit-v3", "audit-v5", "audit-v6")
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
        (row["who"], "", row)
        for row in idle
        if row["who"] in ("sign_reader", "one_flag_with_distances", "flag_all_with_distances", "text_coin")
    ]
    return [f"| {who} | {how} | {' | '.join(levels_of(sat, level) for level in LEVELS)} |" for who, how, sat in found]


def test_the_table_of_the_audit_is_that_of_the_committed_reports() -> None:
    """And before there are reports, there is no table."""
    page = (ROOT / "docs/tasks/audit.md").read_text(encoding="utf-8")
    _, head, block = page.partition("| policy | decoding | easy | medium | hard |\n| --- | --- | --- | --- | --- |\n")
    if not (ROOT / "data/reports/protocol/audit-v3.json").exists():
        assert not head
        return
    assert block.split("\n\n")[0].splitlines() == audit_rows()


def test_what_the_page_of_the_audit_says_of_the_gate_and_audit_v6_is_in_the_reports() -> None:
    page = (ROOT / "docs/tasks/audit.md").read_text(encoding="utf-8")
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    limit = params["gates"]["audit"]["limits"]["dangerous"]
    arms = params["comparisons"]["audit-gold-long-seeds"]["arms"]
    found = {
        mode: {
            name: json.loads((ROOT / f"data/reports/{name}/{mode}.json").read_text(encoding="utf-8"))["metrics"][
                "dangerous"
            ]["value"]
            for name in arms["v6"]
        }
        for mode in ("think", "direct")
    }
    assert max(value for seeds in found.values() for value in seeds.values()) <= limit["max"]["embedded"]
    detection = {
        mode: [
            json.loads((ROOT / f"data/reports/{name}/{mode}.json").read_text(encoding="utf-8"))["metrics"]["detection"][
                "value"
            ]
            for name in arms["v6"]
        ]
        for mode in found
    }
    assert all(seeds[0] == max(seeds) for seeds in detection.values())
    ranges = [f"{100 * min(seeds):.1f}% to {100 * max(seeds):.1f}%" for seeds in detection.values()]
    assert "reach {} in mode think and {} in direct".format(*ranges) in " ".join(page.split())
    direct = sorted(found["direct"].values())
    assert f"they clear an error in {100 * direct[0]:.1f}% to {100 * direct[-1]:.1f}% of the audits" in page
    assert "Each of the six seeds keeps it" in page
    assert len(direct) == 6
    assert direct[2] <= 0.04 < direct[3]  # "three of them in more than 4%"


def test_what_page_and_readme_say_of_long_audits_is_in_the_report() -> None:
    report = json.loads((ROOT / "data/reports/comparisons/audit-gold-long-seeds.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/tasks/audit.md").read_text(encoding="utf-8")
    parts = {(one["mode"], one["part"]): one for one in report["sections"] if one["part"] != "all"}
    rows = {at: {row["name"]: row["metrics"]["dangerous"] for row in one["rows"]} for at, one in parts.items()}
    for level in LEVELS:
        think, direct = (rows[mode, f"{level} 6-12"] for mode in ("think", "direct"))
        found = think["v6"], think["base"], direct["v6"], direct["base"], think["sign_reader"]
        cells = ("{:.1f}% [{:.1f}, {:.1f}]".format(*(100 * one[k] for k in ("value", "low", "high"))) for one in found)
        assert f"| {level} | {think['v6']['n']} | {' | '.join(cells)} |" in page
    hard = rows["think", "hard 6-12"]["v6"]
    assert min(hard["seeds"]) > hard["low"] > 0.1
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"clear an error in {100 * hard['value']:.1f}% (think, n = {hard['n']})" in readme
    short = [100 * one["v6"]["value"] for (_, part), one in rows.items() if part.endswith(" 2-5")]
    assert f"With two to five proposals, v6 clears an error in {max(short):.1f}% at most" in page
    shown = [
        mode
        for (mode, _), one in parts.items()
        for test in one["contrasts"]
        if test["adjusted"] < 0.05
        and (test["first"], test["second"], test["measure"], test["versions"]) == ("v6", "base", "dangerous", None)
    ]
    assert shown == ["direct"] * 5  # "in none of them, in mode direct in five"


def behind(version: str) -> set[tuple[str, str, str, str]]:
    """Than whom the version is not shown to be better: policy or base, mode, decoding and level."""
    report = json.loads((ROOT / f"data/reports/protocol/{version}.json").read_text(encoding="utf-8"))
    return {
        (row["other"], row["mode"], row["decoding"], level)
        for row in report["above"]
        for level, is_above in row["levels"].items()
        if not is_above
    }


def test_what_the_page_of_the_audit_says_of_its_published_protocol_is_in_the_reports() -> None:
    v5, v6 = behind("audit-v5"), behind("audit-v6")
    report = json.loads((ROOT / "data/reports/protocol/audit-v6.json").read_text(encoding="utf-8"))
    idle = {row["who"] for row in report["sat"] if not row["mode"]}
    assert {row["other"] for row in report["above"]} == idle - {"oracle"} | {"audit-base"}
    assert v6 == {("audit-base", "think", "as examined", "easy"), ("sign_reader", "think", "sampled", "easy")}
    assert {decoding for other, _, decoding, _ in v5 if other == "audit-base"} == {"as examined"}
    assert {found for found in v5 if found[0] != "audit-base"} == {
        ("sign_reader", "think", "sampled", "easy"),
        ("sign_reader", "direct", "sampled", "easy"),
        ("sign_reader", "direct", "sampled", "medium"),
        ("sign_reader", "direct", "as examined", "medium"),
        ("mediocre", "direct", "sampled", "medium"),
    }
