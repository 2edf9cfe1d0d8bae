"""A task for lm-evaluation-harness: the same prompts, and the same verdicts on the same answers."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import auditors
import clients
import contest
import dolls
import esi_sources
import examined
from clinrl import paths
from clinrl.artifacts import write_text
from clinrl.cli import main as cli
from clinrl.config.params import load_params
from clinrl.data import dataset
from clinrl.data.dataset import read_cases
from clinrl.errors import DataError, ParamsError
from clinrl.evaluation.answers import load_report, read_graded
from clinrl.exports import lm_eval, lm_eval_scorer
from clinrl.models.chat import write_turn
from clinrl.tasks.base import get_task

pytestmark = pytest.mark.usefixtures("few_draws")
ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ("lm-eval==0.4.13", "pydantic")
REPLAY = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

answers = json.load(open(sys.argv[2]))

class Replay(LM):
    def generate_until(self, requests, disable_tqdm=False):
        self.asked = {one.doc["id"]: one.args[0] for one in requests}
        return [answers[one.doc["id"]] for one in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood

model = Replay()
tasks = TaskManager(include_path=sys.argv[1])
(name,) = sys.argv[3:]
found = simple_evaluate(model=model, tasks=[name], task_manager=tasks, log_samples=True, bootstrap_iters=0)
print(json.dumps({
    "results": found["results"][name],
    "asked": model.asked,
    "exact": {one["doc"]["id"]: one["exact"] for one in found["samples"][name]},
}))
"""


@pytest.fixture
def project(monkeypatch) -> None:
    """Answers to an exam, with a data set to mine."""
    monkeypatch.chdir(examined.answered())


def scorer_of(folder: Path):
    spec = importlib.util.spec_from_file_location("scorer", folder / "scorer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replies(name: str, mode: str) -> dict[str, str]:
    lines = read_graded(paths.graded(name) / f"{mode}.jsonl")
    return {line.case_id: write_turn(line.transcript.messages[-1], mode == "think") for line in lines}


def test_the_folder_has_cases_of_the_pool_mine_unless_the_exam_is_opened(project, tmp_path, capsys):
    assert cli.main(["export", "lm-eval", "esi", "--out", str(tmp_path / "mine")]) == 0
    assert cli.main(["export", "lm-eval", "esi", "--out", str(tmp_path / "exam"), "--open-exam"]) == 0
    assert "THE EXAM IS OPEN" in capsys.readouterr().err
    for folder, data in (("mine", "m1"), ("exam", "x1")):
        made = tmp_path / folder / "clinrl_esi"
        cases = list(read_cases(paths.cases(data), get_task("esi")))
        rows = [json.loads(line) for line in (made / "cases.jsonl").read_text(encoding="utf-8").splitlines()]
        assert [row["id"] for row in rows] == [case.id for case in cases]
        assert {get_task("esi").pool_of(case.group) for case in cases} == {folder}
        assert (made / "clinrl_esi.yaml").read_text(encoding="utf-8").count("!function scorer.") == 2


@pytest.mark.parametrize(("kind", "folder"), [("lm-eval", "clinrl_esi"), ("verifiers", "clinrl-esi")])
def test_a_folder_that_something_else_made_is_left_alone(project, tmp_path, capsys, kind, folder):
    words = ["export", kind, "esi", "--out", str(tmp_path)]
    made = tmp_path / folder
    assert [cli.main(words), cli.main(words)] == [0, 0]  # its own it replaces
    says = f"{made} was not made by `clinrl export {kind}`, or was changed since"
    cases = next(made.rglob("cases.jsonl"))
    before = cases.read_bytes()
    for change in (lambda: cases.write_bytes(b""), lambda: write_text(made / ".git/config", "")):
        change()
        assert cli.main(words) == 2
        assert says in capsys.readouterr().err
        cases.write_bytes(before)
    assert (made / ".git/config").exists()
    shutil.rmtree(made)
    (tmp_path / "elsewhere").mkdir()
    made.symlink_to(tmp_path / "elsewhere")
    assert cli.main(words) == 2


@pytest.mark.parametrize("mode", ["think", "direct"])
def test_the_scorer_counts_as_the_report_does(mode, project, tmp_path):
    lm_eval.stage(examined.mining(), "esi", out=tmp_path, open_exam=True)
    scorer, answers = scorer_of(tmp_path / "clinrl_esi"), replies("v2", mode)
    found: dict[str, list[float]] = {}
    process = scorer.process_opened if mode == "think" else scorer.process
    for row in scorer.load(version=2)["test"]:
        for name, value in process(row, [answers[row["id"]]]).items():
            found.setdefault(name, []).append(value)
    report = load_report("v2", mode)
    assert 0 < report.metrics["exact"].value < 1
    for name in get_task("esi").compared:
        assert round(sum(found[name]) / len(found[name]), 6) == report.metrics[name].value
        assert len(found[name]) == report.metrics[name].n


def test_an_answer_that_cannot_be_read_counts_as_clinrl_counts_it(project, tmp_path):
    lm_eval.stage(examined.mining(), "esi", out=tmp_path, open_exam=True)
    scorer = scorer_of(tmp_path / "clinrl_esi")
    for gold, expected in ((1, {"exact": 0.0, "critical_under": 1.0}), (5, {"exact": 0.0, "critical_under": 0.0})):
        row = {"task": "esi", "gold": json.dumps(gold)}
        assert scorer.process(row, ["It may be 1 or 5."]).items() <= expected.items()


def test_a_thought_that_was_cut_off_is_an_answer_only_where_no_prompt_opened_it(project, tmp_path):
    lm_eval.stage(examined.mining(), "esi", out=tmp_path, open_exam=True)
    scorer, row = scorer_of(tmp_path / "clinrl_esi"), {"task": "esi", "gold": "2"}
    cut = "The pulse is 130.\nANSWER: ESI 2"
    assert [one(row, [cut])["exact"] for one in (scorer.process, scorer.process_opened)] == [1.0, 0.0]
    whole = f"{cut}\n</think>\n\nANSWER: ESI 2"
    assert [one(row, [whole])["exact"] for one in (scorer.process, scorer.process_opened)] == [1.0, 1.0]


def test_the_harness_is_told_to_decode_as_an_exam_does(project, tmp_path):
    params = examined.mining()
    base = params.bases["esi"].full.model_copy(update={"temperature": 0.6, "top_p": 0.95})
    bases = {"esi": params.bases["esi"].model_copy(update={"full": base})}
    for scale, expected in (
        ("embedded", {"do_sample": False, "temperature": 0.0}),
        ("full", {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 0}),
    ):
        lm_eval.stage(params.model_copy(update={"scale": scale, "bases": bases}), "esi", out=tmp_path, open_exam=True)
        for name in ("clinrl_esi", "clinrl_esi_think"):
            made = YAML().load(tmp_path / f"clinrl_esi/{name}.yaml")
            assert made["task"] == name
            neutral = {"until": [], "repetition_penalty": 1.0}  # Qwen2.5's own penalty is 1.05, for greedy tokens too
            assert made["generation_kwargs"] == {**neutral, **expected, "max_gen_toks": 64}


def test_the_longest_answer_is_allowed_and_more_is_better_only_where_it_is(project, tmp_path):
    params = examined.mining()
    think = params.modes["think"].model_copy(update={"max_new_tokens": {"embedded": 96, "full": 96}})
    modes = {**params.modes, "think": think}
    lm_eval.stage(params.model_copy(update={"modes": modes}), "esi", out=tmp_path, open_exam=True)
    made = YAML().load(tmp_path / "clinrl_esi/clinrl_esi.yaml")
    assert made["generation_kwargs"]["max_gen_toks"] == 96
    better = {one["metric"] for one in made["metric_list"] if one["higher_is_better"]}
    assert (better, len(made["metric_list"])) == ({"exact"}, len(get_task("esi").compared))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["esy"], 2, "'esy' is no task that `clinrl export lm-eval` knows; did you mean esi?"),
        (["audit"], 2, "'audit' is no task that `clinrl export lm-eval` knows"),
    ],
)
def test_what_cannot_be_exported_is_a_sentence(words, code, says, project, capsys):
    assert cli.main(["export", "lm-eval", *words]) == code
    assert says in capsys.readouterr().err


