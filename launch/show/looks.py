"""How methods are named and drawn, the same in all pictures."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import algorithms
from launch.config import registry

# Of Okabe and Ito and near them: colour-blind people tell them apart on light and dark.
# Neighbours differ in grey too, and by their dashes and markers.
COLORS = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00",
    "#7b3fa0", "#56b4e9", "#8c510a", "#cc79a7", "#7f7f7f",
)  # fmt: skip
_DASHES = ((), (5, 1.5), (1.2, 1.2), (6, 1.5, 1.2, 1.5))
_MARKERS = "osD^vPX<>*"
_FINE_TUNED = "+ft"


class Look(NamedTuple):
    """A method's colour, marker and dashes ((on, off, ...), () = none)."""

    color: str
    marker: str
    dashes: tuple[float, ...]

    def line(self, points: int) -> dict[str, Any]:
        """matplotlib's style of a line of so many points, of which a few are marked."""
        style: dict[str, Any] = {"color": self.color, "marker": self.marker}
        style |= {"ms": 4, "markevery": max(1, points // 8)}
        return style | ({"dashes": self.dashes} if self.dashes else {})


def look(index: int) -> Look:
    """The look of the method at an index; 180 of them differ."""
    marks = _DASHES[index % len(_DASHES)], _MARKERS[index % len(_MARKERS)]
    return Look(COLORS[index % len(COLORS)], marks[1], marks[0])


def title(name: str) -> str:
    """A row's name as papers write it, if its first word is an algorithm's.

    Example:
        >>> title("fedper_plus"), title("fedavg+ft"), title("cdkt client_lr=0.1")
        ('FedPer+', 'FedAvg + FT', 'CDKT-FL client_lr=0.1')
    """
    first, blank, rest = name.partition(" ")
    base = first.removesuffix(_FINE_TUNED)
    known = registry.called(base)
    if known is None or known != base:
        return name
    about = algorithms.describe(known).partition(":")[0]
    return about + " + FT" * (first != base) + blank + rest


def titles(names: Sequence[str]) -> list[str]:
    """`title` of each name, unless two would be the same."""
    out = list(map(title, names))
    return out if len(set(out)) == len(set(names)) else list(names)
