"""The release gate: whether a candidate may take the champion's place, decided from answers to the same exam.

Pure functions of records. Every limit is checked in every mode, and findings on the safety metric precede those on
other metrics. A relative limit compares answers to the same cases, so neither the luck of a draw nor another exam can
pass for progress.

Besides the limits of params.yaml the gate has floors that nobody can turn off: a candidate must surely have more exact
answers than every simple policy (constants, guesses, the bag of words), and must not surely be worse than the bag of
words in the safety metric. "Surely" means that the whole 95% interval of the difference on the same cases lies there.

Where the task has a change plan, a candidate must be better than the champion in a test at the level that the error
budget of the exam leaves (`clinrl.release.budget`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

from pydantic import Field

from clinrl.analysis.baselines import BAG_OF_WORDS
from clinrl.analysis.paired import ByMode, between_modes, comparable
from clinrl.artifacts import digest as digest_of
from clinrl.config.base import Scale, unless
from clinrl.config.change_plan import Protocol
from clinrl.config.schema import Gate, Limit
from clinrl.errors import ArtefactError
from clinrl.intervals import rounded
from clinrl.release.budget import Account, Look, Spent
from clinrl.release.form import BOTH_MODES, CHAMPION, Finding, FormRow, compare, form, paired_change, value_of
from clinrl.tasks.base import EXACT, Task
from clinrl.tasks.parts import Share
from clinrl.types import Estimate, Strict


class Decision(Strict):
    """Whether the candidate may become champion. Digests bind the decision to both adapters and to the exam."""

    model: str
    """The registered model whose champion the candidate may become."""
    task: str
    candidate: str
    candidate_digest: str
    champion: str | None
    """None if there is no champion yet, so that only the absolute limits and the floors count."""
    champion_digest: str | None
    moved: str | None
    """Digest of the audit log's last promotion or rollback before this decision, None without one: an approval of the
    decision counts until the champion's name moves, and never again."""
    exam_digest: str
    findings: tuple[Finding, ...]
    promote: bool
    reasons: tuple[str, ...]
    """One sentence for each broken limit, or a single sentence that all limits hold."""
    rows: tuple[FormRow, ...]
    """The form that the approver sees: the candidate, its rivals and every simple policy, mode by mode."""
    budget: Spent | None = Field(default=None, exclude_if=unless(None))
    """The look that it spent on the exam; None without a champion or a change plan, and in older decisions."""

    @property
    def digest(self) -> str:
        """The digest that a person approves. It covers every field."""
        return digest_of(self.model_dump(mode="json"))


