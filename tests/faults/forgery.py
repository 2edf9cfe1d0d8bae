"""Alterations by somebody who knows how the pipeline keeps its books: lock, cache, audit file, store, keys.

As `damage`: each takes the file and a generator of random numbers, and says what it did, or None.
"""

import copy
import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import yaml
from damage import append, flip, truncate

from clinrl import artifacts
from clinrl.artifacts import canonical_json, digest, read_manifest, seal
from clinrl.release.audit_log import START


def in_cache(path: Path, random: Random) -> str | None:
    """DVC's cache: the object that holds this file, altered."""
    name = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    cached = Path(".dvc/cache/files/md5") / name[:2] / name[2:]
    if not cached.exists():
        return None
    cached.chmod(0o644)
    said = random.choice((flip, truncate, append))(cached, random)
    return said and f"its object in the cache: {said}"


def another_digest(path: Path, random: Random) -> str | None:
    """dvc.lock: one digit of the digest of one output of the lineage."""
    lock = yaml.safe_load(path.read_text())
    outs = [(stage, out) for stage, held in lock["stages"].items() for out in held.get("outs", ()) if _used(stage)]
    stage, out = outs[random.randrange(len(outs))]
    at = random.randrange(32)
    old = out["md5"]
    out["md5"] = f"{old[:at]}{'0' if old[at] != '0' else '1'}{old[at + 1 :]}"
    path.write_text(yaml.safe_dump(lock, sort_keys=False))
    return f"{stage}: digest of {out['path']} changed"


def forgotten_stage(path: Path, random: Random) -> str | None:
    """dvc.lock: a stage of the lineage taken out."""
    lock = yaml.safe_load(path.read_text())
    stages = [stage for stage in lock["stages"] if _used(stage)]
    stage = stages[random.randrange(len(stages))]
    del lock["stages"][stage]
    path.write_text(yaml.safe_dump(lock, sort_keys=False))
    return f"{stage} taken out"


def exchanged_digests(path: Path, random: Random) -> str | None:
    """dvc.lock: the outputs of two versions exchanged."""
    lock = yaml.safe_load(path.read_text())
    kind = random.choice(("train", "evaluate"))
    first, second = (lock["stages"][f"{kind}@{name}"]["outs"] for name in ("v1", "v2"))
    for a, b in zip(first, second, strict=True):
        a["md5"], b["md5"] = b["md5"], a["md5"]
    path.write_text(yaml.safe_dump(lock, sort_keys=False))
    return f"digests of {kind}@v1 and {kind}@v2 exchanged"


def _used(stage: str) -> bool:
    return stage.partition("@")[0] in ("base", "dataset", "validate", "probe", "train", "evaluate")


def rewritten_chain(path: Path, random: Random) -> str | None:
    """The audit file: something in it changed, and every digest from there on computed anew."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    at = random.randrange(len(lines))
    body, said = lines[at]["body"], ""
    if lines[at]["kind"] == "decision":
        finding = body["findings"][random.randrange(len(body["findings"]))]
        finding["observed"], said = 0.0, f"line {at + 1}: {finding['metric']} made 0"
    elif "approver" in body:
        for line in lines:  # the whole story, as somebody would tell it who covers traces
            if "approver" in line["body"]:
                line["body"]["approver"] = "Mallory Doe"
        said = "approvals given another name"
    else:
        return None
    rechain(path, lines)
    return f"{said}, and the chain computed anew"


def backdated(path: Path, random: Random) -> str | None:
    """The audit file: a line dated otherwise, and the chain computed anew."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    at = random.randrange(len(lines))
    lines[at]["at"] = "2020-02-02T02:02:02+00:00"
    rechain(path, lines)
    return f"line {at + 1} dated 2020, and the chain computed anew"


def cut_end(path: Path, random: Random) -> str | None:
    """The audit file: its last lines gone, cleanly."""
    lines = path.read_bytes().splitlines(keepends=True)
    left = random.randrange(len(lines))
    path.write_bytes(b"".join(lines[:left]))
    return f"cut after line {left} of {len(lines)}"


