"""Pushing to a hub: the real client against an imitation on this machine, what it gets, and what it never gets."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants, hf_hub_download

import dolls
import examined
import hubs
import locks
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, seal, staged, write_text
from clinrl.cli import main as cli
from clinrl.config.params import load_params
from clinrl.errors import DataError
from clinrl.evaluation.answers import load_report
from clinrl.exports.hub import SENT, TERMS, card_of
from clinrl.merging import merge
from clinrl.models import bases
from clinrl.provenance import pins
from clinrl.registry.log_run import collect
from clinrl.reports import model_card

pytestmark = pytest.mark.usefixtures("few_draws")
REPO = hubs.REPO
RECIPE = {"profile": "imitate", "lora": {}, "trainer": {}, "stream": {}, "modes": [], "omit": {}}
"""What a card says of a manifest's recipe."""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Examined versions, whose adapters have the card that training writes and a file that quotes a model."""
    folder = tmp_path_factory.mktemp("pushed")
    with pytest.MonkeyPatch.context() as patch, dolls.few_draws():
        patch.chdir(folder)
        params = examined.build({})
        for name in ("v1", "v2"):
            examined.train(name)
            held = read_manifest(paths.adapter(name)).model_dump(exclude={"files"})
            with staged(paths.adapter(name).with_name("made")) as out:
                shutil.copytree(paths.adapter(name), out, dirs_exist_ok=True)
                write_text(out / "README.md", model_card.write(held | {"spec": held["spec"] | RECIPE}, lineage=[name]))
                write_text(out / "verdicts.jsonl", '{"verdict": "the patient of case 7 is pale"}\n')
                seal(out, **held)
            shutil.rmtree(paths.adapter(name))
            paths.adapter(name).with_name("made").rename(paths.adapter(name))
            dolls.examine(params, name, examined.GOOD)
        locks.record(params)
    return folder


@pytest.fixture
def hub(project, tmp_path, monkeypatch):
    monkeypatch.chdir(project)
    with hubs.served(hubs.Imitation(files={}), tmp_path, monkeypatch) as hub_:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield hub_


