"""Many small clients: a data set of vectors, and options of runs on it."""

import numpy as np

OPTIONS = {
    "model": "narrow",
    "preset": "none",
    "partition": "iid",
    "batch_size": 4,
    "local_epochs": 1,
}


def drawn(num_clients):
    """(f4[10 K, 6], labels): ten examples for each client."""
    gen = np.random.default_rng(0)
    label = gen.integers(0, 4, 10 * num_clients)
    centre = gen.normal(size=(4, 6))
    return (centre[label] + gen.normal(size=(len(label), 6))).astype("f4"), label
