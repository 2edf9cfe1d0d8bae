"""`clinrl show`: which episode is meant, and how it reads."""

import json
import shutil
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import auditors
import dolls
import esi_sources as synthetic
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, write_json
from clinrl.cli import main as cli
from clinrl.config.params import load_params
from clinrl.data import dataset
from clinrl.data.dataset import read_cases
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation import answers, evaluate
from clinrl.evaluation.answers import read_graded
from clinrl.evaluation.record import load_record
from clinrl.evaluation.show import place
from clinrl.provenance import lock
from clinrl.reports.episode import WIDTH, WITHHELD, Episode, Part, episode_of, write
from clinrl.tasks.base import get_task
from clinrl.types import Call, Message, Score, Transcript, Unreadable

EPISODE = Episode(
    name="audit-v2",
    exam="audit-x1",
    mode="think",
    number=7,
    of=360,
    case_id="audit-00112233aabbccdd",
    traits={"level": "hard", "proposals": "2"},
    withheld=False,
    request=(
        Message(role="system", content="You audit an Actor."),
        Message(
            role="user",
            content="Protocol: age 40 to 78, both included.\nProposals:\nA1 P23 clear 0.93\nA2 P7 clear 0.80",
        ),
    ),
    messages=(
        Message(
            role="assistant",
            content="",
            thinking="",
            calls=(
                Call(name="review_proposal", arguments={"proposal_id": "A1"}),
                Call(name="temporal_audit", arguments={"patient_id": "P23"}),
            ),
        ),
        Message(
            role="tool",
            content="A1 P23 clear confidence 0.93. The age is within the usual range of adult trials. cites: none",
        ),
        Message(role="tool", content="P23 delay 30, standard +2, stage IV -8, death none"),
        Message(
            role="assistant",
            content="",
            thinking="upper +1 is above 0, so the age is out of range; the delay is above the window as well, and the "
            "stage is IV.\nflag A1",
            calls=(
                Call(
                    name="flag_error",
                    arguments={
                        "proposal_id": "A1",
                        "error_type": "age_boundary_error",
                        "reason": "upper +1; generic_range",
                    },
                ),
                Call(name="approve", arguments={"proposal_id": 2}),
            ),
        ),
        Message(role="tool", content="recorded"),
        Message(role="tool", content="error: no such proposal; there are A1 A2"),
        Message(role="assistant", content="Done.\x1b[2J", thinking="nothing left"),
    ),
    stop="answered",
    parts=(
        Part(about="A1", right="age_boundary_error", decided="age_boundary_error"),
        Part(about="A2", right="approve", decided=Unreadable(reason="undecided")),
    ),
    score=Score(terms={"detection": 0.4, "evidence": 0.05, "steps": 0.0, "invalid": -0.02}, total=0.43),
)

GOLDEN = """\
audit-v2 on audit-x1, mode think: case audit-00112233aabbccdd, 7 of 360
level hard; proposals 2

Request
  Protocol: age 40 to 78, both included.
  Proposals:
  A1 P23 clear 0.93
  A2 P7 clear 0.80

Turn 1
  thinks  (nothing)
  calls   review_proposal(proposal_id="A1")
          -> A1 P23 clear confidence 0.93. The age is within the usual range of adult trials. cites:
             none
  calls   temporal_audit(patient_id="P23")
          -> P23 delay 30, standard +2, stage IV -8, death none
Turn 2
  thinks  upper +1 is above 0, so the age is out of range; the delay is above the window as well,
          and the stage is IV.
          flag A1
  calls   flag_error(proposal_id="A1", error_type="age_boundary_error", reason="upper +1;
          generic_range")
          -> recorded
  calls   approve(proposal_id=2)
          -> error: no such proposal; there are A1 A2
Turn 3
  thinks  nothing left
  says    Done.\\x1b[2J
The end: by itself.

Decided
  A1  age_boundary_error      right
  A2  unreadable (undecided)  wrong: approve

Score 0.4300
  detection  +0.4000
  evidence   +0.0500
  invalid    -0.0200
"""


