"""Data sets on disk: bytes, identity, and what a reader says of a bad one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import laid
from clinrl import artifacts, paths
from clinrl.config.params import Params
from clinrl.data import dataset
from clinrl.errors import ArtefactError, DataError, ParamsError
from clinrl.tasks.base import get_task

ROOT = Path(__file__).parents[2]
FOLDER = paths.cases("esi-d3")
FILE = FOLDER / paths.CASES_FILE


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def params(**changes: object) -> Params:
    """The project's parameters with a data set of 40 cases."""
    source = laid.content(ROOT)
    source["datasets"]["esi-d3"].update({"cases": 40} | changes)
    return Params.model_validate(source)


def reseal(text: str) -> None:
    """Replace the file of cases and give it a fitting manifest, as a careless importer would."""
    FILE.write_text(text, encoding="utf-8")
    spec = artifacts.read_manifest(FOLDER)
    artifacts.seal(FOLDER, **spec.model_dump(exclude={"files"}))


def test_cases_survive_the_file() -> None:
    dataset.stage(params(), "esi-d3")
    task = get_task("esi")
    assert list(dataset.read_cases(FOLDER, task)) == list(task.cases(40, 7, pool="train", mix="natural", edition="v4"))


def test_the_manifest_names_what_determines_the_data() -> None:
    dataset.stage(params(), "esi-d3")
    manifest = artifacts.verified(FOLDER)
    assert (manifest.kind, manifest.name, manifest.task, manifest.task_version) == ("cases", "esi-d3", "esi", 2)
    assert manifest.spec == params().datasets["esi-d3"].model_dump(mode="json", exclude={"emphasis"})
    assert not manifest.inputs


def test_another_process_writes_the_same_bytes() -> None:
    dataset.stage(params(), "esi-d3")
    before = artifacts.identity(artifacts.read_manifest(FOLDER))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1] + '/src')\n"
        "from clinrl.config import files, params; from clinrl.data import dataset\n"
        "source, _ = files.merge_files(files.read_files(params.Path(sys.argv[1] + '/params.yaml')))\n"
        "source['datasets']['esi-d3']['cases'] = 40\n"
        "dataset.stage(params.Params.model_validate(source), 'esi-d3')"
    )
    command = [sys.executable, "-c", code, str(ROOT)]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "77"}, capture_output=True)
    assert artifacts.identity(artifacts.verified(FOLDER)) == before


def test_lines_are_canonical() -> None:
    dataset.stage(params(), "esi-d3")
    for line in FILE.read_text(encoding="utf-8").splitlines():
        assert line == artifacts.canonical_json(json.loads(line))


def test_no_terminal_no_output(capfd: pytest.CaptureFixture[str]) -> None:
    dataset.stage(params(), "esi-d3")
    assert capfd.readouterr() == ("", "")


def test_another_task_version_is_refused_and_nothing_written() -> None:
    with pytest.raises(ParamsError, match=r"datasets.esi-d3.task_version is 9, but the task esi is at 2: set it to 2"):
        dataset.stage(params(task_version=9), "esi-d3")
    assert not FOLDER.exists()


def test_a_failed_rebuild_leaves_the_old_data() -> None:
    dataset.stage(params(), "esi-d3")
    with pytest.raises(ParamsError):
        dataset.stage(params(task_version=9), "esi-d3")
    artifacts.verified(FOLDER)
    assert not list(FOLDER.parent.glob(".*"))


def test_missing_data_is_named() -> None:
    with pytest.raises(
        ArtefactError, match=r"no manifest\.json; run `dvc repro dataset@esi-d3`, or `dvc repro import@"
    ):
        dataset.read_cases(FOLDER, get_task("esi"))
    with pytest.raises(ArtefactError, match=r"no manifest\.json; run `dvc repro base@esi`, which makes it"):
        artifacts.read_manifest(paths.base("esi"))
    dataset.stage(params(), "esi-d3")
    FILE.unlink()
    with pytest.raises(ArtefactError, match=r"cases.jsonl is missing.*dvc repro dataset@esi-d3"):
        dataset.read_cases(FOLDER, get_task("esi"))


def test_a_truncated_file_is_refused_before_a_case_is_used() -> None:
    dataset.stage(params(), "esi-d3")
    FILE.write_bytes(FILE.read_bytes()[:-100])
    with pytest.raises(ArtefactError, match=r"cases.jsonl was altered after it was built \(.*row 40 is cut short"):
        dataset.read_cases(FOLDER, get_task("esi"))


def test_an_edited_file_is_refused_even_if_every_row_parses() -> None:
    dataset.stage(params(), "esi-d3")
    FILE.write_text("".join(FILE.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")
    with pytest.raises(ArtefactError, match=r"cases.jsonl was altered after it was built; rebuild with"):
        dataset.read_cases(FOLDER, get_task("esi"))


def test_a_bad_row_is_named_with_its_column_and_value() -> None:
    dataset.stage(params(), "esi-d3")
    lines = FILE.read_text(encoding="utf-8").splitlines()
    case = json.loads(lines[16])
    case["facts"]["narrative"] = 5
    lines[16] = json.dumps(case)
    reseal("\n".join(lines) + "\n")
    rows = dataset.read_cases(FOLDER, get_task("esi"))
    with pytest.raises(
        DataError,
        match=r"^data/cases/esi-d3/cases.jsonl row 17, column facts.narrative: .*string, got 5; "
        r"rebuild with `dvc repro dataset@esi-d3`$",
    ):
        list(rows)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"row 41, column \(the whole line\): Invalid JSON"),
        ("[]", r"row 41, column \(the whole line\): "),
        ("\udcff", r"row 41, column \(the whole line\): Invalid JSON"),
        ("", r"row 41, column \(the whole line\): Invalid JSON"),
        ("x" * (dataset.LONGEST_LINE + 5), "row 41 is longer than 1,048,576 bytes"),
    ],
)
def test_a_line_that_is_no_case_is_one_sentence(line: str, message: str) -> None:
    dataset.stage(params(), "esi-d3")
    with FILE.open("a", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(line + "\n")
    with pytest.raises(DataError, match=message) as error:
        list(dataset.read_rows(FILE, get_task("esi")))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_data_of_another_task_version_is_not_read() -> None:
    dataset.stage(params(), "esi-d3")
    fields = artifacts.read_manifest(FOLDER).model_dump(exclude={"files"})
    artifacts.seal(FOLDER, **fields | {"task_version": 0})
    with pytest.raises(ArtefactError, match="was built by version 0 of the task esi, which is now at 2"):
        dataset.read_cases(FOLDER, get_task("esi"))
