"""Published results on MIETIC's 36 retained validation cases, as counts where the printed share fits one count of 36.

A printed 77.8% of 36 cases can only be 28 of them, so each count is certain and has an interval, which none of the
sources gives. What was not printed is left out.
"""

from collections.abc import Mapping
from typing import Final

from clinrl.tasks.parts import Published, PublishedRow

CARD: Final = "the system's own model card or preprint; counts follow from the printed shares"
OTHERS: Final = "printed by others than this series' author; counts follow from the printed shares"
TUNED: Final = OTHERS + "; a rule engine at three stages of being tuned on these very cases"


def _row(name: str, source: str, statistics: Mapping[str, float] | None = None, **hits: int) -> PublishedRow:
    return PublishedRow(name=name, hits=hits, statistics=statistics or {}, source=source)


PUBLISHED: Final = Published(
    exam="MIETIC validation, 36 retained cases",
    labels={1: 14, 2: 11, 3: 5, 4: 4, 5: 2},
    rows=(
        _row("Qwen3.5-9B v43, SFT", CARD, exact=27, adjacent=35),
        _row("Qwen3.5-9B v46", CARD, exact=28, adjacent=34),
        _row("Qwen3.5-9B v49, both modes", CARD, exact=28, adjacent=36, dangerous=0),
        _row("MedGemma-4B SFT, lower end of a range", CARD, exact=28, adjacent=35),
        _row("MedGemma-4B SFT, upper end of a range", CARD, exact=29, adjacent=35),
        _row("MedGemma-4B GRPO", CARD, exact=30, adjacent=35),
        _row(
            "BiomedBERT v42 with engine, experts' labels", CARD, exact=31, adjacent=35, under_triage=3, over_triage=2,
        ),
        _row("BiomedBERT v42 with engine, algorithm's labels", CARD, exact=33, adjacent=35),
        _row("BiomedBERT, preprint", CARD, exact=32, adjacent=35),
        _row(
            "GPT-4.1, prompt and structured fields", OTHERS + "; under, over and dangerous from its confusion matrix",
            {"kappa": 0.948}, exact=31, adjacent=36, under_triage=2, over_triage=3, dangerous=0,
        ),
        _row("GPT-5, prompt and structured fields", OTHERS, {"kappa": 0.961}, exact=32, adjacent=36, dangerous=0),
        _row("keyword engine, first stage", TUNED, exact=15, adjacent=35),
        _row("keyword engine, second stage", TUNED, exact=25, adjacent=34),
        _row("keyword engine, last stage", TUNED, exact=35),
    ),
)  # fmt: skip
"""The rows of the external report. An adjacent share of 100% leaves no dangerous error."""
