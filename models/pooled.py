"""A convolution and the 2x2 max-pool after it in one layout, as suits a CPU.

There small products wait for memory: patches, the pool and its gradient take more of a
step than the multiplications. So the input is split once into its four parities, with
which the four places of a pool's window are four slabs of every row of patches, and the
pool is a maximum of slabs. What the pool leaves out is not computed. It agrees with
`forms.patches` and `forms.pooled` up to the rounding of sums in another order.
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
    maps, layout = rows.split(h, side, 2, forms.paddings(side, padding), parts=2)
    if layout.patch_bytes * len(h) > rows.PATCH_BYTES:
        matrix = kernel.reshape(-1, kernel.shape[-1])
        out = rows.product(matrix, maps, layout)
    else:
        out = forms.product(kernel, rows.all_windows(maps, layout))
    height, length = layout.size
    largest = _largest(out.reshape(len(out), 4, height * length))
    return largest.reshape(len(out), height, length // max(batch, 1), batch)


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
