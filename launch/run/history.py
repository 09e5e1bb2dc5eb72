"""The accuracies of every client in every evaluation (`--client_metrics=every`)."""

import math
from collections.abc import Sequence

import numpy as np

from data import memory

MAX_BYTES = 2**30


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
