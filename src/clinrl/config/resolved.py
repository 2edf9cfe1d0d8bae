"""`clinrl params`: prints the parameters of a model, gathered from all blocks that it uses."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from clinrl.artifacts import dump_yaml
from clinrl.config.params import Params
from clinrl.config.recipes import SftProfile
from clinrl.signing.keys import Key


def stage(params: Params, name: str | None = None, *, resolved: bool = False, as_json: bool = False) -> None:
    """Print the parameters of a version, a merge or `<task>-base`, or all of them, as YAML or JSON.

    `resolved` fills in every default and, for a name, keeps only the active scale. Raises ParamsError for an unknown
    name.
    """
    content = plain(params, defaults=resolved) if name is None else uses(params, name, resolved=resolved)
    print(json.dumps(content, indent=2, ensure_ascii=False) if as_json else dump_yaml(content).rstrip("\n"))


def uses(params: Params, name: str, *, resolved: bool) -> dict[str, Any]:
    """The parameters that build and evaluate a version, a merge or a base, by their use."""
    model = params.model(name)
    task, exam = model.task.name, model.exam
    found: dict[str, Any] = {"name": name, "task": task, "scale": params.scale}
    if name in params.versions:
        version = params.versions[name]
        profile = params.profiles[version.profile]
        recipe = plain(profile, defaults=resolved)
        if resolved:
            recipe["lora"] = plain(params.lora(name), defaults=True)
            recipe["trainer"] = plain(params.trainer(version.profile), defaults=True)
            if not isinstance(profile, SftProfile):
                recipe["reward"] = plain(params.reward(name), defaults=True)
        found |= {"parent": version.parent, "lineage": list(params.lineage(name)), "seed": version.seed}
        found["data"] = {version.data: plain(params.data_spec(version.data), defaults=resolved)}
        found["recipe"] = {version.profile: recipe}
        found["why"] = version.why
    elif name in params.merges.all:
        merge = plain(params.merges.all[name], defaults=resolved)
        found["merge"] = {key: value for key, value in merge.items() if key not in ("task", "exam")}
    blocks = {mode: params.mode(mode, task) if resolved else block for mode, block in params.modes.items()}
    modes = {mode: plain(block, defaults=resolved) for mode, block in blocks.items()}
    if resolved:
        modes = {mode: {**block, "max_new_tokens": params.budget(mode, task)} for mode, block in modes.items()}
    base = params.base(task) if resolved else params.bases[task]
    return {
        **found,
        "exam": {exam: plain(params.data_spec(exam), defaults=resolved)},
        "base": plain(base, defaults=resolved),
        "modes": modes,
    }


def plain(value: Any, *, defaults: bool) -> Any:
    """A block as plain values for JSON and YAML, with all defaults or only with the keys that the files have."""
    if isinstance(value, Key):
        return value.line
    if isinstance(value, BaseModel):
        fields = ((key, part) for key, part in value if defaults or key in value.model_fields_set)
        return {key: plain(part, defaults=defaults) for key, part in fields}
    if isinstance(value, Mapping):
        return {key: plain(part, defaults=defaults) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, defaults=defaults) for part in value]
    return value
