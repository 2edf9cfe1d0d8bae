"""Validation with the real Great Expectations on real small files, sound and damaged."""

import json
import re
import shutil
from collections.abc import Callable
from copy import copy, deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import laid
from clinrl import artifacts, paths
from clinrl.config.params import Params
from clinrl.data import dataset, expectations, validate
from clinrl.errors import ArtefactError, DataError
from clinrl.models.judges import Judges
from clinrl.tasks.base import content_id, get_task
from clinrl.tasks.importing import HIDDEN_CHARACTERS
from clinrl.tasks.parts import Expect
from clinrl.tasks.policies import write_answer
from clinrl.types import Case

ROOT = Path(__file__).parents[2]
TASK = get_task("esi")
FOLDER = paths.cases("esi-d3")
FILE = FOLDER / paths.CASES_FILE
PROOF = paths.data_proof("esi-d3")
FAILED = PROOF.with_suffix(".failed.json")
COMPUTED = {
    "narrative_unique" if name == expectations.TEXT_UNIQUE else name: says
    for name, says in expectations.COMPUTED.items()
}
"""The computed columns as they are called for this task."""
ADDED = {
    " \u202e": "control or invisible character",
    " Call 555-123-4567.": "telephone number",
    " Gold is ESI 2.": "ExpectColumnValuesToNotMatchRegex",
}
"""What a narrative must not hold, and the rule that says so."""
SIZE = 400
"""Cases of the sound data set: enough for its shares to lie within the task's tolerances."""


@cache
def committed() -> dict[str, Any]:
    return laid.content(ROOT)


def params() -> Params:
    source = deepcopy(committed())
    source["datasets"]["esi-d3"]["cases"] = SIZE
    return Params.model_validate(source)


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace with a validated data set; tests that damage it copy its file."""
    place = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        dataset.stage(params(), "esi-d3")
        validate.stage(params(), "esi-d3")
    return place


def refusal(sound: Path, lines: list[str], *, sealed: bool = True) -> str:
    """Validation's refusal of a data set of these lines, which is sealed unless told otherwise."""
    artifacts.write_text(FILE, "".join(lines))
    manifest = artifacts.read_manifest(sound / FOLDER)
    artifacts.write_json(FOLDER / artifacts.MANIFEST, manifest.model_dump(mode="json"))
    if sealed:
        fields = manifest.model_dump(exclude={"files"})
        artifacts.seal(FOLDER, **fields | {"spec": manifest.spec | {"cases": len(lines)}})
    artifacts.write_json(PROOF, {"an": "old proof"})
    with pytest.raises(DataError) as error:
        validate.stage(params(), "esi-d3")
    assert not PROOF.exists()
    assert json.loads(FAILED.read_text(encoding="utf-8"))["refused"] == str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    return str(error.value)


@pytest.fixture
def damage(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)
    return partial(refusal, sound)


@pytest.fixture
def lines(sound: Path) -> list[str]:
    """The first rows of the sound data set."""
    return (sound / FILE).read_text(encoding="utf-8").splitlines(keepends=True)[:60]


def edited(line: str, change: Callable[[dict[str, Any]], Any], *, renamed: bool = True) -> str:
    """A row with a change in its content, and the id that the new content has if it is to look untouched."""
    content = json.loads(line)
    change(content)
    if renamed:
        case: Case = TASK.Case.model_validate(content)
        content["id"] = content_id(TASK.name, case.facts, case.key)
    return artifacts.canonical_json(content) + "\n"


@pytest.mark.long
def test_gold_is_the_best_answer_under_the_reward_of_every_method_that_has_one(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sound)
    source = deepcopy(committed())
    source["comparisons"] = {}
    assert validate._subject(Params.model_validate(source), "esi-d3")[3] == [TASK.Reward()], "of imitations alone"
    for version in ("esi-v46", "esi-v46-2", "esi-v47"):  # the last has a waiver
        source["versions"][version]["data"] = "esi-d3"
    before = validate._subject(Params.model_validate(source), "esi-d3")[3]
    recipe = source["profiles"]["esi-fifth-asymmetric"] = json.loads(
        json.dumps(source["profiles"]["esi-fifth-asymmetric"])
    )
    recipe |= {"method": "rejection", "reward": {**recipe["reward"], "unreadable": -1.75}}
    for trainer in recipe["trainer"].values():
        trainer |= {"batch": 8}
        for key in ("beta", "held_out", "scale_rewards"):
            trainer.pop(key, None)
    found = validate._subject(Params.model_validate(source), "esi-d3")[3]
    assert before == [Params.model_validate(committed()).reward("esi-v46")]
    assert found == [before[0].model_copy(update={"unreadable": -1.75})]


