"""Protect what DVC trusts unchecked: pickles in its folders, its run cache, and a dvc.lock that a kill cut short.

DVC remembers the digests of files in `diskcache`, which reads pickles (CVE-2025-69872), by default below /var/tmp/dvc,
where every user of a machine may write. `.dvc/config` moves it to a folder of the project that git keeps, since
everybody can write in a folder that DVC makes. This module checks who can write there, so that no other user can run
code as the user of DVC. DVC writes dvc.lock in place: a kill at that moment would lose the record of every stage.
"""

import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from clinrl.artifacts import locked, write_text
from clinrl.errors import Refused, echo

VARIABLE = "DVC_SITE_CACHE_DIR"
"""The variable in which DVC looks first for the folder's place."""
SITE = Path(".clinrl/dvc")
"""The place that `.dvc/config` names."""
RUNS = Path(".dvc/cache/runs")
"""DVC's record of what stages made, which it trusts unchecked: an entry made by hand is an exam never taken."""
TMP = Path(".dvc/tmp")
"""Locks, and the queue of experiments."""
KEPT = {"repo", "repo/.gitignore"}
"""All that a clone holds in SITE before DVC first runs."""
LOCK = Path("dvc.lock")
COPY = Path(".clinrl/dvc.lock")
"""dvc.lock as it was before the last stage ran."""
CUT = Path(".clinrl/dvc.lock.cut")
"""What a kill left of dvc.lock, kept for inspection."""
AT_WORK = TMP / "lock"
"""The lock that DVC holds while it writes dvc.lock."""
CONFLICT = b"<<<<<<<"
"""Git's mark of a merge that a person has to finish."""
REPRO = ("-m", "clinrl.runtime.dvc_command", "--wait-for-lock", "repro", "--no-run-cache")
"""Arguments with which Python runs DVC: without its run cache, which DVC trusts unchecked. Anybody who can write there
could decide what a stage has made. It waits for another DVC: it frees its lock while a stage works, and if it did not
get it back within 3 s it would not record what the stage made, and delete that when it is run again."""
OTHERS = stat.S_IWGRP | stat.S_IWOTH
ENTER = stat.S_IXGRP | stat.S_IXOTH


def fence(project: Path | None = None) -> None:
    """Before DVC runs: restore a cut dvc.lock, empty the run cache, and make and close both folders of pickles.

    Does nothing where there is no DVC project.

    A folder of the project that other users could write in or replace is closed if it is still empty: with a umask of
    0002 every folder of a clone is such. `project` is the working directory unless named. Raises Refused if the folder
    holds anything, is a link or belongs to somebody else, and for a folder elsewhere that others can write in or
    replace.
    """
    root = Path.cwd() if project is None else project.absolute()
    if not (root / ".dvc").is_dir():
        return
    mend(root)
    if (root / RUNS).exists():
        _make([root / TMP])  # or the lock would make it open to others, as the umask says
        with suppress(OSError), locked(root / AT_WORK, waits=False) as is_alone:
            if is_alone:  # a DVC at work may be writing there, and would fail; it emptied the folder when it began
                shutil.rmtree(root / RUNS, ignore_errors=True)
    site, tmp = (Path(os.path.normpath(root / folder)) for folder in (os.environ.get(VARIABLE) or SITE, TMP))
    found = [place for place in (site, tmp) if not (_close if root in place.parents else _close_elsewhere)(place, root)]
    if not found:
        return
    advice, inside = [], [place for place in found if root in place.parents]
    if inside:
        above = _list_places(dict.fromkeys(above for place in inside for above in _between(root, place)))
        again = _list_places(inside)
        advice.append(f"make anew what is only a cache: `chmod go-w {above}; rm -rf {again}; mkdir -m 700 {again}`")
    if len(inside) < len(found):
        advice.append(f"set {VARIABLE} to a folder of your own, or unset it")
    raise Refused(
        f"other users can write in {_list_places(found, ' and ')}, where DVC keeps pickles, which can run code; "
        + "; ".join(advice)
    )


