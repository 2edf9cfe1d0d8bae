"""What a published protocol and a sampled exam say of a version or a base: the record, and its page."""

from typing import Any, Final

from pydantic import Field

from clinrl.analysis.exam import NOTE
from clinrl.errors import ParamsError
from clinrl.reports.exam_page import table
from clinrl.tasks.base import PublishedProtocol, Task, get_task
from clinrl.types import Estimate, Strict

POOL: Final = "exam"
ORACLE: Final = "oracle"
SAMPLED: Final = "sampled"
EXAMINED: Final = "as examined"
"""The answers that the exam kept, at the temperature of the mode: greedy where that is 0."""
ALL: Final = "all"
SCORES: Final = {"theirs": "published score", "ours": "corrected score"}


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


def published_of(task: Task) -> PublishedProtocol:
    """What somebody published of a task. Raises ParamsError if nobody did."""
    if task.protocol is None:  # params.yaml is refused before
        raise ParamsError(f"nobody published a protocol of {task.name}")
    return task.protocol


def page(report: ProtocolReport) -> str:
    """The report as Markdown."""
    task = get_task(report.task)
    published = published_of(task)
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
    published = published_of(get_task(report.task))
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
