"""dvc.lock of a small project, as DVC would write it: what its stages follow from and make, as it lies on the disk."""

import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from clinrl.artifacts import md5
from clinrl.config.params import Params

GRAPH = Path(__file__).parents[1] / "dvc.yaml"


def record(params: Params) -> None:
    """Write dvc.lock in the working directory: every stage of which an output is there."""
    groups = YAML(typ="safe").load(GRAPH)["stages"]
    content = params.model_dump(mode="json")
    stages: dict[str, Any] = {}
    for group, block in groups.items():
        if "foreach" not in block:
            continue
        items: Any = content
        for part in block["foreach"].strip("${}").split("."):
            items = items.get(part, {})
        for key, item in items.items():
            entry = _entry(block["do"], key, item)
            if entry["outs"]:
                stages[f"{group}@{key}"] = entry
    YAML().dump({"schema": "2.0", "stages": stages}, Path("dvc.lock"))


def store() -> None:
    """Let DVC write dvc.lock in the working directory, and keep what is there of every finished stage in its cache."""
    from dvc.repo import Repo

    with Repo() as repo, repo.lock:  # `dvc commit` would read the graph anew for each of them
        made = [stage for stage in repo.index.stages if all(out.exists for out in stage.outs)]
        for stage in made:
            stage.save()
            stage.commit()
        made[0].dvcfile.dump_stages(made, update_pipeline=False)


def _entry(block: dict[str, Any], key: str, item: dict[str, Any]) -> dict[str, Any]:
    def paths(kind: str) -> list[str]:
        named = [next(iter(path)) if isinstance(path, dict) else path for path in block.get(kind, ())]
        return [re.sub(r"\$\{(key|item\.(\w+))\}", lambda m: str(item[m[2]]) if m[2] else key, path) for path in named]

    def digests(found: list[str]) -> list[dict[str, str]]:
        return [{"path": p, "hash": "md5", "md5": md5(Path(p))} for p in sorted(found) if Path(p).exists()]

    outs = digests([*paths("outs"), *paths("metrics"), *paths("plots")])
    return {"cmd": block["cmd"], "deps": digests(paths("deps")), "outs": outs}
