"""Answers to an exam as traces of MLflow, where people filter, compare and label them, and their labels as a file.

A trace's id follows from the adapter and the graded answer, so that an answer is logged once, whoever logs it. When it
was given was not kept: a trace is dated when it is logged, and its spans follow each other by a microsecond.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from clinrl.analysis.exam import EvalReport
from clinrl.analysis.run import Run
from clinrl.artifacts import canonical_json, digest, write_text
from clinrl.errors import DataError, RegistryError, did_you_mean, format_value
from clinrl.evaluation.show import is_wrong
from clinrl.exports.inspect_log import examined, verdicts
from clinrl.registry.log_run import logged_models
from clinrl.registry.versions import Entry, find
from clinrl.reports.episode import Episode, decided_text, episode_of
from clinrl.tasks.base import EXACT, Task, get_task, parts_of
from clinrl.tracking.mlflow_store import connect, place, writing
from clinrl.types import Graded, Message, Unreadable

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Assessment, Span, TraceInfo
    from mlflow.tracing.client import TracingClient

    from clinrl.config.params import Params

SAMPLE: Final = 200
"""Traces of a mode, unless all are wanted: the wrong answers, then right ones, each by case id, which is a digest."""
TOGETHER: Final = 100
"""Traces that are sent at once."""
PAGE: Final = 500
"""Traces that are asked for at once: the most that MLflow gives."""
ANSWER: Final = "clinrl.answer"
"""Metadata of a trace: case, version and mode. Nobody can change it, as tags can be."""
GRADED: Final = "clinrl.graded"
"""Trace tag: digest of the graded answer."""
GOLD, LABEL = "gold", "label"
"""The assessments that are the exam's label, and a person's."""
OPENING: Final = {
    "mlflow.experimentKind": "genai_development",
    "mlflow.experiment.primaryMetric.greaterIsBetter": "True",
}
"""Experiment tags: MLflow shows the pages about answers. Its charts begin with the primary metric, named below."""


class Answer(NamedTuple):
    """One answer of an exam, with what is shown of it."""

    episode: Episode
    line: Graded
    gold: Any
    counted: Mapping[str, bool]
    """Whether it is correct, and whether the task's safety metric counts it, if the case is in its denominator."""


def stage(params: "Params", name: str, *, every: bool = False) -> None:
    """Log the exam of a registered version or merge to MLflow, in every mode: a sample, or `every` answer.

    Raises ArtefactError and DataError as `examined` and `verdicts`, and RegistryError if `name` is not registered as it
    was examined, or MLflow did not do its part; the same call then completes it.
    """
    exams = [examined(params, name, mode) for mode in params.modes]
    run, _, report = exams[0]
    entry = find(run.model.registered, name, digest=report.adapter_digest)
    if entry.digest != report.adapter_digest:
        raise RegistryError(f"{name} is not registered as it was examined; run `clinrl register {name}`")
    chosen = [answer for exam in exams for answer in _answers(*exam)[: None if every else SAMPLE]]
    with connect() as client, writing(client):
        logged = _log(client, entry, run, report, chosen)
    print(f"clinrl: {name}: {logged} traces are new, {len(chosen) - logged} were there", file=sys.stderr)


def _answers(run: Run, lines: Sequence[Graded], report: EvalReport) -> list[Answer]:
    """The answers of a mode, wrong ones first, each by case id."""
    shares = verdicts(run, lines, report)
    shown = {
        "correct": EXACT,
        **{metric: metric for metric in run.task.compared if metric in shares and metric != EXACT},
    }
    order = sorted(
        range(len(lines)), key=lambda at: (not is_wrong(run.model, run.cases[at], lines[at]), lines[at].case_id)
    )
    return [
        Answer(
            episode_of(run.model, run.cases[at], lines[at], number=at + 1, of=len(lines)),
            lines[at],
            run.golds[at],
            {called: bool(of[at]) for called, metric in shown.items() if (of := shares[metric])[at] is not None},
        )
        for at in order
    ]


