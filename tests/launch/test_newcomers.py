"""Validation rows, clients that never train, and models adapted before measuring."""

import functools
import re
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest

import fedjax_pfl as fp
import models
from data import plan
from fedjax_pfl import averaging, evaluate, levels, local_training, traffic, types
from launch import build, main
from launch.folder import finished
from tests.toys import model as toy

pytestmark = pytest.mark.usefixtures("narrow")
GEN = np.random.default_rng(1)
X = GEN.normal(size=(240, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)
COMMON = {
    "algo": "fedavg",
    "dataset": (X, Y, np.arange(240) // 24),
    "preset": "none",
    "rounds": 2,
    "local_epochs": 1,
    "batch_size": 5,
    "clients_per_round": 4,
    "model": "narrow",
    "devices": 1,
}
NEW = {"val_split": 0.25, "unseen_clients": 3, "fine_tune_epochs": 2}


def ran(**given):
    """A finished small experiment."""
    experiment = build.experiment(**COMMON | given)
    experiment.run(progress=False)
    return experiment


def planned(**given):
    """A small experiment that does not run."""
    return build.experiment(**COMMON | given)


def part(experiment):
    """The partition of the first seed, as numpy arrays."""
    every = jax.tree.map(np.asarray, experiment.data.partition)
    return jax.tree.map(lambda leaf: leaf[0], every)


def rows(table, client):
    """The rows of a client."""
    start = table.start[client]
    return np.asarray(table.row[start : start + table.count[client]])


@functools.partial(jax.jit, static_argnames=("model", "level"))
@functools.partial(jax.grad, has_aux=True)
def slope(params, model, stats, x, y, level):
    """Gradient of the cross-entropy, summed over the held exits, and statistics."""
    mode = {"sample_mask": jnp.ones(len(x), bool), "train": True}
    out, stats = model.forward(params, stats, jnp.asarray(x), **mode)
    exits = out[:level] if model.has_exits else (out,)
    of = optax.softmax_cross_entropy_with_integer_labels
    return sum(of(one, y).mean() for one in exits), stats


def adapted(experiment, client, num_epochs, pull=None):
    """A client's served model after plain SGD on its train rows, one batch a step.

    `pull` is (weight, parameters) of a proximal term.
    """
    mine, model = experiment.client_model(client), experiment.task.model
    params, stats = jax.device_get(mine.variables)
    table = np.asarray(experiment.data.replace(partition=None).normalised(X))
    own = rows(part(experiment).adapting, client)
    level = len(params)
    if model.has_exits:
        level = int(levels.assigned(experiment.hparams, 10)[0][client])
    size, lr = experiment.hparams.batch_size, experiment.hparams.client_lr
    drop_last = experiment.hparams.drop_last
    spec = types.PlanSpec("adapt", num_epochs, size, drop_last=drop_last)
    named = np.array([client]), np.array([len(own)])
    order = plan.orders(0, experiment.round, *named, spec).reshape(num_epochs, -1)
    for epoch in order:
        for first in range(0, len(epoch), size):
            taken = own[epoch[first : first + size]]
            given = params, model, stats, table[taken], Y[taken], level
            grads, new = jax.device_get(slope(*given))
            stats = (*new[:level], *stats[level:])
            if pull is not None:
                weight, to = pull
                apart = jax.tree.map(np.subtract, params, to)
                pulled = jax.tree.map(lambda gap, w=weight: w * gap, apart)
                grads = jax.tree.map(np.add, grads, pulled)
            params = jax.tree.map(lambda p, g: p - lr * g, params, grads)
    return model, params, stats


def test_validation_rows_are_train_rows_with_the_same_class_mix():
    with_val, without = part(planned(**NEW)), part(planned())
    for client in range(10):
        train, val = rows(with_val.adapting, client), rows(with_val.val, client)
        both = rows(without.train, client)
        assert sorted([*train, *val]) == sorted(both)
        assert [row for row in both if row in set(train)] == list(train)
        assert len(val) == len(both) // 4
        share = np.bincount(Y[val], minlength=3) / len(val)
        np.testing.assert_allclose(
            share, np.bincount(Y[both], minlength=3) / len(both), atol=1 / len(val)
        )
        assert (rows(with_val.test, client) == rows(without.test, client)).all()


def own_split(**given):
    """The common data with test and validation rows of their own, of owners."""
    x, y, owner = COMMON["dataset"]
    split = {"test": slice(160, 200), "val": slice(200, 240)}
    parts = {name: (x[rows], y[rows], owner[rows] % 6) for name, rows in split.items()}
    return {"dataset": (x[:160], y[:160], owner[:160] % 6), **parts} | given


def test_validation_rows_of_the_data():
    """Natural clients validate on their own, others' models on all; none trains."""
    without = ran(**own_split(val=None))
    mine, alone = ran(**own_split()), ran(**own_split(partition="iid", num_clients=4))
    assert mine.config.test_split == "official"
    for client in range(6):
        val = rows(part(mine).val, client)
        np.testing.assert_array_equal(
            val, 200 + np.flatnonzero(COMMON["dataset"][2][200:] % 6 == client)
        )
        np.testing.assert_array_equal(mine.rows(client, "val"), val)
    assert part(alone).val.count.sum() == 0
    said = [line for line in alone.notes if "validation rows belong to no" in line]
    assert len(said) == 1 and not any("to no client" in line for line in mine.notes)
    plain = [
        {n: v for n, v in one.items() if n[:4] != "val_" and n != "seconds"}
        for one in mine.metrics
    ]
    said = [{n: v for n, v in one.items() if n != "seconds"} for one in without.metrics]
    assert plain == said
    twin = mine.summary()["metrics"]
    accuracy = mine.evaluate(X[200:], Y[200:])["accuracy"]
    np.testing.assert_allclose(twin["val_global_accuracy"]["mean"], accuracy, atol=1e-6)
    assert "val_client_accuracy" in twin and "client_accuracy" in twin
    names = alone.summary()["metrics"]
    assert "val_global_accuracy" in names


def test_validation_rows_of_the_data_choose():
    given = {"rounds": 8, "eval_every": 1, "early_stop": 2, "num_seeds": 2}
    stopped = ran(**own_split(**given))
    assert stopped.config.summary == "best_validation" and stopped.round <= 8
    for seed, value in zip(
        stopped.seeds,
        stopped.summary()["metrics"]["best_round"]["per_seed"],
        strict=True,
    ):
        found = [one for one in stopped.metrics if one["seed"] == seed]
        top = max(found, key=lambda one: one["val_client_accuracy"])
        assert top["round"] == value
    with pytest.raises(ValueError, match="--val_split=0.2: the data bring 40 .* omit"):
        planned(**own_split(val_split=0.2))
    x, y, owner = COMMON["dataset"]
    with pytest.raises(ValueError, match="owners that only test or validation rows ha"):
        planned(dataset=(x[:40], y[:40], owner[:40]), val=(x, y, owner))
    free = {"partition": "iid", "num_clients": 4, "algo": "fedper"}
    with pytest.raises(ValueError, match="--algo=fedper has no server's model to meas"):
        planned(**own_split(**free, summary="best_validation"))
    made = planned(**own_split(test=None, test_split="client_share"))
    (line,) = [one for one in made.notes if "rows stay as they are" in one]
    assert line.startswith("--test_split=client_share is of the other rows")


def few_owners(algo="fedper", **given):
    """Owner 1 has 2 rows, and alone owns test or validation rows if any are owned."""
    rows = (X[:40], Y[:40], np.repeat([0, 1], [38, 2]))
    common = {"preset": "none", "rounds": 2, "eval_every": 1, "model": "narrow"}
    common["devices"] = 1
    return build.experiment(algo=algo, **{"dataset": rows} | common | given)


OF_ONE, OF_NOBODY = (X[:6], Y[:6], np.ones(6, int)), (X[:6], Y[:6])


@pytest.mark.parametrize("gone", [{"min_owner_examples": 5}, {"num_clients": 1}])
def test_owners_that_are_no_clients(gone):
    """Nothing chooses by their rows or tests on them, which is said or refused."""
    for name, value in (("early_stop", 2), ("summary", "best_validation")):
        with pytest.raises(ValueError, match=f"^--{name}={value}: no validation row i"):
            few_owners(**gone, val=OF_ONE, **{name: value})
    said = " ".join(few_owners(**gone, val=OF_ONE).notes)
    assert "no validation row is left" in said or "6 of 6 validation rows" in said
    with pytest.raises(ValueError, match="official leaves no test row, as all are of"):
        few_owners(**gone, test=OF_ONE)


def test_owners_of_parts():
    """A dict of tables keeps the owners of test and validation rows."""
    names = list("abcde")
    table = pandas.DataFrame(X[:60, :5], columns=names)
    table = table.assign(label=Y[:60], client=np.arange(60) % 2)
    parts = {"train": table[:40], "test": table[40:50], "val": table[50:]}
    made = few_owners(dataset=parts)
    found = made.data.partition
    assert found.test.count.tolist() == found.val.count.tolist() == [[5, 5]]
    made = few_owners(dataset=parts, test_split="client_share")
    assert any("the rows that are test rows in the data" in one for one in made.notes)
    made = few_owners(dataset=parts, partition="iid", num_clients=2)
    said = [one for one in made.notes if "rows belong to no client; natural" in one]
    assert len(said) == 2
    with pytest.raises(ValueError, match="pool divides each client's .* take official"):
        few_owners(dataset=parts, test_split="pool")


def test_clients_without_rows_to_measure():
    """A line counts them, where others have some."""
    made = few_owners(test=OF_ONE, val=OF_ONE)
    lines = [one for one in made.notes if "count in none of the clients' metr" in one]
    empty = (np.asarray(made.data.partition.test.count[0]) == 0).sum()
    assert 0 < empty and f"{empty} of " in lines[0]
    assert ["no test rows" in lines[0], "no validation rows" in lines[1]] == [True] * 2
    made = few_owners(test=OF_NOBODY)
    assert not any("count in none" in one for one in made.notes)


def test_how_many_clients_are_in_a_mean():
    """Where that is not all: of test rows, of validation rows, and of newcomers."""
    owner = np.repeat(np.arange(6), [3, 20, 20, 3, 20, 3])
    given = {"dataset": (X[: len(owner)], Y[: len(owner)], owner), "val_split": 0.25}
    made = ran(**given, unseen_clients=2, partition_seed=1, fine_tune_epochs=1)
    mine, last = part(made), made.metrics[-1]
    new, tested, known = mine.is_unseen, mine.test.count > 0, mine.val.count > 0
    assert last["clients_evaluated"] == (tested & ~new).sum()
    assert last["val_clients_evaluated"] == (known & ~new).sum() < (~new).sum()
    kinds = "unseen_accuracy", "unseen_loss", "unseen_fine_tuned_accuracy"
    counts = [last.get(f"clients_in_val_{name}") for name in kinds]
    assert counts == [(known & new).sum()] * 3 != [new.sum()] * 3
    count = last.get("clients_in_unseen_accuracy", new.sum())
    assert count == (tested & new).sum()
    found = made.summary()["metrics"]
    assert found["client_accuracy"]["clients"] == last["clients_evaluated"]
    for name in ("val_client_accuracy", "val_fine_tuned_accuracy"):
        assert found[name]["clients"] == last["val_clients_evaluated"]
    assert found["val_unseen_accuracy"]["clients"] == counts[0]
    assert not {"val_clients_evaluated", "clients_evaluated"} & found.keys()


def test_trained_models_of_a_sample():
    """Those of a method without a server are of as many clients as the others."""
    made = ran(algo="local", eval_sample=3)
    found = made.summary()["metrics"]
    assert (
        found["trained_accuracy"]["clients"]
        == 3
        == made.metrics[-1].get("clients_evaluated")
    )


@pytest.mark.parametrize("eval_clients", ["selected", "all"])
def test_scored_clients_of_a_sample(eval_clients):
    """C-Spec, C-Gen and C-Per say how many clients of the sample are behind them."""
    given = {"c_gen": True, "eval_clients": eval_clients, "clients_per_round": 8}
    made = ran(**given, eval_sample=5)
    key = made.state.key[0] if made.state.key.ndim else made.state.key
    sample = np.asarray(evaluate.sampled_clients(key, 10, 5))
    drawn = np.asarray(made.planner.drawn(0, 2).client_id)
    scored = np.flatnonzero(sample)
    if eval_clients == "selected":
        scored = np.intersect1d(scored, drawn)
    last, found = made.metrics[-1], made.summary()["metrics"]
    assert 0 < len(scored) == last["clients_in_c_spec"] == last["clients_in_c_gen"]
    for name in ("c_spec", "c_gen", "c_per"):
        assert found[name]["clients"] <= len(scored)
    whole = ran(**given)
    assert not {"clients_in_c_spec", "clients_in_c_gen"} & whole.metrics[-1].keys()


def test_fine_tuning_takes_all_rows():
    """Whatever local training leaves out."""
    given = {"fine_tune_epochs": 2, "batch_size": 7}
    both = [planned(**given, **one) for one in ({}, {"examples_per_round": 2})]
    records = [one.run(until=0, progress=False) and one.metrics[0] for one in both]
    assert records[0]["fine_tuned_loss"] == records[1]["fine_tuned_loss"]


def test_fine_tuning_of_clients_without_a_whole_batch():
    """With --drop_last they are measured as they are, and a line says how many."""
    owner = np.arange(240) % 24 % 10  # 20 or 30 rows, of which some are for tests
    given = {"dataset": (X, Y, owner), "batch_size": 20, "drop_last": True}
    made = ran(**given, fine_tune_epochs=2, client_metrics="every", unseen_clients=5)
    frame = made.client_metrics()
    lacks = np.asarray(part(made).adapting.count) < 20
    same = frame[lacks[frame["client"]]]
    assert lacks.sum() == 6 and (same["fine_tuned_accuracy"] == same["accuracy"]).all()
    assert made.metrics[-1]["fine_tuned_loss"] != made.metrics[-1]["client_loss"]
    said = "--drop_last: 6 of 10 clients have fewer than the 20 train rows of a batch "
    assert said + "and are measured without --fine_tune_epochs" in made.notes
    plain = planned(**given | {"batch_size": 5}, fine_tune_epochs=2).notes
    assert not any("measured without" in note for note in plain)


def test_rows_of_nobody_without_a_server():
    """They measure no client's model, which a line says, and whether anything is."""
    for algo in ("fedper", "local"):
        made = few_owners(algo, test=OF_NOBODY, val=OF_NOBODY)
        assert sum("so that this run measures nothing" in n for n in made.notes) == 2
        made = few_owners(algo, test=OF_NOBODY, val=OF_ONE)
        assert sum("measures clients only; give" in one for one in made.notes) == 1
        made = few_owners(algo, test=OF_NOBODY, c_gen=True)
        assert not any("belong to no client" in one for one in made.notes)
    for algo, count in (("ditto", 2), ("fedavg", 0)):
        made = few_owners(algo, test=OF_NOBODY, val=OF_NOBODY)
        assert sum("the server's model alone" in one for one in made.notes) == count
    with pytest.raises(ValueError, match="^--early_stop=2: --algo=local has no server"):
        few_owners("local", val=OF_NOBODY, early_stop=2)


def test_unseen_clients_never_train_and_depend_on_the_seed():
    experiment = planned(**NEW)
    mine = part(experiment)
    unseen = np.flatnonzero(mine.is_unseen)
    assert len(unseen) == 3 and (mine.train.count[unseen] == 0).all()
    trained = {row for row in mine.train.row if row >= 0}
    assert len(trained) == mine.train.count.sum()
    own = {row for client in unseen for row in rows(mine.adapting, client)}
    assert own and not own & trained
    drawn = [experiment.planner.cohort(0, r).client_id for r in range(50)]
    assert set(np.concatenate(drawn)) == set(range(10)) - set(unseen)
    other = np.flatnonzero(part(planned(seed=3, **NEW)).is_unseen)
    assert set(other) != set(unseen)
    assert planned(**NEW | {"unseen_clients": 0.35}).planner.num_clients == 10


def test_unseen_clients_by_name(tmp_path, monkeypatch):
    """Those of every seed, by owners or numbers, on a line or as a list."""
    names = np.array(["uri", "bern", "zug, 1"])[np.arange(240) % 3]
    given = {"dataset": (X, Y, names), "num_seeds": 2, "clients_per_round": 0}
    run = ran(**given, unseen_names=["zug, 1"], workdir=str(tmp_path))
    assert run.owners == ("bern", "uri", "zug, 1")
    assert run.data.partition.is_unseen.tolist() == 2 * [[False, False, True]]
    assert part(run).train.count[2] == 0 and "unseen_accuracy" in run.metrics[-1]
    assert planned(**given, unseen_names='["zug, 1"]').hashes == run.hashes
    again = build.load(str(tmp_path), rounds=3, dataset=given["dataset"])
    assert again.config.unseen_names == run.config.unseen_names
    every = planned(unseen_names="1, 3"), planned(unseen_names=[np.int64(3), 1])
    for one in every:
        assert np.flatnonzero(part(one).is_unseen).tolist() == [1, 3]
    odd = {
        "unseen_names=bern": "expected one of 0, 1, 2",
        "unseen_names=1,1": "=1,1: expected different names",
        "unseen_names=1,,2": "expected different names",
        "unseen_names=0,1,2,3,4,5,6,7,8,9": "10 of --num_clients=10; expected fewer",
        "unseen_names=[1.5]": "expected a list of names .its .0. is a number",
        "unseen_names=1&unseen_clients=2": "does not go with --unseen_clients=2",
        "unseen_names=1&algo=dfedavg": "no server that gives a newcomer a model",
    }
    for line, words in odd.items():
        options = dict(pair.split("=") for pair in line.split("&"))
        if "unseen_clients" in options:
            options["unseen_clients"] = 2
        with pytest.raises(ValueError, match=words):
            planned(**options)
    monkeypatch.setitem(models.MODELS, "with_exits", toy.with_exits)
    few = {"algo": "depthfl", "level_mix": "1:1:1", "exclusive": True}
    with pytest.raises(ValueError, match="=0: 0 would not train anyway"):
        planned(**few, model="with_exits", unseen_names="0")


def test_what_is_measured_of_them():
    """The means over the two kinds of clients, from the models that serve them."""
    experiment = ran(algo="fedper", personal_from="last", **NEW)
    mine, last = part(experiment), experiment.metrics[-1]
    right = []
    for client in range(10):
        own = rows(mine.test, client)
        right.append((experiment.predict(client, X[own]).argmax(-1) == Y[own]).mean())
        trained = experiment.rows(client, "train")
        np.testing.assert_array_equal(trained, rows(mine.adapting, client))
    unseen, count = np.asarray(mine.is_unseen), mine.test.count
    right = np.array(right)
    pooled = (right * count)[~unseen].sum() / count[~unseen].sum()
    assert last["client_accuracy_pooled"] == pytest.approx(pooled)
    assert last["client_accuracy"] == pytest.approx(right[~unseen].mean())
    assert last["unseen_accuracy"] == pytest.approx(right[unseen].mean())
    assert last["clients_evaluated"] == 7
    np.testing.assert_allclose(experiment.kept.arrays[0, 0, 0], right)


@pytest.mark.parametrize(
    ("algo", "chunk"),
    [("fedavg", 1), ("fedper", 4), ("ditto", 1), ("cdkt", 1), ("depthfl", 4)],
)
def test_fine_tuning_equals_a_plain_loop(algo, chunk, monkeypatch):
    """In batches of which the last is short, but with --drop_last (fedper here)."""
    more = {
        "fedper": {"personal_from": "last", "drop_last": True},
        "depthfl": {"self_distill_weight": 0.0},
    }
    more["cdkt"] = {"proxy_fraction": 0.1}
    if algo == "depthfl":
        monkeypatch.setitem(models.MODELS, "with_exits", toy.with_exits)
        more["depthfl"] |= {"feddyn_alpha": 0.0, "model": "with_exits"}
        more["depthfl"]["level_mix"] = "1:1:1"
    given = NEW | more.get(algo, {}) | {"algo": algo, "client_chunk": chunk}
    given["devices"] = 1 if chunk == 1 else 2
    experiment = ran(**given)
    mine, last = part(experiment), experiment.metrics[-1]
    pull = None
    if algo == "ditto":
        server = jax.device_get(experiment.state.server.params)
        server = jax.tree.map(lambda leaf: leaf[0], server)
        pull = experiment.hparams.proximal_weight, server
    found, forward = [], jax.jit(experiment.task.model.forward)
    for client in range(10):
        model, params, stats = adapted(experiment, client, 2, pull)
        own = rows(mine.test, client)
        x = experiment.data.replace(partition=None).normalised(X[own])
        out, _ = forward(params, stats, x)
        out = sum(out) / len(out) if model.has_exits else out
        of = optax.softmax_cross_entropy_with_integer_labels
        found.append(float(of(out, Y[own]).mean()))
    unseen, found = np.asarray(mine.is_unseen), np.array(found)
    assert last["fine_tuned_loss"] == pytest.approx(found[~unseen].mean(), rel=1e-5)
    name = "unseen_fine_tuned_loss"
    assert last[name] == pytest.approx(found[unseen].mean(), rel=1e-5)


def test_each_device_has_one_plan_of_fine_tuning():
    """And not those of all devices, whose memory grew with their square."""
    made = planned(algo="fedper", devices=2, fine_tune_epochs=3)
    made.run(until=0, progress=False)
    seen = []
    found = made.simulation.evaluations
    for call in made.simulation.calls:
        for block in found._blocks(call):
            plan = found._members(call, block).plans["adapt"]
            seen += [one.data.shape[1] for one in plan.position.addressable_shards]
    assert seen == [1, 1]


def test_fine_tuning_of_few_large_clients():
    """The rate is that of the next round, the shuffles are those of the seed alone.

    Clients have more batches of test rows than training takes steps.
    """
    x = GEN.normal(size=(1400, 6)).astype(np.float32)
    given = {"dataset": (x, (x[:, 0] > 0).astype(int), np.arange(1400) // 700)}
    given |= {"rounds": 1, "eval_every": 1, "clients_per_round": 2, "batch_size": 300}
    # Almost 0 from round 1 on
    given |= {"fine_tune_epochs": 1, "client_lr": 0.3, "client_lr_decay": 1e-6}
    both, alone = ran(**given, num_seeds=2), ran(**given, seed=1)
    assert part(alone).test.count.min() > 2 * 64
    first, last = (one for one in both.metrics if one["seed"] == 1)
    assert abs(first["fine_tuned_loss"] - first["client_loss"]) > 1e-3
    assert last["fine_tuned_accuracy"] == last["client_accuracy"]
    assert last["fine_tuned_loss"] == pytest.approx(last["client_loss"], rel=1e-5)
    expected = pytest.approx(alone.metrics[0]["fine_tuned_loss"], rel=1e-6)
    assert first["fine_tuned_loss"] == expected


def test_somebody_trains_the_largest_level(monkeypatch):
    """A seed in which all that hold it are unseen is refused, with the next level."""
    given = {"algo": "heterofl", "level_mix": "2:2:1", "clients_per_round": 2}
    given |= {"num_clients": 5, "unseen_clients": 1, "num_seeds": 2}
    outcomes = set()
    for seed in range(8):
        try:
            made = planned(**given, seed=seed)
        except ValueError as error:
            words = r"--unseen_clients=1: with seed (\d+) all .* level 3 .*max_level=2$"
            assert int(re.match(words, str(error))[1]) in (seed, seed + 1)
            assert planned(**given, seed=seed, max_level=2)
            outcomes.add("refused")
        else:
            assert not np.asarray(made.data.partition.is_unseen)[:, -1].any()
            outcomes.add("made")
    assert outcomes == {"refused", "made"}
    # Of Split-Mix all clients train all bases in turn.
    given |= {"algo": "splitmix", "num_bases": 3, "num_seeds": 1}
    assert all(planned(**given, seed=seed) for seed in range(8))
    # InclusiveFL's clients learn of the next level.
    monkeypatch.setitem(models.MODELS, "with_exits", toy.with_exits)
    given = NEW | {"algo": "inclusivefl", "model": "with_exits", "level_mix": "1:1:1"}
    given |= {"num_clients": 3, "unseen_clients": 1, "clients_per_round": 1}
    lines = []
    for seed in range(12):
        try:
            planned(**given, momentum_distill_weight=0.3, seed=seed)
        except ValueError as error:
            lines.append(str(error))
    assert any("level 2 are unseen, of which the level below" in one for one in lines)


def test_accuracies_by_architecture(monkeypatch):
    """Of clients that may train, before they are fine-tuned."""

    def other(num_classes, width=1.0):
        return toy.narrow(num_classes, width)._replace(name="other")

    monkeypatch.setitem(models.MODELS, "other", other)
    given = {"algo": "fedmd", "proxy_fraction": 0.1, "client_model": "narrow,other"}
    experiment = planned(**given, unseen_clients=3, fine_tune_epochs=1)
    found, is_even = GEN.uniform(size=(2, 10)), np.arange(10) % 2 == 0
    unseen = part(experiment).is_unseen
    of_clients = dict(zip(experiment.kept.names, found, strict=True))
    assert experiment._by_architecture(of_clients, 0) == pytest.approx(
        {
            "client_accuracy_narrow": found[0][is_even & ~unseen].mean(),
            "client_accuracy_other": found[0][~is_even & ~unseen].mean(),
            "clients_in_client_accuracy_narrow": (is_even & ~unseen).sum(),
            "clients_in_client_accuracy_other": (~is_even & ~unseen).sum(),
        }
    )


@pytest.mark.parametrize(
    ("algo", "label"), [("fedmd", 0), ("cdkt", 1), ("fedavg", None)]
)
def test_bytes_of_sending_a_proxy_set_once(algo, label):
    """To all ten clients: six floats a row, and a byte for a label that is sent."""
    experiment = planned(algo=algo, **{} if label is None else {"proxy_fraction": 0.1})
    size = 0 if label is None else 10 * experiment.task.num_proxy * (6 * 4 + label)
    assert experiment.setup_bytes() == size


def test_bytes_of_labels():
    """Those of more than 256 classes have two."""
    sizes = {1: 1, 2: 1, 256: 1, 257: 2, 65_536: 2, 65_537: 3}
    assert list(map(traffic.label_bytes, sizes)) == list(sizes.values())
    for algo, name, size in (
        ("fedd2s", "labels", 2),
        ("fedproto", "prototypes down", 4 * 10 + 2),
        ("cdkt", "", None),
    ):
        x, y = GEN.normal(size=(600, 6)), np.arange(600) % 300
        given = {"num_clients": 3, "proxy_fraction": 0.1 * (algo == "cdkt")}
        given |= {"partition": "iid", "preset": "none", "model": "narrow"}
        made = build.experiment(algo=algo, dataset=(x, y), **given)
        sent = {one.name: one.num_bytes for one in made.program.algorithm.messages}
        if size is None:
            each = made.setup_bytes() / (3 * made.task.num_proxy)
            assert each == 6 * 8 / 2 + 2
        else:
            assert sent[name] == size


@pytest.mark.parametrize("state", ["replicated", "device", "host"])
def test_it_leaves_the_run_as_it_is(state):
    """The bits of all else are those of a run that does not measure it."""
    few = {name: NEW[name] for name in ("val_split", "unseen_clients")}
    given = few | {"algo": "ditto", "client_state": state, "devices": 2}
    plain, tuned = ran(**given), ran(**given, fine_tune_epochs=2)
    sums = [one.summary()["parameters_sha256"] for one in (plain, tuned)]
    assert sums[0] == sums[1]
    for one, other in zip(plain.metrics, tuned.metrics, strict=True):
        shared = one.keys() - {"seconds"}
        assert {n: one[n] for n in shared} == {n: other[n] for n in shared}
        assert "fine_tuned_loss" in other and "val_fine_tuned_loss" in other


@pytest.mark.parametrize(
    "summary, by",
    [
        ("best_validation", "val_client_accuracy"),
        ("best", "client_accuracy_pooled"),
    ],
)
def test_the_best_round(tmp_path, summary, by):
    """By validation rows, or by test rows where that is asked for, and then said."""
    given = {"rounds": 6, "eval_every": 1, "num_seeds": 2, "val_split": 0.25}
    folder = str(tmp_path / "run")
    experiment = ran(**given, summary=summary, workdir=folder)
    said = [note for note in experiment.notes if "by test rows" in note]
    assert len(said) == (summary == "best")
    summary = experiment.summary()
    for place, seed in enumerate(experiment.seeds):
        mine = [one for one in experiment.metrics if one["seed"] == seed]
        best = max(mine, key=lambda one: (one[by], -one["round"]))
        metrics = summary["metrics"]
        assert metrics["best_round"]["per_seed"][place] == best["round"]
        assert metrics["client_accuracy"]["per_seed"][place] == best["client_accuracy"]
        kept = np.load(f"{folder}/clients.npz")
        assert kept["best_round"][place] == best["round"]
        mean = np.nanmean(kept["accuracy"][place, 0])
        assert mean == pytest.approx(best["client_accuracy"])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            experiment.predict(0, X[:1], seed=seed)
        # Models are those of the last round.
        assert len(said) == (best["round"] < 6)
        line = f"summary of seed {seed} is that of round {best['round']}, by"
        assert all(line in str(one.message) for one in said)


def test_early_stop(tmp_path, capsys):
    """It ends when no validation became better, and a resumed run ends there, too."""
    given = {"client_lr": 0.0, "rounds": 30, "eval_every": 2, "val_split": 0.25}
    given |= {"early_stop": 4, "workdir": str(tmp_path / "run")}
    experiment = ran(**given)
    assert experiment.round == 4
    assert experiment.summary()["stopped_early"]
    again = ran(**given)
    assert (again.round, again.summary()["rounds"]) == (4, 4)
    line = "--early_stop=4: no validation became better in the last 4 rounds, so the "
    capsys.readouterr()
    again.extend(40).run()
    assert capsys.readouterr().out.endswith(f"{line}run ends after round 4\n")
    main.execute(COMMON | given)
    assert f"{line}run ends after round 4\n" in capsys.readouterr().out


def test_early_stop_waits_for_all_variants():
    """One of two points never becomes better."""
    given = {"rounds": 30, "val_split": 0.25, "eval_every": 1, "early_stop": 2}
    experiment = ran(**given, sweep={"client_lr": [0.0, 0.1]})
    best = [experiment.best_round(variant) for variant in range(2)]
    assert best[0] == 0 < best[1]
    assert experiment.round - max(best) == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"summary": "best_validation"}, "--val_split=0.2"),
        ({"early_stop": 5}, "val_split"),
        ({"early_stop": 5, "val_split": 0.2, "summary": "last"}, "--summary=last"),
        ({"unseen_clients": 2, "eval_sample": 3}, "eval_sample"),
        ({"val_split": 0.01}, "--val_split=0.01 leaves no validation row"),
        ({"unseen_clients": 10}, "--unseen_clients=10"),
        ({"unseen_clients": 2.5}, "--unseen_clients=2.5"),
        ({"unseen_clients": 7, "clients_per_round": 4}, "--unseen_clients"),
        ({"unseen_clients": 2, "algo": "dfedavg"}, "has no server"),
        (
            {"fine_tune_epochs": 2, "algo": "majority", "clients_per_round": 10},
            "do not train",
        ),
    ],
)
def test_refusals(given, words):
    common = dict(COMMON)
    if given.get("algo") == "majority":
        common = {name: COMMON[name] for name in ("dataset", "preset", "model")}
    with pytest.raises(ValueError, match=words) as found:
        build.experiment(**common | given)
    assert "\n" not in str(found.value)


