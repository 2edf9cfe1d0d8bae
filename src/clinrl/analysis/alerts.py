"""Alarms about a training run, found step by step in its history; the same code runs during a training and after it.

Each published failure of the series shows in the log long before the exam: a collapse in the shares of answers, hedging
in the excess of the safest answer, a short token budget in clipped and unreadable turns. `Monitor` takes the logged
steps in order and returns the alarms that each of them raises. `warn` asks a person to look; `stop` ends the training
before more time is wasted. An alarm is raised once at each level for each mode, answer or metric that it is about.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Literal

from clinrl.errors import ArtefactError
from clinrl.tasks.tables import read_table
from clinrl.types import Strict

Line = Mapping[str, float | None]
"""One step of a history; None stands for a number that was not finite."""

BASELINE = 5
"""Number of first steps; later entropies are compared with the median entropy of these."""
NUMBERS = ("loss", "grad_norm", "reward", "kl")
"""Metrics that must be finite at every step."""


Level = Literal["warn", "stop"]
LEVELS: Final[tuple[Level, ...]] = ("stop", "warn")
"""From the more severe level to the less severe one."""


class Alarm(Strict):
    """A problem of a run, and the step at which it was found."""

    name: str
    about: str
    """A mode, an answer or a metric; empty for the whole run."""
    level: Level
    step: int
    observed: float | None
    """Mean over the rule's window; None for a number that was not finite."""
    limit: float
    says: str
    helps: str


class Rule(Strict):
    """The value to observe over a window of steps, and the limits at which it raises an alarm. Greater is worse."""

    name: str
    of: str = ""
    """The metric whose mean is observed, or a prefix of several that ends in "/"; empty if code computes the value."""
    window: int = 1
    """Number of steps in the window; the rule raises no alarm before there are so many."""
    warn: float
    stop: float
    says: str
    """One clause with the fields about, observed, shown (the excess on held-out cases), window and baseline."""
    helps: str

    def observe(self, lines: Sequence[Line]) -> Mapping[str, float]:
        """The values over the window, by what each is about; values that cannot be computed are left out."""
        if not self.of:
            return _BY_NAME[self.name](lines)
        if self.of.endswith("/"):
            return _means(self.of, lines)
        mean = _mean(lines, self.of)
        return {} if mean is None else {"": mean}


class _Rules(Strict):
    rules: tuple[Rule, ...]
    others: Mapping[str, Rule]


_RULES: Final = read_table(__file__, _Rules)
RULES: Final = _RULES.rules


def _means(prefix: str, lines: Sequence[Line]) -> dict[str, float]:
    """The mean of each metric `<prefix><about>` that the last line and half of the window have, by `about`."""
    names = sorted(name for name in lines[-1] if name.startswith(prefix))
    means = {name.removeprefix(prefix): _mean(lines, name) for name in names}
    return {about: mean for about, mean in means.items() if mean is not None}


def _mean(lines: Sequence[Line], name: str) -> float | None:
    """The mean of a metric over the lines that have it: the steps of an episode task have one mode each, in turn.

    None if fewer than half of the lines have it, or if it is not finite in one of them.
    """
    values = [line[name] for line in lines if name in line]
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) and 2 * len(known) >= len(lines) > 0 else None


def _excess(lines: Sequence[Line]) -> dict[str, float]:
    """The share of each answer minus the share of cases in which it is right."""
    given, right = _means("answer/", lines), _means("gold/", lines)
    return {label: share - right[label] for label, share in given.items() if label in right}


def _unmoved(lines: Sequence[Line]) -> dict[str, float]:
    """1 if no step of the window had a gradient, else 0; empty if no group had differing rewards."""
    alike = _mean(lines, "frac_reward_zero_std")
    return {} if alike is None or alike == 1 else {"": float(all(line.get("grad_norm") == 0 for line in lines))}


def _first_kl(lines: Sequence[Line]) -> dict[str, float]:
    """The KL divergence at step 1, where the policy still equals its parent, so that TRL measures 0."""
    kl = lines[-1].get("kl")
    return {} if lines[-1]["step"] != 1 or kl is None else {"": kl}


_BY_NAME = {"over_called": _excess, "unmoved": _unmoved, "first_kl": _first_kl}
ENTROPY_WINDOW = 3


