"""Labels that come when it is known what was right: a JSONL file of ids of responses and labels."""

from pathlib import Path

from pydantic import ValidationError

from clinrl.data.expectations import Tally, checker
from clinrl.errors import DataError
from clinrl.tasks.base import Task
from clinrl.tasks.parts import expect
from clinrl.types import Strict
from clinrl.watching import store


class Label(Strict):
    """One line of a file."""

    id: str
    """That of the response, which whoever asked has kept."""
    label: int | str


def take_in(model: str, task: Task, path: Path) -> tuple[int, int]:
    """Validate a file of labels, and count those whose answers are kept: how many, and of how many lines.

    What Great Expectations holds against the file are the task's own rules about the column of answers; its pages are
    those of the data set `watch-<model>`. Raises DataError for a file that breaks one, of which nothing is counted. A
    file that is given again changes nothing.
    """
    found: list[Label] = []
    try:
        found.extend(map(Label.model_validate_json, path.read_bytes().splitlines()))
    except (OSError, ValidationError):
        raise DataError(f'{path} holds no labels: a line is {{"id": "chatcmpl-...", "label": ...}}') from None
    column = task.safety.answer
    suite = [
        expect("ExpectColumnValuesToMatchRegex", "id", regex=r"^chatcmpl-[0-9a-f]{32}$"),
        expect("ExpectColumnValuesToBeUnique", "id"),
        expect("ExpectColumnValuesToBeInSet", column, value_set=list(task.labels)),
        *(rule for rule in task.checks.expectations if (rule.on, rule.of) == ("rows", "all")
          and rule.arguments.get("column") == column),
    ]  # fmt: skip
    table = [{"row": row, "id": one.id, column: one.label} for row, one in enumerate(found, start=1)]
    results = checker(f"watch-{model}", {"rows": suite}, withheld=True)("rows", table) if table else []
    for rule, result in zip(suite, results, strict=False):
        tally = Tally(rule, withheld=True)
        tally.add(result)
        if not tally.success:
            raise DataError(tally.sentence(path))
    return store.match(model, {one.id: str(one.label) for one in found}), len(found)
