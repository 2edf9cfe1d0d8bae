"""The origin of artefacts: stages, dvc.lock, signed statements, rebuilds, cited values and bills of materials."""
