"""docs/published.md and params/: every number of a published arm is on the page, as it is trained with at full."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from clinrl.config.params import load_params
from clinrl.evaluation.answers import decoding

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/published.md").read_text(encoding="utf-8")
PARAMS = load_params(ROOT / "params.yaml").model_copy(update={"scale": "full"})
HOW = {"checkpoint_every", "on_alarm", "loss_path", "generation_path", "held_out", "vllm", "turn_tokens"}
"""Settings of a trainer that no publication could state: how this project runs it, and checks it on the way."""
ARMS = {
    "esi": [
        "esi-distilled",
        "esi-naive-2",
        "esi-fifth-asymmetric",
        "esi-valve-2",
        "esi-clipped-2",
        "esi-fifth-rule-aware",
    ],
    "imaging": [name for name, own in PARAMS.bases["imaging"].full.recipes.items() if own.keys() - HOW],
    "audit": ["audit-published"],
}
"""Task to the recipes of its published arms and of the controls beside them."""


def test_the_arms_are_all_that_are_called_published_or_have_published_numbers() -> None:
    arms = {name for names in ARMS.values() for name in names}
    assert {name for name in PARAMS.profiles if "published" in name} <= arms
    stated = {name: own for base in PARAMS.bases.values() for name, own in base.full.recipes.items()}
    assert {name for name, own in stated.items() if own.keys() - HOW} <= arms


def written(value: Any) -> str:
    """A value as the page prints it."""
    if isinstance(value, tuple):
        return ", ".join(value)
    return str(value).lower() if isinstance(value, bool) or not isinstance(value, int | float) else f"{value:g}"


def settings(task: str, arm: str) -> dict[str, str]:
    """Every setting of an arm at full scale, as the page prints it."""
    base, profile = PARAMS.bases[task].full, PARAMS.profiles[arm]
    exam = decoding(PARAMS, profile.modes[0], task)
    found = {
        **{f"lora.{key}": value for key, value in (base.lora or profile.lora)},
        **{key: value for key, value in PARAMS.trainer(arm) if key not in HOW},
        "exam.temperature": exam["temperature"], "exam.top_p": exam.get("top_p", 1.0),
        "exam.max_new_tokens": exam["max_new_tokens"], "prefill": base.prefill,
    }  # fmt: skip
    return {key: written(value) for key, value in found.items()}


def rows(columns: str) -> Iterator[list[str]]:
    """The cells of each row of the tables with these columns."""
    for table in PAGE.split(f"| {columns} |\n")[1:]:
        for line in table.split("\n\n")[0].splitlines()[1:]:
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def stated(task: str, arm: str) -> Iterator[tuple[str, str]]:
    """Every setting that the page states of an arm, with the value that is trained with."""
    tables = {"recipes | setting | value | source": 2, "recipes | setting | taken here": 2,
              "recipes | setting | published | here | why": 3}  # fmt: skip
    for columns, place in tables.items():
        for cells in rows(columns):
            if any(fnmatch(arm, pattern) for pattern in re.findall(r"`([^`]+)`", cells[0])):
                yield cells[1], cells[place]


@pytest.mark.parametrize(("task", "arm"), [(task, arm) for task, names in ARMS.items() for arm in names])
def test_the_page_states_every_setting_once_and_as_it_is(task: str, arm: str) -> None:
    found = list(stated(task, arm))
    assert sorted(found) == sorted(settings(task, arm).items())


def test_every_source_is_listed_and_every_row_is_about_an_arm() -> None:
    listed = {cells[0] for cells in rows("source | what it is")}
    assert {source for *_, cell in rows("recipes | setting | value | source") for source in cell.split("; ")} == listed
    arms = [name for names in ARMS.values() for name in names]
    patterns = {pattern for line in PAGE.splitlines() for pattern in re.findall(r"^\| `([^`]+)`", line)}
    assert all(any(fnmatch(arm, pattern) for arm in arms) for pattern in patterns)
