"""dvc.lock as a witness: what stages ran on and made, in locks that nobody's stages would leave."""

from pathlib import Path
from typing import Any

import pytest

from clinrl.artifacts import md5, write_text
from clinrl.errors import ArtefactError
from clinrl.provenance import lock


def test_a_stage_ran_on_what_there_now_is_and_some_stage_made(checkout: Path) -> None:
    write_text(Path("data/a/x"), "a")
    made, code = {"path": "data/a/x", "md5": md5(Path("data/a/x"))}, {"path": "src/code.py", "md5": "0"}
    folder = {"path": "data/a", "md5": md5(Path("data/a"))}  # which no stage makes as a whole
    whole: dict[str, Any] = {"make@a": {"outs": [made]}, "use@a": {"deps": [folder, made, code]}}

    def fact(stages: lock.Lock, stage: str = "use@a") -> tuple[str, str]:
        found = lock.facts(stages, stage)
        return found[0].state, found[0].sentence

    assert [(fact.path, fact.state) for fact in lock.facts(whole, "use@a")] == [("data/a/x", "holds")]
    assert lock.ancestors({**whole, "use@a": {"deps": [folder]}}, "use@a") == ["make@a", "use@a"]
    state, says = fact(whole | {"make@a": {}})
    assert (state, says.split(";")[0]) == ("unrecorded", "dvc.lock records no run that made data/a, on which use@a ran")
    assert lock.facts({"import@a": whole["use@a"]}, "import@a") == []
    *_, last = lock.facts(whole | {"use@a": {"deps": [made | {"md5": "0"}]}}, "use@a")
    assert last.state == "altered"
    assert last.sentence.startswith("dvc.lock records another data/a/x than the one that use@a ran on")
    state, says = fact(whole, "use@b")
    assert (state, says.split(";")[0]) == ("unrecorded", "dvc.lock records no run of use@b")


def test_stages_that_follow_from_each_other_or_from_themselves_have_an_end() -> None:
    stages = {
        "a": {"deps": [{"path": "y"}], "outs": [{"path": "x"}]},
        "b": {"deps": [{"path": "x"}, {"path": "y"}], "outs": [{"path": "y"}]},
    }
    assert lock.ancestors(stages, "a") == ["b", "a"]


def test_an_output_that_two_stages_claim_is_refused(checkout: Path) -> None:
    two = "stages: {a: {outs: [{path: data/x, md5: '1'}]}, b: {outs: [{path: data/x, md5: '2'}]}}"
    write_text(Path("dvc.lock"), two)
    with pytest.raises(ArtefactError, match=r"names one output twice: data/x is of a and of b; delete the entry"):
        lock.read()


def test_a_lock_that_is_a_folder_is_refused(checkout: Path) -> None:
    Path("dvc.lock").unlink(missing_ok=True)
    Path("dvc.lock").mkdir()
    with pytest.raises(ArtefactError, match=r"dvc\.lock is not a lock file of DVC's; restore it from git"):
        lock.read()


def test_a_lock_with_the_marks_of_a_merge_is_refused_with_what_git_can_do(checkout: Path) -> None:
    write_text(Path("dvc.lock"), "stages:\n<<<<<<< HEAD\n  a: {}\n=======\n  b: {}\n>>>>>>> other\n")
    with pytest.raises(ArtefactError, match=r"marks of a conflict of git; take one side .*--ours dvc\.lock"):
        lock.read()
