"""Which source of triage records lies at a path: what is there decides, not what it is called."""

from pathlib import Path

from clinrl.errors import DataError
from clinrl.tasks.csv_reader import open_table
from clinrl.tasks.esi import mietic, mimic
from clinrl.tasks.importing import Source

EXPECTED = (
    "it must be a folder with triage.csv, edstays.csv and patients.csv (MIMIC-IV-ED; each may be .csv.gz, in ed/ or "
    "hosp/), or a CSV file with a column tiragecase (MIETIC's validation file) or with the columns instruction, input "
    "and output (MIETIC.csv)"
)


def recognise(path: Path) -> Source:
    """The source at a path. Raises DataError, saying what is expected, for anything else."""
    if not path.exists():
        raise DataError(f"{path} does not exist; {EXPECTED}")
    if path.is_dir():
        if found := mimic.recognise(path):
            return found
        raise DataError(f"{path} is a folder without triage records; {EXPECTED}")
    table = open_table(path)
    if "tiragecase" in table.columns:
        return mietic.validation(table)
    if {"instruction", "input"} <= set(table.columns):
        return mietic.instructions(table)
    raise DataError(f"{path} has other columns; {EXPECTED}")
