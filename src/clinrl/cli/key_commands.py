"""`clinrl keys` and `clinrl approve`: one function a command, which prints the result and returns the exit code."""

from pathlib import Path

from clinrl.config.params import load_params
from clinrl.errors import ParamsError, echo
from clinrl.reports.tables import show
from clinrl.signing import approval
from clinrl.signing import keys as ring

KEYS = ("name", "counts_for", "fingerprint", "line")
HERE, APPROVALS, REBUILDS = "this checkout", "approvals", "rebuilds"
"""What a key counts for: registered folders and audit lines; these and approvals; statements about rebuilds."""


def keys(source: Path, action: str, *, name: str = "", line: str = "", as_json: bool = False) -> None:
    """Make this checkout's key, list what each key counts for, or trust another key."""
    root = next((folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / source).exists()), Path.cwd())
    if root != Path.cwd():
        raise ParamsError(f"keys belong to a project, and {root} above this folder is one; start in the project's root")
    if action == "init":
        rows = [_row(ring.OURS, ring.init(), HERE)]
    elif action == "trust":
        key = ring.parse_key(line)
        ring.trust(name, key)
        rows = [_row(name, key, HERE)]
    else:
        rows = [_row(name, key, HERE) for name, key in ring.keyring().items()]
        if source.exists() or source != Path("params.yaml"):
            params = load_params(source)
            rows += [_row(name, key, APPROVALS) for name, key in params.approvers.items()]
            rows += [_row(name, key, REBUILDS) for name, key in params.rebuilders.items()]
    show(KEYS, rows, as_json=as_json, narrow=KEYS[:-1])
    if not rows:
        echo("there is no key yet; `clinrl keys init` makes one")


def _row(name: str, key: ring.Key, counts_for: str) -> dict[str, str]:
    return {"name": name, "counts_for": counts_for, "fingerprint": key.fingerprint, "line": key.line}


def vouch(source: Path, reason: str) -> int:
    """Sign the audit log anew after a key was revoked, and print the revoked keys. Returns 1 if there are none."""
    from clinrl.release import promotion

    revoked = promotion.vouch(load_params(source), reason)
    if not revoked:
        echo("the audit log has no line whose key does not count; nothing was added")
        return 1
    print("\n".join(revoked))
    return 0


def approve(decision: str, approver: str) -> int:
    """Print the token that approves a decision. This needs only the approver's key, no project and no server."""
    approver, signer = approval.check_approver(approver), ring.signer("full")
    print(approval.token(decision, approver, signer))
    echo(
        f"this approves the decision {decision} as {approver}, by the key "
        f"{signer.key.fingerprint}; it counts for that decision alone, where that person's key is this one"
    )
    return 0
