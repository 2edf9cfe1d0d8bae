"""A backup brings back what was lost, whole, and a damaged one nothing; it is made and restored by its script."""

import contextlib
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import champions
import dolls
import examined
import laid
import locks
from clinrl import paths
from clinrl.artifacts import sha256_file
from clinrl.provenance import dvc_yaml
from clinrl.registry import versions
from clinrl.release import audit_log, decisions, lineage, moves, promotion
from clinrl.signing import keys
from clinrl.tracking import mlflow_store
from once import once
from plant import BUCKET, Plant, end, needed, run
from processes import eventually

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy/backup.sh"
LOST = ("mlruns", ".dvc/cache", ".clinrl", "data/adapters/v1", "data/adapters/v2", "data/graded", "data/cases")
"""What a disk that fails takes along; the audit log too, which git may have in an older state."""


LOADS = """
import sys, clinrl_loader, pandas
model = clinrl_loader.load("models:/esi@champion", digest=sys.argv[1])
print(len(model.predict(pandas.DataFrame({"narrative": ["62 year old man, crushing chest pain."]}))))
"""


def script(*words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run the script in the working directory."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(SCRIPT), *words], env=os.environ | {"PATH": path} | env, capture_output=True, text=True, check=False
    )


def store() -> None:
    """The project of `champions.built` as DVC knows one, with its files in DVC's cache."""
    from dvc.repo import Repo

    examined.copy(champions.built(), Path())
    shutil.copy(ROOT / "dvc.yaml", ".")
    laid.lay(Path(), dolls.PARAMS | {"gates": examined.GATES, "datasets": examined.DATASETS, "schedules": {}})
    Repo.init(no_scm=True).close()
    dvc_yaml.prove(Path("params.yaml"))
    locks.store()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project of `store`, entered."""
    folder = tmp_path / "project"
    examined.copy(once("stored", store), folder)
    monkeypatch.chdir(folder)
    return folder


def lose() -> None:
    """Remove all that a backup is for."""
    paths.AUDIT_LOG.unlink()
    for folder in LOST:
        shutil.rmtree(folder)


def whole() -> list[tuple[str, ...]]:
    """What `clinrl lineage` says of the champion; nothing of it is broken."""
    links = lineage.walk(champions.params(), "v1")
    assert {link.state for link in links} <= {"holds", "unrecorded"}, links
    return [(link.link, link.state, link.digest, link.says) for link in links]


def check(kept: list[audit_log.Entry], before: list[tuple[str, ...]]) -> None:
    """Hold the files, the audit log, the lineage and the champion against what was before."""
    run(sys.executable, "-m", "dvc", "checkout", "--quiet", "--with-deps", "evaluate@v1", "evaluate@v2")
    assert audit_log.read(paths.AUDIT_LOG, keys.keyring()) == kept
    assert whole() == before
    assert not keys.PRIVATE.exists()
    champion = versions.holder("esi", "champion")
    assert champion is not None
    assert (
        run(
            sys.executable, "-c", LOADS, champion.digest, env=os.environ | {"MLFLOW_TRACKING_URI": mlflow_store.store()}
        )
        == "1"
    )


@pytest.mark.slow
def test_a_lost_project_is_whole_again_and_its_champion_loads(project: Path, tmp_path: Path) -> None:
    before = whole()
    done = script("make", str(tmp_path / "backup"))
    assert (done.returncode, done.stderr) == (0, "")
    assert not [*(tmp_path / "backup").rglob("*.pem")]
    assert (tmp_path / "backup").stat().st_mode & 0o077 == 0
    kept = audit_log.read(paths.AUDIT_LOG, keys.keyring())
    lose()
    restored = script("restore", str(tmp_path / "backup"))
    assert restored.returncode == 0, restored.stderr
    whose, end = restored.stderr.splitlines()
    assert whose == f"clinrl: this checkout's key is that of the backup: {keys.PUBLIC.read_text().split()[1]}"
    assert end.startswith("clinrl: restored; ")
    check(kept, before)
    assert script("make", str(tmp_path / "backup")).stderr.endswith("exists; a backup is a new folder\n")
    again = script("restore", str(tmp_path / "backup"))
    assert (again.returncode, again.stderr) == (1, "clinrl: mlruns/mlflow.db exists; move it away first\n")
    Path("mlruns/mlflow.db").rename("mlruns/mlflow.db-journal")  # of a process that was killed
    again = script("restore", str(tmp_path / "backup"))
    assert (again.returncode, again.stderr) == (1, "clinrl: mlruns/mlflow.db-journal exists; move it away first\n")


BESIDE = """#!/bin/sh
"{python}" "$@" || exit
case "$*" in *" backup/mlflow.db") [ -e moved ] || "{python}" -m clinrl rollback esi --approver Ada > moved ;; esac
"""
"""A Python beside which somebody rolls back, once, when the registry's database was just copied."""


