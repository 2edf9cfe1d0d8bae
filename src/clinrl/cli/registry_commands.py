"""Commands about planned and registered versions: one function a command, which prints and returns an exit code."""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clinrl import paths
from clinrl.analysis import alerts
from clinrl.cli.names import check_name, names
from clinrl.cli.stage_commands import make
from clinrl.config.model import MERGED
from clinrl.config.params import Params
from clinrl.errors import ParamsError, echo
from clinrl.evaluation import notebook
from clinrl.evaluation.answers import HISTORY
from clinrl.pipeline import propose as drafts
from clinrl.registry import versions as registry
from clinrl.release import decisions, promotion
from clinrl.release import lineage as lineages
from clinrl.reports import numbers
from clinrl.reports.tables import show
from clinrl.signing.approval import check_token, sign_approval
from clinrl.tracking.mlflow_store import place, store

COLUMNS = ("model", "number", "version", "aliases", "gate", "approver", "parent", "digest")
NARROW = COLUMNS[:-2]
"""The columns for a terminal that is too narrow for all: a digest would break into two lines."""
FINDINGS = ("metric", "mode", "limit", "observed", "verdict")
ALARMS = ("step", "level", "name", "about", "observed", "limit", "says")
DRAFT = ("version", "parent", "lever", "rule", "cases", "worth", "mean cost")
LINKS = ("version", "link", "state", "digest", "says")


def register(params: Params, name: str) -> None:
    """Register a version or a merge and print its row."""
    gc.disable()  # it would scan every imported object again and again, which takes a sixth of the time
    try:
        _show(registry.register(params, name))
    finally:
        gc.enable()


def decide(params: Params, name: str, *, as_json: bool = False) -> int:
    """Decide on a version; print every finding and the metrics of each model, as an approver sees them.

    The reasons go to stderr, with the decision's digest, which an approval signs. Returns 0 if the version may be
    promoted, else 1.
    """
    decision = decisions.decide(params, name)
    rows = [
        {
            **finding.model_dump(include={"metric", "mode", "limit"}),
            "observed": "not measured" if finding.observed is None else f"{finding.observed:.6g}",
            "verdict": "passed" if finding.passed else "refused",
        }
        for finding in decision.findings
    ]
    content = decision.model_dump(mode="json") | {"digest": decision.digest}
    show(FINDINGS, rows, as_json=as_json, content=content)
    if sys.stdout.isatty() and not as_json:  # scripts get one table; the form is in the JSON
        print()
        answered = numbers.form(decision.rows)
        show(tuple(answered[0]), answered, as_json=False)
    for reason in decision.reasons:
        echo(reason)
    if decision.budget:
        echo(decision.budget)
    how = f"; to approve it: clinrl approve {decision.digest} --as NAME" if decision.promote else ""
    echo(f"decision {decision.digest}{how}")
    return 0 if decision.promote else 1


def promote(params: Params, name: str, *, approver: str, token: str | None = None) -> None:
    """Decide on a version, promote it if it may be, and print its row."""
    approver = promotion.check_listed(params, approver)  # refused before a decision, which spends a look
    entry = promotion.settle(params, name)  # completes a promotion that a kill interrupted
    if entry is None:
        decision = decisions.decide(params, name)
        if token is None:
            approval = sign_approval(params, decision.digest, approver)
        else:
            approval = check_token(params, decision.digest, token, approver)
        entry = promotion.promote(params, name, decision=decision, approval=approval)
    _show(entry)


def rollback(
    params: Params, name: str, *, approver: str, champion: str | None = None, earlier: str | None = None
) -> None:
    """Make the previous champion of a registered model the champion again and print its row.

    `champion` is the name or number of the version that is to be demoted; without it a rollback is not undone.
    `earlier` is the champion to bring back, if not the previous one. Warns on stderr if the full model of the demoted
    version is still a champion. Raises ParamsError for an alias, which would name another version when the command is
    given twice.
    """
    named = {"--from": champion, "--to": earlier}
    found = {option: registry.find(name, which) for option, which in named.items() if which is not None}
    for option, entry in found.items():
        if named[option] in entry.aliases:
            raise ParamsError(
                f"{option} {named[option]} is an alias, which moves; name the version: {option} {entry.number}"
            )
    of, to = (found[option].digest if option in found else "" for option in named)
    _show(promotion.rollback(params, name, approver=approver, of=of, to=to))
    gone = registry.holder(name, promotion.PREVIOUS)
    full = registry.holder(name + MERGED, registry.CHAMPION)
    if gone and full and full.tags.get("parent_digest") == gone.digest:
        echo(
            f"{full.name}, the full model of {gone.name}, is still the champion of {full.model}; "
            f"`clinrl rollback {full.model} --approver NAME` is for that"
        )


def versions(params: Params, name: str, *, as_json: bool = False) -> None:
    """Print every version of a registered model, oldest first; if there is none, say so on stderr."""
    found = registry.entries(name)
    _show(*found, as_json=as_json)
    if not found:
        echo(f"no model {name} is registered in {place(store())}; `clinrl register NAME` registers a version")


