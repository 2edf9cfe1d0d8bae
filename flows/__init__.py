"""The flows: when things run, in which order, and who is asked. What a step does is in `clinrl`.

Deleting this folder loses no artefact: `dvc repro` builds every one of them, and `clinrl` has a command for the rest.
"""
