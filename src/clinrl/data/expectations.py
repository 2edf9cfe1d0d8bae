"""Runs Great Expectations suites over chunks of a table, adds up the outcomes, and writes faults as sentences."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clinrl.data.dataset import to_text
from clinrl.tasks.importing import CONTROL_CHARACTERS, HIDDEN_CHARACTERS, IDENTIFIERS, IDENTIFIERS_OF_IMPORTS
from clinrl.tasks.parts import Expect

TEXT_UNIQUE = "text_unique"
COMPUTED: dict[str, str] = {
    "id_matches_content": "the id is not the content hash of the case, so the row was edited after it was built",
    "id_unique": "an earlier row has the same id",
    TEXT_UNIQUE: "an earlier row has the same text",
    "group_in_pool": "the group belongs to another pool, so a pool would leak into this one",
    "label_reproduced": "the rules do not give the case's label from its latent facts",
    "gold_scores_best": "the gold answer is unreadable, or not the only best one under a reward used with this data",
}
"""The computed columns, which are true in every sound row, and for each the fault of a row where it is false. In
tables, the column `TEXT_UNIQUE` is named after the task's text column."""


class Tally:
    """The outcome of one expectation, added up over the chunks. With `withheld`, no value of a row may be shown."""

    def __init__(self, expect: Expect, *, withheld: bool = False) -> None:
        self.expect, self.withheld = expect, withheld and expect.on == "rows"
        self.success = True
        self.counts: Counter[str] = Counter()
        self.observed: Any = None
        self.first: dict[str, Any] | None = None

    def add(self, result: dict[str, Any]) -> None:
        """Add Great Expectations' result on one chunk."""
        found = result["result"]
        self.success = self.success and bool(result["success"])
        self.counts.update(
            {key: int(found[f"{key}_count"]) for key in ("element", "missing", "unexpected") if f"{key}_count" in found}
        )
        unexpected = found.get("partial_unexpected_list") or [None]
        if self.observed is None and not self.withheld:
            self.observed = found.get("observed_value", unexpected[0])
        if self.first is None and self.expect.on == "rows" and found.get("partial_unexpected_index_list"):
            first = found["partial_unexpected_index_list"][0]
            # Without values, the list has one entry that holds all rows of each index column.
            self.first = {key: value[0] if isinstance(value, list) else value for key, value in first.items()}

    def first_row(self) -> float:
        """The number of the first bad row; infinite if the expectation names none."""
        return self.first["row"] if self.first else math.inf

    def sentence(self, path: Path) -> str:
        """The fault as a sentence that names file, row, column, value and rule."""
        arguments = dict(self.expect.arguments)
        names = [str(arguments.pop(key)) for key in ("column", "column_A", "column_B") if key in arguments]
        column = ", ".join(names)
        if self.first is None:
            return f"{path}, {self.expect.on}, column {column}: {to_text(self.observed)} breaks {self._rule(arguments)}"
        where = f"{path} row {self.first['row']} ({self.first['id']}), column {column}"
        many = self.counts["unexpected"]
        more = f" ({many:,} of {self.counts['element']:,} rows)" if many > 1 else ""
        computed = TEXT_UNIQUE if column.endswith("_unique") and column not in COMPUTED else column
        if computed in COMPUTED:
            return f"{where}: {COMPUTED[computed]}{more}"
        if self.withheld:
            return f"{where}: a value breaks {self._rule(arguments)}{more}"
        values = [self.first[name] for name in names]
        return f"{where}: {', '.join(map(to_text, values))} breaks {self._rule(arguments)}{more}"

    def report(self) -> dict[str, Any]:
        """The outcome for the proof: rule, success, and counts or the observed value."""
        observed = {} if self.observed is None else {"observed": self.observed}
        expect = {"type": self.expect.type, "on": self.expect.on, "arguments": dict(self.expect.arguments)}
        return expect | {"success": self.success} | dict(sorted(self.counts.items())) | observed

    def _rule(self, arguments: Mapping[str, Any]) -> str:
        if (kind := _KIND.get(arguments.get("regex", ""))) is not None:
            return f"the rule that it holds no {kind}"
        return f"{self.expect.type}({', '.join(f'{key}={to_text(value)}' for key, value in arguments.items())})"


_KIND = {
    **{shape: kind for kinds in (IDENTIFIERS, IDENTIFIERS_OF_IMPORTS) for kind, shape in kinds.items()},
    **dict.fromkeys((CONTROL_CHARACTERS, HIDDEN_CHARACTERS), "control or invisible character"),
}


def checker(
    suites: Mapping[str, Sequence[Expect]], *, withheld: bool = False
) -> Callable[[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """A function that runs one of the suites, by name, on a table (a list of rows).

    It returns Great Expectations' result for each expectation, in the order of the suite, as plain values. It raises
    RuntimeError if an expectation could not be evaluated at all, which is a bug of the suite and no fault of the data.
    With `withheld`, results have no value of a row.
    """
    import great_expectations as gx
    import pandas as pd

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    tables = context.data_sources.add_pandas("tables").add_dataframe_asset("table")
    whole = tables.add_batch_definition_whole_dataframe("whole")
    rules = {
        on: gx.ExpectationSuite(
            on,
            expectations=[
                getattr(gx.expectations, expect.type)(**expect.arguments, meta={"at": at})
                for at, expect in enumerate(suite)
            ],
        )
        for on, suite in suites.items()
    }

    def check(on: str, table: list[dict[str, Any]]) -> list[dict[str, Any]]:
        shown = {
            "result_format": "SUMMARY",
            "unexpected_index_column_names": ["row", "id"] if on == "rows" else [],
            **({"exclude_unexpected_values": True} if withheld else {}),
        }
        batch = whole.get_batch({"dataframe": pd.DataFrame(table)})
        results = batch.validate(rules[on], result_format=shown).results
        found = sorted(results, key=lambda result: result.expectation_config.meta["at"])
        return [_evaluated(result.to_json_dict()) for result in found]

    return check


def _evaluated(result: dict[str, Any]) -> dict[str, Any]:
    """The result, unchanged. Raises RuntimeError if it contains an exception."""
    info = result["exception_info"]
    for entry in (info, *info.values()):
        if isinstance(entry, dict) and entry.get("raised_exception"):
            rule = result["expectation_config"]
            raise RuntimeError(f"{rule['type']}({rule['kwargs']}) could not be evaluated: {entry['exception_message']}")
    return result
