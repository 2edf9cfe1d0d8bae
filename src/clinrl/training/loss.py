"""The GRPO loss without what cannot change its gradient: dead rows are left out, and a shared prompt is computed once.

A row is dead when its advantage is exactly 0 and no KL term applies, as in a group whose completions all earn the same.
The loss itself stays TRL's: it is given scores of the full shape, in which a dead row has no gradient, so that every
loss type, mask and normaliser is what it was. At the first step of a run both ways are computed and compared.

Shapes: B rows of a micro-batch, P tokens of the padded prompts, T of the padded completions, N distinct live rows,
G distinct prompts among these.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from trl import GRPOTrainer

AGREES, LOSS_GAP, GRADIENT_GAP = "loss_path/agrees", "loss_path/loss_gap", "loss_path/gradient_gap"
"""Logged where the shared path is asked for: whether it agreed with TRL's, and at the step of the check by how much."""
TOLERANCE = 1e-4
"""Allowed differences of loss and gradient, relative."""
BFLOAT16_TOLERANCE = 6e-2
"""The same in bfloat16: its rounding alone moves TRL's gradient by 0.02 from float32's, and by 0.06 in one batch of
ten, on tiny models; the shared path's is as far from it."""


@dataclass(frozen=True)
class Scores:
    """What TRL reads of a forward with its fused head: (B, T) each."""

    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class LiveRows:
    """A causal language model, to be called by TRL's loss in its place, that computes the distinct live rows alone."""

    model: Any
    """With TRL's fused head, and PEFT around it or not."""
    live: Tensor
    """(B,), whether a row can change the gradient."""
    mask: Tensor
    """(B, T), the tokens that the loss covers."""
    old: Tensor | None = None
    """(B, T), log-probabilities at sampling, where TRL holds them: a dead row has these, and so a ratio of 1."""
    share_prompts: bool = True

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Scores:
        """Score the completions, given tokens and mask of whole rows (B, P + T).

        Entropies of dead rows are the mean of the live tokens' (NaN where no row is live), so that TRL logs that mean.
        """
        length = self.mask.size(1)
        places = self.live.nonzero()[:, 0]
        log_probs = self.mask.new_zeros(self.mask.shape, dtype=torch.float32) if self.old is None else self.old
        if not len(places):
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            zero = torch.stack([parameter.sum() * 0 for parameter in trained]).sum()  # a gradient of zeros for each
            return Scores(log_probs + zero, torch.full_like(log_probs, torch.nan))
        (ids, mask), rows = distinct(input_ids[places], attention_mask[places])
        used = mask.any(0).nonzero()[:, 0]
        start, end = min(int(used[0]), ids.size(1) - length - 1), max(int(used[-1]) + 1, ids.size(1) - length + 1)
        unused = ids.size(1) - end
        found = score(
            self.model, ids[:, start:end], mask[:, start:end], length - unused, share_prompts=self.share_prompts
        )
        log_p, entropy = (pad(value, (0, unused))[rows].float() for value in (found.log_probs, found.entropy))
        covered = self.mask[places]
        mean = (entropy * covered).sum() / covered.sum()
        return Scores(
            log_probs.index_copy(0, places, log_p),
            mean.detach().expand(self.mask.shape).index_copy(0, places, entropy),
        )


