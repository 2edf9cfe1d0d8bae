"""The core has no one task's clinical words, and no name is a word that docs/glossary.md retired."""

import ast
import re
from pathlib import Path

from clinrl.tasks.base import task_names

SRC = Path(__file__).resolve().parents[1] / "src" / "clinrl"
CORE = [path for path in sorted(SRC.rglob("*.py")) if not set(task_names()) & set(path.relative_to(SRC).parts)]

CLINICAL = re.compile(r"""dangerous|narrative|triage|\bESI\b|\blevel_|["'](?:boundary|level)["']""")
PUBLIC = {
    ("evaluation/error_analysis.py", "narrative"),  # a field of reports that are written and hashed
    ("analysis/alerts.py", "level_"),  # the name of an alarm, in histories that are written and hashed
    ("cli/registry_commands.py", '"level"'),  # of an alarm: warn or stop
    ("tasks/importing.py", "narrative"),  # in the reasons that lists of refused rows hold
}
"""Words that stay, because files that are there hold them."""


def test_the_core_has_no_clinical_word() -> None:
    found = {
        (name, number, word)
        for name, path in ((str(path.relative_to(SRC)), path) for path in CORE)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for word in CLINICAL.findall(line)
        if (name, word) not in PUBLIC
    }
    assert not found, "what this names is a task's to say: see clinrl.tasks.parts"


RETIRED = {"examinee", "hear", "heard", "ledger", "said", "sat", "sit", "sits", "sitting", "sittings", "told", "who"}
WRITTEN = {
    ("benchmarks/protocol.py", "who"),  # fields of reports that are written and hashed
    ("benchmarks/protocol.py", "sat"),
    ("benchmarks/protocol.py", "Sat"),
}
"""Names that stay, because files that are there hold them."""


def names(path: Path) -> set[str]:
    """What a module calls its functions, classes, arguments and variables."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_no_name_is_a_retired_word() -> None:
    found = {
        (str(path.relative_to(SRC)), name)
        for path in SRC.rglob("*.py")
        for name in names(path)
        if RETIRED & set(name.lower().split("_"))
    }
    assert not found - WRITTEN, "see docs/glossary.md"
