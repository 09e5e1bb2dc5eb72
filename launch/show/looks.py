"""How each method looks in every picture: its name, colour, marker and dashes."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import algorithms

# Most are Okabe and Ito's or Tol's. Colour-blind people tell them apart, neighbours
# differ in grey, and all are visible on a light and a dark page.
COLORS = (
    "#0072B2", "#CCBB44", "#882255", "#009E73",
    "#7A4A1E", "#56B4E9", "#D55E00", "#CC79A7",
)  # fmt: skip
# The same hues on the dark page, where the dark ones are lighter
ON_DARK = (
    "#2E8BCB", "#CCBB44", "#C04A82", "#009E73",
    "#A97142", "#7CC8F2", "#D55E00", "#E0A0C4",
)  # fmt: skip
MARKERS = "os^DvPX*<>d"
DASHES = ((), (5, 1.5), (1.2, 1.2), (6, 1.5, 1.2, 1.5), (5, *[1.2] * 5))


class Look(NamedTuple):
    """A line's colour, marker, and dashes in points (on, off, ...), () = solid."""

    color: str
    marker: str
    dashes: tuple[float, ...]

    def style(self) -> dict[str, Any]:
        """The arguments of matplotlib's `plot`; markers of two lines rarely meet."""
        every = 0.02 * (1 + MARKERS.index(self.marker) % 6), 0.12  # of the axes' size
        line = {"ls": (0, self.dashes), "lw": 1.3, "ms": 4.5, "markevery": every}
        return {"color": self.color, "marker": self.marker, **line}


def looks(names: Sequence[str]) -> dict[str, Look]:
    """A look for each name by their order; up to 40 differ in any two of its parts."""
    each = map(Look, *map(itertools.cycle, (COLORS, MARKERS, DASHES)))
    return dict(zip(dict.fromkeys(names), each, strict=False))


def title(name: str) -> str:
    """A run's name with its algorithm as papers write it; other names are unchanged."""
    word, *options = name.split(" ", 1)
    algo = word.removesuffix("+ft")
    if algo not in algorithms.ALGORITHMS:
        return name
    own = algorithms.title(algo) + " + FT" * (algo != word)
    return " ".join([own, *options])


def titles(names: Sequence[str]) -> list[str]:
    """`title` of each name, or the names if two would be the same."""
    out = list(map(title, names))
    return out if len(set(out)) == len(set(names)) else list(names)
