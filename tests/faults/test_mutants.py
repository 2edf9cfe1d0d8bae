"""Ten small errors in the heart of the code, one at a time: the test that is named beside each fails for it.

A test that passes with such an error guards nothing. Who rewrites one of these lines writes its error here anew.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from once import RUN

pytestmark = pytest.mark.faults

ROOT = Path(__file__).resolve().parents[2]
FAILED = 1
"""How pytest ends if a test failed. With an import that fails, or without a test, it ends otherwise."""


class Mutant(NamedTuple):
    """An error in the code, and the test that finds it."""

    file: str
    old: str
    new: str
    test: str


MUTANTS = {
    "a rule": Mutant(
        "clinrl/tasks/esi/rules.py",
        "p.hr_bpm > limits.hr_bpm",
        "p.hr_bpm >= limits.hr_bpm",
        "tests/tasks/test_esi_rules.py::test_limits_are_strict_in_every_band",
    ),
    "a reward": Mutant(
        "clinrl/tasks/esi/rewards.py",
        "    if total < reward.floor:",
        "    if total < reward.unreadable:",
        "tests/tasks/test_esi_rewards.py::test_no_answer_is_strictly_the_worst",
    ),
    "a parser": Mutant(
        "clinrl/tasks/esi/answer.py",
        "if len(set(levels)) > 1:",
        "if len(set(levels)) > 2:",
        "tests/tasks/test_esi_answer.py::test_two_answers_are_read_only_if_they_agree",
    ),
    "an advantage": Mutant(
        "clinrl/training/loss.py",
        "else advantages != 0,",
        "else advantages > 0,",
        "tests/training/test_loss.py::test_dead_rows_and_shared_prompts_are_not_forwarded",
    ),
    "an interval": Mutant(
        "clinrl/intervals.py",
        'alpha=1 - LEVEL, method="wilson"',
        'alpha=1 - LEVEL, method="normal"',
        "tests/test_intervals.py::test_wilson_of_the_published_36_cases",
    ),
    "the gate": Mutant(
        "clinrl/release/gate.py",
        "above = change is not None and change.low > 0",
        "above = change is not None and change.value > 0",
        "tests/release/test_gate.py::test_a_lead_that_chance_may_explain_is_none",
    ),
    "a signature": Mutant(
        "clinrl_loader.py",
        "    except InvalidSignature:\n        return False",
        "    except InvalidSignature:\n        return True",
        "tests/signing/test_dsse.py::test_every_change_of_an_envelope_is_found",
    ),
    "a digest": Mutant(
        "clinrl/artifacts.py",
        "if sha256_file(path) != expected:",
        "if not sha256_file(path):",
        "tests/models/test_bases.py::test_an_altered_base_is_refused",
    ),
    "a pool": Mutant(
        "clinrl/tasks/esi/cases.py",
        "if pool_of(group) != pool:",
        "if pool_of(group) not in (pool, 'exam'):",
        "tests/tasks/test_esi_cases.py::test_pools_share_no_template",
    ),
    "a seed": Mutant(
        "clinrl/models/generate.py",
        "torch.manual_seed(seed)",
        "torch.manual_seed(0)",
        "tests/models/test_rollout.py::test_sampling_obeys_its_seed_and_leaves_the_global_one",
    ),
}


def run(source: Path, tests: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run tests of this checkout on the code of a folder, and keep apart what they build of it."""
    env = {name: value for name, value in os.environ.items() if name != RUN} | {
        "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(source.parent / "hypothesis"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    command += ["-m", "", *tests]  # those too that the default run leaves out
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the code that may be changed."""
    return Path(shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__")))


def test_the_code_as_it_is_passes_all_of_them(source: Path) -> None:
    done = run(source, [mutant.test for mutant in MUTANTS.values()])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", MUTANTS)
def test_an_error_fails_its_test(source: Path, name: str) -> None:
    mutant = MUTANTS[name]
    text = (source / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, f"{mutant.file} has another text by now; write the error anew"
    (source / mutant.file).write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    done = run(source, [mutant.test])
    assert done.returncode == FAILED, done.stdout + done.stderr
