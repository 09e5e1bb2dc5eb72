"""`--client_state`: rows on the host are the run on the device, bit for bit."""

import numpy as np
import pytest

from fedjax_pfl import population
from launch import build

NUM_CLIENTS = 40
OPTIONS = {
    "num_clients": NUM_CLIENTS,
    "clients_per_round": 4,
    "rounds": 5,
    "eval_every": 2,
    "model": "mlp",
    "preset": "none",
    "partition": "iid",
    "batch_size": 4,
    "local_epochs": 1,
    "devices": 1,
}


@pytest.fixture(scope="module")
def vectors():
    """Ten examples for each client."""
    gen = np.random.default_rng(0)
    label = gen.integers(0, 4, 10 * NUM_CLIENTS)
    centre = gen.normal(size=(4, 6))
    return (centre[label] + gen.normal(size=(len(label), 6))).astype("f4"), label


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    """The device holds the rows of one round, so that windows and blocks are short."""
    monkeypatch.setattr(population, "RESIDENT_BYTES", 1)


def made(vectors, where, **options):
    given = {"dataset": vectors, "client_state": str(where), **OPTIONS, **options}
    return build.experiment(**given)


def untimed(experiment):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in experiment.metrics]


# Two groups that serve, peers, an optimizer state beside rows, what the server serves,
# a sample of the clients, two models of the server; seeds one by one and together.
CASES = {
    "pfedsd": {"algo": "pfedsd", "eval_sample": 13},
    "uapdfl": {"algo": "uapdfl", "num_peers": 2, "num_seeds": 2},
    "scaffold": {"algo": "scaffold"},
    "state": {"algo": "fedavg", "optimizer_state": "persist", "client_momentum": 0.5},
    "fedper": {
        "algo": "fedper",
        "c_gen": True,
        "eval_clients": "selected",
        "num_seeds": 2,
        "emulate": "accelerator",
    },
    "points": {"algo": "pfedsd", "sweep": "client_lr=0.01,0.1"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_on_the_device(case, vectors, tmp_path):
    here, there = (made(vectors, w, **CASES[case]) for w in ("device", tmp_path))
    assert there.task.num_rows < NUM_CLIENTS
    one, other = here.run(progress=False), there.run(progress=False)
    assert one["parameters_sha256"] == other["parameters_sha256"]
    assert untimed(here) == untimed(there)
    np.testing.assert_array_equal(here.client_accuracies, there.client_accuracies)
    if case in ("pfedsd", "uapdfl"):
        chosen = there.planner.drawn(0, there.round).client_id[0]
        for client in (0, int(chosen), NUM_CLIENTS - 1):
            found = [e.predict(client, vectors[0][:5]) for e in (here, there)]
            np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("before,after", [("host", "device"), ("device", "host")])
def test_resumed_where_rows_are_kept_otherwise(before, after, vectors, tmp_path):
    """With rows of two seeds, saved and loaded in either form."""
    options = {"algo": "pfedsd", "num_seeds": 2}
    whole = made(vectors, "device", **options).run(progress=False)
    folder = str(tmp_path / "run")
    first = made(vectors, before, **options | {"rounds": 3}, workdir=folder)
    first.run(progress=False)
    more = {"workdir": folder, "resume": True}
    second = made(vectors, after, **options, **more)
    found = second.run(progress=False)
    assert found["parameters_sha256"] == whole["parameters_sha256"]
    assert [r["round"] for r in second.metrics] == [0, 0, 2, 2, 3, 3, 4, 4, 5, 5]


def test_what_trained_is_saved(vectors, tmp_path):
    experiment = made(vectors, "host", algo="pfedsd")
    experiment.run(progress=False)
    drawn = {int(i) for r in range(5) for i in experiment.planner.drawn(0, r).client_id}
    kept = experiment.saved()[0]["state"]
    assert set(kept.ids.tolist()) == drawn and len(drawn) < NUM_CLIENTS
    assert kept.state.clients["has_own"].shape == (len(drawn),)


@pytest.mark.parametrize(
    "options,line",
    [
        ({"algo": "fedavg"}, "clients of --algo=fedavg keep nothing.*omit it"),
        ({"algo": "fedict"}, "--algo=fedict keeps what depends on each client"),
        ({"algo": "dispfl"}, "each client begins with a row of its own"),
        ({"algo": "uapdfl", "shared_init": False}, "a row of its own"),
        ({"algo": "uapdfl", "track_pairs": 2}, "track_pairs=2 reads the same clients"),
        (
            {"algo": "fedmd", "proxy_fraction": 0.1},
            "--algo=fedmd keeps what depends on each client",
        ),
        (
            {"algo": "fedper", "c_gen": True, "eval_clients": "all"},
            "c_gen of all clients needs all their models.*--noc_gen",
        ),
        ({"algo": "fedper", "client_state": "/nowhere"}, "expected device, host or a"),
    ],
)
def test_refused(options, line, vectors):
    given = {"client_state": "host", **options}
    with pytest.raises(ValueError, match=line):
        made(vectors, given.pop("client_state"), **given).start()
