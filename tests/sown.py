"""Synthetic sources whose every private cell holds a string that can be looked for afterwards."""

import csv
from collections.abc import Callable
from pathlib import Path

import esi_sources as synthetic

TEXT, COMPLAINT, LEAK, PERSON = "Zyxwarble", "Qvoxgrumble", "Jkwyttle", "918273640"
CANARIES = (TEXT, COMPLAINT, LEAK, PERSON)
AFTERWARDS = {*synthetic.LEAKS, *synthetic.MIMIC_LEAKS, "output"}
"""Columns that nobody at the triage desk knows, in every source."""


def rewrite(path: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Replace the rows of a CSV file; a damaged header stays as it is."""
    with path.open(encoding="utf-8", newline="") as stream:
        header, *rows = csv.reader(stream)
    names = [{"ï»¿ubject_id": "subject_id"}.get(name, name) for name in header]
    changed = [change(dict(zip(names, row, strict=True))) for row in rows]
    with path.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(header)
        table.writerows([row[name] for name in names] for row in changed)


def sow(row: dict[str, str]) -> dict[str, str]:
    """A row with strings to look for in its text, its complaint, its identifiers and all that came after triage."""
    found = dict(row)
    for name, value in row.items():
        match name.lower().replace(" ", "_"):
            case "tiragecase" | "input":
                found[name] = f"{value} {TEXT} noted."
            case "chiefcomplaint":
                found[name] = f"{value}, {COMPLAINT}"
            case "subject_id" | "stay_id":
                found[name] = f"{PERSON}{value}"
            case "intime":
                found[name] = f"{value[:5]}{LEAK}"
            case leak if leak in AFTERWARDS:
                found[name] = f"{LEAK} {value}"
    return found


def sources(folder: Path) -> Path:
    """All three sources in a folder, sown."""
    files = [
        *synthetic.mietic_validation(folder, 50, 1),
        *synthetic.mietic(folder, 80, 1),
        *synthetic.mimic_iv_ed(folder, 150, 1),
    ]
    for path in files:
        rewrite(path, sow)
    return folder


def imports(folder: Path) -> dict[str, dict[str, object]]:
    """Imports of each source for each use it has, as params.yaml would name them."""

    def entry(use: str, source: Path) -> dict[str, object]:
        return {"task": "esi", "task_version": 2, "use": use, "source": str(source)}

    validation = folder / "MIETIC-validate-samples.csv"
    return {
        "mietic-36": entry("exam", validation),
        "mietic-train": entry("train", folder / "MIETIC.csv"),
        "mietic-mine": entry("mine", folder / "MIETIC.csv"),
        **{f"mimic-{use}": entry(use, folder) for use in ("train", "mine", "exam")},
    }
