"""The MLflow store: its client, its errors as sentences, and the run of each version.

A run is found by a key, the digest of everything that determines the training. So a training that continues, a
registration and another machine all write to the same run. They add missing values and never change existing ones.
"""

import logging
import os
import re
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from clinrl import paths
from clinrl.analysis.exam import EvalReport
from clinrl.artifacts import canonical_json, digest, locked, may_write
from clinrl.errors import FULL, NO_ROOM, RegistryError, format_value, mask
from clinrl.types import Estimate, Manifest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

SQLITE = "sqlite:///"
STORE = Path("mlruns/mlflow.db")
"""The store if MLFLOW_TRACKING_URI does not name another one; its artefacts are in the same folder."""
BESIDE = "artifacts"
"""The folder with the artefacts of a SQLite store, beside its file."""
ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""MLflow's tables and columns with absolute addresses of artefacts."""
PATIENCE_S = 5
"""Seconds to wait for a locked SQLite store."""
KEY = "clinrl.key"
"""Run tag: the digest of everything that determines the training, by which a training that continues finds its run."""
PARENT = "mlflow.parentRunId"
"""MLflow's run tag for the run below which its pages show this one."""
NOTE = "mlflow.note.content"
"""MLflow's tag for the description of an experiment or a run on its pages."""
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""MLflow's experiment tag for the kind of experiment. As of 3.17, its pages open on traces all the same."""
SHOWN = frozenset({"reward", "mode_agreement"})
"""Metrics of every task that are logged to a version's own run. All others are logged to the run below it."""
TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
PATIENCE = {
    TIMEOUT: "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Settings for a server that does not answer. With MLflow's own defaults, a client would wait for many minutes."""

TWICE = re.compile(r"unique constraint|duplicate (key|entry)", re.IGNORECASE)
"""The errors of SQLite, PostgreSQL and MySQL for a row that another process has just added."""

Point = tuple[str, int, float]
"""Metric, step, value."""


class Clash(RegistryError):
    """Two machines added the same thing at once, which MLflow does not handle. A second attempt succeeds."""


def store() -> str:
    """MLFLOW_TRACKING_URI, or the address of the project's SQLite file. Raises RegistryError if it is unfit."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "").strip() or f"{SQLITE}{STORE}"
    if (file := file_of(uri)) is not None:
        if file == Path():
            raise RegistryError("MLFLOW_TRACKING_URI is sqlite:/// without a file; write sqlite:///path/mlflow.db")
        path = str(file.absolute())
        if "?" in path or unquote(path) != path:
            raise RegistryError(
                f"{path} has a ? or a % in its name, and MLflow would open another file; leave out options such as "
                "?timeout=30, which MLflow sets itself, or rename the folder, or set MLFLOW_TRACKING_URI"
            )
        return f"{SQLITE}{path}"
    try:
        place(uri)
    except ValueError:  # its text may contain a password
        raise RegistryError(
            "MLFLOW_TRACKING_URI is no address; set it to a server (http://host:port) or to a file "
            "(sqlite:///path/mlflow.db)"
        ) from None
    if urlsplit(uri).scheme in ("", "file"):
        raise RegistryError(
            f"MLFLOW_TRACKING_URI is {format_value(uri)}, a folder, in which MLflow no longer keeps a registry; set "
            "it to a server (http://host:port) or to a file (sqlite:///path/mlflow.db)"
        )
    return uri


def file_of(uri: str) -> Path | None:
    """The file of a SQLite store, or None for a server."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


def beside(uri: str, address: str) -> Path:
    """The folder of an artefact of a SQLite store, from its address in the store.

    Anybody who can write to the store can put any address there. Raises RegistryError for an address outside of the
    store's own artefacts, so that no other files are written, removed or signed.
    """
    file = Path(uri.removeprefix(SQLITE)).absolute()
    own, folder = (file.parent / BESIDE).resolve(), Path(unquote(urlsplit(address).path))
    if own not in folder.resolve().parents and not may_write(file):  # it may have been moved: see `_follow`
        moved = (own.joinpath(*folder.parts[n + 1 :]) for n, name in enumerate(folder.parts) if name == BESIDE)
        folder = next((one for one in moved if one.exists()), folder)
    if own not in folder.resolve().parents:
        raise RegistryError(
            f"{place(uri)} says that artefacts lie in {folder}, which is not in {own}: it was edited; restore it"
        )
    return folder


def check_host(uri: str, address: str) -> None:
    """Refuse the address of an artefact at another host than its server's: MLflow's client would send it the password.

    Anybody who can write to the server can put any address there. Raises RegistryError.
    """
    there, own = urlsplit(address), urlsplit(uri).netloc.rpartition("@")[2].lower()
    is_elsewhere = there.scheme in ("http", "https", "mlflow-artifacts") and there.netloc.lower() not in ("", own)
    if is_elsewhere or there.scheme in ("models", "runs"):  # MLflow would follow these to another address
        raise RegistryError(
            f"{place(uri)} says that artefacts lie at {mask(address)}, where its password would be sent; restore the "
            "address, or delete what has it"
        )


def application(file: Path) -> Any:
    """MLflow's server for a prepared SQLite store and its artefacts, as an ASGI application without any password."""
    from mlflow.server import constants

    os.environ[constants.BACKEND_STORE_URI_ENV_VAR] = f"{SQLITE}{file.absolute()}"
    os.environ[constants.ARTIFACT_ROOT_ENV_VAR] = (file.absolute().parent / BESIDE).as_uri()
    from mlflow.server.fastapi_app import app

    return app


@contextmanager
def connect() -> Iterator["MlflowClient"]:
    """The client of the store. Its errors in this block are raised as a RegistryError of one sentence."""
    uri = store()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield _client(uri)
    except (MlflowException, SQLAlchemyError) as error:
        if TWICE.search(str(error)):
            raise Clash(f"another process wrote the same to {place(uri)}; give the same command again") from error
        raise RegistryError(_sentence(uri, error)) from error
    except ModuleNotFoundError as error:
        raise RegistryError(
            f"{place(uri)} needs the driver {error.name}, which is not installed here; install it, or set "
            "MLFLOW_TRACKING_URI to another"
        ) from error
    except OSError as error:
        if error.errno is not None:  # an error of the disk; those of the requests library have no number
            raise
        raise RegistryError(_sentence(uri, error)) from error


@contextmanager
def patience(seconds: int) -> Iterator[None]:
    """Wait longer for an answer in this block, which sends or fetches files: a server answers only when it has brought
    the whole file to its bucket, or from there. One block at a time, since the setting is of the process."""
    before = os.environ.get(TIMEOUT, PATIENCE[TIMEOUT])
    os.environ[TIMEOUT] = str(max(int(before), seconds))
    try:
        yield
    finally:
        os.environ[TIMEOUT] = before


@cache
def _client(uri: str) -> "MlflowClient":
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient
    from mlflow.store.db.db_types import DATABASE_ENGINES

    # These loggers announce routine steps, and print a traceback for errors that are raised anyway.
    for talker in ("alembic", "mlflow.store", "urllib3.connectionpool"):
        logging.getLogger(talker).setLevel(logging.CRITICAL)
    file = file_of(uri)
    if file is not None:
        try:
            prepare(file)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            raise RegistryError(
                f"{file} cannot be opened or made ({error.strerror}); set MLFLOW_TRACKING_URI to another file"
            ) from error
    elif urlsplit(uri).scheme.partition("+")[0] in DATABASE_ENGINES:
        from mlflow.store.db.utils import create_sqlalchemy_engine

        create_sqlalchemy_engine(uri).connect().close()  # MLflow would silently retry ten times, for 102 s
    return MlflowClient(uri, registry_uri=uri)  # MLFLOW_REGISTRY_URI may be another project's


def prepare(file: Path) -> None:
    """Create a SQLite store if it is missing, and make it point to the artefacts beside it. One process at a time.

    A store that this user may only read is left as it is: MLflow reads it without a lock. Raises RegistryError for a
    file that SQLite cannot read, which MLflow would try for minutes.
    """
    if file.exists() and not may_write(file):
        try:
            with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", timeout=PATIENCE_S, uri=True)) as store:
                store.execute("SELECT 1 FROM experiments")
        except sqlite3.Error as error:
            raise RegistryError(_sentence(f"{SQLITE}{file}", error)) from None
        return
    with locked(file.with_name(f"{file.name}.lock")):
        if not file.exists():
            _begin(file)
        _follow(file)


def _begin(file: Path) -> None:
    """Create a new store under another name and then rename it, since MLflow cannot use a store with half its tables.

    The process may be killed meanwhile: `live_metrics` is if its training ends that early.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    new = file.with_name(f"{file.name}.new")
    for left in (new, file.with_name(f"{new.name}-journal")):
        left.unlink(missing_ok=True)
    SqlAlchemyStore(f"{SQLITE}{new}", (file.parent / BESIDE).as_uri()).engine.dispose()
    new.replace(file)


def writing(client: "MlflowClient") -> AbstractContextManager[object]:
    """A lock on a SQLite store for adding to it. MLflow checks before it adds, so two processes could both add a thing.

    For a server there is no lock.
    """
    file = file_of(client.tracking_uri)
    return nullcontext() if file is None else locked(file.with_name(f"{file.name}.writing"))


def _follow(file: Path) -> None:
    """Update the addresses in a store that was moved or copied together with its artefacts.

    MLflow stores absolute addresses. Those of artefacts elsewhere, as on a server or in a bucket, stay unchanged, and
    so do those of artefacts that were left behind: they are at the old place and not beside the file.
    """
    try:
        with closing(sqlite3.connect(file, timeout=PATIENCE_S)) as database, database:
            here = (file.parent / BESIDE).as_uri()
            for (location,) in database.execute("SELECT artifact_location FROM experiments").fetchall():
                there, _, folder = location.rpartition("/")  # the name of a task, or a server's number for it
                is_ours = there.startswith("file:") and there.endswith(f"/{BESIDE}")
                left_behind = os.path.isdir(unquote(urlsplit(location).path))
                if not is_ours or there == here or (left_behind and not (file.parent / BESIDE / folder).is_dir()):
                    continue
                for table, column in ADDRESSES:
                    database.execute(
                        f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {column} = ? "
                        f"OR substr({column}, 1, ?) = ?",
                        (here, len(there) + 1, location, len(location) + 1, f"{location}/"),
                    )
    except sqlite3.Error:  # not MLflow's, or locked: MLflow's own error is better
        return


def _sentence(uri: str, error: Exception) -> str:
    """The error of MLflow as one sentence without passwords."""
    text = mask(" ".join(str(error).split()))
    code = getattr(error, "error_code", "")
    if "Invalid Host header" in text:
        return f"{place(uri)} is not known by that name to its server; start it with --allowed-hosts"
    if code in ("CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED", "UNAUTHENTICATED") or "asks for a user" in text:
        return (
            f"{place(uri)} refused the credentials; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN"
        )
    if FULL.search(text):
        return f"disk is full at {place(uri)}: free some space and give the same command again"
    if "database is locked" in text:
        return f"{place(uri)} is locked by another process; give the same command again when that has ended"
    if "disk image is malformed" in text or "is not a database" in text:
        return f"{place(uri)} is damaged, or no database; restore it from a backup (docs/operations.md)"
    if "readonly database" in text:
        return f"{place(uri)} may only be read by you; give the command as a user who may write it and its folder"
    if "API request to" in text and "exception" in text:
        return f"{place(uri)} does not answer; start the server, or set MLFLOW_TRACKING_URI to one that runs"
    return f"{place(uri)} refused: {text if len(text) <= 200 else text[:197] + '...'}"


def place(uri: str) -> str:
    """The name of the store in messages, without credentials."""
    if (file := file_of(uri)) is not None:
        return f"the registry in {file}"
    parts = urlsplit(uri)
    return f"the registry at {parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"


def run_key(manifest: Manifest) -> str:
    """The key of the run of a version or a merge: the name of the folder with the checkpoints of its training."""
    spec = {
        **manifest.spec,
        "version": manifest.name,
        "task": manifest.task,
        "task_version": manifest.task_version,
        "inputs": manifest.inputs,
    }
    spec.pop("samplers", None)  # known only at the end of the training
    return paths.checkpoints(manifest.name, digest(spec)).name


def run_of(client: "MlflowClient", task: str, key: str, name: str) -> "Run":
    """The run with a key, created if there is none. Call it while `writing`.

    If two machines create it on a server at once, one run remains, unless their clocks disagree. Raises RegistryError
    if the experiment of the task was deleted, or if its artefacts are kept by a server.
    """
    return _one_run(client, _experiment(client, task), KEY, key, name)


def finished_run(client: "MlflowClient", task: str, key: str) -> "Run | None":
    """The run with a key, if there is one that has finished and was not deleted; else None."""
    experiment = client.get_experiment_by_name(task)
    runs = _runs(client, experiment.experiment_id, KEY, key) if experiment else []
    return runs[0] if runs and runs[0].info.status == "FINISHED" else None


def details_of(client: "MlflowClient", run: "Run") -> "Run":
    """The run below a version's own, for the metrics that are not logged there, created if there is none."""
    return _one_run(client, run.info.experiment_id, PARENT, run.info.run_id, f"{run.info.run_name}, all metrics")


def belongs_in(name: str, run: "Run", shown: Collection[str] = SHOWN) -> bool:
    """Whether a metric is logged to a version's own run: by its name, or because that run has it from before."""
    return name in shown or name in run.data.metrics


def _one_run(client: "MlflowClient", experiment: str, tag: str, value: str, name: str) -> "Run":
    found = _runs(client, experiment, tag, value)
    if not found:
        created = client.create_run(experiment, run_name=name, tags={tag: value})
        found = _runs(client, experiment, tag, value)
        if found[0].info.run_id != created.info.run_id:  # another machine was quicker
            client.set_terminated(created.info.run_id, "KILLED")  # else the deleted run would still look alive
            client.delete_run(created.info.run_id)
    return found[0]


def _runs(client: "MlflowClient", experiment: str, tag: str, value: str) -> list["Run"]:
    found = client.search_runs([experiment], f"tags.`{tag}` = '{value}'")
    return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))


