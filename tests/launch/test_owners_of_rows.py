"""Rows shared out over four devices: a run as on one, to rounding."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import local
from data import plan
from fedjax_pfl import stacked, types
from launch import build
from tests import programs, vectors

pytestmark = pytest.mark.usefixtures("narrow")
K = 30
OPTIONS = vectors.OPTIONS | {
    "num_clients": K,
    "clients_per_round": 6,
    "rounds": 3,
    "eval_every": 1,
}


@pytest.fixture(scope="module", name="vectors")
def _vectors():
    return vectors.drawn(K)


def made(vectors, devices, **options):
    given = {"dataset": vectors, "devices": devices, **OPTIONS, **options}
    return build.experiment(**given)


def arrays_of(experiment):
    state = experiment.state
    return jax.tree.map(np.asarray, (state.server, *state.private))


def assert_alike(one, other):
    chex.assert_trees_all_close(arrays_of(one), arrays_of(other), atol=1e-5)
    for a, b in zip(one.metrics, other.metrics, strict=True):
        assert a.keys() == b.keys()
        assert all(a[k] == pytest.approx(b[k], abs=1e-5) for k in a if k != "seconds")
    np.testing.assert_array_equal(one.kept.arrays, other.kept.arrays)


def assert_shared(four, num_gathers=0):
    """Each device has its clients' rows alone, and rows travel to who trains them.

    Nothing else is communicated meanwhile. Besides numbers of the clients, all devices
    get `num_gathers` arrays.
    """
    assert four.task.execution.shares_rows
    program = four.simulation.program
    (text,) = [x.as_text() for x in program.rounds.executables]
    assert " all-to-all(" in text
    assert programs.beside_loops(text) == []
    places = four.config.num_seeds * 8
    gathered = re.findall(r" = f32\[([\d,]*)\]\S* all-gather\(", text)
    sizes = [math.prod(map(int, one.split(","))) for one in gathered]
    assert len([n for n in sizes if n != places]) == num_gathers
    rows = jax.tree.leaves(four.simulation.calls[0].state.private)
    # 30 clients on 4 devices have 8 rows on each.
    assert rows and all(x.addressable_shards[0].data.shape[1] == 8 for x in rows)
    if program.algorithm.peers is not None:
        (text,) = [x.as_text() for x in program.of_clients.executables]
        assert " all-to-all(" in text
        assert programs.beside_loops(text) == []


# Models, heads, control variates and optimizer states of clients; a proxy set; seeds
# side by side, a sample of the clients, and all of them scored; rows of peers, also
# masks with which each client begins.
CASES = {
    "pfedsd": {"algo": "pfedsd", "c_gen": True, "eval_sample": 13},
    "selected": {"algo": "fedper", "c_gen": True, "eval_clients": "selected"},
    "fedper": {
        "algo": "fedper",
        "num_seeds": 2,
        "emulate": "accelerator",
        "c_gen": True,
        "eval_clients": "all",
    },
    "scaffold": {"algo": "scaffold", "client_chunk": 2},
    "cdkt": {"algo": "cdkt", "proxy_fraction": 0.1},
    "state": {
        "algo": "fedavg",
        "optimizer_state": "persist",
        "client_momentum": 0.5,
        "client_chunk": 2,
    },
    "uapdfl": {"algo": "uapdfl", "num_peers": 3, "divergence_threshold": 0.02},
    "dfedper": {"algo": "dfedper", "topology": "ring"},
    "dispfl": {"algo": "dispfl", "num_peers": 3},
    "criticalfl": {"algo": "criticalfl", "num_peers": 3, "sparsify": True},
    # With mae equal answers, as at the start, have the slope of rounding errors.
    "fedmd": {"algo": "fedmd", "proxy_fraction": 0.1, "public_loss": "kl"},
    "fedproto": {"algo": "fedproto", "optimizer_state": "persist"},
}


SLOW = pytest.mark.slow


SELDOM = "state", "selected", "fedper", "uapdfl", "dispfl", "criticalfl", "fedmd"
SELDOM += ("fedproto",)


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[SLOW] * (n in SELDOM)) for n in CASES]
)
def test_as_on_one_device(case, vectors):
    one, four = (made(vectors, n, **CASES[case]) for n in (1, 4))
    assert four.task.execution.shares_rows and not one.task.execution.shares_rows
    for experiment in (one, four):
        experiment.run(progress=False)
    assert_alike(one, four)
    # The server's logits and embeddings on the proxy set, of which each device has
    # some, unit representations, gradient norms and whose count
    assert_shared(four, {"cdkt": 2, "uapdfl": 1, "criticalfl": 3}.get(case, 0))
    if case in ("pfedsd", "uapdfl"):
        chosen = int(four.planner.drawn(0, four.round).client_id.min())
        server = [None] * (case == "pfedsd")
        for client in (0, chosen, K - 1, *server):
            found = [e.predict(client, vectors[0][:5]) for e in (one, four)]
            np.testing.assert_allclose(*found, atol=1e-6)


@SLOW
@pytest.mark.parametrize(
    "algo, state",
    [
        (algo, state)
        for algo in ("apfl", "ditto", "fedala", "fedd2s", "fedper", "fedrod")
        + ("lg_fedavg", "moon", "pfedme")
        for state in ("reset", "persist")
    ]
    + [(algo, "persist") for algo in ("cdkt", "feddyn", "splitmix")],
)
def test_trips_wait(algo, state, vectors):
    """No other communication is under way, whatever a method sums."""
    options = {"rounds": 1, "optimizer_state": state, "client_momentum": 0.5}
    options |= {"proxy_fraction": 0.1} if algo == "cdkt" else {}
    four = made(vectors, 4, algo=algo, **options)
    four.run(progress=False)
    (text,) = [x.as_text() for x in four.simulation.program.rounds.executables]
    assert " all-to-all(" in text
    assert programs.beside_loops(text) == []


@pytest.mark.parametrize(
    "before,after", [(4, 2), (1, 4), pytest.param(4, 1, marks=SLOW)]
)
def test_goes_on_with_another_number_of_devices(before, after, vectors, tmp_path):
    """And where rows were on the host: a checkpoint has the order of clients."""
    options = {"algo": "pfedsd", "num_seeds": 2}
    whole = made(vectors, 1, **options)
    whole.run(progress=False)
    folder = str(tmp_path / "run")
    state = {"client_state": "host"} if before == 1 else {}
    first = made(vectors, before, **options, **state, workdir=folder, rounds=2)
    first.run(progress=False)
    second = made(vectors, after, **options, workdir=folder, resume=True)
    second.run(progress=False)
    assert_alike(whole, second)


def test_replicated(vectors):
    """All rows on every device, as `fedict` has them, whose rows depend on clients."""
    for options in (
        {"algo": "pfedsd", "client_state": "replicated"},
        {"algo": "fedict"},
    ):
        experiment = made(vectors, 4, **options, rounds=1)
        assert not experiment.task.execution.shares_rows
        work = [experiment.planner.examples(0, r) for r in range(plan.SEEN_ROUNDS)]
        waits = 4 * np.max(work, axis=1).sum()
        balance = experiment.summary()["device_balance"]
        assert balance == pytest.approx(np.sum(work) / waits)
        experiment.start()
        leaf = jax.tree.leaves(experiment.state.clients)[0]
        assert leaf.addressable_shards[0].data.shape[1] == K


def test_the_last_line_says_how_even_devices_are(vectors):
    """Six clients on four devices: the slowest has two, wherever their rows are."""
    experiment = made(vectors, 4, algo="pfedsd")
    experiment.run(progress=False)
    assert experiment.summary()["device_balance"] == pytest.approx(1.5 / 2)
    assert re.search(r"of devices 0.75, on", str(experiment))


class ByClient:
    """Local training of a user's, in which the first clients alone are served."""

    HParams = local.HParams

    @staticmethod
    def make(hparams, task):
        made = local.make(hparams, task)

        def serving(state, cohort, data):
            mask = jnp.arange(task.num_clients) < 7
            return (types.Serving.each(task.client_model, state.clients, mask=mask),)

        return made._replace(serving=serving)


