"""Sources of triage records as cases: what is taken, what is refused, and what is never looked at."""

import csv
import gzip
import io
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dolls
import esi_sources as synthetic
import sown
from clinrl import artifacts, paths
from clinrl.artifacts import canonical_json
from clinrl.data import dataset
from clinrl.errors import DataError
from clinrl.tasks import importing
from clinrl.tasks.base import get_task, is_sound_id
from clinrl.tasks.esi import imported, mietic, mimic, triggers
from clinrl.tasks.importing import Intake
from clinrl.types import Message, Transcript, transcript_of

TASK = get_task("esi")
USES = ("train", "mine", "exam")


def taken(path: Path, use: str) -> tuple[list[str], dict, list[list[str]]]:
    """Lines, counts and refused rows of an import."""
    source, refused = TASK.recognise(path), io.StringIO()
    intake = Intake(refused)
    lines = list(source.cases(use, intake))
    record = intake.record(source)
    assert record["kept"] + record["another_pool"] + record["refused"] == record["read"]
    assert record["kept"] == len(lines)
    assert record["refused"] == sum(sum(reasons.values()) for reasons in record["refusals"].values())
    rows = [line.split("\t") for line in refused.getvalue().splitlines()]
    assert len(rows) == record["refused"]
    return lines, record, rows


SHIPPED = Path(__file__).parents[2] / "data/sources/synthetic"
FILES = {
    "mietic-validation": ("MIETIC-validate-samples.csv",),
    "mietic": ("MIETIC.csv",),
    "mimic-iv-ed": ("ed/triage.csv", "ed/edstays.csv", "hosp/patients.csv"),
}


def files(kind: str, folder: Path) -> Path:
    """A copy of a synthetic source as it is shipped; for one file, the file. To draw one anew takes longer."""
    for name in FILES[kind]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SHIPPED / name, folder / name)
    return folder if len(FILES[kind]) > 1 else folder / FILES[kind][0]


def uses(kind: str) -> tuple[str, ...]:
    return {"mietic-validation": ("exam",), "mietic": ("train", "mine")}.get(kind, USES)


kinds = pytest.mark.parametrize("kind", synthetic.KINDS)


@kinds
def test_lines_are_what_the_records_dump(kind, tmp_path):
    path = files(kind, tmp_path)
    for use in uses(kind):
        lines, record, _ = taken(path, use)
        assert record["source"] == kind
        assert lines
        for line in lines:
            case = TASK.Case.model_validate_json(line)
            assert line == canonical_json(case.model_dump(mode="json"))
            assert is_sound_id(TASK, case)
            assert TASK.pool_of(case.group) == use


@pytest.mark.long
@kinds
def test_equal_sources_give_equal_bytes(kind, tmp_path):
    one, other = (files(kind, tmp_path / name) for name in "ab")
    for use in uses(kind):
        assert taken(one, use) == taken(other, use)


@kinds
def test_the_task_works_on_imported_cases(kind, tmp_path):
    path = files(kind, tmp_path)
    columns = set(TASK.row(next(iter(TASK.cases(1, 1, pool="train", mix="natural")))))
    for line in taken(path, uses(kind)[0])[0]:
        case = TASK.Case.model_validate_json(line)
        assert TASK.relabel(case) == TASK.label(case)
        assert TASK.omittable(case) == ()
        assert set(TASK.row(case)) == columns
        assert {name: of(case) for name, of in TASK.reporting.slices.items()}["rule"] == "imported"
        for thinking in (True, False):
            turn = TASK.gold(case, thinking=thinking).messages[-1]
            assert bool(turn.thinking) == thinking
            assert TASK.parse(transcript_of(turn)) == TASK.label(case)
            gold = TASK.score(case, Transcript(messages=(turn,), stop="answered"), TASK.Reward()).total
            for level in {1, 2, 3, 4, 5} - {TASK.label(case)}:
                other = Message(role="assistant", content=f"ANSWER: ESI {level}")
                assert TASK.score(case, Transcript(messages=(other,), stop="answered"), TASK.Reward()).total < gold


