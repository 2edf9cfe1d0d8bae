"""Comparisons of a model with published results: the published protocol, and external exams."""
