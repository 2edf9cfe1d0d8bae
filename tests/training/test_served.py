"""GRPO whose completions a server writes: with the adapter of each step, beside a base that stays as it is."""

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

import dolls
import engines
from clinrl import paths
from clinrl.artifacts import read_manifest
from clinrl.config.params import Params
from clinrl.errors import Alarmed, TrainingError
from clinrl.models import bases, opening, vllm_client
from clinrl.models.engine import model_of
from clinrl.models.judges import Judges
from clinrl.tasks.base import get_task
from clinrl.training import launch, rejection, served, trl
from clinrl.training.rows import Row
from clinrl.training.trl import write_adapter
from clinrl.training.world import ALONE, World

pytestmark = pytest.mark.long

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[engines.Imitation]:
    """A server of the doll's base; the doll's project at full scale, which asks it, entered."""
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(vllm_client, "PAUSES_S", (0.0,))
    shutil.copytree(paths.base("esi"), "checkpoint")
    bases.stage(project(), "esi")
    model, _ = bases.open_base(paths.base("esi"), for_training=False)
    imitation = engines.Imitation(model, model_of(paths.base("esi")))
    monkeypatch.setenv(vllm_client.TOKEN, imitation.key)
    with engines.served(imitation) as url:
        YAML(typ="safe").dump({"sampler": "vllm", "vllm": {"url": url, "at_once": 4}}, Path("machine.yaml"))
        yield imitation


def project(**trainer: Any) -> Params:
    changed = {"exam": "x1", "embedded": dolls.PARAMS["bases"]["esi"]["embedded"]}
    changed["full"] = {"repo": str(Path("checkpoint").resolve()), "revision": "main", "quantize": "none"}
    profiles = json.loads(json.dumps(dolls.PARAMS["profiles"]), object_hook=dolls._integer_keys)
    profiles["reward"]["trainer"]["full"] |= trainer
    return dolls.params(scale="full", bases={"esi": changed}, profiles=profiles)


def train(**trainer: Any) -> list[dict[str, Any]]:
    """The history of v3, trained anew."""
    with dolls.in_process():
        launch.stage(project(**trainer), "v3")
    return [json.loads(line) for line in (paths.adapter("v3") / "history.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_processes_ask_one_server_and_make_the_adapter_of_one(
    server: engines.Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    machine = YAML(typ="safe").load(Path("machine.yaml"))
    found, asked = [], []
    for number in (1, 2):
        YAML(typ="safe").dump(machine | {"processes": number, "try_anyway": True}, Path("machine.yaml"))
        first = len(server.asked)
        launch.stage(project(steps=3), "v3")
        found.append(load_file(paths.adapter("v3") / opening.WEIGHTS))
        asked.append(sorted((body["seed"], tuple(body["prompt"])) for body in server.asked[first:]))
        shutil.rmtree(paths.adapter("v3"))
    assert asked[0] == asked[1]
    assert max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0]) < 1e-6
    assert len(server.adapters) == 1, "the last of the second training"


def test_what_is_imitated_is_written_by_the_server(server: engines.Imitation) -> None:
    params, before = project(), weights(server.model)
    reward = params.model_dump()["profiles"]["reward"]
    settings = {"lr": 1.0e-3, "steps": 2, "batch": 4, "checkpoint_every": 1, "prompts": 4, "group": 4}
    settings |= {"temperature": 0.5, "max_completion": 32, "threshold": -1.25}
    own = {key: reward[key] for key in ("modes", "lora", "stream", "reward")} | {"method": "rejection"}
    own["trainer"] = dict.fromkeys(("embedded", "full"), settings)
    versions = dolls.PARAMS["versions"] | {"v4": dolls.PARAMS["versions"]["v2"] | {"profile": "own"}}  # above v1
    profiles = params.model_dump()["profiles"] | {"own": own}
    bases_of = params.model_dump()["bases"]
    changed = dolls.params(scale="full", bases=bases_of, profiles=profiles, versions=versions)
    dolls.prove(changed)
    with dolls.in_process():
        launch.stage(changed, "v1")
        launch.stage(changed, "v4")
    spec = read_manifest(paths.adapter("v4")).spec
    assert [entry["sampler"]["name"] for entry in spec["samplers"]] == ["vllm"]
    _, _, *asked = server.asked  # the first two find out whether the adapter makes a difference
    assert len(asked) == 4 * 4
    assert {body["model"] for body in asked} == set(server.adapters)
    assert len({body["seed"] for body in asked}) == len(asked)
    assert all(map(torch.equal, before, weights(server.model)))


def weights(model: Any) -> list[torch.Tensor]:
    return [tensor.clone() for name, tensor in model.state_dict().items() if "lora_" not in name]


def test_a_rejection_whose_sampling_is_over_needs_no_server_and_records_no_sampler(tmp_path: Path) -> None:
    spec = {"scale": "full", "method": "rejection", "task": "esi", "machine": {"sampler": "transformers"}}
    (tmp_path / "sampled").mkdir()
    (tmp_path / "sampled" / rejection.OVER).touch()
    for checkpoint in (None, tmp_path / "trainer/checkpoint-4"):
        assert served.begin(tmp_path, spec, None, None, checkpoint, ALONE) is None
    assert not (tmp_path / launch.SAMPLERS).exists()


