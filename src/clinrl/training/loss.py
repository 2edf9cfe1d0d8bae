"""The shared path: a second way to compute TRL's losses, without computation that cannot change their gradient.

In SFT and GRPO, rows of similar length are computed together, so that there is little padding, and the head computes no
logits for prompts. In GRPO, dead rows are also skipped, and a shared prompt is computed once. A row is dead when its
advantage is exactly 0 and no KL term applies, as in a group whose completions all have the same reward. The loss is
still TRL's: it gets scores in which a dead row has no gradient, so each loss type, mask and normaliser works as before.
At the first step that has a gradient, the shared path is compared with TRL's own, the stock path.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOTrainer, SFTTrainer

from clinrl.config.base import Scale
from clinrl.errors import TrainingError, echo
from clinrl.models import memory
from clinrl.models.cache import is_plain
from clinrl.models.decoding import Rows, complete, complete_turn, folded, numbered, write
from clinrl.training.scores import ByLength, LiveRows
from clinrl.training.world import ALONE, World

AGREES, LOSS_GAP, GRADIENT_GAP = "loss_path/agrees", "loss_path/loss_gap", "loss_path/gradient_gap"
"""Metrics of a recipe with the shared path: whether it agrees with TRL's, and at the step of the check by how much."""
ROUNDING = "loss_path/rounding"
"""Logged if the gradients differ by more than `BFLOAT16_TOLERANCE`: how far TRL's gradient moves under more padding."""
TOLERANCE = 1e-4
"""Allowed relative differences of loss and gradient."""
BFLOAT16_TOLERANCE = 6e-2
"""The same in bfloat16. Its rounding alone moves TRL's gradient of a tiny model by 0.02 from that in float32 (median),
and by 0.06 in one batch of ten. The shared path's gradient is as far from it. Deep models round more often: with 32
layers of random weights the gradient moves by 0.1. So a larger difference is compared with `ROUNDING`."""
PADDING = 24
"""Columns of padding that are added for it. Attention then sums in other blocks, so values change by rounding alone."""
ROUNDED = 2.0
"""The gradients may differ by this many times `ROUNDING`. In twenty batches over 32 layers of random weights they
differed by at most 1.1 times as much, and by 0.5 in the median."""

GRID = 2.0**14
"""At full scale, rewards are rounded to multiples of 1 / GRID, so that sums of up to 16 rewards below 64 are exact."""
CANCELLED = 1e-7
"""A gradient without any entry this large says nothing: rounding leaves as much where equal completions cancel out."""


