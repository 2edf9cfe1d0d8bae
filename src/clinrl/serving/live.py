"""The served versions and their names, which follow the registry's aliases.

A version is opened before it takes a name, and stays open for a while after it lost its last name. If the next version
cannot be served, the former one goes on. A version that is refused while it serves loses its name.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Mapping, Sequence
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
from clinrl.registry.pyfunc import Served, read_current
from clinrl.release import audit_log
from clinrl.release.moves import recorded_champion
from clinrl.release.standing import check_servable
from clinrl.serving.backends import Backend
from clinrl.signing.keys import PUBLIC, TRUSTED, Key, trusted_keys

ALIASES = (versions.CHAMPION, versions.CANDIDATE)
POLL_S = 1.0
"""Seconds between two checks of the registry."""
COPY = "clinrl-served-"
"""The prefix of private copies in the temporary folder."""


_State = list[tuple[str, int, int]]
"""Names, sizes and times of files."""


@dataclass(frozen=True)
class Version:
    """A version that is open."""

    served: Served
    sampler: Sampler
    folder: Path
    since: int
    """When it was opened, in seconds since 1970."""

    def mode(self, thinking: bool | None) -> str | None:
        """The exam's mode with thinking or without, or the default mode for None; None if the exam had no such mode."""
        if thinking is None:
            return self.served.default_mode
        return next((name for name, mode in self.served.modes.items() if mode.thinking == thinking), None)


