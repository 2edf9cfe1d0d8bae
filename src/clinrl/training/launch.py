"""Train one version: the parent process, which checks the inputs, starts the worker and publishes the adapter.

Training runs in a child process, so that a crash, an out-of-memory kill or a signal ends only the child, and the parent
can report it. One file, the resolved spec, determines everything the child does. Its digest names the folder of the
run's checkpoints, so the same command continues the same run and no other.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from clinrl import paths
from clinrl.artifacts import (
    PUBLISHED,
    canonical_json,
    digest,
    exclusive,
    identity,
    remove_published,
    seal,
    staged,
    write_json,
    write_text,
)
from clinrl.config.machine import Machine, read_machine, sequences_of
from clinrl.config.params import Params
from clinrl.config.recipes import HANDLING
from clinrl.data.dataset import read_cases
from clinrl.data.reward_audit import identity_in, validated_identity
from clinrl.data.sampling import omitted, training_stream
from clinrl.errors import Alarmed, ArtefactError, TrainingError, echo
from clinrl.models import bases, needs, step_time
from clinrl.models.judges import identities
from clinrl.reports import model_card
from clinrl.runtime import determinism
from clinrl.runtime.worker_process import live_metrics, run_worker
from clinrl.tasks.base import GIVEN, get_task
from clinrl.training.world import OTHERS, STATUS, check_alone

SPEC = "spec.json"
ROWS = "rows.jsonl"
ADAPTER = "adapter"
SAMPLERS = "samplers.json"
"""The file with the samplers of a training at full scale: the identity of each, and from which step on it sampled.
Rejection sampling counts parts of its completions instead, which are all sampled before the first step."""
DISK_FULL = 5
"""The worker's exit code when the disk is full, so that it cannot even write its status."""


def stage(params: Params, version: str) -> None:
    """Train `version` and write `data/adapters/<version>`.

    Raises ArtefactError if the data, its proofs, the parent or the base are absent or do not fit together, ParamsError
    if machine.yaml is wrong, Busy if the version is being trained already, OutOfMemory if it cannot fit at full scale,
    Alarmed if an alert stopped the training, and TrainingError if it ended without an adapter for another reason. If
    the same command would continue the run, the message says from which step.
    """
    check_alone(os.environ)
    target = paths.adapter(version)
    with exclusive(target):
        spec, rows = resolve(params, version)
        base = bases.reference(paths.base(spec["task"]))
        local = _on_this_machine(spec)
        folder, by_dvc = paths.checkpoints(version, digest(spec)), "DVC_STAGE" in os.environ
        remove_published(version, but=folder if by_dvc else None)  # by hand, a version is trained as often as one asks
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # completions may repeat somebody's records
        write_text(folder / ROWS, "".join(canonical_json(row) + "\n" for row in rows))
        handling = params.trainer(params.versions[version].profile).model_dump(include=HANDLING)
        write_json(folder / SPEC, local | handling)
        fields = manifest_fields(spec)
        tracked = {"task": spec["task"], "version": version, "recipe": fields["spec"]}
        write_json(folder / paths.TRAINING_FILE, tracked)
        status, steps = _status(folder), spec["trainer"]["steps"]
        if (folder / PUBLISHED).exists():
            echo(f"{version} was trained to its last step before; to train it anew, remove {folder}")
        elif (status["state"], status["step"]) != ("completed", steps):
            needs.check(params, version, read_machine())
            step_time.announce(params, version, read_machine())
            # The worker may die before it writes a status. That of an earlier attempt must not pass for its own.
            write_json(folder / STATUS, {**status, "state": "starting", "reason": ""})
            for file in folder.glob(OTHERS.format("*")):
                file.unlink()
            with live_metrics(folder) as tell:
                code = run_worker(folder / SPEC, several=local["machine"]["processes"] > 1)
                tell(_fate(code, _status(folder)["state"]))
            _judge(code, folder, version, steps)
        with staged(target) as out:
            for file in sorted((folder / ADAPTER).iterdir()):
                shutil.copyfile(file, out / file.name)
            lineage, records = params.lineage(version), params.records_of(version)
            write_text(out / "README.md", model_card.write(fields, lineage=lineage, records=records, base=base))
            if (folder / SAMPLERS).exists():
                fields["spec"]["samplers"] = json.loads((folder / SAMPLERS).read_text(encoding="utf-8"))
            seal(out, **fields)
        (folder / PUBLISHED).touch()
        if not by_dvc:
            remove_published(version)
            return
        # DVC has yet to record the adapter. If it dies or finds the disk full, it removes the folder and starts the
        # stage again, so what the adapter was copied from stays until the version is evaluated.
        for part in folder.iterdir():
            if part.is_dir() and part.name != ADAPTER:
                shutil.rmtree(part)


