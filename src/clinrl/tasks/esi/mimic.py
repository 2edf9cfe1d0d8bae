"""Import MIMIC-IV-ED as cases: each triage row, joined to its stay and its patient, becomes a short note.

The note has only facts known at the triage desk: age, sex, way of arrival, chief complaint, vital signs and pain. The
level is the triage nurse's. Columns that are known only after triage, or that may not decide the level, are never
read; of `intime` only the year is read, for the age.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from sys import intern
from typing import Final, NamedTuple, TypeVar

from clinrl.errors import DataError
from clinrl.tasks.csv_reader import Table, locate, open_table
from clinrl.tasks.esi import imported, measured
from clinrl.tasks.esi.rules import Sex
from clinrl.tasks.importing import (
    Fields,
    Intake,
    Source,
    Taken,
    Unclear,
    claims,
    clean,
    find_contested,
    pseudonym,
    sift,
    use_of,
)
from clinrl.types import Pool

T = TypeVar("T")

KIND: Final = "mimic-iv-ed"
NAMES: Final = ("triage.csv", "edstays.csv", "patients.csv")

TRIAGE: Final = (
    "subject_id", "stay_id", "temperature", "heartrate", "resprate", "o2sat", "sbp", "dbp", "pain", "acuity",
    "chiefcomplaint",
)  # fmt: skip
VITALS: Final = {
    "hr_bpm": "heartrate", "rr_bpm": "resprate", "spo2_pct": "o2sat", "sbp_mmhg": "sbp", "dbp_mmhg": "dbp",
}  # fmt: skip
"""Vital signs in whole numbers: the field of a case, and its column."""
STAYS: Final = ("subject_id", "stay_id", "intime", "gender", "arrival_transport")
PATIENTS: Final = ("subject_id", "anchor_age", "anchor_year")

SHARES: Final[Mapping[Pool, int]] = {"train": 65, "mine": 15, "exam": 20}
"""Percentage of patients in each pool, by the hash of their subject_id."""

SEXES: Final[Mapping[str, Sex]] = {"f": "female", "m": "male"}
ARRIVALS: Final[Mapping[str, str]] = {
    "walk in": "walks in with ",
    "ambulance": "arrives by ambulance with ",
    "helicopter": "arrives by helicopter with ",
    "other": "arrives with ",
    "unknown": "arrives with ",
    "": "arrives with ",
}


class Stay(NamedTuple):
    """The values that are used of a row of edstays."""

    subject: str
    year: int
    gender: str
    arrival: str


def recognise(folder: Path) -> Source | None:
    """The source in a folder with the three files; None if it has none of them. Raises DataError if it has some."""
    found = {name: path for name in NAMES if (path := locate(folder, name))}
    if not found:
        return None
    if missing := [name for name in NAMES if name not in found]:
        raise DataError(
            f"{folder} holds {', '.join(sorted(found))} but not {', '.join(missing)}; put all three there, or into its "
            "subfolders ed and hosp"
        )
    triage, stays, patients = (open_table(found[name]) for name in NAMES)
    wanted = {triage: TRIAGE, stays: STAYS, patients: PATIENTS}
    for table, names in wanted.items():
        table.require(names)
    return Source(
        kind=KIND,
        files={str(path.relative_to(folder)): path for path in found.values()},
        used=frozenset(f"{_stem(table)}.{name}" for table, names in wanted.items() for name in names),
        dropped=frozenset(
            f"{_stem(table)}.{name}" for table, names in wanted.items() for name in table.columns if name not in names
        ),
        uses=tuple(SHARES),
        lines=triage.lines,
        cases=lambda use, intake: _cases(triage, stays, patients, use, intake),
    )


def _stem(table: Table) -> str:
    return table.path.name.split(".")[0]


def _cases(triage: Table, stays: Table, patients: Table, use: Pool, intake: Intake) -> Iterator[str]:
    birth_years, known_stays = _by_key(patients, "subject_id", _birth_year), _by_key(stays, "stay_id", _stay)

    def stay_and_level(row: Fields) -> list[tuple[str, int]]:
        return [(measured.identifier(row["stay_id"], "stay_id"), measured.acuity(row["acuity"]))]

    disputed = find_contested(claims(triage.rows(), stay_and_level))

    def take(row: Fields, seen: set[str]) -> Taken:
        stay_id = measured.identifier(row["stay_id"], "stay_id")
        measured.check_stay(stay_id, seen, disputed)
        subject_id = measured.identifier(row["subject_id"], "subject_id")
        if stay_id not in known_stays:
            raise Unclear("stay_id", "has no row in edstays")
        stay = known_stays[stay_id]
        if stay is None:
            raise Unclear("stay_id", "has several rows in edstays")
        if stay.subject != subject_id:
            raise Unclear("subject_id", "is not that of the stay in edstays")
        return _taken(row, stay, birth_years)

    yield from sift("esi", triage.path.name, triage.rows, take, use, intake)


def _taken(row: Fields, stay: Stay, birth_years: Mapping[str, int | None]) -> Taken:
    level, temp_c = measured.acuity(row["acuity"]), measured.temperature_c(row["temperature"])
    signs = {name: measured.vital(row[column], name, column) for name, column in VITALS.items()}
    measured.pressures(signs["sbp_mmhg"], signs["dbp_mmhg"])
    score, chief = measured.pain(row["pain"]), _complaint(row["chiefcomplaint"])
    sex = SEXES.get(stay.gender)
    if sex is None:
        raise Unclear("gender", "is neither F nor M")
    arrival = ARRIVALS.get(stay.arrival)
    if arrival is None:
        raise Unclear("arrival_transport", "is no known way of arrival")
    age = _age(stay, birth_years)
    known = {"complaint": chief, "age_years": float(age), "sex": sex, **signs, "temp_c": temp_c, "pain": score}
    key = imported.ImportedKey.model_validate({"source": KIND, "level": level, **known}).model_dump()
    subject = pseudonym("subject", stay.subject)
    facts = {"narrative": narrative(age, sex, arrival, chief, key) + _why_no_score(row["pain"])}
    return Taken(use_of(subject, SHARES), subject, facts, key, level)


@lru_cache(1 << 17)
def _complaint(cell: str) -> str:
    return imported.check(clean(cell).rstrip(" .,;"), "chiefcomplaint")


def narrative(age: int, sex: Sex, arrival: str, complaint: str, signs: Mapping[str, float | None]) -> str:
    """The note on one patient: values that were not measured are not mentioned."""
    person = ("girl" if sex == "female" else "boy") if age < 18 else ("woman" if sex == "female" else "man")
    hr, rr, spo2, temp = signs["hr_bpm"], signs["rr_bpm"], signs["spo2_pct"], signs["temp_c"]
    sbp, dbp, pain = signs["sbp_mmhg"], signs["dbp_mmhg"], signs["pain"]
    words = (
        (hr, f"HR {hr}"),
        (sbp, f"BP {sbp}" if dbp is None else f"BP {sbp}/{dbp}"),
        (dbp if sbp is None else None, f"diastolic pressure {dbp}"),
        (rr, f"RR {rr}"),
        (spo2, f"SpO2 {spo2}%"),
        (temp, f"T {temp}"),
    )
    vitals = [text for value, text in words if value is not None]
    text = f"{age}-year-old {person} {arrival}{complaint}."
    if vitals:
        text += f" {', '.join(vitals)}."
    if pain is not None:
        text += f" Pain {pain}/10." if pain else " Denies pain."
    return text


def _why_no_score(pain: str) -> str:
    """The nurse's word in place of a score, which may be the gravest of the record, as of a patient with a tube."""
    word = measured.phrase(pain)
    return f" Pain: {word}." if word in measured.WHY_NOT_ASSESSED else ""


