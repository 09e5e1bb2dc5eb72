"""Per-FedAvg against numpy: first-order and Hessian-free."""

import chex
import jax
import numpy as np
import pytest
from flax import linen as nn

from algorithms import perfedavg
from fedjax_pfl import local_training, shapes
from models import own as own_lib
from tests.algorithms import plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5, "inner_lr": 0.3}


def slope_of(table, params, rows):
    """The gradient on some rows, 0 on none."""
    if not len(rows):
        return plain.scaled(0.0, params)
    of_logits = plain.cross_entropy(table.label[rows])
    return plain.gradients(params, table.images(rows), of_logits)


def moved(params, size, along):
    return plain.total(params, plain.scaled(size, along))


def reference(state, cohort, table, values):
    """Algorithm 1, on halves or thirds of the rows of a step."""
    alpha, delta, own = values["inner_lr"], values["difference"], {}
    count = 3 if values["hessian_free"] else 2
    for one in plain.clients(state, cohort, table):
        w, tx = one.server, one.sgd(values)
        for _, rows, _ in one.steps():
            parts = [rows[number::count] for number in range(count)]
            adapted = moved(w, -alpha, slope_of(table, w, parts[0]))
            g = slope_of(table, adapted, parts[1])
            if values["hessian_free"]:
                up, down = (
                    slope_of(table, moved(w, d, g), parts[2]) for d in (delta, -delta)
                )
                g = moved(g, -alpha / (2 * delta), plain.minus(up, down))
            w = tx.step(w, g)
        own[one.number] = w
    return plain.averaged(own, table), None


@pytest.mark.parametrize("is_free", [False, True])
def test_rounds_equal_a_numpy_reference(is_free, compiled, start, problem):
    """Every option matters, and the second-order term; a model is sent each way."""
    structure = {"hessian_free": is_free, "difference": 0.02}
    hparams = perfedavg.HParams(batch_size=5, hessian_free=is_free)
    made = perfedavg.make(hparams, problem.task_of())
    (spec,) = made.plans
    assert spec.batch_size == 5 * (3 if is_free else 2)
    changes = dict.fromkeys(FLOATS, 0.2)
    if is_free:
        # A step so wide that gradients are no longer linear in it
        changes |= {"difference": 0.5, "hessian_free": False}
    steps = plain.follow(
        compiled("perfedavg", floats=FLOATS, **structure),
        reference,
        start().replace(clients=()),
        problem,
        structure | FLOATS,
        cohort_at=plain.planner(problem.data, made.plans),
        changes=changes,
        rtol=0,
        atol=1e-5,
    )
    size = shapes.tree_bytes(plain.server(steps[-1].after))
    plain.assert_both_ways(made, steps[-1].sent, size)


def test_differences_are_the_hessians_product(compiled, start, problem):
    """In 32 bits, at the default step, as a limit in 64 bits."""
    hparams = perfedavg.HParams(batch_size=5, hessian_free=True)
    made = perfedavg.make(hparams, problem.task_of())
    state, cohort = start().replace(clients=()), plain.planner(problem.data, made.plans)
    run = compiled("perfedavg", hessian_free=True)
    after, *_ = run(state, cohort(1), difference=hparams.difference, **FLOATS)
    values = FLOATS | {"hessian_free": True, "difference": 1e-6}
    expected, _ = reference(state, cohort(1), problem.table, values)
    chex.assert_trees_all_close(plain.server_layers(after), expected, atol=1e-5)


@pytest.mark.parametrize("size", [5, 7])
def test_adapted_models_serve(size, start, problem):
    """Each client, also one never drawn, after one step along the whole gradient."""
    values = {"inner_lr": 0.3, "batch_size": size}
    made = perfedavg.make(perfedavg.HParams(**values), problem.task_of())
    state = start().replace(clients=())
    served = plain.served(made, state, data=problem.data)
    for number, one in enumerate(served):
        w, rows = plain.server_layers(state), problem.table.owned(number)
        expected = moved(w, -0.3, slope_of(problem.table, w, rows))
        chex.assert_trees_all_close(plain.layers(one.params), expected, atol=1e-6)
        assert plain.differs(one, state.server, 1e-3)
    ((name, (_, variables)),) = made.server(state, problem.data).items()
    assert name == "global"
    chex.assert_trees_all_equal(variables, state.server)
    # On images as they are, though training may change them at random.
    data = problem.data.replace(augment="crop_flip")
    chex.assert_trees_all_equal(plain.served(made, state, data=data), served)


