"""Replication: seeds moved and nothing else, what is finished found again, and the page on what was found."""

import copy
import json
import os
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import dolls
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, write_json
from clinrl.config.files import merge_files, read_files
from clinrl.config.params import load_params
from clinrl.data import dataset
from clinrl.errors import ArtefactError, ParamsError, TrainingError
from clinrl.evaluation import answers
from clinrl.intervals import paired, wilson
from clinrl.pipeline import replicate

PARAMS_FILE = Path(__file__).parents[2] / "params.yaml"
LINEAGE = ("v1", "v2")


def test_moving_the_seeds_of_a_lineage_moves_nothing_else(tmp_path):
    params = load_params(PARAMS_FILE)
    lineage = params.lineage(list(params.versions)[-1])

    text = replicate.shift_seeds(PARAMS_FILE, lineage, 1000)

    before, after = merge_files(read_files(PARAMS_FILE))[0], YAML(typ="safe").load(text)
    for name in lineage:
        assert after["versions"][name].pop("seed") == before["versions"][name].pop("seed") + 1000
    assert after == before
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    assert load_params(tmp_path / "params.yaml").lineage(lineage[-1]) == lineage


def result(agreement):
    """A replication of one version over two seeds, in one mode, as `stage` writes it."""
    runs = []
    for seed, hits in ((7, 3), (1007, 4)):
        test = paired("exact", "root", [True] * hits + [False] * (8 - hits), [False] * 8)
        share = wilson(hits, 8).model_dump(mode="json")
        runs.append(
            {
                "seeds": {"v1": seed},
                "metrics": {"v1": {"think": {"exact": share, "critical_under": wilson(0, 8).model_dump(mode="json")}}},
                "mode_agreement": {"v1": agreement},
                "tests": [{"version": "v1", "mode": "think", **test.model_dump(mode="json")}],
            }
        )
    return {
        "version": "v1",
        "lineage": ["v1"],
        "modes": ["think"],
        "exam": "x1",
        "note": "Research only.",
        "runs": runs,
    }


def test_the_page_has_a_row_for_each_seed_and_each_test():
    page = replicate.page(result(wilson(8, 8).model_dump(mode="json")))

    assert page.startswith("# v1 with 2 seeds\n\nResearch only. Not for clinical use.\n\n- Exam x1, n = 8. ")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert rows[0] == "| seed | version | think exact | think critical_under | mode agreement |"
    assert rows[2].startswith("| 7 | v1 | 0.375 [0.137, 0.694] | 0.000 [0.000, 0.324] | 1.000 [")
    assert rows[3].startswith("| 1007 | v1 | 0.500 [")
    assert rows[6].startswith("| 7 | v1 | root | think | exact | 3 | 0 | 0.375 [")
    assert rows[7].endswith("| 0.12 |")
    assert len({line.count("|") for line in rows[:4]}) == len({line.count("|") for line in rows[4:]}) == 1


def test_a_single_mode_agrees_with_nothing():
    assert "| 0.000 [0.000, 0.324] | - |" in replicate.page(result(None))


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    """A doll's project whose base and lineage sat the exam with answers made up here; nothing was trained."""
    root = tmp_path_factory.mktemp("examined")
    with chdir(root):
        YAML(typ="safe").dump(dolls.PARAMS, Path("params.yaml"))
        for data in ("d1", "x1"):
            dataset.stage(dolls.params(), data)
        dolls.examine(dolls.params(), "esi-base", [1])
        dolls.examine(dolls.params(), "v1", [1, 2])
        dolls.examine(dolls.params(), "v2", [1, 2, 3])
    return root


