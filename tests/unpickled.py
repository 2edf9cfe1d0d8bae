"""What processes unpickle, by what Python itself says of them: a pickle names what it calls when it is read."""

import os
from pathlib import Path

HEARING = Path(__file__).parent / "unpickling"
"""Holds a `sitecustomize.py`, which every Python runs that finds it."""
LISTENS = ("listening",)
"""What a process writes when it begins to listen."""
ALLOWED: dict[tuple[str, str], str] = {}
"""Module and name of what a pickle may call, and who reads it and why. None is read on any of our ways."""


def listening(log: Path) -> dict[str, str]:
    """The variables with which a process, and what it starts, write down in a file what they unpickle."""
    found = os.environ.get("PYTHONPATH")
    return {"CLINRL_UNPICKLED": str(log), "PYTHONPATH": f"{HEARING}{os.pathsep}{found}" if found else str(HEARING)}


def strangers(log: Path) -> set[tuple[str, ...]]:
    """Module and name of everything in such a file that is not allowed. There is no file if no process listened."""
    return {tuple(line.split()) for line in log.read_text().splitlines()} - ALLOWED.keys() - {LISTENS}
