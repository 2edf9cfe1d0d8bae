"""Somebody's own records of rated procedures as cases: what is taken, what is refused, and where no text may go."""

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dolls
import imaging_sources as synthetic
from clinrl import artifacts, paths
from clinrl.artifacts import canonical_json
from clinrl.data import dataset, validate
from clinrl.errors import DataError
from clinrl.evaluation import evaluate
from clinrl.tasks import importing, json_reader
from clinrl.tasks.base import get_task, is_sound_id
from clinrl.tasks.imaging import imported, intake
from clinrl.tasks.imaging.answer import LABELS
from clinrl.tasks.imaging.cases import with_evidence
from clinrl.tasks.imaging.intake import recognise
from clinrl.tasks.importing import Intake
from clinrl.types import Message, transcript_of

TASK = get_task("imaging")
USES = ("train", "mine", "exam")
NO_LABEL = "is none of the three labels: usually not appropriate, may be appropriate, usually appropriate"
CONDITION, VARIANT, PROCEDURE, REASON, ABSTRACT = "Zyxwarble", "Qvoxgrumble", "Jkwyttle", "Blorfmunge", "Drizzlock"
CANARIES = (CONDITION, VARIANT, PROCEDURE, REASON, ABSTRACT)

RECORD = {
    "condition": "Sore elbow", "variant": "Variant 2: Adult. Initial imaging.",
    "procedure": "CT elbow without contrast", "appropriateness": "May Be Appropriate",
    "reasoning_traces": ["It shows the joint in most adults [1].", "Others are read faster [2, 3]."],
    "citations": {"2": "CT was read twice.", "1": {"pmid": "0", "abstract": "CT in 40 elbows."}, "3": ""},
}  # fmt: skip

forms = pytest.mark.parametrize("form", synthetic.FORMATS)


def taken(path: Path, use: str) -> tuple[list[str], dict, list[list[str]]]:
    """Lines, counts and refused rows of an import."""
    source, refused = recognise(path), io.StringIO()
    counted = Intake(refused)
    lines = list(source.cases(use, counted))
    record = counted.record(source)
    assert record["kept"] + record["another_pool"] + record["refused"] == record["read"]
    assert record["kept"] == len(lines)
    rows = [line.split("\t") for line in refused.getvalue().splitlines()]
    assert len(rows) == record["refused"]
    return lines, record, rows


def everything(path: Path) -> tuple[list[dict], list[list[str]]]:
    """The cases of all pools, and what was refused."""
    found = [taken(path, use) for use in recognise(path).uses]
    return [json.loads(line) for lines, _, _ in found for line in lines], found[0][2]


