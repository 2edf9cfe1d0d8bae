"""The tracking server: what is sent to it, and the sentence for each way in which it does not answer."""

import multiprocessing
import os
import signal
import socket
import sqlite3
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.errors import RegistryError
from clinrl.tracking import mlflow_store
from clinrl.tracking.mlflow_store import connect, exam_metrics, flat, points, store
from clinrl.types import Estimate, Manifest

LEAVES = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())
NAMES = st.text("abc_1", min_size=1)


@pytest.mark.long
@given(st.dictionaries(NAMES, st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner), max_leaves=12)))
def test_a_recipe_is_flattened_to_text_and_nothing_is_lost(spec):
    def leaves(value):
        return sum(map(leaves, value.values())) if isinstance(value, dict) and value else 1

    flattened = flat(spec)

    assert all(isinstance(value, str) for value in flattened.values())
    assert len(flattened) == sum(map(leaves, spec.values()))


def test_a_recipe_s_parameters_read_as_they_are_written():
    assert flat({"lr": 5e-4, "lora": {"rank": 4}, "omit": {}, "targets": ["a"], "kind": "sft", "none": None}) == {
        "lr": "0.0005", "lora.rank": "4", "omit": "{}", "targets": '["a"]', "kind": "sft", "none": "null",
    }  # fmt: skip


def test_a_history_is_taken_apart_and_what_could_not_be_computed_is_left_out():
    assert points([{"step": 1, "loss": 0.5, "kl": None}, {"step": 2, "loss": 1, "note": "text"}]) == [
        ("loss", 1, 0.5),
        ("loss", 2, 1.0),
    ]


def test_the_agreement_of_modes_is_a_metric_like_the_others():
    agreement = Estimate(value=0.9, low=0.8, high=0.95, n=40)
    assert exam_metrics([], agreement) == {
        "mode_agreement": 0.9, "mode_agreement.low": 0.8, "mode_agreement.high": 0.95, "mode_agreement.n": 40.0,
    }  # fmt: skip
    assert exam_metrics([], None) == {}


def test_the_key_of_a_run_follows_from_everything_that_determined_it():
    manifest = Manifest(
        kind="adapter", name="v1", task="esi", task_version=2, spec={"seed": 1}, inputs={"data": "d"}, files={}
    )
    other = [{"spec": {"seed": 2}}, {"inputs": {"data": "e"}}, {"task_version": 3}]
    keys = {mlflow_store.run_key(manifest.model_copy(update=change)) for change in [{}, *other]}
    assert len(keys) == 4
    assert all(key.startswith("v1-") for key in keys)


def test_the_store_is_the_project_s_own_unless_the_environment_names_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert store() == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
    assert store() == f"sqlite:///{tmp_path}/other.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert store() == "http://127.0.0.1:5000"


@pytest.mark.parametrize("name", ["feature%2Fone", "a?b", "ü #1, 100%"])
def test_a_folder_by_whose_name_another_file_would_be_opened_is_refused(tmp_path, monkeypatch, name):
    """Two projects, `a b` and `a%20b`, would share a champion."""
    from sqlalchemy.engine import make_url

    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if name.endswith("%"):
        assert make_url(store()).database == str(Path("mlruns/mlflow.db").absolute())
    else:
        with pytest.raises(RegistryError, match=r"has a . or a % in its name, and MLflow would open another file"):
            store()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db?timeout=30")
        with pytest.raises(RegistryError, match=r"leave out options such as \?timeout=30"):
            store()


