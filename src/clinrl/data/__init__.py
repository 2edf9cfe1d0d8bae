"""Data sets: drawing, importing and validating cases, the training stream, and the audit of a reward on it."""