def written(folder: Path, records: list, name: str = "records.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


# What is taken


@pytest.mark.long
@forms
def test_lines_are_what_the_records_dump(form, tmp_path):
    path = synthetic.write(tmp_path, 120, 1, form)
    for use in USES:
        lines, record, _ = taken(path, use)
        assert record["source"] == "appropriateness"
        assert lines
        for line in lines:
            case = TASK.Case.model_validate_json(line)
            assert line == canonical_json(case.model_dump(mode="json"))
            assert is_sound_id(TASK, case)
            assert TASK.pool_of(case.group) == use


@pytest.mark.long
def test_all_formats_give_the_same_cases(tmp_path):
    found = [everything(synthetic.write(tmp_path, 60, 1, form))[0] for form in synthetic.FORMATS]
    assert found[0] == found[1] == found[2]


@pytest.mark.long
@forms
def test_equal_sources_give_equal_bytes_and_refusals(form, tmp_path):
    one, other = (synthetic.write(tmp_path / name, 60, 1, form) for name in "ab")
    assert one.read_bytes() == other.read_bytes()
    assert [taken(one, use) for use in USES] == [taken(other, use) for use in USES]


@forms
def test_the_synthetic_dirt_is_refused_for_what_it_is(form, tmp_path):
    _, record, rows = taken(synthetic.write(tmp_path, 120, 1, form), "train")
    assert record["refusals"] == {
        "(the whole row)": {"an earlier row has the same condition, variant and procedure": 3},
        "appropriateness": {
            "another row gives the same request another label": 6,
            "is a disagreement of the panel, which is no label": 3,
        },
        "citations": {"holds more than 3,300 words of abstracts": 3},
    }
    assert {row[0] for row in rows} == {f"appropriateness.{form}"}
    assert not set(record["columns_used"]) & set(record["columns_dropped"])
    assert record["columns_dropped"] == ["topic_id"]


def test_a_record_becomes_a_request(tmp_path):
    (case,), refused = everything(written(tmp_path, [RECORD]))
    assert not refused
    assert case["facts"] == {
        "condition": "Sore elbow", "variant": "Variant 2: Adult. Initial imaging.",
        "procedure": "CT elbow without contrast",
        "evidence": [{"number": 1, "text": "CT in 40 elbows."}, {"number": 2, "text": "CT was read twice."}],
    }  # fmt: skip
    assert case["key"] == {
        "label": "May Be Appropriate", "rule": "imported", "source": "appropriateness",
        "reasoning": ["It shows the joint in most adults [1].", "Others are read faster [2, 3]."],
    }  # fmt: skip


SAME = [
    {"appropriateness": "  may BE   appropriate "},
    {"condition": None, "category": "Sore elbow"},
    {"category": "Sore elbow"},
    {"condition": "Sore\u200b elbow\n"},
    {"reasoning_traces": None, "acr_traces": RECORD["reasoning_traces"]},
    {"reasoning_traces": json.dumps(RECORD["reasoning_traces"])},
    {"reasoning_traces": "\n".join(RECORD["reasoning_traces"])},
    {"reasoning_traces": ["1. It shows the joint in most adults [1]", "- Others are read faster [2, 3].", " "]},
    {"citations": json.dumps(RECORD["citations"])},
    {"citations": {"[1]": "CT in 40 elbows.", "02": "CT was read twice.", "4": None}},
    {"extra": [1, {"a": None}]},
]


@pytest.mark.parametrize("change", SAME)
def test_other_spellings_of_a_record_are_the_same_case(tmp_path, change):
    one, _ = everything(written(tmp_path / "a", [RECORD]))
    changed = {name: value for name, value in (RECORD | change).items() if value is not None}
    other, refused = everything(written(tmp_path / "b", [RECORD | {"condition": "x"}, changed]))
    assert not refused
    assert [case for case in other if case["facts"]["condition"] != "x"] == one


@pytest.mark.parametrize(
    "change", [{"citations": {}}, {"citations": ""}, {"citations": None}, {"citations": {"7": ""}}]
)
def test_a_record_may_have_no_evidence(tmp_path, change):
    (case,), refused = everything(written(tmp_path, [RECORD | change]))
    assert case["facts"]["evidence"] == []
    assert not refused


def test_sentences_stay_apart_when_they_are_joined(tmp_path):
    from clinrl.tasks.imaging.sentences import split

    traces = ["It is fast. It is cheap", "See No. 4 [2]", "It was read by Dr. Who.[1]"]
    (case,), _ = everything(written(tmp_path, [RECORD | {"reasoning_traces": traces}]))
    said = case["key"]["reasoning"]
    assert said == ["It is fast.", "It is cheap.", "See No. 4 [2].", "It was read by Dr. Who.[1]"]
    assert list(split(" ".join(said))) == said


# What the task makes of an imported case


@pytest.fixture(scope="module")
def imports(tmp_path_factory) -> list:
    lines = taken(synthetic.write(tmp_path_factory.mktemp("imports"), 100, 1, "jsonl"), "train")[0]
    return [TASK.Case.model_validate_json(line) for line in lines]


def test_the_task_works_on_imported_cases(imports):
    columns = set(TASK.row(next(iter(TASK.cases(1, 1, pool="train", mix="natural")))))
    for case in imports:
        assert TASK.relabel(case) == TASK.label(case)
        assert TASK.omittable(case) == ()
        assert set(TASK.row(case)) == columns
        assert all(isinstance(shows(case), bool) for shows in TASK.improvement.triggers.values())
        for thinking in (True, False):
            turn = TASK.gold(case, thinking=thinking).messages[-1]
            assert turn.thinking == (" ".join(case.key.reasoning) if thinking else None)
            assert TASK.parse(transcript_of(turn)) == TASK.label(case)
            gold = TASK.score(case, transcript_of(turn), TASK.Reward()).total
            for label in set(LABELS) - {TASK.label(case)}:
                other = Message(role="assistant", content=f"<answer>{label}</answer>")
                assert TASK.score(case, transcript_of(other), TASK.Reward()).total < gold


def test_neither_slices_nor_clusters_tell_what_a_request_says(imports):
    case, *_ = imports
    told = {name: of(case) for name, of in TASK.reporting.slices.items()} | {"cluster": TASK.reporting.cluster(case)}
    assert (told["rule"], told["condition"], told["conditions"]) == ("imported", "imported", "imported")
    assert case.facts.condition not in str(told)
    assert len({TASK.reporting.cluster(case) for case in imports}) == len({c.facts.condition for c in imports})


def test_the_only_other_view_is_without_evidence(imports):
    cases = imports
    assert {bool(case.facts.evidence) for case in cases} == {True, False}
    for case in cases:
        shown = {name: view(case) for name, view in TASK.reporting.variants.items()}
        bare = shown.pop("without_evidence")
        assert set(shown.values()) == {None}
        assert (bare is not None) == bool(case.facts.evidence)
        if bare is not None:
            assert not bare.facts.evidence
            assert (bare.id, bare.group, bare.key) == (case.id, case.group, case.key)
        assert with_evidence(case, ()).facts.condition == case.facts.condition


def test_what_needs_the_generators_statements_is_not_measured(imports):
    case = next(case for case in imports if case.facts.evidence)
    number = case.facts.evidence[0].number
    turn = transcript_of(
        Message(role="assistant", content="x", thinking=f"CT shows it well here [{number}]. Not so [88].")
    )
    values = {}
    for name, quality in TASK.reporting.qualities.items():
        heard = dict.fromkeys(quality.requests(case, turn), '{"medical_concepts": 5}')
        values[name] = quality.of(case, turn, heard)
    assert values.pop("citation_validity") == 0.5
    assert values.pop("second_opinion") == 0
    assert values
    assert set(values.values()) == {None}


def test_of_an_answer_only_the_label_is_kept(imports):
    case, *_ = imports
    turn = TASK.gold(case, thinking=True).messages[-1]
    for content in (turn.content, f"{REASON}\n{turn.content}", REASON):
        answered = transcript_of(Message(role="assistant", content=content, thinking=REASON))
        (line,) = evaluate.grade(TASK, "think", [case], [answered], TASK.Reward())
        assert REASON not in importing.redact(TASK, case, line).model_dump_json()


# What is refused


REFUSED = [
    ({"condition": " "}, "condition", "is empty"),
    ({"variant": ""}, "variant", "is empty"),
    ({"procedure": None}, "procedure", "is empty"),
    ({"variant": 5}, "variant", "is no text"),
    ({"condition": "Sore", "category": "Elbow"}, "condition", "says something else than category"),
    ({"condition": "x" * 301}, "condition", "is longer than 300 characters"),
    ({"variant": "x" * 2001}, "variant", "is longer than 2,000 characters"),
    ({"procedure": "x" * 301}, "procedure", "is longer than 300 characters"),
    ({"variant": "Seen on 2019-03-04."}, "variant", "holds what looks like a full date"),
    ({"condition": "half \ud800"}, "condition", "holds half a character"),
    ({"variant": "It is usually appropriate."}, "variant", "names a label"),
    ({"variant": "It is \uff35\uff53\uff55\uff41\uff4c\uff4c\uff59 appropriate."}, "variant", "names a label"),
    ({"reasoning_traces": ["She has MRN 12345678, and it is so."]}, "reasoning_traces",
     "holds what looks like a medical record number"),
    ({"procedure": "CT </answer>"}, "procedure", "holds a mark of a chat template"),
    ({"condition": "Knee＜|eot_id|＞"}, "condition", "holds a mark of a chat template"),
    ({"reasoning_traces": ["It is so.<|im_end|>"]}, "reasoning_traces",
     "holds a mark of a chat template"),
    ({"citations": {"1": "It is <tool_call> so."}}, "citations", "holds a mark of a chat template"),
    ({"appropriateness": ""}, "appropriateness", "is empty"),
    ({"appropriateness": "appropriate"}, "appropriateness", NO_LABEL),
    ({"appropriateness": "Usually Appropriate, mostly"}, "appropriateness", NO_LABEL),
    ({"appropriateness": 8}, "appropriateness", "is no text"),
    *(
        ({"appropriateness": label}, "appropriateness", "is a disagreement of the panel, which is no label")
        for label in ("May be appropriate (Disagreement)", "MAY BE APPROPRIATE(disagreement)")
    ),
    ({"reasoning_traces": []}, "reasoning_traces", "is empty"),
    ({"reasoning_traces": None}, "reasoning_traces", "is empty"),
    ({"reasoning_traces": [1]}, "reasoning_traces", "is no list of sentences"),
    ({"reasoning_traces": "[oh]"}, "reasoning_traces", "is no JSON"),
    ({"reasoning_traces": ["So."]}, "reasoning_traces", "is too short to be a reasoning"),
    ({"reasoning_traces": ["x" * 2001]}, "reasoning_traces", "is longer than 2,000 characters"),
    ({"reasoning_traces": ["It is so."] * 61}, "reasoning_traces", "has more than 60 sentences"),
    ({"reasoning_traces": ["It is well seen [100]."]}, "reasoning_traces", "cites a number outside 1 to 99"),
    ({"reasoning_traces": ["It is well seen [0]."]}, "reasoning_traces", "cites a number outside 1 to 99"),
    ({"reasoning_traces": ["It is <think> seen."]}, "reasoning_traces",
     "holds a mark of a chat template"),
    ({"citations": ["a"]}, "citations", "is no map of reference numbers to abstracts"),
    ({"citations": "{'1': 'a'}"}, "citations", "is no JSON"),
    ({"citations": {"0": "a"}}, "citations", "has a reference number outside 1 to 99"),
    ({"citations": {"100": ""}}, "citations", "has a reference number outside 1 to 99"),
    ({"citations": {"one": "a"}}, "citations", "has a key that is no reference number"),
    ({"citations": {"1": "a", "01": "b"}}, "citations", "has a reference number twice"),
    ({"citations": '{"1": "a", "1": "b"}'}, "citations", "has a reference number twice"),
    ({"citations": {"1": 5}}, "citations", "has an abstract that is no text"),
    ({"citations": {"1": {"pmid": "5"}}}, "citations", "has an entry without an abstract"),
    ({"citations": {"1": "x" * 6001}}, "citations", "is longer than 6,000 characters"),
    ({"citations": {"1": "a " * 1700, "2": "a " * 1601}}, "citations", "holds more than 3,300 words of abstracts"),
    ({"citations": {str(n): "x" * 5999 for n in range(1, 18)}}, "citations",
     "holds more than 100,000 characters of abstracts"),
    ({"citations": {"1": "It may be appropriate."}}, "citations", "names a label"),
    ({"citations": {"1": "He has MRN 12345678."}}, "citations", "holds what looks like a medical record number"),
    ({"citations": {"1": "SSN 123-45-6789"}}, "citations", "holds what looks like a social security number"),
    ({"citations": {"1": {"abstract": "Call 555-123-4567."}}}, "citations", "holds what looks like a telephone number"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "column", "reason"), REFUSED)
def test_what_is_not_certain_is_refused_with_its_row(tmp_path, change, column, reason):
    cases, refused = everything(written(tmp_path, [RECORD | {"condition": "x"}, RECORD | change]))
    assert [case["facts"]["condition"] for case in cases] == ["x"]
    assert refused == [["records.jsonl", "2", column, reason]]


@pytest.mark.parametrize(
    "text",
    [
        "Rated 8 of 9", "rated 8/9", "rated an 8 out of 9", "Rating: 8/9", "rated eight of nine", "Appropriateness: 8",
        "The rating is 8 of 9", "That makes 8 of 9.", "the panel rates it 8 of 9", "appropriateness rating: 8",
        "appropriateness score of 8", "Usually not appropriate", "may be appropriate", "Usually_appropriate",
        "appropriateness criteria rating of 8", "ACR Appropriateness Criteria rating: 9", "score of 8 of 9",
        "Rating: 8", "ACR rating 8", "panel rating of 8", "8 out of 9", "8.0/9", "ACR rated seven to nine",
        "Highly appropriate",
    ],
)  # fmt: skip
def test_a_text_that_names_its_label_or_rating_is_refused(text):
    for said in (f"Adult. {text}", f"Adult, {text.upper()}; initial imaging"):
        with pytest.raises(importing.Unclear, match="names a label"):
            imported.check_shown(said, "variant")


@pytest.mark.parametrize(
    "text",
    [
        "pain rated 8 of 10", "pain rated 8/10", "seen in 8 of 9 patients", "sensitivity 89% (8 of 9)", "stage 3 of 4",
        "Beighton score of 5 of 9 points", "quality rated 4 of 5", "appropriateness of 3 modalities", "a rating of 3.5",
        "it generated 8 of 9 maps", "heart rate 9 of 10", "pain since 8/9",
    ],
)  # fmt: skip
def test_what_only_looks_like_a_rating_is_taken(text):
    imported.check_shown(f"Adult, {text}, initial imaging", "variant")
    imported.check_shown(f"Adult, {text}.", "variant")


def test_an_abstract_may_hold_the_dates_and_addresses_of_its_study(tmp_path):
    text = "Read on 2019-03-04 (https://trials.example/NCT01234567; a@b.com): +2.1 points (95% CI 1.2 to 3.0)."
    (case,), _ = everything(written(tmp_path, [RECORD | {"citations": {"1": text}}]))
    assert case["facts"]["evidence"] == [{"number": 1, "text": text}]


def test_as_many_words_as_the_published_filter_lets_through_are_taken(tmp_path):
    (case,), _ = everything(written(tmp_path, [RECORD | {"citations": {"1": "a " * 2000, "2": "b " * 1300}}]))
    assert len(case["facts"]["evidence"]) == 2


def test_a_repeated_request_is_refused_and_a_contradicting_one_is_refused_in_every_row(tmp_path):
    other = {"procedure": "MRI elbow"}
    rows = [
        RECORD,
        RECORD | other,
        RECORD | {"procedure": "ct ELBOW, without contrast", "citations": {}},
        RECORD | other | {"appropriateness": LABELS[0]},
        RECORD | other,
        RECORD | {"procedure": "Ultrasound elbow"},
        RECORD | {"procedure": "Ultrasound elbow", "appropriateness": "May be appropriate (Disagreement)"},
    ]
    cases, refused = everything(written(tmp_path, rows))
    assert [case["facts"]["procedure"] for case in cases] == [RECORD["procedure"]]
    assert [row[1:] for row in refused] == [
        ["2", "appropriateness", "another row gives the same request another label"],
        ["3", "(the whole row)", "an earlier row has the same condition, variant and procedure"],
        ["4", "appropriateness", "another row gives the same request another label"],
        ["5", "appropriateness", "another row gives the same request another label"],
        ["6", "appropriateness", "another row gives the same request another label"],
        ["7", "appropriateness", "is a disagreement of the panel, which is no label"],
    ]


def test_a_copy_of_a_refused_row_is_taken(tmp_path):
    cases, refused = everything(written(tmp_path, [RECORD | {"citations": {"0": "a"}}, RECORD]))
    assert len(cases) == len(refused) == 1


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b'{"a": 1, "a": 2}', "names a field twice"),
        (b'{"a": "' + b"x" * (1 << 20) + b'"}', "is longer than 1,048,576 bytes"),
    ],
)
def test_a_first_line_that_is_no_record_keeps_no_other_out(tmp_path, first, reason):
    path = written(tmp_path, [RECORD, RECORD | {"condition": "Sore knee"}])
    path.write_bytes(first + b"\n" + path.read_bytes())
    cases, refused = everything(path)
    assert len(cases) == 2
    assert [row[1:] for row in refused] == [["1", "(the whole row)", reason]]


