"""What the versions of a project need of this machine's memory, place by place, and what is there.

The places are those that may run out: loading, training, generation within it, judges, and the exam. Figures are
estimates: prompts are taken at so many characters a token, and kernels as `estimate` has them.
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
from clinrl.models import bases, hub
from clinrl.models.estimate import GIB, TRAINED, Size, measure
from clinrl.models.generate import HELD_OUT_TOKENS, LOGITS_TOGETHER, MAX_TOKENS, SHARED
from clinrl.models.judges import TOGETHER
from clinrl.models.pretrain import shape
from clinrl.models.shapes import SHAPES
from clinrl.runtime.gpus import Gpu, visible
from clinrl.tasks.base import Task, get_task
from clinrl.types import Case

CASES = 32
"""Cases whose prompts are measured; the longest counts."""
CHARACTERS = 3
"""Of a prompt to a token: English has four, numbers and tags fewer."""
SCORED = 1024
"""Tokens whose logits supervised fine-tuning holds at once."""
LIBRARIES, CUDA_LIBRARIES = int(1.5 * GIB), int(2.5 * GIB)
"""Of the host, for Python, torch and the other libraries of a training and of what watches it: without a GPU measured,
with one assumed."""
LONGER = 1.25
"""A completion of a model that is built here, by the longest right answer of some cases: measured in three tasks."""
CUDA = int(1.5 * GIB)
"""Of a GPU, for CUDA itself and the room that its kernels work in."""
CONTAINERS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Where a container says how much of the host it may have, how much it uses, and which field of its memory.stat counts
what of that is files that were read long ago, whose memory the kernel takes back first."""
KEYS = {"loading": "gpu to another GPU", "training": "micro_batch lower", "judges": "gpu to another GPU"}
"""What to set in machine.yaml, by place, where it is not exam_tokens."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one place of a version needs. Bytes; None where nothing is known of the checkpoint."""

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
class Room:
    """The memory that is there. Bytes."""

    gpu: Gpu | None
    """The one that is used; of those of several processes, the one with the least that is free."""
    host: int
    """That is free, within the limit of a container."""
    gpus: tuple[Gpu, ...] = ()
    """All that are visible."""


def room(machine: Machine) -> Room:
    """What this machine has. Raises ParamsError for a GPU in machine.yaml that is not there."""
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
    return Room(min(used, key=lambda gpu: gpu.free, default=None), min([free, *_left()]), tuple(gpus))


