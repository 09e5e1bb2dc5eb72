"""Synthetic data: Gaussian blobs, learnable in a few steps. For tests and demos."""

from __future__ import annotations

import numpy as np

from data import dataset
from fedjax_pfl import rng


def blobs(
    num_rows: int, shape: tuple[int, ...], num_classes: int, *, seed: int = 0
) -> dataset.Dataset:
    """`num_rows` uint8 examples of `shape`, one noisy random pattern per class.

    Labels go round, 0, 1, ..., so that every class has its share.
    """
    gen = rng.generator(seed, "data.partition")
    patterns = gen.uniform(60, 200, (num_classes, *shape))
    label = np.arange(num_rows) % num_classes
    image = patterns[label] + gen.normal(0, 25, (num_rows, *shape))
    return dataset.Dataset(
        np.clip(image, 0, 255).astype(np.uint8),
        label.astype(np.int32),
        num_rows,
        num_classes,
    )
