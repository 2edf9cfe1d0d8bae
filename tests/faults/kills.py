"""SIGKILL at random moments of every kind of command, and the same command again: does it end where it would have?

A command runs once without a disturbance, which says how long it takes and what it leaves. Then it is started from the
same state, killed, looked after for five seconds, and started again to its end. Compared are the SHA-256 of every file
that a stage made, the versions and names of the registry, and the lines of the audit file.
"""

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import attempts
import projects
from attempts import Record
from projects import APPROVER, ROOT

from clinrl import paths
from processes import free_port

GROUP, PARENT, CHILD = "whole group", "parent alone", "child alone"
"""What is killed: all that the command started, the command itself, or one process below it."""
ORPHANS_S = 5.0
"""Seconds after which nothing of a killed command may be left."""
LIMIT_S = 900.0
READY = "serving the flows"
"""What the servers say once they are up; they have no end of their own."""
PYTHON = sys.executable


class Command(NamedTuple):
    """One command of a chain."""

    what: str
    words: Sequence[str]
    kills: int
    """How many of sixty; 0 leads on to the next one."""
    serves: bool = False


class Chain(NamedTuple):
    """Commands that build on each other, in a project of their own."""

    name: str
    build: Callable[[Path], None]
    commands: Sequence[Command]


CHECKED = '"$0" -m clinrl check && exec "$0" -m dvc repro --no-run-cache --single-item "$1"'
"""A stage as `make demo` and the flows run it."""


def _stage(address: str, kills: int) -> Command:
    return Command(f"dvc repro {address}", ["sh", "-c", CHECKED, PYTHON, address], kills)


def _clinrl(*words: str, kills: int) -> Command:
    return Command(f"clinrl {words[0]}", [PYTHON, "-m", "clinrl", *words], kills)


DOLL = Chain(
    "doll",
    projects.doll,
    (
        _stage("dataset@d1", 3),
        _stage("dataset@x1", 0),
        _stage("dataset@m1", 0),
        _stage("validate@d1", 3),
        _stage("validate@x1", 0),
        _stage("validate@m1", 0),
        _stage("baseline@esi", 3),
        _stage("probe@v1", 3),
        _stage("train@v1", 6),
        _stage("evaluate@v1", 3),
        _stage("probe@v2", 0),
        _stage("train@v2", 6),
        _stage("evaluate@v2", 0),
        _stage("mine@v2", 3),
        _stage("fold@v2-full", 3),
        _stage("examine-fold@v2-full", 3),
    ),
)
"""Every kind of stage, for real, at the size of a doll."""
RELEASE = Chain(
    "release",
    projects.scripted_project,
    (
        Command("flows.retrain", [PYTHON, "-m", "flows", "retrain", "esi", "--approver", APPROVER], 6),
        _clinrl("register", "v2", kills=0),
        _clinrl("draft", "esi", kills=3),
        Command("flows.serve", [PYTHON, "-m", "flows", "serve", "--servers"], 5, serves=True),
    ),
)
BY_HAND = Chain(
    "by hand",
    projects.scripted_project,
    (
        _stage("evaluate@v2", 0),
        _clinrl("register", "v1", kills=0),
        _clinrl("register", "v2", kills=5),
        _clinrl("promote", "v2", "--approver", APPROVER, kills=5),
    ),
)
"""What changes names. Models are scripted, so that a version passes its gate."""
CHAINS = (DOLL, BY_HAND, RELEASE)
QUICK = (Chain("quick", projects.doll, (_stage("dataset@d1", 60),)),)
"""A command that imports no torch."""


def attack(folder: Path, total: int, seed: int, chains: Sequence[Chain] = CHAINS) -> Iterator[Record]:
    """Kill `total` times and a few more, spread over the commands, below `folder`."""
    whole = sum(command.kills for chain in chains for command in chain.commands)
    shares = [
        (chain, [round(total * command.kills / whole) if command.kills else 0 for command in chain.commands])
        for chain in chains
    ]
    kinds = _in_turn()
    bar = iter(attempts.each(range(count := sum(sum(share) for _, share in shares)), "kills", count))
    for chain, kills in shares:
        project = folder / chain.name.replace(" ", "-") / "project"
        chain.build(project)
        for command, number in zip(chain.commands, kills, strict=True):
            before, after = (project.with_name(name) for name in ("before", "after"))
            _copy(project, before)
            took_s = undisturbed(project, command)
            if not number:
                continue
            expected = standing(project)
            _copy(project, after)
            random = Random(f"{seed} {chain.name} {command.what}")
            for _ in range(number):
                next(bar, None)
                yield _attempt(project, before, command, took_s, expected, next(kinds), random, seed)
            _copy(after, project)
    next(bar, None)


