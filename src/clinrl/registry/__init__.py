"""The registry in MLflow: runs, versions and aliases, and the models that are loaded from it."""
