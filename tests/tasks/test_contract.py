"""What every task folder must hold to. A new folder is found and tested without an edit here.

Golden files pin what a task version means: `tests/tasks/golden/<task>-v<version>.json`, and beside it the digest of the
first cases. After raising `TASK.version`, write the new files with
`PYTHONPATH=tests python tests/tasks/test_contract.py <task>` and commit them; an
existing file is never overwritten, because data and adapters may have been built with that version.
"""

import inspect
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, islice, pairwise, permutations
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, get_args

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from clinrl.artifacts import digest
from clinrl.errors import DataError
from clinrl.models.rollout import act
from clinrl.tasks.base import (
    Task,
    get_task,
    is_sound_id,
    parts_of,
    task_names,
)
from clinrl.tasks.parts import EXACT_SHARE, Request, Safety, Share, Statistic
from clinrl.tasks.policies import write_answer
from clinrl.types import Call, Case, Message, Pool, Score, Stop, Strict, Transcript, Unreadable, transcript_of
from recipes import NAMED

GOLDEN = Path(__file__).parent / "golden"
POOLS: tuple[Pool, ...] = get_args(Pool)
SAMPLE = 60
"""Cases a task is judged on, per pool."""
PINNED = 300
"""Cases in the digest of a golden file."""
FIRST = 40
"""Of those, the first, which have a digest of their own that is soon taken."""

tasks = pytest.mark.parametrize("name", task_names())
of_one_turn = pytest.mark.parametrize("name", [name for name in task_names() if get_task(name).episodes is None])
of_several = pytest.mark.parametrize("name", [name for name in task_names() if get_task(name).episodes is not None])


@cache
def sample(name: str, pool: Pool = "train", n: int = SAMPLE) -> tuple[Case, ...]:
    task = get_task(name)
    return tuple(task.cases(n, 11, pool=pool, mix=task.checks.mixes[-1]))


@cache
def turns(name: str, thinking: bool) -> dict[Any, Message]:
    """For each label, the gold turn of a case that has it: well-formed answers of every kind."""
    task = get_task(name)
    cases = {task.label(case): case for case in reversed(sample(name))}
    assert set(cases) == set(task.labels), "the last mix must show every label within a sample"
    return {label: task.gold(cases[label], thinking=thinking).messages[-1] for label in task.labels}


def lessons_of(task: Task, judge: str, n: int, seed: int) -> Iterator[tuple[str, str]]:
    """What an embedded judge of the task learns; nothing, if it has none."""
    return task.asks.lessons(judge, n, seed)


def stand_in(task: Task, ask: Request) -> Any:
    """What a model might answer: a unit vector that equal texts share, or a reply of the form that a judge learns."""
    if ask.model == "encoder":
        vector = numpy.random.default_rng(list(ask.text.encode()) or [0]).normal(size=16).astype("float32")
        return vector / numpy.linalg.norm(vector)
    return next((reply for _, reply in lessons_of(task, ask.model, 1, 1)), "")


def scored(task: Task, case: Case, transcript: Transcript, reward: Any) -> Score:
    """The reward of a transcript, whatever models it asks."""
    asks = task.asks.requests(case, transcript, reward)
    return task.asks.score(case, transcript, reward, {ask: stand_in(task, ask) for ask in asks})


@cache
def terms(name: str) -> tuple[str, ...]:
    """The terms of a task's reward."""
    task, case = get_task(name), sample(name)[0]
    return tuple(scored(task, case, task.gold(case, thinking=False), task.Reward()).terms)


def parameter_sets(task: Task) -> dict[str, Any]:
    """The default reward, and those that the module of `Reward` names or that are pinned beside it."""
    module = sys.modules[task.Reward.__module__]
    named = {key: value for key, value in vars(module).items() if isinstance(value, task.Reward)}
    return {"default": task.Reward(), **named, **NAMED.get(task.name, {})}


def test_there_are_tasks() -> None:
    assert task_names()
    assert all(get_task(name).name == name for name in task_names())
    with pytest.raises(KeyError, match="tasks are"):
        get_task("no-such-task")


# Cases


