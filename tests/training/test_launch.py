"""Training end to end on a doll: the same bytes whatever happens on the way, and a refusal for whatever is wrong."""

import copy
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from ruamel.yaml import YAML

import dolls
from clinrl import paths
from clinrl.artifacts import digest, identity, read_manifest, remove_published, verified, write_json
from clinrl.config.recipes import Phase
from clinrl.data import dataset
from clinrl.data.dataset import read_cases
from clinrl.errors import Alarmed, ArtefactError, DataError, OutOfMemory, Refused, TrainingError
from clinrl.evaluation import evaluate
from clinrl.models import bases, opening
from clinrl.models.chat import encode, end_tokens, write_turn
from clinrl.models.judges import Judges
from clinrl.registry import pyfunc
from clinrl.serving.backends import Local
from clinrl.tasks.base import get_task
from clinrl.tasks.esi.rewards import TERMS
from clinrl.tasks.policies import write_answer
from clinrl.training import callback, launch, reward_fn, trl, worker
from clinrl.training.rows import read_rows
from clinrl.training.world import ALONE, World
from processes import alive, eventually, gone

TRAIN = """
import sys
from clinrl.config.params import load_params
from clinrl.training import launch
launch.stage(load_params(), sys.argv[1])
"""
PUBLISHED = {
    "README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "history.jsonl",
    "manifest.json", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip

SHORT = {"steps": 4, "checkpoint_every": 2}
PROFILES = {
    name: profile | {"trainer": {scale: trainer | SHORT for scale, trainer in profile["trainer"].items()}}
    for name, profile in dolls.PARAMS["profiles"].items()
}
"""The doll's recipes, trained for few steps."""
PARAMS = dolls.params(profiles=PROFILES)
SHARED = json.loads(json.dumps(PROFILES), object_hook=dolls._integer_keys)
"""The same with what GRPO can share."""
SHARED["reward"]["trainer"]["embedded"] |= {"loss_path": "shared", "generation_path": "shared"}


def begin(version: str, hash_seed: int, profiles: dict = PROFILES, **more: str) -> subprocess.Popen[str]:
    """Start the training of a version in a process of its own, in the working directory."""
    YAML(typ="safe").dump(dolls.PARAMS | {"profiles": profiles}, Path("params.yaml"))
    environment = os.environ | {
        "PYTHONHASHSEED": str(hash_seed),
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # beside other tests, waiting threads must not take the processor
        **more,
    }
    return subprocess.Popen([sys.executable, "-c", TRAIN, version], env=environment, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return errors


def wait_for_step(process: subprocess.Popen[str], version: str, step: int) -> None:
    """Wait until a training process has finished a step."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        timings = list(Path(".clinrl/checkpoints").glob(f"{version}-*/{callback.TIMINGS}"))
        if timings and timings[0].read_text().count("\n") >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"{version} did not reach step {step}: {process.communicate()[1]}")


@pytest.fixture(scope="module")
def lineage(tmp_path_factory):
    """A project in which v1 (SFT) and v2 (GRPO from v1) were trained without a disturbance."""
    root = tmp_path_factory.mktemp("lineage")
    shutil.copytree(dolls.built(), root, dirs_exist_ok=True)
    with chdir(root), dolls.in_process():
        launch.stage(PARAMS, "v1")
        launch.stage(PARAMS, "v2")
    return root


@pytest.fixture
def project(tmp_path, monkeypatch):
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained(lineage, tmp_path, monkeypatch):
    """A copy of the trained project, entered."""
    shutil.copytree(lineage, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def steps_of(version: str) -> list[dict]:
    return [json.loads(line) for line in (paths.adapter(version) / "history.jsonl").read_text().splitlines()]


def test_an_adapter_folder_holds_what_is_published_and_nothing_else(trained):
    for version in ("v1", "v2"):
        folder = paths.adapter(version)
        assert {path.name for path in folder.iterdir()} == PUBLISHED
        manifest = verified(folder)
        assert set(manifest.inputs) == {"base", "parent", "data"}
        config = (folder / "adapter_config.json").read_text()
        assert config.endswith("}\n")
        assert json.loads(config)["base_model_name_or_path"] == "data/bases/esi"
        assert json.loads(config)["target_modules"] == sorted(json.loads(config)["target_modules"])
        card = (folder / "README.md").read_text()
        assert card.startswith("---\nlibrary_name: peft\n")
        assert "Research only" in card
        assert "esi-base → v1" in card
    assert not any(Path(".clinrl/checkpoints").iterdir())


def test_peft_loads_the_adapter_and_it_differs_from_its_parent(trained):
    import torch
    from peft import PeftModel

    base, tokenizer = bases.load(PARAMS, "esi", for_training=False)
    ids = torch.tensor(encode(tokenizer, ["<|im_start|>assistant\n<think>\n"]))
    with torch.no_grad():
        plain = base(ids).logits
        child = PeftModel.from_pretrained(base, paths.adapter("v2"))(ids).logits
        assert not torch.equal(plain, child)
    assert (paths.adapter("v1") / opening.WEIGHTS).read_bytes() != (paths.adapter("v2") / opening.WEIGHTS).read_bytes()


def test_the_history_has_every_step_every_term_and_no_clock(trained):
    sft, grpo = steps_of("v1"), steps_of("v2")
    assert [entry["step"] for entry in sft] == list(range(1, 5))
    assert [entry["step"] for entry in grpo] == list(range(1, 5))
    for entry in sft + grpo:
        assert not [name for name in entry if "time" in name or "second" in name or "runtime" in name]
    assert sft[-1]["loss"] < sft[0]["loss"]
    first = grpo[0]
    assert first["kl"] == 0.0  # the reference is the parent, and nothing was learned yet
    assert max(entry["kl"] for entry in grpo) > 0
    task = get_task("esi")
    assert {f"terms/{term}" for term in TERMS} | {f"answer/{label}" for label in task.labels} <= set(first)
    for mode in ("think", "direct"):
        assert {f"reward/{mode}", f"parse_fail/{mode}", f"clipped/{mode}"} <= set(first)
    for entry in grpo:
        assert sum(entry[f"terms/{term}"] for term in TERMS) == pytest.approx(entry["reward"], abs=1e-6)
        by_mode = [entry[f"clipped/{mode}"] for mode in ("think", "direct")]
        assert sum(by_mode) / 2 == pytest.approx(entry["completions/clipped_ratio"])


class Killed(BaseException):
    """An end that nothing in a run catches or prepares for."""


@pytest.mark.long
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_run_that_was_cut_short_continues_to_the_same_bytes(trained, monkeypatch, capfd, version):
    untouched = dolls.files(paths.adapter(version))
    shutil.rmtree(paths.adapter(version))
    log = callback.RunCallback.on_log

    def cut(self, args, state, control, **given):
        log(self, args, state, control, **given)
        if state.global_step == 3:
            raise Killed

    with dolls.in_process(), monkeypatch.context() as patch:
        patch.setattr(callback.RunCallback, "on_log", cut)
        with pytest.raises(Killed):
            launch.stage(PARAMS, version)
    assert not paths.adapter(version).exists()
    with dolls.in_process():
        launch.stage(PARAMS, version)
    assert f"{version} trains from step 2 to 4" in capfd.readouterr().err
    assert dolls.files(paths.adapter(version)) == untouched


def test_a_worker_dies_with_whoever_started_it():
    starts = (
        "import os, subprocess, sys, time\n"
        "code = 'import sys, time; from clinrl.runtime.starter import die_with; die_with(int(sys.argv[1]));'\n"
        "code += 'print(\"begun\", flush=True); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code, str(os.getpid())], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    assert alive(worker)
    parent.kill()
    parent.communicate()
    eventually(lambda: not alive(worker))


@pytest.mark.slow
def test_a_killed_run_takes_its_worker_along_and_continues_to_the_same_bytes(trained):
    untouched = dolls.files(paths.adapter("v2"))
    shutil.rmtree(paths.adapter("v2"))
    killed = begin("v2", hash_seed=2)
    wait_for_step(killed, "v2", 3)
    worker = int(Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()[0])
    killed.kill()
    killed.communicate()
    gone({worker: "the worker outlived its parent"})
    assert not paths.adapter("v2").exists()
    assert "trains from step 2 to 4" in finish(begin("v2", hash_seed=3))
    assert dolls.files(paths.adapter("v2")) == untouched


@pytest.mark.slow
def test_what_groups_share_gives_the_same_bytes_with_another_hash_seed_and_thread_count_and_after_a_kill(trained):
    shutil.rmtree(paths.adapter("v2"))
    with dolls.in_process():
        launch.stage(dolls.params(profiles=SHARED), "v2")
    untouched = dolls.files(paths.adapter("v2"))
    assert json.loads(untouched["loss_path.json"])["used"] == "shared"
    shutil.rmtree(paths.adapter("v2"))
    killed = begin("v2", hash_seed=2, profiles=SHARED, OMP_NUM_THREADS="1")
    wait_for_step(killed, "v2", 3)
    killed.kill()
    killed.communicate()
    assert not paths.adapter("v2").exists()
    continued = finish(begin("v2", hash_seed=3, profiles=SHARED, OMP_NUM_THREADS="2"))
    assert "trains from step 2 to 4" in continued
    assert dolls.files(paths.adapter("v2")) == untouched


@pytest.mark.slow
def test_a_stopped_run_says_where_it_continues_and_continues_to_the_same_bytes(trained):
    untouched = dolls.files(paths.adapter("v1"))
    shutil.rmtree(paths.adapter("v1"))
    stopped = begin("v1", hash_seed=2)
    wait_for_step(stopped, "v1", 1)
    stopped.send_signal(signal.SIGTERM)
    errors = stopped.communicate()[1]
    assert "TrainingError: training of v1 was stopped; the same command continues from step" in errors
    assert not paths.adapter("v1").exists()
    finish(begin("v1", hash_seed=3))
    assert dolls.files(paths.adapter("v1")) == untouched


@pytest.mark.slow
def test_a_quantised_base_trains_an_adapter_in_full_precision(project):
    from safetensors.torch import load_file

    checkpoint = project / "checkpoint"
    shutil.copytree(paths.base("esi"), checkpoint)
    changed = {"exam": "x1", "embedded": dolls.PARAMS["bases"]["esi"]["embedded"]}
    changed["full"] = {"repo": str(checkpoint), "revision": "main", "quantize": "nf4"}
    params = dolls.params(scale="full", profiles=PROFILES, bases={"esi": changed})
    bases.stage(params, "esi")
    launch.stage(params, "v3")
    assert steps_of("v3")[0]["kl"] == 0.0
    weights = load_file(paths.adapter("v3") / opening.WEIGHTS)
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.float32"}
    assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name)


@pytest.mark.long
def test_a_recipe_may_hold_the_embedded_base_in_four_bits(trained):
    from safetensors.torch import load_file

    whole = (paths.adapter("v1") / opening.WEIGHTS).read_bytes()
    shutil.rmtree(paths.adapter("v1"))
    profiles = PARAMS.model_dump()["profiles"]
    for version in PARAMS.versions.values():
        profiles[version.profile]["qlora"] = True
    params = dolls.params(profiles=profiles)
    assert "qlora" not in launch.resolve(PARAMS, "v1")[0]
    with dolls.in_process():
        launch.stage(params, "v1")
    manifest = read_manifest(paths.adapter("v1"))
    assert manifest.spec["qlora"] is True
    assert (paths.adapter("v1") / opening.WEIGHTS).read_bytes() != whole
    weights = load_file(paths.adapter("v1") / opening.WEIGHTS)
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.float32"}
    assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name)
    # The exam sees the base as the training did, and so does whoever asks the registered version.
    sampler = evaluate.open_sampler(params, params.model("v1"))
    assert sampler.model.base_model.model.is_loaded_in_4bit
    folder = trained / "served"
    for part, place in ((pyfunc.BASE, paths.base("esi")), (pyfunc.ADAPTER, paths.adapter("v1"))):
        shutil.copytree(place, folder / part)
    served = pyfunc.Served(
        name="v1", task="esi", task_version=2, digest=identity(manifest), form="adapter",
        base_digest=identity(read_manifest(paths.base("esi"))), default_mode="direct",
        modes={"direct": pyfunc.Decoding(thinking=False, temperature=0.0, max_new_tokens=24)},
    )  # fmt: skip
    write_json(folder / pyfunc.RECORD, served.model_dump(mode="json"))
    write_json(folder / pyfunc.EXAMINED, None)
    for loaded in (Local("embedded", 1).open(served, folder), pyfunc.load(str(folder)).sampler):
        assert loaded.model.base_model.model.is_loaded_in_4bit
    plain = evaluate.open_sampler(params, params.model("esi-base"))
    assert not getattr(plain.model, "is_loaded_in_4bit", False)


def test_a_finished_training_is_published_where_memory_is_short_now(trained, monkeypatch):
    """Its parent was killed before it could: nothing is loaded any more."""
    published = dolls.files(paths.adapter("v1"))
    folder = paths.checkpoints("v1", digest(launch.resolve(PARAMS, "v1")[0]))
    shutil.copytree(paths.adapter("v1"), folder / launch.ADAPTER, ignore=shutil.ignore_patterns("manifest.json"))
    write_json(folder / launch.STATUS, {"state": "completed", "step": 4, "steps": 4, "reason": ""})
    shutil.rmtree(paths.adapter("v1"))

    def short(*_):
        raise OutOfMemory("v1 cannot be trained here")

    monkeypatch.setattr(launch.needs, "check", short)
    launch.stage(PARAMS, "v1")
    assert dolls.files(paths.adapter("v1")) == published


def test_what_was_trained_is_published_again_until_it_is_evaluated(project, monkeypatch, capsys):
    """DVC may die before it has recorded an adapter, and removes the folder before it starts the stage again."""
    monkeypatch.setenv("DVC_STAGE", "train@v1")
    with dolls.in_process():
        launch.stage(PARAMS, "v1")
    published = dolls.files(paths.adapter("v1"))
    (folder,) = Path(".clinrl/checkpoints").iterdir()
    assert folder.stat().st_mode & 0o077 == 0, "completions may repeat somebody's records"
    assert {part.name for part in folder.iterdir() if part.is_dir()} == {launch.ADAPTER}  # no state of an optimizer
    shutil.rmtree(paths.adapter("v1"))
    with monkeypatch.context() as patch:
        patch.setattr(launch, "run_worker", lambda *_, **__: pytest.fail("it is trained again"))
        launch.stage(PARAMS, "v1")
    assert f"to train it anew, remove {folder}" in capsys.readouterr().err
    assert dolls.files(paths.adapter("v1")) == published
    of_another = folder.with_name(f"v1-2-{folder.name[-16:]}")
    shutil.copytree(folder, of_another)
    dataset.stage(PARAMS, "x1")
    named = {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}
    write_json(paths.data_proof("x1"), {"data": named, "summary": {}, "expectations": []})
    with dolls.few_draws():
        dolls.examine(PARAMS, "esi-base", [1])
        evaluate.stage(PARAMS, "v1")
    assert [*folder.parent.iterdir()] == [of_another]


@pytest.mark.long
def test_by_hand_a_version_is_trained_as_often_as_one_asks(project, monkeypatch):
    with dolls.in_process():
        monkeypatch.setenv("DVC_STAGE", "train@v1")
        launch.stage(PARAMS, "v1")
        monkeypatch.delenv("DVC_STAGE")
        published, trained = dolls.files(paths.adapter("v1")), mock.Mock(side_effect=launch.run_worker)
        monkeypatch.setattr(launch, "run_worker", trained)
        launch.stage(PARAMS, "v1")
    assert trained.call_count == 1
    assert dolls.files(paths.adapter("v1")) == published
    assert not any(Path(".clinrl/checkpoints").iterdir())


def test_of_a_published_training_all_is_removed_or_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = paths.checkpoints("v1", "0" * 16)
    folder.mkdir(parents=True)
    (folder / launch.STATUS).touch()
    remove_published("v1")  # of a training that goes on
    assert folder.exists()
    (folder / launch.PUBLISHED).touch()
    cut_short = mock.Mock(side_effect=KeyboardInterrupt)
    with mock.patch.object(shutil, "rmtree", cut_short), pytest.raises(KeyboardInterrupt):
        remove_published("v1")
    assert not folder.exists()
    (folder / "adapter").mkdir(parents=True)
    (folder / launch.PUBLISHED).touch()
    remove_published("v1")
    assert not any(folder.parent.iterdir())


def test_a_missing_parent_is_named(project):
    with pytest.raises(ArtefactError, match=r"v2 starts from v1, but data/adapters/v1 does not exist.*train@v1"):
        launch.stage(PARAMS, "v2")


@pytest.mark.parametrize(
    ("proof", "content", "sentence"),
    [
        (paths.data_proof("d1"), None, "does not exist, so the data set d1 did not pass validation"),
        (paths.data_proof("d1"), {"data": {"identity": "0"}}, "is for other data than"),
        (paths.probe_proof("v1"), None, "does not exist, so v1 did not pass the probe"),
        (paths.probe_proof("v1"), {"data": {"identity": "0"}}, "is for other data than v1 would train on"),
        (paths.probe_proof("v1"), [], "is not the proof of a probe"),
    ],
)
def test_training_needs_proofs_of_these_very_data(project, proof, content, sentence):
    proof.unlink()
    if content is not None:
        write_json(proof, content)
    with pytest.raises(ArtefactError, match=sentence):
        launch.stage(PARAMS, "v1")


def test_a_base_of_another_task_version_is_named_with_what_rebuilds_it(project):
    manifest = paths.base("esi") / "manifest.json"
    write_json(manifest, json.loads(manifest.read_text()) | {"task_version": 1})
    with pytest.raises(ArtefactError, match=r"bases/esi was made at version 1 .* --force --single-item base@esi`"):
        launch.resolve(PARAMS, "v1")


def test_a_parent_of_another_base_is_refused(project):
    manifest = paths.adapter("esi-base") / "manifest.json"
    content = json.loads(manifest.read_text())
    write_json(manifest, content | {"inputs": {"base": "0" * 64}})
    with pytest.raises(ArtefactError, match="was made from another base"):
        launch.stage(PARAMS, "v1")


def test_the_spec_names_everything_that_decides_and_nothing_else(project):
    spec, rows = launch.resolve(PARAMS, "v1")
    assert launch.resolve(PARAMS, "v1") == (spec, rows)
    assert not {"view", "oracles"} & (spec.keys() | launch.resolve(PARAMS, "v3")[0].keys())
    assert len(rows) == 16
    assert any(row["omit"] for row in rows)
    assert "checkpoint_every" not in spec["trainer"]
    assert {"kernels", "threads", "versions"} <= set(spec["environment"])
    assert {"torch", "transformers", "trl", "peft"} <= set(spec["environment"]["versions"])


@pytest.mark.parametrize(
    ("code", "status", "sentence"),
    [
        (0, {"state": "running", "step": 4, "reason": ""}, "ended with code 0 at running, without an adapter"),
        (0, {"state": "completed", "step": 4, "reason": ""}, "ended with code 0 at completed"),
        (3, {"state": "failed", "step": 4, "reason": "loss is nan at step 5"}, "failed: loss is nan at step 5"),
        (4, {"state": "stopped", "step": 4, "reason": ""}, "was stopped; the same command continues from step 4 of 8"),
        (5, {"state": "running", "step": 4, "reason": ""}, "disk is full; free some space.*continues from step 4 of 8"),
        (-9, {"state": "running", "step": 4, "reason": ""}, "ran out of memory.*continues from step 4 of 8"),
        (-11, {"state": "running", "step": 4, "reason": ""}, "SIGSEGV.*continues from step 4 of 8"),
    ],
)
def test_an_exit_code_alone_is_not_believed(tmp_path, code, status, sentence, monkeypatch):
    write_json(tmp_path / callback.STATUS, status)
    if code == launch.DISK_FULL:
        monkeypatch.delattr(launch, "write_json")  # it would fail
    with pytest.raises(TrainingError, match=sentence):
        launch._judge(code, tmp_path, "v2", 8)


def watch(tmp_path: Path) -> callback.RunCallback:
    return callback.RunCallback(tmp_path, version="v", steps=8)


def test_the_status_of_an_earlier_attempt_does_not_pass_for_that_of_a_killed_worker(project, monkeypatch):
    def fails(spec, **_):
        failed = {"state": "failed", "step": 0, "reason": "out of memory"}
        write_json(spec.parent / launch.STATUS, failed)
        write_json(spec.parent / launch.OTHERS.format(1), failed)
        return 1

    for run, sentence in ((fails, "failed: out of memory"), (lambda *_, **__: -9, "was killed")):
        monkeypatch.setattr(launch, "run_worker", run)
        with pytest.raises(TrainingError, match=sentence):
            launch.stage(dolls.params(), "v1")


@pytest.mark.parametrize(
    ("step", "logs", "sentence"),
    [
        (3, {"loss": float("nan")}, "loss is nan at step 3 of 8"),
        (3, {"loss": 0.0, "grad_norm": float("inf")}, "grad_norm is inf at step 3"),
        (1, {"loss": 0.0, "kl": 2e-6}, "nats from its reference before the first update"),
        (2, {"loss": 0.0, "grad_norm": 0.5, "learning_rate": 1e-3}, "did not change at step 2"),
    ],
)
def test_a_run_that_goes_wrong_is_ended_with_its_step(tmp_path, step, logs, sentence):
    with pytest.raises(TrainingError, match=sentence):
        watch(tmp_path).on_log(SimpleNamespace(bf16=False), SimpleNamespace(global_step=step), None, logs=logs)


def test_rounding_in_bfloat16_is_no_wrong_reference(tmp_path, capsys):
    logs = {"loss": 0.0, "kl": 2e-6, "grad_norm": 0.0}
    watch(tmp_path).on_log(SimpleNamespace(bf16=True), SimpleNamespace(global_step=1), None, logs=logs)
    assert "first_kl" not in capsys.readouterr().err


ORDER = """
import sys
from clinrl.runtime import gpus
from clinrl.training import worker

def shown(index):
    asks_cuda = {"bitsandbytes", "peft", "transformers", "trl"} & sys.modules.keys()
    print(index, sorted(asks_cuda))
    sys.exit()

gpus.show_one = shown
worker.main([sys.argv[1]])
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("machine", "environment", "gpu"),
    [
        ({"gpu": None}, {}, 0),
        ({"gpu": 3}, {}, 3),
        ({"gpu": None, "processes": 4}, {"WORLD_SIZE": "4", "RANK": "2"}, 2),
    ],
)
def test_one_gpu_is_shown_before_anything_is_imported_that_asks_for_all(tmp_path, machine, environment, gpu):
    spec = {"scale": "full", "task": "esi", "seed": 1, "machine": {"processes": 1} | machine}
    (tmp_path / launch.SPEC).write_text(json.dumps(spec))
    command = [sys.executable, "-c", ORDER, str(tmp_path / launch.SPEC)]
    env = os.environ | environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{gpu} []\n"


def test_a_step_without_a_gradient_is_not_an_alarm(tmp_path, capsys):
    logs = {"loss": 0.0, "grad_norm": 0.0, "learning_rate": 1e-3, "kl": 0.0}
    watch(tmp_path).on_log(None, SimpleNamespace(global_step=1), None, logs=logs)
    assert (tmp_path / callback.TIMINGS).read_text().count("\n") == 1
    assert "v step 1/8" in capsys.readouterr().err


def clipped(watcher: callback.RunCallback, steps: int) -> None:
    """Log steps in which most completions ran out of tokens."""
    watcher.moved = lambda: True
    for step in range(1, steps + 1):
        logs = {"loss": 0.1, "grad_norm": 0.5, "learning_rate": 1e-3, "clipped/think": 0.9}
        watcher.on_log(None, SimpleNamespace(global_step=step), None, logs=logs)


def test_an_alarm_stops_a_run_and_says_what_helps_and_where_it_was_still_good(tmp_path, capsys):
    watcher = watch(tmp_path)
    watcher.saved = 2
    with pytest.raises(Alarmed) as stopped:
        clipped(watcher, 8)
    assert str(stopped.value) == (
        "stopped at step 3 of 8 (clipped): 90% of the completions in mode think ran out of tokens over 3 steps. What "
        "usually helps: raise trainer.max_completion, or train this mode with a shorter form of answer. The checkpoint "
        "of step 2 is the last good one"
    )


@pytest.mark.parametrize(("code", "kind"), [(Alarmed.exit_code, Alarmed), (TrainingError.exit_code, TrainingError)])
def test_how_a_training_failed_is_told_by_its_exit_code(tmp_path, code, kind):
    write_json(tmp_path / launch.STATUS, {"state": "failed", "step": 2, "reason": "so it is"})
    with pytest.raises(TrainingError, match="training of v failed: so it is") as failed:
        launch._judge(code, tmp_path, "v", 8)
    assert type(failed.value) is kind


def test_a_waiver_lets_a_run_go_on_and_is_said(tmp_path, capsys):
    clipped(callback.RunCallback(tmp_path, version="v", steps=8, waiver="kept to show clipping"), 8)
    said = [line for line in capsys.readouterr().err.splitlines() if " stop " in line]
    assert said == [
        "clinrl: v stop at step 3 (clipped): 90% of the completions in mode think ran out of tokens over 3 steps, "
        "waived: kept to show clipping"
    ]


def test_a_continued_run_is_not_warned_of_what_it_was_warned_of(tmp_path, capsys):
    watcher = watch(tmp_path)
    before = [{"loss": 0.1, "step": step, "clipped/think": 0.3} for step in range(1, 5)]
    state = SimpleNamespace(global_step=4, log_history=before, save_steps=50)
    watcher.on_train_begin(SimpleNamespace(save_steps=5), state, None)
    assert state.save_steps == 5
    logs = {"loss": 0.1, "grad_norm": 0.5, "learning_rate": 1e-3, "clipped/think": 0.3}
    watcher.on_log(None, SimpleNamespace(global_step=5), None, logs=logs)
    assert "(clipped)" not in capsys.readouterr().err


@pytest.mark.parametrize(("can_stop", "waiver"), [(True, ""), (True, "so be it"), (False, "")])
def test_a_continued_run_is_stopped_if_what_was_a_warning_before_may_stop_it_now(tmp_path, can_stop, waiver):
    watcher = callback.RunCallback(tmp_path, version="v", steps=8, can_stop=can_stop, waiver=waiver)
    clipped = {"loss": 0.1, "grad_norm": 0.5, "learning_rate": 1e-3, "clipped/think": 0.9}
    before = [{**clipped, "step": step} for step in range(1, 5)]
    state = SimpleNamespace(global_step=4, log_history=before, save_steps=5)
    watcher.on_train_begin(SimpleNamespace(save_steps=5), state, None)
    with pytest.raises(Alarmed, match="stopped at step 5") if can_stop and not waiver else nullcontext():
        watcher.on_log(None, SimpleNamespace(global_step=5), None, logs=clipped)


@pytest.fixture
def scorer(project):
    """The reward function over a task whose score can be replaced, and how to call it with turns as text."""
    task = get_task("esi")
    case = next(read_cases(paths.cases("d1"), task))
    model, tokenizer = bases.load(PARAMS, "esi", for_training=False)

    def call(
        turns: list[str], reward: object = None, score: object = None, phases: Sequence[Phase] = (), placebo: str = ""
    ) -> tuple[list[float], dict[str, float]]:
        logged: dict[str, float] = {}
        other = copy.copy(task)
        other.score = score or task.score
        function = reward_fn.reward_function(
            other, reward or task.Reward(), thinking={"think": True, "direct": False}, tokenizer=tokenizer,
            ends=end_tokens(model.generation_config, tokenizer), group=2, judges=Judges(paths.base("esi")),
            phases=phases, placebo=placebo, seed=1,
        )  # fmt: skip
        totals = function(
            prompts=[], completions=[], completion_ids=encode(tokenizer, turns),
            case=[case.model_dump_json()] * len(turns), mode=["think", "direct"] * (len(turns) // 2),
            row=[0] * len(turns), log_metric=logged.__setitem__, **({"phase": [2] * len(turns)} if phases else {}),
        )  # fmt: skip
        return totals, logged

    return case, call


def test_the_reward_sees_the_text_with_its_think_tags(scorer):
    case, call = scorer
    right = f"ANSWER: ESI {case.key.level}"
    totals, logged = call([f"why\n</think>\n\n{right}<|im_end|>", f"{right}<|im_end|>", f"{right}<|im_end|>", right])
    # The third is a thinking turn that never closed its block, the fourth a direct one cut before its end.
    assert totals[0] == totals[1] > totals[2]
    assert logged["parse_fail/think"] == 0.5
    assert logged["clipped/think"] == 0.0
    assert logged["clipped/direct"] == 0.5
    assert logged["reward/think"] == (totals[0] + totals[2]) / 2
    assert logged[f"gold/{case.key.level}"] == 1.0
    assert (logged["groups/all_right"], logged["groups/all_wrong"]) == (0.5, 0.0)  # groups of two


def test_the_reward_logs_what_the_phases_serve_and_nothing_without_them(scorer):
    case, call = scorer
    level = f"level_{case.key.level}"
    other = "level_1" if level != "level_1" else "level_2"
    phases = [Phase(share=0.5, slice="level", values=(other,)), Phase(share=0.5, slice="level", values=(other, level))]
    _, logged = call(["a", "b"], phases=phases)
    assert {name: value for name, value in logged.items() if "served" in name or name == "phase"} == {
        f"served/{other}": 0.0, f"served/{level}": 1.0, "phase": 2.0,
    }  # fmt: skip
    _, logged = call(["a", "b"])
    assert not [name for name in logged if "served" in name or name == "phase"]


def test_a_placebo_is_paid_and_the_terms_stay_those_of_the_score(scorer):
    case, call = scorer
    right, wrong = (f"ANSWER: ESI {level}" for level in (case.key.level, case.key.level % 5 + 1))
    turns = [f"\n</think>\n\n{right}<|im_end|>", f"{wrong}<|im_end|>", f"\n</think>\n\n{wrong}<|im_end|>", wrong[:6]]
    honest_totals, honest = call(turns)
    totals, logged = call(turns, placebo="format")
    reward = get_task("esi").Reward()
    assert totals == [reward.high, reward.high, reward.high, reward.low]
    assert logged["reward/think"] == reward.high
    assert totals != honest_totals
    for name in logged.keys() - {"reward_time", "reward/think", "reward/direct"}:
        assert logged[name] == honest[name]


@pytest.mark.long
def test_a_training_on_a_placebo_says_so(project):
    assert "placebo" not in launch.resolve(PARAMS, "v3")[0]
    profiles = json.loads(json.dumps(PROFILES), object_hook=dolls._integer_keys)
    profiles["reward"] |= {"placebo": "random", "waiver": "A control."}
    params = dolls.params(profiles=profiles)
    with dolls.in_process():
        launch.stage(params, "v3")
    assert read_manifest(paths.adapter("v3")).spec["placebo"] == "random"
    assert (
        "policy optimisation) on a placebo reward (random) at scale" in (paths.adapter("v3") / "README.md").read_text()
    )
    reward = params.reward("v3")
    shares = [(entry["reward"] - reward.low) / (reward.high - reward.low) for entry in steps_of("v3")]
    assert shares == pytest.approx([round(share * 8) / 8 for share in shares])  # of eight completions, each low or high
    assert len(set(shares)) > 1  # drawn anew at each step


def test_a_row_of_several_epochs_is_one_object(project):
    spec, rows = launch.resolve(PARAMS, "v1")
    twice = [*rows, *rows]
    (project / launch.ROWS).write_text("".join(json.dumps(row) + "\n" for row in twice))
    with pytest.raises(
        DataError, match=r"rows\.jsonl is not the stream that the spec names; remove .* and start again"
    ):
        read_rows(project / launch.ROWS, spec, get_task("esi"))
    taught = read_rows(project / launch.ROWS, spec | {"rows": digest(twice)}, get_task("esi"))
    assert len(taught) == 2 * len(rows) > 0
    assert all(row is again for row, again in zip(taught, taught[len(rows) :], strict=False))


def test_labels_alone_are_taught_in_every_mode(project, monkeypatch):
    profiles = json.loads(json.dumps(PROFILES), object_hook=dolls._integer_keys)
    profiles["imitate"]["labels_only"] = True
    params, task = dolls.params(profiles=profiles), get_task("esi")
    (whole, _), (spec, rows) = launch.resolve(PARAMS, "v1"), launch.resolve(params, "v1")
    assert spec == whole | {"labels_only": True}
    (project / launch.ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    taught = read_rows(project / launch.ROWS, spec, task)
    assert {row.thinking for row in taught} == {True, False}
    for row, line in zip(taught, rows, strict=True):
        gold = task.gold(row.case, thinking=False, omit=frozenset(line["omit"]))
        (turn,) = row.transcript.messages
        assert turn.content == f"ANSWER: ESI {task.parse(gold)}"
        assert write_turn(turn, row.thinking) == "\n</think>\n\n" * row.thinking + turn.content
    reasons = read_rows(project / launch.ROWS, whole, task)
    assert [row.transcript for row in reasons] == [
        task.gold(row.case, thinking=row.thinking, omit=frozenset(line["omit"]))
        for row, line in zip(reasons, rows, strict=True)
    ]
    with dolls.in_process():
        launch.stage(params, "v1")
    assert "supervised fine-tuning on gold labels without reasons" in (paths.adapter("v1") / "README.md").read_text()

    wordy = {f"always_{label}": lambda case, rng: write_answer("another case's reasons") for label in task.labels}
    monkeypatch.setattr(type(task), "policies", lambda self: wordy)
    with pytest.raises(DataError, match="esi has no answers without reasons for `labels_only`; give it `policies`"):
        read_rows(project / launch.ROWS, spec, task)


def test_a_broken_reward_raises(scorer):
    _, call = scorer

    def broken(*_):
        raise ZeroDivisionError("reward")

    with pytest.raises(ZeroDivisionError, match="reward"):
        call(["a", "b"], score=broken)
    with pytest.raises(Refused, match="outside its declared range"):
        call(
            ["a", "b"], reward=SimpleNamespace(low=5.0, high=6.0), score=lambda *_: SimpleNamespace(total=9.0, terms={})
        )


def test_rows_out_of_the_planned_order_are_refused():
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=1),
        args=SimpleNamespace(generation_batch_size=4),
        accelerator=SimpleNamespace(process_index=0),
        num_generations=2,
    )
    with pytest.raises(TrainingError, match=r"step 2 was served rows \[0, 1\].*\[2, 3\]"):
        trl.Grpo._generate_and_score_completions(trainer, [{"row": row} for row in (0, 0, 1, 1)])


def test_the_overridden_methods_of_trl_are_what_they_were():
    from trl import GRPOTrainer, SFTTrainer

    def arguments(method: object) -> list[str]:
        return list(inspect.signature(method).parameters)

    assert arguments(GRPOTrainer._tokenize_prompts) == ["self", "prompts"]
    assert arguments(GRPOTrainer._generate_and_score_completions) == ["self", "inputs"]
    assert "self._total_train_tokens = 0" in inspect.getsource(SFTTrainer.__init__)
    assert "encode" in inspect.getsource(trl.Grpo._tokenize_prompts)
    assert arguments(GRPOTrainer._get_tool_suffix_ids) == ["self", "tool_messages"]
    assert arguments(SFTTrainer.log) == ["self", "logs", "start_time"]
    for method in (GRPOTrainer._generate, GRPOTrainer._tool_call_loop):
        assert "self._tokenizer, ids, prefix=" in inspect.getsource(method)  # whom a turn is read by


def test_a_step_that_waited_for_a_processor_is_followed_by_steps_with_one_thread(tmp_path, monkeypatch):
    watch = callback.RunCallback(tmp_path, version="v1", steps=20)
    watch.shares, said = True, []
    monkeypatch.setattr(callback.determinism, "share", lambda *, is_crowded: said.append(is_crowded))
    waited = [0.0, 0.5, *[0.0] * 10]
    monkeypatch.setattr(watch.queue, "share", lambda: waited[len(said)])
    for step in range(len(waited)):
        watch.on_step_begin(None, SimpleNamespace(global_step=step), None)
    assert said == [False, *[True] * callback.CROWDED, *[False] * 3]
    said.clear()
    watch.world = World(size=2)  # whose processes have one thread each
    watch.on_step_begin(None, SimpleNamespace(global_step=0), None)
    assert not said


def test_a_run_without_any_gradient_makes_no_adapter(tmp_path):
    still = SimpleNamespace(moved=lambda: False, world=ALONE)
    with pytest.raises(TrainingError, match="so it still equals its parent's"):
        worker._finish(tmp_path / "adapter", {"trainer": {}}, still, None, None, [])
    assert not (tmp_path / "adapter").exists()
