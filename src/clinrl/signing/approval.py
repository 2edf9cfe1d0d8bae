"""Approvals: a person's signature on one decision.

The statement names the decision by its digest, which covers the candidate, the champion, the exam and every finding, so
anybody with the digest and a key can approve anywhere, offline. The token that an approver passes on is the signature.
"""

import base64
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clinrl.errors import GateError, SignatureError
from clinrl.signing import dsse, keys

if TYPE_CHECKING:
    from clinrl.config.params import Params
    from clinrl.signing.keys import Key, Signer

PREDICATE = "https://clinrl.dev/approval/v1"
NAME = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{2,80}")
"""An approver's name as it goes into tags and the audit log."""
MAX_TOKEN = 120
"""Characters of a token; a signature has 92 to 96."""


def check_approver(approver: str) -> str:
    """A person's name, trimmed. Raises GateError unless it has 2 to 80 characters, none of them a control character."""
    name = approver.strip()
    if not NAME.fullmatch(name):
        raise GateError("a promotion needs the name of the person who approves it, 2 to 80 characters; nothing moved")
    return name


def statement(decision: str, approver: str) -> dict[str, Any]:
    """The statement that an approver signs about the digest of a decision. Raises SignatureError if it is no digest."""
    if not re.fullmatch(r"[0-9a-f]{64}", decision):
        raise SignatureError(
            "a decision is approved by its digest, 64 characters of 0-9 and a-f; `clinrl decide NAME` prints it"
        )
    return dsse.statement(PREDICATE, {"decision": {"sha256": decision}}, {"approver": approver})


def token(decision: str, approver: str, signer: "Signer") -> str:
    """The approval of a decision as a token that an approver can paste: a signature in URL-safe Base64."""
    return base64.urlsafe_b64encode(signer.sign(dsse.signed_bytes(statement(decision, approver)))).decode()


def is_by_list(params: "Params") -> bool:
    """Whether only those may approve whom params.yaml lists: where it lists somebody, and at scale full."""
    return bool(params.approvers) or params.scale != "embedded"


def approvers(params: "Params", name: str = "") -> Mapping[str, "Key"]:
    """The keys that may approve, by name: those that params.yaml lists, and no others.

    If it lists none, at scale embedded, this checkout's key may approve under any name (`name`). With `name`, only the
    key of that name is returned. Raises SignatureError if there is none.
    """
    if params.approvers:
        if name and name not in params.approvers:
            raise SignatureError(
                f"`approvers` in params.yaml does not list {name[:80]!r}; a listed person must approve"
            )
        return {name: params.approvers[name]} if name else params.approvers
    if params.scale != "embedded":
        raise SignatureError(
            "`approvers` in params.yaml lists nobody, so nobody can approve; list names and keys there"
        )
    ours = keys.keyring().get(keys.OURS)
    if ours is None:
        raise SignatureError(
            "nobody is listed as approver, and this checkout has no key; list approvers in params.yaml, or run "
            "`clinrl keys init` where nobody else approves"
        )
    return {name or keys.OURS: ours}


def check_token(params: "Params", decision: str, token: str, name: str) -> dict[str, Any]:
    """The signed approval of a decision (its digest) by the person of a name, which a token stands for.

    If params.yaml lists no approvers, at scale embedded, this checkout's key approves under that name. Raises
    SignatureError if the key of that name did not make the token, or if nobody can approve.
    """
    try:
        signature = base64.b64decode(token.strip(), altchars=b"-_", validate=True) if len(token) < MAX_TOKEN else b""
    except ValueError:
        signature = b""
    key, claim = approvers(params, name)[name], statement(decision, name)
    if not key.verifies(dsse.signed_bytes(claim), signature):
        raise SignatureError(
            f"this token is no approval of this decision by {name}; `clinrl approve DECISION --as {name!r}` makes one"
        )
    return dsse.make_envelope(claim, key, signature)


def sign_approval(params: "Params", decision: str, approver: str) -> dict[str, Any]:
    """The approval of a decision (its digest), signed now with this machine's key.

    Raises SignatureError if that key is not the one that `approvers` lists for that name.
    """
    signer = keys.signer(params.scale)
    if approvers(params, approver).get(approver) != signer.key:
        raise SignatureError(
            f"the key of this machine is not the one that `approvers` in params.yaml lists for {approver!r}; "
            f"`clinrl approve {decision} --as {approver!r}` where that key is makes a token"
        )
    return dsse.envelope(statement(decision, approver), signer)


def approver_of(envelope: Any, decision: str, listed: Mapping[str, "Key"]) -> str:
    """The name of the person whose approval of a decision (its digest) an envelope is.

    `listed` is `approvers`. It must list the signer's key under the name in the approval; this checkout's own key, if
    listed, may approve under any name. Raises SignatureError for anything else.
    """
    signer, claim = dsse.open_envelope(envelope, listed)
    predicate = claim.get("predicate")
    name = str(predicate.get("approver")) if isinstance(predicate, dict) else ""
    if claim != statement(decision, name) or signer not in (name, keys.OURS):
        raise SignatureError(f"this is no approval of the decision {decision[:16]} by {signer}")
    return name
