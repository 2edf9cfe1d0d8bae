"""Rebuilds a version from nothing and compares it, file by file, with the commit.

A reproduction from a cache proves nothing. So the commit is checked out into a fresh git worktree with an empty DVC
cache, every output of the version and its ancestors is removed there (except the base, which is verified by an address
of its own), and DVC builds them again. They are compared with `dvc.lock` and the files of that commit.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from clinrl import paths
from clinrl.artifacts import digests, identity_of, locked, md5, sha256_file
from clinrl.config.machine import FILE as MACHINE
from clinrl.config.params import Params, load_params
from clinrl.errors import ArtefactError, ParamsError, Refused, did_you_mean, echo
from clinrl.provenance import dvc_yaml, lock, rebuilt
from clinrl.reports.tables import show
from clinrl.runtime import child, dvc_state, starter
from clinrl.signing.keys import signer

Verdict = Literal["equal", "differs", "missing", "extra"]
"""`missing`: committed but not rebuilt. `extra`: rebuilt but not committed."""

FOREIGN = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "DVC_ROOT", "DVC_STAGE", "MLFLOW_TRACKING_URI",
    "CLINRL_SIGNING_KEY", "CLINRL_SIGNING_KEY_FILE", "CLINRL_SIGNING_FINGERPRINT", "CLINRL_SIGNING_PASSWORD",
)  # fmt: skip
"""Variables set by git hooks, by DVC and by people, which would lead the rebuild to the main checkout, its runs or a
key, and which it therefore does not get."""

PREFIX, IN_USE = "clinrl-verify-", "in-use.lock"
"""The start of the name of a checkout's folder, and the lock in it."""


@dataclass(frozen=True, kw_only=True)
class FileVerdict:
    """The verdict on one file of one stage. Digests are `<algorithm>:<hex>`, or empty if there is no such file."""

    stage: str
    file: str
    verdict: Verdict
    committed: str
    rebuilt: str


def stage(address: str, *, keep: bool = False, attest: bool = False, as_json: bool = False) -> int:
    """Rebuild `address` from HEAD, print the verdicts, and return 0 if every file is equal, 1 otherwise.

    `address` is a version or a merge (`esi-v49`: its whole lineage and its exams), `<task>-base` (the base's exam) or
    `base@<task>` (the base itself). The rebuild has this process's environment but for `FOREIGN`, and its processors.
    `keep` leaves the worktree for inspection. If every file is equal, `attest` signs a statement of that and writes it
    to data/attestations. The log of the rebuild goes to standard error. Raises Refused if there is nothing to compare,
    if the rebuild fails, if `attest` finds no key, and as `dvc_state.fence` does.
    """
    root = Path(git(Path.cwd(), "rev-parse", "--show-toplevel").strip())
    if git(Path.cwd(), "rev-parse", "--show-prefix").strip():
        raise Refused(f"a project in a folder of {root} cannot be verified; it must be the root of its git repository")
    commit = git(root, "rev-parse", "HEAD").strip()
    if dirty := git(root, "status", "--porcelain").splitlines():
        echo(f"{len(dirty)} uncommitted files are ignored; this verifies {commit[:12]}")
    dvc_state.fence(root)
    with _worktree(root, commit, keep) as tree:
        params = load_params(tree / "params.yaml")
        target = _target(address, params)
        witness = signer(params.scale) if attest else None  # before the rebuild, which may take hours
        before = lock.read(tree / lock.LOCK)
        if target not in before:
            raise ArtefactError(
                f"{lock.LOCK} of {commit[:12]} has no entry for {target}; run `dvc repro {target}`, commit"
            )
        names = [target] if target.startswith("base@") else rebuilt.lineage(before, target)
        for name in names:
            _remove_outputs(tree, before[name])
        started = time.monotonic()
        _rebuild(tree, target)
        seconds = time.monotonic() - started
        after = lock.read(tree / lock.LOCK)
        added = [name for name in rebuilt.lineage(after, target) if name not in names]
        cache = dvc_yaml.cache_folder(root)
        verdicts = []
        for name in [*names, *added]:
            old, new = before.get(name, {}), after.get(name, {})
            verdicts += [_row(name, str(lock.LOCK), _entry_digest(old), _entry_digest(new))]
            verdicts += compare(name, old, new, lambda out: committed_files(root, commit, cache, out), tree)
        equal = all(row.verdict == "equal" for row in verdicts)
        claim = None
        if equal and witness is not None:
            built = {row.file: row.rebuilt.removeprefix("sha256:") for row in verdicts if row.file != str(lock.LOCK)}
            outs = lock.outputs(after, names)
            claim = rebuilt.statement(address, commit, _identity(address, tree), outs, built)
    files = [asdict(row) for row in verdicts]
    report = {"address": address, "commit": commit, "equal": equal, "files": files}
    show(("verdict", "stage", "file", "committed", "rebuilt"), files, as_json=as_json, content=report)
    good = sum(row.verdict == "equal" for row in verdicts)
    echo(f"{address} at {commit[:12]}, rebuilt in {seconds:.0f} s: {good} of {len(verdicts)} files are equal")
    if claim is not None and witness is not None:  # after the verdict, which thus survives a failure to sign
        echo(f"signed {rebuilt.write(root, claim, witness)}; commit it, or send it on")
    return 0 if equal else 1


