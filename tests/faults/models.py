"""Adapters and checkpoints of the hub that were made to do harm; and what a hostile input is."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import projects
from safetensors.numpy import load_file, save_file

import dolls
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, seal, write_json
from clinrl.cli import main as cli

PWNED = "pwned"
"""A file that hostile input tries to make."""


class Input(NamedTuple):
    """One hostile input, and the command that meets it."""

    kind: str
    what: str
    lay: Callable[[], Any]
    """Puts it into the project that is the working directory."""
    command: Sequence[str]
    allowed: bool = False
    """The command may end with 0, since what is hostile is left out or changes nothing."""


class Exploit:
    """What runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {PWNED}",))


def inputs() -> Iterator[Input]:
    """All of them."""
    yield from _adapters()
    yield from _hub()


# Adapters


def _adapter(change: Callable[[Path], Any]) -> Callable[[], Any]:
    """An adapter that somebody sent, sealed as its own manifest asks, in the place of v1's."""

    def lay() -> None:
        folder = paths.adapter("v1")
        manifest = read_manifest(folder)
        change(folder)
        seal(folder, **manifest.model_dump(exclude={"files"}))

    return lay


def _weights(of: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file(of(load_file(path)), path)

    return change


def _file(name: str, raw: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(raw)


def _fields(file: str, **fields: Any) -> Callable[[Path], Any]:
    """A JSON file with other fields."""

    def change(folder: Path) -> None:
        path = folder / file
        write_json(path, json.loads(path.read_text()) | fields)

    return change


_config = partial(_fields, "adapter_config.json")
_in_config = partial(_fields, "config.json")


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Exploit()))


def _adapters() -> Iterator[Input]:
    command = ("evaluate", "v1")
    weights = "adapter_model.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}).encode()
    changes: dict[str, Callable[[Path], Any]] = {
        "a pickle in the place of weights": _pickled,
        "a pickle named safetensors": _file(weights, pickle.dumps(Exploit())),
        "weights of nothing": _file(weights, b""),
        "a header of 2^63 bytes": _file(weights, struct.pack("<Q", 2**63) + b"{}"),
        "a header of 100 MB that is not there": _file(weights, struct.pack("<Q", 10**8) + b"{"),
        "a header that is no JSON": _file(weights, struct.pack("<Q", 8) + b"\xff" * 8),
        "a header 4000 lists deep": _file(weights, struct.pack("<Q", 8000) + b"[" * 4000 + b"]" * 4000),
        "a shape of 2^40": _file(weights, struct.pack("<Q", len(header)) + header + b"0000"),
        "weights cut in half": lambda folder: (folder / weights).write_bytes((folder / weights).read_bytes()[:5000]),
        "weights that are no numbers": _weights(lambda held: {k: v * numpy.nan for k, v in held.items()}),
        "weights without end": _weights(lambda held: {k: v + numpy.inf for k, v in held.items()}),
        "wrong shapes": _weights(lambda held: {k: numpy.zeros((3, 3), "float32") for k in held}),
        "half of the tensors": _weights(lambda held: dict(list(held.items())[::2])),
        "other tensors": _weights(lambda held: {"pwned": numpy.zeros(2, "float32")}),
        "whole numbers": _weights(lambda held: {k: v.astype("int64") for k, v in held.items()}),
        "a config that is no JSON": _file("adapter_config.json", b"{" * 100),
        "a config that is a list": _file("adapter_config.json", b"[]"),
        "a config of another kind": _config(peft_type="PWNED"),
        "code to be imported": _config(auto_mapping={"base_model_class": "system", "parent_library": "os"}),
        "a base on the network": _config(base_model_name_or_path="http://127.0.0.1:1/x"),
        "a rank of -1": _config(r=-1),
        "a rank of 10^9": _config(r=10**9),
        "a rank that is a text": _config(r="four"),
        "a pattern without end": _config(target_modules="(([a-z0-9_.])*)*!"),
        "modules that do not exist": _config(target_modules=["pwned"]),
        "a config of a later PEFT": _config(pwned=1),
        "a chat template that reads the system": _file(
            "chat_template.jinja", b"{{ ''.__class__.__mro__[1].__subclasses__() }}"
        ),
        "a tokenizer that is no JSON": _file("tokenizer.json", b"{"),
        "a script beside it": _file("adapter_model.py", b"open('pwned', 'w')"),
    }  # fmt: skip
    for what, change in changes.items():
        # An adapter's own tokenizer, template and scripts are not what an exam reads: then nothing happens.
        yield Input("adapter", what, _adapter(change), command, allowed=True)


