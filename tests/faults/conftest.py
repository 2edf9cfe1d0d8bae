"""What attacks in tests share: where the scripted project and the flows are found, and one released project."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tests/flows"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose v2 is registered and promoted. It is put back after each attack."""
    import projects

    import dolls

    folder = tmp_path_factory.mktemp("released") / "project"
    with pytest.MonkeyPatch.context() as patch, dolls.few_draws():
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return projects.released_apart(folder)