def compare(
    name: str,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    committed_of: Callable[[Mapping[str, Any]], dict[str, str] | None],
    tree: Path,
) -> list[FileVerdict]:
    """The verdicts on all output files of one stage, in the order of their paths.

    `old` and `new` are its entries in the committed and in the rebuilt lock, `committed_of` returns the digests of an
    output's committed files, `tree` has the rebuilt files.
    """
    rows = []
    old_outs, new_outs = ({out["path"]: out for out in entry.get("outs", ())} for entry in (old, new))
    for path in sorted(old_outs.keys() | new_outs.keys()):
        committed = committed_of(old_outs[path]) if path in old_outs else {}
        rebuilt = {str(Path(path, file)): f"sha256:{digest}" for file, digest in digests(tree / path).items()}
        if committed is None:  # these files are not here, so only the lock's digests of the whole output are compared
            both = [f"md5:{outs[path]['md5']}" if path in outs else "" for outs in (old_outs, new_outs)]
            if both[0] != both[1]:
                rows.append(_row(name, path, *both))
                continue
            committed = rebuilt
        files = sorted(committed.keys() | rebuilt.keys())
        rows += [_row(name, file, committed.get(file, ""), rebuilt.get(file, "")) for file in files]
    return rows


def committed_files(root: Path, commit: str, cache: Path, out: Mapping[str, Any]) -> dict[str, str] | None:
    """The digest of every committed file of an output in a lock, from git or from the main checkout's DVC cache.

    None if neither has the files undamaged. `cache` is the folder that `dvc_yaml.cache_folder` returns.
    """
    path, recorded = out["path"], out["md5"]
    if listed := git(root, "ls-tree", "-r", "-z", "--name-only", commit, "--", path).split("\0")[:-1]:
        return {
            file: "sha256:"
            + hashlib.sha256(output_of(["git", "cat-file", "blob", f"{commit}:{file}"], root)).hexdigest()
            for file in listed
        }
    parts = {path: recorded}
    if recorded.endswith(".dir"):
        listing = dvc_yaml.stored(cache, recorded)
        if not listing.exists() or f"{md5(listing)}.dir" != recorded:
            return None
        parts = {f"{path}/{entry['relpath']}": entry["md5"] for entry in json.loads(listing.read_bytes())}
    objects = {file: dvc_yaml.stored(cache, part) for file, part in parts.items()}
    if not all(kept.exists() and md5(kept) == parts[file] for file, kept in objects.items()):
        return None
    return {file: f"sha256:{sha256_file(kept)}" for file, kept in objects.items()}


def _row(stage_name: str, file: str, committed: str, rebuilt: str) -> FileVerdict:
    verdict: Verdict = "equal" if committed == rebuilt else "differs"
    if not committed or not rebuilt:
        verdict = "missing" if committed else "extra"
    return FileVerdict(stage=stage_name, file=file, verdict=verdict, committed=committed, rebuilt=rebuilt)


def _entry_digest(entry: Mapping[str, Any]) -> str:
    """The digest of a stage's entry in the lock: its command, its parameters, and the digests of inputs and outputs."""
    return "sha256:" + hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest() if entry else ""


