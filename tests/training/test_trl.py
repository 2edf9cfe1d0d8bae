"""What a recipe says of optimiser, loss and shape reaches TRL and PEFT: a few real steps of a doll with each."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trl import GRPOConfig, SFTConfig

import dolls
from clinrl import paths
from clinrl.artifacts import read_manifest
from clinrl.config.params import Params
from clinrl.config.recipes import GrpoTrainer, SftTrainer
from clinrl.errors import TrainingError
from clinrl.models import bases, opening
from clinrl.models.chat import encode
from clinrl.training import launch, trl
from clinrl.training.loss import Checked
from hubs import COMMIT, REPO, Imitation, served

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS = 10
COSINE = {"scheduler": "cosine", "warmup": 1, "steps": STEPS}
"""A tenth of the steps."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imitation]:
    """A hub on this machine that has the doll's base, and a project without it."""
    files = {path.name: path.read_bytes() for path in paths.base("esi").iterdir() if path.name != "manifest.json"}
    shutil.rmtree(paths.base("esi"))
    with served(Imitation(files), project, monkeypatch) as hub_:
        yield hub_


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What TRL's trainers are built with, in order."""
    built: list[Any] = []
    for kind in (trl.Sft, trl.Grpo):
        made = kind.__init__

        def build(self: Any, *arguments: Any, made: Callable[..., None] = made, **named: Any) -> None:
            built.append(named["args"])
            made(self, *arguments, **named)

        monkeypatch.setattr(kind, "__init__", build)
    return built


def recipes(**changes: Any) -> Params:
    """The doll's parameters with changed trainers at the embedded scale, each with what it knows of."""
    profiles = json.loads(json.dumps(dolls.PARAMS["profiles"]), object_hook=dolls._integer_keys)
    for profile in profiles.values():
        known = (SftTrainer if profile["method"] == "sft" else GrpoTrainer).model_fields
        own = {"steps": 2, "checkpoint_every": 50} | changes
        profile["trainer"]["embedded"] |= {key: value for key, value in own.items() if key in known}
    return dolls.params(profiles=profiles)


def train(params: Params, version: str) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The weights and the history of a version that is trained anew."""
    shutil.rmtree(paths.adapter(version), ignore_errors=True)
    with dolls.in_process():
        launch.stage(params, version)
    history = (paths.adapter(version) / "history.jsonl").read_text().splitlines()
    return load_file(paths.adapter(version) / opening.WEIGHTS), [json.loads(line) for line in history]


def differ(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(first[name], second[name]) for name in first)


def test_the_defaults_are_those_of_the_libraries() -> None:
    """So that a record which leaves them out says what it said before they could be set."""
    for config in (SFTConfig, GRPOConfig):
        fields = config.__dataclass_fields__
        mine = {name: field.default for name, field in GrpoTrainer.model_fields.items()}
        assert fields["lr_scheduler_type"].default == mine["scheduler"]
        assert fields["warmup_steps"].default == mine["warmup"]
        assert config(output_dir="x", use_cpu=True, bf16=False, report_to="none").optim.value == mine["optimizer"]
        for name in ("adam_beta2", "weight_decay", "max_grad_norm"):
            assert fields[name].default == mine[name]
    assert GRPOConfig.__dataclass_fields__["loss_type"].default == mine["loss_type"]


@pytest.mark.long
def test_the_learning_rate_rises_for_a_tenth_and_falls_along_a_cosine(project: Path) -> None:
    _, history = train(recipes(**COSINE), "v1")
    peak = 2.0e-3
    after = [peak * 0.5 * (1 + math.cos(math.pi * step / (STEPS - 1))) for step in range(STEPS - 1)]
    assert [line["learning_rate"] for line in history] == pytest.approx([0.0, *after])
    _, linear = train(recipes(steps=STEPS), "v1")
    assert [line["learning_rate"] for line in linear] == pytest.approx([peak * (1 - s / STEPS) for s in range(STEPS)])


@pytest.mark.long
def test_a_setting_of_the_optimiser_changes_the_weights(project: Path, settings: list[Any]) -> None:
    plain, _ = train(recipes(steps=3), "v1")
    for name, value in {"weight_decay": 0.1, "max_grad_norm": 0.1, "adam_beta2": 0.9}.items():
        other, _ = train(recipes(steps=3, **{name: value}), "v1")
        assert getattr(settings[-1], name) == value != getattr(settings[0], name)
        assert differ(plain, other), name
        assert read_manifest(paths.adapter("v1")).spec["trainer"][name] == value


@pytest.mark.long
def test_bnpo_divides_by_the_tokens_of_the_micro_batch(project: Path, settings: list[Any]) -> None:
    """Completions of two lengths a micro-batch, so that the two divisors differ."""
    dapo, _ = train(recipes(micro_batch=2, beta=0.0), "v3")
    bnpo, _ = train(recipes(micro_batch=2, beta=0.0, loss_type="bnpo"), "v3")
    assert [held.loss_type for held in settings] == ["dapo", "bnpo"]
    assert differ(dapo, bnpo)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit"])
def test_an_optimiser_that_needs_cuda_is_refused_on_a_cpu(tmp_path: Path, optimizer: str) -> None:
    spec = {"scale": "full", "trainer": {"lr": 1.0e-3, "steps": 3, "optimizer": optimizer}}
    with pytest.raises(
        TrainingError, match=rf"the optimizer {optimizer} needs CUDA, .* on the CPU; train on a GPU, or"
    ):
        trl.common_settings(spec, tmp_path)


def test_it_reaches_the_trainer_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = {"scale": "full", "seed": 1, "checkpoint_every": 5}
    trainer = {"lr": 1.0e-3, "steps": 3, "optimizer": "paged_adamw_8bit", "batch": 2, "micro_batch": None}
    found = trl.common_settings(spec | {"trainer": trainer}, tmp_path)
    assert (found["optim"], found["use_cpu"], found["bf16"]) == ("paged_adamw_8bit", False, True)


def at_full(**block: Any) -> Params:
    """The doll's parameters at full, above a checkpoint of the hub."""
    base = {**dolls.PARAMS["bases"]["esi"], "full": {"repo": REPO, "revision": "main", "quantize": "none"} | block}
    return dolls.params(scale="full", bases={"esi": base})