def score(model: Any, ids: Tensor, mask: Tensor, length: int, *, share_prompts: bool) -> Scores:
    """Log-probabilities and entropies (N, T) of the last `length` tokens of rows (N, P + T), left-padded.

    With `share_prompts`, rows with the same prompt share its keys and values: all of the prompt but its last token is
    computed once, with gradient; the last token stands at the head of each completion, whose first token it predicts.
    """
    shared = ids.size(1) - length - 1
    (prompts, prompts_mask), of = distinct(ids[:, :shared], mask[:, :shared]) if shared else ((ids, mask), None)
    cache = None
    if share_prompts and len(prompts) < len(ids):
        cache = DynamicCache(config=model.config)
        model(input_ids=prompts, attention_mask=prompts_mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_select_indices(of)
        ids = ids[:, shared:]
    labels = ids.masked_fill(mask[:, -ids.size(1) :] == 0, -100)
    labels[:, :-length] = -100
    found = model(
        input_ids=ids[:, :-1],
        attention_mask=mask[:, :-1],
        past_key_values=cache,
        shift_labels=labels[:, 1:],
        fused_lm_head=True,
    )
    return Scores(found.log_probs[:, -length:], found.entropy[:, -length:])


def distinct(ids: Tensor, mask: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The distinct rows of tokens and mask in one order for all machines, and which of them each row is."""
    rows, of = torch.unique(torch.cat([ids, mask], dim=1), dim=0, return_inverse=True)
    tokens, seen = rows.chunk(2, dim=1)
    return (tokens, seen), of


class SharedLossTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's trainer with a second way to its loss."""

    loss_path: Literal["stock", "shared"] = "stock"
    """What the recipe asks for."""
    agrees: bool | None = None
    """Whether the shared path gave TRL's loss and gradient; None before the first step that has a gradient."""
    _metrics: dict[str, Any]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.loss_path == "stock":
            return self._stock_loss(model, inputs)
        advantages = inputs["advantages"]
        live = torch.ones_like(advantages, dtype=torch.bool) if self.beta else advantages != 0
        if self.agrees is None:
            self.agrees = next((entry[AGREES] > 0 for entry in self.state.log_history if AGREES in entry), None)
        if self.agrees is None and live.any():
            self.agrees = self._check(model, inputs, live)
        if self.agrees is not None:
            self._metrics["train"][AGREES].append(float(self.agrees))
        return self._stock_loss(model if self.agrees is False else self._live(model, inputs, live), inputs)

    def _stock_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    def _live(self, model: Any, inputs: dict[str, Any], live: Tensor) -> LiveRows:
        mask = inputs["completion_mask"]
        return LiveRows(
            model,
            live,
            mask * inputs["tool_mask"] if "tool_mask" in inputs else mask,
            inputs.get("old_per_token_logps"),
            share_prompts=self._caches(),
        )

    def _caches(self) -> bool:
        """Whether keys and values of a prompt can be shared: a cache holds them all, and keeps their gradient."""
        layers = DynamicCache(config=self.model.config).layers
        return not self.args.gradient_checkpointing and all(type(layer) is DynamicLayer for layer in layers)

    def _check(self, model: Any, inputs: dict[str, Any], live: Tensor) -> bool:
        """Compare both ways on a micro-batch, and say so on stderr if the stock one is gone on with, or in part."""
        if self.accelerator.num_processes > 1:
            _say("several processes must take the same forward passes, so the training goes on with TRL's loss")
            return False
        logged = self._metrics
        self._metrics = {mode: defaultdict(list) for mode in logged}
        try:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            losses, gradients = [], []
            for way in (model, self._live(model, inputs, live)):
                loss = self._stock_loss(way, inputs)
                losses.append(loss.item())
                gradients.append(torch.autograd.grad(loss, trained))
        finally:
            self._metrics = logged
        gaps = {LOSS_GAP: _gap_of_losses(*losses), GRADIENT_GAP: _gap_of_gradients(*gradients)}
        for name, gap in gaps.items():
            self._metrics["train"][name].append(gap)
        allowed = BFLOAT16_TOLERANCE if self.args.bf16 or self.model.dtype is torch.bfloat16 else TOLERANCE
        if not all(gap <= allowed for gap in gaps.values()):
            _say(
                f"the shared loss path differs from TRL's at step {self.state.global_step + 1} (loss by "
                f"{gaps[LOSS_GAP]:.2g}, gradient by {gaps[GRADIENT_GAP]:.2g}, allowed {allowed:g}), so the training "
                "goes on with TRL's loss"
            )
            return False
        if not self._caches():
            _say("prompts cannot be shared (gradient checkpointing, or layers without keys); dead groups are skipped")
        return True

    def loss_record(self) -> dict[str, Any]:
        """Which way was asked for and which was used (live: dead rows left out, no prompt shared), with the gaps."""
        used = "stock" if not self.agrees else "shared" if self._caches() else "live"
        found: dict[str, Any] = next((entry for entry in self.state.log_history if GRADIENT_GAP in entry), {})
        return {
            "asked": self.loss_path,
            "used": used,
            "loss_gap": found.get(LOSS_GAP),
            "gradient_gap": found.get(GRADIENT_GAP),
        }


def _gap_of_losses(stock: float, ours: float) -> float:
    """Relative to the loss or, where that is near 0 as by construction in a group, to a normalised advantage, 1."""
    return abs(ours - stock) / max(abs(stock), 1.0)


def _gap_of_gradients(stock: tuple[Tensor, ...], ours: tuple[Tensor, ...]) -> float:
    """The largest difference over the largest entry."""
    largest = max(float(gradient.abs().max()) for gradient in stock)
    gap = max(float((a - b).abs().max()) for a, b in zip(stock, ours, strict=True))
    return gap / largest if largest else float(gap > 0)


def _say(sentence: str) -> None:
    print(f"clinrl: {sentence}", file=sys.stderr, flush=True)
