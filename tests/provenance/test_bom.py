"""The bill of materials of the release, and that of one version."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

import examined
from clinrl import paths
from clinrl.artifacts import read_manifest, sha256_file
from clinrl.config.bases import HubModel
from clinrl.config.params import Params, load_params
from clinrl.config.recipes import RejectionProfile
from clinrl.errors import ArtefactError, ParamsError
from clinrl.provenance import bom, pins

pytestmark = pytest.mark.usefixtures("few_draws")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return bom.release(load_params())


def parts(bill: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in bill["components"] if part["type"] == kind}


def facts(part: dict[str, Any]) -> dict[str, str]:
    return {entry["name"].removeprefix("clinrl:"): entry["value"] for entry in part["properties"]}


def one_of_each_form(bill: dict[str, Any]) -> dict[str, Any]:
    """A bill with one component for each set of fields and form of licence: to check all of them takes a minute."""
    forms = {}
    for part in bill["components"]:
        (licence, *_) = part.get("licenses", [{}])
        form = (part["type"], *part, *licence, *licence.get("license", {}), bool(part.get("hashes")))
        short = [{**entry, "hashes": entry["hashes"][:1]} for entry in part.get("externalReferences", [])]
        forms[form] = part | ({"externalReferences": short} if short else {})
    return bill | {"components": [*forms.values()], "dependencies": bill["dependencies"][:2]}


def assert_sound(bill: dict[str, Any]) -> None:
    """Valid by the schema of CycloneDX; every reference is to something in the bill, and nothing is in it twice."""
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(one_of_each_form(bill))) is None
    refs = [part["bom-ref"] for part in [bill["metadata"]["component"], *bill["components"]]]
    assert len(refs) == len({*refs})
    assert [entry["ref"] for entry in bill["dependencies"]] == sorted(refs)
    used = {ref for entry in bill["dependencies"] for ref in entry["dependsOn"]}
    used |= {entry["ref"] for found in bill["vulnerabilities"] for entry in found["affects"]}
    assert used <= {*refs}


@pytest.mark.long
def test_the_committed_bill_is_that_of_this_checkout(bill: dict[str, Any]) -> None:
    assert (ROOT / bom.FILE).read_text(encoding="utf-8") == bom.text(bill), "run `make bom`"


def test_it_is_sound(bill: dict[str, Any]) -> None:
    assert_sound(bill)
    assert not {"serialNumber", "timestamp"} & {*bill, *bill["metadata"]}


def test_what_is_written_is_the_bill(bill: dict[str, Any]) -> None:
    assert json.loads(bom.text(bill)) == bill


def test_every_pinned_library_is_in_it_with_its_hashes_and_licence(bill: dict[str, Any]) -> None:
    found = {part.get("purl"): part for part in bill["components"]}
    for pin in pins.load():
        part = found[f"pkg:pypi/{pin.name}@{pin.version.replace('+', '%2B')}"]
        (source,) = part["externalReferences"]
        assert [entry["content"] for entry in source["hashes"]] == [*pin.hashes]
        assert pin.licence in json.dumps(part["licenses"])


def test_every_base_is_in_it_with_the_digest_of_its_weights(bill: dict[str, Any]) -> None:
    models = parts(bill, "machine-learning-model")
    weights = {"": "-base", "judge/": "-judge", "second_judge/": "-second-judge"}
    for task in load_params(ROOT / "params.yaml").bases:
        for folder, name in weights.items():
            path = ROOT / paths.base(task) / folder / "model.safetensors"
            if path.exists():
                assert models[task + name]["hashes"] == [{"alg": "SHA-256", "content": sha256_file(path)}]
    assert models["meta-llama/Llama-3.1-8B-Instruct"]["purl"].startswith("pkg:huggingface/meta-llama/")
    assert bom.ENCODER in models


def test_every_data_set_is_in_it_with_its_seed_and_the_digest_in_the_lock(bill: dict[str, Any]) -> None:
    sets = parts(bill, "data")
    params = load_params(ROOT / "params.yaml")
    assert {*sets} == {*params.all_data}
    text = (ROOT / "dvc.lock").read_text(encoding="utf-8")
    for name, spec in params.datasets.items():
        assert facts(sets[name])["seed"] == str(spec.seed)
        assert f"path: data/cases/{name}\n" in text
        assert facts(sets[name])["dvc:md5"] in text
        assert sets[name]["data"][0]["classification"] == "synthetic"


def test_a_weakness_that_nobody_mends_is_told_with_what_is_done_about_it(bill: dict[str, Any]) -> None:
    (told,) = bill["vulnerabilities"]
    assert told["id"] == "CVE-2025-69872"
    assert told["affects"] == [{"ref": "pkg:pypi/diskcache@5.6.3"}]
    assert told["analysis"]["detail"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Params]:
    folder = tmp_path_factory.mktemp("examined")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, examined.build({"v1": [1], "v2": examined.RIGHT, "v2-full": examined.RIGHT})


@pytest.fixture
def project(built: tuple[Path, Params], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """A copy of the built project, free to be damaged."""
    shutil.copytree(built[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return built[1]


def test_a_version_names_its_base_its_ancestors_its_data_and_what_serving_needs(project: Params) -> None:
    bill = bom.of_version(project, "v2")
    assert_sound(bill)
    mine = bill["metadata"]["component"]
    assert mine["name"] == "v2"
    assert {file["name"]: file["hashes"][0]["content"] for file in mine["components"]} == read_manifest(
        paths.adapter("v2")
    ).files
    assert {"esi-base", "v1"} <= {*parts(bill, "machine-learning-model")}
    assert {*parts(bill, "data")} == {"d1", "x1"}
    libraries = parts(bill, "library")
    assert {"torch", "numpy", "bitsandbytes", "mlflow", "typing-extensions"} <= {*libraries}
    assert not {"dvc", "prefect", "trl"} & {*libraries}
    graph = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    assert graph["version/v1"] == ["base/esi", "data/d1", "data/x1"]
    assert {"version/v1", "data/d1", "pkg:pypi/peft@0.21.2"} <= {*graph["version/v2"]}
    assert bill == bom.of_version(project, "v2")


def test_how_a_model_learned_is_said_in_the_words_of_the_format(project: Params) -> None:
    trainer = {"lr": 1e-3, "steps": 2, "batch": 4, "prompts": 4, "group": 4, "temperature": 1.0, "max_completion": 24}
    own = project.profiles["reward"].model_dump() | {
        "method": "rejection",
        "trainer": {"embedded": trainer, "full": trainer},
    }
    rejection = project.model_copy(update={"profiles": project.profiles | {"reward": RejectionProfile(**own)}})
    found = [
        bom.of_version(params, name)["metadata"]["component"]["modelCard"]["modelParameters"]["approach"]["type"]
        for params, name in ((project, "v1"), (project, "v2"), (rejection, "v2"))
    ]
    assert found == ["supervised", "reinforcement-learning", "supervised"]


def test_a_merge_names_the_version_that_it_was_made_of(project: Params) -> None:
    bill = bom.of_version(project, "v2-full")
    assert_sound(bill)
    assert {"esi-base", "v1", "v2"} <= {*parts(bill, "machine-learning-model")}
    graph = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    assert "version/v2" in graph["version/v2-full"]


def test_an_altered_base_gets_no_bill(project: Params) -> None:
    with (paths.base("esi") / "config.json").open("a") as stream:
        stream.write(" ")
    with pytest.raises(ArtefactError, match="altered"):
        bom.of_version(project, "v2")


def test_an_unknown_name_is_refused(project: Params) -> None:
    with pytest.raises(ParamsError, match="v9"):
        bom.of_version(project, "v9")


def test_at_full_scale_the_base_is_the_pinned_commit(project: Params) -> None:
    full = project.model_copy(update={"scale": "full"})
    (paths.base("esi") / "base.json").write_text('{"repo": "Qwen/Qwen3.5-9B", "commit": "%s"}' % ("a" * 40))
    bill = bom.of_version(full, "v2")
    assert_sound(bill)
    base = parts(bill, "machine-learning-model")["Qwen/Qwen3.5-9B"]
    assert base["purl"] == f"pkg:huggingface/Qwen/Qwen3.5-9B@{'a' * 40}"
    assert base["bom-ref"] == "base/esi"


def test_judges_of_one_repository_are_told_apart_by_their_commits(project: Params) -> None:
    spec = project.bases["esi"].full
    judges = dict.fromkeys(("judge", "second_judge"), HubModel(repo=spec.repo, revision="main", quantize="none"))
    judged = project.bases["esi"].model_copy(update={"full": spec.model_copy(update={"judges": judges})})
    full = project.model_copy(update={"scale": "full", "bases": project.bases | {"esi": judged}})
    pinned = {"repo": spec.repo, "commit": "b" * 40}
    base = {"repo": spec.repo, "commit": "a" * 40, "judges": dict.fromkeys(judges, pinned)}
    (paths.base("esi") / "base.json").write_text(json.dumps(base))
    bill = bom.of_version(full, "v2")
    assert_sound(bill)
    found = [(part["bom-ref"], part["version"]) for part in bill["components"] if part["name"] == spec.repo]
    assert found == [("base/esi", "a" * 40), (f"hub/{spec.repo}@{'b' * 40}", "b" * 40)]


def test_at_full_scale_the_licence_is_that_of_the_base_whose_weights_a_full_model_has(
    project: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = project.model_copy(update={"scale": "full"})
    repo = full.bases["esi"].full.repo
    (paths.base("esi") / "base.json").write_text(f'{{"repo": "{repo}", "commit": "{"a" * 40}"}}')
    monkeypatch.setitem(bom.HUB_LICENCES, repo, "LicenseRef-Own")
    for name, has_base in (("v2", False), ("v2-full", True)):
        bill = bom.of_version(full, name)
        models = parts(bill, "machine-learning-model")
        for model in (bill["metadata"]["component"], models["v1"], models[repo]):
            assert model["licenses"] == [{"license": {"name": "LicenseRef-Own"}}]
        assert ("its weights are in the merged model" in models[repo]["description"]) == has_base


def test_writing_bills_loads_no_library_for_them() -> None:
    heavy = "{'cyclonedx', 'torch', 'mlflow', 'pandas'}"
    code = f"import sys, clinrl.provenance.bom; sys.exit({heavy} & {{*sys.modules}} != set())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", '{"repo": 1, "commit": "a"}', '{"repo": "a", "commit": {}}', "[" * 100_000]
)
def test_a_damaged_reference_to_the_hub_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "base.json").write_text(text)
    with pytest.raises(ArtefactError, match="rebuild the base"):
        bom._pinned(tmp_path)


def test_a_full_disk_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", bom.FILE)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(bom, "release", lambda _params: {})
    monkeypatch.setattr(bom, "write_text", full)
    assert bom.main() == 1
    said = "clinrl: disk is full at bom.cdx.json: free some space and give the same command again\n"
    assert capsys.readouterr().err == said
