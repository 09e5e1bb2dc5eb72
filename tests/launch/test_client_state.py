"""`--client_state`: rows on the host are the run on the device, bit for bit."""

import errno
import os

import numpy as np
import pytest

from data import plan
from fedjax_pfl.rows import hosted, transfer
from launch import build, contract
from launch.machine import memory
from tests import vectors

pytestmark = pytest.mark.usefixtures("narrow")
NUM_CLIENTS = 40
OPTIONS = vectors.OPTIONS | {
    "num_clients": NUM_CLIENTS,
    "clients_per_round": 4,
    "rounds": 5,
    "eval_every": 2,
    "devices": 1,
}


@pytest.fixture(scope="module", name="vectors")
def _vectors():
    return vectors.drawn(NUM_CLIENTS)


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    """The device holds the rows of one round, so that windows and blocks are short."""
    monkeypatch.setattr(hosted, "RESIDENT_BYTES", 1)


def made(vectors, where, **options):
    given = {"dataset": vectors, "client_state": str(where), **OPTIONS, **options}
    return build.experiment(**given)


def untimed(experiment):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in experiment.metrics]


# Two devices that share rows out as accelerators do
TWO = {"devices": 2, "emulate": "accelerator"}
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
    "fedmd": {"algo": "fedmd", "proxy_fraction": 0.1},
    "peers": {"algo": "dfedavg", "topology": "ring", "num_peers": 2, **TWO},
    "points": {"algo": "pfedsd", "sweep": "client_lr=0.01,0.1"},
    "metrics": {"algo": "pfedsd", "eval_metrics": "macro_f1,auc,ece", **TWO},
    "all": {
        "algo": "fedper",
        "c_gen": True,
        "eval_clients": "all",
        "num_seeds": 2,
        **TWO,
    },
}


# Large programs, or those of another case; `pytest -m slow` runs them.
SLOW = "uapdfl", "points", "fedmd", "peers"


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_the_same_bits_as_on_the_device(case, vectors, tmp_path):
    here, there = (made(vectors, w, **CASES[case]) for w in ("device", tmp_path))
    assert there.task.num_rows < NUM_CLIENTS
    one, other = here.run(progress=False), there.run(progress=False)
    assert one["parameters_sha256"] == other["parameters_sha256"]
    assert untimed(here) == untimed(there)
    np.testing.assert_array_equal(here.kept.arrays, there.kept.arrays)
    if case in ("pfedsd", "uapdfl"):
        chosen = there.planner.drawn(0, there.round).client_id[0]
        for client in (0, int(chosen), NUM_CLIENTS - 1):
            found = [e.predict(client, vectors[0][:5]) for e in (here, there)]
            np.testing.assert_array_equal(*found)


def test_a_device_that_needs_more_rows_in_a_later_round(vectors, monkeypatch):
    """The first round says how many; a later one has more clients on one device."""
    monkeypatch.setattr(plan, "OWNED_ROUNDS", 1)
    options = {"algo": "fedper", "rounds": 12, "clients_per_round": 6, **TWO}
    here, there = (made(vectors, where, **options) for where in ("device", "host"))
    before = there.simulation.rows.layout.num_rows
    one, other = here.run(progress=False), there.run(progress=False)
    assert before == there.task.num_rows < there.simulation.rows.layout.num_rows
    assert there.simulation.rows.layout.num_rows < NUM_CLIENTS
    assert one["parameters_sha256"] == other["parameters_sha256"]
    assert untimed(here) == untimed(there)


@pytest.fixture
def grows(monkeypatch):
    """Options of which the first round says how many rows a device has."""
    monkeypatch.setattr(plan, "OWNED_ROUNDS", 1)
    return {"algo": "pfedsd", "clients_per_round": 6, "client_chunk": 1, **TWO}


@pytest.mark.slow
def test_rows_grow_between_two_calls(vectors, grows):
    """The calls that are behind go on with the slots of the window they are in."""
    options = {"seed": 10, "num_seeds": 2, "sweep": "client_lr=0.01,0.1", "rounds": 4}
    runs = [made(vectors, w, **grows, **options) for w in ("device", "host")]
    before = runs[1].simulation.rows.layout
    one, other = (run.run(progress=False) for run in runs)
    assert before != runs[1].simulation.rows.layout
    assert one["parameters_sha256"] == other["parameters_sha256"]
    assert untimed(runs[0]) == untimed(runs[1])


@pytest.mark.parametrize("seed,rounds", [(17, 7), (6, 2)])
def test_models_of_a_cohort_for_which_there_is_no_room(vectors, grows, seed, rounds):
    """The round after the last may need more rows than any before."""
    options = {"seed": seed, "rounds": rounds, **grows}
    here, there = (made(vectors, where, **options) for where in ("device", "host"))
    for experiment in (here, there):
        experiment.simulation.advance_to(rounds)
    cohort = there.planner.drawn(0, rounds)
    drawn = cohort.client_id[cohort.row_mask]
    layout = there.simulation.rows.layout
    assert layout.fullest(drawn) > layout.rows_per_device
    for client in (*drawn.tolist(), 11, 38):
        found = [e.predict(client, vectors[0][:5]) for e in (here, there)]
        np.testing.assert_array_equal(*found, err_msg=str(client))


