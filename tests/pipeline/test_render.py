"""Pages and figures follow from the reports' JSON alone, byte for byte as they are committed."""

import shutil
from pathlib import Path

import pytest

from clinrl import paths
from clinrl.artifacts import md5
from clinrl.config.params import load_params
from clinrl.errors import ArtefactError, ParamsError
from clinrl.pipeline import render
from clinrl.provenance import lock
from clinrl.reports import figures

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "dvc.lock"
STUDIES = {"judges.md"}
"""Written by `tests/bench` alone."""


@pytest.fixture
def params(tmp_path, monkeypatch):
    """The parameters of this repository, in a folder that holds its reports and nothing else."""
    params = load_params(ROOT / "params.yaml")
    shutil.copytree(ROOT / "data/reports", tmp_path / "data/reports")
    monkeypatch.chdir(tmp_path)
    return params


def emptied(suffix: str) -> dict[Path, bytes]:
    """Empty all files of a suffix, so that only what is written again can be equal; what they held, by path."""
    found = {path: path.read_bytes() for path in Path("data/reports").rglob(f"*{suffix}") if path.name not in STUDIES}
    for path in found:
        path.write_bytes(b"")
    return found


@pytest.mark.long
def test_every_committed_page_is_written_again_from_json_byte_for_byte(params, monkeypatch, capsys):
    for drawing in ("confusion", "curves", "groups", "arms"):
        monkeypatch.setattr(figures, drawing, lambda *arguments, **options: None)
    held = emptied(".md")
    assert len(held) > 50
    render.stage(params, [])
    assert {path for path, text in held.items() if path.read_bytes() != text} == set()
    assert set(capsys.readouterr().out.split()) == set(map(str, held))
    render.stage(params, [])
    assert capsys.readouterr().out == "", "what did not change is not listed"


@pytest.mark.long
@pytest.mark.usefixtures("real")
@pytest.mark.parametrize("names", [["esi-v43"], pytest.param([], marks=pytest.mark.slow)])
def test_every_figure_is_drawn_again_as_dvc_lock_has_it(params, names):
    """A clone holds none: figures are in DVC's cache, and this draws them without it."""
    emptied(".png")
    render.stage(params, names)
    held = {Path(path): digest for path, digest in lock.outputs(lock.read(LOCK)).items() if path.endswith(".png")}
    drawn = {path: digest for path, digest in held.items() if not names or set(names) & {path.parent.name, path.stem}}
    assert {path for path, digest in drawn.items() if md5(path) != digest} == set()
    assert len(drawn) >= 4


def test_a_figure_whose_numbers_are_not_here_stays(params, capsys):
    folder = Path("data/reports/esi-v43")
    before = b"as it was"
    (folder / "curves.png").write_bytes(before)
    (folder / "history.csv").unlink()
    render.stage(params, ["esi-v43"])
    assert (folder / "curves.png").read_bytes() == before
    assert "data/reports/esi-v43/history.csv is not here" in capsys.readouterr().err


def test_a_name_without_a_report_is_refused(params):
    with pytest.raises(ParamsError, match=r"'esi-v94' has no report.*did you mean esi-v4"):
        render.stage(params, ["esi-v94"])


@pytest.mark.parametrize("edit", [lambda text: text[:1000], lambda text: text.replace(b'"exam"', b'"exams"')])
def test_a_report_that_was_cut_short_or_edited_is_named_with_what_brings_it_back(params, edit):
    path = Path("data/reports/esi-v43/think.json")
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(ArtefactError, match=r"esi-v43/think\.json is no report; restore it with `git checkout data"):
        render.stage(params, ["esi-v43"])


def test_a_report_of_a_simulation_in_conflict_is_named(params):
    path = paths.retraining_report("esi")
    path.write_bytes(b"<<<<<<< HEAD\n" + path.read_bytes())
    with pytest.raises(ArtefactError, match=r"retraining/esi\.json is no report; restore it with `git checkout data"):
        render.write_retraining(path)
