"""The answers of the tools: short lines of data in one form for every patient, and never a verdict.

Differences are signed, so that a reader need not compare two numbers to see on which side of a limit a value lies.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Final

from clinrl.tasks.audit.cases import Proposal
from clinrl.tasks.audit.evidence import format_signed
from clinrl.tasks.audit.rules import Differences, PatientRecord

NUMERIC: Final[Mapping[str, Callable[[PatientRecord], float]]] = {
    "age": attrgetter("age_years"),
    "comorbidity": attrgetter("comorbidity_index"),
    "ecog": attrgetter("ecog"),
    "chemo": attrgetter("prior_chemo_cycles"),
    "ldh": attrgetter("ldh_u_l"),
    "bmi": attrgetter("bmi_kg_m2"),
}
"""Numeric features: the name of each, and the function that reads it."""

CATEGORICAL: Final[Mapping[str, Callable[[PatientRecord], str]]] = {
    name: attrgetter("tumor_site" if name == "tumor" else name)
    for name in (
        "sex", "ethnicity", "stage", "outcome", "site", "country", "drug", "insurance", "smoking", "tumor", "histology",
    )
}  # fmt: skip
"""Categorical features, whose values are counted."""

RISK_WEIGHTS: Final[Mapping[str, float]] = {
    "age": 0.02, "comorbidity": 0.15, "ecog": 0.2, "chemo": 0.05, "ldh": 0.002, "bmi": -0.01,
}  # fmt: skip
"""Weights of the linear risk score that Shapley values explain. Invented, and the same for every protocol."""


def review_line(proposal: Proposal) -> str:
    """A proposal with the text and citations of the Actor."""
    cites = ", ".join(proposal.citations) or "none"
    return (
        f"{proposal.proposal_id} {proposal.patient_id} {proposal.action} confidence {proposal.confidence:.2f}. "
        f"{proposal.text} cites: {cites}"
    )


def patient_lines(record: PatientRecord, found: Differences) -> str:
    """A record without its three days. The values that have limits come first."""
    threshold = "" if found.threshold is None else f", threshold {found.threshold:+d}"
    return (
        f"{record.patient_id} age {record.age_years}, lower {found.lower:+d}, upper {found.upper:+d}; "
        f"stage {record.stage}; comorbidity {record.comorbidity_index}{threshold}\n"
        f"{record.sex}, {record.ethnicity}, {record.arm}, {record.drug}, {record.outcome}, {record.site}, "
        f"{record.country}, ecog {record.ecog}, chemo {record.prior_chemo_cycles}, ldh {record.ldh_u_l:.1f}, "
        f"bmi {record.bmi_kg_m2:.1f}, insurance {record.insurance}, smoking {record.smoking}, "
        f"tumor {record.tumor_site}, histology {record.histology}"
    )


def timeline_line(patient_id: str, found: Differences) -> str:
    """The delay and death of a patient. The delay is compared with both windows at every stage."""
    return (
        f"{patient_id} delay {found.delay_days}, standard {found.standard:+d}, stage IV {found.stage_iv:+d}, "
        f"death {format_signed(found.death)}"
    )


def shapley_line(record: PatientRecord, cohort: Sequence[PatientRecord], feature: str) -> str:
    """The Shapley value of a numeric feature in the linear risk score, against the mean of the cohort.

    For a linear score the Shapley value is exactly the weight times the distance from the mean. Raises KeyError for a
    feature that is not numeric.
    """
    read = NUMERIC[feature]
    mean = _mean(cohort, read)
    value = RISK_WEIGHTS[feature] * (read(record) - mean)
    return f"{record.patient_id} {feature} {read(record):g}, mean {mean:.1f}, shap {value:+.3f}"


def cohort_line(cohort: Sequence[PatientRecord], feature: str) -> str:
    """The mean of a numeric feature in each arm, or the count of each value. Raises KeyError for other features."""
    parts = []
    for arm in ("treatment", "control"):
        members = [record for record in cohort if record.arm == arm]
        if not members:
            parts.append(f"{arm} none")
        elif feature in NUMERIC:
            parts.append(f"{arm} mean {_mean(members, NUMERIC[feature]):.1f} of {len(members)}")
        else:
            read = CATEGORICAL[feature]
            counts = Counter(sorted(map(read, members)))
            parts.append(f"{arm} " + ", ".join(f"{value} {count}" for value, count in counts.items()))
    return f"{feature}: " + "; ".join(parts)


def _mean(cohort: Sequence[PatientRecord], read: Callable[[PatientRecord], float]) -> float:
    return sum(map(read, cohort)) / len(cohort)