@pytest.mark.long
def test_what_was_pushed_is_what_was_examined(hub, tmp_path, capsys):
    assert cli.main(["push", "v2", "--repo", REPO]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{constants.ENDPOINT}/{REPO}/tree/{hubs.COMMIT}\n"
    assert "private; digest " + identity(read_manifest(paths.adapter("v2"))) in printed.err
    assert hub.private
    assert hub.tokens == {"Bearer hf_secret"}
    fetched = Path(hf_hub_download(REPO, "adapter_model.safetensors", cache_dir=tmp_path / "other"))
    assert fetched.read_bytes() == (paths.adapter("v2") / "adapter_model.safetensors").read_bytes()
    manifest = json.loads(hub.files["manifest.json"])
    for name in hub.files.keys() - {"README.md", "manifest.json", *TERMS}:
        folder, named = (paths.base("esi"), name.removeprefix("base/")) if "/" in name else (paths.adapter("v2"), name)
        assert hub.files[name] == (folder / named).read_bytes()
    assert hubs.digest(hub.files["adapter_model.safetensors"]) == manifest["files"]["adapter_model.safetensors"]
    assert {"base/model.safetensors", "base/config.json", "adapter_config.json", "history.jsonl"} <= hub.files.keys()
    assert all(hub.files[name] == (pins.ROOT / name).read_bytes() for name in TERMS)
    sent = b"".join(hub.files.values())
    assert b"the patient of case 7" not in sent, "verdicts quote what a model wrote"
    cases = (paths.cases("x1") / paths.CASES_FILE).read_text(encoding="utf-8").splitlines()
    assert not [case for case in cases if json.loads(case)["facts"]["narrative"][:40].encode() in sent]


def test_files_of_a_model_that_was_pushed_before_are_removed(hub):
    hub.files |= {
        "model-00002-of-00002.safetensors": b"old",
        "base/adapter_config.json": b"{}",
        ".gitattributes": b"",
        "plot.png": b"",
        "LICENSE": b"mine",
    }
    assert cli.main(["push", "v2", "--repo", REPO]) == 0
    assert {".gitattributes", "plot.png", "NOTICE"} <= hub.files.keys()
    assert hub.files["LICENSE"] == b"mine"
    assert not {"model-00002-of-00002.safetensors", "base/adapter_config.json"} & hub.files.keys()


def test_the_card_is_read_back_by_the_hubs_own_library(hub):
    assert cli.main(["push", "v2", "--repo", REPO]) == 0
    card = ModelCard.load(REPO)
    assert (card.data.license, card.data.base_model, card.data.datasets) == ("apache-2.0", REPO, ["d1"])
    found = {(one.dataset_config, one.metric_type): one for one in card.data.eval_results}
    reports = {mode: load_report("v2", mode) for mode in ("think", "direct")}
    assert 0 < reports["think"].metrics["exact"].value < 1
    for mode, report in reports.items():
        for name, estimate in report.metrics.items():
            one = found.pop((mode, name))
            assert {"value": one.metric_value, **one.metric_args} == estimate.model_dump()
            assert (one.dataset_type, one.dataset_revision) == (report.exam, report.exam_digest)
    assert not found
    exact = reports["think"].metrics["exact"]
    assert f"{exact.value:.3f} [{exact.low:.3f}, {exact.high:.3f}]" in card.text
    assert "Research only" in card.text
    assert f'folder = snapshot_download("{REPO}")' in card.text
    assert identity(read_manifest(paths.adapter("v2"))) in card.text


def test_an_altered_adapter_is_not_sent(hub, capsys):
    """Not even one whose own manifest was made anew: dvc.lock knows better."""
    file = paths.adapter("v1") / "adapter_model.safetensors"
    before = dolls.files(paths.adapter("v1"))
    file.write_bytes(b"other weights")
    seal(paths.adapter("v1"), **read_manifest(paths.adapter("v1")).model_dump(exclude={"files"}))
    try:
        assert cli.main(["push", "v1", "--repo", REPO]) == 1
    finally:
        for name, text in before.items():
            (paths.adapter("v1") / name).write_bytes(text)
    assert "data/adapters/v1 is not what dvc.lock records" in capsys.readouterr().err
    assert not hub.asked


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["v9"], 2, "'v9' is no name that `clinrl push` knows"),
        (["v2", "--repo", "name"], 2, "--repo must be OWNER/NAME"),
        (["v2", "--repo", "a/b/c"], 2, "--repo must be OWNER/NAME"),
        (["v2", "--endpoint", "http://user:pw@hub.example.org"], 2, "'http://hub.example.org' is no endpoint such as"),
        (["v2", "--endpoint", "ftp://hub.example.org"], 2, "is no endpoint such as https://huggingface.co"),
        (["v2", "--endpoint", "https://[hub"], 2, "is no endpoint such as https://huggingface.co"),
        (["v3"], 1, "dvc.lock records"),
    ],
)
def test_what_cannot_be_pushed_is_a_sentence(words, code, says, hub, capsys):
    words = words if "--repo" in words else [*words, "--repo", REPO]
    assert cli.main(["push", *words]) == code
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not hub.asked


