"""The test that a change plan asks for: whether a candidate is better than the champion, at the level of a look."""

from collections.abc import Iterator

from clinrl.analysis.paired import ByMode
from clinrl.config.change_plan import Protocol
from clinrl.release.budget import Look
from clinrl.release.form import BOTH_MODES, Finding, gain, paired_change
from clinrl.tasks.base import Task
from clinrl.tasks.parts import Share

TEST, TEST_OF_CLUSTERS = (f"randomisation of {what}, averaged over modes" for what in ("cases", "clusters"))
"""Name the test, so that what another one has said is no answer to the same question."""
CHAMPION = "the champion"
"""What sentences call the rival whose place a candidate would take."""


def compare(task: Task, protocol: Protocol, look: Look, candidate: ByMode, champion: ByMode) -> Iterator[Finding]:
    """Whether a candidate is better than the champion on average over modes, and in none worse by a margin."""
    level, metric = look.level, protocol.superior
    share = task.metrics[metric]
    change, p = (isinstance(share, Share) and gain(share, candidate, champion)) or (None, 1.0)
    if change is None:
        sentence = f"{metric} could not be measured against {CHAMPION}; it must be better"
    else:
        sentence = (
            f"{metric} changes by {change.value:+.4g} against {CHAMPION} on the same cases, averaged over "
            f"{' and '.join(candidate)}, one-sided p = {p:.4g}; look {look.number} of {look.most} at this exam may "
            f"spend {level:.4g}, so p must be at most that"
        )
    limit = f"better than {CHAMPION}, p at most {level:.4g}"
    yield Finding.of(metric, BOTH_MODES, limit, change, passed=p <= level, sentence=sentence)
    for metric, margin in protocol.not_worse.items():
        for mode, mine in candidate.items():
            sign = -1 if task.metrics[metric].worse == "higher" else 1
            change = paired_change(task.metrics[metric], metric, mine, champion[mode], 1 - 2 * level)
            worst = None if change is None else sign * (change.low if sign > 0 else change.high)
            sentence = (
                f"{metric} ({mode}) may be worse than {CHAMPION} by "
                f"{'an unknown amount' if worst is None else format(max(0.0, -worst), '.4g')} on the same cases, with "
                f"an error of {level:.4g}; the plan asks for less than {margin:g}"
            )
            limit = f"worse than {CHAMPION} by less than {margin:g}, at {level:.4g}"
            passed = worst is not None and worst > -margin
            yield Finding.of(metric, mode, limit, change, passed=passed, sentence=sentence)
