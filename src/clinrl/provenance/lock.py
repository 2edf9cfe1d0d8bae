"""Comparison with dvc.lock: whether the files here are those that the stages made, and made of each other.

Somebody who alters a folder can also rewrite the digests in its manifest. dvc.lock lies outside of all such folders,
under git. Digests are DVC's own: the MD5 of a file's bytes, and of a folder that of the list of its files.
"""

import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from clinrl import paths
from clinrl.artifacts import md5
from clinrl.config.params import Params
from clinrl.errors import ArtefactError
from clinrl.types import Strict

LOCK = Path("dvc.lock")
MADE = "data"
"""The folder that stages write to. Stages have also made all inputs in it, except the sources of imports."""
SOURCED = "import@"

Lock = Mapping[str, Mapping[str, Any]]
"""Stage address to its entry in dvc.lock."""
State = Literal["holds", "altered", "absent", "unrecorded"]


class Fact(Strict):
    """One file or folder that a stage made or used, compared with dvc.lock."""

    path: str
    stage: str
    """Address of the stage that made it, or that used it as an input."""
    md5: str
    """The digest in dvc.lock; empty if there is none."""
    state: State
    """holds: it is as recorded. altered: it differs from the record, or is not the input that the stage used. absent:
    it is recorded and not here. unrecorded: dvc.lock has no stage that made it."""
    sentence: str
    """What is wrong and how to mend it; empty if the fact holds."""


def read(path: Path = LOCK) -> Lock:
    """The stages of a dvc.lock. Raises ArtefactError if the file is missing or malformed."""
    from ruamel.yaml.error import YAMLError

    content = b""
    try:
        stages = _stages(content := path.read_bytes())
        claims = [(out["path"], out["md5"], key) for key, entry in stages.items() for out in entry.get("outs", ())]
    except FileNotFoundError:
        raise ArtefactError(f"{path.name} is not here, so nothing says what was built; run `dvc repro`") from None
    except (YAMLError, UnicodeDecodeError, AttributeError, KeyError, TypeError, IsADirectoryError):
        if b"<<<<<<<" in content:
            mend = f"take one side (in a merge `git checkout --ours {path}`); `dvc repro` makes what it lacks"
            raise ArtefactError(f"{path} has the marks of a conflict of git; {mend}") from None
        raise ArtefactError(f"{path} is not a lock file of DVC's; restore it from git, or run `dvc repro`") from None
    if twice := next((out for out, n in Counter(out for out, *_ in claims).items() if n > 1), None):
        both = " and of ".join(key for out, _, key in claims if out == twice)
        raise ArtefactError(
            f"{path} names one output twice: {twice} is of {both}; delete the entry of the stage that dvc.yaml no "
            "longer has, or restore the file from git"
        )
    return stages


@lru_cache(maxsize=2)  # a command reads it for one model after the other
def _stages(content: bytes) -> Lock:
    from ruamel.yaml import YAML

    stages: Lock = YAML(typ="safe").load(content).get("stages", {})
    return stages


def outputs(lock: Lock, stages: Iterable[str] | None = None) -> dict[str, str]:
    """DVC's digest of every output of some stages, by default of all stages, by path."""
    entries = lock.values() if stages is None else [lock[stage] for stage in stages]
    return {out["path"]: out["md5"] for entry in entries for out in entry.get("outs", ())}


def ancestors(lock: Lock, target: str) -> list[str]:
    """`target` and every stage that it follows from, ancestors first. Stages that the lock lacks are left out."""
    makers = _makers(lock)
    found, begun, open_ = list[str](), set[str](), [(target, False)]
    while open_:
        name, is_done = open_.pop()
        if is_done:
            found.append(name)
        elif name in lock and name not in begun:  # somebody may have written stages that follow from each other
            begun.add(name)
            open_.append((name, True))
            inputs = (out for dep in lock[name].get("deps", ()) for out in _made_at(dep["path"], makers))
            open_ += [(makers[out], False) for out in inputs]
    return found


