"""Health of a training run: alarms, read line by line from its history, while it runs and afterwards by the same code.

Each published failure of the series shows in the log long before the exam: a collapse in the shares of answers, hedging
in the excess of the level that is safest to say, a short budget in clipped and unreadable turns. `Monitor` takes one
logged step after the other and returns the alarms that it raises. `warn` asks a person to look; `stop` ends the
training before more of it is wasted. An alarm is raised once at each level for each thing that it is about.
"""

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Literal

from clinrl.errors import ArtefactError
from clinrl.tasks.tables import read_table
from clinrl.types import Strict

Line = Mapping[str, float | None]
"""One step of a history; None stands for a number that was not finite."""

BASELINE = 5
"""Steps whose median entropy is what later entropies are compared with."""
NUMBERS = ("loss", "grad_norm", "reward", "kl")
"""What must be finite at every step."""


Level = Literal["warn", "stop"]
LEVELS: Final[tuple[Level, ...]] = ("stop", "warn")
"""The worse first."""


class Alarm(Strict):
    """Something that is wrong with a run, since a step."""

    name: str
    about: str
    """A mode or an answer; empty where the whole run is meant."""
    level: Level
    step: int
    observed: float | None
    """Mean over the rule's window; None for a number that was not finite."""
    limit: float
    says: str
    helps: str


class Rule(Strict):
    """What is observed over a window of steps, and from which value on it is an alarm. Greater is worse."""

    name: str
    of: str = ""
    """The metric whose mean is observed, or the prefix of several; empty: observed by a function of `_BY_NAME`."""
    window: int = 1
    """Steps that are looked at together; nothing is said before there are so many."""
    warn: float
    stop: float
    says: str
    """One clause with the fields about, observed, shown (of held-out cases), window and baseline."""
    helps: str

    def observe(self, lines: Sequence[Line]) -> Mapping[str, float]:
        """From what it is about to its value over the window; what cannot be said is left out."""
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
    """The mean of every metric `<prefix><about>` that the last line has and at least half of the window."""
    names = sorted(name for name in lines[-1] if name.startswith(prefix))
    means = {name.removeprefix(prefix): _mean(lines, name) for name in names}
    return {about: mean for about, mean in means.items() if mean is not None}


def _mean(lines: Sequence[Line], name: str) -> float | None:
    """The mean of a metric over the lines that have it, as steps of episodes have those of one mode in turn.

    None if fewer than half of them have it, or if it is no number in one of them.
    """
    values = [line[name] for line in lines if name in line]
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) and 2 * len(known) >= len(lines) > 0 else None


def _excess(lines: Sequence[Line]) -> dict[str, float]:
    """By how much each answer is given more often than it is right."""
    given, right = _means("answer/", lines), _means("gold/", lines)
    return {label: share - right[label] for label, share in given.items() if label in right}


def _still(lines: Sequence[Line]) -> dict[str, float]:
    """1 if no step of the window had a gradient although groups disagreed; else 0."""
    alike = _mean(lines, "frac_reward_zero_std")
    return {} if alike is None or alike == 1 else {"": float(all(line.get("grad_norm") == 0 for line in lines))}


def _first(lines: Sequence[Line]) -> dict[str, float]:
    """The distance at the first step, where the policy still is its parent; TRL measures 0 there."""
    kl = lines[-1].get("kl")
    return {} if lines[-1]["step"] != 1 or kl is None else {"": kl}


_BY_NAME = {"over_called": _excess, "unmoved": _still, "first_kl": _first}
ENTROPY_WINDOW = 3


class Monitor:
    """Takes the steps of one run in order and returns the alarms that each of them raises."""

    def __init__(self) -> None:
        self._recent: deque[Line] = deque(maxlen=max(rule.window for rule in RULES))
        self._entropies: list[float] = []
        self._held_out: list[tuple[float, float]] = []
        """Exact share on held-out cases, and the mean reward around it."""
        self._first_excess: Mapping[str, float] = {}
        """Of each label, at the first look at held-out cases."""
        self._raised: set[tuple[str, str, str]] = set()

    def add(self, line: Line) -> list[Alarm]:
        """The alarms that this step raises for the first time; the worse ones first."""
        self._recent.append(line)
        found = [*self._not_finite(line)]
        for rule in RULES:
            if len(self._recent) >= rule.window:
                lines = list(self._recent)[-rule.window :]
                for about, observed in rule.observe(lines).items():
                    found += _reached(rule, line, observed, about)
        if "reward" in line:  # an imitation's entropy falls by design
            found += self._entropy(line)
        found += self._over_called(line)
        found += self._divergence(line)
        new = []
        for alarm in sorted(found, key=lambda alarm: alarm.level != "stop"):
            key = (alarm.name, alarm.about, alarm.level)
            if key not in self._raised:
                self._raised |= {key, (alarm.name, alarm.about, "warn")}  # a stop is not warned of afterwards
                new.append(alarm)
        return new

    def _not_finite(self, line: Line) -> Iterable[Alarm]:
        for name in NUMBERS:
            if name in line and line[name] is None:
                yield _alarm(_RULES.others["not_finite"], "stop", line, None, name)

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
    """The alarm of a value at the worse of its rule's limits that it reaches; none below both."""
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
    """The alarms that a report holds; None if there is no such file, as for what was not trained."""
    if not path.exists():
        return None
    return [Alarm.model_validate(alarm) for alarm in json.loads(path.read_text(encoding="utf-8"))]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a written history, None for what was not finite. Raises ArtefactError naming a bad line."""
    if not path.exists():
        raise ArtefactError(f"{path} does not exist; train the version first, or restore it with `dvc checkout`")
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(text)
            lines.append({**entry, "step": int(entry["step"])})
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            raise ArtefactError(
                f"{path} line {number} is no step of a history; restore it with `dvc checkout`"
            ) from None
    return lines