@tasks
def test_an_answer_has_parts(name: str) -> None:
    task = get_task(name)
    for case in sample(name):
        gold = task.label(case)
        assert parts_of(task, gold, gold)


@tasks
def test_a_published_protocol_is_about_what_the_task_has(name: str) -> None:
    task = get_task(name)
    if task.benchmark is None:
        return
    found = task.benchmark
    assert task.episodes is not None
    assert found.mix in task.checks.mixes
    assert set(found.levels) <= {task.reporting.slices[found.by](case) for case in sample(name, "exam")}
    assert not task.reporting.qualities[found.quality].asks
    assert isinstance(task.metrics[found.statistic], Statistic)
    assert all(set(figures) <= set(found.levels) for figures in found.printed.values())
    assert isinstance(found.theirs, task.Reward)
    assert isinstance(found.ours, task.Reward)


@tasks
@pytest.mark.parametrize("pool", POOLS)
def test_cases_are_the_same_each_time_and_distinct(name: str, pool: Pool) -> None:
    task = get_task(name)
    for mix in task.checks.mixes:
        first, again, other = (list(task.cases(n, seed, pool=pool, mix=mix)) for n, seed in ((20, 3), (8, 3), (8, 4)))
        assert first[:8] == again != other
        assert len(first) == len({case.id for case in first}) == 20
        assert len({task.prompt(case.facts)[-1].content for case in first}) == 20