def _in_turn() -> Iterator[str]:
    while True:
        yield from (GROUP, PARENT, CHILD)


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target, symlinks=True)


def start(project: Path, command: Command) -> "subprocess.Popen[bytes]":
    """A command as a terminal would start it: in a session of its own. What it says goes to the file `said`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    env["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{env['PATH']}"
    words = list(command.words)
    if command.serves:
        for option in ("--prefect-port", "--mlflow-port"):
            words += [option, str(free_port())]
    with (project / "said").open("wb") as said:
        return subprocess.Popen(
            words, cwd=project, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )


def undisturbed(project: Path, command: Command) -> float:
    """Run a command to its end; the seconds that it took. Fails with its words if it does not end well."""
    started = time.monotonic()
    code = _to_the_end(project, start(project, command), command)
    assert code == 0, f"{command.what} ended with {code}: {said(project)}"
    return time.monotonic() - started


def said(project: Path) -> str:
    """The last words of a command."""
    return (project / "said").read_text(errors="replace")[-800:]


def _to_the_end(project: Path, process: "subprocess.Popen[bytes]", command: Command) -> int:
    deadline = time.monotonic() + LIMIT_S
    if command.serves:
        while process.poll() is None and READY not in (project / "said").read_text(errors="replace"):
            assert time.monotonic() < deadline, f"{command.what} is not up after {LIMIT_S:g} s"
            time.sleep(0.1)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    try:
        return process.wait(deadline - time.monotonic())
    finally:
        _end(_family(process.pid, project))


def _attempt(
    project: Path, before: Path, command: Command, took_s: float, expected: dict[str, Any], kind: str, random: Random,
    seed: int,
) -> Record:  # fmt: skip
    share, pick = random.random(), random.random()
    moment_s = share * took_s
    for _ in range(4):
        _copy(before, project)
        started = time.monotonic()
        killed = _killed(project, command, moment_s, kind, pick)
        if killed is not None:
            break
        moment_s = share * (time.monotonic() - started)  # it was quicker this time, and ended first
    left = len(killed or ())
    _end(killed or [])
    code = _to_the_end(project, start(project, command), command)
    found = standing(project)
    differing, doubled, lost = compared(expected, found)
    words = [f"{left} left after 5 s"] if left else []
    words += [f"{len(differing)} files differ: {', '.join(differing[:3])}"] if differing else []
    words += [f"doubled: {', '.join(doubled)}"] if doubled else []
    words += [f"lost: {', '.join(lost)}"] if lost else []
    words += [f"the same command ended with {code}: {said(project)[-200:]}"] if code else []
    words += ["it always ended first"] if killed is None else []
    return {
        "what": command.what,
        "killed": kind,
        "at": f"{share:.0%} of its time",
        "seed": seed,
        "differing": len(differing),
        "doubled": len(doubled),
        "lost": len(lost),
        "orphans": left,
        "outcome": "; ".join(words) or "as undisturbed",
    }


def _killed(project: Path, command: Command, moment_s: float, kind: str, pick: float) -> list[int] | None:
    """Start a command and kill it at a moment. What is left of it after five seconds; None if it ended before."""
    process = start(project, command)
    try:
        process.wait(moment_s)
        _end(_family(process.pid, project))
        return None
    except subprocess.TimeoutExpired:
        pass
    family = _family(process.pid, project)
    below = [pid for pid in family if pid != process.pid]
    if kind == CHILD and below:
        _kill(sorted(below)[int(pick * len(below))])
    elif kind == GROUP:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    if kind == CHILD and below:
        process.wait(LIMIT_S) if not command.serves else _given_up(process)
    process.wait()
    deadline = time.monotonic() + ORPHANS_S
    while (left := _alive(family, project)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _given_up(process: "subprocess.Popen[bytes]") -> None:
    """Servers may go on without one of their children: then they are told to end."""
    try:
        process.wait(ORPHANS_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _family(root: int, project: Path) -> dict[int, str]:
    """A process, all below it, and all at work in the project, with when each started."""
    parents: dict[int, int] = {}
    started: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            parents[int(entry.name)], started[int(entry.name)] = int(fields[1]), fields[19]
    found = {root, *(pid for pid in started if _works_in(pid, project))}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: started[pid] for pid in found if pid in started}


def _works_in(pid: int, project: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")) == project.resolve()
    except OSError:
        return False


def _stat(pid: int) -> list[str] | None:
    """State, parent and so on of a process that has not ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def _alive(family: dict[int, str], project: Path) -> list[int]:
    of_old = [pid for pid, started in family.items() if (now := _stat(pid)) is not None and now[19] == started]
    return sorted({*of_old, *(pid for pid in _family(-1, project) if pid > 0)})


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _end(pids: Any) -> None:
    """End what a command left behind, so that the next attempt begins from nothing."""
    for pid in pids:
        _kill(pid)


