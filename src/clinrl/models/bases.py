"""The model at the root of a lineage: an embedded one built here, or a pinned checkpoint of the hub.

A base folder holds either the weights and a tokenizer (embedded) or `base.json`, which names the repository, the commit
and the quantisation (full). The base also holds the judges that the task's reward or measures ask, each as a folder or
as a reference. Everything that needs the model loads it here, so that all stages see the same weights.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl import paths
from clinrl.artifacts import digest, digests, exclusive, identity, read_manifest, seal, staged, verified, write_json
from clinrl.config.base import Scale
from clinrl.errors import ArtefactError, Refused
from clinrl.models import hub, memory, opening
from clinrl.models.chat import end_tokens, render, think_block, without_clock, without_prefill
from clinrl.runtime import determinism, gpus
from clinrl.tasks.base import Task, get_task
from clinrl.types import Manifest, Message

if TYPE_CHECKING:
    from clinrl.config.bases import HubBase, HubModel
    from clinrl.config.params import Params

REFERENCE = "base.json"
RESERVED_PAD = "<|finetune_right_pad_id|>"
"""Llama's padding token: its vocabulary has one, but its tokenizer does not declare it."""


def stage(params: "Params", task_name: str) -> None:
    """Build `data/bases/<task>` and the empty adapter `data/adapters/<task>-base` that starts its lineage.

    Raises Refused if the hub does not give the commit behind a revision.
    """
    from clinrl.config.bases import EmbeddedBase

    task = get_task(task_name)
    spec = params.base(task_name)
    folder, root = paths.base(task_name), paths.adapter(f"{task_name}-base")
    described = {"scale": params.scale, **spec.model_dump(mode="json"), "environment": determinism.record()}
    scratch = paths.checkpoints(f"{task_name}-base", digest([described, task.version]))
    of = {"task": task_name, "task_version": task.version}
    with exclusive(folder), exclusive(root):
        with staged(folder) as out:
            if isinstance(spec, EmbeddedBase):
                from clinrl.models import pretrain

                pretrain.build(task, spec, out, scratch)
                for name, judge in spec.judges.items():
                    pretrain.build_judge(task, name, judge, out / name, scratch / name)
            else:
                write_json(out / REFERENCE, _reference(spec))
            base = seal(out, kind="base", name=task_name, spec=described, inputs={}, **of)
        with staged(root) as out:
            seal(out, kind="adapter", name=f"{task_name}-base", spec={}, inputs={"base": identity(base)}, **of)
    shutil.rmtree(scratch, ignore_errors=True)


def of_version(task: Task, folder: Path) -> Manifest:
    """The manifest of an unaltered folder. Raises ArtefactError if it was made at another version of the task."""
    made = verified(folder)
    if made.task_version != task.version:
        is_base = folder in (paths.base(task.name), paths.adapter(f"{task.name}-base"))
        stage = f" --force --single-item base@{task.name}" if is_base else ""
        raise ArtefactError(
            f"{folder} was made at version {made.task_version} of the task {task.name}, which is now at "
            f"{task.version}; rebuild it with `dvc repro{stage}`"
        )
    return made


def made_of(task: Task, folder: Path) -> dict[str, str]:
    """Check that `folder` was made from the task's base, both unaltered; return their digests. Raises ArtefactError."""
    base, made = verified(paths.base(task.name)), of_version(task, folder)
    if made.inputs.get("base") != identity(base):
        raise ArtefactError(
            f"{folder} was made from another base than {paths.base(task.name)} now holds; "
            f"restore both with `dvc checkout` or rebuild it"
        )
    return {"adapter": identity(made), "base": identity(base)}


def _reference(spec: "HubBase") -> dict[str, Any]:
    """The content of `base.json`: each checkpoint with its commit."""
    found: dict[str, Any] = {**_pinned(spec), "quantize": spec.quantize}
    if not spec.prefill:
        found["prefill"] = False
    if spec.judges:
        found["judges"] = {name: {**_pinned(judge), "quantize": judge.quantize} for name, judge in spec.judges.items()}
    return found


def _pinned(model: "HubModel") -> dict[str, str]:
    """A repository and its commit, or a local folder and its digest. Raises Refused as `hub.commit_of` does, for a
    folder that is not here, and for a repository's name that is a folder here too."""
    folder = Path(model.repo)
    if not folder.is_absolute():
        if folder.is_dir():
            raise Refused(f"{folder} is a folder here and a name on the hub; for the folder, give its absolute path")
        commit = hub.commit_of(model.repo, model.revision)
    elif folder.is_dir():
        commit = "local-" + digest(digests(folder))
    else:
        raise Refused(f"{folder}, a checkpoint of params.yaml, is no folder here; bring it back, or change `repo`")
    return {"repo": model.repo, "commit": commit}


