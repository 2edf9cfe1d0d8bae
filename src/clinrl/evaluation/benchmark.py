"""Evaluation beyond the exam, for tasks that are played in an environment and that somebody else evaluated before.

First their protocol: an episode for each of a few seeds and levels, sampled, scored as they scored it and as it is
scored here. Then the exam, whose many episodes can show what so few cannot: sampled at the same temperature, beside the
answers that the exam kept. Policies that do not read and the oracle play all of it too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from clinrl import paths
from clinrl.analysis import baselines
from clinrl.analysis.benchmark import (
    ALL,
    EXAMINED,
    ORACLE,
    POOL,
    SAMPLED,
    SCORES,
    Above,
    Cell,
    Level,
    Played,
    ProtocolReport,
    Sat,
    published_of,
    verdicts,
)
from clinrl.analysis.exam import estimates, measured
from clinrl.artifacts import exclusive, identity, read_manifest, verified, write_json, write_text
from clinrl.config.model import Model
from clinrl.data.dataset import progress, read_cases
from clinrl.data.reward_audit import proven
from clinrl.errors import ArtefactError, DataError, ParamsError, did_you_mean
from clinrl.evaluation.answers import SEED, answer, load_sitting, read_graded, sitting_of
from clinrl.evaluation.evaluate import check_apart, open_sampler
from clinrl.intervals import DIGITS, mean, rate
from clinrl.models.rollout import run
from clinrl.reports.render import load, render
from clinrl.tasks.base import Task, parts_of
from clinrl.tasks.parts import NO_RESPONSES
from clinrl.types import Case, Transcript

if TYPE_CHECKING:
    from clinrl.config.params import Params

MOST_DRAWN: Final = 1000
"""Cases that are drawn of a seed before a level is given up."""


def stage(params: "Params", name: str) -> None:
    """Let a version or a base play the published protocol and its exam at a temperature; write report and page.

    Raises ParamsError if params.yaml has no protocol of `name`, or one of more episodes than the exam has,
    ArtefactError if an input is missing or altered, if the exam was answered by another adapter, or if the report that
    it is compared with is missing or of other episodes, DataError if a seed draws no case of a level or a prompt leaves
    no room for the budget, and Busy if another command writes the same report.
    """
    protocols = params.protocols
    if name not in protocols.all:
        raise ParamsError(f"params.yaml has no protocol of {name!r}; {did_you_mean(name, protocols.all)}")
    spec, who = protocols.all[name], params.model(name)
    published = published_of(who.task)
    target = paths.protocol_report(name)
    with exclusive(target):
        exam_digest = proven(who.exam, who.task)
        exam = list(read_cases(paths.cases(who.exam), who.task))
        check_apart(params, name, who, exam)
        adapter = identity(verified(who.folder))
        blank = {mode: sitting_of(who, mode, params, exam_digest, exam) for mode in params.modes}
        drawn = draw(who.task, spec.seeds, spec.levels)
        head = ProtocolReport(
            name=name, task=who.task.name, task_version=who.task.version, adapter_digest=adapter,
            exam=who.exam, exam_digest=exam_digest,
            against=protocols.versions[name].against if name in protocols.versions else None,
            settings=spec.model_dump(mode="json", include={"seeds", "levels", "temperature", "episodes"}),
            modes={mode: dict(sitting.mode_spec) for mode, sitting in blank.items()},
            cells=tuple(Cell(seed=seed, level=level, case_id=case.id) for (seed, level), case in drawn.items()),
            played=(), sat=(), above=(), printed={row: dict(found) for row, found in published.printed.items()},
        )  # fmt: skip
        # Before the expensive part: what is not there, or of other episodes, is found out now.
        before = _before(head)
        places = chosen(who.task, exam, spec.levels, spec.episodes, f"the exam {who.exam}")
        kept = {mode: _kept(who, mode, adapter, blank[mode], exam, places) for mode in params.modes}
        played, sampled = _sample(params, who, spec.temperature, drawn, [exam[place] for place in places])
        report = reported(
            head, who, before, list(drawn.values()), played, [exam[place] for place in places],
            {(mode, SAMPLED): said for mode, said in sampled.items()}
            | {(mode, EXAMINED): said for mode, said in kept.items()},
        )  # fmt: skip
        write_json(target, report.model_dump(mode="json"))
        write_pages(target, who.task, params.modes)


def write_pages(target: Path, task: Task, modes: Iterable[str]) -> None:
    """Write the page of a report beside it."""
    report = ProtocolReport.model_validate(load(target, task, modes))
    text = render("benchmark", report=report, scores=SCORES, verdicts=verdicts(report))
    write_text(target.with_suffix(".md"), text)


def draw(task: Task, seeds: Sequence[int], levels: Sequence[str]) -> dict[tuple[int, str], Case]:
    """The episode of each cell: of the cases that its seed draws from the published mix, the first of its level.

    The mix draws levels by itself. Cases are of the exam's pool, whose templates nobody trains on. Raises DataError if
    a seed draws no case of a level.
    """
    published = published_of(task)
    found: dict[tuple[int, str], Case] = {}
    for seed in seeds:
        firsts: dict[str, Case] = {}
        for case in task.cases(MOST_DRAWN, seed, pool=POOL, mix=published.mix):
            firsts.setdefault(task.reporting.slices[published.by](case), case)
            if set(levels) <= set(firsts):
                break
        for level in levels:
            if level not in firsts:
                raise DataError(f"seed {seed} draws no {level} case of {task.name} among its first {MOST_DRAWN:,}")
            found[seed, level] = firsts[level]
    return found


def chosen(task: Task, exam: Sequence[Case], levels: Sequence[str], episodes: int, called: str) -> list[int]:
    """The places of the first so many cases of each level, in the order of the exam.

    Raises ParamsError if it has fewer.
    """
    of = task.reporting.slices[published_of(task).by]
    by_level: dict[str, list[int]] = {level: [] for level in levels}
    for place, case in enumerate(exam):
        if (level := of(case)) in by_level and len(by_level[level]) < episodes:
            by_level[level].append(place)
    for level, places in by_level.items():
        if len(places) < episodes:
            raise ParamsError(
                f"{called} has {len(places)} cases of level {level}, and the protocol asks for {episodes} a level; "
                "lower its episodes or enlarge the exam"
            )
    return sorted(place for places in by_level.values() for place in places)


def _kept(
    who: Model, mode: str, adapter: str, like: Any, exam: Sequence[Case], places: Sequence[int]
) -> list[Transcript]:
    """The transcripts of the exam in a mode, of the chosen cases."""
    folder = paths.graded(who.name)
    load_sitting(who.name, like, exam)  # refuses answers to another exam
    if read_manifest(folder).inputs["adapter"] != adapter:
        raise ArtefactError(
            f"{folder} was answered by another adapter than {who.folder} now holds; examine {who.name} again"
        )
    lines = read_graded(folder / f"{mode}.jsonl")
    return [lines[place].transcript for place in places]


def _before(head: ProtocolReport) -> ProtocolReport | None:
    """The report of whoever a version is compared with. Raises ArtefactError if it is missing or of other episodes."""
    if head.against is None:
        return None
    path = paths.protocol_report(head.against)
    advice = f"run `clinrl protocol {head.against}`"
    try:
        before = ProtocolReport.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ArtefactError(f"{path} does not exist, and {head.name} is compared with it; {advice}") from None
    for what in ("task_version", "exam_digest", "settings", "modes", "cells"):
        if getattr(before, what) != getattr(head, what):
            raise ArtefactError(
                f"{path} has other {what.replace('_', ' ')} than {head.name} would have; {advice} again"
            )
    return before


def _sample(
    params: "Params", who: Model, temperature: float, drawn: Mapping[tuple[int, str], Case], exam: Sequence[Case]
) -> tuple[dict[str, list[Transcript]], dict[str, list[Transcript]]]:
    """The episodes of the cells and the exam, by mode, sampled with the model loaded once. A cell has its own seed."""
    sampler = open_sampler(params, who)
    modes = {name: mode.model_copy(update={"temperature": temperature}) for name, mode in params.modes.items()}
    played, sampled = {}, {}
    for name, mode in modes.items():
        budget = params.budget(name, who.task.name)
        with progress(f"{who.name} {name}, sampled", len(drawn) + len(exam)) as advance:
            played[name] = [
                run(sampler, who.task, [who.sees(case)], mode, budget, seed, progress=advance)[0]
                for (seed, _), case in drawn.items()
            ]
            shown = [who.sees(case) for case in exam]
            sampled[name] = run(sampler, who.task, shown, mode, budget, SEED, progress=advance)
    return played, sampled


def reported(
    head: ProtocolReport,
    who: Model,
    before: ProtocolReport | None,
    cells: Sequence[Case],
    played: Mapping[str, Sequence[Transcript]],
    exam: Sequence[Case],
    sat: Mapping[tuple[str, str], Sequence[Transcript]],
) -> ProtocolReport:
    """The report on transcripts: of the cells by mode, of the exam by mode and decoding. Loads no model.

    Where there is an earlier report on the same episodes, the rows of policies and the oracle are taken from it.
    """
    task = who.task
    mine = [_played(task, head, who.name, mode, cells, said) for mode, said in played.items()]
    mine_sat, others, others_sat = [], [], []
    rivals = [] if before else list(idle(task, exam))
    with progress(f"{head.name}, intervals", len(sat) + len(rivals)) as advance:
        for (mode, decoding), said in sat.items():
            mine_sat.append(_sat(task, head, head.name, mode, decoding, exam, said))
            advance()
        for row, said in rivals:
            others_sat.append(_sat(task, head, row, "", "", exam, said))
            advance()
    if before:  # the same episodes, so nobody plays them again
        others = [row for row in before.played if not row.mode or row.who == before.name]
        others_sat = [row for row in before.sat if not row.mode or row.who == before.name]
    else:
        others = [_played(task, head, row, "", cells, said) for row, said in idle(task, cells)]
    return head.model_copy(
        update={
            "played": (*mine, *others),
            "sat": (*mine_sat, *others_sat),
            "above": tuple(_above(mine_sat, [row for row in others_sat if row.who != ORACLE])),
        }
    )


def idle(task: Task, cases: Sequence[Case]) -> Iterator[tuple[str, list[Transcript]]]:
    """What every policy of the task does with the cases, and last the oracle: the task's own best answer."""
    for name, policy in task.policies().items():
        yield name, [policy(case, Random(f"{baselines.SEED}/{name}/{case.id}")) for case in cases]
    yield ORACLE, [task.gold(case, thinking=False) for case in cases]


