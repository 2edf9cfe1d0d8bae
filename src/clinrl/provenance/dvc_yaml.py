"""The stages of dvc.yaml as DVC reads them, and their states by dvc.lock and the disk.

`dvc status` takes longer than some stages do: for named stages a minute and a half of CPU here, since it collects the
whole graph anew for each. A test compares the states of this module with those of `dvc status`.
"""

import configparser
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from clinrl import paths
from clinrl.artifacts import md5, write_json
from clinrl.config.files import FOLDER, filed, files_with, merge_files, read_files
from clinrl.config.params import Params, load_params
from clinrl.config.plain_yaml import read_yaml
from clinrl.errors import ArtefactError, ParamsError
from clinrl.provenance import lock

MODES = {"think": True, "direct": False}
"""The modes whose outputs dvc.yaml names, and whether each thinks, on which prompts and rewards depend."""
PIPELINE = Path("dvc.yaml")
PARAMS = "params.yaml"
PLACE = re.compile(r"\$\{([^}]+)\}")
"""A placeholder in a template, which DVC replaces by a value."""
READ = {"cmd", "deps", "params", "outs", "metrics", "plots", "desc"}
"""The keys of a stage that are read here; a stage with any other key is refused."""
ABSENT = object()
"""The value of a parameter that its file does not have."""

State = Literal["up to date", "stale", "missing", "unknown"]
"""stale: an input or output changed since the stage ran. missing: an output is absent. unknown: there is no such
stage, or the state could not be found out."""


class Stage(NamedTuple):
    """A stage of dvc.yaml, with its template filled in as DVC does it."""

    address: str
    command: str
    deps: list[str]
    params: dict[str, dict[str, Any]]
    """The parameters that it depends on, by file and by key in the file, as dvc.lock records them."""
    outs: dict[str, bool]
    """Its outputs, and whether DVC caches each."""


def read(source: Path = Path(PARAMS)) -> dict[str, Stage]:
    """Every stage of dvc.yaml, by its address. `source` is the file to read as params.yaml.

    Raises ArtefactError if dvc.yaml cannot be read, or names a key that params.yaml does not have.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        files = read_files(source)
        whole, pipeline = merge_files(files)[0], YAML(typ="safe").load(source.parent / PIPELINE)
        named = {
            (PARAMS if file == source else file.relative_to(source.parent).as_posix()): files[file] for file in files
        }
        found = [
            _stage(address, template, scope, named)
            for group, block in pipeline["stages"].items()
            for address, template, scope in _templates(group, block, whole)
        ]
        return {stage.address: stage for stage in found}
    except FileNotFoundError:
        raise ArtefactError(f"there is no {PIPELINE} here, so there are no stages") from None
    except (YAMLError, LookupError, TypeError, AttributeError, ValueError):
        raise ArtefactError(f"{PIPELINE} is no pipeline that DVC would run; `dvc status` says why") from None


def check(source: Path) -> Params:
    """Return the parameters. Refuse invalid ones, and those that dvc.yaml would not find or does not track.

    Raises ParamsError, and ArtefactError as `read` does.
    """
    params = load_params(source)
    pipeline = source.parent / PIPELINE
    if pipeline.exists():
        if {name: mode.thinking for name, mode in params.modes.items()} != MODES:
            raise ParamsError("modes must be think, with thinking, and direct, without: dvc.yaml names their outputs")
        described = read_yaml(pipeline)
        listed = described.get("vars", [])
        for file in files_with(source)[1:]:
            if (name := f"{FOLDER}/{file.name}") not in listed:
                raise ParamsError(f"{name} is not among `vars` in dvc.yaml, so DVC does not see it; list it there")
        for at, block in filed(params).items() if "stages" in described else ():
            if not block.file:
                to = f"{FOLDER}/{block.task}.yaml, with `file: {block.task}`"
                raise ParamsError(f"{at} stands in {source.name}, where DVC does not look for it; move it to {to}")
        for stage in read(source).values() if "stages" in described else ():
            for named, values in stage.params.items():
                if missing := next((key for key, value in values.items() if value is ABSENT), None):
                    raise ParamsError(f"{stage.address} reads {missing} in {named}, where it is not; move it there")
    return params


def prove(source: Path) -> None:
    """Check the parameters, then write the proof, which is a constant.

    The proof never changes, so after an edit of params.yaml DVC runs this stage again, but none that depends on it.
    Raises ParamsError.
    """
    check(source)
    write_json(paths.PARAMS_PROOF, {"params.yaml": "every name and value in it was checked"})


def states(addresses: Collection[str]) -> dict[str, State]:
    """The state of each stage, judged as `dvc status` does: by its inputs as they are now.

    A stage after a stale one may therefore be up to date. A stage that dvc.yaml does not have is unknown. Raises
    ArtefactError as `read` and `lock.read` do.
    """
    stages, recorded = read(), lock.read() if lock.LOCK.exists() else {}
    folder = cache_folder()

    @cache
    def digest(path: str) -> str:
        try:
            return md5(Path(path))
        except OSError:
            return ""

    is_cached = cache(partial(_is_cached, folder))
    return {
        address: _state(stages[address], recorded.get(address), digest, is_cached) if address in stages else "unknown"
        for address in addresses
    }


def _state(
    stage: Stage, entry: Mapping[str, Any] | None, digest: Callable[[str], str], is_cached: Callable[[str], bool]
) -> State:
    if not all(os.path.exists(path) for path in stage.outs):
        return "missing"
    if entry is None or entry["cmd"] != stage.command or not (stage.deps or stage.params or stage.outs):
        return "stale"
    used = {dep["path"]: dep.get("md5") for dep in entry.get("deps", ())}
    made = {out["path"]: out["md5"] for out in entry.get("outs", ())}
    recorded = entry.get("params", {})
    is_same = (
        all(
            value == recorded.get(file, {}).get(key, ABSENT) is not ABSENT
            for file, values in stage.params.items()
            for key, value in values.items()
        )
        and all(used.get(path) == digest(path) for path in stage.deps)
        and all(made.get(path) == digest(path) for path in stage.outs)
        and all(is_cached(made[path]) for path, keeps in stage.outs.items() if keeps)
    )
    return "up to date" if is_same else "stale"


def _is_cached(folder: Path, oid: str) -> bool:
    path = stored(folder, oid)
    if not path.is_file():
        return False
    entries = json.loads(path.read_bytes()) if oid.endswith(".dir") else ()
    return all(stored(folder, entry["md5"]).is_file() for entry in entries)


def stored(cache: Path, oid: str) -> Path:
    """The path in DVC's cache of the content with a digest."""
    return cache / oid[:2] / oid[2:]


