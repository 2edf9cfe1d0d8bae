"""Rebuilds by others: whose word counts, about what, and how often."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from clinrl import paths
from clinrl.config.params import Params
from clinrl.errors import ArtefactError
from clinrl.provenance import rebuilt
from clinrl.signing import dsse, keys
from intoto import validated
from valid_params import VALID

FIRST, SECOND, STRANGER = (keys._signer_of(ec.derive_private_key(number, ec.SECP256R1())) for number in (21, 22, 23))
PARAMS = Params.model_validate({**VALID, "rebuilders": {"b1": FIRST.key.line, "b2": SECOND.key.line}})
IDENTITY = "1d" * 32
LOCK = """\
schema: '2.0'
stages:
  params: {cmd: z, outs: [{path: data/reports/params.json, md5: p0}]}
  base@esi:
    cmd: a
    deps: [{path: data/reports/params.json, md5: p0}]
    outs: [{path: data/bases/esi, md5: b0.dir}]
  train@v1: {cmd: b, deps: [{path: data/bases/esi, md5: b0.dir}], outs: [{path: data/adapters/v1, md5: a1.dir}]}
  train@v2: {cmd: c, deps: [{path: data/adapters/v1, md5: a1.dir}], outs: [{path: data/adapters/v2, md5: a2.dir}]}
  evaluate@v2:
    cmd: d
    deps: [{path: data/adapters/v2, md5: a2.dir}]
    outs: [{path: data/graded/v2, md5: e2.dir}, {path: data/reports/v2/think.json, md5: e3}]
  evaluate@v3: {cmd: e, deps: [{path: data/adapters/v2, md5: a2.dir}], outs: [{path: data/graded/v3, md5: f2.dir}]}
"""
OUTS = {
    "data/adapters/v1": "a1.dir", "data/adapters/v2": "a2.dir", "data/graded/v2": "e2.dir",
    "data/reports/v2/think.json": "e3",
}  # fmt: skip
FILES = {"data/adapters/v2/weights": "0" * 64, "data/reports/v2/think.json": "1" * 64}


@pytest.fixture(autouse=True)
def _recorded(checkout: Path) -> None:
    Path("dvc.lock").write_text(LOCK)


def said(**changes: Any) -> dict[str, Any]:
    return rebuilt.statement(
        **{"name": "v2", "commit": "c" * 40, "identity": IDENTITY, "outs": OUTS, "files": FILES, **changes}
    )


def test_each_listed_rebuilder_counts_once() -> None:
    assert rebuilt.count(PARAMS, "v2", IDENTITY) == []
    rebuilt.write(Path(), said(), SECOND)
    assert rebuilt.count(PARAMS, "v2", IDENTITY) == ["b2"]
    path = rebuilt.write(Path(), said(), FIRST)
    rebuilt.write(Path(), said(commit="d" * 40), FIRST)
    path.with_name("copy.json").write_bytes(path.read_bytes())
    rebuilt.write(Path(), said(), STRANGER)
    assert rebuilt.count(PARAMS, "v2", IDENTITY) == ["b1", "b2"]
    assert rebuilt.count(Params.model_validate(VALID), "v2", IDENTITY) == []


def test_the_statement_is_one_of_in_toto() -> None:
    read = validated(said())
    subjects = {subject.name: dict(subject.digest) for subject in read.pb.subject}
    assert subjects["data/adapters/v2"] == {"dvcMd5": "a2.dir"}
    assert subjects["data/adapters/v2/weights"] == {"sha256": "0" * 64}
    assert subjects["data/reports/v2/think.json"] == {"dvcMd5": "e3", "sha256": "1" * 64}
    path = rebuilt.write(Path(), said(), FIRST)
    assert path.parent == Path("data/attestations/v2")
    assert path.name.startswith("SHA256-")
    assert path.read_bytes() == rebuilt.write(Path(), said(), FIRST).read_bytes()


OTHERS = {
    "another adapter": said(identity="2e" * 32),
    "another version": said(name="v3"),
    "other answers": said(outs={**OUTS, "data/graded/v2": "00.dir"}),
    "another parent": said(outs={**OUTS, "data/adapters/v1": "00.dir"}),
    "fewer outputs": said(outs={path: digest for path, digest in OUTS.items() if "graded" not in path}),
    "not equal": said() | {"predicate": said()["predicate"] | {"equal": False}},
    "equal in a word": said() | {"predicate": said()["predicate"] | {"equal": "true"}},
    "another kind of statement": said() | {"predicateType": "https://slsa.dev/verification_summary/v1"},
    "no predicate": said() | {"predicate": None},
    "no subjects": said() | {"subject": 1},
    "malformed subjects": said() | {"subject": [[]]},
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_word_about_something_else_does_not_count(what: str) -> None:
    folder = paths.attestations("v2")
    folder.mkdir(parents=True)
    (folder / "b1.json").write_text(json.dumps(dsse.envelope(OTHERS[what], FIRST)))
    assert rebuilt.count(PARAMS, "v2", IDENTITY) == []


@pytest.mark.parametrize(
    "text", ["", "{}", "[" * 100_000, "\x00", '{"payload": "", "payloadType": "", "signatures": []}']
)
def test_a_file_that_is_no_attestation_does_not_count(text: str) -> None:
    path = rebuilt.write(Path(), said(), FIRST)
    path.with_name("broken.json").write_text(text)
    path.with_name("folder.json").mkdir()
    assert rebuilt.count(PARAMS, "v2", IDENTITY) == ["b1"]
    envelope = json.loads(path.read_text())
    path.write_text(json.dumps(envelope | {"payload": envelope["payload"].replace("A", "B", 1)}))
    assert rebuilt.count(PARAMS, "v2", IDENTITY) == []


def test_what_the_lock_now_says_counts() -> None:
    rebuilt.write(Path(), said(), FIRST)
    Path("dvc.lock").write_text(LOCK.replace("e2.dir", "e9.dir"))
    assert rebuilt.count(PARAMS, "v2", IDENTITY) == []
    Path("dvc.lock").unlink()
    with pytest.raises(ArtefactError, match=r"dvc\.lock is not here"):
        rebuilt.count(PARAMS, "v2", IDENTITY)
