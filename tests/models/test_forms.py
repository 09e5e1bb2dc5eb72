"""The forms of a convolution are one function, and a CPU has the first of them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import execution
from models import forms

TPU = execution.Setting("tpu", 8)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(("side", "size"), [(1, 5), (2, 6), (3, 7), (4, 5), (5, 6)])
def test_forms_agree(padding, stride, side, size):
    """Outputs and both gradients, for odd and even sides of maps and kernels."""
    gen = np.random.default_rng(side)
    with jax.enable_x64(True):
        h = jnp.asarray(gen.normal(size=(2, size, size + 1, 4)))
        kernel = jnp.asarray(gen.normal(size=(side, side, 2, 3)))

        @jax.jit
        def all_of(h, kernel):
            found = []
            for form in forms.FORMS.values():
                fn = functools.partial(form, stride=stride, padding=padding)
                out, pull = jax.vjp(fn, h, kernel)
                weight = jnp.cos(jnp.arange(out.size).reshape(out.shape))
                found.append((out, *pull(weight.astype(out.dtype))))
            return found

        first, *others = all_of(h, kernel)
        assert first[0].dtype == jnp.float64
        for other in others:
            chex.assert_trees_all_close(other, first, rtol=0, atol=1e-12)
