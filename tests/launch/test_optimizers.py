"""Optimizers as a user gives them: by name, as objects, at the server."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from algorithms import local
from fedjax_pfl import local_training, options
from launch import build

pytestmark = pytest.mark.usefixtures("narrow")
GEN = np.random.default_rng(0)
X = GEN.normal(size=(48, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
COMMON = {
    "dataset": (X, Y, np.arange(48) // 12),
    "preset": "none",
    "rounds": 2,
    "batch_size": 12,
    "normalization": "none",
    "devices": 1,
}


def made(**given):
    """A small experiment."""
    return build.experiment(**{"algo": "fedavg", "model": "narrow"} | COMMON | given)


def ran(**given):
    """The same after its rounds."""
    experiment = made(**given)
    experiment.run(progress=False)
    return experiment


def loaded(folder, **given):
    """The run in a folder, with its data."""
    return build.load(folder, dataset=COMMON["dataset"], **given)


def chained(learning_rate):
    """A clip, AdamW and a cosine within a round."""
    return optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(optax.cosine_decay_schedule(learning_rate, 4), weight_decay=0.1),
    )


@pytest.fixture(scope="module")
def server():
    """Four clients of one batch: (start, the model of two rounds) by name."""
    names = "none", "sgd", "adam", "adagrad", "yogi"
    return {name: _server_of(name) for name in names}


def _server_of(name):
    more = {} if name == "none" else {"server_lr": 0.1, "server_momentum": 0.5}
    given = {"server_optimizer": name, "client_lr": 0.3, "local_epochs": 1} | more
    experiment = made(test_split="pool", **given)
    out = []
    for until in range(3):
        experiment.simulation.advance_to(until)
        out.append(jax.tree.map(np.asarray, experiment.client_model().variables.params))
    return out


def test_a_chain_equals_optax_alone():
    """One client's round is optax's own loop over its batches, with one global clip."""
    module = nn.Sequential([nn.Dense(7), nn.relu, nn.Dense(2)])
    given = {"model": module, "num_clients": 1, "partition": "iid", "rounds": 1}
    given |= {"dataset": (X, Y), "test_split": "pool", "local_epochs": 4}
    # One batch has all rows, so that their order does not matter.
    given["batch_size"] = len(X)
    experiment = made(client_optimizer=chained, client_lr=0.05, **given)
    start = jax.tree.map(jnp.asarray, experiment.client_model().variables.params)
    experiment.run(progress=False)
    rows = np.asarray(experiment.data.partition.train.row).ravel()
    rows = rows[rows >= 0]
    found = experiment.client_model().variables.params

    def loss(params):
        logits = experiment.client_model().model.forward(params, stats, X[rows])[0]
        pairs = optax.softmax_cross_entropy_with_integer_labels(logits, Y[rows])
        return pairs.mean()

    tx = chained(0.05)
    stats = ({},) * len(start)
    params, state = start, tx.init(start)
    for _ in range(4):
        update, state = tx.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, update)
    for one, other in zip(*map(jax.tree.leaves, (found, params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "yogi"])
def test_the_servers_optimizer_equals_numpy(name, server):
    """Two rounds along the mean change, that of the first round being FedAvg's."""
    start, plain, _ = map(jax.tree.leaves, server["none"])
    begin, first, _ = map(jax.tree.leaves, server[name])
    for x, same, mean, got in zip(start, begin, plain, first, strict=True):
        np.testing.assert_array_equal(x, same)
        change = np.float64(mean) - x
        step = change
        if name != "sgd":
            v = {"adam": 0.99e-6, "adagrad": 1e-6, "yogi": 1e-6}[name]
            v = v + (1 if name == "adagrad" else 0.01) * change**2
            if name == "yogi":
                v = 1e-6 - 0.01 * change**2 * np.sign(1e-6 - change**2)
            step = 0.5 * change / (np.sqrt(v) + 1e-3)
        np.testing.assert_allclose(got, x + 0.1 * step, rtol=1e-3, atol=2e-6)


def momentum(learning_rate):
    """What `--server_optimizer=sgd --server_momentum=0.9` is."""
    return optax.sgd(learning_rate, 0.9)


