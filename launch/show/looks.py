"""How each method looks in every picture: its name, colour, marker and dashes."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import algorithms

# From the palettes of Okabe and Ito, and of Tol. Protanopes and deuteranopes tell them
# apart, neighbours differ in grey, and all are visible on a light and a dark page.
COLORS = (
    "#0072B2", "#CCBB44", "#882255", "#009E73",
    "#7A4A1E", "#56B4E9", "#D55E00", "#CC79A7",
)  # fmt: skip
MARKERS = "os^DvPX*<>d"
DASHES = ((), (5, 1.5), (1.2, 1.2), (6, 1.5, 1.2, 1.5), (5, *[1.2] * 5))


class Look(NamedTuple):
    """A line's colour, marker, and dashes in points (on, off, ...), () = solid."""

    color: str
    marker: str
    dashes: tuple[float, ...]

    def style(self) -> dict[str, Any]:
        """The arguments of matplotlib's `plot`.

        A marker is at every eighth of the axes' size, and those of two lines that run
        together do not meet.
        """
        first = 0.02 * (1 + MARKERS.index(self.marker) % 6)
        line = {"ls": (0, self.dashes), "lw": 1.3, "ms": 5, "markevery": (first, 0.12)}
        return {"color": self.color, "marker": self.marker, **line}


def looks(names: Sequence[str]) -> dict[str, Look]:
    """A look for each name, which depends on nothing but their order.

    The numbers of colours, markers and dashes have no common divisor. So up to 55 names
    have distinct pairs of marker and dashes, by which a print in grey is read.
    """
    parts = map(itertools.cycle, (COLORS, MARKERS, DASHES))
    each = map(Look, *parts)
    return dict(zip(dict.fromkeys(names), each, strict=False))


def title(name: str) -> str:
    """A run's name with its algorithm as papers write it; other names are unchanged."""
    word, *options = name.split(" ", 1)
    algo = word.removesuffix("+ft")
    if algo not in algorithms.ALGORITHMS:
        return name
    own = algorithms.title(algo) + " + FT" * (algo != word)
    return " ".join([own, *options])
