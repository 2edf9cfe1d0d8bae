"""No pickle is read by a stage, a registration, a promotion or a server, and one that were read would be found."""

import inspect
import os
import pickle
import runpy
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from clinrl.cli.main import main
from clinrl.runtime import dvc_state
from forks import fork
from processes import free_port
from unpickled import HEARING, listening, strangers

ROOT = Path(__file__).parents[2]
PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}
"""What a pickled path names, in one version of Python or another."""
MODE_PICKLE = 4
"""How diskcache marks a value that it shall unpickle."""


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which processes that are started from now on write down what they unpickle."""
    log = tmp_path / "unpickled"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]))
    monkeypatch.setenv(dvc_state.VARIABLE, str(tmp_path / "site"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name, value in listening(log).items():
        monkeypatch.setenv(name, value)
    return log


def python(*words: str) -> None:
    """Run Python to its end."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_repro_reads_no_pickle_and_a_planted_one_is_heard(empty: Path, heard: Path, tmp_path: Path) -> None:
    repro = ["repro", "dataset@d1"]  # twice: then there is nothing to do, and DVC asks what it remembers
    python("-c", f"from dvc.cli import main; assert [main({repro}), main({repro})] == [0, 0]")
    assert strangers(heard) == set()

    # DVC reads digests as text, and pickles of numbers for the links that it made, which `dvc checkout` looks at.
    (store,) = (tmp_path / "site").rglob("links/cache.db")
    with closing(sqlite3.connect(store)) as database, database:
        planted = ("params.yaml", MODE_PICKLE, pickle.dumps(Path("anything")))  # a file that is there, and no output
        one = "SELECT min(rowid) FROM Cache"
        database.execute(f"UPDATE Cache SET key = ?, mode = ?, value = ? WHERE rowid = ({one})", planted)
    subprocess.run([sys.executable, "-m", "dvc", "checkout"], capture_output=True, check=False)
    assert strangers(heard) & PATHS


@pytest.mark.slow
def test_a_whole_repro_reads_no_pickle(empty: Path, heard: Path) -> None:
    python("-m", "dvc", "repro", "evaluate@v2")
    assert strangers(heard) == set()


def register_and_promote() -> None:
    """Make v2 the champion, by the commands."""
    assert [main(["register", "v2"]), main(["promote", "v2", "--approver", "Ada Lovelace"])] == [0, 0]


def fork_and_hear(does: Callable[[], object]) -> int | None:
    """The exit code of a fork of this process that writes down what it unpickles."""

    def listen_and_do() -> None:
        runpy.run_path(str(HEARING / "sitecustomize.py"))
        does()

    return fork(listen_and_do).code


def test_a_registration_and_a_promotion_read_no_pickle(project: Path, heard: Path) -> None:
    assert fork_and_hear(register_and_promote) == 0
    assert strangers(heard) == set()
    assert fork_and_hear(lambda: pickle.loads(pickle.dumps(Path("anything")))) == 0  # noqa: S301
    assert strangers(heard) & PATHS


@pytest.mark.slow
def test_a_registration_and_a_promotion_read_no_pickle_when_they_are_imported(project: Path, heard: Path) -> None:
    python("-c", f"{inspect.getsource(register_and_promote)}\nfrom clinrl.cli.main import main; register_and_promote()")
    assert strangers(heard) == set()


@pytest.mark.slow
def test_servers_of_flows_read_no_pickle(project: Path, heard: Path) -> None:
    ports = [str(free_port()) for _ in range(2)]
    words = ["-m", "flows", "serve", "--servers", "--prefect-port", ports[0], "--mlflow-port", ports[1]]
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""
        while "serving the flows" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert strangers(heard) == set()
    assert heard.read_text().count("listening\n") >= 3, "a server does not listen"


@pytest.mark.slow
def test_a_flow_reads_no_pickle(project: Path, heard: Path) -> None:
    python("-m", "flows", "release", "v2", "--approver", "Ada Lovelace")
    assert strangers(heard) == set()
