"""A convolution and the 2x2 max-pool after it in one layout, as suits a CPU.

Small products wait for memory there: patches, the pool and its gradient take more of a
step than the multiplications. So the input is split once into its four parities. The
four places of a pool's window are then four slabs of every row of patches, and the pool
is a maximum of slabs. What it leaves out is not computed. Where a device has one core,
large layers run row by row (`models.rows`). It agrees with `forms.patches` and
`forms.pooled` up to rounding.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import execution
from models import forms, rows


def suits(
    given: tuple[int, ...], side: int, padding: str, setting: execution.Setting
) -> bool:
    """Whether `convolve` costs less than a convolution and a pool after it.

    The input [C, H, W, B] is `given`, and `side` is S. `setting` has the platform, and
    the form of convolutions that was asked for.
    """
    lost = side - 1 - sum(forms.paddings(side, padding))
    has_windows = min(given[1:3]) - lost > 1
    is_cpu = setting.platform == "cpu" and not setting.form
    return is_cpu and forms.has_slices(given) and side > 1 and has_windows


def convolve(h: jax.Array, kernel: jax.Array, padding: str) -> jax.Array:
    """The maximum of each 2x2 window of a convolution of stride 1.

    A last odd row or column is left out, and equal values share the gradient.

    Args:
        h, kernel: float[C, H, W, B] and float[S, S, C, O].
        padding: `SAME` or `VALID`; see `forms.windows`.

    Returns:
        float[O, H' // 2, W' // 2, B] for a convolution of H' rows and W' columns.
    """
    batch = h.shape[-1]
    maps, layout, (height, width) = forms.split(h, len(kernel), padding, pool=2)
    num_bytes, features = layout.patch_bytes * len(h), kernel.shape[-1]
    if rows.suits(num_bytes, layout.size[1], features, execution.setting()):
        matrix = kernel.reshape(-1, features)
        out = rows.product(matrix, maps, layout)
    else:
        out = forms.product(kernel, rows.all_windows(maps, layout))
    largest = _largest(out.reshape(len(out), 4, height * width * batch))
    return largest.reshape(len(out), height, width, batch)


@jax.custom_jvp
def _largest(h: jax.Array) -> jax.Array:
    """float[O, 4, N] -> float[O, N], with the gradient of `jnp.max`; none for nan."""
    # XLA keeps the result of a reduction, but would compute another maximum again.
    return h.max(1)


@_largest.defjvp
def _slope_of_largest(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (h,), (slope,) = primals, tangents
    found = _largest(h)
    count = sum((h[:, place] == found).astype(h.dtype) for place in range(4))
    total = jnp.where(h == found[:, None], slope, 0).sum(1)
    return found, total / jnp.maximum(count, 1)
