"""Where an artefact comes from: dvc.lock, signed statements, rebuilds, recounts and the bill of materials."""
