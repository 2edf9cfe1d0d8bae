"""The words and the tables of a task: TOML files beside the modules that use them, read once, as records."""

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

Table = TypeVar("Table", bound=BaseModel)


def read_table(module: str, record: type[Table]) -> Table:
    """What the file `<module>.toml` beside a module holds, given the module's `__file__`."""
    return record.model_validate(tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8")))
