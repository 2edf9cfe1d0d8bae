"""The identity of a process: host, number and start time, so that a reused number is another process."""

import os
import socket
from hashlib import sha256
from pathlib import Path

MACHINE = Path("/etc/machine-id")
"""The machine's identity by systemd: two machines that share a Prefect server may share a hostname too."""


def identity() -> str:
    return f"{_host()}:{os.getpid()}:{_start_of(os.getpid())}"


def is_dead(process: str) -> bool:
    """Whether a process of this machine, given its identity, has ended. False for a process of another machine."""
    host, number, start = process.rsplit(":", 2)
    return host == _host() and _start_of(int(number)) != start


def _host() -> str:
    machine = sha256(MACHINE.read_bytes()).hexdigest()[:8] if MACHINE.exists() else ""  # the id itself is confidential
    return f"{socket.gethostname()}/{machine}"


def _start_of(pid: int) -> str | None:
    """When a process started, in ticks of this boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return None if fields[0] in "ZX" else f"{boot}-{fields[19]}"
