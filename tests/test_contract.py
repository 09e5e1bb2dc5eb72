"""The contract that every algorithm keeps: those registered, and three toys.

The toys are the proof of the design: a boundary per client and round, depth masks with
statistics and a ledger, and peers that mix two groups of stages differently. They run
through the same engine, loop, checkpoint and evaluation as all others.
"""

import dataclasses
import logging

import chex
import jax
import numpy as np
import pytest

import algorithms
import models
from data import loaders
from fedjax_pfl import checkpoint
from launch import build, flags, settings
from tests.toys import gossip, ledger, model, spliced

TOYS = {"toy_spliced": spliced, "toy_ledger": ledger, "toy_gossip": gossip}
OWN_OPTIONS = {
    "toy_ledger": {"model": "with_exits"},
    "cdkt": {"proxy_fraction": 0.1},
    "local": {"proxy_fraction": 0.1},
    # Two architectures: two stacked groups.
    "fedmd": {"proxy_fraction": 0.1, "client_model": "mlp,narrow"},
    "fedrep": {"local_epochs": 2, "head_epochs": 1},
    # The boundary moves in every round.
    "fedrep_plus": {"local_epochs": 2, "head_epochs": 1, "drop_every": 1},
    "fedper_plus": {"drop_every": 1},
    "fedd2s": {"drop_every": 1, "optimizer_state": "persist"},
}
NAMES = [*algorithms.ALGORITHMS, *TOYS]


@pytest.fixture(autouse=True)
def _toys(monkeypatch):
    for name, module in TOYS.items():
        monkeypatch.setitem(algorithms.ALGORITHMS, name, module)
    monkeypatch.setitem(models.MODELS, "with_exits", model.with_exits)
    monkeypatch.setitem(models.MODELS, "narrow", model.narrow)


def build_experiment(name, dataset, **given):
    """Seven unequal clients, five a round, on one device unless told otherwise."""
    options = {
        "model": "mlp",
        "preset": "none",
        "clients_per_round": 5,
        "rounds": 3,
        "batch_size": 16,
        "local_epochs": 1,
        "client_lr": 0.1,
        "devices": 1,
        "client_chunk": 1,
    }
    options |= OWN_OPTIONS.get(name, {}) | given
    known = settings.fields_of(name)
    options = {key: value for key, value in options.items() if key in known}
    config, hparams = settings.configure({"algo": name, "dataset": dataset, **options})
    source = loaders.load(dataset, "")
    config = settings.resolve(config, source, options)
    depth = 1 + np.arange(config.num_clients, dtype=np.int32) % 3
    return build.assemble(config, hparams, source, depth)


def final_state(*args, **given):
    """The state after the run, as numpy leaves."""
    experiment = build_experiment(*args, **given)
    experiment.run()
    return experiment, (experiment.state.server, experiment.state.clients)


@pytest.mark.parametrize("name", NAMES)
def test_learns_and_compiles_once(name, unequal, caplog):
    """init, rounds and evaluate compile once each; all finite; the loss falls."""
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        experiment, state = final_state(name, unequal, rounds=5, eval_every=2)
    compiled = [
        record.getMessage().split()[4]
        for record in caplog.records
        if record.getMessage().startswith("Finished XLA compilation of")
    ]
    for program in ("jit(init)", "jit(rounds)", "jit(count)"):
        assert compiled.count(program) == 1, compiled
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    losses = [r["train_loss"] for r in experiment.metrics if "train_loss" in r]
    assert name == "majority" or losses[-1] < losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_chunk_and_devices_do_not_matter(name, unequal):
    """Chunks of 3 (with padding rows) and 4 devices agree with one by one."""
    _, alone = final_state(name, unequal)
    _, chunked = final_state(name, unequal, client_chunk=3)
    _, sharded = final_state(name, unequal, devices=4, client_chunk=2)
    chex.assert_trees_all_close(alone, chunked, atol=1e-5)
    chex.assert_trees_all_close(alone, sharded, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_restored_run_is_the_same(name, unequal, tmp_path):
    """4 rounds at once = 2, save, restore, 2: bit for bit, metrics too."""
    whole, state = final_state(name, unequal, rounds=4, eval_every=1)
    first = build_experiment(name, unequal, rounds=4, eval_every=1)
    first.run(until=2)
    arrays, host = first.saved()
    checkpoint.save(tmp_path, 2, arrays, host)
    second = build_experiment(name, unequal, rounds=4, eval_every=1)
    round, arrays, host = checkpoint.restore(tmp_path, second.saved_template())
    second.load(round, arrays, host, list(first.metrics))
    second.run()
    resumed = (second.state.server, second.state.clients)
    assert checkpoint.digest(resumed) == checkpoint.digest(state)

    def untimed(records):
        return [{k: v for k, v in r.items() if k != "seconds"} for r in records]

    assert untimed(second.metrics) == untimed(whole.metrics)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_in_one_program(name, unequal):
    """Two seeds in one program equal the single runs, bit for bit."""
    _, both = final_state(name, unequal, num_seeds=2, seed=5)
    for index, seed in enumerate((5, 6)):
        _, one = final_state(name, unequal, seed=seed)
        mine = jax.tree.map(lambda leaf, i=index: leaf[i], both)
        chex.assert_trees_all_equal(mine, jax.tree.map(lambda leaf: leaf[0], one))


@pytest.mark.parametrize("name", NAMES)
def test_absent_clients_are_untouched(name, unequal):
    """A round leaves the private rows of absent clients bitwise alone."""
    experiment = build_experiment(name, unequal, rounds=1)
    experiment.start()
    before = jax.tree.map(np.array, experiment.state.clients)
    cohort = experiment.cohorts(0, 0)
    absent = np.setdiff1d(np.arange(7), cohort.client_id)
    assert len(absent) == 2
    experiment.run()
    # Groups of one architecture have rows for their members only.
    groups = np.asarray(experiment.task.group_of_client)
    members = [np.arange(7), *(np.flatnonzero(groups == g) for g in np.unique(groups))]
    slots = {len(ids): np.flatnonzero(np.isin(ids, absent)) for ids in members}

    def of_absent(tree):
        return jax.tree.map(
            lambda leaf: np.asarray(leaf)[0, slots[leaf.shape[1]]], tree
        )

    chex.assert_trees_all_equal(of_absent(before), of_absent(experiment.state.clients))


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_every_option(name, capsys):
    """--algo=NAME --help lists every field with its help text."""
    with pytest.raises(SystemExit):
        flags.parse(["main", f"--algo={name}", "--help"])
    shown = capsys.readouterr().out
    for field in dataclasses.fields(algorithms.ALGORITHMS[name].HParams):
        assert f"--{field.name}=" in shown
        assert field.metadata["help"] in shown