@pytest.mark.slow
def test_a_rollback_beside_a_backup_is_in_it_wholly_or_not_at_all(project: Path, tmp_path: Path) -> None:
    beside = tmp_path / "bin/python"
    beside.parent.mkdir()
    beside.write_text(BESIDE.format(python=sys.executable))
    beside.chmod(0o755)
    done = script("make", "backup", PATH=f"{beside.parent}{os.pathsep}{os.environ['PATH']}")
    assert (done.returncode, done.stderr) == (0, "")
    lose()
    assert script("restore", "backup").returncode == 0
    champion = versions.holder("esi", "champion")
    assert champion is not None
    assert champion.name == "v2"
    assert moves.recorded_champion("esi", audit_log.lines(champions.params())) == champion.digest


@pytest.mark.slow
def test_the_private_key_is_in_a_backup_that_was_asked_for_it(project: Path, tmp_path: Path) -> None:
    assert script("make", str(tmp_path / "backup"), "--with-private-key").returncode == 0
    held = sha256_file(keys.PRIVATE)
    lose()
    assert script("restore", str(tmp_path / "backup")).returncode == 0
    assert sha256_file(keys.PRIVATE) == held
    assert keys.PRIVATE.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_it_brings_counts_back_and_nothing_that_somebody_laid_into_it(project: Path, tmp_path: Path) -> None:
    """A sum can be written anew by whoever can write there; a hook would run with the next checkout."""
    counts, backup = paths.watched("esi"), tmp_path / "backup"
    counts.parent.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(counts)) as held:
        held.executescript("create table counts (n int); insert into counts values (7)")
        assert script("make", str(backup)).returncode == 0
    lose()
    keys.make_key()
    other = keys.PUBLIC.read_text()
    shutil.rmtree(keys.FOLDER)
    for name in (hook := ".git/hooks/post-checkout", f"{keys.TRUSTED}/Eve.pub"):
        (backup / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        (backup / "checkout" / name).write_text(other)
    files = sorted(path for path in backup.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    sums = "".join(f"{sha256_file(path)}  ./{path.relative_to(backup)}\n" for path in files)
    (backup / "SHA256SUMS").write_text(sums)
    (backup / "link").symlink_to("/etc")
    assert (
        script("restore", str(backup)).stderr
        == f"clinrl: {backup} holds a link, which no backup does; nothing was restored\n"
    )
    (backup / "link").unlink()
    done = script("restore", str(backup))
    assert done.returncode == 0, done.stderr
    assert "clinrl: signatures of Eve count here, as in the backup\n" in done.stderr
    assert not Path(hook).exists()
    with contextlib.closing(sqlite3.connect(counts)) as held:
        assert held.execute("select n from counts").fetchall() == [(7,)]


@pytest.mark.slow
def test_a_link_in_the_store_is_seen_when_the_backup_is_made(project: Path, tmp_path: Path) -> None:
    Path("mlruns/artifacts/link").symlink_to("/etc")
    done = script("make", str(tmp_path / "backup"))
    says = "clinrl: artifacts/link is a link, which no restore takes; remove it where it was copied from\n"
    assert (done.returncode, done.stderr) == (1, says)
    assert not (tmp_path / "backup/SHA256SUMS").exists()


@pytest.mark.slow
def test_a_log_of_git_that_is_younger_than_the_backup_stays(project: Path, tmp_path: Path) -> None:
    assert script("make", str(tmp_path / "backup")).returncode == 0
    promotion.refuse(champions.params(), decisions.decide(champions.params(), "v2"), "not this week")
    log = paths.AUDIT_LOG.read_bytes()
    shutil.rmtree("mlruns")
    done = script("restore", str(tmp_path / "backup"))
    assert done.returncode == 0, done.stderr
    assert "clinrl: data/reports/decisions.jsonl is younger than the backup and stays" in done.stderr
    assert paths.AUDIT_LOG.read_bytes() == log


def longer() -> None:
    paths.AUDIT_LOG.write_text("{}\n")


def other_key() -> None:
    shutil.rmtree(keys.FOLDER)
    keys.make_key()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (longer, "clinrl: data/reports/decisions.jsonl has lines that the backup has not, and the backup has others; "),
        (other_key, "clinrl: .clinrl/keys holds the key of another checkout; move it away, "),
    ],
)
def test_what_is_there_is_not_overwritten(project: Path, tmp_path: Path, change: Callable[[], None], says: str) -> None:
    assert script("make", str(tmp_path / "backup")).returncode == 0
    shutil.rmtree("mlruns")
    change()
    done = script("restore", str(tmp_path / "backup"))
    assert (done.returncode, done.stderr.startswith(says), Path("mlruns").exists()) == (1, True, False), done.stderr


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backup of two files, in an empty folder: it is looked at before anything is done."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "backup"
    (folder / "dvc").mkdir(parents=True)
    for name in ("mlflow.db", "dvc/of weights"):
        (folder / name).write_text(name)
    sums = "".join(f"{sha256_file(folder / name)}  ./{name}\n" for name in ("dvc/of weights", "mlflow.db"))
    (folder / "SHA256SUMS").write_text(sums)
    return folder


