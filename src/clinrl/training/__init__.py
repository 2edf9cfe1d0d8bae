"""Training of one version: the parent process, the worker that trains, and the callback that watches it."""