def test_clients_that_never_train_are_adapted_to(start, problem):
    """Their train rows are in a table of their own."""
    made = perfedavg.make(perfedavg.HParams(inner_lr=0.3), problem.task_of())
    state, part = start().replace(clients=()), problem.data.partition
    is_unseen = np.arange(5) == 2
    train, others = (
        part.train.replace(count=np.where(mask, part.train.count, 0))
        for mask in (~is_unseen, is_unseen)
    )
    parted = problem.data.replace(partition=part.replace(train=train, unseen=others))
    pair = (plain.served(made, state, data=one) for one in (problem.data, parted))
    chex.assert_trees_all_close(*pair, atol=1e-6)


def test_without_an_inner_rate_it_is_fedavg(compiled, start, problem):
    """On the second half of each batch."""
    state, cohort = start().replace(clients=()), plain.cut(problem.cohort(1), 1)
    after, *_ = compiled("perfedavg")(state, cohort, **FLOATS | {"inner_lr": 0.0})
    plan = cohort.plans["local"]
    rest = plan.replace(position=np.where(np.arange(5) % 2, plan.position, -1))
    cohort = cohort.replace(plans={"local": rest})
    rates = {"client_lr": 0.1, "client_lr_decay": 0.5}
    expected, *_ = compiled("fedavg")(state, cohort, **rates)
    chex.assert_trees_all_close(
        plain.host(after.server), plain.host(expected.server), atol=1e-6
    )


def of_a_single_row(problem):
    """A cohort in which each client takes one step on one row."""
    cohort = plain.cut(problem.cohort(1), 1)
    plan = cohort.plans["local"]
    first = plan.replace(position=np.where(np.arange(5) == 0, plan.position, -1))
    return cohort.replace(plans={"local": first})


def test_the_loss_of_a_single_row(compiled, start, problem):
    """It is that of the model itself, and not 0, as there is no second half."""
    state, cohort = start().replace(clients=()), of_a_single_row(problem)
    rates = dict.fromkeys(FLOATS, 0.0) | {"client_lr_decay": 1.0}
    _, metrics, *_ = compiled("perfedavg")(state, cohort, **rates)
    del rates["inner_lr"]
    _, expected, *_ = compiled("fedavg")(state, cohort, **rates)
    total, count = metrics["train_loss"]
    assert total > 0.1 * count
    np.testing.assert_allclose((total, count), expected["train_loss"], rtol=1e-6)


class Normed(nn.Module):
    """flax's own batch norm, which is not told which rows of a batch are real."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(3)(x.reshape(len(x), -1))
        return nn.Dense(4)(nn.BatchNorm(use_running_average=not train)(x))


def test_a_single_row_leaves_no_statistics_of_the_empty_half(problem):
    """Whatever fills the batch, and the row itself counts once."""
    task = problem.task_of(own_lib.chain(Normed()), chunk=1)
    made = perfedavg.make(perfedavg.HParams(batch_size=5, inner_lr=0.0), task)
    state = made.init(problem.data, jax.random.key(0))
    cohort, found = of_a_single_row(problem), []
    for position in (0, 3):
        with local_training.filled_from(position):
            after, *_ = jax.jit(lambda *given: made.round(*given))(
                state, cohort, problem.data
            )
        found.append(plain.host(after.server.stats))
    chex.assert_trees_all_equal(*found)
    assert plain.differs(found[0], plain.host(state.server.stats), 1e-4)


def test_the_loss_is_that_of_the_adapted_model(compiled, start, problem):
    """Of Per-FedAvg: f_i at w - alpha grad, on the second half of each batch."""
    state, cohort = start().replace(clients=()), plain.cut(problem.cohort(1), 1)
    rates = {"client_lr": 0.1, "client_lr_decay": 1.0, "inner_lr": 0.3}
    _, metrics, _ = compiled("perfedavg")(state, cohort, **rates)
    total = 0.0
    for one in plain.clients(state, cohort, problem.table):
        (_, rows, _), *_ = one.steps()
        w, halves = one.server, (rows[::2], rows[1::2])
        x, of = problem.table.images(halves[0]), problem.table.label[halves[0]]
        g = plain.gradients(w, x, plain.cross_entropy(of))
        w = plain.total(w, plain.scaled(-0.3, g))
        x, of = problem.table.images(halves[1]), problem.table.label[halves[1]]
        p = plain.softmax(plain.logits(w, x))[np.arange(len(of)), of]
        total -= len(rows) * np.log(p).mean()
    np.testing.assert_allclose(metrics["train_loss"][0], total, rtol=1e-4)


@pytest.mark.parametrize("is_free", [False, True])
def test_an_epoch_of_fewer_examples_than_parts(is_free, problem):
    """It would train nothing, or leave the Hessian out."""
    count = 2 + is_free
    given = {"hessian_free": is_free, "examples_per_round": count}
    perfedavg.make(perfedavg.HParams(**given), problem.task_of())
    given["examples_per_round"] -= 1
    with pytest.raises(ValueError, match=f"has {count} parts, each with other exam"):
        perfedavg.make(perfedavg.HParams(**given), problem.task_of())
