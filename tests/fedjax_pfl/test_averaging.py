"""The rounds of FedAvg's family, with a client update that needs no training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import (
    averaging,
    boundary,
    each_client,
    execution,
    local_training,
    program,
    shapes,
    types,
)
from tests.fedjax_pfl import small

SIZES = [4, 1, 3, 2]
MODEL = small.linear()


def task(chunk):
    """Four clients of one linear model."""
    how = execution.Execution(chunk)
    return types.Task(MODEL, (MODEL,), np.zeros(4), 4, 4, 0, 4, 4, (3,), how)


def trained(variables, opt_state, loss):
    """What local training would have returned."""
    loss = (jnp.float32(loss), jnp.int32(1))
    return each_client.Trained(*variables, opt_state, loss, persists=True)


def moved(variables, by):
    """All entries moved by a number."""
    return jax.tree.map(lambda leaf: leaf + by, variables)


def client_update(client, server):
    """The model moves by the client's id, the private row counts participations."""
    by = client.id.astype(jnp.float32)
    kept = jax.tree.map(lambda leaf: leaf + 10 * by, client.opt_state)
    return trained(moved(server, by), kept, by), client.own + 1


def without_rows(client, server):
    """The same where clients keep nothing."""
    assert client.own == ()
    return client_update(client.replace(own=0), server)[0]


@pytest.fixture(scope="module")
def tables():
    """Examples of four clients, and a cohort of two of them with a padding row."""
    data = small.tables(SIZES)
    plans = {
        "local": jax.tree.map(lambda x: x[jnp.array([2, 0, 0])], small.plan(SIZES))
    }
    return data, small.cohort([2, 4, 0], 4, plans)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(("kind", "expected"), [("examples", 6 / 7), ("uniform", 1.0)])
def test_a_round(tables, kind, expected, chunk):
    """The server takes the mean of the cohort's models; rows and states are kept."""
    data, cohort = tables
    hparams = averaging.Averaging(
        aggregation=kind, client_momentum=0.9, optimizer_state="persist"
    )
    given = hparams, task(chunk)
    method = averaging.make(*given, client_update, own=lambda server: jnp.zeros(()))
    state = program.first_state(method, *given, data, jax.random.key(0))
    np.testing.assert_array_equal(state.clients, np.zeros(4))
    after, metrics, sent = jax.jit(method.round)(state, cohort, data)
    ((name, (model, server)),) = method.server(after, data).items()
    assert (name, model) == ("global", MODEL)
    # Clients 2 and 0, of 3 and 4 examples, moved by their ids.
    before = state.server.params[0]["w"]
    np.testing.assert_allclose(server.params[0]["w"], before + expected, rtol=1e-5)
    np.testing.assert_array_equal(after.clients, [1, 0, 1, 0])
    (momentum,) = jax.tree.leaves(after.opt_state)
    np.testing.assert_array_equal(momentum[:, 0, 0], [0, 0, 20, 0])
    assert tuple(map(float, metrics["train_loss"])) == (2, 2)
    assert int(after.round) == 1
    size = shapes.model_bytes(MODEL, (3,))
    kinds = {(one.name, one.direction, one.num_bytes) for one in method.messages}
    assert kinds == {("model down", "down", size), ("model up", "up", size)}
    assert sent == {"model down": 1, "model up": 1}


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (lambda out: out[0], "a Trained, expected .Trained, the client's new private"),
        (lambda out: (out[0].variables, out[1]), "returned a tuple, expected .Trained"),
        (
            lambda out: (out[0], out[1].astype(int)),
            "3 updates return int32.3. for",
        ),
        (lambda out: (out[0], out[1][None]), "3 updates return float32.3, 1. for them"),
        (lambda out: (out[0], (out[1],)), "is built in another way than .client.own."),
    ],
)
def test_updates_that_return_something_else(tables, out, words):
    """A row of another shape would be broadcast, of another type converted."""
    data, cohort = tables

    def other(client, server):
        return out(client_update(client, server))

    given = averaging.Averaging(), task(1), other
    method = averaging.make(*given, own=lambda server: 0.0)
    with pytest.raises(ValueError, match=words):
        method.round(method.init(data, jax.random.key(0)), cohort, data)


def test_clients_may_keep_nothing(tables):
    """Then no row is made, and the update returns what was trained alone."""
    data, cohort = tables
    method = averaging.make(averaging.Averaging(), task(1), without_rows)
    state = method.init(data, jax.random.key(0))
    assert state.clients == () and state.opt_state == ()
    after, *_ = jax.jit(method.round)(state, cohort, data)
    np.testing.assert_allclose(
        after.server.params[0]["w"], state.server.params[0]["w"] + 6 / 7, rtol=1e-5
    )
    assert after.clients == ()