def _experiment(client: "MlflowClient", task: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(task)
    if found is None:
        try:
            file = file_of(client.tracking_uri)  # a server chooses the place itself
            own = None if file is None else (file.parent / BESIDE / task).as_uri()
            return str(client.create_experiment(task, own, tags=KIND))
        except MlflowException:  # another machine was quicker
            found = client.get_experiment_by_name(task)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise RegistryError(f"the experiment {task} was deleted in {place(client.tracking_uri)}; restore it there")
    if file_of(client.tracking_uri) and found.artifact_location.startswith("mlflow-artifacts:"):
        raise RegistryError(
            f"{place(client.tracking_uri)} is a server's, which keeps the artefacts of {task}; start that server and "
            "set MLFLOW_TRACKING_URI to its address"
        )
    for tag in KIND.keys() - found.tags.keys():
        client.set_experiment_tag(found.experiment_id, tag, KIND[tag])
    return str(found.experiment_id)


def flat(spec: Mapping[str, Any], at: str = "") -> dict[str, str]:
    """A recipe as MLflow's parameters: nested names joined by dots, and values other than text as JSON."""
    flattened: dict[str, str] = {}
    for name, value in spec.items():
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, f"{at}{name}.")
        else:
            flattened[f"{at}{name}"] = value if isinstance(value, str) else canonical_json(value)
    return flattened


