"""`--lanes`: which methods have them, that they change no number, what is refused."""

import chex
import jax
import numpy as np
import pytest

import algorithms
from fedjax_pfl import execution as execution_lib
from launch import build
from launch.machine import devices
from tests.toys import taught

# Of the others a client's round is more than one loop over its examples, or of parts of
# a model.
FIT = {
    *("apfl", "fedavg", "fedprox", "scaffold", "pfedsd", "feddyn"),
    *("fedper", "fedrep", "fedper_plus", "fedrep_plus"),
    *("dfedavg", "dfedper", "dfedavgm", "uapdfl", "criticalfl", "dispfl"),
    *("fedavgm", "fedadam", "fedyogi", "fedadagrad", "local", "cdkt", "distill"),
}


def make(dataset, algo="fedavg", **given):
    """Seven clients of quite different sizes, five a round."""
    needs = {
        "model": "mlp",
        "num_peers": 2 if algo == "criticalfl" else None,
        "proxy_fraction": 0.1 if algo in ("cdkt", "fedmd") else None,
        "public_set": "none" if algo == "fedmd" else None,
    }
    needs |= taught.options(algo, dataset)
    if algo in ("depthfl", "inclusivefl"):
        needs |= {"model": "depth_convnet", "model_width": 0.1, "image_size": 32}
    options = {
        "preset": "none",
        "dataset": dataset,
        "clients_per_round": 5,
        "rounds": 2,
        "eval_every": 2,
        "batch_size": 4,
        "devices": 1,
    }
    return build.experiment(algo=algo, **options | needs | given)


def trained(dataset, **given):
    """(state as numpy arrays, the experiment) of a run."""
    experiment = make(dataset, **given)
    experiment.run(progress=False)
    state = experiment.simulation.state
    kept = (state.server, state.clients, state.opt_state)
    return jax.tree.map(np.asarray, kept), experiment


def test_nobody_trains(unequal):
    """A method without training has nothing to deal out."""
    with pytest.raises(
        ValueError, match="--lanes=4: .*--algo=majority no client trains"
    ):
        make(unequal, "majority", lanes=4, batch_size=None)


@pytest.mark.parametrize("algo", sorted(set(algorithms.ALGORITHMS) - {"majority"}))
def test_who_has_lanes(algo, unequal):
    """Those whose client is one training; of others the reason in one line."""
    if algo in FIT:
        assert make(unequal, algo, lanes=3).task.execution.lanes == 3
        return
    with pytest.raises(ValueError, match=f"^--lanes=3: .*--algo={algo}") as refused:
        make(unequal, algo, lanes=3)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {
            **{"lanes": 2, "devices": 2},
            **{"client_optimizer": "adam", "optimizer_state": "persist"},
        },
        {
            **{"lanes": 3, "emulate": "accelerator", "num_seeds": 2},
            "sweep": {"client_lr": [0.02, 0.1]},
        },
    ],
    ids=["adam", "sweep"],
)
def test_lanes_change_no_number(given, unequal):
    """Against clients one by one: parameters, private rows and optimizer states."""
    in_chunks = given | {"lanes": 0, "client_chunk": 1, "devices": 1, "emulate": ""}
    expected, plain = trained(unequal, **in_chunks)
    found, experiment = trained(unequal, **given)
    # Adam makes whole steps of what two devices round otherwise.
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(experiment.metrics, plain.metrics, strict=True):
        assert mine["client_accuracy"] == theirs["client_accuracy"]
    assert experiment.totals.steps == plain.totals.steps
    assert plain.totals.step_efficiency == 1 > experiment.totals.step_efficiency
    assert experiment.summary()["lanes"] == given["lanes"]
    # Points share which lane has ended; seeds do not.
    assert len(experiment.simulation.calls) == given.get("num_seeds", 1)


def test_auto_takes_what_costs_least(unequal, monkeypatch):
    """On an accelerator, where the method has lanes and they cost less than a chunk."""
    monkeypatch.setattr(execution_lib, "STEP_CYCLES", {1: {2: 2.0, 3: 0.3}})
    auto = {"lanes": "auto", "emulate": "accelerator", "batch_size": 4}
    how = make(unequal, **auto).task.execution
    assert (how.lanes, how.chunk) == (3, 1)
    for other in ({"algo": "ditto"}, {"emulate": ""}):
        how = make(unequal, **auto | other).task.execution
        assert how.lanes == 0
    assert make(unequal, **auto | {"algo": "ditto"}).task.execution.chunk > 1
    monkeypatch.setattr(execution_lib, "STEP_CYCLES", {1: {1: 1.0}})
    how = make(unequal, **auto).task.execution
    assert (how.lanes, how.chunk) == (0, 1)


def test_idle_lanes_are_told(unequal):
    """A line where most of what is executed is waiting for the longest client."""
    _, experiment = trained(unequal, lanes=5, batch_size=1, local_epochs=1)
    efficiency = experiment.totals.step_efficiency
    line = devices.advice(experiment)
    assert (efficiency < 0.5) == bool(line)
    assert efficiency < 0.5 and "with fewer --lanes" in line


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lanes": "x"}, "--lanes=x: expected auto, 0 or at least 2"),
        ({"lanes": 1}, "--lanes=1: expected auto, 0 or at least 2"),
        ({"lanes": -3}, "--lanes=-3: expected auto, 0 or at least 2"),
        ({"lanes": "auto", "min_chunk": 3}, "--lanes=auto .*--min_chunk=3; omit one"),
    ],
)
def test_what_is_no_number_of_lanes(given, words, unequal):
    """One line that names the flag."""
    with pytest.raises(ValueError, match=words):
        make(unequal, **{"algo": "fedavg"} | given)
