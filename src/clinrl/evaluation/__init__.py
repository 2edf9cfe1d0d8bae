"""Evaluation: exams, comparisons, published benchmarks, external data and error analysis."""
