"""The command that serves an environment: what it refuses."""

import socket
import sys

import pytest

from clinrl.cli import main as cli
from clinrl.cli import openenv
from clinrl.errors import Refused


def test_a_task_without_an_environment_is_refused(capsys):
    assert openenv.names() == ["audit"]
    assert cli.main(["openenv", "esi"]) == 2
    assert capsys.readouterr().err == "clinrl: 'esi' is no task whose environment can be served; allowed: audit\n"


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(("openenv", "clinrl.tasks.audit.served"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openenv", None)
    assert cli.main(["openenv", "audit"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("clinrl: OpenEnv is not installed; install it with ")
    assert error.count("\n") == 1


def test_an_address_that_cannot_be_had_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=rf"^127.0.0.1 port {port} is taken; choose another"):
            openenv._listening("127.0.0.1", port)
    with pytest.raises(Refused, match=r"^192\.0\.2\.1 port 0 cannot be listened on \("):
        openenv._listening("192.0.2.1", 0)


@pytest.mark.parametrize("arguments", [["--port", "65536"], ["--port", "x"], ["--sessions", "0"]])
def test_what_is_no_port_and_no_number_of_sessions_is_a_usage_error(arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["openenv", "audit", *arguments])
    assert ended.value.code == 2
