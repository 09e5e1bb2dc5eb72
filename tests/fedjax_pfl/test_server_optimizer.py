"""The server's optimizers against numpy, and where they have no place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import ALGORITHMS
from fedjax_pfl import averaging, server_optimizer, types

RATE, BETA, BETA_2, TAU = 0.3, 0.6, 0.99, 1e-3


def by_hand(kind, changes):
    """x after a server's steps along changes f64[T, D], from zero (Algorithm 2)."""
    x, m = np.zeros_like(changes[0]), np.zeros_like(changes[0])
    v = np.full_like(x, TAU**2)
    for change in changes:
        if kind == "sgd":
            m = BETA * m + change
            x = x + RATE * m
            continue
        m = BETA * m + (1 - BETA) * change
        if kind == "adagrad":
            v = v + change**2
        elif kind == "yogi":
            v = v - (1 - BETA_2) * change**2 * np.sign(v - change**2)
        else:
            v = BETA_2 * v + (1 - BETA_2) * change**2
        x = x + RATE * m / (np.sqrt(v) + TAU)
    return x


@pytest.mark.parametrize("kind", ["sgd", "adam", "adagrad", "yogi"])
def test_steps_equal_numpy(kind):
    """Four rounds, whose changes are far above and below tau; statistics are a mean."""
    changes = np.random.default_rng(0).normal(size=(4, 6)) * 10.0 ** np.arange(-5, 1)
    hparams = averaging.Averaging(
        server_optimizer=kind, server_lr=RATE, server_momentum=BETA
    )
    tx = server_optimizer.make(hparams)
    old = types.Variables((jnp.zeros(6),), ({},))
    state = tx.init(old.params)
    for number, change in enumerate(changes):
        moved = old.params[0] + jnp.asarray(change, jnp.float32)
        stats = ({"mean": jnp.float32(number)},)
        mean = types.Variables((moved,), stats)
        old, state = jax.jit(lambda *a: server_optimizer.step(tx, *a))(state, old, mean)
        assert old.stats == stats
    expected = by_hand(kind, changes)
    np.testing.assert_allclose(old.params[0], expected, rtol=2e-4, atol=1e-7)


def test_a_step_of_one_along_the_change_is_the_mean():
    """sgd without momentum and with a rate of 1 is FedAvg."""
    tx = server_optimizer.make(averaging.Averaging(server_optimizer="sgd"))
    old = types.Variables((jnp.array([1.0, 2.0]),), ({},))
    mean = types.Variables((jnp.array([0.5, 8.0]),), ({},))
    new, _ = server_optimizer.step(tx, tx.init(old.params), old, mean)
    np.testing.assert_allclose(new.params[0], mean.params[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "kind", "momentum"),
    [
        ("fedavgm", "sgd", 0.9),
        ("fedadam", "adam", 0.9),
        ("fedyogi", "yogi", 0.9),
        ("fedadagrad", "adagrad", 0.0),
    ],
)
def test_names(name, kind, momentum):
    """The papers' names are FedAvg with an optimizer."""
    hparams = ALGORITHMS[name].HParams()
    assert (hparams.server_optimizer, hparams.server_momentum) == (kind, momentum)
    assert ALGORITHMS[name].make is ALGORITHMS["fedavg"].make
