"""Labels that are known some time after the answers: a JSONL file of ids of responses and their right labels."""

from pathlib import Path

from pydantic import Field, StrictInt, StrictStr, ValidationError

from clinrl.data.expectations import Tally, checker
from clinrl.errors import DataError
from clinrl.tasks.base import Task
from clinrl.tasks.csv_reader import without_mark
from clinrl.tasks.json_reader import TWICE, parse_json
from clinrl.tasks.parts import expect
from clinrl.types import Strict
from clinrl.watching import store

MOST_BYTES = 64 << 20
"""The most bytes of a file of labels."""


class Label(Strict):
    """One line of a file."""

    id: str = Field(pattern=r"^chatcmpl-[0-9a-f]{32}$")
    """The id of the response, which the client has kept."""
    label: StrictInt | StrictStr


def take_in(model: str, task: Task, path: Path) -> tuple[int, int]:
    """Validate a file of labels, and count those with a stored answer. Returns their number and that of all lines.

    Great Expectations checks the file by the task's own rules about the column of answers. If the file breaks a rule,
    nothing of it is counted, and the DataError quotes no value of it. A file that is given again changes nothing.
    """
    found = _read(path)
    column = task.safety.answer
    suite = [
        expect("ExpectColumnValuesToBeUnique", "response"),
        expect("ExpectColumnValuesToBeInSet", column, value_set=list(task.labels)),
        *(rule for rule in task.checks.expectations if (rule.on, rule.of) == ("rows", "all")
          and rule.arguments.get("column") == column),
    ]  # fmt: skip
    table = [{"row": row, "id": f"line {row}", "response": one.id, column: one.label} for row, one in found]
    results = checker({"rows": suite}, withheld=True)("rows", table) if table else []
    for rule, result in zip(suite, results, strict=False):
        tally = Tally(rule, withheld=True)
        tally.add(result)
        if not tally.success:
            raise DataError(tally.sentence(path))
    return store.match(model, {one.id: str(one.label) for _, one in found}), len(found)


def _read(path: Path) -> list[tuple[int, Label]]:
    """The labels with their lines."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path} has more than {MOST_BYTES >> 20} MiB; give it in parts")
        lines = without_mark(path.read_bytes()).splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line.decode())
            if value is TWICE:
                raise DataError(f"{path} line {number} names a key twice; leave one out")
            found.append((number, Label.model_validate(value)))
        except ValueError as error:
            at = error.errors()[0]["loc"][:1] if isinstance(error, ValidationError) else ()
            form = '{"id": "chatcmpl-...", "label": a whole number or a text}'
            which = next((f"; its {name} is missing or wrong" for name in Label.model_fields if name in at), "")
            raise DataError(f"{path} line {number} is no label, which is {form}{which}") from None
    return found