def test_a_sampler_that_changes_is_recorded_from_its_step_on(tmp_path: Path) -> None:
    for after, name, held in (
        (0, "a", [(0, "a")]),
        (4, "a", [(0, "a")]),
        (10, "b", [(0, "a"), (10, "b")]),
        (10, "a", [(0, "a")]),
        (6, "b", [(0, "a"), (6, "b")]),
        (5, "a", [(0, "a")]),  # from a checkpoint before the change: what b wrote is discarded
        (0, "b", [(0, "b")]),
    ):
        served.note(tmp_path, {"name": name}, after)
        found = json.loads((tmp_path / launch.SAMPLERS).read_text())
        assert [(entry["after"], entry["sampler"]["name"]) for entry in found] == held


def test_each_step_is_sampled_with_its_own_adapter(server: engines.Imitation) -> None:
    before = weights(server.model)
    steps = train(steps=4)
    assert len(steps) == 4
    for step in steps:
        assert step["sampling/sampling_logp_difference/mean"] < 1e-4
        assert step["sampling/sampling_logp_difference/max"] < 1e-3
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
    loaded, asked = server.paths.count("/v1/load_lora_adapter"), {body["model"] for body in server.asked}
    assert 1 < loaded == len(asked), "a step that moved nothing has the adapter of the one before"
    assert len(server.adapters) == 1, "a step's adapter goes when the next one comes"
    assert len(server.asked) == 4 * 2 * 4
    assert len({body["seed"] for body in server.asked}) == len(server.asked)
    assert {body["temperature"] for body in server.asked} == {1.0}
    assert all(torch.equal(a, b) for a, b in zip(before, weights(server.model), strict=True)), "the base never changes"
    (sampler,) = read_manifest(paths.adapter("v3")).spec["samplers"]
    assert sampler == {
        "after": 0,
        "sampler": {
            "name": "vllm", "version": "0.30.0", "model": model_of(paths.base("esi")).removesuffix(":bfloat16"),
            "dtype": "bfloat16", "quantize": "none",
        },
    }  # fmt: skip


def test_processes_with_different_adapters_are_noticed(
    server: engines.Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        World, "gathered", lambda _, items: [*items, "another"] if "clinrl-" in str(items) else [*items]
    )
    with pytest.raises(TrainingError, match="the processes have different adapters after step 0"):
        train(steps=1)


def test_another_adapter_than_the_one_that_is_trained_raises_an_alarm(
    server: engines.Imitation, tmp_path: Path
) -> None:
    """As an engine would be whose names for layers are others, or one that read the folder of another run."""
    server.wrong = wrong(tmp_path / "wrong")
    with pytest.raises(Alarmed, match=r"step 1 of 2 \(sampler_gap\): trainer and engine give the same tokens log-prob"):
        train(on_alarm="stop")


def wrong(folder: Path) -> Path:
    model, tokenizer = bases.open_base(paths.base("esi"), for_training=False)
    folder.mkdir()
    write_adapter(engines.adapt(model, 7), tokenizer, engines.SPEC, folder)
    return folder


@pytest.mark.slow
def test_a_stale_adapter_raises_an_alarm(server: engines.Imitation, capfd: pytest.CaptureFixture[str]) -> None:
    server.is_stale = True
    steps = train(lr=0.2, steps=3)
    assert steps[0]["sampling/sampling_logp_difference/mean"] < 1e-4
    assert max(step["sampling/sampling_logp_difference/mean"] for step in steps) > 0.1
    assert "(sampler_gap)" in capfd.readouterr().err


@pytest.mark.slow
def test_a_server_that_ends_is_told_and_the_same_command_goes_on(
    server: engines.Imitation, capfd: pytest.CaptureFixture[str]
) -> None:
    server.dies_after = 20
    with pytest.raises(TrainingError, match=r"no vLLM server answers .*; start one with `clinrl engine esi`.* from st"):
        train(steps=4)
    server.dies_after = None
    steps = train(steps=4)
    assert "v3 trains from step 2 to 4" in capfd.readouterr().err
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["sampling/sampling_logp_difference/mean"] < 1e-4 for step in steps)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*environment_factory.*:UserWarning")
def test_episodes_are_written_turn_by_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = get_task("audit")
    model, tokenizer = engines.auditor()
    imitation = engines.Imitation(copy.deepcopy(model), "audit", max_length=4096)
    spec = {
        "task": "audit", "scale": "embedded", "seed": 1, "checkpoint_every": 9, "stream": {},
        "lora": {"rank": 2, "alpha": 4.0, "targets": "all-linear"}, "modes": {"direct": {"thinking": False}},
        "reward": task.Reward().model_dump(mode="json"),
        "trainer": {
            "steps": 2, "prompts": 2, "group": 2, "micro_batch": None, "lr": 1.0e-2, "temperature": 1.0, "beta": 0.0,
            "max_completion": 500, "scale_rewards": "group",
        },
    }  # fmt: skip
    rows = [Row(case, "direct", False) for case in task.cases(4, 3, pool="train", mix="easy")]
    adapted = trl.start_adapter(model, spec, None)
    grpo = trl.grpo_trainer(adapted, tokenizer, task, spec, rows, tmp_path / "out", Judges(tmp_path))
    with engines.served(imitation) as url:
        served.serve(grpo, engines.asked(url, imitation, tokenizer), spec, tmp_path / "served", ALONE)
        grpo.train()
    steps = [entry for entry in grpo.state.log_history if "loss" in entry]
    assert len(steps) == 2
    assert all(step["sampling/sampling_logp_difference/max"] < 1e-3 for step in steps)
    assert all(step["tools/call_frequency"] > 1 for step in steps), "more than one turn of an episode was asked"
    assert len(imitation.asked) > 2 * 4
    assert len({body["seed"] for body in imitation.asked}) == len(imitation.asked)