@pytest.mark.long
@kinds
def test_what_came_after_triage_changes_nothing_and_appears_nowhere(kind, tmp_path):
    one, other = (files(kind, tmp_path / name) for name in ("plain", "changed"))
    for path in (tmp_path / "changed").rglob("*.csv"):
        sown.rewrite(path, lambda row: {**row, **{name: sown.sow(row)[name] for name in row if leaks(name)}})
    assert sown.LEAK in "".join(path.read_text() for path in (tmp_path / "changed").rglob("*.csv"))
    for use in uses(kind):
        before, after = taken(one, use), taken(other, use)
        assert after == before
        assert sown.LEAK not in "".join(after[0])


def leaks(name: str) -> bool:
    return name.lower().replace(" ", "_") in sown.AFTERWARDS


@kinds
def test_every_column_is_either_read_or_named_as_dropped(kind, tmp_path):
    record = taken(files(kind, tmp_path), uses(kind)[0])[1]
    assert not set(record["columns_used"]) & set(record["columns_dropped"])
    dropped = {name.split(".")[-1] for name in record["columns_dropped"]}
    known = {"mietic-validation": {*synthetic.LEAKS, *synthetic.AFTER_TRIAGE}, "mietic": {"output"}}
    assert dropped == known.get(kind, {*synthetic.MIMIC_LEAKS, "gender"})


def test_the_published_columns_are_57(tmp_path):
    path = files("mietic-validation", tmp_path)
    assert len(TASK.recognise(path).used | TASK.recognise(path).dropped) == 57
    assert path.read_bytes().startswith(imported_mark())


def imported_mark() -> bytes:
    return "ï»¿ubject_id".encode()


# MIMIC-IV-ED


@pytest.mark.long
def test_patients_never_cross_pools(tmp_path):
    synthetic.mimic_iv_ed(tmp_path, 500, 1)
    cases = {use: [json.loads(line) for line in taken(tmp_path, use)[0]] for use in USES}
    people = {use: {case["group"].split("/")[-1] for case in found} for use, found in cases.items()}
    texts = {use: {case["facts"]["narrative"] for case in found} for use, found in cases.items()}
    assert all(people.values())
    for kind in (people, texts):
        assert sum(map(len, kind.values())) == len(set().union(*kind.values()))
    shares = {use: len(found) / sum(map(len, people.values())) for use, found in people.items()}
    assert all(abs(100 * shares[use] - mimic.SHARES[use]) < 8 for use in USES)


