"""Synthetic files in the published form of MIETIC and MIMIC-IV-ED, for trying and testing imports.

Everything is drawn by this project's own generator. No row is about a person, whatever the columns are called; the
dirt is real in kind: a damaged byte-order mark, words for pain scores, acuities as 1.0, two units of temperature,
cells with line ends, and rows that must be refused.
"""

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

from clinrl.tasks.csv_reader import MARKS
from clinrl.tasks.esi.cases import EsiCase, EsiKey, cases
from clinrl.tasks.esi.mietic import ASKED
from clinrl.tasks.esi.rules import Presentation

AFTER_TRIAGE: Final = (
    "gender", "age", "arrival_transport", "temperature", "heartrate", "resprate", "o2sat", "sbp", "dbp", "pain",
    "chiefcomplaint",
)  # fmt: skip
"""Known at triage, but deliberately unlike the narrative in places: not read."""
LEAKS: Final = (
    "hadm_id", "intime", "outtime", "race", "disposition",
    "invasive_ventilation", "invasive_ventilation_beyond_1h", "non_invasive_ventilation", "transfer2surgeryin1h",
    "transfer_to_surgery_beyond_1h", "transfer_to_icu_in_1h", "transfer_to_icu_beyond_1h", "transfer_within_1h",
    "transfer_beyond_1h", "expired_within_1h", "expired_beyond_1h", "tier1_med_usage_1h", "tier1_med_usage_beyond_1h",
    "tier2_med_usage", "tier3_med_usage", "tier4_med_usage", "critical_procedure", "psychotropic_med_within_120min",
    "transfusion_within_1h", "transfusion_beyond_1h", "red_cell_order_more_than_1", "intraosseous_line_placed",
    "lab_event_count", "microbio_event_count", "exam_count", "intravenous_fluids", "intravenous", "intramuscular",
    "nebulized_medications", "oral_medications", "consults_count", "procedure_count", "resources_used",
    "expert_1_opinion", "expert_2_opinion", "expert_3_opinion",
)  # fmt: skip
"""What happened after triage and what reviewers said of it: never read."""
MIMIC_LEAKS: Final = frozenset({"hadm_id", "outtime", "race", "disposition", "dod", "anchor_year_group"})
"""What is known after triage, or may not decide it: never read."""

KINDS: Final = ("mietic-validation", "mietic", "mimic-iv-ed")

MIETIC_COLUMNS: Final = (
    "subject_id", "stay_id", "hadm_id", "intime", "outtime", "gender", "race", "age", "arrival_transport",
    "disposition", "temperature", "heartrate", "resprate", "o2sat", "sbp", "dbp", "pain", "acuity", "chiefcomplaint",
    "tiragecase", *LEAKS[5:-3], "Expert 1 Opinion", "Expert 2 Opinion", "Expert 3 Opinion", "Final Decision",
)  # fmt: skip
"""The 57 columns of the validation file, the misspelt one included."""

RETAINED: Final = {1: 14, 2: 11, 3: 5, 4: 4, 5: 2}
"""Of every fifty validation rows, those that experts retained, by level; the other fourteen are REMOVE."""

QUESTIONS: Final = {
    1: "Does this patient need an immediate life-saving intervention? Answer yes or no, and say which.",
    2: "Which of the level 2 criteria does this patient meet, if any?",
    3: "Which resources will this patient likely require? List them.",
}
"""Our wording; what matters is which of the three questions it is."""

RACES: Final = ("A", "B", "C", "UNKNOWN")
DISPOSITIONS: Final = ("HOME", "ADMITTED", "TRANSFER")
TRANSPORTS: Final = ("WALK IN", "AMBULANCE", "UNKNOWN", "OTHER", "HELICOPTER")
STRANGE_PAIN: Final = ("uta", "unable", "Critical", "sleeping", "refused", "7-8", "6/10", "5.0", "13", "purple")
TEMPLATES: Final = 2_000
"""Patients that are drawn by the generator; beyond that many rows they recur with other vital signs."""
FIRST_STAY: Final = 30_000_001
FIRST_SUBJECT: Final = 10_000_001
ELSEWHERE: Final = 18_000_001
"""The first subject of the validation file, who is nobody of the other files."""


