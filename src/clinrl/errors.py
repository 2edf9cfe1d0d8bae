"""The refusals a user can cause. The message is the one sentence the user reads; the class decides the exit code."""

import errno
import os
import re
import reprlib
import select
import sys
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

REFUSALS = {
    errno.ENOSPC: ("disk is full", "free some space"),
    errno.EDQUOT: ("the quota of the disk is reached", "free some space"),
    errno.EFBIG: ("a file would pass the limit of this shell", "raise it (`ulimit -f unlimited`)"),
    errno.EROFS: ("the disk can only be read", "mount it for writing"),
    errno.EIO: ("the disk fails to read or write", "restore what it lost"),
    errno.EACCES: ("access is denied", "get the right to it"),
    errno.EPERM: ("this user may not change it", "use one of your own"),
}
"""Errors of the operating system that only a person can mend: what happened, and what to do."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
FULL = re.compile(r"no space left on device|disk quota exceeded|database or disk is full", re.IGNORECASE)
"""How libraries say that the disk is full, in errors of their own without a number."""
INSTALL = "install it with `pip install --no-deps --require-hashes -r constraints.txt`"
"""What to do about a library that is not installed."""
UNREAD = 141
"""The exit code when nobody reads the output any more: that of a program which SIGPIPE ended, as shells report it."""


def echo(sentence: object) -> None:
    """Print a message for the user on stderr, unbuffered: stdout is for results."""
    print(f"clinrl: {sentence}", file=sys.stderr, flush=True)


def mask(text: str) -> str:
    """The text without the credentials in its URLs."""
    return re.sub(r"//[^/\s]*@", "//", text)


class Refused(Exception):
    """A refusal: something was not done. The message says what, why and what to do."""

    exit_code = 1


P = ParamSpec("P")


def with_exit_code(main: Callable[P, int]) -> Callable[P, int]:
    """Wrap a program so that it returns its exit code, or that of the refusal, interrupt or system error that ended it.

    The reason goes to stderr. If the reader of the output went away, as `head` does, that is no fault, and nothing is
    printed. Every other exception is a fault and is passed on with its traceback.
    """

    @wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        _open_closed()
        try:
            try:
                return main(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except Refused as refused:
            echo(refused)
            return refused.exit_code
        except KeyboardInterrupt:
            echo("interrupted; give the same command again")
            return 130
        except BrokenPipeError:
            unread = [number for number in (1, 2) if _is_unread(number)]
            if not unread:
                raise
            _drop(unread)
            return UNREAD
        except Exception as error:
            if isinstance(error, FileNotFoundError) and error.filename == "git":
                echo("git is not installed, or not in PATH; install it and give the same command again")
                return 1
            if (number := number_of(error)) not in REFUSALS or (number == errno.EPERM and not file_of(error)):
                raise
            what, do = REFUSALS[number]
            where = f" at {file}" if (file := file_of(error)) else ""
            echo(f"{what}{where}: {do} and give the same command again")
            try:
                sys.stdout.flush()
            except OSError:
                _drop([1])
            return 1

    return run


def number_of(error: BaseException) -> int:
    """The number of the operating system's error, or 0 for any other one. Libraries may give its words alone."""
    return getattr(error, "errno", None) or (errno.ENOSPC if FULL.search(str(error)) else 0)


def file_of(error: BaseException) -> str:
    """The file that an error of the operating system names, or an empty text: a copy rather than what was copied."""
    return str(getattr(error, "filename2", None) or getattr(error, "filename", None) or "")


def disk_is_full(error: BaseException, folder: Path) -> bool:
    """Whether a write failed for lack of space. torch does not say why it failed."""
    if not isinstance(error, RuntimeError) or number_of(error):
        return number_of(error) in NO_ROOM
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize < 1 << 20


def _open_closed() -> None:
    """Open the streams that a shell closed, as by `>&-`: else a file takes the number, and children print into it."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), "r+")  # its own number, if no import took that
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _drop(numbers: Iterable[int]) -> None:
    """Point descriptors at /dev/null: flushing their buffers at exit would fail again, with another exit code."""
    for number in numbers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _is_unread(number: int) -> bool:
    """Whether a descriptor is a pipe without a reader."""
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class ParamsError(Refused):
    """params.yaml asks for something impossible. The message names the key, the value and the allowed values."""

    exit_code = 2


class ArtefactError(Refused):
    """An artefact is missing, incomplete or altered. The message names the file and how to get it back."""


class DataError(Refused):
    """A case or a data set is invalid. The message names the file, the row and the column."""


class ProbeError(Refused):
    """A reward or a sampling would teach the wrong thing. The message names the policy that it pays."""


class TrainingError(Refused):
    """Training ended without an adapter. The message names the step, and whether the same command continues it."""

    exit_code = 3


class OutOfMemory(Refused):
    """Memory ran out. The message names the place, and the key of machine.yaml to set."""


class EngineError(Refused):
    """A sampling server failed. The message names its address, and what to do."""


class Alarmed(TrainingError):
    """An alert ended a training; the same command would end the same way."""

    exit_code = 4


class Busy(Refused):
    """Another command is writing the same artefact. Nothing was touched; try again when it is done."""

    exit_code = 75


class GateError(Refused):
    """A version may not be released. The message names the broken limit, or what changed since the decision."""


class RegistryError(Refused):
    """The model registry did not do what was asked. The message names the server, the model or the alias."""


class Unregistered(RegistryError):
    """The model registry answered that it has no such model, version or alias."""


class SignatureError(Refused):
    """A key or a signature is not valid. The message names the file, and what to do, but never a secret."""


MAX_NAMES = 20
"""A refusal lists at most this many allowed names: some five lines of a terminal."""
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother, _BRIEF.maxlong = 4, 130, 130, 130


def format_value(value: object) -> str:
    """A value as a refusal quotes it: at most 60 characters. A large value is not formatted as a whole."""
    text = _BRIEF.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, names: Collection[str]) -> str:
    """The name nearest to a misspelt word; empty if none is near."""
    import difflib  # here, since only refusals need it

    return next(iter(difflib.get_close_matches(word[:80], names, n=1)), "")


def did_you_mean(value: object, allowed: Collection[object]) -> str:
    """The end of a refusal: the nearest allowed name, if one is near, and the allowed names, or the most similar ones.

    The names of a task begin with the task: for a value such as esi-v99, only names that begin with esi- are listed, if
    there are any.
    """
    text, names = str(value)[:80], sorted(map(str, allowed))
    task, mark, _ = text.partition("-")
    own = [name for name in names if mark and name.startswith(f"{task}-")] or names
    near = nearest(text, own) or nearest(text, names)
    own = own if not near or near in own else names
    if len(own) > MAX_NAMES:  # similar: a long common prefix, which is cheap to find for any number of names
        own = sorted(own, key=lambda name: -max(n for n in range(len(text) + 1) if name.startswith(text[:n])))
    listed = ", ".join(own[:MAX_NAMES]) or "none"
    more = f" and {len(own) - MAX_NAMES:,} more" if len(own) > MAX_NAMES else ""
    return (f"did you mean {near}? " if near else "") + f"allowed: {listed}{more}"
