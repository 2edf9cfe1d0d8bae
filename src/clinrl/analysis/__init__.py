"""Figures that follow from records alone: exams, contrasts between recipes, baselines and training alerts."""