def test_a_task_of_several_turns_and_one_without_cases_are_refused(checkout):
    with pytest.raises(ParamsError, match="audit is played in several turns, and lm-eval asks once"):
        lm_eval.stage(auditors.params(), "audit")
    with pytest.raises(ParamsError, match="has no data set of esi with use: mine; name one, or give --open"):
        lm_eval.stage(dolls.params(), "esi")


def test_the_text_of_somebodys_records_does_not_leave(checkout):
    (made,) = esi_sources.mietic_validation(checkout / "source", 50, 1)
    entry = {"task": "esi", "task_version": 2, "use": "exam", "source": str(made)}
    bases = {"esi": dolls.PARAMS["bases"]["esi"] | {"exam": "mietic-36"}}
    params = dolls.params(imports={"mietic-36": entry}, bases=bases)
    dataset.stage(params, "mietic-36")
    with pytest.raises(DataError, match="mietic-36 holds somebody's records, whose text must not leave"):
        lm_eval.stage(params, "esi", open_exam=True)
    assert not paths.EXPORTS.exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["think", "direct"])
@pytest.mark.parametrize(
    ("name", "version", "folder"), [("esi", "v2", examined.answered), ("imaging", "better-1", contest.compared)]
)
def test_the_harness_itself_counts_as_the_report_does(name, version, folder, mode, monkeypatch, tmp_path):
    """Unmodified, in an environment of its own that has this checkout's clinrl on its path."""
    venv = clients.client(*REQUIREMENTS)
    monkeypatch.chdir(folder())
    task, exported = get_task(name), f"clinrl_{name}" + ("_think" if mode == "think" else "")
    lm_eval.stage(load_params(), name, out=tmp_path, open_exam=True)
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps(replies(version, mode)), encoding="utf-8")
    settings = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    printed = clients.run(venv, "python", "-c", REPLAY, tmp_path, answers, exported, **settings)
    found, report = json.loads(printed.splitlines()[-1]), load_report(version, mode)
    assert 0 < report.metrics["exact"].value < 1
    for metric in task.compared:
        assert round(found["results"][f"{metric},none"], 6) == report.metrics[metric].value
    cases = list(read_cases(paths.cases("x1"), task))
    lines = read_graded(paths.graded(version) / f"{mode}.jsonl")
    for case, line in zip(cases, lines, strict=True):
        assert found["asked"][case.id] == "".join(turn.content for turn in task.prompt(case.facts))
        assert found["exact"][case.id] == float(line.answer == task.label(case))
    options = ("--tasks", exported, "--include_path", tmp_path, "--limit", "3")
    assert "exact" in clients.run(venv, "lm_eval", "run", "--model", "dummy", *options, **settings)


def test_a_case_with_a_line_separator_of_unicode_is_one_row(tmp_path, monkeypatch):
    monkeypatch.setattr(lm_eval_scorer, "HERE", tmp_path)
    write_text(tmp_path / "cases.jsonl", '{"text":"chest\u2028pain"}\n{"text":"b"}\n')
    assert [row["text"] for row in lm_eval_scorer.load()["test"]] == ["chest\u2028pain", "b"]
