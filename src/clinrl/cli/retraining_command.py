"""`clinrl simulate-retraining`: which drafts a change plan promotes in a year, in simulated lives of a model."""

from typing import Any

from clinrl import paths
from clinrl.analysis.retraining import SCENARIOS, Row, World, most_discordant, simulate
from clinrl.artifacts import write_json
from clinrl.config.base import check_known
from clinrl.config.params import Params
from clinrl.errors import ParamsError, echo
from clinrl.pipeline.render import write_retraining
from clinrl.reports.numbers import percent
from clinrl.reports.tables import show

COLUMNS = ("drafts", "rule", "useless", "worse", "better", "looks")
LARGER = 2
"""The larger exam of the written report has so many times the cases of the given one."""


def stage(
    params: Params, name: str, *, lives: int, weeks: int, wrong: float, discordance: float, seed: int,
    cases: int | None = None, mine: int | None = None, write: bool = False, as_json: bool = False,
) -> None:  # fmt: skip
    """Print a row for each scenario and rule of one world; with `write`, write the report on it and three others.

    Raises ParamsError for a task without a change plan, for a champion that errs in half of the cases or more, for a
    discordance above that of independent errors, and if params.yaml gives no number of cases.
    """
    check_known("plans", name, params.plans, "a task with a change plan")
    if wrong >= 0.5:
        raise ParamsError(f"--wrong is {wrong:g}; a champion errs in less than half of the cases")
    # A draft is screened on the mine data of its parent, which is the newest version.
    mined = [spec.data for spec in params.mining.values() if spec.task == name]
    drawn = [data for data, spec in params.datasets.items() if spec.task == name and spec.use == "mine"]
    given = World(
        lives=lives, weeks=weeks, wrong=wrong, discordance=discordance, seed=seed,
        cases=cases or _cases(params, params.plans[name].changes.exam, f"the exam of plans.{name}", "--cases"),
        mine=mine or _cases(params, next(reversed(mined or drawn), None), f"the mine data of {name}", "--mine"),
    )  # fmt: skip
    if given.discordance > (most := most_discordant(given.wrong)):
        raise ParamsError(
            f"--discordance is {given.discordance:g}, but two models that err in {given.wrong:g} of the cases, "
            f"independently of each other, differ in {most:.4g}; give at most that"
        )
    rows = simulate(given, params.plans[name])
    if write:
        write_json(paths.retraining_report(name), report(params, name, given, rows))
        write_retraining(paths.retraining_report(name))
    simulated = {row.scenario for row in rows}
    if left_out := "; ".join(scenario for scenario in SCENARIOS if scenario not in simulated):
        echo(f"left out, since a draft would gain as much as the champion errs, {wrong:.1%}: {left_out}")
    shares = [{kind: percent(getattr(row, kind)) for kind in COLUMNS[2:5]} for row in rows]
    texts = [
        {"drafts": row.scenario, "rule": row.rule, "looks": row.looks, **of}
        for row, of in zip(rows, shares, strict=True)
    ]
    show(COLUMNS, texts, as_json=as_json, content=[row.model_dump(mode="json") for row in rows])


def _cases(params: Params, data: str | None, what: str, option: str) -> int:
    """The number of cases of a data set by params.yaml. Raises ParamsError if params.yaml gives none."""
    if data is None or (cases := getattr(params.data_spec(data), "cases", None)) is None:
        raise ParamsError(f"params.yaml has no number of cases for {what}; give {option}")
    return int(cases)


def report(params: Params, task: str, given: World, found: list[Row]) -> dict[str, Any]:
    """The report on a world and what was found there, and on three variants of it: with a larger exam, with models that
    err independently of each other, and with lopsided drafts."""
    plan = params.plans[task]
    independent = given.model_copy(update={"discordance": round(most_discordant(given.wrong), 4)})
    larger = given.model_copy(update={"cases": LARGER * given.cases})
    lopsided = given.model_copy(update={"lopsided": True})
    return {
        "task": task,
        "protocol": plan.protocol.model_dump(mode="json"),
        "budget": plan.budget.model_dump(mode="json"),
        "studies": [
            {
                "world": world.model_dump(mode="json"),
                "rows": [row.model_dump(mode="json") for row in (found if world is given else simulate(world, plan))],
            }
            for world in (given, larger, independent, lopsided)
        ],
    }
