"""One colour for one name, in every figure of a task: those of Okabe and Ito, which colour-blind readers tell apart.

Where there are more names than colours, a further name takes a colour again with another dash.
"""

from collections.abc import Iterable, Mapping
from itertools import cycle, product

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Without black and yellow: one is hard to see on a dark page, the other on a white one."""
DASHES = ("none", "6 3", "2 2", "8 3 2 3")
"""Of SVG's stroke-dasharray: whole, dashed, dotted, dashed and dotted."""


def styles(names: Iterable[str]) -> Mapping[str, tuple[int, int]]:
    """The place of a colour and of a dash for each name, in the order of the names; a name keeps that of its first.

    More names than styles share them.
    """
    free = product(range(len(DASHES)), range(len(COLOURS)))
    return {name: (colour, dash) for name, (dash, colour) in zip(dict.fromkeys(names), cycle(free), strict=False)}