def test_the_servers_own_one_goes_on_over_rounds(tmp_path):
    """It equals the same one by name, also if it is stopped, resumed and swept."""
    given = {"rounds": 3, "server_lr": 0.7}
    named = ran(server_optimizer="sgd", server_momentum=0.9, **given)
    own = given | {"server_optimizer": momentum}
    made(**own, workdir=str(tmp_path / "run")).run(1, progress=False)
    with pytest.raises(ValueError, match="--server_optimizer=own_momentum was a cus"):
        loaded(tmp_path / "run")
    again = loaded(tmp_path / "run", server_optimizer=momentum)
    again.run(progress=False)
    swept = ran(**own | {"server_lr": None}, sweep={"server_lr": [0.1, 0.7]})
    expected = named.predict(None, X)
    np.testing.assert_array_equal(again.predict(None, X), expected)
    found = swept.predict(None, X, point={"server_lr": 0.7})
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_servers_own_one_leaves_what_never_travels():
    """FedBABU's head stays as it began, whatever decays at the server."""

    def decays(rate):
        return optax.chain(optax.add_decayed_weights(0.5), optax.sgd(rate))

    given = {"server_optimizer": decays, "server_lr": 1.0, "client_lr": 1e-6}
    experiment = made(algo="fedbabu", **given)
    before = [*map(jax.tree.leaves, experiment.client_model().variables.params)]
    experiment.run(progress=False)
    after = [*map(jax.tree.leaves, experiment.client_model().variables.params)]
    for one, other in zip(before[-1], after[-1], strict=True):
        np.testing.assert_array_equal(one, other)
    kernel = before[0][-1]
    np.testing.assert_allclose(after[0][-1], kernel / 4, rtol=1e-3, atol=1e-5)


def test_an_option_of_a_custom_algorithm():
    """It may have the option without those that belong to it."""
    field = options.option("none", "the server's step")
    bases = (local_training.LocalTraining,)
    kinds = [("server_optimizer", str, field)]
    hparams = dataclasses.make_dataclass("HParams", kinds, bases=bases, frozen=True)
    mine = SimpleNamespace(HParams=hparams, make=local.make, __name__="mine")
    found = made(algo=mine, server_optimizer=optax.adam, server_lr=None).hparams
    assert str(found.server_optimizer) == "own_adam"


def test_a_rate_of_one_is_noted():
    """Only where the user did not choose it and the optimizer scales its steps."""
    for given in ({"server_optimizer": optax.adam}, {"server_optimizer": "adam"}):
        assert "gets the learning rate 1, the default" in "".join(made(**given).notes)
    others = {"server_optimizer": "sgd"}, {"server_optimizer": optax.adam(0.1)}
    chosen = {"server_optimizer": optax.adam, "server_lr": 1.0}
    swept = {"server_optimizer": "adam", "sweep": {"server_lr": [0.1, 0.2]}}
    for given in ({}, *others, chosen, swept, {"algo": "fedadam"}):
        assert "learning rate 1" not in "".join(made(**given).notes), given


@pytest.mark.parametrize("name", ["fedavgm", "fedyogi"])
def test_stopped_and_resumed(name, tmp_path):
    """The moments are part of the state."""
    whole = ran(algo=name, rounds=3)
    stopped = made(algo=name, rounds=3, workdir=str(tmp_path / "run"))
    stopped.run(1, progress=False)
    again = loaded(tmp_path / "run")
    assert again.round == 1
    again.run(progress=False)
    pairs = (one.client_model().variables for one in (whole, again))
    for one, other in zip(*map(jax.tree.leaves, pairs), strict=True):
        np.testing.assert_array_equal(one, other)


def test_personal_methods_take_one():
    """Their own models are served as before; the server's is not the clients' mean."""
    one, other = (
        ran(algo="apfl", server_optimizer=kind, **more)
        for kind, more in (("none", {}), ("adam", {"server_lr": 0.01}))
    )
    assert one.predict(0, X).shape == other.predict(0, X).shape == (48, 2)
    assert not np.allclose(one.predict(None, X), other.predict(None, X), atol=1e-4)


def test_a_custom_one_belongs_to_a_run(tmp_path):
    """Another one is another run; a folder asks for it; the rate can be swept."""
    folder = str(tmp_path / "run")
    ran(client_optimizer=chained, workdir=folder)
    with pytest.raises(ValueError, match="own_chained was a custom optimizer; give"):
        loaded(folder)
    again = loaded(folder, client_optimizer=chained, rounds=3)
    assert (again.round, str(again.hparams.client_optimizer)) == (2, "own_chained")
    again.run(progress=False)
    with pytest.raises(ValueError, match="own_chained, not own_adamw"):
        loaded(folder, client_optimizer=optax.adamw)
    swept = ran(client_optimizer=optax.adamw, sweep={"client_lr": [0.001, 0.1]})
    first, last = (swept.predict(None, X, point=point) for point in swept.points)
    assert not np.allclose(first, last, atol=1e-3)


