"""`python -m clinrl.runtime.dvc_command repro`: DVC's command line, which writes what a stage changed of `dvc.lock`.

DVC reads and writes the whole file anew after each stage, by a YAML of pure Python that keeps comments: eight seconds
at the 30,000 lines of a hundred versions. Here the other stages stay text. The file has the same bytes either way, and
takes its place whole, where DVC's is cut short by a kill.

With `--side-by-side` before DVC's own words, stages run side by side (`clinrl.runtime.side_by_side`).
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from dvc import dvcfile
from dvc.cli import main
from dvc.utils.serialize import dumps_yaml, modify_yaml, parse_yaml_for_update

from clinrl.artifacts import write_text
from clinrl.runtime import side_by_side

HEAD = "schema: '2.0'\nstages:\n"
"""How a lock begins that holds stages alone."""
_STAGE = re.compile(r"^  (\S+):\n", re.MULTILINE)
_OTHER = re.compile(r"^\S", re.MULTILINE)


class Stages(dict[str, Any]):
    """Stages by name, each read when it is asked for. Those that were not set keep their text."""

    def __init__(self, text: str) -> None:
        begins = [*_STAGE.finditer(text)]
        ends = [*(found.start() for found in begins), len(text)]
        blocks = (text[start:end] for start, end in pairwise(ends))
        super().__init__(zip((found[1] for found in begins), blocks, strict=True))

    def get(self, name: str, default: Any = None) -> Any:
        """What is recorded of a stage."""
        block = super().get(name, default)
        return parse_yaml_for_update(block, name)[name] if isinstance(block, str) else block

    def text(self) -> str:
        """The lines of all stages."""
        return "".join(value if isinstance(value, str) else _block(name, value) for name, value in self.items())


def _block(name: str, value: Mapping[str, Any]) -> str:
    return str(dumps_yaml({"stages": {name: value}})).removeprefix("stages:\n")


def modify(path: str, fs: Any = None) -> AbstractContextManager[Any]:
    """What DVC changes a file with: a lock that holds stages alone by blocks, any other file in DVC's own way."""
    text = Path(path).read_text(encoding="utf-8") if path.endswith(".lock") and Path(path).is_file() else ""
    blocks = text.removeprefix(HEAD)
    return modify_yaml(path, fs=fs) if blocks == text or _OTHER.search(blocks) else _by_blocks(path, blocks)


@contextmanager
def _by_blocks(path: str, text: str) -> Iterator[dict[str, Any]]:
    stages = Stages(text)
    yield {"schema": "2.0", "stages": stages}
    write_text(Path(path), HEAD + stages.text())


if __name__ == "__main__":
    dvcfile.modify_yaml = modify
    words = sys.argv[1:]
    if words[:1] == ["--side-by-side"]:
        side_by_side.install()
        words = words[1:]
    sys.exit(main(words))