def test_the_last_evaluation_mixes_all_peers(vectors, monkeypatch):
    """Of the round after the last, whose clients and peers are more than of any."""
    monkeypatch.setattr(plan, "PEERS_ROUNDS", 1)
    options = {"algo": "dfedavg", "num_peers": 2, "seed": 3, "rounds": 2, **TWO}
    here, there = (made(vectors, where, **options) for where in ("device", "host"))
    before = there.simulation.rows.layout
    next_round = there.planner.drawn(0, 2)
    assert before.fullest(next_round.needed) > before.rows_per_device
    runs = [run.run(progress=False) for run in (here, there)]
    assert there.simulation.rows.layout != before
    assert runs[0]["parameters_sha256"] == runs[1]["parameters_sha256"]
    assert untimed(here) == untimed(there)
    for client in next_round.client_id[next_round.row_mask].tolist():
        found = [e.predict(client, vectors[0][:5]) for e in (here, there)]
        np.testing.assert_array_equal(*found, err_msg=str(client))


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
    experiment.simulation.advance_to(5)
    drawn = {int(i) for r in range(5) for i in experiment.planner.drawn(0, r).client_id}
    kept = experiment.saved()[0]["state"]
    assert set(kept.ids.tolist()) == drawn and len(drawn) < NUM_CLIENTS
    assert kept.state.clients["has_own"].shape == (len(drawn),)


@pytest.mark.parametrize(
    "options,line",
    [
        ({"algo": "fedavg"}, "clients of --algo=fedavg keep nothing.*omit it"),
        ({"algo": "fedict"}, "--algo=fedict keeps what depends on each client"),
        (
            {"algo": "fedict", "clients_per_round": NUM_CLIENTS},
            "--algo=fedict keeps what depends on each client",
        ),
        (
            {
                "algo": "perfedavg",
                "optimizer_state": "persist",
                "client_momentum": 0.5,
            },
            "--algo=perfedavg needs the rows of all clients .* declare shares_rows",
        ),
        ({"algo": "dispfl"}, "each client begins with a row of its own"),
        ({"algo": "uapdfl", "shared_init": False}, "a row of its own"),
        ({"algo": "uapdfl", "track_pairs": 2}, "track_pairs=2 reads the same clients"),
        (
            {"algo": "fedmd", "proxy_fraction": 0.1, "client_model": "narrow,mlp"},
            "--algo=fedmd keeps the rows of each architecture apart",
        ),
        ({"algo": "fedper", "client_state": "/nowhere"}, "host or a folder to which"),
    ],
)
def test_refused(options, line, vectors):
    given = {"client_state": "host", **options}
    with pytest.raises(ValueError, match=line):
        experiment = made(vectors, given.pop("client_state"), **given)
        with pytest.raises(ValueError, match=line):
            experiment.start()
        experiment.start()  # again in a notebook


def test_refused_when_resumed(vectors, tmp_path):
    """The checkpoint is not said to be damaged, and the run goes on without it."""
    given = {"algo": "uapdfl", "shared_init": False, "num_peers": 2, "rounds": 1}
    given["workdir"] = str(tmp_path)
    made(vectors, "device", **given).run(progress=False)
    given |= {"rounds": 2, "resume": True}
    with pytest.raises(ValueError, match="^--client_state: with these options"):
        made(vectors, "host", **given).run(progress=False)
    assert made(vectors, "device", **given).run(progress=False)["rounds"] == 2


@pytest.mark.slow
def test_all_rows_fit(vectors, monkeypatch):
    """Slots are then clients, so that an algorithm may read fixed rows."""
    options = {"algo": "uapdfl", "num_peers": 2, "track_pairs": 3, "eval_sample": 7}
    here = made(vectors, "device", **options)
    here.run(progress=False)
    monkeypatch.setattr(hosted, "RESIDENT_BYTES", 1 << 28)
    there = made(vectors, "host", **options)
    there.run(progress=False)
    assert untimed(here) == untimed(there)
    assert "divergence_0_2" in here.metrics[-1]


def test_loaded_after_rows_were_read_ahead(vectors):
    """In memory, from what `saved` gives, as `contract.check` does."""
    options = {"algo": "pfedsd", "clients_per_round": 20, "rounds": 6}
    whole = made(vectors, "device", **options).simulation
    whole.advance_to(6)
    simulation = made(vectors, "host", **options).simulation
    simulation.advance_to(2)
    ahead = simulation._window
    assert ahead.first == 2 and ahead.rows.ahead
    kept = simulation.saved
    simulation.load(2, kept, simulation.totals, 0.0, simulation.metrics)
    simulation.advance_to(6)
    assert simulation.digest() == whole.digest()


