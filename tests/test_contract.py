"""The contract that every algorithm keeps: those registered, and the toys.

The toys are the proof of the design: a boundary per client and round, levels of depth
with statistics and a ledger, a drawn graph of peers, frozen exits on trained trunks,
masks of single weights, and widths as slices. They run through the same engine, loop,
checkpoint and evaluation as all others.

One run of four rounds is the reference of all tests of a name; others share its
compiled programs.
"""

import dataclasses

import chex
import jax
import numpy as np
import pytest

import algorithms
import models
from data import texts as texts_lib
from fedjax_pfl import checkpoint, each_client, levels, program, shapes
from launch import build
from launch.assemble import assemble, given
from launch.config import flags, registry
from models import text
from tests import texts
from tests.toys import frozen, gossip, ledger, model, sparse, spliced, taught, widths

TOYS = {
    "toy_spliced": spliced,
    "toy_ledger": ledger,
    "toy_gossip": gossip,
    "toy_frozen": frozen,
    "toy_sparse": sparse,
    "toy_widths": widths,
}
# The same algorithms on rows of tokens
ON_TEXT = {"text_fedper": "fedper", "text_depthfl": "depthfl"}
TEXT = {"dataset": "small", "partition": "natural"}
OWN_OPTIONS = {
    "text_fedper": TEXT | {"model": "one_layer"},
    "text_depthfl": TEXT
    | {
        "model": "two_layers",
        "level_mix": "1:1",
        "client_momentum": 0.5,
        "optimizer_state": "persist",
    },
    "toy_ledger": {"model": "with_exits", "level_mix": "1:1:1"},
    "toy_widths": {"level_mix": "1:1"},
    "toy_frozen": {"model": "with_exits"},
    "cdkt": {"proxy_fraction": 0.1},
    "fedbn": {"model": "normed"},
    "local": {"proxy_fraction": 0.1},
    # Two architectures: two stacked groups.
    "feddf": {"proxy_fraction": 0.1, "distill_steps": 3},
    "fedmd": {"proxy_fraction": 0.1, "client_model": "mlp,narrow"},
    # The boundary moves in every round.
    "fedrep_plus": {
        "model": "mlp",
        "local_epochs": 2,
        "head_epochs": 1,
        "drop_every": 1,
    },
    "fedd2s": {"model": "mlp", "drop_every": 1, "optimizer_state": "persist"},
    # A drawn graph in which a client is alone now and then.
    "dfedavg": {
        "topology": "erdos_renyi",
        "edge_probability": 0.2,
        "personal_from": "last",
        "client_momentum": 0.5,
        "optimizer_state": "persist",
    },
    # One, then two and four peers; the whole model, then a fifth of it.
    "criticalfl": {
        "num_peers": 1,
        "sparsify": True,
        "client_momentum": 0.5,
        "optimizer_state": "persist",
    },
    "dispfl": {
        "topology": "erdos_renyi",
        "edge_probability": 0.2,
        "client_momentum": 0.5,
        "clip_norm": 10.0,
    },
    # Levels of stages, widths or numbers, with momentum that is kept.
    "depthfl": {
        "model": "two_exits",
        "level_mix": "1:1",
        "client_momentum": 0.5,
        "optimizer_state": "persist",
    },
    "inclusivefl": {
        "model": "two_exits",
        "level_mix": "1:1",
        "client_momentum": 0.5,
        "optimizer_state": "persist",
    },
    # Adam counts its steps, for each slice and each base.
    "heterofl": {
        "level_mix": "1:1",
        "all_widths": True,
        "masked_cross_entropy": True,
        "client_optimizer": "adam",
        "client_lr": 0.003,
        "optimizer_state": "persist",
    },
    "splitmix": {
        "level_mix": "1:1",
        "num_bases": 2,
        "client_optimizer": "adam",
        "client_lr": 0.01,
        "optimizer_state": "persist",
    },
}
# The same functions as another name's, with options that hold there too.
COVERED = {
    "fedavgm": "fedadam",
    "fedyogi": "fedadam",
    "fedadagrad": "fedadam",
    "fedper_plus": "fedrep_plus",
    "fedrep": "fedrep_plus",
    "dfedper": "dfedavg",
    "dfedavgm": "dfedavg",
    "feddyn": "depthfl",
    "sheterofl": "heterofl",
}
OURS = [name for name in algorithms.ALGORITHMS if name not in COVERED]
SLOW = (*TOYS, *ON_TEXT)
LEVELLED = [
    name
    for name in OURS
    if issubclass(algorithms.ALGORITHMS[name].HParams, levels.Levels)
]
# A name of each frame: FedAvg's, control variates, a boundary, levels of stages, widths
# and numbers, peers, a proxy set, architectures, clients in turn, tables by sample.
FRAMES = (
    *("fedavg", "scaffold", "fedper", "depthfl", "heterofl", "splitmix"),
    *("dfedavg", "cdkt", "fedmd", "fedict", "fedd2s"),
)
# Names whose evaluation in chunks and on devices is compared too: the server's model,
# exits, rows of clients, architectures.
MEASURED = ("fedavg", "depthfl", "fedper", "fedmd")
COMMON = {
    "model": "narrow",  # two layers, for all that need no more
    "preset": "none",
    "clients_per_round": 5,
    "rounds": 4,
    "eval_every": 1,
    "batch_size": 16,
    "local_epochs": 1,
    "client_lr": 0.1,
    "devices": 1,
    "client_chunk": 1,
    "seed": 5,
}