def cut(sums: Path) -> None:
    sums.write_text(sums.read_text().splitlines(keepends=True)[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda to: (to / "mlflow.db").write_text("mlflow dB"), "is damaged, as in ./mlflow.db; nothing was restored"),
        (lambda to: (to / "dvc/of weights").unlink(), "is damaged, as in ./dvc/of weights; nothing was restored"),
        (lambda to: (to / "SHA256SUMS").unlink(), "is no whole backup: SHA256SUMS, which is written last, is missing"),
        (lambda to: cut(to / "SHA256SUMS"), "is damaged: SHA256SUMS does not list its files; nothing was restored"),
        (lambda to: (to / "SHA256SUMS").write_text("?\n"), "is damaged; nothing was restored, take another backup"),
    ],
)
def test_a_damaged_backup_is_refused(small: Path, change: Callable[[Path], None], says: str) -> None:
    change(small)
    done = script("restore", str(small))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith(f"clinrl: {small} {says}")
    assert [path.name for path in Path().iterdir()] == ["backup"]


def test_misuse_prints_how_it_is_used(tmp_path: Path) -> None:
    for words in ((), ("make",), ("save", str(tmp_path / "backup"))):
        done = script(*words)
        assert (done.returncode, "deploy/backup.sh restore FOLDER" in done.stderr) == (2, True)
    assert script("make", str(tmp_path / "backup"), "--all").returncode == 1
    done = script("make", str(tmp_path / "backup"), MLFLOW_TRACKING_URI="http://10.0.0.1:5000")
    assert (done.returncode, "set MLFLOW_BACKEND_STORE_URI to the database behind it" in done.stderr) == (1, True)
    assert not (tmp_path / "backup").exists()