def load(params: "Params", task_name: str, *, for_training: bool, qlora: bool = False) -> tuple[Any, Any]:
    """Load the base model and its tokenizer, which pads on the left with a token that does not end a turn.

    With `qlora` the weights are loaded in 4 bits, whatever quantisation the base names.

    Raises ArtefactError when the base folder is absent, altered, or of another scale than `params` asks for.
    """
    folder = paths.base(task_name)
    read_manifest(folder)  # fails early if there is no base; `open_base` verifies the files
    if (folder / REFERENCE).exists() == (params.scale == "embedded"):
        raise ArtefactError(f"{folder} was not built at scale {params.scale}; run `clinrl base {task_name}` first")
    return open_base(folder, for_training=for_training, qlora=qlora)


def open_base(folder: Path, *, for_training: bool, qlora: bool = False) -> tuple[Any, Any]:
    """Open a base folder of either scale, or a merged model, as `load` does. Raises ArtefactError as `load` does."""
    verified(folder)
    with memory.place("loading the model", memory.larger(scale_of(folder))), opening.refused(folder, "model"):
        model, tokenizer = _open(folder, reference(folder), folder, qlora=qlora)
        _render(tokenizer)
    return model.train(for_training), tokenizer


def open_tokenizer(folder: Path) -> tuple[Any, Any, frozenset[int], dict[str, str]]:
    """The tokenizer, text configuration, end-of-turn ids and tensor names of a base at the full scale.

    The names map each tensor of the model to its name in the checkpoint; they are empty for a checkpoint of text alone.
    No weights are loaded, since the server holds them. Raises ArtefactError as `load` does.
    """
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    verified(folder)
    named = reference(folder)
    if not named:
        raise ArtefactError(f"{folder} was not built at scale full; build the base anew, with `scale: full`")
    origin = str(locate(named, folder))
    with opening.refused(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(origin, padding_side="left", trust_remote_code=False)
        config = AutoConfig.from_pretrained(origin, trust_remote_code=False)
        try:
            generation = GenerationConfig.from_pretrained(origin)
        except OSError:  # as transformers does for a model: use its configuration
            generation = GenerationConfig.from_model_config(config)
        _ready(tokenizer, named, origin, folder)
        _render(tokenizer)
        text, names = config.get_text_config(), dict[str, str]()
        if text is not config:
            stored = set[str]()
            for file in sorted(Path(origin).glob("model*.safetensors")):
                with safe_open(file, framework="pt") as tensors:
                    stored.update(tensors.keys())
            names = opening.stored_names(Path(origin), sorted(stored))
    return tokenizer, text, end_tokens(generation, tokenizer), names


def think_blocks(folder: Path) -> list[str]:
    """What `chat.render` adds to the chat template of a model's folder, with thinking and without; empty if nothing."""
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").exists():
        return []
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    return [block for thinking in (True, False) if (block := think_block(tokenizer, thinking))]


def open_judge(folder: Path, name: str) -> tuple[Any, Any]:
    """Open a judge of a base folder and its tokenizer. Raises ArtefactError if the base has no such judge."""
    verified(folder)
    named = reference(folder)
    found = named.get("judges", {}).get(name)
    if found is None and (named or not (folder / name / "config.json").exists()):
        raise ArtefactError(f"{folder} has no {name}; name one in params.yaml under its base and rebuild it")
    with memory.place(f"loading {name}", memory.larger(scale_of(folder))):
        model, tokenizer = _open(folder / name, found or {}, folder)
    return model.eval(), tokenizer


def identity_of(model: Any, base: Path) -> dict[str, str]:
    """The identity of this model as a sampler, for manifests: transformers' version, checkpoint and number format."""
    from transformers import __version__

    named = reference(base)
    is_small = bool(getattr(model, "is_loaded_in_4bit", False))
    return {
        "name": "transformers",
        "version": __version__,
        "model": "@".join(named[key] for key in ("repo", "commit") if named),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantize": "nf4" if is_small else "none",
    }


def reference(folder: Path) -> dict[str, Any]:
    """The content of a base folder's `base.json`; empty if the folder holds the weights itself."""
    path = folder / REFERENCE
    named: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return named


def scale_of(folder: Path) -> Scale:
    """The scale at which a base folder, or a merged model, was built."""
    return "full" if reference(folder) or read_manifest(folder).spec.get("scale") == "full" else "embedded"


def again(base: Path) -> str:
    """How a person rebuilds a base whose checkpoint has changed: DVC does not see that."""
    return f"rebuild the base with `dvc repro --force --single-item base@{base.name}`"


def locate(named: dict[str, Any], by: Path) -> Path:
    """The folder of a checkpoint that the base folder `by` names: a local folder, or the hub's files at its commit.

    Loaders get a folder, never a name: given a name, they would look for a path here first, then ask the hub for more.
    Raises ArtefactError if a local folder has changed or a commit is not whole, and Refused as `hub.fetch` does.
    """
    repo, commit = named["repo"], named["commit"]
    if commit.startswith("local-"):
        folder = Path(repo)
        if "local-" + digest(digests(folder)) != commit:
            raise ArtefactError(f"{repo} is not the checkpoint that {by} names; {again(by)}")
    elif not hub.COMMIT.fullmatch(commit):
        raise ArtefactError(
            f"{by} names {commit[:80]!r} as the commit of {repo}, which is not 40 hex digits; {again(by)}"
        )
    else:
        folder = hub.fetch(repo, commit)
    opening.check_checkpoint(folder)
    return folder


def _open(folder: Path, named: dict[str, Any], by: Path, *, qlora: bool = False) -> tuple[Any, Any]:
    """Open the checkpoint `named`, or the model in `folder` if nothing is named, and its tokenizer.

    Raises Refused if it is one of full scale and torch cannot use the GPU that nvidia-smi lists.
    """
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        BitsAndBytesConfig,
        GenerationConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # for reading the weights; the stages show their own progress
    if not named:
        opening.check_checkpoint(folder)
    origin = str(locate(named, by) if named else folder)
    is_embedded = not named and scale_of(by) == "embedded"  # others are checkpoints of the hub, and merges of them
    # A model of a few million parameters, in full precision, stays on the CPU: equal inputs give equal bytes there.
    weights: dict[str, Any] = {"dtype": torch.float32}
    if not is_embedded:
        gpu = torch.cuda.is_available()
        if not gpu and (there := gpus.visible()):
            raise Refused(
                f"torch cannot use GPU {there[0].number}, which nvidia-smi lists, so the model would be computed by "
                "the CPU. CUDA_VISIBLE_DEVICES= hides the GPU, if machine.yaml names none. Otherwise, if `clinrl "
                "doctor` says `CUDA none`, remove .venv and install it by `make CPU= .venv/.installed`; else the "
                "driver is too old"
            )
        weights = {"dtype": torch.bfloat16 if gpu else torch.float32, "device_map": {"": 0 if gpu else "cpu"}}
    # AutoTokenizer goes by the architecture's name: it would split text as Qwen2 does, not as an embedded one does.
    reader = PreTrainedTokenizerFast if is_embedded else AutoTokenizer
    qlora = qlora or (bool(named) and named["quantize"] == "nf4")
    if qlora:
        weights["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32 if is_embedded else torch.bfloat16,
        )
    try:
        tokenizer = reader.from_pretrained(origin, padding_side="left", trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            origin, **weights, attn_implementation="sdpa", use_safetensors=True, trust_remote_code=False
        )
    except ValueError as error:  # transformers has no error class of its own for this
        if "custom code" not in str(error):
            raise
        raise ArtefactError(
            f"{origin} needs custom code of its own, which is never run; name a "
            "checkpoint whose architecture transformers has"
        ) from None
    if qlora:
        from bitsandbytes.nn import Linear4bit

        # A CPU unpacks four bits alike on every machine, in exams as in training: for an exam, bitsandbytes would ask
        # it, and not ATEN_CPU_CAPABILITY, whether to compute in bfloat16 with AVX-512. Weights that were packed for
        # that have no gradient in a training that goes on.
        for layer in model.modules():
            if isinstance(layer, Linear4bit):
                layer.support_avx512bf16_for_cpu = False
    _ready(tokenizer, named, origin, by)
    # The mode decides how to decode: a checkpoint's own temperature or penalties must not leak into it.
    model.generation_config = GenerationConfig(
        eos_token_id=model.generation_config.eos_token_id or tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    return model, tokenizer


def _render(tokenizer: Any) -> None:
    """Render a prompt in both modes, as a test: a template may be as hostile as a pickle, and every prompt runs it."""
    for thinking in (True, False):
        render(tokenizer, [Message(role="user", content="?")], thinking)


def _ready(tokenizer: Any, named: dict[str, Any], origin: str, by: Path) -> None:
    """Set the chat template that the base asks for, and a pad token. Raises ArtefactError if there is no pad token."""
    if tokenizer.chat_template:
        tokenizer.chat_template = without_clock(tokenizer.get_chat_template())
    if not named.get("prefill", True):
        try:
            tokenizer.chat_template = without_prefill(tokenizer.get_chat_template())
        except ValueError as error:
            raise ArtefactError(f"{by} leaves the think block to the model, but {error}; leave out prefill") from None
    if tokenizer.pad_token_id is None and RESERVED_PAD in tokenizer.get_vocab():
        tokenizer.pad_token = RESERVED_PAD
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ArtefactError(
            f"the tokenizer of {origin} has no pad token of its own, so padding would "
            "read as the end of a turn; choose a checkpoint that has one"
        )
