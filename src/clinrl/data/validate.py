"""Validation: what must hold of a data set before anything trains on it, as one Great Expectations suite.

Row expectations (the task's own, identifiers of real people, and this module's computed columns) are checked on the
real file in chunks, summary expectations on a one-row table of shares. A data set that passes gets a proof, which
names the very bytes it was given for; one that fails gets a report beside it and no proof. Memory does not grow with
the number of cases.
"""

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl import artifacts, paths
from clinrl.data import data_docs
from clinrl.data.dataset import is_import, manifest_of, read_rows, rebuild, to_text
from clinrl.data.reward_audit import gold_is_best, golds, plain, totals
from clinrl.data.sightings import first_sightings
from clinrl.errors import DataError
from clinrl.models.judges import Judges
from clinrl.runtime.progress import progress
from clinrl.tasks.base import Task, get_task, is_sound_id, models_of
from clinrl.tasks.importing import CONTROL_CHARACTERS, IDENTIFIERS, IDENTIFIERS_OF_IMPORTS
from clinrl.tasks.parts import Expect
from clinrl.types import Case, Manifest, Pool

if TYPE_CHECKING:
    from clinrl.config.params import Params

CHUNK_ROWS = 5_000
"""Rows in memory at a time. A "rows" expectation must therefore be about single rows, not about the whole table."""

TEXT_UNIQUE = "text_unique"
COMPUTED: dict[str, str] = {
    "id_matches_content": "the id is not the content hash of the case, so the row was edited after it was built",
    "id_unique": "an earlier row has the same id",
    TEXT_UNIQUE: "an earlier row has the same text",
    "group_in_pool": "the group belongs to another pool, so a pool would leak into this one",
    "label_reproduced": "the rules do not give the case's label from its latent facts",
    "gold_scores_best": "the gold answer is unreadable, or not the only best one under a reward used with this data",
}
"""The computed columns, each true of a sound row, and what is wrong where one is false. `TEXT_UNIQUE` is called after
the task's own column of text."""

NOT_OF_IMPORTS = frozenset({"label_reproduced"})
"""Computed columns that say nothing of imported cases: their labels are people's, and no rule gives them again."""

LONGEST_TEXT_CHARACTERS = 8_000


def stage(params: "Params", name: str) -> None:
    """Validate a data set, drawn or imported; write `paths.data_proof(name)` and the pages in `paths.data_docs(name)`.

    The proof says nothing of versions: that another one comes to train on the data set changes no byte of it.

    The proof of an import also holds what became of the rows of its source, in counts. Of imported rows no value is
    shown, neither in a refusal nor on a page.

    Raises DataError, after writing `<name>.failed.json` in the proof's place, naming the file, the first bad row, its
    column and value and the broken rule; ArtefactError if there is no such data set.
    """
    subject = _subject(params, name)
    proof = paths.data_proof(name)
    failed = proof.with_suffix(".failed.json")
    with artifacts.exclusive(proof):
        proof.unlink(missing_ok=True)
        failed.unlink(missing_ok=True)
        shutil.rmtree(paths.data_docs(name), ignore_errors=True)
        try:
            report, faults = _examined(*subject)
        except DataError as error:
            artifacts.write_json(failed, {"data": {"name": name}, "refused": str(error)})
            raise
        if faults:
            message = f"{faults[0]}; {rebuild(paths.cases(name))}, and see {paths.data_docs(name) / data_docs.INDEX}"
            artifacts.write_json(failed, report | {"refused": message, "faults": faults})
            raise DataError(message)
        artifacts.write_json(proof, report)


def pages(params: "Params", name: str) -> None:
    """Write `paths.data_docs(name)` if it is missing, as in a clone: the proof is in git, its pages are not.

    Raises DataError if the data set does not pass any more, and ArtefactError if it is altered.
    """
    with artifacts.exclusive(paths.data_proof(name)):
        if (paths.data_docs(name) / data_docs.INDEX).exists():
            return
        _, faults = _examined(*_subject(params, name))
        if faults:
            raise DataError(f"{faults[0]}; {rebuild(paths.cases(name))}")


