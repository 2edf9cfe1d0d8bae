"""What a model has written so far of something long: a killed exam goes on from it, to the same bytes.

A line holds one unit of work, a batch or a request, by the digest of what was asked. Lines are only added, and one that
a kill cut short is passed over. The folder is private, outside of DVC's outputs, and removed in the end.
"""

import base64
import errno
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl.artifacts import whole_lines

if TYPE_CHECKING:
    import torch

FILE = "completions.jsonl"


class Journal:
    """The units of one run, which the name of its folder stands for: whatever else they depend on is in that name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        entries = whole_lines(folder / FILE)
        self.found = {entry["asked"]: entry for entry in entries if isinstance(entry.get("asked"), str)}
        """Each by the digest of what was asked."""
        self._part, self._calls = "", 0
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)

    def begin(self, part: str) -> None:
        """Count calls anew, for a part of the run that other processes may share with this one."""
        self._part, self._calls = part, 0

    def call(self) -> list[str | int]:
        """Part and number of this call for completions. A part makes the same calls in the same order, by whomever."""
        self._calls += 1
        return [self._part, self._calls]

    def put(self, asked: str, **entry: Any) -> None:
        """Add a unit, at once: the forks of a stage write into one file, and a line in pieces could hold another."""
        # A line end comes first: a kill may have cut the line before short.
        line = b"\n" + json.dumps({"asked": asked, **entry}, separators=(",", ":")).encode()
        target = os.open(self.folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if os.write(target, line) != len(line):
                raise OSError(errno.ENOSPC, "a line was cut short", str(self.folder / FILE))
        finally:
            os.close(target)

    def remove(self) -> None:
        """Delete it: what it was for is finished."""
        shutil.rmtree(self.folder)


def generators(device: "torch.device") -> list[str]:
    """The state of the generators of random numbers that a model on a device draws from, as text."""
    import torch

    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [base64.b64encode(bytes(state.tolist())).decode() for state in states]


def restore(states: Sequence[str], device: "torch.device") -> None:
    """Draw on from where `generators` was asked."""
    import torch

    first, *rest = [torch.tensor(list(base64.b64decode(state)), dtype=torch.uint8) for state in states]
    torch.set_rng_state(first)
    for state in rest:
        torch.cuda.set_rng_state(state, device)
