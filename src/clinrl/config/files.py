"""params.yaml and the files of params/ beside it, read as one mapping.

People write params.yaml and one file a task; commands write the whole of params/drafts.yaml. DVC merges the same files.
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
"""The file of params/ that commands write, and that a branch of a scheduled retraining brings."""
DRAFTED = ("datasets", "mining", "profiles", "versions")
"""The sections that it may have: none that says who approves, what a gate asks, or when something runs."""
NESTED = ("merges", "protocols")
"""Sections that consist of sections."""
HEADER = (
    "# Written by `clinrl draft`, always the whole file, so a comment here does not last. A block that is to stay may\n"
    "# move to the file of its task.\n"
)

Contents = Mapping[Path, Any]
"""What each file holds, in the order in which they are merged."""
Places = Mapping[str, Path]
"""Key path of a section, or of an entry of one, to the file in which it stands."""


def files_with(path: Path) -> list[Path]:
    """params.yaml and the files beside it; drafts come last."""
    # Hidden ones are an editor's or a system's.
    beside = (file for file in (path.parent / FOLDER).glob("*.yaml") if not file.name.startswith("."))
    return [path, *sorted(beside, key=lambda file: (file.stem == DRAFTS, file.name))]


def read_files(path: Path) -> dict[Path, Any]:
    """The content of params.yaml and of the files beside it. Raises ParamsError as `read_yaml`."""
    return {file: read_yaml(file) for file in files_with(path)}


def merge_files(contents: Contents) -> tuple[dict[str, Any], dict[str, Path]]:
    """All files as one mapping, and where its parts stand. Sections merge, entries do not.

    Raises ParamsError for a file that holds no mapping, naming both files for a key that stands in two, and for a
    section of drafts that no command writes: nobody has reviewed that file when a retraining reads it.
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
    """The file that holds what a sentence is about, by the key path with which it begins."""
    about = [key for key in places if text.startswith(key) and not re.match(r"[\w-]", text[len(key) :])]
    return places[max(about, key=len)] if about else default


def check_places(params: "Params", places: Places) -> None:
    """Refuse a block of params/ that stands in another file than the one in which dvc.yaml looks for it."""
    blocks: dict[str, VersionSpec | DatasetSpec] = {f"versions.{name}": v for name, v in params.versions.items()}
    blocks |= {f"datasets.{name}": dataset for name, dataset in params.datasets.items()}
    for at, block in blocks.items():
        if places[at].parent.name == FOLDER and block.file != places[at].stem:
            raise ParamsError(
                f"{at}.file is {block.file!r}; it must be {places[at].stem!r}, the file that it stands in"
            )
    wanted = {f"bases.{task}": task for task in params.bases}
    for section in ("imports", "merges.folds", "merges.blends", "protocols.bases", "protocols.versions"):
        wanted |= {f"{section}.{name}": block.task for name, block in attrgetter(section)(params).items()}
    wanted |= {f"profiles.{version.profile}": version.file for version in params.versions.values()}
    for at, stem in wanted.items():
        if places[at].parent.name == FOLDER and stem != places[at].stem:
            raise ParamsError(f"{at} stands in {places[at].name}, but DVC looks for it in {stem}.yaml; move it there")


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that commands write: the content in the manner of YAML, below a line for people."""
    write_text(path, HEADER + dump_yaml(content))