def exam_metrics(reports: Iterable[EvalReport], agreement: Estimate | None) -> dict[str, float]:
    """Every number of an exam: `mode/metric` with `.low`, `.high` and `.n`, and the mean reward with its terms."""
    found: dict[str, float] = {}
    for report in reports:
        for name, estimate in report.metrics.items():
            found |= _numbers(f"{report.mode}/{name}", estimate)
        found[f"{report.mode}/reward"] = report.reward
        found |= {f"{report.mode}/terms/{term}": value for term, value in report.terms.items()}
    return found | (_numbers("mode_agreement", agreement) if agreement else {})


def _numbers(name: str, estimate: Estimate) -> dict[str, float]:
    return {
        name: estimate.value,
        f"{name}.low": estimate.low,
        f"{name}.high": estimate.high,
        f"{name}.n": float(estimate.n),
    }


def points(history: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Every number of a training history as a point; `step` itself is none."""
    return [
        (name, int(line["step"]), float(value))
        for line in history
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)
    ]


def known_points(client: "MlflowClient", run: "Run", names: Iterable[str]) -> set[tuple[str, int]]:
    """Metric and step of each point that a run already has of the named metrics."""
    known = set(names) & run.data.metrics.keys()
    return {(name, metric.step) for name in known for metric in client.get_metric_history(run.info.run_id, name)}


def log_points(client: "MlflowClient", run_id: str, new: Iterable[Point], *, at: int | None = None) -> None:
    """Log points, dated `at` (ms since 1970; None: now). The client sends them in blocks of 1000.

    MLflow stores a point only once if it comes twice with the same date.
    """
    from mlflow.entities import Metric

    date = int(time.time() * 1000) if at is None else at
    if metrics := [Metric(name, value, date, step) for name, step, value in new]:
        client.log_batch(run_id, metrics=metrics)


def log_params(client: "MlflowClient", run: "Run", spec: Mapping[str, Any]) -> None:
    """Log the recipe's parameters that a run lacks."""
    from mlflow.entities import Param

    if new := [Param(name, value) for name, value in flat(spec).items() if name not in run.data.params]:
        client.log_batch(run.info.run_id, params=new)
