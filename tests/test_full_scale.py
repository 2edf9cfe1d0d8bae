"""The chain at scale full as far as a CPU goes, with the folder of a tiny checkpoint in the place of the hub's."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from ruamel.yaml import YAML

import dolls
import examined
import locks
from clinrl import paths
from clinrl.config.params import load_params
from clinrl.data import dataset, reward_audit, validate
from clinrl.evaluation import evaluate
from clinrl.evaluation.answers import load_report
from clinrl.models import bases
from clinrl.registry import versions
from clinrl.release import decisions, dossier, lineage
from clinrl.signing import approval, keys
from clinrl.training import launch

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("few_draws")]
LIMITS = {"critical_under": {"max": {"embedded": 0.9, "full": 0.9}}}


def test_what_is_trained_and_examined_at_full_scale_is_registered_released_and_written_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copytree(dolls.built() / paths.base("esi"), "checkpoint")
    keys.init()
    shape = {"rank": 2, "alpha": 4.0, "targets": "all-linear"}
    full = {"repo": str(tmp_path / "checkpoint"), "revision": "main", "quantize": "none", "lora": shape}
    sections = dolls.PARAMS | {
        "scale": "full",
        "bases": {"esi": dolls.PARAMS["bases"]["esi"] | {"full": full}},
        "versions": {name: dolls.PARAMS["versions"][name] for name in ("v1", "v2")},
        "datasets": examined.DATASETS,
        "gates": {"esi": {"least_cases": 10, "limits": LIMITS}},
        "approvers": {"Ada": keys.signer("full").key.line},
    }
    YAML().dump(sections, Path("params.yaml"))
    params = load_params()
    bases.stage(params, "esi")
    for name in ("d1", "x1"):
        dataset.stage(params, name)
        validate.stage(params, name)
    with dolls.in_process():
        for name in ("v1", "v2"):
            reward_audit.stage(params, name)
            launch.stage(params, name)
    for name in ("esi-base", "v1", "v2"):
        evaluate.stage(params, name)
    locks.record(params)
    for name in ("v1", "v2"):
        assert versions.register(params, name).name == name
    refused = decisions.decide(params, "v2")
    assert any("from always" in reason for reason in refused.reasons), "the doll cannot read"

    sampler = load_report("v2", "think").sampler
    assert sampler["name"] == "transformers"
    for name, pattern in (("esi-base", [1]), ("v1", [1]), ("v2", examined.RIGHT)):
        dolls.examine(params, name, pattern, sampler)
    locks.record(params)
    for name in ("v1", "v2"):
        versions.register(params, name)
    examined.promote(params, "v2", "Ada", decisions.decide(params, "v2"))
    assert {link.state for link in lineage.walk(params, "v2") if link.link != "provenance"} <= {"holds", "open"}
    assert approval.is_by_list(params)
    assert dossier.stage(params, Path("params.yaml"), "v2") == 0
    assert json.loads((paths.adapter("v2") / "adapter_config.json").read_text())["r"] == 2
    card = ModelCard.load(paths.adapter("v2") / "README.md")
    assert card.data.base_model == full["repo"], "where other machines find it"
    shown: dict[str, Any] = {}
    exec(card.text.split("```python")[1].split("```")[0], shown)  # noqa: S102  what the card shows
    assert shown["model"].active_adapters == ["default"]
