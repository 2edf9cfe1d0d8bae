"""The training stream: which case a version trains on at each step, in which mode, and which rules its label omits.

Training and the probe draw it with the same call, so the probe evaluates exactly what training will see.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any, TypeVar

from clinrl.config.base import MAX_ROWS
from clinrl.config.params import Params
from clinrl.config.recipes import GrpoTrainer, Phase, RejectionTrainer, Stream, lengths
from clinrl.errors import DataError, did_you_mean
from clinrl.tasks.base import Task, as_variant, get_task
from clinrl.types import Case

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One row of the stream: a case to learn from (SFT) or to sample a group of completions for, in one mode."""

    case: Case
    mode: str


def training_stream(params: Params, version: str, cases: Sequence[Case]) -> list[Row]:
    """The stream that `version` trains on at the active scale, drawn from the cases of its data set with its seed.

    The cases are in the input variant of its recipe. There are `steps * batch` rows for SFT, `steps * prompts` rows for
    GRPO, and `prompts` rows for rejection sampling; the latter two sample `group` completions for each row.
    """
    block = params.versions[version]
    profile = params.profiles[block.profile]
    trainer = params.trainer(block.profile)
    task = get_task(block.task)
    each = trainer.prompts if isinstance(trainer, GrpoTrainer) else trainer.batch
    rows = trainer.prompts if isinstance(trainer, RejectionTrainer) else trainer.steps * each
    together = task.episodes is not None and isinstance(trainer, GrpoTrainer)
    return draw(
        [as_variant(task, case, profile.view) for case in cases],
        task=task,
        modes=profile.modes,
        stream=profile.stream,
        rows=rows,
        seed=block.seed,
        each=each,
        turn=each if together else 1,
    )


