"""Pre-registration: writes the plan of a comparison, with digests and the exam's power, before the runs.

The file has no time in it. It is committed, and git's history shows whether it came before the reports.
"""

from clinrl import paths
from clinrl.analysis.preregistration import forecasts
from clinrl.artifacts import exclusive, write_json
from clinrl.config.params import Params
from clinrl.errors import ArtefactError, echo
from clinrl.evaluation.answers import open_run
from clinrl.evaluation.preregistration import discordant_shares, plan, primary_of
from clinrl.provenance import lock
from clinrl.reports.tables import show

COLUMNS = ("mode", "cases", "seeds", "effect", "discordant", "power", "detectable")


def stage(params: Params, name: str, *, retrospective: bool = False, as_json: bool = False) -> None:
    """Write data/preregistrations/<name>.json and print the power of the exam, effects in points.

    Raises ParamsError if the comparison has no primary measure, ArtefactError if it is already registered, if one of
    its two recipes has already taken its exam and `retrospective` is not set, or if a data set has no proof, and Busy
    if another command registers the same comparison.
    """
    primary, path = primary_of(params, name), paths.preregistration(name)
    with exclusive(path):
        if path.exists():
            raise ArtefactError(
                f"{path} exists: a plan is registered once; to change it, give the comparison another name"
            )
        if not retrospective:
            _check_not_run(params, name)
        run = open_run(params, params.model(f"{params.comparisons[name].task}-base"))
        made = plan(params, name, run, retrospective=retrospective, discordant=discordant_shares(params, name))
        made = made.model_copy(update={"forecasts": forecasts(made)})
        write_json(path, made.model_dump(mode="json"))
    rows = [
        {
            "mode": mode,
            "cases": made.n,
            "seeds": " and ".join(str(len(versions)) for versions in made.versions.values()),
            "effect": f"{primary.effect:g}",
            "discordant": f"{made.discordant[mode]:.1%}",
            "power": f"{found.power:.0%}",
            "detectable": "none" if found.detectable is None else f"{100 * found.detectable:.1f}",
        }
        for mode, found in made.forecasts.items()
    ]
    show(COLUMNS, rows, as_json=as_json, content=made.model_dump(mode="json"))
    echo(f"commit {path} before the runs: git's history is what says when it was written")


def _check_not_run(params: Params, name: str) -> None:
    """Refuse if a version of either row has taken its exam, by its files here or by dvc.lock."""
    recorded = lock.read() if lock.LOCK.exists() else {}
    for versions in params.comparisons[name].primary_rows.values():
        for version in versions:
            taken = [str(path) for path in (paths.report(version), paths.graded(version)) if path.exists()]
            taken += [str(lock.LOCK)] if params.model(version).stage in recorded else []
            if taken:
                raise ArtefactError(
                    f"{version} took its exam already, by {taken[0]}, and what is written after the runs is no "
                    "pre-registration; compare versions that did not run, or say --retrospective, which every report "
                    "will repeat"
                )
