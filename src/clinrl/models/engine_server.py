"""`clinrl engine`: vLLM's own server, started so that exams and trainings may use it.

The server accepts connections from this machine alone, needs a random key for every path, and serves the base's
checkpoint at its pinned commit. vLLM never reports which commit it serves, so the name of the served model includes it.
"""

import json
import os
import secrets
import sys
from pathlib import Path

from clinrl import paths
from clinrl.artifacts import locked, verified, write_text
from clinrl.config.machine import LOOPBACK, read_machine
from clinrl.config.params import Params
from clinrl.errors import Refused, echo
from clinrl.models import bases
from clinrl.models.engine import DTYPE, model_of
from clinrl.runtime.guard import EngineFence, listen

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks that vLLM can be started with."""
PROGRAM = Path(__file__).resolve().parents[3] / ".venv-vllm/bin/vllm"
"""The program that `make vllm` installs in this checkout."""


def stage(params: Params, name: str, port: int) -> None:
    """Replace this process by the vLLM server of a task's base. Does not return.

    Raises Refused at the embedded scale, without vLLM, for adapters of too high a rank, while an earlier server of this
    task loads or serves, or if the port is taken; and ArtefactError without a base.
    """
    if params.scale != "full":
        raise Refused("vLLM serves hub checkpoints; set scale to full in params.yaml")
    base = paths.base(name)
    verified(base)
    if not bases.reference(base):
        raise Refused(f"{base} was not built at scale full; run `clinrl base {name}` first")
    program = next((path for path in (Path(sys.executable).with_name("vllm"), PROGRAM) if path.is_file()), None)
    if program is None:
        raise Refused(f"there is no vLLM beside {sys.executable}, and no {PROGRAM}; run `make vllm`")
    command = [str(program.resolve()), *arguments(base, largest_rank(params, name), port)]
    file = paths.engine(name)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(file.with_suffix(".lock"), waits=False) as lock:
        if lock is None:
            raise Refused(f"another `clinrl engine {name}` serves or loads, and commands here use it; end it first")
        os.set_inheritable(lock.fileno(), True)  # so it is held until vLLM, which this process becomes, has ended
        with listen(LOOPBACK[0], port, "--port"):
            pass
        key = secrets.token_urlsafe(32)
        write_text(file, json.dumps({"url": f"http://{LOOPBACK[0]}:{port}", "key": key}) + "\n", mode=0o600)
        environment = {**os.environ, "VLLM_API_KEY": key, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        echo(f"serves {model_of(base)} at {LOOPBACK[0]}:{port}; Ctrl-C ends it")
        os.execve(command[0], command, environment)


def largest_rank(params: Params, task: str) -> int:
    """The largest rank of the adapters of a task's versions and blends."""
    ranks = [params.lora(version).rank for version in params.versions_of(task)]
    blends = [blend for blend in params.merges.blends.values() if blend.task == task and blend.method == "cat"]
    ranks += [sum(params.lora(version).rank for version in blend.parts.values()) for blend in blends]
    return max(ranks, default=RANKS[0])


def arguments(base: Path, rank: int, port: int) -> list[str]:
    """The arguments of `vllm`, for adapters up to a rank.

    Raises Refused for a rank that vLLM does not support, and if transformers cannot open the checkpoint as a causal
    language model.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes

    room = next((room for room in RANKS if room >= rank), None)
    if room is None:
        raise Refused(f"vLLM has no room for adapters of rank {rank}, at most {RANKS[-1]}")
    settings, folder = read_machine().vllm, bases.locate(bases.reference(base), base)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type not in classes:
        raise Refused(f"{folder} is no causal language model that transformers has; name another checkpoint")
    text = config.get_text_config()
    window = getattr(text, "max_position_embeddings", None) or settings.max_length
    return [
        "serve", str(folder.resolve()),
        "--served-model-name", model_of(base),
        # vLLM's class for the text part alone refuses a checkpoint that has tensors for images.
        *(["--language-model-only"] if text is not config else []),
        "--host", LOOPBACK[0],
        "--port", str(port),
        "--dtype", DTYPE,
        "--load-format", "safetensors",
        "--max-model-len", str(min(window, settings.max_length)),
        "--gpu-memory-utilization", f"{settings.memory_share:g}",
        "--generation-config", "vllm",  # not the checkpoint's own temperature and penalties
        "--logprobs-mode", "processed_logprobs",  # training needs those of the distribution that was drawn from
        "--enable-prefix-caching",
        "--middleware", f"{EngineFence.__module__}.{EngineFence.__name__}",
        "--enable-lora", "--max-lora-rank", str(room), "--max-loras", "2", "--max-cpu-loras", "2",
    ]  # fmt: skip
