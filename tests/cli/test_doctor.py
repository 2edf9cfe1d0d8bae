"""`clinrl doctor`: memory place by place at both scales, and what a step takes at full."""

import json
import shutil
from pathlib import Path

import pytest

from clinrl.cli import doctor
from clinrl.config.params import Params, load_params
from clinrl.errors import ArtefactError
from clinrl.models import needs
from clinrl.tasks.base import get_task

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def params(monkeypatch: pytest.MonkeyPatch) -> Params:
    """The project, above tiny checkpoints, on a machine without a GPU."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(needs, "config_of", lambda *_: TINY)
    monkeypatch.setattr(needs, "visible", list)
    return load_params()


@pytest.mark.long
def test_at_full_scale_times_are_reckoned_and_called_so(params: Params, capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.stage(params, ["esi-v49"], scale="full")
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("reckoned, at most")
    assert lines[at + 1].split() == ["task", "longest,", "of", "write", "loss", "step", "all"]
    assert lines[at + 2].startswith("esi\tesi-v49\t")
    assert "Rates measured on this CPU: " in lines[at + 3]
    assert all(len(line) <= 90 for line in lines)
    assert code in (0, 1)
    doctor.stage(params, ["esi-v49"], scale="full", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["reckoned"]["rates"]["source"] == "measured"
    (times,) = found["reckoned"]["times"]
    assert times["name"] == "esi-v49"
    assert times["loss_s"] > 0
    assert [need["place"] for need in found["needs"]] == ["loading", "training", "generation", "exam"]


def test_at_the_embedded_scale_nothing_is_reckoned(params: Params, capsys: pytest.CaptureFixture[str]) -> None:
    doctor.stage(params, ["esi-v49"], scale="embedded")
    said = capsys.readouterr().out
    assert "reckoned" not in said
    assert "held-out" in said


def test_a_damaged_tokenizer_is_refused_in_one_sentence(params: Params, tmp_path: Path) -> None:
    folder = tmp_path / "esi"
    shutil.copytree(ROOT / "data/bases/esi", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    del tokenizer["added_tokens"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ArtefactError, match=r"esi holds no tokenizer that can be opened \(KeyError: 'added_tokens'\)"):
        needs._lengths(get_task("esi"), folder)


def test_a_prompt_at_the_embedded_scale_is_measured_by_its_own_tokenizer(params: Params) -> None:
    """Whose tokens are phrases: by characters it would be several times as long."""
    by_characters, by_tokenizer = (
        needs.workload(params.model_copy(update={"scale": scale}), "audit-v1", needs.Machine(), is_gpu=False)
        for scale in ("full", "embedded")
    )
    assert by_tokenizer.prompt < by_characters.prompt / 4
    assert by_tokenizer.policy.slack > 1.5
