"""The plan of a comparison by the present params.yaml and data, and the check that it is the registered one."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from clinrl import paths
from clinrl.analysis.preregistration import DECIMALS, Registration, changes, metric_digest, rule_digest
from clinrl.analysis.retraining import most_discordant
from clinrl.analysis.run import Run
from clinrl.artifacts import digest, read_record
from clinrl.config.comparisons import Primary, check_design_effect
from clinrl.config.params import Params
from clinrl.config.recipes import HANDLING
from clinrl.data.reward_audit import identity_in_proof
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation.error_analysis import MineReport


def primary_of(params: Params, name: str) -> Primary:
    """The primary block of a comparison. Raises ParamsError if it has none."""
    primary = params.comparisons[name].primary
    if primary is None:
        raise ParamsError(
            f"comparisons.{name}.primary is missing, so there is nothing to register; name a measure, its modes, two "
            "rows and the smallest effect of interest there"
        )
    return primary


def plan(params: Params, name: str, run: Run, *, retrospective: bool, discordant: Mapping[str, float]) -> Registration:
    """The plan as it would be registered now, without its forecasts.

    `run` is the base's exam, `discordant` the expected share of discordant cases in each mode. Raises ArtefactError if
    the data of a version has no proof, or if the exam has no case for the measure, and ParamsError if the exam's cases
    are clustered and no design effect is given.
    """
    spec, primary, task = params.comparisons[name], primary_of(params, name), run.task
    share = task.shares[primary.measure]
    # A share's denominator depends on gold alone.
    inside = [i for i, gold in enumerate(run.golds) if share.of(gold, gold) is not None]
    if not inside:
        raise ArtefactError(f"{run.model.exam} has no case that {primary.measure} counts; name another measure or exam")
    clusters = None if run.clusters is None else len({run.clusters[i] for i in inside})
    if clusters is not None:
        check_design_effect(f"comparisons.{name}.primary", primary, run.model.exam)
    made = [version for versions in spec.primary_rows.values() for version in versions]
    lineage = dict.fromkeys(name for version in made for name in params.lineage(version))
    training = dict.fromkeys(params.versions[version].data for version in lineage)
    return Registration(
        name=name,
        retrospective=retrospective,
        task=task.name,
        task_version=task.version,
        measure=primary.measure,
        metric=metric_digest(task, primary.measure, run.golds),
        test=rule_digest(),
        first=primary.first,
        second=primary.second,
        versions=spec.primary_rows,
        exam=run.model.exam,
        data={run.model.exam: run.exam_digest, **{data: identity_in_proof(data) for data in training}},
        n=len(inside),
        clusters=clusters,
        scale=params.scale,
        recipes={
            run.model.name: digest(params.base(task.name).model_dump(mode="json")),
            **{version: _recipe(params, version) for version in lineage},
        },
        seeds={version: params.versions[version].seed for version in lineage},
        modes={mode: run.modes[mode] for mode in primary.modes},
        effect=primary.effect / 100,
        alpha=primary.alpha,
        discordant=dict(discordant),
        seed_sd=primary.seed_sd / 100,
        design_effect=primary.design_effect or 1.0,
        forecasts={},
    )


def discordant_shares(params: Params, name: str) -> dict[str, float]:
    """The share of cases that is expected to be discordant, by mode, from params.yaml or the parent's error analysis.

    The latter gives w, the parent's share of errors. If both rows erred as often as the parent, and independently,
    2 w (1 - w) of the cases would be discordant; at least the smallest effect of interest is assumed. Models of one
    lineage err on the same cases more often than that, so this is the cautious end. Raises ArtefactError if the error
    analysis is missing.
    """
    primary, rows = primary_of(params, name), params.comparisons[name].primary_rows
    if primary.discordant is not None:
        return dict.fromkeys(primary.modes, primary.discordant)
    parent = next(params.versions[version].parent for versions in rows.values() for version in versions)
    path = paths.mine_report(parent)
    try:
        wrong = MineReport.model_validate_json(path.read_bytes()).wrong
        shares = {mode: wrong[mode].value for mode in primary.modes}
    except (FileNotFoundError, ValidationError, KeyError):
        raise ArtefactError(
            f"{path} does not say how often {parent} errs in each mode of comparisons.{name}.primary; run `dvc repro "
            f"mine@{parent}`, or give `discordant`"
        ) from None
    return {mode: max(primary.effect / 100, round(most_discordant(w), DECIMALS)) for mode, w in shares.items()}


def registered(params: Params, name: str, run: Run) -> Registration:
    """The registration of a comparison, checked to be the plan of the present params.yaml and data.

    Raises ArtefactError if there is none, or if the plan differs; it then names the differences.
    """
    path = paths.preregistration(name)
    found = read_record(
        path,
        Registration,
        missing=lambda: (
            f"{path} does not exist, so comparisons.{name}.primary was not registered; run `clinrl preregister {name}` "
            "before the runs, or with --retrospective after them"
        ),
        broken=lambda why: f"{path} is no registration: {why}; restore it with `git checkout {path}`",
    )
    primary = primary_of(params, name)
    # Shares from an error analysis are taken as registered: the analysis may have been repeated since.
    assumed = {mode: found.discordant.get(mode, 1.0) for mode in primary.modes}
    discordant = assumed if primary.discordant is None else dict.fromkeys(primary.modes, primary.discordant)
    planned = plan(params, name, run, retrospective=found.retrospective, discordant=discordant)
    if not found.test:  # plans once did not name their test; the report says so
        planned = planned.model_copy(update={"test": ""})
    if differing := list(changes(found, planned)):
        raise ArtefactError(
            f"comparisons.{name} is not what {path} registered: it differs in {'; '.join(differing)}; restore what was "
            "registered, or register the changed plan as a comparison with a name of its own"
        )
    return planned.model_copy(update={"forecasts": found.forecasts})  # in the order of params.yaml


def _recipe(params: Params, version: str) -> str:
    """The digest of all that determines a version except its seed: parent, data spec, and recipe at this scale."""
    spec = params.versions[version]
    made: dict[str, Any] = spec.model_dump(mode="json", exclude={"why", "seed"})
    profile = params.profiles[spec.profile].model_dump(mode="json", exclude={"trainer"})
    recipe = [
        profile | {"lora": params.lora(version).model_dump(mode="json")},
        params.trainer(spec.profile).model_dump(mode="json", exclude=HANDLING),
    ]
    data = params.data_spec(spec.data).model_dump(mode="json", exclude_defaults=True)
    return digest({"version": made, "recipe": recipe, "data": data})
