"""MLflow tracking: the client, the run of each training, and the metrics that a training sends live."""
