"""Evaluation beyond the exam, for tasks that are played in an environment and that somebody else evaluated before.

First their protocol: an episode for each of a few seeds and levels, sampled, scored as they scored it and as it is
scored here. Then the exam, whose many episodes can show what so few cannot: sampled at the same temperature, beside the
answers that the exam kept. Policies that do not read and the oracle play all of it too.
"""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field

from clinrl import baselines, paths
from clinrl.artefacts import exclusive, identity, read_manifest, verified, write_json, write_text
from clinrl.dataset import progress, read_cases
from clinrl.errors import ArtefactError, DataError, ParamsError
from clinrl.evaluate import (
    SEED,
    Examinee,
    answer,
    check_apart,
    examinee,
    load_sitting,
    open_sampler,
    read_graded,
    sitting_of,
)
from clinrl.probe import proven
from clinrl.prose import table
from clinrl.records import Case, Estimate, Strict, Transcript
from clinrl.report import NOTE, estimates, measured
from clinrl.rollout import run
from clinrl.section import did_you_mean
from clinrl.statistics import DIGITS, mean, rate
from clinrl.task import NOTHING_HEARD, PublishedProtocol, Task, get_task

if TYPE_CHECKING:
    from clinrl.params import Params

POOL: Final = "exam"
ORACLE: Final = "oracle"
SAMPLED: Final = "sampled"
EXAMINED: Final = "as examined"
"""The answers that the exam kept, at the temperature of the mode: greedy where that is 0."""
MOST_DRAWN: Final = 1000
"""Cases that are drawn of a seed before a level is given up."""
ALL: Final = "all"
SCORES: Final[Mapping[str, str]] = MappingProxyType({"theirs": "published score", "ours": "corrected score"})


class Cell(Strict):
    """One episode of the published protocol: the first of its level that its seed draws."""

    seed: int
    level: str
    case_id: str


class Played(Strict):
    """Somebody's scores in the published protocol."""

    who: str
    mode: str
    """Empty for a policy and the oracle."""
    scores: dict[str, tuple[float, ...]]
    """By `SCORES`, in the order of the cells."""
    means: dict[str, dict[str, Estimate]]
    """The same, then by level and for all; the interval is a bootstrap over cells."""


class Level(Strict):
    """Somebody's exam at one level."""

    quality: Estimate
    """What the exam is judged by, the mean over episodes; the interval is a bootstrap over them."""
    statistic: Estimate | None
    """What stands beside it; None where it is undefined."""
    recall: dict[str, Estimate]
    """For each label that is right somewhere, the share of its decisions that are it; n counts decisions, and the
    interval is a bootstrap over episodes."""


class Sat(Strict):
    """Somebody's exam, level by level."""

    who: str
    mode: str
    decoding: str
    """`SAMPLED` or `EXAMINED`; empty, as the mode, for a policy and the oracle."""
    levels: dict[str, Level]


class Above(Strict):
    """Whether the interval of `ProtocolReport.name` lies wholly above another's at each level."""

    other: str
    mode: str
    decoding: str
    levels: dict[str, bool]


class ProtocolReport(Strict):
    """A version or a base in the published protocol and on its exam. Holds no times: equal answers, equal bytes."""

    name: str
    task: str
    task_version: int
    adapter_digest: str
    exam: str
    exam_digest: str
    against: str | None
    """An ancestor or the base, whose rows are those of its own report."""
    settings: dict[str, Any]
    """Seeds, levels, temperature and episodes."""
    modes: dict[str, dict[str, Any]]
    """Decoding of the exam in each mode; of what is sampled all but the temperature."""
    cells: tuple[Cell, ...] = Field(min_length=1)
    played: tuple[Played, ...]
    """The version in each mode, what it is against, policies, the oracle."""
    sat: tuple[Sat, ...]
    """The same."""
    above: tuple[Above, ...]
    printed: dict[str, dict[str, float]]
    """What was published, by level."""
    note: str = NOTE


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
    spec, who = protocols.all[name], examinee(params, name)
    published = _published(who.task)
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
        write_text(target.with_suffix(".md"), page(report))
        write_json(target, report.model_dump(mode="json"))


def draw(task: Task, seeds: Sequence[int], levels: Sequence[str]) -> dict[tuple[int, str], Case]:
    """The episode of each cell: of the cases that its seed draws from the published mix, the first of its level.

    The mix draws levels by itself. Cases are of the exam's pool, whose templates nobody trains on. Raises DataError if
    a seed draws no case of a level.
    """
    published = _published(task)
    found: dict[tuple[int, str], Case] = {}
    for seed in seeds:
        firsts: dict[str, Case] = {}
        for case in task.cases(MOST_DRAWN, seed, pool=POOL, mix=published.mix):
            firsts.setdefault(task.slices[published.by](case), case)
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
    of = task.slices[_published(task).by]
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


def _published(task: Task) -> PublishedProtocol:
    if task.protocol is None:  # params.yaml is refused before
        raise ParamsError(f"nobody published a protocol of {task.name}")
    return task.protocol