def test_compressed_files_in_any_folder_are_the_same_source(tmp_path):
    plain = files("mimic-iv-ed", tmp_path / "plain")
    packed = tmp_path / "packed"
    packed.mkdir()
    for path in plain.rglob("*.csv"):
        (packed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert taken(packed, "train")[0] == taken(plain, "train")[0]


HEADS = {
    "ed/triage.csv": "subject_id,stay_id,temperature,heartrate,resprate,o2sat,sbp,dbp,pain,acuity,chiefcomplaint",
    "ed/edstays.csv": "subject_id,hadm_id,stay_id,intime,outtime,gender,race,arrival_transport,disposition",
    "hosp/patients.csv": "subject_id,gender,anchor_age,anchor_year",
}
TRIAGE = {
    "subject_id": "1", "stay_id": "9", "temperature": "98.6", "heartrate": "84.0", "resprate": "16", "o2sat": "97",
    "sbp": "120", "dbp": "70", "pain": "8", "acuity": "2.0", "chiefcomplaint": "Chest pain, SOB",
}  # fmt: skip
STAY = {
    "subject_id": "1", "hadm_id": "", "stay_id": "9", "intime": "2150-01-01 10:00:00", "outtime": "", "gender": "F",
    "race": "x", "arrival_transport": "AMBULANCE", "disposition": "HOME",
}  # fmt: skip
PATIENT = {"subject_id": "1", "gender": "F", "anchor_age": "60", "anchor_year": "2148"}


def mimic_files(folder: Path, triage, stays=(STAY,), patients=(PATIENT,)) -> Path:
    for (name, head), rows in zip(HEADS.items(), (triage, stays, patients), strict=True):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as stream:
            table = csv.writer(stream, lineterminator="\n")
            table.writerow(head.split(","))
            table.writerows([row[column] for column in head.split(",")] for row in rows)
    return folder


def everything(folder: Path):
    """The cases of all pools, and what was refused."""
    found = [taken(folder, use) for use in USES]
    return [json.loads(line) for lines, _, _ in found for line in lines], found[0][2]


def test_a_row_becomes_a_short_note(tmp_path):
    (case,), refused = everything(mimic_files(tmp_path, [TRIAGE]))
    assert not refused
    assert case["facts"]["narrative"] == (
        "62-year-old woman arrives by ambulance with Chest pain, SOB. HR 84, BP 120/70, RR 16, SpO2 97%, T 37.0. "
        "Pain 8/10."
    )
    assert case["key"]["level"] == 2


def test_what_is_not_measured_is_not_mentioned(tmp_path):
    blank = dict.fromkeys(("temperature", "heartrate", "resprate", "o2sat", "sbp", "dbp", "pain"), "")
    (case,), _ = everything(mimic_files(tmp_path, [TRIAGE | blank]))
    assert case["facts"]["narrative"] == "62-year-old woman arrives by ambulance with Chest pain, SOB."
    (case,), _ = everything(mimic_files(tmp_path, [TRIAGE | blank | {"pain": "0", "dbp": "70"}]))
    assert case["facts"]["narrative"].endswith("SOB. diastolic pressure 70. Denies pain.")


def test_the_word_in_place_of_a_pain_score_is_in_the_note(tmp_path):
    (case,), _ = everything(mimic_files(tmp_path, [TRIAGE | {"pain": " Intubated. "}]))
    assert case["key"]["pain"] is None
    assert case["facts"]["narrative"].endswith("T 37.0. Pain: intubated.")
    assert triggers.done_intervention(case["facts"]["narrative"])
    (case,), _ = everything(mimic_files(tmp_path, [TRIAGE | {"pain": "Critical"}]))
    assert case["facts"]["narrative"].endswith("T 37.0."), "this is about the level rather than about pain"


@pytest.mark.parametrize(
    ("change", "column", "reason"),
    [
        ({"acuity": ""}, "acuity", "is missing"),
        ({"acuity": "1.5"}, "acuity", "is not one of 1 to 5"),
        ({"pain": "13"}, "pain", "is above 10"),
        ({"pain": "purple"}, "pain", "is neither a score nor a known word"),
        ({"temperature": "60"}, "temperature", "is neither a body temperature in °C nor one in °F"),
        ({"temperature": "986"}, "temperature", "is neither a body temperature in °C nor one in °F"),
        ({"heartrate": "999"}, "heartrate", "is outside 20 to 300"),
        ({"o2sat": "9"}, "o2sat", "is outside 50 to 100"),
        ({"resprate": "x"}, "resprate", "is not a number"),
        ({"sbp": "70", "dbp": "120"}, "sbp", "is not 5 above dbp"),
        ({"sbp": "74", "dbp": "70"}, "sbp", "is not 5 above dbp"),
        ({"chiefcomplaint": " "}, "chiefcomplaint", "is empty"),
        ({"chiefcomplaint": "___"}, "chiefcomplaint", "is empty"),
        ({"chiefcomplaint": "pain, call 555-123-4567"}, "chiefcomplaint", "holds what looks like a telephone number"),
        ({"chiefcomplaint": "ESI 2"}, "chiefcomplaint", "names a level"),
        ({"chiefcomplaint": "\uff25\uff33\uff29 \uff12"}, "chiefcomplaint", "names a level"),  # full width
        ({"chiefcomplaint": "pain<|im_end|>"}, "chiefcomplaint", "holds a mark of a chat template"),
        ({"chiefcomplaint": "pain <think> x"}, "chiefcomplaint", "holds a mark of a chat template"),
        ({"stay_id": "8"}, "stay_id", "has no row in edstays"),
        ({"stay_id": "x"}, "stay_id", "is not a whole number"),
        ({"subject_id": "2"}, "subject_id", "is not that of the stay in edstays"),
    ],
)
def test_what_is_not_certain_is_refused_and_counted(tmp_path, change, column, reason):
    cases, refused = everything(mimic_files(tmp_path, [TRIAGE | change]))
    assert not cases
    assert refused == [["triage.csv", "2", column, reason]]


@pytest.mark.parametrize(
    ("stays", "patients", "column", "reason"),
    [
        ((), (PATIENT,), "stay_id", "has no row in edstays"),
        ((STAY, STAY), (PATIENT,), "stay_id", "has several rows in edstays"),
        ((STAY,), (), "subject_id", "has no row in patients"),
        ((STAY,), (PATIENT, PATIENT), "subject_id", "has several rows in patients"),
        ((STAY | {"gender": "X"},), (PATIENT,), "gender", "is neither F nor M"),
        ((STAY | {"arrival_transport": "SLEIGH"},), (PATIENT,), "arrival_transport", "is no known way of arrival"),
        ((STAY | {"intime": "soon"},), (PATIENT,), "intime", "gives no age"),
        ((STAY,), (PATIENT | {"anchor_age": "x"},), "anchor_age", "gives no age"),
        ((STAY,), (PATIENT | {"anchor_age": "60.5"},), "anchor_age", "gives no age"),
        ((STAY,), (PATIENT | {"anchor_age": ""},), "anchor_age", "gives no age"),
        ((STAY,), (PATIENT | {"anchor_age": "-1"},), "anchor_age", "gives no age"),
        ((STAY,), (PATIENT | {"anchor_age": "109"},), "anchor_age", "is outside 0 to 110"),
        ((STAY | {"intime": "2050-01-01"},), (PATIENT,), "anchor_age", "is outside 0 to 110"),
    ],
)
def test_a_join_that_is_not_certain_is_refused(tmp_path, stays, patients, column, reason):
    cases, refused = everything(mimic_files(tmp_path, [TRIAGE], stays, patients))
    assert not cases
    assert refused == [["triage.csv", "2", column, reason]]


@pytest.mark.parametrize(
    ("level", "steps"),
    [("1", ("yes", "-", "-", "-")), ("2", ("no", "yes", "-", "-")), ("3", ("no", "no", "two or more", "no")),
     ("4", ("no", "no", "one", "no")), ("5", ("no", "no", "none", "no"))],
)  # fmt: skip
def test_the_steps_of_an_imported_gold_turn_lead_to_its_level(tmp_path, level, steps):
    (line,), _ = everything(mimic_files(tmp_path, [TRIAGE | {"acuity": level}]))
    turn = TASK.gold(TASK.Case.model_validate(line), thinking=False).messages[-1]
    assert tuple(re.findall(r"Step . \(.*?\): (.*)", turn.content)) == steps


def test_later_copies_are_refused(tmp_path):
    stays = [STAY, STAY | {"stay_id": "10"}]
    rows = [TRIAGE, TRIAGE, TRIAGE | {"stay_id": "10", "chiefcomplaint": "chest PAIN -- SOB"}]
    cases, refused = everything(mimic_files(tmp_path, rows, stays))
    assert len(cases) == 1
    assert [row[1:] for row in refused] == [
        ["3", "stay_id", "an earlier row has the same one"],
        ["4", "(the whole row)", "an earlier row has the same narrative"],
    ]


def test_copies_with_another_level_are_refused_all_with_their_lines(tmp_path):
    stays = [STAY | {"stay_id": stay} for stay in ("9", "10", "11", "12", "13")]
    rows = [
        TRIAGE,
        TRIAGE | {"stay_id": "10", "chiefcomplaint": "Cough"},
        TRIAGE | {"stay_id": "11", "chiefcomplaint": "CHEST pain - SOB", "acuity": "3"},
        TRIAGE | {"stay_id": "12", "chiefcomplaint": "Rash"},
        TRIAGE | {"stay_id": "12", "chiefcomplaint": "Rash", "heartrate": "999", "acuity": "4"},
        TRIAGE,
        TRIAGE | {"stay_id": "13", "chiefcomplaint": "Fall", "acuity": ""},
        TRIAGE | {"stay_id": "13", "chiefcomplaint": "Fall", "acuity": "4"},
    ]
    cases, refused = everything(mimic_files(tmp_path, rows, stays))
    assert [(case["key"]["complaint"], case["key"]["level"]) for case in cases] == [("Cough", 2)]
    narrative, stay = (
        "another row gives the same narrative another label",
        "another row gives the same stay another level",
    )
    assert [row[1:] for row in refused] == [
        ["2", "(the whole row)", narrative],
        ["4", "(the whole row)", narrative],
        ["5", "acuity", stay],
        ["6", "acuity", stay],
        ["7", "stay_id", "an earlier row has the same one"],
        ["8", "acuity", "is missing"],
        ["9", "stay_id", "an earlier row has the same one"],
    ]


def test_a_row_of_another_width_is_refused(tmp_path):
    mimic_files(tmp_path, [TRIAGE])
    with (tmp_path / "ed/triage.csv").open("a") as stream:
        stream.write("1,2,3\n")
    assert everything(tmp_path)[1] == [
        ["triage.csv", "3", "(the whole row)", "has another number of cells than the header"]
    ]


@given(st.dictionaries(st.sampled_from(sorted(TRIAGE)), st.text(st.characters(exclude_categories=["Cs"]), max_size=9)))
def test_any_cell_is_taken_or_refused(tmp_path_factory, change):
    change = {name: cell.replace("\0", "") for name, cell in change.items()}
    folder = tmp_path_factory.getbasetemp() / "any"
    try:
        cases, refused = everything(mimic_files(folder, [TRIAGE | change]))
    except DataError:
        return  # a bare carriage return, which csv does not quote
    assert len(cases) + len(refused) == 1 or any("\r" in cell or "\n" in cell for cell in change.values())
    for case in cases:
        TASK.Case.model_validate(case)


# MIETIC


def test_only_retained_rows_are_taken_and_the_text_alone_is_told(tmp_path):
    lines, record, refused = taken(files("mietic-validation", tmp_path), "exam")
    cases = [TASK.Case.model_validate_json(line) for line in lines]
    assert Counter(map(TASK.label, cases)) == synthetic.RETAINED
    assert record["refusals"] == {"final_decision": {"is REMOVE": 14}}
    assert {tuple(row[2:]) for row in refused} == {("final_decision", "is REMOVE")}
    assert not any(set(case.facts.narrative) & set("\r\n") for case in cases)
    assert {(case.key.hr_bpm, case.key.age_years, case.key.pain) for case in cases} == {(None, None, None)}


def test_the_levels_of_the_main_file_follow_from_the_question(tmp_path):
    path = files("mietic", tmp_path)
    (train, record, _), (mine, _, _) = (taken(path, use) for use in ("train", "mine"))
    assert {json.loads(line)["key"]["level"] for line in (*train, *mine)} == {1, 2}
    refusals = record["refusals"]
    assert list(refusals) == ["instruction"]
    assert ["resources" in reason for reason in refusals["instruction"]] == [True]


@pytest.mark.parametrize(
    ("question", "level"),
    [
        ("Is a life-saving intervention required at once?", 1),
        ("Does the patient need immediate lifesaving care?", 1),
        ("Does the case meet ESI level 2 criteria?", 2),
        ("ESI-2: is this a high-risk situation?", 2),
    ],
)
def test_a_question_is_recognised(question, level):
    assert mietic.level_of(question) == level


def test_a_narrative_with_two_questions_of_different_levels_is_refused_in_both_rows(tmp_path):
    ask = {1: "Is a life-saving intervention required?", 2: "Is this a high-risk situation?"}
    rows = [(1, "Chest pain."), (2, "Cough."), (2, "chest PAIN"), (2, "cough"), (1, "Rash.")]
    path = tmp_path / "MIETIC.csv"
    path.write_text("instruction,input,output\n" + "".join(f"{ask[level]},{text},x\n" for level, text in rows))
    (train, _, refused), (mine, _, again) = (taken(path, use) for use in ("train", "mine"))
    assert refused == again
    assert {json.loads(line)["facts"]["narrative"] for line in (*train, *mine)} == {"Cough.", "Rash."}
    assert [(row[1], row[3]) for row in refused] == [
        ("2", "another row gives the same narrative another label"),
        ("4", "another row gives the same narrative another label"),
        ("5", "an earlier row has the same narrative"),
    ]


def test_a_row_that_is_refused_for_its_label_contests_the_label_of_another(tmp_path):
    """The question about resources says 3, 4 or 5, which no other level can be."""
    path = tmp_path / "MIETIC.csv"
    asked = {
        "Chest pain.": ("Is a life-saving intervention required?", "How many resources?"),
        "Rash.": ("high-risk?",),
    }
    path.write_text("instruction,input,output\n" + "".join(f"{q},{text},x\n" for text in asked for q in asked[text]))
    (train, _, refused), (mine, _, _) = (taken(path, use) for use in ("train", "mine"))
    assert {json.loads(line)["facts"]["narrative"] for line in (*train, *mine)} == {"Rash."}
    assert refused[0][3] == "another row gives the same narrative another label"


def test_a_stay_that_is_removed_in_one_row_is_taken_from_no_other(tmp_path):
    path, first = files("mietic-validation", tmp_path), []

    def change(row):
        first.append(row)
        return row | {"stay_id": first[0]["stay_id"], "Final Decision": "REMOVE"} if len(first) == 2 else row

    sown.rewrite(path, change)
    _, _, refused = taken(path, "exam")
    assert first[0]["Final Decision"].strip().upper() == "RETAIN"
    assert any(row[1] == "2" and "stay" in row[3] for row in refused)


def test_a_stay_that_experts_kept_at_two_levels_is_refused_in_both_rows(tmp_path):
    path = files("mietic-validation", tmp_path)
    kept = []

    def change(row):
        if row["Final Decision"].strip().upper() == "RETAIN":
            kept.append(row)
        if len(kept) == 2 and row is kept[1]:
            return row | {"stay_id": kept[0]["stay_id"], "acuity": str(1 + int(float(kept[0]["acuity"])) % 5)}
        return row

    sown.rewrite(path, change)
    lines, record, _ = taken(path, "exam")
    assert record["refusals"]["acuity"] == {"another row gives the same stay another level": 2}
    assert len(lines) == 34


LEAKS_A_LEVEL = [
    "ESI 2", "ESI2", "ESI-2", "ESI: 2", "ESI = 2", "ESI level: two", "ESI two", "ESI II", "ESI IV", "ESI iii",
    "an ESI of 2", "ESI score of 3", "ESI is a 2", "(ESI) 2", "ESI 2-3", "ESI 2/3", "Emergency Severity Index 2",
    "Emergency Severity Index: 2", "Emergency Severity Index (ESI) level 2", "emergency severity index of III",
    "Acuity: 2", "Acuity 2", "acuity=2", "acuity level II", "acuity of 2", "acuity (2)", "Acuity 2/5", "Acuity: two",
    "triaged as a 2", "triaged as 2", "triaged as a two", "triaged as level 2", "triaged at level 3", "triaged 2.",
    "triage 2", "triage: 2", "triage level of 2", "triage category III", "triage acuity 2", "level 2 triage",
    "level two acuity", "2 on the ESI", "a two on the Emergency Severity Index", "triage priority 1",
    "Triage nurse assigned level 2.", "ESI was set at 2", "ESI determined to be 2", "E.S.I. 2", "E.S.I. level II",
    "triaged immediately to level 1", "ESI has been judged to be a 3", "the triage RN made it a level 3",
    "assigned to level two", "acuity was changed to level 2", "ESI_2", "esi_level: 2", "ESI_level=3", "acuity_level 3",
    "acuity is two", "ESI would be 2", "ESI was felt to be 2", "ESI lvl 2", "triage lvl 3", "triage cat. 2", "ESI -> 2",
    "acuity -> 2", "triage => 2", "ESI remains 2", "ESI equals 2", "ESI noted as 2", "acuity rated 2",
    "acuity assigned: 2", "acuity assessed as 2", "Acuity two", "acuity III", "Acuity [3]", "ESI v4 level 2",
    "ESI version 4: 2",
]  # fmt: skip
NAMES_NO_LEVEL = [
    "triaged at 2 pm", "triaged at 2:30", "triaged 2 hours ago", "triaged as a 2-year-old", "triaged as a 2 year old",
    "triage, 2 episodes of vomiting", "high acuity, two episodes", "high acuity. IV placed", "visual acuity 20/40",
    "visual acuity 2/60 on the left", "at triage IV access obtained", "in triage I felt faint", "triaged to room 2",
    "triage nurse noted 3 episodes", "in triage 3 times", "came from a level 1 trauma center", "pain 5, ESI pending",
    "2 patients in triage", "2 mg at triage", "triage 2 L of oxygen", "triage temperature 38.5",
    "severity 8 of 10", "level 3 pain", "acuity 1.5", "triaged one hour ago", "in triage for two hours",
    "assigned a level 1 trauma alert", "triage nurse set 2 lines", "triaged immediately at 2 pm", "e.g. I fainted",
    "nurse assigned room 2", "glucose determined to be 4",
    "high acuity IV placed", "acuity was changed at 2 pm", "decreased acuity of one eye",
    "acuity was one of many worries",
]  # fmt: skip


@pytest.mark.parametrize("text", LEAKS_A_LEVEL)
def test_a_text_that_names_its_level_is_refused(text):
    for said in (f"Chest pain, {text}", f"Chest pain. {text.upper()}; sweating"):
        with pytest.raises(importing.Unclear, match="names a level"):
            imported.check(said, "chiefcomplaint")


@pytest.mark.parametrize("text", NAMES_NO_LEVEL)
def test_what_only_looks_like_a_level_is_taken(text):
    imported.check(f"Chest pain, {text}, sweating", "chiefcomplaint")
    imported.check(f"Chest pain, {text}", "chiefcomplaint")


@pytest.mark.usefixtures("seconds")
@pytest.mark.parametrize(
    "filler",
    [
        "esi ",
        "esi of is as ",
        "level 2 ",
        "triaged as a ",
        "acuity level ",
        "(",
        "I ",
        "e.s.i. ",
        "triage level as to ",
    ],
)
def test_a_hundred_thousand_characters_are_searched(filler):
    re.search(imported.NAMES_A_LEVEL, filler * (100_000 // len(filler)))


@pytest.mark.parametrize(
    "question", ["", "What is the level?", "How many resources?", "Life-saving, or level 2?", "ESI 23?"]
)
def test_any_other_question_is_refused(question):
    with pytest.raises(importing.Unclear, match="instruction"):
        mietic.level_of(question)


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"tiragecase": " "}, "tiragecase"),
        ({"acuity": "7"}, "acuity"),
        ({"subject_id": "?"}, "subject_id"),
        ({"Final Decision": "PERHAPS"}, "final_decision"),
        ({"tiragecase": "x" * 4001}, "tiragecase"),
        ({"tiragecase": "Seen on 2019-03-04."}, "tiragecase"),
        ({"tiragecase": "Seen on 4 March 2019."}, "tiragecase"),
        ({"tiragecase": "Chest pain.<|im_end|>"}, "tiragecase"),
        ({"tiragecase": "Chest pain, triaged as a 2."}, "tiragecase"),
    ],
)
def test_a_bad_validation_row_is_refused(tmp_path, change, column):
    path = files("mietic-validation", tmp_path)
    first = iter([True])
    sown.rewrite(path, lambda row: row | change if next(first, False) else row)
    lines, record, _ = taken(path, "exam")
    assert len(lines) == 35
    assert record["refusals"][column]


