"""The record of a comparison, kept as one JSON file: its rows, their numbers and the tests between them."""

from typing import Any, Literal

from pydantic import Field

from clinrl.analysis.costs import Costs
from clinrl.analysis.exam import Confusion
from clinrl.analysis.preregistration import Primary
from clinrl.config.comparisons import Pair, Partition
from clinrl.types import Estimate, Strict

ALL = "all"
"""The name of the part that holds all cases."""
COMMONEST = "commonest label"
"""The measure of a test on how often the commonest gold label is answered."""

Kind = Literal["arm", "base", "rival", "baseline"]


class Figure(Strict):
    """A number of a row: the mean over its seeds."""

    value: float
    low: float | None = None
    """95% interval, over cases and seeds. None for a mean of reports, which hold no single cases."""
    high: float | None = None
    n: int = Field(ge=0)
    """Number of cases."""
    seeds: tuple[float, ...]
    """One number for each version, in the order of params.yaml."""


Figures = dict[str, Figure]


class Row(Strict):
    """One line of the tables."""

    name: str
    kind: Kind
    versions: tuple[str, ...]
    metrics: Figures
    """The columns of the comparison, and `no_parse`."""
    qualities: Figures
    answered: dict[str, float]
    """Share of the answers, or of the decisions of episodes, by label, unreadable ones last; all seeds together."""
    confusion: Confusion
    """All seeds together."""


class ViewRow(Strict):
    """A row under one input variant, on the cases that have the variant."""

    name: str
    view: str
    metrics: Figures


class Contrast(Strict):
    """One test between two rows. A family is all tests of one measure and kind in one section."""

    first: str
    second: str
    measure: str
    """A share of the paired tests, the first column, a quality, or `commonest label`."""
    versions: tuple[str, str] | None
    """The two versions of an exact paired test; None for a test over all seeds."""
    b: int | None = None
    """Paired test: cases that count for the first and not for the second."""
    c: int | None = None
    """Paired test: cases that count for the second and not for the first."""
    difference: Estimate
    """The first minus the second."""
    p: float
    adjusted: float
    """p after Holm, within the family."""
    detectable: float | None
    """Smallest difference that this test shows with a probability of 80%, before adjustment; None if nothing varies."""


class Section(Strict):
    """One mode, on all cases or on those of one part."""

    mode: str
    part: str
    n: int = Field(gt=0)
    clusters: int | None
    """Number of clusters of the cases; None where cases are independent."""
    right: dict[str, float]
    """Share of the cases, or of the decisions of episodes, by gold label."""
    commonest: str
    """The commonest gold label."""
    rows: tuple[Row, ...]
    contrasts: tuple[Contrast, ...]
    views: tuple[ViewRow, ...] = ()
    """Rows under input variants, in sections on all cases only."""
    partition: tuple[Estimate, ...] = Field(default=(), exclude_if=lambda partition: not partition)
    """Differences in the first column: null, elicitation and reward, each row minus the one before, then their sum."""


class Compared(Strict):
    """A whole comparison. It holds no times, so that equal answers give equal bytes."""

    name: str
    task: str
    task_version: int
    exam: str
    exam_digest: str
    modes: dict[str, dict[str, Any]]
    """Decoding of each mode."""
    adapters: dict[str, str]
    """Version to the digest of the adapter that answered."""
    columns: tuple[str, ...]
    quality: str
    parts: str
    tests: tuple[Pair, ...]
    partition: Partition | None = Field(default=None, exclude_if=lambda partition: partition is None)
    published: dict[str, dict[str, dict[str, float]]]
    """Part to row to metric: published numbers about other data."""
    sections: tuple[Section, ...]
    """By mode, and in each all cases first."""
    note: str
    costs: dict[str, dict[str, tuple[Costs, ...]]] = Field(default_factory=dict, exclude_if=lambda costs: not costs)
    """Mode to row to the counts that thresholds on probabilities reach, for each version; rows without are left out."""
    primary: Primary | None = Field(default=None, exclude_if=lambda primary: primary is None)