MOMENTS = {
    "fedavg": {},
    "fedper": {"personal_from": "last"},
    "ditto": {},
    "cdkt": {"proxy_fraction": 0.1},
    "depthfl": {"model": "with_exits", "level_mix": "1:1:1", "feddyn_alpha": 0.0},
    "inclusivefl": {"model": "with_exits", "level_mix": "1:1:1", "levels": "maximum"},
}


@pytest.mark.parametrize("algo", MOMENTS)
def test_what_training_left(algo, monkeypatch):
    """With one client a round it is that client's new model; all else is unchanged."""
    given = {"algo": algo, "clients_per_round": 1, "eval_every": 1, "val_split": 0.2}
    if "model" in MOMENTS[algo]:
        monkeypatch.setitem(models.MODELS, "with_exits", toy.with_exits)
    one, both = (
        ran(**given | MOMENTS[algo], eval_moments=m, rounds=3)
        for m in ("before", "both")
    )
    assert one.simulation.digest() == both.simulation.digest()
    for a, b in zip(one.metrics, both.metrics, strict=True):
        own = {"trained_accuracy", "clients_in_trained_accuracy"} & b.keys()
        rest = {n: x for n, x in b.items() if n not in {*own, "seconds"}}
        assert not own or b["clients_in_trained_accuracy"] == 1
        assert rest == {n: x for n, x in a.items() if n != "seconds"}
    (client,) = both.planner.drawn(0, 2).client_id[both.planner.drawn(0, 2).row_mask]
    own = rows(part(both).test, client)
    model = None if algo == "fedavg" else int(client)
    right = (both.predict(model, X[own]).argmax(-1) == Y[own]).mean()
    assert both.metrics[-1]["trained_accuracy"] == pytest.approx(right, abs=1e-6)


