"""A tiny network, one small problem and rounds that are compiled once per session."""

import dataclasses
import types as namespace

import jax
import numpy as np
import pytest

import algorithms
from fedjax_pfl import options, shapes, types
from launch import build
from models import stages
from tests import padded
from tests.algorithms import plain

WIDTHS = (8, 6)


def network(name="tiny", widths=WIDTHS, dropout=0.0, num_classes=4):
    """A multilayer perceptron, with dropout after every hidden layer."""
    hidden = [
        (f"dense{i}", stages.Dense(width, dropout=dropout))
        for i, width in enumerate(widths, start=1)
    ]
    return stages.chain(name, [*hidden, ("last", stages.Dense(num_classes, False))])


def sliced(rate=1.0):
    """Eight by eight hidden units at rate 1; a narrower one is leading slices of it."""
    width = round(8 * rate)
    return network("sliced", (width, width))._replace(
        at_width=lambda more, scaler=1.0: sliced(rate * more)
    )


def with_exits(num_classes=4):
    """Three stages of 8, 6 and 6 units, an exit of one layer after each."""
    trunks = [(f"s{i}", stages.Dense(width)) for i, width in enumerate((8, 6, 6), 1)]
    exits = {f"s{i}": stages.Dense(num_classes, False) for i in (1, 2, 3)}
    return stages.chain("with_exits", trunks, exits)


def with_norm(num_classes=4):
    """A convolution of three channels with batch norm, and a layer."""
    conv = stages.Conv(3, 3, pool=False, norm=True, bias=False)
    last = stages.Dense(num_classes, False)
    return stages.chain("with_norm", [("conv", conv), ("last", last)])


NETWORKS = {
    "tiny": network(),
    "twin": network("twin"),
    "noisy": network("noisy", dropout=0.5),
    "deeper": network("deeper", (10, 7, 6)),
    "wide": network("wide", (8, 5)),
    "sliced": sliced(),
    "with_exits": with_exits(),
    "with_norm": with_norm(),
}


def first_seed(tree):
    """The first seed's slice of a stacked tree."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def random_params(model, seed, shape=(8, 8, 1)):
    """Variables of numpy numbers, so that no initialisation is compiled."""
    gen = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (gen.normal(size=leaf.shape) * 0.3).astype(leaf.dtype),
        shapes.variables(model, shape),
    )


def watched():
    """The network `tiny`, and a list of the keys of its calls in train mode."""
    tiny, seen = NETWORKS["tiny"], []

    def forward(params, stats, h, **mode):
        if mode.get("key") is not None:
            words = jax.random.key_data(mode["key"])
            jax.debug.callback(lambda key: seen.append(key.tobytes()), words)
        return tiny.forward(params, stats, h, **mode)

    return tiny._replace(forward=forward), seen


@pytest.fixture(scope="session")
def problem(unequal):
    """Five clients of 10 to 40 examples, three of them a round, 12 proxy rows.

    Batches of 5: the proxy set has three (5, 5 and 2 rows), clients have 2 to 6 steps
    an epoch.
    """
    made = build.experiment(
        dataset=unequal,
        algo="cdkt",
        preset="none",
        num_clients=5,
        clients_per_round=3,
        batch_size=5,
        proxy_fraction=0.05,
        client_chunk=3,
        devices=1,
    )

    def task_of(server="tiny", clients=None, chunk=3, **more):
        """Models or their names; clients have the server's unless told."""
        server, clients = (
            NETWORKS[one] if isinstance(one, str) else one
            for one in (server, clients or server)
        )
        return made.task._replace(
            server_model=server,
            client_models=(clients,),
            execution=types.Execution(chunk),
        )._replace(**more)

    data = made.data.replace(partition=first_seed(made.data.partition))
    return namespace.SimpleNamespace(
        task_of=task_of,
        data=data,
        table=plain.Table(data),
        cohort=lambda round: padded.cohort(made.planner, 0, round),
        execution=types.Execution(3),
    )


@pytest.fixture(scope="session")
def start():
    """Makes round states whose clients and server are all different."""

    def make(server="tiny", clients=None, round=1, seed=0, equal=False):
        seeds = [seed if equal else seed + 1 + number for number in range(5)]
        rows = [random_params(NETWORKS[clients or server], one) for one in seeds]
        return types.RoundState(
            server=random_params(NETWORKS[server], seed),
            clients=jax.tree.map(lambda *leaves: np.stack(leaves), *rows),
            key=jax.random.key(3),
            round=np.int32(round),
        )

    return make


def jitted(module, hparams, task):
    """A round `(state, cohort, data, **floats)`; floats are traced as in a run."""
    static, floats = options.split_floats(hparams)

    @jax.jit
    def run(values, state, cohort, data):
        made = module.make(dataclasses.replace(static, **values), task)
        return made.round(state, cohort, data)

    def one_round(state, cohort, data, **changed):
        # What a round gives back lies on a mesh, for which it would be compiled again.
        state = jax.device_put(state, jax.devices()[0])
        return run(floats | changed, state, cohort, data)

    return one_round


@pytest.fixture(scope="session")
def compiled(problem):
    """Jitted rounds by structure; `floats` are traced."""
    cache = {}

    def get(
        algo,
        server="tiny",
        clients=None,
        chunk=3,
        floats=(),
        num_eligible=5,
        **structure,
    ):
        name = (algo, server, clients, chunk, num_eligible, *sorted(structure.items()))
        if name not in cache:
            module = algorithms.ALGORITHMS[algo]
            hparams = module.HParams(batch_size=5, **structure)
            task = problem.task_of(server, clients, chunk, num_eligible=num_eligible)
            cache[name] = jitted(module, hparams, task)

        def one_round(state, cohort=None, data=None, **changed):
            cohort = problem.cohort(int(state.round)) if cohort is None else cohort
            data = problem.data if data is None else data
            return cache[name](state, cohort, data, **dict(floats) | changed)

        return one_round

    return get
