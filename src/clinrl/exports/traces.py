"""Log answers to an exam as traces of MLflow, where people filter, compare and label them; write the labels to a file.

A trace's id is a digest of adapter, exam and graded answer, so that nobody logs an answer twice. The time of an answer
was not kept: a trace has the time of its logging, and its spans begin a microsecond apart.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from clinrl.analysis.exam import EvalReport
from clinrl.analysis.run import Run
from clinrl.artifacts import canonical_json, digest, read_manifest, write_text
from clinrl.errors import DataError, RegistryError, did_you_mean, echo, format_value
from clinrl.evaluation.show import is_wrong
from clinrl.exports.inspect_log import examined, verdicts
from clinrl.registry.log_run import logged_models
from clinrl.registry.versions import find
from clinrl.reports.episode import Episode, decided_text, episode_of
from clinrl.tasks.base import EXACT, Task, get_task, parts_of
from clinrl.tracking.mlflow_store import KIND, connect, finished_run, place, run_key, writing
from clinrl.types import Graded, Message, Unreadable

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as Registered
    from mlflow.entities import Span, TraceInfo
    from mlflow.tracing.client import TracingClient

    from clinrl.config.params import Params

SAMPLE: Final = 200
"""Traces of a mode, unless all are logged: wrong answers, then right ones, each by case id, which is a digest."""
PAGE: Final = 100
"""Traces in one request to MLflow, or in one of its responses."""
PREVIEW: Final = 1000
"""Characters of a text in the list of traces: MLflow's columns hold no more, and PostgreSQL refuses a longer text."""
ANSWER: Final = "clinrl.answer"
"""Key of a trace's metadata that holds case, version and mode. Unlike tags, metadata cannot be changed."""
GOLD, LABEL = "gold", "label"
"""Names of the assessments that hold the exam's label and a person's label."""


class Answer(NamedTuple):
    """One answer of an exam; `counted` holds which of the task's compared shares count it."""

    episode: Episode
    line: Graded
    gold: Any
    counted: Mapping[str, bool]


def stage(params: "Params", name: str, *, every: bool = False) -> None:
    """Log the exam of a registered version or merge to MLflow, in every mode: a sample, or `every` answer.

    Raises ArtefactError and DataError as `examined` and `verdicts` do, and RegistryError if the adapter that took the
    exam is not registered, if its run or its logged model was deleted, or if MLflow fails; the same call then completes
    the logging.
    """
    exams = [examined(params, name, mode) for mode in params.modes]
    run, _, report = exams[0]
    entry = find(run.model.registered, name, digest=report.adapter_digest)
    if entry.digest != report.adapter_digest:
        raise RegistryError(f"{name} is not registered as it was examined; run `clinrl register {name}`")
    key = run_key(read_manifest(run.model.folder))
    chosen = [answer for exam in exams for answer in _answers(*exam)[: None if every else SAMPLE]]
    with connect() as client, writing(client):
        # The entry may name a run that was erased. A registration makes another run, but an entry cannot be changed.
        if (own := finished_run(client, run.model.task.name, key)) is None:
            raise RegistryError(f"MLflow has no finished run of {name}; run `clinrl register {name}`")
        logged = _log(client, own, run, report, chosen)
    echo(f"{name}: {logged} traces are new, {len(chosen) - logged} were there")


def _answers(run: Run, lines: Sequence[Graded], report: EvalReport) -> list[Answer]:
    """The answers of a mode: wrong ones, then right ones, each by case id."""
    shares = {metric: of for metric, of in verdicts(run, lines, report).items() if metric in run.task.compared}
    wrong = [is_wrong(run.model, case, line) for case, line in zip(run.cases, lines, strict=True)]
    return [
        Answer(
            episode=episode_of(run.model, run.cases[at], lines[at], number=at + 1, of=len(lines)),
            line=lines[at],
            gold=run.golds[at],
            counted={"correct" if metric == EXACT else metric: verdict for metric, of in shares.items()
                     if (verdict := of[at]) is not None},
        )
        for at in sorted(range(len(lines)), key=lambda at: (not wrong[at], lines[at].case_id))
    ]  # fmt: skip


