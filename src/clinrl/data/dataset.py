"""Data sets: the cases of one pool, drawn or imported, as a JSONL file with a manifest.

Files are read and written line by line. Importers, and generators that draw no case twice, keep a key of each case.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clinrl import artifacts, paths
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.config.schema import DatasetSpec, ImportSpec
from clinrl.errors import ArtefactError, DataError, ParamsError, echo
from clinrl.runtime.progress import progress
from clinrl.tasks.base import Task, get_task
from clinrl.tasks.importing import COLUMNS, Intake, identities, opened
from clinrl.tasks.marks import holds_mark
from clinrl.types import Case, Manifest

CACHE = Path(".dvc/cache")
TICK_ROWS = 1_000
"""Imported rows between two updates of the progress bar."""
LONGEST_LINE = 1 << 20
"""Bytes. A longer line is refused before it is parsed, so that a file without line ends cannot fill the memory."""


def stage(params: Params, name: str) -> None:
    """Write data set `name` to `paths.cases(name)`: `cases.jsonl`, one canonical JSON line per case, and the manifest.

    An imported data set also has `refused.tsv` (file, line, column and reason of each refused row, without its values)
    and `import.json` (counts). Equal specifications and equal sources give equal bytes. Raises ParamsError if the data
    set is for another version of the task than this code has, DataError if the pool does not have that many distinct
    cases or the source cannot be read, and Busy if another command writes the data set.
    """
    spec = params.data_spec(name)
    task = get_task(spec.task)
    if spec.task_version != task.version:
        group = "imports" if isinstance(spec, ImportSpec) else "datasets"
        raise ParamsError(
            f"{group}.{name}.task_version is {spec.task_version}, but the task {task.name} is at {task.version}: "
            f"set it to {task.version} (and expect every artefact that grew from the data set to be rebuilt)"
        )
    with artifacts.exclusive(paths.cases(name)), artifacts.staged(paths.cases(name)) as folder:
        inputs = {}
        if isinstance(spec, ImportSpec):
            inputs = _import(folder, spec, name, task)
        else:
            _draw(folder, spec, name)
        artifacts.seal(
            folder,
            kind="cases",
            name=name,
            task=task.name,
            task_version=task.version,
            spec=spec.model_dump(mode="json", exclude_defaults=True),  # so a new option changes no spec without it
            inputs=inputs,
        )


def draw(spec: DatasetSpec) -> Iterator[Case]:
    """The cases that the specification of a data set describes, one by one."""
    edition = {"edition": spec.edition} if spec.edition else {}
    task = get_task(spec.task)
    return task.cases(spec.cases, spec.seed, pool=spec.use, mix=spec.mix, emphasis=spec.emphasis, **edition)


def corpora(params: Params, model: Model) -> dict[str, Iterable[Case]]:
    """The training data sets of a version, or of all versions of a merge, and of their ancestors, by name.

    The model's own data sets are read; ArtefactError is raised if they are missing or altered. Those of ancestors are
    drawn again, or read if they were imported. A base has none.
    """
    own = dict.fromkeys(params.versions[part].data for part in model.parts)
    every = dict.fromkeys(params.versions[name].data for part in model.parts for name in params.lineage(part)[::-1])
    return {
        name: read_cases(paths.cases(name), model.task) if name in own else drawn_again(params, name, model.task)
        for name in own | every
    }


def drawn_again(params: Params, name: str, task: Task) -> Iterable[Case]:
    """The cases of a data set, drawn again so that its files are not needed. Only those of an import are read."""
    return draw(params.datasets[name]) if name in params.datasets else read_cases(paths.cases(name), task)


def _draw(folder: Path, spec: DatasetSpec, name: str) -> None:
    """Write the file of a drawn data set."""
    written = 0
    with (folder / paths.CASES_FILE).open("w", encoding="utf-8") as stream, progress(name, spec.cases) as advance:
        for case in draw(spec):
            stream.write(artifacts.canonical_json(case.model_dump(mode="json")) + "\n")
            written += 1
            advance()
    if written != spec.cases:
        raise DataError(
            f"datasets.{name}: the pool {spec.use} of {spec.task} gave {written:,} distinct cases, "
            f"not the {spec.cases:,} asked for; ask for fewer"
        )


def _import(folder: Path, spec: ImportSpec, name: str, task: Task) -> dict[str, str]:
    """Write the files of an imported data set. Returns the digests of the files that it was read from."""
    folder.chmod(0o700)  # whoever may read the source, these are rows of it
    _, _, digests = opened(task, spec.source, spec.without)
    source, apart, _ = opened(task, spec.source, spec.without)  # anew, so that a header is no older than the digests
    if spec.use not in source.uses:
        raise DataError(
            f"imports.{name}.use is {spec.use}, but {spec.source} is {source.kind} data, which is for "
            f"{' or '.join(source.uses)}; change the use"
        )
    with (
        (folder / paths.CASES_FILE).open("w", encoding="utf-8") as cases,
        (folder / paths.REFUSED_FILE).open("w", encoding="utf-8") as refused,
        progress(name, source.lines) as advance,
    ):
        refused.write("\t".join(COLUMNS) + "\n")
        intake, shown = Intake(refused, without=identities(apart) if apart else frozenset()), 0
        for line in source.cases(spec.use, intake):
            cases.write(line + "\n")
            if intake.kept % TICK_ROWS == 0:
                advance(intake.read - shown)
                shown = intake.read
    if not intake.kept:
        raise DataError(f"{spec.source} gives {name} no case: {intake.outcome()}; check the file and the use")
    if opened(task, spec.source, spec.without)[2] != digests:
        raise DataError(f"a source of {name} changed while it was read; import it again when nothing writes to it")
    echo(f"{name}: {intake.outcome()}")
    artifacts.write_json(folder / paths.IMPORT_FILE, intake.record(source))
    if CACHE.parent.is_dir():  # DVC would make it open to others
        CACHE.mkdir(exist_ok=True)
        CACHE.chmod(0o700)
    return digests


def read_cases(folder: Path, task: Task) -> Iterator[Case]:
    """The cases of a data set, in file order, each checked against the task's schema, after a check of the digest.

    Raises ArtefactError if the folder, its file or its manifest is missing, of another task version, or altered after
    it was built (naming the first bad row if there is one), and DataError for a row that is not a case.
    """
    manifest = manifest_of(folder, task)
    path = folder / paths.CASES_FILE
    if artifacts.sha256_file(path) != manifest.files.get(paths.CASES_FILE):
        raise ArtefactError(f"{path} was altered after it was built{_first_bad_row(path, task)}; {rebuild(folder)}")
    return read_rows(path, task)


def manifest_of(folder: Path, task: Task) -> Manifest:
    """The manifest of a data set of this task. Raises ArtefactError if it is missing, or is for another task or task
    version, or if the file of cases is missing."""
    manifest = artifacts.read_manifest(folder)
    if (manifest.kind, manifest.task) != ("cases", task.name):
        raise ArtefactError(
            f"{folder} holds {manifest.kind} of {manifest.task}, not cases of {task.name}; {rebuild(folder)}"
        )
    if manifest.task_version != task.version:
        raise ArtefactError(
            f"{folder} was built by version {manifest.task_version} of the task {task.name}, which is now at "
            f"{task.version}: raise {'imports' if is_import(folder) else 'datasets'}.{folder.name}.task_version and "
            f"{rebuild(folder)}"
        )
    if missing := next((name for name in manifest.files if not (folder / name).is_file()), None):
        stage = f"{'import' if paths.IMPORT_FILE in manifest.files else 'dataset'}@{folder.name}"
        raise ArtefactError(
            f"{folder / missing} is missing: restore it with `dvc checkout` or rebuild with `dvc repro {stage}`"
        )
    return manifest


def read_rows(path: Path, task: Task) -> Iterator[Case]:
    """The cases of a JSONL file, without a check of its digest.

    Raises DataError for a row that is not a case, or that contains a mark of a chat template; it names file, row (from
    1), column and value. The value is left out for imported cases, since it may be a patient's.
    """
    withheld = is_import(path.parent)
    with path.open("rb") as stream:
        row = 0
        while line := stream.readline(LONGEST_LINE):
            row += 1
            if not line.endswith(b"\n"):
                fault = f"longer than {LONGEST_LINE:,} bytes" if len(line) == LONGEST_LINE else "cut short: no line end"
                raise DataError(f"{path} row {row} is {fault}; {rebuild(path.parent)}")
            try:
                case = task.Case.model_validate_json(line)
            except ValidationError as error:
                raise DataError(f"{path} row {row}, {_fault(error, withheld)}; {rebuild(path.parent)}") from None
            if holds_mark(case.model_dump_json()):
                raise DataError(
                    f"{path} row {row} ({case.id}) holds a mark of a chat template, such as <|im_end|>, which a model "
                    f"would take for the end of a turn; {rebuild(path.parent)}"
                )
            yield case


def rebuild(folder: Path) -> str:
    """The advice to rebuild a bad data set, as the end of a sentence."""
    return f"rebuild with `dvc repro {'import' if is_import(folder) else 'dataset'}@{folder.name}`"


def is_import(folder: Path) -> bool:
    """Whether the data set in a folder was imported."""
    return (folder / paths.IMPORT_FILE).exists()


def to_text(value: Any) -> str:
    """A value for an error message: its JSON, shortened if it has more than 80 characters."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


def _fault(error: ValidationError, withheld: bool) -> str:
    first = error.errors(include_url=False)[0]
    column = ".".join(str(part) for part in first["loc"]) or "(the whole line)"
    return f"column {column}: {first['msg']}" + ("" if withheld else f", got {to_text(first['input'])}")


def _first_bad_row(path: Path, task: Task) -> str:
    try:
        for _ in read_rows(path, task):
            pass
    except DataError as error:
        return f" ({str(error).rsplit(';', 1)[0]})"
    return ""
