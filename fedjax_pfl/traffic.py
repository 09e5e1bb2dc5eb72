"""Bytes of messages. Counts are small integers that the host multiplies in int64."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import shapes, types
from fedjax_pfl.rows import exchange

FLOAT_BYTES = 4
# The simulated network of every client, in both directions together
BYTES_PER_SECOND = 1e6


def label_bytes(num_classes: int) -> int:
    """Bytes of a class's number: one, or two for more than 256 classes, and so on."""
    return max(1, -(-(num_classes - 1).bit_length() // 8))


def both_ways(name: str, size: int) -> tuple[types.MessageKind, types.MessageKind]:
    """Kinds `<name> down` and `<name> up` of `size` bytes."""
    kind = types.MessageKind
    return kind(f"{name} down", "down", size), kind(f"{name} up", "up", size)


def model_both_ways(task: types.Task, model: types.Model) -> tuple:
    """Kinds `model down` and `model up`: a whole model."""
    return both_ways("model", shapes.model_bytes(model, task.example_shape))


def stages_both_ways(task: types.Task, model: types.Model) -> tuple:
    """Kinds `<stage> down` and `<stage> up` of every stage."""
    sizes = shapes.stage_bytes(model, task.example_shape)
    return tuple(
        types.MessageKind(f"{name} {way}", way, size)
        for way in ("down", "up")
        for name, size in zip(model.stage_names, sizes, strict=True)
    )


def of_stages(
    what: str, way: str, model: types.Model, sizes: Sequence[int]
) -> tuple[types.MessageKind, ...]:
    """Kinds `<what> <stage>` that go one way, of a size in bytes for each stage."""
    named = zip(model.stage_names, sizes, strict=True)
    return tuple(types.MessageKind(f"{what} {name}", way, size) for name, size in named)


def stages_sent(
    model: types.Model, down: jax.Array, up: jax.Array
) -> dict[str, jax.Array]:
    """Counts of `stages_both_ways`: stages bool[C, L] that each row gets and sends."""
    return {
        f"{name} {way}": held[:, stage]
        for way, held in (("down", down), ("up", up))
        for stage, name in enumerate(model.stage_names)
    }


def check(kinds: Sequence[types.MessageKind]) -> None:
    """Refuses (ValueError) kinds of messages that cannot be counted apart."""
    names = [kind.name for kind in kinds]
    for kind in kinds:
        if names.count(kind.name) > 1:
            raise ValueError(
                f"algo: two of its messages are called {kind.name!r}; give each a name "
                "of its own, such as one for each direction"
            )
        if kind.direction not in ("up", "down"):
            raise ValueError(
                f"algo: its message {kind.name!r} has the direction "
                f"{kind.direction!r}, expected 'up' or 'down'"
            )
        if not isinstance(kind.num_bytes, numbers.Integral) or kind.num_bytes < 0:
            raise ValueError(
                f"algo: its message {kind.name!r} has {kind.num_bytes!r} bytes, "
                "expected a whole number"
            )


def counted(
    sent: Mapping[str, Any], kinds: Sequence[types.MessageKind], row_mask: jax.Array
) -> jax.Array:
    """Messages of all real rows by kind, int32[kinds], in the order of `kinds`.

    `sent` has messages by the kind's name, int32[C] or one number for every row, and
    other names are not counted. A round's sum of a kind is below 2^31. Raises
    ValueError if it lacks a kind, or counts one in fractions.
    """
    missing = [kind.name for kind in kinds if kind.name not in sent]
    if missing:
        raise ValueError(
            f"a round counts no {' and no '.join(missing)}, which the algorithm's "
            "messages declare; return 0 for what is not sent"
        )
    found = {kind.name: jnp.asarray(sent[kind.name]) for kind in kinds}
    for name, count in found.items():
        if not (count.dtype == bool or jnp.issubdtype(count.dtype, jnp.integer)):
            raise ValueError(
                f"a round counts {name} in {count.dtype}: messages are whole numbers; "
                "of sizes that differ count the parts, such as kilobytes, of one size"
            )
    counts = [count.astype(jnp.int32) for count in found.values()]
    counts = exchange.everywhere(counts)
    total = [jnp.where(row_mask, n, 0).sum(dtype=jnp.int32) for n in counts]
    return jnp.stack(total) if total else jnp.zeros(0, jnp.int32)


def lasting(
    sent: Mapping[str, Any], kinds: Sequence[types.MessageKind], cohort: types.Cohort
) -> Any:
    """f32[]: the simulated seconds of a round, which waits for its slowest client.

    () for a cohort without a clock. `sent` and `kinds` are those of `counted`.
    """
    if isinstance(cohort.seconds, tuple):
        return ()
    counts = [jnp.asarray(sent[kind.name], jnp.float32) for kind in kinds]
    # Floats, as int32 has no 2 GiB
    sizes = [float(kind.num_bytes) for kind in kinds]
    size = sum(n * one for n, one in zip(counts, sizes, strict=True))
    every = jnp.where(cohort.row_mask, cohort.seconds + size / BYTES_PER_SECOND, 0)
    return jnp.minimum(every.max(), cohort.deadline)


def by_kind(
    counts: np.ndarray, kinds: Sequence[types.MessageKind]
) -> dict[str, tuple[int, int]]:
    """(messages, bytes) of `counts` int[kinds] by the kind's name, as Python ints."""
    pairs = zip(np.asarray(counts, np.int64), kinds, strict=True)
    return {kind.name: (int(n), int(n) * kind.num_bytes) for n, kind in pairs}


def cumulative(counts: np.ndarray, kinds: Sequence[types.MessageKind]) -> dict:
    """{"bytes_up", "bytes_down"} of `counts` int[kinds] messages, as Python ints."""
    total = {"bytes_up": 0, "bytes_down": 0}
    for count, kind in zip(np.asarray(counts, np.int64), kinds, strict=True):
        total[f"bytes_{kind.direction}"] += int(count) * kind.num_bytes
    return total
