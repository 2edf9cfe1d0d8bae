"""Log-probabilities of completions, with gradient, of which nothing is computed twice or in vain.

Rows that the caller has no use for are left out, equal rows are one, and a prompt that rows share is computed once.
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
"""Tokens that are scored together, padding included: longer batches are cut into rows of like length."""
TAUGHT_TOGETHER = 2048
"""The same in supervised fine-tuning, whose rows share no prompt: smaller parts have less padding and cost nothing."""


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
    entropy: list[Tensor] = field(default_factory=list)
    """Of each call, the sum over live tokens and their count."""

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
        """Log-probabilities and entropies (N, T) of some rows (N, P + T), without columns that none of them uses."""
        used = mask.any(0).nonzero()[:, 0]
        start, end = min(int(used[0]), ids.size(1) - length - 1), max(int(used[-1]) + 1, ids.size(1) - length + 1)
        unused = ids.size(1) - end
        found = score(
            self.model, ids[:, start:end], mask[:, start:end], length - unused, share_prompts=self.share_prompts
        )
        return pad(found.log_probs, (0, unused)), pad(found.entropy, (0, unused))


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


@dataclass(frozen=True)
class ByLength:
    """A causal language model, to be called by TRL's loss of supervised fine-tuning in its place, that computes rows of
    like length together."""

    model: Any
    """With TRL's fused head, and PEFT around it or not."""
    split: bool = True
    """Whether what comes before the first learned word is computed apart, its keys and values kept: TRL's head looks
    for a word at every token that it is given."""

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **settings: Any) -> SimpleNamespace:
        """What TRL reads of whole rows (B, T), padded on the right: the same values of each token, in one row and in
        another order."""
        found = []
        for rows in _parts(attention_mask.sum(1).argsort(stable=True), input_ids.size(1), TAUGHT_TOGETHER):
            used = attention_mask[rows].any(0)
            ids, mask, learned = (values[rows][:, used] for values in (input_ids, attention_mask, labels))
            start = int((learned != -100).any(0).float().argmax()) - 1  # where the first learned word is looked for
            part = dict(settings)
            if self.split and start > 0:
                part["past_key_values"] = cache = DynamicCache(config=self.model.config)
                self.model(
                    input_ids=ids[:, :start], attention_mask=mask[:, :start], past_key_values=cache, use_cache=True,
                    logits_to_keep=1,
                )  # fmt: skip
                ids, learned = ids[:, start:], learned[:, start:]
            found.append(self.model(input_ids=ids, attention_mask=mask, labels=learned, **part))
        read = ("log_probs", "entropy", "is_top1", "label_mask")
        return SimpleNamespace(**{name: torch.cat([getattr(part, name).flatten() for part in found]) for name in read})


def _parts(rows: Tensor, width: int, together: int) -> tuple[Tensor, ...]:
    """Numbers of rows of `width` tokens, in the parts of at most so many tokens that are computed together."""
    return torch.split(rows, max(1, together // width))
