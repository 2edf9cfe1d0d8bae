"""Synthetic files of appropriateness records in the published schema, for trying and testing imports.

Everything is drawn by this project's own generator: no guideline's text, no study, no patient. The dirt is real in
kind: a byte-order mark, a field with two names, labels in any case, missing abstracts, ratings without consensus,
repeated and contradicting records, and more evidence than a prompt can hold.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final

from clinrl.tasks.imaging import evidence
from clinrl.tasks.imaging.answer import LABELS
from clinrl.tasks.imaging.cases import ImagingCase, ImagingKey, _variant, _worded, cases
from clinrl.tasks.imaging.guideline import CONTRAST, MODALITIES
from clinrl.tasks.imaging.intake import MAX_WORDS
from clinrl.tasks.imaging.rules import decide

FORMATS: Final = ("json", "jsonl", "csv")
COLUMNS: Final = ("category", "variant", "procedure", "appropriateness", "reasoning_traces", "citations", "topic_id")
"""Of the CSV file; the last one is never read."""
DISAGREEMENT: Final = "May be appropriate (Disagreement)"
MARK: Final = "\ufeff".encode()

Record = dict[str, Any]


def records(rows: int, seed: int) -> Iterator[Record]:
    """So many records, procedures of one variant after another. About one in ten must be refused."""
    rng = Random(f"imaging-records/{seed}")
    last: Record = {}
    for number, record in enumerate(islice(_sound(rng, seed), rows)):
        match number % 40:
            case 7:
                record["appropriateness"] = DISAGREEMENT
            case 16:
                record["citations"] = {str(n): _long(rng) for n in range(1, 10)}
            case 25:
                record = last | {"procedure": f" {last['procedure'].upper()}"}
            case 34:
                other = rng.choice([label for label in LABELS if label != last["appropriateness"]])
                record = last | {"appropriateness": other}
            case 5 | 13:
                record["appropriateness"] = f" {record['appropriateness'].lower()} "
        last = record
        yield record


def _sound(rng: Random, seed: int) -> Iterator[Record]:
    """Records without a fault. The pool of base texts is nobody's exam."""
    for case in cases(1 << 40, seed, pool="base", mix="natural"):
        for other in _procedures(rng, case):
            yield _record(rng, case, other)


def _procedures(rng: Random, case: ImagingCase) -> Iterator[ImagingCase]:
    """Some other procedures for the request of a case, as a panel rates them all."""
    assert isinstance(case.key, ImagingKey)
    for modality in rng.sample(MODALITIES, rng.randint(2, len(MODALITIES))):
        contrast = modality in CONTRAST and rng.random() < 0.5
        scenario = case.key.scenario.model_copy(update={"modality": modality, "contrast": contrast})
        found = evidence.studies(rng, scenario)
        yield _worded(scenario, case.group, found, _variant(rng, scenario), decide(scenario))


def _record(rng: Random, case: ImagingCase, other: ImagingCase) -> Record:
    """The procedure of `other` for the variant of `case`, in the published schema."""
    abstracts: dict[str, Any] = {str(abstract.number): abstract.text for abstract in other.facts.evidence}
    if abstracts and rng.random() < 0.3:
        abstracts[str(len(abstracts) + 1)] = ""
    if rng.random() < 0.3:
        abstracts = {n: {"pmid": f"{rng.randint(0, 9999):08d}", "abstract": text} for n, text in abstracts.items()}
    return {
        "condition": case.facts.condition,
        "variant": case.facts.variant,
        "procedure": other.facts.procedure,
        "appropriateness": other.key.label,
        "reasoning_traces": list(other.key.reasoning),
        "citations": abstracts,
        "topic_id": rng.randint(1, 99),
    }


def _long(rng: Random) -> str:
    """An abstract of which nine are more than a prompt can hold."""
    words = ("patients", "images", "were", "read", "again", "by", "two", "readers", "who", "agreed")
    return " ".join(rng.choice(words) for _ in range(MAX_WORDS // 8))


def write(folder: Path, rows: int, seed: int, form: str) -> Path:
    """Write `appropriateness.<form>`; every form holds the same records. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"appropriateness.{form}"
    rng = Random(f"imaging-form/{seed}")
    path.write_bytes(MARK)
    with path.open("a", encoding="utf-8", newline="") as stream:
        if form == "csv":
            table = csv.writer(stream, lineterminator="\n")
            table.writerow(COLUMNS)
            table.writerows(_cells(rng, record) for record in records(rows, seed))
        elif form == "jsonl":
            for record in records(rows, seed):
                stream.write(json.dumps(_renamed(rng, record), ensure_ascii=False) + "\n")
        else:
            lines = (json.dumps(_renamed(rng, record), ensure_ascii=False) for record in records(rows, seed))
            stream.write("[\n" + ",\n".join(lines) + "\n]\n")
    return path


def _renamed(rng: Random, record: Record) -> Record:
    """A record whose condition or reasons are called by their other name, now and then."""
    names = {"condition": "category"} if rng.random() < 0.3 else {}
    names |= {"reasoning_traces": "acr_traces"} if rng.random() < 0.1 else {}
    return {names.get(name, name): value for name, value in record.items()}


def _cells(rng: Random, record: Record) -> list[str]:
    """A record as cells: reasons as JSON, or one a line."""
    reasons = record["reasoning_traces"]
    traces = json.dumps(reasons) if rng.random() < 0.5 else "\n".join(reasons)
    cells = record | {"reasoning_traces": traces, "citations": json.dumps(record["citations"])}
    return [str(cells[{"category": "condition"}.get(name, name)]) for name in COLUMNS]


def main(argv: Sequence[str] | None = None) -> int:
    """Write a synthetic source; print its path."""
    parser = argparse.ArgumentParser(
        prog="python tests/imaging_sources.py",
        description="Writes a synthetic file in the published form of appropriateness records. Nothing is clinical.",
        epilog="examples:\n"
        "  python tests/imaging_sources.py /tmp/imaging\n"
        "  python tests/imaging_sources.py /tmp/imaging --rows 2000 --seed 3 --format csv",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to write; made if need be")
    parser.add_argument("--rows", metavar="N", type=int, default=200, help="records, 1 or more; default: 200")
    parser.add_argument("--seed", metavar="S", type=int, default=1, help="default: 1")
    parser.add_argument(
        "--format", dest="form", metavar="F", choices=FORMATS, default="jsonl",
        help=f"{', '.join(FORMATS)}; default: jsonl",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.rows < 1:
        parser.error(f"--rows is {arguments.rows}; it must be 1 or more")
    print(write(arguments.folder, arguments.rows, arguments.seed, arguments.form))
    return 0


if __name__ == "__main__":
    sys.exit(main())
