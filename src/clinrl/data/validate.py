"""Validation of data sets before anything trains on them, with a suite of Great Expectations.

Row expectations (the task's own, identifiers of real people, and this module's computed columns) are checked on the
file in chunks, summary expectations on a table with one row of shares. A data set that passes gets a proof with the
digest of its bytes; one that fails gets a report in its place. If all rows could be read, there is also a page of
either, `paths.data_docs(name)`. Of the cases before a chunk, only fingerprints are held in memory.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from clinrl import artifacts, paths
from clinrl.config.params import Params
from clinrl.data.dataset import is_import, manifest_of, read_rows, rebuild
from clinrl.data.expectations import COMPUTED, TEXT_UNIQUE, Tally, checker
from clinrl.data.reward_audit import gold_is_best, golds, plain_answers, totals
from clinrl.errors import DataError
from clinrl.models.judges import Judges
from clinrl.runtime.progress import progress
from clinrl.tasks.base import Task, get_task, is_sound_id
from clinrl.tasks.importing import CONTROL_CHARACTERS, HIDDEN_CHARACTERS, IDENTIFIERS, IDENTIFIERS_OF_IMPORTS
from clinrl.tasks.parts import Expect, expect
from clinrl.types import Case, Manifest, Pool

CHUNK_ROWS = 5_000
"""Rows in memory at a time. A "rows" expectation must therefore be about single rows, not about the whole table."""

NOT_OF_IMPORTS = frozenset({"label_reproduced"})
"""Computed columns that are not checked for imported cases: people label those, so rules cannot reproduce a label."""

LONGEST_TEXT_CHARACTERS = 8_000


def stage(params: Params, name: str) -> None:
    """Validate a data set, drawn or imported; write `paths.data_proof(name)` and the page in `paths.data_docs(name)`.

    The proof does not name the versions that train on the data set, so a new version changes no byte of it. The proof
    of an import also has the counts of kept and refused rows of its source. No value of an imported row is shown,
    neither in an error nor on a page.

    Raises DataError for a data set that fails, after writing `<name>.failed.json` in the proof's place; it names the
    file, the first bad row, its column and value, and the broken rule. Raises ArtefactError if the data set is missing.
    """
    subject = _subject(params, name)
    proof = paths.data_proof(name)
    failed = proof.with_suffix(".failed.json")
    with artifacts.exclusive(proof):
        proof.unlink(missing_ok=True)
        failed.unlink(missing_ok=True)
        shutil.rmtree(paths.data_docs(name), ignore_errors=True)
        try:
            report, faults = examine(*subject)
        except DataError as error:
            artifacts.write_json(failed, {"data": {"name": name}, "refused": str(error)})
            raise
        if faults:
            message = f"{faults[0]}; {rebuild(paths.cases(name))}, and see {_page(name)}"
            artifacts.write_json(failed, report | {"refused": message, "faults": faults})
            write_page(failed)
            raise DataError(message)
        artifacts.write_json(proof, report)
        write_page(proof)


def write_page(report: Path) -> None:
    """Write the page of a report or a proof into `paths.data_docs` of its data set."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found, here = json.loads(report.read_bytes()), Path(__file__)
    loader = FileSystemLoader(here.parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, autoescape=True, trim_blocks=True)
    text = environment.get_template(here.with_suffix(".html.j2").name).render(report=found)
    artifacts.write_text(_page(found["data"]["name"]), text)


def complete_page(name: str) -> None:
    """Write the page of a proof if it is missing, as in a clone, since git has only the proof."""
    with artifacts.exclusive(proof := paths.data_proof(name), waits=True):
        if proof.exists() and not _page(name).exists():
            write_page(proof)


def _page(name: str) -> Path:
    return paths.data_docs(name) / "index.html"


def _subject(params: Params, name: str) -> tuple[str, Task, Pool, list[Any], Manifest]:
    """The arguments of `examine` for a data set."""
    spec = params.data_spec(name)
    task = get_task(spec.task)
    rewards = [
        params.reward(version)
        for version, block in params.versions.items()
        if block.data == name
        and (profile := params.profiles[block.profile]).method != "sft"
        and not profile.waiver  # known to be wrong, and the probe states why
        and not task.asks.models(params.reward(version))  # the probe checks rewards with models, in one batch
    ]
    distinct = {artifacts.digest(reward.model_dump(mode="json")): reward for reward in rewards or [task.Reward()]}
    return name, task, spec.use, list(distinct.values()), manifest_of(paths.cases(name), task)


