"""One colour for one name, in every figure of a task: those of Okabe and Ito, which colour-blind readers tell apart.

Where there are more names than colours, a further name takes a colour again with another dash.
"""

from collections.abc import Iterable, Mapping
from itertools import count, product

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Without black and yellow: one is hard to see on a dark page, the other on a white one."""
DASHES = ("none", "6 3", "2 2", "8 3 2 3")
"""Of SVG's stroke-dasharray: whole, dashed, dotted, dashed and dotted."""


def styles(names: Iterable[str]) -> Mapping[str, tuple[int, int]]:
    """The place of a colour and of a dash for each name, in the order of the names; a name keeps that of its first."""
    free = product(range(len(DASHES)), range(len(COLOURS)))
    return {name: (colour, dash) for name, (dash, colour) in zip(dict.fromkeys(names), _again(free), strict=False)}


def _again(free: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """The same over and over: more names than styles share them."""
    known = list(free)
    return (known[number % len(known)] for number in count())
