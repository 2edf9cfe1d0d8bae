"""Prefect's and MLflow's own applications behind the fence, for uvicorn, which `flows.servers` starts."""

import os
from pathlib import Path

from clinrl.runtime.guard import Fence

MLFLOW_LOGIN = "CLINRL_MLFLOW_LOGIN"
"""User and password that the MLflow server asks for."""
MLFLOW_STORE = "CLINRL_MLFLOW_STORE"
"""The SQLite file that the MLflow server serves."""


def prefect() -> Fence:
    """Prefect, which asks for its authentication string itself: the page sends it, and no browser adds it unasked."""
    from prefect.server.api.server import create_app

    return Fence(create_app())


def mlflow() -> Fence:
    """MLflow, which has no password of its own without a second database of users."""
    from clinrl.registry import mlflow_store

    return Fence(mlflow_store.application(Path(os.environ[MLFLOW_STORE])), login=os.environ.pop(MLFLOW_LOGIN))
