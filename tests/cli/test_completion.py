"""`clinrl completion`: bash completes what the parser knows; so do fish and zsh where they are."""

import os
import pty
import select
import shlex
import shutil
import subprocess
import time

import pytest

from clinrl.cli import main as cli
from clinrl.cli.commands import COMMANDS


def script(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


CASES = pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["clinrl", ""], sorted(COMMANDS)),
        (["clinrl", "tr"], ["traces", "train", "try"]),
        (["clinrl", "try", "--s"], ["--seed"]),
        (["clinrl", "doctor", "--scale", ""], ["embedded", "full"]),
        (["clinrl", "completion", ""], ["bash", "fish", "zsh"]),
        (["clinrl", "keys", ""], sorted(COMMANDS["keys"].actions)),
    ],
)


@CASES
def test_bash_completes(words, expected, capsys):
    asking = f"""
        {script("bash", capsys)}
        COMP_WORDS=({" ".join(repr(word) for word in words)})
        COMP_CWORD={len(words) - 1}
        $(complete -p clinrl | sed -E 's/.* -F ([^ ]+) .*/\\1/') clinrl {words[-1]!r} {words[-2]!r}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "--norc"], input=asking, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert sorted(line for line in done.stdout.split() if not line.startswith("-") or words[-1]) == expected


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish on this machine")
@CASES
def test_fish_completes(words, expected, capsys):
    asking = f"{script('fish', capsys)}\ncomplete -C {shlex.join([' '.join(words)])}"
    done = subprocess.run(["fish", "--no-config"], input=asking, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert sorted({line.partition("\t")[0] for line in done.stdout.splitlines()}) == expected


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh on this machine")
@pytest.mark.parametrize(
    ("typed", "offered"), [("tr", ["traces", "train", "try"]), ("keys ", [*COMMANDS["keys"].actions])]
)
def test_zsh_completes_what_is_typed(typed, offered, tmp_path, capsys):
    """A script in a folder of fpath, as its own head says, and a shell that believes in a terminal."""
    (tmp_path / "_clinrl").write_text(script("zsh", capsys), encoding="utf-8")
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], os.environ | {"TERM": "dumb", "HOME": str(tmp_path)})
    setting = f"fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -D; echo rea''dy\n"
    os.write(terminal, setting.encode())
    assert "ready" in heard(terminal, ["ready"])
    os.write(terminal, f"clinrl {typed}\t\t".encode())
    listed = heard(terminal, offered)
    os.close(terminal)
    os.waitpid(child, 0)
    assert not [name for name in offered if name not in listed]


def heard(terminal, words):
    """What a terminal shows until it has shown all of these words, or for a minute."""
    text, deadline = "", time.monotonic() + 60
    while time.monotonic() < deadline and not all(word in text for word in words):
        if select.select([terminal], [], [], 1)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
    return text


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "#compdef clinrl"), ("fish", "complete -c clinrl")])
def test_other_shells_have_scripts_with_every_command(shell, mark, capsys):
    text = script(shell, capsys)
    assert mark in text
    assert not [name for name in COMMANDS if name not in text]
