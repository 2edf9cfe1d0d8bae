"""Rebuilds by others: signed statements that somebody built a version from nothing and got the same bytes.

This works because the pipeline's bytes do not depend on the machine. `clinrl verify NAME --attest` writes a statement
to data/attestations, which is under git: the rebuilder commits or sends the file. A gate may require some of them.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clinrl import paths
from clinrl.artifacts import write_json
from clinrl.config.params import Params
from clinrl.errors import SignatureError
from clinrl.provenance import lock
from clinrl.provenance.stages import FIRST
from clinrl.signing import dsse
from clinrl.signing.keys import Signer

PREDICATE = "https://clinrl.dev/rebuilt/v1"


def lineage(recorded: lock.Lock, target: str) -> list[str]:
    """The stages that a rebuild of `target` runs: itself and those that it depends on, ancestors first.

    Those that check names or build bases are left out: `clinrl verify base@TASK` rebuilds a base by itself.
    """
    return [name for name in lock.ancestors(recorded, target) if name != FIRST and not name.startswith("base@")]


def statement(
    name: str, commit: str, identity: str, outs: Mapping[str, str], files: Mapping[str, str]
) -> dict[str, Any]:
    """The statement that a rebuilder signs: a name was rebuilt at a commit, and every file was equal.

    `identity` is the digest of its adapter or full model, `outs` the DVC digest of every output of its lineage, `files`
    the SHA-256 of every file in them.
    """
    wholes = {path: {"dvcMd5": digest} for path, digest in outs.items()}
    each = {path: {"sha256": digest} for path, digest in files.items()}
    subjects = {path: wholes.get(path, {}) | each.get(path, {}) for path in sorted(wholes.keys() | each.keys())}
    claim = {"name": name, "commit": commit, "identity": identity, "equal": True}
    return dsse.statement(PREDICATE, subjects, claim)


def write(root: Path, claim: dict[str, Any], signer: Signer) -> Path:
    """Sign a rebuild and write it below `root`, where `count` reads it. The same key writes to the same file."""
    file = re.sub(r"[^A-Za-z0-9]", "-", signer.key.fingerprint) + ".json"
    path = root / paths.attestations(claim["predicate"]["name"]) / file
    write_json(path, dsse.envelope(claim, signer))
    return path


def count(params: Params, name: str, identity: str) -> list[str]:
    """The names in `rebuilders` of params.yaml that signed a rebuild of a version or a merge, in their order there.

    A statement counts if it is about this very adapter or full model, by its identity, and about every output of its
    lineage as dvc.lock records it. Other files do not count. Raises ArtefactError if there is no dvc.lock.
    """
    recorded = lock.read()
    outs = lock.outputs(recorded, lineage(recorded, params.model(name).stage))
    found = set()
    for file in sorted(paths.attestations(name).glob("*.json")):
        try:
            signer, claim = dsse.open_envelope(json.loads(file.read_bytes()), params.rebuilders)
            predicate = claim["predicate"]
            subjects = {subject["name"]: subject["digest"].get("dvcMd5") for subject in claim["subject"]}
            agrees = subjects.items() >= outs.items()
            about = (claim["predicateType"], predicate["name"], predicate["identity"], predicate["equal"])
        except (SignatureError, OSError, *dsse.MALFORMED):
            continue
        if agrees and about == (PREDICATE, name, identity, True):
            found.add(signer)
    return [name for name in params.rebuilders if name in found]