class Monitor:
    """Takes the steps of one run in order and returns the alarms that each of them raises."""

    def __init__(self) -> None:
        self._recent: deque[Line] = deque(maxlen=max(rule.window for rule in RULES))
        self._entropies: list[float] = []
        self._held_out: list[tuple[float, float]] = []
        """At each evaluation of held-out cases: their exact share, and the mean of the last three rewards."""
        self._first_excess: Mapping[str, float] = {}
        """Excess of each label at the first evaluation of held-out cases."""
        self._raised: set[tuple[str, str, str]] = set()

    def add(self, line: Line) -> list[Alarm]:
        """The alarms that this step raises for the first time, `stop` before `warn`."""
        self._recent.append(line)
        lost = [name for name in NUMBERS if name in line and line[name] is None]
        found = [_alarm(_RULES.others["not_finite"], "stop", line, None, name) for name in lost]
        for rule in RULES:
            if len(self._recent) >= rule.window:
                lines = list(self._recent)[-rule.window :]
                for about, observed in rule.observe(lines).items():
                    found += _reached(rule, line, observed, about)
        if "reward" in line:  # in supervised fine-tuning entropy falls by design
            found += self._entropy(line)
        found += self._over_called(line)
        found += self._divergence(line)
        new = []
        for alarm in sorted(found, key=lambda alarm: alarm.level != "stop"):
            key = (alarm.name, alarm.about, alarm.level)
            if key not in self._raised:
                self._raised |= {key, (alarm.name, alarm.about, "warn")}  # no warning after a stop
                new.append(alarm)
        return new

    def forget_stops(self) -> None:
        """Let alarms of level `stop` be raised anew while their conditions last."""
        self._raised = {key for key in self._raised if key[2] != "stop"}

    def _entropy(self, line: Line) -> Iterable[Alarm]:
        value = line.get("entropy")
        if value is None:
            return
        self._entropies.append(value)
        if len(self._entropies) < BASELINE + ENTROPY_WINDOW:
            return
        baseline = median(self._entropies[:BASELINE])
        ratio = fmean(self._entropies[-ENTROPY_WINDOW:]) / baseline if baseline else 1.0
        falls, rises = _RULES.others["entropy_falls"], _RULES.others["entropy_rises"]
        for level in LEVELS:
            if ratio <= getattr(falls, level) or ratio >= getattr(rises, level):
                yield _alarm(falls if ratio <= getattr(falls, level) else rises, level, line, ratio)
                return

    def _over_called(self, line: Line) -> Iterable[Alarm]:
        excess = _means("held_out/excess/", [line])
        self._first_excess = self._first_excess or excess
        for about, value in excess.items():
            observed = min(value, value - self._first_excess[about])
            yield from _reached(_RULES.others["over_called"], line, observed, about, shown=value)

    def _divergence(self, line: Line) -> Iterable[Alarm]:
        exact, reward = line.get("held_out/exact"), line.get("reward")
        if exact is None or reward is None:
            return
        rewards = [value for some in self._recent if (value := some.get("reward")) is not None]
        self._held_out.append((exact, fmean(rewards[-3:])))
        best, first_reward = max(exact for exact, _ in self._held_out), self._held_out[0][1]
        fallen = [best - now for now, _ in self._held_out[-2:]]
        if len(self._held_out) < 3 or self._held_out[-1][1] <= first_reward:
            return
        yield from _reached(_RULES.others["diverged"], line, min(fallen))


def _reached(rule: Rule, line: Line, observed: float, about: str = "", shown: float = 0.0) -> Iterable[Alarm]:
    """The alarm at the more severe of the rule's limits that a value reaches; empty below both."""
    level = next((level for level in LEVELS if observed >= getattr(rule, level)), None)
    return [_alarm(rule, level, line, observed, about, shown)] if level else []


def _alarm(rule: Rule, level: Level, line: Line, observed: float | None, about: str = "", shown: float = 0.0) -> Alarm:
    says = rule.says.format(about=about, observed=observed, shown=shown, window=rule.window, baseline=BASELINE)
    return Alarm(
        name=rule.name, about=about, level=level, step=int(line["step"] or 0), limit=getattr(rule, level), says=says,
        observed=None if observed is None else round(observed, 6), helps=rule.helps,
    )  # fmt: skip


def alarms(history: Iterable[Line]) -> list[Alarm]:
    """Every alarm of a finished run, in the order of its steps."""
    monitor = Monitor()
    return [alarm for line in history for alarm in monitor.add(line)]


def stored(path: Path) -> list[Alarm] | None:
    """The alarms in a written report; None if there is no such file, as for a model that was not trained.

    Raises ArtefactError for a file that is cut short or malformed.
    """
    if not path.exists():
        return None
    try:
        return [Alarm.model_validate(alarm) for alarm in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError):
        raise ArtefactError(f"{path} holds no alarms; restore it with `git checkout {path}`") from None


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a written history, one at a time, with None for numbers not finite.

    Raises ArtefactError for a file that is not there, and for a bad line, which it names.
    """
    if not path.exists():
        raise ArtefactError(f"{path} does not exist; train the version first, or restore it with `dvc checkout`")
    with path.open("rb") as stream:
        for number, text in enumerate(stream, start=1):
            try:
                entry = json.loads(text)
                line = {**entry, "step": int(entry["step"])}
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
                raise ArtefactError(
                    f"{path} line {number} is no step of a history; restore it with `dvc checkout`"
                ) from None
            yield line
