"""FedALA against numpy: weights of the mixture, and FedAvg where all are one."""

import chex
import jax
import numpy as np
import pytest

from algorithms import fedala
from tests.algorithms import plain

FLOATS = {
    "client_lr": 0.1,
    "client_lr_decay": 0.5,
    "adaptive_lr": 1.0,
    "adaptive_share": 0.5,
    "adaptive_threshold": 0.01,
}


def state_of(start):
    """Upper layers and weights of the clients; one of them has learned weights."""
    state, gen = start(), np.random.default_rng(4)
    own = state.clients.params[-1:]
    weight = jax.tree.map(lambda x: np.float32(gen.uniform(size=x.shape)), own)
    learned = np.array([True, False, False, False, False])
    return state.replace(clients={"own": own, "weight": weight, "has_learned": learned})


def layer(tree, number):
    part = plain.at(tree, number)[0]["trunk"]
    return [np.float64(part["kernel"]), np.float64(part["bias"])]


def mixed(server, own, weight):
    upper = jax.tree.map(lambda a, b, w: a + (b - a) * w, own, server[-1], weight)
    return [*server[:-1], upper]


def reference(state, cohort, table, values):
    """Algorithm 1: weights and upper layers by client, and epochs of the weights."""
    trained, rows_of, epochs = {}, {}, {}
    for one in plain.clients(state, cohort, table):
        weight = layer(state.clients["weight"], one.number)
        own = layer(state.clients["own"], one.number)
        gap = plain.minus(one.server[-1], own)
        steps = [rows for _, rows, epoch in one.steps() if epoch == 0]
        steps = steps[: int(np.ceil(values["adaptive_share"] * len(steps)))]
        seen = []
        while True:
            total = 0.0
            for rows in steps:
                params, label = mixed(one.server, own, weight), table.label[rows]
                x, of_logits = table.images(rows), plain.cross_entropy(label)
                p = plain.softmax(plain.logits(params, x))[np.arange(len(rows)), label]
                total -= np.log(p).sum()
                grad = plain.gradients(params, x, of_logits)[-1]
                weight = jax.tree.map(
                    lambda w, g, d: np.clip(w - values["adaptive_lr"] * g * d, 0, 1),
                    *(weight, grad, gap),
                )
            seen.append(total / sum(map(len, steps)))
            if state.clients["has_learned"][one.number]:
                break
            if len(seen) > 10 and np.std(seen[-10:]) < values["adaptive_threshold"]:
                break
        epochs[one.number] = len(seen)
        params = one.train(mixed(one.server, own, weight), one.sgd(values))
        trained[one.number], rows_of[one.number] = params, (weight, params[-1])
    return plain.averaged(trained, table), None, rows_of, epochs


def test_rounds_equal_a_numpy_reference(compiled, start, problem):
    """Of clients that learn weights for the first time, and of others."""
    run, state = compiled("fedala", floats=FLOATS), state_of(start)
    changes = FLOATS | dict.fromkeys(("client_lr", "client_lr_decay"), 0.3)
    changes |= {"adaptive_lr": 0.1, "adaptive_share": 1.0, "adaptive_threshold": 1e-6}
    taken = []
    steps = plain.follow(
        run, reference, state, problem, FLOATS, changes=changes, by=1e-6
    )
    for step in steps:
        rows, epochs = step.more
        taken += epochs.values()
        before, after = step.before.clients, step.after.clients
        for number in range(5):
            if number not in rows:
                chex.assert_trees_all_equal(
                    *(plain.at(x, number) for x in (before, after))
                )
                continue
            assert after["has_learned"][number]
            found = layer(after["weight"], number), layer(after["own"], number)
            chex.assert_trees_all_close(found, rows[number], rtol=1e-5, atol=1e-5)
            assert plain.differs(found[0], layer(before["weight"], number))
    assert 1 in taken and max(taken) > 10


@pytest.mark.parametrize("share", [0.5, 1e-5])
def test_weights_take_eleven_epochs_at_least(compiled, start, problem, share):
    """Ten losses tell whether they still move, and the first is of the start.

    An epoch is at least one batch.
    """
    values = FLOATS | {"adaptive_threshold": 1e9, "adaptive_lr": 0.1}
    values |= {"adaptive_share": share}
    state, cohort = state_of(start), problem.cohort(1)
    after, *_ = compiled("fedala", floats=FLOATS)(state, cohort, **values)
    *_, rows, epochs = reference(state, cohort, problem.table, values)
    assert max(epochs.values()) == 11
    for number, wanted in rows.items():
        found = tuple(layer(after.clients[one], number) for one in ("weight", "own"))
        chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_client_that_equals_the_server_does_not_learn(compiled, start, problem):
    """As all do in the first round, which then is FedAvg's."""
    state = start(equal=True)
    weight = jax.tree.map(np.ones_like, state.clients.params[-1:])
    has_learned = np.zeros(5, bool)
    rows = {"own": state.clients.params[-1:], "weight": weight}
    rows |= {"has_learned": has_learned}
    after, *_ = compiled("fedala", floats=FLOATS)(state.replace(clients=rows))
    rates = {name: FLOATS[name] for name in ("client_lr", "client_lr_decay")}
    other, *_ = compiled("fedavg")(state.replace(clients=()), **rates)
    chex.assert_trees_all_close(after.server, other.server, atol=1e-6)
    assert not np.asarray(after.clients["has_learned"]).any()


def test_nothing_is_learned_without_a_step(compiled, start, problem):
    """The first long training is still to come where a client's time was up before."""
    state, cohort = state_of(start), problem.cohort(1)
    before = state.clients | {"has_learned": np.zeros(5, bool)}
    plan = cohort.plans["local"]
    still = plan.replace(num_steps=np.zeros_like(plan.num_steps))
    run = compiled("fedala", floats=FLOATS)
    for one, learns in ((plan, True), (still, False)):
        given = state.replace(clients=before), cohort.replace(plans={"local": one})
        after, *_ = run(*given)
        assert np.asarray(after.clients["has_learned"]).any() == learns
    chex.assert_trees_all_equal(after.clients["weight"], before["weight"])


def test_the_mixture_serves(start, problem):
    """With the server's present model and the weights as last learned."""
    made, state = fedala.make(fedala.HParams(), problem.task_of()), state_of(start)
    for number, one in enumerate(plain.served(made, state)):
        own, weight = (layer(state.clients[x], number) for x in ("own", "weight"))
        expected = mixed(plain.server_layers(state), own, weight)
        chex.assert_trees_all_close(plain.layers(one.params), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ("x", "--adaptive_from=x: --model=tiny has the"),
        ("none", "--adaptive_from=none leaves --model=tiny without parameters"),
    ],
)
def test_refused(stage, line, problem):
    """No such stage, and nothing to mix, which would be `fedavg`."""
    with pytest.raises(ValueError, match=line):
        fedala.make(fedala.HParams(adaptive_from=stage), problem.task_of())
