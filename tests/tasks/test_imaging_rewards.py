"""The rewards of imaging answers: what each arm pays, within what range, and that gold is the case's own."""

import hashlib
import math
from functools import cache
from random import Random

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from clinrl.errors import DataError
from clinrl.tasks.imaging.answer import LABELS
from clinrl.tasks.imaging.cases import cases
from clinrl.tasks.imaging.judging import reply
from clinrl.tasks.imaging.rewards import TERMS, JudgeTerm, Reward, SimilarityTerm, models, requests, score
from clinrl.tasks.parts import Request
from clinrl.types import Message, Transcript
from recipes import CORRECTED, PUBLISHED, reward_of

UNA, MBA, UA = LABELS
ARMS = {
    **{f"published {name}": reward for name, reward in PUBLISHED.items()},
    **{f"corrected {name}": reward for name, reward in CORRECTED.items()},
    "format_only": reward_of("imaging", "imaging-format-only"),
    "ungated": Reward(similarity=SimilarityTerm(kind="matched", gated=False)),
    "all at once": Reward(format=0.5, judge=JudgeTerm(reader="corrected"), similarity=SimilarityTerm(kind="matched")),
    "second judge": Reward(judge=JudgeTerm(reader="corrected", model="second_judge", gated=False)),
    "published, all ungated": Reward(
        parser="published", unreadable=-1.0, judge=JudgeTerm(reader="published", gated=False),
        similarity=SimilarityTerm(kind="paper", gated=False, weight=0.3),
    ),
}  # fmt: skip
arms = pytest.mark.parametrize("arm", ARMS)

contents = st.one_of(
    st.sampled_from([f"<answer>{label}</answer>" for label in LABELS]),
    st.sampled_from([f"<answer>{UA} or {MBA}</answer>", f"<answer>{UA}", "", "I do not know."]),
    st.text(),
)
thoughts = st.one_of(
    st.none(), st.text(), st.sampled_from(["", "CT shows a stone well here. Study [1] supports this. The end."])
)
replies = st.one_of(
    st.text(), st.lists(st.integers(-200, 200), min_size=3, max_size=3).map(reply), st.just('{"a": 99999999999}')
)


@cache
def known() -> tuple:
    return tuple(cases(24, 3, pool="train", mix="balanced"))


def said(content: str, thinking: str | None = None) -> Transcript:
    return Transcript(messages=(Message(role="assistant", content=content, thinking=thinking),), stop="answered")


def vector(text: str) -> numpy.ndarray:
    draw = numpy.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
    found = draw.normal(size=384).astype(numpy.float32)
    return found / numpy.linalg.norm(found)


def heard(wanted, judged: str = reply((8, 7, 6))) -> dict:
    return {ask: vector(ask.text) if ask.model == "encoder" else judged for ask in wanted}


def earned(reward: Reward, case, transcript: Transcript, judged: str = reply((8, 7, 6))):
    return score(case, transcript, reward, heard(requests(case, transcript, reward), judged))


@arms
@given(content=contents, thinking=thoughts, judged=replies, which=st.integers(0, 23))
def test_any_turn_has_a_score_within_the_declared_range(arm, content, thinking, judged, which):
    reward, case = ARMS[arm], known()[which]
    found = earned(reward, case, said(content, thinking), judged)
    assert tuple(found.terms) == TERMS
    assert reward.low - 1e-6 <= found.total <= reward.high + 1e-6
    assert math.isclose(math.fsum(found.terms.values()), found.total)


@arms
def test_only_its_oracles_are_asked(arm):
    reward = ARMS[arm]
    for case in known():
        wanted = requests(case, said(f"<answer>{case.key.label}</answer>", " ".join(case.key.reasoning)), reward)
        assert {ask.model for ask in wanted} == set(models(reward))
        assert len(set(wanted)) == len(wanted)


@arms
def test_gold_earns_more_than_any_other_label(arm):
    reward = ARMS[arm]
    for case in known():
        gold, *others = (
            earned(reward, case, said(f"<answer>{label}</answer>", " ".join(case.key.reasoning))).total
            for label in sorted(LABELS, key=lambda label: label != case.key.label)
        )
        assert gold > max(others) or arm == "format_only"


