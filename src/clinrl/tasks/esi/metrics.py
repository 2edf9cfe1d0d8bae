"""The metrics of an ESI exam, and which direction of each is worse.

ESI 1 is the most urgent level, so under-triage (less urgent than the truth) is `predicted > gold`. An unreadable
answer is a wrong answer: it stays in every denominator, and `exact`, `adjacent`, `high_risk_sensitivity` and the
recalls count it as a miss. It is no mistriage though, since it names no level: under-triage, over-triage and the
errors built on them count readable answers only (except `critical_under`, which also counts silence on a critical
patient), and the unreadable share is reported by its own name. Hence
exact + under_triage + over_triage + unreadable = 1 and adjacent + two_level_error + unreadable = 1.

Under- and over-triage as shares of all cases follow the mistriage definition of Sax et al., JAMA Netw Open 2023
(under-triage, over-triage and their sum over all encounters).
"""

from collections.abc import Mapping

from clinrl.intervals import Counts, quadratic_kappa
from clinrl.tasks.esi.rewards import LEVELS
from clinrl.tasks.parts import EXACT_SHARE, Share, Statistic, by_steps, recall
from clinrl.types import Unreadable

HIGH_RISK = (1, 2)
"""ESI 1 and 2: the patients who may not wait (ESI Handbook, decision points A and B)."""

Answer = int | Unreadable


def critical_under(gold: int, answer: Answer) -> bool:
    """A patient of level 1 or 2 rated less urgent than that, or not rated at all. Share of all cases.

    Stricter than `dangerous` at the urgent end: gold 1 answered 2 counts here, and so does silence.
    """
    return gold in HIGH_RISK and (isinstance(answer, Unreadable) or answer > gold)


def high_risk_sensitivity(gold: int, answer: Answer) -> bool | None:
    """Among gold levels 1 and 2 (the denominator), the answer is level 1 or 2. Its complement is the high-risk miss."""
    return answer in HIGH_RISK if gold in HIGH_RISK else None


def mean_signed_error(counts: Counts) -> float:
    """Mean of predicted minus gold over readable answers, in levels: positive is under-triage."""
    signed: int = sum(count * (answer - gold) for (gold, answer), count in counts.items())
    return signed / sum(counts.values())


METRICS: Mapping[str, Share | Statistic] = {
    "exact": EXACT_SHARE,
    "adjacent": by_steps(int, lambda steps: abs(steps) <= 1, "lower"),
    "under_triage": by_steps(int, lambda steps: steps > 0, "higher"),
    "over_triage": by_steps(int, lambda steps: steps < 0, "higher"),
    # The published series reports "dangerous errors" without a definition; this is the reading its figures fit.
    "dangerous": by_steps(int, lambda steps: steps >= 2, "higher"),
    "two_level_error": by_steps(int, lambda steps: abs(steps) >= 2, "higher"),
    "critical_under": Share(of=critical_under, worse="higher"),
    "high_risk_sensitivity": Share(of=high_risk_sensitivity, worse="lower"),
    **{f"recall_level_{level}": recall(level) for level in LEVELS},
    "kappa": Statistic(of=quadratic_kappa, worse="lower"),
    "mean_signed_error": Statistic(of=mean_signed_error, worse="higher"),
}
