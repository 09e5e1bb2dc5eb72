"""The flat table of positions by client that every partition returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np


class Parts(NamedTuple):
    """The rows of all clients, in two arrays.

    `row` int64[N] has the rows of client 0, then those of client 1, ..., and `count`
    int64[K] the number of rows of each client.
    """

    row: np.ndarray
    count: np.ndarray

    @property
    def start(self) -> np.ndarray:
        """Where each client's rows begin, int64[K]."""
        return np.cumsum(self.count) - self.count

    @property
    def owner(self) -> np.ndarray:
        """The client of each row, int64[N]."""
        return np.repeat(np.arange(len(self.count)), self.count)

    @property
    def place(self) -> np.ndarray:
        """The place of each row among those of its client, int64[N]."""
        return np.arange(len(self.row)) - np.repeat(self.start, self.count)

    def divided(self, mask: np.ndarray) -> tuple[Parts, Parts]:
        """The rows in which bool[N] is True, and the others, both in their order."""
        count = np.bincount(self.owner[mask], minlength=len(self.count))
        return Parts(self.row[mask], count), Parts(self.row[~mask], self.count - count)

    def by_client(self) -> Iterator[np.ndarray]:
        """Yields the rows of each client, as views of `row`."""
        for begin, count in zip(self.start.tolist(), self.count.tolist(), strict=True):
            yield self.row[begin : begin + count]


class Given(NamedTuple):
    """Rows to measure on: `owned` by clients, and `others` int64[...] of nobody."""

    owned: Parts
    others: np.ndarray


class Split(NamedTuple):
    """Rows of the data set for one seed: train and test rows by client.

    `official_test` and `proxy` int64[...] are unowned.
    """

    train: Parts
    test: Parts
    official_test: np.ndarray
    proxy: np.ndarray


def collect(row: np.ndarray, owner: np.ndarray, num_clients: int) -> Parts:
    """Groups rows int[N] by owner in 0..K-1; each client's rows keep their order."""
    order = np.argsort(owner, kind="stable")
    return Parts(row[order], np.bincount(owner, minlength=num_clients))


def by_class(
    labels: np.ndarray,
    owners: Iterable[tuple[int, np.ndarray]],
    num_clients: int,
    gen: np.random.Generator,
) -> Parts:
    """Splits each class equally between its owners; the first get the remainder.

    `owners` are pairs (class, its owners int[...]). A class without owners is unowned.
    """
    position, owner = [], []
    for c, chosen in owners:
        if not len(chosen):
            continue
        members = gen.permutation(np.flatnonzero(labels == c))
        each, more = divmod(len(members), len(chosen))
        position.append(members)
        owner.append(np.repeat(chosen, each + (np.arange(len(chosen)) < more)))
    drawn = collect(np.concatenate(position), np.concatenate(owner), num_clients)
    return shuffled(drawn, gen)


def shuffled(parts: Parts, gen: np.random.Generator) -> Parts:
    """Returns the same parts with each client's rows in random order."""
    out = Parts(parts.row.copy(), parts.count)
    for own in out.by_client():
        gen.shuffle(own)
    return out
