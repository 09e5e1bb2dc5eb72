"""What is timed, on Fashion-MNIST's 60,000 train images, partition seed 0."""

from __future__ import annotations

from typing import Any

# The algorithm of a command that names none.
ALGORITHM = "fedavg"
COMMON = {
    "dataset": "fashion_mnist",
    "test_split": "official",
    "partition_seed": 0,
    "summary": "last",
}
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
        "batch_size": 20,
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
        "local_epochs": 1,
        "client_optimizer": "adam",
        "client_lr": 0.01,
        "batch_size": 20,
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
        "local_epochs": 1,
        "batch_size": 20,
        "model": "depth_convnet",
    },
    # A thousand clients of 60 examples, all in each round; five peers where there are.
    "w5": {
        "num_clients": 1000,
        "partition": "client_dirichlet",
        "partition_alpha": 0.5,
        "clients_per_round": 0,  # all of them
        "examples_per_client": 60,
        "local_epochs": 1,
        "client_optimizer": "sgd",
        "client_lr": 0.05,
        "client_momentum": 0.0,
        "batch_size": 20,
        "model": "m1",
    },
}
