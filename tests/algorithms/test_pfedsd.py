"""pFedSD against numpy and FedAvg; numbers are those of the spec's section 5."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import pfedsd
from fedjax_pfl import rng, traffic, types
from tests.algorithms import conftest, plain

FLOATS = {
    "client_lr": 0.1,
    "client_lr_decay": 0.5,
    "self_distill_weight": 0.8,
    "temperature": 2.0,
}
STRUCTURES = {
    "uniform": {"client_momentum": 0.5},
    "examples": {"aggregation": "examples"},
}


@pytest.fixture(scope="session")
def given(start):
    """Makes states whose server and clients are all different."""

    def make(has_own=(1, 1, 1, 1, 1), round=1, **more):
        state = start(round=round, **more)
        return state.replace(
            server=(state.server["params"], state.server["stats"]),
            clients={"own": state.clients, "has_own": np.array(has_own, bool)},
        )

    return make


def distillation(table, teacher, tau, weight):
    """Gradients of weight * tau^2 * KL(teacher || student) on a batch."""

    def extra(params, position, rows):
        x = table.images(rows)
        q = plain.softmax(plain.logits(teacher, x) / tau)
        return plain.gradients(
            params, x, lambda z: weight * tau * (plain.softmax(z / tau) - q) / len(z)
        )

    return extra


@pytest.mark.parametrize("name", STRUCTURES)
def test_round_equals_a_numpy_reference(name, compiled, given, problem):
    """Section 1.10: from the server's weights, CE + lam tau^2 KL(own last || new).

    Number 14: a first participation has no teacher; absent teachers stay; and 23.
    """
    cohort, table = problem.cohort(1), plain.Table(problem.data)
    first_time = int(cohort.client_id[1])
    state = given([number != first_time for number in range(5)])
    after, metrics, sent = compiled("pfedsd", **STRUCTURES[name])(state, **FLOATS)
    server = plain.layers(state.server[0])
    momentum = STRUCTURES[name].get("client_momentum", 0.0)
    own = {}
    for row, number in enumerate(cohort.client_id):
        teacher = plain.layers(plain.at(state.clients["own"][0], number))
        extra = distillation(table, teacher, 2.0, 0.8)
        extra = None if number == first_time else extra
        one = plain.at(cohort.plans["local"], row)
        tx = plain.Sgd(0.1 * 0.5, momentum)
        own[number] = plain.train(table, server, one, number, tx, extra=extra)
    size = table.train.count[cohort.client_id]
    assert len(set(size)) > 1
    mean = plain.mean(list(own.values()), size if name == "examples" else [1] * 3)
    found = plain.layers(after.server[0])
    chex.assert_trees_all_close(found, mean, rtol=1e-3, atol=1e-5)
    for number in range(5):
        got = plain.at(after.clients["own"], number)
        if number in own:
            chex.assert_trees_all_close(
                plain.layers(got[0]), own[number], rtol=1e-3, atol=1e-5
            )
        else:
            chex.assert_trees_all_equal(got, plain.at(state.clients["own"], number))
    assert np.asarray(after.clients["has_own"]).all() and int(after.round) == 2
    total, count = metrics["train_loss"]
    assert np.isfinite(total) and int(count) == 2 * size.sum()

    made = pfedsd.make(pfedsd.HParams(), problem.task_of())
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(state.server))
    for row in np.asarray(sent):
        total = traffic.cumulative(row, made.messages)
        assert total == {"bytes_up": size, "bytes_down": size}


def fedavg_of(compiled, state, **floats):
    """FedAvg's round from the same server."""
    params, stats = state.server
    other = state.replace(server={"params": params, "stats": stats}, clients=())
    run = compiled("fedavg", aggregation="uniform", client_momentum=0.5)
    after, _, _ = run(other, **floats)
    return after.server["params"]


@pytest.mark.parametrize(("has_own", "weight"), [(True, 0.0), (False, 0.8)])
def test_without_a_teacher_it_is_fedavg(has_own, weight, compiled, given):
    """Number 14: lam = 0, or all in their first participation: FedAvg, bit for bit."""
    rates = {"client_lr": 0.1, "client_lr_decay": 0.5}
    state = given([has_own] * 5)
    run = compiled("pfedsd", **STRUCTURES["uniform"])
    after, _, _ = run(state, **rates, self_distill_weight=weight, temperature=2.0)
    chex.assert_trees_all_equal(after.server[0], fedavg_of(compiled, state, **rates))
    on, _, _ = run(given(), **FLOATS)
    assert plain.differs(on.server, after.server, 1e-4)


def only_first_step(cohort):
    """The cohort's clients take one step each."""
    one = cohort.plans["local"]
    one = one.replace(num_steps=np.minimum(one.num_steps, 1))
    return cohort.replace(plans={"local": one})


