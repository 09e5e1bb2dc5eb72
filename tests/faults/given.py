"""Small data and options that the faults share."""

import numpy as np

generator = np.random.default_rng(0)
y = generator.integers(0, 4, 400)
X = (generator.normal(size=(400, 8, 8, 1)) + y[:, None, None, None]).astype("f")
xv = X.reshape(400, -1)
base = {
    "algo": "fedavg", "model": "mlp", "num_clients": 8, "clients_per_round": 4,
    "rounds": 4, "local_epochs": 1, "summary": "mean_last10", "seed": 3,
    "preset": "none",
}  # fmt: skip
