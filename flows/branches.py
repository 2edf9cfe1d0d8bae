"""The branch in which a run hands over the text that stages wrote: their entries in dvc.lock, and reports.

The DVC remote carries the other files, by their digests in dvc.lock. DVC's run cache would need no branch, but DVC
trusts it unchecked, and it does not show who wrote there.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from clinrl import paths
from clinrl.artifacts import write_text
from clinrl.errors import Refused
from clinrl.provenance.lock import LOCK
from clinrl.release import audit_log
from clinrl.runtime.dvc_command import HEAD, Stages, blocks_of
from flows.clone import Away, git

PLAIN, GONE = "100644", "000000"
"""Git's modes of a plain file, which is neither a link nor a program, and of a removed file."""
OBEYED = re.compile(r"(^|/)(dvc\.yaml|\.git[a-z]+|\.dvc[a-z]*)$|\.dvc$")
"""Files that git or DVC obeys in any folder."""
BUILT = "built"
"""The first part of the name of every branch that holds built stages."""


def result(*names: str) -> str:
    """The name of a branch with built stages of this project. If it stands in a folder of the repository, that follows
    behind `_`, which no version or task is called."""
    folder = Path(git("rev-parse", "--show-prefix")).parts
    return "/".join([BUILT, *("_" for _ in folder[:1]), *folder, *names])


def branch(commit: str, name: str) -> str:
    """The name of the branch with a worker's results for `name` at a commit."""
    return result(commit[:12], name)


def commit(message: str, only: Collection[str] = ()) -> None:
    """Commit what stages wrote: all of it, or `only` these files and folders."""
    if written := [path for path in only or (".",) if Path(path).exists()]:
        git("add", "--all", "--", *written)
    if git("diff", "--cached", "--name-only"):
        git("commit", "--quiet", "--message", message)


def hand_over(to: str, message: str, *, only: Collection[str] = (), force: str = "--force") -> str:
    """Commit what stages wrote, push it as a branch of the origin, and return the commit.

    Raises Away unless the option `force` allows it: an empty one, if this continues the branch of that name.
    """
    commit(message, only)
    git("push", "--quiet", *filter(None, [force]), "origin", f"HEAD:refs/heads/{to}")
    return git("rev-parse", "HEAD")


def hand_over_rest(to: str, message: str, only: Collection[str]) -> None:
    """Hand over what an earlier run left here, merged with what the branch holds by now. Raises as `go_on` does."""
    commit(message, only)
    go_on(to, only)
    hand_over(to, message, only=only, force="")


def tip(of: str) -> str:
    """The commit of a branch of the origin; empty if the origin has no such branch."""
    return git("ls-remote", "--heads", "origin", f"refs/heads/{of}").partition("\t")[0]


def go_on(of: str, may_change: Collection[str]) -> None:
    """Merge a branch that was handed over before, if the origin has it.

    Raises Refused if it changes files or folders that it may not, or a file that git or DVC obeys, since code that
    somebody pushed would run here; and if it does not merge any more.
    """
    if not tip(of):
        return
    git("fetch", "--quiet", "origin", f"refs/heads/{of}")
    before = git("rev-parse", "HEAD")
    try:
        _check(of, git("merge-base", "HEAD", "FETCH_HEAD"), "FETCH_HEAD", may_change)
        try:
            git("merge", "--quiet", "--no-edit", "FETCH_HEAD")
        except Refused:
            raise Refused(
                f"branch {of} does not merge with {before[:7]}: both changed the same; merge it by hand, or give it up "
                f"with `git push origin --delete {of}`"
            ) from None
        # Git names one of several merge bases. Compared with that one alone, changes of another could be reverted.
        _check(of, before, "HEAD", may_change)
    except Refused as error:
        git("reset", "--quiet", "--hard", before)
        if not audit_log.is_longer_at(log := paths.AUDIT_LOG, "FETCH_HEAD"):
            raise
        raise Refused(  # as after a forced push: its approvals would be lost with the branch
            f"{error}. It has lines of {log} that are nowhere else; first `git fetch origin {of}`, "
            f"`git show FETCH_HEAD:./{log} > {log}`, and commit them"
        ) from None


