"""A resit: a version takes an exam besides its own, and what it answered there is kept beside its graded answers."""

import shutil

import pytest

import dolls
from clinrl import paths
from clinrl.artifacts import identity, md5, read_manifest, write_json
from clinrl.data import dataset
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation import evaluate, notebook, resit

DATASETS = {**dolls.PARAMS["datasets"], "x2": dolls.PARAMS["datasets"]["x1"] | {"cases": 3, "seed": 12}}


def params(**resits):
    return dolls.params(resits=resits, datasets=DATASETS)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The doll with a version v1, whose adapter is the base's own, and a second validated exam."""
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(paths.adapter("esi-base"), paths.adapter("v1"))
    found = params(v1={"task": "esi", "data": "x2"})
    dataset.stage(found, "x2")
    write_json(paths.data_proof("x2"), {"data": {"name": "x2", "identity": identity(read_manifest(paths.cases("x2")))}})
    return found


def test_a_real_model_takes_a_fresh_exam_twice_to_the_same_bytes(project):
    resit.stage(project, "v1")
    folder, before = paths.resit("v1"), md5(paths.resit("v1"))
    assert not paths.graded("v1").exists(), "its own exam is left alone"
    inputs = read_manifest(folder).inputs
    assert inputs["adapter"] == identity(read_manifest(paths.adapter("v1")))
    assert inputs["exam"] == identity(read_manifest(paths.cases("x2")))
    shutil.rmtree(folder)
    resit.stage(project, "v1")
    assert md5(folder) == before


def test_a_version_without_a_resit_and_data_that_is_no_exam_are_refused(project):
    with pytest.raises(ParamsError, match=r"params\.yaml has no resit of 'v2'; allowed: v1"):
        resit.stage(project, "v2")
    shutil.rmtree(paths.cases("x2"))
    shutil.copytree(paths.cases("d1"), paths.cases("x2"))
    with pytest.raises(ArtefactError, match="is drawn from the train pool; a resit is of exam data"):
        resit.stage(project, "v1")


def test_two_models_are_compared_on_the_exam_that_both_took(project):
    dataset.stage(project, "x1")
    write_json(paths.data_proof("x1"), {"data": {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}})
    versions = dolls.PARAMS["versions"] | {"v2": dolls.PARAMS["versions"]["v2"] | {"exam": "x2"}}
    fresh = dolls.params(resits=project.model_dump(mode="json")["resits"], datasets=DATASETS, versions=versions)
    for name, exam, folder, pattern in (
        ("v1", "x1", paths.graded("v1"), [0]),
        ("v1", "x2", paths.resit("v1"), [0]),
        ("v2", "x2", paths.graded("v2"), [1, 5]),
    ):
        run = dolls.answered(fresh, name, exam, pattern)
        evaluate.keep(folder, run, {"exam": run.exam_digest, "adapter": run.adapter_digest})
    there, back = (notebook.compare(fresh, *names)["think"][0].difference for names in (("v1", "v2"), ("v2", "v1")))
    assert (there.n, there.value) == (3, -back.value)
    shutil.rmtree(paths.graded("v1"))
    assert notebook.compare(fresh, "v1", "v2")["think"][0].difference == there, "the resit alone is compared"
    with pytest.raises(ParamsError, match="v1 took x1, v2 x2: no exam is common"):
        notebook.compare(dolls.params(datasets=DATASETS, versions=versions), "v1", "v2")