def test_one_moment_alone():
    """after hides what is measured before; means are over the round's clients."""
    after = ran(algo="ditto", eval_moments="after")
    names = set(after.metrics[-1])
    assert "trained_accuracy" in names and "client_accuracy" not in names
    cohort = after.planner.drawn(0, 1)
    right = []
    for client in cohort.client_id[cohort.row_mask]:
        own = rows(part(after).test, client)
        found = after.predict(int(client), X[own]).argmax(-1)
        right.append((found == Y[own]).mean())
    expected = pytest.approx(np.mean(right), abs=1e-6)
    assert len(right) == 4 and after.metrics[-1]["trained_accuracy"] == expected
    assert after.metrics[-1]["clients_in_trained_accuracy"] == 4
    assert after.summary()["metrics"]["trained_accuracy"]["clients"] == 4


def test_a_metric_that_a_moment_leaves_out():
    """A line says so at once, and not that it is undefined at the end."""
    given = {"eval_metrics": "macro_f1", "eval_moments": "after"}
    made = ran(algo="fedper", personal_from="last", **given)
    assert any("eval_metrics=macro_f1 has no effect" in one for one in made.notes)
    assert "undefined" not in made.summary()
    made = ran(algo="fedavg", **given)
    assert not [one for one in made.notes if "eval_metrics" in one]
    assert "global_macro_f1" in made.summary()["metrics"]


