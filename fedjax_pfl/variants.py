"""The variants of a run: every seed at every point of a sweep.

All points of the first seed come first, then those of the second, and so on. A run
without a sweep has one point.
"""

from typing import NamedTuple


class Variants(NamedTuple):
    """Maps indices of seeds and points to the indices of variants, and back."""

    num_seeds: int
    num_points: int = 1

    @property
    def count(self) -> int:
        return self.num_seeds * self.num_points

    def index(self, seed: int, point: int) -> int:
        """The variant of a seed at a point, both as indices."""
        return seed * self.num_points + point

    def seed(self, variant: int) -> int:
        return variant // self.num_points

    def point(self, variant: int) -> int:
        return variant % self.num_points

    def at_point(self, point: int) -> slice:
        """The variants of one point, in the order of the seeds."""
        return slice(point, None, self.num_points)

    def calls(self, *, vmaps_seeds: bool, vmaps_points: bool) -> list[range]:
        """The variants of each call of a program.

        One call has all points of a seed, which share its plans, or without a sweep all
        seeds, if the program vmaps these. Otherwise each variant is a call, as on a
        CPU, where a loop over them inside the program would copy the state every round.
        """
        if self.num_points > 1:
            together = self.num_points if vmaps_points else 1
        else:
            together = self.num_seeds if vmaps_seeds else 1
        starts = range(0, self.count, together)
        return [range(first, first + together) for first in starts]