def test_a_reasoning_may_begin_and_end_with_a_citation():
    assert intake.reasoning_of("[1] shows CT sees the stone well [1]", "x") == (
        "[1] shows CT sees the stone well [1].",
    )
    with pytest.raises(importing.Unclear, match="is no JSON"):
        intake.reasoning_of("['CT sees the stone well']", "x")


def test_lines_that_are_no_records_are_refused_one_by_one(tmp_path):
    path = written(tmp_path, [RECORD])
    with path.open("ab") as stream:
        stream.write(b'{"a": \n\n[1]\n{"a": "\xff"}\n{"a": 1, "a": 2}\n"' + b"x" * (1 << 20) + b'"\n')
        stream.write(b"[" * 100_000 + b"\n" + b'{"a": ' + b"1" * 5000 + b"}\n")
        stream.write(json.dumps(RECORD | {"condition": "Sore knee"}).encode())
    cases, refused = everything(path)
    assert len(cases) == 2
    assert [row[1:] for row in refused] == [
        ["2", "(the whole row)", "is no JSON"],
        ["4", "(the whole row)", "is no JSON object"],
        ["5", "(the whole row)", "is not UTF-8 text"],
        ["6", "(the whole row)", "names a field twice"],
        ["7", "(the whole row)", "is longer than 1,048,576 bytes"],
        ["8", "(the whole row)", "is no JSON"],
        ["9", "(the whole row)", "is no JSON"],
    ]