def examine(
    name: str, task: Task, pool: Pool, rewards: Sequence[Any], manifest: Manifest
) -> tuple[dict[str, Any], list[str]]:
    """Run both suites over a data set. Returns the report, which has no times, and the faults as sentences.

    The first fault is the one to show. Raises DataError for a row that is not a case.
    """
    path = paths.cases(name) / paths.CASES_FILE
    imported = is_import(path.parent)
    intake = _intake(name, manifest) if imported else {}
    size = int(intake["kept"] if imported else manifest.spec["cases"])
    all_here = expect("ExpectColumnValuesToBeInSet", "cases", on="summary", value_set=[size])
    suites = {
        "rows": row_suite(task, imported=imported),
        "summary": [*_of(task, "summary", imported), all_here],
    }
    tallies = {on: [Tally(rule, withheld=imported) for rule in suite] for on, suite in suites.items()}
    check = checker(suites, withheld=imported)
    counts: Counter[str] = Counter()
    judges = Judges(paths.base(task.name))
    is_first = sightings()
    with progress(name, size) as advance:
        rows = enumerate(read_rows(path, task), start=1)
        while chunk := list(islice(rows, CHUNK_ROWS)):
            table = []
            for row, case in chunk:
                try:
                    line = task.row(case)
                    computed = columns(case, line[task.checks.text], task, pool, rewards, is_first, judges)
                except (LookupError, AssertionError):  # of tables that lack what an edited row names
                    if is_sound_id(task, case):
                        raise
                    raise DataError(
                        f"{path} row {row} ({case.id}) was edited after it was built: the task {task.name} does not "
                        f"know what it holds, and its id is not its content's; {rebuild(path.parent)}"
                    ) from None
                table.append(line | computed | {"row": row, "id": case.id})
                counts["cases"] += 1
                counts["duplicates"] += not (computed["id_unique"] and computed[_computed(task, TEXT_UNIQUE)])
                counts[f"{task.checks.share}_{task.label(case)}"] += 1
                counts.update({column: int(bool(value)) for column, value in line.items() if column.startswith("has_")})
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
    """The record of an import. Raises DataError if it was altered, or if its counts do not add up."""
    path = paths.cases(name) / paths.IMPORT_FILE
    if artifacts.sha256_file(path) != manifest.files.get(path.name):
        raise DataError(f"{path} was altered after it was written; {rebuild(path.parent)}")
    intake: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if intake["read"] != intake["kept"] + intake["another_pool"] + intake["refused"]:
        raise DataError(f"{path} loses rows: kept, another_pool and refused do not sum to read; {rebuild(path.parent)}")
    return intake


def row_suite(task: Task, *, imported: bool = False) -> list[Expect]:
    """The expectations of each row: the task's rules, a clean text without identifiers, and true computed columns."""
    text = task.checks.text
    identifiers = IDENTIFIERS_OF_IMPORTS if imported else IDENTIFIERS
    shapes = [HIDDEN_CHARACTERS if imported else CONTROL_CHARACTERS, *identifiers.values()]
    return [
        *_of(task, "rows", imported),
        expect("ExpectColumnValueLengthsToBeBetween", text, min_value=1, max_value=LONGEST_TEXT_CHARACTERS),
        *(expect("ExpectColumnValuesToNotMatchRegex", text, regex=shape) for shape in shapes),
        *(
            expect("ExpectColumnValuesToBeInSet", _computed(task, name), value_set=[True])
            for name in COMPUTED
            if not (imported and name in NOT_OF_IMPORTS)
        ),
    ]


def sightings() -> Callable[[str, str], bool]:
    """A function of a kind and a text that is true the first time it gets the pair; a million texts take 0.1 GB."""
    seen: set[bytes] = set()

    def is_first(kind: str, text: str) -> bool:
        before = len(seen)
        seen.add(hashlib.blake2b(f"{kind}:{text}".encode(), digest_size=16).digest())
        return len(seen) > before

    return is_first


def _computed(task: Task, name: str) -> str:
    return f"{task.checks.text}_unique" if name == TEXT_UNIQUE else name


def _of(task: Task, on: str, imported: bool) -> list[Expect]:
    """The task's own expectations of the rows, or of the table of shares."""
    kinds = ("all", "imported" if imported else "drawn")
    return [rule for rule in task.checks.expectations if rule.on == on and rule.of in kinds]


def columns(
    case: Case,
    text: str,
    task: Task,
    pool: Pool,
    rewards: Sequence[Any],
    is_first: Callable[[str, str], bool],
    judges: Judges,
) -> dict[str, bool]:
    """The computed columns of one case, with the keys of `COMPUTED`. They need the task's code, not only a table."""
    best = golds(task, case)
    lazy = plain_answers(task, case)
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
    """The single row of the table of shares.

    Its columns are `cases` and `duplicates` (counts), `<Checks.share>_<label>` (the share of each label), and for each
    column of `Checks.row` whose name begins with `has_`, the share of its true values under the same name.
    """
    cases = totals["cases"]
    labels = [f"{task.checks.share}_{label}" for label in task.labels]
    flags = sorted(column for column in totals if column.startswith("has_"))
    shares = {column: round(totals[column] / max(1, cases), 6) for column in [*labels, *flags]}
    return {"cases": cases, "duplicates": totals["duplicates"]} | shares
