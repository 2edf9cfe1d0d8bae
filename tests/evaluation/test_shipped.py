"""`clinrl try`: a drawn case, answered by a small model with a real adapter, in a checkout and as a wheel lays it."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import tried
from clinrl import paths
from clinrl.artifacts import identity, read_manifest
from clinrl.cli import main as cli
from clinrl.config.params import load_params
from clinrl.evaluation import shipped
from clinrl.evaluation.answers import load_report
from clinrl.tasks.base import get_task


@pytest.fixture
def project(tmp_path, monkeypatch):
    shutil.copytree(tried.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(capsys, *words):
    """What `clinrl try` printed as JSON."""
    assert cli.main(["try", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.long
def test_the_case_follows_from_the_seed_and_is_of_no_exam_and_no_training(project, capsys):
    task, found = get_task("esi"), asked(capsys, "--seed", "3")
    (case,) = task.cases(1, 3, pool="mine", mix="natural")
    assert task.pool_of(case.group) == "mine"
    assert {one["case_id"] for one in found["modes"].values()} == {case.id}
    assert (found["right"], found["rule"]) == (task.label(case), case.key.rule)
    assert found == asked(capsys, "v1", "--seed", "3")

    assert (found["version"], found["adapter"]) == ("v1", identity(read_manifest(paths.adapter("v1"))))
    thought, direct = found["modes"]["think"], found["modes"]["direct"]
    assert (thought["mode"], direct["mode"]) == ("think", "direct")
    assert thought["messages"][0]["thinking"] is not None
    assert direct["messages"][0]["thinking"] is None
    assert sum(thought["score"]["terms"].values()) == pytest.approx(thought["score"]["total"])
    rows = [row for row in found["rows"] if row["mode"] == "think"]
    assert [row["answered by"] for row in rows] == ["v1", "esi-base", "always 3"]
    assert rows[0]["exact"].startswith("100.0% [")
    assert {row["n"] for row in rows} == {10}


@pytest.mark.long
def test_text_has_the_case_once(project, capsys):
    assert cli.main(["try"]) == 0
    plain, err = capsys.readouterr()
    assert err == ""
    assert plain.startswith("v1 on a case drawn with seed 1, mode think: case esi-")
    assert (plain.count("\nRequest\n"), plain.count("\nDecided\n")) == (1, 2)
    assert "\nRight is " in plain
    assert "Research only, synthetic data." in plain
    assert "\nthink\tv1\t10\t100.0% [" in plain


def test_what_came_with_the_installation_answers_before_the_folder(project, tmp_path_factory, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path_factory.mktemp("anywhere"))
    assert cli.main(["try"]) == 1
    assert "no models are here; install the wheel that `make wheel` writes" in capsys.readouterr().err
    monkeypatch.setattr(shipped, "FOLDER", project)
    assert asked(capsys)["version"] == "v1"
    assert not [*Path().iterdir()]


@pytest.mark.parametrize("folder", [paths.adapter("v1"), paths.base("esi")], ids=str)
def test_altered_weights_are_refused(folder, project, capsys):
    (weights,) = folder.glob("*.safetensors")
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert cli.main(["try"]) == 1
    assert f"{weights} was altered after it was built" in capsys.readouterr().err


def test_a_name_that_is_not_here_is_refused(project, capsys):
    assert cli.main(["try", "v2"]) == 1
    said = capsys.readouterr().err
    assert said == "clinrl: no trained version of v2 is here; name one of v1, or run `dvc repro evaluate@v2`\n"
    assert cli.main(["try", "v11"]) == 2
    assert "'v11' is neither a version nor a task; did you mean v1?" in capsys.readouterr().err
    shutil.rmtree(paths.adapter("v1"))
    assert cli.main(["try", "esi"]) == 1
    assert "no trained version of esi is here; run `dvc repro evaluate@v1`\n" in capsys.readouterr().err


def test_of_a_task_the_last_version_that_is_here_is_asked(project, capsys):
    shutil.copytree(paths.adapter("v1"), paths.adapter("v2"))
    assert cli.main(["try", "esi"]) == 1
    assert "v2" in capsys.readouterr().err  # whose adapter this is not


def test_a_rival_that_was_not_built_here_has_no_row(project):
    params = load_params()
    model = params.model("v1")
    absent = {"trees": SimpleNamespace(exam=model.exam, task="esi")}
    assert shipped._rivals(params.model_copy(update={"rivals": absent}), model, load_report("v1", "think")) == {}