def _left() -> Iterator[int]:
    """What a container's limit leaves of the host. None says nothing, or `max`."""
    for folder, limit, used, idle in CONTAINERS:
        with suppress(OSError, ValueError):
            most, now = (int((folder / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield most - now + int(stat.get(idle, 0))


def check(params: Params, version: str, machine: Machine) -> None:
    """Refuse a training at scale full that cannot fit, before hours are lost. Raises OutOfMemory with the shortfall.

    What nobody knows the shape of is not refused, nor anything under `try_anyway`. Raises ParamsError as `room`.
    """
    if params.scale == "embedded":
        return
    there = room(machine)
    if machine.try_anyway:
        return
    for need in needs(params, version, machine, there):
        if need.place != "exam" and not need.fits and need.host is not None:
            raise OutOfMemory(
                f"{version} cannot be trained here: {need.place} needs {need.short}; in machine.yaml set "
                f"{KEYS.get(need.place, 'exam_tokens lower')}, or try_anyway to true"
            )


def needs(params: Params, name: str, machine: Machine, there: Room) -> list[Need]:
    """The places of a version, or of `<task>-base`, which is loaded and examined alone."""
    task, is_full = params.model(name).task.name, params.scale == "full"
    try:
        load = workload(params, name, machine, is_gpu=is_full and there.gpu is not None)
    except Refused as refused:
        fields = {"task": task, "scale": params.scale, "name": name, "gpu": None, "host": None, "fits": False}
        return [Need(**fields, place="loading", short=str(refused))]  # type: ignore[arg-type]
    found = _places(
        load,
        machine.exam_tokens if is_full else None,
        checkpointed=is_full,
        is_served=is_full and machine.sampler == "vllm",
    )
    alike = machine.processes if is_full else 1
    return [
        _need(params.scale, task, place, name, size, there, 1 if place == "exam" else alike) for place, size in found
    ]


def _need(scale: str, task: str, place: str, name: str, size: int, there: Room, processes: int) -> Need:
    """Of the GPU what one process needs, of the host what all do."""
    is_gpu = scale == "full" and there.gpu is not None
    gpu, host = (size + CUDA, CUDA_LIBRARIES * processes) if is_gpu else (0, (size + LIBRARIES) * processes)
    free = there.gpu.free if there.gpu else 0
    parts = [(gpu, free, "the GPU")] if is_gpu else []
    lacks = [
        f"{wanted / GIB:,.1f} GiB of {what}, {(wanted - has) / GIB:,.1f} more than is free"
        for wanted, has, what in [*parts, (host, there.host, "the host")]
        if wanted > has
    ]
    return Need(
        task=task, scale=scale, place=place, name=name, gpu=gpu, host=host, fits=not lacks, short=" and ".join(lacks)
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a version computes, or a base: sizes, tokens and rows. Memory and time follow from it."""

    policy: Size
    judges: dict[str, Size]
    asked: tuple[str, ...]
    """The judges that are asked while it is trained."""
    prompt: int
    """Tokens of the longest prompt."""
    gold: int
    """Tokens of the longest right answer."""
    longest: int
    """Tokens of the longest prompt and answer of its exam."""
    examined: int
    """Rows that an exam writes at once."""
    training: "Training | None"


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training of a version."""

    method: str
    steps: int
    sequences: int
    """Rows of a step that a process computes."""
    micro: int
    """Rows that are computed at once."""
    prompts: int
    """Prompts that are computed with these rows: one for each, or for each group that shares its own."""
    written: int
    """Tokens of a completion, or of what is imitated: the most that are allowed, or of a model that is built here those
    that are usual, since the most is several times as much."""
    sampled: int
    """Completions that a process writes, in a step of GRPO, or before the first of rejection sampling."""
    together: int
    """Completions that are written at once."""
    reads: int
    """How often a prompt is read: in each turn of an episode that keeps nothing."""
    beta: float
    moments: int
    """Bytes of the two moments of a trained number."""
    looked: int
    """Tokens of held-out cases whose log-probabilities are computed at once; 0: none."""


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
    tokens = machine.exam_tokens if params.scale == "full" else None
    return Workload(
        policy=policy,
        judges=judges,
        asked=() if version is None or isinstance(profile, SftProfile) else task.asks.models(params.reward(name)),
        prompt=prompt,
        gold=gold,
        longest=longest,
        examined=_rows(MAX_TOKENS // longest, longest, tokens),
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
    world = machine.world if params.scale == "full" else 1
    share = sequences // world
    micro = machine.rows_at_once(fields, sequences, params.scale) or share
    shares = is_built and isinstance(profile, GrpoProfile) and trainer.loss_path == SHARED
    tokens = machine.exam_tokens if params.scale == "full" else None
    is_grpo = isinstance(profile, GrpoProfile)
    keeps = task.episodes is not None and trainer.generation_path == SHARED
    together = share if is_grpo else MAX_TOKENS // (prompt + written)
    at_most = min(HELD_OUT_TOKENS, tokens or HELD_OUT_TOKENS, LOGITS_TOGETHER // policy.vocab)
    sampled = 0 if isinstance(profile, SftProfile) else fields["prompts"] * fields["group"] // world
    return Training(
        method=profile.method,
        steps=trainer.steps,
        sequences=share,
        micro=micro,
        prompts=max(1, micro // fields["group"]) if shares else micro,
        written=written,
        sampled=sampled,
        together=together if keeps else _rows(together, prompt + written, tokens),
        reads=task.episodes.turns if task.episodes is not None and not keeps else 1,
        beta=fields.get("beta", 0.0),
        moments=2 if trainer.optimizer.endswith("8bit") else 8,
        looked=max(prompt + written, at_most) if fields.get("held_out") else 0,
    )


def _places(load: Workload, bound: int | None, *, checkpointed: bool, is_served: bool) -> Iterator[tuple[str, int]]:
    """Each place with its bytes, beside the libraries; `bound`: the machine's exam_tokens; `is_served`: a server writes
    the completions of a training."""
    policy, prompt, judges, training = load.policy, load.prompt, load.judges, load.training
    yield "loading", policy.weights + policy.unpacked
    if training:
        beside = policy.weights + sum(size.weights for judge, size in judges.items() if judge in load.asked)
        length, tokens = prompt + training.written, training.prompts * prompt + training.micro * training.written
        scored = training.micro * training.written if training.method == "grpo" else SCORED
        step = policy.training(tokens, 1, scored, checkpointed=checkpointed, moments=training.moments)
        yield "training", beside + step
        if training.sampled and not is_served:
            yield "generation", beside + policy.adapter * TRAINED + policy.writing(prompt, length, training.together)
        if training.looked:
            yield "held-out", beside + policy.adapter * (TRAINED + training.moments) + policy.looking(training.looked)
    if judges:
        asked = prompt + load.gold
        at_once = max(1, min(bound or TOGETHER, TOGETHER) // asked)
        most = max(size.writing(asked, asked, at_once) for size in judges.values())
        yield "judges", policy.weights + sum(size.weights for size in judges.values()) + most
    yield "exam", policy.weights + policy.adapter * 4 + policy.writing(prompt, load.longest, load.examined)


def _rows(own: int, tokens: int, machine: int | None) -> int:
    """Rows of so many tokens at once: those of the recipe, or fewer, and at least one."""
    return max(1, own if machine is None else min(own, machine // tokens))


def _is_nf4(spec: Any) -> bool:
    return bool(getattr(spec, "quantize", "none") == "nf4")


def config_of(params: Params, task: str, judge: str = "") -> dict[str, Any]:
    """The config.json of a base or of its judge: its own, or the copy here of a known one.

    Raises Refused for a checkpoint of which neither is there.
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

    By the tokenizer of a base that is built here, whose tokens are whole phrases; of another, by so many characters.
    """
    from clinrl.models.rollout import schemas

    cases = list(task.cases(CASES, 0, pool="exam", mix=task.checks.mixes[0]))
    if folder is not None:
        return _encoded(task, cases, folder)
    tools = len(json.dumps(schemas(task)))
    prompts = [sum(len(turn.content) for turn in task.prompt(case.facts)) for case in cases]
    golds = [len(task.gold(case, thinking=True).model_dump_json()) for case in cases]
    return (tools + max(prompts)) // CHARACTERS, max(golds) // CHARACTERS


def _encoded(task: Task, cases: Sequence[Case], folder: Path) -> tuple[int, int]:
    from transformers import PreTrainedTokenizerFast

    from clinrl.models.chat import encoded, spelt
    from clinrl.models.rollout import schemas

    tokenizer, tools = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False), schemas(task)
    texts = [
        spelt(tokenizer, task.prompt(case.facts), task.gold(case, thinking=True), True, tools, tokenizer.eos_token)
        for case in cases
    ]
    found = encoded(tokenizer, texts)
    prompts = [own.index(1) for _, own in found]
    return max(prompts), max(len(ids) - prompt for (ids, _), prompt in zip(found, prompts, strict=True))


def is_copy(params: Params, task: str) -> bool:
    """Whether the hub base of a task is measured by the copy of its shape here, for want of its own config."""
    repo = params.bases[task].full.repo
    try:
        return config_of(params.model_copy(update={"scale": "full"}), task) == SHAPES.get(repo)
    except Refused:
        return False


def worst(params: Params, names: Sequence[str], machine: Machine, there: Room) -> list[Need]:
    """Place by place of each task, the version that needs most."""
    found: dict[tuple[str, str], Need] = {}
    for name in names:
        for need in needs(params, name, machine, there):
            held = found.get((need.task, need.place))
            if held is None or (need.gpu or 0, need.host or 0) > (held.gpu or 0, held.host or 0):
                found[need.task, need.place] = need
    return list(found.values())
