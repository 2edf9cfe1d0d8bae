"""An exam that is killed goes on where it stopped, asks nobody twice, and ends with the bytes of one that was not."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import dolls
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, write_json
from clinrl.config.params import Params
from clinrl.data import dataset
from clinrl.data.dataset import read_cases
from clinrl.evaluation import evaluate
from clinrl.models import bases
from clinrl.models.generate import Prompt, Sampler
from clinrl.models.journal import Journal
from clinrl.models.probabilities import Watch
from clinrl.tasks.base import get_task
from processes import eventually

ROOT = Path(__file__).resolve().parents[2]
EXAMINE = """
import dolls
from clinrl.evaluation import evaluate
from clinrl.models.generate import Sampler
Sampler.__init__.__kwdefaults__["max_tokens"] = 1500
write = Sampler._write
def written(self, rows, *rest):
    print("asked", len(rows), flush=True)
    return write(self, rows, *rest)
Sampler._write = written
evaluate.stage(dolls.params(), "esi-base")
"""


class Killed(BaseException):
    """An end that nothing in a run catches or prepares for."""


def kill_at(patch: pytest.MonkeyPatch, last: int) -> list[int]:
    """Let the process that writes end before a batch with this number; the sizes of those that were written."""
    write, done = Sampler._write, list[int]()

    def written(self: Sampler, rows: Any, *rest: Any) -> Any:
        if len(done) == last:
            raise Killed
        done.append(len(rows))
        return write(self, rows, *rest)

    patch.setattr(Sampler, "_write", written)
    return done


@pytest.fixture
def doll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """The doll's project with its exam, entered."""
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    params = dolls.params()
    dataset.stage(params, "x1")
    exam = {"data": {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}}
    write_json(paths.data_proof("x1"), exam)
    return params


def results() -> dict[str, bytes]:
    folders = (paths.graded("esi-base"), paths.report("esi-base"), paths.exam_record("esi", "x").parent)
    return {f"{folder}/{name}": text for folder in folders for name, text in dolls.files(folder).items()}


@pytest.mark.long
def test_an_exam_goes_on_where_it_was_killed(doll: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    with dolls.few_draws():
        with monkeypatch.context() as patch:
            asked = kill_at(patch, 99)
            evaluate.stage(doll, "esi-base")
        untouched = results()
        for folder in (paths.graded("esi-base"), paths.report("esi-base")):
            shutil.rmtree(folder)
        with monkeypatch.context() as patch:
            before = kill_at(patch, 2)
            with pytest.raises(Killed):
                evaluate.stage(doll, "esi-base")
        (journal,) = Path(".clinrl/exams").iterdir()
        assert journal.name.startswith("esi-base-")
        assert (journal.stat().st_mode | (journal / "completions.jsonl").stat().st_mode) & 0o77 == 0
        assert not paths.graded("esi-base").exists()
        with monkeypatch.context() as patch:
            after = kill_at(patch, 99)
            evaluate.stage(doll, "esi-base")
    assert results() == untouched
    assert before + after == asked
    assert after
    assert not any(Path(".clinrl/exams").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("shared", [True, False])
def test_drawn_completions_and_probabilities_go_on_too(
    doll: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    task = get_task("esi")
    model, tokenizer = bases.load(doll, "esi", for_training=False)
    prompts = [Prompt(case.id, task.prompt(case.facts)) for case in read_cases(paths.cases("x1"), task)]

    def sample(journal: Journal | None) -> tuple[Any, Any]:
        assert task.ordered is not None
        sampler = Sampler(model, tokenizer, max_tokens=1200, shared=shared)
        watch = Watch(tokenizer, task.ordered)
        sampler.watch, sampler.journal = [watch], journal
        how: dict[str, Any] = {"thinking": False, "temperature": 1.2, "budget": 16}
        return [sampler.sample(prompts, seed=seed, **how) for seed in (1, 2)], watch.kept

    opened: Callable[[], Journal] = lambda: Journal(tmp_path / "journal")  # noqa: E731
    whole = sample(None)
    with monkeypatch.context() as patch:
        before = kill_at(patch, 1)  # between the batches of a call, which draw from one generator
        with pytest.raises(Killed):
            sample(opened())
    with monkeypatch.context() as patch:
        after = kill_at(patch, 99)
        assert sample(opened()) == whole
    assert whole[1]
    assert sum(before + after) == 2 * len(prompts)
    assert len(after) > 1


def test_a_journal_passes_over_a_line_that_is_not_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for number in range(3):
        journal.put(f"{number}", ids=[[number]])
    file = tmp_path / "journal/completions.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    for tail in (b'{"asked":"', b"\x00" * 40, b"[]", b'{"no": 1}', b"7", lines[3][:-1]):
        file.write_bytes(b"".join(lines[:3]) + tail)
        again = Journal(tmp_path / "journal")
        assert [*again.found] == ["0", "1"]
        again.put("2", ids=[[2]])
        assert [*Journal(tmp_path / "journal").found] == ["0", "1", "2"]


def test_a_journal_names_its_file_on_a_full_disk_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, full = os.write, os.open("/dev/full", os.O_WRONLY)
    journal = Journal(tmp_path)
    journal.put("first", written=[1])
    for cut in (lambda file, line: write(file, line[:10]), lambda _, line: write(full, line)):
        monkeypatch.setattr(os, "write", cut)
        with pytest.raises(OSError, match="completions") as raised:
            journal.put("second", written=[2])
        assert raised.value.errno == errno.ENOSPC
    monkeypatch.undo()
    journal.put("second", written=[2])
    assert [*Journal(tmp_path).found] == ["first", "second"]


def test_forks_that_write_at_once_leave_whole_lines(tmp_path: Path) -> None:
    journal, big = Journal(tmp_path), list(range(20_000))  # far beyond any buffer

    def write(name: str) -> None:
        for number in range(25):
            journal.put(f"{name} {number}", ids=big)

    forks = [get_context("fork").Process(target=write, args=(name,)) for name in ("think", "direct")]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join()
    found = Journal(tmp_path).found
    assert len(found) == 50
    assert all(entry["ids"] == big for entry in found.values())


def test_a_part_finds_its_calls_whatever_was_asked_before_it(tmp_path: Path) -> None:
    alone, after = Journal(tmp_path), Journal(tmp_path)
    alone.begin("direct")
    after.begin("think")
    after.call()
    assert alone.call() != after.call()
    after.begin("direct")
    assert after.call() == ["direct", 1]


@pytest.mark.slow
def test_kill_9_in_the_middle(doll: Params) -> None:
    def start() -> "subprocess.Popen[str]":
        environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen([sys.executable, "-c", EXAMINE], env=environment, stdout=subprocess.PIPE, text=True)

    def rows(text: str) -> int:
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("asked"))

    whole = start()
    asked = rows(whole.communicate()[0])
    assert whole.returncode == 0
    untouched = results()
    for folder in (paths.graded("esi-base"), paths.report("esi-base")):
        shutil.rmtree(folder)
    killed = start()
    eventually(lambda: sum(file.read_bytes().count(b"\n") for file in Path(".clinrl/exams").rglob("*.jsonl")) > 3, 300)
    killed.kill()
    killed.communicate()
    assert not paths.graded("esi-base").exists()
    again = start()
    left = rows(again.communicate()[0])
    assert again.returncode == 0
    assert results() == untouched
    assert 0 < left < asked