def _log(client: "MlflowClient", own: "Registered", run: Run, report: EvalReport, chosen: Sequence[Answer]) -> int:
    from mlflow.tracing.client import TracingClient

    experiment = own.info.experiment_id
    if not (models := logged_models(client, experiment, report.adapter_digest)):
        raise RegistryError(f"MLflow has no model of {run.model.name} any more; run `clinrl register {run.model.name}`")
    model = models[0].model_id
    found = _traces(client, experiment, f"metadata.`mlflow.modelId` = '{model}'")
    held = {trace.trace_id: "mlflow.trace.spansLocation" in trace.tags for trace in found}
    exam = [report.adapter_digest, report.exam_digest]
    named = {f"tr-{digest([*exam, answer.line.model_dump(mode='json')])[:32]}": answer for answer in chosen}
    new = [(name, answer) for name, answer in named.items() if not held.get(name)]
    if not new:
        return 0
    tracing, now = TracingClient(client.tracking_uri), int(time.time() * 1000)
    data = _prepare(client, tracing, experiment, run, report)
    metadata = {"mlflow.modelId": model, "mlflow.sourceRun": own.info.run_id}
    for start in range(0, len(new), PAGE):
        some, spans = new[start : start + PAGE], list["Span"]()
        tracing.store.upsert_dataset_records(data, [
            {"inputs": _asked(answer), "expectations": {GOLD: answer.gold}, "tags": {"case": answer.line.case_id},
             "source": {"source_type": "TRACE", "source_data": {"trace_id": name}}} for name, answer in some
        ])  # fmt: skip
        for at, (name, answer) in enumerate(some, start=start):
            if name not in held:  # a trace that exists here has no spans: its logging was killed
                tracing.start_trace(_info(name, answer, run.task, experiment, now - at, metadata))
            spans += _spans(name, answer, now - at)  # MLflow shows the newest first
        tracing.log_spans(experiment, spans)
    return len(new)


def _traces(client: "MlflowClient", experiment: str, where: str | None = None) -> Iterator["TraceInfo"]:
    token, options = None, {"locations": [experiment], "filter_string": where, "include_spans": False}
    while page := client.search_traces(max_results=PAGE, page_token=token, **options):
        yield from (trace.info for trace in page)
        if not (token := page.token):
            return


def _prepare(client: "MlflowClient", tracing: "TracingClient", experiment: str, run: Run, report: EvalReport) -> str:
    """Set up an experiment for traces, and return the id of the exam's evaluation dataset, which is made if missing.

    MLflow then shows the pages about answers, begins charts with the primary metric, and asks people for a label of the
    task. Tags that somebody set stay, except the kind of experiment that trainings set.
    """
    from mlflow.genai.label_schemas import InputCategorical, InputText

    tags = {"Kind": "genai_development", ".primaryMetric.name": f"{next(iter(run.modes))}/reward",
            ".primaryMetric.greaterIsBetter": "True"}  # fmt: skip
    there = dict(client.get_experiment(experiment).tags.items() - KIND.items())  # a training's kind is replaced
    for key in [key for key in tags if f"mlflow.experiment{key}" not in there]:
        client.set_experiment_tag(experiment, f"mlflow.experiment{key}", tags[key])
    if LABEL not in {schema.name for schema in tracing.store.list_label_schemas(experiment)}:
        asked = InputText() if run.task.episodes else InputCategorical(options=[str(one) for one in run.task.labels])
        tracing.store.create_label_schema(experiment, name=LABEL, type="expectation", input=asked)
    name = f"{report.exam}-{report.exam_digest[:8]}"
    found = client.search_datasets(experiment_ids=[experiment], filter_string=f"name = '{name}'")
    made = found[0] if found else client.create_dataset(name, experiment, {"digest": report.exam_digest})
    return str(made.dataset_id)


def _asked(answer: Answer) -> dict[str, Any]:
    return {"messages": [_message(message) for message in answer.episode.request]}