def test_rows_of_a_table_and_of_a_list_are_refused_at_their_lines_and_numbers(tmp_path):
    names = list(RECORD)
    cells = {name: value if isinstance(value, str) else json.dumps(value) for name, value in RECORD.items()}
    with (tmp_path / "a").open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream)
        table.writerows([names, [cells[name].replace(". ", ".\n") for name in names], ["x"], []])
        table.writerow([{"appropriateness": "?"}.get(name, cells[name]) for name in names])
    (tmp_path / "b").write_text(
        json.dumps({"made": "2", "of": {"a": 1}, "rows": [RECORD, 5, RECORD | {"appropriateness": "?"}]}, indent=1)
    )
    assert [row[1:] for row in everything(tmp_path / "a")[1]] == [
        ["4", "(the whole row)", "has another number of cells than the header"],
        ["6", "appropriateness", NO_LABEL],
    ]
    cases, refused = everything(tmp_path / "b")
    assert len(cases) == 1
    assert [row[1:] for row in refused] == [
        ["2", "(the whole row)", "is no JSON object"],
        ["3", "appropriateness", NO_LABEL],
    ]


def test_lines_are_records_whatever_the_first_of_them_holds(tmp_path):
    odd = RECORD | {"citations": [{"number": "1"}]}
    for records in ([odd, RECORD], [RECORD, odd]):
        cases, refused = everything(written(tmp_path, records))
        assert (len(cases), [row[1] for row in refused]) == (1, [str(records.index(odd) + 1)])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(change=st.dictionaries(st.sampled_from([*RECORD, "category", "acr_traces"]), VALUES))
