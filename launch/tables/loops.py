"""Rounds of FedAvg as plain loops: one client after another, in JAX and in PyTorch.

Both make the same optimizer steps (plain SGD) as the vectorized rounds, on the same
batches, from the same parameters. The JAX loop calls one compiled function per client,
which trains it and adds its model to the mean. The PyTorch loop is the usual one: a
model, an optimizer and a loop over batches.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl import options
from launch.experiment import Experiment


class Batches(NamedTuple):
    """A client's batches in a round."""

    rows: np.ndarray  # of the data set, int32[S, B] padded with -1
    weight: int  # its number of train examples
    client: int


# The clients of rounds by the seed's index and the round
Rounds = dict[tuple[int, int], list[Batches]]


@dataclasses.dataclass
class Loop:
    """A plain loop over the rounds of all variants (seeds and points of a sweep).

    Attributes:
        experiment: The rounds to follow.
        servers: The present server of each variant.
        trained: Returns a server after a round of some clients at a learning rate.
        params_of: Returns a server's parameters, as in a RoundState.
        compile: Compiles what `trained` needs for some rounds.
        plans: The rounds that are prepared.
    """

    experiment: Experiment
    servers: list[Any]
    trained: Callable[[Any, Sequence[Batches], float], Any]
    params_of: Callable[[Any], Any] = lambda server: server
    compile: Callable[[Rounds], None] = lambda plans: None
    plans: Rounds = dataclasses.field(default_factory=dict)

    def prepare(self, first: int, end: int) -> None:
        """Makes the batches of the rounds `first` to `end - 1`, and compiles."""
        self.plans.update(planned(self.experiment, first, end))
        self.compile(self.plans)

    def run(self, first: int, end: int) -> None:
        """Runs the rounds `first` to `end - 1`, and waits for them."""
        for index, (seed, rate) in enumerate(_variants(self.experiment)):
            for round in range(first, end):
                server, clients = self.servers[index], self.plans[seed, round]
                self.servers[index] = self.trained(server, clients, rate)
        jax.block_until_ready(self.servers)

    def params(self) -> list[Any]:
        """The server's parameters of every variant."""
        return list(map(self.params_of, self.servers))


def check(experiment: Experiment) -> None:
    """Raises a ValueError for options that the loops do not follow."""
    config, given = experiment.config, vars(experiment.hparams)
    expected = {
        "client_optimizer": "sgd",
        "client_momentum": 0.0,
        "client_lr_decay": 1.0,
        "weight_decay": 0.0,
        "clip_norm": 0.0,
        "aggregation": "examples",
    }
    other = [f"--{k}={given[k]}" for k, v in expected.items() if v != given.get(k, v)]
    swept = {name for point in experiment.points for name in point} - {"client_lr"}
    other += [f"--sweep={name}" for name in sorted(swept)]
    if config.algo != "fedavg" or config.model != "mlp" or other:
        raise ValueError(
            "a plain loop is FedAvg's with --model=mlp and plain SGD, not "
            + ", ".join([f"--algo={config.algo}", f"--model={config.model}", *other])
        )


def planned(experiment: Experiment, first: int, end: int) -> Rounds:
    """The clients of the rounds `first` to `end - 1`, for all seeds."""
    return {
        (seed, round): list(_cohort(experiment, seed, round))
        for seed in range(len(experiment.seeds))
        for round in range(first, end)
    }


