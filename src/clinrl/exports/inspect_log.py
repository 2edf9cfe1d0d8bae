"""An exam as a log of Inspect: one sample a case, with request, turns, tool calls, and the score term by term.

The log holds no real time and no random id, so that equal answers give equal bytes: every time is the start of 1970,
and ids are digests. It holds the exam's cases with their gold labels, so imported cases are refused.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from clinrl import __version__, paths
from clinrl.analysis.exam import EvalReport
from clinrl.analysis.run import Run
from clinrl.artifacts import digest, exclusive, read_manifest
from clinrl.config.params import Params
from clinrl.errors import ArtefactError, DataError, Refused
from clinrl.evaluation.answers import check_here, load_graded, load_report, may_repeat_records, mode_of, open_run
from clinrl.intervals import DIGITS
from clinrl.reports.episode import answer_text, episode_of
from clinrl.tasks.base import EXACT
from clinrl.tasks.importing import is_imported
from clinrl.types import Case, Graded, Message, Stop, Unreadable

REQUIREMENT: Final = "inspect-ai==0.3.285"
"""The version with which these logs were tested."""
VENV: Final = Path(".venv-inspect")
"""A separate environment, since Inspect needs an older fsspec than constraints.txt pins."""
MOMENT: Final = "1970-01-01T00:00:00+00:00"
REWARD: Final = "reward"
SHARE: Final = "share"
ENDS: Final[Mapping[Stop, str]] = {
    "answered": "stop", "max_tokens": "max_tokens", "max_turns": "tool_calls", "tool_error": "unknown",
}  # fmt: skip
"""How a transcript ended, to Inspect's name for it."""


def stage(params: Params, name: str, *, mode: str | None = None, out: Path | None = None) -> None:
    """Write the exam of a version, a merge or a base, in one mode, as a log; print its path.

    Raises Refused without Inspect or if Inspect fails, ParamsError for an unknown mode, DataError as `examined`
    does, and ArtefactError if the exam was not taken, or if the report is about other answers.
    """
    mode, python = mode_of(params, mode), _python()
    run, lines, report = examined(params, name, mode)
    target = (out or paths.EXPORTS) / f"{name}_{mode}.eval"
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = Path(__file__).with_name("inspect_writer.py")
    text = json.dumps(log_of(run, mode, lines, report))
    with exclusive(target):
        done = subprocess.run([python, "-I", writer, target], input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise Refused(f"Inspect did not write {target}, and says: {last[:300]}; this was tested with {REQUIREMENT}")
    print(target)


def examined(params: Params, name: str, mode: str) -> tuple[Run, list[Graded], EvalReport]:
    """An exam that may be exported: the run, its graded answers in the order of the cases, and their report.

    Raises DataError for imported cases and for a model that was trained on some, and ArtefactError if the exam was not
    taken, or if another one was.
    """
    check_here(model := params.model(name))
    run = open_run(params, model)
    if may_repeat_records(params, model):
        raise DataError(f"{name} learned from somebody's records and may repeat them; nothing was written")
    if any(map(is_imported, run.cases)):
        raise DataError(f"{run.model.exam} holds somebody's records, whose text must not leave; nothing was written")
    _, lines = load_graded(run, mode, name)
    return run, lines, load_report(name, mode)


def _python() -> str:
    own = VENV / "bin/python"
    if find_spec("inspect_ai") is not None:
        return sys.executable
    if own.exists():
        return str(own.absolute())
    install = f"python -m venv {VENV} && {VENV}/bin/pip install {REQUIREMENT}"
    raise Refused(f"Inspect is not installed; run `{install}`, which leaves .venv as it is")


def log_of(run: Run, mode: str, lines: Sequence[Graded], report: EvalReport) -> dict[str, Any]:
    """The log, as JSON of Inspect's own classes. Its metrics are those of the report, to the last digit.

    Raises ArtefactError as `verdicts` does.
    """
    task, name, shares = run.task, run.model.name, verdicts(run, lines, report)
    model, ids = f"clinrl/{name}@{report.adapter_digest}", digest([name, mode, report.model_dump(mode="json")])
    decoding = {"temperature": report.mode_spec.get("temperature"), "top_p": report.mode_spec.get("top_p"),
                "max_tokens": report.mode_spec["max_new_tokens"]}  # fmt: skip
    decoding = {key: value for key, value in decoding.items() if value is not None}
    headline = {"scorer": EXACT, "metric": SHARE}
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": ids[:22], "run_id": ids[22:44], "task_id": ids[42:64], "created": MOMENT,
            "task": f"clinrl/{task.name}", "task_version": task.version, "task_display_name": f"{task.name}, {mode}",
            "dataset": {
                "name": report.exam, "samples": report.n, "sample_ids": [case.id for case in run.cases],
                "shuffled": False,
            },
            "model": model, "model_generate_config": decoding, "config": {"epochs": 1},
            "packages": {"clinrl": __version__}, "headline_metric": headline,
            "scorers": [{"name": score} for score in (*shares, REWARD)],
            "metadata": {
                "note": report.note, "mode": mode, "mode_spec": report.mode_spec, "exam_digest": report.exam_digest,
                "adapter_digest": report.adapter_digest, "sampler": report.sampler,
            },
        },
        "plan": {"name": "plan", "steps": [{"solver": "generate", "params": dict(report.mode_spec)}],
                 "config": decoding},
        "results": {
            "total_samples": report.n, "completed_samples": report.n, "headline": headline,
            "scores": [*_scores(shares, report)],
        },
        "stats": {"started_at": MOMENT, "completed_at": MOMENT},
        "samples": [
            _sample(run, case, line, {score: of[place] for score, of in shares.items()}, place, model)
            for place, (case, line) in enumerate(zip(run.cases, lines, strict=True))
        ],
    }  # fmt: skip


