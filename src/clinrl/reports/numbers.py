"""Numbers as text for pages: an estimate with its interval in brackets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from clinrl.analysis.compared import Figure
from clinrl.tasks.base import Task
from clinrl.types import Estimate

if TYPE_CHECKING:
    from clinrl.release.form import FormRow


def percent(estimate: Estimate) -> str:
    """A share in per cent with its interval."""
    return f"{100 * estimate.value:.1f}%{_interval(100 * estimate.low, 100 * estimate.high, 1)}"


def decimal(estimate: Estimate | None, digits: int = 3) -> str:
    """A number with its interval; an empty text for None."""
    return f"{estimate.value:.{digits}f}{_interval(estimate.low, estimate.high, digits)}" if estimate else ""


def _interval(low: float, high: float, digits: int) -> str:
    """The ends in brackets, or `no interval` for one without width, which says nothing about unmeasured cases."""
    return f" [{low:.{digits}f}, {high:.{digits}f}]" if low < high else ", no interval"


def counted(estimate: Estimate | None, n: int | None = None) -> str:
    """A number with its interval, and its n if that is not the given one; an empty text for None."""
    return decimal(estimate) if not estimate or estimate.n == n else f"{decimal(estimate)}, n {estimate.n}"


def points(difference: Estimate) -> str:
    """A difference of two shares in percentage points with its interval."""
    return f"{100 * difference.value:+.1f} points [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"


def p_value(p: float) -> str:
    """A p value to three digits, or to as many as tell it from the usual limit of 0.05."""
    digits = next((digits for digits in range(3, 9) if float(f"{p:.{digits}f}") != 0.05), 3)
    return f"{p:.{digits}f}" if p >= 0.001 else "< 0.001"


def p_is(p: float) -> str:
    """A p value with its name: `p = 0.019`, `p < 0.001`."""
    shown = p_value(p)
    return f"p {shown}" if shown.startswith("<") else f"p = {shown}"


def plain(value: float) -> str:
    """A number without an interval, as in publications."""
    return f"{value:.3f}"


def ranged(estimate: Mapping[str, float]) -> str:
    """Value and interval of an estimate that is a mapping."""
    return f"{estimate['value']:.3f}{_interval(estimate['low'], estimate['high'], 3)}"


def metric(estimate: Estimate | None, task: Task, name: str, n: int | None = None) -> str:
    """A metric of the task with its interval: a share in per cent, any other metric as a number; empty for None.

    The estimate's n is added if it is not the given one.
    """
    if not estimate:
        return ""
    text = percent(estimate) if task.is_share(name) else decimal(estimate, 3 if name in task.metrics else 2)
    return text if n in (None, estimate.n) else f"{text}, n {estimate.n}"


def metrics(
    task: Task,
    names: Iterable[str],
    found: Mapping[str, Estimate],
    printed: Mapping[str, float] | None = None,
    n: int | None = None,
) -> list[str]:
    """A cell for each metric, with its n if that is not the given one. A published number in `printed` replaces the
    estimate, and has no interval."""
    published = printed or {}
    return [plain(published[name]) if name in published else metric(found.get(name), task, name, n) for name in names]


def figures(task: Task, names: Iterable[str], found: Mapping[str, Figure]) -> list[str]:
    """A cell for each number of a row over seeds, as `figure` writes it."""
    return [figure(found.get(name), task, name) for name in names]


def figure(found: Figure | None, task: Task, name: str, n: int | None = None) -> str:
    """A number of a row over seeds with its interval, or, if single cases are unknown, with the range of its seeds.

    Its n is added if it is not the given one.
    """
    if found is None:
        return ""
    if found.low is None or found.high is None:
        ends = " to ".join(_number(task, name, edge) for edge in (min(found.seeds), max(found.seeds)))
        return f"{_number(task, name, found.value)}, {ends}{'' if n in (None, found.n) else f', n {found.n}'}"
    return metric(Estimate(value=found.value, low=found.low, high=found.high, n=found.n), task, name, n)


def _number(task: Task, name: str, value: float) -> str:
    return f"{100 * value:.1f}%" if task.is_share(name) else plain(value)


def change(difference: Estimate, task: Task, name: str) -> str:
    """A difference in a metric of the task, with its interval; of a share in percentage points."""
    if task.is_share(name):
        return points(difference)
    return f"{difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def with_n(names: Iterable[str], found: Mapping[str, Estimate]) -> list[str]:
    """The heads of columns, each with the n of its estimate."""
    return [f"{name}, n {found[name].n}" if name in found else name for name in names]


def present(names: Iterable[str], found: Iterable[Mapping[str, object]]) -> list[str]:
    """Those of the names that at least one of the mappings has."""
    rows = list(found)
    return [name for name in names if any(name in row for row in rows)]


def form(rows: Sequence["FormRow"]) -> list[dict[str, str]]:
    """The table that an approver sees, a line for each model or baseline: its shares, and the candidate's lead over it.

    A lead is the candidate's share minus the row's on the same cases; it is empty for the candidate itself.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    return [
        {"mode": row.mode, "who": row.name, "role": row.role}
        | {name: percent(row.metrics[name]) if name in row.metrics else "" for name in names}
        | {f"ahead in {name}": points(row.ahead[name]) if name in row.ahead else "" for name in names}
        for row in rows
    ]
