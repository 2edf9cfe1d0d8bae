"""One engine for exams and training: a base that vLLM serves at its pinned commit, and adapters above it by name.

An adapter is never merged: the base stays the same, bit for bit, and the server applies the adapter that each request
names. The server reads an adapter's files again whenever it has dropped them, so they are copied to a folder that never
changes. The adapter's name is the digest of its files and of the place of the copies: no answer and no cached prompt
can belong to another adapter, and no other checkout unloads it.
"""

import fcntl
import json
import os
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clinrl import paths
from clinrl.artifacts import digest, locked, sha256_file, staged
from clinrl.config.machine import FILE, Vllm
from clinrl.errors import EngineError
from clinrl.models import bases, opening
from clinrl.models.chat import Completion, decode
from clinrl.models.generate import Prompt, Sampler
from clinrl.models.vllm_client import Call, Client, Request, Written, key_of

DTYPE = "bfloat16"
PROBE_TOKENS = 16
"""Tokens of the completion that shows whether an adapter has an effect."""


def model_of(base: Path) -> str:
    """The name under which a base's checkpoint is served: repository, commit and number format."""
    named = bases.reference(base)
    return f"{named['repo']}@{named['commit']}:{DTYPE}"


class Engine(Sampler):
    """A sampler that has a vLLM server write completions, with the adapter given to `adopt`, or with none.

    Each request has a seed of its own, from the call's seed, the prompt's name and its earlier occurrences. So a
    completion does not depend on other requests, but for rounding.

    Adapters are served from copies in the folder `copies`. `names` maps the model's tensors to their names in the
    checkpoint. If there are any, the copies use those: vLLM opens a checkpoint with images by a class of its own, which
    knows its layers by them.
    """

    can_watch = False

    def __init__(
        self, client: Client, tokenizer: Any, window: int | None, *,
        copies: Path, names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        super().__init__(None, tokenizer, scale="full")
        self.client, self.window, self.names, self.copies = client, window, names, copies.resolve()
        self.room = min(filter(None, (window, client.max_length)))
        self.adapter: str | None = None
        self.let_go: Callable[[], Any] = lambda: None
        """Leave the adapter to its other users. If there are none, the next change of adapters unloads it."""
        self.identity = {
            "name": "vllm", "version": client.version, "model": client.model.removesuffix(f":{DTYPE}"), "dtype": DTYPE,
            "quantize": "none",
        }  # fmt: skip

    def name_of(self, folder: Path) -> str:
        """The name under which the adapter in a folder is served."""
        files = [sha256_file(folder / name) for name in (opening.WEIGHTS, opening.CONFIG)]
        return "clinrl-" + digest([str(self.copies), *files])[:32]

    def adopt(self, folder: Path) -> None:
        """Use the adapter in a folder from now on, in place of the one before, and unload those that nobody uses.

        Raises EngineError if the server refuses, or if the adapter was replaced meanwhile.
        """
        name = self.name_of(folder)
        copy = self.copies / name
        with locked(self.copies / ".lock"):
            for rest in self.copies.glob(".clinrl-*"):  # of processes that were killed
                shutil.rmtree(rest)
            if not copy.is_dir():
                with staged(copy) as out:
                    if self.names:
                        opening.rename_modules(folder, self.names, out)
                    else:
                        for part in (opening.WEIGHTS, opening.CONFIG):
                            shutil.copyfile(folder / part, out / part)
                    if self.name_of(folder) != name:
                        raise EngineError(f"{folder} was replaced meanwhile; give the same command again")
            used = os.open(copy / opening.CONFIG, os.O_RDWR)
            let_go = weakref.finalize(self, os.close, used)
            fcntl.flock(used, fcntl.LOCK_SH)  # the kernel releases it when this process ends
            self.let_go()
            self.let_go, self.adapter = let_go, name
            self.client.load(name, copy)
            for other in self.copies.glob("clinrl-*"):
                if not _is_used(other):
                    self.client.unload(other.name)
                    shutil.rmtree(other.rename(other.with_name(f".{other.name}")))

    def check_adopted(self) -> None:
        """Raise EngineError if the server's answer with the adapter equals that without in every digit.

        vLLM matches the names in an adapter's file with those of its own layers, and silently ignores other paths.
        """
        ids = self.tokenizer("?", add_special_tokens=False)["input_ids"]
        one = Request(name="?", ids=ids, budget=PROBE_TOKENS, temperature=0.0, top_p=1.0, seed=0)
        (_, without), (_, adapted) = (next(iter(self.client.complete([one], name))) for name in (None, self.adapter))
        if without == adapted:
            raise EngineError(
                f"the server at {self.client.url} answers with the adapter as without it: it does not know the layers "
                f"that the adapter changes; set sampler to transformers in {FILE}"
            )

    def together(self, lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
        """All conversations at once: the server itself caches what it has read of each."""
        yield list(range(len(lengths)))

    def sample(
        self, prompts: Sequence[Prompt], *, thinking: bool, temperature: float, budget: int, seed: int,
        top_p: float = 1.0, progress: Callable[[], None] = lambda: None, call: Call | None = None,
    ) -> list[Completion]:  # fmt: skip
        """As `Sampler.sample`; `call` as for `Client.complete`."""
        requests, times = [], Counter[str]()
        for prompt, ids, room in zip(prompts, *self._encode_prompts(prompts, thinking, budget), strict=True):
            name = prompt.name
            own = seed_of(seed, name, times[name])
            requests.append(Request(name=name, ids=ids, budget=room, temperature=temperature, top_p=top_p, seed=own))
            times[name] += 1
        return [decode(self.tokenizer, one.ids, self.client.ends) for one in self.write(requests, progress, call)]

    def write(
        self, requests: Sequence[Request], progress: Callable[[], None] = lambda: None, call: Call | None = None
    ) -> list[Written]:
        """The completion of each request, in order: from the journal if it is there, else from the server."""
        found, keys = dict[int, Written](), dict[int, str]()
        if self.journal is not None:
            step = self.journal.call()
            for number, one in enumerate(requests):
                keys[number] = digest((self.identity, step, number, asdict(one)))
                if (entry := self.journal.found.get(keys[number])) is not None:
                    found[number] = Written(ids=tuple(entry["ids"]), log_probabilities=tuple(entry["logs"]))
        rest = [number for number in range(len(requests)) if number not in found]
        for _ in found:
            progress()
        for place, written in self.client.complete([requests[number] for number in rest], self.adapter, call):
            found[rest[place]] = written
            if self.journal is not None:
                self.journal.put(keys[rest[place]], ids=written.ids, logs=written.log_probabilities)
            progress()
        return [found[number] for number in range(len(requests))]


def _is_used(copy: Path) -> bool:
    """Whether a process, or an engine of this one, uses the copy of an adapter."""
    with suppress(FileNotFoundError), (copy / opening.CONFIG).open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def seed_of(*parts: object) -> int:
    """A seed that no other call, prompt or repeat has."""
    return int(digest(parts)[:15], 16)


def connect(task: str, settings: Vllm) -> Engine:
    """Connect to the engine of a task's base: the server in machine.yaml, or the one that `clinrl engine` started.

    Raises EngineError if there is no server or if it serves something else, and ArtefactError as `bases.open_tokenizer`
    does.
    """
    base = paths.base(task)
    tokenizer, config, ends, names = bases.open_tokenizer(base)
    start = f"start one with `clinrl engine {task}`"
    if settings.url is not None:
        url, key = settings.url, key_of(settings.url)
    else:
        url, key = _started(paths.engine(task), start)
    client = Client(url, key, settings, model_of(base), ends=ends, vocabulary=config.vocab_size, start=start)
    client.check()
    window = getattr(config, "max_position_embeddings", None)
    return Engine(client, tokenizer, window, names=names, copies=paths.engine_adapters(task))


def _started(file: Path, start: str) -> tuple[str, str]:
    """Address and key of the server that was last started on this machine."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return str(found["url"]), str(found["key"])
    except FileNotFoundError:
        raise EngineError(f"{FILE} has sampler: vllm, and no vLLM server was started here; {start}") from None
    except (ValueError, LookupError, TypeError):
        raise EngineError(f"{file} names no server; {start}") from None
