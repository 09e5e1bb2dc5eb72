"""Generated examples for clients of equal or lognormal sizes."""

import math

import numpy as np

SMALLEST, LARGEST = 2, 10_000


def draw(
    num_clients: int, examples: int, sigma: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws (x f32[N, 16], y int[N], client int[N]) for `num_clients` clients.

    Examples lie around the centres of four classes.

    Use them with `--partition=natural --test_split=pool`. That split trains on 80 % of
    a client's rows, rounded down, which gives each client the train rows requested
    here.

    Args:
        examples: Mean number of train rows per client.
        sigma: Standard deviation of the log sizes, 0 = equal sizes. The mean size does
            not depend on it. Sizes are clipped to 2..10,000 rows.
    """
    gen = np.random.default_rng(0)
    centre = math.log(examples) - sigma**2 / 2
    sizes = np.exp(gen.normal(centre, sigma, num_clients)).round()
    owned = np.ceil(1.25 * sizes.clip(SMALLEST, LARGEST)).astype(int)
    y = gen.integers(4, size=owned.sum())
    means = gen.standard_normal((4, 16), np.float32)
    x = gen.standard_normal((len(y), 16), np.float32)
    x += means[y]
    return x, y, np.repeat(np.arange(num_clients), owned)


def lognormal(num_clients: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws (x f32[N, 16], y int[N], client int[N]) for very unequal clients.

    Sizes are exp(N(2.5, 1.5)), clipped to 5..10,000. Examples lie around the centres of
    four classes.
    """
    gen = np.random.default_rng(0)
    sizes = np.exp(gen.normal(2.5, 1.5, num_clients)).clip(5, 10_000).astype(int)
    y = gen.integers(4, size=sizes.sum())
    x = gen.normal(size=(4, 16))[y] + gen.normal(size=(len(y), 16))
    return x.astype(np.float32), y, np.repeat(np.arange(num_clients), sizes)
