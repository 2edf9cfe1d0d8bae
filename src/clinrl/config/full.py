"""What a hub checkpoint decides of the recipes that are trained above it.

A publication states its numbers for one checkpoint, so they stand in the block of that checkpoint, below `bases`, and
the recipes stay as the embedded versions used them. DVC tracks that block at the full scale alone.
"""

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from clinrl.config.base import check_known, sentence
from clinrl.errors import ParamsError

if TYPE_CHECKING:
    from clinrl.config.params import Params


def check(params: "Params") -> None:
    """Refuse settings of a recipe that is not there or is another task's, or that do not fit it. Raises ParamsError."""
    for task, base in params.bases.items():
        at = f"bases.{task}.full.recipes"
        others = {spec.profile for spec in params.versions.values() if spec.task != task}
        others |= {name for other in params.bases if other != task for name in params.bases[other].full.recipes}
        for name in base.full.recipes:
            check_known(at, name, [own for own in params.profiles if own not in others], f"a recipe of {task}")
            recipe(params, name)


def recipe(params: "Params", name: str) -> Any:
    """A recipe, with what the checkpoint's block says instead of its trainer at full.

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