def _subject(params: "Params", name: str) -> tuple[str, Task, Pool, list[Any], Manifest]:
    """What `examine` is asked about."""
    spec = params.data_spec(name)
    task = get_task(spec.task)
    rewards = [
        params.reward(version)
        for version, block in params.versions.items()
        if block.data == name
        and (profile := params.profiles[block.profile]).method != "sft"
        and not profile.waiver  # known to be wrong; the probe says how
        and not models_of(task, params.reward(version))  # the probe asks models, for its stream at once
    ]
    distinct = {artifacts.digest(reward.model_dump(mode="json")): reward for reward in rewards or [task.Reward()]}
    return name, task, spec.use, list(distinct.values()), manifest_of(paths.cases(name), task)


def _examined(name: str, *rest: Any) -> tuple[dict[str, Any], list[str]]:
    """What `examine` says; no page is left that loads anything, whatever it raises."""
    try:
        return examine(name, *rest)
    finally:
        data_docs.detach(paths.data_docs(name), name)


def examine(
    name: str, task: Task, pool: Pool, rewards: Sequence[Any], manifest: Manifest
) -> tuple[dict[str, Any], list[str]]:
    """Run both suites over a data set and write their pages. Returns the report, free of times, and the faults found.

    Faults are sentences, the one to show first. Raises DataError for a row that is not a case.
    """
    path = paths.cases(name) / paths.CASES_FILE
    imported = is_import(path.parent)
    intake = _intake(name, manifest) if imported else {}
    size = int(intake["kept"] if imported else manifest.spec["cases"])
    suites = {"rows": row_suite(task, imported=imported), "summary": summary_suite(task, size, imported=imported)}
    tallies = {on: [Tally(expect, withheld=imported) for expect in suite] for on, suite in suites.items()}
    check = checker(name, suites, withheld=imported)
    counts: Counter[str] = Counter()
    judges = Judges(paths.base(task.name))
    with first_sightings() as is_first, progress(name, size) as advance:
        rows = enumerate(read_rows(path, task), start=1)
        while chunk := list(islice(rows, CHUNK_ROWS)):
            table = []
            for row, case in chunk:
                line = task.row(case)
                computed = columns(case, line[task.checks.text], task, pool, rewards, is_first, judges)
                table.append(line | computed | {"row": row, "id": case.id})
                counts["cases"] += 1
                counts["duplicates"] += not (computed["id_unique"] and computed[_computed(task, TEXT_UNIQUE)])
                counts[f"{task.checks.share}_{task.label(case)}"] += 1
                counts.update({column: int(value) for column, value in line.items() if column.startswith("has_")})
                advance()
            for tally, result in zip(tallies["rows"], check("rows", table), strict=True):
                tally.add(result)
    if not counts["cases"]:
        raise DataError(f"{path} holds no case; {rebuild(path.parent)}")
    summary = summarise(counts, task)
    for tally, result in zip(tallies["summary"], check("summary", [summary]), strict=True):
        tally.add(result)
    faults = [tally.sentence(path) for tally in sorted(tallies["rows"], key=Tally.first_row) if not tally.success]
    faults += [tally.sentence(path) for tally in tallies["summary"] if not tally.success]
    if artifacts.sha256_file(path) != manifest.files.get(paths.CASES_FILE):
        faults.append(f"{path} was altered after it was built: its digest is not the one in its manifest")
    expectations = [tally.report() for on in suites for tally in tallies[on]]
    report = {
        "data": {"name": name, "identity": artifacts.identity(manifest)},
        "task": task.name,
        "task_version": task.version,
        "suite": artifacts.digest([[entry["type"], entry["on"], entry["arguments"]] for entry in expectations]),
        "summary": summary,
        "expectations": expectations,
    }
    return report | ({"import": intake} if imported else {}), faults


def _intake(name: str, manifest: Manifest) -> dict[str, Any]:
    """What an import wrote of its source. Raises DataError if it was altered, or if its counts do not add up."""
    path = paths.import_record(name)
    if artifacts.sha256_file(path) != manifest.files.get(path.name):
        raise DataError(f"{path} was altered after it was written; {rebuild(path.parent)}")
    intake: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if intake["read"] != intake["kept"] + intake["another_pool"] + intake["refused"]:
        raise DataError(f"{path} loses rows: kept, another_pool and refused do not sum to read; {rebuild(path.parent)}")
    return intake


