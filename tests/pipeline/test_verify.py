"""Rebuilding from nothing, on a small project with real git and real DVC whose stages are cheap."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path

import pytest

from clinrl.artifacts import identity, read_manifest, sha256_file
from clinrl.errors import ArtefactError, Refused, SignatureError
from clinrl.pipeline import verify
from clinrl.runtime.dvc_digest import md5
from clinrl.signing import dsse
from clinrl.signing.keys import OURS, keyring
from intoto import validated

ROOT = Path(__file__).resolve().parents[2]

STAGES = """\
stages:
  base:
    foreach: ${bases}
    do:
      cmd: python make.py base ${key}
      outs:
        - data/bases/${key}: {cache: false}
        - data/adapters/${key}-base: {cache: false}
  train:
    foreach: ${versions}
    do:
      cmd: python make.py train ${key}
      deps: ["data/adapters/${item.parent}"]
      params: ["versions.${key}.parent"]
      outs: ["data/adapters/${key}"]
  evaluate:
    foreach: ${versions}
    do:
      cmd: python make.py evaluate ${key}
      deps: ["data/adapters/${key}"]
      outs:
        - data/reports/${key}/summary.json: {cache: false}
"""
MAKE = """\
import json, os, pathlib, sys, time

stage, name = sys.argv[1:]
folder = {"base": "data/bases", "train": "data/adapters", "evaluate": "data/reports"}[stage]
outs = [pathlib.Path(folder) / name] + ([pathlib.Path(f"data/adapters/{name}-base")] if stage == "base" else [])
for out in outs:
    out.mkdir(parents=True, exist_ok=True)
    text = f"{stage} {name}\\n"
    if (stage, name) == ("train", "moody"):
        text += f"{time.time_ns()}\\n"
    if (stage, name) == ("train", "sets"):
        text += " ".join({"a", "b", "c", "d", "e", "f", "g"}) + "\\n"
    if (stage, name) == ("train", "slow") and pathlib.Path("data/slow").exists():
        pathlib.Path(os.environ["STARTED"]).write_text(str(os.getpid()))
        time.sleep(600)
    if (stage, name) == ("train", "broken") and pathlib.Path("data/slow").exists():
        sys.exit("no adapter today")
    (out / "summary.json").write_text(text)
    (out / "constant.txt").write_text("constant\\n")
    if stage == "train":
        manifest = {"kind": "adapter", "name": name, "task": "esi", "task_version": 1, "spec": {}, "inputs": {}}
        (out / "manifest.json").write_text(json.dumps(manifest | {"files": {}}))
"""
PARAMS = """\
scale: embedded
bases:
  esi:
    exam: esi-x1
    embedded: {template: qwen3_5_think, vocab: 512, hidden: 32, layers: 2, heads: 2, kv_heads: 2, mlp: 64,
               cases: 100, forget: 0.3, steps: 10, batch: 4, lr: 1.0e-3, prompt_weight: 0.1, seed: 1}
    full: {repo: Qwen/Qwen3.5-9B, revision: main, quantize: nf4}
modes:
  think: {thinking: true, temperature: 0.0, max_new_tokens: {embedded: 64, full: 64}}
datasets:
  esi-d1: {task: esi, task_version: 1, use: train, mix: natural, cases: 10, seed: 7}
  esi-x1: {task: esi, task_version: 1, use: exam, mix: reporting, cases: 10, seed: 8}
profiles:
  root:
    method: sft
    modes: [think]
    lora: {rank: 2, alpha: 2, targets: all-linear}
    trainer: {embedded: {lr: 1.0e-3, steps: 2, batch: 2}, full: {lr: 1.0e-3, steps: 2, batch: 2}}
versions:
"""
VERSION = "  {name}: {{task: esi, parent: {parent}, data: esi-d1, exam: esi-x1, profile: root, seed: 1}}\n"
PARENTS = {"steady": "esi-base", "child": "steady", "moody": "esi-base", "sets": "steady", "slow": "steady"}
PARENTS["broken"] = "steady"


def run(*command: str, where: Path) -> None:
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "DVC_NO_ANALYTICS": "1"}
    subprocess.run(command, cwd=where, check=True, capture_output=True, env=env | {"PYTHONHASHSEED": "1"})


def worktrees(project: Path) -> int:
    listed = subprocess.run(["git", "worktree", "list"], cwd=project, capture_output=True, text=True, check=True)
    return len(listed.stdout.splitlines())


def running(pid: int) -> bool:
    """Whether a process exists and is not just waiting for whoever adopted it to take notice of its end."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(listed.stdout.strip()) and not listed.stdout.strip().startswith("Z")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed project in which everything was built once."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "dvc.yaml").write_text(STAGES)
    (folder / "make.py").write_text(MAKE)
    (folder / "params.yaml").write_text(PARAMS + "".join(VERSION.format(name=n, parent=p) for n, p in PARENTS.items()))
    (folder / ".gitignore").write_text("/.clinrl/\n/data/adapters/*\n!/data/adapters/*-base/\n")
    run("git", "init", "-q", ".", where=folder)
    run("git", "config", "user.name", "t", where=folder)
    run("git", "config", "user.email", "t@example.org", where=folder)
    run(sys.executable, "-m", "dvc", "init", "-q", where=folder)
    run(sys.executable, "-m", "dvc", "repro", "-q", where=folder)
    (folder / "data/slow").write_text("")
    run("git", "add", "-A", where=folder)
    run("git", "commit", "-qm", "built", where=folder)
    return folder


