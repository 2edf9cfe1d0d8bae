"""params.yaml: how it is read, what its blocks consist of, and how they refer to each other."""
