"""machine.yaml: how much this machine computes at once, and in how many processes.

It lies beside params.yaml, outside git, and may be absent. No key enters a digest or a DVC parameter, so what is set
here keeps checkpoints and makes nothing stale.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from clinrl.config.base import Count, Scale, Section, Text, refusal, sentence
from clinrl.config.plain_yaml import read_yaml
from clinrl.errors import ParamsError

FILE = "machine.yaml"
Words = Annotated[tuple[Text, ...], Field(strict=False, min_length=1)]


class Machine(Section):
    """What fits this machine. All but `gpu` holds at the full scale alone: embedded bytes follow from params.yaml."""

    micro_batch: Count | None = None
    """Most rows of a training step that are computed at once; null: the recipe's micro_batch. A step takes the largest
    divisor of its rows that is not above it. The loss bnpo depends on the number, so such a recipe keeps its own."""
    exam_tokens: int | None = Field(default=None, ge=64)
    """Most tokens, padding included, for which completions are written at once, in an exam, by a judge and in a
    training; 64 or more, null: 32,768 in an exam, 16,384 by a judge, a step's completions together in a training."""
    gpu: int | None = Field(default=None, ge=0)
    """The one GPU that a training is shown, by its place among the visible ones, from 0; null: the first."""
    processes: Count = 1
    """Processes that train a version together, one a GPU, on all machines together. The rows of a step are shared."""
    launcher: Words | None = None
    """What starts these processes on several machines, as the words of a command that `-m`, a module and its file
    follow; null: torchrun on this machine, or for one process nothing."""
    try_anyway: bool = False
    """Whether a training starts although the estimate of `clinrl doctor` says that it does not fit."""

    @model_validator(mode="after")
    def _shows(self) -> "Machine":
        if self.gpu is not None and (self.processes > 1 or self.launcher):
            raise refusal("is set, and shows a training one GPU, while processes share all that are visible", "gpu")
        return self

    def rows_at_once(self, trainer: dict[str, Any], sequences: int, scale: Scale) -> int | None:
        """Rows of a training step of `sequences` that are computed at once; None: all of them."""
        own: int | None = trainer["micro_batch"]
        if scale == "embedded" or self.micro_batch is None or trainer.get("loss_type") == "bnpo":
            return own
        return max(rows for rows in range(1, sequences + 1) if sequences % rows == 0 and rows <= self.micro_batch)


def read_machine(path: Path = Path(FILE)) -> Machine:
    """The record of machine.yaml; that of defaults if there is none. Raises ParamsError as `load_params`."""
    content = read_yaml(path) if path.exists() else None
    try:
        return Machine.model_validate({} if content is None else content)
    except ValidationError as error:
        raise ParamsError(f"{path}: {sentence(error, Machine)}") from None


def sequences_of(trainer: dict[str, Any]) -> int:
    """Rows of one optimiser step of a resolved trainer."""
    return int(trainer["batch"] if "batch" in trainer else trainer["prompts"] * trainer["group"])
