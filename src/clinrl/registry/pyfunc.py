"""A registered model as its user sees it: a table of facts in, a table of answers out.

A registered folder holds everything that answering needs, including the code of clinrl for it, so that a user needs
neither a checkout nor the data. The folder is signed as a whole, and `clinrl_loader`, which MLflow imports to load it,
checks every file before this module is imported. Nothing here stores the content of a row: rows are patients.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import BaseModel, Field, ValidationError

import clinrl_loader
from clinrl.artifacts import canonical_json, identity_of, read_manifest, read_record, verified, write_json, write_text
from clinrl.errors import ArtefactError, DataError, Refused
from clinrl.models import bases, opening
from clinrl.models.chat import Completion, read_turn
from clinrl.models.generate import Prompt, Sampler, check_room, shares
from clinrl.provenance import pins
from clinrl.registry import novelty
from clinrl.runtime import determinism
from clinrl.tasks.base import Task, get_task
from clinrl.tasks.marks import holds_mark
from clinrl.types import Strict, Unreadable, transcript_of

if TYPE_CHECKING:
    from pandas import DataFrame

RECORD = "served.json"
BASE, ADAPTER, MERGED = "base", "adapter", "merged"
CODE = "code"
ANSWERS = {"config", "models", "provenance", "registry", "runtime", "signing", "tasks"}
"""The packages of clinrl that answering imports: a registered folder holds them, and the modules beside them."""
MODE = "mode"
COLUMNS = ("rationale", "thinking", MODE, "parse_status", "novelty")
"""The columns of an answer after the task's own column."""
READ = "ok"
"""The parse status of a readable answer; that of an unreadable one is the reason."""
REFUSED = "refused: "
"""The beginning of the parse status of a refused row, which the model does not get; the reason follows."""
SEED = 1
"""The seed of sampling, in modes with a temperature above 0: that of the exam."""
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""A control character. No case of a training or an exam holds one; in a prompt it could end the line of a turn."""
EXAMPLE, SERVING_EXAMPLE = "input_example.json", "serving_input_example.json"
EXAMINED = "examined.json"
"""The record of the exam's texts, which tells rows that are unlike them: see `clinrl.registry.novelty`."""


class Decoding(Strict):
    """The decoding of one mode, which is that of the version's exam."""

    thinking: bool
    temperature: float
    max_new_tokens: int
    turn_tokens: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """The most tokens of a turn, where a case has several; `max_new_tokens` are those of all turns."""
    top_p: float = Field(default=1.0, exclude_if=lambda value: value == 1.0)
    """Left out at its default, as in folders that were registered before there was this field."""


class Served(Strict):
    """The record of a registered folder: `served.json`."""

    name: str
    """The version or the merge."""
    task: str
    task_version: int
    digest: str
    """Identity of the adapter, or of the full model."""
    base_digest: str
    """Identity of the base that the adapter is for, or that the full model came from."""
    form: Literal["adapter", "merged"]
    """adapter: applied to the base beside it. merged: a full model, alone."""
    modes: dict[str, Decoding]
    default_mode: str
    """The mode of rows that name none."""


