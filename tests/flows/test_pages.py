"""What a person reads before they approve: everybody who answered, how far the candidate is ahead, and every limit."""

from clinrl.analysis.baselines import BAG_OF_WORDS
from clinrl.analysis.paired import Answers
from clinrl.config.schema import Gate, Limit
from clinrl.release.gate import Decision, decide
from clinrl.tasks.base import get_task

GOLDS = [1, 2, 3, 4, 5] * 20
SIMPLE = {"always 2": [2] * 100, BAG_OF_WORDS: [1, 2, 3, 4, 2] * 10 + [2] * 50}


def decided(answers: list[int], champion: str | None = "v1") -> Decision:
    """A decision on answers that are the same in both modes, against a champion who calls every ESI 1 ESI 2."""

    def both(name: str, answered: list[int]) -> dict[str, Answers]:
        common = {"name": name, "task": "esi", "task_version": 2, "mode_spec": {}, "exam_digest": "e" * 64}
        return {mode: Answers(**common, mode=mode, golds=GOLDS, answers=answered) for mode in ("think", "direct")}

    rules = Gate(least_cases=10, limits={"critical_under": Limit(max={"embedded": 0.02, "full": 0.0})})
    held = (champion, "b" * 64) if champion else (None, None)
    rivals = {"the champion": both("v1", [max(2, gold) for gold in GOLDS])} if champion else {}
    return decide(
        get_task("esi"), rules, "embedded", both("v2", answers), rivals, SIMPLE, model="esi", digest="a" * 64,
        champion=held,
    )  # fmt: skip


def page_of(decision: Decision) -> str:
    """Its page. Prefect takes a second to import: only the process that runs these tests does so."""
    from flows import pages

    return pages.decision_page(decision)


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a line that begins so."""
    lines = page[page.index(heading) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = [line for line in lines[start : lines.index("", start)] if not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_page_shows_everybody_and_the_change_to_the_champion():
    decision = decided(GOLDS)
    page = page_of(decision)
    for mode in ("think", "direct"):
        assert rows(page, f"### Mode {mode}") == [
            ["", "exact", "critical_under", "dangerous"],
            ["v2", "100.0% [96.3, 100.0]", "0.0% [0.0, 3.7]", "0.0% [0.0, 3.7]"],
            ["v1 (champion)", "80.0% [71.1, 86.7]", "20.0% [13.3, 28.9]", "0.0% [0.0, 3.7]"],
            ["always 2", "20.0% [13.3, 28.9]", "20.0% [13.3, 28.9]", "0.0% [0.0, 3.7]"],
            ["bag of words", "50.0% [40.4, 59.6]", "10.0% [5.5, 17.4]", "0.0% [0.0, 3.7]"],
        ]
    leads = rows(page, "v2 minus each, case by case")
    assert [row[0] for row in leads] == ["", "v1 (champion)", "always 2", "bag of words"]
    assert (leads[1][1], leads[1][2]) == ("+20.0 points [+11.4, +27.8]", "-20.0 points [-27.8, -11.4]")
    assert f"`clinrl approve {decision.digest} --as NAME`" in page


def test_a_limit_is_one_row_and_each_mode_a_column():
    limits = rows(page_of(decided(GOLDS)), "### Limits")
    assert limits[:3] == [
        ["metric", "limit", "all modes", "think", "direct"],
        ["cases", "min 10", "100", "", ""],
        ["critical_under", "max 0.02", "", "0", "0"],
    ]
    assert ["exact", "above always 2, paired", "", "0.8", "0.8"] in limits


def test_what_is_refused_stands_out_and_is_not_to_be_approved():
    page = page_of(decided([2] * 100, champion=None))
    assert "## v2 against no champion" in page
    assert "v2 may **not** be promoted." in page
    assert ["exact", "above always 2, paired", "", "**refused**: 0", "**refused**: 0"] in rows(page, "### Limits")
    assert "clinrl approve" not in page


def test_an_approver_is_asked_below_the_decision_and_told_why_again():
    from flows import pages

    decision = decided(GOLDS)
    asked = pages.approval_page(decision, "")
    assert asked.startswith(page_of(decision))
    assert f"the token that your key makes: `clinrl approve {decision.digest} --as NAME`." in asked
    again = pages.approval_page(decision, "the last answer was yes, but it has no token")
    assert again == f"**Asked again**, since\n\n```text\nthe last answer was yes, but it has no token\n```\n\n{asked}"
