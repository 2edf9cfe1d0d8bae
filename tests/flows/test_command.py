"""The command line of the flows: quick to say what it is, and one sentence for what it will not do."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clinrl import child, registry
from flows import servers

ROOT = Path(__file__).parents[2]
FLOWS = ("reproduce", "release", "retrain", "serve")


def flow(
    name: str, *words: str, python: tuple[str, ...] = (), api: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a flow's command, with the Prefect server at the URL `api`, or with none."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src"} | ({"PREFECT_API_URL": api} if api else {})
    command = [sys.executable, *python, "-m", f"flows.{name}", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", sorted((ROOT / "flows").glob("*.py")), ids=lambda path: path.stem)
def test_a_flow_is_short_and_holds_nothing_but_order(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    own = {"clinrl", "flows", "prefect", "httpx"}
    assert {name.split(".")[0] for name in named} <= own | set(sys.stdlib_module_names)
    assert not any(name.startswith("clinrl.tasks") for name in named)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 200
    assert ast.get_docstring(tree)


@pytest.mark.parametrize("name", FLOWS)
def test_help_has_examples_and_loads_nothing_heavy(name: str) -> None:
    done = flow(name, "--help", python=("-X", "importtime"))
    assert done.returncode == 0
    assert f"python -m flows.{name}" in done.stdout.split("examples:")[1]
    loaded = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert not {"prefect", "mlflow", "torch", "pandas", "numpy"} & loaded


ALLOWED = "allowed: v1, v1-v2, v2, v2-full"


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("reproduce", "v22"), 2, f"params.yaml: 'v22' is not a version or a merge; did you mean v2? {ALLOWED}"),
        (("reproduce", "../v2"), 2, f"params.yaml: '../v2' is not a version or a merge; {ALLOWED}"),
        (("release", "v2;ls"), 2, f"params.yaml: 'v2;ls' is not a version or a merge; {ALLOWED}"),
        (("retrain", "imaging"), 2, "params.yaml: 'imaging' is not a task with a base; allowed: esi"),
        (
            ("release", "v2", "--approver", " "), 1,
            "a promotion needs the name of the person who approves it, 2 to 80 characters; nothing moved",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_anything_starts(
    project: Path, words: tuple[str, ...], code: int, sentence: str
) -> None:
    done = flow(*words)
    assert (done.returncode, done.stderr) == (code, f"clinrl: {sentence}\n")
    assert not Path(".clinrl/prefect").exists()


@pytest.mark.slow
def test_a_release_without_a_server_and_without_a_name_is_refused(project: Path) -> None:
    done = flow("release", "v2")
    assert done.returncode == 1
    assert "nobody can be asked" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_flow_needs_no_server(project: Path) -> None:
    done = flow("release", "v2", "--approver", "Ada Lovelace")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "clinrl: v2 is the champion of esi; v2-full is the champion of esi-merged"
    again = flow("retrain", "esi")
    assert again.returncode == 0
    assert again.stderr.splitlines()[-1].startswith("clinrl: nothing to do: ")
    assert "Traceback" not in done.stderr + again.stderr


def test_a_server_that_is_away_is_one_sentence(project: Path) -> None:
    done = flow("release", "v2", "--approver", "Ada Lovelace", api=f"http://127.0.0.1:{servers.free_port()}/api")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "does not answer; start it, or unset PREFECT_API_URL" in done.stderr
    assert registry.holder("esi", "champion") is None


@pytest.mark.slow
def test_wrong_credentials_are_one_sentence(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "ada:secret")
    port = servers.free_port()
    server = servers.prefect(port, ui=False)
    try:
        servers.wait("prefect", server, f"http://127.0.0.1:{port}/api/health")
        done = flow("release", "v2", "--approver", "Ada Lovelace", api=f"http://127.0.0.1:{port}/api")
    finally:
        child.end(server)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "refused the credentials; set PREFECT_API_AUTH_STRING" in done.stderr
    assert registry.holder("esi", "champion") is None
