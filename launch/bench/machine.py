"""What the machine could do: matrix products, and the operations of a training step."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from fedjax_pfl import shapes, types


def matmul_peak(size: int = 2048, repeats: int = 5) -> float:
    """GFLOP/s of the best of a few f32 matrix products on the default device."""
    product = jax.jit(lambda a, b: a @ b)
    a = jnp.ones((size, size))
    product(a, a).block_until_ready()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        product(a, a).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / min(times) / 1e9


def train_flops(model: types.Model, example_shape: tuple[int, ...]) -> float:
    """Floating-point operations of forward and backward for one example, per XLA."""
    params, stats = shapes.variables(model, example_shape)
    image = jax.ShapeDtypeStruct((32, *example_shape), jnp.float32)

    def loss(params, stats, image):
        return model.forward(params, stats, image)[0].sum()

    lowered = jax.jit(jax.grad(loss)).lower(params, stats, image)
    return float(lowered.cost_analysis()["flops"]) / 32
