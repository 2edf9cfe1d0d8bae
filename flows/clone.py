"""The clone in which a run works, so that it never touches a person's checkout, and the branch that it hands over.

Git carries what stages wrote as text: their entries in dvc.lock, and reports. The DVC remote carries the rest by its
digests in dvc.lock. DVC's run cache would need no branch, and is believed unchecked: nobody could say who wrote there.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import chdir, contextmanager
from itertools import count, product
from pathlib import Path

from clinrl.artifacts import write_text
from clinrl.errors import Refused, mask
from clinrl.provenance.lock import LOCK
from clinrl.runtime import dvc_state
from clinrl.runtime.dvc_command import HEAD, Stages
from clinrl.tracking import mlflow_store

FOLDER = "CLINRL_CLONES"
"""Variable: where clones lie, by default in .clinrl/clones of the checkout."""
BUILT = "built"
"""What branches begin with that hold what one worker made of one commit."""
AUTHOR = {"NAME": "clinrl", "EMAIL": "clinrl@localhost"}
"""Who commits in clones; a person merges."""
OWN = (Path(".dvc/config.local"), Path("machine.yaml"))
"""What a machine says of itself outside of git: in the checkout, or in the folder of its clones."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


class Away(Refused):
    """The origin, or the DVC remote, did not do what was asked: mostly it is away, and does it later."""


def head() -> str:
    """The commit of the working directory. Raises Refused outside of git, and where tracked files differ from it."""
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        raise Refused(
            f"{changed.split(maxsplit=1)[1].splitlines()[0]} is changed and not committed, and other machines build "
            "commits; commit it, or put it back with `git checkout`"
        )
    return git("rev-parse", "HEAD")


@contextmanager
def at(commit: str, name: str) -> Iterator[None]:
    """Work in a clone of this checkout's origin, at a commit, until the block ends. `name` is whom the clone is for.

    The clone stays, with checkpoints and DVC's cache, so that a training that was killed goes on there. A checkout
    without an origin is the origin itself. Stages import clinrl as it is in the clone, and the registry stays the
    checkout's. Raises Refused for what is no commit, or one that the origin does not have.
    """
    if not _COMMIT.fullmatch(commit):
        raise Refused(f"{commit!r} is no full digest of a commit; `git rev-parse HEAD` prints one")
    checkout = Path.cwd()
    origin = git("config", "--default", str(checkout), "--get", "remote.origin.url")
    os.environ.setdefault("MLFLOW_TRACKING_URI", mlflow_store.store())  # before the folder changes
    clones = Path(os.environ.get(FOLDER) or ".clinrl/clones").absolute()
    with _own(clones, name) as folder:
        if not (folder / ".git").is_dir():
            part = folder.with_name(f"{folder.name}.partial")  # a kill may leave half a clone
            shutil.rmtree(part, ignore_errors=True)
            git("clone", "--quiet", "--no-checkout", "--", origin, str(part))
            part.rename(folder)
        with chdir(folder):
            git("fetch", "--quiet", "--", origin, commit)
            git("checkout", "--quiet", "--force", "--detach", commit)
            git("clean", "--quiet", "--force", "-d")  # what git ignores stays
            for place, own in product((checkout, clones), OWN):
                if (place / own).exists():
                    shutil.copy2(place / own, own)
            os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "src"), str(folder)])
            dvc_state.fence()
            yield


@contextmanager
def _own(parent: Path, name: str) -> Iterator[Path]:
    """The first clone of a name in which no other process works. The kernel frees it with its process."""
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in count(1):
        folder = parent / f"{name}-{number}"
        with folder.with_suffix(".lock").open("a") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield folder
            return


def pull(addresses: Collection[str]) -> None:
    """Fetch the outputs of stages that dvc.lock records and the remote has. What it has not is built."""
    _dvc("pull", addresses)


def push(addresses: Collection[str]) -> None:
    """Send the outputs of stages to the remote, as far as they are made. Raises Away with DVC's words if that fails."""
    if code := (done := _dvc("push", addresses)).returncode:
        said = mask((done.stderr.strip().splitlines() or [f"exit code {code}"])[-1])
        raise Away(f"what was made could not be sent to the DVC remote, and is kept here: {said}")


def branch(commit: str, name: str) -> str:
    """The branch that holds what a worker made of `name` at a commit."""
    return f"{BUILT}/{commit[:12]}/{name}"


def hand_over(to: str, message: str) -> None:
    """Commit what stages wrote, and make it a branch of the origin; an older one of that name gives way."""
    git("add", "--all")
    if git("status", "--porcelain"):
        git("commit", "--quiet", "--message", message)
    git("push", "--quiet", "--force", "origin", f"HEAD:refs/heads/{to}")


def offers(to: str) -> bool:
    """Whether the origin has a branch."""
    return bool(git("ls-remote", "--heads", "origin", f"refs/heads/{to}"))


def take_in(of: str, addresses: Collection[str], message: str) -> list[str]:
    """Commit here what a branch has made of some stages. Returns the addresses whose entries changed.

    Other branches may have written to dvc.lock meanwhile, so entries are taken and not the file. Raises Refused if the
    branch changes anything but entries and outputs of these stages: a worker that does is broken, or not ours.
    """
    git("fetch", "--quiet", "origin", f"refs/heads/{of}")
    base = git("merge-base", "HEAD", "FETCH_HEAD")
    changed = git("diff", "--name-only", "--no-renames", base, "FETCH_HEAD").splitlines()
    stages = _entries("FETCH_HEAD")
    before, theirs, ours = dict(_entries(base)), dict(stages), dict(_entries("HEAD"))  # as text
    new = {address: text for address, text in theirs.items() if before.get(address) != text}
    if foreign := [address for address in [*new, *(before.keys() - theirs.keys())] if address not in addresses]:
        raise Refused(f"branch {of} changes the stage {foreign[0]} in dvc.lock, which was not asked of it")
    outs = {out["path"] for address in addresses for out in (stages.get(address) or {}).get("outs", ())}
    reports = [path for path in changed if path != str(LOCK)]
    if foreign := [path for path in reports if outs.isdisjoint([path, *map(str, Path(path).parents)])]:
        raise Refused(f"branch {of} changes {foreign[0]}, which no stage that was asked of it writes")
    if reports:
        git("checkout", "FETCH_HEAD", "--", *reports)
    write_text(LOCK, HEAD + "".join((ours | new).values()))
    git("add", "--all")
    if git("status", "--porcelain"):
        git("commit", "--quiet", "--message", message)
    return [*new]


def _entries(commit: str) -> Stages:
    """The entries of dvc.lock at a commit, by address: text, which `get` reads."""
    return Stages(git("show", f"{commit}:{LOCK}", strip=False).removeprefix(HEAD))


def git(*words: str, strip: bool = True) -> str:
    """What git says. Raises Refused with its last words if it fails, Away if another repository was asked."""
    env = os.environ | {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in AUTHOR.items()}
    env["GIT_TERMINAL_PROMPT"] = "0"
    done = subprocess.run(["git", *words], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        said = mask((done.stderr.strip().splitlines() or ["no word"])[-1])
        error = Away if words[0] in ("clone", "fetch", "push", "ls-remote") else Refused
        raise error(f"git {words[0]} failed in {Path.cwd()}: {said}")
    return done.stdout.strip() if strip else done.stdout


def _dvc(command: str, addresses: Collection[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dvc", command, "--quiet", *addresses], capture_output=True, text=True, check=False
    )
