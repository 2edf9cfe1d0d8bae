"""Evaluation of a policy on held-out cases while it trains."""

from collections.abc import Mapping
from typing import Any

import torch

from clinrl.models import memory
from clinrl.models.chat import Completion, encode, opens, read_turn, render
from clinrl.models.generate import HELD_OUT_TOKENS, LOGITS_TOGETHER, MAX_TOKENS, Prompt, Sampler, batches, shares
from clinrl.runtime import determinism
from clinrl.tasks.base import GIVEN, Task, as_variant
from clinrl.training.world import shares_threads
from clinrl.types import transcript_of

HELD_OUT_SEED = 271828
"""The seed of the held-out cases, the same for all runs, so that all versions answer the same cases."""


class HeldOut:
    """Cases of the mine pool that a policy answers while it trains, to measure how right it is and how far it moved.

    `exact` is the share of greedy answers that equal the gold label. `excess/<label>` is the share of a label among the
    answers minus its share among the gold labels. `kl` estimates the divergence from the parent in nats per token: the
    mean of r - 1 - log r over the tokens of texts that the parent sampled, encoded again, where r is the ratio of the
    policy's probability to the parent's (Schulman's low-variance estimator). Create it before training, while the model
    has the parent's weights.
    """

    def __init__(
        self, model: Any, tokenizer: Any, task: Task, spec: Mapping[str, Any], tokens: int = MAX_TOKENS
    ) -> None:
        self.tokens, self.scale = tokens, spec["scale"]
        settings = spec["trainer"]["held_out"]
        self.every: int = settings["every"]
        self.task, self.tokenizer = task, tokenizer
        drawn = task.cases(settings["cases"], HELD_OUT_SEED, pool="mine", mix=task.checks.mixes[-1])
        self.cases = [as_variant(task, case, spec.get("view", GIVEN)) for case in drawn]
        self.thinking = {mode: switch["thinking"] for mode, switch in spec["modes"].items()}
        self.budget: int = spec["trainer"]["max_completion"]
        self.is_shared = shares(spec)
        if self.scale == "embedded" and shares_threads(spec):  # before the first step, and perhaps beside an exam
            determinism.share()
        self.texts = [
            (prompt, completion.text + (tokenizer.eos_token if completion.stop == "answered" else ""))
            for thinking in self.thinking.values()
            for prompt, completion in zip(self._prompts(thinking), self._sample(model, thinking, 1.0), strict=True)
        ]
        self.before = self._log_probabilities(model)

    def look(self, model: Any) -> dict[str, float]:
        """The metrics of the policy as it is now."""
        answers = [
            self.task.parse(transcript_of(read_turn(completion.text, opens(self.tokenizer, thinking))))
            for thinking in self.thinking.values()
            for completion in self._sample(model, thinking, 0.0)
        ]
        golds = [self.task.label(case) for case in self.cases] * len(self.thinking)
        exact = sum(answer == gold for answer, gold in zip(answers, golds, strict=True)) / len(golds)
        excess = {
            f"excess/{label}": (sum(answer == label for answer in answers) - golds.count(label)) / len(golds)
            for label in self.task.labels
        }
        change = self._log_probabilities(model) - self.before
        return excess | {"exact": exact, "kl": float((change.exp() - 1 - change).mean())}

    def _prompts(self, thinking: bool) -> list[str]:
        return [render(self.tokenizer, self.task.prompt(case.facts), thinking) for case in self.cases]

    def _sample(self, model: Any, thinking: bool, temperature: float) -> list[Completion]:
        prompts = [Prompt(case.id, self.task.prompt(case.facts)) for case in self.cases]
        sampler = Sampler(
            model, self.tokenizer, max_tokens=self.tokens, shared=self.is_shared, scale=self.scale, place="generation"
        )
        return sampler.sample(
            prompts, thinking=thinking, temperature=temperature, budget=self.budget, seed=HELD_OUT_SEED
        )

    def _log_probabilities(self, model: Any) -> torch.Tensor:
        """The log-probabilities of all tokens that the parent wrote, in one dimension."""
        prompts, written = (encode(self.tokenizer, list(texts)) for texts in zip(*self.texts, strict=True))
        found = []
        was_training = model.training
        model.eval()
        try:
            with torch.inference_mode():
                lengths = [len(p) + len(w) for p, w in zip(prompts, written, strict=True)]
                words = int(model.config.get_text_config().vocab_size)
                at_once = min(HELD_OUT_TOKENS, self.tokens, LOGITS_TOGETHER // words)
                for batch in batches(lengths, 0, at_once):
                    rows = [torch.tensor(prompts[i] + written[i], device=model.device) for i in batch]
                    ids = torch.nn.utils.rnn.pad_sequence(
                        rows, batch_first=True, padding_value=self.tokenizer.pad_token_id
                    )
                    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
                    remedy = memory.fewer_tokens(self.scale, len(rows), ids.shape[1])
                    with memory.place("a held-out check", remedy):
                        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
                        picked = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
                    for place, i in enumerate(batch):
                        first = len(prompts[i]) - 1
                        found.append(picked[place, first : first + len(written[i])].cpu())
        finally:
            model.train(was_training)
        return torch.cat(found)
