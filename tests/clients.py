"""Other people's tools, unmodified, each in an environment of its own, made once and kept between runs of the tests."""

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "clinrl-clients"
INSTALL_S = 900


def client(*requirements: str) -> Path:
    """The folder of an environment with these requirements. Skips the test where the index cannot be reached."""
    folder = CACHE / hashlib.sha256(" ".join((sys.version, *requirements)).encode()).hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            install = [folder / "bin/pip", "install", "-q", *requirements]
            done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if done.returncode:
                if "ConnectionError" in done.stderr or "NewConnectionError" in done.stderr:
                    pytest.skip(f"the package index cannot be reached for {requirements[0]}")
                raise AssertionError(done.stderr[-2000:])
            (folder / "installed").touch()
    return folder


def run(folder: Path, *words: object, **settings: str) -> str:
    """What a program of an environment prints; it finds neither this environment nor the project's code."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [folder / "bin" / str(words[0]), *map(str, words[1:])], capture_output=True, text=True, check=False,
        env=environment | {"PATH": path, "VIRTUAL_ENV": str(folder)} | settings,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