@pytest.fixture
def verdicts(project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run a verification in the project; returns its exit code and its report."""
    monkeypatch.chdir(project)

    def verdicts(address: str, **options):
        code = verify.stage(address, as_json=True, **options)
        return code, json.loads(capfd.readouterr().out)

    return verdicts


def test_a_deterministic_lineage_is_equal_file_by_file(project: Path, verdicts) -> None:
    code, report = verdicts("child", threads=1, attest=True)
    assert code == 0
    assert report["equal"]
    files = [(row["stage"], row["file"]) for row in report["files"]]
    assert ("train@steady", "data/adapters/steady/constant.txt") in files
    assert ("evaluate@child", "data/reports/child/summary.json") in files
    assert not [stage for stage, _ in files if stage.startswith("base@")]
    assert all(row["committed"].startswith("sha256:") for row in report["files"])
    assert worktrees(project) == 1

    # An equal rebuild is attested.
    [written] = (project / "data/attestations/child").iterdir()
    with chdir(project):
        who, said = dsse.open_envelope(json.loads(written.read_text()), keyring())
    validated(said)
    folder, told = project / "data/adapters/child", said["predicate"]
    assert (who, told["name"], told["equal"]) == (OURS, "child", True)
    assert told["identity"] == identity(read_manifest(folder))
    subjects = {subject["name"]: subject["digest"] for subject in said["subject"]}
    assert subjects["data/adapters/child"] == {"dvcMd5": md5(folder)}
    assert subjects["data/adapters/child/manifest.json"] == {"sha256": sha256_file(folder / "manifest.json")}
    assert "data/reports/child/summary.json" in subjects
    shutil.rmtree(project / "data/attestations")


def test_who_cannot_sign_hears_so_before_the_rebuild(verdicts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLINRL_SIGNING_KEY", "no key")
    monkeypatch.setattr(verify, "_rebuild", None)
    with pytest.raises(SignatureError, match="CLINRL_SIGNING_KEY holds no P-256 private key"):
        verdicts("steady", attest=True)


def test_a_file_that_changes_from_run_to_run_is_named_and_nothing_attested(project: Path, verdicts) -> None:
    code, report = verdicts("moody", attest=True)
    assert code == 1
    assert not (project / "data/attestations").exists()
    differing = {row["file"] for row in report["files"] if row["verdict"] != "equal"}
    assert differing == {"dvc.lock", "data/adapters/moody/summary.json"}


def test_the_hash_seed_reaches_the_rebuild_and_a_kept_worktree_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.chdir(project)
    assert verify.stage("sets", hash_seed=1, keep=True) == 0
    kept = next(line for line in capfd.readouterr().err.splitlines() if "kept" in line).split()[2].rstrip(";")
    assert (Path(kept) / "data/adapters/steady/constant.txt").exists()
    shutil.rmtree(Path(kept).parent)
    run("git", "worktree", "prune", where=project)
    assert verify.stage("sets", hash_seed=2) == 1


def test_the_base_is_rebuilt_under_its_own_address(project: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(project)
    (project / "stray.txt").write_text("")
    code = verify.stage("base@esi", as_json=True)
    (project / "stray.txt").unlink()
    out, err = capfd.readouterr()
    assert code == 0
    assert "1 uncommitted files are not looked at" in err
    report = json.loads(out)
    assert {row["stage"] for row in report["files"]} == {"base@esi"}
    assert "data/adapters/esi-base/constant.txt" in {row["file"] for row in report["files"]}


def test_without_a_cache_the_lock_decides(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    clone = tmp_path / "clone"
    run("git", "clone", "-q", str(project), str(clone), where=tmp_path)
    monkeypatch.chdir(clone)
    assert verify.stage("moody") == 1
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("equal\tevaluate@moody") for line in lines)
    assert any(line.startswith("differs\ttrain@moody\tdata/adapters/moody\tmd5:") for line in lines)


def test_a_rebuild_that_fails_is_refused(verdicts) -> None:
    with pytest.raises(Refused, match=r"rebuilding evaluate@broken failed with exit code \d+"):
        verdicts("broken")


def test_an_unknown_address_is_refused_with_those_that_exist(verdicts) -> None:
    with pytest.raises(Refused, match=r"'esi-v99' cannot be verified; HEAD has steady, child"):
        verdicts("esi-v99")


def test_a_version_that_was_never_built_is_refused(verdicts) -> None:
    with pytest.raises(ArtefactError, match="no entry for baseline@esi"):
        verdicts("esi-base")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_an_interrupt_ends_the_rebuild_and_leaves_nothing(project: Path, tmp_path: Path, number: int) -> None:
    started = tmp_path / "started"
    env = os.environ | {"STARTED": str(started), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    code = "import sys; from clinrl.pipeline import verify; sys.exit(verify.stage('slow'))"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=project, env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not started.exists() or not started.read_text():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(number)
    assert child.wait(300) != 0
    assert not running(int(started.read_text()))
    assert list(tmp_path.glob("clinrl-verify-*")) == []
    assert worktrees(project) == 1


def test_nothing_is_verified_with_pickles_that_others_can_write(project: Path, verdicts) -> None:
    (project / ".dvc/tmp").chmod(0o775)
    try:
        with pytest.raises(Refused, match="others than you can write in"):
            verdicts("steady")
    finally:
        (project / ".dvc/tmp").chmod(0o700)


def test_a_rebuild_is_closed_to_others_whatever_the_umask(project: Path) -> None:
    commit = verify._git(project, "rev-parse", "HEAD").strip()
    before = os.umask(0o002)
    try:
        with verify._worktree(project, commit, keep=False) as tree:
            places = [tree / ".dvc", tree / ".dvc/tmp", tree.parent / "site"]
            assert not [place for place in places if place.stat().st_mode & 0o022]
    finally:
        os.umask(before)