def _age(stay: Stay, birth_years: Mapping[str, int | None]) -> int:
    year = birth_years.get(stay.subject, 0)
    if year is None:
        raise Unclear("subject_id", "has several rows in patients")
    if year == 0:
        raise Unclear("subject_id", "has no row in patients")
    if year < 0 or not stay.year:
        raise Unclear("anchor_age" if year < 0 else "intime", "gives no age")
    age = stay.year - year
    measured.within(age, "age_years", "anchor_age")
    return age


def _stay(row: Fields) -> Stay:
    subject, intime = measured.identifier(row["subject_id"], "subject_id"), row["intime"].strip()
    year = int(intime[:4]) if intime[:4].isdecimal() and intime[4:5] in ("-", "/") else 0
    gender, arrival = row["gender"].strip().lower(), " ".join(row["arrival_transport"].lower().split())
    arrival = "" if arrival in measured.BLANK else arrival
    return Stay(subject, year, intern(gender), intern(arrival))


def _birth_year(row: Fields) -> int:
    """The year of age 0, in MIMIC's shifted years; -1 if it is unclear."""
    try:
        age, year = (measured.number(row[name], "anchor_age") for name in PATIENTS[1:])
    except Unclear:
        return -1
    whole = age is not None and year is not None and age == int(age) and year == int(year) and year > age >= 0
    return int(year - age) if whole and year and age is not None else -1


def _by_key(table: Table, key: str, read: Callable[[Fields], T]) -> dict[str, T | None]:
    """The values of rows, by an identifier; None where several rows have the same. Unclear rows are skipped."""
    found: dict[str, T | None] = {}
    for name, value in claims(table.rows(), lambda row: [(measured.identifier(row[key], key), read(row))]):
        found[name] = None if name in found else value
    return found
