"""Model cards: front matter that other programs read, and every number of the exam with its interval."""

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from clinrl.analysis.exam import EvalReport
from clinrl.reports import model_card
from clinrl.types import Estimate

REPORTS = Path(__file__).parents[2] / "data/reports/esi-v49"
MANIFEST = {
    "name": "v2", "task": "esi", "task_version": 2, "inputs": {"base": "b" * 64, "parent": "p" * 64},
    "spec": {
        "method": "grpo", "scale": "embedded", "parent": "v1", "data": "d1", "profile": "reward", "seed": 2,
        "lora": {"rank": 4}, "trainer": {"lr": 1e-3}, "stream": {}, "modes": {}, "reward": {"kind": "asymmetric"},
    },
}  # fmt: skip

TRAINING = [
    model_card.Trained("v1", "d1", False, {"severe_pain": 0.65, "open_injury": 0.5}),
    model_card.Trained("v2", "own", True, {}),
]


def front_matter(card):
    start, matter, body = card.split("---\n", 2)
    assert start == ""
    return YAML(typ="safe").load(matter), body


@pytest.fixture
def reports():
    return [EvalReport.model_validate_json((REPORTS / f"{mode}.json").read_bytes()) for mode in ("think", "direct")]


def test_a_trained_adapter_says_what_it_is_and_what_it_is_not_for():
    matter, body = front_matter(model_card.write(MANIFEST, lineage=["v1", "v2"]))
    assert matter["library_name"] == "peft"
    assert "research-only" in matter["tags"]
    assert "esi-base → v1 → v2" in body
    assert "## Out of scope" in body
    assert "p" * 64 in body


def test_a_base_of_the_hub_is_named_by_repository_and_commit():
    base = {"repo": "Qwen/Qwen3.5-9B", "commit": "c" * 40}
    matter, body = front_matter(model_card.write(MANIFEST, lineage=["v1"], base=base))
    assert matter["base_model"] == "Qwen/Qwen3.5-9B"
    assert f'from_pretrained("Qwen/Qwen3.5-9B", revision="{"c" * 40}")\n' in body


@pytest.mark.parametrize(("quantize", "spec"), [("nf4", {}), ("none", {"qlora": True})])
def test_an_adapter_is_opened_above_the_four_bits_that_it_was_trained_above(quantize, spec):
    base = {"repo": "Qwen/Qwen3.5-9B", "commit": "c" * 40, "quantize": quantize}
    made = {**MANIFEST, "spec": MANIFEST["spec"] | spec}
    _, body = front_matter(model_card.write(made, lineage=["v1"], base=base))
    assert f'from_pretrained("Qwen/Qwen3.5-9B", revision="{"c" * 40}", quantization_config=small)\n' in body
    assert "AutoTokenizer, BitsAndBytesConfig\n" in body
    assert 'bnb_4bit_compute_dtype="bfloat16"\n' in body
    assert "small" not in model_card.write(made, lineage=["v1"])  # above an embedded base its bytes stay as they are


def test_a_card_of_a_version_that_saw_records_says_so():
    matter, body = front_matter(model_card.write(MANIFEST, lineage=["v2"], records="training"))
    assert "Trained on imported records of patients" in body
    assert "no patient's data were used" not in body
    assert "synthetic-data" not in matter["tags"]


@pytest.mark.parametrize(
    ("spec", "clause"),
    [
        ({"placebo": "random", "waiver": "A control."}, "policy optimisation) on a placebo reward (random) at scale"),
        ({"method": "rejection"}, "on completions of its parent that the task's reward kept (rejection sampling) at"),
        ({"method": "sft", "omit": {}, "labels_only": True}, "supervised fine-tuning on gold labels without reasons,"),
    ],
)
def test_a_card_says_how_a_control_and_a_rival_were_trained(spec, clause):
    card = model_card.write(MANIFEST | {"spec": MANIFEST["spec"] | spec}, lineage=["v2"])
    assert clause in card
    recipe = json.loads(card.partition("```json")[2].partition("```")[0])
    assert recipe | {key: value for key, value in spec.items() if key != "waiver"} == recipe
    assert ("reward" in recipe) == (spec.get("method") != "sft")


