"""machine.yaml: what it may hold, and that it decides how much is computed at once and nothing else."""

import re
from pathlib import Path
from typing import Any

import pytest

from clinrl.config.machine import Machine, read_machine
from clinrl.errors import ParamsError

STEP = {"micro_batch": 8, "prompts": 8, "group": 8}


def test_it_may_be_absent_or_empty(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    assert read_machine(file) == Machine()
    file.write_text("# nothing yet\n")
    assert read_machine(file) == Machine()
    file.write_text("micro_batch: 2\ngpu: 1\ntry_anyway: true\n")
    assert read_machine(file) == Machine(micro_batch=2, gpu=1, try_anyway=True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("micro_bach: 2", "micro_bach is not a key here; did you mean micro_batch?"),
        ("micro_batch: 0", "micro_batch is 0; it must be greater than or equal to 1"),
        ("micro_batch: '2'", "micro_batch is '2'; it must be a valid integer"),
        ("exam_tokens: 3", "exam_tokens is 3; it must be greater than or equal to 64"),
        ("gpu: -1", "gpu is -1; it must be greater than or equal to 0"),
        ("sampler: sglang", "sampler is 'sglang'; it must be 'transformers' or 'vllm'"),
        ("vllm: {urll: x}", "vllm.urll is not a key here; did you mean url?"),
        ("vllm: {memory_share: 1.0}", "vllm.memory_share is 1.0; it must be less than or equal to 0.95"),
        ("vllm: {at_once: 0}", "vllm.at_once is 0; it must be greater than or equal to 1"),
        ("vllm: {timeout_s: '9'}", "vllm.timeout_s is '9'; it must be a valid integer"),
        *(
            (f"vllm: {{url: '{url}'}}", "vllm.url must be http://127.0.0.1:PORT, or https://HOST:PORT; neither names")
            for url in (
                "http://10.0.0.7:8000",
                "127.0.0.1:8000",
                "ftp://127.0.0.1",
                "https://",
                "https://me:key@host:8000",
                "https://host:8000/v1",
                "https://host:8000?key=1",
                "http://localhost.example.org",
                "http://[::1",
                "https://host:99999",
            )
        ),
        ("processes: 0", "processes is 0; it must be greater than or equal to 1"),
        ("processes: 2\ngpu: 1", "gpu is 1, but 2 processes take a GPU each; leave out gpu"),
        ("- gpu", "the file is ['gpu']; it must be a mapping"),
    ],
)
def test_what_it_may_not_hold_is_said_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(text)
    with pytest.raises(ParamsError) as refused:
        read_machine(file)
    assert sentence in str(refused.value)
    assert str(refused.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("most", "changes", "rows"),
    [
        (None, {}, 8),
        (3, {}, 2),
        (16, {}, 16),
        (100, {}, 64),
        (3, {"loss_type": "bnpo"}, 8),
        (1, {"micro_batch": None}, 1),
        (None, {"micro_batch": None}, None),
    ],
)
def test_rows_at_once_divide_the_step_and_do_not_exceed_what_is_set(
    most: int | None, changes: dict[str, Any], rows: int | None
) -> None:
    assert Machine(micro_batch=most).rows_at_once(STEP | changes, 64) == rows


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:8000/", "http://[::1]:1", "https://host"])
def test_a_server_is_here_or_behind_https(tmp_path: Path, url: str) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(f"sampler: vllm\nvllm: {{url: '{url}'}}\n")
    machine = read_machine(file)
    assert (machine.sampler, machine.vllm.url, machine.vllm.at_once) == ("vllm", url, 64)


@pytest.mark.parametrize(
    ("machine", "changes", "rows"),
    [
        ({"processes": 4}, {}, 8),
        ({"processes": 8}, {"micro_batch": None}, None),
        ({"processes": 16, "micro_batch": 8}, {}, 4),
        ({"processes": 16}, {}, 4),
        ({"processes": 4, "micro_batch": 3}, {}, 2),
        ({"processes": 2, "micro_batch": 100}, {}, 32),
        ({"processes": 2, "micro_batch": 1}, {"loss_type": "bnpo"}, 8),
    ],
)
def test_processes_share_the_rows_of_a_step(machine: dict[str, Any], changes: dict[str, Any], rows: int | None) -> None:
    assert Machine(**machine).rows_at_once(STEP | changes, 64) == rows
    assert Machine(**machine).processes * (rows or 1) <= 64


@pytest.mark.parametrize(
    ("machine", "changes", "sentence"),
    [
        ({"processes": 3}, {}, "machine.yaml: 3 processes cannot share the 64 rows of a training step evenly"),
        ({"processes": 16, "micro_batch": 4}, {"loss_type": "bnpo"}, "take fewer processes, since the loss bnpo"),
    ],
)
def test_a_step_that_they_cannot_share_is_refused(
    machine: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ParamsError, match=sentence):
        Machine(**machine).rows_at_once(STEP | changes, 64)


def test_the_examples_of_the_documentation_are_accepted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/full-scale.md").read_text(encoding="utf-8")
    (one,) = re.findall(r"```yaml\n(# machine\.yaml.*?)```", page, re.DOTALL)
    several = re.sub(r"^(gpu|sampler): .*\n", "", one, flags=re.MULTILINE)
    several = re.sub(r"^# (processes)", r"\1", several, flags=re.MULTILINE)
    file = tmp_path / "machine.yaml"
    for text, number in ((one, 1), (several, 8)):
        file.write_text(text)
        assert read_machine(file).processes == number