@tasks
def test_cases_are_the_same_in_another_process(name: str) -> None:
    task = get_task(name)
    command = (
        "from clinrl.tasks.base import get_task; "
        f"print(*(case.id for case in get_task({name!r}).cases(30, 5, pool='train', mix={task.checks.mixes[0]!r})))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "271"}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [case.id for case in task.cases(30, 5, pool="train", mix=task.checks.mixes[0])]


@tasks
def test_more_cases_begin_with_the_same_cases(name: str) -> None:
    task = get_task(name)
    more = task.cases(10**9, 3, pool="train", mix=task.checks.mixes[0])
    assert list(islice(more, 20)) == list(task.cases(20, 3, pool="train", mix=task.checks.mixes[0]))


@tasks
def test_cases_go_through_json_unchanged(name: str) -> None:
    task = get_task(name)
    for case in sample(name):
        assert task.Case.model_validate_json(case.model_dump_json()) == case
        assert task.Case.model_validate(json.loads(case.model_dump_json())) == case


@tasks
def test_a_case_id_is_the_hash_of_its_content(name: str) -> None:
    task = get_task(name)
    assert all(is_sound_id(task, case) for case in sample(name))
    assert all(case.id.startswith(f"{name}-") for case in sample(name))


@tasks
def test_a_group_is_in_one_pool_for_good(name: str) -> None:
    task = get_task(name)
    groups = {pool: {case.group for case in sample(name, pool)} for pool in POOLS}
    for pool in POOLS:
        assert {task.pool_of(group) for group in groups[pool]} == {pool}
    for one, other in combinations(POOLS, 2):
        assert not groups[one] & groups[other]


@tasks
def test_labels_follow_from_the_latent_facts(name: str) -> None:
    task = get_task(name)
    for pool in POOLS:
        for case in sample(name, pool):
            assert task.relabel(case) == task.label(case)
            gold = task.label(case)
            assert all(right in task.labels and right == given for right, given in parts_of(task, gold, gold).values())


@tasks
def test_rows_and_slices_are_defined_for_every_case(name: str) -> None:
    task = get_task(name)
    columns = {tuple(task.row(case)) for case in sample(name)}
    assert len(columns) == 1
    assert all(isinstance(of(case), str) and of(case) for of in task.reporting.slices.values() for case in sample(name))
    named = {
        rule.arguments["column"]
        for rule in task.checks.expectations
        if rule.on == "rows" and "column" in rule.arguments
    }
    assert named <= set(columns.pop())


@tasks
def test_a_view_shows_other_facts_of_the_same_case(name: str) -> None:
    task = get_task(name)
    assert "given" not in task.reporting.variants
    assert "view" not in task.reporting.slices, "reports keep this slice for views"
    assert not [view for view in task.reporting.variants if "/" in view or "." in view], (
        "a view's name becomes a file's"
    )
    for view, show in task.reporting.variants.items():
        pairs = [(case, shown) for case in sample(name, "exam") if (shown := show(case)) is not None]
        assert pairs, view
        for case, shown in pairs:
            assert (shown.id, shown.group, task.label(shown)) == (case.id, case.group, task.label(case))
            assert task.relabel(shown) == task.label(shown)
            assert task.parse(task.gold(shown, thinking=True)) == task.label(case)
            assert task.prompt(shown.facts) != task.prompt(case.facts)
            assert task.prompt(shown.facts)[0] == task.prompt(case.facts)[0]


@tasks
def test_clusters_are_named(name: str) -> None:
    task = get_task(name)
    if task.reporting.cluster is not None:
        names = {task.reporting.cluster(case) for case in sample(name)}
        assert all(isinstance(cluster, str) and cluster for cluster in names)
        assert len(names) > 1


# Prompts


@tasks
def test_changing_the_key_alone_changes_no_prompt(name: str) -> None:
    task = get_task(name)
    assert list(inspect.signature(task.prompt).parameters) == ["facts"]
    cases = sample(name)
    for case, other in pairwise(cases):
        swapped = case.model_copy(update={"key": other.key})
        assert task.prompt(swapped.facts) == task.prompt(case.facts)


@tasks
def test_a_prompt_is_a_system_and_a_user_turn(name: str) -> None:
    task = get_task(name)
    prompts = [task.prompt(case.facts) for case in sample(name)]
    assert all([message.role for message in prompt] == ["system", "user"] for prompt in prompts)
    assert len({prompt[0].content for prompt in prompts}) == 1, "the system turn must not depend on the case"


@tasks
def test_what_is_no_source_of_records_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    for path in (tmp_path, tmp_path / "other.csv", tmp_path / "absent"):
        with pytest.raises(DataError, match="must be"):
            get_task(name).recognise(path)


# The gold turn


@of_one_turn
@pytest.mark.parametrize("thinking", [True, False])
def test_the_gold_turn_says_the_label(name: str, thinking: bool) -> None:
    task = get_task(name)
    for case in sample(name):
        message = task.gold(case, thinking=thinking).messages[-1]
        assert message.role == "assistant"
        assert bool(message.thinking) == thinking
        assert task.parse(transcript_of(message)) == task.label(case)


@of_one_turn
def test_the_two_forms_of_the_gold_turn_differ_in_the_thinking_alone(name: str) -> None:
    task = get_task(name)
    for case in sample(name):
        direct = task.gold(case, thinking=False).messages[-1]
        assert task.gold(case, thinking=True).messages[-1].model_copy(update={"thinking": None}) == direct
        for tag in ("<think>", "</think>"):
            assert tag not in direct.content + (task.gold(case, thinking=True).messages[-1].thinking or "")


@of_one_turn
@pytest.mark.parametrize("thinking", [True, False])
def test_the_gold_turn_is_the_unique_best(name: str, thinking: bool) -> None:
    task = get_task(name)
    for case in sample(name):
        for reward in parameter_sets(task).values():
            best = scored(task, case, task.gold(case, thinking=thinking), reward).total
            others = [turn for label, turn in turns(name, thinking).items() if label != task.label(case)]
            assert all(scored(task, case, transcript_of(turn), reward).total < best for turn in others)


@tasks
def test_omitting_a_rule_changes_the_answer_where_it_is_said_to(name: str) -> None:
    task = get_task(name)
    told = [(case, rule) for case in sample(name)[:25] for rule in task.omittable(case)]
    assert {rule for _, rule in told} <= set(task.checks.rules)
    assert told or not task.checks.rules
    for case, rule in told:
        answer = task.parse(task.gold(case, thinking=False, omit=frozenset({rule})))
        assert all(given in task.labels for _, given in parts_of(task, task.label(case), answer).values())
        assert answer != task.label(case)


# Reading and scoring


@pytest.mark.long
@of_one_turn
@given(data=st.data())
def test_any_text_is_read_and_scored(name: str, data: st.DataObject) -> None:
    task = get_task(name)
    pieces = [line for turn in turns(name, False).values() for line in turn.content.splitlines()]
    near = st.lists(st.sampled_from(pieces) | st.text(max_size=20), max_size=8).map("\n".join)
    content, thinking = data.draw(st.text() | near), data.draw(st.none() | st.text() | near)
    case = data.draw(st.sampled_from(sample(name)))
    message = Message(role="assistant", content=content, thinking=thinking)
    answer = task.parse(transcript_of(message))
    assert isinstance(answer, Unreadable) or answer in task.labels
    for reward in parameter_sets(task).values():
        for stop in get_args(Stop):
            asks = task.asks.requests(case, transcript_of(message, stop), reward)
            assert {ask.model for ask in asks} <= set(task.asks.models(reward))
            replies = {ask: data.draw(st.text()) for ask in asks if ask.model != "encoder"}
            heard = {ask: replies.get(ask, stand_in(task, ask)) for ask in asks}
            score = task.asks.score(case, transcript_of(message, stop), reward, heard)
            assert reward.low <= score.total <= reward.high
            assert tuple(score.terms) == terms(name)
            assert sum(score.terms.values()) == pytest.approx(score.total, abs=1e-9)


@tasks
@pytest.mark.parametrize("roles", [(), ("user",), ("system", "user"), ("tool",)])
def test_a_transcript_without_a_turn_of_the_model_is_unreadable(name: str, roles: tuple[Any, ...]) -> None:
    task, case = get_task(name), sample(name)[0]
    said = task.gold(case, thinking=False).messages[-1].content
    transcript = Transcript(messages=tuple(Message(role=role, content=said) for role in roles), stop="max_tokens")
    assert isinstance(task.parse(transcript), Unreadable)
    for quality in task.reporting.qualities.values():
        if not quality.asks:
            quality.of(case, transcript, {})  # raises nothing


@of_one_turn
def test_an_unreadable_turn_is_strictly_the_worst(name: str) -> None:
    task, reward = get_task(name), get_task(name).Reward()
    for case in sample(name):
        worst = min(scored(task, case, transcript_of(turn), reward).total for turn in turns(name, False).values())
        for content in ("", "I cannot tell.", "\n".join(turn.content for turn in turns(name, False).values())):
            assert scored(task, case, transcript_of(Message(role="assistant", content=content)), reward).total < worst


@of_one_turn
def test_contradicting_answers_are_unreadable(name: str) -> None:
    task = get_task(name)
    for one, other in permutations(turns(name, False).values(), 2):
        both = Message(role="assistant", content=f"{one.content}\n{other.content}")
        assert isinstance(task.parse(transcript_of(both)), Unreadable)


@of_one_turn
def test_an_answer_only_inside_the_thinking_is_unreadable(name: str) -> None:
    task = get_task(name)
    for turn in turns(name, False).values():
        for content in ("", "As I said."):
            hidden = Message(role="assistant", content=content, thinking=turn.content)
            assert isinstance(task.parse(transcript_of(hidden)), Unreadable)


@of_one_turn
def test_another_answer_inside_the_thinking_is_never_the_answer(name: str) -> None:
    """It changes nothing, or it makes the turn unreadable."""
    task = get_task(name)
    for (label, turn), (_, other) in permutations(turns(name, False).items(), 2):
        outcome = task.parse(transcript_of(turn.model_copy(update={"thinking": other.content})))
        assert outcome == label or isinstance(outcome, Unreadable)


@pytest.mark.parametrize("name", [name for name in task_names() if "rule" in get_task(name).reporting.slices])
def test_a_rule_that_is_emphasised_decides_more_cases(name: str) -> None:
    """Or a draft from the rules that a version misses would train on the cases that it had before."""
    task = get_task(name)

    def share(rule: str, **emphasis: float) -> int:
        cases = task.cases(200, 5, pool="train", mix=task.checks.mixes[0], emphasis=emphasis)
        return [task.reporting.slices["rule"](case) for case in cases].count(rule)

    rarest = min(task.checks.deciding, key=lambda rule: (not share(rule), share(rule)))
    assert share(rarest, **{rarest: 20.0}) > share(rarest) > 0


@of_one_turn
def test_only_the_gold_label_costs_nothing(name: str) -> None:
    task = get_task(name)
    for gold in task.labels:
        costs = {answer: task.improvement.cost(gold, answer) for answer in task.labels}
        assert costs.pop(gold) == 0
        assert min(costs.values()) > 0
        assert task.improvement.cost(gold, Unreadable(reason="nothing said")) >= max(costs.values())


@tasks
def test_triggers_are_read_in_the_text_alone(name: str) -> None:
    task = get_task(name)
    assert set(task.improvement.triggers) <= set(task.checks.rules)
    for rule, shows in task.improvement.triggers.items():
        cases = sample(name, n=100)
        verdicts = [shows(case) for case in cases]
        assert {*verdicts} == {True, False}, rule
        others = [case.model_copy(update={"key": other.key}) for case, other in pairwise([*cases, cases[0]])]
        assert [shows(case) for case in others] == verdicts, rule


@tasks
def test_policies_answer_and_the_mediocre_one_is_among_them(name: str) -> None:
    task = get_task(name)
    policies = task.policies()
    lazy = {"empty", "truncated", "hedge", "random"} if task.episodes is None else {"null", "coin"}
    assert {"mediocre"} | lazy <= set(policies)
    for policy, answer in policies.items():
        once, again = ([answer(case, rng) for case in sample(name)[:8]] for rng in (Random(policy), Random(policy)))
        assert once == again
        assert {transcript.messages[-1].role for transcript in once} == {"assistant"}
    for silent in lazy & {"empty", "truncated", "hedge", "null"}:
        transcript = policies[silent](sample(name)[0], Random(0))
        assert isinstance(task.parse(transcript), Unreadable), silent


# Metrics


@tasks
def test_metrics_of_a_perfect_set_are_perfect(name: str) -> None:
    task = get_task(name)
    golds = [task.label(case) for case in sample(name)]
    for metric, how in task.metrics.items():
        assert how.worse in ("higher", "lower")
        best = how.worse == "lower"
        if isinstance(how, Share):
            counted = [value for gold in golds if (value := how.of(gold, gold)) is not None]
            assert counted, metric
            assert all(value is best for value in counted), metric
        else:
            assert how.value(Counter(zip(golds, golds, strict=True))) == pytest.approx(float(best)), metric


@tasks
def test_metrics_are_defined_when_nothing_was_readable(name: str) -> None:
    task = get_task(name)
    silent = Unreadable(reason="empty")
    for metric, how in task.metrics.items():
        if isinstance(how, Share):
            values = [how.of(task.label(case), silent) for case in sample(name)]
            assert all(value is None or isinstance(value, bool) for value in values), metric
            assert how.worse == "higher" or not any(values), f"{metric} counts an unreadable answer as good"


@tasks
def test_what_reports_show_is_defined(name: str) -> None:
    task = get_task(name)
    assert {"exact", task.safety.metric} <= set(task.metrics)
    assert not set(task.metrics) & set(task.reporting.qualities)
    assert set(task.reporting.headline) <= {*task.metrics, *task.reporting.qualities, "no_parse", "clipped"}
    assert set(task.reporting.row_metrics) <= set(task.metrics)
    assert task.reporting.approval[0] == "exact"
    assert task.safety.metric in task.reporting.approval
    assert all(isinstance(task.metrics[name], Share) for name in task.reporting.approval)
    assert len(set(task.reporting.headline)) == len(task.reporting.headline)


@tasks
def test_qualities_are_between_nothing_and_all_or_counts(name: str) -> None:
    task = get_task(name)
    for quality in task.reporting.qualities.values():
        assert quality.worse in ("higher", "lower")
        for case in sample(name)[:20]:
            for turn in (task.gold(case, thinking=True).messages[-1], Message(role="assistant", content="")):
                asks = quality.requests(case, transcript_of(turn))
                assert {ask.model for ask in asks} <= set(quality.asks)
                value = quality.of(case, transcript_of(turn), {ask: stand_in(task, ask) for ask in asks})
                assert value is None or 0 <= value <= (math.inf if quality.counts else 1)


@tasks
@pytest.mark.parametrize("judge", ["judge", "second_judge"])
def test_lessons_are_the_same_each_time(name: str, judge: str) -> None:
    task = get_task(name)
    first, again = (list(lessons_of(task, judge, 5, 3)) for _ in range(2))
    assert first == again
    assert len(first) in (0, 5)
    assert all(isinstance(text, str) and text for pair in first for text in pair)


# Episodes


@of_several
@pytest.mark.parametrize("thinking", [True, False])
def test_the_gold_episode_decides_everything_rightly_and_earns_the_most(name: str, thinking: bool) -> None:
    task, reward = get_task(name), get_task(name).Reward()
    for case in sample(name):
        gold = task.gold(case, thinking=thinking)
        assert task.parse(gold) == task.label(case) == task.relabel(case)
        assert scored(task, case, gold, reward).total == pytest.approx(reward.high)
        turns_of_its_own = [message for message in gold.messages if message.role == "assistant"]
        assert all((turn.thinking is not None) == thinking for turn in turns_of_its_own)
        assert len(turns_of_its_own) <= task.episodes.turns
        assert [message.calls for message in gold.messages if message.role == "tool"] == [()] * (
            sum(len(turn.calls) for turn in turns_of_its_own)
        )


@of_several
def test_the_modes_of_the_gold_episode_make_the_same_calls(name: str) -> None:
    task = get_task(name)
    for case in sample(name)[:50]:
        both = [task.gold(case, thinking=thinking) for thinking in (True, False)]
        thoughtful, direct = ([turn.calls for turn in one.messages] for one in both)
        assert thoughtful == direct


@of_several
@given(data=st.data())
def test_any_episode_is_read_and_scored(name: str, data: st.DataObject) -> None:
    task = get_task(name)
    case = data.draw(st.sampled_from(sample(name)[:20]))
    known = [call for turn in task.gold(case, thinking=False).messages for call in turn.calls]
    values = st.none() | st.integers() | st.text(max_size=8) | st.lists(st.text(max_size=3), max_size=2)
    strange = st.builds(
        Call, name=st.text(max_size=10), arguments=st.dictionaries(st.text(max_size=10), values, max_size=3)
    )
    bent = st.sampled_from(known).flatmap(
        lambda call: st.builds(
            Call, name=st.just(call.name), arguments=st.fixed_dictionaries(dict.fromkeys(call.arguments, values))
        )
    )
    calls = st.lists(st.sampled_from(known) | strange | bent, max_size=6).map(tuple)
    environment = task.episodes.environment()
    environment.reset(case=case)
    messages: list[Message] = []
    for made in data.draw(st.lists(calls, max_size=5)):
        messages.append(Message(role="assistant", content=data.draw(st.text(max_size=20)), calls=made))
        messages += [act(environment, call) for call in made]
    transcript = Transcript(messages=tuple(messages), stop=data.draw(st.sampled_from(get_args(Stop))))
    answer = task.parse(transcript)
    for right, given_label in parts_of(task, task.label(case), answer).values():
        assert right in task.labels
        assert isinstance(given_label, Unreadable) or given_label in task.labels
    for reward in parameter_sets(task).values():
        score = task.score(case, transcript, reward)
        assert reward.low <= score.total <= reward.high
        assert tuple(score.terms) == terms(name)
        assert sum(score.terms.values()) == pytest.approx(score.total, abs=1e-9)
    assert task.improvement.cost(task.label(case), answer) >= 0
    for quality in task.reporting.qualities.values():
        value = quality.of(case, transcript, {})
        assert value is None or 0 <= value <= (math.inf if quality.counts else 1)


@of_several
def test_lazy_episodes_earn_less_than_a_mediocre_reader(name: str) -> None:
    task, reward = get_task(name), get_task(name).Reward()
    earned = {
        policy: fmean(
            scored(task, case, play(case, Random(f"{policy}/{case.id}")), reward).total for case in sample(name)[:50]
        )
        for policy, play in task.policies().items()
        if policy not in task.checks.readers
    }
    mediocre = earned.pop("mediocre")
    assert max(earned.values()) < mediocre, earned
    assert all(
        scored(task, case, transcript_of(Message(role="assistant", content="")), reward).total < 0
        for case in sample(name)
    )


@of_several
def test_only_right_decisions_cost_nothing(name: str) -> None:
    task = get_task(name)
    for case in sample(name)[:30]:
        gold = task.label(case)
        assert task.improvement.cost(gold, gold) == 0
        others = [task.parse(play(case, Random(0))) for play in task.policies().values()]
        assert all(task.improvement.cost(gold, other) > 0 for other in others if other != gold)


# What the version number promises


def golden(task: Task) -> dict[str, Any]:
    """What a task version means, in numbers: five cases in full.

    The five are the first case of each label, filled up with the first of the sample. A case's terms are given for
    the gold turn and for a well-formed answer of every other label, under every parameter set of the reward.
    """
    cases = sample(task.name)
    first = {task.label(case): case for case in reversed(cases)}
    labels = task.labels if task.episodes is None else ()
    chosen = list({case.id: case for case in (*(first[label] for label in labels), *cases)}.values())[:5]
    return {"task": task.name, "version": task.version, "cases": [_meaning(task, case) for case in chosen]}


def digest_of(task: Task, n: int) -> str:
    """What it means of the first `n` cases."""
    return digest([_meaning(task, case) for case in sample(task.name, n=n)])


def _meaning(task: Task, case: Case) -> dict[str, Any]:
    thinking, direct = (task.gold(case, thinking=thinking) for thinking in (True, False))
    if task.episodes is None:
        answers = {label: transcript_of(turn) for label, turn in turns(task.name, False).items()} | {
            task.label(case): direct
        }
    else:
        answers = {"gold": direct, **{name: play(case, Random(name)) for name, play in task.policies().items()}}
    rewards = parameter_sets(task)
    terms: dict[str, dict[str, Any]] = {key: {} for key in rewards}
    for label, answer in answers.items():  # an episode is played again once for all rewards
        for key, reward in rewards.items():
            terms[key][str(label)] = scored(task, case, answer, reward).terms
    unreadable = scored(task, case, transcript_of(Message(role="assistant", content="")), task.Reward()).terms
    return {
        "id": case.id,
        "prompt": digest([message.model_dump(mode="json") for message in task.prompt(case.facts)]),
        "gold": digest([turn.model_dump(mode="json") for done in (thinking, direct) for turn in done.messages]),
        "terms": {
            **{key: {label: _nonzero(values) for label, values in each.items()} for key, each in terms.items()},
            "unreadable": _nonzero(unreadable),
        },
    }


def _nonzero(terms: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 9) for name, value in terms.items() if round(value, 9)}