def of_names(*names):
    """A test of each of these; the toys and the texts with `pytest -m slow` alone."""
    slow = pytest.mark.slow
    cases = [pytest.param(one, marks=slow) if one in SLOW else one for one in names]
    return pytest.mark.parametrize("name", cases, scope="module")


@pytest.fixture(autouse=True)
def _toys(monkeypatch):
    register_toys(monkeypatch)


def register_toys(monkeypatch):
    for name, module in TOYS.items():
        monkeypatch.setitem(algorithms.ALGORITHMS, name, algorithms.custom(module))
    for name, base in ON_TEXT.items():
        monkeypatch.setitem(algorithms.ALGORITHMS, name, algorithms.ALGORITHMS[base])
    monkeypatch.setitem(texts_lib.TEXTS, "small", texts.SMALL)
    monkeypatch.setitem(models.MODELS, "one_layer", one_layer)
    monkeypatch.setitem(models.MODELS, "two_layers", two_layers)
    monkeypatch.setitem(models.MODELS, "with_exits", model.with_exits)
    monkeypatch.setitem(models.MODELS, "two_exits", two_exits)
    monkeypatch.setitem(models.MODELS, "narrow", model.narrow)
    monkeypatch.setitem(models.MODELS, "normed", model.normed)


def two_layers(num_classes, width):
    return text.with_exits(num_classes, 8, 2)


def two_exits(num_classes, width):
    return model.with_exits(num_classes, width, 2)


def one_layer(num_classes, width):
    return text.with_one_exit(num_classes, 8, 1)


def build_experiment(name, dataset, **more):
    """Seven unequal clients, five a round, on one device unless told otherwise."""
    options = {"dataset": dataset} | COMMON | OWN_OPTIONS.get(name, {})
    options |= taught.options(name, dataset) | more
    known = registry.fields_of(name)
    options = {key: value for key, value in options.items() if key in known}
    settings = given.settled(algo=name, **options)
    return build.Experiment(assemble.assemble(settings))


def arrays_of(experiment):
    """What the rounds make: server, private rows and kept optimizer states."""
    state = experiment.state
    return jax.tree.map(np.array, (state.server, state.clients, state.opt_state))


def untimed(records):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


class Reference:
    """A name's run of four rounds, saved after the second, and what it compiled.

    `first`, `second` and `last` are its arrays before, after one and after all rounds.
    """

    def __init__(self, name, dataset, folder):
        program.forget()
        self.experiment = build_experiment(name, dataset)
        self.experiment.start()
        self.first = arrays_of(self.experiment)
        self.experiment.run(until=1)
        self.second = arrays_of(self.experiment)
        self.experiment.run(until=2)
        arrays, host = self.experiment.saved()
        checkpoint.save(folder, 2, arrays, host)
        self.folder, self.early = folder, list(self.experiment.metrics)
        self.experiment.run()
        made = self.experiment.simulation.program
        functions = made.init, made.rounds, made.of_shared, made.of_clients
        self.compiled = [len(one.executables) for one in functions]
        self.last = arrays_of(self.experiment)