def decide(
    task: Task, gate: Gate, scale: Scale, candidate: ByMode, rivals: Mapping[str, ByMode],
    simple: Mapping[str, Sequence[Any]], *, model: str, digest: str,
    champion: tuple[str, str] | tuple[None, None], moved: str | None = None, rebuilders: Sequence[str] = (),
    protocol: Protocol | None = None, look: Look | None = None, spent: Account | None = None,
) -> Decision:  # fmt: skip
    """Check the limits of the gate and the floors on the answers of the candidate and its rivals, mode by mode.

    `candidate` and each rival are answers by mode; a rival's key is its name in sentences ("the champion").
    `simple` holds the answers of the simple policies to the same cases (`baselines.answers`). `model` is the
    registered model, `digest` the candidate's identity, `champion` the name and identity of its champion, `moved`
    the digest of the audit line that last moved the champion's name, `rebuilders` the signers who built the same
    bytes. With a `look`, the `protocol` tests the candidate against the champion; `spent` is the account of the
    exam. Raises ArtefactError if a rival took another exam or other modes, if there are no answers, or if the bag
    of words is missing.
    """
    first = next(iter(candidate.values()), None)
    if first is None:
        raise ArtefactError("nothing was answered, so nothing can be decided; evaluate the candidate first")
    if not simple or (task.episodes is None and BAG_OF_WORDS not in simple):
        raise ArtefactError(
            f"{first.name} was not compared with the {BAG_OF_WORDS}, which learns from its training cases; bring them "
            "back with `dvc pull`, or build them with `dvc repro`"
        )
    for rival in rivals.values():
        _check_comparable(candidate, rival)
    policies = {
        name: {mode: replace(mine, name=name, answers=given) for mode, mine in candidate.items()}
        for name, given in simple.items()
    }
    limits = chain.from_iterable(
        _findings(task, metric, limit, scale, candidate, rivals) for metric, limit in gate.limits.items()
    )
    floors = chain.from_iterable(_floors(task, candidate, policy) for policy in policies.values())
    findings = [
        _at_least("cases", gate.least_cases, len(first.golds), f"the exam has {len(first.golds)} cases"),
        *sorted([*limits, *floors], key=lambda finding: finding.metric != task.safety.metric),
    ]
    if gate.rebuilt:
        names = f" ({', '.join(rebuilders)})" if rebuilders else ""
        signed = f"{len(rebuilders)} of the listed rebuilders{names} signed that they built the same bytes"
        findings += [_at_least("rebuilt", gate.rebuilt.least, len(rebuilders), signed)]
    findings += compare(task, protocol, look, candidate, rivals[CHAMPION]) if protocol and look else ()
    broken = tuple(finding.sentence for finding in findings if not finding.passed)
    against = f"compared with {champion[0]} case by case" if champion[0] else "there is no champion"
    left = 0.0
    if look:
        key = (digest, champion[1] or "", look.answers)
        left = (spent or Account(look.before, {})).after(key, look, passed=not broken)
    return Decision(
        model=model,
        task=task.name,
        candidate=first.name,
        candidate_digest=digest,
        champion=champion[0],
        champion_digest=champion[1],
        moved=moved,
        exam_digest=first.exam_digest,
        findings=tuple(findings),
        promote=not broken,
        reasons=broken or (f"all {len(findings)} limits hold on {len(first.golds)} cases; {against}",),
        rows=tuple(form(task, candidate, rivals, policies)),
        budget=Spent(**look.model_dump(), left_after=left) if look else None,
    )


def _check_comparable(candidate: ByMode, rival: ByMode) -> None:
    if candidate.keys() != rival.keys():
        name = next((theirs.name for theirs in rival.values()), "the other")
        raise ArtefactError(
            f"the candidate was examined in {', '.join(candidate)} and {name} in {', '.join(rival)}; "
            "evaluate both in the same modes"
        )
    for mode, mine in candidate.items():
        comparable(mine, rival[mode])


def _at_least(what: str, least: int, count: int, sentence: str) -> Finding:
    return Finding(
        metric=what, mode=BOTH_MODES, limit=f"min {least}", observed=float(count), passed=count >= least,
        sentence=f"{sentence}; the gate asks for {least} or more",
    )  # fmt: skip


def _floors(task: Task, candidate: ByMode, policy: ByMode) -> Iterator[Finding]:
    """Findings on the floors against one simple policy, in each mode, which params.yaml cannot change."""
    safety = task.safety.metric
    for mode, mine in candidate.items():
        other = policy[mode]
        change = paired_change(task.metrics[EXACT], EXACT, mine, other)
        above = change is not None and change.low > 0
        yield _floor(EXACT, mode, change, other.name, f"above {other.name}, paired", above)
        if other.name == BAG_OF_WORDS:
            harm = paired_change(task.metrics[safety], safety, mine, other)
            worse = harm is None or (harm.low > 0 if task.metrics[safety].worse == "higher" else harm.high < 0)
            yield _floor(safety, mode, harm, other.name, f"not worse than {other.name}, paired", not worse)


def _floor(metric: str, mode: str, change: Estimate | None, other: str, limit: str, passed: bool) -> Finding:
    demand = "must be above" if metric == EXACT else "must not be worse than"
    if change is None:
        sentence = f"{metric} ({mode}) could not be measured against {other}; it {demand} it"
    else:
        sentence = (
            f"{metric} ({mode}) differs by {change.value:+.4g} (95% interval {change.low:+.4g} to {change.high:+.4g}, "
            f"n = {change.n}) from {other} on the same cases; it {demand} it with its whole interval"
        )
    return Finding.of(metric, mode, limit, change, passed=passed, sentence=sentence)


