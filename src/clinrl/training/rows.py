"""The rows of a training stream in the worker: cases and modes, and for SFT the transcripts to imitate."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from clinrl import paths
from clinrl.artifacts import digest
from clinrl.data.dataset import read_cases
from clinrl.errors import DataError
from clinrl.tasks.base import GIVEN, Task, as_variant
from clinrl.types import Case, Transcript


@dataclass(frozen=True)
class Row:
    """A case, its mode, and whether the model thinks in that mode."""

    case: Case
    mode: str
    thinking: bool


@dataclass(frozen=True)
class Taught(Row):
    """A row with the transcript that the model learns to imitate."""

    transcript: Transcript


def read_rows(path: Path, spec: Mapping[str, Any], task: Task) -> list[Any]:
    """The rows of a resolved spec.

    In SFT each row is `Taught` the gold transcript without the rules that it omits, or with `labels_only` the gold
    answer alone. Raises DataError if the rows in the file are not those of the spec.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if digest(lines) != spec["rows"]:
        raise DataError(f"{path} is not the stream that the spec names; remove {path.parent} and start again")
    variant = spec.get("view", GIVEN)
    cases = {case.id: as_variant(task, case, variant) for case in read_cases(paths.cases(spec["data"]), task)}
    thinks = {mode: decoding["thinking"] for mode, decoding in spec["modes"].items()}
    if spec["method"] != "sft":
        return [Row(cases[line["case"]], line["mode"], thinks[line["mode"]]) for line in lines]
    policies = task.policies() if spec.get("labels_only") else {}  # the policy always_LABEL answers without reasons

    @cache
    def teach(case: str, mode: str, omit: frozenset[str]) -> Taught:
        """Cached, so that equal rows are one object, whose transcript is written and encoded once for all epochs."""
        gold = task.gold(cases[case], thinking=thinks[mode], omit=omit)
        if policies:
            whole, gold = gold, policies[f"always_{task.parse(gold)}"](cases[case], Random(0))
            if gold.messages[-1].content not in whole.messages[-1].content:  # it may hold what another case says
                raise DataError(f"{task.name} has no answers without reasons for `labels_only`; give it `policies`")
        return Taught(cases[case], mode, thinks[mode], transcript=gold)

    return [teach(line["case"], line["mode"], frozenset(line["omit"])) for line in lines]
