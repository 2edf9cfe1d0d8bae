"""The models that rewards ask, on a toy task: built, asked, recorded, and left alone by a task that asks none."""

import json
import shutil
from pathlib import Path

import numpy
import pytest
from tokenizers import Tokenizer

import dolls
import toys
from clinrl import paths
from clinrl.artifacts import digest, digests, identity, read_manifest, verified
from clinrl.data import dataset, reward_audit
from clinrl.errors import ArtefactError, Refused, TrainingError
from clinrl.evaluation import answers, evaluate
from clinrl.models import bases, judges, pretrain
from clinrl.models.chat import encode
from clinrl.models.judges import Judges, scores
from clinrl.tasks.base import get_task
from clinrl.tasks.parts import Request
from clinrl.training import callback, launch, worker
from clinrl.types import Message, Transcript
from samplers import ScriptedSampler

pytestmark = pytest.mark.long

TEXTS = [
    "With a cough a scan is usually not appropriate.",
    "Headache",
    "A " * 60,
    "Headache and a red flag, so a scan.",
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A toy project with its base, its judge and its data."""
    folder = tmp_path_factory.mktemp("toy")
    with toys.at_home(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        bases.stage(toys.params(), "toy")
        for data in ("d1", "x1"):
            dataset.stage(toys.params(), data)
            toys.prove(data)
        toys.prove("d1")
        yield folder


@pytest.fixture
def project(built, tmp_path, monkeypatch):
    """A copy of it as the working directory."""
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def in_process():
    """Training in this process, which knows the toy task."""
    with dolls.in_process():
        yield


def questions(n=12):
    return [Request("judge", prompt) for prompt, _ in get_task("toy").judged.lessons("judge", n, 99)]


# The base and its judges


def test_a_judge_reads_text_as_it_learned_to(project):
    """By the architecture's name transformers would put another splitting into the tokenizer than it learned with."""
    _, tokenizer = bases.open_judge(paths.base("toy"), "judge")
    learned = Tokenizer.from_file(str(paths.base("toy") / "judge/tokenizer.json"))
    for text in (*(ask.text for ask in questions()), 'It\'s {"medical_concepts": 10}'):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == learned.encode(text).ids


def test_a_judge_is_part_of_the_base_that_it_belongs_to(project):
    manifest = verified(paths.base("toy"))
    assert {"model.safetensors", "judge/model.safetensors", "judge/tokenizer.json"} <= set(manifest.files)
    assert manifest.spec["architecture"] == "llama"
    assert manifest.spec["judges"]["judge"]["architecture"] == "qwen2"
    model, tokenizer = bases.load(toys.params(), "toy", for_training=False)
    assert (model.config.model_type, tokenizer.eos_token, tokenizer.bos_token) == (
        "llama", "<|eot_id|>", "<|begin_of_text|>",
    )  # fmt: skip
    assert tokenizer("<think></think>", add_special_tokens=False)["input_ids"] not in ([], tokenizer.all_special_ids)
    judge, _ = bases.open_judge(paths.base("toy"), "judge")
    assert judge.config.model_type == "qwen2"
    with pytest.raises(ArtefactError, match=r"has no second_judge; name one in params.yaml"):
        bases.open_judge(paths.base("toy"), "second_judge")
    with (paths.base("toy") / "judge" / "model.safetensors").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(ArtefactError, match=r"judge/model.safetensors was altered"):
        verified(paths.base("toy"))


def test_a_killed_build_of_a_judge_continues_to_the_same_bytes(project, tmp_path):
    spec = toys.params().bases["toy"].embedded.judges["judge"].model_copy(update={"steps": 4})
    for out in ("once", "again", "torn"):
        pretrain.build_judge(get_task("toy"), "judge", spec, tmp_path / out, tmp_path / "scratch")
        state = tmp_path / "scratch/checkpoint-4/trainer_state.json"
        if out == "again":  # killed while the last checkpoint was written
            state.unlink()
    assert dolls.files(tmp_path / "once") == dolls.files(tmp_path / "again") == dolls.files(tmp_path / "torn")
    assert state.exists()


def test_what_cannot_be_built_is_refused(project, tmp_path):
    spec = toys.params().bases["toy"].embedded
    with pytest.raises(Refused, match="the task toy has no lessons for a second_judge"):
        pretrain.build_judge(get_task("toy"), "second_judge", spec.judges["judge"], tmp_path / "a", tmp_path / "b")
    with pytest.raises(Refused, match="the chat template gemma ends no turn"):
        pretrain.build(
            get_task("toy"), spec.model_copy(update={"template": "gemma"}), tmp_path / "a", tmp_path / "b"
        )  # fmt: skip


def test_a_hub_base_names_its_judges_by_their_commits(project):
    checkpoint = str(shutil.copytree(paths.base("toy") / "judge", project / "checkpoint"))
    named = {"repo": checkpoint, "revision": "main"}
    full = {**named, "quantize": "none", "judges": {"judge": {**named, "quantize": "none"}}}
    params = toys.params(scale="full", bases={"toy": toys.PARAMS["bases"]["toy"] | {"full": full}})
    bases.stage(params, "toy")
    reference = bases.reference(paths.base("toy"))
    commit = "local-" + digest(digests(Path(checkpoint)))
    assert reference["judges"] == {"judge": {"repo": checkpoint, "commit": commit, "quantize": "none"}}
    assert bases.open_judge(paths.base("toy"), "judge")[0].config.model_type == "qwen2"


# Asking


def test_a_chat_model_of_the_hub_is_asked_by_its_template_and_one_that_is_built_here_as_it_learned(project):
    checkpoint = Path(shutil.copytree(paths.base("toy") / "judge", project / "checkpoint"))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template += "{% if enable_thinking is not false %}<think>\n{% endif %}"  # a thought would use up the budget
    (checkpoint / "chat_template.jinja").write_text(template)
    here, asked = paths.base("toy"), []
    before = judges.identities(get_task("toy"), get_task("toy").Reward(judged=1.0), here)
    named = {"repo": str(checkpoint), "revision": "main", "quantize": "none"}
    full = {**named, "judges": {"judge": named}}
    for scale in ("embedded", "full"):
        if scale == "full":
            bases.stage(toys.params(scale="full", bases={"toy": toys.PARAMS["bases"]["toy"] | {"full": full}}), "toy")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(judges, "encode", lambda tokenizer, texts: asked.extend(texts) or encode(tokenizer, texts))
            Judges(here).answer([Request("judge", "How<|im_end|>good?")])
    assert asked == ["How<|im_end|>good?", "<|im_start|>user\nHow good?<|im_end|>\n<|im_start|>assistant\n"]
    assert judges.identities(get_task("toy"), get_task("toy").Reward(judged=1.0), here) != before


def test_whoever_asks_nothing_opens_nothing():
    task, nowhere = get_task("esi"), Judges(Path("no-such-folder"))
    case = next(task.cases(1, 1, pool="train", mix="natural"))
    said = task.gold(case, thinking=True)
    assert scores(task, [(case, said)], task.Reward(), nowhere) == [task.score(case, said, task.Reward())]
    assert nowhere.answer([]) == {}
    assert nowhere.record() == []
    assert judges.identities(task, task.Reward(), Path("no-such-folder")) == {}


def test_a_text_has_one_vector_whatever_is_asked_beside_it(project):
    asks = [Request("encoder", text) for text in TEXTS]
    together = Judges(paths.base("toy")).answer([*asks, asks[0]])
    alone = Judges(paths.base("toy"))
    assert list(together) == asks
    for ask in asks:
        vector = alone.answer([ask])[ask]
        assert vector.dtype == numpy.float32
        assert numpy.array_equal(vector, together[ask])
        assert float(vector @ vector) == pytest.approx(1.0, abs=1e-6)
    assert float(together[asks[1]] @ together[asks[3]]) > float(together[asks[1]] @ together[asks[0]])


def test_a_verdict_is_the_same_whatever_is_asked_beside_it_and_is_recorded_once(project):
    asks = questions()
    first = Judges(paths.base("toy"), log=project / "log.jsonl")
    together = first.answer(asks)
    assert {reply.split(":")[0] for reply in together.values()} == {"verdict"}
    for ask in list(together)[:3]:
        assert Judges(paths.base("toy")).answer([ask])[ask] == together[ask]
    first.answer(asks)
    record = first.record()
    assert len(record) == len(together) == len((project / "log.jsonl").read_text().strip().split("\n"))
    assert record == sorted(record, key=lambda verdict: verdict["ask"])
    with (project / "log.jsonl").open("a") as stream:
        stream.write('\n{"ask": "cut sho')
    (project / "other.jsonl").write_text((project / "log.jsonl").read_text())
    joined = Judges(Path("no-such-folder"), project / "new.jsonl", [project / "other.jsonl", project / "new.jsonl"])
    assert joined.record() == Judges(Path("no-such-folder"), log=project / "log.jsonl").record()
    continued = Judges(Path("no-such-folder"), log=project / "log.jsonl")
    assert continued.answer(asks) == together
    assert continued.record() == record


@pytest.mark.parametrize("cut", [1, 2, 8])
def test_a_log_that_a_kill_cut_anywhere_is_read_and_written_on(project, cut):
    """Between two characters, within one, and after a name: the last verdict is lost, and no other."""
    log, asks = project / "log.jsonl", questions(3)
    replies = ["verdict:\u2028first", "second\x85", "thi\u00e9"]
    judged = Judges(Path("no-such-folder"), log)
    judged._keep("judge", asks, replies)
    whole = log.read_bytes()
    end = whole.rindex("\u00e9".encode()) + 3
    log.write_bytes(whole[: end - cut])
    other = project / "other.jsonl"
    other.write_bytes(log.read_bytes())
    assert len(Judges(Path("no-such-folder"), None, [other]).record()) == 2
    assert other.read_bytes() == whole[: end - cut]  # another process may be writing it
    continued = Judges(Path("no-such-folder"), log)
    assert continued.answer(asks[:2]) == dict(zip(asks, replies[:2], strict=False))
    continued._keep("judge", asks[2:], replies[2:])
    assert Judges(Path("no-such-folder"), log).record() == judged.record()


def test_a_prompt_without_room_gets_no_verdict(project):
    ask = Request("judge", "word " * 3000)
    assert Judges(paths.base("toy")).answer([ask, *questions(2)])[ask] == ""


def test_a_missing_encoder_is_refused_with_what_installs_it(project, monkeypatch):
    monkeypatch.setattr(judges, "ENCODER", "no-such-package")
    with pytest.raises(Refused, match=r"no-such-package is not installed; install it with .*constraints\.txt`"):
        Judges(paths.base("toy")).answer([Request("encoder", "text")])


def test_asking_draws_no_number_that_training_would(project):
    import torch

    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    Judges(paths.base("toy")).answer([Request("encoder", "text"), *questions(1)])
    assert torch.equal(torch.rand(2), expected)


# In the stages


def test_a_reward_that_asks_is_probed_and_trained_and_what_it_heard_is_kept(project, in_process, monkeypatch):
    params = toys.params()
    reward_audit.stage(params, "v2")
    proof = json.loads(paths.probe_proof("v2").read_text())
    assert proof["policies"]["gold"]["mean"] > proof["policies"]["mediocre"]["mean"]
    assert list(proof["stream"]["shares"]) == sorted(get_task("toy").labels)
    launch.stage(params, "v2")
    spec = read_manifest(paths.adapter("v2")).spec
    assert spec["oracles"] == {"encoder": {"package": judges.ENCODER, "version": "0.1.0"}, "judge": {"tokens": 48}}
    verdicts = [json.loads(line) for line in (paths.adapter("v2") / worker.VERDICTS).read_text().splitlines()]
    assert verdicts
    assert {verdict["model"] for verdict in verdicts} == {"judge"}
    first = json.loads((paths.adapter("v2") / "history.jsonl").read_text().splitlines()[0])
    assert f"answer/{toys.LABEL}" in first
    assert f"held_out/excess/{toys.LABEL}" in first
    assert "reward_time" not in first
    whole = dolls.files(paths.adapter("v2"))
    shutil.rmtree(paths.adapter("v2"))
    begin = callback.RunCallback.on_train_begin

    def stop_soon(watch, *arguments, **named):
        begin(watch, *arguments, **named)
        watch.request_stop()

    with monkeypatch.context() as patch:
        patch.setattr(callback.RunCallback, "on_train_begin", stop_soon)
        with pytest.raises(TrainingError, match="continues from step 1 of 2"):
            launch.stage(params, "v2")
    launch.stage(params, "v2")
    assert dolls.files(paths.adapter("v2")) == whole


def test_a_recipe_shows_its_view_and_its_version_is_examined_under_it(project, in_process, monkeypatch):
    params = toys.params()
    launch.stage(params, "v1")
    manifest = read_manifest(paths.adapter("v1"))
    assert manifest.spec["view"] == "no-evidence"
    assert "oracles" not in manifest.spec
    who = params.model("v1")
    assert (who.variant, who.variants) == ("no-evidence", ())
    asked = []
    monkeypatch.setattr(evaluate, "open_sampler", lambda *_: ScriptedSampler(str))
    monkeypatch.setattr(
        evaluate, "rollout", lambda _sampler, task, cases, *_, **__: asked.extend(cases) or right_answers(cases)
    )
    cases = list(dataset.read_cases(paths.cases("x1"), who.task))
    run = answers.run_of(params, who, cases, "e" * 64)
    graded = evaluate.answer_exam(params, run, Judges(paths.base("toy"))).graded
    assert list(graded) == ["think", "direct"]
    assert [line.case_id for line in graded["think"]] == [case.id for case in cases]
    assert {case.facts.evidence is None for case in asked if case.key.topic != "cough"} == {True}
    assert identity(manifest)


def right_answers(cases):
    """Everybody right, with the evidence repeated where it is shown."""
    return [
        Transcript(
            messages=(
                Message(role="assistant", content=f"ANSWER: {case.key.label}", thinking=case.facts.evidence or "None."),
            ),
            stop="answered",
        )
        for case in cases
    ]


def test_the_exam_is_sat_under_every_view_and_reported_in_words(project, monkeypatch):
    monkeypatch.setattr(evaluate, "open_sampler", lambda *_: ScriptedSampler(str))
    monkeypatch.setattr(evaluate, "rollout", lambda _sampler, task, cases, *_, **__: right_answers(cases))
    evaluate.stage(toys.params(), "toy-base")
    cases = list(dataset.read_cases(paths.cases("x1"), get_task("toy")))
    shown = [case for case in cases if case.key.topic != "cough"]
    kept = (paths.graded("toy-base") / "think.no-evidence.jsonl").read_text().splitlines()
    assert [json.loads(line)["case_id"] for line in kept] == [case.id for case in shown]
    assert set(read_manifest(paths.graded("toy-base")).spec["modes"]) == {"think", "direct"}
    think, direct = (answers.load_report("toy-base", mode) for mode in ("think", "direct"))
    assert "view" not in direct.slices
    assert set(think.slices["view"]) == {"given", "no-evidence"}
    given, bare = think.slices["view"]["given"], think.slices["view"]["no-evidence"]
    assert set(given) == set(bare) == {"exact", "dangerous", "agreement"}  # a model is asked about the exam alone
    assert given["exact"].n == bare["exact"].n == len(shown) < think.n
    assert think.metrics["similarity"].n == think.n
    assert think.predicted[toys.LABEL] > 0
    page = (paths.report("toy-base") / "report.md").read_text()
    assert "## Input variants" in page
    assert "| no-evidence |" in page
    assert "| agreement | 1.000, no interval |" in page
    assert json.loads((paths.report("toy-base") / "summary.json").read_text())["think"]["similarity"] == 1.0


def test_a_view_that_the_task_has_not_is_refused():
    profiles = toys.PARAMS["profiles"]
    with toys.at_home(), pytest.raises(Exception, match=r"profiles.imitate.view: 'bare' is not an input variant"):
        toys.params(profiles=profiles | {"imitate": profiles["imitate"] | {"view": "bare"}})


def test_what_is_new_is_in_no_record_that_does_not_use_it():
    doll = dolls.params()
    assert not {"architecture", "judges"} & doll.bases["esi"].embedded.model_dump(mode="json").keys()
    assert "judges" not in doll.bases["esi"].full.model_dump(mode="json")
    assert all("view" not in profile.model_dump(mode="json") for profile in doll.profiles.values())


def test_a_log_answers_for_no_encoder_and_an_empty_verdict_is_asked_for_anew(tmp_path):
    log = tmp_path / "judged.jsonl"
    lines = [("encoder", "a text"), ("judge", None)]
    log.write_text("".join(json.dumps({"model": model, "ask": "0", "reply": reply}) + "\n" for model, reply in lines))
    assert judges._read_log(log) == {}
    log.write_text(json.dumps({"model": "judge", "ask": "0", "reply": "yes"}) + "\n")
    assert judges._read_log(log) == {("judge", "0"): "yes"}
