"""The stages by their addresses, and the first of them."""

import json
import shutil
from pathlib import Path

import pytest

from clinrl import paths
from clinrl.cli import main as cli
from clinrl.errors import ParamsError
from clinrl.provenance import stages

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("train@esi-v46", ("train", "esi-v46")),
        ("import@mietic-36", ("dataset", "mietic-36")),
        ("baseline@esi", ("evaluate", "esi-base")),
        ("examine-fold@esi-v49-full", ("evaluate", "esi-v49-full")),
        ("compare@imaging-arms", ("compare", "imaging-arms")),
        ("../dvc.yaml:train@esi-v46", ("train", "esi-v46")),
    ],
)
def test_an_address_is_a_command_and_a_name(address: str, command: tuple[str, str]) -> None:
    assert stages.command_of(address) == command


@pytest.mark.parametrize(
    "address",
    [
        "dataset@x; touch y", "dataset@../../mlruns", "train@", "train", "@esi-v46", "", "train@esi-v46@x", "trian@x1",
        "compare-imaging-arms", "compare@x y", "dataset@$(id)", "dataset@-h", "train@esi\n", "x" * 100_000,
    ],
)  # fmt: skip
def test_another_address_is_refused_in_a_sentence(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ParamsError):
        stages.command_of(address)
    assert cli.main(["stage", "--", address]) == 2
    error = capsys.readouterr().err
    assert error.startswith("clinrl: ")
    assert error.count("\n") == 1
    assert len(error) < 600


def test_the_first_stage_writes_a_constant_only_for_a_sound_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "params", tmp_path / "params")
    file = tmp_path / "params/esi.yaml"
    sound = file.read_text(encoding="utf-8")
    file.write_text(sound.replace("  esi-d4:", "  ../../d2:"), encoding="utf-8")
    for command in (["check"], ["stage", "params"]):
        assert cli.main(command) == 2
        assert capsys.readouterr() == ("", (
            "clinrl: params/esi.yaml: datasets.../../d2 is not a name; a name becomes a folder and must match "
            "[a-z][a-z0-9-]{1,40}\n"
        ))  # fmt: skip
    assert not paths.PARAMS_PROOF.exists()
    file.write_text(sound, encoding="utf-8")
    assert cli.main(["check"]) == 0
    assert not paths.PARAMS_PROOF.exists()
    assert cli.main(["stage", "params"]) == 0
    assert capsys.readouterr() == ("", "")
    assert paths.PARAMS_PROOF.read_bytes() == (ROOT / paths.PARAMS_PROOF).read_bytes()
    assert json.loads(paths.PARAMS_PROOF.read_text())
