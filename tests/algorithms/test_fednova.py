"""FedNova against numpy."""

import numpy as np
import pytest

from algorithms import fednova
from fedjax_pfl import shapes
from tests.algorithms import plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5}


def reference(state, cohort, table, values):
    """x - (sum p_i n_i) sum p_i (x - y_i) / n_i, n_i = sum of a client's row of A.

    A's row has what each step's gradient comes to in the change: with momentum the
    gradient of step s is in steps s, s + 1, ... with powers of rho.
    """
    x, rho = plain.server_layers(state), values["client_momentum"]
    changes, sizes, rows = [], [], []
    for one in plain.clients(state, cohort, table):
        steps = int(one.plan().num_steps)
        sizes.append(sum(rho ** (t - s) for t in range(steps) for s in range(t + 1)))
        y = one.train(x, one.sgd(values))
        changes.append(plain.scaled(1 / sizes[-1], plain.minus(x, y)))
        rows.append(table.train.count[one.number])
    p = np.array(rows) / sum(rows) if values["by_rows"] else np.ones(len(rows))
    p = p / p.sum()
    assert len(set(sizes)) > 1
    far = -float(p @ sizes)
    return plain.total(x, plain.scaled(far, plain.mean(changes, p))), None


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_rounds_equal_a_numpy_reference(momentum, compiled, start, problem):
    """Every option matters; bytes are the model's, and one number more up."""
    kind = {"aggregation": "uniform"} if momentum else {}
    run = compiled("fednova", floats=FLOATS, client_momentum=momentum, **kind)
    values = FLOATS | {"client_momentum": momentum, "by_rows": not momentum}
    changes = dict.fromkeys(FLOATS, 0.3) | {"by_rows": bool(momentum)}
    state = start().replace(clients=())
    steps = plain.follow(run, reference, state, problem, values, changes=changes)
    made = fednova.make(fednova.HParams(), problem.task_of())
    size = shapes.tree_bytes(plain.server(steps[-1].after))
    assert [kind.num_bytes for kind in made.messages] == [size, size + 4]


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"client_optimizer": "adam"}, "has no effect with fednova"),
        ({"optimizer_state": "persist"}, "has no effect with fednova"),
        (
            {"client_optimizer_options": "nesterov=true", "client_momentum": 0.5},
            "has no effect with fednova",
        ),
        ({"client_momentum": 1.0}, "needs less than 1"),
    ],
)
def test_optimizers_without_a_count(options, reason, problem):
    with pytest.raises(ValueError, match=reason):
        fednova.make(fednova.HParams(**options), problem.task_of())


@pytest.mark.parametrize("momentum", [0.1, 0.9, 0.999])
def test_steps_in_a_change(momentum):
    """Also where they are nearly a sum of 1, 2, 3, ...; none are none."""
    for steps in (0, 1, 5, 200):
        wanted = sum(momentum**i for step in range(steps) for i in range(step + 1))
        for rho in (momentum, np.float32(momentum)):
            found = fednova.steps_in_change(np.int32(steps), rho)
            np.testing.assert_allclose(found, wanted, rtol=3e-4)