# Hub folders


def _checkpoint(change: Callable[[Path], Any]) -> Callable[[], Any]:
    """A checkpoint on the disk that params.yaml names as the base at scale full, pinned and about to be examined."""

    def lay() -> None:
        hub = Path("hub").resolve()
        shutil.copytree(paths.base("esi"), hub)
        (hub / "manifest.json").unlink()
        change(hub)
        full = {**dolls.PARAMS["bases"]["esi"]["full"], "repo": str(hub), "quantize": "none"}
        esi = {**dolls.PARAMS["bases"]["esi"], "full": full}
        projects.write_params(Path(), scale="full", bases={"esi": esi})
        assert cli.main(["base", "esi"]) == 0, "a checkpoint is pinned, not loaded"
        base = identity(read_manifest(paths.base("esi")))
        folder = paths.adapter("v1")
        manifest = read_manifest(folder).model_dump(exclude={"files"})
        seal(folder, **{**manifest, "inputs": {**manifest["inputs"], "base": base}})

    return lay


def _own_code(hub: Path) -> None:
    (hub / "modeling_pwned.py").write_text("open('pwned', 'w')\nclass Pwned: pass\n")
    _in_config(auto_map={"AutoConfig": "modeling_pwned.Pwned", "AutoModelForCausalLM": "modeling_pwned.Pwned"})(hub)
    config = json.loads((hub / "tokenizer_config.json").read_text())
    write_json(hub / "tokenizer_config.json", config | {"auto_map": {"AutoTokenizer": ["modeling_pwned.Pwned", None]}})


def _unknown_code(hub: Path) -> None:
    _own_code(hub)
    _in_config(model_type="pwned", architectures=["Pwned"])(hub)


def _pickled_hub(hub: Path) -> None:
    (hub / "model.safetensors").unlink()
    (hub / "pytorch_model.bin").write_bytes(pickle.dumps(Exploit()))


def _hub() -> Iterator[Input]:
    command = ("evaluate", "esi-base")
    changes: dict[str, Callable[[Path], Any]] = {
        "code of its own": _own_code,
        "code of its own, of a kind that nobody knows": _unknown_code,
        "a pickle in the place of weights": _pickled_hub,
        "a kind that nobody knows": _in_config(model_type="pwned"),
        "weights of nothing": lambda hub: (hub / "model.safetensors").write_bytes(b""),
        "a config that is no JSON": lambda hub: (hub / "config.json").write_bytes(b"{"),
        "no config": lambda hub: (hub / "config.json").unlink(),
        "a template that reads the system": lambda hub: (hub / "chat_template.jinja").write_text(
            "{{ ''.__class__.__mro__[1].__subclasses__() }}"
        ),
        "a template with a range that is too long": lambda hub: (hub / "chat_template.jinja").write_text(
            "{% for a in range(99999999) %}{{ a }}{% endfor %}"
        ),
        "a template that is none": lambda hub: (hub / "chat_template.jinja").write_text("{% for"),
        "a tokenizer that is no JSON": lambda hub: (hub / "tokenizer.json").write_bytes(b"{"),
        "a layer more": _in_config(num_hidden_layers=3),
        "10^9 layers": _in_config(num_hidden_layers=10**9),
        "no layers": _in_config(num_hidden_layers=-1),
        "another vocabulary": _in_config(vocab_size=7),
    }  # fmt: skip
    for what, change in changes.items():
        # Code beside a checkpoint that needs none may lie there: it is never imported.
        yield Input("hub folder", what, _checkpoint(change), command, allowed=what == "code of its own")
