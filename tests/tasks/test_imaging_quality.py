"""Measures of imaging reasonings: what they count, on turns whose right value is known."""

import json
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from agreement import spread
from clinrl.config.params import load_params
from clinrl.data.dataset import draw
from clinrl.tasks.base import get_task
from clinrl.tasks.imaging import judging, quality
from clinrl.tasks.imaging.cases import cases
from clinrl.tasks.imaging.statements import CITES, STANCES, read
from clinrl.types import Message, Transcript

TASK = get_task("imaging")
CASES = [case for case in cases(200, 3, pool="mine", mix="natural") if len(case.facts.evidence) == 2]
NOBODY: dict = {}
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tasks/imaging.md").read_text(encoding="utf-8")


def thinks(text: str | None) -> Transcript:
    return Transcript(
        messages=(Message(role="assistant", content="<answer>x</answer>", thinking=text),), stop="answered"
    )


def measured(case, text):
    heard = {ask: judging.reply((4, 7, 9)) for ask in quality.second_requests(case, thinks(text))}
    return {name: how.of(case, thinks(text), heard) for name, how in quality.QUALITIES.items()}


@pytest.mark.parametrize("case", CASES[:20], ids=lambda case: case.id)
def test_gold_is_perfect_in_every_wording(case):
    rng = Random(case.id)
    for text in (" ".join(case.key.reasoning), " ".join(judging.reword(x, rng) for x in case.key.reasoning)):
        found = measured(case, text)
        assert found.pop("second_opinion") == 0.4
        cites = any(read(sentence).kind == CITES for sentence in case.key.reasoning)
        assert found == {
            "statement_recall": 1.0, "statement_precision": 1.0, "contradiction": 0.0,
            "citation_validity": 1.0 if cites else None, "citation_truth": 1.0 if cites else None,
        }  # fmt: skip


def test_a_statement_left_out_lowers_recall_alone_and_one_too_many_precision_alone():
    case = CASES[0]
    plain = [sentence for sentence in case.key.reasoning if read(sentence).kind != CITES]
    less, more = measured(case, " ".join(plain[1:])), measured(case, " ".join([*plain, "The weather was fine."]))
    assert (less["statement_recall"], less["statement_precision"]) == (1 - 1 / len(plain), 1.0)
    assert (more["statement_recall"], more["statement_precision"]) == (1.0, len(plain) / (len(plain) + 1))
    assert less["contradiction"] == more["contradiction"] == 0.0


EXAMS = ROOT / "data/reports/exams/imaging"
ROWS = {
    "base, without evidence": (["imaging-base"], "think.without_evidence"),
    "base, with evidence": (["imaging-base"], "think"),
    "baseline": ([f"imaging-baseline-{seed}" for seed in range(1, 6)], "think"),
    "citations": ([f"imaging-citations-{seed}" for seed in range(1, 6)], "think"),
}


@pytest.mark.long
def test_the_page_says_of_which_studies_statements_are_false():
    """From the committed records of the exam, whose cases are drawn again."""
    exam = list(draw(load_params(ROOT / "params.yaml").datasets["imaging-x2"]))
    gold = [quality.gold_statements(case) for case in exam]
    cited = [[some.about[1] == STANCES["agrees"] for some in one if some.kind == CITES] for one in gold]

    def kind(case, statements, agree):
        if not case.facts.evidence:
            return "none"
        if any(some.kind == "wrong_region" for some in statements):
            return "the request is about another region"
        return "all support the rating" if all(agree) else "some do not"

    kinds = [kind(*one) for one in zip(exam, gold, cited, strict=True)]
    records = {path.stem: json.loads(path.read_text())["given"] for path in EXAMS.glob("*.json")}

    def share(names, view, wanted):
        of = [records[name][view]["qualities"]["contradiction"] for name in names]
        return fmean(fmean(x for x, one in zip(values, kinds, strict=True) if one == wanted) for values in of)

    table = PAGE.partition("<!-- by studies: begin -->\n")[2].partition("<!-- by studies: end -->")[0]
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert head[2:] == [*ROWS]
    for wanted, count, *shares in lines:
        assert int(count) == kinds.count(wanted)
        assert shares == [f"{share(*row, wanted):.1%}" for row in ROWS.values()]
    assert sum(int(line[1]) for line in lines) == len(exam)
    supporting = [fmean(agree) if agree else None for agree in cited]
    assert f"{fmean(one for one in supporting if one is not None):.1%}" in PAGE
    told = [
        given[mode]["qualities"]["citation_truth"]
        for given in records.values()
        for mode in ("think", "direct")
        if mode in given
    ]
    told = [values for values in told if any(value is not None for value in values)]
    assert f"none of {len(told)} exams" in PAGE
    assert all(
        value is None or value <= most + 1e-9
        for values in told
        for value, most in zip(values, supporting, strict=True)
        if most is not None
    )


def test_a_statement_said_twice_counts_once():
    case = CASES[0]
    once = next(sentence for sentence in case.key.reasoning if read(sentence).kind != CITES)
    assert measured(case, f"{once} {once}")["statement_precision"] == 0.5


def test_what_is_false_of_the_request_is_a_contradiction():
    rng = Random(1)
    for case in CASES[:50]:
        sentence = next(x for x in case.key.reasoning if read(x).kind == "rating")
        assert measured(case, judging.falsify(sentence, rng))["contradiction"] == 1.0


def test_studies_that_do_not_exist_are_not_valid_citations():
    found = measured(CASES[0], "Study [2] supports this. Study [7] supports this.")
    assert found["citation_validity"] == 0.5


def test_a_turn_without_a_think_block_is_outside_every_measure_of_it():
    assert set(measured(CASES[0], None).values()) == {None}


def test_an_empty_think_block_has_said_nothing():
    found = measured(CASES[0], "")
    assert (found["statement_recall"], found["statement_precision"], found["contradiction"]) == (0.0, 0.0, 0.0)


@pytest.mark.long
def test_lessons_are_of_the_base_pool_and_show_paraphrases_of_gold():
    pairs = list(TASK.judged.lessons("judge", 300, 5))
    assert len(pairs) == 300
    few, again, other = (list(TASK.judged.lessons("judge", 33, seed)) for seed in (5, 5, 6))
    assert few == again != other
    assert all(judging.verdict(reply) is not None for _, reply in pairs)
    assert len(spread(pairs)) == 11
