"""Nothing of an imported row but counts leaves the folders that git ignores: looked for in every file and line."""

import json
import shutil
import subprocess
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import pytest

import dolls
import locks
import sites
import sown
from clinrl import artifacts, paths
from clinrl.benchmarks import external
from clinrl.config.params import Params
from clinrl.data import dataset, reward_audit, validate
from clinrl.errors import DataError
from clinrl.evaluation import error_analysis, evaluate
from clinrl.registry import versions
from clinrl.site import build
from clinrl.tasks.base import content_id, get_task
from clinrl.tracking import mlflow_store
from clinrl.training import launch

ROOT = Path(__file__).parents[1]


def project(folder: Path) -> Params:
    """The doll with a version that trains on a MIMIC import and is examined on MIETIC's validation file."""
    source = json.loads(json.dumps(dolls.PARAMS), object_hook=dolls._integer_keys)
    source["profiles"]["reward"]["trainer"]["embedded"]["steps"] = 2
    source["profiles"]["reward"]["waiver"] = "Four rows are too few for the probe."
    source["bases"]["esi"]["exam"] = "mietic-36"
    version = {"task": "esi", "parent": "esi-base", "data": "mimic-train", "exam": "mietic-36"}
    return Params.model_validate(
        source
        | {
            "imports": sown.imports(folder),
            "versions": {"v1": version | {"profile": "reward", "seed": 1}},
            "mining": {"v1": {"task": "esi", "data": "mietic-mine"}},
            "external": {"v1": {"task": "esi", "data": "mietic-36"}},
        }
    )


def exposed(place: Path) -> list[Path]:
    """Every file that git would take, and the whole MLflow store."""
    command = ["git", "ls-files", "--others", "--cached", "--exclude-standard"]
    listed = subprocess.run(command, cwd=place, check=True, capture_output=True, text=True).stdout.splitlines()
    store = [path for path in (place / "mlruns").rglob("*") if path.is_file()]
    return [place / name for name in listed] + store


def holding(files: list[Path]) -> list[tuple[str, str]]:
    """The files in which a sown string is found, in their names too."""
    return [
        (str(path), canary)
        for path in files
        for canary in sown.CANARIES
        if canary.encode() in path.read_bytes() or canary in str(path)
    ]


