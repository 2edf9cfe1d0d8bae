"""The name by which a registered folder asks for what loads it. Folders that are registered hold it, so it stays."""

from clinrl.registry.pyfunc import load

__all__ = ["load"]
