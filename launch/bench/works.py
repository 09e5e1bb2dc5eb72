"""The works: w1 to w5 on Fashion-MNIST's train images, and w6 on drawn vectors."""

from typing import Any

import numpy as np

# The default algorithm of the command
ALGORITHM = "fedavg"
COMMON = {
    "dataset": "fashion_mnist",
    "test_split": "official",
    "partition_seed": 0,
    "summary": "last",
    "local_epochs": 1,
    "batch_size": 20,
}


def lognormal(num_clients: int = 2000, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Arrays (x, y, client) of clients with very unequal numbers of examples.

    Sizes are exp(N(2.5, 1.5)), clipped to 5..10,000. Examples are vectors of 16 numbers
    around the centre of their class, of which there are four.
    """
    gen = np.random.default_rng(seed)
    sizes = np.exp(gen.normal(2.5, 1.5, num_clients)).clip(5, 10_000).astype(int)
    y = gen.integers(4, size=sizes.sum())
    x = gen.normal(size=(4, 16))[y] + gen.normal(size=(len(y), 16))
    return x.astype(np.float32), y, np.repeat(np.arange(num_clients), sizes)


WORKS: dict[str, dict[str, Any]] = {
    # 100 clients of unequal sizes, a large net, small batches.
    "w1": {
        "num_clients": 100,
        "partition": "dirichlet",
        "partition_alpha": 0.5,
        "clients_per_round": 10,
        "local_epochs": 2,
        "client_optimizer": "sgd",
        "client_lr": 0.05,
        "model": "fedavg_cnn",
    },
    # 50 unequal clients, a small net, large batches.
    "w2": {
        "num_clients": 50,
        "partition": "dirichlet",
        "partition_alpha": 0.1,
        "clients_per_round": 10,
        "local_epochs": 4,
        "client_optimizer": "adam",
        "client_lr": 0.01,
        "batch_size": 128,
        "model": "m1",
    },
    # Many clients of 60 examples each.
    "w3": {
        "num_clients": 1000,
        "partition": "client_dirichlet",
        "partition_alpha": 0.5,
        "clients_per_round": 100,
        "client_optimizer": "adam",
        "client_lr": 0.01,
        "model": "m1",
    },
    # Clients of 60 examples that hold one to four levels of a net with exits.
    "w4": {
        "num_clients": 100,
        "partition": "iid",
        "clients_per_round": 20,
        "examples_per_client": 60,
        "image_size": 32,
        "image_channels": 3,
        "model": "depth_convnet",
    },
    # A thousand clients of 60 examples, all in each round.
    "w5": {
        "num_clients": 1000,
        "partition": "client_dirichlet",
        "partition_alpha": 0.5,
        "clients_per_round": 0,  # all of them
        "examples_per_client": 60,
        "client_optimizer": "sgd",
        "client_lr": 0.05,
        "client_momentum": 0.0,
        "model": "m1",
    },
    # 2,000 clients of lognormal sizes, a hundred a round.
    "w6": {
        "dataset": lognormal,
        "partition": "natural",
        "test_split": "client_share",
        "clients_per_round": 100,
        "client_optimizer": "sgd",
        "client_lr": 0.05,
        "model": "mlp",
    },
}