def _findings(
    task: Task, metric: str, limit: Limit, scale: Scale, candidate: ByMode, rivals: Mapping[str, ByMode]
) -> Iterator[Finding]:
    yield from bounds(metric, limit, scale, _values(task, metric, candidate))
    for name, rival in rivals.items():
        for sign, allowed in ((1, limit.may_rise), (-1, limit.may_fall)):
            if allowed is not None:
                for mode, change in _changes(task, metric, candidate, rival).items():
                    yield _relative(metric, mode, change, sign, allowed, name, paired_only=limit.paired)


def bounds(metric: str, limit: Limit, scale: Scale, values: Mapping[str, Estimate | None]) -> Iterator[Finding]:
    """Findings on the absolute limits of a metric, given its values by mode: no rival is needed."""
    for mode, value in values.items():
        if limit.max is not None:
            yield _bound(metric, mode, value, "max", limit.max[scale])
        if limit.min is not None:
            yield _bound(metric, mode, value, "min", limit.min[scale])


def _values(task: Task, metric: str, answers: ByMode) -> dict[str, Estimate | None]:
    """A metric by mode, or once for all modes if it is about their agreement."""
    if metric == "mode_agreement":
        first = next(iter(answers.values()))
        given = {mode: one.answers for mode, one in answers.items()}
        agreement = between_modes(task, first.golds, given, first.clusters)
        return {BOTH_MODES: agreement.get("mode_agreement")}
    return {mode: value_of(task, metric, given) for mode, given in answers.items()}


def _changes(task: Task, metric: str, candidate: ByMode, rival: ByMode) -> dict[str, Estimate | None]:
    """Candidate minus rival on the same cases, by mode. For a statistic or an agreement, `low` and `high` are equal."""
    kind = task.all_metrics.get(metric)
    if isinstance(kind, Share):
        return {mode: paired_change(kind, metric, candidate[mode], rival[mode]) for mode in candidate}
    mine, theirs = _values(task, metric, candidate), _values(task, metric, rival)
    changes: dict[str, Estimate | None] = {}
    for mode, a in mine.items():
        b, changes[mode] = theirs[mode], None
        if a is not None and b is not None:
            change = rounded(a.value - b.value)  # or a tie at a limit would break it
            changes[mode] = Estimate(value=change, low=change, high=change, n=a.n)
    return changes


def _bound(metric: str, mode: str, value: Estimate | None, side: Literal["min", "max"], allowed: float) -> Finding:
    words = "at most" if side == "max" else "at least"
    if value is None:
        passed, sentence = False, f"{metric} ({mode}) could not be measured; the gate asks for {words} {allowed:g}"
    else:
        passed = value.value <= allowed if side == "max" else value.value >= allowed
        interval = f"{value.value:.4g} (95% interval {value.low:.4g} to {value.high:.4g}, n = {value.n})"
        sentence = f"{metric} ({mode}) is {interval}; the gate asks for {words} {allowed:g}"
    return Finding.of(metric, mode, f"{side} {allowed:g}", value, passed=passed, sentence=sentence)


def _relative(
    metric: str, mode: str, change: Estimate | None, sign: int, allowed: float, rival: str, *, paired_only: bool
) -> Finding:
    """The finding on a relative limit. With `paired_only` it is broken only if the whole interval is beyond it."""
    verb = "rise" if sign > 0 else "fall"
    limit = f"may_{verb} {allowed:g}{', paired' if paired_only else ''}, against {rival}"
    if change is None:
        passed, sentence = False, f"the change of {metric} ({mode}) could not be measured; it may {verb} by {allowed:g}"
    else:
        worst = (change.low if sign > 0 else change.high) if paired_only else change.value
        passed = sign * worst <= allowed
        interval = f" (95% interval {change.low:+.4g} to {change.high:+.4g}, n = {change.n})"
        beyond = ", with its whole interval" if paired_only else ""
        sentence = (
            f"{metric} ({mode}) changes by {change.value:+.4g}{interval if change.low < change.high else ''} against "
            f"{rival} on the same cases; it may {verb} by at most {allowed:g}{beyond}"
        )
    return Finding.of(metric, mode, limit, change, passed=passed, sentence=sentence)
