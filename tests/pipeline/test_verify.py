"""Rebuilding from nothing, on a small project with real git and real DVC whose stages are cheap."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import chdir
from pathlib import Path

import pytest

from clinrl.artifacts import dump_yaml, identity, md5, read_manifest, sha256_file
from clinrl.config.plain_yaml import read_yaml
from clinrl.errors import ArtefactError, Refused, SignatureError
from clinrl.pipeline import verify
from clinrl.provenance import dvc_yaml, lock
from clinrl.signing import dsse
from clinrl.signing.keys import OURS, keyring
from forks import dvc
from intoto import validated
from processes import alive

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
if told := os.environ.get("TOLD"):
    foreign = os.environ.keys() & set(os.environ["FOREIGN"].split())
    pathlib.Path(told).write_text(" ".join(sorted(foreign)) or "None")
folder = {"base": "data/bases", "train": "data/adapters", "evaluate": "data/reports"}[stage]
outs = [pathlib.Path(folder) / name] + ([pathlib.Path(f"data/adapters/{name}-base")] if stage == "base" else [])
for out in outs:
    out.mkdir(parents=True, exist_ok=True)
    text = f"{stage} {name}\\n"
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
        manifest = {"kind": "adapter", "name": name, "task": "esi", "task_version": 2, "spec": {}, "inputs": {}}
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
  esi-d1: {task: esi, task_version: 2, use: train, mix: natural, cases: 10, seed: 7}
  esi-x1: {task: esi, task_version: 2, use: exam, mix: reporting, cases: 10, seed: 8}
profiles:
  root:
    method: sft
    modes: [think]
    lora: {rank: 2, alpha: 2, targets: all-linear}
    trainer: {embedded: {lr: 1.0e-3, steps: 2, batch: 2}, full: {lr: 1.0e-3, steps: 2, batch: 2}}
versions:
"""
VERSION = "  {name}: {{task: esi, parent: {parent}, data: esi-d1, exam: esi-x1, profile: root, seed: 1}}\n"
PARENTS = {"steady": "esi-base", "sets": "steady", "slow": "steady", "broken": "steady"}


def run(*command: str, where: Path) -> None:
    subprocess.run(command, cwd=where, check=True, capture_output=True)


def worktrees(project: Path) -> int:
    listed = subprocess.run(["git", "worktree", "list"], cwd=project, capture_output=True, text=True, check=True)
    return len(listed.stdout.splitlines())


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
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the stages say `python`
    dvc("init", "-q", where=folder)
    dvc("repro", "-q", where=folder, PATH=path, PYTHONHASHSEED="1")
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