def test_an_episode_reads_as_it_was_played():
    assert write(EPISODE) == GOLDEN


def test_calls_that_nobody_answered_and_a_cut_turn_are_said():
    call = Call(name="approve", arguments={"proposal_id": "A1"})
    cut = EPISODE.model_copy(
        update={
            "messages": (
                Message(role="assistant", content="", calls=(call,)),
                Message(role="assistant", content="", thinking="and so"),
            ),
            "stop": "max_tokens",
            "score": Score(terms={"detection": 0.0}, total=0.0),
        }
    )
    text = write(cut)
    assert '  calls   approve(proposal_id="A1")\n          -> (no answer)\nTurn 2\n' in text
    assert "  thinks  and so\n  says    (nothing)\nThe end: cut off: out of tokens.\n" in text
    assert text.endswith("Score 0.0000, of no term\n")


IDS = ["esi-00aa", "esi-00ab", "esi-01aa"]


@pytest.mark.parametrize(("episode", "expected"), [("1", 0), ("3", 2), ("esi-00ab", 1), ("esi-01", 2)])
def test_an_episode_is_a_number_or_the_beginning_of_an_id(episode, expected):
    assert place(IDS, episode) == expected


@pytest.mark.parametrize(
    ("episode", "says"),
    [
        ("0", "there is no episode 0; the exam has those from 1 to 3"),
        ("4", "there is no episode 4"),
        ("1" * 5000, "no case of the exam begins with '1"),
        ("esi-00", r"2 cases of the exam begin with 'esi-00' \(esi-00aa, esi-00ab\)"),
        ("esi", r"3 cases of the exam begin with 'esi' \(esi-00aa, esi-00ab, esi-01aa\)"),
        ("xyz", "no case of the exam begins with 'xyz'; give a case id such as esi-00aa"),
        ("", "no case of the exam begins with ''"),
    ],
)
def test_what_is_no_single_episode_is_refused(episode, says):
    with pytest.raises(ParamsError, match=says):
        place(IDS, episode)


@pytest.fixture(scope="module")
def audits(tmp_path_factory) -> Path:
    """A project about the audit whose base slips now and then."""
    folder = tmp_path_factory.mktemp("audits")
    with chdir(folder):
        auditors.write_slipping()
    return folder


def test_an_episode_of_an_exam_is_found_and_shown(audits, monkeypatch, capsys):
    monkeypatch.chdir(audits)
    cases = list(read_cases(paths.cases("x1"), auditors.TASK))
    assert cli.main(["show", "audit-base", "5", "--mode", "think"]) == 0
    text = capsys.readouterr().out
    case = cases[4]
    assert text.startswith(
        f"audit-base on x1, mode think: case {case.id}, 5 of {len(cases)}\nlevel {case.facts.level};"
    )
    for proposal in case.facts.proposals:
        assert f"-> {proposal.proposal_id} {proposal.patient_id} {proposal.action}" in text
    assert "calls   submit_audit_report(" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    for episode in (case.id, case.id[:12]):
        assert cli.main(["show", "audit-base", episode, "--mode", "think"]) == 0
        assert capsys.readouterr().out == text


def test_wrong_ones_drawn_ones_and_json(audits, monkeypatch, capsys):
    monkeypatch.chdir(audits)
    lines = read_graded(paths.graded("audit-base") / "direct.jsonl")
    cases = list(read_cases(paths.cases("x1"), auditors.TASK))
    pairs = zip(lines, cases, strict=True)
    wrong = [line.case_id for line, case in pairs if line.answer != auditors.TASK.label(case)]
    assert cli.main(["show", "audit-base", "--wrong", "3", "--mode", "direct", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["case_id"] for one in found] == wrong[:3]
    assert all(any(part["right"] != part["decided"] for part in one["parts"]) for one in found)
    assert [Episode.model_validate(one).mode for one in found] == ["direct"] * 3
    assert cli.main(["show", "audit-base", "--wrong", "--mode", "direct"]) == 0
    assert wrong[0] in capsys.readouterr().out
    drawn = []
    for _ in range(2):
        assert cli.main(["show", "audit-base", "--random", "3"]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["audit-base", "99"], 2, "there is no episode 99"),
        (["audit-base", "1", "--mode", "thnk"], 2, "'thnk' is no mode of params.yaml; did you mean think?"),
        (
            ["v1", "1"],
            1,
            "data/graded/v1 is not here; run `dvc pull --with-deps evaluate@v1` where a remote has them, or ",
        ),
        (["v7", "1"], 2, "'v7' is no name that `clinrl show` knows"),
    ],
)
def test_what_is_not_there_is_a_sentence(words, code, says, audits, monkeypatch, capsys):
    monkeypatch.chdir(audits)
    assert cli.main(["show", *words]) == code
    assert says in capsys.readouterr().err