@pytest.mark.long
def test_what_is_never_pushed_is_in_a_backup_beside_the_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported cases, and what nobody pushed yet: a restore brings them back, though no remote ever had them."""
    from dvc.repo import Repo

    project = tmp_path / "project"
    (project / "mlruns/artifacts").mkdir(parents=True)
    monkeypatch.chdir(project)
    sqlite3.connect("mlruns/mlflow.db").close()
    stages: dict[str, dict[str, Any]] = {
        "import": {
            "cmd": "mkdir -p ward && echo a > ward/cases && echo b > ward/manifest",
            "outs": [{"ward": {"push": False}}],
        },
        "draw": {"cmd": "echo c > drawn", "outs": ["drawn"]},
        "lose": {"cmd": "echo d > lost", "outs": [{"lost": {"push": False}}]},
        "wait": {"cmd": "echo e > waiting", "deps": ["drawn"], "outs": ["waiting"]},
    }
    Path("dvc.yaml").write_text(yaml.safe_dump({"stages": stages}), encoding="utf-8")
    Path("remote").mkdir()
    with Repo.init(no_scm=True) as repo:
        with repo.config.edit() as config:
            config["core"] |= {"remote": "store", "analytics": False}
            config["remote"]["store"] = {"url": str(project / "remote")}
        repo.reproduce()
        repo.push(["draw"])
    digest = hashlib.md5(b"d\n").hexdigest()
    Path(".dvc/cache/files/md5", digest[:2], digest[2:]).unlink()
    assert script("make", str(tmp_path / "backup"), MLFLOW_BACKEND_STORE_URI="mysql://ward").returncode == 1
    done = script("make", str(tmp_path / "backup"))  # the same folder again
    says = "clinrl: lost is not in the cache, so it is not in this backup; make one where it was imported\n"
    assert (done.returncode, done.stderr) == (0, says)
    for lost in ("mlruns", ".dvc/cache", "remote", "ward"):
        shutil.rmtree(lost)
    for name in ("drawn", "waiting"):
        Path(name).unlink()
    done = script("restore", str(tmp_path / "backup"))
    assert done.returncode == 0, done.stderr
    with Repo() as repo:
        repo.pull(["import", "draw", "wait"])
    files = ("ward/cases", "ward/manifest", "drawn", "waiting")
    assert [Path(name).read_text() for name in files] == ["a\n", "b\n", "c\n", "e\n"]


WRITER = """
import os, secrets, shutil
from pathlib import Path
while True:
    for folder in (".dvc/cache/files/md5/00", ".clinrl/provenance", "mlruns/artifacts/esi"):
        made = Path(folder, "m-1")
        made.mkdir(parents=True, exist_ok=True)
        names = [f".{secrets.token_urlsafe(16)}.tmp" if n % 2 else f".{n}.partial-1" for n in range(100)]
        for n, name in enumerate(names):
            for path in (made.parent / name, made / str(n)):
                path.write_bytes(b"x" * 3000)
        for n, name in enumerate(names):
            os.replace(made.parent / name, made.parent / str(n))
        shutil.rmtree(made)
