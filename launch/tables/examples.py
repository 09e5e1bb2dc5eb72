"""Examples that a cell draws: clients of equal or lognormal sizes."""

import math

import numpy as np

SMALLEST, LARGEST = 2, 10_000


def draw(
    num_clients: int,
    examples: int,
    features: int = 16,
    classes: int = 4,
    sigma: float = 0.0,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrays (x, y, client) for `--partition=natural --test_split=pool`.

    That split trains on floor(.8 n) of a client's rows, and it leaves each client the
    number of train rows that is asked for.

    Args:
        num_clients: K.
        examples: Train rows of a client, on average.
        features: Numbers of an example, which lie around the centre of its class.
        classes: Classes.
        sigma: Of the logarithm of the sizes, whose mean stays; they are cut to 2 to
            10,000 rows. 0 = all are equal.
        seed: Of the draw.

    Returns:
        x f32[N, features], y int[N], client int[N].
    """
    gen = np.random.default_rng(seed)
    centre = math.log(examples) - sigma**2 / 2
    sizes = np.exp(gen.normal(centre, sigma, num_clients)).round()
    owned = np.ceil(1.25 * sizes.clip(SMALLEST, LARGEST)).astype(int)
    y = gen.integers(classes, size=owned.sum())
    means = gen.standard_normal((classes, features), np.float32)
    x = gen.standard_normal((len(y), features), np.float32)
    x += means[y]
    return x, y, np.repeat(np.arange(num_clients), owned)


def lognormal(num_clients: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Arrays (x, y, client) of clients with very unequal numbers of examples.

    Sizes are exp(N(2.5, 1.5)), clipped to 5..10,000. Examples are vectors of 16 numbers
    around the centre of their class, of which there are four.
    """
    gen = np.random.default_rng(seed)
    sizes = np.exp(gen.normal(2.5, 1.5, num_clients)).clip(5, 10_000).astype(int)
    y = gen.integers(4, size=sizes.sum())
    x = gen.normal(size=(4, 16))[y] + gen.normal(size=(len(y), 16))
    return x.astype(np.float32), y, np.repeat(np.arange(num_clients), sizes)
