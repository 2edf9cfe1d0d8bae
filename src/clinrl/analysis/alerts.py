"""Health of a training run: alarms, read line by line from its history, while it runs and afterwards by the same code.

Each published failure of the series shows in the log long before the exam: a collapse in the shares of answers, hedging
in the excess of the level that is safest to say, a short budget in clipped and unreadable turns. `Monitor` takes one
logged step after the other and returns the alarms that it raises. `warn` asks a person to look; `stop` ends the
training before more of it is wasted. An alarm is raised once at each level for each thing that it is about.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from clinrl.errors import ArtefactError
from clinrl.types import Strict

Line = Mapping[str, float | None]
"""One step of a history; None stands for a number that was not finite."""

BASELINE = 5
"""Steps whose median entropy is what later entropies are compared with."""
NUMBERS = ("loss", "grad_norm", "reward", "kl")
"""What must be finite at every step."""


class Alarm(Strict):
    """Something that is wrong with a run, since a step."""

    name: str
    about: str
    """A mode or an answer; empty where the whole run is meant."""
    level: Literal["warn", "stop"]
    step: int
    observed: float | None
    """Mean over the rule's window; None for a number that was not finite."""
    limit: float
    says: str
    helps: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is observed over a window of steps, and from which value on it is an alarm. Greater is worse."""

    name: str
    window: int
    """Steps that are looked at together; nothing is said before there are so many."""
    warn: float
    stop: float
    observe: Callable[[Sequence[Line]], Mapping[str, float]]
    """From what it is about to its value over the window; what cannot be said is left out."""
    says: str
    """One clause with the fields about, observed and window."""
    helps: str


def _means(prefix: str) -> Callable[[Sequence[Line]], Mapping[str, float]]:
    """The mean of every metric `<prefix>/<about>` that the last line has and at least half of the window."""

    def observe(lines: Sequence[Line]) -> dict[str, float]:
        names = {name for name in lines[-1] if name.startswith(f"{prefix}/")}
        means = {name.removeprefix(f"{prefix}/"): _mean(lines, name) for name in sorted(names)}
        return {about: mean for about, mean in means.items() if mean is not None}

    return observe


def _mean(lines: Sequence[Line], name: str) -> float | None:
    """The mean of a metric over the lines that have it, as steps of episodes have those of one mode in turn.

    None if fewer than half of them have it, or if it is no number in one of them.
    """
    values = [line[name] for line in lines if name in line]
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) and 2 * len(known) >= len(lines) > 0 else None


def _excess(lines: Sequence[Line]) -> dict[str, float]:
    """By how much each answer is given more often than it is right."""
    given, right = _means("answer")(lines), _means("gold")(lines)
    return {label: share - right[label] for label, share in given.items() if label in right}


def _one(name: str) -> Callable[[Sequence[Line]], Mapping[str, float]]:
    def observe(lines: Sequence[Line]) -> dict[str, float]:
        mean = _mean(lines, name)
        return {} if mean is None else {"": mean}

    return observe


def _still(lines: Sequence[Line]) -> dict[str, float]:
    """1 if no step of the window had a gradient although groups disagreed; else 0."""
    alike = _mean(lines, "frac_reward_zero_std")
    return {} if alike is None or alike == 1 else {"": float(all(line.get("grad_norm") == 0 for line in lines))}


def _first(lines: Sequence[Line]) -> dict[str, float]:
    """The distance at the first step, where the policy still is its parent; TRL measures 0 there."""
    kl = lines[-1].get("kl")
    return {} if lines[-1]["step"] != 1 or kl is None else {"": kl}


HIDES = "make that answer cost where it is wrong, or lower trainer.lr: it is where this policy hides"

RULES = (
    Rule(
        name="clipped", window=3, warn=0.2, stop=0.5, observe=_means("clipped"),
        says="{observed:.0%} of the completions in mode {about} ran out of tokens over {window} steps",
        helps="raise trainer.max_completion, or train this mode with a shorter form of answer",
    ),
    Rule(
        name="no_parse", window=3, warn=0.1, stop=0.3, observe=_means("parse_fail"),
        says="{observed:.0%} of the answers in mode {about} could not be read over {window} steps",
        helps="make an unreadable answer the worst outcome of the reward, and look whether answers are cut short",
    ),
    Rule(
        name="not_submitted", window=3, warn=0.25, stop=0.6, observe=_means("not_submitted"),
        says="{observed:.0%} of the episodes in mode {about} were not submitted over {window} steps",
        helps="raise trainer.max_completion if they run out of tokens, or make an episode cost that is never handed in",
    ),
    Rule(
        name="malformed_calls", window=3, warn=0.1, stop=0.3, observe=_means("malformed"),
        says="{observed:.0%} of the turns in mode {about} wrote a call that could not be read over {window} steps",
        helps="imitate more episodes before this, lower trainer.temperature, or make a malformed call cost",
    ),
    Rule(
        name="tool_failures", window=3, warn=0.1, stop=0.3, observe=_one("tools/failure_frequency"),
        says="{observed:.0%} of the calls named no tool or not its arguments over {window} steps",
        helps="look whether the prompt shows the tools that there are, and make such a call cost",
    ),
    Rule(
        name="level_share", window=5, warn=0.7, stop=0.9, observe=_means("answer"),
        says="{observed:.0%} of all answers are {about} over {window} steps",
        helps="lower the repeat or the cap of that label in the stream, or make a false one cost",
    ),
    Rule(
        name="over_called", window=6, warn=0.1, stop=0.2, observe=_excess,
        says="{about} is answered {observed:.0%} of the time more often than it is right, over {window} steps",
        helps=HIDES,
    ),
    Rule(
        name="no_signal", window=5, warn=0.4, stop=0.7, observe=_one("groups/all_wrong"),
        says="in {observed:.0%} of the groups no completion was right over {window} steps",
        helps="start from a parent that is sometimes right, or give easier cases: such groups teach nothing",
    ),
    Rule(
        name="converged", window=10, warn=0.97, stop=2.0, observe=_one("groups/all_right"),
        says="in {observed:.0%} of the groups every completion was right over {window} steps",
        helps="stop here, or give harder cases: such groups teach nothing",
    ),
    Rule(
        name="unmoved", window=10, warn=2.0, stop=1.0, observe=_still,
        says="no step had a gradient over {window} steps although rewards differed",
        helps="look at what is trainable: the adapter is not what the optimiser sees",
    ),
    Rule(
        name="kl", window=1, warn=0.1, stop=0.5, observe=_one("kl"),
        says="the policy is {observed:.2g} nats a token from its parent",
        helps="lower trainer.lr, or raise trainer.beta",
    ),
    Rule(
        name="held_out_kl", window=1, warn=0.2, stop=1.0, observe=_one("held_out/kl"),
        says="on held-out cases the policy is {observed:.2g} nats a token from its parent",
        helps="lower trainer.lr, or raise trainer.beta",
    ),
    Rule(
        name="sampler_gap", window=1, warn=0.1, stop=0.5, observe=_one("sampling/sampling_logp_difference/mean"),
        says="trainer and engine give the same tokens log-probabilities that differ by {observed:.2g} in the mean",
        helps="the engine serves another adapter, base or number format than is trained: start it again with "
        "`clinrl engine`, or set sampler to transformers in machine.yaml",
    ),
    Rule(
        name="first_kl", window=1, warn=1.0e-4, stop=1.0e-2, observe=_first,
        says="before anything was learned the policy is {observed:.2g} nats a token from its reference",
        helps="the reference is not the parent: look at how both adapters were loaded",
    ),
)  # fmt: skip
"""Limits after the thresholds that users of such trainers report as telling, adjusted on runs of the series: a run that
ends well raises none of them. Windows are short because an embedded run has a few dozen steps."""

ENTROPY_WINDOW = 3
ENTROPY_FALLS = (0.3, 0.1)
"""Warn and stop: entropy as a share of its baseline."""
ENTROPY_RISES = (4.0, 10.0)
"""Warn and stop: entropy as a multiple of its baseline."""
OVER_CALLED = (0.06, 0.15)
"""Warn and stop: by how much a label is answered more often than it is right on held-out cases, and than at first."""
DIVERGES = (0.05, 0.1)
"""Warn and stop: how far the held-out share of exact answers falls below its best value while the reward is up."""


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
                    says = rule.says.format(about=about, observed=observed, window=rule.window)
                    found += _reached(rule.name, about, line, observed, (rule.warn, rule.stop), says, rule.helps)
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
                helps = "lower trainer.lr, or look at the rows of this step"
                yield _alarm("not_finite", name, "stop", line, None, 0.0, f"{name} is not a finite number", helps)

    def _entropy(self, line: Line) -> Iterable[Alarm]:
        value = line.get("entropy")
        if value is None:
            return
        self._entropies.append(value)
        if len(self._entropies) < BASELINE + ENTROPY_WINDOW:
            return
        baseline = median(self._entropies[:BASELINE])
        ratio = fmean(self._entropies[-ENTROPY_WINDOW:]) / baseline if baseline else 1.0
        text = f"entropy is {ratio:.2g} times what it was in the first {BASELINE} steps"
        falls, rises = "explore more: raise trainer.temperature", "lower trainer.lr: the policy is losing its form"
        for level, low, high in zip(("stop", "warn"), reversed(ENTROPY_FALLS), reversed(ENTROPY_RISES), strict=True):
            if ratio <= low or ratio >= high:
                limit, helps = (low, falls) if ratio <= low else (high, rises)
                yield _alarm("entropy", "", level, line, ratio, limit, text, helps)
                return

    def _over_called(self, line: Line) -> Iterable[Alarm]:
        excess = _means("held_out/excess")([line])
        self._first_excess = self._first_excess or excess
        for about, value in excess.items():
            observed = min(value, value - self._first_excess[about])
            says = f"{about} is answered {value:.0%} of the time more often than it is right, on held-out cases"
            yield from _reached("over_called", about, line, observed, OVER_CALLED, says, HIDES)

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
        says = f"exact answers on held-out cases fell by {min(fallen):.0%} while the reward rose"
        helps = "the reward pays for something else than right answers; compare its terms"
        yield from _reached("diverged", "", line, min(fallen), DIVERGES, says, helps)


def _reached(
    name: str, about: str, line: Line, observed: float, limits: tuple[float, float], says: str, helps: str
) -> Iterable[Alarm]:
    """The alarm of a value at the worse of its limits, warn and stop, that it reaches; none below both."""
    for level, limit in zip(("stop", "warn"), reversed(limits), strict=True):
        if observed >= limit:
            yield _alarm(name, about, level, line, observed, limit, says, helps)
            return


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


def _alarm(
    name: str, about: str, level: Any, line: Line, observed: float | None, limit: float, says: str, helps: str
) -> Alarm:
    step = int(line["step"] or 0)
    rounded = None if observed is None else round(observed, 6)
    return Alarm(name=name, about=about, level=level, step=step, observed=rounded, limit=limit, says=says, helps=helps)