class Checked:
    """A trainer of TRL with the shared path, which is used only if it gives TRL's loss and gradient."""

    loss_path: Literal["stock", "shared"] = "stock"
    """The path that the recipe requests."""
    least_loss: float
    """The difference of the losses is relative to the loss, or to this value if the loss is smaller."""
    agrees: bool | None = None
    """Whether the shared path gave TRL's loss and gradient. None until a step has had a gradient."""
    world: World = ALONE
    """The processes that share a step."""
    aux_loss_enabled: bool
    """Whether TRL adds the auxiliary loss of a mixture of experts. That covers whole batches, so TRL's path is used."""
    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    state: Any
    _metrics: dict[str, Any]

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write no card: `model_card` does."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load an optimizer's state as memory that is not paged.

        bitsandbytes saves paged state marked as such, and several processes read it into memory that is not.
        """
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        for state in self.optimizer.state.values() if checkpoint else ():
            for tensor in filter(torch.is_tensor, state.values()):
                tensor.__dict__.pop("is_paged", None)

    def _save_rng_state(self, output: str) -> None:
        # Process 0 seals the checkpoint as soon as it has written it. The generators of other processes only decide
        # which of their rows share a micro-batch; a loss that counts tokens in one (bnpo) so differs after a resume.
        if self.accelerator.is_main_process:
            super()._save_rng_state(output)  # type: ignore[misc]  # of the trainer

    def _way(self, model: Any, ours: Any, loss_of: Callable[[Any], Tensor], *, has_gradient: bool = True) -> Any:
        """The model that TRL's loss calls for a micro-batch: `model`, or `ours`, the stand-in of the shared path.

        `loss_of` computes the loss with either. Without `has_gradient`, no path gives the micro-batch a gradient. Of
        several processes, each compares its own micro-batch, and all take the same path.
        """
        if self.agrees is None:  # a run that continues keeps its path
            self.agrees = next((entry[AGREES] > 0 for entry in self.state.log_history if AGREES in entry), None)
        if self.agrees is None and self.world.any(has_gradient):
            self.agrees = self._check((self.accelerator.unwrap_model(model), ours), loss_of)
        if self.agrees is not None:
            self._metrics["train"][AGREES].append(float(self.agrees))
        # Ours gives no entropy without a gradient, and one process's NaN would be everybody's mean.
        if not self.agrees and (has_gradient or (self.agrees is False and self.world.size > 1)):
            return model
        return ours if self.world.size == 1 else partial(inside, model, ours)

    def _check(self, ways: Sequence[Any], loss_of: Callable[[Any], Tensor]) -> bool | None:
        """Compare both paths on a micro-batch of each process; None if TRL's gradients are too small for that.

        If the shared path cannot be used, a line on stderr says so.
        """
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

        def gradient_of(way: Any) -> tuple[list[Tensor], tuple[Tensor, ...]]:
            logged = self._metrics
            self._metrics = {mode: defaultdict(list) for mode in logged}
            try:
                loss = loss_of(way)
                return [loss.detach()], torch.autograd.grad(loss, trained)
            finally:
                self._metrics = logged

        losses, gradients = zip(*map(gradient_of, ways), strict=True)
        has_gradient = max(float(entry.abs().max()) for entry in gradients[0]) >= CANCELLED
        here = [largest_gap(losses[0], losses[1], self.least_loss), largest_gap(gradients[0], gradients[1])]
        rounds = self.args.bf16 or self.model.dtype is torch.bfloat16
        allowed = BFLOAT16_TOLERANCE if rounds else TOLERANCE
        names = [LOSS_GAP, GRADIENT_GAP]
        if self.world.any(rounds and has_gradient and not here[1] <= allowed):
            names.append(ROUNDING)
            here.append(largest_gap(gradients[0], gradient_of(partial(padded, ways[0]))[1]))
        found = self.world.gathered([here] if has_gradient else [])
        if not found:
            return None
        # By torch: if one of several gaps is NaN, so is the largest.
        largest: list[float] = torch.tensor(found).max(0).values.tolist()
        gaps = dict(zip(names, largest, strict=True))
        for name, gap in gaps.items():
            self._metrics["train"][name].append(gap)
        allowed = max(allowed, ROUNDED * gaps.get(ROUNDING, 0.0))
        agrees = gaps[LOSS_GAP] <= allowed and gaps[GRADIENT_GAP] <= allowed
        if not agrees and self.world.is_main:
            echo(
                f"the shared loss path differs from TRL's at step {self.state.global_step + 1} (loss by "
                f"{gaps[LOSS_GAP]:.2g}, gradient by {gaps[GRADIENT_GAP]:.2g}, allowed {allowed:g}), so the training "
                "goes on with TRL's loss"
            )
        return agrees

    def loss_record(self) -> dict[str, Any]:
        """The requested and the used path, and the gaps. live: dead rows are left out, but no prompt is shared."""
        ways = {entry[AGREES] > 0 for entry in self.state.log_history if AGREES in entry} or {self.agrees}
        used = self._shares() if True in ways else "stock"
        gaps: dict[str, Any] = next((entry for entry in self.state.log_history if GRADIENT_GAP in entry), {})
        names = (LOSS_GAP, GRADIENT_GAP, *((ROUNDING,) if ROUNDING in gaps else ()))
        found = {name.split("/")[1]: gaps.get(name) for name in names}
        return {"requested": self.loss_path, "used": used, **found}

    def _shares(self) -> str:
        return "shared"


class CheckedSFTTrainer(Checked, SFTTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's trainer of supervised fine-tuning with the shared path."""

    least_loss = 0.0
    _total_train_tokens: float

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        """The loss of a micro-batch, by the shared path if it agrees with TRL's."""
        compute = super().compute_loss
        if self.loss_path == "stock" or self.aux_loss_enabled:
            return compute(model, inputs, *arguments, **named)
        counted = self._total_train_tokens
        rows = ByLength(self.accelerator.unwrap_model(model), split=keeps_cache(self))
        way = self._way(model, rows, lambda way: compute(way, inputs, *arguments, **named))
        self._total_train_tokens = counted  # the comparison may have counted the batch too
        return compute(way, inputs, *arguments, **named)


