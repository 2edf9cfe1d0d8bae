"""Auditing what another agent decided about the patients of a trial, over several turns and with tools."""
