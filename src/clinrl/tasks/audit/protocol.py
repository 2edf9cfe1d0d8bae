"""How the published auditor was evaluated, and what it reached."""

from typing import Final

from clinrl.tasks.audit.cases import LEVEL_NAMES
from clinrl.tasks.audit.rewards import CORRECTED, PUBLISHED
from clinrl.tasks.parts import Benchmark

PROTOCOL: Final = Benchmark(
    mix="published",
    by="level",
    levels=LEVEL_NAMES,
    theirs=PUBLISHED,
    ours=CORRECTED,
    quality="detection",
    statistic="f_beta",
    printed={
        "published base": {"easy": 0.087, "medium": 0.018, "hard": 0.015},
        "published, trained": {"easy": 0.287, "medium": 0.129, "hard": 0.044},
    },
    source="they were printed for SynthAudit.Env and its 3B adapter, five seeds a level without intervals: another "
    "model on other episodes, its prompt and sampling unknown",
)
