"""The source records of imports, which neither git nor the DVC remote has: an import reads them where they are.

A clone reads the records of its checkout through links. A worker on a machine without the records cannot run the
stages that depend on them.
"""

from collections.abc import Iterator
from pathlib import Path

from clinrl.config.params import Params
from clinrl.errors import Refused
from flows import clone

EXCLUDE = Path("info/exclude")
"""The file in a clone's git directory that lists what git ignores in this clone."""


def places(params: Params, name: str) -> list[Path]:
    """The files and folders that an import reads."""
    spec = params.imports[name]
    return [Path(place) for place in (spec.source, spec.without) if place]


def link(params: Params, checkout: Path) -> None:
    """Link the records that the checkout holds into this clone, for its imports, and have git ignore the links.

    Records at an absolute path need no link. Those at a path that leads out of the project get none.
    """
    prefix, folder = clone.git("rev-parse", "--show-prefix"), Path(clone.git("rev-parse", "--git-dir"))
    exclude = folder / EXCLUDE
    for line in exclude.read_text(encoding="utf-8").splitlines() if exclude.exists() else ():
        if (former := Path(line.removeprefix(f"/{prefix}"))).is_symlink() and not former.is_absolute():
            former.unlink()  # to records that no import reads any more, or to a checkout that has moved
    wanted = {place for name in params.imports for place in places(params, name)}
    inside = sorted(place for place in wanted if not place.is_absolute() and ".." not in place.parts)
    linked = [made for place in inside for made in _linked(place, checkout)]
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text("".join(f"/{prefix}{place}\n" for place in linked), encoding="utf-8")


def _linked(place: Path, checkout: Path) -> Iterator[Path]:
    """Link what the checkout has and this clone lacks; in a folder that git has in part, link entry by entry."""
    source = checkout / place
    if place.is_dir() and not place.is_symlink() and source.is_dir():
        for entry in sorted(source.iterdir()):
            yield from _linked(place / entry.name, checkout)
    elif source.exists() and not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source)
        yield place


def check(params: Params, name: str) -> None:
    """Raise Refused if the records of an import are not here."""
    for place in places(params, name):
        if not place.exists():
            raise Refused(
                f"import@{name} reads {place}, which this machine has not, and no clone brings somebody's records; run "
                "this where they are, below the project or at an absolute path"
            )