def test_any_value_is_taken_or_refused(tmp_path_factory, change):
    path = written(tmp_path_factory.getbasetemp() / "any", [RECORD | {"condition": "x"}, RECORD | change])
    cases, refused = everything(path)
    assert len(cases) + len(refused) == 2
    for case in cases:
        TASK.Case.model_validate(case)


@given(data=st.binary(max_size=40) | st.text(alphabet='[]{}",:1a \n', max_size=40).map(str.encode))
def test_any_file_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "file"
    path.write_bytes(data)
    with pytest.raises(DataError):
        recognise(path)


# Pools


@pytest.mark.long
def test_the_procedures_of_a_variant_are_in_one_pool(tmp_path):
    path = synthetic.write(tmp_path, 600, 1, "jsonl")
    cases = {use: [json.loads(line) for line in taken(path, use)[0]] for use in USES}
    variants = {use: {(c["facts"]["condition"], c["facts"]["variant"]) for c in found} for use, found in cases.items()}
    groups = {use: {case["group"] for case in found} for use, found in cases.items()}
    assert sum(map(len, variants.values())) == len(set().union(*variants.values()))
    assert {use: len(found) for use, found in groups.items()} == {use: len(found) for use, found in variants.items()}
    assert sum(map(len, cases.values())) > 2 * sum(map(len, groups.values()))
    shares = {use: len(found) / sum(map(len, groups.values())) for use, found in groups.items()}
    assert all(abs(100 * shares[use] - intake.SHARES[use]) < 8 for use in USES)