def _log(client: "MlflowClient", entry: Entry, run: Run, report: EvalReport, chosen: Sequence[Answer]) -> int:
    """Log the answers that the experiment does not hold; how many they were."""
    from mlflow.tracing.client import TracingClient

    experiment = client.get_run(entry.run_id).info.experiment_id
    model = logged_models(client, experiment, entry.digest)[0].model_id
    where = f"metadata.`mlflow.modelId` = '{model}'"
    held = {info.trace_id: "mlflow.trace.spansLocation" in info.tags for info in _traces(client, experiment, where)}
    exam = [report.adapter_digest, report.exam_digest]
    named = {f"tr-{digest([*exam, answer.line.model_dump(mode='json')])[:32]}": answer for answer in chosen}
    new = {name: answer for name, answer in named.items() if not held.get(name)}
    if not new:
        return 0
    tracing, now = TracingClient(client.tracking_uri), int(time.time() * 1000)
    _open(client, tracing, experiment, run)
    data = _dataset(client, tracing, experiment, report)
    metadata = {"mlflow.modelId": model, "mlflow.sourceRun": entry.run_id}
    dated = {name: now - place for place, name in enumerate(new)}  # the newest is shown first
    for start in range(0, len(new), TOGETHER):
        some = list(new.items())[start : start + TOGETHER]
        tracing.store.upsert_dataset_records(data, [
            {"inputs": _asked(answer), "expectations": {GOLD: answer.gold}, "tags": {"case": answer.line.case_id},
             "source": {"source_type": "TRACE", "source_data": {"trace_id": name}}}
            for name, answer in some
        ])  # fmt: skip
        for name, answer in some:
            if name not in held:  # one that is held has no spans yet: its logging was killed
                tracing.start_trace(_info(name, answer, run.task, experiment, dated[name], metadata))
        tracing.log_spans(experiment, [span for name, answer in some for span in _spans(name, answer, dated[name])])
    return len(new)


def _traces(client: "MlflowClient", experiment: str, where: str | None = None) -> Iterator["TraceInfo"]:
    """The traces of an experiment, without their spans."""
    token: str | None = None
    while True:
        page = client.search_traces(
            locations=[experiment], filter_string=where, max_results=PAGE, page_token=token, include_spans=False
        )
        yield from (trace.info for trace in page)
        if not (token := page.token):
            return


def _open(client: "MlflowClient", tracing: "TracingClient", experiment: str, run: Run) -> None:
    """Say how MLflow opens an experiment, and what a person may call an answer; what is set there stays."""
    from mlflow.genai.label_schemas import InputCategorical, InputText

    tags = OPENING | {"mlflow.experiment.primaryMetric.name": f"{next(iter(run.modes))}/reward"}
    for key, value in tags.items():
        if key not in client.get_experiment(experiment).tags:
            client.set_experiment_tag(experiment, key, value)
    if LABEL not in {schema.name for schema in tracing.store.list_label_schemas(experiment)}:
        asked = InputText() if run.task.episodes else InputCategorical(options=[str(one) for one in run.task.labels])
        tracing.store.create_label_schema(experiment, name=LABEL, type="expectation", input=asked)


def _dataset(client: "MlflowClient", tracing: "TracingClient", experiment: str, report: EvalReport) -> str:
    """The evaluation dataset of an exam, made if it is not there. MLflow keeps a case once, by what was asked."""
    name = f"{report.exam}-{report.exam_digest[:8]}"
    if found := client.search_datasets(experiment_ids=[experiment], filter_string=f"name = '{name}'"):
        return str(found[0].dataset_id)
    return str(client.create_dataset(name, experiment, {"exam": report.exam, "digest": report.exam_digest}).dataset_id)


def _asked(answer: Answer) -> dict[str, Any]:
    return {"messages": [_message(message) for message in answer.episode.request]}