@pytest.mark.long
@pytest.mark.usefixtures("few_draws")
def test_no_value_of_a_row_gets_out(tmp_path, monkeypatch, capfd, caplog):
    place, source = tmp_path / "project", tmp_path / "source"
    shutil.copytree(dolls.built(), place)
    monkeypatch.chdir(place)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(ROOT / ".gitignore", place)
    subprocess.run(["git", "init", "-q"], check=True)
    params = project(sown.sources(source))
    for name in params.imports:
        dataset.stage(params, name)
    for name in ("mietic-36", "mimic-train", "mietic-mine"):  # what is used, of each source
        validate.stage(params, name)
    evaluate.stage(params, "esi-base")
    with dolls.in_process():
        for step in (reward_audit, launch, evaluate, error_analysis, external):
            step.stage(params, "v1")
    locks.record(params)
    Path("mlruns").mkdir()  # now, since live metrics send nothing that a registration does not
    versions.register(params, "v1")
    (kept,) = (place / "mlruns").rglob("examined.json")
    assert kept.read_text().strip() == "null", "no hash of a patient's words"

    assert any(sown.TEXT in path.read_text() for path in Path("data/cases").glob("*/cases.jsonl"))
    assert (place / mlflow_store.STORE).exists()
    files = exposed(place)
    assert {"data/reports/external/v1.md", "data/reports/mine/v1.md", "data/reports/data/mietic-36.json"} <= {
        str(path.relative_to(place)) for path in files
    }
    assert not holding(files)
    kept = [*Path("data").rglob("*"), *Path(".clinrl").rglob("*")]
    ignored = [path for path in kept if path.is_file() and path.name not in (paths.CASES_FILE,)]
    assert not holding(ignored), "not even there, cases.jsonl apart"
    said = capfd.readouterr()
    assert not [canary for canary in sown.CANARIES if canary in said.out + said.err + caplog.text]
    for folder in (paths.graded("v1"), paths.mined("v1")):
        lines = (folder / "think.jsonl").read_text().splitlines()
        turns = [json.loads(line)["transcript"]["messages"] for line in lines]
        assert {(turn["thinking"], turn["content"].startswith(("ANSWER", "answer")) or not turn["content"])
                for messages in turns for turn in messages} == {(None, True)}  # fmt: skip
    page = paths.mine_report("v1").with_suffix(".md").read_text()
    assert "Research only, imported cases." in page
    assert "None is shown: the cases are imported" in page
    assert "synthetic" not in (paths.report("v1") / "report.md").read_text()

    build.stage(params)
    text = sites.unpacked(paths.SITE)
    assert not [canary for canary in sown.CANARIES if canary in text]
    assert "nothing is shown but counts" in (paths.SITE / "answers/v1.html").read_text()
    assert not list(paths.SITE.glob("answers/data/*"))


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A folder with the sown sources and one import of them."""
    folder = tmp_path_factory.mktemp("imported")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        dataset.stage(project(sown.sources(folder / "source")), "mimic-train")
    return folder


def spoil(name: str, *changes) -> None:
    """Change the rows of an import, one change after the other, and seal the result, as somebody would by hand."""
    folder = paths.cases(name)
    task = get_task("esi")
    lines = []
    for line, change in zip((folder / paths.CASES_FILE).read_text().splitlines(), cycle(changes), strict=False):
        content = json.loads(line)
        change(content)
        with suppress(ValueError):  # what is no case any more has no id either
            case = task.Case.model_validate(content)
            content["id"] = content_id("esi", case.facts, case.key)
        lines.append(artifacts.canonical_json(content) + "\n")
    artifacts.write_text(folder / paths.CASES_FILE, "".join(lines))
    fields = artifacts.read_manifest(folder).model_dump(exclude={"files"})
    artifacts.seal(folder, **fields)


def told(text: str):
    """A change that adds to a narrative."""
    return lambda case: case["facts"].update(narrative=f"{case['facts']['narrative']} {text}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        (
            (
                told("MRN 9182736455"),
                told("a\u2060b"),
                told("ESI 2"),
                lambda case: case["key"].update(hr_bpm=3133799),
                told("seen on 4 March 2019"),
                told("call +49 30 9182736455"),
            ),
            (
                "narrative: a value breaks the rule that it holds no medical record number",
                "narrative: a value breaks the rule that it holds no control or invisible character",
                "narrative: a value breaks ExpectColumnValuesToNotMatchRegex",
                "hr_bpm: a value breaks ExpectColumnValuesToBeBetween",
                "narrative: a value breaks the rule that it holds no full date",
                "narrative: a value breaks the rule that it holds no telephone number",
            ),
        ),
        ((lambda case: case["key"].update(complaint=5),), ("key.complaint",)),
        ((lambda case: case["facts"].update(narrative=[sown.TEXT]),), ("facts.narrative",)),
    ],
)
def test_a_refusal_shows_no_value(imported, tmp_path, monkeypatch, capfd, changes, columns):
    params = project(imported / "source")
    monkeypatch.chdir(shutil.copytree(imported, tmp_path / "project"))
    spoil("mimic-train", *changes)
    with pytest.raises(DataError) as error:
        validate.stage(params, "mimic-train")
    failed = json.loads(paths.data_proof("mimic-train").with_suffix(".failed.json").read_text())
    said = str(error.value)
    assert failed["refused"] == said
    assert "dvc repro import@mimic-train" in said
    faults = failed.get("faults", [said])
    for row, (fault, column) in enumerate(zip(faults, columns, strict=True), start=1):
        assert f"row {row}" in fault
        assert f"column {column}" in fault
    assert not paths.data_proof("mimic-train").exists()
    shown = [path for path in [*Path("data/docs").rglob("*"), *Path("data/reports").rglob("*")] if path.is_file()]
    assert shown
    assert not holding(shown)
    assert "3133799" not in said
    assert not [path for path in shown if b"9182736455" in path.read_bytes() or b"3133799" in path.read_bytes()]
    output = capfd.readouterr()
    assert not [canary for canary in sown.CANARIES if canary in said + output.out + output.err]