def test_a_variant_is_known_whatever_its_number_and_spelling(tmp_path):
    rows = [RECORD | {"variant": text, "procedure": f"CT {text}"} for text in
            ("Variant 2: Adult, first look.", "VARIANT 11:  adult first look", "Adult; first look")]  # fmt: skip
    cases, refused = everything(written(tmp_path, rows))
    assert not refused
    assert len({case["group"] for case in cases}) == 1


def test_a_file_for_each_use_decides_by_itself(tmp_path):
    written(tmp_path, [RECORD, RECORD | {"condition": "A"}, RECORD | {"condition": "B"}], "train.jsonl")
    written(tmp_path, [RECORD | {"procedure": "MRI"}, RECORD | {"condition": "C"}], "exam.jsonl")
    assert recognise(tmp_path).uses == ("train", "exam")
    train, record, refused = taken(tmp_path, "train")
    exam, _, _ = taken(tmp_path, "exam")
    assert [json.loads(line)["facts"]["condition"] for line in (*train, *exam)] == ["A", "B", "C"]
    assert refused == [
        [name, "1", "variant", "is in the file of another use too"] for name in ("train.jsonl", "exam.jsonl")
    ]
    assert record["read"] == 5
    assert recognise(tmp_path).files == {name: tmp_path / name for name in ("train.jsonl", "exam.jsonl")}