def _close(place: Path, root: Path) -> bool:
    """Close a folder of the project and the folders around it, and return whether no other user can have written in it.

    The owner of the project may own the folder too, since they could change the code as well.
    """
    places = [*_between(root, place), place]
    _make(places)
    owners = {os.geteuid(), root.stat().st_uid}
    before = [each.lstat() for each in places]
    if any(not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners for found in before):
        return False
    was_open = any(map(_is_replaceable, before[:-1])) or _is_open(place)
    if was_open and not _is_empty(place, owners):
        return False
    try:
        for each, found in zip(places[:-1], before[:-1], strict=True):
            if _is_replaceable(found):
                each.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
        if was_open or before[-1].st_uid == os.geteuid():
            place.chmod(0o700)
        if was_open and (place / "repo").is_dir():  # a user who was in there before could go on writing
            (place / "repo").chmod(0o700)
    except PermissionError:
        return False
    if was_open and not _is_empty(place, owners):  # another user was quicker
        place.chmod(stat.S_IMODE(before[-1].st_mode) | stat.S_IWGRP)
        return False
    return True


def _close_elsewhere(place: Path, root: Path) -> bool:
    """Close a folder outside the project, and return whether no other user can write in it or replace it.

    The folders around it are not changed, nor are their owners checked: in a container the owner may be nobody.
    """
    _make([*reversed(place.parents), place])
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in {os.geteuid(), root.stat().st_uid} or _is_open(place):
        return False
    if any(_is_replaceable(above.stat()) for above in {*place.parents, *place.resolve().parents}):
        return False
    if found.st_uid == os.geteuid():
        place.chmod(0o700)
    return True


def _between(root: Path, place: Path) -> list[Path]:
    """The folders between the root and a place, outermost first."""
    return [above for above in reversed(place.parents) if root in above.parents]


def _make(places: Sequence[Path]) -> None:
    """Make the missing folders, whatever the umask: the last one for this user alone."""
    for each in places:
        if not os.path.lexists(each):
            each.mkdir(mode=0o700 if each == places[-1] else 0o755, exist_ok=True)


def _is_replaceable(found: os.stat_result) -> bool:
    """Whether others can rename or remove the entries of a folder, and put their own in their place."""
    return bool(found.st_mode & OTHERS) and not found.st_mode & stat.S_ISVTX


def _is_open(folder: Path) -> bool:
    """Whether others can write in a folder or, if they can enter it, in a folder below it."""
    mode = folder.stat().st_mode
    inner = folder.rglob("*/") if mode & ENTER else ()
    return bool(mode & OTHERS) or any(each.lstat().st_mode & OTHERS for each in inner if not each.is_symlink())


def _is_empty(folder: Path, owners: set[int]) -> bool:
    """Whether a folder holds only what git keeps there, of these owners."""
    return all(
        str(each.relative_to(folder)) in KEPT and not each.is_symlink() and each.lstat().st_uid in owners
        for each in folder.rglob("*")
    )


def _list_places(places: Iterable[Path], between: str = " ") -> str:
    here = Path.cwd()
    return between.join(str(place.relative_to(here) if here in place.parents else place) for place in places)


def keep() -> None:
    """Keep a copy of dvc.lock, which DVC has just read, unless another DVC is writing it."""
    with locked(Path.cwd() / AT_WORK, waits=False) as alone:
        if alone and LOCK.is_file():
            write_text(COPY, LOCK.read_text(encoding="utf-8"))


def mend(root: Path) -> None:
    """Restore dvc.lock from its copy if a kill cut it short, and say so: its last stage then runs again.

    Does nothing while DVC is at work, if dvc.lock is whole, or in a merge that is not finished.
    """
    lock, copy = root / LOCK, root / COPY
    if not (lock.is_file() and copy.is_file()):
        return
    text = lock.read_bytes()
    if text.endswith(b"\n") and len(text) >= copy.stat().st_size:  # nearly always the case, and cheap to check
        return
    with locked(root / AT_WORK, waits=False) as alone:
        if alone and CONFLICT not in text and not _is_whole(lock):
            shutil.copy2(lock, root / CUT)  # a copy, so that dvc.lock exists at every moment
            write_text(lock, copy.read_text(encoding="utf-8"))
            echo(f"{LOCK} was cut short by a kill; it is as before the last stage again, and {CUT} is the rest")


def _is_whole(lock: Path) -> bool:
    """Whether a dvc.lock has what DVC demands of it."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        stages = YAML(typ="safe").load(lock)["stages"].values()
        parts = [part for entry in stages for kind in ("deps", "outs") for part in entry.get(kind, [])]
        return all(entry["cmd"] for entry in stages) and all(part["path"] for part in parts)
    except (YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        return False
