"""The wheel that ships models: what it is built of, equal bytes, and an answer from nothing but what it installs."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from uv import find_uv_bin

import tried
from clinrl import paths
from clinrl.artifacts import write_text
from clinrl.config.comparisons import Rival
from clinrl.config.params import load_params
from clinrl.pipeline import wheel

ROOT = Path(__file__).parents[2]
PIPELINE = [
    *("asyncssh", "datasets", "dvc", "great_expectations", "lightgbm", "matplotlib", "mlflow", "sklearn"),
    *("starlette", "trl", "uvicorn"),
]
"""What neither the wheel nor what it asks for brings."""
AUTHOR = ["-c", "user.name=A", "-c", "user.email=a@example.org"]


def git(*words: str) -> None:
    subprocess.run(["git", *AUTHOR, *words], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A commit of a small project; its adapter is beside it, as DVC would have put it there."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    shutil.copytree(tried.built(), tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    write_text(Path(".gitignore"), "/data/*\n!/data/bases/\n!/data/reports/\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "a project")
    return Path.cwd()


def test_it_is_built_of_what_is_committed_and_recorded(project, capsys):
    weights = paths.adapter("v1") / "adapter_model.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert wheel.main(["v1"]) == 1
    assert "data/adapters/v1 is not what dvc.lock records of train@v1" in capsys.readouterr().err
    shutil.rmtree(paths.adapter("v1"))
    assert wheel.main(["v1"]) == 1
    assert "build it with `dvc repro train@v1`" in capsys.readouterr().err
    write_text(project / "params.yaml", "scale: full\n")
    assert wheel.main(["v1"]) == 1
    assert "tracked files are not as they were committed" in capsys.readouterr().err
    assert not Path("dist").exists()


def test_what_learned_from_somebodys_records_is_not_shipped(project, capsys, monkeypatch):
    given = load_params()
    imported = given.model_copy(update={"imports": dict.fromkeys([given.versions["v1"].data])})
    monkeypatch.setattr(wheel, "load_params", lambda: imported)
    assert wheel.main(["v1"]) == 1
    assert "v1 learned from somebody's records" in capsys.readouterr().err
    assert not Path("dist").exists()


def test_a_rivals_answers_to_imported_cases_are_not_shipped(project, monkeypatch):
    given = load_params().model_copy(update={"rivals": {"trees": Rival(task="esi", data=("d1",), exam="x1")}})
    drawn = {name: spec for name, spec in given.datasets.items() if name != "x1"}
    imported = given.model_copy(update={"datasets": drawn, "imports": {"x1": given.datasets["x1"]}})
    found = []
    for params in (given, imported):
        taken: list[str] = []
        monkeypatch.setattr(wheel, "load_params", lambda params=params: params)
        monkeypatch.setattr(wheel, "_extract", lambda names, _, taken=taken: taken.extend(names))
        with pytest.raises(subprocess.CalledProcessError):  # of nothing pip builds nothing
            wheel.build(["v1"], project / "dist")
        found.append(str(paths.exam_record("esi", "trees")) in taken)
    assert found == [True, False]


def test_modes_are_gits_whatever_the_umask_and_the_settings(project, tmp_path):
    git("config", "tar.umask", "user")
    old = os.umask(0o077)
    try:
        wheel._extract(["params.yaml"], tmp_path / "a/b")
    finally:
        os.umask(old)
    assert (tmp_path / "a/b/params.yaml").stat().st_mode & 0o777 == 0o644


@pytest.mark.slow
def test_a_second_build_has_equal_bytes_and_answers_where_nothing_else_is(project, tmp_path, capsys, monkeypatch):
    listed = subprocess.run(["git", "ls-files", "-z", *wheel.CODE], cwd=ROOT, capture_output=True, check=True).stdout
    for file in listed.decode().rstrip("\0").split("\0"):
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, project / file)
    git("add", ".")
    git("commit", "--quiet", "--message", "its code")
    assert wheel.main(["v1", "--out", str(tmp_path / "first")]) == 0
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    old = os.umask(0o077)
    try:
        assert wheel.main(["v1", "--out", str(tmp_path / "second")]) == 0
    finally:
        os.umask(old)
    (first,), (second,) = ([*(tmp_path / name).iterdir()] for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        held = {name.removeprefix("clinrl/shipped/") for name in archive.namelist() if "/shipped/" in name}
    assert {f"data/reports/v1/{mode}.json" for mode in ("think", "direct")} < held
    assert not [name for name in held if name.endswith((".bin", ".pt", ".pkl"))]
    assert not [name for name in held if "esi-base" in name or "graded" in name or "cases" in name]

    site = tmp_path / "site"
    subprocess.run([find_uv_bin(), "pip", "install", "--quiet", "--no-deps", f"--target={site}", first], check=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    blocked = f"import sys; sys.modules.update(dict.fromkeys({PIPELINE}))\n"
    begin = "from clinrl.cli.main import main; sys.exit(main(['try', '--json']))"
    done = subprocess.run(
        [sys.executable, "-c", blocked + begin], cwd=empty, env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert json.loads(done.stdout)["version"] == "v1"
    assert not [*empty.iterdir()]