def test_published_arms_by_hand():
    case = next(case for case in known() if case.key.label == UA)
    right, wrong = (said(f"<answer>{label}</answer>", " ".join(case.key.reasoning)) for label in (UA, UNA))
    silent, bare = said("", " ".join(case.key.reasoning)), said(f"<answer>{UA}</answer>")

    def totals(arm: str, judged: str = reply((7, 7, 7))) -> list[float]:
        return [earned(PUBLISHED[arm], case, turn, judged).total for turn in (right, wrong, silent, bare)]

    assert totals("baseline") == totals("citations") == pytest.approx([2, 1, 0, 1])
    assert totals("llm-eval") == pytest.approx([2.7, 1.7, 0.7, 1.7])
    assert totals("llm-eval", reply((100, 100, 100)))[0] == pytest.approx(12)
    assert totals("llm-eval", "no verdict") == pytest.approx([2, 1, 0, 1])
    assert totals("custom-embedding") == pytest.approx([2, 1, 0, 0], abs=1e-5)
    assert totals("custom-embedding-paper") == pytest.approx([2, 1, 0, 0], abs=1e-5)
    assert (PUBLISHED["baseline"].low, PUBLISHED["baseline"].high) == (0, 2)


def test_both_scalings_of_the_published_similarity():
    case = known()[0]
    turn = said(f"<answer>{case.key.label}</answer>", "Something else was said.")
    code, paper = (earned(PUBLISHED[arm], case, turn).terms for arm in ("custom-embedding", "custom-embedding-paper"))
    assert code["similarity"] == pytest.approx((paper["similarity"] + 1) / 2)
    assert code["answer"] == paper["answer"] == 0.0
    assert code["format"] == 1.0


def test_corrected_arms_by_hand():
    case = next(case for case in known() if case.key.label == UA)
    thought = " ".join(case.key.reasoning)
    turns = [said(f"<answer>{label}</answer>", thought) for label in (UA, UNA)] + [said(f"<answer>{UA}", thought)]
    for arm, expected in {
        "baseline": [1, 0, -0.5],
        "llm-eval": [1.3, 0, -0.5],
        "custom-embedding": [2, 0, -0.5],
    }.items():
        reward = CORRECTED[arm]
        assert [earned(reward, case, turn).total for turn in turns] == pytest.approx(expected, abs=1e-5)
        assert reward.low == -0.5
    assert earned(CORRECTED["llm-eval"], case, turns[0], reply((100, 100, 100))).total == 1.5
    assert earned(CORRECTED["llm-eval"], case, turns[0], "7, 7, 7").total == 1.0
    assert earned(CORRECTED["custom-embedding"], case, said(f"<answer>{UA}</answer>")).total == 1.0


def test_the_default_needs_no_model():
    assert models(Reward()) == ()
    assert score(known()[0], said(f"<answer>{known()[0].key.label}</answer>"), Reward()).total == 1.0
    assert not any(requests(case, said("<answer>x</answer>"), Reward()) for case in known())


def test_a_gate_that_is_shut_asks_nothing():
    case = next(case for case in known() if case.key.label == UA)
    turn = said(f"<answer>{UNA}</answer>", " ".join(case.key.reasoning))
    assert requests(case, turn, CORRECTED["llm-eval"]) == requests(case, turn, CORRECTED["custom-embedding"]) == ()
    assert requests(case, turn, PUBLISHED["llm-eval"])
    assert requests(case, turn, ARMS["ungated"])
    assert requests(case, turn, Reward(judge=JudgeTerm(reader="corrected", gated=False, weight=0.0))) == ()
    assert requests(case, said(f"<answer>{UA}</answer>"), CORRECTED["llm-eval"]) == ()  # there is no reasoning to judge


