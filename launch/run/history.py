"""What is kept of single clients: of a summary's rounds, or of every evaluation."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from data import memory
from fedjax_pfl.rows import views

MAX_BYTES = 2**30
_MIN_SLOTS = 10
# The summary's values in a checkpoint, without measures and with them
_PLAIN, _MEASURED = "accuracies", "of_clients"
_EVERY = "history"


class LastRounds:
    """The clients' values after the rounds of a window, by variant.

    `arrays` f64[variants, W, ...] with W = max(window, 10) are those of `rounds` in
    order, nan if not evaluated. Their shape does not depend on a run's length, so that
    a longer run can resume.
    """

    def __init__(self, rounds: Sequence[int], shape: Sequence[int]):
        """`shape` is that of one evaluation, (variants, ..., K)."""
        self.rounds, self.shape = tuple(rounds), tuple(shape)
        slots = max(len(self.rounds), _MIN_SLOTS)
        self.arrays = np.full((shape[0], slots, *shape[1:]), np.nan)

    def add(self, variant: int, round: int, values: np.ndarray, best: int) -> None:
        """Keeps what was measured after a round, if it is in the window."""
        if round in self.rounds:
            self.arrays[variant, self.rounds.index(round)] = values

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
    """The clients' values after each variant's best round, and after the last one.

    `arrays` are as in `LastRounds`. The first are those of the best round of the
    regular ones, a multiple of `every`, and the second those of a last round that is
    none, since a longer run would not evaluate it.
    """

    def __init__(self, every: int, shape: Sequence[int]):
        self.every, self.shape = every, tuple(shape)
        self.arrays = np.full((shape[0], _MIN_SLOTS, *shape[1:]), np.nan)

    def add(self, variant: int, round: int, values: np.ndarray, best: int) -> None:
        """Keeps what was measured after a round if it is the best, or not regular."""
        if round % self.every:
            self.arrays[variant, 1] = values
        elif round == best:
            self.arrays[variant, 0] = values

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

    `arrays` has an f64[variants, ..., K] of each, nan if not evaluated.
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

    def add(self, values: Sequence[np.ndarray | None]) -> None:
        """Adds an evaluation: the values of each variant, None = of no client."""
        array = np.full(self.shape, np.nan)
        for index, one in enumerate(values):
            if one is not None:
                array[index] = one
        self.arrays.append(array)

    @property
    def stacked(self) -> np.ndarray:
        """All evaluations, f64[evaluations, variants, ..., K]."""
        return np.stack(self.arrays) if self.arrays else np.zeros((0, *self.shape))


class Kept:
    """The values of single clients that a run keeps, by variant.

    Attributes:
        names: What they are: `accuracy` or `perplexity`, the same after fine-tuning,
            and measures. A variant's values are f64[K], of several names f64[Q, K].
        summary: Those that a summary may need.
        every: Those of every evaluation, None = not kept.
    """

    def __init__(
        self,
        answers: Sequence[str],
        measures: Sequence[str],
        variants: int,
        num_clients: int,
        summary: Callable[[Sequence[int]], LastRounds | BestRound],
        has_every: bool,
    ):
        """`answers` and `measures` are names; `summary` takes an evaluation's shape."""
        self._answers, self._sizes = tuple(answers), (variants, num_clients)
        self._make = summary, (History if has_every else lambda shape: None)
        self._keep((*answers, *measures))

    def _keep(self, names: tuple[str, ...]) -> None:
        self.names, shape = names, self._shape(names)
        self.summary, self.every = (make(shape) for make in self._make)

    def _shape(self, names: Sequence[str]) -> tuple[int, ...]:
        """The shape of an evaluation's values of these names."""
        variants, num_clients = self._sizes
        several = (len(names),) if len(names) > 1 else ()
        return variants, *several, num_clients

    @property
    def arrays(self) -> np.ndarray:
        """The arrays of `summary`."""
        return self.summary.arrays

    def by_name(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Kept values [..., K], of several names [..., Q, K], by their names."""
        if len(self.names) == 1:
            return {self.names[0]: values}
        return {name: values[..., n, :] for n, name in enumerate(self.names)}

    def add(
        self, round: int, found: Sequence[Mapping[str, np.ndarray]], best: Sequence[int]
    ) -> None:
        """Keeps an evaluation: f64[K] by name and the best round, of each variant."""
        arrays = [self._array(one) for one in found]
        if self.every is not None:
            self.every.add(arrays)
        for index, array in enumerate(arrays):
            if array is not None:
                self.summary.add(index, round, array, best[index])

    def _array(self, found: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """The values of a variant by name as one array, None without any."""
        if not found:
            return None
        nowhere = np.full(self._sizes[-1], np.nan)
        array = np.stack([found.get(name, nowhere) for name in self.names])
        return array if len(array) > 1 else array[0]

    def saved(self) -> dict[str, np.ndarray]:
        """The arrays of a checkpoint."""
        is_plain = self.names == self._answers
        arrays = {_PLAIN if is_plain else _MEASURED: self.arrays}
        return arrays if self.every is None else arrays | {_EVERY: self.every.stacked}

    def templates(self) -> list[dict[str, Any]]:
        """The shapes of `saved`, and those of earlier versions, without measures."""
        out = []
        for names in dict.fromkeys((self.names, self._answers)):
            variants, *shape = self._shape(names)
            name = _PLAIN if names == self._answers else _MEASURED
            shapes = {name: (variants, self.arrays.shape[1], *shape)}
            if self.every is not None:
                shapes[_EVERY] = -1, variants, *shape
            kinds = {n: jax.ShapeDtypeStruct(s, np.float64) for n, s in shapes.items()}
            out.append(kinds)
        return out

    def load(
        self,
        rounds: Sequence[int],
        arrays: Mapping[str, Any],
        mended: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        """Takes what `saved` returned of a run with a window of `rounds`, as views.

        Measures are no longer kept if it has none. `mended` is applied to the values
        that a summary may need.
        """
        name = _PLAIN if _PLAIN in arrays else _MEASURED
        if name == _PLAIN and self.names != self._answers:
            self._keep(self._answers)
        self.summary.take(rounds, mended(views.materialised(arrays[name])))
        if self.every is not None:
            self.every.arrays = list(views.materialised(arrays[_EVERY]))
