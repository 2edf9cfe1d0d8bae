"""The clone in which a run works, so that it never touches a person's checkout, and its files in the DVC remote."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from itertools import count
from pathlib import Path

from clinrl import paths
from clinrl.artifacts import locked
from clinrl.config.base import Scale
from clinrl.errors import Refused, mask
from clinrl.provenance import statements
from clinrl.runtime import dvc_state
from clinrl.signing import keys
from clinrl.tracking import mlflow_store
from flows import interpreter

FOLDER = "CLINRL_CLONES"
"""The variable with the folder of clones, by default .clinrl/clones of the checkout."""
AUTHOR = {"NAME": "clinrl", "EMAIL": "clinrl@localhost"}
"""The author of commits in clones; a person merges them."""
OWN = (Path(".dvc/config.local"), Path("machine.yaml"))  # not in git: of the checkout, or of the folder of its clones
SHARED = (keys.FOLDER, statements.FOLDER, paths.CHAMPIONS)
"""The folders that a clone shares with the checkout, so that they count in both: keys, signed statements, and the
answers of champions with the lock under which an alias moves."""

OVERRULED = """commit.gpgSign=false core.excludesFile=/dev/null core.fsmonitor=false core.hooksPath=/dev/null
core.quotePath=false diff.orderFile=/dev/null diff.relative=false gc.autoDetach=false http.lowSpeedLimit=1
http.lowSpeedTime=120 log.showSignature=false merge.ff=true merge.verifySignatures=false push.gpgSign=false
status.showUntrackedFiles=normal"""
"""Settings in place of a person's own, which could sign, run hooks, hide files, refuse to merge or wait for ever."""
GIT = ("git", *(word for setting in OVERRULED.split() for word in ("-c", setting)))
BEGUN = "refs/clinrl/begun"
"""The commit at which the last run of a clone began; the commits of that run follow it."""


class Away(Refused):
    """The origin or the DVC remote failed. Mostly it is away, and the same command succeeds later."""


def head() -> str:
    """The commit of the working directory. Raises Refused outside of git, or if it lacks changes or params.yaml."""
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        raise Refused(
            f"{changed.split(maxsplit=1)[1].splitlines()[0]} is changed and not committed, and other machines build "
            "commits; commit it, or put it back with `git checkout`"
        )
    return git("rev-parse", "HEAD", "HEAD:./params.yaml").split()[0]


@contextmanager
def at(commit: str, name: str, left: Callable[[], None] | None = None) -> Iterator[None]:
    """Work in a clone of this checkout's origin, at a commit, until the block ends. `name` is the clone's purpose.

    `left` is called in the clone before it is reset, if a run that was killed or found the origin away left work there.
    The clone stays, so that a killed training continues in it. A checkout without an origin is the origin itself.
    Stages import clinrl from the clone; the registry stays the checkout's. Raises Refused if it lacks the commit.
    """
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise Refused(f"{commit!r} is no full digest of a commit; `git rev-parse HEAD` prints one")
    checkout, clones = Path.cwd(), Path(os.environ.get(FOLDER) or ".clinrl/clones").absolute()
    prefix, top = git("rev-parse", "--show-prefix"), git("rev-parse", "--show-toplevel")
    fetched = git("config", "--default", top, "--get", "remote.origin.url")
    pushed = git("config", "--default", fetched, "--get", "remote.origin.pushurl")
    origin, to = (str(Path(top, at)) if Path(top, at).exists() else at for at in (fetched, pushed))  # not relative
    _leave_checkout()
    with _own(clones, name) as folder:
        if not (folder / ".git").is_dir():
            part = folder.with_name(f"{folder.name}.partial")  # a kill may leave half a clone
            shutil.rmtree(part, ignore_errors=True)
            git("clone", "--quiet", "--no-checkout", "--origin", "origin", "--", origin, str(part))
            part.rename(folder)
        with chdir(folder):
            for lock in (*Path(".git").glob("*.lock"), *Path(".git/refs").rglob("*.lock")):  # of a git that was killed
                lock.unlink()
            if Path(".git/MERGE_HEAD").exists():
                git("merge", "--abort")
            git("remote", "set-url", "origin", origin)
            git("remote", "set-url", "--push", "origin", to)
            unpushed = "rev-list", "--max-count=1", "HEAD", "--not", BEGUN, "--remotes"  # when last fetched
            if left and git("for-each-ref", BEGUN) and (git("status", "--porcelain") or git(*unpushed)):
                with chdir(folder / prefix):
                    _copy_own(checkout, clones)  # perhaps a new address or password of the DVC remote
                    left()
            git("fetch", "--quiet", "--", origin, commit)
            git("update-ref", "-d", BEGUN)  # what a checkout that is cut short leaves is no run's work
            git("checkout", "--quiet", "--force", "--detach", commit)
            begin_here()
            git("clean", "--quiet", "--force", "-d")  # what git ignores stays
        with chdir(folder / prefix):
            _copy_own(checkout, clones)
            _link_shared(checkout, may_have_keys=name == "worker")  # a worker registers nothing
            Path(".dvc/tmp/rwlock").unlink(missing_ok=True)  # it names dead processes: no other works here
            os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "src"), str(folder)])
            dvc_state.fence()
            yield


