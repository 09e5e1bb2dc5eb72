"""FedBN against a plain loop: batch norms stay with their clients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from algorithms import fedbn
from fedjax_pfl import types
from models import own as own_lib
from tests.algorithms import conftest, plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5}
MODEL = conftest.NETWORKS["with_norm"]


def norms(variables):
    """The batch norm of the convolution: its bias and scale, mean and variance."""
    affine, moving = variables.params[0]["trunk"]["norm"], variables.stats[0]
    return affine, moving["trunk"]["norm"]


def with_norms(variables, mine):
    """A copy with another batch norm."""
    conv = {"trunk": variables.params[0]["trunk"] | {"norm": mine[0]}}
    return types.Variables(
        (conv, *variables.params[1:]), ({"trunk": {"norm": mine[1]}}, {})
    )


def state_of(start):
    """A server and clients whose batch norms differ, with positive variances."""
    state = start("with_norm")
    rows = state.clients._replace(stats=jax.tree.map(np.abs, state.clients.stats))
    own = tuple(jax.tree.leaves(norms(rows)))
    server = state.server._replace(stats=jax.tree.map(np.abs, state.server.stats))
    return state.replace(server=server, clients=own)


def own_norms(state, number):
    bias, scale, mean, var = (leaf[number] for leaf in state.clients)
    return {"bias": bias, "scale": scale}, {"mean": mean, "var": var}


@jax.jit
def step(variables, image, label, rate):
    def loss(params):
        logits, stats = MODEL.forward(params, variables.stats, image, train=True)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], 1)
        return -chosen.mean(), stats

    grads, stats = jax.grad(loss, has_aux=True)(variables.params)
    params = jax.tree.map(lambda w, g: w - rate * g, variables.params, grads)
    return types.Variables(params, stats)


def test_rounds_equal_a_plain_loop(compiled, start, problem):
    """The rest is averaged; norms of clients that are absent stay, bit for bit."""
    run, state = compiled("fedbn", "with_norm", floats=FLOATS), state_of(start)
    made = fedbn.make(fedbn.HParams(), problem.task_of("with_norm"))
    assert made.server is None
    for _ in range(2):
        cohort, trained = problem.cohort(int(state.round)), {}
        for one in plain.clients(state, cohort, problem.table):
            model = with_norms(state.server, own_norms(state, one.number))
            for _, rows, _ in one.steps():
                image, label = problem.data.gather(jnp.asarray(rows))
                model = step(model, image, label, one.rate(FLOATS))
            trained[one.number] = model
        after, _, sent = run(state, cohort)
        weight = problem.table.train.count[list(trained)]
        rows = plain.stack([one.params for one in trained.values()])
        mean = jax.tree.map(functools.partial(np.average, axis=0, weights=weight), rows)
        server = with_norms(types.Variables(mean, ({}, {})), norms(state.server))
        chex.assert_trees_all_close(after.server, server, rtol=1e-5, atol=1e-5)
        assert plain.differs(after.server.params[0], state.server.params[0], 1e-3)
        for number in range(5):
            found = own_norms(after, number)
            if number in trained:
                expected = norms(trained[number])
                chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
                assert plain.differs(found, own_norms(state, number), 1e-3)
            else:
                chex.assert_trees_all_equal(found, own_norms(state, number))
        size = sum(map(np.size, jax.tree.leaves(state.server.params))) - 6
        plain.assert_both_ways(made, sent, 4 * size)
        state = after
    for number, one in enumerate(plain.served(made, state)):
        expected = with_norms(state.server, own_norms(state, number))
        chex.assert_trees_all_equal(one, plain.host(expected))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Dense(3)(x.reshape(len(x), -1))
        x = linen.BatchNorm(use_running_average=not train)(x)
        return linen.Dense(4)(linen.LayerNorm()(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = (
            nnx.Linear(64, 3, rngs=rngs),
            nnx.BatchNorm(3, rngs=rngs),
        )
        self.last = nnx.Linear(3, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x.reshape(len(x), -1))))


@pytest.mark.parametrize("given", [Linen(), Nnx])
def test_norms_of_own_modules_are_found(given):
    """Scale, bias, mean and variance; a layer norm travels."""
    model = own_lib.chain(given)
    found = fedbn.without_norms(model, (8, 8, 1))
    assert [leaf.shape for leaf in found.kept(found.like)] == [(3,)] * 4


def test_a_model_without_batch_norm_is_refused(problem):
    line = "--algo=fedbn: --model=tiny has no batch norm.*--algo=fedavg"
    with pytest.raises(ValueError, match=line) as error:
        fedbn.make(fedbn.HParams(), problem.task_of())
    is_image = len(problem.task_of().example_shape) == 3
    assert ("resnet18" in str(error.value)) == is_image
