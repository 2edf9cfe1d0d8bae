"""params.yaml and the files of params/: reading them, the schemas of their blocks, and checks of cross-references."""