def test_rounds_without_test_rows():
    """No client of the round has any: the record has no accuracy, and not 0."""
    gen = np.random.default_rng(0)
    x = gen.normal(size=(60, 6)).astype(np.float32)
    given = {"dataset": (x, (x[:, 0] > 0).astype(int)), "rounds": 4}
    given |= {"model": "narrow", "devices": 1, "num_clients": 8}
    given |= {"partition": "dirichlet", "partition_alpha": 0.3}
    given |= {"test_split": "client_share", "preset": "none", "eval_every": 1}
    made = build.experiment(
        algo="fedavg", clients_per_round=1, eval_moments="both", **given
    )
    made.run(progress=False)
    count, seen = made.data.partition.test.count[0], set()
    for one in made.metrics[1:]:
        cohort = made.planner.drawn(0, one["round"] - 1)
        (client,) = cohort.client_id[cohort.row_mask]
        assert ("trained_accuracy" in one) == (count[client] > 0)
        seen.add(bool(count[client] > 0))
    assert seen == {False, True}
    official = given | {"test": given["dataset"], "test_split": "official"}
    with pytest.raises(ValueError, match="no test rows on which it could"):
        build.experiment(algo="fedavg", eval_moments="both", val_split=0.2, **official)


@pytest.mark.parametrize(
    ("algo", "line"),
    [
        ("apfl", "cannot be measured"),
        ("local", "both already"),
    ],
)
def test_moments_that_cannot_be_measured(algo, line):
    """One line."""
    with pytest.raises(ValueError, match=line):
        ran(algo=algo, eval_moments="both")