class SharedLossTrainer(Checked, GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's trainer of GRPO with the shared path for its loss, and another for its completions."""

    least_loss = 1.0  # a normalised advantage: the loss of a group is near 0 by construction
    generation_path: Literal["stock", "shared"] = "stock"
    """The path that the recipe requests for completions."""
    scale: Scale = "embedded"
    turn_tokens: int | None = None
    """Most tokens of one turn of an episode; None: the rest of the episode's budget."""
    most_tokens: int | None = None
    """Most tokens, prompts and padding included, of the rows that are generated together; None: all rows of a step."""
    seed: int | None = None
    """With a seed, a token is drawn by its step, row and place, so that it does not depend on the number of processes.
    None: torch's generator draws it."""
    _turn: Rows | None = None
    """The tokens, and the keys and values, of the step's episodes so far."""
    _openings: Sequence[Sequence[int]] | None = None
    """The distinct opening prompts of these episodes, the longest first."""
    open_rows: Sequence[tuple[int, Sequence[int]]] = ()
    """With a seed, the rows of the step whose episodes may continue, and the tokens of each."""
    turns: int = 0
    """With a seed, the number of turns that the step has begun."""

    def _calculate_rewards(self, *arguments: Any) -> Tensor:
        # In float32 the mean of eight rewards of -0.8 is not -0.8, so a group of equal rewards had an advantage. At the
        # embedded scale it still has, since the bytes of adapters trained there must stay the same.
        found: Tensor = super()._calculate_rewards(*arguments)
        return found if self.scale == "embedded" else (found * GRID).round() / GRID

    def _generate(self, prompts: list[Any]) -> Any:
        if self.seed is not None:
            first = self.accelerator.process_index * len(prompts)
            self.open_rows, self.turns = [(first + place, ()) for place in range(len(prompts))], 0
        try:
            return super()._generate(prompts)
        finally:
            self._turn = self._openings = None

    def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **named: Any) -> Any:
        """Completions of prompts, in parts whose padded size fits `most_tokens` if that is set.

        Raises OutOfMemory, which names the setting to change.
        """
        if self.seed is not None:
            self.open_rows, self.turns = continued_rows(self.open_rows, prompt_ids), self.turns + 1
        if self.use_vllm:  # the engine itself limits the requests that run at once
            whole: Any = super()._generate_single_turn(prompt_ids, *arguments, **named)
        else:
            whole = self._in_parts(prompt_ids, *arguments, **named)
        if self.seed is not None:
            turns = zip(self.open_rows, prompt_ids, whole[0], strict=True)
            self.open_rows = [(row, [*prompt, *written]) for (row, _), prompt, written in turns]
        return whole

    def _in_parts(self, prompt_ids: Any, *arguments: Any, **named: Any) -> Any:
        budget = self.turn_budget(prompt_ids)
        width, rows = max(map(len, prompt_ids)) + budget, len(prompt_ids)
        # A turn that continues the rows which the previous one left in memory cannot be split.
        keeps_rows = self.generation_path != "stock" and bool(self.tools)
        if self.most_tokens is not None and not keeps_rows:
            rows = max(1, min(rows, self.most_tokens // width))
        parts, numbers = [], None
        if self.seed is not None:
            numbered_rows = [row for row, _ in self.open_rows]
            numbers = numbered(self.seed, self.state.global_step, self.turns, numbered_rows, self.max_completion_length)
        if self.tools:
            self.generation_config.max_new_tokens = budget
        for first in range(0, len(prompt_ids), rows):
            some = None if numbers is None else numbers[first : first + rows]
            with memory.place("generation", memory.fewer_tokens(self.scale, 1 if keeps_rows else rows, width)):
                parts.append(self._generate_part(some, prompt_ids[first : first + rows], *arguments, **named))
        return parts[0] if len(parts) == 1 else tuple(_joined(some) for some in zip(*parts, strict=True))

    def turn_budget(self, prompt_ids: Sequence[Sequence[int]]) -> int:
        """The most tokens that are written in a turn.

        TRL requests the budget of a whole episode in each turn, and then drops the tokens that exceed it. At full scale
        a turn gets no more than the largest budget that an episode has left. An embedded recipe without `turn_tokens`
        keeps TRL's way, since dropped tokens, too, draw random numbers, on which later ones depend.
        """
        whole: int = self.max_completion_length
        if not self.tools or (self.scale == "embedded" and self.turn_tokens is None):
            return whole
        if self._openings is None:
            self._openings = sorted({tuple(ids) for ids in prompt_ids}, key=len, reverse=True)
        opened = (
            next(len(opening) for opening in self._openings or () if tuple(ids[: len(opening)]) == opening)
            for ids in prompt_ids
        )
        left = max(whole - (len(ids) - first) for ids, first in zip(prompt_ids, opened, strict=True))
        return max(1, min(self.turn_tokens or whole, left))

    def _generate_part(self, numbers: Tensor | None, *arguments: Any, **named: Any) -> Any:
        if self.generation_path == "stock" and numbers is None:
            return super()._generate_single_turn(*arguments, **named)
        model = self.accelerator.unwrap_model(self.model_wrapped)  # TRL calls `generate` of this one
        model.generate = partial(self._generated, model, numbers=numbers)
        try:
            with folded(model) if self.generation_path != "stock" else nullcontext():
                return super()._generate_single_turn(*arguments, **named)
        finally:
            del model.generate

    def _generated(
        self, model: Any, *, input_ids: Tensor, attention_mask: Tensor, generation_config: Any,
        numbers: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """The prompts, padded on the left, each followed by its completion, as `generate` of a model returns them."""
        drawn = None if numbers is None else numbers.to(input_ids.device)
        if self.generation_path == "stock":
            rows = Rows(input_ids, attention_mask, None)
            return write(model, rows, generation_config, generation_config.max_new_tokens, drawn)[0].ids
        prompts = [ids[mask > 0].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        if self.tools:
            completions, self._turn = complete_turn(model, prompts, generation_config, self._turn, numbers=drawn)
        else:
            completions = complete(model, prompts, generation_config, numbers=drawn)
        new = pad_sequence(
            [torch.tensor(row) for row in completions], batch_first=True, padding_value=generation_config.pad_token_id
        )
        return torch.cat([input_ids, new.to(input_ids.device)], 1)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        if self.loss_path == "stock" or self.aux_loss_enabled:
            return super()._compute_loss(model, inputs)
        rows = self.live_rows(model, inputs)
        compute, was = super()._compute_loss, self.agrees
        way = self._way(model, rows, lambda way: compute(way, inputs), has_gradient=bool(rows.live.any()))
        if self.agrees and not was and not rows.share_prompts and self.world.is_main:
            echo("prompts cannot be shared (gradient checkpointing, or layers without keys); dead rows are left out")
        loss = compute(way, inputs)
        if self.agrees and self.world.size > 1:  # TRL's mean is NaN for all once one process has no live row
            total, count = self.accelerator.reduce(rows.entropy[-1], reduction="sum").tolist()
            self._metrics["train"]["entropy"][-1] = total / count if count else math.nan
        return loss

    def live_rows(self, model: Any, inputs: dict[str, Any]) -> LiveRows:
        """The stand-in for the model in TRL's loss, for a micro-batch that TRL has scored."""
        advantages, mask = inputs["advantages"], inputs["completion_mask"]
        return LiveRows(
            self.accelerator.unwrap_model(model),
            live=torch.ones_like(advantages, dtype=torch.bool) if self.beta else advantages != 0,
            mask=mask * inputs["tool_mask"] if "tool_mask" in inputs else mask,
            old=inputs.get("old_per_token_logps"),
            share_prompts=keeps_cache(self),
        )

    def _shares(self) -> str:
        return "shared" if keeps_cache(self) else "live"


def padded(model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **settings: Any) -> Any:
    """The outputs of a model for rows with `PADDING` more columns on the left, which the loss does not cover."""
    ids, mask = (pad(values, (PADDING, 0)) for values in (input_ids, attention_mask))
    return model(input_ids=ids, attention_mask=mask, labels=pad(labels, (PADDING, 0), value=-100), **settings)


def inside(wrapper: Any, ours: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call `ours` as the forward of `wrapper`, which averages the gradients of several processes: it does so only for a
    backward that follows a forward of its own."""
    module = wrapper.module
    forward = module.forward

    def once(*arguments: Any, **named: Any) -> Any:
        module.forward = forward  # ours calls the module itself, perhaps several times
        return ours(*arguments, **named)

    module.forward = once
    try:
        return wrapper(*arguments, **named)
    finally:
        module.forward = forward


def keeps_cache(trainer: Any) -> bool:
    """Whether a prompt can be computed separately: a cache then holds its keys and values with their gradient."""
    return not trainer.args.gradient_checkpointing and is_plain(trainer.model)


def largest_gap(stock: Sequence[Tensor], ours: Sequence[Tensor], least: float = 0.0) -> float:
    """The largest difference, divided by the largest entry of `stock` or by `least` if that is larger; NaN if either
    side has a NaN."""
    largest = torch.stack([entry.abs().max() for entry in stock]).max().clamp(min=least)
    gap = torch.stack([(a - b).abs().max() for a, b in zip(stock, ours, strict=True)]).max()
    return float(gap / largest) if gap != 0 else 0.0


def continued_rows(
    before: Sequence[tuple[int, Sequence[int]]], prompts: Sequence[Sequence[int]]
) -> list[tuple[int, Sequence[int]]]:
    """The rows of the previous turn, `before`, that the prompts of a turn continue; each with its tokens.

    Both are in the same order, and of rows with equal tokens all continue or none does. Raises TrainingError for a
    prompt that continues no row.
    """
    rest, found = iter(before), []
    for prompt in prompts:
        row = next((row for row in rest if list(prompt[: len(row[1])]) == list(row[1])), None)
        if row is None:
            raise TrainingError("a turn of an episode does not continue the one before it: TRL's tool loop has changed")
        found.append(row)
    return found


def _joined(parts: Sequence[list[Any] | None]) -> list[Any] | None:
    """The lists of all parts as one; None if the parts are None, such as log-probabilities that were not requested."""
    return None if parts[0] is None else [entry for part in parts for entry in part or ()]
