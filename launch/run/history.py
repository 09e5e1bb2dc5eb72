"""What is kept of single clients: of a summary's rounds, or of every evaluation."""

import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from data import memory

MAX_BYTES = 2**30
_MIN_SLOTS = 10


class LastRounds:
    """The clients' accuracies after the rounds of a window, by variant.

    `arrays` f64[variants, W, ...] with W = max(window, 10) are those of `rounds` in
    order, nan if not evaluated. Their shape does not depend on a run's length, so that
    a longer run can resume.
    """

    def __init__(self, rounds: Sequence[int], shape: Sequence[int]):
        """`shape` is that of one evaluation, (variants, ..., K)."""
        self.rounds, self.shape = tuple(rounds), tuple(shape)
        slots = max(len(self.rounds), _MIN_SLOTS)
        self.arrays = np.full((shape[0], slots, *shape[1:]), np.nan)

    def add(self, variant: int, round: int, accuracies: np.ndarray, best: int) -> None:
        """Keeps what was measured after a round, if it is in the window."""
        if round in self.rounds:
            self.arrays[variant, self.rounds.index(round)] = accuracies

    def extended(self, rounds: Sequence[int]) -> Self:
        """Those for the window of a longer run."""
        out = LastRounds(rounds, self.shape)
        out.take(self.rounds, self.arrays)
        return out

    def take(self, rounds: Sequence[int], arrays: np.ndarray) -> None:
        """Takes those rounds of another window that are in this one."""
        for slot, done in enumerate(rounds):
            if done in self.rounds:
                self.arrays[:, self.rounds.index(done)] = arrays[:, slot]

    def of_summary(self, best: Sequence[int]) -> np.ndarray:
        """Those of the summary, f64[variants, rounds, ...]."""
        return self.arrays[:, : len(self.rounds)]


class BestRound:
    """The clients' accuracies after each variant's best round, and after the last one.

    `arrays` are as in `LastRounds`. The first are those of the best round of the
    regular ones, a multiple of `every`, and the second those of a last round that is
    none, since a longer run would not evaluate it.
    """

    def __init__(self, every: int, shape: Sequence[int]):
        self.every, self.shape = every, tuple(shape)
        self.arrays = np.full((shape[0], _MIN_SLOTS, *shape[1:]), np.nan)

    def add(self, variant: int, round: int, accuracies: np.ndarray, best: int) -> None:
        """Keeps what was measured after a round if it is the best, or not regular."""
        if round % self.every:
            self.arrays[variant, 1] = accuracies
        elif round == best:
            self.arrays[variant, 0] = accuracies

    def extended(self, rounds: Sequence[int]) -> Self:
        """Those for a longer run, which keeps the same rounds."""
        return self

    def take(self, rounds: Sequence[int], arrays: np.ndarray) -> None:
        """Takes those of the same run, of whatever length."""
        self.arrays[:, :2] = arrays[:, :2]

    def of_summary(self, best: Sequence[int]) -> np.ndarray:
        """Those of each variant's best round, f64[variants, 1, ...]."""
        slots = [int(one % self.every > 0) for one in best]
        return self.arrays[np.arange(len(slots)), slots][:, None]


class History:
    """What each evaluation measured of each client, in order, in 64 bits.

    `arrays` has an f64[variants, K] of each, nan if not evaluated, with fine-tuned
    clients f64[variants, 2, K].
    """

    def __init__(self, shape: Sequence[int]):
        """`shape` is that of one evaluation."""
        self.shape, self.arrays = tuple(shape), []

    def check(self, evaluations: int) -> None:
        """Refuses (ValueError) so many evaluations that a run should not keep them."""
        size = 8 * evaluations * math.prod(self.shape)
        if size > MAX_BYTES:
            raise ValueError(
                f"--client_metrics=every keeps {memory.in_words(size)} of "
                f"{evaluations} evaluations of {self.shape[-1]} clients, at most "
                f"{memory.in_words(MAX_BYTES)} are kept; raise --eval_every, or take "
                "summary"
            )

    def add(self, accuracies: Sequence[np.ndarray | None]) -> None:
        """Adds an evaluation: the accuracies of each variant, None = of no client."""
        array = np.full(self.shape, np.nan)
        for index, one in enumerate(accuracies):
            if one is not None:
                array[index] = one
        self.arrays.append(array)

    @property
    def stacked(self) -> np.ndarray:
        """All evaluations, f64[evaluations, variants, K] or [..., 2, K]."""
        return np.stack(self.arrays) if self.arrays else np.zeros((0, *self.shape))
