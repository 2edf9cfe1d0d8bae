"""Provenance of stages: what DVC records, in the words of SLSA, read by the stock libraries."""

import base64
import copy
import json
import os
import shutil
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

import clinrl_loader
import laid
from clinrl.artifacts import md5
from clinrl.cli import main as cli
from clinrl.errors import ArtefactError, Refused, SignatureError
from clinrl.provenance import dvc_yaml, lock, stages, statements
from clinrl.signing import dsse, keys
from intoto import validated

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _unchanged_environment() -> Iterator[None]:
    """`main.main` pins variables of the process; they go back to what they were after each test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def project(valid: dict[str, Any], checkout: Path) -> Path:
    """A checkout with the project's own dvc.yaml, small data sets, and a version whose stage `train` has run."""
    for spec in valid["datasets"].values():
        spec["cases"] = 5
    valid["imports"], valid["external"], valid["rivals"] = {}, {}, {}
    valid["protocols"] = {"bases": {}, "versions": {}}
    laid.lay(checkout, valid)
    shutil.copy(ROOT / "dvc.yaml", checkout)
    for file in (
        "reports/params.json", "bases/esi/manifest.json", "bases/esi/model", "adapters/v1/manifest.json",
        "cases/esi-d1/cases.jsonl", "reports/probe/v2.json", "adapters/v2/adapter", "adapters/v2/manifest.json",
    ):  # fmt: skip
        (checkout / "data" / file).parent.mkdir(parents=True, exist_ok=True)
        (checkout / "data" / file).write_text(file)
    return checkout


STATEMENT = Path(".clinrl/provenance/train@v2.json")


@pytest.mark.long
def test_every_stage_is_what_dvc_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands, inputs, parameters and outputs of all stages in the project's own dvc.lock."""
    monkeypatch.chdir(ROOT)
    recorded = {name: entry for name, entry in lock.read().items() if name != stages.FIRST}
    read = dvc_yaml.read()
    assert len(recorded) > 100
    for address, entry in recorded.items():
        stage = read[address]
        assert (stage.address, stage.command) == (address, entry["cmd"])
        assert sorted(stage.deps) == sorted(dep["path"] for dep in entry.get("deps", ()))
        assert sorted(stage.outs) == sorted(out["path"] for out in entry["outs"])
        assert stage.params == entry.get("params", {})


def test_outputs_have_the_digests_of_dvc_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    stage = statements.find("base", "esi")
    assert stage is not None
    subjects = {subject["name"]: subject["digest"] for subject in statements.statement(stage)["subject"]}
    for out in lock.read()["base@esi"]["outs"]:
        assert subjects[out["path"]] == {"dvcMd5": out["md5"]}
    assert {"data/bases/esi/manifest.json", "data/adapters/esi-base/manifest.json"} <= subjects.keys()


def test_the_stock_tools_read_it(project: Path) -> None:
    statements.record("train", "v2", "embedded")
    envelope = json.loads(STATEMENT.read_text())
    who, said = dsse.open_envelope(envelope, keys.keyring())
    assert who == keys.OURS
    read = validated(said)
    assert read.pb.predicate_type == "https://slsa.dev/provenance/v1"
    slsa = ParseDict(said["predicate"], provenance_pb2.Provenance())
    definition = slsa.build_definition
    assert slsa.run_details.builder.id == "clinrl"
    assert definition.external_parameters["stage"] == "train@v2"
    assert definition.external_parameters["command"] == 'python -m clinrl stage "$DVC_STAGE"'
    assert definition.external_parameters["params"]["versions.v2.parent"] == "v1"
    assert [used.name for used in definition.resolved_dependencies] == [
        "data/reports/params.json",
        "data/bases/esi/manifest.json",  # names all its files
        "data/adapters/v1/manifest.json",
        "data/cases/esi-d1/cases.jsonl",  # has no manifest here
        "data/reports/probe/v2.json",
    ]
    made = {subject.name: dict(subject.digest) for subject in read.pb.subject}
    assert made.keys() == {"data/adapters/v2", "data/adapters/v2/adapter", "data/adapters/v2/manifest.json"}
    assert made["data/adapters/v2"] == {"dvcMd5": md5(Path("data/adapters/v2"))}
    key = keys.keyring()[keys.OURS]
    stock = SSlibKey(key.fingerprint, "ecdsa", "ecdsa-sha2-nistp256", {"public": clinrl_loader.pem(key.line)})
    assert Envelope.from_dict(copy.deepcopy(envelope)).verify([stock], 1)