def verdicts(run: Run, lines: Sequence[Graded], report: EvalReport) -> dict[str, list[bool | None]]:
    """For each share of the task and each case, whether the share counts it; None for a case outside its denominator.

    Raises ArtefactError if the answers do not give the shares of the report, or are by another adapter.
    """
    name = run.model.name
    shares = {
        metric: [share.of(gold, line.answer) for gold, line in zip(run.golds, lines, strict=True)]
        for metric, share in run.task.shares.items()
    }
    written = f"{paths.report(name) / report.mode}.json"
    for metric, given in shares.items():
        inside = [verdict for verdict in given if verdict is not None]
        found, stated = round(sum(inside) / len(inside), DIGITS) if inside else None, report.metrics.get(metric)
        if found != (stated and stated.value):
            raise ArtefactError(f"the answers of {name} give another {metric} than {written}; examine {name} anew")
    if read_manifest(paths.graded(name)).inputs.get("adapter") != report.adapter_digest:
        raise ArtefactError(f"the answers of {name} are of another adapter than {written}; examine {name} anew")
    return shares


def _scores(shares: Mapping[str, Sequence[bool | None]], report: EvalReport) -> Iterator[dict[str, Any]]:
    """Every number of the report: each share as its own score, the reward with its terms, other metrics together."""
    metrics = {
        name: {"name": SHARE if name in shares else name, "value": one.value,
               "metadata": {"low": one.low, "high": one.high, "n": one.n}}
        for name, one in report.metrics.items()
    }  # fmt: skip
    for name, verdicts in shares.items():
        inside = sum(verdict is not None for verdict in verdicts)
        counts = {"scored_samples": inside, "unscored_samples": len(verdicts) - inside}
        yield {"name": name, "scorer": name, **counts, "metrics": {SHARE: metrics[name]} if name in metrics else {}}
    terms = {"total": report.reward, **report.terms}
    yield {"name": REWARD, "scorer": REWARD, "scored_samples": report.n, "unscored_samples": 0,
           "metrics": {term: {"name": term, "value": value} for term, value in terms.items()}}  # fmt: skip
    others = {name: metric for name, metric in metrics.items() if name not in shares}
    yield {"name": "report", "scorer": "report", "metrics": others}


def _sample(
    run: Run, case: Case, line: Graded, verdicts: Mapping[str, bool | None], place: int, model: str
) -> dict[str, Any]:
    episode = episode_of(run.model, case, line, number=place + 1, of=len(run.cases))
    asked = [_message(one, f"{case.id}-{i}", [], model) for i, one in enumerate(episode.request)]
    turns = _turns(episode.messages, case.id, len(asked), model)
    last = next((turn for turn in reversed(turns) if turn["role"] == "assistant"), None)
    silent = line.answer.reason if isinstance(line.answer, Unreadable) else None
    given = {"answer": None if silent else str(line.answer), "explanation": silent}
    wrong = (part for part in episode.parts if not part.is_right)
    decided = [f"{part.about}: {answer_text(part.decided)}, right: {part.right}" for part in wrong]
    return {
        "id": case.id, "epoch": 1, "uuid": digest([model, line.mode, case.id])[:22],
        "input": asked, "target": str(run.task.label(case)), "messages": [*asked, *turns],
        "output": {"model": model, "choices": [{"message": last, "stop_reason": ENDS[line.transcript.stop]}]}
        if last else {"model": model},
        "scores": {
            **{name: {"value": float("nan") if verdict is None else float(verdict), **given}
               for name, verdict in verdicts.items()},
            REWARD: {"value": {"total": line.score.total, **line.score.terms}, "answer": given["answer"],
                     "explanation": "\n".join(decided) or "right"},
        },
        "metadata": {**episode.traits, "stop": line.transcript.stop},
        "started_at": MOMENT, "completed_at": MOMENT,
    }  # fmt: skip


def _turns(messages: Sequence[Message], case: str, start: int, model: str) -> list[dict[str, Any]]:
    """The turns after the request. The results of calls follow their turn, in the order of its calls."""
    turns: list[dict[str, Any]] = []
    open_: list[dict[str, Any]] = []
    for number, message in enumerate(messages, start=start):
        turn = _message(message, f"{case}-{number}", open_, model)
        open_ = list(turn.get("tool_calls", ())) if message.role == "assistant" else open_[1:]
        turns.append(turn)
    return turns


def _message(message: Message, name: str, calls: Sequence[Mapping[str, Any]], model: str) -> dict[str, Any]:
    """A turn in Inspect's form. The result of a call names the first of `calls`, which have no result yet."""
    turn: dict[str, Any] = {"id": name, "role": message.role, "content": message.content}
    if message.role == "tool" and calls:
        turn |= {"tool_call_id": calls[0]["id"], "function": calls[0]["function"]}
    if message.role == "assistant":
        turn |= {"source": "generate", "model": model}
        if message.thinking is not None:
            text = [{"type": "text", "text": message.content}]
            turn["content"] = [{"type": "reasoning", "reasoning": message.thinking}, *text]
        if message.calls:
            turn["tool_calls"] = [
                {"id": f"{name}-{i}", "function": call.name, "arguments": call.arguments, "type": "function"}
                for i, call in enumerate(message.calls)
            ]
    return turn
