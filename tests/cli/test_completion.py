"""`clinrl completion`: bash completes what the parser knows; the other shells get a script of their own."""

import subprocess

import pytest

from clinrl.cli import main as cli
from clinrl.cli.commands import COMMANDS


def script(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "#compdef clinrl"), ("fish", "complete -c clinrl")])
def test_other_shells_have_scripts_with_every_command(shell, mark, capsys):
    text = script(shell, capsys)
    assert mark in text
    assert not [name for name in COMMANDS if name not in text]
