"""The tasks of Prefect: a stage of dvc.yaml in a child process, and the steps that change names rather than files.

Prefect caches nothing here, since DVC knows what is up to date and the registry knows what it holds. A repeated step
therefore does the work that is left, or nothing.
"""

import re
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from clinrl.config.params import load_params
from clinrl.errors import Busy, Refused, RegistryError
from clinrl.pipeline import propose as drafts
from clinrl.pipeline.plan import dvc_states
from clinrl.pipeline.propose import Draft
from clinrl.registry import versions
from clinrl.registry.versions import Entry
from clinrl.release import decisions, promotion
from clinrl.release.gate import Decision
from clinrl.runtime import child, dvc_state
from flows import interpreter, records, runs

LIGHT = {"dataset", "import", "validate", "validate-import", "probe"}
"""Stages that neither train nor load a model: they may run beside a training."""
LAST_WORDS = 15
"""The number of last lines of a stage that are kept to explain a failure."""
CHATTER = ("Updating lock file", "Generating lock file", "Use `dvc push`", "To track the changes")
"""The beginnings of the lines that DVC prints after every stage."""
BUSY_RETRIES = 8
AWAY_S = [1.0, 5.0, 20.0]
"""Seconds before each new attempt at a registry that did not answer, or at a lock that another process held."""

_LOCKED = ("Unable to acquire lock", "Unable to read RWLock-file", "is busy, it is being blocked by")
_EXITED = re.compile(r"exited with (-?\d+)$")


class StageFailed(Refused):
    """A stage of dvc.yaml ended without its outputs. The exit code is that of its command."""

    def __init__(self, sentence: str, exit_code: int = 1) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class DvcBusy(StageFailed):
    """Another DVC held the lock of a path, for which none waits."""


def _failed_with(*errors: type[Exception]) -> Callable[[Any, Any, Any], bool]:
    """The condition of a retry: the last attempt ended with one of these."""
    return lambda _task, _run, state: isinstance(state.result(raise_on_failure=False), errors)


REGISTRY: dict[str, Any] = {
    "retries": len(AWAY_S),
    "retry_delay_seconds": AWAY_S,
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": _failed_with(RegistryError, Busy),
    "cache_policy": NO_CACHE,
}
"""The options of a task that uses the registry: how it is retried."""


@task(
    task_run_name="{stage}@{name}",
    retries=BUSY_RETRIES,
    retry_delay_seconds=2,
    retry_jitter_factor=0.5,
    retry_condition_fn=_failed_with(DvcBusy),  # and nothing else: continuing a training is the trainer's business
    cache_policy=NO_CACHE,
)
def repro(stage: str, name: str) -> None:
    """Bring one stage up to date, without the stages before it, and pass its output on to the run's log.

    Training, evaluating and merging wait for their slot. Raises StageFailed with the stage's own last message,
    ParamsError for an invalid params.yaml, before DVC makes paths of it, and Refused as `interpreter.stages_python`
    does, or as `records.check` does.
    """
    logger, words = get_run_logger(), deque[str](maxlen=LAST_WORDS)

    def say(line: str) -> None:
        if not line.startswith(CHATTER):
            words.append(line)
            logger.info("%s", line)

    with nullcontext() if stage in LIGHT else runs.slot(runs.TRAINING):
        params = load_params()
        if stage == "import":  # DVC would name a missing path, but not why it is missing
            records.check(params, name)
        dvc_state.fence()
        python = interpreter.stages_python()
        code = child.run([python, *dvc_state.REPRO, "--single-item", f"{stage}@{name}"], say, python=python)
    if code:
        raise failure(f"{stage}@{name}", code, list(words))


def failure(address: str, code: int, words: list[str]) -> StageFailed:
    """Why a stage failed, from the exit code of its supervisor and the last lines that DVC and its command printed."""
    text = "\n".join(words)
    if any(sign in text for sign in _LOCKED):
        sentence = f"{address} did not run: another DVC is at work in this project; try again when it is done, or, if "
        sentence += "none is, as after a power cut, remove .dvc/tmp/rwlock"
        return DvcBusy(sentence, Busy.exit_code)
    if (number := child.signal_of(code)) is not None:
        sentence = f"{address} failed: it was killed ({number.name}), not by its own doing; the same command continues"
        return StageFailed(sentence)
    own = next((line for line in reversed(words) if line.startswith("clinrl: ")), None)
    dvcs = next((line for line in reversed(words) if line.startswith("ERROR: ")), None)
    found = next(filter(None, (_EXITED.search(line) for line in reversed(words))), None)
    reason = (own or dvcs or (words[-1] if words else f"exit code {code}, without any output")).split(": ", 1)[-1]
    return StageFailed(f"{address} failed: {reason}", int(found[1]) if found and int(found[1]) > 0 else 1)


def bring_up_to_date(addresses: list[str], done: Callable[[str], None] | None = None) -> list[str]:
    """Run the stages that are not up to date, in the given order, and return their addresses. Calls `done` with each.

    DVC judges a stage by its present inputs, so every stage after the first stale one is given to DVC unasked.
    """
    states = dvc_states(addresses)
    first = next((i for i, address in enumerate(addresses) if states[address] != "up to date"), len(addresses))
    for address in addresses[first:]:
        stage, name = address.split("@", 1)
        repro(stage, name)
        if done is not None:
            done(address)
    return addresses[first:]


@task(task_run_name="register {name}", **REGISTRY)
def register(name: str) -> Entry:
    """Register a version or a merge; the same one is never registered twice."""
    entry = versions.register(load_params(), name)
    get_run_logger().info("%s is version %d of %s", name, entry.number, entry.model)
    return entry


@task(task_run_name="decide {name}", **REGISTRY)
def decide(name: str) -> Decision:
    """Decide on a registered version by its gate, and record the decision."""
    decision = decisions.decide(load_params(), name)
    for reason in decision.reasons:
        get_run_logger().info("%s", reason)
    return decision


@task(task_run_name="promote {name}", **REGISTRY)
def promote(name: str, decision: Decision, approval: dict[str, Any], approved: str = "") -> Entry:
    """Make a version the champion, with its decision and a signed approval of it, or of the decision `approved`."""
    entry = promotion.promote(load_params(), name, decision=decision, approval=approval, approved=approved)
    get_run_logger().info("%s is the champion of %s, approved by %s", name, entry.model, entry.tags["approver"])
    return entry


@task(task_run_name="refuse {decision.candidate}", cache_policy=NO_CACHE)
def refuse(decision: Decision, reason: str) -> None:
    """Record that a version or a merge was not approved."""
    promotion.refuse(load_params(), decision, reason)
    get_run_logger().info("%s was not approved: %s", decision.candidate, reason)


@task(task_run_name="draft {task_name}", cache_policy=NO_CACHE)
def draft(task_name: str) -> Draft:
    """Write the next version of a task into params/drafts.yaml, from its champion's errors and within its plan."""
    made = drafts.stage(load_params(), task_name, is_planned=True)
    rules = ", ".join(target.rule for target in made.targets)
    get_run_logger().info("%s is drafted from %s for %s; lever: %s", made.name, made.parent, rules, made.lever)
    return made


@task(task_run_name="drop {made.name}", **REGISTRY)
def drop(made: Draft, reason: str) -> None:
    """Take a draft without a gain out of params/drafts.yaml, and remove its alias `candidate`; its reports stay."""
    held = versions.holder(made.task, versions.CANDIDATE)
    if held is not None and held.name == made.name:
        versions.point(made.task, versions.CANDIDATE, None)
    drafts.drop(made, reason)
    get_run_logger().info("%s is dropped: %s", made.name, reason)
