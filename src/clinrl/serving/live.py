"""Which versions are asked under which names: the registry's aliases, looked at every few seconds.

A version is opened before it takes a name, and stays open for a while after it lost the last one. Whatever is wrong
with the next one, the version before goes on. A version that is refused while it serves loses its name.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from clinrl import paths
from clinrl.artifacts import read_manifest
from clinrl.config.files import files_with
from clinrl.config.params import Params, load_params
from clinrl.errors import GateError, Refused, RegistryError, SignatureError, echo
from clinrl.models.generate import Sampler
from clinrl.registry import versions
from clinrl.registry.pyfunc import Served, read
from clinrl.release import audit_log
from clinrl.release.moves import recorded_champion
from clinrl.release.standing import check_servable
from clinrl.serving.backends import Backend
from clinrl.signing.keys import PUBLIC, TRUSTED

ALIASES = (versions.CHAMPION, versions.CANDIDATE)
POLL_S = 1.0
"""Seconds between two looks at the registry."""
COPY = "clinrl-served-"
"""How the names of private copies in the temporary folder begin."""


_State = list[tuple[str, int, int]]
"""Names, sizes and times of files."""


@dataclass(frozen=True)
class Version:
    """A version that is ready."""

    served: Served
    sampler: Sampler
    room: int | None
    """Tokens of prompt and completion together."""
    folder: Path
    since: int
    """When it was opened, in seconds since 1970."""

    def mode(self, thinking: bool | None) -> str | None:
        """The mode in which it was examined with thinking or without, or that by default (None); None if it was not."""
        if thinking is None:
            return self.served.default_mode
        return next((name for name, mode in self.served.modes.items() if mode.thinking == thinking), None)


class Live:
    """The versions that are asked. `names` is replaced as a whole, so whoever reads it needs no lock."""

    def __init__(self, params: Params, model: str, backend: Backend, keep_s: float, source: Path | None = None) -> None:
        """`keep_s`: seconds for which a version that lost its names may still be asked for. `source`: params.yaml, to
        be read again when it changes; None: `params` stay."""
        self.params = params
        self._model, self._backend, self._keep_s = model, backend, keep_s
        self._held: dict[str, Version] = {}
        """By alias."""
        self._open: dict[str, Version] = {}
        """By digest."""
        self._places: dict[Path, int] = {}
        """The private copies, also one that is being made, each with its lock."""
        self._has_ended = False
        self._lost: dict[str, float] = {}
        """When a version lost its last name, by digest."""
        self._source, self._read, self._trusted, self._log = source, _State(), _State(), _State()
        self._intact: dict[str, SignatureError | None] = {}
        """What was wrong with a registered folder when it was last read under the keys that count, by digest."""
        self._allowed: dict[str, object] = {}
        """The versions that may be asked by what the audit log says and the keys that count, by alias."""
        self._recorded: str | None = None
        """The digest of the champion by the audit log."""
        self._reported: dict[str, str] = {}
        self._wait: dict[str, float] = {}
        """When a version that could not be opened is tried again, by digest: a large model takes long to read."""
        self.names: Mapping[str, Version] = {}
        """The champion's first, if there is one."""
        _sweep()

    def renew(self) -> None:
        """Look at the registry once. What cannot be served is said once, and nothing is raised for it."""
        try:
            self._read_records()
            self._reported.pop("records", None)
        except OSError as error:
            self._say("records", f"params.yaml, the keys and the audit log are not read again: {error}")
        for alias in ALIASES:
            try:
                entry = self._holder(alias)
                if entry is None:
                    self._held.pop(alias, None)
                    continue
                self._check(alias, entry)
                if self._is_news(alias, entry.digest):
                    self._held[alias] = self._opened(entry)
                    self._say(alias, f"{self._model}@{alias} is {entry.name} ({entry.digest[:12]})")
            except (Refused, OSError) as error:
                kept = f"; {self._held[alias].served.name} goes on" if alias in self._held else ""
                self._say(alias, f"{self._model}@{alias} is not renewed: {error}{kept}")
        held = {alias: self._held[alias] for alias in ALIASES if alias in self._held}
        by_alias = {f"{self._model}@{alias}": version for alias, version in held.items()}
        self.names = by_alias | {version.served.name: version for version in reversed(held.values())}
        self._let_go()

    def lack(self) -> str | None:
        """Why nothing can be asked; None: something can."""
        if self.names:
            return None
        why = next(iter(self._reported.values()), f"{self._model} has neither a champion nor a candidate")
        return f"nothing is served yet: {why}; `clinrl versions {self._model}` lists what there is"

    def end(self) -> None:
        """Remove the private copies, also while another thread looks at the registry; it opens nothing more."""
        self._has_ended = True
        for place in self._places.copy():
            shutil.rmtree(place, ignore_errors=True)

    def _read_records(self) -> None:
        """Read params.yaml, the keys and the audit log again if they changed; what followed from them is asked anew.

        An approver may have been struck off the list, or a key removed.
        """
        read = _state_of(*files_with(self._source)) if self._source else _State()
        if self._source and read != self._read:  # of a broken one too: it is not read again before it changes
            try:
                self.params = load_params(self._source)
                self._reported.pop("params", None)
            except Refused as error:
                self._say("params", f"params.yaml is not read again: {error}")
        trusted, log = _state_of(PUBLIC, *sorted(TRUSTED.glob("*.pub"))), _state_of(paths.audit_log())
        if (read, trusted) != (self._read, self._trusted):
            self._intact.clear()
        if (read, trusted, log) != (self._read, self._trusted, self._log):
            self._allowed.clear()
            self._recorded = None
            with suppress(Refused, OSError):  # which `check_servable` says
                self._recorded = recorded_champion(self._model, audit_log.lines(self.params))
        self._read, self._trusted, self._log = read, trusted, log

    def _holder(self, alias: str) -> versions.Entry | None:
        """Who is to be asked by an alias. As champion, whom the audit log knows as champion.

        A scheduled retraining moves the name before its lines are merged: the champion before is approved until then.
        """
        entry = versions.holder(self._model, alias)
        if alias != versions.CHAMPION or entry is None:
            return entry
        if self._recorded in (None, entry.digest):
            self._reported.pop("recorded", None)
            return entry
        self._say("recorded", f"{entry.name} is {self._model}@{alias} in the registry, and not in {paths.audit_log()}")
        return versions.by_digest(self._model, self._recorded) or entry

    def _check(self, alias: str, entry: versions.Entry) -> None:
        """Refuse what may not be served, if the audit log or the registry says anything new, or other keys count.

        What is open is read once under the same keys, since it may be many gigabytes. Raises GateError, and
        SignatureError where nobody signed whose key counts still.
        """
        state = entry.digest, entry.tags
        if self._allowed.get(alias) == state:
            return
        try:
            check_servable(self.params, entry, alias)
            if entry.digest in self._open:
                self._check_intact(entry)
        except (GateError, SignatureError):
            if alias in self._held and self._held[alias].served.digest == entry.digest:
                del self._held[alias]
            raise
        self._allowed[alias] = state

    def _check_intact(self, entry: versions.Entry) -> None:
        if entry.digest not in self._intact:
            fault = None
            try:
                versions.check_intact(self.params, entry)  # what else it raises says nothing of the folder
            except SignatureError as error:
                fault = error
            self._intact[entry.digest] = fault
        if found := self._intact[entry.digest]:
            raise found

    def _is_news(self, alias: str, digest: str) -> bool:
        is_held = alias in self._held and self._held[alias].served.digest == digest
        return not is_held and not self._has_ended and time.monotonic() >= self._wait.get(digest, 0.0)

    def _opened(self, entry: versions.Entry) -> Version:
        if entry.digest not in self._open:
            place, started = Path(mkdtemp(prefix=COPY)), time.monotonic()
            self._places[place] = os.open(place, os.O_RDONLY)
            fcntl.flock(self._places[place], fcntl.LOCK_EX)  # which the kernel drops with this process
            try:
                folder = versions.checked_copy(self.params, entry, place)
                self._intact[entry.digest] = None
                served = read(folder)
                # The tag in the registry may be removed by whoever writes there; this was signed.
                if waiver := read_manifest(folder / served.form).spec.get("waiver"):
                    raise GateError(f"{served.name} was trained on a waiver ({waiver}) and is never served")
                sampler = self._backend.open(served, folder)
                room, now = self._backend.room(sampler), int(time.time())
                self._open[entry.digest] = Version(served, sampler, room, place, now)
            except Exception as error:  # whatever is wrong with this one, the others are served
                self._wait[entry.digest] = time.monotonic() + 5 * (time.monotonic() - started)
                has_reason = isinstance(error, Refused | OSError)
                reason = str(error) if has_reason else f"it cannot be opened ({type(error).__name__})"
                raise RegistryError(reason.replace(f"{place}/", "")) from error  # each copy has another name
            finally:
                if entry.digest not in self._open or self._has_ended:
                    self._remove(place)
        return self._open[entry.digest]

    def _let_go(self) -> None:
        """Close what nobody can be waiting for any more."""
        named, now = {version.served.digest for version in self._held.values()}, time.monotonic()
        self._lost = {digest: self._lost.get(digest, now) for digest in self._open if digest not in named}
        for digest in [digest for digest, at in self._lost.items() if now - at > self._keep_s]:
            version = self._open.pop(digest)  # first: what is closed by half may not be used again
            del self._lost[digest]
            self._intact.pop(digest, None)
            try:
                self._backend.close(digest)
            except Refused as error:
                echo(f"{version.served.name} is not unloaded: {error}")
            self._remove(version.folder)

    def _remove(self, place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        if (lock := self._places.pop(place, None)) is not None:
            os.close(lock)

    def _say(self, alias: str, sentence: str) -> None:
        if self._reported.get(alias) != sentence:
            self._reported[alias] = sentence
            echo(sentence)


def _sweep() -> None:
    """Remove the copies of servers that were killed: nobody holds their locks."""
    for place in Path(gettempdir()).glob(f"{COPY}*"):
        with suppress(OSError):  # of a server that runs, or somebody else's
            lock = os.open(place, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(lock)


def _state_of(*files: Path) -> _State:
    """By which a change of one of these files is seen."""
    found = [(file, file.stat()) for file in files if file.exists()]
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in found]