class Live:
    """The served versions. `names` is replaced as a whole, so that readers need no lock."""

    def __init__(self, params: Params, model: str, backend: Backend, keep_s: float, source: Path | None = None) -> None:
        """`keep_s`: seconds for which a version stays open after it lost its last name. `source`: params.yaml, which is
        read again when it changes; None: `params` stay."""
        self.params = params
        self._model, self._backend, self._keep_s = model, backend, keep_s
        self._held: dict[str, Version] = {}
        """The version of each alias."""
        self._open: dict[str, Version] = {}
        """Every open version, by digest."""
        self._places: dict[Path, int] = {}
        """The private copies, including one that is being made, with the descriptors of their locks."""
        self._has_ended = False
        self._lost: dict[str, float] = {}
        """The time at which a version lost its last name, by digest."""
        self._source, self._read, self._trusted, self._log = source, _State(), _State(), _State()
        self._keys: Mapping[str, Key] | None = None
        """The keys that count; None if they cannot be read."""
        self._intact: dict[str, SignatureError | None] = {}
        """The fault of a registered folder, if any, when it was last read under the present keys; by digest."""
        self._allowed: dict[str, object] = {}
        """The version that may be served by the present audit log and keys, as digest and tags, by alias."""
        self._lines: Sequence[audit_log.Entry] | None = None
        """The audit log as it was last read: of one look, all questions are answered by the same lines."""
        self._reported: dict[str, str] = {}
        self._wait: dict[str, float] = {}
        """The time of the next try to open a version after a failure, by digest: a large model takes long to read."""
        self.names: Mapping[str, Version] = {}
        """The served versions by their names; the champion's alias comes first, if there is a champion."""
        _sweep()

    def renew(self) -> None:
        """Check the registry once. A version that cannot be served is reported once, and raises nothing."""
        try:
            self._read_records()
            self._reported.pop("records", None)
        except OSError as error:
            self._say("records", f"params.yaml, the keys and the audit log are not read again: {error}")
        for alias in ALIASES:
            entry = None
            try:
                entry = self._holder(alias)
                if entry is None:
                    if self._held.pop(alias, None):
                        self._say(alias, f"{self._model}@{alias} is no version any more: the registry has no such name")
                    continue
                self._check(alias, entry)
                is_held = alias in self._held and self._held[alias].served.digest == entry.digest
                may_try = not self._has_ended and time.monotonic() >= self._wait.get(entry.digest, 0.0)
                if is_held or may_try:
                    self._held[alias] = self._opened(entry)
                    self._say(alias, f"{self._model}@{alias} is {entry.name} ({entry.digest[:12]})")
                self._drop_revoked(alias, entry)  # while it waits for its next try
            except (Refused, OSError) as error:
                self._drop_revoked(alias, entry)
                kept = f"; {self._held[alias].served.name} goes on" if alias in self._held else ""
                self._say(alias, f"{self._model}@{alias} is not renewed: {error}{kept}")
            finally:
                self._publish()  # the champion does not wait until a candidate is open
        self._close_unused()

    def _publish(self) -> None:
        held = {alias: self._held[alias] for alias in ALIASES if alias in self._held}
        by_alias = {f"{self._model}@{alias}": version for alias, version in held.items()}
        self.names = by_alias | {version.served.name: version for version in reversed(held.values())}

    def why_nothing_served(self) -> str | None:
        """The reason why nothing is served; None if something is."""
        if self.names:
            return None
        why = next(iter(self._reported.values()), f"{self._model} has neither a champion nor a candidate")
        return f"nothing is served yet: {why}; `clinrl versions {self._model}` lists what there is"

    def end(self) -> None:
        """Remove the private copies, even while another thread checks the registry; that thread opens nothing more."""
        self._has_ended = True
        for place in self._places.copy():
            shutil.rmtree(place, ignore_errors=True)

    def _read_records(self) -> None:
        """Read params.yaml, the keys and the audit log again if they changed, and drop the checks that used them.

        An approver may have been removed from the list, or a key from the keyring.
        """
        read = _state_of(*files_with(self._source)) if self._source else _State()
        if self._source and read != self._read:  # a broken one too is not read again before it changes
            try:
                self.params = load_params(self._source)
                self._reported.pop("params", None)
            except Refused as error:
                self._say("params", f"params.yaml is not read again: {error}")
        trusted, log = _state_of(PUBLIC, *sorted(TRUSTED.glob("*.pub"))), _state_of(paths.AUDIT_LOG)
        if sum(size for _, size, _ in log) < sum(size for _, size, _ in self._log):  # git may be writing it anew
            time.sleep(POLL_S)
            log = _state_of(paths.AUDIT_LOG)
        if (read, trusted) != (self._read, self._trusted):
            before, self._keys = self._keys, None
            with suppress(Refused):
                self._keys = trusted_keys(self.params)
            if self._keys is None or self._keys != before:
                self._intact.clear()
        if (read, trusted, log) != (self._read, self._trusted, self._log):
            self._allowed.clear()
            self._lines = None
            with suppress(Refused, OSError):  # `check_servable` reports these
                self._lines = audit_log.lines(self.params)
        self._read, self._trusted, self._log = read, trusted, log

    def _holder(self, alias: str) -> versions.Entry | None:
        """The version to serve under an alias. Under the champion's alias, this is the champion of the audit log.

        A scheduled retraining moves the alias before its lines are merged; until then the former champion is approved.
        """
        entry = versions.holder(self._model, alias)
        if alias != versions.CHAMPION or entry is None:
            return entry
        recorded = recorded_champion(self._model, self._lines or ())
        if recorded in (None, entry.digest):
            self._reported.pop("recorded", None)
            return entry
        self._say("recorded", f"{entry.name} is {self._model}@{alias} in the registry, and not in {paths.AUDIT_LOG}")
        return versions.by_digest(self._model, recorded) or entry

    def _check(self, alias: str, entry: versions.Entry) -> None:
        """Refuse a version that may not be served. It is checked again if the audit log, its tags or the keys changed.

        The folder of an open version is read once under the same keys, since it may have many gigabytes. Raises
        GateError, and SignatureError if no key that is still trusted signed the folder.
        """
        state = entry.digest, entry.tags
        if self._allowed.get(alias) == state:
            return
        try:
            check_servable(self.params, entry, alias, self._lines)
            if entry.digest in self._open:
                self._check_intact(entry)
        except (GateError, SignatureError):
            if alias in self._held and self._held[alias].served.digest == entry.digest:
                del self._held[alias]
            raise
        self._allowed[alias] = state

    def _drop_revoked(self, alias: str, entry: versions.Entry | None) -> None:
        """Drop the version that goes on while `entry` cannot be served, if it was refused or a key does not count."""
        held = self._held.get(alias)
        if held is None or entry is None or held.served.digest == entry.digest:
            return
        digest = held.served.digest
        try:
            known = versions.by_digest(self._model, digest)
            if alias == versions.CHAMPION:
                audit_log.lines(self.params)
            elif known is not None:
                check_servable(self.params, known, alias, self._lines)
            if known is not None:
                self._check_intact(known)
            elif digest not in self._intact:  # the keys changed, and nobody can say whether they still are its own
                del self._held[alias]
        except (GateError, SignatureError):
            del self._held[alias]
        except (Refused, OSError):
            pass  # says nothing about this version

    def _check_intact(self, entry: versions.Entry) -> None:
        if entry.digest not in self._intact:
            fault = None
            try:
                versions.check_intact(self.params, entry)  # other exceptions say nothing about the folder
            except SignatureError as error:
                fault = error
            self._intact[entry.digest] = fault
        if found := self._intact[entry.digest]:
            raise found

    def _opened(self, entry: versions.Entry) -> Version:
        if entry.digest not in self._open:
            made, started = Path(mkdtemp(prefix=f".{COPY}")), time.monotonic()
            lock = os.open(made, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when this process ends
            place = made.rename(made.with_name(made.name[1:]))  # only now may `_sweep` of another server find it
            self._places[place] = lock
            try:
                folder = versions.checked_copy(self.params, entry, place)
                self._intact[entry.digest] = None
                served = read_current(folder)
                # Anybody who can write to the registry can remove the tag there; this manifest is signed.
                if waiver := read_manifest(folder / served.form).spec.get("waiver"):
                    raise GateError(f"{served.name} was trained on a waiver ({waiver}) and is never served")
                sampler = self._backend.open(served, folder)
                self._open[entry.digest] = Version(served, sampler, place, int(time.time()))
            except Exception as error:  # whatever is wrong with this one, the others are served
                self._wait[entry.digest] = time.monotonic() + 5 * (time.monotonic() - started)
                has_reason = isinstance(error, Refused | OSError)
                reason = str(error) if has_reason else f"it cannot be opened ({type(error).__name__})"
                raise RegistryError(reason.replace(f"{place}/", "")) from error  # each copy has another name
            finally:
                if entry.digest not in self._open or self._has_ended:
                    self._remove(place)
        return self._open[entry.digest]

    def _close_unused(self) -> None:
        """Close the versions for which no client can be waiting any more."""
        named, now = {version.served.digest for version in self._held.values()}, time.monotonic()
        self._lost = {digest: self._lost.get(digest, now) for digest in self._open if digest not in named}
        for digest in [digest for digest, at in self._lost.items() if now - at > self._keep_s]:
            version = self._open.pop(digest)  # first: a version that is half closed must not be used again
            del self._lost[digest]
            self._intact.pop(digest, None)
            self._backend.close(digest)
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
        with suppress(OSError, RecursionError):  # of a server that runs, or somebody else's, who may nest folders
            lock = os.open(place, os.O_DIRECTORY | os.O_NOFOLLOW)  # of somebody's pipe it would wait for a writer
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(lock)


def _state_of(*files: Path) -> _State:
    """The names, sizes and times of the files that exist, by which a change is detected."""
    found = [(file, file.stat()) for file in files if file.exists()]
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in found]
