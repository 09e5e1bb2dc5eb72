"""pFedSD against numpy and FedAvg; numbers are those of the spec's section 5."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import pfedsd
from fedjax_pfl import local_training, rng, shapes
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
        clients = {"own": state.clients, "has_own": np.array(has_own, bool)}
        return state.replace(clients=clients)

    return make


def reference(state, cohort, table, values):
    """Section 1.10: from the server's weights, CE + lam tau^2 KL(own last || new)."""
    tau, weight, own = values["temperature"], values["self_distill_weight"], {}
    for one in plain.clients(state, cohort, table):

        def extra(params, position, rows, teacher=one.own):
            x = table.images(rows)
            target = plain.logits(teacher, x)
            return plain.gradients(
                params, x, lambda z: weight * plain.of_divergence(z, target, tau)
            )

        has_own = state.clients["has_own"][one.number]
        tx, extra = one.sgd(values), extra if has_own else None
        own[one.number] = one.train(one.server, tx, extra=extra)
    is_uniform = values.get("aggregation") != "examples"
    return plain.averaged(own, table, is_uniform), own


@pytest.mark.parametrize("name", STRUCTURES)
def test_rounds_equal_a_numpy_reference(name, compiled, given, problem):
    """Number 14: a first participation has no teacher; absent teachers stay; and 23."""
    first_time = int(problem.cohort(1).client_id[1])
    state = given([number != first_time for number in range(5)])
    changes = {"self_distill_weight": 0.4, "temperature": 1.0}
    if name == "uniform":
        changes |= {"aggregation": "examples", "client_momentum": 0.0}
    run = compiled("pfedsd", floats=FLOATS, **STRUCTURES[name])
    values = STRUCTURES[name] | FLOATS
    _, last = plain.follow(run, reference, state, problem, values, changes=changes)
    assert np.asarray(last.after.clients["has_own"]).all()
    total, count = last.metrics["train_loss"]
    size = problem.table.train.count[list(last.own)]
    assert len(set(size)) > 1
    assert np.isfinite(total) and int(count) == 2 * size.sum()

    made = pfedsd.make(pfedsd.HParams(), problem.task_of())
    plain.assert_both_ways(made, last.sent, shapes.tree_bytes(plain.server(state)))


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_loss_by_hand(tau, problem):
    """Section 1.10: cross-entropy + weight tau^2 KL(teacher || student), no padding."""
    model = conftest.NETWORKS["tiny"]
    student, teacher = (conftest.random_params(model, seed) for seed in (1, 2))
    table, label = problem.table, np.array([0, 3, 1, 2, 2])
    rows = table.owned(0)[:5]
    x, _ = problem.data.gather(jnp.asarray(rows))
    batch = local_training.Batch(
        image=x.at[4].set(jnp.nan),
        label=label,
        mask=np.arange(5) < 4,
        position=np.arange(5),
        step=0,
        epoch=0,
        key=jax.random.key(0),
    )
    loss_fn = pfedsd.self_distillation(model, teacher, 0.7, tau)
    found, _ = loss_fn(*student, batch)
    z, target = (
        plain.logits(plain.layers(one.params), table.images(rows[:4]))
        for one in (student, teacher)
    )
    hard = -np.log(plain.softmax(z)[np.arange(4), label[:4]]).mean()
    expected = hard + 0.7 * plain.divergence(z, target, tau)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # The gradient of the reference, against differences of the divergence itself.
    slope = plain.of_divergence(z, target, tau)
    for index in np.ndindex(z.shape):
        move = np.zeros_like(z)
        move[index] = 1e-6
        up, down = (plain.divergence(z + s * move, target, tau) for s in (1, -1))
        np.testing.assert_allclose(slope[index], (up - down) / 2e-6, atol=1e-7)


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
        for number, one in enumerate(plain.served(made, state)):
            if number in joined:
                chex.assert_trees_all_equal(one, plain.own(state, number))
            else:
                chex.assert_trees_all_equal(one, plain.host(state.server))
            if number in cohort.client_id:
                assert number not in last or plain.differs(one, last[number], 1e-4)
                last[number] = one
            elif number in last:
                chex.assert_trees_all_equal(one, last[number])


def test_eval_model_server(problem, given):
    """`--eval_model=server`: the server's model serves everybody."""
    made = pfedsd.make(pfedsd.HParams(eval_model="server"), problem.task_of())
    state = given()
    for one in plain.served(made, state):
        chex.assert_trees_all_equal(one, state.server)
    ((name, (model, variables)),) = made.server(state, problem.data).items()
    assert (name, model.name) == ("global", "tiny")
    chex.assert_trees_all_equal(variables, state.server)


def test_teacher_has_no_dropout(compiled, problem, given):
    """Section 1.10: the teacher answers in eval mode, the student in train mode.

    One step of one client in plain jax without vmap.
    """
    state = given(server="noisy")
    cohort = plain.cut(problem.cohort(1), 1)
    run = compiled("pfedsd", "noisy")
    after, _, _ = run(state, cohort, **FLOATS)
    number, model = int(cohort.client_id[0]), conftest.NETWORKS["noisy"]
    table = problem.table
    ((_, rows, _),) = table.steps(plain.at(cohort.plans["local"], 0), number)
    assert len(rows) == 5
    x, label = problem.data.gather(jnp.asarray(rows))
    key = rng.stream(state.key, "engine.local", jnp.asarray(state.round), number)
    teacher = plain.own(state, number)

    @jax.jit
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
    expected = jax.tree.map(lambda w, g: w - 0.05 * g, state.server.params, grads)
    found = plain.own(after, number).params
    chex.assert_trees_all_close(found, plain.host(expected), rtol=1e-4, atol=1e-6)
