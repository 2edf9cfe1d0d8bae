"""The Python that runs stages: the flows' own, unless CLINRL_STAGES_PYTHON names that of another environment.

Prefect and vLLM need different versions of FastAPI, so stages that sample with vLLM have an environment of their own.
"""

import os
import subprocess
import sys

import clinrl
from clinrl.errors import Refused

SETTING = "CLINRL_STAGES_PYTHON"


def stages_python() -> str:
    """The absolute path of the interpreter of the stages' environment.

    Raises Refused, with what to do, if CLINRL_STAGES_PYTHON names no interpreter, or one that does not import this
    checkout's clinrl.
    """
    named = os.environ.get(SETTING)
    if not named:
        return sys.executable
    python = os.path.abspath(named)  # not resolved: the link's own path selects the environment
    first = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]  # a clone's own, mostly
    found_first = (os.path.join(place, "clinrl", "__init__.py") for place in first)
    mine = next(filter(os.path.exists, found_first), str(clinrl.__file__))
    try:
        if os.path.basename(python) != "python":  # the name by which dvc.yaml calls it
            raise FileNotFoundError
        found = subprocess.run(
            [python, "-c", "import clinrl; print(clinrl.__file__)"], capture_output=True, text=True, check=False
        )
    except OSError:
        raise Refused(
            f"{SETTING} is {named}, which is no `python` that can be run; name that of an environment, such as "
            ".venv-vllm/bin/python, or unset it"
        ) from None
    if os.path.realpath(theirs := found.stdout.strip()) != os.path.realpath(mine):
        raise Refused(
            f"{SETTING} is {named}, which imports {theirs or 'no clinrl'} in place of {mine}; install this checkout "
            "there, as `make vllm` does"
        )
    return python
