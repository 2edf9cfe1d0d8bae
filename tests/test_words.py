"""The core speaks of no one task's medicine, and nobody speaks words that were given up."""

import re
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "clinrl"
TASKS = ("esi", "imaging", "audit")
CORE = [path for path in sorted(SRC.rglob("*.py")) if not set(TASKS) & set(path.relative_to(SRC).parts)]

CLINICAL = re.compile(r"""dangerous|narrative|triage|\bESI\b|\blevel_|["'](?:boundary|level)["']""")
PUBLIC = {
    ("evaluation/error_analysis.py", "narrative"),  # a field of reports that are written and hashed
    ("analysis/alerts.py", "level_"),  # the name of an alarm, in histories that are written and hashed
    ("cli/registry_commands.py", '"level"'),  # of an alarm: warn or stop
    ("tasks/importing.py", "narrative"),  # in the reasons that lists of refused rows hold
}
"""Words that stay, because files that are there hold them."""


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(SRC)))
def test_the_core_has_no_clinical_word(path: Path) -> None:
    name = str(path.relative_to(SRC))
    found = {
        (number, word)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for word in CLINICAL.findall(line)
        if (name, word) not in PUBLIC
    }
    assert not found, "what this names is a task's to say: see clinrl.tasks.parts"
