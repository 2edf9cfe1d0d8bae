"""`clinrl params`: what a name of params.yaml really uses, gathered from all its blocks."""

import json

from clinrl.artifacts import dump_yaml
from clinrl.config.params import Params
from clinrl.config.resolved import plain, uses


def stage(params: Params, name: str | None = None, *, resolved: bool = False, as_json: bool = False) -> None:
    """Print the parameters of a version, a merge or `<task>-base`, or all of them, as YAML or JSON.

    `resolved` fills in every default and, of a name, keeps the active scale alone. Raises ParamsError for an
    unknown name.
    """
    content = plain(params, defaults=resolved) if name is None else uses(params, name, resolved=resolved)
    if as_json:
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return
    print(dump_yaml(content), end="")
