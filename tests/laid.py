"""Parameters laid out in files as a project has them that DVC reads: params.yaml, one file a task, and drafts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from clinrl.artifacts import dump_yaml
from clinrl.config.files import merge_files, read_files, write_whole

FILES = [Path(file).stem for file in YAML(typ="safe").load(Path(__file__).parents[1] / "dvc.yaml")["vars"]]
"""What dvc.yaml merges."""
BLOCKS = ("bases", "datasets", "imports", "profiles", "versions", "merges", "protocols")
"""Sections that stand in the file of a task."""


def lay(folder: Path, params: Mapping[str, Any], top: str = "") -> None:
    """Write the parameters of one task into its file and into params.yaml, which begins with `top`. Drafts stay."""
    (task,) = params["bases"]
    (folder / "params").mkdir(exist_ok=True)
    filed = {
        section: {name: {**block, "file": task} for name, block in params.get(section, {}).items()}
        for section in ("datasets", "versions")
    }
    blocks = {section: params[section] for section in BLOCKS if section in params} | filed
    missing = {"imports": {}, "external": {}, "resits": {}, "mining": {}, "comparisons": {}, "rivals": {}}
    missing |= {"merges": {"folds": {}, "blends": {}}, "protocols": {"bases": {}, "versions": {}}}
    rest = {section: block for section, block in params.items() if section not in blocks}
    rest |= {section: empty for section, empty in missing.items() if section not in params}
    (folder / "params.yaml").write_text(top + dump_yaml(rest), encoding="utf-8")
    for name in FILES:
        file = folder / "params" / f"{name}.yaml"
        if name == task or not file.exists():
            write_whole(file, blocks if name == task else {})


def content(folder: Path) -> dict[str, Any]:
    """What a project's files of parameters say together."""
    return merge_files(read_files(folder / "params.yaml"))[0]


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    """Change what people wrote; drafts stay."""
    read = read_files(folder / "params.yaml")
    content, _ = merge_files({file: held for file, held in read.items() if file.stem != "drafts"})
    change(content)
    lay(folder, content)


def held(folder: Path) -> dict[Path, bytes]:
    """Every file of parameters, byte by byte."""
    return {file: file.read_bytes() for file in (folder / "params.yaml", *sorted((folder / "params").glob("*.yaml")))}