def _cohort(experiment: Experiment, seed: int, round: int) -> Iterator[Batches]:
    drawn = experiment.planner.cohort(seed, round)
    plan = drawn.plans["local"]
    owned = jax.tree.map(lambda leaf: leaf[seed], experiment.data.partition.train)
    rows_per_device = len(drawn.client_id) // len(plan.position)
    for place in np.flatnonzero(drawn.row_mask):
        size, batch = int(plan.num_rows[place]), plan.batch_size
        epochs = int(plan.num_steps[place]) // max(-(-size // batch), 1)
        first, client = int(plan.first[place]), int(drawn.client_id[place])
        position = plan.position[place // rows_per_device]
        position = position[first : first + epochs * size]
        rows = owned.row[owned.start[client] + position]
        padding = ((0, 0), (0, -size % batch))
        rows = np.pad(rows.reshape(epochs, size), padding, constant_values=-1)
        rows, weight = rows.reshape(-1, batch).astype(np.int32), owned.count[client]
        yield Batches(rows, int(weight), client)


def _variants(experiment: Experiment) -> list[tuple[int, float]]:
    """(index of the seed, learning rate) of every variant."""
    rate = experiment.hparams.client_lr
    return [
        (seed, point.get("client_lr", rate))
        for seed in range(len(experiment.seeds))
        for point in experiment.points
    ]


def _begin(experiment: Experiment) -> list[Any]:
    """The server's first parameters of every variant."""
    experiment.start()
    params = jax.tree.map(np.asarray, experiment.state.server.params)
    every = range(len(_variants(experiment)))
    return [jax.tree.map(lambda leaf, v=v: leaf[v], params) for v in every]


def in_jax(experiment: Experiment) -> Loop:
    """The loop in JAX."""
    check(experiment)
    model, data = experiment.task.model, experiment.data.replace(partition=None)
    stats = jax.tree.map(
        lambda leaf: leaf[0], experiment.simulation.template().server.stats
    )

    def loss(params, image, label, mask):
        out, _ = model.forward(params, stats, image)
        nats = optax.softmax_cross_entropy_with_integer_labels(out, label)
        return jnp.where(mask, nats, 0).sum() / jnp.maximum(mask.sum(), 1)

    @jax.jit
    def update(params, total, data, rows, num_steps, rate, weight):

        def step(index, own):
            image, label = data.gather(rows[index])
            grads = jax.grad(loss)(own, image, label, rows[index] >= 0)
            return jax.tree.map(lambda p, g: p - rate * g, own, grads)

        own = jax.lax.fori_loop(0, num_steps, step, params)
        return jax.tree.map(lambda t, p: t + weight * p, total, own)

    @jax.jit
    def mean(total, weight):
        return jax.tree.map(lambda leaf: leaf / weight, total)

    def padded(batches: Batches) -> np.ndarray:
        """Its rows, padded to a power of two so that few programs are compiled."""
        room = 1 << (len(batches.rows) - 1).bit_length()
        more = room - len(batches.rows)
        return np.pad(batches.rows, ((0, more), (0, 0)), constant_values=-1)

    def trained(params: Any, clients: Sequence[Batches], rate: float) -> Any:
        total, weights = jax.tree.map(jnp.zeros_like, params), 0
        for one in clients:
            count = np.int32(len(one.rows))
            numbers = np.float32(rate), np.float32(one.weight)
            total = update(params, total, data, padded(one), count, *numbers)
            weights += one.weight
        return mean(total, np.float32(weights))

    every = [jax.tree.map(jnp.asarray, one) for one in _begin(experiment)]

    def compile(plans: Rounds) -> None:
        for shape in {padded(one).shape for found in plans.values() for one in found}:
            rows, none = np.full(shape, -1, np.int32), np.int32(0)
            update(every[0], every[0], data, rows, none, *np.zeros(2, np.float32))
        jax.block_until_ready(mean(every[0], np.float32(1)))

    return Loop(experiment, every, trained, compile=compile)


def torch_net(torch: Any, params: tuple[Any, ...], padding: str = "valid") -> Any:
    """Convolutions with a 2x2 pool, then affine layers, in the shapes of `params`."""
    layers: list[Any] = []
    for stage in params:
        shape = stage["trunk"]["kernel"].shape
        if len(shape) == 4:
            side, _, channels, features = shape
            conv = torch.nn.Conv2d(channels, features, side, padding=padding)
            layers += [conv, torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
            continue
        if layers and isinstance(layers[-1], torch.nn.MaxPool2d):
            layers.append(torch.nn.Flatten())
        layers += [torch.nn.Linear(*shape), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def torch_round(
    torch: Any,
    server: Any,
    client: Any,
    clients: Sequence[Batches],
    examples: tuple[Any, Any],
    optimizer: Callable[[Any], Any],
) -> None:
    """One round of FedAvg in PyTorch, after which `server` has the clients' mean.

    `server` and `client` are modules of one architecture, `examples` the (images,
    labels) of the data set, and `optimizer` makes a client's optimizer from its
    parameters.
    """
    state = {k: v.clone() for k, v in server.state_dict().items()}
    total = {k: torch.zeros_like(v) for k, v in state.items()}
    weights = 0
    for one in clients:
        client.load_state_dict(state)
        torch_steps(torch, client, optimizer, one.rows, examples)
        for name, value in client.state_dict().items():
            total[name] += one.weight * value
        weights += one.weight
    server.load_state_dict({k: v / weights for k, v in total.items()})


def torch_steps(
    torch: Any,
    net: Any,
    optimizer: Callable[[Any], Any],
    batches: Sequence[np.ndarray],
    examples: tuple[Any, Any],
) -> None:
    """Trains a client's module in place, one step for each batch of rows, -1 = none.

    `optimizer` and `examples` are those of `torch_round`.
    """
    image, label = examples
    tx = optimizer(net.parameters())
    for rows in batches:
        chosen = torch.from_numpy(rows[rows >= 0]).to(image.device)
        tx.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(image[chosen]), label[chosen])
        loss.backward()
        tx.step()


def imported_torch() -> Any:
    """The package `torch`; a ValueError says that it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"torch is not installed ({options.reason(error)})") from error
    return torch


def in_torch(experiment: Experiment) -> Loop:
    """The loop in PyTorch; raises a ValueError if it is not installed."""
    check(experiment)
    torch = imported_torch()
    # Such small operations take longer on several threads.
    torch.set_num_threads(1)
    data = experiment.data
    image, label = data.gather(jnp.arange(len(data.label)))
    image = torch.tensor(np.asarray(image)).flatten(1)
    examples = image, torch.tensor(np.asarray(label, np.int64))

    def module(params: Any) -> Any:
        net = torch_net(torch, params)
        for stage, dense in zip(params, net[::2], strict=True):
            kernel, bias = (torch.tensor(stage["trunk"][n]) for n in ("kernel", "bias"))
            dense.load_state_dict({"weight": kernel.T, "bias": bias})
        return net

    begin = _begin(experiment)
    servers, client = [module(params) for params in begin], module(begin[0])

    def trained(server: Any, clients: Sequence[Batches], rate: float) -> Any:
        sgd = functools.partial(torch.optim.SGD, lr=rate)
        torch_round(torch, server, client, clients, examples, sgd)
        return server

    def params_of(server: Any) -> Any:
        def stage(dense: Any) -> dict[str, Any]:
            bias, weight = dense.bias.detach(), dense.weight.detach()
            return {"trunk": {"bias": bias.numpy(), "kernel": weight.numpy().T}}

        return tuple(map(stage, server[::2]))

    return Loop(experiment, servers, trained, params_of)


LOOPS = {"loop": in_jax, "torch": in_torch}
