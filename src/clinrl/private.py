"""The folders in which DVC keeps pickles: nobody else may write there, or they could run code as whoever runs DVC.

DVC remembers the digests of files in `diskcache`, which reads pickles (CVE-2025-69872), by default below /var/tmp/dvc,
where every user of a machine may write. `.dvc/config` puts it into the project, into a folder that git keeps, since
one that DVC makes is for everybody to write in; this module sees who can write there.
"""

import os
import stat
from pathlib import Path

from clinrl.errors import Refused

VARIABLE = "DVC_SITE_CACHE_DIR"
"""Where DVC looks first for the folder's place."""
SITE = Path(".clinrl/dvc")
"""The place that `.dvc/config` names."""
TMP = Path(".dvc/tmp")
"""Locks, and the queue of experiments."""


def fence() -> None:
    """Close both folders to everybody but their owner. Raises Refused for one that others could write before.

    Does nothing where there is no DVC project.
    """
    if not Path(".dvc").is_dir():
        return
    site = Path(os.environ.get(VARIABLE) or SITE)
    site.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (site, TMP):
        if not folder.exists():
            continue
        inside = [] if folder.is_absolute() else [above for above in folder.parents if above != Path()]
        if not all(_is_ours(place) for place in (folder, *inside)):
            advice = f"set {VARIABLE} to a folder of your own, or unset it"
            if inside:
                above = " ".join(map(str, inside))
                advice = f"make it anew: `chmod go-w {above}; rm -rf {folder}; mkdir -m 700 {folder}`"
            raise Refused(
                f"others than you can write in {folder}, where DVC keeps pickles, which can run code; {advice}"
            )
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(0o700)


def _is_ours(folder: Path) -> bool:
    """Whether a folder is no link, and not everybody's to write in.

    Who owns the project may own it too, since they could change the code as well.
    """
    found = folder.lstat()
    owners = {os.geteuid(), Path.cwd().stat().st_uid}
    return not stat.S_ISLNK(found.st_mode) and found.st_uid in owners and not found.st_mode & stat.S_IWOTH