def test_a_sound_data_set_gets_a_proof_of_its_very_bytes(sound: Path) -> None:
    proof = json.loads((sound / PROOF).read_text(encoding="utf-8"))
    assert proof["data"] == {"name": "esi-d3", "identity": artifacts.identity(artifacts.verified(sound / FOLDER))}
    assert proof["summary"]["cases"] == SIZE
    assert proof["summary"]["duplicates"] == 0
    assert sum(proof["summary"][f"share_level_{level}"] for level in TASK.labels) == pytest.approx(1, abs=1e-5)
    assert proof["expectations"]
    assert all(entry["success"] for entry in proof["expectations"])
    assert {entry["arguments"].get("column") for entry in proof["expectations"]} >= set(COMPUTED)
    assert not (sound / FAILED).exists()


def test_the_page_of_a_proof_loads_nothing_and_shows_text_as_text(sound: Path, tmp_path: Path, monkeypatch) -> None:
    page = (sound / paths.data_docs("esi-d3") / "index.html").read_text(encoding="utf-8")
    assert "esi-d3: all rules hold" in page
    assert "spo2_pct" in page
    proof = json.loads((sound / PROOF).read_bytes())
    monkeypatch.chdir(tmp_path)
    artifacts.write_json(FAILED, proof | {"refused": "x", "faults": ["row 1: <script src=//x.example></script>"]})
    validate.write_page(FAILED)
    refused = (paths.data_docs("esi-d3") / "index.html").read_text(encoding="utf-8")
    assert "&lt;script src=//x.example&gt;" in refused
    for text in (page, refused):
        assert "default-src 'none'" in text
        assert not re.search(r"(?i)<(script|link|img|iframe)|\b(src|href|on\w+)=[\"']|@import|url\(", text)


