"""What a published protocol and a sampled exam say of a version or a base: the record."""

from typing import Any, Final

from pydantic import Field

from clinrl.analysis.exam import NOTE
from clinrl.errors import ParamsError
from clinrl.tasks.base import Task
from clinrl.tasks.parts import Benchmark
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
    sampler: dict[str, str] = Field(default_factory=dict, exclude_if=lambda sampler: not sampler)
    """Who wrote what is sampled, at the full scale."""
    cells: tuple[Cell, ...] = Field(min_length=1)
    played: tuple[Played, ...]
    """The version in each mode, what it is against, policies, the oracle."""
    sat: tuple[Sat, ...]
    """The same."""
    above: tuple[Above, ...]
    printed: dict[str, dict[str, float]]
    """What was published, by level."""
    note: str = NOTE


def published_of(task: Task) -> Benchmark:
    """What somebody published of a task. Raises ParamsError if nobody did."""
    if task.benchmark is None:  # params.yaml is refused before
        raise ParamsError(f"nobody published a protocol of {task.name}")
    return task.benchmark


def verdicts(report: ProtocolReport) -> tuple[list[tuple[str, str, str]], dict[str, list[str]]]:
    """Mode, decoding and level of each column, and by name of the other whether the report's interval lies above."""
    found = {
        (line.other, line.mode, line.decoding, level): "yes" if above else "no"
        for line in report.above
        for level, above in line.levels.items()
    }
    columns = list(dict.fromkeys((mode, decoding, level) for _, mode, decoding, level in found))
    others = dict.fromkeys(line.other for line in report.above)
    return columns, {other: [found[other, *column] for column in columns] for other in others}