def test_equal_student_and_teacher(compiled, given, problem):
    """Number 14: kl = 0 and no gradient where the own last model is the server's."""
    run, cohort = compiled("pfedsd", **STRUCTURES["uniform"]), problem.cohort(1)
    state = given()
    same = plain.stack([plain.host(state.server)] * 5)
    state = state.replace(clients=state.clients | {"own": same})
    cohort = only_first_step(cohort)
    off = FLOATS | {"self_distill_weight": 0.0}
    values = [run(state, cohort, **one)[:2] for one in (FLOATS, off)]
    (with_, loss_with), (without, loss_without) = values
    chex.assert_trees_all_close(with_.server, without.server, atol=1e-7)
    chex.assert_trees_all_close(loss_with, loss_without, rtol=1e-6)
    (with_, loss_with, _), (without, loss_without, _) = (
        run(given(), cohort, **one) for one in (FLOATS, off)
    )
    assert plain.differs(with_.server, without.server, 1e-4)
    assert loss_with["train_loss"][0] > loss_without["train_loss"][0] + 1e-3


def test_teacher_is_what_was_evaluated(compiled, given, problem):
    """Number 14: the teacher is bitwise the model served since the last participation.

    Those that never took part are served the server's model of now.
    """
    made = pfedsd.make(pfedsd.HParams(), problem.task_of())
    run = compiled("pfedsd", **STRUCTURES["uniform"])
    state, last, joined = given([0] * 5, round=0), {}, set()
    for round in range(3):
        cohort = problem.cohort(round)
        state, _, _ = run(state, cohort, **FLOATS)
        joined |= set(cohort.client_id.tolist())
        np.testing.assert_array_equal(
            state.clients["has_own"], np.isin(np.arange(5), list(joined))
        )
        shared, own = made.serving(state, None, problem.data)
        np.testing.assert_array_equal(~np.asarray(shared.mask), own.mask)
        np.testing.assert_array_equal(own.mask, state.clients["has_own"])
        chex.assert_trees_all_equal(shared.params, state.server[0])
        assert shared.shared and not own.shared
        for number in range(5):
            served = plain.at((own.params, own.stats), number)
            chex.assert_trees_all_equal(served, plain.at(state.clients["own"], number))
            if number in cohort.client_id:
                assert number not in last or plain.differs(served, last[number], 1e-4)
                last[number] = served
            elif number in last:
                chex.assert_trees_all_equal(served, last[number])


def test_eval_model_server(problem, given):
    """`--eval_model=server`: the server's model serves everybody."""
    made = pfedsd.make(pfedsd.HParams(eval_model="server"), problem.task_of())
    shared, own = made.serving(given(), None, problem.data)
    assert np.asarray(shared.mask).all() and not np.asarray(own.mask).any()
    np.testing.assert_array_equal(shared.client_id, range(5))
    model, params, _ = made.server_params(given())
    assert model.name == "tiny"
    chex.assert_trees_all_equal(params, given().server[0])


def test_teacher_has_no_dropout(compiled, problem, given, quick_jit):
    """Section 1.10: the teacher answers in eval mode, the student in train mode.

    One step of one client in plain jax without vmap.
    """
    state = given(server="noisy", clients="noisy")
    cohort = only_first_step(problem.cohort(1))
    run = compiled("pfedsd", server="noisy", clients="noisy")
    after, _, _ = run(state, cohort, **FLOATS)
    number, model = int(cohort.client_id[0]), conftest.NETWORKS["noisy"]
    table = plain.Table(problem.data)
    ((_, rows, _),) = table.steps(plain.at(cohort.plans["local"], 0), number)
    assert len(rows) == 5
    x, label = problem.data.gather(jnp.asarray(rows))
    key = rng.stream(state.key, rng.Tag.LOCAL, jnp.asarray(state.round), number)
    teacher = plain.at(state.clients["own"], number)

    @quick_jit
    def gradient(params, stats):
        def loss(params):
            mode = {"train": True, "key": jax.random.fold_in(key, 0)}
            z, _ = model.forward(params, stats, x, **mode)
            t, _ = model.forward(*teacher, x)
            log_p, log_q = jax.nn.log_softmax(z / 2), jax.nn.log_softmax(t / 2)
            hard = -jax.nn.log_softmax(z)[jnp.arange(5), label].mean()
            return hard + 0.8 * 4 * (jnp.exp(log_q) * (log_q - log_p)).sum(-1).mean()

        return jax.grad(loss)(params)

    grads = gradient(*state.server)
    expected = jax.tree.map(lambda w, g: w - 0.05 * g, state.server[0], grads)
    found = plain.at(after.clients["own"][0], number)
    chex.assert_trees_all_close(found, plain.host(expected), rtol=1e-4, atol=1e-6)


def test_everyone_starts_from_one_model(problem, quick_jit):
    """Section 1.0: a common initialisation, nobody has a model of its own yet."""
    made = pfedsd.make(pfedsd.HParams(local_epochs=4), problem.task_of())
    assert made.plans == (types.PlanSpec("local", 4, 20),)
    state = quick_jit(made.init)(problem.data, jax.random.key(0))
    for number in range(5):
        chex.assert_trees_all_equal(
            plain.at(state.clients["own"], number), plain.host(state.server)
        )
    assert not np.asarray(state.clients["has_own"]).any()
