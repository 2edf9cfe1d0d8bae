"""Imported cases: pools by name, what is withheld, patients apart, and the whole way through the stages' own checks."""

import io
import json
import re
import shutil
import stat
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import dolls
import esi_sources as synthetic
import sown
from clinrl import artifacts, paths
from clinrl.config.params import Params
from clinrl.data import dataset, validate
from clinrl.errors import ArtefactError, DataError, ParamsError
from clinrl.evaluation import answers, error_analysis, evaluate, notebook
from clinrl.provenance import stages
from clinrl.reports.render import render
from clinrl.tasks import importing
from clinrl.tasks.base import get_task
from clinrl.tasks.esi.imported import ImportedKey
from clinrl.tasks.imaging.imported import ImportedKey as ImagingKey
from clinrl.tasks.importing import MARK, check_apart, fingerprint, normalise, pool_of, pseudonym, redact, use_of
from clinrl.types import Graded, Message, Transcript, Unreadable, transcript_of

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "data/sources/synthetic"
TASK = get_task("esi")


@pytest.fixture
def project(tmp_path, monkeypatch) -> Params:
    """The doll's params with an import of each shipped source, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return dolls.params(imports=sown.imports(SHIPPED))


def case(narrative: str, group: str, level: int = 2):
    key = ImportedKey(source="mietic", level=level).model_dump()
    line = importing.case_line("esi", group, {"narrative": narrative}, key)
    return TASK.Case.model_validate_json(line)


def test_of_an_imported_case_nobody_says_that_training_has_its_complaint():
    shown = TASK.reporting.slices
    assert {shown[name](case("Chest pain.", "exam")) for name in ("rule", "family")} == {"imported"}


# Groups, pools and texts


@given(st.sampled_from(["base", "train", "mine", "exam"]), st.text(min_size=1))
def test_a_group_names_its_pool(use, text):
    group = f"{use}{MARK}{pseudonym('subject', text)}"
    assert pool_of(group) == TASK.pool_of(group) == use
    assert text not in group or len(text) < 5
    assert pseudonym("subject", "12") == "76af7efd61a17869"


@given(st.text())
def test_a_group_of_a_drawn_case_names_none(text):
    assert pool_of(text) is None or "/imported/" in text
    assert use_of(pseudonym("subject", text), {"train": 99, "exam": 1}) in ("train", "exam")


@pytest.mark.parametrize("group", ["chest pain/acs/0FHVPRD", "x/imported/1", "imported", "/imported/", "exam"])
def test_other_groups_have_no_named_pool(group):
    assert pool_of(group) is None


@pytest.mark.parametrize("key", [None, 5])
def test_a_key_that_is_no_record_is_refused(key):
    with pytest.raises(ValidationError, match="key"):
        TASK.Case.model_validate(case("Cough.", "exam/imported/1").model_dump() | {"key": key})


@pytest.mark.parametrize("level", [0, 6])
def test_an_imported_case_without_a_level_is_refused(level):
    with pytest.raises(ValidationError, match="level"):
        case("Cough.", "exam/imported/1", level)


@given(st.text())
def test_copies_of_a_text_have_one_fingerprint(text):
    assert normalise(normalise(text)) == normalise(text)
    assert fingerprint(f"  {text.upper().lower()}.\n") == fingerprint(text.upper().lower())
    assert fingerprint(unicodedata.normalize("NFD", text)) == fingerprint(unicodedata.normalize("NFC", text))


@given(st.text())
def test_cleaned_text_is_one_clean_line(text):
    cleaned = importing.clean(text)
    assert cleaned == " ".join(cleaned.split())
    assert not any(character in cleaned for character in "\r\n\t\u200b\ufeff")


TWINS = ["Chest pain since noon.", "Chest pa\u2060in since noon.", "Chest pain\ufe0f since n\u00adoon."]

# Soft hyphen, marks of direction, joiners, selectors of a variation, tags: none of them shows.
HIDDEN = [chr(code) for code in (
    0xAD, 0x34F, 0x61C, 0x180E, 0x200B, 0x200D, 0x202E, 0x2060, 0x2064, 0x2066, 0x2069, 0x3164, 0xFE00, 0xFE0F, 0xFEFF,
    0xFFFB, 0xE0001, 0xE0041, 0xE007F, 0xE0100, 0xE01EF,
)]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("MRN-1234567", "medical record number"),
        ("MRN is 1234567", "medical record number"),
        ("MRN12345678", "medical record number"),
        ("mrn_1234567 seen", "medical record number"),
        ("MRN: A1234567", "medical record number"),
        ("Medical record number is 12345678", "medical record number"),
        ("medical record #12345678", "medical record number"),
        ("Medical record number is 4321", "medical record number"),
        ("Medical record number: K1234-5", "medical record number"),
        ("medical record no. (4321)", "medical record number"),
        ("medical record (1234567)", "medical record number"),
        ("Arrived 2020-03-14T10:22:00, chest pain", "full date"),
        ("since 3/14/2020pm", "full date"),
        ("14-Mar-2020T10", "full date"),
        ("03 / 14 / 2020", "full date"),
        ("SSN 123\u201145\u20116789", "social security number"),
        ("call 555\u2013123\u20134567", "telephone number"),
        ("seen 2019\u201103\u201104", "full date"),
        ("write to a\uff20b.com", "e-mail address"),
    ],
)
def test_identifiers_are_found_however_a_word_processor_writes_them(text: str, kind: str) -> None:
    with pytest.raises(importing.Unclear, match=f"holds what looks like a {kind}"):
        importing.check_text(text, "text")


@pytest.mark.parametrize(
    "text",
    ["reviewed medical record. 1500 mL given", "Per medical record, 2019 CABG", "old medical record: 2018 stent",
     "medical record (2020 visit)", "no medical record is here"],
)  # fmt: skip
def test_what_only_looks_like_an_identifier_is_taken(text: str) -> None:
    importing.check_text(text, "text")


@pytest.mark.parametrize("hidden", HIDDEN, ids=ascii)
def test_what_does_not_show_parts_no_word(hidden):
    assert importing.clean(f"{hidden}E{hidden}SI 2 \t{hidden}\nat 3 a.m.{hidden}") == "ESI 2 at 3 a.m."
    with pytest.raises(importing.Unclear, match="holds what looks like a full date"):
        importing.check_text(importing.clean(f"Seen on 1970-01{hidden}-02."), "text")
    assert re.search(importing.HIDDEN_CHARACTERS, hidden)


@pytest.mark.parametrize(
    "text", ["Caf\u00e9 \u2014 5\u00a0\u00b5g, \u2265 38 \u00b0C", "\u0646\u0635 \u4e2d\u6587 \U0001f600"]
)
def test_what_shows_is_kept(text):
    assert importing.clean(text) == text.replace("\u00a0", " ")
    assert not re.search(importing.HIDDEN_CHARACTERS, text)


def test_copies_that_differ_in_what_does_not_show_are_one_narrative(tmp_path):
    path = tmp_path / "MIETIC.csv"
    rows = ["instruction,input,output", *(f"Is a life-saving intervention needed?,{text},x" for text in TWINS)]
    path.write_text("\n".join(rows), encoding="utf-8")
    refused = io.StringIO()
    source = TASK.recognise(path)
    assert sum(len([*source.cases(use, importing.Intake(refused))]) for use in ("train", "mine")) == 1
    assert refused.getvalue().count("an earlier row has the same narrative") == 4


# What is kept of an answer


def graded(content: str, narrative: str = "A secret story.") -> Graded:
    turn = Message(role="assistant", content=content, thinking=narrative)
    transcript = Transcript(messages=(turn,), stop="answered")
    (line,) = evaluate.grade(TASK, "think", [case(narrative, "exam/imported/1")], [transcript], TASK.Reward())
    return line


@given(st.text(max_size=60), st.text(max_size=60), st.integers(1, 5))
def test_of_an_answer_only_its_line_is_kept(before, after, level):
    line = graded(f"{before}\nANSWER: ESI {level}\n{after}")
    kept = redact(TASK, case("A secret story.", "exam/imported/1"), line)
    (turn,) = kept.transcript.messages
    assert turn.thinking is None
    assert turn.content in ("", f"ANSWER: ESI {level}") or TASK.parse(transcript_of(turn)) == line.answer
    assert (kept.answer, kept.score) == (line.answer, line.score)


@pytest.mark.parametrize("content", ["", "secret", "ANSWER: ESI 2 or 3, since she is secret", "ANSWER: ESI 9\nsecret"])
def test_nothing_is_kept_of_an_unreadable_answer(content):
    kept = redact(TASK, case("A secret story.", "exam/imported/1"), graded(content))
    assert "secret" not in kept.model_dump_json()


def test_of_the_turns_of_tools_and_users_nothing_is_kept():
    line = graded("ANSWER: ESI 2")
    turns = (*(Message(role=role, content="secret") for role in ("user", "tool")), *line.transcript.messages)
    line = line.model_copy(update={"transcript": Transcript(messages=turns, stop="answered")})
    kept = redact(TASK, case("A secret story.", "exam/imported/1"), line)
    assert [turn.content for turn in kept.transcript.messages] == ["ANSWER: ESI 2"]


@pytest.mark.parametrize("label", get_task("imaging").labels)
@pytest.mark.parametrize(
    "form", ["<answer>\n{}\n</answer>", "<answer>{}\n</answer>\n", "\n<ANSWER>\r\n\r\n{}.</answer>"]
)
def test_an_answer_that_spans_lines_is_kept_so_that_it_reads_as_itself(form, label):
    task = get_task("imaging")
    facts = {"condition": "Secret.", "variant": "Secret.", "procedure": "CT", "evidence": []}
    key = ImagingKey(source="appropriateness", label=task.labels[0], reasoning=("A secret.",)).model_dump()
    told = importing.case_line("imaging", "exam/imported/1", facts, key)
    asked = task.Case.model_validate_json(told)
    turn = Message(role="assistant", content=form.format("\n".join(label.split())), thinking="It is a secret story.")
    (line,) = evaluate.grade(task, "think", [asked], [transcript_of(turn)], task.Reward())
    assert line.answer == label
    kept = redact(task, asked, line)
    answers.check_answers(task, [asked], [kept], Path("think.jsonl"))
    assert "secret" not in kept.model_dump_json().lower()
    for other in (*({*task.labels} - {label}), Unreadable(reason="empty")):
        forged = kept.model_copy(update={"answer": other})
        with pytest.raises(ArtefactError, match=r"think\.jsonl line 1 gives another answer to"):
            answers.check_answers(task, [asked], [forged], Path("think.jsonl"))


def test_answers_to_drawn_cases_are_kept_whole():
    drawn = next(iter(TASK.cases(1, 1, pool="exam", mix="natural")))
    line = graded("x\nANSWER: ESI 2")
    assert redact(TASK, drawn, line) is line


# Patients apart


def test_a_shared_patient_or_narrative_is_refused():
    exam = [case("Chest pain, sweating.", "exam/imported/aa")]
    for other in ("Something else.", "chest PAIN - sweating"):
        training = [case("Cough.", "train/imported/bb"), case(other, "train/imported/aa")]
        with pytest.raises(DataError, match=r"data/cases/d and x share patients or narratives \(1 rows"):
            check_apart([("d", training)], "x", exam)
    with pytest.raises(DataError, match="share patients or narratives"):
        check_apart([("d", [case("chest pain sweating", "train/imported/cc")])], "x", exam)
    check_apart([("d", [case("Cough.", "train/imported/bb")])], "x", exam)
    check_apart([("d", TASK.cases(5, 1, pool="train", mix="natural"))], "x", exam)


def test_an_exam_on_trained_patients_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    shutil.copytree(dolls.built(), tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    (made,) = synthetic.mietic_validation(tmp_path, 50, 1)
    training = tmp_path / "MIETIC.csv"
    rows = [("instruction", "input", "output")]
    texts = [json.loads(line)["facts"]["narrative"] for line in lines_of(made)]
    rows += [("Is a life-saving intervention needed?", text.upper(), "x2") for text in texts]
    training.write_text("\n".join(",".join(f'"{cell}"' for cell in row) for row in rows))
    shared = {"task": "esi", "parent": "esi-base", "exam": "x2", "profile": "imitate", "seed": 1}
    imports = {
        "d2": {"task": "esi", "task_version": 2, "use": "train", "source": str(training)},
        "m2": {"task": "esi", "task_version": 2, "use": "mine", "source": str(training)},
        "x2": {"task": "esi", "task_version": 2, "use": "exam", "source": str(made)},
    }
    versions = {"v1": shared | {"data": "d2"}, "v2": shared | {"parent": "v1", "data": "d1"}}
    bases = {"esi": dolls.PARAMS["bases"]["esi"] | {"exam": "x2"}}
    params = dolls.params(imports=imports, versions=versions, bases=bases)
    for name in imports:
        dataset.stage(params, name)
        named = {"data": {"name": name, "identity": artifacts.identity(artifacts.read_manifest(paths.cases(name)))}}
        artifacts.write_json(paths.data_proof(name), named)
    cases = list(dataset.read_cases(paths.cases("x2"), TASK))
    mining = {"v3": {"task": "esi", "data": "m2"}}
    mined = dolls.params(
        imports=imports, versions=versions | {"v3": shared | {"data": "d1"}}, bases=bases, mining=mining
    )
    errors = replace(mined.model("v3"), exam="m2")
    for model, asked in ((mined.model("v3"), cases), (errors, list(dataset.read_cases(paths.cases("m2"), TASK)))):
        with pytest.raises(DataError, match=r"data/cases/\w2 and \w2 share patients"):  # errors are mined on patients
            evaluate.check_apart(mined, model, asked)
    for name in ("v1", "v2"):  # v2 trained on other data, but its parent on this
        with pytest.raises(DataError, match=r"data/cases/d2 and x2 share patients or narratives"):
            evaluate.check_apart(params, params.model(name), cases)
    evaluate.check_apart(params, params.model("esi-base"), cases)
    shutil.copytree(paths.adapter("esi-base"), paths.adapter("v1"))
    with pytest.raises(DataError, match="share patients or narratives"):
        evaluate.stage(params, "v1")
    assert not paths.graded("v1").exists()
    for asked in (None, cases):
        with pytest.raises(DataError, match="share patients or narratives"):
            notebook.evaluate(params, "v1", asked)


def lines_of(path: Path) -> list[str]:
    return list(TASK.recognise(path).cases("exam", importing.Intake(io.StringIO())))


# Stages


@pytest.mark.long
def test_an_import_and_its_proof(project):
    for name in ("mietic-36", "mietic-train", "mimic-mine"):  # one of each source; the use changes no check
        dataset.stage(project, name)
        validate.stage(project, name)
        record = json.loads((paths.cases(name) / paths.IMPORT_FILE).read_text())
        refused = (paths.cases(name) / paths.REFUSED_FILE).read_text().splitlines()
        proof = json.loads(paths.data_proof(name).read_text())
        assert refused[0].split("\t") == ["file", "line", "column", "reason"]
        assert len(refused) - 1 == record["refused"]
        assert proof["import"] == record
        assert proof["summary"]["cases"] == record["kept"]
        columns = [entry["arguments"].get("column") for entry in proof["expectations"]]
        assert "label_reproduced" not in columns
        assert "has_missing_vital" not in columns
        assert {"hr_bpm", "narrative", "group_in_pool", "gold_scores_best"} <= set(columns)
        manifest = artifacts.verified(paths.cases(name))
        assert set(manifest.files) == {paths.CASES_FILE, paths.REFUSED_FILE, paths.IMPORT_FILE}
        assert all(len(digest) == 64 for digest in manifest.inputs.values())


def test_while_it_is_written_an_import_is_its_owners_alone(project, monkeypatch, capsys):
    """A killed import leaves its folder as it is."""
    seen, progress = [], dataset.progress

    def watched(*words):
        seen.extend(stat.S_IMODE(found.stat().st_mode) for found in paths.cases("x").parent.glob(".*.partial-*"))
        return progress(*words)

    monkeypatch.setattr(dataset, "progress", watched)
    dataset.stage(project, "mietic-36")
    assert seen == [0o700]
    counts = json.loads((paths.cases("mietic-36") / paths.IMPORT_FILE).read_text())
    says = f"clinrl: mietic-36: of {counts['read']} rows {counts['kept']} are kept, 0 belong to another pool and "
    assert f"{says}{counts['refused']} were refused (" in capsys.readouterr().err


def test_a_source_that_is_replaced_while_it_is_read_is_no_import(project, tmp_path, monkeypatch):
    source = tmp_path / "MIETIC.csv"
    shutil.copy(SHIPPED / "MIETIC.csv", source)
    imports = {"d2": sown.imports(SHIPPED)["mietic-train"] | {"source": str(source)}}
    recognise, seen = TASK.recognise, []

    def replaced(path):
        found = recognise(path)
        seen.append(path)
        if len(seen) == 2:  # after its header was read
            source.write_bytes(source.read_bytes() + b'"What?","x","y"\n')
        return found

    monkeypatch.setattr(TASK, "recognise", replaced)
    with pytest.raises(DataError, match="a source of d2 changed while it was read; import it again when nothing"):
        dataset.stage(dolls.params(imports=imports), "d2")
    assert not paths.cases("d2").exists()


def test_an_import_for_another_use_is_refused(project):
    imports = sown.imports(SHIPPED)
    imports["mietic-36"]["use"] = "train"
    imports["mietic-mine"]["use"] = "exam"
    params = dolls.params(imports=imports)
    with pytest.raises(DataError, match=r"imports\.mietic-36\.use is train, but .* is mietic-validation data"):
        dataset.stage(params, "mietic-36")
    with pytest.raises(DataError, match=r"which is for train or mine; change the use"):
        dataset.stage(params, "mietic-mine")
    assert not paths.cases("mietic-36").exists()


def test_a_source_without_a_case_is_refused_and_leaves_nothing(project, tmp_path):
    path = tmp_path / "only.csv"
    asked = ("How many resources?", "What?", "What is the level of acuity?")
    path.write_text("instruction,input,output\n" + "".join(f'"{each}",text,x\n' for each in asked))
    params = dolls.params(imports={"n1": {"task": "esi", "task_version": 2, "use": "train", "source": str(path)}})
    with pytest.raises(DataError) as refused:
        dataset.stage(params, "n1")
    assert "gives n1 no case: of 3 rows 0 are kept, 0 belong to another pool and 3 were refused (" in str(refused.value)
    assert "(2 for column instruction is none of the three known questions; 1 for column instruction " in str(
        refused.value
    )
    assert not paths.cases("n1").exists()


def test_lost_rows_and_altered_counts_fail_validation(project):
    dataset.stage(project, "mietic-36")
    path = paths.cases("mietic-36") / paths.IMPORT_FILE
    record = json.loads(path.read_text())
    artifacts.write_json(path, record | {"refused": record["refused"] - 1})
    with pytest.raises(DataError, match=r"import\.json was altered .*dvc repro import@mietic-36"):
        validate.stage(project, "mietic-36")
    fields = artifacts.read_manifest(paths.cases("mietic-36")).model_dump(exclude={"files"})
    artifacts.seal(paths.cases("mietic-36"), **fields)
    with pytest.raises(DataError, match="loses rows"):
        validate.stage(project, "mietic-36")


def test_another_task_version_is_named_under_imports(project):
    imports = {"n1": sown.imports(SHIPPED)["mietic-36"] | {"task_version": 9}}
    with pytest.raises(ParamsError, match=r"imports\.n1\.task_version is 9"):
        dataset.stage(dolls.params(imports=imports), "n1")


def test_a_page_of_mined_imports_shows_no_text(project, monkeypatch):
    params = dolls.params(imports=sown.imports(SHIPPED), mining={"v1": {"task": "esi", "data": "mimic-mine"}})
    dataset.stage(params, "mimic-mine")
    cases = list(dataset.read_cases(paths.cases("mimic-mine"), TASK))
    said = [Transcript(messages=(Message(role="assistant", content="So.\nANSWER: ESI 5"),), stop="answered")] * len(
        cases
    )
    graded = {mode: evaluate.grade(TASK, mode, cases, said, TASK.Reward()) for mode in params.modes}
    run = answers.run_of(params, params.model("v1"), cases, "e" * 64)
    report = error_analysis.report_of(replace(run, graded=graded))
    assert report.groups
    page = render("mining", report=report, most=error_analysis.MAX_GROUPS)
    assert "None is shown: the cases are imported" in page
    assert not any(text in page for case in cases for text in (case.facts.narrative, case.id))


def test_the_table_of_an_imported_exam_is_in_no_order_of_patients(project, tmp_path):
    params = dolls.params(imports=sown.imports(SHIPPED))
    dataset.stage(params, "mietic-36")
    cases = list(dataset.read_cases(paths.cases("mietic-36"), TASK))
    said = [Transcript(messages=(Message(role="assistant", content=f"ANSWER: ESI {1 + n % 5}"),), stop="answered")
            for n in range(len(cases))]  # fmt: skip
    graded = {mode: evaluate.grade(TASK, mode, cases, said, TASK.Reward()) for mode in params.modes}
    run = replace(answers.run_of(params, params.model("v1"), cases, "e" * 64), graded=graded)
    evaluate.write_reports(tmp_path, run, evaluate.reports_of(run, [], {}))
    rows = (tmp_path / "predictions_think.csv").read_text().splitlines()
    assert rows[1:] == sorted(rows[1:])
    assert len(rows) == 1 + len(cases)


def test_other_users_cannot_open_imported_rows(project):
    Path(".dvc").mkdir(exist_ok=True)
    for _ in range(2):  # without a cache, and with one
        dataset.stage(project, "mietic-36")
    for place in (paths.cases("mietic-36"), Path(".dvc/cache")):
        assert place.stat().st_mode & 0o077 == 0


# params.yaml


def test_imports_and_data_sets_are_looked_up_alike(project):
    assert project.data_spec("d1").use == "train"
    assert project.data_spec("mietic-36").use == "exam"
    assert project.data_stages("d1") == ("dataset@d1", "validate@d1")
    assert project.data_stages("mietic-36") == ("import@mietic-36", "validate-import@mietic-36")
    with pytest.raises(ParamsError, match="did you mean mietic-36"):
        project.data_spec("mietic-37")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"imports": {"d1": {}}}, "imports.d1 is the name of a data set too"),
        ({"imports": {"n1": {"task": "esl"}}}, "imports.n1.task: 'esl' is not a task; did you mean esi"),
        ({"external": {"v9": {"task": "esi", "data": "x1"}}}, "external: 'v9' is not a version"),
        ({"external": {"v1": {"task": "esl", "data": "x1"}}}, "external.v1.task: 'esl' is not the task of v1"),
        (
            {"external": {"v1": {"task": "esi", "data": "d1"}}},
            "external.v1.data: 'd1' is not exam data of esi but train",
        ),
        (
            {"mining": {"v1": {"task": "esi", "data": "n1"}}, "imports": {"n1": {}}},
            "mining.v1.data: 'n1' is not mine data",
        ),
    ],
)
def test_what_imports_and_externals_may_name(change, sentence):
    entry = sown.imports(SHIPPED)["mietic-36"]
    imports = {name: entry | given for name, given in change.get("imports", {}).items()}
    with pytest.raises(ParamsError) as error:
        dolls.params(**change | {"imports": imports})
    assert sentence in str(error.value)


def test_an_import_is_training_data_and_an_exam_like_any(project):
    shared = {"task": "esi", "parent": "esi-base", "profile": "imitate", "seed": 1}
    params = dolls.params(
        imports=sown.imports(SHIPPED), versions={"v1": shared | {"data": "mimic-train", "exam": "mietic-36"}}
    )
    assert stages.addresses_of(params, "v1") | {"probe": ""} == {
        "dataset": "import@mimic-train", "validate": "validate-import@mimic-train", "probe": "", "train": "train@v1",
        "evaluate": "evaluate@v1",
    }  # fmt: skip
    with pytest.raises(ParamsError, match=r"versions\.v1\.data: 'mimic-exam' is not train data of esi but exam data"):
        dolls.params(
            imports=sown.imports(SHIPPED), versions={"v1": shared | {"data": "mimic-exam", "exam": "mietic-36"}}
        )


def test_a_missing_proof_names_the_stage_of_an_import(project):
    from clinrl.data.reward_audit import validated_identity

    dataset.stage(project, "mietic-36")
    with pytest.raises(ArtefactError, match="dvc repro validate-import@mietic-36"):
        validated_identity("mietic-36", TASK)
