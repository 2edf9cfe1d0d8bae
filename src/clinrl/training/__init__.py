"""Training one version: the process that is started, the one that trains, and what watches it."""