@pytest.fixture
def project(examined, tmp_path, monkeypatch):
    """A copy of that project, entered."""
    shutil.copytree(examined, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return dolls.params()


def test_finished_replicates_are_found_and_reported(project):
    folder = replicate.prepare(project, LINEAGE, 1, Path("params.yaml"))
    with chdir(folder):
        dolls.examine(dolls.params(), "v1", [5])
        dolls.examine(dolls.params(), "v2", [4, 3])

    replicate.stage(project, "v2", seeds=2)

    moved = load_params(folder / "params.yaml")
    assert {name: moved.versions[name].seed for name in moved.versions} == {"v1": 1001, "v2": 1002, "v3": 3}
    assert (folder / paths.cases("x1")).resolve() == paths.cases("x1").resolve()
    report = paths.seeds_report("v2")
    written = json.loads(report.read_text())
    own, other = written["runs"]
    assert written["lineage"] == ["v1", "v2"]
    assert (own["seeds"], other["seeds"]) == ({"v1": 1, "v2": 2}, {"v1": 1001, "v2": 1002})
    for run, where in ((own, Path()), (other, folder)):
        with chdir(where):
            exact = answers.load_report("v2", "think").metrics["exact"]
        assert run["metrics"]["v2"]["think"]["exact"] == exact.model_dump(mode="json")
        tests = [(test["version"], test["other"], test["metric"]) for test in run["tests"] if test["mode"] == "think"]
        assert tests == [("v2", "v1", "exact"), ("v2", "v1", "critical_under")]
    assert own["metrics"] != other["metrics"]
    page = report.with_suffix(".md").read_text()
    assert page == replicate.page(written)

    first = report.read_bytes()
    replicate.stage(project, "v2", seeds=2)
    assert report.read_bytes() == first


def test_another_recipe_has_another_folder_and_another_reason_the_same(project):
    folder = replicate.prepare(project, LINEAGE, 1, Path("params.yaml"))
    profiles = copy.deepcopy(dolls.PARAMS["profiles"])
    profiles["imitate"]["trainer"]["embedded"]["steps"] = 11
    versions = copy.deepcopy(dolls.PARAMS["versions"])
    versions["v1"]["why"] = "another reason"
    safer = copy.deepcopy(dolls.PARAMS["profiles"])
    safer["imitate"]["trainer"]["embedded"]["checkpoint_every"] = 1

    assert replicate.prepare(dolls.params(profiles=safer), LINEAGE, 1, Path("params.yaml")) == folder
    assert replicate.prepare(dolls.params(profiles=profiles), LINEAGE, 1, Path("params.yaml")) != folder
    assert replicate.prepare(dolls.params(versions=versions), LINEAGE, 1, Path("params.yaml")) == folder
    assert replicate.prepare(project, LINEAGE, 2, Path("params.yaml")) != folder


def test_what_cannot_be_replicated_is_refused_before_anything_is_built(project):
    with pytest.raises(ParamsError, match="needs at least 2"):
        replicate.stage(project, "v2", seeds=1)
    with pytest.raises(ParamsError, match="v9"):
        replicate.stage(project, "v9", seeds=2)
    with pytest.raises(ArtefactError, match="dvc repro evaluate@v3"):
        replicate.stage(project, "v3", seeds=2)
    assert not Path(".clinrl/replicates").exists()


def test_a_stage_that_fails_is_named_with_its_replicate(project):
    with pytest.raises(TrainingError, match=r"replicate 1: `clinrl probe v1` in .* ended with code 1"):
        replicate.stage(project, "v2", seeds=2)


@pytest.mark.slow
def test_a_doll_is_trained_again_from_the_command_line(project):
    folder = dolls.built()
    for name in ("data/bases", "data/adapters", "data/reports/data", "data/cases/d1"):
        shutil.copytree(folder / name, name, dirs_exist_ok=True)
    named = {"data": {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}}
    write_json(paths.data_proof("x1"), named)
    command = [sys.executable, "-m", "clinrl", "replicate", "v1", "--seeds", "2"]

    done = subprocess.run(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    own, other = json.loads(paths.seeds_report("v1").read_text())["runs"]
    assert (own["seeds"], other["seeds"]) == ({"v1": 1}, {"v1": 1001})
    assert other["metrics"]["v1"]["direct"]["exact"]["n"] == 10
    (trained,) = Path(".clinrl/replicates").iterdir()
    assert read_manifest(trained / paths.adapter("v1")).spec["seed"] == 1001
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "replicate 1: train" not in again.stderr
