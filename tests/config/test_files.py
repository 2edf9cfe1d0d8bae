"""params.yaml and the files beside it are one mapping; what is wrong is said with the file in which it stands."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import laid
from clinrl.artifacts import dump_yaml
from clinrl.cli import main as cli
from clinrl.config.files import merge_files, place_of, read_files, write_whole
from clinrl.config.params import Params, load_params
from clinrl.errors import ParamsError
from clinrl.provenance import dvc_yaml
from valid_params import VALID

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """The valid parameters in files, the first of which is given back."""
    laid.lay(tmp_path, VALID)
    return tmp_path / "params.yaml"


def change(path: Path, edit: Any) -> None:
    content = YAML(typ="safe").load(path)
    edit(content)
    path.write_text(dump_yaml(content), encoding="utf-8")


def test_split_and_whole_are_the_same_parameters(split: Path) -> None:
    assert load_params(split).model_dump() == Params.model_validate(VALID).model_dump()


def test_sections_merge_and_drafts_come_last(split: Path) -> None:
    drafted = {**VALID["versions"]["v3"], "file": "drafts", "profile": "again"}
    write_whole(
        split.parent / "params/drafts.yaml",
        {"versions": {"a1": drafted}, "profiles": {"again": VALID["profiles"]["grpo"]}},
    )
    assert list(load_params(split).versions) == [*VALID["versions"], "a1"]


@pytest.mark.parametrize(
    ("section", "file", "other", "name"),
    [
        ({"scale": "full"}, "params/esi.yaml", "params.yaml", "scale"),
        ({"modes": {"think": {}}}, "params/esi.yaml", "params.yaml", "modes.think"),
        ({"versions": {"v1": {"seed": 9}}}, "params/imaging.yaml", "params/esi.yaml", "versions.v1"),
        ({"merges": {"folds": {"v3-full": {}}}}, "params/imaging.yaml", "params/esi.yaml", "merges.folds.v3-full"),
        ({"versions": None}, "params/imaging.yaml", "params/esi.yaml", "versions"),
    ],
)
def test_a_key_in_two_files_is_refused_with_both(
    split: Path, section: dict[str, Any], file: str, other: str, name: str
) -> None:
    root = split.parent
    change(root / file, lambda content: content.update({**section, **{k: v for k, v in content.items() if k != name}}))
    with pytest.raises(ParamsError) as refused:
        load_params(split)
    assert str(refused.value) == f"{root / file}: {name} stands in {root / other} too; keep it in one of the two files"


@pytest.mark.parametrize(
    ("file", "edit", "sentence"),
    [
        ("params/esi.yaml", lambda c: c["versions"]["v1"].update(sed=1), "versions.v1.sed is not a key here; did you"),
        ("params/esi.yaml", lambda c: c["versions"]["v2"].update(parent="v9"), "versions.v2.parent: 'v9' is not"),
        ("params/esi.yaml", lambda c: c["versions"]["v2"].update(file="imaging"), "versions.v2.file is 'imaging'; it"),
        ("params/esi.yaml", lambda c: c["versions"]["v2"].pop("file"), "versions.v2.file is ''; it must be 'esi'"),
        ("params/imaging.yaml", lambda c: c.update(version={}), "version is not a key here; did you mean versions?"),
        ("params.yaml", lambda c: c["gates"]["esi"].update(least_cases=0), "gates.esi.least_cases is 0; it must be"),
    ],
)
def test_a_refusal_names_the_file(
    split: Path, file: str, edit: Any, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(split.parent / file, edit)
    assert cli.main(["check", "--params", str(split)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"clinrl: {split.parent / file}: {sentence}")
    assert error.count("\n") == 1


def test_a_gate_that_no_exam_is_large_enough_for_is_a_warning(split: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(split.parent / "params.yaml", lambda content: content["gates"]["esi"].update(least_cases=10**6))
    assert cli.main(["check", "--params", str(split)]) == 0
    assert "clinrl: gates.esi.least_cases is 1000000, but the exam esi-x1 has " in capsys.readouterr().err


def test_a_file_that_dvc_does_not_merge_is_refused(split: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (split.parent / "dvc.yaml").write_text("vars: [params/audit.yaml, params/drafts.yaml, params/esi.yaml]\n")
    assert cli.main(["check", "--params", str(split)]) == 2
    says = "clinrl: params/imaging.yaml is not among `vars` in dvc.yaml, so DVC does not see it; list it there\n"
    assert capsys.readouterr().err == says


def test_a_block_stands_where_dvc_looks_for_it(split: Path) -> None:
    held = YAML(typ="safe").load(split.parent / "params/esi.yaml")["profiles"]["grpo"]
    change(split.parent / "params/esi.yaml", lambda content: content["profiles"].pop("grpo"))
    write_whole(split.parent / "params/imaging.yaml", {"profiles": {"grpo": held}})
    with pytest.raises(ParamsError, match=r"profiles.grpo stands in imaging.yaml, but DVC looks for it in esi.yaml"):
        load_params(split)


@pytest.mark.parametrize(
    "section",
    [
        {"approvers": {"Mallory": "ssh-ed25519 AAAA"}},
        {"gates": {"esi": {}}},
        {"approvers": {}},
        {"plans": None},
    ],
)
def test_drafts_say_nothing_of_who_approves_and_what_a_gate_asks(split: Path, section: dict[str, Any]) -> None:
    """A branch that anybody can push brings that file into a scheduled retraining."""
    change(split, lambda content: [content.pop(name, None) for name in section])
    write_whole(split.parent / "params/drafts.yaml", section)
    with pytest.raises(ParamsError, match=f"{next(iter(section))} is no section of drafts; write it to"):
        load_params(split)


@pytest.mark.parametrize("text", ["", "- 1\n", "1\n"])
def test_a_file_that_is_no_mapping_is_refused(split: Path, text: str) -> None:
    file = split.parent / "params/imaging.yaml"
    file.write_text(text)
    with pytest.raises(ParamsError) as refused:
        load_params(split)
    assert str(refused.value).startswith(f"{file}: the file is ")


def test_the_place_of_a_key_is_not_that_of_a_longer_name() -> None:
    places = {"versions": Path("a"), "versions.v1": Path("b"), "versions.v10": Path("c")}
    assert place_of("versions.v10.seed is wrong", places, Path("d")) == Path("c")
    assert place_of("versions.v1.seed is wrong", places, Path("d")) == Path("b")
    assert place_of("versions.v1-b is wrong", places, Path("d")) == Path("a")
    assert place_of("something is wrong", places, Path("d")) == Path("d")


@pytest.mark.parametrize("text", ["it: is, {so}", "#", "- a", "", " ", "null", "1e5", "é'\"", "yes", "&a", "*a", "!x"])
def test_what_commands_write_is_read_back(tmp_path: Path, text: str) -> None:
    content = {"versions": {"v1": {"why": text, "lr": 5e-05, "seed": 1, "x": [1, text], "y": {1: None, text: True}}}}
    write_whole(tmp_path / "params.yaml", content)
    assert merge_files(read_files(tmp_path / "params.yaml"))[0] == content


def test_hidden_files_beside_are_an_editors(split: Path) -> None:
    (split.parent / "params/.#esi.yaml").symlink_to("ada@host.1:2")
    (split.parent / "params/._esi.yaml").write_bytes(b"\x00\x05\x16\x07")
    assert load_params(split).model_dump() == Params.model_validate(VALID).model_dump()
    dvc_yaml.check(split)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda text: text.replace("modes:", "modes:\n  brief: {thinking: true, temperature: 0.0, max_new_tokens: "
                                   "{embedded: 8, full: 8}}", 1), "modes must be think, with thinking, and direct"),
        (lambda text: text.replace("thinking: false", "thinking: true", 1), "modes must be think, with thinking, and"),
        (lambda text: text.replace("imports: {}", "imports:\n  ward: {task: esi, task_version: 2, use: exam, source: "
                                   "ward.csv}", 1), "import@ward reads imports.ward in params/esi.yaml, where it"),
        (lambda text: text + "\ndatasets:\n  loose: {task: esi, task_version: 2, use: exam, mix: natural, cases: 9, "
                             "seed: 1}\n", "datasets.loose stands in params.yaml, where DVC does not look for it; "
                             "move it to params/esi.yaml, with `file: esi`"),
        (lambda text: text + "\nversions:\n  loose: {task: esi, parent: esi-v43, data: esi-d4, exam: esi-x3, profile: "
                             "esi-fifth-asymmetric, seed: 1}\n", "versions.loose stands in params.yaml, where DVC"),
    ],
)  # fmt: skip
def test_what_dvc_would_not_find_or_not_track_is_refused(
    edit: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("params.yaml", "params", "dvc.yaml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    dvc_yaml.check(Path("params.yaml"))
    before = Path("params.yaml").read_text(encoding="utf-8")
    Path("params.yaml").write_text(edit(before), encoding="utf-8")
    assert Path("params.yaml").read_text(encoding="utf-8") != before
    with pytest.raises(ParamsError, match=re.escape(says)):
        dvc_yaml.check(Path("params.yaml"))
