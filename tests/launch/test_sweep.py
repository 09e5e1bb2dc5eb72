"""Sweeps: every point is the run that it would be alone, in one program."""

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest

import models
from launch import build, export
from launch import main as main_lib
from launch.assemble import custom, notes
from launch.config import flags, resolve, sweep
from launch.folder import record
from launch.show import figures, words
from launch.show import page as page_lib
from tests import conftest
from tests.toys import model

pytestmark = pytest.mark.usefixtures("narrow")
RATES, WEIGHTS = (0.02, 0.1), (0.1, 1.0, 5.0)
SWEEP = {"client_lr": list(RATES), "proximal_weight": list(WEIGHTS)}
LINE = "client_lr=0.02,0.1;proximal_weight=0.1,1.0,5.0"


def make(blobs, algo="fedprox", **given):
    """Six small clients, three a round."""
    options = {"algo": algo, "dataset": blobs, "batch_size": 8, "eval_every": 1}
    options |= {"partition": "iid", "test_split": "client_share"}
    return build.experiment(**conftest.SIX | options | given)


def arrays(experiment, rows=slice(None)):
    """What is compared of a state."""
    state = experiment.simulation.state
    return jax.tree.map(
        lambda leaf: np.asarray(leaf)[rows], (state.server, state.clients)
    )


def untimed(records, leave=()):
    """Records without times and some names."""
    return [
        {k: v for k, v in one.items() if k not in ("seconds", *leave)}
        for one in records
    ]


@pytest.fixture(scope="module")
def swept(blobs, tmp_path_factory):
    """Two seeds at six points, in a folder; nobody changes it."""
    folder = tmp_path_factory.mktemp("swept") / "run"
    experiment = make(
        blobs, sweep=SWEEP, num_seeds=2, workdir=str(folder), tensorboard=True, csv=True
    )
    experiment.run(progress=False)
    return experiment, folder


def test_every_point_is_its_own_run(swept, blobs):
    """Bit for bit, its records too; all by one program."""
    experiment, _ = swept
    rounds = experiment.program.rounds
    assert len(rounds.executables) == 1 and len(experiment.simulation.calls) == 12
    for seed, rate, weight in ((0, 0.02, 1.0), (1, 0.1, 0.1)):
        point = {"client_lr": rate, "proximal_weight": weight}
        alone = make(blobs, seed=seed, **point)
        assert alone.program.rounds is rounds
        alone.run(progress=False)
        row = experiment.variant(seed, point)
        assert row == 6 * seed + experiment.points.index(point)
        chex.assert_trees_all_equal(arrays(experiment, row), arrays(alone, 0))
        mine = [
            one
            for one in experiment.metrics
            if one["seed"] == seed and sweep.matches(one, point)
        ]
        assert untimed(mine, point) == untimed(alone.metrics)
        assert list(mine[0])[:4] == ["round", "seed", "client_lr", "proximal_weight"]
        found = experiment.summary()["sweep"][experiment.points.index(point)]
        wanted = alone.summary()
        assert found["point"] == point
        name = "client_accuracy"
        per_seed = found["metrics"][name]["per_seed"]
        assert [per_seed[seed]] == wanted["metrics"][name]["per_seed"]
        assert (
            found["traffic"]["model up"]["bytes"]["mean"]
            == (wanted["traffic"]["model up"]["bytes"]["mean"])
        )
        np.testing.assert_array_equal(
            experiment.predict(2, np.zeros((1, 8, 8, 1), np.uint8), seed, point),
            alone.predict(2, np.zeros((1, 8, 8, 1), np.uint8)),
        )
        inside = experiment.predictions(2, "test", seed, point)
        assert inside.equals(alone.predictions(2))
    assert len(rounds.executables) == 1
    with pytest.raises(ValueError, match="point=None: expected one of the sweep's, {'"):
        experiment.predict(2, np.zeros((1, 8, 8, 1), np.uint8))


