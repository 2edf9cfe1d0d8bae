"""The three labels of a rating."""

from typing import Final

LABELS: Final = ("Usually Not Appropriate", "May Be Appropriate", "Usually Appropriate")
"""From the least to the most favourable."""
