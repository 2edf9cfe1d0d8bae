"""A function of the prompt in the place of a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from clinrl.models.chat import Completion
from clinrl.models.generate import Prompt, Sampler
from clinrl.types import Message


class ScriptedSampler(Sampler):
    """Writes what a function of the prompt returns. A token is a word here."""

    def __init__(self, reply: Callable[[Sequence[Message]], str]) -> None:
        self.reply = reply

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        thinking: bool,
        temperature: float,
        budget: int,
        seed: int,
        top_p: float = 1.0,
        progress: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        """A reply longer than the budget is cut there."""
        completions = []
        for prompt in prompts:
            text = self.reply(prompt.messages)
            words = text.split(" ")
            answered = len(words) < budget
            completions.append(
                Completion(
                    text=text if answered else " ".join(words[:budget]),
                    stop="answered" if answered else "max_tokens",
                    ids=(0,) * min(len(words) + 1, budget),
                )
            )
            progress()
        return completions

    def together(self, lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
        """All of them."""
        yield list(range(len(lengths)))

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], thinking: bool) -> list[int]:
        """As many ids as the prompt has words."""
        return [0] * sum(len(message.content.split(" ")) for message in messages)

    def opens(self, thinking: bool) -> bool:
        """A prompt with thinking does."""
        return thinking

    def after(self, found: Sequence[Message], thinking: bool) -> list[int]:
        """As many ids as the results have words."""
        return self.opening(found, (), thinking)

    def cut(self, completion: Completion, tokens: int) -> Completion:
        """The first so many words."""
        text = " ".join(completion.text.split(" ")[:tokens])
        return Completion(text=text, stop="max_tokens", ids=completion.ids[:tokens])
