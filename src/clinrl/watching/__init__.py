"""Watching of served models: counts of requests and answers, tests of them against the exam, and their storage."""
