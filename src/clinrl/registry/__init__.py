"""The registry: what MLflow holds of a version, names and aliases, and the model that is loaded from it."""
