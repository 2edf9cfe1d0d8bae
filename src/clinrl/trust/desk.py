"""What the command line says of keys and approvals: one function a command, which prints and gives the exit code."""

import sys
from argparse import Namespace

from clinrl.tables import show
from clinrl.trust import approval
from clinrl.trust import keys as ring

KEYS = ("name", "fingerprint", "line")


def keys(arguments: Namespace) -> int:
    """Make this checkout's key, list whose signatures count, or let those of one more key count. Prints the keys."""
    if arguments.action == "init":
        shown = {ring.OURS: ring.init()}
    elif arguments.action == "trust":
        key = ring.parsed(arguments.line)
        ring.trust(arguments.name, key)
        shown = {arguments.name: key}
    else:
        shown = ring.keyring()
    rows = [{"name": name, "fingerprint": key.fingerprint, "line": key.line} for name, key in shown.items()]
    show(KEYS, rows, as_json=arguments.json)
    if not rows:
        print("clinrl: there is no key yet; `clinrl keys init` makes one", file=sys.stderr)
    return 0


def approve(arguments: Namespace) -> int:
    """Print the token by which a person approves a decision. Only their key is needed, no project and no server."""
    signer = ring.signer("full")
    print(approval.token(arguments.decision, arguments.approver, signer))
    print(
        f"clinrl: this approves the decision {arguments.decision} as {arguments.approver}, by the key "
        f"{signer.key.fingerprint}; it is good for that decision alone",
        file=sys.stderr,
    )
    return 0
