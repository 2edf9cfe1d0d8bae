"""Ways to alter a file of a project so that something that is used afterwards is another than before.

Each takes the file and a generator of random numbers, alters it, and says in words what it did; or returns None if this
file has no such place, as a list of one line has no order.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import yaml

from clinrl import artifacts
from clinrl.artifacts import MANIFEST, canonical_json, read_manifest, seal

Damage = Callable[[Path, Random], str | None]


def flip(path: Path, random: Random) -> str | None:
    """Another bit in one byte."""
    held = bytearray(path.read_bytes())
    if not held:
        return None
    place = random.randrange(len(held))
    held[place] ^= 1 << random.randrange(8)
    path.write_bytes(held)
    return f"a bit of byte {place} flipped"


def truncate(path: Path, random: Random) -> str | None:
    """The end cut off."""
    held = path.read_bytes()
    if len(held) < 2:
        return None
    left = random.randrange(len(held) - 1)
    path.write_bytes(held[:left])
    return f"cut to {left} bytes"


def append(path: Path, random: Random) -> str | None:
    """A line more at the end."""
    with path.open("ab") as stream:
        stream.write(b"\n# one line more\n")
    return "a line added at the end"


def edit(path: Path, random: Random) -> str | None:
    """Another value in one field of a JSON file, of a line of JSON lines, or of YAML."""
    if path.suffix not in (".json", ".jsonl", ".lock"):
        return None
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        lines = text.splitlines()
        at = random.randrange(len(lines))
        value = json.loads(lines[at])
        said = change(value, random)
        lines[at] = canonical_json(value)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return f"line {at + 1}: {said}"
    if path.suffix == ".json" or path.name == "dvc.lock":
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        said = change(value, random)
        if said is not None:
            path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")  # which is YAML too
        return said
    return None


def change(value: Any, random: Random) -> str | None:
    """Change one leaf of parsed JSON in place; says which, or None if it has none."""
    leaves = [leaf for leaf in _leaves(value) if leaf[2] is not None and leaf[2] != ""]
    if not leaves:
        return None
    holder, key, old = leaves[random.randrange(len(leaves))]
    if isinstance(old, bool):
        new: Any = not old
    elif isinstance(old, int | float):
        new = old + 1 if random.random() < 0.5 or not old else -old
    else:
        at = random.randrange(len(old))
        new = old[:at] + ("0" if old[at] != "0" else "1") + old[at + 1 :]
    holder[key] = new
    return f"field {key!r} changed"


def _leaves(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        if isinstance(inner, dict | list):
            yield from _leaves(inner)
        else:
            yield value, key, inner


def reorder(path: Path, random: Random) -> str | None:
    """Two different lines exchanged."""
    if path.suffix not in (".jsonl", ".csv", ".md", ".py", ".txt"):
        return None
    lines = path.read_bytes().splitlines(keepends=True)
    pairs = [(a, b) for a in range(len(lines)) for b in range(a) if lines[a].strip() != lines[b].strip()]
    if not pairs:
        return None
    a, b = pairs[random.randrange(len(pairs))]
    lines[a], lines[b] = lines[b], lines[a]
    path.write_bytes(b"".join(lines))
    return f"lines {b + 1} and {a + 1} exchanged"


def drop_line(path: Path, random: Random) -> str | None:
    """One line less."""
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) < 2:
        return None
    at = random.randrange(len(lines))
    path.write_bytes(b"".join(lines[:at] + lines[at + 1 :]))
    return f"line {at + 1} of {len(lines)} dropped"


def repeat_line(path: Path, random: Random) -> str | None:
    """One line twice."""
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) < 2:
        return None
    at = random.randrange(len(lines))
    path.write_bytes(b"".join(lines[: at + 1] + lines[at:]))
    return f"line {at + 1} of {len(lines)} written twice"


def remove(path: Path, random: Random) -> str | None:
    """The file gone; not that of an ancestor, which nothing reads again and a clone has not got."""
    if {"v1", "v1.json", "d1", "d1.json"} & set(path.parts):
        return None
    path.unlink()
    return "removed"


def add(path: Path, random: Random) -> str | None:
    """A file more beside it."""
    name = random.choice(("extra.py", "sitecustomize.py", "notes.txt", "pytorch_model.bin", "more.json"))
    (path.parent / name).write_text("0\n")
    return f"{name} added beside it"


def link(path: Path, random: Random) -> str | None:
    """A symbolic link in its place, to an altered copy elsewhere."""
    elsewhere = path.parents[2] / f"elsewhere-{path.name}"
    shutil.copyfile(path, elsewhere)
    if flip(elsewhere, random) is None:
        return None
    path.unlink()
    path.symlink_to(elsewhere.resolve())
    return "replaced by a link to an altered copy"


def swap(path: Path, random: Random) -> str | None:
    """Exchanged with the file of that name of the parent version."""
    if "v2" not in path.parts:
        return None
    other = Path(*("v1" if part == "v2" else part for part in path.parts))
    if not other.exists() or other.read_bytes() == path.read_bytes():
        return None
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return "exchanged with that of v1"


def swap_modes(path: Path, random: Random) -> str | None:
    """Exchanged with the file of the other mode."""
    name = path.name.replace("think", "\0").replace("direct", "think").replace("\0", "direct")
    other = path.with_name(name)
    if name == path.name or not other.exists() or other.read_bytes() == path.read_bytes():
        return None
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return f"exchanged with {name}"


def reseal(path: Path, random: Random) -> str | None:
    """Edited or flipped, and the folder sealed again to fit."""
    if path.name == MANIFEST or not (path.parent / MANIFEST).exists():
        return None
    said = edit(path, random) if path.suffix in (".json", ".jsonl") else flip(path, random)
    if said is None:
        return None
    manifest = read_manifest(path.parent)
    seal(path.parent, **manifest.model_dump(exclude={"files"}))
    return f"{said}, and the manifest written to fit"


def claim_right(path: Path, random: Random) -> str | None:
    """Graded answers: the field `answer` made the gold label in every line, and the folder sealed again to fit."""
    if path.suffix != ".jsonl" or not (path.parent / MANIFEST).exists():
        return None
    golds = {
        row["id"]: row["key"]["level"]
        for row in map(json.loads, Path("data/cases/x1/cases.jsonl").read_text().splitlines())
    }
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    wrong = [line for line in lines if line["answer"] != golds[line["case_id"]]]
    if not wrong:
        return None
    for line in wrong:
        line["answer"] = golds[line["case_id"]]
    path.write_text("".join(canonical_json(line) + "\n" for line in lines), encoding="utf-8")
    manifest = read_manifest(path.parent)
    seal(path.parent, **manifest.model_dump(exclude={"files"}))
    return f"{len(wrong)} wrong answers declared right, and the manifest written to fit"


def better_number(path: Path, random: Random) -> str | None:
    """A report: one measured value halved, as somebody would who wants it to look better."""
    report = json.loads(path.read_text(encoding="utf-8"))
    found = [
        leaf
        for leaf in _leaves(report)
        if leaf[1] in ("value", "low", "high") and isinstance(leaf[2], float) and leaf[2]
    ]
    if not found:
        return None
    holder, key, old = found[random.randrange(len(found))]
    holder[key] = round(old / 2, 6)
    artifacts.write_json(path, report)
    return f"{key} {old:g} made {holder[key]:g}"


def lock_to_fit(path: Path, random: Random) -> str | None:
    """Edited, sealed again, and dvc.lock written to fit by DVC itself."""
    if (said := reseal(path, random)) is None:
        return None
    import projects

    groups = {"adapters": "train", "cases": "dataset", "graded": "evaluate"}
    name = f"{groups[path.parts[1]]}@{path.parts[2]}"
    if projects.dvc("commit", "--force", name):
        return None
    return f"{said}, and dvc.lock too"
