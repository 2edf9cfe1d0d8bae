"""Somebody's records, which neither git nor the DVC remote has: an import reads them where they are.

A clone reads those of its checkout, through links. A worker on a machine without them cannot make what follows from
them.
"""

from pathlib import Path

from clinrl.config.params import Params
from clinrl.errors import Refused
from flows import clone

EXCLUDE = Path("info/exclude")
"""What git ignores of one clone, in its git directory."""


def places(params: Params, name: str) -> list[Path]:
    """The files and folders that an import reads."""
    spec = params.imports[name]
    return [Path(place) for place in (spec.source, spec.without) if place]


def link(params: Params, checkout: Path) -> None:
    """Let the imports of this clone read what the checkout holds of their records, and git ignores it here.

    Records at an absolute path need no link. Those at a path that leads out of the project get none.
    """
    wanted = sorted({place for name in params.imports for place in places(params, name)})
    inside = [place for place in wanted if not place.is_absolute() and ".." not in place.parts]
    tracked = clone.git("ls-files", "-z", "--", *map(str, inside)) if inside else ""
    linked = list[Path]()
    for place in inside:
        if any(above.is_symlink() for above in place.parents) or str(place) in tracked.split("\0"):
            continue  # it comes with the folder that it is in, or with git
        if place.is_symlink():  # to a checkout that has moved, perhaps
            place.unlink()
        if (checkout / place).exists() and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(checkout / place)
            linked.append(place)
    prefix, folder = clone.git("rev-parse", "--show-prefix"), Path(clone.git("rev-parse", "--git-dir"))
    (folder / EXCLUDE).parent.mkdir(exist_ok=True)
    (folder / EXCLUDE).write_text("".join(f"/{prefix}{place}\n" for place in linked), encoding="utf-8")


def check(params: Params, name: str) -> None:
    """Raise Refused if what an import reads is not here."""
    for place in places(params, name):
        if not place.exists():
            raise Refused(
                f"import@{name} reads {place}, which this machine has not, and no clone brings somebody's records; run "
                "this where they are, below the project or at an absolute path"
            )