@pytest.mark.long
def test_the_proof_is_the_same_every_time_in_one_chunk_or_many(
    sound: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (sound / PROOF).read_bytes()
    monkeypatch.chdir(sound)
    monkeypatch.setattr(validate, "CHUNK_ROWS", 250)
    validate.stage(params(), "esi-d3")
    assert PROOF.read_bytes() == before
    assert capfd.readouterr() == ("", "")


def test_a_fault_in_one_chunk_is_kept_whatever_the_next_one_holds() -> None:
    tally = expectations.Tally(Expect(type="ExpectColumnValuesToBeNull", arguments={"column": "a"}))
    for success, unexpected in ((True, []), (False, [7]), (True, []), (False, [8])):
        tally.add({"success": success, "result": {"partial_unexpected_list": unexpected}})
    assert not tally.success
    assert tally.report()["observed"] == 7


def test_gold_that_one_of_its_modes_does_not_say_is_found() -> None:
    task, case = copy(TASK), next(TASK.cases(1, 1, pool="train", mix="natural"))
    task.gold = lambda case, *, thinking: TASK.gold(case, thinking=True) if thinking else write_answer("Well.")  # type: ignore[method-assign]
    found = validate.columns(case, "", task, "train", [], lambda *_: True, Judges(paths.base("esi")))
    assert not found.pop("gold_scores_best")
    assert all(found.values())


def test_an_impossible_oxygen_saturation_is_named(damage: Callable[..., str], lines: list[str]) -> None:
    lines[16] = edited(lines[16], lambda case: case["key"]["presentation"].update(spo2_pct=140), renamed=False)
    message = damage(lines)
    assert message.startswith("data/cases/esi-d3/cases.jsonl row 17, column key.presentation.spo2_pct: ")
    assert "got 140" in message
    assert "dvc repro dataset@esi-d3" in message


def test_a_truncated_file_is_named(damage: Callable[..., str], lines: list[str]) -> None:
    message = damage([*lines[:-1], lines[-1][:200]], sealed=False)
    assert message.startswith("data/cases/esi-d3/cases.jsonl row 60 is cut short")


def test_an_empty_file_is_named(damage: Callable[..., str]) -> None:
    assert damage([], sealed=False).startswith("data/cases/esi-d3/cases.jsonl holds no case")


def test_a_novel_is_no_narrative(damage: Callable[..., str], lines: list[str]) -> None:
    lines[3] = edited(lines[3], lambda case: case["facts"].update(narrative="word " * 100_000), renamed=False)
    assert "row 4, column facts.narrative: " in damage(lines)


@pytest.fixture(scope="module")
def damaged(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """The refusal of a data set that is cut short and damaged in many rows, and all the faults found in it.

    Each expectation takes as long on one bad row as on many, so all the damage is done in one file.
    """

    def added(line: str, text: str) -> str:
        return edited(line, lambda case: case["facts"].update(narrative=case["facts"]["narrative"] + text))

    rows = (sound / FILE).read_text(encoding="utf-8").splitlines(keepends=True)[:60]
    foreign = next(TASK.cases(1, 1, pool="exam", mix="natural")).model_dump(mode="json")
    rows[1] = edited(rows[1], lambda case: case["key"]["presentation"].update(hr_bpm=12))
    rows[2] = edited(rows[2], lambda case: case["key"].update(level=case["key"]["level"] % 5 + 1))
    rows[3] = edited(rows[3], lambda case: case["facts"].update(narrative="A calm adult, well."), renamed=False)
    rows[8:11] = [added(row, text) for row, text in zip(rows[8:11], ADDED, strict=True)]
    rows += [rows[0], artifacts.canonical_json(foreign) + "\n"]
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("damaged")
        patch.chdir(place)
        message = refusal(sound, rows, sealed=False)
        return message, json.loads(FAILED.read_text(encoding="utf-8"))["faults"]


def test_a_value_within_the_schema_and_outside_the_rules_is_named(damaged: tuple[str, list[str]]) -> None:
    """It is the first bad row, so the refusal is about it."""
    message, _ = damaged
    assert re.match(r"data/cases/esi-d3/cases.jsonl row 2 \(esi-[0-9a-f]{16}\), column hr_bpm: 12", message)
    assert "ExpectColumnValuesToBeBetween(min_value=20, max_value=300)" in message


def test_a_file_cut_between_rows_is_noticed(damaged: tuple[str, list[str]]) -> None:
    _, faults = damaged
    assert any("column cases: 62 breaks ExpectColumnValuesToBeInSet(value_set=[400])" in fault for fault in faults)
    assert faults[-1].startswith("data/cases/esi-d3/cases.jsonl was altered after it was built")


@pytest.mark.parametrize("row", range(9, 9 + len(ADDED)))
def test_what_a_narrative_must_not_hold(damaged: tuple[str, list[str]], row: int) -> None:
    _, faults = damaged
    found = [fault for fault in faults if f" row {row} (" in fault and "column narrative: " in fault]
    assert any([*ADDED.values()][row - 9] in fault for fault in found), faults


@pytest.mark.parametrize("hidden", ["\u0007", "\u202e"])
def test_control_characters_are_caught(hidden: str) -> None:
    assert re.search(validate.CONTROL_CHARACTERS, f"A patient {hidden} in pain.")


@pytest.mark.parametrize("hidden", ["\u0007", "\u200b", "\u202e", "\u2060", "\ufe0f"])
def test_of_imported_rows_all_that_does_not_show_is_caught(hidden: str) -> None:
    suite = validate.row_suite(get_task("esi"), imported=True)
    shapes = [expect.arguments["regex"] for expect in suite if expect.type == "ExpectColumnValuesToNotMatchRegex"]
    assert HIDDEN_CHARACTERS in [shape for shape in shapes if re.search(shape, f"A patient {hidden} in pain.")]


def test_imported_rows_are_held_to_all_that_is_computed_but_the_label() -> None:
    suites = (validate.row_suite(get_task("esi"), imported=imported) for imported in (False, True))
    drawn, imported = ({rule.arguments["column"] for rule in suite} for suite in suites)
    assert COMPUTED.keys() & drawn - imported == {"label_reproduced"}


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (3, "label_reproduced"),
        (3, "gold_scores_best"),
        (4, "id_matches_content"),
        (61, "id_unique"),
        (61, "narrative_unique"),
        (62, "group_in_pool"),
    ],
)
def test_repeated_foreign_and_mislabelled_rows_are_named(damaged: tuple[str, list[str]], row: int, column: str) -> None:
    _, faults = damaged
    assert any(re.search(rf" row {row} \(\S+, column {column}: {COMPUTED[column]}", fault) for fault in faults), faults


def test_a_rule_that_cannot_be_evaluated_is_a_bug_and_no_data_fault(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sound)
    check = expectations.checker({"rows": [Expect(type="ExpectColumnValuesToBeNull", arguments={"column": "absent"})]})
    with pytest.raises(RuntimeError, match="absent"):
        check("rows", [{"row": 1, "id": "a"}])