def row_suite(task: Task, *, imported: bool = False) -> list[Expect]:
    """What must hold of each row: the task's rules, a clean text without identifiers, computed columns true."""
    return [
        *_of(task, "rows", imported),
        Expect(
            type="ExpectColumnValueLengthsToBeBetween",
            arguments={"column": task.checks.text, "min_value": 1, "max_value": LONGEST_TEXT_CHARACTERS},
        ),
        Expect(
            type="ExpectColumnValuesToNotMatchRegex",
            arguments={"column": task.checks.text, "regex": CONTROL_CHARACTERS},
        ),
        *(
            Expect(type="ExpectColumnValuesToNotMatchRegex", arguments={"column": task.checks.text, "regex": shape})
            for shape in (*IDENTIFIERS.values(), *(IDENTIFIERS_OF_IMPORTS.values() if imported else ()))
        ),
        *(
            Expect(type="ExpectColumnValuesToBeInSet", arguments={"column": _computed(task, name), "value_set": [True]})
            for name in COMPUTED
            if not (imported and name in NOT_OF_IMPORTS)
        ),
    ]


def _computed(task: Task, name: str) -> str:
    return f"{task.checks.text}_unique" if name == TEXT_UNIQUE else name


def _of(task: Task, on: str, imported: bool) -> list[Expect]:
    kinds = ("all", "imported" if imported else "drawn")
    return [expect for expect in task.checks.expectations if expect.on == on and expect.of in kinds]


def summary_suite(task: Task, size: int, *, imported: bool = False) -> list[Expect]:
    """What must hold of the table of shares: the task's rules, and as many cases as were asked for, or kept."""
    return [
        *_of(task, "summary", imported),
        Expect(type="ExpectColumnValuesToBeInSet", arguments={"column": "cases", "value_set": [size]}, on="summary"),
    ]


def columns(
    case: Case,
    text: str,
    task: Task,
    pool: Pool,
    rewards: Sequence[Any],
    is_first: Callable[[str, str], bool],
    judges: Judges,
) -> dict[str, bool]:
    """The computed columns of one case, the keys of `COMPUTED`: what takes the task's code to know."""
    best = golds(task, case)
    lazy = plain(task, case)
    turns = [(case, transcript) for transcript in best]
    pairs = turns + [(case, transcript) for _, transcript in lazy]
    earned = [totals(task, pairs, reward, judges) for reward in rewards]
    return {
        "id_matches_content": is_sound_id(task, case),
        "id_unique": is_first("id", case.id),
        _computed(task, TEXT_UNIQUE): is_first("text", text),
        "group_in_pool": task.pool_of(case.group) == pool,
        "label_reproduced": task.relabel(case) == task.label(case),
        "gold_scores_best": all(task.parse(transcript) == task.label(case) for transcript in best)
        and all(
            gold_is_best(
                task.label(case),
                each[: len(turns)],
                [(answer, total) for (answer, _), total in zip(lazy, each[len(turns) :], strict=True)],
            )
            for each in earned
        ),
    }


def summarise(totals: Mapping[str, int], task: Task) -> dict[str, float]:
    """The one row of the table of shares.

    `cases` and `duplicates` (counts), `<Checks.share>_<label>` for each label of the task, and the share of true values
    of each column of `Checks.row` whose name begins with `has_`, under that name.
    """
    cases = totals["cases"]
    labels = [f"{task.checks.share}_{label}" for label in task.labels]
    flags = sorted(column for column in totals if column.startswith("has_"))
    shares = {column: round(totals[column] / max(1, cases), 6) for column in [*labels, *flags]}
    return {"cases": cases, "duplicates": totals["duplicates"]} | shares


