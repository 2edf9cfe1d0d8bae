"""The command line of the flows: quick to say what it is, and one sentence for what it will not do."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import httpx
import pytest

from clinrl.errors import Refused
from clinrl.registry import versions
from clinrl.runtime import child, dvc_state
from clinrl.runtime.guard import address_of, listen
from flows import __main__ as command
from flows import servers
from processes import as_reader, free_port

ROOT = Path(__file__).parents[2]
FLOWS = (*command.FLOWS,)


def flow(
    name: str, *words: str, python: tuple[str, ...] = (), api: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a flow's command, with the Prefect server at the URL `api`, or with none."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src"} | ({"PREFECT_API_URL": api} if api else {})
    command = [sys.executable, *python, "-m", "flows", name, *words]
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


@pytest.fixture
def here() -> Iterator[None]:
    """Flows in this process, without a server; what they settle in its environment goes with the test."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("PREFECT_")]:
            del os.environ[name]
        yield


@pytest.mark.parametrize(
    ("words", "meant"),
    [("retrian esi", "retrain"), ("promote x", "release"), ("retrain esi --aprover x", "--approver")],
)
def test_a_near_miss_is_suggested(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(words.split())
    assert f"did you mean {meant}?" in capsys.readouterr().err


HELP = f"""
from contextlib import suppress
from flows import __main__ as command
for name in {FLOWS}:
    with suppress(SystemExit):
        command.main([name, "--help"])
"""


def test_help_has_examples_and_loads_nothing_heavy() -> None:
    words = [sys.executable, "-X", "importtime", "-c", HELP]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    shown = done.stdout.split("usage: ")[1:]
    assert all(f"python -m flows {name}" in page.split("examples:")[1] for name, page in zip(FLOWS, shown, strict=True))
    assert all(page.startswith(f"python -m flows {name}") for name, page in zip(FLOWS, shown, strict=True))
    loaded = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "clinrl" in loaded
    assert not {"prefect", "mlflow", "torch", "pandas", "numpy"} & loaded


def run_stage() -> None:
    from flows import steps

    with mock.patch.multiple(steps, get_run_logger=mock.Mock(), load_params=mock.Mock()):
        steps.repro.fn("dataset", "d1")


@pytest.mark.parametrize(
    "begin", [lambda: command.check({"task": "esi"}), lambda: command.main.__wrapped__(["serve"]), run_stage]
)
@pytest.mark.usefixtures("here")
def test_nothing_begins_where_others_can_write_what_dvc_unpickles(
    begin: Callable[[], object], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", mock.Mock())
    monkeypatch.delenv(dvc_state.VARIABLE, raising=False)
    Path(".dvc").mkdir()
    (dvc_state.SITE / "index").mkdir(parents=True)
    dvc_state.SITE.chmod(0o777)
    with pytest.raises(Refused, match="other users can write in"):
        begin()


ALLOWED = "allowed: v1, v1-v2, v2, v2-full"


@pytest.mark.long
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
@pytest.mark.usefixtures("here")
def test_what_cannot_be_is_said_before_anything_starts(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: int,
    sentence: str,
) -> None:
    monkeypatch.setattr(servers, "prefect", lambda *_, **__: pytest.fail("a server was started"))
    assert command.main(words) == code
    assert capfd.readouterr().err == f"clinrl: {sentence}\n"
    assert not Path(".clinrl/prefect").exists()


@pytest.mark.long
def test_the_command_ends_with_its_code_and_its_sentence(project: Path) -> None:
    done = flow("reproduce", "v22")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"clinrl: params.yaml: 'v22' is not a version or a merge; did you mean v2? {ALLOWED}\n"


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


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_a_server_that_is_away_is_one_sentence(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    servers.configure()
    from prefect.settings import PREFECT_API_URL, temporary_settings

    url = f"http://127.0.0.1:{free_port()}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    with temporary_settings({PREFECT_API_URL: url}):
        assert command.main(["release", "v2", "--approver", "Ada Lovelace"]) == 1
    (sentence,) = capfd.readouterr().err.splitlines()
    assert "does not answer; start it (or unset PREFECT_API_URL, if the flow needs none)" in sentence
    assert versions.holder("esi", "champion") is None


@pytest.mark.slow
def test_wrong_credentials_are_one_sentence(project: Path) -> None:
    with listen("127.0.0.1", 0) as listening:
        api = f"{address_of(listening)}/api"
        server = servers.prefect(listening, "ada:secret", ui=False)
    try:
        servers.wait("prefect", server, f"{api}/health")
        done = flow("release", "v2", "--approver", "Ada Lovelace", api=api)
        other = flow("release", "v2", "--approver", "Ada Lovelace", api=api.removesuffix("/api"))
    finally:
        child.end(server)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "refused the credentials; set PREFECT_API_AUTH_STRING" in done.stderr
    assert (other.returncode, len(other.stderr.splitlines())) == (1, 1)
    assert "is no API of Prefect; the address of one ends in /api" in other.stderr
    assert versions.holder("esi", "champion") is None


def started(*words: str) -> "subprocess.Popen[str]":
    """A flow's command without a server, in the background."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src"}
    return subprocess.Popen([sys.executable, "-m", "flows", *words], env=env, stderr=subprocess.PIPE, text=True)


AT_WORK = re.compile(
    r"clinrl: flows retrain esi \(process (\d+), since [-0-9]{10} [0-9:]{5}\) is at work on esi here; "
    r"wait for it to end and give the same command again: it continues\n"
)


@pytest.mark.usefixtures("here")
def test_the_second_flow_of_a_task_is_told_who_is_at_work(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the first one does is to give the second command, in this process; the lock is one that the kernel keeps."""
    codes = []

    def begun(name: str, _arguments: object) -> int:
        if name == "watch":
            return 0
        for words in (("retrain", "esi"), ("release", "v2", "--approver", "Ada Lovelace")):
            codes.append(command.main(words))
            told = AT_WORK.fullmatch(capfd.readouterr().err)
            assert told is not None
            assert int(told[1]) == os.getpid()
        assert command.main(["watch", "esi"]) == 0  # it decides nothing
        return 0

    monkeypatch.setattr(command, "_run", begun)
    assert command.main(["retrain", "esi"]) == 0
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")  # on a server too: two would spend one budget
    assert command.main(["retrain", "esi"]) == 0
    assert codes == [75] * 4


@pytest.mark.slow
def test_of_five_retrainings_at_once_one_trains_and_four_say_who(empty: Path) -> None:
    flows = [started("retrain", "esi", "--approver", "Ada Lovelace") for _ in range(5)]
    said = [process.communicate(timeout=600)[1] for process in flows]
    assert sorted(process.returncode for process in flows) == [0, 75, 75, 75, 75], said
    winner = next(process.pid for process in flows if process.returncode == 0)
    told = [AT_WORK.fullmatch(text) for process, text in zip(flows, said, strict=True) if process.returncode]
    assert [match and int(match[1]) for match in told] == [winner] * 4, said
    assert [path.name for path in Path(".clinrl/servers").glob("*.log")] == [f"prefect-{winner}.log"]
    trained = [json.loads(line)["words"] for line in Path("worked.jsonl").read_text().splitlines()]
    assert len(trained) == len({tuple(words) for words in trained})


SERVED = """
from flows import servers
servers.configure()
with servers.starting():
    server = servers.begin_private()
    servers.wait("prefect", server, servers.health())
"""


@pytest.mark.slow
def test_servers_that_start_at_once_make_one_database(empty: Path) -> None:
    command, env = [sys.executable, "-c", SERVED], os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src"}
    three = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=300)[1] for process in three]
    assert [process.returncode for process in three] == [0, 0, 0], said


@pytest.mark.long
def test_old_logs_of_servers_are_swept(project: Path) -> None:
    """Not those of a process that still writes, whose server may be quiet for long."""
    gone, old = 99_999_999, servers.LOGS_S + 60
    for name, age_s in ((f"prefect-{gone}.log", old), (f"mlflow-{gone}.log", 60.0), ("mlflow-1.log", old)):
        log = project / ".clinrl/servers" / name
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        os.utime(log, (time.time() - age_s,) * 2)
    with listen("127.0.0.1", 0) as listening:
        child.end(servers._start("prefect", listening, {}), grace_s=0)  # it need not have started
    assert {log.name for log in (project / ".clinrl/servers").glob("*.log")} == {
        f"mlflow-{gone}.log",
        "mlflow-1.log",
        f"prefect-{os.getpid()}.log",
    }


READS = """
import sys
from clinrl.cli.main import main
for words in (
    "params v1 --resolved", "versions esi", "lookup esi v1", "lineage v1", "alarms v2", "keys show",
):
    print(words, main(words.split()), file=sys.stderr)
"""


@pytest.mark.long
def test_who_may_only_read_a_checkout_may_look_at_it(project: Path) -> None:
    done = as_reader(project, READS)
    codes = [line.rsplit(" ", 1)[1] for line in done.stderr.splitlines() if not line.startswith("clinrl: ")]
    assert (done.returncode, codes) == (0, ["0"] * 6), done.stderr


@pytest.mark.long
def test_a_server_that_went_away_in_the_middle_of_a_flow_is_a_sentence() -> None:
    from prefect.states import Failed

    with pytest.raises(Refused, match=r"the Prefect server at .* does not answer; start it"):
        command.verdict(Failed(data=httpx.ConnectError("no connection")))