@pytest.mark.parametrize(
    "algo", ["fedper", pytest.param("depthfl", marks=pytest.mark.slow)]
)
def test_points_as_a_vmapped_axis(algo, blobs, monkeypatch):
    """As on accelerators: a call for each seed, with its plans once for all points.

    So a branch by level stays one branch for all of them.
    """
    monkeypatch.setitem(models.MODELS, "with_exits", model.with_exits)
    more = {"algo": algo, "sweep": {"client_lr": [0.02, 0.1, 0.3]}, "num_seeds": 2}
    if algo == "depthfl":
        more |= {"level_mix": "1:1:1", "model": "with_exits"}
    one, other = (
        make(blobs, **more, emulate=kind, client_chunk=1)
        for kind in ("", "accelerator")
    )
    for experiment in (one, other):
        experiment.run(progress=False)
    calls = other.simulation.calls
    assert [(len(one.variants), len(one.seeds)) for one in calls] == [(3, 1)] * 2
    window = other.simulation.windows.make(0, 2)
    assert window.cohorts[0].client_id.shape[0] == 1
    assert len(other.program.rounds.executables) == 1
    chex.assert_trees_all_close(arrays(one), arrays(other), rtol=0, atol=1e-6)
    # Each point's work counts, however many are computed at once.
    mine, theirs = one.totals, other.totals
    assert mine.samples == theirs.samples > 0 and mine.steps == theirs.steps
    assert mine.client_updates == theirs.client_updates
    assert [r["client_lr"] for r in other.metrics[:3]] == [0.02, 0.1, 0.3]


def test_a_folder_knows_its_points(swept, blobs, undrawn, capsys):
    """Records, clients, event files, tables and pictures have a point beside a seed."""
    experiment, folder = swept
    lines = [json.loads(one) for one in (folder / "metrics.jsonl").open()]
    assert len(lines) == 3 * 12
    pairs = [(one["client_lr"], one["proximal_weight"]) for one in lines[:6]]
    assert pairs == [(rate, weight) for rate in RATES for weight in WEIGHTS]
    assert f"--sweep={LINE}" in (folder / "run.flags").read_text().splitlines()
    with np.load(folder / "clients.npz") as file:
        assert file["accuracy"].shape[:2] == (2, 6)
        assert file["client_lr"].tolist() == [0.02] * 3 + [0.1] * 3
    names = {path.name for path in (folder / "tensorboard").iterdir()}
    assert len(names) == 12 and "seed1 client_lr=0.1 proximal_weight=5.0" in names
    head = (folder / "metrics.csv").read_text().splitlines()[0]
    assert head.startswith("round,seed,client_lr,proximal_weight,")
    frame = experiment.to_frame()
    assert list(frame)[:4] == ["round", "seed", "client_lr", "proximal_weight"]

    runs = record.by_point(record.read(folder))
    assert len(runs) == 6 and all(len(run.records) == 6 for run in runs)
    assert runs[4].flags["client_lr"] == "0.1" and runs[4].point == {
        "client_lr": 0.1,
        "proximal_weight": 1.0,
    }
    assert record.labels(runs)[4] == "fedprox client_lr=0.1 proximal_weight=1.0"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metrics"] == {}
    mean = summary["sweep"][4]["metrics"]["client_accuracy"]["mean"]
    out, point = (
        f"--output={folder.parent}/one.npz",
        "client_lr=0.1,proximal_weight=1.0",
    )
    export.command(["export", str(folder), out, f"--point={point}"])
    for wrong in ("", "client_lr=0.1"):
        with pytest.raises(SystemExit):
            export.command(["export", str(folder), out, f"--point={wrong}"])
        said = capsys.readouterr().err
        assert f"--point={wrong}: expected one of " in said and point in said
    assert runs[4].summary["metrics"]["client_accuracy"]["mean"] == mean
    np.testing.assert_allclose(np.nanmean(record.of_clients(runs[4])), 100 * mean)
    curves = figures.picture("curves", runs)
    assert len(curves.axes[0].lines) == 6
    heat = figures.picture("heatmap", runs).axes[0]
    assert (heat.get_xlabel(), heat.get_ylabel()) == ("client_lr", "proximal_weight")
    texts = {one.get_text() for one in heat.texts}
    assert len(heat.texts) == 6 and f"{100 * mean:.1f}" in texts
    assert len(experiment.plot("curves").axes[0].lines) == 6
    page = page_lib.page(page_lib.read([folder]))
    assert "a sweep of client_lr and proximal_weight" in page and ">Sweep<" in page
    assert "Its 6 points reach" in page and "is best" not in page
    table = words.table(summary).splitlines()
    assert (
        table[0].startswith("point")
        and "client_lr=0.1 proximal_weight=1.0 " in table[5]
    )
    assert "training on the test set" in table[7]
    # With validation rows the point that is best by them is named.
    entries = page_lib.read([folder])
    for number, one in enumerate(entries):
        value = {"mean": 0.9 - 0.1 * abs(number - 4), "per_seed": [0.5, 0.5], "std": 0}
        one.run.summary["metrics"]["val_client_accuracy"] = value
    page = page_lib.page(entries)
    assert "Best by validation rows: client_lr=0.1 proximal_weight=1.0 (" in page
    assert "training on the test set" not in page


