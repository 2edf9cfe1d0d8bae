"""A journal of what a model has written so far, from which a killed exam resumes: on the CPU, to the same bytes.

A line holds one unit of work, a batch or a request, under the digest of the request. Lines are only added, and a line
that a kill cut short is ignored. The folder is private, outside of DVC's outputs, and removed in the end.
"""

import base64
import errno
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl.artifacts import naming, whole_lines

if TYPE_CHECKING:
    import torch

FILE = "completions.jsonl"


class Journal:
    """The units of one run. The folder's name must depend on everything that the digests of units leave out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        entries = whole_lines(folder / FILE)
        self.found = {entry["asked"]: entry for entry in entries if isinstance(entry.get("asked"), str)}
        """The units by the digests of their requests."""
        self._part, self._calls = "", 0
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)

    def begin(self, part: str) -> None:
        """Count calls from 0 again, for a part of the run. The parts of a run may be shared among processes."""
        self._part, self._calls = part, 0

    def call(self) -> list[str | int]:
        """Part and number of this call for completions. Every process makes a part's calls in the same order."""
        self._calls += 1
        return [self._part, self._calls]

    def put(self, asked: str, **entry: Any) -> None:
        """Add a unit in one write: the forks of a stage share the file, and lines in pieces could be mixed."""
        # A line end comes first: a kill may have cut the line before short.
        line = b"\n" + json.dumps({"asked": asked, **entry}, separators=(",", ":")).encode()
        with naming(file := self.folder / FILE):
            target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                if os.write(target, line) != len(line):
                    raise OSError(errno.ENOSPC, "a line was cut short")
            finally:
                os.close(target)

    def remove(self) -> None:
        """Delete the journal, once its run is finished."""
        shutil.rmtree(self.folder)


def generators(device: "torch.device") -> list[str]:
    """The states of the random generators that a model on a device draws from, as text."""
    import torch

    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [base64.b64encode(bytes(state.tolist())).decode() for state in states]


def restore(states: Sequence[str], device: "torch.device") -> None:
    """Set the random generators to states that `generators` returned."""
    import torch

    first, *rest = [torch.tensor(list(base64.b64decode(state)), dtype=torch.uint8) for state in states]
    torch.set_rng_state(first)
    for state in rest:
        torch.cuda.set_rng_state(state, device)
