"""Live metrics: what arrives while a training runs, and that training pays for nothing that happens to them."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import dolls
import exhibits
from clinrl import paths
from clinrl.artifacts import canonical_json, digest, read_manifest, write_json
from clinrl.registry import versions
from clinrl.runtime import forkserver
from clinrl.runtime import worker_process as process
from clinrl.signing import keys
from clinrl.tracking import live_metrics, mlflow_store
from clinrl.tracking.mlflow_store import connect
from clinrl.training import launch
from processes import eventually, free_port, patience_s
from trackers import PATIENCE_S, serving

pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with the store's folder, entered."""
    shutil.copytree(exhibits.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("mlruns").mkdir()
    return exhibits.params()


def scratch(project, name):
    """The folder in which a version would be trained, as `launch.stage` leaves it to the worker."""
    spec, _ = launch.resolve(project, name)
    folder = paths.checkpoints(name, digest(spec))
    recipe = launch.manifest_fields(spec)["spec"]
    write_json(folder / paths.TRAINING_FILE, {"task": spec["task"], "version": name, "recipe": recipe})
    return folder


def add(folder, lines):
    with (folder / paths.LIVE_FILE).open("a", encoding="utf-8") as stream:
        stream.writelines(canonical_json(line) + "\n" for line in lines)


def run_of(folder):
    """The run of a folder, or None."""
    with connect() as client:
        experiment = client.get_experiment_by_name("esi")
        found = client.search_runs([experiment.experiment_id], f"tags.`{mlflow_store.KEY}` = '{folder.name}'")
    assert len(found) < 2
    return found[0] if found else None


def runs_of(folder):
    """The run of a folder and the one below it."""
    run = run_of(folder)
    with connect() as client:
        below = client.search_runs([run.info.experiment_id], f"tags.`{mlflow_store.PARENT}` = '{run.info.run_id}'")
    assert len(below) < 2
    return [run, *below]


def history(folder, metric):
    """A metric by step, of the run of a folder or of the one below it."""
    with connect() as client:
        return [
            (m.step, m.value) for run in runs_of(folder) for m in client.get_metric_history(run.info.run_id, metric)
        ]


def wait_until(condition):
    """Wait until a condition of the store holds, which may not have its tables or its run yet."""

    def holds():
        with suppress(AttributeError, versions.RegistryError):
            return condition()

    eventually(holds, PATIENCE_S)


def unanswered(port):
    """What is said of a server that does not answer."""
    return (
        f"clinrl: no live metrics: the registry at http://127.0.0.1:{port} does not answer; start the server, or set "
        "MLFLOW_TRACKING_URI to one that runs; `clinrl register` fills them in\n"
    )


def test_a_training_and_its_registration_find_the_same_run(project):
    for name in ("v1", "v2"):
        assert mlflow_store.run_key(read_manifest(paths.adapter(name))) == scratch(project, name).name


@pytest.mark.parametrize(
    ("code", "state", "word"),
    [
        (0, "completed", "FINISHED"), (4, "stopped", "KILLED"), (-9, "running", "KILLED"), (3, "failed", "FAILED"),
        (1, "running", "FAILED"), (launch.DISK_FULL, "running", "FAILED"),
    ],
)  # fmt: skip
def test_how_a_run_ended_is_said_truthfully(code, state, word):
    assert launch._fate(code, state) == word


def test_nothing_is_sent_where_mlflow_is_not_used(project, capfd):
    Path("mlruns").rmdir()
    with process.live_metrics(scratch(project, "v1")) as tell:
        tell("FINISHED")
    assert not Path("mlruns").exists()
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_metrics_arrive_while_training_runs_and_a_continued_run_is_the_same_one(project, capfd):
    keys.make_key()  # or the registration would say that it made one
    folder, lines = scratch(project, "v1"), exhibits.history(1)
    with process.live_metrics(folder) as tell:
        add(folder, lines[:2])
        wait_until(lambda: run_of(folder).data.metrics.get("reward") == 2.0)
        run = run_of(folder)
        assert run.info.status == "RUNNING"
        assert run.data.tags["machine"].startswith(platform.node())
        assert run.data.params["method"] == "sft"
        assert "checkpoint_every" not in run.data.params
        tell("KILLED")
    assert [run.info.status for run in runs_of(folder)] == ["KILLED", "KILLED"]

    add(folder, lines[1:2])  # the step after the checkpoint is trained again
    with process.live_metrics(folder) as tell:
        wait_until(lambda: run_of(folder).info.status == "RUNNING")
        add(folder, lines[2:])
        wait_until(lambda: run_of(folder).data.metrics["reward"] == 3.0)
        tell("FINISHED")
    assert [run.info.status for run in runs_of(folder)] == ["FINISHED", "FINISHED"]
    assert run_of(folder).info.run_id == run.info.run_id
    assert history(folder, "loss") == [(1, 2.0), (2, 1.5), (3, 1.0 / 3 + 1)]
    assert history(folder, "kl") == [(1, 0.1), (3, 0.1)]

    entry = versions.register(project, "v1")
    assert entry.run_id == run.info.run_id
    assert history(folder, "loss") == [(1, 2.0), (2, 1.5), (3, 1.0 / 3 + 1)]
    assert set(run_of(folder).data.params) == set(run.data.params)
    assert capfd.readouterr().err == ""


@pytest.mark.long
def test_a_trainer_that_was_killed_leaves_no_run_that_looks_alive(project):
    folder = scratch(project, "v1")
    mlflow_store.prepare(mlflow_store.STORE.absolute())  # as a copy; the follower would make one, which takes longest
    add(folder, exhibits.history(1))
    code = (
        "import sys, time; from pathlib import Path; from clinrl.runtime import worker_process as process\n"
        f"with process.live_metrics(Path({str(folder)!r})):\n    print('begun', flush=True); time.sleep(600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "begun\n"
    try:
        wait_until(lambda: run_of(folder).data.metrics.get("reward") == 3.0)
    finally:
        trainer.kill()
        trainer.communicate()
    wait_until(lambda: run_of(folder).info.status == "KILLED")


@pytest.mark.long
@pytest.mark.parametrize("word", ["FINISHED", ""])
def test_a_fork_sends_them_where_the_libraries_are_loaded(project, monkeypatch, word):
    folder = scratch(project, "v1")
    mlflow_store.prepare(mlflow_store.STORE.absolute())
    monkeypatch.setattr(forkserver, "IS_FORK", True)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process of its own"))
    with process.live_metrics(folder) as tell:
        add(folder, exhibits.history(1))
        wait_until(lambda: run_of(folder).data.metrics.get("reward") == 3.0)
        tell(word)
    assert run_of(folder).info.status == (word or live_metrics.UNKNOWN_END)


def test_a_server_that_is_away_is_said_once(project, monkeypatch, capfd):
    port = free_port()
    for name, value in (live_metrics.HURRY | {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}).items():
        monkeypatch.setenv(name, value)
    said = iter([None, "FINISHED"])  # while it trains, and once it has ended
    monkeypatch.setattr(live_metrics, "_read_status", lambda _ends: next(said))
    live_metrics.follow(scratch(project, "v1"), 0)
    assert next(said, "asked twice") == "asked twice"
    assert capfd.readouterr().err == unanswered(port)


@pytest.mark.long
def test_a_server_that_stops_to_answer_is_said_by_the_process_and_not_waited_for(project, monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        deaf.settimeout(PATIENCE_S)
        folder, heard = scratch(project, "v1"), []
        with process.live_metrics(folder) as tell:
            deaf.accept()[0].close()
            wait_until(lambda: heard.append(capfd.readouterr().err) or any(heard))
            tell("FINISHED")  # which it would tell, if anybody listened
            began = time.monotonic()
        assert time.monotonic() - began < process.LAST_METRICS_S + patience_s()
        deaf.accept()[0].close()
    assert "".join(heard) + capfd.readouterr().err == unanswered(port)


@pytest.mark.slow
def test_a_server_killed_in_the_middle_loses_no_metric(project, tmp_path_factory, monkeypatch):
    port, lines = free_port(), exhibits.history(2)
    files = tmp_path_factory.mktemp("server")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    folder = scratch(project, "v2")
    with serving(files, port) as kill, process.live_metrics(folder) as tell:
        add(folder, lines[:1])
        wait_until(lambda: run_of(folder).data.metrics.get("reward") == 1.0)
        run = run_of(folder)
        kill()
        add(folder, lines[1:])
        tell("FINISHED")

    with serving(files, port):
        assert run_of(folder).info.status == "RUNNING"
        entry = versions.register(project, "v2")
        assert versions.find("esi", "candidate") == entry == versions.register(project, "v2")
        assert entry.run_id == run.info.run_id
        assert run_of(folder).info.status == "FINISHED"
        assert sorted(history(folder, "loss")) == [(step, 1.0 / step + 2) for step in (1, 2, 3)]
        metrics = run_of(folder).data.metrics
        for mode, report in exhibits.reports("v2").items():
            assert metrics[f"{mode}/exact"] == report["metrics"]["exact"]["value"]
        with connect() as client:
            assert not client.get_run(entry.run_id).info.artifact_uri.startswith("file:")
            stored = client.download_artifacts(entry.run_id, "training/history.jsonl")
        assert Path(stored).read_bytes() == (paths.adapter("v2") / "history.jsonl").read_bytes()


@pytest.mark.slow
def test_a_real_training_has_the_same_bytes_with_and_without_live_metrics(tmp_path, monkeypatch):
    code = (
        "import sys; from clinrl.config.params import load_params; from clinrl.training import launch\n"
        "launch.stage(load_params(), sys.argv[1])"
    )
    made = {}
    for name, store in (("without", None), ("with", None), ("away", f"http://127.0.0.1:{free_port()}")):
        folder = tmp_path / name
        shutil.copytree(dolls.built(), folder)
        YAML(typ="safe").dump(dolls.PARAMS, folder / "params.yaml")
        environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
        environment |= {"HF_HUB_OFFLINE": "1"} | ({"MLFLOW_TRACKING_URI": store} if store else {})
        if name == "with":  # with the store there: a training this short may end before it is made
            (folder / "mlruns").mkdir()
            mlflow_store.prepare(folder / mlflow_store.STORE)
        subprocess.run([sys.executable, "-c", code, "v1"], cwd=folder, env=environment, check=True)
        made[name] = dolls.files(folder / paths.adapter("v1"))
    assert made["with"] == made["without"] == made["away"]

    monkeypatch.chdir(tmp_path / "with")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    trained = [json.loads(line) for line in made["with"]["history.jsonl"].splitlines()]
    folder = Path(mlflow_store.run_key(read_manifest(paths.adapter("v1"))))
    sent = dict(history(folder, "loss"))
    assert sent
    assert sent.items() <= {line["step"]: line["loss"] for line in trained}.items()
