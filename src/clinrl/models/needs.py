"""The memory that a project's versions need on this machine, place by place, and the memory that is free.

The places are those that may run out: loading, training, generation within it, judges, and the exam. All figures are
estimates: for hub checkpoints the tokens of prompts follow from their characters; `estimate` says what kernels take.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from clinrl import paths
from clinrl.config.bases import HubModel
from clinrl.config.machine import Machine, sequences_of
from clinrl.config.params import Params
from clinrl.config.recipes import GrpoProfile, SftProfile
from clinrl.errors import OutOfMemory, ParamsError, Refused
from clinrl.models import bases, hub, opening
from clinrl.models.chat import encode_pieces, to_pieces
from clinrl.models.estimate import GIB, TRAINED, Size, measure
from clinrl.models.generate import HELD_OUT_TOKENS, LOGITS_TOGETHER, MAX_TOKENS, SHARED
from clinrl.models.judges import TOGETHER
from clinrl.models.pretrain import shape
from clinrl.models.rollout import schemas
from clinrl.models.shapes import SHAPES
from clinrl.runtime.gpus import Gpu, visible
from clinrl.tasks.base import Task, get_task
from clinrl.types import Case

CASES = 32
"""Cases whose prompts are measured; the longest one is used."""
CHARACTERS = 3
"""Characters of a prompt per token: English has four, numbers and tags fewer."""
SCORED = 1024
"""Tokens whose logits supervised fine-tuning holds at once."""
LIBRARIES, CUDA_LIBRARIES = int(1.5 * GIB), int(2.5 * GIB)
"""Host memory for Python, torch and the other libraries of a training and of the process that watches it: measured
without a GPU, assumed with one."""
LONGER = 1.25
"""Length of an embedded model's completion over the longest right answer of some cases: measured in three tasks."""
CUDA = int(1.5 * GIB)
"""GPU memory for CUDA itself and for the workspace of its kernels."""
CONTAINERS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""A container's folder, the files with its memory limit and its use, and the field of its memory.stat for the part of
the use that is inactive file cache, which the kernel takes back first."""
KEYS = {"loading": "gpu to another GPU", "training": "micro_batch lower"}
"""What to set in machine.yaml, by place; for other places it is exam_tokens."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """The memory that one place of a version needs, in bytes; None if the checkpoint's shape is not known."""

    task: str
    scale: str
    place: str
    name: str
    gpu: int | None
    host: int | None
    fits: bool
    short: str = ""
    """What is missing, in words; empty if it fits."""


@dataclass(frozen=True)
class FreeMemory:
    """The memory of this machine, in bytes."""

    gpu: Gpu | None
    """The GPU that is used; with several processes, the one with the least free memory."""
    host: int
    """Free memory of the host, within the limit of a container."""
    gpus: tuple[Gpu, ...] = ()
    """All visible GPUs."""


def free_memory(machine: Machine) -> FreeMemory:
    """The memory of this machine. Raises ParamsError if machine.yaml names GPUs that are not visible."""
    import psutil

    free = psutil.virtual_memory().available
    gpus, index = visible(), machine.gpu or 0
    if machine.gpu is not None and index >= len(gpus):
        raise ParamsError(f"machine.yaml: gpu is {index}, but {len(gpus)} are visible, counted from 0; correct it")
    if gpus and machine.processes > len(gpus):
        raise ParamsError(
            f"machine.yaml: processes is {machine.processes}, one a GPU, but {len(gpus)} are visible; lower it"
        )
    used = gpus[index : index + machine.processes]
    return FreeMemory(min(used, key=lambda gpu: gpu.free, default=None), min([free, *_left()]), tuple(gpus))