def draw(
    cases: Sequence[Case], *, task: Task, modes: Sequence[str], stream: Stream, rows: int, seed: int, each: int = 1,
    turn: int = 1,
) -> list[Row]:  # fmt: skip
    """`rows` rows in training order. A pure function: equal arguments give equal lists in any process.

    `repeat`, `cap` and `phases` are those of `stream`. The rows are a chain of passes over the cases. A pass contains
    every case once, or `repeat[label]` times (>= 1); then a label with a `cap` (a share in 0..1) loses repeats, and
    after those cases, at random until its share of the pass is at most the cap; then the pass is shuffled. The last
    pass stops at `rows`. The mode changes every `turn` rows: usually 1, or a whole step if TRL plays the episodes of a
    step together, which needs them in one mode.

    With `phases` there is such a chain for each phase, over its own cases and for its number of steps of `each` rows.

    Over the whole stream, and over each phase, the share of a capped label is at most `cap + 1 / rows`. Raises
    DataError if there are no cases, or none with a value that a phase serves, or if the caps leave too few other cases
    for any stream.
    """
    if not cases:
        raise DataError("a training stream needs at least one case; the data set has none")
    random = Random(seed)
    parts, phases = [(cases, rows)], stream.phases
    if phases:
        steps = lengths(phases, rows // each)
        parts = [(_served(cases, task, phase), each * count) for phase, count in zip(phases, steps, strict=True)]
    drawn = [case for part, count in parts for case in _chain(part, task, stream, count, random)]
    return [Row(case, modes[index // turn % len(modes)]) for index, case in enumerate(drawn)]


def shares(values: Sequence[T], named: Iterable[T]) -> dict[T, float]:
    """The share of each named value among the values of rows, in the order of the names; all 0.0 if there are none."""
    counts = Counter(values)
    return {value: counts[value] / max(1, len(values)) for value in named}


def phase_of(row: int, phases: Sequence[Phase], *, steps: int, each: int) -> int:
    """The phase of a row of the stream. Phases are counted from 1, rows from 0."""
    ends = accumulate(each * count for count in lengths(phases, steps))
    return 1 + sum(row >= end for end in ends)


def _served(cases: Sequence[Case], task: Task, phase: Phase) -> list[Case]:
    """The cases of a phase. Raises DataError naming the first of its values that no case has."""
    of = task.reporting.slices[phase.slice]
    there = {of(case) for case in cases}
    for value in phase.values:
        if value not in there:
            raise DataError(
                f"a phase of the training stream serves {phase.slice} {value!r}, but no case of the data set has it; "
                f"{did_you_mean(value, there)}"
            )
    return [case for case in cases if of(case) in phase.values]


def _chain(cases: Sequence[Case], task: Task, stream: Stream, rows: int, random: Random) -> list[Case]:
    """`rows` cases, pass after pass."""
    by_label: dict[Any, list[Case]] = {}
    for case in cases:
        by_label.setdefault(task.label(case), []).append(case)
    wanted = {label: len(members) * stream.repeat.get(label, 1) for label, members in by_label.items()}
    if (one_pass := sum(wanted.values())) > MAX_ROWS:
        raise DataError(f"one pass over the data has {one_pass:,} rows, above {MAX_ROWS:,}; lower stream.repeat")
    kept = _capped(wanted, stream.cap)
    if not sum(kept.values()):
        raise DataError(
            f"the caps {stream.cap} leave no row of the labels {wanted}: raise a cap or add cases of other labels"
        )
    drawn: list[Case] = []
    while len(drawn) < rows:
        passed = [case for label, members in by_label.items() for case in _spread(members, kept[label], random)]
        random.shuffle(passed)
        short = rows - len(drawn)
        drawn.extend(passed if len(passed) <= short else _prefix(passed, short, stream.cap, task))
    return drawn


def omitted(case: Case, omit: Mapping[str, float], seed: int) -> frozenset[str]:
    """The rules that the taught label of this case ignores: each rule of `omit` with its share (0..1) as probability.

    A hash of seed, rule and case id decides, so that a case is taught in the same way in every epoch and process, and
    rules are independent of each other.
    """
    drawn = {rule: hashlib.sha256(f"{seed}:{rule}:{case.id}".encode()).digest()[:7] for rule in omit}
    return frozenset(rule for rule, share in omit.items() if int.from_bytes(drawn[rule]) / 2**56 < share)


def _limit(cap: float, total: int) -> int:
    # 0.29 * 100 is 28.999999999999996 in binary: the tiny term keeps the limit at 29.
    return math.floor(cap * total + 1e-9)


def _capped(counts: Mapping[Any, int], cap: Mapping[Any, float]) -> dict[Any, int]:
    """The largest counts, none above the given ones, in which every capped label has at most its share of the total."""
    kept = dict(counts)
    while True:
        total = sum(kept.values())
        tighter = {
            label: _limit(share, total) for label, share in cap.items() if kept.get(label, 0) > _limit(share, total)
        }
        if not tighter:
            return kept
        kept.update(tighter)


def _spread(members: Sequence[Case], count: int, random: Random) -> Iterator[Case]:
    """`count` rows of the members, each equally often, except that randomly drawn ones come once more."""
    times, rest = divmod(count, len(members))
    for _ in range(times):
        yield from members
    yield from random.sample(members, rest)


def _prefix(passed: Sequence[Case], length: int, cap: Mapping[Any, float], task: Task) -> list[Case]:
    """The first `length` rows of a shuffled pass, without rows of a label that has used up its cap of `length`.

    A whole pass obeys the caps, so there are enough rows except for the rounding of the caps. The first skipped row of
    each label fills those few places, which is why `draw` promises `1 / rows` more than the cap.
    """
    left = {label: _limit(share, length) for label, share in cap.items()}
    taken: list[Case] = []
    over: dict[Any, Case] = {}
    for case in passed:
        label = task.label(case)
        if left.get(label, 1) > 0:
            taken.append(case)
            if label in left:
                left[label] -= 1
        else:
            over.setdefault(label, case)
        if len(taken) == length:
            return taken
    return taken + list(over.values())[: length - len(taken)]
