"""Checkpoints as files: safetensors read and written tensor by tensor, in the hub's sharded layout.

A checkpoint of any size passes through in blocks of a few megabytes, read and written at offsets, so the memory of the
process does not grow with it. What is written depends on names, types, shapes and values alone: not on how the source
was cut into files, nor on which thread was first. A file has the bytes that the safetensors library itself would write.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clinrl.artifacts import PICKLES
from clinrl.errors import ArtefactError, Refused, format_value
from clinrl.runtime.determinism import THREADS

INDEX = "model.safetensors.index.json"
"""The index of a model with several files: the file of each tensor."""
MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in a file: the hub's own default, which every client can fetch and resume."""
BLOCK_BYTES = 2 << 20
"""Bytes of float32 that are computed at once: small enough to stay in a core's cache from the read to the write."""
COPY_BYTES = 4 << 20
"""Bytes that are copied at once if nothing is computed."""
WINDOW, BEHIND = 16 << 20, 64 << 20
"""Bytes between two hints to the kernel that written data is not read again, and how far back each hint reaches.

Otherwise a large model fills the page cache, and each write waits until memory is freed.
"""

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of an element by the type's name in the format, in the order in which a file is sorted, last type first."""
FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""The types that can be computed with, by torch's name: a change is made in float32 and rounded once."""

Put = Callable[[memoryview], None]
"""Appends bytes to the tensor that is being written."""
Change = Callable[[Tensor, int], None]
"""Changes rows of a matrix in place, in float32: `change(rows, first)`, `first` being the index of the first row."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of one tensor's bytes."""

    file: Path
    dtype: str
    """As the format names it: one of BITS."""
    shape: tuple[int, ...]
    start: int
    """Offset in the file, in bytes."""
    size: int
    """In bytes."""