def _played(
    task: Task, head: ProtocolReport, who: str, mode: str, cases: Sequence[Case], said: Sequence[Transcript]
) -> Played:
    published = published_of(task)
    pairs = list(zip(cases, said, strict=True))
    found, means = {}, {}
    for name, reward in (("theirs", published.theirs), ("ours", published.ours)):
        totals = tuple(round(task.score(case, one, reward).total, DIGITS) + 0.0 for case, one in pairs)
        by_level = {
            level: [total for total, cell in zip(totals, head.cells, strict=True) if cell.level == level]
            for level in head.settings["levels"]
        }
        found[name] = totals
        means[name] = {level: mean(some) for level, some in (by_level | {ALL: list(totals)}).items()}
    return Played(who=who, mode=mode, scores=found, means=means)


def _sat(
    task: Task,
    head: ProtocolReport,
    who: str,
    mode: str,
    decoding: str,
    exam: Sequence[Case],
    said: Sequence[Transcript],
) -> Sat:
    of = task.reporting.slices[published_of(task).by]
    pairs = list(zip(exam, said, strict=True))
    levels = {
        level: _level(task, [(case, one) for case, one in pairs if of(case) == level])
        for level in head.settings["levels"]
    }
    return Sat(who=who, mode=mode, decoding=decoding, levels=levels)