def standing(project: Path) -> dict[str, Any]:
    """Where a project stands: digests of files, versions and names of the registry, lines of the audit file."""
    return {"files": _files(project), "registry": _registry(project), "decisions": _decisions(project)}


def _files(project: Path) -> dict[str, str]:
    """Digests of what a command makes. No file of these holds a signature: models keep theirs in mlruns, stages in
    .clinrl, and decisions in the audit file, whose lines are counted by themselves since they hold times.
    """
    kept = [project / name for name in ("dvc.lock", "params.yaml")]
    kept += (project / "params").glob("*.yaml")
    kept += [path for path in (project / "data").rglob("*") if path.is_file()]
    ledger = project / paths.AUDIT_LOG
    found = {
        str(path.relative_to(project)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in kept
        if path.exists() and path != ledger and "docs" not in path.parts
    }
    unfinished = [name for name in found if ".partial-" in name or ".former-" in name]
    # What a kill leaves is swept by whoever writes there next, and stands where nobody looks.
    return {name: digest for name, digest in found.items() if name not in unfinished}


def _registry(project: Path) -> Counter[str]:
    store = project / "mlruns/mlflow.db"
    if not store.exists():
        return Counter()
    with closing(sqlite3.connect(store)) as database:
        try:
            versions = database.execute(
                "SELECT name, key, value FROM model_version_tags WHERE key IN ('version', 'digest', 'gate', 'approver')"
            ).fetchall()
            aliases = database.execute(
                "SELECT a.name, a.alias, t.value FROM registered_model_aliases a JOIN model_version_tags t "
                "ON a.name = t.name AND a.version = t.version AND t.key = 'version'"
            ).fetchall()
            runs = database.execute("SELECT name, status FROM runs").fetchall()
        except sqlite3.OperationalError:  # no tables yet
            return Counter()
    return Counter(" ".join(map(str, row)) for row in [*versions, *aliases, *(("run", *row) for row in runs)])


def _decisions(project: Path) -> Counter[str]:
    ledger = project / paths.AUDIT_LOG
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    found = Counter[str]()
    for line in map(json.loads, lines):
        body = line["body"]
        found[f"{line['kind']} {body.get('candidate') or body.get('version') or body.get('to')}"] += 1
    return found


def compared(expected: dict[str, Any], found: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Files that differ; versions, names and decisions that are there more often than they should be; or less often."""
    theirs, ours = expected["files"], found["files"]
    differing = [name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name)]
    parts = ("registry", "decisions")
    doubled = [what for part in parts for what in (found[part] - expected[part])]
    lost = [what for part in parts for what in (expected[part] - found[part])]
    return differing, doubled, lost


def counted(records: Sequence[Record]) -> dict[str, Any]:
    """What the report says of kills."""
    sums = {name: sum(record[name] for record in records) for name in ("differing", "doubled", "lost", "orphans")}
    return {"n": len(records), **sums, "attempts": list(records)}


FINE = "as undisturbed"
