"""MLflow: what it holds of a version, live metrics, names and aliases, and the model that is loaded from it."""