def lookup(params: Params, name: str, which: str | None, *, as_json: bool = False) -> None:
    """Print the version that an alias, a name or a number stands for."""
    if which is None:
        raise ParamsError(f"WHICH is missing: champion, candidate, previous, a version of {name} or a number")
    entry = registry.find(name, which)
    content = _row(entry) | {"tags": entry.tags, "uri": f"models:/{entry.model}/{entry.number}"}
    _show(entry, as_json=as_json, content=content)


def alarms(params: Params, name: str, *, as_json: bool = False) -> int:
    """Print the alerts of a version's training, from its history. Returns 1 if one of them stops a training, else 0."""
    found = alerts.alarms(alerts.read(paths.adapter(name) / HISTORY))
    show(ALARMS, [alarm.model_dump(include=set(ALARMS)) for alarm in found], as_json=as_json)
    if not found:
        echo(f"nothing was wrong with the training of {name}")
    for alarm in found:
        echo(f"{alarm.name} {alarm.about}: what usually helps: {alarm.helps}")
    return 1 if any(alarm.level == "stop" for alarm in found) else 0


def compare(params: Params, source: Path, name: str, other: str | None = None, *, as_json: bool = False) -> None:
    """Write a comparison of params.yaml, or print the paired tests between two models, mode by mode."""
    if other is None:
        if name not in params.comparisons and name in {**names(params, "NAME"), **names(params, "BASE")}:
            raise ParamsError(f"{name} is one model; name the other too: `clinrl compare {name} OTHER`")
        check_name(params, name, "compare", kind="COMPARISON")
        if as_json:
            raise ParamsError("--json is for two models; the comparison of one name is written as JSON in any case")
        make(params, source, "compare", name)
        return
    if whole := next((one for one in (name, other) if one in params.comparisons), ""):
        raise ParamsError(f"{whole} is a comparison, which is given alone: `clinrl compare {whole}`")
    check_name(params, other, "compare", task=check_name(params, name, "compare"))
    if name == other:
        raise ParamsError(f"{name} cannot be compared with itself; name another model")
    tests = [(mode, test) for mode, some in notebook.compare(params, name, other).items() for test in some]
    rows = [
        {
            "mode": mode,
            "metric": test.metric,
            f"only {name}": test.b,
            f"only {other}": test.c,
            "n": test.difference.n,
            "difference": f"{test.difference.value:+.4f} [{test.difference.low:+.4f}, {test.difference.high:+.4f}]",
            "p": f"{test.p:.4g}",
        }
        for mode, test in tests
    ]
    dumped = [{"mode": mode, "name": name, **test.model_dump(mode="json")} for mode, test in tests]
    show(tuple(rows[0]), rows, as_json=as_json, content=dumped)


def draft(
    params: Params, name: str, *, parent: str | None, new_name: str | None, lever: str | None, as_json: bool
) -> None:
    """Draft the next version of a task into params/drafts.yaml and print it; the next steps go to stderr.

    A draft that was not trained yet is printed again instead, unless `new_name` or `lever` asks for another one.
    """
    untrained = None if new_name or lever else drafts.find_untrained(params, name, parent)
    made = untrained or drafts.stage(params, name, parent=parent, name=new_name, lever=lever)
    rows: list[dict[str, Any]] = [
        {
            "version": made.name,
            "parent": made.parent,
            "lever": made.lever,
            "rule": target.rule,
            "cases": target.n,
            "worth": f"{target.worth:.2f}",
            "mean cost": numbers.decimal(target.cost),
        }
        for target in made.targets
    ]
    show(DRAFT, rows, as_json=as_json, content=made.model_dump(mode="json"))
    echo(
        f"{made.name} is in params/drafts.yaml, to be read and changed; `clinrl plan {made.name}` says what it "
        f"would train, `dvc repro evaluate@{made.name}` trains and evaluates it"
    )


def lineage(params: Params, name: str, *, as_json: bool = False) -> int:
    """Print every link of a version's lineage, and broken ones again on stderr. Returns 1 if one is broken, else 0."""
    links = lineages.walk(params, name)
    _show_digests(LINKS, [link.model_dump() for link in links], as_json=as_json)
    broken = [link for link in links if link.state == "broken"]
    for link in broken:
        echo(f"{link.version}, {link.link}: {link.says}")
    return 1 if broken else 0


def _show(*entries: registry.Entry, as_json: bool = False, content: Any = None) -> None:
    _show_digests(COLUMNS, [_row(entry) for entry in entries], as_json=as_json, narrow=NARROW, content=content)


def _show_digests(columns: Sequence[str], rows: list[dict[str, Any]], *, as_json: bool, **named: Any) -> None:
    """Show a table; only JSON has the digests whole."""
    short = [row if as_json else row | {"digest": row["digest"][:16]} for row in rows]
    show(columns, short, as_json=as_json, **named)


def _row(entry: registry.Entry) -> dict[str, Any]:
    return {
        "model": entry.model,
        "number": entry.number,
        "version": entry.name,
        "aliases": ", ".join(entry.aliases),
        "gate": entry.tags.get("gate", "open"),
        "approver": entry.tags.get("approver", ""),
        "parent": entry.tags.get("parent", ""),
        "digest": entry.digest,
    }