def test_one_command_brings_all_that_models_lack(tmp_path, monkeypatch):
    params, recorded = load_params(), lock.read()
    models = [params.model(name) for name in ("esi-base", "esi-v49", "esi-v49-full", "esi-v46-v49")]
    for model in models:
        assert str(paths.graded(model.name)) in lock.outputs(recorded, [model.stage])
    shutil.copy("dvc.lock", tmp_path)
    monkeypatch.chdir(tmp_path)
    for model in models:
        run = answers.run_of(params, model, [], "")
        new = partial(answers.load_report, mode="new")  # of params.yaml, and not yet of dvc.lock
        for load in (partial(answers.load_report, mode="think"), new, partial(load_record, run)):
            with pytest.raises(ArtefactError, match=f"does not exist: run `dvc repro {model.stage}`"):
                load(name=model.name)
    stages = "baseline@esi evaluate@esi-v49 examine-fold@esi-v49-full examine-blend@esi-v46-v49"
    with pytest.raises(ArtefactError, match=f"esi-base and .*esi-v49 .* are not here; .* `dvc repro {stages}`"):
        answers.check_here(*models)


def test_a_task_of_one_turn_is_shown_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    params = dolls.params()
    dataset.stage(params, "x1")
    named = {"data": {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}}
    write_json(paths.data_proof("x1"), named)
    YAML(typ="safe").dump(dolls.PARAMS, Path("params.yaml"))
    shutil.rmtree(paths.graded("esi-base"), ignore_errors=True)
    who = params.model("esi-base")
    cases = list(read_cases(paths.cases("x1"), who.task))
    said = Transcript(messages=(Message(role="assistant", content="ANSWER: ESI 3", thinking="Seen."),), stop="answered")
    graded = {mode: evaluate.grade(who.task, mode, cases, [said] * len(cases), who.reward) for mode in params.modes}
    run = replace(answers.open_run(params, who), graded=graded)
    evaluate.keep(paths.graded("esi-base"), run, {"exam": run.exam_digest, "adapter": "0" * 64})
    right = next(i for i, case in enumerate(cases) if who.task.label(case) == 3)
    assert cli.main(["show", "esi-base", str(right + 1)]) == 0
    text = capsys.readouterr().out
    assert " ".join(cases[right].facts.narrative.split()[:6]) in text
    assert "Turn 1\n  thinks  Seen.\n  says    ANSWER: ESI 3\n" in text
    assert "Decided\n  answer  3  right\n" in text


def test_of_an_imported_case_it_says_that_the_text_is_withheld(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (made,) = synthetic.mietic_validation(tmp_path / "source", 50, 1)
    entry = {"task": "esi", "task_version": 2, "use": "exam", "source": str(made)}
    params = dolls.params(imports={"mietic-36": entry})
    dataset.stage(params, "mietic-36")
    who = params.model("v1")
    case = next(iter(read_cases(paths.cases("mietic-36"), get_task("esi"))))
    said = Transcript(
        messages=(Message(role="assistant", content="ANSWER: ESI 3", thinking="SECRET"),), stop="answered"
    )
    (line,) = evaluate.grade(who.task, "think", [case], [said], who.reward)
    found = episode_of(who, case, line, number=1, of=36)
    assert found.request == ()
    assert WITHHELD in write(found)
    assert "SECRET" not in write(found)
    assert case.facts.narrative[:20] not in write(found)
