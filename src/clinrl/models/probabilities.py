"""The probabilities that a model gives the answers of a task, at the place of the answer in its own transcript.

They are kept while the transcript is written: reading the prompts again takes up to a third of an exam on a CPU.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LogitsProcessor

from clinrl.models.chat import encode, opens, render, write_turn
from clinrl.tasks.base import Task
from clinrl.tasks.parts import Ordered
from clinrl.types import Case, Graded, Unreadable, last_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Watch(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Keeps the probabilities of the answers after each token that may end the answer's prefix, while a model writes.

    Nothing is kept, and so no threshold is reported, if an answer is not a single token of the tokenizer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", ordered: Ordered) -> None:
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        prefix, answers = ordered.prefix, [str(answer) for answer in ordered.answers]
        ends = [token for token, text in enumerate(texts) if text and (text.endswith(prefix) or prefix.endswith(text))]
        # The token as the tokenizer writes it after the prefix: a vocabulary may also hold its text as a bare byte.
        words = [ids[-1] for ids in encode(tokenizer, [prefix + answer for answer in answers])]
        are_words = [texts[word] for word in words] == answers
        self.tokenizer, self.prefix = tokenizer, prefix
        self.words = words if are_words else []
        self.ends = torch.tensor(ends if are_words else [])
        self.kept: dict[str, tuple[float, ...]] = {}
        """Probabilities by the text of prompt and turn so far, given that an answer follows: they sum to 1."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (B, V) unchanged; `input_ids` are the tokens before them (B, T), with padding anywhere."""
        for row in torch.isin(input_ids[:, -1], self.ends.to(input_ids)).nonzero()[:, 0]:
            tokens = input_ids[row][input_ids[row] != self.tokenizer.pad_token_id].tolist()
            self.kept[self._text(tokens)] = tuple(scores[row, self.words].double().softmax(-1).tolist())
        return scores

    def take(self) -> dict[str, tuple[float, ...]]:
        """Return the probabilities kept so far, and forget them."""
        kept, self.kept = self.kept, {}
        return kept

    def read(
        self, task: Task, cases: Sequence[Case], graded: Sequence[Graded], *, thinking: bool
    ) -> list[tuple[float, ...] | None]:
        """The probabilities of the ordered answers, one row a case.

        None where the answer is unreadable, or where no line begins with exactly the prefix and the answer.
        """
        prompts = [render(self.tokenizer, task.prompt(case.facts), thinking) for case in cases]
        texts = [self._before(line, thinking) for line in graded]
        whole = [prompt + (text or "") for prompt, text in zip(prompts, texts, strict=True)]
        found = [self.kept.get(self._text(tokens)) for tokens in encode(self.tokenizer, whole)]
        return [row if text else None for row, text in zip(found, texts, strict=True)]

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _before(self, line: Graded, thinking: bool) -> str | None:
        turn = last_turn(line.transcript)
        found = re.search(rf"^{re.escape(self.prefix)}(?={re.escape(str(line.answer))})", turn.content, re.MULTILINE)
        if isinstance(line.answer, Unreadable) or found is None:
            return None
        before = turn.model_copy(update={"content": turn.content[: found.end()]})
        return write_turn(before, thinking, is_opened=opens(self.tokenizer, thinking))
