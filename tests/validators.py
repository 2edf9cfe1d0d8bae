"""OpenEnv's own validator, in this process, which has imported it."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def validated(*arguments: object) -> dict[str, Any]:
    """What `openenv validate` says in JSON, which passes."""
    from openenv.cli.__main__ import app
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, ["validate", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def check_episode(address: str, folder: Path, start: Mapping[str, Any], actions: Sequence[Mapping[str, Any]]) -> None:
    """The checks that the command makes in a container, made on a running server. `folder` has its manifest."""
    from openenv.validation.graders import Subject
    from openenv.validation.graders.runtime import ObservationSchemaGrader, RewardWellFormedGrader, StateContractGrader
    from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser
    from openenv.validation.runtime.collector import collect_runtime_evidence
    from openenv.validation.runtime.contracts import RuntimePlan, RuntimeReset

    options = dict(start)
    reset = RuntimeReset(episode_id="probe", seed=options.pop("seed"), options=options)
    plan = RuntimePlan(plan_schema_version="1", reset=reset, actions=list(actions))
    evidence = collect_runtime_evidence(address, plan, episode_timeout_s=60.0)
    assert evidence.failure_reason is None
    subject = Subject(
        root=folder,
        manifest=OpenEnvYamlParser().parse(folder),
        image_ref=None,
        running=None,
        outputs_dir=folder,
        runtime_evidence=evidence,
    )
    for grader in (RewardWellFormedGrader(), ObservationSchemaGrader(), StateContractGrader()):
        for _ in range(4):  # a grader's own process has five seconds, which a busy machine needs for its imports
            result = grader.run(subject)
            if not re.search("exceeded its (time|resource) budget", " ".join(map(str, result.evidence))):
                break
        assert result.status.value == "pass", (result.check_id, result.evidence)