@pytest.mark.long
def test_a_deterministic_lineage_is_equal_file_by_file(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the hash seed of the first build, which one file of it shows."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(own)])
    try:
        assert verify.stage("sets", keep=True, attest=True, as_json=True) == 0
    finally:
        os.sched_setaffinity(0, own)
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert report["equal"]
    files = [(row["stage"], row["file"]) for row in report["files"]]
    assert ("train@steady", "data/adapters/steady/constant.txt") in files
    assert ("evaluate@sets", "data/reports/sets/summary.json") in files
    assert not [stage for stage, _ in files if stage.startswith("base@")]
    assert all(row["committed"].startswith("sha256:") for row in report["files"])

    # The worktree is named, and kept.
    kept = Path(next(line for line in err.splitlines() if "kept" in line).split()[2].rstrip(";"))
    assert (kept / "data/adapters/steady/constant.txt").exists()
    shutil.rmtree(kept.parent)
    run("git", "worktree", "prune", where=project)

    # An equal rebuild is attested.
    [written] = (project / "data/attestations/sets").iterdir()
    with chdir(project):
        who, said = dsse.open_envelope(json.loads(written.read_text()), keyring())
    validated(said)
    folder, told = project / "data/adapters/sets", said["predicate"]
    assert (who, told["name"], told["equal"]) == (OURS, "sets", True)
    assert told["identity"] == identity(read_manifest(folder))
    subjects = {subject["name"]: subject["digest"] for subject in said["subject"]}
    assert subjects["data/adapters/sets"] == {"dvcMd5": md5(folder)}
    assert subjects["data/adapters/sets/manifest.json"] == {"sha256": sha256_file(folder / "manifest.json")}
    assert "data/reports/sets/summary.json" in subjects
    shutil.rmtree(project / "data/attestations")


@pytest.mark.long
def test_who_cannot_sign_hears_so_before_the_rebuild(verdicts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLINRL_SIGNING_KEY", "no key")
    monkeypatch.setattr(verify, "_rebuild", None)
    with pytest.raises(SignatureError, match="CLINRL_SIGNING_KEY holds no P-256 private key"):
        verdicts("steady", attest=True)


@pytest.mark.long
def test_a_file_that_changes_with_the_hash_seed_is_named_and_nothing_attested(
    project: Path, verdicts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    code, report = verdicts("sets", attest=True)
    assert code == 1
    assert not (project / "data/attestations").exists()
    assert worktrees(project) == 1
    differing = {(row["stage"], row["file"]) for row in report["files"] if row["verdict"] != "equal"}
    after = [("train@sets", "data/adapters/sets/summary.json"), ("evaluate@sets", "dvc.lock")]
    assert differing == {("train@sets", "dvc.lock"), *after}


@pytest.mark.long
def test_the_base_is_rebuilt_under_its_own_address(project: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(project)
    git = {"GIT_DIR": ".git", "GIT_WORK_TREE": ".", "GIT_INDEX_FILE": ".git/index", "GIT_PREFIX": "."}  # as in a hook
    keys = [f"CLINRL_SIGNING_{part}" for part in ("KEY", "KEY_FILE", "FINGERPRINT", "PASSWORD")]
    foreign = {name: str(project / path) for name, path in git.items()} | dict.fromkeys(keys, "a key")
    foreign["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:1"
    for name, value in (foreign | {"FOREIGN": " ".join(foreign)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOLD", str(tmp_path / "tracking"))
    hook = project / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    (project / "stray.txt").write_text("")
    code = verify.stage("base@esi", as_json=True)
    (project / "stray.txt").unlink()
    hook.unlink()
    assert not (tmp_path / "hooked").exists()
    assert (tmp_path / "tracking").read_text() == "None"
    out, err = capfd.readouterr()
    assert code == 0
    assert "1 uncommitted files are ignored" in err
    report = json.loads(out)
    assert {row["stage"] for row in report["files"]} == {"base@esi"}
    assert "data/adapters/esi-base/constant.txt" in {row["file"] for row in report["files"]}


@pytest.mark.long
def test_without_a_cache_the_lock_decides(project: Path, tmp_path: Path) -> None:
    recorded, commit = lock.read(project / "dvc.lock"), verify.git(project, "rev-parse", "HEAD").strip()
    trained, taken = recorded["train@sets"], recorded["evaluate@sets"]

    def compared(name: str, old, new, cache: Path):
        return verify.compare(name, old, new, lambda out: verify.committed_files(project, commit, cache, out), project)

    assert [row.file for row in compared("train", trained, trained, project / ".dvc/cache/files/md5")] == [
        f"data/adapters/sets/{name}" for name in ("constant.txt", "manifest.json", "summary.json")
    ]
    other = {**trained, "outs": [out | {"md5": "0.dir"} for out in trained["outs"]]}
    rows = compared("train", trained, other, tmp_path)
    [(path, old)] = [(out["path"], out["md5"]) for out in trained["outs"]]
    assert [(r.file, r.verdict, r.committed, r.rebuilt) for r in rows] == [(path, "differs", f"md5:{old}", "md5:0.dir")]
    assert {row.verdict for row in compared("train", trained, trained, tmp_path)} == {"equal"}
    assert {row.verdict for row in compared("evaluate", taken, taken, tmp_path)} == {"equal"}  # git has it
    for damaged, (name, content) in enumerate((("", b"x"), (".dir", b"[]"))):
        cache = tmp_path / f"damaged-{damaged}"
        shutil.copytree(project / ".dvc/cache/files/md5", cache)
        for kept in cache.glob("??/*"):
            if kept.name.endswith(".dir") is bool(name):
                kept.chmod(0o600)
                kept.write_bytes(content)
        assert {row.verdict for row in compared("train", trained, trained, cache)} == {"equal"}


@pytest.mark.slow
def test_an_ancestor_that_the_lock_lacks_is_extra(project: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    clone = tmp_path / "clone"
    run("git", "clone", "-q", str(project), str(clone), where=tmp_path)
    entries = read_yaml(clone / "dvc.lock")
    del entries["stages"]["train@steady"]
    (clone / "dvc.lock").write_text(dump_yaml(entries))
    run("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qam", "less", where=clone)
    monkeypatch.chdir(clone)
    assert verify.stage("steady") == 1
    verdicts = dict.fromkeys(
        line.split("\t")[0] for line in capfd.readouterr().out.splitlines() if "train@steady" in line
    )
    assert list(verdicts) == ["extra"]


@pytest.mark.slow
def test_in_a_clone_without_a_cache_the_lock_decides(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    clone = tmp_path / "clone"
    run("git", "clone", "-q", str(project), str(clone), where=tmp_path)
    monkeypatch.chdir(clone)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert verify.stage("sets") == 1
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("equal\tevaluate@sets") for line in lines)
    assert any(line.startswith("differs\ttrain@sets\tdata/adapters/sets\tmd5:") for line in lines)


def test_a_dvc_that_fails_is_refused(verdicts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\nexit 7\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(Refused, match="rebuilding evaluate@broken failed with exit code 7"):
        verdicts("broken")


@pytest.mark.slow
def test_a_rebuild_that_fails_is_refused(verdicts) -> None:
    with pytest.raises(Refused, match=r"rebuilding evaluate@broken failed with exit code \d+"):
        verdicts("broken")


def test_an_unknown_address_is_refused_with_those_that_exist(verdicts) -> None:
    with pytest.raises(Refused, match=r"'esi-v99' cannot be verified; allowed: esi-base"):
        verdicts("esi-v99")


def test_an_entry_that_names_a_folder_elsewhere_removes_nothing(tmp_path: Path) -> None:
    """dvc.lock comes with a branch that somebody pushed."""
    tree, mine = tmp_path / "tree", tmp_path / "mine"
    for folder in (tree, mine):
        folder.mkdir()
        (folder / "kept").write_text("")
    (tree / "link").symlink_to(mine)
    for path in ("../mine", str(mine), "link/kept", "..", "data/../.."):
        with pytest.raises(ArtefactError, match="outside of the project"):
            verify._remove_outputs(tree, {"outs": [{"path": path}]})
    assert (mine / "kept").exists()
    verify._remove_outputs(tree, {"outs": [{"path": "kept"}, {"path": "gone"}, {"path": "link"}]})
    assert (mine / "kept").exists()
    assert not (tree / "kept").exists()


def test_a_version_that_was_never_built_is_refused(verdicts) -> None:
    with pytest.raises(ArtefactError, match="no entry for baseline@esi"):
        verdicts("esi-base")


@pytest.mark.long
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
    assert not alive(int(started.read_text()))
    assert list(tmp_path.glob("clinrl-verify-*")) == []
    assert worktrees(project) == 1


@pytest.mark.long
def test_what_a_killed_verification_left_is_removed_by_the_next_one_alone(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    commit, hangs = verify.git(project, "rev-parse", "HEAD").strip(), tmp_path / "hangs"
    code = (
        "import sys, pathlib, time; from clinrl.pipeline import verify\n"
        "with verify._worktree(pathlib.Path.cwd(), sys.argv[1], False) as tree:\n"
        "    pathlib.Path(sys.argv[2]).write_text(str(tree)); time.sleep(600)"
    )
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    child = subprocess.Popen([sys.executable, "-c", code, commit, str(hangs)], cwd=project, env=env)
    (project / "machine.yaml").write_text("processes: 1\n")
    try:
        with verify._worktree(project, commit, keep=True) as kept:
            assert (kept / "machine.yaml").read_text() == "processes: 1\n"
        while not hangs.exists() or not hangs.read_text():
            assert child.poll() is None
            time.sleep(0.05)
        used = Path(hangs.read_text())
        with verify._worktree(project, commit, keep=False):
            assert (used.exists(), kept.exists(), worktrees(project)) == (True, True, 4)
    finally:
        child.kill()
        child.wait()
    assert used.exists()
    with verify._worktree(project, commit, keep=False):
        assert (used.parent.exists(), kept.exists(), worktrees(project)) == (False, True, 3)
    run("git", "worktree", "remove", "--force", str(kept), where=project)
    assert worktrees(project) == 1
    begun = tmp_path / "clinrl-verify-begun/tree"  # an interrupt while git makes a checkout leaves it locked
    run("git", "worktree", "add", "--quiet", "--detach", "--lock", str(begun), where=project)
    shutil.rmtree(begun.parent)
    with verify._worktree(project, commit, keep=False):
        assert worktrees(project) == 2


def test_nothing_is_verified_with_pickles_that_others_can_write(project: Path, verdicts) -> None:
    (project / ".dvc/tmp").chmod(0o775)
    try:
        with pytest.raises(Refused, match="other users can write in"):
            verdicts("steady")
    finally:
        (project / ".dvc/tmp").chmod(0o700)


def test_a_rebuild_is_closed_to_others_whatever_the_umask_and_has_a_cache_of_its_own(project: Path) -> None:
    commit = verify.git(project, "rev-parse", "HEAD").strip()
    before = os.umask(0o002)
    try:
        with verify._worktree(project, commit, keep=False) as tree:
            places = [tree / ".dvc", tree / ".dvc/tmp", tree.parent / "site"]
            assert not [place for place in places if place.stat().st_mode & 0o022]
            assert dvc_yaml.cache_folder(tree).resolve() == tree.parent / "cache/files/md5"
    finally:
        os.umask(before)


def test_a_file_too_few_and_one_too_many_are_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/new").write_text("x")
    out = {"outs": [{"path": "out", "md5": "1.dir"}]}
    rows = verify.compare("s", out, out, lambda _: {"out/old": "sha256:0"}, tmp_path)
    assert {(row.file, row.verdict) for row in rows} >= {("out/new", "extra"), ("out/old", "missing")}
