"""Evaluation: exams, comparisons and error analysis."""
