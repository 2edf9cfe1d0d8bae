"""The loader module that registered folders name. Folders that are registered already hold this name, so it stays."""

from clinrl.registry.pyfunc import load

__all__ = ["load"]
