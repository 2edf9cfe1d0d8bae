"""Signatures: keys, signed statements, signed folders and a person's approval of a decision."""