class Tally:
    """What one expectation found, added up over the chunks. `withheld`: no value of a row may be shown."""

    def __init__(self, expect: Expect, *, withheld: bool = False) -> None:
        self.expect, self.withheld = expect, withheld and expect.on == "rows"
        self.success = True
        self.counts: Counter[str] = Counter()
        self.observed: Any = None
        self.first: dict[str, Any] | None = None

    def add(self, result: dict[str, Any]) -> None:
        """Add the outcome on one chunk, as Great Expectations reports it."""
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
        """The fault for a reader: file, row, column, value and rule."""
        arguments = dict(self.expect.arguments)
        names = [str(arguments.pop(key)) for key in ("column", "column_A", "column_B") if key in arguments]
        column = ", ".join(names)
        if self.first is None and self.withheld:
            return f"{path}, column {column}: values break {self._rule(arguments)}"
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
        """The outcome as the proof holds it: rule, success, and counts or the observed value."""
        observed = {} if self.observed is None else {"observed": self.observed}
        expect = {"type": self.expect.type, "on": self.expect.on, "arguments": dict(self.expect.arguments)}
        return expect | {"success": self.success} | dict(sorted(self.counts.items())) | observed

    def _rule(self, arguments: Mapping[str, Any]) -> str:
        if (kind := _KIND.get(arguments.get("regex", ""))) is not None:
            return f"the rule that it holds no {kind}"
        return f"{self.expect.type}({', '.join(f'{key}={to_text(value)}' for key, value in arguments.items())})"


_KIND = {shape: kind for kinds in (IDENTIFIERS, IDENTIFIERS_OF_IMPORTS) for kind, shape in kinds.items()} | {
    CONTROL_CHARACTERS: "control or invisible character"
}


def checker(
    name: str, suites: Mapping[str, Sequence[Expect]], *, withheld: bool = False
) -> Callable[[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """A function of suite and table (a list of rows) that runs the suite and adds a page to the data set's pages.

    It returns Great Expectations' result for each expectation, in the order of the suite, as plain values. It raises
    RuntimeError if an expectation could not be evaluated at all, which is a bug of the suite and no fault of the data.
    Neither results nor pages hold a value of a row if they are `withheld`.
    """
    import great_expectations as gx
    import pandas as pd
    from great_expectations.core.run_identifier import RunIdentifier

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    context.add_data_docs_site(
        "pages",
        {
            "class_name": "SiteBuilder",
            "store_backend": {
                "class_name": "TupleFilesystemStoreBackend",
                "base_directory": str(paths.data_docs(name).absolute()),
            },
            "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
            "show_how_to_buttons": False,
        },
    )
    source = context.data_sources.add_pandas(name)
    checkpoints = {}
    for on, suite in suites.items():
        rules = [
            getattr(gx.expectations, expect.type)(**expect.arguments, meta={"at": at})
            for at, expect in enumerate(suite)
        ]
        definition = gx.ValidationDefinition(
            name=on,
            data=source.add_dataframe_asset(on).add_batch_definition_whole_dataframe(on),
            suite=context.suites.add(gx.ExpectationSuite(on, expectations=rules)),
        )
        index = ["row", "id"] if on == "rows" else []
        checkpoints[on] = context.checkpoints.add(
            gx.Checkpoint(
                name=on,
                validation_definitions=[context.validation_definitions.add(definition)],
                actions=[gx.checkpoint.UpdateDataDocsAction(name="pages", site_names=["pages"])],
                result_format={
                    "result_format": "SUMMARY",
                    "unexpected_index_column_names": index,
                    **({"exclude_unexpected_values": True} if withheld else {}),
                },
            )
        )

    def check(on: str, table: list[dict[str, Any]]) -> list[dict[str, Any]]:
        run = RunIdentifier(run_name=f"rows-from-{table[0]['row']}" if on == "rows" else on)
        outcome = checkpoints[on].run(batch_parameters={"dataframe": pd.DataFrame(table)}, run_id=run)
        (validation,) = outcome.run_results.values()
        found = sorted(validation.results, key=lambda result: result.expectation_config.meta["at"])
        return [_plain(result.to_json_dict()) for result in found]

    return check


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    """A result with numpy's values turned into Python's. Raises RuntimeError if it holds an exception."""
    info = result["exception_info"]
    for entry in (info, *info.values()):
        if isinstance(entry, dict) and entry.get("raised_exception"):
            rule = result["expectation_config"]
            raise RuntimeError(f"{rule['type']}({rule['kwargs']}) could not be evaluated: {entry['exception_message']}")
    found = result["result"]
    rows = found.get("partial_unexpected_index_list") or []
    return result | {
        "result": found
        | {
            "partial_unexpected_list": [_scalar(value) for value in found.get("partial_unexpected_list") or []],
            "partial_unexpected_index_list": [
                {key: _scalar(value) for key, value in row.items()} for row in rows if isinstance(row, dict)
            ],
        }
    }


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