def test_many_rows_are_hashed_where_they_have_trained(vectors, monkeypatch):
    monkeypatch.setattr(hosted, "HASHED_BYTES", 0)
    found = set()
    for seed in (0, 0, 1):
        simulation = made(vectors, "host", algo="pfedsd", seed=seed).simulation
        simulation.advance_to(5)
        found.add(simulation.digest())
    assert len(found) == 2


def test_clients_that_begin_with_rows_of_their_own(vectors, tmp_path):
    """They are refused before a folder is made, whatever room the devices have."""
    own = {"algo": "dfedavg", "shared_init": False, "workdir": str(tmp_path / "run")}
    run = made(vectors, "host", **own)
    with pytest.raises(ValueError, match="--client_state: .* a row of its own"):
        run.run(progress=False)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_and_later_room(vectors, tmp_path, monkeypatch):
    """A run that stopped there goes on, and ends as one that never did."""
    rows, folder = tmp_path / "rows", str(tmp_path / "run")
    rows.mkdir()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="--client_state=.*No space left"):
            made(vectors, rows, algo="local", workdir=folder).run(progress=False)
    again = made(vectors, rows, algo="local", workdir=folder, resume=True)
    alone = made(vectors, "device", algo="local").run(progress=False)
    found = again.run(progress=False)
    assert found["parameters_sha256"] == alone["parameters_sha256"]


def test_a_folder_that_is_gone(vectors, tmp_path):
    """A run that kept its rows there opens as one that has them in memory."""
    scratch, folder = tmp_path / "scratch", str(tmp_path / "run")
    scratch.mkdir()
    first = made(vectors, scratch, algo="fedper", workdir=folder)
    summary = first.run(progress=False)
    scratch.rmdir()
    again = build.load(folder, dataset=vectors)
    assert again.config.client_state == "host"
    assert again.summary()["parameters_sha256"] == summary["parameters_sha256"]


@pytest.mark.slow
def test_the_contract_holds(vectors):
    options = {**OPTIONS, "dataset": vectors, "client_state": "host", "rounds": 4}
    contract.check("pfedsd", **options)


def test_rows_that_both_windows_need_stay_on_the_devices(vectors):
    """A client keeps its slot, and what others trained is stored a call later."""
    options = {"algo": "pfedsd", "clients_per_round": 20, "rounds": 6}
    whole = made(vectors, "device", **options).simulation
    whole.advance_to(6)
    simulation = made(vectors, "host", **options).simulation
    simulation.advance_to(2)
    before, after = simulation.rows._held[0][0], simulation._window.rows
    old, new = before.residents[0], after.residents[0]
    both = np.intersect1d(old.ids, new.ids)
    assert 0 < len(both) < len(new.ids)
    np.testing.assert_array_equal(old.slots_of(both), new.slots_of(both))
    read = [ids for chunk, *_ in after.ahead[0][1] for _, _, ids, _ in chunk.parts()]
    assert not np.isin(np.concatenate(read), both).any()
    call = simulation.calls[0]
    simulation.rows.before(call, after)
    left = [
        ids
        for chunk, _ in simulation.rows._leaving[0]
        for _, _, ids, _ in chunk.parts()
    ]
    assert set(np.concatenate(left)) == set(np.concatenate(old.drawn))
    simulation.advance_to(6)
    assert simulation.digest() == whole.digest()


def test_an_interrupt_while_rows_enter(vectors, monkeypatch):
    """All rows then come again, also those that were to stay, as the host has them."""
    options = {"algo": "pfedsd", "clients_per_round": 20, "rounds": 6}
    whole = made(vectors, "device", **options).simulation
    whole.advance_to(6)
    simulation = made(vectors, "host", **options).simulation
    simulation.advance_to(2)
    put = transfer.put

    def interrupted(*args):
        put(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            simulation.advance_to(3)
    simulation.advance_to(6)
    assert simulation.digest() == whole.digest()


def test_a_host_has_memory_for_its_own_rows(vectors):
    """All of them with one process, or those of its devices.

    Of 8 clients that may be drawn, 4 a round, 6 are expected to be after two rounds.
    """
    rows = made(vectors, "host", algo="pfedsd", **TWO).simulation.rows
    assert rows.share == 1
    options = {"num_seeds": 3, "num_clients": NUM_CLIENTS}
    options |= {"rounds": 2, "clients_per_round": 4}
    chance = np.append(np.full(8, 0.5), np.zeros(100))
    for rows.share in (1, 0.5):
        needed = memory.on_host(options, rows, variants=3, chance=chance)
        assert needed.bytes == 3 * 6 * rows.row_bytes * rows.share