def test_resumed_it_is_the_same(swept, blobs, tmp_path):
    """Stopped after a round and opened again: the bits of the whole."""
    whole, _ = swept
    folder = str(tmp_path / "run")
    first = make(blobs, sweep=LINE, num_seeds=2, workdir=folder)
    first.run(until=1, progress=False)
    again = build.load(folder)
    assert (again.round, again.points) == (1, whole.points)
    again.run(progress=False)
    chex.assert_trees_all_equal(arrays(again), arrays(whole))
    assert untimed(again.metrics) == untimed(whole.metrics)
    assert (
        again.summary()["parameters_sha256"] == (whole.summary()["parameters_sha256"])
    )
    with pytest.raises(ValueError, match="run-2, or continue that run with .*--work"):
        make(
            blobs, sweep="client_lr=0.02,0.3", num_seeds=2, workdir=folder, resume=True
        ).run(progress=False)


@pytest.mark.parametrize(
    "line, expected",
    [
        ("client_lr", "expected NAME=VALUE"),
        ("client_lr=0.1,x", "a value that is not a number"),
        ("client_lr=0.1,0.1", "client_lr has a value twice"),
        ("client_lr=0.1;client_lr=0.2", "client_lr is named twice"),
        ("client_lr=-1,0.1", "--client_lr=-1.0: expected at least 0"),
        ("local_epochs=1,2", "local_epochs is an integer.*compare"),
        ("aggregation=1,2", "aggregation is a choice.*compare"),
        ("partition_alpha=0.1,1", "partition_alpha shapes the data.*compare"),
        ("model_width=0.5,1", "model_width shapes the data.*compare"),
        ("client_rl=0.1,0.5", "an option of this algorithm; did you mean client_lr?"),
        ("lr=0.1,0.5", "lr is not an option of .*; did you mean client_lr.$"),
        ("density=0.1,0.5", "density is not an option of this algorithm; .*compare"),
        ("weight_decay=0,0.1", "0 takes weight_decay out of the program"),
    ],
)
def test_refused(line, expected, blobs):
    """One line that names the way."""
    with pytest.raises(ValueError, match=expected):
        make(blobs, sweep=line)


def test_a_point_serves_with_its_own_numbers(blobs):
    """What a client's model answers after a step of adaptation, as it is measured."""
    made = make(blobs, "perfedavg", sweep={"inner_lr": [0.001, 2.0]})
    made.measure()
    measured = [one["client_loss"] for one in made.metrics]
    for wanted, point in zip(measured, made.points, strict=True):
        losses = []
        for client in range(6):
            rows = made.rows(client)
            given = made.data.image[rows], made.data.label[rows]
            found = made.evaluate(*given, client_id=client, point=point)
            losses.append(found["loss"])
        assert np.mean(losses) == pytest.approx(wanted, rel=1e-5)
    assert len(set(measured)) == 2
    for odd in (0.1, "inner_lr=2.0"):
        with pytest.raises(ValueError, match="expected a mapping, such as {'inner_lr'"):
            made.predict(0, made.data.image[:1], point=odd)


def test_points_that_differ_in_more_than_numbers(blobs):
    """Another graph, and what the algorithm refuses of a point alone."""
    peers = {"algo": "dfedavg", "topology": "erdos_renyi"}
    with pytest.raises(ValueError, match="differ in plans, peers or messages.*compare"):
        make(blobs, **peers, sweep={"edge_probability": [0.2, 0.9]})
    with pytest.raises(ValueError, match="--edge_probability=0.9 has no effect"):
        make(blobs, algo="dfedavg", num_peers=2, sweep="edge_probability=0.2,0.9")


