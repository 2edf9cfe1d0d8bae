"""Log-probabilities of completions, with gradient, without repeated or unused computation.

Rows that the caller does not need are skipped, equal rows are computed once, and so is a prompt that rows share.
Shapes: B rows of a batch, P tokens of the padded prompts, T of the padded completions, N distinct rows that are used.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from clinrl.models.cache import distinct

TOGETHER = 8192
"""Most tokens in a forward pass, padding included. Larger batches are split into parts of rows of similar length."""
TAUGHT_TOGETHER = 2048
"""The same for supervised fine-tuning. Its rows share no prompt, so smaller parts cost nothing and save padding."""


@dataclass(frozen=True)
class Scores:
    """The outputs that TRL reads from a forward pass with its fused head, each (B, T)."""

    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class LiveRows:
    """A stand-in for a causal language model in TRL's loss. It computes only the distinct live rows."""

    model: Any
    """The model, with TRL's fused head, with or without PEFT around it."""
    live: Tensor
    """(B,), whether a row can change the gradient."""
    mask: Tensor
    """(B, T), the tokens that the loss covers."""
    old: Tensor | None = None
    """(B, T), log-probabilities at sampling, if TRL has them. Dead rows get them as theirs, and so a ratio of 1."""
    share_prompts: bool = True
    entropy: list[Tensor] = field(default_factory=list)
    """For each call, the sum of the entropies over live tokens, and the number of these tokens."""

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Scores:
        """Score the completions, given the tokens and the mask of whole rows (B, P + T).

        Dead rows get the mean entropy of the live tokens (NaN if no row is live), so that TRL logs that mean.
        """
        length = self.mask.size(1)
        places = self.live.nonzero()[:, 0]
        log_probs = self.mask.new_zeros(self.mask.shape, dtype=torch.float32) if self.old is None else self.old
        if not len(places):
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            zero = torch.stack([parameter.sum() * 0 for parameter in trained]).sum()  # a gradient of zeros for each
            self.entropy.append(log_probs.new_zeros(2))
            return Scores(log_probs + zero, torch.full_like(log_probs, torch.nan))
        (ids, mask), rows = distinct(input_ids[places], attention_mask[places])
        by_length = mask[:, -length:].sum(1).argsort(stable=True)
        parts = _parts(by_length, ids.size(1), TOGETHER)
        scored = [self._part(ids[part], mask[part], length) for part in parts]
        order = by_length.argsort()[rows]
        log_p, entropy = (torch.cat(values)[order].float() for values in zip(*scored, strict=True))
        covered = self.mask[places]
        total, count = (entropy * covered).sum(), covered.sum()
        self.entropy.append(torch.stack([total, count]).detach())
        mean = total / count
        return Scores(
            log_probs.index_copy(0, places, log_p), mean.detach().expand(self.mask.shape).index_copy(0, places, entropy)
        )

    def _part(self, ids: Tensor, mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (N, T) of some rows (N, P + T). Columns that no row uses are skipped."""
        used = mask.any(0).nonzero()[:, 0]
        start, end = min(int(used[0]), ids.size(1) - length - 1), max(int(used[-1]) + 1, ids.size(1) - length + 1)
        unused = ids.size(1) - end
        found = score(
            self.model, ids[:, start:end], mask[:, start:end], length - unused, share_prompts=self.share_prompts
        )
        return pad(found.log_probs, (0, unused)), pad(found.entropy, (0, unused))


def score(model: Any, ids: Tensor, mask: Tensor, length: int, *, share_prompts: bool) -> Scores:
    """Log-probabilities and entropies (N, T) of the last `length` tokens of left-padded rows (N, P + T).

    With `share_prompts`, rows with the same prompt share its keys and values: all but the last token of the prompt are
    computed once, with gradient. The last token is computed with each completion, since it predicts its first token.
    """
    shared = ids.size(1) - length - 1
    (prompts, prompts_mask), of = distinct(ids[:, :shared], mask[:, :shared]) if shared else ((ids, mask), None)
    cache = None
    if share_prompts and len(prompts) < len(ids):
        cache = _cached(model, prompts, prompts_mask)
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


@dataclass(frozen=True)
class ByLength:
    """A stand-in for a causal language model in TRL's loss of supervised fine-tuning. It computes rows of similar
    length together."""

    model: Any
    """The model, with TRL's fused head, with or without PEFT around it."""
    split: bool = True
    """Whether the tokens before the first learned one are computed in a separate pass, which fills a cache of keys and
    values. Otherwise TRL's head computes logits for each of them."""

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **settings: Any) -> SimpleNamespace:
        """The outputs that TRL reads for whole rows (B, T), padded on the right: the same values for each token, but
        flattened and in another order."""
        found = []
        for rows in _parts(attention_mask.sum(1).argsort(stable=True), input_ids.size(1), TAUGHT_TOGETHER):
            used = attention_mask[rows].any(0)
            ids, mask, learned = (values[rows][:, used] for values in (input_ids, attention_mask, labels))
            start = int((learned != -100).any(0).float().argmax()) - 1  # this token predicts the first learned one
            part = dict(settings)
            if self.split and start > 0:
                part["past_key_values"] = _cached(self.model, ids[:, :start], mask[:, :start])
                ids, learned = ids[:, start:], learned[:, start:]
            found.append(self.model(input_ids=ids, attention_mask=mask, labels=learned, **part))
        read = ("log_probs", "entropy", "is_top1", "label_mask")
        return SimpleNamespace(**{name: torch.cat([getattr(part, name).flatten() for part in found]) for name in read})


def _cached(model: Any, ids: Tensor, mask: Tensor) -> DynamicCache:
    """The keys and values of some tokens, with gradient."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def _parts(rows: Tensor, width: int, together: int) -> tuple[Tensor, ...]:
    """The row numbers in parts of at most `together` tokens, where each row has `width` tokens."""
    return torch.split(rows, max(1, together // width))