@pytest.fixture(scope="module")
def reference(name, unequal, tmp_path_factory):
    """The `Reference` of a name, while the tests of that name run."""
    with pytest.MonkeyPatch.context() as patch:
        register_toys(patch)
        return Reference(name, unequal, tmp_path_factory.mktemp("checkpoints"))


@of_names(*OURS, *SLOW)
def test_learns_and_compiles_once(name, reference):
    """init, rounds and evaluate compile once each; all finite; the loss falls."""
    assert reference.compiled == [1, 1, 1, 1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(reference.last))
    records = reference.experiment.metrics
    losses = [r["train_loss"] for r in records if "train_loss" in r]
    assert name == "majority" or losses[-1] < losses[0]
    ships = reference.experiment.program.algorithm.ships_proxy
    takes = algorithms.ALGORITHMS[name].public_images
    # FedDF's server alone has them.
    assert takes == (ships == "unlabelled" or name == "feddf")


@of_names(*OURS, *SLOW)
def test_chunks_and_devices_do_not_matter(name, reference, unequal):
    """Chunks of two rows, padding among them, are as one by one; so are two devices.

    How clients are put on devices is the frame's: one name of each shows it. Padding
    rows have numbers of nobody.
    """
    devices = min(2, jax.device_count()) if name in FRAMES else 1
    other = build_experiment(name, unequal, devices=devices, client_chunk=2)
    with each_client.padded_with(0.25):
        if name in MEASURED:
            other.run()
        else:
            other.simulation.advance_to(4)
    chex.assert_trees_all_close(arrays_of(other), reference.last, atol=1e-5)
    if name not in MEASURED:
        return
    mine = reference.experiment.metrics[0]
    for key, value in other.metrics[0].items():
        if key != "seconds":
            assert value == pytest.approx(mine[key], abs=1e-6), key


@of_names(*LEVELLED, "text_depthfl")
def test_masked_is_bucketed(name, reference, unequal):
    """Clients that compute the whole model, masked: the oracle of those that do not."""
    other = build_experiment(name, unequal, bucketed=False)
    other.simulation.advance_to(4)
    chex.assert_trees_all_close(arrays_of(other), reference.last, atol=1e-5)


@of_names(*OURS, *SLOW)
def test_restored_run_is_the_same(name, reference, unequal):
    """4 rounds at once = 2, save, restore, 2: bit for bit, metrics too."""
    second = build_experiment(name, unequal)
    restored = checkpoint.restore(reference.folder, *second.saved_templates())
    second.load(*restored, list(reference.early))
    second.run()
    chex.assert_trees_all_equal(arrays_of(second), reference.last)
    assert untimed(second.metrics) == untimed(reference.experiment.metrics)


@of_names(*OURS, *SLOW)
def test_seeds_in_one_run(name, reference, unequal):
    """The second of two seeds equals the reference, its single run, bit for bit.

    Where seeds are a vmapped axis, as on a GPU, sums may have another order.
    """
    both = build_experiment(name, unequal, num_seeds=2, seed=4)
    both.simulation.advance_to(4)
    mine = jax.tree.map(lambda leaf: leaf[1:], arrays_of(both))
    if both.task.execution.vmaps_runs:
        chex.assert_trees_all_close(mine, reference.last, atol=1e-5)
    else:
        chex.assert_trees_all_equal(mine, reference.last)