@pytest.mark.parametrize("uri", ["mlruns", "./mlruns", "file:///tmp/mlruns"])
def test_a_folder_of_files_is_no_store(monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(RegistryError, match="a folder, in which MLflow no longer keeps a registry; set it to a server"):
        store()


@pytest.mark.parametrize("uri", ["http://[", "http://user:secret", "http://user:secret@host:99999"])
def test_what_is_no_address_is_refused_without_its_password(monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(RegistryError, match="is no address; set it to a server") as refused:
        store()
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("uri", "driver"), [("postgresql", "psycopg2"), ("mysql", "MySQLdb"), ("mssql", "pyodbc")])
def test_a_missing_driver_is_named_and_no_password(monkeypatch, uri, driver):
    if find_spec(driver) is not None:
        pytest.skip(f"{driver} is installed here")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{uri}://user:secret@127.0.0.1:1/runs")
    with pytest.raises(
        RegistryError, match=f"{uri}://127.0.0.1:1 needs the driver {driver}.*, which is not"
    ) as refused:
        ask()
    assert "secret" not in str(refused.value)


def test_another_registry_of_the_environment_is_left_alone(tmp_path, monkeypatch):
    """MLflow would keep versions and aliases there, and runs here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///here.db")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "sqlite:///there.db")
    with connect() as client:
        client.create_registered_model("esi")
        assert [model.name for model in client.search_registered_models()] == ["esi"]
    assert sorted(file.name for file in tmp_path.glob("*.db")) == ["here.db"]


def test_a_database_that_is_away_is_said_at_once(monkeypatch):
    """MLflow asks it ten times, which takes 102 s, and says nothing of that."""
    pytest.importorskip("psycopg2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:secret@127.0.0.1:1/db")
    monkeypatch.setattr("mlflow.store.db.utils.time.sleep", lambda _: pytest.fail("asked again"))
    with pytest.raises(RegistryError, match=r"127.0.0.1:1 refused: .*Connection refused") as refused, connect():
        pass
    assert "secret" not in str(refused.value)


@contextmanager
def answering(code, body="", kind="text/plain"):
    """A server on loopback that gives one answer to everything; yields its address."""

    class Answer(BaseHTTPRequestHandler):
        def answer(self):
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = answer

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask():
    with connect() as client:
        client.get_registered_model("esi")


FENCE = '{"detail": "This server asks for a user and a password."}'
"""How a server of `make serve` answers who does not log in."""


@pytest.mark.parametrize(
    ("code", "says"), [(401, ["You are not authenticated."]), (403, ["No."]), (401, [FENCE, "application/json"])]
)
def test_wrong_credentials_are_said_without_repeating_them(monkeypatch, code, says):
    with answering(code, *says) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://nurse:secret@{address}")
        with pytest.raises(RegistryError) as refused:
            ask()
    assert str(refused.value) == (
        f"the registry at http://{address} refused the credentials; set MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    )


def test_a_server_that_does_not_know_its_name_blames_no_password(monkeypatch):
    with answering(403, "Invalid Host header - possible DNS rebinding attack detected", "text/plain") as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{address}")
        with pytest.raises(RegistryError, match="not known by that name to its server; start it with --allowed-hosts"):
            ask()


def test_a_server_that_is_away_is_one_sentence(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://nurse:secret@127.0.0.1:{port}")
    with pytest.raises(RegistryError) as refused:
        ask()
    assert str(refused.value) == (
        f"the registry at http://127.0.0.1:{port} does not answer; start the server, or set MLFLOW_TRACKING_URI to "
        "one that runs"
    )


def test_something_that_is_no_tracking_server_is_quoted_in_one_sentence(monkeypatch):
    with answering(200, "<html>Welcome</html>", "text/html") as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://nurse:secret@{address}")
        with pytest.raises(RegistryError, match=rf"^the registry at http://{address} refused: ") as refused:
            ask()
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_error_of_the_disk_is_not_taken_for_the_server_s(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(FileNotFoundError), connect():
        (tmp_path / "absent").read_text()


def test_a_file_that_may_only_be_read_is_refused_at_once_if_it_is_no_database(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/self/mem")  # its folder takes no file, of root either
    with pytest.raises(RegistryError, match=r"^the registry in /proc/self/mem refused: disk I/O error$"), connect():
        pass


def test_artefacts_of_a_moved_store_are_found_by_who_may_only_read_it(tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow_store, "may_write", lambda _: False)
    own = tmp_path / "artifacts/esi/run/artifacts"
    own.mkdir(parents=True)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert mlflow_store.beside(uri, "file:///old/artifacts/ward/mlruns/artifacts/esi/run/artifacts") == own
    for address in ("file:///etc/ssl", "file:///old/artifacts/../../ssl"):
        with pytest.raises(RegistryError, match=rf"artefacts lie in {address.removeprefix('file://')}, which is not"):
            mlflow_store.beside(uri, address)


@pytest.mark.parametrize("edit", [lambda held: b"no store" * 999, lambda held: held[:8192]])
def test_a_damaged_store_is_one_sentence(tmp_path, monkeypatch, edit):
    file = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
    with connect():
        pass
    mlflow_store._client.cache_clear()
    file.write_bytes(edit(file.read_bytes()))
    with pytest.raises(RegistryError, match=r"mlflow\.db is damaged, or no database; restore it from a backup"):
        ask()


@pytest.mark.slow
def test_a_store_that_another_process_keeps_locked_is_one_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with connect() as client:
        client.create_registered_model("esi")
    other = sqlite3.connect(tmp_path / "mlflow.db")
    other.execute("BEGIN IMMEDIATE")
    capfd.readouterr()
    with (
        pytest.raises(RegistryError, match=r"mlflow.db is locked by another process; give the same command again"),
        connect() as client,
    ):
        client.create_registered_model("other")
    other.close()
    assert capfd.readouterr().err == ""


@pytest.mark.long
@pytest.mark.usefixtures("real")
def test_who_is_killed_while_a_store_is_made_leaves_none(tmp_path, monkeypatch):
    from alembic import command

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")

    def killed():
        # The first tables are made, their changes are not.
        monkeypatch.setattr(command, "upgrade", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with connect():
            pass

    maker = multiprocessing.get_context("fork").Process(target=killed)
    maker.start()
    maker.join()
    assert maker.exitcode == -signal.SIGKILL
    assert (tmp_path / "mlflow.db.new").stat().st_size > 0
    assert not (tmp_path / "mlflow.db").exists()
    with connect() as client:
        client.create_registered_model("esi")
        assert client.get_experiment("0").artifact_location == f"file://{tmp_path}/artifacts/0"
    assert not (tmp_path / "mlflow.db.new").exists()


def test_a_disk_that_is_full_is_one_sentence_without_sql(tmp_path, monkeypatch):
    """SQLite's own error: a database that may not grow says the same as a disk that cannot."""
    from sqlalchemy import create_engine, text

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with (  # noqa: PT012
        pytest.raises(RegistryError) as refused,
        connect(),
        create_engine(f"sqlite:///{tmp_path}/small.db").connect() as database,
    ):
        database.execute(text("CREATE TABLE notes (note TEXT)"))
        database.execute(text("PRAGMA max_page_count = 2"))
        database.execute(text("INSERT INTO notes VALUES (:note)"), {"note": "x" * 100_000})
    sentence = f"disk is full at the registry in {tmp_path}/mlruns/mlflow.db: free some space and give the same command"
    assert str(refused.value) == f"{sentence} again"
    assert refused.value.exit_code == 1


def test_the_loser_of_a_race_leaves_no_run_that_looks_alive(tmp_path, monkeypatch):
    from mlflow import MlflowClient
    from mlflow.entities import ViewType

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with connect() as client:
        create = MlflowClient.create_run

        def too_late(self, experiment, **words):
            create(self, experiment, start_time=1, **words)  # another machine was quicker
            return create(self, experiment, **words)

        monkeypatch.setattr(MlflowClient, "create_run", too_late)
        winner = mlflow_store.run_of(client, "esi", "v1-abc", "v1")
        assert winner.info.start_time == 1
        (loser,) = client.search_runs([winner.info.experiment_id], run_view_type=ViewType.DELETED_ONLY)
        assert loser.info.status == "KILLED"
        assert client.get_run(winner.info.run_id).info.status == "RUNNING"


def test_a_file_may_take_long_and_an_answer_may_not(monkeypatch):
    """A server answers an upload only when the file is in its bucket."""
    monkeypatch.setenv(mlflow_store.TIMEOUT, "10")
    with pytest.raises(RegistryError, match="away"), mlflow_store.patience(300):
        raise RegistryError("away")
    assert os.environ[mlflow_store.TIMEOUT] == "10"
    for own, waits in (("10", "300"), ("900", "900")):
        monkeypatch.setenv(mlflow_store.TIMEOUT, own)
        with mlflow_store.patience(300):
            assert os.environ[mlflow_store.TIMEOUT] == waits
        assert os.environ[mlflow_store.TIMEOUT] == own
