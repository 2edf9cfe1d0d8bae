"""Published results on MIETIC's 36 retained validation cases, as counts where the printed share fits one count of 36.

A printed 77.8% of 36 cases can only be 28 of them, so a count is certain where the exam is, and has an interval, which
none of the sources gives. Results that were not printed are left out.
"""

from collections.abc import Mapping
from typing import Final

from clinrl.tasks.parts import Published
from clinrl.tasks.tables import read_table


class _Published(Published):
    labels: Mapping[int, int]


PUBLISHED: Final = read_table(__file__, _Published)
"""The rows of the external report. An adjacent share of 100% leaves no dangerous error."""
