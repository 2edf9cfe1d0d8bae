"""The reward audit, or probe: before a version is trained, it finds out what its reward would teach on its stream.

Every reward that failed in the published series failed in a way that a policy without a model shows: the first label as
the answer to every case earned more than honest work. The probe lets such lazy policies answer the real stream, and
refuses the version if one of them earns as much as a mediocre reader. It loads only the models that the reward needs,
and takes seconds if there are none.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from clinrl import artifacts, paths
from clinrl.config.params import Params
from clinrl.config.recipes import GrpoProfile, GrpoTrainer, Phase, RejectionTrainer, SftProfile
from clinrl.data.dataset import is_import, manifest_of, read_cases
from clinrl.data.sampling import Row, omitted, phase_of, shares, training_stream
from clinrl.errors import ArtefactError, ProbeError, echo
from clinrl.models.judges import Judges, Pair, scores
from clinrl.runtime.progress import progress
from clinrl.tasks.base import Task, as_variant, get_task
from clinrl.tasks.policies import write_answer
from clinrl.types import Case, Transcript, Unreadable

HONEST = "mediocre"
"""The policy whose mean reward every lazy policy must stay below."""
TOLERANCE = 1e-9
"""Totals that differ by less count as equal, since they may be sums of the same terms in another order."""

UNREADABLE = write_answer(""), write_answer("", "", "max_tokens")
"""Transcripts without an answer: an empty turn, and a turn whose reasoning used up the budget."""


def stage(params: Params, version: str) -> None:
    """Probe `version` and write `paths.probe_proof(version)`, or write `<version>.failed.json` beside it and raise.

    For SFT it reports the stream, and how often each declared omission falsifies a label. For GRPO and rejection
    sampling it scores every policy of the task, and the gold turns, on every row of the stream. A recipe with a waiver
    gets a proof that states what is wrong with it. Raises ProbeError if a lazy policy earns at least as much as the
    mediocre one, if an unreadable answer is not strictly the worst outcome, if the gold answer is not the only best
    one, or if the reward is a placebo; ArtefactError if the data set has no proof, or only a proof for other data.
    """
    block = params.versions[version]
    task = get_task(block.task)
    proof = paths.probe_proof(version)
    failed = proof.with_suffix(".failed.json")
    with artifacts.exclusive(proof):
        data = validated_identity(block.data, task)
        cases = list(read_cases(paths.cases(block.data), task))
        proof.unlink(missing_ok=True)  # only now, since the probe can run
        failed.unlink(missing_ok=True)
        rows = training_stream(params, version, cases)
        profile = params.profiles[block.profile]
        report: dict[str, Any] = {
            "version": version,
            "task": task.name,
            "task_version": task.version,
            "data": {"name": block.data, "identity": data},
            "method": profile.method,
            "seed": block.seed,
            "stream": describe(rows, task, profile.stream.phases, params.trainer(block.profile).steps),
        }
        fault = None
        trainer = params.trainer(block.profile)
        if isinstance(trainer, GrpoTrainer | RejectionTrainer):
            reward = params.reward(version)
            report["reward"] = reward.model_dump(mode="json")
            thinking = {mode: params.modes[mode].thinking for mode in profile.modes}
            judges = Judges(paths.base(task.name))
            shown = [as_variant(task, case, profile.view) for case in cases]
            if task.asks.models(reward):  # models are slow, so they score the cases of the stream only
                shown = list({row.case.id: row.case for row in rows}.values())
            report["outcomes"] = outcomes(shown, task, reward, judges)
            report |= score_policies(
                rows, task, reward, thinking=thinking, group=trainer.group, seed=block.seed, judges=judges
            )
            fault = judge(report["policies"], report["outcomes"], task.checks.readers)
        if isinstance(profile, GrpoProfile) and profile.placebo:
            report["placebo"] = profile.placebo
            fault = f"its placebo reward ({profile.placebo}) is paid in place of what the task's score says"
        if isinstance(profile, SftProfile):
            report["omissions"] = audit_omissions(rows, task, profile.omit, block.seed)
        if fault and profile.waiver:
            report |= {"refused": fault, "waiver": profile.waiver}
            echo(f"{version} would learn the wrong thing: {fault}; waived: {profile.waiver}")
        elif fault:
            artifacts.write_json(failed, report | {"refused": fault})
            raise ProbeError(f"{version} would learn the wrong thing: {fault}; see {failed}")
        artifacts.write_json(proof, report)


def validated_identity(data: str, task: Task) -> str:
    """The identity of a data set. Raises ArtefactError unless the proof of its validation names the same identity."""
    identity = artifacts.identity(manifest_of(paths.cases(data), task))
    if identity_in_proof(data) != identity:
        raise ArtefactError(
            f"{paths.data_proof(data)} is for other data than {paths.cases(data)} now holds; {_validate(data)}"
        )
    return identity


def identity_in_proof(data: str) -> str:
    """The identity of a data set in its proof. Its cases need not be here. Raises ArtefactError without a proof."""
    not_passed = f"the data set {data} did not pass validation"
    return identity_in(paths.data_proof(data), not_passed, "validation", _validate(data))


def identity_in(proof: Path, not_passed: str, kind: str, advice: str) -> str:
    """The identity of the data that a proof file is about. Raises ArtefactError if it is missing, or is no proof."""
    try:
        identity: str = json.loads(proof.read_text(encoding="utf-8"))["data"]["identity"]
    except FileNotFoundError:
        raise ArtefactError(f"{proof} does not exist, so {not_passed}; {advice}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise ArtefactError(f"{proof} is not the proof of a {kind}; {advice}") from None
    return identity


def _validate(data: str) -> str:
    return f"run `dvc repro {'validate-import' if is_import(paths.cases(data)) else 'validate'}@{data}`"


def describe(rows: Sequence[Row], task: Task, phases: Sequence[Phase] = (), steps: int = 1) -> dict[str, Any]:
    """The stream in numbers: rows, distinct cases, and the share (0..1) of each label and each mode.

    With phases, also the share of each phase among the rows, and the share of each value among the rows of a phase.
    """
    modes, labels = Counter(row.mode for row in rows), [task.label(row.case) for row in rows]
    found = {
        "rows": len(rows),
        "distinct_cases": len({row.case.id for row in rows}),
        "shares": {str(label): round(share, 6) for label, share in shares(labels, task.labels).items()},
        "modes": {mode: round(count / len(rows), 6) for mode, count in sorted(modes.items())},
    }
    return found | ({"phases": _phases(rows, task, phases, steps)} if phases else {})


def _phases(rows: Sequence[Row], task: Task, phases: Sequence[Phase], steps: int) -> list[dict[str, Any]]:
    of = task.reporting.slices[phases[0].slice]
    each = len(rows) // steps
    values: list[list[str]] = [[] for _ in phases]
    for index, row in enumerate(rows):
        values[phase_of(index, phases, steps=steps, each=each) - 1].append(of(row.case))
    return [
        {
            "slice": phase.slice,
            "share": round(len(found) / len(rows), 6),
            "shares": {value: round(share, 6) for value, share in shares(found, phase.values).items()},
        }
        for phase, found in zip(phases, values, strict=True)
    ]


def audit_omissions(rows: Sequence[Row], task: Task, omit: Mapping[str, float], seed: int) -> dict[str, Any]:
    """The effect of the declared omissions on the stream.

    For each rule: the declared share; `triggered`, the share of rows whose label the rule decides (leaving it out
    changes the taught answer); and `affected`, the share of those rows whose label ignores the rule. For all rules
    together: `relabelled`, the share of rows that teach another answer than the gold label.
    """
    triggered: Counter[str] = Counter()
    affected: Counter[str] = Counter()
    relabelled = 0
    for row in rows:
        ignored = omitted(row.case, omit, seed)
        for rule in set(omit).intersection(task.omittable(row.case)):
            triggered[rule] += 1
            affected[rule] += rule in ignored
        relabelled += bool(ignored) and task.parse(task.gold(row.case, thinking=False, omit=ignored)) != task.label(
            row.case
        )
    return {
        "rules": {
            rule: {
                "declared": share,
                "triggered": round(triggered[rule] / len(rows), 6),
                "affected": round(affected[rule] / triggered[rule], 6) if triggered[rule] else None,
            }
            for rule, share in omit.items()
        },
        "relabelled": round(relabelled / len(rows), 6),
    }


def score_policies(
    rows: Sequence[Row], task: Task, reward: Any, *, thinking: Mapping[str, bool], group: int, seed: int, judges: Judges
) -> dict[str, Any]:
    """The rewards of every policy on every row of the stream. Judges get the requests of a policy in one batch.

    `policies`: mean and standard deviation of the reward of each policy (gold answers in the mode of the row).
    `zero_spread`: the share of groups of `group` mediocre answers with equal rewards, from which GRPO learns nothing.
    """
    policies = task.policies()
    earned: dict[str, list[float]] = {}
    with progress("probe", (len(policies) + 2) * len(rows)) as advance:
        for name, policy in policies.items():
            random = Random(f"{seed}:{name}")
            earned[name] = totals(task, [(row.case, policy(row.case, random)) for row in rows], reward, judges)
            advance(len(rows))
        gold = [(row.case, task.gold(row.case, thinking=thinking[row.mode])) for row in rows]
        earned["gold"] = totals(task, gold, reward, judges)
        advance(len(rows))
        random = Random(f"{seed}:zero-spread")
        tries = [(row.case, policies[HONEST](row.case, random)) for row in rows for _ in range(group)]
        drawn = totals(task, tries, reward, judges)
        groups = [drawn[first : first + group] for first in range(0, len(drawn), group)]
        advance(len(rows))
    return {
        "policies": {
            name: {"mean": round(statistics.fmean(each), 6), "std": round(statistics.pstdev(each), 6)}
            for name, each in sorted(earned.items())
        },
        "zero_spread": round(sum(max(some) - min(some) <= TOLERANCE for some in groups) / len(rows), 6),
        "group": group,
    }


def outcomes(cases: Sequence[Case], task: Task, reward: Any, judges: Judges) -> dict[str, Any]:
    """The extreme outcomes over all labels and all cases.

    They are the best reward of an unreadable answer, the worst reward of a readable one, and the number of cases whose
    gold answer is not the only best one, with the id of the first such case.
    """
    unreadable = totals(task, [(case, silent) for case in cases for silent in UNREADABLE], reward, judges)
    lazy = {case.id: plain_answers(task, case) for case in cases}
    gold = [(case, best) for case in cases for best in golds(task, case)]
    each = iter(totals(task, [(case, done) for case in cases for _, done in lazy[case.id]], reward, judges))
    best = totals(task, gold, reward, judges)
    worst, beaten = math.inf, []
    for i, case in enumerate(cases):
        earned = [(answer, next(each)) for answer, _ in lazy[case.id]]
        worst = min([worst, *(total for answer, total in earned if not isinstance(answer, Unreadable))])
        if not gold_is_best(task.label(case), best[2 * i : 2 * i + 2], earned):
            beaten.append(case.id)
    return {
        "best_unreadable": round(max(unreadable), 6),
        "worst_readable": round(worst, 6),
        "gold_beaten": len(beaten),
        "gold_beaten_first": beaten[0] if beaten else None,
    }


def judge(
    policies: Mapping[str, Mapping[str, float]], extremes: Mapping[str, Any], readers: Sequence[str] = ()
) -> str | None:
    """The reason not to train on the reward, in one sentence, or None. All policies except mediocre, gold and `readers`
    count as lazy."""
    honest = policies[HONEST]["mean"]
    lazy = {name: earned["mean"] for name, earned in policies.items() if name not in (HONEST, "gold", *readers)}
    worst = max(lazy, key=lambda name: lazy[name])
    if lazy[worst] >= honest:
        return (
            f"the lazy policy {worst!r} earns {lazy[worst]:.3f} a row of this stream, a mediocre reader {honest:.3f}; "
            "make its errors cost more, or lower the repeat or the cap of the label it pays"
        )
    if extremes["best_unreadable"] >= extremes["worst_readable"] - TOLERANCE:
        return (
            f"the lazy policy of saying nothing earns {extremes['best_unreadable']:.3f}, not less than the worst "
            f"readable answer, {extremes['worst_readable']:.3f} (a mediocre reader's mean is {honest:.3f}); "
            "set the reward of an unreadable answer below every other"
        )
    if extremes["gold_beaten"]:
        return (
            f"on {extremes['gold_beaten']:,} cases, first {extremes['gold_beaten_first']}, another answer earns "
            f"as much as gold (mean of gold {policies['gold']['mean']:.3f}, of a mediocre reader {honest:.3f}); "
            "make the exact answer the only best"
        )
    return None


def plain_answers(task: Task, case: Case) -> list[tuple[Any, Transcript]]:
    """Answers to a case without reasons, each with its transcript.

    There is one for each label, from the policy `always_<label>`. For an episode, there is one for each policy except
    the mediocre one.
    """
    policies = task.policies()
    if task.episodes is None:
        return [(label, policies[f"always_{label}"](case, Random(0))) for label in task.labels]
    done = [policy(case, Random(0)) for name, policy in policies.items() if name != HONEST]
    return [(task.parse(transcript), transcript) for transcript in done]


def golds(task: Task, case: Case) -> tuple[Transcript, Transcript]:
    """The gold transcript with thinking and the one without."""
    return task.gold(case, thinking=True), task.gold(case, thinking=False)


def gold_is_best(label: Any, gold: Sequence[float], plain: Sequence[tuple[Any, float]]) -> bool:
    """Whether each gold transcript earns at least as much as every plain answer, and more than every wrong one.

    `label` is the right answer, `gold` the rewards of the gold transcripts, and `plain` plain answers with theirs.
    """
    return all(
        min(gold) >= earned - TOLERANCE if answer == label else min(gold) > earned + TOLERANCE
        for answer, earned in plain
    )


def totals(task: Task, pairs: Sequence[Pair], reward: Any, judges: Judges) -> list[float]:
    """The reward of each transcript, as a number."""
    return [score.total for score in scores(task, pairs, reward, judges)]