def test_an_edited_row_that_the_task_has_no_table_for_is_named_and_a_bug_of_the_task_is_not_hidden(
    damage: Callable[..., str], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def columns(*_: Any) -> dict[str, bool]:
        raise KeyError("pneumonia-typo")

    monkeypatch.setattr(validate, "columns", columns)
    with pytest.raises(KeyError, match="pneumonia-typo"):
        damage(lines)
    other = edited(lines[0], lambda row: row["facts"].update(narrative="Chest pain."), renamed=False)
    assert re.search(r"cases\.jsonl row 1 \(.*\) was edited after it was built: the task esi does not", damage([other]))


def test_an_import_that_lost_its_record_is_not_taken_for_drawn_data(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sound / FOLDER, FOLDER)
    (FOLDER / paths.IMPORT_FILE).write_text("{}")
    artifacts.seal(FOLDER, **artifacts.read_manifest(FOLDER).model_dump(exclude={"files"}))
    (FOLDER / paths.IMPORT_FILE).unlink()
    with pytest.raises(ArtefactError, match=r"import\.json is missing: .* rebuild with `dvc repro import@esi-d3`"):
        dataset.manifest_of(FOLDER, TASK)


def test_missing_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtefactError, match="data/cases/esi-d3 has no manifest"):
        validate.stage(params(), "esi-d3")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("social security number", "SSN 123-45-6789"),
        ("telephone number", "call (555) 123-4567"),
        ("telephone number", "mobile +1 555.123.4567"),
        ("e-mail address", "write to jo.doe@example.org"),
        ("medical record number", "MRN: 0012345"),
        ("full date", "seen 03/04/2021"),
        ("full date", "born 1961-02-03"),
        ("full date", "on March 4, 2021"),
        ("web address", "see https://example.org"),
        *(
            ("full date", f"on {day}")
            for day in (
                "4 March 2024", "04 Mar 2024", "4th of March, 2024", "March 4th, 2024", "Mar. 4 2024", "4-Mar-2024",
                "4/MAR/24", "04MAR2024", "4. March 2024", "2024 March 4", "2024-Mar-04", "1st May 2019", "31 dec 1999",
                "Sept 3rd 2020", "Feburary 3, 2020", "12/31-1999", "2020-12/31", "31.12.99", "31/12/99",
            )
        ),
        *(
            ("telephone number", f"call {number}")
            for number in (
                "+49 30 1234567", "+49 (0)30 123456", "+49 30/1234567", "+491701234567", "0049 170 1234567",
                "+44 20 7946 0958", "+33 1 23 45 67 89", "+1 5551234567", "+1 (555) 123-4567", "Tel.:+43-1-5331234",
                "(+41 44 668 18 00)", "+49.30.1234567", "+49. 30 1234567", "+44.(0)20.7946.0958",
                "+31.6-12345678", "+61.4 1234 5678", "+49 30.1 234567",
            )
        ),
    ],
)  # fmt: skip
def test_identifiers_are_caught(kind: str, text: str) -> None:
    assert kinds(f"A patient, {text}, in pain.") == {kind}


def kinds(text: str) -> set[str]:
    """The kinds of identifiers that a text of an imported row seems to hold."""
    return {name for name, shape in validate.IDENTIFIERS_OF_IMPORTS.items() if re.search(shape, text)}


@pytest.mark.parametrize(
    "text",
    [
        "seen by Dr. March, 45 years", "Mrs March 4 weeks after surgery", "4 may be enough", "took 2 may take 3 more",
        "since March", "in March 2024", "born in May", "aged 19 in 2020", "BP 120/80, HR 98", "BP 130/85 98 16 37",
        "temperature +37.5", "pitting oedema +2 120/80 98 16 99", "edema 2+ 110/70", "K+ 3.5, Na+ 140, Cl 100",
        "heparin 5000 units", "weight +20 kg in 2 years", "00:30 120/80", "at 10:00 36 120 80 98 16",
        "10.00 25 120 80 98 16", "gained +49 g", "2000-3000 ml", "mar 5 mm", "augmentin 875 mg", "decreased 10 20 30",
        "mean difference +15.3 (12.1-18.5)", "+7.2 (-1.1 to 15.3) mmHg",
        "odds ratio 2.1 (95% CI 1.2-12.5)", "5.1/10.20 mg",
    ],
)  # fmt: skip
def test_doses_pressures_ages_and_names_are_no_identifiers(text: str) -> None:
    assert kinds(f"A patient, {text}, in pain.") == set()
    assert kinds(text) == set()


@pytest.mark.usefixtures("seconds")
@pytest.mark.parametrize("filler", ["+49 ", "0", "00 ", "4 march ", "4-", "march 4 ", "1 ", "+4(", "2024 "])
def test_a_hundred_thousand_characters_are_searched_for_identifiers(filler: str) -> None:
    for shape in validate.IDENTIFIERS_OF_IMPORTS.values():
        re.search(shape, filler * (100_000 // len(filler)))


@given(
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 110),
    st.integers(0, 10),
    st.floats(25, 44).map("{:.1f}".format),
)
def test_vital_signs_are_no_identifiers(systolic: int, diastolic: int, age: int, pain: int, celsius: str) -> None:
    vitals = f"BP {systolic}/{diastolic}, HR {systolic}, RR {pain}, SpO2 {age}%, T {celsius}"
    text = f"{age} years, {vitals}, pain {pain}/10, vision 20/20."
    assert not kinds(text)
