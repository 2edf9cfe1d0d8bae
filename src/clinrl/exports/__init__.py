"""Exports for unmodified other tools: logs of exams, model repositories, task folders and environments."""
