"""Rewards of the recipes in params/, as versions are trained with them, under the names that golden files have."""

from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from clinrl.config.plain_yaml import read_yaml
from clinrl.tasks.audit.rewards import Reward as AuditReward
from clinrl.tasks.base import get_task

PARAMS: Final = Path(__file__).parents[1] / "params"
_recipes = cache(lambda task: read_yaml(PARAMS / f"{task}.yaml")["profiles"])


def reward_of(task: str, recipe: str) -> Any:
    """The reward that a recipe asks for."""
    return get_task(task).Reward(**_recipes(task)[recipe]["reward"])


ARMS: Final = ("baseline", "citations", "llm-eval", "custom-embedding")
PUBLISHED: Final = MappingProxyType(
    {arm: reward_of("imaging", f"imaging-published-{arm}") for arm in (*ARMS, "custom-embedding-paper")}
)
"""The published arms of imaging. Citations has the reward of Baseline: its evidence is in the prompt. The similarity of
the code is the one that ran; the formula of the paper has no halving. Totals lie in [0, 2], with a judge of proper
replies in [0, 3]; the declared ranges are wider, since the published verdict has no bound and a cosine may be
negative."""
CORRECTED: Final = MappingProxyType({arm: reward_of("imaging", f"imaging-{arm}") for arm in ARMS})
"""The same arms with a strict parser, and with the reasoning paid for the right label alone."""

NAIVE_V45C: Final = reward_of("esi", "esi-naive-2")
"""As published: 1 for the exact level, 0 for everything else, silence included."""
PUBLISHED_V46: Final = reward_of("esi", "esi-clipped-2")
"""The published no-answer outcome of v46 and v48, above many wrong answers, on our reconstruction of the matrix."""
RULE_AWARE_V49: Final = reward_of("esi", "esi-fifth-rule-aware")
"""v49: the published -2.0 for no answer and -0.5 for missed severe pain; the other halves are read from its table."""

DENSE: Final = AuditReward(kind="published_dense")

NAMED: Final = MappingProxyType(
    {
        "audit": {"DENSE": DENSE},
        "esi": {"NAIVE_V45C": NAIVE_V45C, "PUBLISHED_V46": PUBLISHED_V46, "RULE_AWARE_V49": RULE_AWARE_V49},
        "imaging": {"_AS_PUBLISHED": PUBLISHED["baseline"]},
    }
)
"""By task, the rewards that golden files hold beside the default and those that the task's `rewards` module names."""
