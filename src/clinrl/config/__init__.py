"""params.yaml and the files of params/: how they are read, what blocks consist of and how they refer to each other."""