@of_names(*OURS, *SLOW)
def test_absent_clients_are_untouched(name, reference):
    """A round leaves the private rows of absent clients bitwise alone."""
    experiment = reference.experiment
    drawn = experiment.planner.drawn(0, 0)
    absent = np.setdiff1d(np.arange(7), drawn.client_id)
    assert len(absent) == 2
    before, after = reference.first, reference.second
    # Private rows and kept optimizer states; where there are several architectures,
    # each has a tree with rows for its own clients alone.
    for part in (1, 2):
        if len(experiment.task.client_models) == 1 or not before[part]:
            _assert_alone(before[part], after[part], absent)
            continue
        for group in range(len(experiment.task.client_models)):
            slots = np.flatnonzero(np.isin(experiment.task.members(group), absent))
            _assert_alone(before[part][group], after[part][group], slots)


def _assert_alone(before, after, slots):
    def rows(tree):
        return jax.tree.map(lambda leaf: leaf[0, slots], tree)

    chex.assert_trees_all_equal(rows(before), rows(after))


@of_names("dfedavg", "toy_gossip")
def test_a_client_is_alone_in_the_drawn_graph(name, reference):
    """What the tests above hold for: one without a peer, and others with some."""
    planner = reference.experiment.planner
    drawn = [planner.drawn(0, round) for round in range(4)]
    degrees = np.concatenate([one.peer_mask.sum(1)[one.row_mask] for one in drawn])
    assert 0 in degrees and degrees.max() > 1


@of_names("depthfl", "toy_ledger")
def test_stages_travel_to_who_holds_them(name, reference):
    """Messages of a run: a stage as often as one that holds it took part, each way."""
    experiment = reference.experiment
    drawn = [experiment.planner.drawn(0, round) for round in range(4)]
    depth = np.concatenate([one.level[one.row_mask] for one in drawn])
    sizes = shapes.stage_bytes(experiment.task.model, (8, 8, 1))
    counts = [int((depth > stage).sum()) for stage in range(len(sizes))]
    assert counts[0] == 20 and counts[-1] > 0 and (np.diff(counts) < 0).all()
    found = experiment.summary()["traffic"]
    assert len(found) == 2 * len(sizes)
    for stage, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        for way in ("down", "up"):
            kind = found[f"s{stage} {way}"]
            assert kind["messages"]["per_seed"] == [count]
            assert kind["bytes"]["per_seed"] == [count * size]


@pytest.mark.parametrize(
    "name", ["heterofl", "inclusivefl", "splitmix"], scope="module"
)
def test_the_last_exit_serves(name, reference):
    """Widths and budgets are reported as exits are; and HeteroFL's messages."""
    summary = reference.experiment.summary()
    assert {"exit1_accuracy", "exit2_accuracy"} <= summary["metrics"].keys()
    for record in reference.experiment.metrics:
        assert record["global_accuracy"] == record["exit2_accuracy"]
    assert ("ensemble_accuracy" in summary["metrics"]) == (name == "inclusivefl")
    if name != "heterofl":
        return
    sent = {k: v["messages"]["mean"] for k, v in summary["traffic"].items()}
    for way in ("down", "up"):
        assert sum(sent[f"width {level}/2 {way}"] for level in (1, 2)) == 20


@of_names("fedd2s", "criticalfl", "toy_gossip")
def test_a_summary_tells_numbers_from_shares(name, reference):
    """What rounds measure is a number unless the algorithm calls it a share."""
    summary = reference.experiment.summary()
    number = {"fedd2s": "mean_layer", "criticalfl": "peers", "toy_gossip": "gap"}[name]
    assert set(summary["numbers"]) - {"client_loss", "global_loss"} == {number}
    assert ("copies" in summary["metrics"]) == (name == "toy_gossip")


@of_names(*OURS, *SLOW)
def test_help_shows_every_option(name, capsys):
    """--algo=NAME --help lists every field with its help text."""
    with pytest.raises(SystemExit):
        flags.parse(["main", f"--algo={name}", "--help"])
    shown = capsys.readouterr().out
    for field in dataclasses.fields(algorithms.ALGORITHMS[name].HParams):
        assert f"--{field.name}=" in shown
        assert field.metadata["help"] in shown


@pytest.mark.parametrize("name", COVERED)
def test_covered_names_are_variants(name):
    """A name without a contract of its own is another name's functions."""
    entry = algorithms.ALGORITHMS[name]
    assert entry.make is algorithms.ALGORITHMS[COVERED[name]].make
