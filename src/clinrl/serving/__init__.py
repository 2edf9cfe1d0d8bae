"""Serves a task's champion and candidate to clients of OpenAI's interface."""