def _level(task: Task, pairs: Sequence[tuple[Case, Transcript]]) -> Level:
    published = published_of(task)
    cases, said = [case for case, _ in pairs], [one for _, one in pairs]
    golds, answers = [task.label(case) for case in cases], [answer(task, one) for one in said]
    verdicts: dict[Any, list[tuple[bool, str]]] = {label: [] for label in task.labels}
    for case, gold, given in zip(cases, golds, answers, strict=True):
        for right, decided in parts_of(task, gold, given):
            verdicts[right].append((decided == right, case.id))
    statistic = estimates({published.statistic: task.metrics[published.statistic]}, golds, answers)
    quality = measured({published.quality: task.reporting.qualities[published.quality]}, cases, said, NO_RESPONSES)
    return Level(
        quality=quality[published.quality],
        statistic=statistic.get(published.statistic),
        recall={
            str(label): rate([hit for hit, _ in some], [case for _, case in some])
            for label, some in verdicts.items()
            if some
        },
    )


def _above(mine: Sequence[Sat], others: Sequence[Sat]) -> Iterator[Above]:
    """Every row of mine against everybody else; against another model's in the same mode and decoding."""
    for row in mine:
        for other in others:
            if other.mode in ("", row.mode) and other.decoding in ("", row.decoding):
                yield Above(
                    other=other.who,
                    mode=row.mode,
                    decoding=row.decoding,
                    levels={
                        level: found.quality.low > other.levels[level].quality.high
                        for level, found in row.levels.items()
                    },
                )
