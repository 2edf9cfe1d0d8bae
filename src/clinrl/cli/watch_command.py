"""`clinrl watch`: report on a served model from its counts, and count labels that arrive later."""

from pathlib import Path

from clinrl.cli.names import names
from clinrl.config.params import Params
from clinrl.errors import Refused, echo
from clinrl.registry import versions
from clinrl.reports.tables import show
from clinrl.tasks.base import get_task
from clinrl.watching import labels
from clinrl.watching.standing import Finding, standing

ROWS = 10
"""Features that the table shows, most significant first; JSON has all."""


def watch(params: Params, action: str, name: str, *, file: Path | None = None, as_json: bool = False) -> int:
    """Report on champion and candidate, or count the labels of `file`.

    Returns 1 if there is an alarm, or if no label is of an answer that is kept; else 0. Raises Refused if nothing was
    counted on this machine, since the absence of an alarm then means nothing.
    """
    task = get_task(names(params, "MODEL")[name])
    if task.episodes is not None:
        raise Refused(f"{name} is played with tools, so `clinrl serve` does not serve it, and nothing of it is watched")
    if file is not None:
        matched, given = labels.take_in(name, task, file)
        echo(f"{matched} of {given} labels are of answers that are kept, and were counted")
        return 0 if matched else 1
    entries = [versions.holder(name, alias) for alias in (versions.CHAMPION, versions.CANDIDATE)]
    found = [standing(params, entry) for entry in entries if entry]
    if not any(one.requests or one.safety for one in found):
        few = ["too few requests of a version were counted on this machine"]
        lacks = ", and ".join(few + [one.unseen for one in found if one.unseen][:1])
        lacks = lacks if found else "the registry has no champion or candidate"
        raise Refused(f"nothing of {name} is watched here: {lacks}; look where `clinrl serve {name}` runs")
    rows = [{"version": one.version, **row.model_dump()} for one in found for row in (*one.safety, *one.drift[:ROWS])]
    content = [one.model_dump(mode="json") for one in found]
    show(("version", *Finding.model_fields), rows, as_json=as_json, content=content)
    for one in found:
        alarms = f"alarm: {', '.join(one.alarms)}" if one.alarms else "no alarm"
        if one.exposed is not None:
            alarms += f"; {task.noun_of(one.safety[0].feature)} are possible with {one.exposed:.0%} of the labels"
        alarms += f"; drift was not looked at: {one.unseen}" if one.unseen else ""
        echo(f"{one.version}: {one.requests} requests; {alarms}")
    return int(any(one.alarms for one in found))
