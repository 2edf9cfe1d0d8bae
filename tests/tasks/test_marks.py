"""Marks of chat templates: what is one, and that none comes in by a data set."""

from pathlib import Path

import pytest
from test_importing import project  # noqa: F401  a fixture

from clinrl import artifacts, paths
from clinrl.data import dataset, validate
from clinrl.errors import DataError
from clinrl.models.pretrain import LLAMA, QWEN
from clinrl.tasks.base import content_id, get_task, task_names
from clinrl.tasks.marks import holds_mark
from clinrl.types import Case


@pytest.mark.parametrize(
    "mark",
    [
        *QWEN.all, *LLAMA.all, "<|eom_id|>", "<|python_tag|>", "<|reserved_special_token_5|>", "<think>", "</think>",
        "<THINK>", "</answer>", "<tool_call>", "</tool_response>", "<start_of_turn>user", "<s>", "</s>", "<pad>",
        "<image>", "<function=look>", "<fim_prefix>", "[SEP]",
        "[INST]", "[/INST]", "<<SYS>>", "<|im_", "＜|im_end|＞", "＜｜im_end｜＞", "<｜end▁of▁sentence｜>", "＜think＞",
    ],
)  # fmt: skip
def test_a_mark_is_seen_anywhere_in_a_text(mark: str) -> None:
    assert holds_mark(mark)
    assert holds_mark(f"Chest pain{mark}, age 50")


@pytest.mark.parametrize(
    "text",
    [
        "", "SpO2 < 92%, age > 60", "HR 120 | RR 30", "pain 7/10 [radiates]", "a <b> c", "BP 90/60 -> 80/50",
        "thinks of harm; answer: none", "WBC <4 or >12", "°C ≥ 38,5 – é",
    ],
)  # fmt: skip
def test_what_notes_say_is_no_mark(text: str) -> None:
    assert not holds_mark(text)


def test_a_tokenizers_own_tokens_are_marks_too() -> None:
    assert holds_mark("a §end§ b", ["§end§"])
    assert not holds_mark("a §end b", ["§end§"])


@pytest.mark.parametrize("name", task_names())
def test_no_case_that_is_drawn_holds_one(name: str) -> None:
    task = get_task(name)
    for case in task.cases(50, 3, pool="train", mix=task.checks.mixes[0]):
        assert not holds_mark(case.model_dump_json())


def poison(folder: Path, mark: str) -> None:
    """Put a mark into the third case of a data set of triage notes, whose digests are made right again."""
    task = get_task("esi")
    cases = list(dataset.read_rows(folder / paths.CASES_FILE, task))
    facts = cases[2].facts.model_copy(update={"narrative": f"{cases[2].facts.narrative}{mark}"})
    told = {"facts": facts, "id": content_id(task.name, facts, cases[2].key)}
    cases[2] = cases[2].model_copy(update=told)
    lines = [artifacts.canonical_json(Case.model_dump(case, mode="json")) + "\n" for case in cases]
    (folder / paths.CASES_FILE).write_text("".join(lines), encoding="utf-8")
    fields = artifacts.read_manifest(folder).model_dump(exclude={"files"})
    artifacts.seal(folder, **fields)


@pytest.mark.parametrize("name", ["d1", "mietic-36"])
@pytest.mark.parametrize("mark", ["<|im_end|>", "＜|im_end|＞"])
def test_a_data_set_with_a_mark_neither_passes_nor_is_read(name: str, mark: str, project) -> None:  # noqa: F811
    dataset.stage(project, name)
    poison(paths.cases(name), mark)
    with pytest.raises(DataError, match=r"row 3 \(esi-[0-9a-f]{16}\) holds a mark of a chat template") as refused:
        validate.stage(project, name)
    assert mark not in str(refused.value).replace("such as <|im_end|>", "")
    assert not paths.data_proof(name).exists()
    with pytest.raises(DataError, match="row 3"):  # as training, exam and external exam read it
        list(dataset.read_cases(paths.cases(name), get_task("esi")))
