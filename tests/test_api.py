"""The public names of clinrl: a list, lazy, and the page's five lines as a notebook runs them."""

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import clinrl
import dolls
import exhibits
import laid
from clinrl import paths
from clinrl.artifacts import identity, read_manifest
from clinrl.data.dataset import read_cases
from clinrl.errors import ArtefactError, RegistryError
from clinrl.registry import versions
from clinrl.tasks.base import get_task

pytestmark = pytest.mark.usefixtures("few_draws")

ROOT = Path(__file__).parents[1]
PUBLIC = ["compare", "evaluate", "get_task", "load_champion", "load_params"]


def test_the_public_names_are_these():
    assert clinrl.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(clinrl))
    assert all(callable(getattr(clinrl, name)) for name in PUBLIC)
    with pytest.raises(AttributeError, match="module 'clinrl' has no attribute 'train'"):
        clinrl.train  # noqa: B018
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)\(", page, re.MULTILINE)) == PUBLIC


def test_the_import_alone_loads_nothing_of_it():
    program = "import sys, clinrl; print([n for n in sys.modules if n.startswith('clinrl.') or n == 'pydantic'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose version v1 is registered."""
    with warnings.catch_warnings():  # of MLflow about its own type hints, when it is imported
        warnings.simplefilter("ignore", UserWarning)
        import mlflow.pyfunc  # noqa: F401
    shutil.copytree(exhibits.built(), tmp_path, dirs_exist_ok=True)
    laid.lay(tmp_path, dolls.PARAMS | {"merges": exhibits.MERGES})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return versions.register(exhibits.params(), "v1")


@pytest.mark.long
def test_the_five_lines_of_the_page(project, tmp_path):
    with pytest.raises(RegistryError, match="the registered model 'esi' has no champion; `clinrl promote` makes one"):
        clinrl.load_champion("esi")
    with pytest.raises(RegistryError, match=r"the registered model 'esy' has no champion; did you mean esi\?"):
        clinrl.load_champion("esy")
    with pytest.raises(RegistryError, match="model 'esi-merged' has no champion; `clinrl promote` makes one"):
        clinrl.load_champion("esi-merged")
    versions.point("esi", versions.CHAMPION, project)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    lines = [line for line in code.splitlines() if line and not line.startswith("import ")]
    assert len(lines) == 5
    notebook = {}
    exec(code.replace("esi-v46", "v2"), notebook)  # noqa: S102
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == before

    assert "MLFLOW_TRACKING_URI" not in os.environ  # a notebook that goes to another project finds that one's store

    champion, reports, tests = notebook["champion"], notebook["reports"], notebook["tests"]
    assert (champion.name, champion.number) == ("v1", 1)
    assert champion.digest == identity(read_manifest(paths.adapter("v1")))
    assert list(reports) == list(tests) == list(notebook["params"].modes)
    for report in reports.values():
        assert (report.exam, report.adapter_digest) == ("x1", champion.digest)
        assert 0 <= report.metrics["exact"].value <= 1
    assert {test.metric for some in tests.values() for test in some} <= set(notebook["task"].metrics)

    params, cases = notebook["params"], list(read_cases(paths.cases("x1"), get_task("esi")))[:3]
    some = clinrl.evaluate(params, "v1", cases)
    assert {report.exam for report in some.values()} == {"given cases"}
    with pytest.raises(ArtefactError, match="is not the v1 of the registry"):
        clinrl.evaluate(params, versions.Champion(name="v1", number=1, digest="0" * 64, model=None))
