"""The complaints of the synthetic triage desk: their patients, possible findings and usual resources."""

from collections.abc import Mapping
from typing import Final, Literal

from clinrl.tasks.esi.rules import Finding, Resource, Sex
from clinrl.tasks.tables import read_table
from clinrl.types import Strict


class Complaint(Strict):
    """A reason for the visit. Its wordings are `complaints/<id>/says`."""

    id: str
    flags: tuple[Finding, ...] = ()
    """Findings that this complaint may carry beyond those of everybody."""
    needs: tuple[Resource, ...] = ()
    site: Literal["visceral", "limb", "none"] = "none"
    ages: tuple[float, float] = (0.01, 95)
    """In years, both included."""
    sex: Sex | None = None
    minor: bool = False
    """It never comes with level 1, danger-zone vital signs, hypotension or an extreme temperature."""


class _Desk(Strict):
    complaints: tuple[Complaint, ...]
    held_out: frozenset[str]
    findings: Mapping[Finding, str]


_DESK: Final = read_table(__file__, _Desk)
COMPLAINTS: Final = _DESK.complaints
HELD_OUT: Final = _DESK.held_out
"""Complaints that no training data has: the base alone has read them."""
FINDING_SAYS: Final = _DESK.findings
"""The name of a finding in the extraction. Its wordings are `findings/<id>/yes` and `findings/<id>/no`."""