def test_the_variants_of_an_exam_can_be_left_out(tmp_path):
    first = written(tmp_path / "a", [RECORD | {"condition": f"c{n}"} for n in range(40)])
    exam = written(tmp_path / "b", [RECORD | {"condition": f"c{n}", "procedure": "MRI"} for n in range(20)])
    apart = Intake(io.StringIO(), without=importing.identities(recognise(exam)))
    list(recognise(first).cases("train", apart))
    assert apart.refused.total() == 20
    train = [TASK.Case.model_validate_json(line) for line in taken(first, "train")[0]]
    other = [TASK.Case.model_validate_json(line) for line in taken(exam, "train")[0]]
    with pytest.raises(DataError, match=r"data/cases/t and x share"):
        importing.check_apart([("t", train)], "x", other)
    importing.check_apart([("t", train)], "x", [TASK.Case.model_validate_json(x) for x in taken(first, "exam")[0]])


# What a path may hold


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        "{}",
        "[]",
        "[1]",
        '{"a": 1}\n{"a": 2}\n',
        '{"rows": [{"a": 1}]}',
        '[{"variant": "x"}]',
        "Hello.",
    ],
)
def test_other_files_are_refused_with_what_is_expected(tmp_path, text):
    (tmp_path / "other").write_text(text)
    with pytest.raises(
        DataError,
        match=r"lacks .*condition or category.*must be a file of records as JSON .* JSON Lines or CSV.*acr_",
    ):
        recognise(tmp_path / "other")


def test_a_folder_without_such_records_and_a_missing_path_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match=r"must be .* named train, mine or exam"):
            recognise(path)
    for name in ("exam.json", "exam.csv"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match="holds 2 files for the use exam; keep one"):
        recognise(tmp_path)
    (tmp_path / "train_ct.jsonl").touch()
    with pytest.raises(DataError, match=r"train_ct\.jsonl is named after no use; it must be"):
        recognise(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[\n{"variant": ]', "line 2, column 13, is broken JSON"),
        ("[1, 2", "line 1, column 6, is broken JSON"),
        ("[1] 2", "line 1, column 5, is broken JSON"),
        ('{"a": [{}], "b": []}', "is an object with 2 lists, not one list of records"),
        ('{"a": [{}],\n "a": []}', "is an object that names a field twice"),
        ("[" * 100_000, "holds a value that cannot be read"),
    ],
)
def test_broken_json_is_named_by_its_place(tmp_path, text, sentence):
    (tmp_path / "x").write_text(text)
    with pytest.raises(DataError, match=sentence):
        recognise(tmp_path / "x")


def test_json_that_is_no_text_or_too_long_is_refused(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b'[\n"\xff"]')
    with pytest.raises(DataError, match="line 2 is not UTF-8 text"):
        recognise(tmp_path / "x")
    monkeypatch.setattr(json_reader, "MAX_JSON_BYTES", 1 << 20)
    (tmp_path / "x").write_bytes(b"[" + b" " * (1 << 20) + b"]")
    with pytest.raises(DataError, match="is longer than 1 MiB; save it as JSON Lines"):
        recognise(tmp_path / "x")


# Stages


def sown(record: dict) -> dict:
    """A record with strings to look for in every text."""
    label = record["appropriateness"]
    texts = (given if isinstance(given, str) else given["abstract"] for given in record["citations"].values())
    cited = dict(zip(record["citations"], texts, strict=True))
    return record | {
        "condition": f"{record['condition']} {CONDITION}",
        "variant": f"{record['variant']} {VARIANT}",
        "procedure": f"{record['procedure']} {PROCEDURE}",
        "appropriateness": label if "(" not in label else f"{label} {CONDITION}",
        "reasoning_traces": [*record["reasoning_traces"], f"{REASON} is so."],
        "citations": {number: f"{text} {ABSTRACT}" for number, text in cited.items()},
        f"A {CONDITION}": 1,
    }


