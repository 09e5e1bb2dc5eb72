"""Partitions in which the classes of each client are given."""

import re
from collections.abc import Sequence

import numpy as np

from data.partitions import parts


def parse(text: str) -> tuple[tuple[int, ...], ...]:
    """Parses the classes of each client: `0,1/0,1/2,3` are three clients.

    Raises ValueError if an entry is not a list of different class numbers.
    """
    out = []
    for client, entry in enumerate(text.split("/")):
        numbers = [word.strip() for word in entry.split(",")]
        if not all(re.fullmatch("[0-9]{1,9}", word) for word in numbers):
            raise ValueError(
                f"--client_classes={text}: client {client} has {entry!r}; expected "
                "class numbers with commas between them and a slash before the next "
                "client, such as 0,1/0,1/2,3"
            )
        own = tuple(int(word) for word in numbers)
        if len(set(own)) < len(own):
            raise ValueError(
                f"--client_classes={text}: client {client} has {entry}, a class twice; "
                "once is enough"
            )
        out.append(own)
    return tuple(out)


def check(client_classes: Sequence[Sequence[int]], num_classes: int) -> None:
    """Refuses classes that the data do not have, with a ValueError about the first."""
    for client, own in enumerate(client_classes):
        if odd := [c for c in own if c >= num_classes]:
            raise ValueError(
                f"--client_classes: client {client} has class {odd[0]}, the data have "
                f"the classes 0 to {num_classes - 1}; take one of them"
            )


def named(labels: np.ndarray, client_classes: Sequence[Sequence[int]]) -> np.ndarray:
    """Whether any client owns the class of each example, bool[N]."""
    return np.isin(labels, [c for own in client_classes for c in own])


def split(
    labels: np.ndarray,
    *,
    client_classes: Sequence[Sequence[int]],
    gen: np.random.Generator,
) -> parts.Parts:
    """Splits every class of labels int[N] equally between the clients that own it.

    Returns positions 0..N-1. Examples of classes without an owner are unowned.
    """
    owned = {c for own in client_classes for c in own}
    owners = [
        (c, np.flatnonzero([c in own for own in client_classes])) for c in sorted(owned)
    ]
    return parts.by_class(labels, owners, len(client_classes), gen)