def facts(lock: Lock, target: str) -> list[Fact]:
    """Everything that a stage makes and follows from, compared with the disk, ancestors first."""
    if target not in lock:
        sentence = f"dvc.lock records no run of {target}; run `dvc repro {target}`"
        return [Fact(path="", stage=target, md5="", state="unrecorded", sentence=sentence)]
    made = outputs(lock)
    found = []
    for stage in ancestors(lock, target):
        for dep in lock[stage].get("deps", ()):
            path, used = dep["path"], dep.get("md5")
            if not _made_at(path, made) and path.startswith(f"{MADE}/") and not stage.startswith(SOURCED):
                sentence = f"dvc.lock records no run that made {path}, on which {stage} ran; run `dvc repro {stage}`"
                found.append(Fact(path=path, stage=stage, md5=used or "", state="unrecorded", sentence=sentence))
            if made.get(path, used) != used:
                sentence = f"dvc.lock records another {path} than the one that {stage} ran on; run `dvc repro {stage}`"
                found.append(Fact(path=path, stage=stage, md5=used or "", state="altered", sentence=sentence))
        found += [_fact(stage, path, recorded) for path, recorded in outputs(lock, [stage]).items()]
    return found


def demand(params: Params, name: str) -> None:
    """Refuse a version or a merge if anything that it was made of or evaluated on differs from dvc.lock.

    Itself, its base, its exam, its answers, reports and proofs must also be here. Anything else that is recorded may be
    absent, such as the data of an ancestor in a clone. Raises ArtefactError for the first fact that does not hold.
    """
    model = params.model(name)
    used = [model.folder, paths.base(model.task.name), paths.cases(model.exam), paths.data_proof(model.exam)]
    used += [paths.graded(name), paths.report(name), *([paths.probe_proof(name)] if model.data else [])]
    found = facts(read(), model.stage)
    for path in used:
        about = [fact for fact in found if fact.path == str(path) or Path(fact.path).parent == path]
        if not about:
            raise ArtefactError(f"dvc.lock records nothing of {path}; run `dvc repro {model.stage}`")
        for fact in about:
            if fact.state == "absent":
                raise ArtefactError(fact.sentence)
    for fact in found:
        if fact.state in ("altered", "unrecorded"):
            raise ArtefactError(fact.sentence)


def unsound_inputs(lock: Lock, stage: str) -> list[Fact]:
    """The inputs of a stage that are absent or differ from the lock, sorted by path."""
    made, makers = outputs(lock), _makers(lock)
    inputs = {out for dep in lock.get(stage, {}).get("deps", ()) for out in _made_at(dep["path"], made)}
    facts = (_fact(makers[path], path, made[path]) for path in sorted(inputs))
    return [fact for fact in facts if fact.state != "holds"]


def _makers(lock: Lock) -> dict[str, str]:
    return {out["path"]: name for name, entry in lock.items() for out in entry.get("outs", ())}


def _made_at(path: str, outs: Collection[str]) -> list[str]:
    """The outputs that an input covers: the output at that path, or all outputs below that folder."""
    return [path] if path in outs else [out for out in outs if out.startswith(f"{path}/")]


def _fact(stage: str, path: str, recorded: str) -> Fact:
    try:
        is_same = md5(Path(path)) == recorded
    except OSError:
        sentence = f"{path} is not here, though dvc.lock records it; {_mends(stage, path)}"
        return Fact(path=path, stage=stage, md5=recorded, state="absent", sentence=sentence)
    if is_same:
        return Fact(path=path, stage=stage, md5=recorded, state="holds", sentence="")
    sentence = f"{path} is not what dvc.lock records of {stage}: it was altered since; {_mends(stage, path)}"
    return Fact(path=path, stage=stage, md5=recorded, state="altered", sentence=sentence)


def _mends(stage: str, path: str) -> str:
    """How to restore an output: from git if git has it, else from DVC's cache or a remote."""
    tracked = _in_git(Path.cwd())
    if path in tracked or any(name.startswith(f"{path}/") for name in tracked):
        return f"restore it with `git checkout {path}`, or build it with `dvc repro {stage}`"
    return f"build it with `dvc repro {stage}`, or restore it with `dvc checkout {path}` (`dvc pull` from a remote)"


@lru_cache(maxsize=1)
def _in_git(folder: Path) -> frozenset[str]:
    """The outputs of a project that git tracks; none without a repository."""
    command = ["git", "-C", str(folder), "ls-files", "-z", MADE]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return frozenset(done.stdout.split("\0")[:-1])