def take_in(of: str, stages: Mapping[str, Collection[str]], message: str, *, is_shared: bool = False) -> list[str]:
    """Commit here a branch's results for some stages; `stages` maps each address to its outputs in dvc.yaml.

    Other branches may have written to dvc.lock meanwhile, so entries are taken and not the file. `is_shared`: leave out
    the branch's other results, since it belongs to a version that shares these stages. The commit has the date of its
    parent: repeating this gives the same commit, by which workers find their results. Returns the addresses that were
    taken. Raises Refused if the branch changes anything but entries and outputs of these stages, or names outputs that
    dvc.yaml does not: its worker is broken, or not ours.
    """
    git("fetch", "--quiet", "origin", f"refs/heads/{of}")
    base = git("merge-base", "HEAD", "FETCH_HEAD")
    changed, theirs = _changes(of, base, "FETCH_HEAD"), _entries("FETCH_HEAD")
    before, after, ours = dict(_entries(base)), dict(theirs), dict(_entries("HEAD"))  # as text
    new = {address: text for address, text in after.items() if before.get(address) != text}
    outs, lock = _from_the_root(path for written in stages.values() for path in written), _from_the_root([str(LOCK)])
    reports = [path for path in changed if path not in lock]
    foreign = [path for path in reports if outs.isdisjoint([path, *map(str, Path(path).parents)])]
    if is_shared:
        new = {address: text for address, text in new.items() if address in stages}
        reports = [path for path in reports if path not in foreign]
    elif other := [address for address in [*new, *(before.keys() - after.keys())] if address not in stages]:
        raise Refused(f"branch {of} changes the stage {other[0]} in dvc.lock, which was not asked of it")
    elif foreign:
        raise Refused(f"branch {of} changes {foreign[0]}, which no stage that was asked of it writes")
    for address in new:
        if (written := theirs.written(address)) is None:
            raise Refused(f"branch {of} has an entry of {address} that DVC does not write; delete it")
        if odd := written.difference(stages[address]):
            raise Refused(f"branch {of} says that {address} writes {min(odd)}, which it does not by dvc.yaml")
    held = {*git("ls-tree", "-r", "--full-tree", "--name-only", "FETCH_HEAD").split("\n")}
    for act, is_held in ((("checkout", "FETCH_HEAD"), True), (("rm", "--quiet", "--ignore-unmatch"), False)):
        if some := [f":(top,literal){path}" for path in reports if (path in held) == is_held]:
            git(*act, "--", *some)
    write_text(LOCK, HEAD + "".join((ours | new).values()))
    git("add", "--all")
    if git("status", "--porcelain"):
        git("commit", "--quiet", "--message", message, date=git("log", "-1", "--format=%cI"))
    return [*new]


def go_on_with(name: str, commit: str, stages: Mapping[str, Mapping[str, Collection[str]]], one: str = "") -> list[str]:
    """Take in the results of workers for a version at a commit: its own branch, and shared stages of another branch.

    `stages`: the stages of each version, as for `take_in`. With `one`, that shared stage alone, from the first other
    branch that has it. Returns why other branches were not taken; their stages are made anew.
    """
    place = f"refs/heads/{branch(commit, '')}"
    begun = [line.split("\t")[1].removeprefix(place) for line in git("ls-remote", "origin", f"{place}*").splitlines()]
    missing, reasons = {one} if one else set(stages[name]), list[str]()
    for other in sorted((some for some in begun if not one or some != name), key=lambda other: other != name):
        if not (same := {address: outs for address, outs in stages.get(other, {}).items() if address in missing}):
            continue
        try:
            taken = take_in(branch(commit, other), same, f"{name}, begun for {other}", is_shared=other != name)
        except Refused as error:
            if other == name or isinstance(error, Away):
                raise
            reasons.append(str(error))
        else:  # what is up to date at the commit is never taken
            missing -= {*taken} if one else same.keys()
    return reasons


def _check(of: str, old: str, new: str, may_change: Collection[str]) -> None:
    """Refuse a branch for changes between two commits that `go_on` does not allow. Raises Refused."""
    allowed, changed = _from_the_root(may_change), _changes(of, old, new)
    outside = [path for path in changed if allowed.isdisjoint([path, *map(str, Path(path).parents)])]
    if foreign := outside or [*filter(OBEYED.search, changed)]:
        raise Refused(f"branch {of} changes {foreign[0]}, which no retraining does; see who pushed it, and delete it")
    if not audit_log.grew(log := paths.AUDIT_LOG, old, new):
        raise Refused(f"branch {of} lacks lines of {log}, which only grows; see who pushed it, and delete it")


def _changes(of: str, old: str, new: str) -> list[str]:
    """The files that a branch changes between two commits.

    Raises Refused if one of them is a program, or a link, through which later writes would land elsewhere.
    """
    lines = [line.split("\t") for line in git("diff", "--raw", "--no-renames", old, new).split("\n") if line]
    if odd := [path for about, path in lines if about.split()[1] not in (PLAIN, GONE)]:
        raise Refused(f"branch {of} brings {odd[0]} as a link or a program; see who pushed it, and delete it")
    return [path for _, path in lines]


def _entries(commit: str) -> Stages:
    """The entries of dvc.lock at a commit, as text by address, which `Stages.get` parses.

    Raises Refused if one entry could hide another: each must occur once, and in DVC's own layout.
    """
    blocks = blocks_of(git("show", f"{commit}:./{LOCK}", strip=False))
    if blocks is None:
        raise Refused(f"{LOCK} of {commit} is not as DVC writes it; see who pushed it, and run `dvc repro` anew")
    return Stages(blocks)


def _from_the_root(paths: Iterable[str]) -> set[str]:
    """Paths of the project as git names them: from the root of the repository, which may lie above the project."""
    prefix = git("rev-parse", "--show-prefix")
    return {prefix + path for path in paths}
