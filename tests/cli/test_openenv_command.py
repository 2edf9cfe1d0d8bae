"""The command that serves an environment: what it refuses."""

import sys

import pytest

from clinrl.cli import main as cli


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch, capsys):
    for name in [
        name
        for name in sys.modules
        if name.startswith(("openenv", "clinrl.tasks.openenv", "clinrl.tasks.audit.served"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openenv", None)
    assert cli.main(["openenv", "audit"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("clinrl: OpenEnv is not installed; install it with ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--port", "65536"], ["--port", "x"], ["--sessions", "0"]])
def test_what_is_no_port_and_no_number_of_sessions_is_a_usage_error(arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["openenv", "audit", *arguments])
    assert ended.value.code == 2


@pytest.mark.long
def test_the_reward_of_a_control_is_refused(capsys):
    assert cli.main(["openenv", "esi", "--port", "0", "--reward", "esi-random"]) == 2
    assert "esi-random is a control, whose reward is no score of an answer" in capsys.readouterr().err