"""
"""What trainings, DVC and registrations do: temporary files take their names, and folders come and go."""


@pytest.mark.long
def test_a_backup_beside_who_writes_ends_well_and_holds_whole_files(tmp_path: Path, monkeypatch: Any) -> None:
    from dvc.repo import Repo

    monkeypatch.chdir(tmp_path)
    Path("mlruns/artifacts").mkdir(parents=True)
    Path(".dvc").mkdir()
    sqlite3.connect("mlruns/mlflow.db").close()
    Repo.init(no_scm=True, force=True).close()
    Path(".dvc/cache").mkdir()
    linked, key = Path(".clinrl/keys/trusted/ward.pub"), tmp_path / "key of the ward"
    linked.parent.mkdir(parents=True)
    key.write_text("public")
    linked.symlink_to(key)
    listing = Path(".dvc/cache/files/md5/zz/1.dir")
    listing.parent.mkdir(parents=True)
    listing.write_text("[]")
    with subprocess.Popen([sys.executable, "-c", WRITER]) as writer:
        try:
            eventually(Path("mlruns/artifacts/esi/99").exists)  # the last of the first round
            for number in range(3):
                done = script("make", f"backup-{number}")
                assert (done.returncode, done.stderr) == (0, "")
        finally:
            writer.kill()
    for number in range(3):
        kept = [path for path in Path(f"backup-{number}").rglob("*") if path.parent.name in {"00", "provenance", "esi"}]
        assert {path.name for path in kept} <= {*map(str, range(100)), "m-1"}
        assert {path.stat().st_size for path in kept if path.is_file()} == {3000}
        md5 = Path(f"backup-{number}/dvc/files/md5")
        listed = (md5 / "zz/1.dir").stat().st_ctime_ns  # copied before its parts, which were written before it
        assert listed < min(path.stat().st_ctime_ns for path in (md5 / "00").rglob("*") if path.is_file())
    for lost in ("mlruns", ".dvc/cache", ".clinrl"):
        shutil.rmtree(lost)
    done = script("restore", "backup-2")
    assert done.returncode == 0, done.stderr
    assert Path(".dvc/cache/files/md5/00/99").stat().st_size == 3000
    assert (linked.read_text(), linked.is_symlink()) == ("public", False)


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    with contextlib.ExitStack() as stack:
        plant = Plant(tmp_path, stack, flows=False)
        for name, value in plant.client.items():
            if name.startswith(("AWS_", "MLFLOW_")):
                monkeypatch.setenv(name, value)
        yield plant


@needed
@pytest.mark.skipif(not shutil.which("aws"), reason="needs aws (pip install awscli)")
def test_a_lost_database_and_bucket_are_whole_again(project: Path, plant: Plant, tmp_path: Path) -> None:
    import boto3

    run(sys.executable, "-m", "dvc", "remote", "add", "--default", "store", "s3://clinrl/dvc")
    run(sys.executable, "-m", "dvc", "push", "--quiet")
    given = champions.params()
    paths.AUDIT_LOG.unlink()
    with dolls.few_draws():
        for name in ("v2", "v1"):
            versions.register(given, name)
        examined.promote(given, "v1", "Ada Lovelace", decisions.decide(given, "v1"))
    kept, before = audit_log.read(paths.AUDIT_LOG, keys.keyring()), whole()
    shared = {
        "MLFLOW_BACKEND_STORE_URI": f"postgresql://{plant.database}/mlflow",
        "MLFLOW_ARTIFACTS_DESTINATION": BUCKET,
    }
    backup = tmp_path / "backup"
    assert script("make", str(backup), **shared).returncode == 0
    full = script("restore", str(backup), **shared)
    assert (full.returncode, full.stderr) == (1, "clinrl: s3://clinrl/mlflow is not empty; move it away first\n")

    bucket = boto3.resource("s3").Bucket("clinrl")
    bucket.objects.all().delete()
    taken = script("restore", str(backup), **shared)  # whose artefacts alone are gone
    assert (taken.returncode, "PostgreSQL took nothing: restore into an empty database" in taken.stderr) == (
        1,
        True,
    )
    assert not [*bucket.objects.all()]
    end(plant.mlflow)
    plant.make_database("mlflow")
    lose()
    done = script("restore", str(backup), **shared)
    assert done.returncode == 0, done.stderr
    plant.serve_mlflow()
    run(sys.executable, "-m", "dvc", "pull", "--quiet", "--with-deps", "evaluate@v1", "evaluate@v2")
    check(kept, before)
