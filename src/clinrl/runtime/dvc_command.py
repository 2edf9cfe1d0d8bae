"""`python -m clinrl.runtime.dvc_command repro`: DVC's command line, which reads and writes single stages of `dvc.lock`.

DVC reads the whole file again for each stage, a second at 40,000 lines, and takes many seconds to write it with its
comments. Here other stages stay text. The file has the same bytes either way, but is replaced as a whole, while a kill
cuts short a file that DVC writes.

With `--side-by-side` before DVC's own arguments, stages run side by side (`clinrl.runtime.side_by_side`).
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import dvc_objects.db
from dvc import dvcfile, output
from dvc.cli import main
from dvc.exceptions import DvcException
from dvc.utils.serialize import dumps_yaml, modify_yaml, parse_yaml, parse_yaml_for_update
from dvc_data.hashfile.db.local import LocalHashFileDB
from dvc_data.hashfile.tree import Tree
from dvc_data.index import fetch
from dvc_objects.errors import ObjectFormatError
from dvc_objects.fs import generic

from clinrl.artifacts import write_text
from clinrl.errors import Refused, echo
from clinrl.runtime import dvc_state, side_by_side

HEAD = "schema: '2.0'\nstages:\n"
"""The beginning of a lock that holds stages alone."""
_STAGE = re.compile(r"^  ([\w@.-]+):\n", re.MULTILINE)
_NAME = re.compile(r"^  (?! ).*", re.MULTILINE)
_OTHER = re.compile(r"^\S|[\r\x85\u2028\u2029]", re.MULTILINE)
"""A section besides the stages, or a character that ends a line for one reader of YAML and not for another."""


class Stages(dict[str, Any]):
    """Stages by name. A stage is parsed when it is asked for, and one that was not set keeps its text."""

    def __init__(self, text: str) -> None:
        begins = [*_STAGE.finditer(text)]
        ends = [*(found.start() for found in begins), len(text)]
        blocks = (text[start:end] for start, end in pairwise(ends))
        super().__init__(zip((found[1] for found in begins), blocks, strict=True))

    def get(self, name: str, default: Any = None) -> Any:
        """The record of a stage."""
        block = super().get(name, default)
        return self.read(name, block) if isinstance(block, str) else block

    def read(self, name: str, text: str) -> Any:
        """Parse the lines of a stage, with their comments."""
        return parse_yaml_for_update(text, name)[name]

    def written(self, name: str) -> set[str] | None:
        """The paths of a stage's recorded outputs; None if DVC could not have written its lines."""
        try:
            paths = [out["path"] for out in self.get(name).get("outs", ())]
        except (DvcException, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        return {*paths} if all(isinstance(path, str) for path in paths) else None

    def text(self) -> str:
        """The lines of all stages."""
        return "".join(value if isinstance(value, str) else _block(name, value) for name, value in self.items())


class Recorded(Stages):
    """Stages of a lock that is only read. For an invalid stage, DVC's own reader of the whole lock raises the error."""

    def __init__(self, text: str, lock: dvcfile.Lockfile) -> None:
        super().__init__(text)
        self.lock = lock

    def read(self, name: str, text: str) -> Any:
        try:
            stages = parse_yaml(text, self.lock.path)
            return self.lock.validate({"schema": "2.0", "stages": stages})["stages"][name]
        except DvcException:
            self.lock._load()
            raise


def _block(name: str, value: Mapping[str, Any]) -> str:
    return str(dumps_yaml({"stages": {name: value}})).removeprefix("stages:\n")


def modify(path: str, fs: Any = None) -> AbstractContextManager[Any]:
    """In place of DVC's `modify_yaml`: change a lock that holds stages alone by blocks, any other file in DVC's way."""
    text = Path(path).read_text(encoding="utf-8") if path.endswith(".lock") and Path(path).is_file() else ""
    blocks = blocks_of(text)
    return modify_yaml(path, fs=fs) if blocks is None else _by_blocks(path, blocks)


def load(lock: dvcfile.Lockfile) -> Any:
    """In place of DVC's `Lockfile.load`: read a lock of the checkout or of a commit."""
    try:
        with lock.repo.fs.open(lock.path, encoding="utf-8") as stream:
            blocks = blocks_of(stream.read())
    except (OSError, UnicodeDecodeError):
        blocks = None
    if blocks is None:
        return lock._load()[0]
    lock._check_gitignored()
    return {"schema": "2.0", "stages": Recorded(blocks, lock)}


def blocks_of(text: str) -> str | None:
    """The lines of the stages, if a lock holds stages alone, and each once; None for any other file."""
    blocks = text.removeprefix(HEAD)
    names = _NAME.findall(blocks)
    is_plain = len(names) == len(set(names)) == len(_STAGE.findall(blocks)) and text.endswith("\n")
    return None if blocks == text or _OTHER.search(blocks) or not is_plain else blocks


@contextmanager
def _by_blocks(path: str, text: str) -> Iterator[dict[str, Any]]:
    stages = Stages(text)
    yield {"schema": "2.0", "stages": stages}
    write_text(Path(path), HEAD + stages.text())


REFUSED = list[str]()
"""The refusals while DVC ran: DVC does not pass on our errors."""


def keep_inside() -> None:
    """Make DVC refuse digests that lead out of its cache, and listings of a folder that lead out of the folder.

    DVC joins both to paths as they come from a remote: anybody who can write there could replace `.git/config`, or make
    a repository in a folder, whose configuration names programs that git runs; `HEAD` is in each.
    """
    cache: Any = dvc_objects.db.ObjectDB
    own: Any = LocalHashFileDB  # it joins paths by itself
    tree: Any = Tree
    parts, path, listed = cache._oid_parts, own.oid_to_path, tree.from_list.__func__

    def plain_listing(cls: Any, /, entries: Iterable[Mapping[str, Any]], **named: Any) -> Any:
        kept = [dict(entry) for entry in entries]
        for entry in kept:
            if not {"", ".", "..", ".git", "HEAD"}.isdisjoint(str(entry["relpath"]).split("/")):
                _refuse("a folder's listing", "the folder, or makes a git repository there")
        return listed(cls, kept, **named)

    cache._oid_parts = lambda self, oid: parts(self, _digest(oid))
    own.oid_to_path = lambda self, oid: path(self, _digest(oid))
    tree.from_list = classmethod(plain_listing)


def keep_whole() -> None:
    """Make DVC fail if its cache lacks a part of an output, as on a full disk: it would record the output all the same.

    It would also end with 0, and the next run would delete the output, which is nowhere else, and make it anew.
    """
    transfer = output.otransfer

    def whole(*arguments: Any, **named: Any) -> None:
        if transfer(*arguments, **named).failed:
            REFUSED.append(
                "DVC could not copy what a stage has made into its cache, as it says above; mend that, such as a full "
                "disk, and run `dvc commit -f` for the stage, since `dvc repro` would delete it and make it anew"
            )
            raise Refused(REFUSED[-1])

    output.otransfer = whole


def check_fetched() -> None:
    """Make DVC compare files and listings of a remote with their digests, and drop what came in part before an error.

    It trusts a remote, keeps the part of a file under the digest of the whole, and looks at neither again.
    """
    index: Any = fetch
    files: Any = generic
    tree: Any = Tree
    transfer, copy, load = index.transfer, files.copy, tree.load.__func__

    def whole(source: Any, paths: Any, target: Any, places: Any, *, on_error: Any = None, **named: Any) -> None:
        if on_error is None or len(paths) > 1:
            copy(source, paths, target, places, on_error=on_error, **named)
            return
        try:
            copy(source, paths, target, places, **named)
        except Exception as error:  # noqa: BLE001  whatever it is, DVC decides
            on_error(paths[0], places[0], error)

    def true_listing(cls: Any, /, store: Any, hash_info: Any, **named: Any) -> Any:
        found = load(cls, store, hash_info, **named)
        content = found.fs.cat_file(found.path)
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != hash_info.value.removesuffix(".dir"):
            raise ObjectFormatError(f"{found.path} is corrupted")
        return found

    files.copy = whole
    tree.load = classmethod(true_listing)
    index.transfer = lambda *arguments, **named: transfer(*arguments, **{**named, "verify": True})


def _digest(oid: str) -> str:
    if "/" in oid or oid.startswith("."):
        _refuse("a digest", "its cache")
    return oid


def _refuse(what: str, of: str) -> NoReturn:
    REFUSED.append(f"{what} that DVC was to follow leads out of {of}; see who wrote to the remote and to dvc.lock")
    raise Refused(REFUSED[-1])


if __name__ == "__main__":
    dvcfile.modify_yaml, dvcfile.Lockfile.load = modify, load
    keep_inside()
    keep_whole()
    check_fetched()
    words = sys.argv[1:]
    dvc_state.mend(Path.cwd())  # a plain `dvc repro` may have been killed while it wrote dvc.lock
    if words[:1] == ["--side-by-side"]:
        side_by_side.install()
        words = words[1:]
    code = main(words)
    if REFUSED:
        echo(REFUSED[0])
    sys.exit(code or bool(REFUSED))