def golden_files(task: Task) -> tuple[Path, Path]:
    """The golden file of a task's present version, and that of its first cases."""
    return GOLDEN / f"{task.name}-v{task.version}.json", GOLDEN / f"{task.name}-v{task.version}-first.sha256"


CHANGED = (
    "a prompt, rule, reward or case changed its meaning; raise TASK.version and write the new golden files: "
    "`PYTHONPATH=tests python tests/tasks/test_contract.py <task>`"
)


@pytest.mark.long
@tasks
def test_a_version_means_what_it_meant(name: str) -> None:
    task = get_task(name)
    path, of_first = golden_files(task)
    assert path.is_file(), (
        f"{path} is missing: write it with `PYTHONPATH=tests python tests/tasks/test_contract.py {name}`"
    )
    pinned, now = json.loads(path.read_text(encoding="utf-8")), golden(task)
    assert not [key for key in now if pinned.get(key) != now[key]], CHANGED
    assert digest_of(task, FIRST) == of_first.read_text(encoding="utf-8").strip(), CHANGED


@pytest.mark.slow
@tasks
def test_a_version_means_what_it_meant_in_all_that_is_pinned(name: str) -> None:
    task = get_task(name)
    pinned = json.loads(golden_files(task)[0].read_text(encoding="utf-8"))
    assert digest_of(task, PINNED) == pinned["sample"], CHANGED