def _kept(
    who: Examinee, mode: str, adapter: str, like: Any, exam: Sequence[Case], places: Sequence[int]
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
    params: "Params", who: Examinee, temperature: float, drawn: Mapping[tuple[int, str], Case], exam: Sequence[Case]
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
    who: Examinee,
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
    published = _published(task)
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
    of = task.slices[_published(task).by]
    pairs = list(zip(exam, said, strict=True))
    levels = {
        level: _level(task, [(case, one) for case, one in pairs if of(case) == level])
        for level in head.settings["levels"]
    }
    return Sat(who=who, mode=mode, decoding=decoding, levels=levels)


def _level(task: Task, pairs: Sequence[tuple[Case, Transcript]]) -> Level:
    published = _published(task)
    cases, said = [case for case, _ in pairs], [one for _, one in pairs]
    golds, answers = [task.label(case) for case in cases], [answer(task, one) for one in said]
    verdicts: dict[Any, list[tuple[bool, str]]] = {label: [] for label in task.labels}
    for case, gold, given in zip(cases, golds, answers, strict=True):
        for right, decided in task.parts(gold, given):
            verdicts[right].append((decided == right, case.id))
    statistic = estimates({published.statistic: task.metrics[published.statistic]}, golds, answers)
    quality = measured({published.quality: task.qualities[published.quality]}, cases, said, NOTHING_HEARD)
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


def page(report: ProtocolReport) -> str:
    """The report as Markdown."""
    task = get_task(report.task)
    published = _published(task)
    settings, levels = report.settings, report.settings["levels"]
    seeds = ", ".join(map(str, settings["seeds"]))
    parts = [
        f"# {report.name} beyond its exam",
        f"{report.note} Not for clinical use. Brackets hold 95% intervals, by a bootstrap over episodes, "
        f"or Wilson's where all decisions or none are right. `{ORACLE}` is "
        "the task's own best answer; `mediocre` reads and slips; the other rows without a mode read no record.",
        "## The published protocol",
        f"One episode for each of the seeds {seeds} and the levels {', '.join(levels)}, sampled at temperature "
        f"{settings['temperature']:g} with that seed. An episode is the first of its level among the cases that its "
        f"seed draws from the mix `{published.mix}` of the pool `{POOL}`. These are {len(report.cells)} episodes: "
        "their intervals are wide, and with so few too narrow rather than too wide.",
        f"The published figures are not comparable: {published.source}.",
        *(
            text
            for name, title in SCORES.items()
            for text in (
                f"### The {title}, means",
                _means(report, name),
                f"### The {title}, cells",
                _cells(report, name),
            )
        ),
        f"## The exam {report.exam}",
        f"{settings['episodes']} episodes a level. `{SAMPLED}`: once at temperature {settings['temperature']:g}. "
        f"`{EXAMINED}`: the answers that the exam kept, {_decodings(report)}. `{published.quality}` and "
        f"`{published.statistic}` are the task's own measures; the other columns are the share of the decisions for "
        "which a label is right that are it (for a label that approves: the specificity). n counts episodes, in the "
        "other columns decisions.",
        *(text for level in levels for text in (f"### Level {level}", _exam(report, level))),
        f"## Whose interval of {published.quality} lies below",
        f"yes: the whole interval of {report.name} lies above the whole interval of the other.",
        _verdicts(report),
    ]
    return "\n\n".join(parts) + "\n"


def _who(row: Played | Sat | Above) -> str:
    name = row.other if isinstance(row, Above) else row.who
    return ", ".join([name, *([row.mode] if row.mode else [])])


def _shown(found: Estimate | None) -> str:
    return "" if found is None else f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _means(report: ProtocolReport, score: str) -> str:
    columns = [*report.settings["levels"], ALL]
    first = report.played[0].means[score]
    body = [(_who(row), *(_shown(row.means[score][column]) for column in columns)) for row in report.played]
    if score == "theirs":
        body += [
            (row, *(f"{found[column]:.3f}" if column in found else "" for column in columns))
            for row, found in report.printed.items()
        ]
    return table(("who", *(f"{column}, n {first[column].n}" for column in columns)), body)


def _cells(report: ProtocolReport, score: str) -> str:
    body = [(_who(row), *(f"{value:.2f}" for value in row.scores[score])) for row in report.played]
    return table(("who", *(f"{cell.level} {cell.seed}" for cell in report.cells)), body)


def _decodings(report: ProtocolReport) -> str:
    return ", ".join(
        f"{mode} {'greedy' if spec['temperature'] == 0 else 'at temperature ' + format(spec['temperature'], 'g')}"
        for mode, spec in report.modes.items()
    )


def _exam(report: ProtocolReport, level: str) -> str:
    published = _published(get_task(report.task))
    labels = list(dict.fromkeys(label for row in report.sat for label in row.levels[level].recall))
    body = []
    for row in report.sat:
        found = row.levels[level]
        recalls = [found.recall.get(label) for label in labels]
        body.append(
            (_who(row), row.decoding, found.quality.n, *map(_shown, (found.quality, found.statistic, *recalls)))
        )
    counts = report.sat[0].levels[level].recall
    heads = [f"{label}, n {counts[label].n}" if label in counts else label for label in labels]
    return table(("who", "decoding", "n", published.quality, published.statistic, *heads), body)


def _verdicts(report: ProtocolReport) -> str:
    """A row for each other, a column for each mode, decoding and level."""
    found = {
        (row.other, row.mode, row.decoding, level): yes for row in report.above for level, yes in row.levels.items()
    }
    columns = list(dict.fromkeys(key[1:] for key in found))
    body = [
        (other, *({True: "yes", False: "no"}[found[other, *column]] for column in columns))
        for other in dict.fromkeys(row.other for row in report.above)
    ]
    return table(("above", *(" ".join(column) for column in columns)), body)