def _copy_own(*places: Path) -> None:
    """Copy the files that git does not carry into the working directory. The last place counts, and none removes it."""
    for own in OWN:
        own.unlink(missing_ok=True)
        for found in (place / own for place in places if (place / own).exists()):
            shutil.copy2(found, own)


def _leave_checkout() -> None:
    """Make the paths in environment variables absolute, and drop git's variables about the checkout, as in a hook."""
    for variable in git("rev-parse", "--local-env-vars").split():
        if not variable.startswith("GIT_CONFIG"):
            os.environ.pop(variable, None)
    os.environ["MLFLOW_TRACKING_URI"] = mlflow_store.store()
    files = ("CLINRL_SIGNING_KEY_FILE", interpreter.SETTING)
    os.environ |= {setting: os.path.abspath(os.environ[setting]) for setting in files if os.environ.get(setting)}


def _link_shared(checkout: Path, *, may_have_keys: bool) -> None:
    """Link the shared folders to those of the checkout. Raises Refused for keys that would count here alone."""
    for shared in SHARED:
        if shared.is_symlink():  # perhaps to a checkout that has moved
            shared.unlink()
        if (checkout / shared).is_dir() and not shared.exists():
            shared.parent.mkdir(exist_ok=True)
            shared.symlink_to(checkout / shared)
        elif shared == keys.FOLDER and shared.is_dir() and not may_have_keys:
            raise Refused(f"{Path.cwd() / shared} holds keys that count in this clone alone; move it away")


def begin_here() -> None:
    """Mark the present commit as the start of this run: a later run hands over only what follows it."""
    git("update-ref", BEGUN, "HEAD")


@contextmanager
def _own(parent: Path, name: str) -> Iterator[Path]:
    """The first clone of a name in which no other process works, locked until this block or this process ends."""
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in count(1):
        folder = parent / f"{name}-{number}"
        with locked(folder.with_suffix(".lock"), waits=False) as stream:
            if stream:
                yield folder
                return


def share(scale: Scale) -> None:
    """Make the folders that clones share with the checkout, and a key: one made in a clone would count nowhere else."""
    keys.signer(scale)
    for shared in SHARED:
        shared.mkdir(mode=0o700, parents=True, exist_ok=True)


def git(*words: str, strip: bool = True, date: str = "") -> str:
    """The output of git; `date`: of a commit. Raises Refused if it fails, Away if that was about another repository."""
    says = AUTHOR | ({"DATE": date} if date else {})
    env = os.environ | {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in says.items()}
    env["GIT_TERMINAL_PROMPT"] = "0"
    done = subprocess.run([*GIT, *words], capture_output=True, text=True, errors="replace", env=env, check=False)
    if done.returncode:
        lines = [*map(str.strip, done.stderr.strip().splitlines())] or ["no word"]  # a hint may follow the reason
        reason = mask(next((line for line in lines if line.startswith(("fatal: ", "error: ", "! ["))), lines[-1]))
        if "not our ref" in reason:
            raise Refused(f"the origin lacks the commit {words[-1]}; `git push` it, and give the same command again")
        error = Away if words[0] in ("clone", "fetch", "push", "ls-remote") else Refused
        raise error(f"git {words[0]} failed in {Path.cwd()}: {reason}")
    return done.stdout.strip() if strip else done.stdout
