"""Windows of maps times a kernel, all at once or row by row, as suits a CPU.

The patches of all windows are many times larger than the maps. Where they do not fit
the caches of a CPU, the clients on its cores wait for memory. Row by row, the patches
of a row are made, multiplied and dropped, and made again for the gradient. The products
of a row are too small for several cores.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from fedjax_pfl import execution
from models import primitives

# With more bytes of patches, row by row costs a core less than all at once.
PATCH_BYTES = 2_000_000
# A row with more bytes of patches is multiplied in pieces of at least so many columns.
ROW_BYTES, COLUMNS = 1_000_000, 256


class Layout(NamedTuple):
    """Where the windows of a layer are in its maps.

    `places` [F][T] has the map, row and column of the first window, for each part and
    place of a kernel. `size` has the rows R of a part and its columns L = width *
    batch.
    """

    places: tuple[tuple[tuple[int, int, int], ...], ...]
    size: tuple[int, int]

    @property
    def patch_bytes(self) -> int:
        """Bytes of one channel's patches in float32."""
        return 4 * len(self.places) * len(self.places[0]) * self.size[0] * self.size[1]

    def windows(self, channels: int) -> tuple[np.ndarray, int]:
        """Where the windows of each row of the result begin, or of its K pieces.

        Returns (int32[F * R * K, T, 3], the map, row and column; the columns L / K of a
        piece).
        """
        rows, length = self.size
        is_large = 4 * channels * len(self.places[0]) * length > ROW_BYTES
        most = length // COLUMNS if is_large else 1
        count = max(k for k in range(1, max(most, 1) + 1) if length % k == 0)
        first = np.array(self.places, np.int32)[:, None]
        row, piece = np.divmod(np.arange(rows * count), count)
        begin = np.stack([0 * row, row, piece * (length // count)], -1)[:, None]
        found = (first + begin).reshape(-1, *first.shape[2:])
        return found.astype(np.int32), length // count


def suits(
    patch_bytes: int, columns: int, features: int, setting: execution.Setting
) -> bool:
    """Whether row by row costs less than all windows at once.

    `patch_bytes` is for all windows, and `columns` is of a row. `setting` knows whether
    a device has one core.
    """
    # With fewer columns it takes longer to read the kernel for a row than the row.
    has_columns = columns >= features
    return setting.one_core and patch_bytes > PATCH_BYTES and has_columns


def product(kernel: jax.Array, maps: jax.Array, layout: Layout) -> jax.Array:
    """The kernel times all windows of the maps: float[O, F, R, L].

    `kernel` is float[T * C, O], and `maps` float[P, C, rows, columns].
    """
    return _times.bind(kernel, maps, layout=layout)


def _taken(
    maps: jax.Array, windows: np.ndarray, index: jax.Array, size: tuple[int, int]
) -> jax.Array:
    """The windows `windows[index]` of maps side by side: float[T, C, *size]."""
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(1, 2, 3), collapsed_slice_dims=(0,), start_index_map=(0, 2, 3)
    )
    at, sizes = jnp.asarray(windows)[index], (1, maps.shape[1], *size)
    return jax.lax.gather(maps, at, numbers, sizes, mode="promise_in_bounds")


def _added(
    total: jax.Array, given: jax.Array, windows: np.ndarray, index: jax.Array
) -> jax.Array:
    """`total` [P, C, rows, columns] plus float[T, C, *size] at `windows[index]`.

    One place after another, since XLA's scatter is slow.
    """
    at, (_, *shape) = jnp.asarray(windows)[index], given.shape

    def add(place: jax.Array, total: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_slice_in_dim(given, place, 1)
        here = at[place, 0], jnp.int32(0), at[place, 1], at[place, 2]
        old = jax.lax.dynamic_slice(total, here, (1, *shape))
        return jax.lax.dynamic_update_slice(total, old + one, here)

    return jax.lax.fori_loop(0, len(given), add, total)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """A product of matrices, of which those in bfloat16 are summed in float32."""
    # As `forms.summed_in`
    kind = jnp.float32 if a.dtype == jnp.bfloat16 else None
    dims = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=kind)


def _forward(kernel: jax.Array, maps: jax.Array, *, layout: Layout) -> jax.Array:
    windows, length = layout.windows(maps.shape[1])

    def fill(index: jax.Array, out: jax.Array) -> jax.Array:
        seen = _taken(maps, windows, index, (1, length)).reshape(len(kernel), length)
        one = _dot(kernel, seen, 0, 0).astype(out.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, one[:, None], index, 1)

    first = jnp.zeros((kernel.shape[1], len(windows), length), maps.dtype)
    out = jax.lax.fori_loop(0, len(windows), fill, first)
    return out.reshape(len(out), -1, *layout.size)


def _of_kernel(g: jax.Array, maps: jax.Array, *, layout: Layout) -> jax.Array:
    """The kernel's gradient float[T * C, O] for `g` float[O, F, R, L]."""
    windows, length = layout.windows(maps.shape[1])
    g = g.reshape(len(g), -1, length)
    size = windows.shape[1] * maps.shape[1]

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        seen = _taken(maps, windows, index, (1, length)).reshape(size, length)
        one = jax.lax.dynamic_index_in_dim(g, index, 1, keepdims=False)
        return total + _dot(seen, one, 1, 1)

    kind = jnp.promote_types(g.dtype, jnp.float32)
    total = jax.lax.fori_loop(0, len(windows), add, jnp.zeros((size, len(g)), kind))
    return total.astype(g.dtype)


def _of_maps(
    g: jax.Array, kernel: jax.Array, *, layout: Layout, shape: tuple[int, ...]
) -> jax.Array:
    """The gradient of maps of `shape` for `g` float[O, F, R, L]."""
    windows, length = layout.windows(shape[1])
    g = g.reshape(len(g), -1, length)

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_index_in_dim(g, index, 1, keepdims=False)
        each = _dot(kernel, one, 1, 0).astype(g.dtype)
        each = each.reshape(-1, shape[1], 1, length)
        return _added(total, each, windows, index)

    return jax.lax.fori_loop(0, len(windows), add, jnp.zeros(shape, g.dtype))


def all_windows(maps: jax.Array, layout: Layout) -> jax.Array:
    """The patches of all windows at once: float[T, C, F, R, L]."""
    return _cut.bind(maps, layout=layout)


def _whole(maps: jax.Array, *, layout: Layout) -> jax.Array:
    """`all_windows` in a loop over parts, so that XLA does not recompute its input."""
    first = np.array(layout.places, np.int32)
    parts, count, _ = first.shape

    def fill(part: jax.Array, out: jax.Array) -> jax.Array:
        seen = _taken(maps, first, part, layout.size)
        return jax.lax.dynamic_update_slice_in_dim(out, seen[:, :, None], part, 2)

    whole = jnp.zeros((count, maps.shape[1], parts, *layout.size), maps.dtype)
    return jax.lax.fori_loop(0, parts, fill, whole)


def _total(g: jax.Array, *, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    """The transpose of `_whole`: adds windows to the maps [P, C, H, L] of `shape`."""
    first = np.array(layout.places, np.int32)

    def add(part: jax.Array, total: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_index_in_dim(g, part, 2, keepdims=False)
        return _added(total, one, first, part)

    return jax.lax.fori_loop(0, len(first), add, jnp.zeros(shape, g.dtype))


_cut = primitives.linear(
    "cut_windows",
    _whole,
    (4,),
    lambda maps, *, layout: (
        *(len(layout.places[0]), maps[1], len(layout.places)),
        *layout.size,
    ),
)
_add = primitives.linear("add_windows", _total, (5,), lambda _, *, layout, shape: shape)
ad.deflinear2(
    _cut, lambda g, h, **params: [_add.bind(g, shape=h.aval.shape[-4:], **params)]
)
ad.deflinear2(_add, lambda g, _, *, shape, **params: [_cut.bind(g, **params)])

# The three derivatives of one function that is linear in the kernel, the maps and `g`
_times = primitives.linear(
    "rows_times_kernel",
    _forward,
    (2, 4),
    lambda kernel, maps, *, layout: (kernel[1], len(layout.places), *layout.size),
)
_to_kernel = primitives.linear(
    "rows_to_kernel",
    _of_kernel,
    (4, 4),
    lambda g, maps, *, layout: (len(layout.places[0]) * maps[1], g[0]),
)
_to_maps = primitives.linear(
    "rows_to_maps", _of_maps, (4, 2), lambda g, kernel, *, layout, shape: shape
)
ad.defbilinear(
    _times,
    lambda g, kernel, maps, *, layout: _to_kernel.bind(g, maps, layout=layout),
    lambda g, kernel, maps, *, layout: _to_maps.bind(
        g, kernel, layout=layout, shape=maps.aval.shape[-4:]
    ),
)
ad.defbilinear(
    _to_kernel,
    lambda t, g, maps, *, layout: _times.bind(t, maps, layout=layout),
    lambda t, g, maps, *, layout: _to_maps.bind(
        g, t, layout=layout, shape=maps.aval.shape[-4:]
    ),
)
ad.defbilinear(
    _to_maps,
    lambda t, g, kernel, *, layout, shape: _times.bind(kernel, t, layout=layout),
    lambda t, g, kernel, *, layout, shape: _to_kernel.bind(g, t, layout=layout),
)
