"""machine.yaml: how much is computed at once, by how many processes, and by which sampler.

The file is optional, beside params.yaml and outside git. No key enters a digest or a DVC parameter, so a change of it
keeps checkpoints and makes nothing stale. Only the sampler is recorded, since it changes answers.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from clinrl.config.base import Count, Scale, Section, refusal, sentence
from clinrl.errors import ParamsError

FILE = "machine.yaml"


LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Vllm(Section):
    """The vLLM server that samples if `sampler` is vllm: how `clinrl engine` starts it, and how requests are sent."""

    url: str | None = None
    """Address of a server that was started elsewhere: http on this machine, or https; null: that of `clinrl engine`."""
    memory_share: float = Field(default=0.85, gt=0, le=0.95)
    """Share of the GPU that `clinrl engine` takes, above 0 to 0.95; about 0.3 where a training is on the same GPU."""
    max_length: int = Field(default=16384, ge=256)
    """Most tokens of a prompt and its completion for `clinrl engine`, 256 or more; those of the model if fewer."""
    at_once: int = Field(default=64, ge=1, le=1024)
    """Most requests under way, 1 to 1,024."""
    timeout_s: Count = 600
    """Seconds after which a request that has no answer is given up."""

    @model_validator(mode="after")
    def _is_private(self) -> "Vllm":
        if self.url is None:
            return self
        with suppress(ValueError):
            parts = urlsplit(self.url)
            is_private = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
            is_bare = parts.path in ("", "/") and not (parts.query or parts.fragment or "@" in parts.netloc)
            if parts.hostname and parts.port != 0 and is_private and is_bare:
                return self
        raise refusal("must be http://127.0.0.1:PORT, or https://HOST:PORT; neither names nor keys go into it", "url")


class Machine(Section):
    """The settings of this machine. They apply only at the full scale: embedded bytes depend on params."""

    micro_batch: Count | None = None
    """Most rows of a training step that are computed at once; null: the recipe's micro_batch. A step takes the largest
    divisor of its rows that is not above it. The loss bnpo depends on the number, so such a recipe keeps its own."""
    exam_tokens: int | None = Field(default=None, ge=64)
    """Most tokens, padding included, for which completions are written at once, in an exam, by a judge and in a
    training; 64 or more, null: 32,768 in an exam, 16,384 by a judge, a step's completions together in a training."""
    gpu: int | None = Field(default=None, ge=0)
    """The one GPU that a training or an exam uses, by its place among the visible ones, from 0; null: the first."""
    sampler: Literal["transformers", "vllm"] = "transformers"
    """Who writes completions in exams, in GRPO and in rejection sampling; vllm: the server that `vllm` describes. It
    stands in the manifests of answers and adapters."""
    vllm: Vllm = Vllm()
    """The vLLM server."""
    processes: Count = 1
    """Processes of a training on this machine, which share the rows of each step; one a GPU, the first visible ones."""
    try_anyway: bool = False
    """Whether a training starts although the estimate of `clinrl doctor` says that it does not fit."""

    @model_validator(mode="after")
    def _fits(self) -> "Machine":
        if self.gpu is not None and self.processes > 1:
            raise refusal(f"is {self.gpu}, but {self.processes} processes take a GPU each; leave out gpu", "gpu")
        return self

    def rows_at_once(self, trainer: dict[str, Any], sequences: int) -> int | None:
        """The rows that a process computes at once in a training step of `sequences` rows; None: all of its share.

        Raises ParamsError if the processes cannot share the step evenly.
        """
        own: int | None = trainer["micro_batch"]
        share, rest = divmod(sequences, self.processes)
        if rest:
            raise ParamsError(
                f"{FILE}: {self.processes} processes cannot share the {sequences} rows of a training step evenly; "
                f"take a divisor of {sequences}"
            )
        if trainer.get("loss_type") != "bnpo":
            most = self.micro_batch or own
            return most and max(rows for rows in range(1, share + 1) if share % rows == 0 and rows <= most)
        if own and share % own:
            raise ParamsError(
                f"{FILE}: {self.processes} processes have {share} rows of a training step each, which {own} rows at "
                "once do not divide; take fewer processes, since the loss bnpo depends on the rows at once"
            )
        return own


def read_machine(path: Path = Path(FILE)) -> Machine:
    """The settings in machine.yaml, or the defaults without that file. Raises ParamsError if one does not fit."""
    from clinrl.config.plain_yaml import read_yaml  # here, since a registered model imports this without a YAML library

    content = read_yaml(path) if path.exists() else None
    try:
        return Machine.model_validate({} if content is None else content)
    except ValidationError as error:
        raise ParamsError(f"{path}: {sentence(error, Machine)}") from None


def machine_at(scale: Scale) -> Machine:
    """The settings that hold at a scale: at the embedded one the defaults, since others would give other bytes."""
    return read_machine() if scale == "full" else Machine()


def sequences_of(trainer: dict[str, Any]) -> int:
    """The number of rows in an optimiser step of a resolved trainer."""
    return int(trainer["batch"] if "batch" in trainer else trainer["prompts"] * trainer["group"])
