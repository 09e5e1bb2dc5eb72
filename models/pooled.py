"""A convolution and the 2x2 max-pool after it in one layout, as suits a CPU.

There small products wait for memory: patches, the pool and its gradient take more of a
step than the multiplications. So the input is split once into its four parities, with
which the four places of a pool's window are four slabs of every row of patches, and the
pool is a maximum of slabs. What the pool leaves out is not computed. It agrees with
`forms.patches` and `forms.pooled` up to the rounding of sums in another order.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from fedjax_pfl import execution
from models import forms

# The map, the row and the column where a window begins, of each part and place
Places = tuple[tuple[tuple[int, int, int], ...], ...]


def suits(
    given: tuple[int, ...], side: int, padding: str, setting: execution.Setting
) -> bool:
    """Whether `convolve` costs less than a convolution and a pool after it.

    Args:
        given: The shape [C, H, W, B] of the input.
        side: S, the side of the kernel.
        padding: `SAME` or `VALID`.
        setting: The platform, and the form of convolutions that was asked for.
    """
    lost = side - 1 - sum(forms.paddings(side, padding))
    has_windows = min(given[1:3]) - lost > 1
    is_known = isinstance(given[3], int)  # not so in an export for any batch
    is_cpu = setting.platform == "cpu" and not setting.form
    return is_cpu and is_known and side > 1 and has_windows


def convolve(h: jax.Array, kernel: jax.Array, padding: str) -> jax.Array:
    """The maximum of each 2x2 window of a convolution of stride 1.

    A last odd row or column is left out, and values that are equal share the gradient.

    Args:
        h: float[C, H, W, B].
        kernel: float[S, S, C, O].
        padding: `SAME` or `VALID`; see `forms.windows`.

    Returns:
        float[O, H' // 2, W' // 2, B] for a convolution of H' rows and W' columns.
    """
    side, batch = kernel.shape[0], h.shape[-1]
    before, after = forms.paddings(side, padding)
    height, width = ((n + before + after - side + 1) // 2 for n in h.shape[1:3])
    rows, columns = height + side // 2, width + side // 2
    sizes = zip((rows, columns), h.shape[1:3], strict=True)
    ends = [2 * wanted - before - size for wanted, size in sizes]
    pads = [(0, 0, 0), *((before, end, 0) for end in ends), (0, 0, 0)]
    h = jax.lax.pad(h, jnp.zeros((), h.dtype), pads)
    h = h.reshape(len(h), rows, 2, columns, 2, batch).transpose(2, 4, 0, 1, 3, 5)
    h = h.reshape(4, h.shape[2], rows, columns * batch)
    pairs = [*itertools.product(range(side), repeat=2)]
    places = tuple(
        tuple(
            ((i + a) % 2 * 2 + (j + b) % 2, (i + a) // 2, (j + b) // 2 * batch)
            for i, j in pairs
        )
        for a, b in itertools.product(range(2), repeat=2)
    )
    seen = _cut.bind(h, places=places, size=(height, width * batch))
    out = forms.product(kernel, seen)
    largest = _largest(out.reshape(len(out), 4, height * width * batch))
    return largest.reshape(len(out), height, width, batch)


@jax.custom_jvp
def _largest(h: jax.Array) -> jax.Array:
    """float[O, 4, N] -> float[O, N], with the gradient of `jnp.max`.

    NaN, which equals nothing, gets no gradient.
    """
    # XLA keeps the result of a reduction, and would compute another maximum anew.
    return h.max(1)


@_largest.defjvp
def _slope_of_largest(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (h,), (slope,) = primals, tangents
    found = _largest(h)
    count = sum((h[:, place] == found).astype(h.dtype) for place in range(4))
    total = jnp.where(h == found[:, None], slope, 0).sum(1)
    return found, total / jnp.maximum(count, 1)


def _windows(h: jax.Array, *, places: Places, size: tuple[int, int]) -> jax.Array:
    """Windows of maps side by side.

    It is a loop over the parts, since XLA would compute what comes before anew in every
    window.

    Args:
        h: float[P, C, H, L].
        places: [F, T, 3].
        size: The rows and columns of a window.

    Returns:
        float[T, C, F, rows, columns].
    """
    begins = np.array(places, np.int32)
    parts, count, _ = begins.shape
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(1, 2, 3), collapsed_slice_dims=(0,), start_index_map=(0, 2, 3)
    )

    def fill(part: jax.Array, out: jax.Array) -> jax.Array:
        at, sizes = jnp.asarray(begins)[part], (1, h.shape[1], *size)
        seen = jax.lax.gather(h, at, numbers, sizes, mode="promise_in_bounds")
        return jax.lax.dynamic_update_slice_in_dim(out, seen[:, :, None], part, 2)

    whole = jnp.zeros((count, h.shape[1], parts, *size), h.dtype)
    return jax.lax.fori_loop(0, parts, fill, whole)


def _total(
    g: jax.Array, *, places: Places, size: tuple[int, int], shape: tuple[int, ...]
) -> jax.Array:
    """The transpose of `_windows`: adds windows to the maps [P, C, H, L] of `shape`.

    One window after another, since XLA's scatter is slow.
    """
    begins = np.array(places, np.int32)
    parts, count, _ = begins.shape

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        tap, here = number % count, jnp.asarray(begins.reshape(-1, 3))[number]
        window = (1, shape[1], 1, *size)
        one = jax.lax.dynamic_slice(g, (tap, 0, number // count, 0, 0), window)
        here = (here[0], jnp.int32(0), here[1], here[2])
        old = jax.lax.dynamic_slice(total, here, (1, shape[1], *size))
        return jax.lax.dynamic_update_slice(total, old + one[:, :, 0], here)

    return jax.lax.fori_loop(0, parts * count, add, jnp.zeros(shape, g.dtype))


def _primitive(name: str, fn: Any, num_axes: int, shape_of: Any) -> core.Primitive:
    """A linear function of arrays with any number of leading axes.

    As a primitive it has derivatives in both directions, and its own transpose.

    Args:
        name: Its name in a jaxpr.
        fn: The function of an array of `num_axes` axes.
        num_axes: Those of the function without leading ones.
        shape_of: `(shape, **params) -> shape` of the result without leading axes.
    """
    made = core.Primitive(name)

    def computed(h: jax.Array, **params: Any) -> jax.Array:
        one = functools.partial(fn, **params)
        for _ in range(h.ndim - num_axes):
            one = jax.vmap(one)
        return one(h)

    def shaped(h: Any, **params: Any) -> Any:
        leading = h.shape[: len(h.shape) - num_axes]
        shape = shape_of(h.shape[len(leading) :], **params)
        return jax.core.ShapedArray((*leading, *shape), h.dtype)

    def batched(args: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
        return made.bind(jnp.moveaxis(args[0], axes[0], 0), **params), 0

    @functools.lru_cache(maxsize=64)
    def jitted(**params: Any) -> Any:
        return jax.jit(functools.partial(computed, **params))

    made.def_impl(lambda h, **params: jitted(**params)(h))
    made.def_abstract_eval(shaped)
    batching.primitive_batchers[made] = batched
    mlir.register_lowering(made, mlir.lower_fun(computed, multiple_results=False))
    return made


_cut = _primitive(
    "cut_windows",
    _windows,
    4,
    lambda shape, *, places, size: (len(places[0]), shape[1], len(places), *size),
)
_add = _primitive("add_windows", _total, 5, lambda _, *, places, size, shape: shape)
ad.deflinear2(
    _cut,
    lambda g, h, **params: [_add.bind(g, shape=h.aval.shape[-4:], **params)],
)
ad.deflinear2(_add, lambda g, _, *, shape, **params: [_cut.bind(g, **params)])
