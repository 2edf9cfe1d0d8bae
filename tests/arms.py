"""The arms of the published imaging study as rewards: as published, corrected, and controls."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from clinrl.tasks.imaging.rewards import Judged, Reward, Similar

_AS_PUBLISHED: Final = Reward(parser="published", unreadable=0.0, format=1.0)

PUBLISHED: Final[Mapping[str, Reward]] = MappingProxyType(
    {
        "baseline": _AS_PUBLISHED,
        "citations": _AS_PUBLISHED,
        "llm-eval": _AS_PUBLISHED.model_copy(
            update={"judge": Judged(reader="published", weight=1.0, gated=False)},
        ),
        "custom-embedding": _AS_PUBLISHED.model_copy(update={"right": 0.0, "similarity": Similar(kind="code")}),
        "custom-embedding-paper": _AS_PUBLISHED.model_copy(update={"right": 0.0, "similarity": Similar(kind="paper")}),
    }
)
"""The published arms. Citations has the reward of Baseline: its evidence is in the prompt. The similarity of the code
is the one that ran; the formula of the paper has no halving. Totals lie in [0, 2], with a judge of proper replies in
[0, 3]; the declared ranges are wider, since the published verdict has no bound and a cosine may be negative."""

CORRECTED: Final[Mapping[str, Reward]] = MappingProxyType(
    {
        "baseline": Reward(),
        "citations": Reward(),
        "llm-eval": Reward(judge=Judged(reader="corrected")),
        "custom-embedding": Reward(similarity=Similar(kind="matched")),
    }
)
"""The same arms with a strict parser, and with the reasoning paid for the right label alone."""

CONTROLS: Final[Mapping[str, Reward]] = MappingProxyType(
    {
        "format_only": Reward(parser="published", right=0.0, unreadable=0.0, format=1.0),
        "ungated": Reward(similarity=Similar(kind="matched", gated=False)),
    }
)
"""Rewards that should not teach what the others teach: for format alone, and for reasoning whatever the label."""