def test_without_a_token_nobody_is_asked(hub, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    assert cli.main(["push", "v2", "--repo", REPO]) == 1
    assert "the hub wants a token; set HF_TOKEN" in capsys.readouterr().err
    assert not hub.asked


def test_a_private_push_does_not_go_to_a_public_repository(hub, capsys):
    hub.private = False
    assert cli.main(["push", "v2", "--repo", REPO]) == 1
    assert f"{REPO} is there and is public; give --public too" in capsys.readouterr().err
    assert not hub.files
    assert cli.main(["push", "v2", "--repo", REPO, "--public"]) == 0


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_hub_that_refuses_is_a_sentence_without_the_token(status, hub, capsys):
    hub.refuses, hub.private = status, True
    assert cli.main(["push", "v2", "--repo", REPO]) == 1
    error = capsys.readouterr().err
    assert f"({status})" in error
    assert "hf_secret" not in error
    assert error.count("\n") == 1


def test_a_hub_that_keeps_other_weights_is_found_out(hub, capsys):
    hub.alters = True
    assert cli.main(["push", "v2", "--repo", REPO]) == 1
    assert f"{REPO} holds other weights than were sent" in capsys.readouterr().err


def test_nobody_listens(hub, capsys):
    assert cli.main(["push", "v2", "--repo", REPO, "--endpoint", hubs.closed()]) == 1
    assert f"did not take {REPO} (" in capsys.readouterr().err


def test_the_code_of_a_card_opens_what_was_examined(hub, monkeypatch):
    made = collect(load_params(), load_params().model("v2"))
    at_full = card_of(made, REPO, {"repo": "Qwen/Qwen3.5-9B", "commit": "c" * 40, "quantize": "nf4"})
    assert f'"Qwen/Qwen3.5-9B", revision="{"c" * 40}", quantization_config=small' in at_full
    assert 'bnb_4bit_compute_dtype="bfloat16")' in at_full  # as in its exam; transformers would take float32
    blocks = bases.think_blocks(Path(__file__).parents[2] / "data/bases/audit")
    monkeypatch.setattr(bases, "think_blocks", lambda _: blocks)
    here = card_of(made, REPO, {"repo": REPO})
    assert "tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)" in here
    assert "`'<think>\\n'` with thinking, `'<think>\\n\\n</think>\\n\\n'` without" in here


@pytest.mark.long
def test_the_code_of_a_card_runs_on_what_is_pushed_with_an_embedded_base(hub, tmp_path, monkeypatch):
    """The folder is laid out as the repository; only the download is replaced."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = Path(__file__).parents[2] / "data/bases/esi"
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    adapted.peft_config["default"].base_model_name_or_path = "data/bases/esi"
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path)
    shutil.copytree(base, tmp_path / "base")
    card = card_of(collect(load_params(), load_params().model("v2")), REPO, {"repo": REPO})
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo: {REPO: str(tmp_path)}[repo])
    opened: dict[str, Any] = {}
    exec(card.split("## From this repository")[1].split("```")[1].removeprefix("python"), opened)  # noqa: S102
    ids = opened["tokenizer"]("A case", return_tensors="pt").input_ids
    assert torch.equal(opened["model"](ids).logits, adapted(ids).logits)


def test_a_full_model_is_not_its_own_base(hub):
    adapter = collect(load_params(), load_params().model("v2"))
    full = replace(adapter, manifest=adapter.manifest.model_copy(update={"files": {"model.safetensors": "a" * 64}}))
    card = ModelCard(card_of(full, REPO, {"repo": REPO}))
    assert (card.data.base_model, card.data.base_model_relation) == (None, "merge")
    assert f"| its base, esi-base | `{identity(full.base)}` |" in card.text
    assert f'PreTrainedTokenizerFast.from_pretrained("{REPO}")' in card.text


def test_what_the_card_of_a_merge_points_to_is_sent():
    assert merge.RESULT in SENT


def test_an_adapter_above_a_folder_of_this_machine_is_not_pushed(hub, capsys, monkeypatch):
    named = {"repo": "/home/ada/model", "commit": "local-1", "quantize": "none"}
    monkeypatch.setattr(bases, "reference", lambda _: named)
    assert cli.main(["push", "v2", "--repo", REPO]) == 1
    assert "v2 is an adapter above /home/ada/model, a folder of this machine" in capsys.readouterr().err
    assert not hub.files


def test_what_learned_from_somebodys_records_is_not_pushed(hub):
    made = collect(load_params(), load_params().model("v2"))
    first, *rest = made.training
    learned = replace(made, training=(first._replace(is_imported=True), *rest))
    with pytest.raises(DataError, match="learned from somebody's records and may repeat them; nothing was pushed"):
        card_of(learned, REPO, {"repo": REPO})