def write_golden(name: str) -> tuple[Path, Path]:
    """Write the golden files of the task's present version. Raises SystemExit if that version already has them."""
    task = get_task(name)
    path, of_first = golden_files(task)
    if path.exists():
        raise SystemExit(f"{path} exists: raise TASK.version (or delete it, if nothing was ever built with it)")
    path.parent.mkdir(exist_ok=True)
    whole = golden(task) | {"sample": digest_of(task, PINNED)}
    path.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    of_first.write_text(f"{digest_of(task, FIRST)}\n", encoding="utf-8")
    return path, of_first


@pytest.mark.parametrize("members", [{}, {"metrics": {"near": None}}])
def test_a_task_without_its_metrics_is_named(members):
    with pytest.raises(TypeError, match=r"the task Short needs `metrics`, with 'exact' among them"):
        type("Short", (Task,), members)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"version": None}, "the task Odd needs version; see"),
        ({"safety": Safety(metric="misssed")}, "`safety.metric` of the task Odd is no share of `metrics`: 'misssed'"),
        ({"safety": Safety(metric="kappa")}, "`safety.metric` of the task Odd is no share of `metrics`: 'kappa'"),
        (
            {"ordered": replace(get_task("esi").ordered, over="kappa")},
            "`ordered.over` of the task Odd is no share of `metrics`: 'kappa'",
        ),
    ],
)
def test_a_task_with_a_member_missing_or_misnamed_is_named(members, says):
    whole = dict.fromkeys(("name", "version", "Case", "Reward", "labels")) | {"metrics": get_task("esi").metrics}
    given = {name: of for name, of in (whole | members).items() if name not in members or of is not None}
    with pytest.raises(TypeError, match=re.escape(says)):
        type("Odd", (Task,), given)