def cache_folder(root: Path = Path()) -> Path:
    """The folder of DVC's cache by the configuration of the user, the project and the checkout; the last one counts."""
    above = os.environ.get("DVC_GLOBAL_CONFIG_DIR") or Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "dvc"
    place = root / ".dvc/cache"
    for file in (Path(above).expanduser() / "config", root / ".dvc/config", root / ".dvc/config.local"):
        settings = configparser.ConfigParser(interpolation=None, strict=False)
        settings.read(file, encoding="utf-8")
        if settings.has_option("cache", "dir"):
            place = file.parent / settings.get("cache", "dir").strip("\"'")
    return place / "files/md5"


def _templates(group: str, block: Any, params: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    if "foreach" not in block:
        yield group, block, params
        return
    for key, item in (_value(block["foreach"][2:-1], params) or {}).items():
        yield f"{group}@{key}", block["do"], {**params, "key": key, "item": item}


def _stage(address: str, template: Any, scope: Mapping[str, Any], files: Mapping[str, Any]) -> Stage:
    if other := template.keys() - READ:
        raise ArtefactError(f"{PIPELINE}: {address} has {', '.join(sorted(other))}, which clinrl does not read")
    tracked: dict[str, dict[str, Any]] = {}
    for entry in _fill(template.get("params", []), scope):
        for file, keys in ({PARAMS: [entry]} if isinstance(entry, str) else entry).items():
            tracked.setdefault(file, {}).update({key: _value(key, files.get(file), ABSENT) for key in keys})
    outs = [entry for kind in ("outs", "metrics", "plots") for entry in _fill(template.get(kind, []), scope)]
    return Stage(
        address=address,
        command=_fill(template["cmd"], scope),
        deps=[path for path, _ in _paths(_fill(template.get("deps", []), scope))],
        params=tracked,
        outs={path: options.get("cache", True) for path, options in _paths(outs)},
    )


def _fill(value: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return PLACE.sub(lambda place: str(_value(place[1], scope)), value)
    if isinstance(value, list):
        return [_fill(entry, scope) for entry in value]
    if isinstance(value, dict):
        return {_fill(key, scope): _fill(entry, scope) for key, entry in value.items()}
    return value


def _value(key: str, scope: Any, default: Any = None) -> Any:
    """The value at a key path such as `bases.esi.exam`. Raises ArtefactError if there is neither value nor default."""
    found = scope
    for part in key.strip().split("."):
        if not isinstance(found, dict) or part not in found:
            if default is not None:
                return default
            raise ArtefactError(f"{PIPELINE} names {key}, which params.yaml does not have")
        found = found[part]
    return found


def _paths(entries: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in entries:
        yield from ((entry, {}),) if isinstance(entry, str) else entry.items()
