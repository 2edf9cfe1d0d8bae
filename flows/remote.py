"""The DVC remote of a clone, which carries what git does not, and whether a clone may write to both."""

import hashlib
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from uuid import uuid4

from clinrl.errors import Refused, mask
from clinrl.provenance import dvc_yaml
from flows.clone import Away, git

WRITE = """import sys, tempfile
from dvc.fs import LocalFileSystem
from dvc.repo import Repo
with tempfile.NamedTemporaryFile() as file:
    file.write(sys.argv[2].encode())
    file.flush()
    Repo().cloud.get_remote().odb.add(file.name, LocalFileSystem(), sys.argv[1], check_exists=False)"""
"""A program that writes a text by its digest to the DVC remote, as `dvc push` writes a file."""
_AWAY = r"failed to (?:connect to (?!.*not exist)|transfer (?!.*(?:not exist|No such file))).+"
"""What DVC says of a remote that does not send what it has; of what it lacks, a bucket or a folder says otherwise."""


def share_cache(checkout: Path) -> None:
    """Make the cache of the checkout, at its present path, the DVC remote of this clone if it has no other."""
    if not _dvc("config", "core.remote").stdout.strip():
        cache = dvc_yaml.cache_folder(checkout.absolute()).parent.parent
        _dvc("remote", "add", "--local", "--default", "--force", "checkout", str(cache))


def pull(addresses: Collection[str]) -> None:
    """Fetch the outputs of stages that dvc.lock records and the remote has; others will be built. Raises Refused for an
    output that leads out of its folder, Away if the remote does not answer, or not with all that it has.

    A listing whose parts are gone ends DVC's pull before anything is put into its place; the rest is put there then.
    """
    for verb in ("pull", "checkout"):
        done = _dvc(verb, *dict.fromkeys(addresses))
        if refusal := re.search(r"^clinrl: (.+)", done.stderr, re.MULTILINE):
            raise Refused(refusal[1])
        if not done.returncode:
            return
        if away := re.search(_AWAY, done.stderr):
            raise Away(f"the DVC remote is away: {mask(away[0])}")


def check_may_push(to: str) -> None:
    """Raise Away for credentials that may only read. For before a training, which may take days."""
    try:
        git("push", "--quiet", "--dry-run", "--force", "origin", f"HEAD:refs/heads/{to}")
    except Away as error:
        raise Away(f"{error}; nothing was begun") from error


def check_may_write() -> None:
    """Raise Away unless files can be written to the DVC remote. For before a training, which may take days.

    The file stays, and is a new one each time: some credentials may create files and replace none.
    """
    text = str(uuid4())
    words = [sys.executable, "-c", WRITE, hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(), text]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = re.findall(r"^[\w.]+: (.+)", done.stderr, re.MULTILINE)[-1:] or [f"exit code {done.returncode}"]
        raise Away(f"nothing can be written to the DVC remote, so nothing was begun: {mask(reason[0])}")


def push(addresses: Collection[str]) -> None:
    """Send the existing outputs of stages to the remote. Raises Away with DVC's message if that fails."""
    if code := (done := _dvc("push", *addresses)).returncode:
        error = re.search(r"^(?:ERROR|clinrl): (.+)", done.stderr, re.MULTILINE)  # links to a manual follow
        reason = mask(error[1]) if error else f"exit code {code}"
        raise Away(f"what was made could not be sent to the DVC remote, and is kept here: {reason}")


def _dvc(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "clinrl.runtime.dvc_command", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)
