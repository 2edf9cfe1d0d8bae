"""A kill at the moment at which a finished artefact takes the place of an older one."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from clinrl import artifacts, paths

pytestmark = pytest.mark.long

FILES = 500
WRITER = f"""
from pathlib import Path
from clinrl import artifacts as artefacts
turn = 0
while True:
    turn += 1
    with artefacts.staged(Path("data/cases/d1")) as out:
        for number in range({FILES}):
            (out / f"{{number}}.txt").write_text(str(turn))
        artefacts.seal(out, kind="cases", name="d1", task="esi", task_version=2, spec={{"turn": turn}}, inputs={{}})
        print("sealed", flush=True)
"""


def test_a_kill_while_an_artefact_is_replaced_leaves_it_whole_or_absent(tmp_path: Path) -> None:
    folder = tmp_path / paths.cases("d1")
    for wait_s in (0.0, 0.001, 0.004):
        writer = subprocess.Popen([sys.executable, "-c", WRITER], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(2):  # what the second one replaces is deleted in the milliseconds after it
            assert writer.stdout.readline() == "sealed\n"
        time.sleep(wait_s)
        writer.kill()
        writer.communicate()
        assert not folder.exists() or len(artifacts.verified(folder).files) == FILES
    with artifacts.staged(folder) as out:
        artifacts.seal(out, kind="cases", name="d1", task="esi", task_version=2, spec={}, inputs={})
    assert [path.name for path in folder.parent.iterdir()] == ["d1"]
