"""A convolution in four forms, and the rule that chooses one of them.

All take f32[C, H, W, B] and a kernel f32[S, S, C, O] and give f32[O, H', W', B]. They
agree up to the rounding of sums in another order.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import execution
from models import rows


def paddings(side: int, padding: str) -> tuple[int, int]:
    """Rows before and after a map: `SAME` is PyTorch's (side - 1) // 2, side // 2."""
    return ((side - 1) // 2, side // 2) if padding == "SAME" else (0, 0)


def places(
    sizes: tuple[int, ...], side: int, stride: int, padding: str
) -> tuple[int, ...]:
    """The rows and columns of a convolution of a map of `sizes`."""
    more = sum(paddings(side, padding)) - side
    return tuple(max((size + more) // stride + 1, 0) for size in sizes)


def windows(
    h: jax.Array, side: int, stride: int, padding: str, fill: float = 0.0
) -> Iterator[jax.Array]:
    """The values at each place of a `side` x `side` window, [C, H', W', B] each.

    `h` is f32[C, H, W, B], and `fill` the value of the padding. `SAME` is PyTorch's
    padding (side - 1) // 2 for odd sides, also with a stride. An even side has one more
    row at the end.
    """
    if padding == "SAME":
        pads = paddings(side, padding)
        h = jnp.pad(h, ((0, 0), pads, pads, (0, 0)), constant_values=fill)
    height, width = h.shape[1] - side + 1, h.shape[2] - side + 1
    for i in range(side):
        for j in range(side):
            yield h[:, i : i + height : stride, j : j + width : stride]


def patches(h: jax.Array, kernel: jax.Array, stride: int, padding: str) -> jax.Array:
    """The product of the kernel as a matrix and the values of all windows."""
    side, features = kernel.shape[0], kernel.shape[-1]
    seen = jnp.concatenate([*windows(h, side, stride, padding)])
    if stride > 1 and execution.setting().platform == "gpu":
        # XLA ends the process when it fuses a product with every second value of a map.
        seen = jax.lax.optimization_barrier(seen)
    return product(kernel, seen).reshape(features, *seen.shape[1:])


def flat(h: jax.Array, kernel: jax.Array, stride: int, padding: str) -> jax.Array:
    """`patches` with width and batch as one axis, so that a window is a slice.

    A TPU pads a last axis of 20 examples to 128 lanes, but hardly pads this one.
    """
    side, batch = kernel.shape[0], h.shape[-1]
    pads = paddings(side, padding)
    h = jnp.pad(h, ((0, 0), pads, pads, (0, 0)))
    height, width = h.shape[1] - side + 1, h.shape[2] - side + 1
    h = h.reshape(*h.shape[:2], -1)
    seen = [
        h[:, i : i + height : stride, j * batch : (j + width) * batch]
        for i in range(side)
        for j in range(side)
    ]
    if stride > 1:
        wide = [one.reshape(*one.shape[:2], width, batch) for one in seen]
        seen = [one[:, :, ::stride].reshape(*one.shape[:2], -1) for one in wide]
    columns = jnp.concatenate(seen)
    out = product(kernel, columns)
    return out.reshape(len(out), columns.shape[1], -1, batch)


def by_rows(h: jax.Array, kernel: jax.Array, stride: int, padding: str) -> jax.Array:
    """`patches`, of which a CPU makes those of one row at a time; see `rows`.

    A map is split into stride * stride maps, so that a row's windows are slices.
    """
    maps, layout, counts = split(h, len(kernel), padding, stride)
    out = rows.product(kernel.reshape(-1, kernel.shape[-1]), maps, layout)
    return out.reshape(len(out), *counts, h.shape[-1])


def split(
    h: jax.Array, side: int, padding: str, stride: int = 1, pool: int = 1
) -> tuple[jax.Array, rows.Layout, tuple[int, int]]:
    """Maps in which the windows of a convolution and of the pool after it are slices.

    `h` float[C, H, W, B] is split into one map for each place of `stride * pool` rows
    and columns. Part `pool * a + b` has the places (a, b) of all windows of a `pool` x
    `pool` pool of that stride. Returns (float[(stride * pool)^2, C, rows, columns * B],
    the layout, the rows and columns of the result).
    """
    step, batch, (before, _) = stride * pool, h.shape[-1], paddings(side, padding)
    counts = [n // pool for n in places(h.shape[1:3], side, stride, padding)]
    more = (stride * (pool - 1) + side - 1) // step
    sizes = [count + more for count in counts]
    ends = [step * m - before - n for m, n in zip(sizes, h.shape[1:3], strict=True)]
    pads = [(0, 0, 0), *((before, end, 0) for end in ends), (0, 0, 0)]
    h = jax.lax.pad(h, jnp.zeros((), h.dtype), pads)
    h = h.reshape(len(h), sizes[0], step, sizes[1], step, batch)
    maps = h.transpose(2, 4, 0, 1, 3, 5)
    maps = maps.reshape(step**2, len(h), sizes[0], sizes[1] * batch)
    pairs = [*itertools.product(range(side), repeat=2)]

    def place(i: int, j: int) -> tuple[int, int, int]:
        return i % step * step + j % step, i // step, j // step * batch

    begins = tuple(
        tuple(place(a + i, b + j) for i, j in pairs)
        for a, b in itertools.product(range(0, step, stride), repeat=2)
    )
    return maps, rows.Layout(begins, (counts[0], counts[1] * batch)), tuple(counts)


def direct(h: jax.Array, kernel: jax.Array, stride: int, padding: str) -> jax.Array:
    """XLA's convolution, which has one group per kernel when vmapped over kernels."""
    pads, axes = [paddings(len(kernel), padding)] * 2, ("CHWN", "HWIO", "CHWN")
    return jax.lax.conv_general_dilated(
        h, kernel, (stride, stride), pads, dimension_numbers=axes
    )


def pooled(h: jax.Array, form: str) -> jax.Array:
    """The maximum of each 2x2 window; a last odd row or column is left out.

    Equal values share the gradient. `h` f32[C, H, W, B] is a convolution in `form`.
    """
    height, width = (size // 2 * 2 for size in h.shape[1:3])
    h = h[:, :height, :width]
    # On a TPU slices cost less than an axis of two, if width and batch are two axes.
    if execution.setting().platform == "tpu" and form != "flat":
        return _largest([h[:, i::2, j::2] for i in range(2) for j in range(2)])
    return h.reshape(len(h), height // 2, 2, width // 2, 2, h.shape[-1]).max((2, 4))


@jax.custom_jvp
def _largest(seen: list[jax.Array]) -> jax.Array:
    """The maximum of arrays of equal shapes, with the gradient of `jnp.max`."""
    return functools.reduce(jnp.maximum, seen)


@_largest.defjvp
def _slope_of_largest(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (seen,), (slopes,) = primals, tangents
    found = _largest(seen)
    hits = [one == found for one in seen]
    count = sum(hit.astype(found.dtype) for hit in hits)
    pairs = zip(hits, slopes, strict=True)
    total = sum(jnp.where(hit, slope, 0) for hit, slope in pairs)
    return found, total / jnp.maximum(count, 1)


# The width of a TPU's registers and of its matrix unit
LANES = 128

FORMS = {"patches": patches, "rows": by_rows, "flat": flat, "direct": direct}


def product(kernel: jax.Array, seen: jax.Array) -> jax.Array:
    """f32[O, ...]: the kernel as a matrix times `seen` f32[S * S * C, ...]."""
    matrix = kernel.reshape(-1, kernel.shape[-1])
    columns = seen.reshape(len(matrix), -1)
    out = jax.lax.dot_general(
        matrix,
        columns,
        (((0,), (0,)), ((), ())),
        preferred_element_type=summed_in(seen.dtype),
    )
    return out.astype(seen.dtype)


def summed_in(dtype: Any) -> Any:
    """The type that a product of numbers of `dtype` should return, None = the same.

    On a CPU this is float32 for bfloat16. Its bfloat16 instructions, if any, serve only
    products that return float32, and only some of their shapes.
    """
    is_slow = dtype == jnp.bfloat16 and execution.setting().platform == "cpu"
    return jnp.float32 if is_slow else None


def chosen(
    given: tuple[int, ...],
    kernel: tuple[int, ...],
    setting: execution.Setting,
    stride: int = 1,
    padding: str = "SAME",
) -> str:
    """The name of the cheapest form; docs/measured.md and measured_before.md say why.

    On a CPU XLA's convolution is slow inside loops, and slower with one kernel per
    client. A device of one core makes large patches row by row. On a GPU XLA's
    convolution takes 2 to 8 times as long as patches. A TPU computes a convolution of
    many groups as blocks of 128 channels, of which each group uses its own. That is
    cheap if all groups fit into one block, or if a group fills a good part of one.
    `given` and `kernel` are the shapes [C, H, W, B] and [S, S, C, O]. `setting` has the
    platform, and the number of models computed side by side.
    """
    side, _, channels, features = kernel
    if setting.form:
        return setting.form
    if setting.platform == "cpu" and has_slices(given) and side > 1:
        height, width = places(given[1:3], side, stride, padding)
        columns = width * given[3]
        num_bytes = 4 * side**2 * channels * height * columns
        has_rows = rows.suits(num_bytes, columns, features, setting)
        return "rows" if has_rows else "patches"
    if setting.platform != "tpu":
        return "patches"
    if side == 1:
        return "patches"
    # A batch that fills the lanes gains nothing from another axis beside it.
    narrow = "flat" if given[-1] < LANES else "patches"
    if setting.models == 1:
        # It costs least, and the gradient of a direct first layer takes more than eight
        # minutes to compile.
        return narrow
    is_one_block = setting.models * features <= LANES
    if is_one_block or channels >= LANES // 4:
        return "direct"
    if channels >= LANES // 8 and setting.models <= LANES // 4:
        return "direct"
    # The compiler fills the lanes with so many models, otherwise with examples.
    return "patches" if setting.models > LANES // 2 else narrow


def has_slices(given: tuple[int, ...]) -> bool:
    """Whether `split` is possible: not in a model that is exported for any batch."""
    return isinstance(given[-1], int)


def convolve(
    h: jax.Array, kernel: jax.Array, stride: int, padding: str
) -> tuple[jax.Array, str]:
    """The convolution in the form that suits its shapes, and the name of the form."""
    form = chosen(h.shape, kernel.shape, execution.setting(), stride, padding)
    return FORMS[form](h, kernel, stride, padding), form