def wordy(content: str, *, last: int = 5) -> Task:
    """Triage without parts of its own: cases of levels up to `last`, asked in lines, with a reason in each answer."""
    esi = get_task("esi")
    cases = {label: next(case for case in sample("esi") if case.key.level == label) for label in range(1, last + 1)}
    members: dict[str, Any] = {
        "metrics": {"exact": EXACT_SHARE, "cost": Statistic(of=len, worse="higher")},
        "cases": lambda self, n, seed, **_: iter(cases.values()),
        "prompt": lambda self, facts: [Message(role="user", content=f"Note:\n{facts.narrative}")],
        "gold": lambda self, case, **_: write_answer(content.format(case.facts.narrative, case.key.level)),
    }
    other = {name: staticmethod(getattr(esi, name)) for name in ("label", "parse", "score")}
    plain = {name: getattr(esi, name) for name in ("name", "version", "Case", "Reward", "labels")}
    return type("Wordy", (Task,), members | other | plain)()


def test_the_defaults_of_a_task_hold_for_answers_with_reasons_and_requests_of_many_lines():
    task, case = wordy("{0}\nANSWER: ESI {1}"), sample("esi")[0]
    assert task.safety.metric == "exact"  # a statistic cannot be tested on the same cases
    assert task.row(case)["text"] == f"Note: {case.facts.narrative}"
    assert task.policies()["always_2"](case, Random(0)) == write_answer("ANSWER: ESI 2")
    whole = wordy("ANSWER: ESI {1}\n{0}").policies()["always_2"](case, Random(0)).messages[0].content
    assert whole.startswith("ANSWER: ESI 2\n")
    with pytest.raises(
        TypeError, match="none of the cases of esi that were looked at has the label 5; give it `policies`"
    ):
        wordy("{1}", last=4).policies()


@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_no_record_of_a_task_holds_nan_or_infinity(number):
    class Reward(Strict):
        missed: float

    with pytest.raises(ValidationError, match="finite number"):
        Reward(missed=number)


@pytest.mark.parametrize("exported", [None, type(get_task("esi")), get_task("imaging")])
def test_a_folder_exports_one_task_of_its_own_name(monkeypatch, exported):
    monkeypatch.setattr("clinrl.tasks.esi.TASK", exported)
    with pytest.raises(TypeError, match=r"clinrl/tasks/esi needs TASK, an instance of a Task whose `name` is 'esi'"):
        get_task("esi")


@pytest.mark.parametrize("name", task_names())
def test_a_pool_that_does_not_exist_is_refused(name):
    task = get_task(name)
    with pytest.raises(KeyError, match="exm"):
        next(task.cases(1, 7, pool="exm", mix=task.checks.mixes[0]))


if __name__ == "__main__":
    for task_name in sys.argv[1:] or task_names():
        print(*write_golden(task_name))
