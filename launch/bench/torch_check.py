"""FedAvg and FedPer beside PyTorch: `python -m launch.bench.torch_check --algo=fedavg`.

It takes the options of `launch.main`, without a proxy set and with plain SGD. The
vectorized rounds and a plain loop over clients and batches, as one would write it in
PyTorch, start from the same parameters and see the same batches. After each round it
prints the accuracy of both over the test rows of all clients, and how far the shared
parameters are apart. The package `torch` must be installed.

In float32 sums in another order make a few answers differ. With JAX_ENABLE_X64=1 in the
environment both compute in float64.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import boundary
from launch import ending
from launch import experiment as experiment_lib
from launch.config import flags
from launch.tables import loops

# The padding of the nets that PyTorch can have
PADDING = {"mlp": "valid", "fedavg_cnn": "valid", "lenet5": "valid", "cnn_same": "same"}
PLAIN = {
    "client_optimizer": "sgd",
    "client_lr_decay": 1.0,
    "clip_norm": 0.0,
    "head_epochs": 0,
    "aggregation": "examples",
    "layer_dropping": False,
    "server_optimizer": "none",
}


def check(experiment: experiment_lib.Experiment) -> None:
    """Refuses what the loop does not do, with a ValueError."""
    config, given = experiment.config, vars(experiment.hparams)
    other = [f"--{k}={given[k]}" for k, v in PLAIN.items() if v != given.get(k, v)]
    if config.algo not in ("fedavg", "fedper"):
        other.append(f"--algo={config.algo}")
    if config.model not in PADDING:
        other.append(f"--model={config.model}")
    if experiment.simulation.variants.count > 1:
        other.append("several seeds or points of a sweep")
    if other:
        raise ValueError(
            f"the loop is FedAvg's or FedPer's with plain SGD, one seed and --model="
            f"{', '.join(PADDING)}; it does not do {', '.join(other)}"
        )


def in_double(experiment: experiment_lib.Experiment) -> None:
    """Has the parameters and the images of a run before its first round in float64."""

    def double(x: Any) -> Any:
        return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    simulation = experiment.simulation
    experiment.data, simulation.data, state = jax.tree.map(
        double, (experiment.data, simulation.data, simulation.state)
    )
    simulation.load(0, state, simulation.totals, simulation.compile_seconds, {})


def in_torchs_order(params: Any) -> list[np.ndarray]:
    """Weights and biases as PyTorch has them: channels first, maps flattened so."""
    out, channels = [], 0
    for stage in params:
        kernel, bias = (np.asarray(stage["trunk"][n]) for n in ("kernel", "bias"))
        if kernel.ndim == 4:
            channels = kernel.shape[-1]
            kernel = kernel.transpose(3, 2, 0, 1)
        else:
            if channels:
                side = round((len(kernel) / channels) ** 0.5)
                kernel = kernel.reshape(side, side, channels, -1).transpose(2, 0, 1, 3)
                kernel, channels = kernel.reshape(-1, kernel.shape[-1]), 0
            kernel = kernel.T
        out += [kernel, bias]
    return out


class Loop:
    """The plain loop. `server` has all arrays, `heads` those of each client's head."""

    def __init__(self, torch: Any, experiment: experiment_lib.Experiment):
        config, hparams, data = experiment.config, experiment.hparams, experiment.data
        model = experiment.task.model
        params = jax.tree.map(lambda leaf: leaf[0], experiment.state.server.params)
        self.torch, self.experiment = torch, experiment
        self.net = loops.torch_net(torch, params, PADDING[config.model])
        arrays = map(np.ascontiguousarray, in_torchs_order(params))
        self.server = [torch.tensor(one) for one in arrays]
        self.net.to(self.server[0].dtype)
        cut = len(model.stage_names)
        if config.algo == "fedper":
            shape = experiment.task.example_shape
            cut = boundary.first_personal(hparams.personal_from, model, shape)
        self.num_shared = 2 * cut
        first = self.server[self.num_shared :]
        self.heads = [list(first) for _ in range(config.num_clients)]
        image, label = data.gather(jnp.arange(len(data.label)))
        image = torch.tensor(np.asarray(image))
        is_map = config.model != "mlp"
        self.image = image.movedim(-1, 1).contiguous() if is_map else image.flatten(1)
        self.label = torch.tensor(np.asarray(label, np.int64))
        momentum, decay = hparams.client_momentum, hparams.weight_decay
        lr = float(np.float32(hparams.client_lr))  # as here, also in float64
        given = {"lr": lr, "momentum": momentum, "weight_decay": decay}
        self.optimizer = functools.partial(torch.optim.SGD, **given)

    def _load(self, client: int) -> None:
        whole = [*self.server[: self.num_shared], *self.heads[client]]
        with self.torch.no_grad():
            for place, value in zip(self.net.parameters(), whole, strict=True):
                place.copy_(value)

    def round(self, number: int) -> None:
        """One round: each client trains, then the mean of the shared arrays."""
        total, weights = [0.0] * self.num_shared, 0
        for one in loops.planned(self.experiment, number, number + 1)[0, number]:
            self._load(one.client)
            given = self.net, self.optimizer, one.rows, (self.image, self.label)
            loops.torch_steps(self.torch, *given)
            trained = [one.detach().clone() for one in self.net.parameters()]
            self.heads[one.client] = trained[self.num_shared :]
            shared = trained[: self.num_shared]
            total = [t + one.weight * p for t, p in zip(total, shared, strict=True)]
            weights += one.weight
        self.server[: self.num_shared] = [t / weights for t in total]

    def distance(self) -> float:
        """The largest difference from the parameters of the run's server."""
        params = self.experiment.simulation.state.server.params
        ours = in_torchs_order(jax.tree.map(lambda leaf: leaf[0], params))
        pairs = zip(ours, self.server[: self.num_shared], strict=False)
        return max(float(np.abs(one - other.numpy()).max()) for one, other in pairs)

    def accuracy(self) -> float:
        """Right answers over all test rows of all clients."""
        test = self.experiment.data.partition.test
        rows, first, count = (
            np.asarray(x)[0] for x in (test.row, test.start, test.count)
        )
        right = 0
        for client, (begin, size) in enumerate(zip(first, count, strict=True)):
            self._load(client)
            chosen = self.torch.tensor(rows[begin : begin + size].astype(np.int64))
            with self.torch.no_grad():
                answer = self.net(self.image[chosen]).argmax(1)
            right += int((answer == self.label[chosen]).sum())
        return right / int(count.sum())


@ending.command
def command(argv: list[str]) -> None:
    """Runs both, and prints a line for each round and the largest difference."""
    with ending.refused():
        given = flags.parse(argv) | {"eval_every": 1, "devices": 1, "workdir": ""}
        torch = loops.imported_torch()
        is_double = jax.config.jax_enable_x64
        with jax.enable_x64(False):
            experiment = experiment_lib.experiment(**given)
            check(experiment)
            experiment.start()
        if is_double:
            in_double(experiment)
        loop = Loop(torch, experiment)
    largest = 0.0
    for number in range(experiment.config.rounds):
        experiment.run(until=number + 1, progress=False)
        loop.round(number)
        ours, theirs = experiment.metrics[-1]["client_accuracy_pooled"], loop.accuracy()
        largest = max(largest, abs(ours - theirs))
        print(
            f"round {number + 1}: {ours:.4f} here, {theirs:.4f} in PyTorch; "
            f"parameters differ by {loop.distance():.1e} at most",
            flush=True,
        )
    print(f"largest difference of accuracies {largest:.1e}")


if __name__ == "__main__":
    command()
