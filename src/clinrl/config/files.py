"""Reads params.yaml and the files of params/ beside it as one mapping.

People write params.yaml and one file per task. Commands write params/drafts.yaml, always the whole file. DVC merges the
same files.
"""

import re
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl.artifacts import dump_yaml, write_text
from clinrl.config.plain_yaml import read_yaml
from clinrl.config.schema import DatasetSpec, VersionSpec
from clinrl.errors import ParamsError, format_value

if TYPE_CHECKING:
    from clinrl.config.params import Params

FOLDER = "params"
DRAFTS = "drafts"
"""The file of params/ that commands write, and that the branch of a scheduled retraining changes."""
DRAFTED = ("datasets", "mining", "profiles", "versions")
"""The only sections in it: none of them sets approvers, limits of a gate, or schedules."""
NESTED = ("merges", "protocols")
"""Sections that consist of sections."""
HEADER = (
    "# Written by `clinrl draft`, always the whole file, so a comment here does not last. A block that is to stay may\n"
    "# move to the file of its task.\n"
)

Contents = Mapping[Path, Any]
"""The content of each file, in the order in which they are merged."""
Places = Mapping[str, Path]
"""The file of each section and of each entry, by key path."""


def files_with(path: Path) -> list[Path]:
    """params.yaml and the files beside it; drafts come last."""
    # Hidden files belong to an editor or to the system.
    beside = (file for file in (path.parent / FOLDER).glob("*.yaml") if not file.name.startswith("."))
    return [path, *sorted(beside, key=lambda file: (file.stem == DRAFTS, file.name))]


def read_files(path: Path) -> dict[Path, Any]:
    """The content of params.yaml and of the files beside it. Raises ParamsError for the same reasons as `read_yaml`."""
    return {file: read_yaml(file) for file in files_with(path)}


def merge_files(contents: Contents) -> tuple[dict[str, Any], dict[str, Path]]:
    """All files as one mapping, and the file of each part. Sections are merged, entries are not.

    Raises ParamsError for a file that is no mapping, for a key in two files (naming both), and for a section in
    drafts.yaml that no command writes, since a retraining reads that file before anybody has reviewed it.
    """
    whole: dict[str, Any] = {}
    places: dict[str, Path] = {}
    for file, content in contents.items():
        if not isinstance(content, Mapping):
            raise ParamsError(f"{file}: the file is {format_value(content)}; it must be a mapping")
        is_drafts = (file.parent.name, file.stem) == (FOLDER, DRAFTS)
        if is_drafts and (foreign := next((key for key in content if key not in DRAFTED), None)):
            raise ParamsError(f"{file}: {foreign} is no section of drafts; write it to params.yaml")
        _put(whole, content, (), file, places)
    return whole, places


def _put(into: dict[str, Any], content: Mapping[str, Any], at: tuple[str, ...], file: Path, places: Any) -> None:
    is_section = at == () or (len(at) == 1 and at[0] in NESTED)
    for key, value in content.items():
        name = ".".join((*at, str(key)))
        merges = is_section and isinstance(value, Mapping)
        if key in into and not (merges and isinstance(into[key], Mapping)):
            raise ParamsError(f"{file}: {name} stands in {places[name]} too; keep it in one of the two files")
        places.setdefault(name, file)
        if merges:
            _put(into.setdefault(key, {}), value, (*at, str(key)), file, places)
        else:
            into[key] = value


def place_of(text: str, places: Places, default: Path) -> Path:
    """The file that an error is about, found by the key path at the beginning of its text."""
    about = [key for key in places if text.startswith(key) and not re.match(r"[\w-]", text[len(key) :])]
    return places[max(about, key=len)] if about else default


def check_places(params: "Params", places: Places) -> None:
    """Raise ParamsError for a block of params/ that is not in the file in which dvc.yaml looks for it."""
    for at, block in filed(params).items():
        if places[at].parent.name == FOLDER and block.file != places[at].stem:
            raise ParamsError(
                f"{at}.file is {block.file!r}; it must be {places[at].stem!r}, the file that it stands in"
            )
    wanted = [(f"bases.{task}", task) for task in params.bases]
    for section in ("imports", "merges.folds", "merges.blends", "protocols.bases", "protocols.versions"):
        wanted += [(f"{section}.{name}", block.task) for name, block in attrgetter(section)(params).items()]
    wanted += [(f"profiles.{version.profile}", version.file) for version in params.versions.values() if version.file]
    wanted += [(f"datasets.{data}", rival.task) for rival in params.rivals.values() for data in rival.data]
    for at, stem in wanted:
        if places[at].parent.name == FOLDER and stem != places[at].stem:
            raise ParamsError(f"{at} stands in {places[at].name}, but DVC looks for it in {stem}.yaml; move it there")


def filed(params: "Params") -> dict[str, DatasetSpec | VersionSpec]:
    """The blocks that name their file of params/, by key path."""
    drawn: dict[str, DatasetSpec | VersionSpec] = {f"datasets.{name}": block for name, block in params.datasets.items()}
    return drawn | {f"versions.{name}": block for name, block in params.versions.items()}


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Write a whole file of parameters as YAML, below a comment that a command writes it."""
    write_text(path, HEADER + dump_yaml(content))
