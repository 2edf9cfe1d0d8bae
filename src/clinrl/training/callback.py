"""The callback of a training run: it seals checkpoints, raises alerts, and writes the history and the progress."""

import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from clinrl import paths
from clinrl.analysis import alerts
from clinrl.artifacts import canonical_json, write_json
from clinrl.errors import Alarmed, TrainingError, echo
from clinrl.models.checkpoints import seal_checkpoint
from clinrl.runtime import determinism
from clinrl.runtime.progress import Queue, progress_bar
from clinrl.training.world import ALONE, OTHERS, STATUS, World

TIMINGS = "timings.jsonl"
_CLOCK = frozenset({"step_time", "reward_time", "total_flos"})
"""Logged values that differ from run to run, or that only sum up others."""

MUCH = 0.2
"""The machine counts as overcommitted if a training waits for a processor for this share of its time, or for more."""
CROWDED = 8
"""Number of steps that use one thread after a step that waited so much: two threads would wait for each other."""

KL_AT_START = 1e-6
"""Nats. Before the first update the policy equals its reference, so any divergence means a wrong reference. In
bfloat16 rounding alone exceeds this limit; there the alert `first_kl` reports a wrong reference."""


def history(log: list[dict[str, Any]]) -> str:
    """The logged steps as JSON lines, one per step, without values that a clock decides. NaN becomes null."""
    steps = [entry for entry in log if "loss" in entry]  # the other entries are summaries of the run
    return "".join(canonical_json(finite(entry)) + "\n" for entry in steps)


def finite(entry: dict[str, Any]) -> dict[str, Any]:
    """A logged step for the history: without values that a clock decides, and with None for non-finite numbers."""
    kept = {key: value for key, value in entry.items() if key not in _CLOCK}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in kept.items()}


class RunCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Seals checkpoints, stops at step boundaries, and raises TrainingError when a run goes wrong.

    Set `moved` once there is an adapter: it returns whether the adapter differs from its start. It is called after the
    first step whose gradient is not zero, since a step whose groups have equal rewards changes nothing. Of several
    processes only process 0 writes files, prints and raises alerts, because only it logs values of the whole step.
    """

    def __init__(
        self, folder: Path, *, version: str, steps: int, can_stop: bool = True, waiver: str = "", world: World = ALONE
    ) -> None:
        self.folder = folder
        self.world = world
        self.version = version
        self.steps = steps
        self.can_stop = can_stop
        """Whether an alert of level `stop` ends the run."""
        self.waiver = waiver
        self.monitor = alerts.Monitor()
        self.moved: Callable[[], bool] = lambda: False
        self.has_moved = False
        self.shares = False
        """Whether the number of threads leaves the computed bytes unchanged."""
        self.queue = Queue()
        self.crowded_until = 0
        """The step at which two threads are used again."""
        self.stop_requested = False
        self.saved = 0
        self.began = time.monotonic()
        self.line = ProgressLine(version, steps)

    def request_stop(self) -> None:
        """Stop at the end of the current step. For signal handlers."""
        self.stop_requested = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved = state.global_step
        self.has_moved = state.global_step > 0
        self.began = time.monotonic()
        state.save_steps = args.save_steps  # the checkpoint has those of the run before
        for entry in state.log_history:  # of the run that this one continues
            if "loss" in entry:
                self.monitor.add(finite(entry))
        if self.can_stop and not self.waiver:  # the run before may have been one that no alarm stops
            self.monitor.forget_stops()
        self.status("running", state.global_step)
        if self.world.is_main:
            self.line.start(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.queue.share() >= MUCH:
            self.crowded_until = state.global_step + CROWDED
        if self.shares and self.world.size == 1:  # each of several processes always uses one thread
            determinism.share(is_crowded=state.global_step < self.crowded_until)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.world.any(self.stop_requested):
            control.should_save = True
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        step = state.global_step
        for name in alerts.NUMBERS:
            value = logs.get(name)
            if value is not None and not math.isfinite(value):
                raise TrainingError(
                    f"{name} is {value} at step {step} of {self.steps}; the same command would meet it again: lower "
                    "trainer.lr, or look at the rows of this step"
                )
        if step == 1 and logs.get("kl", 0.0) > KL_AT_START and not args.bf16:
            raise TrainingError(
                f"the policy is {logs['kl']:.2g} nats from its reference before the first update (allowed "
                f"{KL_AT_START:g}): the reference is not the parent of {self.version}"
            )
        if not self.has_moved and logs.get("grad_norm", 0.0) > 0 and logs.get("learning_rate", 0.0) > 0:
            if not self.moved():
                raise TrainingError(
                    f"the adapter did not change at step {step} although its gradient is {logs['grad_norm']:.2g}: "
                    "it is not what the optimiser trains, or lr is too small for its number format"
                )
            self.has_moved = True
        if self.world.is_main:
            self._write(step, logs)
            self._report(self.monitor.add(finite({**logs, "step": step})))

    def _write(self, step: int, logs: dict[str, Any]) -> None:
        with (self.folder / TIMINGS).open("a", encoding="utf-8") as stream:
            seconds = round(time.monotonic() - self.began, 3)
            clock = {"seconds": seconds, "step_s": logs.get("step_time"), "reward_s": logs.get("reward_time")}
            stream.write(canonical_json({"step": step, **clock}) + "\n")
        with (self.folder / paths.LIVE_FILE).open("a", encoding="utf-8") as stream:
            stream.write(history([{**logs, "step": step}]))
        self.line.show(step, logs)

    def _report(self, alarms: list[alerts.Alarm]) -> None:
        """Print the alerts of a step. One of level `stop` raises Alarmed, unless `on_alarm` or a waiver forbids it."""
        for alarm in alarms:
            if alarm.level == "stop" and self.can_stop and not self.waiver:
                raise Alarmed(
                    f"stopped at step {alarm.step} of {self.steps} ({alarm.name}): {alarm.says}. What usually helps: "
                    f"{alarm.helps}. The checkpoint of step {self.saved} is the last good one"
                )
            waived = f", waived: {self.waiver}" if alarm.level == "stop" and self.waiver else ""
            echo(f"{self.version} {alarm.level} at step {alarm.step} ({alarm.name}): {alarm.says}{waived}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.world.is_main:
            seal_checkpoint(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")
        self.saved = state.global_step
        self.status("running", self.saved)

    def status(self, state: str, step: int, reason: str = "") -> None:
        """Write the state of the run, and the step from which a new start would continue.

        A process other than 0 writes only that it failed.
        """
        if not self.world.is_main and state != "failed":
            return
        file = STATUS if self.world.is_main else OTHERS.format(self.world.rank)
        write_json(self.folder / file, {"state": state, "step": step, "steps": self.steps, "reason": reason})


class ProgressLine:
    """Shows step, reward or loss, clipped share, time left and a warning of an overcommitted machine on stderr.

    It is a bar on a terminal, and elsewhere a line about every 5% of the steps.
    """

    def __init__(self, version: str, steps: int) -> None:
        self.version = version
        self.steps = steps
        self.every = max(1, steps // 20)
        self.seconds = self.rewarding = 0.0
        self.first, self.began_s, self.queue = 0, time.monotonic(), Queue()
        self.bar: Any = None

    def start(self, step: int) -> None:
        """Begin the display at a step, which an earlier run may have reached."""
        self.first, self.began_s, self.queue = step, time.monotonic(), Queue()
        if not sys.stderr.isatty():
            echo(f"{self.version} trains from step {step} to {self.steps}")
            return
        self.bar = progress_bar("{task.fields[now]}")
        self.bar.add_task(self.version, total=self.steps, completed=step, now="")
        self.bar.start()

    def show(self, step: int, logs: dict[str, Any]) -> None:
        """Show a finished step."""
        if "reward" in logs:
            now = f"reward {logs['reward']:+.3f} clipped {logs['completions/clipped_ratio']:.2f}{self._spent(logs)}"
        else:
            now = f"loss {logs['loss']:.3f} accuracy {logs.get('mean_token_accuracy', 0.0):.3f}"
        if self.bar is not None:
            self.bar.update(0, completed=step, now=now + self._waiting())
        elif step % self.every == 0 or step == self.steps:
            left_s = (time.monotonic() - self.began_s) / (step - self.first) * (self.steps - step)
            now += f", {timedelta(seconds=round(left_s))} left{self._waiting()}"
            echo(f"{self.version} step {step}/{self.steps} {now}")

    def _spent(self, logs: dict[str, Any]) -> str:
        """The time of this step, and the share of the time of all steps that went into the reward."""
        if not logs.get("step_time") or "reward_time" not in logs:
            return ""
        self.seconds += logs["step_time"]
        self.rewarding += logs["reward_time"]
        return f" {logs['step_time']:.1f} s, {100 * self.rewarding / self.seconds:.0f}% of the time for the reward"

    def _waiting(self) -> str:
        """A warning if, since the line before, the training waited for a processor for much of the time."""
        share = self.queue.share()
        return f"; machine overcommitted: {share:.0%} of the time spent waiting for a processor" * (share >= MUCH)

    def stop(self) -> None:
        """Give the terminal back."""
        if self.bar is not None:
            self.bar.stop()