def read_index(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint folder by name: `model.safetensors`, or the shards that its index names.

    Reads headers only. Raises ArtefactError with one sentence for a folder without safetensors, and for a file that
    is cut short, malformed, or not what the index says.
    """
    single, index = folder / "model.safetensors", folder / INDEX
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
        if pickles:
            raise ArtefactError(
                f"{folder} holds pickled weights only ({format_value(pickles[0])}), which can run code when they are "
                "opened; convert them to safetensors first"
            )
        raise ArtefactError(f"{folder} has neither {single.name} nor {index.name}; it is not a checkpoint")
    try:
        named = json.loads(index.read_bytes())["weight_map"]
        files = sorted(set(named.values()))
        local = bool(files) and all(
            Path(file).name == file and file.isprintable() and file.endswith(".safetensors") for file in files
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        local = False
    if not local:
        raise ArtefactError(f"{index} is not an index of safetensors files in its own folder; fetch it again")
    tensors: dict[str, Stored] = {}
    for file in files:
        if not (folder / file).is_file():
            raise ArtefactError(f"{folder / file} is missing, and {index.name} names it; fetch it again")
        tensors |= {
            name: stored for name, stored in read_header(folder / file).items() if named.get(name, file) == file
        }
    if tensors.keys() != named.keys():
        odd = sorted(tensors.keys() ^ named.keys())[0]
        raise ArtefactError(
            f"{index} and its files do not hold the same tensors ({format_value(odd)}); fetch the checkpoint again"
        )
    return tensors


def read_header(file: Path) -> dict[str, Stored]:
    """Every tensor of one safetensors file by name. Raises ArtefactError if the file is cut short or malformed."""
    from safetensors import SafetensorError, safe_open

    found = {}
    try:
        with safe_open(file, framework="np") as tensors, file.open("rb") as stream:
            end = 8 + int.from_bytes(stream.read(8), "little")
            for name in tensors.offset_keys():  # the library has checked that they lie side by side
                entry = tensors.get_slice(name)
                dtype, shape = entry.get_dtype(), tuple(entry.get_shape())
                found[name] = Stored(file, dtype, shape, end, byte_size(dtype, shape))
                end += found[name].size
    except SafetensorError as error:
        reason = format_value(str(error).removeprefix("Error while deserializing header: "))
        raise ArtefactError(f"{file} is not a whole safetensors file ({reason}); fetch it again") from None
    return found


def byte_size(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor. Raises KeyError for a type that the format does not have."""
    return (prod(shape) * BITS[dtype] + 7) // 8


def load(stored: Stored) -> Tensor:
    """A whole tensor, in float32. For small ones. Raises ArtefactError if its type is not one of FLOATS."""
    if stored.dtype not in FLOATS:
        raise ArtefactError(f"{stored.file} holds {stored.dtype} where {', '.join(FLOATS)} was expected; rebuild it")
    raw = torch.empty(prod(stored.shape), dtype=getattr(torch, FLOATS[stored.dtype]))
    with stored.file.open("rb", buffering=0) as stream:
        _read(stream.fileno(), _bytes(raw), stored.start, stored.file)
    return raw.to(torch.float32).view(stored.shape)


def write(
    out: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    fill: Callable[[str, Put], None],
    *,
    advance: Callable[[], object] = lambda: None,
) -> None:
    """Write a full model from the types and shapes of its tensors, by name, and their bytes, from `fill(name, put)`.

    `fill` passes a tensor's bytes to `put`, in order and in pieces of any size; it is called once per tensor, from
    several threads, and `advance` after each. Writes one file if all fits in MAX_SHARD_BYTES, else numbered files and
    an index, with a larger tensor in a file of its own and the others in the order of names. Raises Refused if the disk
    has no room.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    total = sum(byte_size(*kind) for kind in tensors.values())
    free = shutil.disk_usage(out).free
    if total > free:
        raise Refused(f"{out.parent} has {free / 1e9:.1f} GB free and the model needs {total / 1e9:.1f} GB; make room")
    split = split_state_dict_into_shards_factory(
        dict(sorted(tensors.items())),
        get_storage_size=lambda kind: byte_size(*kind),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_BYTES,
    )
    jobs: list[tuple[str, int, int]] = []
    descriptors: list[int] = []
    threads = torch.get_num_threads()
    try:
        for file, names in split.filename_to_tensors.items():
            header, offsets = _header({name: tensors[name] for name in names})
            descriptors.append(os.open(out / file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644))
            _write(descriptors[-1], memoryview(header), 0)
            os.ftruncate(descriptors[-1], len(header) + sum(byte_size(*tensors[name]) for name in names))
            jobs += [(name, descriptors[-1], len(header) + offsets[name]) for name in names]

        def job(name: str, descriptor: int, offset: int) -> None:
            end = released = offset

            def put(data: memoryview) -> None:
                nonlocal end, released
                _write(descriptor, data, end)
                end += len(data)
                if end - released >= WINDOW:
                    _release(descriptor, released - BEHIND, end)
                    released = end

            fill(name, put)
            advance()

        # One thread per core, each with a tensor of its own, is faster than all threads on one small block after
        # another; and reading, computing and writing overlap.
        torch.set_num_threads(1)
        with ThreadPoolExecutor(THREADS) as pool:
            futures = [pool.submit(job, *arguments) for arguments in jobs]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                pool.shutdown(cancel_futures=True)  # after an error, or Ctrl-C, nothing more is begun
        for future in futures:
            if not future.cancelled():
                future.result()
    finally:
        torch.set_num_threads(threads)
        for descriptor in descriptors:
            os.close(descriptor)
    if split.is_sharded:
        metadata = {"total_parameters": sum(prod(shape) for _, shape in tensors.values()), "total_size": total}
        text = json.dumps({"metadata": metadata, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True)
        (out / INDEX).write_text(text + "\n", encoding="utf-8")


def rewrite(
    source: Mapping[str, Stored],
    out: Path,
    change: Callable[[str], Change | None],
    *,
    advance: Callable[[], object] = lambda: None,
) -> None:
    """Write a model from another one: each tensor is copied, or changed by the function that `change(name)` returns.

    A changed tensor must be a matrix of a type in FLOATS: it is read, computed in float32 and rounded once, some rows
    at a time. `change` is called once per tensor, by the thread that then works through its rows in order. Raises
    Refused if a changed value is not finite in the tensor's type, and as `write` does.
    """

    def fill(name: str, put: Put) -> None:
        with source[name].file.open("rb", buffering=0) as stream:
            changed = change(name)
            if changed is None:
                _copy(source[name], stream.fileno(), put)
            else:
                _transform(name, source[name], stream.fileno(), changed, put)

    kinds = {name: (stored.dtype, stored.shape) for name, stored in source.items()}
    write(out, kinds, fill, advance=advance)


def _header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The head of a file and each tensor's offset behind it. The widest types come first, so that all are aligned."""
    rank = {dtype: position for position, dtype in enumerate(BITS)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-rank[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        offsets[name], end = end, end + byte_size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _copy(stored: Stored, source: int, put: Put) -> None:
    buffer = bytearray(min(COPY_BYTES, stored.size))
    for done in range(0, stored.size, COPY_BYTES):
        piece = memoryview(buffer)[: min(COPY_BYTES, stored.size - done)]
        _read(source, piece, stored.start + done, stored.file)
        put(piece)


def rows_at_once(columns: int) -> int:
    """The rows of a tensor that are changed as one block, in float32."""
    return max(1, BLOCK_BYTES // (4 * columns))


def _transform(name: str, stored: Stored, source: int, change: Change, put: Put) -> None:
    rows, columns = stored.shape
    dtype = getattr(torch, FLOATS[stored.dtype])
    step = min(rows, rows_at_once(columns))
    raw = torch.empty(step * columns, dtype=dtype)
    block = raw if dtype == torch.float32 else torch.empty(step * columns, dtype=torch.float32)
    largest = torch.finfo(dtype).max
    for first in range(0, rows, step):
        count = min(step, rows - first) * columns
        done = first * columns * dtype.itemsize
        piece, values = raw[:count], block[:count]
        _read(source, _bytes(piece), stored.start + done, stored.file)
        if block is not raw:
            values.copy_(piece)
        change(values.view(-1, columns), first)
        low, high = torch.aminmax(values)
        if not (low >= -largest and high <= largest):  # NaN compares as false
            raise Refused(
                f"{format_value(name)} would hold values that are infinite or not numbers in {stored.dtype}; look for "
                f"them in {stored.file} and in the adapter"
            )
        if block is not raw:
            piece.copy_(values)
        put(_bytes(piece))


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a flat tensor."""
    return tensor.view(torch.uint8).numpy().data


def _read(source: int, into: memoryview, offset: int, file: Path) -> None:
    """Fill memory from an offset of a file. Raises ArtefactError if the file ends before."""
    done = 0
    while done < len(into):
        got = os.preadv(source, [into[done:]], offset + done)
        if got == 0:
            raise ArtefactError(f"{file} became shorter while it was read; fetch it again")
        done += got


def _write(target: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(target, data[done:], offset + done)


def _release(target: int, first: int, last: int) -> None:
    """Have the kernel write a range of a file to the disk soon, and drop those of its cached pages that are written."""
    first = max(0, first)
    os.posix_fadvise(target, first, last - first, os.POSIX_FADV_DONTNEED)
