"""A task's champion and candidate, asked by the clients of OpenAI's interface."""