@pytest.mark.long
def test_an_import_and_its_proof_hold_no_text(tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, [sown(record) for record in synthetic.records(60, 1)])
    entry = {"task": "imaging", "task_version": TASK.version, "source": str(path)}
    params = dolls.params(imports={f"imaging-{use}": entry | {"use": use} for use in USES})
    for name in params.imports:
        dataset.stage(params, name)
        assert artifacts.verified(paths.cases(name)).inputs == {"records.jsonl": artifacts.sha256_file(path)}
        cases = (paths.cases(name) / paths.CASES_FILE).read_text()
        assert all(canary in cases for canary in CANARIES)
        assert all(
            TASK.pool_of(case.group) == name.split("-")[1] for case in dataset.read_cases(paths.cases(name), TASK)
        )
    for name in ("imaging-train", "imaging-exam"):
        validate.stage(params, name)
        record = json.loads((paths.cases(name) / paths.IMPORT_FILE).read_text())
        proof = json.loads(paths.data_proof(name).read_text())
        assert proof["import"] == record
        assert proof["summary"]["cases"] == record["kept"] > 0
        columns = [entry["arguments"].get("column") for entry in proof["expectations"]]
        assert {"narrative", "shown", "group_in_pool", "gold_scores_best"} <= set(columns)
        assert not {"label_reproduced", "has_evidence"} & set(columns)
    output = capfd.readouterr()
    made = [file for file in Path("data").rglob("*") if file.is_file() and file.name != paths.CASES_FILE]
    assert {"refused.tsv", "import.json", "manifest.json"} <= {file.name for file in made}
    texts = [file.read_text(errors="replace") for file in made] + [output.out, output.err, caplog.text]
    assert not [canary for canary in CANARIES for text in texts if canary in text]


def test_a_refusal_of_validation_shows_no_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = {"task": "imaging", "task_version": TASK.version, "use": "exam"}
    path = written(tmp_path, [sown(record) for record in synthetic.records(40, 1)])
    params = dolls.params(imports={"own": entry | {"source": str(path)}})
    dataset.stage(params, "own")
    folder = paths.cases("own")
    lines = (folder / paths.CASES_FILE).read_text().splitlines(keepends=True)
    content = json.loads(lines[2])
    for change, columns in (
        (
            lambda case: case["facts"].update(variant=f"{VARIANT} of 2019-03-04, usually appropriate"),
            ("column narrative: a value breaks", "column shown: a value breaks"),
        ),
        (lambda case: case["key"].update(label=REASON), ("column key.label",)),
    ):
        changed = json.loads(json.dumps(content))
        change(changed)
        artifacts.write_text(
            folder / paths.CASES_FILE, "".join([*lines[:2], canonical_json(changed) + "\n", *lines[3:]])
        )
        artifacts.seal(folder, **artifacts.read_manifest(folder).model_dump(exclude={"files"}))
        with pytest.raises(DataError, match="row 3") as error:
            validate.stage(params, "own")
        made = [file for file in Path("data").rglob("*") if file.is_file() and file.name != paths.CASES_FILE]
        texts = [str(error.value), *(file.read_text(errors="replace") for file in made)]
        assert all(any(column in text for text in texts) for column in columns)
        assert not [canary for canary in CANARIES for text in texts if canary in text]


def test_a_drawn_data_set_still_validates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = {
        "task": "imaging", "task_version": TASK.version, "use": "train", "mix": "natural", "cases": 40, "seed": 1,
    }  # fmt: skip
    params = dolls.params(datasets=dolls.PARAMS["datasets"] | {"i1": entry})
    dataset.stage(params, "i1")
    validate.stage(params, "i1")
    assert paths.data_proof("i1").exists()


# The writer


def test_the_writer_prints_its_path_and_help_has_examples(tmp_path, capsys):
    assert synthetic.main([str(tmp_path), "--rows", "3", "--seed", "2", "--format", "csv"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "appropriateness.csv")
    assert (tmp_path / "appropriateness.csv").read_bytes().startswith(synthetic.MARK)
    with pytest.raises(SystemExit):
        synthetic.main(["--help"])
    assert "python tests/imaging_sources.py /tmp/imaging --rows 2000" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        synthetic.main([str(tmp_path), "--rows", "0"])
