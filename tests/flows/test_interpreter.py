"""The Python of the stages: of an environment of its own, where one is named. Real environments and real stages."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

import clinrl
from clinrl.errors import Refused
from clinrl.runtime.dvc_state import REPRO
from flows import interpreter, steps

ROOT = Path(__file__).parents[2]
LIBRARIES = Path(pytest.__file__).parents[1]


def environment(folder: Path, *lines: str) -> Path:
    """The `python` of a new environment that reads these lines at its start: folders to import from, or code."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (packages / "lines.pth").write_text("".join(f"{line}\n" for line in lines))
    return folder / "bin/python"


@pytest.fixture(autouse=True)
def _no_other_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    """An environment with the libraries of this one, but for Prefect, that writes down how it is started."""
    note = f"import sys; open({str(tmp_path / 'started')!r}, 'a').write(' '.join(sys.orig_argv) + chr(10))"
    return environment(tmp_path / "stages", LIBRARIES, ROOT / "src", f"{note}; sys.modules['prefect'] = None")


def test_it_is_the_one_of_the_flows_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(interpreter.SETTING, raising=False)
    assert interpreter.stages_python() == sys.executable


@pytest.mark.long
def test_a_flow_runs_dvc_and_its_stages_in_an_environment_without_prefect(
    empty: Path, stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(interpreter.SETTING, os.path.relpath(stages))
    with disable_run_logger():
        steps.repro.fn("dataset", "d1")
    assert Path("data/cases/d1/manifest.json").exists()
    words = [line.split() for line in (tmp_path / "started").read_text().splitlines()]
    assert [str(stages), *REPRO] in [line[: 1 + len(REPRO)] for line in words]
    assert any(line[0] == "python" and line[-1] == "dataset@d1" for line in words), words


def test_what_is_no_python_is_refused(tmp_path: Path, stages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text/python"
    text.parent.mkdir()
    text.write_text("no program\n")
    closed = tmp_path / "closed/python"
    closed.parent.mkdir()
    closed.touch(0o644)
    text.chmod(0o755)
    for path in (tmp_path / "absent/bin/python", tmp_path, closed, text, stages.with_name("python3")):
        monkeypatch.setenv(interpreter.SETTING, str(path))
        with pytest.raises(Refused, match=r"is no `python` that can be run; name that of an environment, such as"):
            interpreter.stages_python()


def test_one_without_this_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "checkout/src/clinrl/__init__.py"
    other.parent.mkdir(parents=True)
    other.touch()
    for python, theirs in (
        (environment(tmp_path / "bare"), "no clinrl"),
        (environment(tmp_path / "other", other.parents[1]), str(other)),
    ):
        monkeypatch.setenv(interpreter.SETTING, str(python))
        with pytest.raises(Refused) as refused:
            interpreter.stages_python()
        assert str(refused.value) == (
            f"CLINRL_STAGES_PYTHON is {python}, which imports {theirs} in place of {clinrl.__file__}; install this "
            "checkout there, as `make vllm` does"
        )


@pytest.mark.long
@pytest.mark.parametrize("words", [("reproduce", "v2"), ("serve",)], ids=" ".join)
def test_a_flow_is_refused_before_anything_starts(project: Path, words: tuple[str, ...]) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {interpreter.SETTING: "absent/bin/python", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src"}
    done = subprocess.run([sys.executable, "-m", "flows", *words], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("clinrl: CLINRL_STAGES_PYTHON is absent/bin/python, which is no `python` that can")
    assert done.stderr.count("\n") == 1
    assert not Path(".clinrl/prefect").exists()