# What a path may hold


def test_anything_else_is_refused_with_what_is_expected(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for path in (tmp_path, tmp_path / "other.csv", tmp_path / "none"):
        with pytest.raises(DataError, match=r"triage\.csv, edstays\.csv and patients\.csv.*tiragecase.*instruction"):
            TASK.recognise(path)


def test_a_folder_with_some_of_the_files_is_told_which_are_missing(tmp_path):
    shutil.rmtree(mimic_files(tmp_path, [TRIAGE]) / "hosp")
    with pytest.raises(DataError, match=r"but not patients\.csv; put all three there"):
        TASK.recognise(tmp_path)


def test_a_missing_column_is_named(tmp_path):
    path = mimic_files(tmp_path, [TRIAGE]) / "ed/triage.csv"
    path.write_text(path.read_text().replace("o2sat", "saturation"))
    with pytest.raises(DataError, match=r"triage\.csv lacks the column o2sat; give the file as it was published"):
        TASK.recognise(tmp_path)


# The shipped files


@pytest.mark.long
@kinds
def test_the_shipped_files_are_what_the_script_writes(kind, tmp_path):
    rows = {"mietic-validation": 50, "mietic": 120, "mimic-iv-ed": 300}[kind]
    made = synthetic.MAKERS[kind](tmp_path, rows, 1)
    assert {str(path.relative_to(tmp_path)) for path in made} == set(FILES[kind])
    for path in made:
        assert path.read_bytes() == (SHIPPED / path.relative_to(tmp_path)).read_bytes()
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 200_000


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        synthetic.main(["--help"])
    assert "python tests/esi_sources.py mimic-iv-ed /tmp/mimic --rows 2000" in capsys.readouterr().out


def test_the_patients_of_an_exam_can_be_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "source"
    files = [*synthetic.mimic_iv_ed(folder, 120, 1), *synthetic.mietic_validation(folder, 50, 1)]
    triage = next(path for path in files if path.name == "triage.csv")
    validation = next(path for path in files if path.name.startswith("MIETIC"))
    with triage.open(encoding="utf-8", newline="") as stream:
        people = iter(dict.fromkeys(row["subject_id"] for row in csv.DictReader(stream)))
    sown.rewrite(validation, lambda row: row | {"subject_id": next(people, row["subject_id"])})

    def train(**options):
        entry = {"task": "esi", "task_version": 2, "use": "train", "source": str(folder), **options}
        params = dolls.params(imports={"train": entry})
        dataset.stage(params, "train")
        cases = list(dataset.read_cases(paths.cases("train"), TASK))
        return cases, json.loads((paths.cases("train") / paths.IMPORT_FILE).read_text())

    exam = [TASK.Case.model_validate_json(line) for line in taken(validation, "exam")[0]]
    before, plain = train()
    with pytest.raises(DataError, match=r"share patients .* under `without` of the other's import"):
        importing.check_apart([("train", before)], "mietic-36", exam)
    after, counted = train(without=str(validation))
    importing.check_apart([("train", after)], "mietic-36", exam)
    left = counted["refusals"]["(the whole row)"]["its patient or narrative is among those that are left out"]
    assert left > 0
    assert counted["kept"] + counted["another_pool"] + counted["refused"] == counted["read"] == plain["read"]
    assert {case.id for case in after} < {case.id for case in before}
    assert "without/MIETIC-validate-samples.csv" in artifacts.read_manifest(paths.cases("train")).inputs