@pytest.mark.parametrize(
    "given", [{"algo": "heterofl"}, {"algo": "splitmix", "num_bases": 1}]
)
def test_moments_of_clients_with_a_part_of_the_model(given):
    """Also with one level, whose part is all of it: padding would count as clients."""
    with pytest.raises(ValueError, match="cannot be measured alone"):
        planned(**given, level_mix="1", model="mlp", eval_moments="both")


@pytest.mark.parametrize("unseen", [0, 3])
def test_adapting_by_sums_over_the_rows_of_a_client(unseen):
    """Each client's are its own train rows, also of those that never train."""

    def make(hparams, task):
        loss_fn = fp.cross_entropy_loss(task.model)

        def client_update(client, server):
            return fp.train(hparams, loss_fn, server, client)

        def adapt(client, start, server):
            """A model that answers with the classes of the client's rows, counted."""
            key = client.stream("mine.sums")
            count = local_training.sum_over_rows(
                lambda batch: jnp.zeros(4).at[batch.label].add(batch.mask),
                *(client.data, client.id, 5, key),
            )
            trained = fp.train(hparams, loss_fn, start, client)
            zeros = jax.tree.map(jnp.zeros_like, trained.params)
            last = jax.tree.map(lambda x: count if x.ndim == 1 else x, zeros[-1])
            return trained.replace(params=(*zeros[:-1], last))

        return averaging.make(hparams, task, client_update, adapt=adapt)

    algo = SimpleNamespace(HParams=averaging.Averaging, make=make)
    owner = np.repeat(np.arange(8), [20, 20, 20, 20, 28, 32, 40, 60])
    given = {"algo": algo, "dataset": (X, owner % 4, owner), "fine_tune_epochs": 1}
    made = ran(**given, unseen_clients=unseen)
    last = made.metrics[-1]
    assert last["fine_tuned_accuracy"] == 1
    assert last.get("unseen_fine_tuned_accuracy", 1) == 1
    assert ("unseen_fine_tuned_accuracy" in last) == (unseen > 0)


def test_class_counts_are_of_clients_that_never_train_too():
    made = planned(**NEW)
    (counts,) = finished.class_counts(made)
    assert counts.sum(1).tolist() == part(made).adapting.count.tolist()
    assert counts.sum(1).all() and part(made).is_unseen.any()