def test_a_statement_that_says_so_already_stays(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statements.record("train", "v2", "embedded")
    before = STATEMENT.stat().st_mtime_ns
    statements.record("train", "v2", "embedded")
    assert STATEMENT.stat().st_mtime_ns == before
    (project / "data/adapters/v2/adapter").write_text("other")
    statements.record("train", "v2", "embedded")
    assert STATEMENT.stat().st_mtime_ns != before
    shutil.rmtree(keys.FOLDER)  # who signed it is nobody whose signature counts any more
    written = STATEMENT.read_text()
    statements.record("train", "v2", "embedded")
    assert STATEMENT.read_text() != written
    assert len(statements.of_stages(["train@v2"])) == 1
    for broken in ("{", "[" * 100_000):
        STATEMENT.write_text(broken)
        statements.record("train", "v2", "embedded")
        assert len(statements.of_stages(["train@v2"])) == 1


def test_parameters_that_change_during_a_stage_are_not_signed_for(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = statements.find("train", "v2")
    assert begun is not None
    statements.record("train", "v2", "embedded", begun=begun)
    STATEMENT.unlink()
    statements.record("train", "v2", "embedded", begun=begun._replace(params={"params.yaml": {"versions.v2.seed": 3}}))
    assert not STATEMENT.exists()
    assert "`dvc repro --single-item --force train@v2` makes it anew" in capsys.readouterr().err
    handled = copy.deepcopy(begun.params)
    handled["params/esi.yaml"]["profiles.grpo"]["trainer"]["embedded"]["on_alarm"] = "warn"
    statements.record("train", "v2", "embedded", begun=begun._replace(params=handled))
    assert STATEMENT.exists(), "how a training is handled changes no adapter"


def test_what_cannot_be_signed_is_said_and_fails_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statements.record("train", "v2", "full")
    assert "train v2 is done, but its provenance is not signed: there is no signing key" in capsys.readouterr().err
    (project / "data/adapters/v2/adapter").unlink()
    shutil.rmtree(project / "data/reports/probe")
    statements.record("train", "v2", "embedded")
    assert "data/reports/probe/v2.json, which dvc.yaml names, is not there" in capsys.readouterr().err
    statements.FOLDER.parent.mkdir(exist_ok=True)
    statements.FOLDER.write_text("")  # a statement cannot be written
    (project / "data/reports/probe").mkdir()
    (project / "data/reports/probe/v2.json").write_text("")
    statements.record("train", "v2", "embedded")
    assert "File exists" in capsys.readouterr().err
    statements.FOLDER.unlink()
    unknown = "stages: {train: {foreach: '${versions}', do: {cmd: c, deps: ['${nowhere.to.be.seen}']}}}"
    for broken in ("stages: [", "stages: {train: {foreach: 1, do: {}}}", "stages: {train: {}}", "- 1", unknown):
        Path("dvc.yaml").write_text(broken)
        statements.record("train", "v2", "embedded")
        assert "is done, but" in capsys.readouterr().err
        with pytest.raises(Refused):
            statements.find("train", "v2")
    Path("dvc.yaml").write_text("stages: {}")
    statements.record("train", "v2", "embedded")
    Path("dvc.yaml").unlink()
    statements.record("train", "v2", "embedded")
    assert capsys.readouterr().err == ""
    assert not STATEMENT.exists()


def test_a_parameter_that_is_not_there_is_not_signed_and_one_that_json_has_not_is_text(project: Path) -> None:
    stage = statements.find("train", "v2")
    assert stage is not None
    stage.params["params.yaml"]["made"] = date(2026, 1, 2)
    build = statements.statement(stage)["predicate"]["buildDefinition"]
    assert build["externalParameters"]["params"]["made"] == "2026-01-02"
    stage.params["params.yaml"]["lost"] = dvc_yaml.ABSENT
    with pytest.raises(ArtefactError, match=r"names lost, which params\.yaml does not have"):
        statements.statement(stage)


def test_only_what_holds_is_handed_on(project: Path) -> None:
    assert statements.of_stages(["train@v2"]) == []
    statements.record("train", "v2", "embedded")
    [(_, envelope)] = statements.of_stages(["probe@v2", "train@v2"])
    (project / "data/adapters/v2/adapter").write_text("as of another commit")
    assert statements.of_stages(["train@v2"]) == []
    (project / "data/adapters/v2/adapter").unlink()
    assert statements.of_stages(["train@v2"]) == []
    shutil.copy(STATEMENT, STATEMENT.with_name("train@v3.json"))
    with pytest.raises(SignatureError, match=r"train@v3\.json is not about train@v3"):
        statements.of_stages(["train@v3"])
    payload = json.loads(base64.b64decode(envelope["payload"]))
    payload["predicate"]["buildDefinition"]["externalParameters"]["params"]["scale"] = "full"
    altered = envelope | {"payload": base64.b64encode(json.dumps(payload).encode()).decode()}
    others = {"{": "it is no provenance", "[" * 100_000: "it is no provenance", "[]": "no DSSE envelope"}
    for text, why in {**others, json.dumps(altered): "nobody whose key counts here signed this"}.items():
        STATEMENT.write_text(text)
        with pytest.raises(SignatureError, match=f"{why}.*; remove it, and the next run of train@v2"):
            statements.of_stages(["train@v2"])
    payload = json.loads(base64.b64decode(envelope["payload"])) | {"predicateType": "https://example.org/other"}
    STATEMENT.write_text(json.dumps(dsse.envelope(payload, keys.signer("embedded"))))
    with pytest.raises(SignatureError, match="is not about train@v2"):
        statements.of_stages(["train@v2"])
    signed = dsse.envelope({"_type": clinrl_loader.STATEMENT, "subject": 1, "predicate": []}, keys.signer("embedded"))
    STATEMENT.write_text(json.dumps(signed))
    with pytest.raises(SignatureError, match="it is no provenance"):
        statements.of_stages(["train@v2"])


def test_a_stage_leaves_its_provenance(project: Path) -> None:
    assert cli.main(["dataset", "esi-x1"]) == 0
    [(_, envelope)] = statements.of_stages(["dataset@esi-x1"])
    _, said = dsse.open_envelope(envelope, keys.keyring())
    names = [subject["name"] for subject in said["subject"]]
    assert names == ["data/cases/esi-x1", "data/cases/esi-x1/cases.jsonl", "data/cases/esi-x1/manifest.json"]
