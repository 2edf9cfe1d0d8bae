"""Processes: children that end with their parent, requests that reach a server, and DVC's own files."""