def mietic_validation(folder: Path, rows: int, seed: int) -> list[Path]:
    """MIETIC-validate-samples.csv: 57 columns, its byte-order mark encoded twice, the first letter eaten."""
    rng = Random(f"mietic-validation/{seed}")
    levels = [level for level, count in RETAINED.items() for _ in range(count)]
    plan = [(level, "RETAIN") for level in levels] + [(rng.randint(1, 5), "REMOVE") for _ in range(50 - len(levels))]
    path = folder / "MIETIC-validate-samples.csv"
    table = []
    for number, case in enumerate(_by_level([plan[i % 50][0] for i in range(rows)], 2 * seed)):
        level, decision = plan[number % 50]
        patient = _latent(case)
        values = dict.fromkeys(MIETIC_COLUMNS, "0") | _signs(rng, patient, fahrenheit=True)
        values |= {
            "subject_id": str(ELSEWHERE + number), "stay_id": str(FIRST_STAY + number),
            "hadm_id": str(20_000_001 + number), "intime": f"2150-01-{1 + number % 28:02d} 08:15:00",
            "outtime": f"2150-01-{1 + number % 28:02d} 19:40:00", "gender": patient.sex[0].upper(),
            "race": rng.choice(RACES), "age": str(int(patient.age_years) + rng.choice((0, 0, 1))),
            "arrival_transport": rng.choice(TRANSPORTS), "disposition": rng.choice(DISPOSITIONS),
            "pain": rng.choice(("Critical", "uta", "0", "4", "8", "")), "acuity": f"{level}.0",
            "chiefcomplaint": patient.complaint, "tiragecase": _lines(rng, case.facts.narrative),
            "resources_used": str(rng.randint(0, 6)), "lab_event_count": str(rng.randint(0, 40)),
            "Expert 1 Opinion": "AGREE", "Expert 2 Opinion": rng.choice(("AGREE", "UNCERTAIN", "")),
            "Expert 3 Opinion": "DISAGREE" if decision == "REMOVE" else "AGREE", "Final Decision": decision,
        }  # fmt: skip
        table.append([values[name] for name in MIETIC_COLUMNS])
    _write(path, ("ubject_id", *MIETIC_COLUMNS[1:]), table, mark=MARKS[1])
    return [path]


def mietic(folder: Path, rows: int, seed: int) -> list[Path]:
    """MIETIC.csv: a question, a narrative and an answer a row."""
    rng = Random(f"mietic/{seed}")
    kinds = [rng.choices((1, 2, 3), (3001, 3001, 3627))[0] for _ in range(rows)]
    cases = _by_level([kind if kind < 3 else rng.choice((3, 4, 5)) for kind in kinds], 2 * seed + 1)
    path = folder / "MIETIC.csv"
    _write(
        path,
        ASKED,
        (
            (QUESTIONS[kind], _lines(rng, case.facts.narrative), f"Not read.\nRow {number}.")
            for number, (kind, case) in enumerate(zip(kinds, cases, strict=True), 1)
        ),
    )
    return [path]


