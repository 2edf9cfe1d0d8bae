"""The tracking server MLflow: its client, the run of each training, and the metrics that a training sends live."""
