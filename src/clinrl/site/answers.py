"""Single answers to an exam as data for the pages: a bounded number, and of imported cases only counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from clinrl import paths
from clinrl.analysis.baselines import text
from clinrl.analysis.run import Run
from clinrl.config.params import Params
from clinrl.evaluation.answers import load_graded, may_repeat_records, open_run, run_of
from clinrl.evaluation.record import Record
from clinrl.evaluation.show import is_wrong
from clinrl.pipeline.plan import children
from clinrl.reports.episode import ENDS, decided_text, episode_of, steps
from clinrl.site.versions import arranged
from clinrl.tasks.base import GIVEN
from clinrl.tasks.importing import is_imported
from clinrl.types import Case, Graded

SEED = 1
"""Seed of the order in which right answers are sampled: equal for all versions, so that two can be compared."""
RIGHT, WRONG, SAFETY = "r", "w", "s"
"""Verdicts on an answer: right; wrong; an error by the task's safety metric."""


@dataclass(frozen=True)
class Counts:
    """The counts of answers in one mode."""

    n: int
    right: int
    safety: int
    shown: int = 0
    """Right answers that are on the page; all wrong ones are."""

    @property
    def wrong(self) -> int:
        """All answers that are not the gold label, safety errors among them."""
        return self.n - self.right


@dataclass(frozen=True)
class Shown:
    """The answers of one model, as its page shows them."""

    name: str
    exam: str
    """The exam's name, with the input variant if there is one: models that see another variant have other requests."""
    imported: bool
    counts: dict[str, Counts]
    data: dict[str, Any] = field(default_factory=dict)
    """The answers for the page's script; empty if the cases are imported, or if the model learned from records."""
    cases: dict[str, Any] = field(default_factory=dict)
    """The exam's cases for the same script, with the requests of the shown answers."""


def gather(params: Params, name: str, most: int, opened: dict[str, Run]) -> Shown | None:
    """The answers that a model's page shows: of each mode all wrong ones, and at most `most` right ones.

    Right answers are chosen first among cases in which the parent or a child was wrong, then in a seeded order of the
    exam. `opened` caches exams that were read. Returns None if the answers or the exam are not here. Raises
    ArtefactError if one of them was altered.
    """
    model = params.model(name)
    if not paths.graded(name).is_dir() or not paths.cases(model.exam).is_dir():
        return None
    if model.exam not in opened:
        opened[model.exam] = open_run(params, model)
    run = run_of(params, model, opened[model.exam].cases, opened[model.exam].exam_digest)
    exam = model.exam if model.variant == GIVEN else f"{model.exam}.{model.variant}"
    may_repeat = may_repeat_records(params, model)
    imported = may_repeat or any(map(is_imported, run.cases))
    order = sorted(range(len(run.cases)), key=lambda at: sha256(f"{SEED}/{run.cases[at].id}".encode()).digest())
    counts: dict[str, Counts] = {}
    modes: dict[str, Any] = {}
    requests: dict[str, str] = {}
    for mode in params.modes:
        _, lines = load_graded(run, mode, name)
        verdicts = [_verdict(run, case, line) for case, line in zip(run.cases, lines, strict=True)]
        if imported:
            counts[mode] = Counts(len(lines), verdicts.count(RIGHT), verdicts.count(SAFETY))
            continue
        flipped = _wrong_nearby(params, run, mode)
        right = sorted((at for at in order if verdicts[at] == RIGHT), key=lambda at: at not in flipped)
        wrong = [at for at, verdict in enumerate(verdicts) if verdict != RIGHT]
        chosen = sorted([*wrong, *right[:most]])
        counts[mode] = Counts(len(lines), len(right), verdicts.count(SAFETY), len(right[:most]))
        requests |= {str(at): text(run.task, run.model.sees(run.cases[at])) for at in chosen}
        shown = {str(at): _answer(run, at, lines[at]) for at in chosen}
        modes[mode] = {"verdicts": "".join(verdicts), "shown": shown}
    if imported:
        return Shown(name, exam, True, counts)
    task = model.task
    data = {"name": name, "exam": exam, "safety": task.noun_of(task.safety.metric), "modes": modes}
    slices = task.reporting.slices
    cases = {
        "slices": list(slices),
        "values": [arranged(task, {of(case) for case in run.cases}) for of in slices.values()],
        "cases": [[case.id, [of(case) for of in slices.values()]] for case in run.cases],
        "requests": requests,
    }
    return Shown(name, exam, False, counts, data, cases)


def _verdict(run: Run, case: Case, line: Graded) -> str:
    share = run.task.shares[run.task.safety.metric]
    if share.of(run.task.label(case), line.answer) is (share.worse == "higher"):
        return SAFETY
    return WRONG if is_wrong(run.model, case, line) else RIGHT


def _wrong_nearby(params: Params, run: Run, mode: str) -> set[int]:
    """Places of the cases in which the parent, or a child with answers here, was wrong, from the exam records."""
    name = run.model.name
    near = [run.model.parent, *(other for other in children(params, name) if paths.graded(other).is_dir())]
    found: set[int] = set()
    for record in (paths.exam_record(run.task.name, other) for other in near if other):
        if record.is_file():
            kept = Record.model_validate_json(record.read_bytes())
            if kept.exam_digest == run.exam_digest and mode in kept.given:
                pairs = zip(run.golds, kept.given[mode].answers, strict=True)
                found |= {at for at, (gold, answer) in enumerate(pairs) if answer != gold}
    return found


def _answer(run: Run, at: int, line: Graded) -> dict[str, Any]:
    """The parts of one answer that `clinrl show` prints, for the page's script."""
    episode = episode_of(run.model, run.cases[at], line, number=at + 1, of=len(run.cases))
    assert not episode.withheld
    return {
        "steps": list(steps(episode.messages)),
        "end": ENDS[episode.stop],
        "parts": [[part.about, str(part.right), decided_text(part.decided)] for part in episode.parts],
        "total": round(episode.score.total, 6),
        "terms": [[name, round(value, 6)] for name, value in episode.score.terms.items() if value],
    }


def merged(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the data of one exam from all models that took it: all requests, in the order of the exam."""
    requests = {at: text for one in cases for at, text in one["requests"].items()}
    return {**cases[0], "requests": dict(sorted(requests.items(), key=lambda item: int(item[0])))}