def _message(message: Message) -> dict[str, Any]:
    """A turn in the form that MLflow's page shows as a conversation."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking is not None:
        shown["reasoning_content"] = message.thinking
    if message.calls:
        shown["tool_calls"] = [
            {"id": str(number), "type": "function",
             "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
            for number, call in enumerate(message.calls)
        ]  # fmt: skip
    return shown


def _info(name: str, answer: Answer, task: Task, experiment: str, at: int, metadata: Mapping[str, str]) -> "TraceInfo":
    """A trace as it is listed, with its assessments: reward and headline, then the terms."""
    from mlflow.entities import AssessmentSource, Expectation, Feedback, TraceInfo, TraceLocation, TraceState

    episode, line = answer.episode, answer.line
    source = AssessmentSource(source_type="CODE", source_id=f"clinrl/{task.name}")
    wrong = [f"{part.about}: {decided_text(part.decided)}, right: {part.right}"
             for part in episode.parts if not part.is_right]  # fmt: skip
    scores = {**answer.counted, "reward": line.score.total,
              **{f"terms/{term}": value for term, value in line.score.terms.items()}}  # fmt: skip
    assessments: list[Assessment] = [Expectation(name=GOLD, value=answer.gold, source=source)]
    assessments += [Feedback(name=score, value=value, source=source) for score, value in scores.items()]
    assessments[1].rationale = "\n".join(wrong) or None
    what = {"case_id": line.case_id, "version": episode.name, "mode": line.mode}
    return TraceInfo(
        trace_id=name,
        trace_location=TraceLocation.from_experiment_id(experiment),
        request_time=at,
        state=TraceState.OK,
        request_preview=episode.request[-1].content,
        response_preview=decided_text(line.answer),
        trace_metadata={**metadata, ANSWER: canonical_json(what)},
        tags={
            "mlflow.traceName": f"{episode.name} {line.mode}",
            **episode.traits,
            **what,
            "exam": episode.exam,
            "stop": episode.stop,
            GRADED: digest(line.model_dump(mode="json")),
        },
        assessments=assessments,
    )


def _spans(name: str, answer: Answer, at: int) -> Iterator["Span"]:
    """The spans of a trace: all of it, the prompt, the turns, the calls of tools, the score."""
    from mlflow.entities import Span

    episode, score, asked = answer.episode, answer.line.score, _asked(answer)
    given = decided_text(answer.line.answer)
    steps = [
        ("prompt", "TASK", {"case_id": episode.case_id}, asked),
        *_turns(episode.messages, asked["messages"]),
        ("score", "EVALUATOR", {"answer": given, GOLD: answer.gold}, {"reward": score.total, **score.terms}),
    ]
    root = ("answer", "AGENT" if len(episode.messages) > 1 else "CHAIN", asked, given)
    for number, (called, kind, inputs, outputs) in enumerate([root, *steps]):
        yield Span.from_dict({
            "trace_id": name,
            "span_id": f"{number + 1:016x}",
            "parent_span_id": f"{1:016x}" if number else None,
            "name": called,
            "start_time_unix_nano": at * 1_000_000 + number * 1_000,
            "end_time_unix_nano": at * 1_000_000 + ((number or len(steps)) + 1) * 1_000,
            "status": {"code": "OK"},
            "attributes": {
                key: json.dumps(value)
                for key, value in {
                    "mlflow.traceRequestId": name,
                    "mlflow.spanType": kind,
                    "mlflow.spanInputs": inputs,
                    "mlflow.spanOutputs": outputs,
                }.items()
            },
        })  # fmt: skip


def _turns(messages: Sequence[Message], asked: Sequence[Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """The turns of the model, each with what it was given since the one before, and the calls of tools."""
    number, given, waiting = 0, list(asked), []
    for message in messages:
        if message.role == "assistant":
            number, waiting = number + 1, list(message.calls)
            yield f"turn {number}", "CHAT_MODEL", {"messages": given}, {"choices": [{"message": _message(message)}]}
            given = []
        else:
            call = waiting.pop(0) if waiting else None
            yield call.name if call else message.role, "TOOL", call.arguments if call else {}, message.content
            given.append(_message(message))


def labels(params: "Params", name: str, *, out: Path) -> None:
    """Write what people called the answers to exams of a task, as JSON Lines in the order of case ids.

    Of what one person says of a trace the last counts. Raises RegistryError if MLflow holds nothing of the task, and
    DataError for a label that the task does not have.
    """
    task, others = get_task(name), 0
    found: dict[tuple[str, ...], tuple[int, str]] = {}
    with connect() as client:
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise RegistryError(f"{place(client.tracking_uri)} holds nothing of {name}; run `clinrl register` first")
        for info in _traces(client, experiment.experiment_id):
            about = json.loads(info.trace_metadata.get(ANSWER, "{}"))
            gold = next((one.value for one in info.assessments if one.name == GOLD), "")
            for one in info.assessments:
                if not about or one.source.source_type != "HUMAN" or one.valid is False:
                    continue
                if one.name != LABEL:
                    others += 1
                    continue
                row = about | {"label": _label(task, gold, one.value, info.trace_id), "trace": info.trace_id,
                               "person": one.source.source_id}  # fmt: skip
                key = tuple(row[part] for part in ("case_id", "version", "mode", "trace", "person"))
                found[key] = max(found.get(key, (0, "")), (one.last_update_time_ms or 0, canonical_json(row)))
    write_text(out, "".join(f"{found[key][1]}\n" for key in sorted(found)))
    print(out)
    left = f"; {others} assessments by people are not called {LABEL} and were left out" if others else ""
    print(f"clinrl: {len(found)} labels{left}", file=sys.stderr)


def _label(task: Task, gold: Any, value: Any, trace: str) -> Any:
    """A label as the task writes it: MLflow's pages make text or a number of one. Raises DataError."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    known = {str(label): label for label in task.labels}
    label = text if task.episodes else known.get(text, Unreadable(reason="no label"))
    with suppress(ValueError):  # of a text that holds no decisions
        decided = [given for _, given in parts_of(task, gold, label)]
        if decided and all(given in task.labels for given in decided):
            return label
    hint = did_you_mean(value, list(known))
    raise DataError(f"the {LABEL} {format_value(text)} of the trace {trace} is none of {task.name}; {hint}")
