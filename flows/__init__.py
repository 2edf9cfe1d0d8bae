"""The flows: when steps run, in which order, and which of them need a person's approval. `clinrl` has the steps.

No artefact depends on this folder: `dvc repro` builds every one of them, and `clinrl` has a command for the rest.
"""