def rechain(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write lines of the audit file with digests that fit, as anybody can; signatures stay as they were."""
    previous = START
    for line in lines:
        line["previous"] = previous
        covered = {key: value for key, value in line.items() if key not in ("digest", "signature")}
        line["digest"] = previous = digest(covered)
    path.write_text("".join(canonical_json(line) + "\n" for line in lines), encoding="utf-8")


def forged_line(path: Path, random: Random) -> str | None:
    """The audit file: a promotion more at its end, well chained, that nobody made."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    forged = copy.deepcopy(next(line for line in reversed(lines) if line["kind"] == "promotion"))
    forged["body"]["approver"] = "Mallory Doe"
    rechain(path, [*lines, forged])
    return "a promotion by Mallory Doe put at the end, and the chain computed anew"


TAGS = ("digest", "decision", "approver", "base_digest", "data_digest", "parent_digest", "version")


def tag(path: Path, random: Random) -> str | None:
    """MLflow's database: another value of a tag of the champion."""
    name = random.choice(TAGS)
    with closing(sqlite3.connect(path)) as store, store:
        done = store.execute(
            "UPDATE model_version_tags SET value = CASE WHEN substr(value, 1, 1) = '0' THEN '1' ELSE '0' END || "
            "substr(value, 2) WHERE key = ? AND version = 2",
            (name,),
        )
    return f"tag {name} of the champion changed" if done.rowcount else None


def alias(path: Path, random: Random) -> str | None:
    """MLflow's database: the champion's name moved to another version, or dropped."""
    with closing(sqlite3.connect(path)) as store, store:
        if random.random() < 0.5:
            store.execute("UPDATE registered_model_aliases SET version = 1 WHERE alias = 'champion'")
            return "the name champion moved to v1"
        store.execute("DELETE FROM registered_model_aliases WHERE alias = 'champion'")
        return "the name champion dropped"


def source(path: Path, random: Random) -> str | None:
    """MLflow's database: the champion's files taken from where those of v1 lie."""
    with closing(sqlite3.connect(path)) as store, store:
        for column in ("source", "storage_location"):
            store.execute(
                f"UPDATE model_versions SET {column} = (SELECT {column} FROM model_versions WHERE version = 1) "
                "WHERE version = 2"
            )
    return "the champion's files are those of v1"


def disarm(path: Path, random: Random) -> str | None:
    """A registered folder: its copy of what checks it, made to agree to everything."""
    if path.name != "clinrl_loader.py":
        return None
    with path.open("a") as stream:
        stream.write("\n\ndef check(*_args, **_options):\n    return 'everybody', {}\n")
    return "the check that travels with the model made to agree to everything"


def another_loader(path: Path, random: Random) -> str | None:
    """A registered folder: MLmodel, which MLflow obeys first, made to name a module that was added."""
    if path.name != "MLmodel":
        return None
    (path.parent / "code/evil.py").write_text("def _load_pyfunc(path):\n    return None\n")
    path.write_text(path.read_text().replace("clinrl_loader", "evil"))
    return "another loader named in MLmodel, and put beside"


def served_again(path: Path, random: Random) -> str | None:
    """A registered folder: weights and code altered, manifest and served.json written to fit."""
    if path.name != "served.json":
        return None
    part = path.parent / random.choice(("adapter", "base"))
    weights = next(part.glob("*.safetensors"))
    held = bytearray(weights.read_bytes())
    held[-1] ^= 1
    weights.write_bytes(held)
    manifest = read_manifest(part)
    sealed = seal(part, **manifest.model_dump(exclude={"files"}))
    record = json.loads(path.read_text())
    record["digest" if part.name == "adapter" else "base_digest"] = artifacts.identity(sealed)
    artifacts.write_json(path, record)
    return f"weights of {part.name} altered, its manifest and served.json written to fit"


def other_key(path: Path, random: Random) -> str | None:
    """params.yaml: the key of an approver exchanged for a stranger's, or taken out."""
    params = yaml.safe_load(path.read_text())
    people = params.get("approvers")
    if not people:
        return None
    name = random.choice(sorted(people))
    if random.random() < 0.5:
        people["Mallory Doe"] = people.pop(name)
        said = f"the key of {name} given to Mallory Doe"
    else:
        held = people[name]
        old = held if isinstance(held, str) else json.dumps(held)
        at = random.randrange(len(old) // 2, len(old) - 4)
        new = old[:at] + ("A" if old[at] != "A" else "B") + old[at + 1 :]
        people[name] = new if isinstance(held, str) else json.loads(new)
        said = f"the key of {name} altered"
    path.write_text(yaml.safe_dump(params, sort_keys=False))
    return said
