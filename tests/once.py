"""What takes long to build, built once a test run: the process that is first builds it, and the others wait for it."""

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

RUN = "CLINRL_TEST_RUN"
"""Environment variable: the folder of this test run. Whoever is started by it finds it there."""

if RUN not in os.environ:
    os.environ[RUN] = tempfile.mkdtemp(prefix="clinrl-tests-")
    atexit.register(shutil.rmtree, os.environ[RUN], ignore_errors=True)


def once(name: str, build: Callable[[], object]) -> Path:
    """A folder that `build` has filled, which it finds as its working directory. Copy it; do not write to it."""
    folder = Path(os.environ[RUN]) / name
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new = folder.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)  # of a process that failed or was killed in the middle
            new.mkdir()
            with chdir(new):
                build()
            new.rename(folder)
    return folder
