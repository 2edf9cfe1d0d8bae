"""Read the words and tables of a task from TOML files beside the modules that use them, once, as records."""

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

Table = TypeVar("Table", bound=BaseModel)


def read_table(module: str, record: type[Table]) -> Table:
    """The content of the file `<module>.toml` beside a module, given the module's `__file__`."""
    return record.model_validate(tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8")))