@pytest.mark.long
def test_others_load_an_adapter_at_full_by_what_the_hub_calls_its_base(hub: Imitation) -> None:
    from peft import AutoPeftModelForCausalLM

    shape = {"rank": 8, "alpha": 16, "targets": SEVEN}
    numbers = {"steps": 3, "scheduler": "cosine", "max_grad_norm": 0.1}
    params = at_full(lora=shape, recipes={"imitate": numbers})
    bases.stage(params, "esi")
    weights, history = train(params, "v1")
    assert len(history) == 3
    assert read_manifest(paths.adapter("v1")).spec["trainer"].items() >= numbers.items()
    config = json.loads((paths.adapter("v1") / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (REPO, COMMIT)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (8, 16, sorted(SEVEN))
    assert {name.split(".")[-3] for name in weights} == set(SEVEN)
    assert {tensor.shape[0] for name, tensor in weights.items() if "lora_A" in name} == {8}
    ours, tokenizer = bases.load(params, "esi", for_training=False)
    adapted = trl.opening.adapted(ours, paths.adapter("v1"))
    ids = torch.tensor(encode(tokenizer, ["<|im_start|>assistant\n<think>\n"]))
    hub.asked.clear()
    train(params, "v2")
    assert not hub.asked  # PEFT would ask for the config on `main` at each checkpoint, and end with the network
    theirs = AutoPeftModelForCausalLM.from_pretrained(str(paths.adapter("v1")), dtype=torch.float32).eval()
    assert [path for path in hub.asked if COMMIT in path]
    assert not [path for path in hub.asked if "/main/" in path and "adapter" not in path]
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, adapted(ids).logits[..., : theirs.config.vocab_size], atol=1e-5)


@pytest.mark.long
def test_a_local_base_is_named_by_its_folder(project: Path) -> None:
    shutil.copytree(paths.base("esi"), project / "checkpoint")
    params = at_full(repo=str(project / "checkpoint"), recipes={"imitate": {"steps": 1}})
    bases.stage(params, "esi")
    train(params, "v1")
    config = json.loads((paths.adapter("v1") / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (str(project / "checkpoint"), None)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    ("target", "says"), [("lm_head", "the output layer, whose factors"), ("embed_tokens", "which is no linear layer")]
)
def test_an_adapter_of_what_would_not_learn_or_could_not_be_read_is_refused_before_the_first_step(
    project: Path, target: str, says: str
) -> None:
    model, _ = bases.load(dolls.params(), "esi", for_training=True)
    spec = {"lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", target]}, "seed": 1}
    with pytest.raises(TrainingError, match=says):
        trl.start_adapter(model, spec, None)


def test_a_parent_that_is_not_loaded_as_it_is_or_cannot_learn_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "targets": ["q_proj"]}, "seed": 1, "task": "esi"}
    (project / "parent").mkdir()

    def base() -> Any:
        return bases.load(dolls.params(), "esi", for_training=True)[0]

    trl.write_weights(trl.start_adapter(base(), spec, None), spec, project / "parent")
    adapted = opening.adapted
    monkeypatch.setattr(opening, "adapted", lambda *arguments, **_: adapted(*arguments, is_trainable=False))
    with pytest.raises(TrainingError, match="the adapter has no trainable parameter"):
        trl.start_adapter(base(), spec, project / "parent")

    def halved(*arguments: Any, **named: Any) -> Any:
        opened = adapted(*arguments, **named)
        next(tensor for name, tensor in opened.named_parameters() if "lora_A" in name).data /= 2
        return opened

    monkeypatch.setattr(opening, "adapted", halved)
    with pytest.raises(TrainingError, match=r"is not that of .*parent: was the base replaced by another"):
        trl.start_adapter(base(), spec, project / "parent")


def test_an_adapter_that_trl_cast_starts_in_float32_as_it_was(project: Path) -> None:
    model, _ = bases.load(dolls.params(), "esi", for_training=True)
    adapted = trl.start_adapter(model, {"lora": {"rank": 4, "alpha": 8, "targets": ["q_proj"]}, "seed": 1}, None)
    start = trl.adapter_state(adapted)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.bfloat16()
    assert trl.differs(adapted, start)
    trl.restore_precision(adapted, start)
    assert not trl.differs(adapted, start)
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    with pytest.raises(TrainingError, match="the trainer changed the adapter, which must start as its parent's"):
        trl.restore_precision(adapted, {name: tensor * math.nan for name, tensor in start.items()})


def test_an_optimizers_state_is_loaded_as_memory_that_is_not_paged(project: Path) -> None:
    """bitsandbytes marks what it pages, and a mark on other memory ends the process at the next step."""

    class Loaded:
        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            state = torch.zeros(2)
            state.is_paged = True  # type: ignore[attr-defined]
            self.optimizer = torch.optim.SGD([torch.zeros(2)])
            self.optimizer.state["p"] = {"state1": state, "step": 1}

    class Trainer(Checked, Loaded):
        pass

    trainer = Trainer()
    trainer._load_optimizer_and_scheduler("checkpoint-5")
    assert not hasattr(trainer.optimizer.state["p"]["state1"], "is_paged")
