"""MOON against numpy, and its loss where a representation is 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import moon
from fedjax_pfl import shapes
from tests.algorithms import conftest, plain

FLOATS = {
    "client_lr": 0.1,
    "client_lr_decay": 0.5,
    "contrastive_weight": 2.0,
    "temperature": 0.4,
}


def normal(z):
    """Rows of length 1, and their lengths; a row of 0 stays."""
    size = np.sqrt((z**2).sum(1, keepdims=True))
    size = np.where(size > 0, size, 1)
    return z / size, size


def contrast(z, near, far, tau):
    """(the mean of -log(e^n / (e^n + e^f)), its gradient to z); n, f: cosines / tau."""
    (u, size), (near, _), (far, _) = map(normal, (z, near, far))
    ends = np.exp((u * near).sum(1) / tau), np.exp((u * far).sum(1) / tau)
    share = ends[0] / sum(ends)
    along = (1 - share)[:, None] * (far - near) / tau
    slope = (along - (along * u).sum(1, keepdims=True) * u) / size
    return -np.log(share).mean(), slope / len(z)


def reference(state, cohort, table, values):
    """Algorithm 1: cross-entropy plus mu l_con, from w^t."""
    own = {}
    for one in plain.clients(state, cohort, table):

        def extra(params, position, rows, fixed=(one.server, one.own)):
            x = table.images(rows)
            every = [plain.activations(one, x) for one in (params, *fixed)]
            _, slope = contrast(*(acts[-2] for acts in every), values["temperature"])
            slope = values["contrastive_weight"] * slope
            return plain.backward(params, every[0], {len(params) - 1: slope})

        own[one.number] = one.train(one.server, one.sgd(values), extra=extra)
    return plain.averaged(own, table), own


def test_rounds_equal_a_numpy_reference(compiled, start, problem):
    """Every option matters; a client keeps what it sent; a model goes each way."""
    run = compiled("moon", floats=FLOATS)
    changes = dict.fromkeys(FLOATS, 0.3)
    given = run, reference, start(), problem, FLOATS
    steps = plain.follow(*given, changes=changes, rtol=0, atol=1e-5)
    made = moon.make(moon.HParams(), problem.task_of())
    size = shapes.tree_bytes(plain.server(steps[-1].after))
    plain.assert_both_ways(made, steps[-1].sent, size)
    assert made.serving is None


def test_the_references_slope():
    """Against differences of its own loss."""
    gen = np.random.default_rng(0)
    z, near, far = gen.normal(size=(3, 4, 5))
    _, slope = contrast(z, near, far, 0.4)
    for index in np.ndindex(z.shape):
        move = np.zeros_like(z)
        move[index] = 1e-6
        up, down = (contrast(z + s * move, near, far, 0.4)[0] for s in (1, -1))
        np.testing.assert_allclose(slope[index], (up - down) / 2e-6, atol=1e-8)


def test_a_first_round_from_equal_models_is_fedavgs(compiled, start):
    """z_glob and z_prev are the same, so that nothing is pulled anywhere."""
    state = start(equal=True)
    after, *_ = compiled("moon")(state, **FLOATS)
    rates = {"client_lr": 0.1, "client_lr_decay": 0.5}
    expected, *_ = compiled("fedavg")(state.replace(clients=()), **rates)
    assert not plain.differs(after.server, expected.server, 1e-6)


def test_the_last_model_has_its_own_statistics(compiled, start):
    """z_prev is of the client's whole model."""
    run, state = compiled("moon", "with_norm", floats=FLOATS), start("with_norm")
    state = state.replace(server=plain.sound(state.server))
    found = []
    for size in (1.0, 0.25):
        after, *_ = run(state.replace(clients=plain.sound(state.clients, size)))
        found.append(after.server.params)
    assert plain.differs(*found, 1e-5)


def test_a_representation_of_zero_has_no_slope():
    """Where all units of the last hidden layer are off."""
    zero, one = jnp.zeros(3), jnp.ones(3)
    value, slope = jax.value_and_grad(moon.similarity)(zero, one)
    assert value == 0 and np.isfinite(slope).all()
    assert moon.similarity(one, 2 * one) == pytest.approx(1)


def test_a_model_of_one_stage_is_refused(problem):
    """It has no representation."""
    task = problem.task_of(conftest.network("one", ()))
    with pytest.raises(ValueError, match="--model=one has one layer"):
        moon.make(moon.HParams(), task)