def write(out: Path, served: Served, examined: novelty.Examined | None, *, model_id: str, run_id: str) -> None:
    """Write a registered folder, but for the weights: record, MLflow's description, requirements, code.

    `examined` is the record of the exam's texts. `model_id` and `run_id` are MLflow's names of the model and of its
    run.
    """
    from mlflow.models import Model

    task = get_task(served.task)
    write_json(out / RECORD, served.model_dump(mode="json"))
    novelty.write(out / EXAMINED, examined)
    facts = next(iter(task.cases(1, SEED, pool="base", mix=task.checks.mixes[0]))).facts.model_dump(mode="json")
    split = {"columns": list(facts), "data": [[_cell(value) for value in facts.values()]]}
    write_json(out / EXAMPLE, split)
    write_json(out / SERVING_EXAMPLE, {"dataframe_split": split})
    needed = [f"{library}=={version(library).split('+')[0]}" for library in pins.LIBRARIES]
    # A base of the hub may be held in four bits; the library for that works on this platform alone.
    needed.append(
        f'{pins.QUANTISED}=={version(pins.QUANTISED)} ; platform_machine == "x86_64" and sys_platform == "linux"'
    )
    write_text(out / "requirements.txt", "".join(f"{pin}\n" for pin in needed))
    environment = f"python: {python_version()}\nbuild_dependencies:\n- pip\ndependencies:\n- -r requirements.txt\n"
    write_text(out / "python_env.yaml", environment)
    source = Path(__file__).parents[1]
    package = out / CODE / source.name
    package.mkdir(parents=True)
    for module in source.glob("*.py"):
        shutil.copyfile(module, package / module.name)
    for name in ANSWERS:
        shutil.copytree(source / name, package / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    shutil.copyfile(clinrl_loader.__file__, out / CODE / f"{clinrl_loader.__name__}.py")
    # A file in the place of Python's folder for compiled code, so that loading leaves the folder as it was signed.
    write_text(out / CODE / "__pycache__", "")
    model = Model(
        run_id=run_id,
        model_id=model_id,
        signature=signature(task, served),
        saved_input_example_info={
            "artifact_path": EXAMPLE,
            "serving_input_path": SERVING_EXAMPLE,
            "type": "dataframe",
            "pandas_orient": "split",
        },
        metadata={"clinrl": {"name": served.name, "digest": served.digest}},
    )
    model.add_flavor(
        "python_function",
        loader_module=clinrl_loader.__name__,
        code=CODE,
        env={"virtualenv": "python_env.yaml"},
        python_version=python_version(),
    )
    model.save(str(out / "MLmodel"))


def signature(task: Task, served: Served) -> Any:
    """MLflow's description of the columns: the task's facts and `mode` in, its answer and `COLUMNS` out.

    Lists come as JSON text.

    Every input is optional to MLflow, because its own refusal of a missing column quotes the rows; `predict` refuses
    in its place, without quoting.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema

    types: dict[Any, DataType] = {
        str: DataType.string,
        int: DataType.long,
        float: DataType.double,
        bool: DataType.boolean,
    }
    facts = {name: types.get(field.annotation, DataType.string) for name, field in _facts(task).model_fields.items()}
    label = types[type(task.labels[0])]
    outputs = {task.safety.answer: label} | dict.fromkeys(COLUMNS, DataType.string)
    return ModelSignature(
        inputs=Schema(
            [ColSpec(kind, name, required=False) for name, kind in (facts | {MODE: DataType.string}).items()]
        ),
        outputs=Schema([ColSpec(kind, name, required=False) for name, kind in outputs.items()]),
        params=ParamSchema([ParamSpec(MODE, DataType.string, served.default_mode)]),
    )


def read(folder: Path) -> Served:
    """The record of a registered folder. Other files are not read: the signature of the folder covers them.

    Raises ArtefactError if the record is missing or malformed, or names other parts than the folder holds.
    """
    path = folder / RECORD
    served = read_record(
        path, Served,
        lambda: f"{path} is missing, so {folder} is no registered model; download it again",
        lambda _: f"{path} is no record of a registered model; register it again",
    )  # fmt: skip
    parts = {MERGED: served.digest} if served.form == "merged" else {BASE: served.base_digest, ADAPTER: served.digest}
    for part, digest in parts.items():
        if identity_of(folder / part) != digest:
            raise ArtefactError(f"{folder / part} is not what {path} names; register {served.name} again")
    return served


def read_current(folder: Path) -> Served:
    """The record of a registered folder. Raises ArtefactError if this code has another version of its task."""
    served = read(folder)
    task = get_task(served.task)
    if task.version != served.task_version:
        raise ArtefactError(
            f"{served.name} was made at version {served.task_version} of the task {task.name}, and the clinrl that is "
            f"imported here is at {task.version}; load the model in a new process, which takes the code beside it"
        )
    return served


def load(path: str) -> "Answerer":
    """The model of a registered folder that `clinrl_loader` checked. Raises ArtefactError if a part does not fit."""
    # MLflow quotes the whole table when a column has the wrong type.
    os.environ.setdefault("MLFLOW_DISABLE_SCHEMA_DETAILS", "true")
    try:
        determinism.pin()
    except Refused as refused:  # a notebook that imported torch first still gets its answers
        warnings.warn(f"{refused}; until then an answer may differ from the exam's in rare cases", stacklevel=2)
    folder = Path(path)
    served = read_current(folder)
    task = get_task(served.task)
    if task.episodes is not None:
        raise ArtefactError(f"{served.name} is played with tools, which no table answers; `clinrl evaluate` plays it")
    spec: Mapping[str, Any] = {}
    if served.form == "merged":
        model, tokenizer = bases.open_base(folder / MERGED, for_training=False)
    else:
        spec = read_manifest(folder / ADAPTER).spec
        qlora = bool(spec.get("qlora", False))
        model, tokenizer = bases.open_base(folder / BASE, for_training=False, qlora=qlora)
        verified(folder / ADAPTER)  # as `open_base` did with its folder: files may have changed since the check
        model = opening.adapted(model, folder / ADAPTER).eval()
    sampler = Sampler(model, tokenizer, shared=shares(spec))
    return Answerer(served, task, sampler, novelty.read(folder / EXAMINED))


@dataclass(frozen=True)
class Row:
    """One row of a table, after reading."""

    mode: str | None
    """None: the row names a mode that the model does not have."""
    prompt: Prompt | None
    """None: the row was refused."""
    refusal: str = ""
    """The reason, without the content of the row."""
    novelty: str = novelty.UNKNOWN


class Answerer:
    """A loaded model, as MLflow calls it."""

    def __init__(self, served: Served, task: Task, sampler: Sampler, examined: novelty.Examined | None) -> None:
        self.served = served
        self.task = task
        self.sampler = sampler
        self.examined = examined

    def predict(self, table: "DataFrame", params: Mapping[str, Any] | None = None) -> "DataFrame":
        """Answer each row: the answer (None if unreadable), `rationale`, `thinking`, `mode`, `parse_status`, `novelty`.

        A row's own `mode` overrides the one of `params`. Rows of one mode are answered together, in batches. A refused
        row has no answer, and a parse status of `REFUSED` and the reason, without the content of the row; the other
        rows are answered. `novelty` is about the text (`registry.novelty`): `novel` means that the exam says nothing
        about such a text. The answer stays, since this is a rule of thumb.

        Raises MLflow's exception, with one sentence, if a column is missing or `params` names no mode of the model.
        """
        from mlflow.exceptions import MlflowException
        from pandas import DataFrame

        try:
            rows = self._read(table, (params or {}).get(MODE))
            completions = self._answer(rows)
        except DataError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from None
        lines: list[tuple[Any, ...]] = []
        for number, row in enumerate(rows):
            completion = completions.get(number)
            if row.mode is None or completion is None:
                lines.append((None, None, None, row.mode, REFUSED + row.refusal, row.novelty))
                continue
            turn = read_turn(completion.text, self.sampler.opens(self.served.modes[row.mode].thinking))
            answer = self.task.parse(transcript_of(turn))
            given = None if isinstance(answer, Unreadable) else answer
            status = answer.reason if isinstance(answer, Unreadable) else READ
            lines.append((given, turn.content, turn.thinking, row.mode, status, row.novelty))
        # As objects: a column of strings and numbers would turn an absent value into NaN, which JSON does not have.
        return DataFrame(lines, columns=[self.task.safety.answer, *COLUMNS], index=table.index, dtype=object)

    def _read(self, table: "DataFrame", mode: Any) -> list[Row]:
        facts = _facts(self.task)
        needed = [name for name, field in facts.model_fields.items() if field.is_required()]
        absent = [name for name in needed if name not in table.columns]
        if absent:
            raise DataError(f"the table has no column {absent[0]}; it needs {', '.join(needed)} and may have {MODE}")
        default = _mode(mode) or self.served.default_mode
        if default not in self.served.modes:
            raise DataError(f"the request's mode is none of this model's: {', '.join(self.served.modes)}")
        names = [name for name in facts.model_fields if name in table.columns]
        columns = [table[name].tolist() for name in names]
        modes = table[MODE].tolist() if MODE in table.columns else [None] * len(table)
        marks = [*self.sampler.tokenizer.get_added_vocab()]
        return [
            self._row(f"row {number}", _mode(own) or default, dict(zip(names, values, strict=True)), marks)
            for number, (own, *values) in enumerate(zip(modes, *columns, strict=True))
        ]

    def _row(self, name: str, mode: str, cells: Mapping[str, Any], marks: Sequence[str]) -> Row:
        if mode not in self.served.modes:
            return Row(None, None, f"its mode is none of this model's: {', '.join(self.served.modes)}")
        decoding = self.served.modes[mode]
        try:
            facts = _read_facts(_facts(self.task), cells, marks)
        except DataError as error:
            return Row(mode, None, str(error))
        unlike = novelty.judge([*novelty.strings(facts.model_dump(mode="json"))], self.examined)
        messages = self.task.prompt(facts)
        ids = self.sampler.opening(messages, (), decoding.thinking)
        try:
            check_room([name], [len(ids)], decoding.max_new_tokens, self.sampler.window)
        except DataError as error:
            return Row(mode, None, str(error).removeprefix(f"{name}: "), unlike)
        return Row(mode, Prompt(name, messages, ids), novelty=unlike)

    def _answer(self, rows: Sequence[Row]) -> dict[int, Completion]:
        answers: dict[int, Completion] = {}
        for mode, decoding in self.served.modes.items():
            prompts = {number: row.prompt for number, row in enumerate(rows) if row.mode == mode and row.prompt}
            if not prompts:
                continue
            written = self.sampler.sample(
                [*prompts.values()],
                thinking=decoding.thinking,
                temperature=decoding.temperature,
                top_p=decoding.top_p,
                budget=decoding.max_new_tokens,
                seed=SEED,
            )
            answers.update(zip(prompts, written, strict=True))
        return answers


def _facts(task: Task) -> type[BaseModel]:
    """The class of a task's facts, whose fields are the columns of a table."""
    return cast("type[BaseModel]", task.Case.model_fields["facts"].annotation)


def _cell(value: Any) -> Any:
    """A fact as a cell of a table holds it: lists and mappings as JSON text."""
    return canonical_json(value) if isinstance(value, list | dict) else value


def _parse_cell(facts: type[BaseModel], name: str, value: Any) -> Any:
    """The reverse of `_cell`. Text that is no JSON stays as it is, and is refused with the other faults of its row."""
    if not isinstance(value, str) or facts.model_fields[name].annotation is str:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # a number of very many digits is no JSONDecodeError
        return value


def _mode(value: Any) -> str:
    """A mode as a cell or a parameter names it; empty for an empty cell, whatever pandas puts there."""
    from pandas import isna

    return "" if isna(value) else str(value)


def _read_facts(facts: type[BaseModel], row: Mapping[str, Any], marks: Sequence[str]) -> BaseModel:
    """The facts in a row. Raises DataError saying what is wrong, without the content of the row.

    `marks` are the texts that the tokenizer reads as one token of its own, such as the end of a turn.
    """
    try:
        read = facts.model_validate({name: _parse_cell(facts, name, value) for name, value in row.items()})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise DataError(f"column {'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
    for name, text in ((name, text) for name, value in read.model_dump().items() for text in novelty.strings(value)):
        if (found := CONTROL.search(text)) is not None:
            raise DataError(f"column {name} holds a control character (code {ord(found[0])}); write spaces instead")
        if holds_mark(text, marks):
            raise DataError(f"column {name} holds a mark of the chat template, which the model would obey; remove it")
    return read