@pytest.mark.parametrize("optimizer", ["none", "sgd"])
def test_who_serves(tables, optimizer):
    """The server's model, unless an algorithm says otherwise, from that model alone."""
    data, cohort = tables
    hparams = averaging.Averaging(server_optimizer=optimizer)
    assert averaging.make(hparams, task(1), client_update).serving is None
    seen = []

    def serving(state, cohort, data):
        seen.append(state.server)
        return ()

    made = averaging.make(hparams, task(1), client_update, serving=serving)
    state = made.init(data, jax.random.key(0))
    assert made.serving(state, cohort, data) == ()
    (model,) = seen
    assert isinstance(model, types.Variables)


def test_a_step_leaves_what_does_not_travel(tables):
    """Else clients would begin with another part that nobody sent them."""
    data, cohort = tables
    model = small.linear(num_exits=2)
    given = {
        "sent": boundary.divided([True, False], model, (3,)),
        "step": lambda server, mean, key: moved(mean, 1.0),
    }
    of_both = task(1)._replace(client_models=(model,), server_model=model)
    method = averaging.make(averaging.Averaging(), of_both, without_rows, **given)
    state = method.init(data, jax.random.key(0))
    after, *_ = jax.jit(method.round)(state, cohort, data)
    (first, kept), (new, still) = state.server.params, after.server.params
    assert (new["w"] != first["w"]).all() and (kept["w"] == still["w"]).all()


@pytest.mark.parametrize("optimizer", ["none", "sgd"])
def test_what_is_sent_and_what_the_server_does_with_it(tables, optimizer):
    """A mean of uploads, a key of the round, and half of the step by an optimizer."""
    data, cohort = tables

    def upload(client, server, trained):
        by = trained.variables.params[0]["w"] - server.params[0]["w"]
        return {"square": by.mean() ** 2, "count": client.plan.num_steps}

    def step(server, mean, key):
        drawn = jax.random.key_data(key).sum() % 97 * 1.0
        return moved(server, mean["square"] + 100 * mean["count"] + 1e4 * drawn)

    hparams = averaging.Averaging(server_optimizer=optimizer, server_lr=0.5)
    given = {"upload": upload, "step": step, "upload_bytes": 8}
    method = averaging.make(hparams, task(1), without_rows, **given)
    state, drawn = method.init(data, jax.random.key(0)), []
    plans = cohort.plans["local"].num_steps
    for _ in range(2):
        after, *_ = jax.jit(method.round)(state, cohort, data)
        (_, (_, old)), (_, (_, new)) = (
            *method.server(state, data).items(),
            *method.server(after, data).items(),
        )
        # Clients 2 and 0, of 3 and 4 examples, moved by their ids.
        far = 3 / 7 * 2**2 + 100 * (3 * plans[0] + 4 * plans[2]) / 7
        found = new.params[0]["w"] - old.params[0]["w"]
        found = found * (1 if optimizer == "none" else 2) - far
        drawn.append(np.round(np.unique(np.round(found / 1e4, 3)), 2).tolist())
        state = after
    assert len(drawn[0]) == len(drawn[1]) == 1 and drawn[0] != drawn[1]
    assert [one.num_bytes for one in method.messages] == [
        shapes.model_bytes(MODEL, (3,)),
        8,
    ]


def test_uploads_that_nobody_understands():
    """Something else than a model needs a step that makes a model of it."""
    given = averaging.Averaging(), task(1), without_rows
    with pytest.raises(ValueError, match="upload=. needs step= and excludes sent="):
        averaging.make(*given, upload=lambda client, server, trained: trained.params)
    for size in (4, -4, 4.5):
        with pytest.raises(ValueError, match="whole number above 0"):
            more = {} if size == 4 else {"upload": max, "step": max}
            averaging.make(*given, upload_bytes=size, **more)


def test_options_without_a_server_s_mean():
    """Those of written-out rounds alone."""
    with pytest.raises(ValueError, match="options LocalTraining, which lack"):
        averaging.make(local_training.LocalTraining(), task(1), without_rows)


def test_uploads_of_another_size(tables):
    """Bytes that are not the model's have to be named."""
    data, cohort = tables
    given = averaging.Averaging(), task(1), without_rows
    sent = {"upload": lambda *_: (1.0, True), "step": lambda server, mean, key: server}
    method = averaging.make(*given, **sent)
    state = method.init(data, jax.random.key(0))
    with pytest.raises(ValueError, match="sends 8 bytes, and the model has .*_bytes=8"):
        method.round(state, cohort, data)
    averaging.make(*given, **sent, upload_bytes=1).round(state, cohort, data)