def test_an_examined_adapter_says_how_it_did_in_every_mode(reports):
    card = model_card.write(MANIFEST, lineage=["v1", "v2"])
    agreement = {"mode_agreement": Estimate(value=0.98, low=0.97, high=0.99, n=800)}
    matter, body = front_matter(
        model_card.with_results(
            card, reports, agreement, training=TRAINING, missing=["other seeds: not done"], licence="Apache-2.0"
        )
    )
    (index,) = matter["model-index"]
    assert [result["dataset"]["name"] for result in index["results"]] == ["esi-x3, mode think", "esi-x3, mode direct"]
    for report, result in zip(reports, index["results"], strict=True):
        told = {metric["type"]: metric["value"] for metric in result["metrics"]}
        assert told == pytest.approx({name: estimate.value for name, estimate in report.metrics.items()}, abs=1e-5)
        exact = report.metrics["exact"]
        assert f"{exact.value:.3f} [{exact.low:.3f}, {exact.high:.3f}]" in body
    assert "The modes agree in 98.0% [97.0, 99.0] of 800 cases." in body
    assert "| bag of words |" in body
    assert card.split("---\n", 2)[2].strip() in body
    sensitivity = reports[0].metrics["high_risk_sensitivity"]
    assert f"[{sensitivity.low:.3f}, {sensitivity.high:.3f}], n {sensitivity.n} |" in body, "an n of its own"
    acs = [report.slices["rule"]["acs"][name] for name in ("exact", "critical_under") for report in reports]
    cells = [f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}], n {one.n}" for one in acs]
    assert f"| rule | acs | {' | '.join(cells)} |" in body
    assert "- other seeds: not done" in body


def test_a_card_says_how_answers_were_decoded(reports):
    think, direct = reports
    sampled = think.model_copy(update={"mode_spec": think.mode_spec | {"temperature": 0.6, "top_p": 0.95}})
    card = model_card.write(MANIFEST, lineage=["v2"])
    text = model_card.with_results(card, [sampled, direct], {}, training=[], missing=[], licence="")
    assert "| think | yes | 0.6 | 0.95 | 96 |\n| direct | no | 0.0 | 1.0 | 96 |" in text


def test_a_card_says_that_a_gap_was_planted(reports):
    card = model_card.write(MANIFEST, lineage=["v1", "v2"])
    planted = model_card.with_results(card, reports, {}, training=TRAINING, missing=[], licence="")
    assert "| v1 | d1 | synthetic, drawn from templates | severe_pain: 0.65, open_injury: 0.5 |" in planted
    assert "| v2 | own | imported records | none |" in planted
    assert "a gap that was planted" in planted
    assert "planted" not in model_card.with_results(card, reports, {}, training=TRAINING[1:], missing=[], licence="")


def test_a_card_names_a_waiver_and_the_alerts_of_the_training(reports):
    card = model_card.write(MANIFEST, lineage=["v2"])
    about = {"training": [], "missing": [], "licence": ""}
    text = model_card.with_results(card, reports, {}, **about, waiver="A control.", alarms="stop clipped think at 12")
    assert "by this waiver: A control.\n\nAlerts of its training: stop clipped think at 12.\n\n## Not" in text
    plain = model_card.with_results(card, reports, {}, **about)
    assert "waiver" not in plain
    assert "Alerts" not in plain


def test_failures_are_named_or_said_to_be_none(reports):
    first = reports[0]
    card = model_card.write(MANIFEST, lineage=["v2"])
    silent = first.model_copy(update={"unreadable": {"empty": 2, "two answers": 1}, "stops": {"max_tokens": 4}})
    assert "| think | 3: empty (2), two answers (1) | 4 | rule " in model_card.with_results(
        card, [silent], {}, training=[], missing=[], licence=""
    )
    clean = first.model_copy(update={"unreadable": {}, "stops": {}, "slices": {}})
    text = model_card.with_results(card, [clean], {}, training=[], missing=[], licence="")
    assert "| think | 0 | 0 | none |" in text
    assert "modes agree" not in text


def test_a_slice_of_one_condition_has_no_interval():
    read = REPORTS.with_name("imaging-labels-1") / "think.json"
    report = EvalReport.model_validate_json(read.read_bytes())
    conditions = report.slices["condition"].values()
    assert any(0 < found["exact"].low == found["exact"].high < 1 for found in conditions)
    card = model_card.write(MANIFEST, lineage=["v2"])
    text = model_card.with_results(card, [report], {}, training=[], missing=[], licence="")
    body = text.split("---\n", 2)[2]
    assert not [ends for ends in re.findall(r"\[([0-9.-]+), ([0-9.-]+)\]", body) if ends[0] == ends[1]]
    assert ", no interval" in body
    assert '"No interval"' in body
