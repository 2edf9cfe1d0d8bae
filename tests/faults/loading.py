"""Loads registered models as a colleague does who has no checkout, each in a fork of a process without clinrl.

The colleague has installed what checks a folder, and has the key of whom to trust. Reads one JSON line a model:
{"store": sqlite:///..., "model": models:/..., "keys": a file}. Writes one: what it raised, by the names of
its classes, or nothing. A program of its own, since a fork of the harness would have the checkout's code imported
already, and the code beside a model would never be run.
"""

import atexit
import contextlib
import io
import json
import logging
import os
import sys
import warnings

from mlflow import set_tracking_uri

import clinrl_loader

for library in ("accelerate", "numpy", "pandas", "peft", "safetensors.torch", "torch", "transformers"):
    __import__(library)


def load(store: str, model: str, keys: str) -> dict[str, object]:
    """What loading a model raised: names of the exception's classes, nearest first, and its message."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.environ["CLINRL_TRUSTED_KEYS"] = keys
    set_tracking_uri(store)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            clinrl_loader.load(model)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is reported
        return {"raised": [kind.__name__ for kind in type(error).__mro__], "says": str(error)[:500]}
    return {"raised": [], "says": ""}


def main() -> None:
    """Serve until standard input ends."""
    assert clinrl_loader.PACKAGE not in sys.modules
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            print(json.dumps(load(**json.loads(line))), flush=True)
            atexit._run_exitfuncs()  # removes the copy that was loaded
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"raised": ["died"], "says": f"ended with status {status}"}), flush=True)


if __name__ == "__main__":
    main()
