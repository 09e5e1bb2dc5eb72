"""What the engine refuses of an algorithm's optimizer states."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_pfl import averaging, local_training, program
from launch import build
from tests import synthetic


def run(change, **more):
    """Two rounds of FedAvg, changed, whose clients keep their momentum."""

    def make(hparams, task):
        loss_fn = local_training.cross_entropy_loss(task.model)

        def client_update(client, server):
            return local_training.train(hparams, loss_fn, server, client)

        return change(averaging.make(hparams, task, client_update), task)

    source = synthetic.blobs(60, (2, 2, 1), 3)
    mine = SimpleNamespace(HParams=averaging.Averaging, make=make, __name__="mine")
    options = {"num_clients": 3, "partition": "iid", "model": "mlp", "rounds": 2}
    options |= {"client_momentum": 0.5, "optimizer_state": "persist", "batch_size": 8}
    options["devices"] = 1
    data = (source.image, source.label)
    return build.experiment(algo=mine, dataset=data, **options | more).run()


def lost(made, task):
    """The round goes on with the state that it was given."""

    def round(state, cohort, data):
        after, *rest = made.round(state, cohort, data)
        return after.replace(opt_state=state.opt_state), *rest

    return made._replace(round=round)


def own_states(made, task):
    """Its init makes optimizer states."""

    def init(data, key):
        return made.init(data, key).replace(opt_state=(1.0,))

    return made._replace(init=init)


@pytest.mark.parametrize(
    "change, line",
    [
        (lost, "the round keeps no optimizer state"),
        (own_states, "init makes optimizer"),
    ],
)
def test_states_that_get_lost(change, line):
    """One line, where momentum would silently begin again in each round."""
    with pytest.raises(ValueError, match=line):
        run(change)


def test_states_that_are_kept():
    """The same without the change; and with plain SGD there is nothing to keep."""
    assert run(lambda made, task: made)
    assert run(lost, client_momentum=0.0)


def test_seconds_are_those_of_an_executable():
    """Not of all shapes, which other runs may have."""
    compiled = program.Compiled(lambda x: x + 1, lambda _: None)
    first, taken = compiled.ahead(np.zeros(2))
    second, more = compiled.ahead(np.zeros(3))
    assert compiled.ahead(np.zeros(2)) == (first, 0.0)
    assert (compiled.seconds_of(first), compiled.seconds_of(second)) == (taken, more)
    assert compiled.executables == [first, second] and min(taken, more) > 0