def test_a_fixed_one_has_its_own_rate(tmp_path):
    """It can be resumed, and options without an effect are refused."""
    folder = str(tmp_path / "run")
    tx = optax.adam(0.01)
    ran(client_optimizer=tx, workdir=folder)
    loaded(folder, client_optimizer=tx, rounds=3).run(progress=False)
    for more in ({"client_lr": 0.1}, {"sweep": {"client_lr": [0.1, 0.2]}}):
        with pytest.raises(ValueError, match="no effect with client_optimizer=own_"):
            made(client_optimizer=tx, **more)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"client_optimizer": "adamz"}, "--client_optimizer=adamz: expected one of"),
        ({"client_optimizer": 5}, "client_optimizer: expected a name, an optax"),
        (
            {"client_optimizer": optax.adamw, "weight_decay": 0.1},
            "--weight_decay=0.1 has no effect",
        ),
        (
            {"algo": "majority", "batch_size": None, "client_optimizer": optax.adamw},
            "--client_optimizer belongs to .*; --algo=majority has no such flag",
        ),
        (
            {"algo": "scaffold", "client_optimizer": optax.adamw},
            "--client_optimizer=own_adamw has no effect with scaffold",
        ),
        (
            {"algo": "scaffold", "server_optimizer": "adam"},
            "--server_optimizer=adam has no effect with scaffold, whose server has",
        ),
        (
            {"algo": "scaffold", "server_optimizer": optax.sgd},
            "--server_optimizer=own_sgd has no effect with scaffold",
        ),
        (
            {"algo": "fedadam", "server_optimizer": optax.adam},
            "server_optimizer=own_adam: fedadam is the name of a method with an opt",
        ),
        ({"server_optimizer": 5}, "server_optimizer: expected a name, an optax"),
        (
            {"server_optimizer": optax.sgd, "server_momentum": 0.9},
            "--server_momentum=0.9 has no effect with server_optimizer=own_sgd; omit",
        ),
        (
            {"server_optimizer": optax.sgd(0.1), "sweep": {"server_lr": [0.1, 0.2]}},
            "no effect with server_optimizer=own_.*, or give a function of the learn",
        ),
        (
            {"server_optimizer": optax.sgd, "eval_model": "stale"},
            "--eval_model=stale does not go with --server_optimizer=own_sgd",
        ),
        (
            {"algo": "cdkt", "server_optimizer": "adam"},
            "--server_optimizer belongs to .*; --algo=cdkt has no such flag",
        ),
        (
            {
                "algo": "depthfl",
                "model": None,
                "client_optimizer": optax.adamw,
                "optimizer_state": "persist",
            },
            "--optimizer_state=persist: .*; give reset",
        ),
    ],
)
def test_bad_input(given, reason):
    """One line each."""
    with pytest.raises(ValueError, match=reason) as error:
        made(**given)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_other_frames_take_a_custom_one():
    """Widths, and phases with a state that persists."""
    image = GEN.normal(size=(40, 8, 8, 1)).astype(np.float32)
    data = {"dataset": (image, np.arange(40) % 2, np.arange(40) // 10)}
    for algo, more in {
        "heterofl": {"model": "narrow", "level_mix": "1:1"},
        "fedict": {"model": "narrow", "optimizer_state": "persist"},
    }.items():
        experiment = ran(algo=algo, client_optimizer=optax.adamw, **data | more)
        assert np.isfinite(experiment.predict(0, image)).all(), algo


def test_a_mask_by_stage_keeps_its_state():
    """The moments of the second stage alone, in each of four clients' rows."""

    def masked(learning_rate):
        return optax.masked(optax.adam(learning_rate), (False, True))

    model, given = [nn.Dense(4), nn.Dense(2)], {"optimizer_state": "persist"}
    run = ran(model=model, client_optimizer=masked, **given)
    assert not [one for one in run.notes if "optimizer_state" in one]
    moments = [leaf.shape for leaf in jax.tree.leaves(run.state.opt_state)]
    assert sorted(moments) == sorted([(1, 4), *[(1, 4, 2), (1, 4, 4, 2)] * 2])


def test_noise_of_clients_and_of_servers_differs():
    """Between clients, rounds and seeds, though the key is the same."""

    def noisy(learning_rate):
        noise = optax.add_noise(1.0, 0.0, key=3)
        return optax.chain(optax.scale(0.0), noise, optax.sgd(learning_rate))

    def moves(of, **more):
        """What each round adds: f32[rounds, seeds, models, P]."""
        run = made(**{"num_seeds": 2, "local_epochs": 1} | more)
        run.start()
        states = [of(run)]
        for until in (1, 2):
            run.run(until, progress=False)
            states.append(of(run))
        return np.diff(np.array(states), axis=0)

    def flat(tree):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    def clients(run):
        return [[flat(run.params(c, seed=s)) for c in range(4)] for s in (0, 1)]

    def server(run):
        return [[flat(run.client_model(seed=s).variables.params)] for s in (0, 1)]

    for found in (
        moves(clients, algo="local", client_optimizer=noisy),
        moves(server, algo="fedavg", server_optimizer=noisy, client_lr=0.0),
    ):
        rows = found.reshape(-1, found.shape[-1])
        assert (rows.std(1) > 0).all()
        apart = np.corrcoef(rows) - np.eye(len(rows))
        assert np.abs(apart).max() < 0.5, apart