def _left() -> Iterator[int]:
    """Yield the host memory that a container's limit leaves, if there is a limit other than `max`."""
    for folder, limit, used, idle in CONTAINERS:
        with suppress(OSError, ValueError):
            most, now = (int((folder / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield most - now + int(stat.get(idle, 0))


def check(params: Params, version: str, machine: Machine) -> None:
    """Refuse a training at scale full that cannot fit, before hours are lost. Raises OutOfMemory with the shortfall.

    A checkpoint of unknown shape is not refused, and with `try_anyway` nothing is. Raises ParamsError as
    `free_memory` does.
    """
    if params.scale == "embedded":
        return
    there = free_memory(machine)
    if machine.try_anyway:
        return
    for need in needs(params, version, machine, there):
        # The judges of the exam: those that this training asks are counted where they stay beside it.
        if need.place not in ("exam", "judges") and not need.fits and need.host is not None:
            is_whole = need.place == "generation" and _keeps(
                params.model(version).task, params.trainer(params.versions[version].profile)
            )
            key = KEYS["loading"] if is_whole else KEYS.get(need.place, "exam_tokens lower")
            raise OutOfMemory(
                f"{version} cannot be trained here: {need.place} needs {need.short}; in machine.yaml set "
                f"{key}, or try_anyway to true"
            )


def needs(params: Params, name: str, machine: Machine, there: FreeMemory) -> list[Need]:
    """The needs at each place of a version, or of `<task>-base`, which is only loaded and examined."""
    about, is_full = {"task": params.model(name).task.name, "scale": params.scale, "name": name}, params.scale == "full"
    is_gpu = is_full and there.gpu is not None
    machine = machine if is_full else Machine()  # its settings apply at the full scale alone
    try:
        load = workload(params, name, machine, is_gpu=is_gpu)
    except Refused as refused:
        return [Need(**about, place="loading", gpu=None, host=None, fits=False, short=str(refused))]
    found, free = [], there.gpu.free if there.gpu else 0
    for place, size in _places(load, machine, checkpointed=is_full):
        processes = machine.processes if place != "exam" else 1  # each has a GPU, and all share the host
        gpu, host = (size + CUDA, CUDA_LIBRARIES * processes) if is_gpu else (0, (size + LIBRARIES) * processes)
        lacks = [
            f"{wanted / GIB:,.1f} GiB of {what}, {(wanted - has) / GIB:,.1f} more than is free"
            for wanted, has, what in ((gpu, free, "the GPU"), (host, there.host, "the host"))
            if wanted > has
        ]
        short = " and ".join(lacks)
        found.append(Need(**about, place=place, gpu=gpu, host=host, fits=not lacks, short=short))
    return found


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The sizes, tokens and rows that a version or a base computes with. Memory and time follow from them."""

    policy: Size
    judges: dict[str, Size]
    asked: tuple[str, ...]
    """The judges that are asked during training."""
    prompt: int
    """Tokens of the longest prompt."""
    gold: int
    """Tokens of the longest right answer."""
    longest: int
    """Tokens of the exam's longest prompt with its longest possible answer."""
    examined: int
    """Rows that an exam writes at once."""
    training: "Training | None"


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training of a version."""

    method: str
    steps: int
    sequences: int
    """Rows of a step that one process computes."""
    micro: int
    """Rows that are computed at once."""
    prompts: int
    """Prompts that are computed with these rows: one for each row, or one for each group that shares a prompt."""
    written: int
    """Tokens of a completion or of an imitated text: the most that are allowed or, for an embedded model, the usual
    number, since the most is several times as much."""
    sampled: int
    """Completions that a process writes in a step of GRPO, or before the first step of rejection sampling."""
    together: int
    """Completions that are written at once."""
    reads: int
    """How often a prompt is read: once, or in each turn of an episode if the cache of a turn is not kept."""
    beta: float
    moments: int
    """Bytes of the two moments of a trained number."""
    held_out: int
    """Tokens of held-out cases whose log-probabilities are computed at once; 0: none."""
    answered: int
    """Held-out cases that are answered at once, here even if a server writes the completions; 0: none."""


def workload(params: Params, name: str, machine: Machine, *, is_gpu: bool) -> Workload:
    """What a version, or `<task>-base`, computes on this machine. Raises Refused if a shape is not known."""
    task = get_task(params.model(name).task.name)
    version, base = params.versions.get(name), params.base(task.name)
    profile = params.profiles[version.profile] if version else None
    lora = params.lora(name) if profile else None
    policy = measure(
        config_of(params, task.name),
        half=is_gpu,
        nf4=_is_nf4(base) or bool(profile and profile.qlora),
        rank=lora.rank if lora else 0,
        targets=lora.targets if lora else (),
    )
    judges: dict[str, Size] = {
        judge: measure(config_of(params, task.name, judge), half=is_gpu, nf4=_is_nf4(spec))
        for judge, spec in base.judges.items()
    }
    folder = paths.base(task.name)
    is_built = params.scale == "embedded" and (folder / "tokenizer.json").exists()
    prompt, gold = _lengths(task, folder if is_built else None)
    longest = prompt + max(params.budget(mode, task.name) for mode in params.modes)
    return Workload(
        policy=policy,
        judges=judges,
        asked=() if version is None or isinstance(profile, SftProfile) else task.asks.models(params.reward(name)),
        prompt=prompt,
        gold=gold,
        longest=longest,
        examined=_rows(MAX_TOKENS // longest, longest, machine.exam_tokens),
        training=_training(params, version.profile, task, machine, policy, prompt, gold) if version else None,
    )


def _training(
    params: Params, recipe: str, task: Task, machine: Machine, policy: Size, prompt: int, gold: int
) -> Training:
    profile, trainer = params.profiles[recipe], params.trainer(recipe)
    fields: dict[str, Any] = trainer.model_dump()
    sequences, is_built = sequences_of(fields), params.scale == "embedded"
    written = int(fields.get("max_completion", gold))
    written = min(written, round(LONGER * gold)) if is_built else written
    world, tokens = machine.processes, machine.exam_tokens
    share = sequences // world
    micro = machine.rows_at_once(fields, sequences) or share
    is_grpo, length = isinstance(profile, GrpoProfile), prompt + written
    shares = is_built and is_grpo and trainer.loss_path == SHARED
    keeps = _keeps(task, trainer)
    together = share if is_grpo else MAX_TOKENS // length
    at_most = min(HELD_OUT_TOKENS, tokens or HELD_OUT_TOKENS, LOGITS_TOGETHER // policy.vocab)
    held_out = fields.get("held_out")
    sampled = 0 if isinstance(profile, SftProfile) else fields["prompts"] * fields["group"] // world
    return Training(
        method=profile.method,
        steps=trainer.steps,
        sequences=share,
        micro=micro,
        prompts=max(1, micro // fields["group"]) if shares else micro,
        written=written,
        sampled=sampled,
        together=together if keeps else _rows(together, length, tokens),
        reads=task.episodes.turns if task.episodes is not None and not keeps else 1,
        beta=fields.get("beta", 0.0),
        moments=2 if trainer.optimizer.endswith("8bit") else 8,
        held_out=max(length, at_most) if held_out else 0,
        answered=_rows(min(held_out["cases"], MAX_TOKENS // length), length, tokens) if held_out else 0,
    )


def _places(load: Workload, machine: Machine, *, checkpointed: bool) -> Iterator[tuple[str, int]]:
    """Yield each place with its bytes, without the libraries."""
    policy, prompt, judges, training = load.policy, load.prompt, load.judges, load.training
    yield "loading", policy.weights + policy.unpacked
    if training:
        beside = policy.weights + sum(size.weights for judge, size in judges.items() if judge in load.asked)
        length, tokens = prompt + training.written, training.prompts * prompt + training.micro * training.written
        scored = training.micro * training.written if training.method == "grpo" else SCORED
        step = policy.training(tokens, scored, checkpointed=checkpointed, moments=training.moments)
        copies = 4 * policy.adapter if machine.processes > 1 else 0  # torch sums the processes' gradients in a copy
        yield "training", beside + step + copies
        if training.sampled and machine.sampler != "vllm":  # a server has its own memory
            yield "generation", beside + policy.adapter * TRAINED + policy.writing(prompt, length, training.together)
        if training.held_out:
            check = max(policy.looking(training.held_out), policy.writing(prompt, length, training.answered))
            yield "held-out", beside + policy.adapter * (TRAINED + training.moments) + check
    if judges:
        asked = prompt + load.gold
        at_once = max(1, min(machine.exam_tokens or TOGETHER, TOGETHER) // asked)
        most = max(size.writing(asked, asked, at_once) for size in judges.values())
        yield "judges", policy.weights + sum(size.weights for size in judges.values()) + most
    yield "exam", policy.weights + policy.adapter * 4 + policy.writing(prompt, load.longest, load.examined)


def _keeps(task: Task, trainer: Any) -> bool:
    """Whether all rows of a step are written together: a turn continues rows that the one before left in memory."""
    return task.episodes is not None and trainer.generation_path == SHARED


def _rows(own: int, tokens: int, machine: int | None) -> int:
    """Rows of `tokens` tokens at once: `own`, or fewer to fit the tokens of the machine, and at least one."""
    return max(1, own if machine is None else min(own, machine // tokens))


def _is_nf4(spec: Any) -> bool:
    return bool(getattr(spec, "quantize", "none") == "nf4")


def config_of(params: Params, task: str, judge: str = "") -> dict[str, Any]:
    """The config.json of a base or of its judge: the checkpoint's own, or else the copy in `shapes`.

    Raises Refused if there is neither.
    """
    base = params.base(task)
    spec = base.judges[judge] if judge else base  # type: ignore[index]
    if not isinstance(spec, HubModel):
        return {"model_type": spec.architecture, **shape(spec, spec.vocab)}
    named = bases.reference(paths.base(task))
    pinned = named.get("judges", {}).get(judge, {}) if judge else named
    revision = pinned.get("commit", spec.revision) if pinned.get("repo") == spec.repo else spec.revision
    if path := hub.cached_config(spec.repo, revision):
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return config
    if spec.repo not in SHAPES:
        raise Refused(f"the shape of {spec.repo} is not known before its config.json is in the hub's cache")
    return dict(SHAPES[spec.repo])


@cache
def _lengths(task: Task, folder: Path | None) -> tuple[int, int]:
    """Tokens of the longest prompt of some cases, tools included, and of the longest right answer.

    Counted by the tokenizer in `folder` of an embedded base, whose tokens are whole phrases; else by CHARACTERS.
    """
    cases = list(task.cases(CASES, 0, pool="exam", mix=task.checks.mixes[0]))
    if folder is not None:
        return _encoded(task, cases, folder)
    tools = len(json.dumps(schemas(task)))
    prompts = [sum(len(turn.content) for turn in task.prompt(case.facts)) for case in cases]
    golds = [len(task.gold(case, thinking=True).model_dump_json()) for case in cases]
    return (tools + max(prompts)) // CHARACTERS, max(golds) // CHARACTERS


def _encoded(task: Task, cases: Sequence[Case], folder: Path) -> tuple[int, int]:
    from transformers import PreTrainedTokenizerFast

    with opening.refused(folder, "tokenizer"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    tools = schemas(task)
    texts = [
        to_pieces(tokenizer, task.prompt(case.facts), task.gold(case, thinking=True), True, tools, tokenizer.eos_token)
        for case in cases
    ]
    found = encode_pieces(tokenizer, texts)
    prompts = [own.index(1) for _, own in found]
    return max(prompts), max(len(ids) - prompt for (ids, _), prompt in zip(found, prompts, strict=True))


def is_copy(params: Params, task: str) -> bool:
    """Whether a task, at scale full, is measured by the copy in `shapes`, because its base's config is not cached."""
    try:
        return config_of(params, task) == SHAPES.get(params.bases[task].full.repo)
    except Refused:
        return False


def worst(params: Params, names: Sequence[str], machine: Machine, there: FreeMemory) -> list[Need]:
    """For each place of each task, the need of the version that needs most."""
    found: dict[tuple[str, str], Need] = {}
    for name in names:
        for need in needs(params, name, machine, there):
            at = need.task, need.place
            found[at] = max(found.get(at, need), need, key=lambda one: (one.gpu or 0, one.host or 0))
    return list(found.values())