def mimic_iv_ed(folder: Path, rows: int, seed: int) -> list[Path]:
    """ed/triage.csv, ed/edstays.csv and hosp/patients.csv: about three visits for two patients.

    About one row in fifty must be refused.
    """
    rng = Random(f"mimic-iv-ed/{seed}")
    drawn = list(islice(_adults(seed), min(rows, TEMPLATES)))
    people = [(drawn[n % len(drawn)], rng.randint(2110, 2190)) for n in range(max(1, 2 * rows // 3))]
    places = [folder / "ed" / "triage.csv", folder / "ed" / "edstays.csv", folder / "hosp" / "patients.csv"]
    visits = [(FIRST_STAY + n, rng.randrange(len(people)), rng.randint(0, 3)) for n in range(rows)]
    _write(
        places[2],
        ("subject_id", "gender", "anchor_age", "anchor_year", "anchor_year_group", "dod"),
        (
            (FIRST_SUBJECT + 7 * n, case.sex[0].upper(), int(case.age_years), year, "2014 - 2016", "")
            for n, (case, year) in enumerate(people)
        ),
    )
    _write(
        places[1],
        ("subject_id", "hadm_id", "stay_id", "intime", "outtime", "gender", "race", "arrival_transport", "disposition"),
        (
            (
                FIRST_SUBJECT + 7 * person, 20_000_001 + stay if stay % 3 else "", stay,
                f"{people[person][1] + later}-03-0{1 + stay % 9} 11:02:00",
                f"{people[person][1] + later}-03-0{1 + stay % 9} 18:47:00", people[person][0].sex[0].upper(),
                rng.choice(RACES), rng.choices(TRANSPORTS, (60, 35, 3, 1, 1))[0], rng.choice(DISPOSITIONS),
            )
            for stay, person, later in visits
            if stay % 211  # some stays are missing
        ),
    )  # fmt: skip
    _write(
        places[0],
        (
            "subject_id", "stay_id", "temperature", "heartrate", "resprate", "o2sat", "sbp", "dbp", "pain", "acuity",
            "chiefcomplaint",
        ),
        (_triage(rng, FIRST_SUBJECT + 7 * person, stay, people[person][0]) for stay, person, _ in visits),
    )  # fmt: skip
    return places


def _triage(rng: Random, subject: int, stay: int, patient: Presentation) -> list[object]:
    signs = _signs(rng, patient, fahrenheit=rng.random() < 0.98)
    level = rng.choices((1, 2, 3, 4, 5), (6, 33, 54, 6.7, 0.3))[0]
    complaint = patient.complaint if rng.random() < 0.7 else f"{patient.complaint}, {rng.choice(('N/V', 'Weakness'))}"
    return [
        subject, stay, signs["temperature"], signs["heartrate"], signs["resprate"], signs["o2sat"], signs["sbp"],
        signs["dbp"], rng.choice(STRANGE_PAIN) if rng.random() < 0.05 else rng.randint(0, 10),
        rng.choices((f"{level}", f"{level}.0", ""), (70, 28, 2))[0], complaint.capitalize(),
    ]  # fmt: skip


def _signs(rng: Random, patient: Presentation, *, fahrenheit: bool) -> dict[str, str]:
    """Vital signs as cells, near those of a patient; the blank ones stay blank."""

    def near(value: int | None, reach: int, low: int, high: int) -> str:
        return "" if value is None else f"{min(max(value + rng.randint(-reach, reach), low), high)}.0"

    celsius = patient.temp_c
    if celsius is not None:
        celsius = round(celsius + rng.uniform(-0.4, 0.4), 1)
    return {
        "temperature": "" if celsius is None else f"{celsius * 9 / 5 + 32:.1f}" if fahrenheit else f"{celsius}",
        "heartrate": near(patient.hr_bpm, 12, 30, 220),
        "resprate": near(patient.rr_bpm, 2, 4, 60),
        "o2sat": near(patient.spo2_pct, 2, 60, 100),
        "sbp": near(patient.sbp_mmhg, 9, 60, 240),
        "dbp": near(patient.dbp_mmhg, 4, 20, 130),
    }


def _by_level(levels: Sequence[int], seed: int) -> Iterator[EsiCase]:
    """A case of each level in turn; the pool of base texts is nobody's exam."""
    streams = {level: (case for case in cases(1 << 40, seed, pool="base", mix="reporting")) for level in set(levels)}
    for level in levels:
        yield next(case for case in streams[level] if case.key.level == level)


def _adults(seed: int) -> Iterator[Presentation]:
    drawn = (_latent(case) for case in cases(1 << 40, seed, pool="base", mix="natural"))
    return (patient for patient in drawn if patient.age_years >= 18)


def _latent(case: EsiCase) -> Presentation:
    assert isinstance(case.key, EsiKey)
    return case.key.presentation


def _lines(rng: Random, narrative: str) -> str:
    """A narrative over two lines, now and then."""
    return narrative.replace(". ", ".\n", 1) if rng.random() < 0.3 else narrative


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]], mark: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(mark)
    with path.open("a", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(header)
        table.writerows(rows)


MAKERS: Final = {"mietic-validation": mietic_validation, "mietic": mietic, "mimic-iv-ed": mimic_iv_ed}


def main(argv: Sequence[str] | None = None) -> int:
    """Write a synthetic source; print the paths."""
    parser = argparse.ArgumentParser(
        prog="python tests/esi_sources.py",
        description="Writes synthetic files in the published form of a triage data set. No row is about a person.",
        epilog="examples:\n"
        "  python tests/esi_sources.py mietic-validation /tmp/mietic\n"
        "  python tests/esi_sources.py mietic /tmp/mietic --rows 500\n"
        "  python tests/esi_sources.py mimic-iv-ed /tmp/mimic --rows 2000 --seed 3",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to write; made if need be")
    parser.add_argument("--rows", metavar="N", type=int, default=50, help="rows, 1 or more; default: 50")
    parser.add_argument("--seed", metavar="S", type=int, default=1, help="default: 1")
    arguments = parser.parse_args(argv)
    if arguments.rows < 1:
        parser.error(f"--rows is {arguments.rows}; it must be 1 or more")
    for path in MAKERS[arguments.kind](arguments.folder, arguments.rows, arguments.seed):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