def test_what_a_point_gives_an_effect(blobs):
    """Options that a swept one needs pass, and are not said to have no effect."""
    nesterov = {"algo": "fedavg", "client_optimizer_options": "nesterov=true"}
    nesterov["sweep"] = "client_momentum=0.5,0.9"
    config, hparams = resolve.configure(nesterov)
    assert custom.with_optimizers(hparams, {}, nesterov) == hparams
    assert not [one for one in notes.of_options(config, hparams) if "effect" in one]
    with pytest.raises(ValueError, match="nesterov has no effect without --client_mo"):
        custom.with_optimizers(hparams, {}, nesterov | {"sweep": ""})

    pruned = {"algo": "dispfl", "prune_rounds": 3, "prune_rate": 0.0}
    resolve.configure(pruned | {"sweep": "prune_rate=0,0.6"})
    with pytest.raises(ValueError, match="--prune_rounds=3 has no effect with --prun"):
        resolve.configure(pruned)
    with pytest.raises(ValueError, match="--prune_rate=-3.0: expected at least 0"):
        resolve.configure(pruned | {"prune_rate": -3.0, "sweep": "prune_rate=0.1,1"})

    with pytest.raises(ValueError, match="--temperature=0.5 has no effect with --con"):
        make(blobs, "moon", contrastive_weight=0.0, sweep="temperature=0.5,1.0")

    distilled = {"algo": "cdkt", "proxy_fraction": 0.2, "temperature": 5.0}
    for weights, is_said in (([0, 0.6], False), ([0], True)):
        swept = {"server_distill_weight": weights}
        made = make(blobs, **distilled, client_distance="js", sweep=swept)
        line = "--temperature=5.0 has no effect without a distance kl; omit it"
        assert (line in made.notes) == is_said


def test_own_floats_are_swept_whatever_their_default():
    """By their annotation, as flags are: a default may be a whole number or None."""

    @dataclasses.dataclass(frozen=True)
    class Own:
        scale: float = 1
        maybe: float | None = None
        count: int = 3

    for name in ("scale", "maybe"):
        assert [one[name] for one in sweep.of(f"{name}=0.5,2", Own())] == [0.5, 2]
        every = sweep.settings(f"{name}=0.5,2;count=5", Own())
        assert [getattr(one, name) for one in every] == [0.5, 2]
        assert {one.count for one in every} == {3}


def test_points_that_are_nearly_equal_stay_apart(blobs, tmp_path):
    """In names, records and pictures; equal sweeps are written alike."""
    near = {"client_lr": [0.1, 0.10000001, 1]}
    experiment = make(blobs, sweep=near)
    assert experiment.config.sweep == "client_lr=0.1,0.10000001,1.0"
    assert sweep.text(" client_lr=0.10,.10000001 , 1") == experiment.config.sweep
    experiment.run(progress=False)
    assert len(experiment.plot().axes[0].lines) == 3
    table = words.table(experiment.summary())
    assert "client_lr=0.10000001 " in table and "client_lr=1.0 " in table


def test_numbers_that_decide_sizes_are_refused(blobs):
    """DisPFL's density; and what is not a mapping."""
    with pytest.raises(ValueError, match="density is part of the program"):
        make(blobs, algo="dispfl", num_peers=2, sweep={"density": [0.2, 0.5]})
    with pytest.raises(ValueError, match="expected names and values"):
        make(blobs, sweep=[0.1])
    for odd in (0.1, "12"):
        with pytest.raises(ValueError, match="a list of values"):
            make(blobs, sweep={"client_lr": odd})


def test_the_command_says_ranges_while_it_runs(blobs, tmp_path, capsys):
    """Of all points the smallest and the largest, then a line for each."""
    argv = [
        "main",
        "--algo=fedavg",
        f"--dataset={blobs}",
        "--model=narrow",
        "--rounds=1",
    ]
    argv += ["--rounds=1", "--num_clients=6", "--preset=none"]
    argv += ["--test_split=client_share"]
    argv += ["--sweep=client_lr=0.001,0.5", f"--workdir={tmp_path / 'run'}"]
    main_lib.execute(flags.parse(argv))
    out = capsys.readouterr().out
    assert " to " in out.split("round 1/1")[1].splitlines()[0]
    assert "client_lr=0.001" in out and "client_lr=0.5 " in out
