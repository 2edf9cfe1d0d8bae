"""Trainer settings that a hub checkpoint sets for the recipes that are trained on it.

A publication states its settings for one checkpoint. So they are in the block of that checkpoint, below `bases`, and
recipes need no change for them. DVC tracks that block only at the full scale.
"""

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from clinrl.config.base import check_known, sentence
from clinrl.errors import ParamsError

if TYPE_CHECKING:
    from clinrl.config.params import Params


def check(params: "Params") -> None:
    """Raise ParamsError for settings of a recipe that is missing or another task's, or that do not fit the recipe."""
    for task, base in params.bases.items():
        at = f"bases.{task}.full.recipes"
        others = {spec.profile for spec in params.versions.values() if spec.task != task}
        others |= {name for other in params.bases if other != task for name in params.bases[other].full.recipes}
        for name in base.full.recipes:
            check_known(at, name, [own for own in params.profiles if own not in others], f"a recipe of {task}")
            recipe(params, name)


def recipe(params: "Params", name: str) -> Any:
    """A recipe by name. Settings in the checkpoint's block replace those of its trainer at the full scale.

    Raises ParamsError for a setting that the trainer does not have, or that does not fit.
    """
    profile = params.profiles[name]
    instead = {task: base.full.recipes[name] for task, base in params.bases.items() if name in base.full.recipes}
    if not instead:
        return profile
    ((task, settings),) = instead.items()
    own = profile.trainer["full"]
    try:
        whole = type(own).model_validate({**own.model_dump(exclude_unset=True), **settings})
    except ValidationError as error:
        raise ParamsError(sentence(error, type(own), f"bases.{task}.full.recipes.{name}")) from None
    return profile.model_copy(update={"trainer": {**profile.trainer, "full": whole}})