def _on_this_machine(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec for the worker, with the settings of machine.yaml, which its digest does not cover."""
    machine, trainer = read_machine(), spec["trainer"]
    if spec["scale"] == "embedded":  # its settings would give other bytes; but a wrong file is refused first
        machine = Machine()
    rows = machine.rows_at_once(trainer, sequences_of(trainer))
    return {**spec, "trainer": trainer | {"micro_batch": rows}, "machine": machine.model_dump()}


def resolve(params: Params, version: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Everything that determines the adapter: the spec as JSON, and the rows of the training stream in order.

    A row has the id of its case, its mode, and the rules that its label omits (SFT only). Raises ArtefactError for the
    same reasons as `stage`.
    """
    block = params.versions[version]
    task, profile = get_task(block.task), params.profiles[block.profile]
    inputs = {
        "base": identity(bases.of_version(task, paths.base(block.task))),
        "parent": _parent(params, version),
        "data": validated_identity(block.data, task),
    }
    proof, advice = paths.probe_proof(version), f"run `dvc repro probe@{version}`"
    if identity_in(proof, f"{version} did not pass the probe", "probe", advice) != inputs["data"]:
        raise ArtefactError(f"{proof} is for other data than {version} would train on; {advice}")
    cases, omit = list(read_cases(paths.cases(block.data), task)), profile.omit if profile.method == "sft" else {}
    rows = [
        {"case": row.case.id, "mode": row.mode, "omit": sorted(omitted(row.case, omit, block.seed))}
        for row in training_stream(params, version, cases)
    ]
    oracles = {} if profile.method == "sft" else identities(task, params.reward(version), paths.base(block.task))
    found = {"rows": digest(rows), "environment": determinism.record(), "inputs": inputs}
    spec = requested(params, version) | found | ({"oracles": oracles} if oracles else {})
    # Labels may be integers in YAML, but JSON has string keys only. The round trip makes the spec what the child reads.
    return json.loads(canonical_json(spec)), rows


def requested(params: Params, version: str) -> dict[str, Any]:
    """The part of an adapter's spec that its params determine. Optional settings are included only if they are set."""
    block = params.versions[version]
    profile = params.profiles[block.profile]
    spec = {
        "version": version,
        "task": block.task,
        "task_version": get_task(block.task).version,
        "scale": params.scale,
        "parent": block.parent,
        "data": block.data,
        "seed": block.seed,
        "profile": block.profile,
        "method": profile.method,
        "lora": params.lora(version).model_dump(mode="json"),
        "stream": profile.stream.model_dump(mode="json"),
        "omit": profile.omit if profile.method == "sft" else {},
        "reward": None if profile.method == "sft" else params.reward(version).model_dump(mode="json"),
        "modes": {mode: {"thinking": params.modes[mode].thinking} for mode in profile.modes},
        "trainer": params.trainer(block.profile).model_dump(mode="json", exclude=HANDLING),
    }
    optional = {
        "waiver": profile.waiver,
        "view": "" if profile.view == GIVEN else profile.view,
        "qlora": profile.qlora,
        "labels_only": profile.method == "sft" and profile.labels_only,
        "placebo": profile.placebo if profile.method == "grpo" else "",
    }
    return spec | {key: value for key, value in optional.items() if value}


def manifest_fields(spec: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `seal` for the adapter of a resolved spec."""
    return {
        "kind": "adapter",
        "name": spec["version"],
        "task": spec["task"],
        "task_version": spec["task_version"],
        "spec": {key: value for key, value in spec.items() if key not in ("version", "task", "task_version", "inputs")},
        "inputs": spec["inputs"],
    }


def _parent(params: Params, version: str) -> str:
    block = params.versions[version]
    folder = paths.adapter(block.parent)
    if not folder.is_dir():
        how = f"clinrl base {block.task}" if block.parent == f"{block.task}-base" else f"dvc repro train@{block.parent}"
        raise ArtefactError(f"{version} starts from {block.parent}, but {folder} does not exist; run `{how}` first")
    return bases.made_of(get_task(block.task), folder)["adapter"]


def _status(folder: Path) -> dict[str, Any]:
    """The status that process 0 wrote; that of another process if it failed and process 0 did not say that it did."""
    try:
        status: dict[str, Any] = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"state": "absent", "step": 0, "reason": ""}
    others = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(OTHERS.format("*")))]
    failed = [other for other in others if other["state"] == "failed" and status["state"] != "failed"]
    return failed[0] if failed else status


def _judge(code: int, folder: Path, version: str, steps: int) -> None:
    """Raise TrainingError unless the worker exited with 0 and its status says that it reached the last step."""
    status = _status(folder)
    if (code, status["state"], status["step"]) == (0, "completed", steps):
        return
    resume = f"the same command continues from step {status['step']} of {steps}"
    if code == DISK_FULL:  # there may be no room for a status
        raise TrainingError(f"training of {version} ended because the disk is full; free some space, and {resume}")
    if status["state"] in ("starting", "running"):  # it died before it could write how it ended
        write_json(folder / STATUS, {**status, "state": "ended"})
    if status["state"] == "stopped":
        raise TrainingError(f"training of {version} was stopped; {resume}")
    if status["state"] == "failed":
        kind = Alarmed if code == Alarmed.exit_code else TrainingError
        raise kind(f"training of {version} failed: {status['reason']}")
    if code == -signal.SIGKILL:
        why = "was killed (signal 9; if nobody did it, the machine ran out of memory: see `clinrl doctor`)"
    elif code < 0:
        why = f"was ended by signal {-code} ({signal.Signals(-code).name})"
    else:
        why = f"ended with code {code} at {status['state']}, without an adapter; its last output is above"
    raise TrainingError(f"the trainer of {version} {why}; {resume}")


def _fate(code: int, state: str) -> str:
    """The MLflow status for the exit code and the last state of a worker."""
    if code == 0:
        return "FINISHED"
    return "KILLED" if code < 0 or state == "stopped" else "FAILED"
