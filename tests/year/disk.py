"""A disk that is full, for one process and those that it starts."""

import ctypes
import os
from pathlib import Path

NEW_MOUNTS, NEW_USER, PRIVATE = 0x00020000, 0x10000000, 0x4000 | 0x40000
"""Flags of unshare(2) and mount(2)."""


def fill(folder: Path, size: str = "64k") -> None:
    """Lay a file system of this size over a folder, in a mount namespace of this process. Linux only.

    Raises OSError where the kernel lets nobody do that. This process may have one thread only, unless it is root's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()

    def done(code: int) -> None:
        if code:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))

    done(libc.unshare(NEW_MOUNTS | (NEW_USER if user else 0)))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    done(libc.mount(b"none", b"/", None, PRIVATE, None))
    done(libc.mount(b"tmpfs", os.fsencode(folder.absolute()), b"tmpfs", 0, f"size={size}".encode()))