def test_an_algorithm_of_ones_own(vectors):
    """It may take slots for clients, unless it says that it does not."""
    one, four = (made(vectors, n, algo=ByClient, rounds=1) for n in (1, 4))
    for experiment in (one, four):
        experiment.run(progress=False)
    assert not four.task.execution.shares_rows
    assert_alike(one, four)
    said = type("Said", (), vars(local) | {"shares_rows": True, "__doc__": "Local."})
    assert made(vectors, 4, algo=said).task.execution.shares_rows


@pytest.mark.parametrize(
    "devices, options", [(4, {}), (1, {"client_state": "host"})], ids=["4", "host"]
)
def test_models_in_a_table_by_client(vectors, devices, options):
    """Rows move between slots, and a table of the server's does not."""

    class Table:
        """Local training, whose models are in the server's state too."""

        HParams, shares_rows = local.HParams, True

        @staticmethod
        def make(hparams, task):
            made = local.make(hparams, task)

            def init(data, key):
                table = stacked.repeat(task.init(task.model, key), task.num_clients)
                return made.init(data, key).replace(server=table)

            def round(state, cohort, data):
                after, *more = made.round(state, cohort, data)
                return after.replace(server=state.server), *more

            def serving(state, cohort, data):
                return (types.Serving.each(task.model, state.server),)

            return made._replace(init=init, round=round, serving=serving)

    words = f"Table declares shares_rows, and its serving .* from a table of {K} and"
    with pytest.raises(ValueError, match=words):
        made(vectors, devices, algo=Table, **options).start()


def test_stopped_in_a_window(vectors, tmp_path):
    """A run that goes on gives the same bits, and those of one device to rounding."""
    options = {"algo": "scaffold", "clients_per_round": 5, "rounds": 12}
    options["eval_every"] = 4
    whole = made(vectors, 4, **options)
    whole.run(progress=False)
    folder = str(tmp_path / "run")
    made(vectors, 4, **options | {"rounds": 7}, workdir=folder).run(progress=False)
    other = made(vectors, 4, **options, workdir=folder, resume=True)
    other.run(progress=False)
    chex.assert_trees_all_equal(arrays_of(whole), arrays_of(other))
    assert_shared(whole)
    one = made(vectors, 1, **options)
    one.run(progress=False)
    assert_alike(one, whole)


def test_programs_are_found_again(vectors):
    """Another run of the same settings compiles nothing."""
    first = made(vectors, 4, algo="pfedsd")
    again = made(vectors, 4, algo="pfedsd")
    assert again.program.rounds is first.program.rounds