def _target(address: str, params: Params) -> str:
    targets = {name: params.model(name).stage for name in (*params.versions, *params.merges.all, *params.roots)}
    targets |= {f"base@{task}": f"base@{task}" for task in params.bases}
    if address not in targets:
        raise ParamsError(f"{address!r} cannot be verified; {did_you_mean(address, targets)}")
    return targets[address]


def _identity(address: str, tree: Path) -> str:
    """The digest of the rebuilt adapter or full model, by which a release identifies it."""
    name = f"{address.removeprefix('base@')}-base" if address.startswith("base@") else address
    folder = next(folder for folder in (tree / paths.merged(name), tree / paths.adapter(name)) if folder.exists())
    return identity_of(folder)


def _remove_outputs(tree: Path, entry: Mapping[str, Any]) -> None:
    for out in entry.get("outs", ()):
        path = tree / out["path"]
        if ".." in path.parts or not path.parent.resolve().is_relative_to(tree.resolve()):
            raise ArtefactError(f"{lock.LOCK} says that a stage writes {out['path']}, outside of the project")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def _worktree(root: Path, commit: str, keep: bool) -> Iterator[Path]:
    """A checkout of a commit with its own DVC cache. It is removed afterwards, also after an interrupt, unless kept.

    A lock says that it is in use, so what a killed verification left is removed by the next one. A checkout that is
    to be kept has none.
    """
    _remove_killed(root)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    tree = folder / "tree"

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with starter.handling([signal.SIGTERM], stop), nullcontext() if keep else locked(folder / IN_USE):
        try:
            git(root, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet", str(tree), commit)
            dvc_state.fence(tree)
            (folder / "site").mkdir(mode=0o700)  # DVC would make it world-writable
            (tree / ".dvc/config.local").write_text("[cache]\n    dir = ../../cache\n", encoding="utf-8")
            if (root / MACHINE).exists():  # git does not carry it
                shutil.copy2(root / MACHINE, tree)
            yield tree
        finally:
            if keep:
                echo(f"kept {tree}; remove it with `git worktree remove --force {tree}`")
            else:
                _remove(root, folder)


def _remove_killed(root: Path) -> None:
    """Remove the checkouts whose lock nobody holds any more."""
    for line in git(root, "worktree", "list", "--porcelain").splitlines():
        folder = Path(line.removeprefix("worktree ")).parent
        if folder.name.startswith(PREFIX) and not folder.exists():
            _remove(root, folder)
        elif folder.name.startswith(PREFIX) and os.access(folder / IN_USE, os.W_OK):
            with locked(folder / IN_USE, waits=False) as free:
                if free is not None:
                    _remove(root, folder)
    git(root, "worktree", "prune")


def _remove(root: Path, folder: Path) -> None:
    """Remove a checkout from disk, its lock last, and from git: if this is killed, the next verification goes on."""
    for entry in folder.glob("*"):  # which, unlike iterdir, bears a folder that somebody removed
        if entry.name != IN_USE:
            shutil.rmtree(entry, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(Refused):  # git holds a lock of its own on one that it has only begun
        git(root, "worktree", "unlock", str(folder / "tree"))
    git(root, "worktree", "prune")


def _rebuild(tree: Path, target: str) -> None:
    """Run `dvc repro` in the worktree, with its log on standard error. Raises Refused if it fails."""
    env = _environment() | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(tree / "src"),
        "DVC_SITE_CACHE_DIR": str(tree.parent / "site"),
        "DVC_NO_ANALYTICS": "1",
    }
    alone = ["--force", "--single-item"] if target.startswith("base@") else []
    command = [sys.executable, *dvc_state.REPRO, *alone, target]
    rebuild = child.start(command, cwd=tree, env=env, stdout=sys.stderr)
    try:
        code = rebuild.wait()
    finally:
        child.end(rebuild)
    if code != 0:
        raise Refused(f"rebuilding {target} failed with exit code {code}; its log is above")


def git(root: Path, *arguments: str) -> str:
    """The output of a git command in a folder. Raises Refused if it fails."""
    return output_of(["git", *arguments], root).decode()


def output_of(command: Sequence[str], where: Path) -> bytes:
    """The output of a command in a folder, run without the variables in `FOREIGN`. Raises Refused if it fails."""
    done = subprocess.run(command, cwd=where, env=_environment(), capture_output=True, check=False)
    if done.returncode != 0:
        raise Refused(f"`{' '.join(command)}` failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in FOREIGN}