def _message(message: Message) -> dict[str, Any]:
    """A turn in the form that MLflow's page shows as a conversation."""
    calls = [{"id": str(number), "type": "function",
              "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
             for number, call in enumerate(message.calls)]  # fmt: skip
    shown = {"role": message.role, "content": message.content, "reasoning_content": message.thinking}
    return {key: value for key, value in shown.items() if value is not None} | ({"tool_calls": calls} if calls else {})


def _info(name: str, answer: Answer, task: Task, experiment: str, at: int, metadata: Mapping[str, str]) -> "TraceInfo":
    """The entry of a trace, with its assessments: gold label, compared shares, reward and reward terms."""
    from mlflow.entities import AssessmentSource, Expectation, Feedback, TraceInfo, TraceLocation, TraceState

    episode, line = answer.episode, answer.line
    source = AssessmentSource(source_type="CODE", source_id=f"clinrl/{task.name}")
    wrong = "; ".join(f"{part.about}: {decided_text(part.decided)}, right: {part.right}"
                      for part in episode.parts if not part.is_right)  # fmt: skip
    terms = {f"terms/{term}": value for term, value in line.score.terms.items()}
    what = {"case_id": line.case_id, "version": episode.name, "mode": line.mode}
    return TraceInfo(
        trace_id=name,
        trace_location=TraceLocation.from_experiment_id(experiment),
        request_time=at,
        state=TraceState.OK,
        request_preview=episode.request[-1].content[:PREVIEW],
        response_preview=decided_text(line.answer)[:PREVIEW],
        trace_metadata={**metadata, ANSWER: canonical_json(what)},
        tags={**episode.traits, **what, "exam": episode.exam, "stop": episode.stop,
              "mlflow.traceName": f"{episode.name} {line.mode}", "graded": digest(line.model_dump(mode="json"))},
        assessments=[
            Expectation(name=GOLD, value=answer.gold, source=source),
            *(Feedback(name=score, value=value, source=source, rationale=wrong if score == "correct" else None)
              for score, value in {**answer.counted, "reward": line.score.total, **terms}.items()),
        ],
    )  # fmt: skip


def _spans(name: str, answer: Answer, at: int) -> Iterator["Span"]:
    """The spans of a trace: the whole answer, the prompt, the turns, the tool calls, the score."""
    from mlflow.entities import Span

    episode, score, asked = answer.episode, answer.line.score, _asked(answer)
    given = decided_text(answer.line.answer)
    steps = [
        ("answer", "AGENT" if len(episode.messages) > 1 else "CHAIN", asked, given),
        ("prompt", "TASK", {"case_id": episode.case_id}, asked),
        *_turns(episode.messages, asked["messages"]),
        ("score", "EVALUATOR", {"answer": given, GOLD: answer.gold}, {"reward": score.total, **score.terms}),
    ]
    for number, (title, kind, inputs, outputs) in enumerate(steps):
        attributes = {"traceRequestId": name, "spanType": kind, "spanInputs": inputs, "spanOutputs": outputs}
        yield Span.from_dict({
            "trace_id": name, "span_id": f"{number + 1:016x}", "parent_span_id": f"{1:016x}" if number else None,
            "name": title, "status": {"code": "OK"},
            "start_time_unix_nano": at * 1_000_000 + number * 1_000,
            "end_time_unix_nano": at * 1_000_000 + (number + 1 if number else len(steps)) * 1_000,
            "attributes": {f"mlflow.{key}": json.dumps(value) for key, value in attributes.items()},
        })  # fmt: skip


def _turns(messages: Sequence[Message], asked: Sequence[Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """Name, kind, input and output of each turn and tool call. A turn's input is the messages since the turn before."""
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
    """Write the labels that people gave to answers of a task, as JSON Lines in the order of case ids.

    If a person labelled a trace several times, the last label counts. Raises RegistryError if MLflow holds nothing of
    the task, and DataError for a label that the task does not have.
    """
    task, others = get_task(name), 0
    found: dict[tuple[str, ...], tuple[int, str]] = {}
    with connect() as client:
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise RegistryError(f"{place(client.tracking_uri)} holds nothing of {name}; run `clinrl register` first")
        for trace in _traces(client, experiment.experiment_id, f"metadata.`{ANSWER}` IS NOT NULL"):
            about = json.loads(trace.trace_metadata[ANSWER])
            gold = next((one.value for one in trace.assessments if one.name == GOLD), "")
            for one in trace.assessments:
                if one.source.source_type != "HUMAN" or one.valid is False:
                    continue
                if one.name != LABEL:
                    others += 1
                    continue
                label, person = _label(task, gold, one.value, trace.trace_id), str(one.source.source_id)
                row = canonical_json({**about, "label": label, "person": person, "trace": trace.trace_id})
                key = (about["case_id"], about["version"], about["mode"], trace.trace_id, person)
                found[key] = max(found.get(key, (0, "")), (one.last_update_time_ms or 0, row))
    write_text(out, "".join(f"{found[key][1]}\n" for key in sorted(found)))
    print(out)
    left = f"; {others} assessments by people are not called {LABEL} and were left out" if others else ""
    echo(f"{len(found)} labels{left}")


def _label(task: Task, gold: Any, value: Any, trace: str) -> Any:
    """A label in the task's own type; MLflow's pages store text or a number. Raises DataError for an unknown label."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    known = {str(label): label for label in task.labels}
    label = text if task.episodes else known.get(text, Unreadable(reason="no label"))
    with suppress(ValueError):  # raised for a text that holds no decisions
        decided = [given for _, given in parts_of(task, gold, label).values()]
        if decided and all(given in task.labels for given in decided):
            return label
    hint = did_you_mean(value, list(known))
    raise DataError(f"the {LABEL} {format_value(text)} of the trace {trace} is none of {task.name}; {hint}")
