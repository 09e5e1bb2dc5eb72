"""Leaves that are never whole in memory, and their numbers in pieces of bounded size.

A state of many clients is hashed and written piece by piece.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Bytes copied at once. A leaf may be most of a state, and a state most of the memory.
PIECE_BYTES = 64 << 20


class Joined:
    """Arrays joined along their leading axis, as a leaf that is never materialised.

    `shape` and `dtype` are those of the whole, which an index also refers to.
    """

    def __init__(self, parts: Sequence[jax.Array]):
        self.parts, self.dtype = tuple(parts), parts[0].dtype
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def __getitem__(self, index: Any) -> jax.Array:
        alone = len(self.parts) == 1
        return (self.parts[0] if alone else jnp.concatenate(self.parts))[index]


class Streamed:
    """An array of `shape` and `dtype` as a leaf that is never materialised.

    `pieces` returns its numbers in order, flat, in arrays of bounded size.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        pieces: Callable[[], Iterator[np.ndarray]],
    ):
        self.shape, self.dtype, self.pieces = shape, dtype, pieces


def joined(trees: Sequence[Any]) -> Any:
    """Pytrees of equal structure as one with leaves `Joined`."""
    return jax.tree.map(lambda *leaves: Joined(leaves), *trees)


def is_key(leaf: Any) -> bool:
    """Whether a leaf holds random keys, as of `jax.random.key`."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def numbers(leaf: Any) -> Any:
    """The leaf, or the numbers uint32[..., n] of random keys."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def pieces_of(leaf: Any) -> Iterator[np.ndarray]:
    """A leaf's numbers in order, flat, at most `PIECE_BYTES` at once."""
    if isinstance(leaf, Streamed):
        yield from (piece for piece in leaf.pieces() if piece.size)
        return
    for array in leaf.parts if isinstance(leaf, Joined) else (leaf,):
        if isinstance(array, jax.Array):
            # This process's copy, so that computing with it involves no other.
            array = array.addressable_data(0)
        array = numbers(array)
        if array.nbytes <= PIECE_BYTES:
            if array.size:
                yield np.ascontiguousarray(jax.device_get(array)).reshape(-1)
            continue
        # Cut along the first axis with rows that are small enough.
        inner = [
            array.dtype.itemsize * math.prod(array.shape[i:])
            for i in range(1, array.ndim)
        ]
        axis = next(
            (i for i, n in enumerate(inner) if n <= PIECE_BYTES), array.ndim - 1
        )
        size = (*inner, array.dtype.itemsize)[axis]
        rows, behind = max(PIECE_BYTES // size, 1), array.shape[axis + 1 :]
        for before in np.ndindex(array.shape[:axis]):
            for at in range(0, array.shape[axis], rows):
                count = min(rows, array.shape[axis] - at)
                start = (*before, at, *(0 for _ in behind))
                many = (*(1 for _ in before), count, *behind)
                yield np.asarray(_cut(array, start, many)).reshape(-1)


def materialised(leaf: Any) -> Any:
    """A leaf as an array: joined or streamed parts are put together."""
    if isinstance(leaf, Joined):
        return leaf[...]
    if not isinstance(leaf, Streamed):
        return leaf
    array, done = np.empty(math.prod(leaf.shape), leaf.dtype), 0
    for piece in leaf.pieces():
        array[done : done + piece.size] = piece
        done += piece.size
    return array.reshape(leaf.shape)


def in_rows(pieces: Iterator[np.ndarray], shape: Sequence[int]) -> Iterator[np.ndarray]:
    """Numbers in flat pieces as whole rows, [n, *shape] at once, in the same order."""
    size, rest = math.prod(shape), None
    for piece in pieces:
        if rest is not None and rest.size:
            piece = np.concatenate([rest, piece])
        count = piece.size // size
        if count:
            yield piece[: count * size].reshape(count, *shape)
        rest = piece[count * size :]


def _cut(array: Any, start: tuple[int, ...], size: tuple[int, ...]) -> Any:
    """A part of an array. Of a host array it is a view, which may have 64 bits."""
    if isinstance(array, np.ndarray):
        return array[tuple(slice(i, i + n) for i, n in zip(start, size, strict=True))]
    # The start is an argument, so that one program serves all pieces of one size.
    return jax.lax.dynamic_slice(array, start, size)
