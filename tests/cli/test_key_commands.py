"""`clinrl keys` and `clinrl approve`, from the command line down."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clinrl.cli import main as cli
from clinrl.signing import approval, keys


@pytest.fixture(autouse=True)
def _unchanged_environment() -> Iterator[None]:
    """`main.main` pins variables of the process; they go back to what they were after each test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("action", ["show", "init"])
def test_below_a_project_no_second_key_is_made(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    (checkout / "params.yaml").touch()
    (checkout / "docs").mkdir()
    monkeypatch.chdir(checkout / "docs")
    assert cli.main(["keys", action]) == 2
    assert "start in the project's root" in capsys.readouterr().err
    assert not (checkout / "docs/.clinrl").exists()


def test_keys_are_made_once_shown_and_trusted(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "show"]) == 0
    assert "`clinrl keys init` makes one" in capsys.readouterr().err
    assert cli.main(["keys", "init"]) == 0
    ours = keys.keyring()[keys.OURS]
    row = f"this checkout\tthis checkout\t{ours.fingerprint}\t{ours.line}"
    assert capsys.readouterr().out == f"name\tcounts_for\tfingerprint\tline\n{row}\n"
    assert cli.main(["keys", "init"]) == 1
    assert "is not overwritten" in capsys.readouterr().err
    assert keys.keyring() == {keys.OURS: ours}
    assert cli.main(["keys", "trust", "Ada", ours.line + " a comment"]) == 0
    assert cli.main(["keys", "trust", "Ada", "ssh-rsa AAAA"]) == 1
    assert cli.main(["keys", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.split("\n", 2)[2])
    assert [row["name"] for row in shown] == ["Ada", keys.OURS]
    assert {row["line"] for row in shown} == {ours.line}


def test_init_keeps_the_public_half_of_a_key_that_is_elsewhere(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["keys", "init"])
    elsewhere = keys.PRIVATE.rename("elsewhere.pem")
    keys.PUBLIC.unlink()
    monkeypatch.setenv("CLINRL_SIGNING_KEY_FILE", str(elsewhere))
    assert cli.main(["keys", "init"]) == 0
    assert not keys.PRIVATE.exists()
    assert keys.keyring() == {keys.OURS: keys.signer("full").key}
    assert cli.main(["keys", "init"]) == 0
    monkeypatch.delenv("CLINRL_SIGNING_KEY_FILE")
    assert cli.main(["keys", "init"]) == 1
    assert "is not here; name it" in capsys.readouterr().err
    keys.PUBLIC.unlink()
    assert cli.main(["keys", "init"]) == 0
    monkeypatch.setenv("CLINRL_SIGNING_KEY_FILE", str(elsewhere))
    assert cli.main(["keys", "init"]) == 1
    assert "this checkout has another key" in capsys.readouterr().err


def test_approve_prints_a_token_alone(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = "6b" * 32
    assert cli.main(["approve", digest, "--as", "Ada"]) == 1
    assert "there is no signing key" in capsys.readouterr().err
    cli.main(["keys", "init"])
    capsys.readouterr()
    assert cli.main(["approve", digest, "--as", "Ada"]) == 0
    said = capsys.readouterr()
    assert said.out == approval.token(digest, "Ada", keys.signer("full")) + "\n"
    assert "as Ada" in said.err
    cli.main(["approve", digest, "--as", " Ada "])
    assert capsys.readouterr().out == said.out
    for nobody in ("", "A\nda"):
        assert cli.main(["approve", digest, "--as", nobody]) == 1
    assert cli.main(["approve", "esi-v49", "--as", "Ada"]) == 1


def test_a_params_file_that_is_not_there_is_no_project_without_approvers(checkout: Path) -> None:
    assert cli.main(["keys", "show"]) == 0
    assert cli.main(["keys", "--params", "typo.yaml", "show"]) == 2