def test_the_matched_similarity_alone_is_asked_without_citations():
    case = next(case for case in known() if "[" in " ".join(case.key.reasoning))
    turn = said(f"<answer>{case.key.label}</answer>", " ".join(case.key.reasoning))
    for reward, cited in ((CORRECTED["custom-embedding"], False), (PUBLISHED["custom-embedding"], True)):
        assert any("[" in ask.text for ask in requests(case, turn, reward)) == cited


@pytest.mark.parametrize("arm", ["ungated", "second judge"])
def test_good_reasons_without_a_label_earn_nothing(arm):
    reward, case = ARMS[arm], known()[0]
    silent = said("", " ".join(case.key.reasoning))
    assert requests(case, silent, reward) == ()
    assert earned(reward, case, silent).total == reward.unreadable


def test_what_is_paid_without_a_label_is_in_the_declared_range():
    reward = ARMS["published, all ungated"]
    # Silence, and right, with the judge's 5 and the similarity's 0.3 against it and for it.
    assert (reward.low, reward.high) == pytest.approx((-1 - 5.3, 1 + 5.3))


def test_the_published_judge_reads_the_whole_turn_without_a_thought():
    case = known()[0]
    (ask,) = requests(case, said(f"<answer>{case.key.label}</answer>", " "), PUBLISHED["llm-eval"])
    assert "<think> </think><answer>" in ask.text


def test_what_was_not_asked_is_a_fault_of_the_caller():
    case = known()[0]
    turn = said(f"<answer>{case.key.label}</answer>", "CT shows a stone well here.")
    for reward, model in ((CORRECTED["llm-eval"], "judge"), (CORRECTED["custom-embedding"], "encoder")):
        with pytest.raises(DataError, match=f"needs the response of the {model} .* before scoring"):
            score(case, turn, reward)


def test_a_case_without_a_label_is_refused():
    case = known()[0]
    key = case.key.model_copy(update={"label": "Unknown"})
    with pytest.raises(ValidationError, match="label"):
        type(case).model_validate(case.model_dump() | {"key": key.model_dump()})


def test_a_transcript_without_a_turn_is_silent():
    for reward in ARMS.values():
        nothing = Transcript(messages=(), stop="max_tokens")
        assert earned(reward, known()[0], nothing).terms["unreadable"] == reward.unreadable


def test_yaml_says_every_number():
    mapping = {
        "right": 1, "unreadable": -1, "judge": {"reader": "corrected", "model": "second_judge", "weight": 0.25},
        "similarity": {"kind": "matched", "floor": 0.3, "slack": 2},
    }  # fmt: skip
    reward = Reward.model_validate(mapping, strict=True)
    assert (reward.low, reward.high) == (-1, 2.25)
    for name, arm in ARMS.items():
        assert Reward.model_validate(arm.model_dump(), strict=True) == arm, name
    with pytest.raises(ValidationError, match="right"):
        Reward.model_validate({"right": 0.0, "wrong": 1.0}, strict=True)
    for wrong in ({"bonus": 1}, {"judge": {"weight": -1}}, {"similarity": {"floor": 1.0}}, {"right": math.inf}):
        with pytest.raises(ValidationError):
            Reward.model_validate(wrong, strict=True)


def test_gold_of_another_case_earns_less():
    """Shuffled gold: what the published scripts did whenever a batch was not the start of the data set."""
    together = [case for case in known() if case.key.label == UNA]
    turns = {case.id: said(f"<answer>{UNA}</answer>", " ".join(case.key.reasoning)) for case in together}
    other = Random(1).sample(together, len(together))
    for reward in (CORRECTED["custom-embedding"], *(PUBLISHED[f"custom-embedding{end}"] for end in ("", "-paper"))):
        paired = [earned(reward, case, turns[case.id]).total for case in together]
        shuffled = [earned(reward, case, turns[mate.id]).total for case, mate in zip(together, other, strict=True)]
        assert sum(paired) > sum(shuffled)
    judged = CORRECTED["llm-eval"]
    ask = Request("judge", requests(together[0], turns[together[0].id], judged)[0].text)
    assert " ".join(together[0].key.reasoning) in ask.text
