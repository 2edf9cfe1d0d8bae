"""The notebooks run in a clone, from what git holds alone, and say what the reports say."""

import json
from pathlib import Path
from typing import Any

import pytest

from clinrl.evaluation.answers import load_report

ROOT = Path(__file__).resolve().parents[1]
BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HELD = ("params.yaml", "params", "data/reports")
"""What a clone has of a project's data before `dvc pull`."""


@pytest.fixture(autouse=True)
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    for name in HELD:
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


def run(name: str, **words: str) -> dict[str, Any]:
    """What the code of a notebook leaves behind, with some words of it replaced."""
    book = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    code = "\n".join("".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code")
    for word, other in words.items():
        code = code.replace(word.replace("_", "-"), other)
    space: dict[str, Any] = {}
    exec(compile(code, name, "exec"), space)  # noqa: S102
    return space


def test_each_is_run_here_and_holds_no_output():
    assert [path.stem for path in BOOKS] == ["compare-two-versions", "write-a-reward"]
    for path in BOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_two_versions_compare_as_their_report_does(capsys):
    """With the version's parent, which its report was tested against."""
    tests = run("compare-two-versions", esi_v43="esi-v46")["tests"]
    for mode, found in tests.items():
        told = [test for test in load_report("esi-v49", mode).paired if test.other == "esi-v46"]
        assert list(found) == told
    assert "esi-v49 alone" in capsys.readouterr().out


def test_what_a_reward_pays_says_which_ones_teach_the_wrong_thing(capsys):
    found = run("write-a-reward")
    assert found["faults"]["default"] == []
    assert found["faults"]["naive"] == ["silence earns 0.00, the worst readable answer 0.00"]  # as `probe` has it
    assert found["faults"]["distance"]
    for by in found["paid"].values():
        assert by["gold"] == max(by.values())
    assert "default    pays those who read" in capsys.readouterr().out
