"""What notebooks do with an experiment: run, look, predict, keep, compare."""

import dataclasses
import functools
import os
import shutil
import signal
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import serialization, traverse_util

import models
from algorithms import fedavg
from fedjax_pfl import local_training, shapes, simulate, types
from fedjax_pfl.rows import views
from launch import build, export, main
from launch.assemble import model_files
from launch.folder import record
from launch.models_out import client_model, inside
from launch.show import words
from tests import synthetic
from tests.toys import model

pytestmark = pytest.mark.usefixtures("narrow")
SMALL = {
    "num_clients": 4,
    "partition": "iid",
    "local_epochs": 1,
    "batch_size": 16,
    "eval_every": 1,
    "summary": "last",
    "devices": 1,
}


class Body(nn.Module):
    """A stage with statistics of its own."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8)(x.reshape(len(x), -1))
        return nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))


MODULES = [Body(), nn.Dense(4)]


@pytest.fixture(scope="module")
def arrays():
    """240 small images in 4 classes: (x uint8, y)."""
    source = synthetic.blobs(240, (8, 8, 1), 4)
    return source.image, source.label


def made(arrays, **more):
    """Two rounds of FedPer, of which a model of our own is hashed in every call."""
    given = {"algo": "fedper", "dataset": arrays, "model": "narrow", "rounds": 2}
    return build.experiment(**SMALL | given | more)


@pytest.fixture(scope="module")
def trained(arrays):
    """An experiment that has run."""
    experiment = made(arrays, model=MODULES)
    experiment.run(progress=False)
    return experiment


@pytest.mark.parametrize("path", [None, 5, 1.5, []])
def test_a_path_of_another_type(path, blobs):
    """One line, and no TypeError from inside."""
    with pytest.raises(ValueError, match="expected a path, got a"):
        build.load(path)
    given = {"algo": "fedavg", "model": "narrow", "devices": 1, "num_clients": 4}
    made = build.experiment(dataset=blobs, **given)
    with pytest.raises(ValueError, match="expected a path, got a"):
        made.save_model(path)


def test_other_things_of_another_type(blobs):
    options = {"dataset": blobs, "model": "narrow", "num_clients": 4}
    options["devices"] = 1
    for made in (
        build.experiment(algo="fedavg", **options),
        build.compare(["fedavg"], run=False, **options),
    ):
        with pytest.raises(ValueError, match="on_record=5: expected a function"):
            made.run(progress=False, on_record=5)
    for algos in (5, "fedavg"):
        with pytest.raises(ValueError, match="compare: expected a list of algorithms"):
            build.compare(algos)
    bare = dataclasses.make_dataclass("HParams", [("a", float, 1.0)])
    odd = SimpleNamespace(HParams=bare, make=fedavg.make, __name__="odd")
    with pytest.raises(ValueError, match="^--batch_size: the HParams of --algo=odd ha"):
        build.experiment(algo=odd, batch_size=5)
    odd = SimpleNamespace(HParams=fedavg.HParams, make=lambda hparams, task: 5)
    with pytest.raises(ValueError, match="make returned a int, expected a fedjax_pfl"):
        build.experiment(algo=odd, dataset=blobs, model="mlp", num_clients=4)


def _grown(state):
    return state.replace(server=jax.tree.map(lambda x: x[None], state.server))


def _listed(state):
    params = list(state.server.params)
    return state.replace(server=state.server._replace(params=params))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("init", lambda state: state.server, "init returned a Variables, expected a R"),
        (
            "round",
            lambda out: out[:2],
            r"round returned \(RoundState, dict\), expected",
        ),
        (
            "round",
            lambda out: (_grown(out[0]), *out[1:]),
            "round changes the form of state.server.*float32 .* after it; keep",
        ),
        ("server", lambda out: None, "server returned a NoneType, expected {name: "),
        ("server", lambda out: out["global"], r"server returned \(Model, Variables\)"),
        (
            "server",
            lambda out: {"a": out["global"][1]},
            "server returned a dict of Var",
        ),
        ("server", lambda out: {}, "server returned a dict of nothing, expected"),
        *(
            (
                "server",
                lambda out, name=name: {name: out["global"]},
                f"server returned the model '{name}', whose metric {name}_accuracy is",
            )
            for name in ("client", "trained", "val_global", "unseen")
        ),
        ("serving", lambda out: out[0], "serving returned a Serving, expected a tuple"),
        ("serving", lambda out: None, "serving returned a NoneType, expected a tuple"),
        (
            "serving",
            lambda out: (out[0].replace(shared=out[0].shared.params),),
            r"serving's model returned \(.*\), expected Variables",
        ),
        (
            "serving",
            lambda out: (
                out[0].replace(
                    own=jnp.ones(4), build=lambda shared, row: shared.params
                ),
            ),
            r"serving's build returned \(.*\), expected Variables",
        ),
        ("adapt", lambda out: out.variables, "adapt returned a Variables, expected wh"),
        ("round", lambda out: (out[0], {"x": 1.0}, {}), r"round .* metric 'x' of sh"),
        ("round", lambda out: (out[0], {3: (1, 1)}, {}), "round .* metric 3 of shapes"),
        (
            "round",
            lambda out: (out[0], {"x": (np.ones(3, "f4"), 1)}, {}),
            r"round returned the metric 'x' of shapes \[\[3\], \[\]\], and a pair of",
        ),
        (
            "round",
            lambda out: (out[0], {"global_loss": (1.0, 1.0)}, {}),
            "round returned the metric global_loss, which is the name of what an eval",
        ),
        *(
            (
                "round",
                lambda out, name=name: (out[0], {name: (1.0, 1.0)}, {}),
                f"round returned the metric {name}, which is the name of {of}",
            )
            for name, of in (
                ("train_accuracy", "what"),
                ("exit2_accuracy", "what"),
                ("client_class3_accuracy", "what"),
                ("best_round", "what"),
                ("client_lr", "its option"),
            )
        ),
        (
            "round",
            lambda out: (_listed(out[0]), *out[1:]),
            "round changes the kinds of containers in state.server; keep them",
        ),
    ],
)
def test_own_algorithms_that_return_something_else(blobs, narrow, name, change, reason):
    """One line, before anything is computed."""

    def make(hparams, task):
        made = fedavg.make(hparams, task)

        def serving(state, cohort, data):
            every = jnp.ones(task.num_clients, bool)
            return (types.Serving.one(task.model, state.server, every),)

        def adapt(client, start, shared):
            loss_fn = local_training.cross_entropy_loss(task.model)
            return local_training.train(hparams, loss_fn, start, client)

        plain = getattr(made, name) or {"serving": serving, "adapt": adapt}[name]
        return made._replace(**{name: lambda *given: change(plain(*given))})

    mine = SimpleNamespace(HParams=fedavg.HParams, make=make, __name__="mine")
    given = {"dataset": blobs, "model": "narrow", "num_clients": 4, "devices": 1}
    given |= {"fine_tune_epochs": 1} if name == "adapt" else {}
    with pytest.raises(ValueError, match=f"^algo: its {reason}"):
        build.experiment(algo=mine, **given)


def test_a_metric_of_a_server_s_model_twice(blobs, narrow):
    """Known before anything is computed."""
    mine = _with_metric("student_loss")

    def make(hparams, task):
        made = mine.make(hparams, task)

        def server(*given):
            return {"student": made.server(*given)["global"]}

        return made._replace(server=server)

    other = SimpleNamespace(HParams=fedavg.HParams, make=make, __name__="other")
    given = {"dataset": blobs, "model": "narrow", "num_clients": 4, "devices": 1}
    with pytest.raises(
        ValueError, match="^algo: its round returned .*student_loss, wh"
    ):
        build.experiment(algo=other, **given)


def _with_metric(name):
    """FedAvg whose rounds have a metric more, 3."""

    def make(hparams, task):
        made = fedavg.make(hparams, task)

        def round(*given):
            state, metrics, sent = made.round(*given)
            return state, metrics | {name: (np.float32(6), np.float32(2))}, sent

        return made._replace(round=round)

    return SimpleNamespace(HParams=fedavg.HParams, make=make, __name__="mine")


def test_a_round_s_metric_of_clients_is_not_hidden(blobs, narrow):
    """`after` leaves out what was measured before, as the round's own was not."""
    given = {"dataset": blobs, "num_clients": 4, "rounds": 1, "eval_moments": "after"}
    given |= {"model": "narrow", "devices": 1, "preset": "none"}
    made = build.experiment(algo=_with_metric("client_drift"), **given)
    made.run(progress=False)
    names = made.metrics[-1].keys()
    assert made.metrics[-1]["client_drift"] == 3 and "client_accuracy" not in names


def test_a_metric_of_the_user_s_name_twice(blobs, narrow):
    """That of a round would replace the evaluation's."""

    def margin(logits, labels, mask):
        return (logits[:, 0] * mask).sum(), mask.sum()

    given = {"dataset": blobs, "num_clients": 4, "rounds": 1, "preset": "none"}
    given |= {"model": "narrow", "devices": 1, "eval_metrics": {"margin": margin}}
    made = build.experiment(algo=_with_metric("global_margin"), **given)
    with pytest.raises(ValueError, match="the metric global_margin, which is what an"):
        made.run(progress=False)


def test_an_own_metric_is_a_sum_by_its_count(blobs, narrow):
    """Also with weights below 1; it is absent where nothing was counted."""

    def make(hparams, task):
        made = fedavg.make(hparams, task)

        def round(*given):
            state, metrics, sent = made.round(*given)
            own = {"three": (1.5, 0.5), "none": (0.0, 0.0)}
            return (
                state,
                metrics | {n: tuple(map(np.float32, own[n])) for n in own},
                sent,
            )

        return made._replace(round=round)

    mine = SimpleNamespace(HParams=fedavg.HParams, make=make, __name__="mine")
    given = {"dataset": blobs, "model": "narrow", "num_clients": 4, "rounds": 1}
    found = build.experiment(algo=mine, devices=1, **given).run(progress=False)
    assert found["metrics"]["three"]["mean"] == 3 and "none" not in found["metrics"]


def test_what_has_no_effect_is_noted(unequal, narrow):
    """A swept option beside its sweep, a shared option that all rows have."""
    given = {"dataset": unequal, "model": "narrow", "preset": "none"}
    given |= {"num_clients": 4, "devices": 1, "algo": "fedavg"}
    swept = build.experiment(
        sweep="client_lr=0.1,0.2", client_lr=0.3, partition="iid", **given
    )
    assert "--client_lr=0.3 has no effect with --sweep=client_lr=0.1,0.2" in "".join(
        swept.notes
    )
    assert "--partition=iid deals all rows out again" in "".join(swept.notes)
    rows = {"a": {"client_lr": 0.1, "algo": given.pop("algo")}}
    compared = build.compare(rows, client_lr=0.2, run=False, **given)
    assert compared.notes[0] == "client_lr=0.2 has no effect, as all have theirs"


def test_own_arrays_and_modules(trained, arrays):
    """They learn; the personal head is the last module."""
    assert trained.config.dataset == "arrays"
    assert trained.config.model == "own_Body_Dense"
    assert trained.summary()["metrics"]["client_accuracy"]["mean"] > 0.5
    params = [trained.params(client) for client in (0, 1)]
    shared, personal = zip(*params, strict=True)
    assert jax.tree.all(jax.tree.map(np.array_equal, *shared))
    assert not jax.tree.all(jax.tree.map(np.array_equal, *personal))


def test_progress_and_records(arrays, capsys):
    """A line where something was measured, unless it is to be silent."""
    records = []
    experiment = made(arrays, model=MODULES)  # which is compiled already
    experiment.run(on_record=records.append)
    assert records == experiment.metrics and len(records) == 3
    rules, note, gone, *lines = capsys.readouterr().out.splitlines()
    assert gone == "note: without a workdir this run is gone with the process"
    assert rules.startswith("rules: --preset=fedd2s (")
    assert note.endswith("is taken as NHWC: H 8, W 8, C 1; --layout=nchw if not")
    assert [line.split("  ")[0] for line in lines] == [f"round {r}/2" for r in range(3)]
    made(arrays, model=MODULES).run(progress=False, until=1)
    assert capsys.readouterr().out == ""


def test_tables(trained, arrays):
    """Records and partition as frames; the partition adds up."""
    frame = trained.to_frame()
    assert list(frame.columns[:2]) == ["round", "seed"] and len(frame) == 3
    assert frame.client_accuracy.iloc[-1] == trained.metrics[-1]["client_accuracy"]
    counts = trained.partition_counts()
    train = trained.data.partition.train
    assert counts.shape == (4, 4)
    np.testing.assert_array_equal(counts.sum(1), train.count[0])
    label = arrays[1][np.asarray(train.row[0][: train.count[0][0]])]
    np.testing.assert_array_equal(counts.loc[0], np.bincount(label, minlength=4))


def test_shown(arrays, trained):
    """A line before, numbers after; HTML escapes."""
    fresh = made(arrays)
    assert "round 0 of 2" in repr(fresh) and "\n" not in repr(fresh)
    assert "Client (UA)" in repr(trained)
    assert "<b>fedper on arrays" in trained._repr_html_()


def test_shown_before_anything_is_measured(trained):
    """As where an evaluation has nothing of single clients."""
    summary = trained.summary()
    bare = summary | {"metrics": {}, "last_round": {}}
    assert "samples/s" in words.table(bare)
    points = [{"point": {"client_lr": lr}, "metrics": {}} for lr in (0.1, 0.2)]
    assert "client_lr=0.2" in words.table(bare | {"sweep": points})


def test_no_pictures(arrays, trained):
    """One line each."""
    with pytest.raises(ValueError, match="run\\(\\) first"):
        made(arrays).plot()
    with pytest.raises(ValueError, match="--kind=pie: expected one of curves"):
        trained.plot("pie")


def test_predictions(trained, arrays):
    """Raw images, normalised and with statistics; accuracies are the run's."""
    x, y = arrays
    test = jax.tree.map(lambda leaf: np.asarray(leaf[0]), trained.data.partition.test)
    for client in range(4):
        rows = test.row[test.start[client] :][: test.count[client]]
        probabilities = trained.predict(client, x[rows])
        np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
        found = trained.evaluate(x[rows], y[rows], client_id=client)
        assert found["accuracy"] == trained.kept.arrays[0, 0, client]
        own = probabilities[np.arange(len(rows)), y[rows]]
        assert found["loss"] == pytest.approx(-np.log(own).mean(), rel=1e-4)


def test_embeddings_of_a_stage_with_an_exit(monkeypatch):
    """They are that exit's, whichever stages come before."""

    def forward(params, stats, x, stop):
        return [x, x + 1][:stop], stats

    net = SimpleNamespace(stage_names=("one", "two"), forward=forward)
    data = SimpleNamespace(normalised=lambda x: x / 2)
    given = {"model": net, "variables": ((), ()), "data": data, "precision": None}
    found = SimpleNamespace(**given, has_stages=True)
    monkeypatch.setattr(inside, "_asked", lambda *_: (found, None, np.arange(3)))
    for index, name in enumerate(("one", "two")):
        for stage in (index, name):
            wanted = np.arange(3) / 2 + index
            np.testing.assert_array_equal(inside.embeddings(None, stage), wanted)
    for stage in (-1, 2, "three"):
        with pytest.raises(ValueError, match="expected one of one, two"):
            inside.embeddings(None, stage)


def test_the_servers_model(arrays):
    """Without a client id; of images in the shape that the data set has."""
    options = {"image_size": 12, "image_channels": 3, "algo": "fedavg"}
    experiment = made(arrays, **options, test_split="pool")
    experiment.run(progress=False)
    test = experiment.data.partition.test.row[0]
    rows = np.asarray(test)[np.asarray(test) >= 0]
    found = experiment.evaluate(arrays[0][rows], arrays[1][rows])
    assert found["accuracy"] == experiment.metrics[-1]["global_accuracy"]


def test_a_client_has_the_model_that_serves_it():
    """Also where another group has a row for each, and where the server has several."""
    own = types.Variables(np.arange(3), ()), np.array([False, True, False])
    all_of_it = types.Variables(np.int64(7), ()), np.array([True, False, False])
    groups = (
        types.Serving.each("own", own[0], mask=own[1]),
        types.Serving.one("shared", *all_of_it),
    )
    algorithm = types.Algorithm((), None, None, serving=lambda *_: groups)
    program = SimpleNamespace(num_rows=3)
    run = SimpleNamespace(program=program, config=SimpleNamespace(algo="mine"))
    nothing = [None] * 3
    found = [client_model._found(run, algorithm, k, k, *nothing) for k in range(2)]
    pairs = [(name, int(one.params)) for name, one in found]
    assert pairs == [("shared", 7), ("own", 1)]
    with pytest.raises(ValueError, match="client_id=2 is served by no model"):
        client_model._found(run, algorithm, 2, 2, *nothing)
    served = {"global": ("first", "one"), "exit1": ("second", "two")}
    algorithm = algorithm._replace(server=lambda *_: served)
    model = client_model._found(run, algorithm, None, None, *nothing)
    assert model == ("first", "one")


def test_a_file_names_a_width_that_makes_its_model(arrays, monkeypatch, tmp_path):
    """Methods of widths serve slices of what the option makes."""
    data, said = made(arrays).data, []

    def write(path, model, variables, normal, width, **more):
        said.append(width)
        return path

    monkeypatch.setattr(model_files, "write", write)
    net = models.make("convnet", 4, 0.5)
    variables = shapes.variables(net, (8, 8, 1))
    for width in (0.5, 1.0):
        found = client_model.ClientModel(net, variables, data, 0, 0, width)
        found.save(tmp_path / "model.npz")
    assert said == [0.5, None]


@pytest.mark.parametrize(
    "change, part",
    [
        (lambda x: x[:, :4], "of shape \\[5, 4, 8, 1\\], expected \\[N, 8, 8, 1\\]"),
        (lambda x: x[0], "expected \\[N, 8, 8, 1\\]"),
        (lambda x: x[:0], "images hold no example"),
        (lambda x: x / 255.0, "float64 from .*expected uint8"),
    ],
)
def test_images_of_another_kind(trained, arrays, change, part):
    """One line."""
    with pytest.raises(ValueError, match=part):
        trained.predict(0, change(arrays[0][:5]))


def test_what_cannot_be_evaluated(trained, arrays):
    """Labels that do not fit, a client or a server that is not there."""
    x, y = arrays[0][:3], arrays[1][:3]
    for given, part in (
        ((x, y[:2]), "y must be integers \\[3\\]"),
        ((x, y + 9), "the model's are 0 to 3"),
        ((x[:0], y[:0]), "no example"),
    ):
        with pytest.raises(ValueError, match=part):
            trained.evaluate(*given, client_id=0)
    with pytest.raises(ValueError, match="fedper has no server's model"):
        trained.predict(None, x)
    with pytest.raises(ValueError, match="seed=3: expected one of"):
        trained.predict(0, x, seed=3)


@pytest.mark.parametrize("suffix", ["msgpack", "npz"])
def test_a_saved_model_needs_no_package(trained, arrays, tmp_path, suffix):
    """The lines in docs/python.md give the same probabilities."""
    path = trained.save_model(tmp_path / "deep" / f"model.{suffix}", client_id=2)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    x = arrays[0][:9]
    if suffix == "npz":
        saved = np.load(path)
        flat = {tuple(name.split("/")): saved[name] for name in saved.files}
        tree = traverse_util.unflatten_dict(flat)["stages"]["stage1"].get
        mean, scale = saved["input/mean"], saved["input/scale"]
        h = Body().apply(
            {"params": tree("params"), **tree("stats")},
            (x - mean) * scale,
            train=False,
        )
        kernel, bias = (saved[f"stages/stage2/params/{n}"] for n in ("kernel", "bias"))
        h = h @ kernel + bias
    else:
        saved = serialization.msgpack_restore(path.read_bytes())
        h = (x - saved["input"]["mean"]) * saved["input"]["scale"]
        modes = ({"train": False}, {})
        for module, stage, mode in zip(
            MODULES, saved["stages"].values(), modes, strict=True
        ):
            variables = {"params": stage["params"], **stage.get("stats", {})}
            h = module.apply(variables, h, **mode)
    found = jax.nn.softmax(h)
    np.testing.assert_allclose(found, trained.predict(2, x), atol=1e-6)


def test_starting_from_a_file(trained, arrays, tmp_path):
    """Server and clients begin with it, and the data's hash knows."""
    path = trained.save_model(tmp_path / "model.npz", client_id=1)
    for algo in ("fedavg", "ditto"):
        begun = made(arrays, algo=algo, model=MODULES, init_from=str(path))
        assert begun.data_sha256 != trained.data_sha256
        for client in (0, 3):
            pairs = jax.tree.map(
                np.array_equal, begun.params(client), trained.params(1)
            )
            assert jax.tree.all(pairs)


def test_narrower_models_start_from_slices(blobs, tmp_path, monkeypatch):
    """HeteroFL's server is the file's model; exits have files too."""
    monkeypatch.setitem(models.MODELS, "with_exits", model.with_exits)
    options = {"dataset": blobs, "level_mix": "1:1:1", "test_split": "client_share"}
    options |= {name: SMALL[name] for name in ("num_clients", "partition", "devices")}
    for algo, name in (("heterofl", "narrow"), ("depthfl", "with_exits")):
        options |= {"algo": algo, "model": name}
        first = build.experiment(seed=3, **options)
        path = first.save_model(tmp_path / f"{algo}.msgpack")
        second = build.experiment(init_from=str(path), **options)
        pair = (one.client_model().variables.params for one in (first, second))
        assert jax.tree.all(jax.tree.map(np.array_equal, *pair))


@pytest.mark.parametrize(
    "change, part",
    [
        ({"model": [Body(), nn.Dense(4, use_bias=False)]}, "another model .*bias is"),
        ({"model": "mlp"}, "another model than --model=mlp: "),
        ({"model": "mlp", "client_model": "m1"}, "--client_model=m1 are several"),
        ({"init_from": "nix.npz"}, "nix.npz: No such file"),
    ],
)
def test_a_file_of_another_model(trained, arrays, tmp_path, change, part):
    """One line that names what differs."""
    path = trained.save_model(tmp_path / "model.npz", client_id=1)
    with pytest.raises(ValueError, match=part) as error:
        given = {"algo": "fedavg", "model": MODULES, "init_from": str(path)}
        made(arrays, **given | change)
    assert "\n" not in str(error.value)


def test_what_is_no_models_file(arrays, tmp_path):
    """A text, a foreign archive, and a suffix that nobody knows."""
    (tmp_path / "text.msgpack").write_text("model")
    np.savez(tmp_path / "foreign.npz", a=1)
    for name in ("text.msgpack", "foreign.npz"):
        with pytest.raises(ValueError, match=f"{name} is not a model's file"):
            made(arrays, init_from=str(tmp_path / name))
    with pytest.raises(ValueError, match="ends in .msgpack or .npz or"):
        made(arrays).save_model(tmp_path / "model.pt", client_id=0)


def test_the_end_of_a_shorter_run_is_no_best_round(arrays, monkeypatch):
    """A run that goes on has the candidates of one that was never shorter."""
    pooled, evaluate = [0.1, 0.0, 0.4, 0.9, 0.6, 0.0, 0.5], simulate.Simulation.evaluate

    def evaluated(self):
        best = {"client_accuracy_pooled": pooled[self.round]}
        return [(one | best, own) for one, own in evaluate(self)]

    monkeypatch.setattr(simulate.Simulation, "evaluate", evaluated)
    given = {"summary": "best", "eval_every": 2}
    short, whole = (made(arrays, rounds=rounds, **given) for rounds in (3, 6))
    short.run(progress=False)
    assert short.best_round(0) == 3  # its last round, which is not in eval_every
    ((_, of_clients),) = evaluate(short.simulation)
    accuracies = of_clients["accuracy"]
    np.testing.assert_array_equal(short.summary_of_clients[0, 0], accuracies)
    kept, host = short.saved()
    kept = jax.tree.map(lambda leaf: views.materialised(leaf).copy(), kept)
    records = list(short.metrics)
    found, expected = short.extend(6).run(progress=False), whole.run(progress=False)
    assert found["metrics"] == expected["metrics"] and short.best_round(0) == 4
    np.testing.assert_array_equal(short.summary_of_clients, whole.summary_of_clients)
    # An earlier version kept the best round's accuracies alone, in the first place.
    kept["accuracies"][:, 0], host["has_last"] = kept["accuracies"][:, 1], False
    again, longer = (made(arrays, rounds=rounds, **given) for rounds in (3, 6))
    again.load(3, kept, host, records)
    np.testing.assert_array_equal(again.summary_of_clients[0, 0], accuracies)
    with pytest.raises(ValueError, match="an earlier version, .* round 3 alone"):
        longer.load(3, kept, host, records)


def test_interrupt_and_extend(arrays):
    """What was done stays; a longer run is the same as one made that long."""
    experiment = made(arrays, rounds=3)

    def interrupt(record):
        if record["round"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="after round [12]"):
        experiment.run(progress=False, on_record=interrupt)
    assert experiment.metrics
    with pytest.raises(ValueError, match="--kind=ecdf: in-memory-.* is not finished"):
        experiment.plot("ecdf")
    experiment.run(progress=False)
    found = experiment.extend(np.int64(5)).run(progress=False)
    whole = made(arrays, rounds=5).run(progress=False)
    assert found["metrics"] == whole["metrics"]
    assert found["parameters_sha256"] == whole["parameters_sha256"]
    assert np.isfinite(experiment.kept.arrays[:, 0]).all()
    for rounds in (4, "9", True):
        with pytest.raises(ValueError, match="expected 5 or more"):
            experiment.extend(rounds)


def test_the_number_that_an_extension_needs(arrays):
    """What the line says is the least that works."""
    experiment = made(arrays, rounds=12, eval_every=12, summary="median_last10")
    experiment.run(progress=False)
    with pytest.raises(ValueError, match="give 17 or more"):
        experiment.extend(13)
    with pytest.raises(ValueError, match="give 17 or more"):
        experiment.extend(16)
    assert experiment.extend(17).config.rounds == 17


def test_extension_whose_summary_has_passed(arrays):
    """Refused: nobody kept the clients' accuracies of that round."""
    experiment = made(arrays, summary="mean_last10", rounds=12, eval_every=12)
    between = experiment.run(until=8, progress=False)
    # There is no evaluation of round 8.
    assert between["summary_of"] == "last evaluation, after round 0"
    assert "(last evaluation, after round 0)" in repr(experiment)
    experiment.config = dataclasses.replace(experiment.config, rounds=8)
    experiment.window = ()
    with pytest.raises(ValueError, match="after round 8, .* give 10 or more"):
        experiment.extend(9)
    assert "metrics" in made(arrays).summary()


def test_a_relative_folder_stays(arrays, tmp_path, monkeypatch):
    """Where the run was built, wherever the process goes."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    one = made(arrays, workdir="runs/one", rounds=2)
    other = made(arrays, workdir="runs/other", rounds=1)
    one.run(progress=False, until=1)
    monkeypatch.chdir(tmp_path / "second")
    assert one.run(progress=False)["rounds"] == 2
    other.run(progress=False)
    assert not list((tmp_path / "second").iterdir())
    for name in ("one", "other"):
        assert (tmp_path / "first" / "runs" / name / "summary.json").is_file()


def test_a_folder_keeps_it(arrays, tmp_path):
    """A run in a folder is opened again, goes on, and ends as one in memory."""
    folder = str(tmp_path / "run")
    own = functools.partial(made, arrays, model=MODULES)
    whole = own(rounds=4).run(progress=False)
    first = own(rounds=3, workdir=folder)
    first.run(until=1, progress=False)
    first.run(until=2, progress=False)
    again = build.load(folder, dataset=arrays, model=MODULES)
    assert again.round == 2 and again.metrics == first.metrics
    more = {"dataset": arrays, "model": MODULES}
    assert build.load(folder, **more, rounds=None, workdir=folder).config.rounds == 3
    for other in ({"workdir": str(tmp_path / "other")}, {"resume": False}):
        with pytest.raises(ValueError, match="continues in its folder, .*; omit it"):
            build.load(folder, **more, **other)
    again.run(progress=False)
    assert (tmp_path / "run" / "summary.json").exists()
    with pytest.raises(ValueError, match="was changed since this run left it"):
        first.run(progress=False)
    longer = build.load(folder, dataset=arrays, model=MODULES, rounds=4)
    assert longer.round == 3
    assert longer.run(progress=False)["metrics"] == whole["metrics"]
    same = own(rounds=4, workdir=folder)
    assert same.run(progress=False)["metrics"] == whole["metrics"]
    assert len(same.metrics) == 5


@pytest.mark.parametrize(
    "change, part",
    [
        ({}, "were in memory; give dataset="),
        ({"dataset": 0}, "expected a name, arrays"),
        ({"other": True}, "holds a run with --data_sha256="),
    ],
)
def test_a_folder_of_other_data(arrays, tmp_path, change, part):
    """One line."""
    made(arrays, workdir=str(tmp_path / "run"), rounds=1).run(progress=False)
    if change.pop("other", False):
        change = {"dataset": (arrays[0][::-1], arrays[1])}
    with pytest.raises(ValueError, match=part):
        build.load(tmp_path / "run", **change)
    with pytest.raises(ValueError, match="holds no run"):
        build.load(tmp_path / "nix")


def test_a_folder_whose_data_moved(arrays, tmp_path, capsys):
    """Another name for the same data opens it; its bits decide."""
    old, new = tmp_path / "old.npz", tmp_path / "new.npz"
    np.savez(old, x=arrays[0], y=arrays[1])
    options = {"algo": "fedavg", "workdir": tmp_path / "run"}
    first = made(f"npz:{old}", rounds=1, **options)
    first.run(progress=False)
    old.rename(new)
    with pytest.raises(ValueError, match="there is no such file"):
        build.load(tmp_path / "run")
    for dataset in (f"npz:{new}", arrays):
        assert build.load(tmp_path / "run", dataset=dataset).metrics == first.metrics
    export.command(
        ["export", str(tmp_path / "run"), f"--dataset=npz:{new}"]
        + [f"--output={tmp_path / 'model.npz'}"]
    )
    assert capsys.readouterr().out.split() == [str(tmp_path / "model.npz")]


def test_other_owners_are_other_data(arrays, tmp_path):
    """The same examples of other clients are another run, also in another file."""
    owner, options = np.arange(240) % 4, {"algo": "fedavg"}
    options |= {"partition": "natural", "workdir": tmp_path / "run", "rounds": 1}
    for name, client in (("a", owner), ("b", np.sort(owner))):
        np.savez(tmp_path / f"{name}.npz", x=arrays[0], y=arrays[1], client=client)
    made(f"npz:{tmp_path / 'a.npz'}", **options).run(progress=False)
    with pytest.raises(ValueError, match="holds a run with --dataset="):
        build.load(tmp_path / "run", dataset=f"npz:{tmp_path / 'b.npz'}")
    with pytest.raises(ValueError, match="holds a run with --dataset="):
        build.load(tmp_path / "run", dataset=(*arrays, np.sort(owner)))
    assert build.load(tmp_path / "run", dataset=(*arrays, owner)).round == 1


def test_exported_by_the_command(blobs, tmp_path, capsys):
    """The same file as `save_model` writes; bad input is one line."""
    folder = tmp_path / "run"
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    run = ["main", "--algo=ditto", "--model=narrow", "--rounds=1", f"--dataset={blobs}"]
    main.main([*run, *flags, f"--workdir={folder}"])
    capsys.readouterr()
    path = tmp_path / "model.msgpack"
    export.command(["export", str(folder), "--client=2", f"--output={path}"])
    assert capsys.readouterr().out.split() == [str(path)]
    opened = build.load(folder)
    other = opened.save_model(tmp_path / "other.msgpack", client_id=2)
    assert path.read_bytes() == other.read_bytes()
    for argv, part in (
        ([], "give the folder of one run"),
        ([str(tmp_path)], "holds no run"),
        ([str(folder), "--client=4"], "--client=4: expected 0..3"),
        ([str(folder), "--output=x.pt"], "ends in .msgpack or .npz or"),
        ([str(folder), "--client=a"], "--client='a': expected an integer"),
        ([str(folder), "--owner=a"], "--owner='a': expected 0..3"),
        ([str(folder), "--owner=a", "--client=1"], "name a client twice"),
    ):
        with pytest.raises(SystemExit) as stop:
            export.command(["export", *argv])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and part in error and error.count("\n") == 1


def test_comparison(arrays, capsys):
    """The same clients, options to those who have them, one frame."""
    records = []
    options = {"personal_from": "last", "rounds": 1} | SMALL
    compared = build.compare(
        ["fedavg", "fedper"],
        seeds=2,
        dataset=arrays,
        model="narrow",
        on_record=records.append,
        **options,
    )
    assert list(compared) == ["fedavg", "fedper"]
    assert compared["fedavg"].config.preset == "fedd2s"
    frame, summary = compared.to_frame(), compared.summary()
    assert len(frame) == len(records) == 2 * 2 * 2
    assert set(frame.algo) == {"fedavg", "fedper"}
    for name in compared:
        entry = compared[name].summary()["metrics"]["client_accuracy"]
        assert summary.loc[name, "client_accuracy"] == entry["mean"]
        assert summary.loc[name, "client_accuracy std"] == entry["std"]
        assert summary.loc[name, "summary"] == compared[name].config.summary
        mine = compared[name].client_metrics()
        of_all = compared.client_metrics().query("algo == @name").drop(columns="algo")
        assert len(mine) and of_all.reset_index(drop=True).equals(mine)
    assert "fedper (2 of 2):" in capsys.readouterr().out
    shown = compared.table(["client_accuracy", "hurt"], control="fedavg")
    found = shown.to_frame()["Client (UA)", "mean"]
    assert [*found.index] == [*compared] and [*found] == [*summary.client_accuracy]
    assert "FedPer" in shown.to_latex() and "† better and ‡ worse" in str(shown)
    for more in ({"control": "fedrep"}, {"test": "t"}, {"metrics": "hurt"}):
        with pytest.raises(ValueError, match=": expected "):
            compared.table(**more)
    assert compared.plot()._repr_png_()[:4] == b"\x89PNG"
    assert "<table" in compared._repr_html_()
    assert len(compared) == 2 and "fedavg on arrays" in repr(compared)


def test_settings_of_one_method(arrays, tmp_path):
    """Runs by a name, each with options of its own."""
    rates = {"slow": 0.01, "fast": 0.1}
    compared = build.compare(
        {name: {"algo": "fedavg", "client_lr": rate} for name, rate in rates.items()},
        dataset=arrays,
        model="narrow",
        rounds=1,
        progress=False,
        workdir=str(tmp_path),
        **SMALL,
    )
    assert {name: one.hparams.client_lr for name, one in compared.items()} == rates
    assert list(compared.summary().index) == ["slow", "fast"]
    assert repr(compared).startswith("slow: fedavg on arrays")
    (legend,) = compared.plot().legends
    shown = {text.get_text().split()[0] for text in legend.texts}
    assert shown == {"slow", "fast"}
    assert {path.name for path in tmp_path.iterdir()} == {"slow", "fast"}


def test_a_comparison_takes_the_preset_that_suits_all():
    """FedPer's paper has no proxy set, which CDKT cannot do without."""
    compared = build.compare(["fedavg", "fedper", "cdkt"], model="narrow", run=False)
    assert {one.config.preset for one in compared.values()} == {"cdkt"}


@pytest.mark.parametrize(
    "algos, more, part",
    [
        (["fedavg", "fedavg"], {}, "expected different algorithms"),
        ([], {}, "expected different algorithms"),
        (["fedavg", "local"], {"personal_from": "last"}, "is a flag of none of fedavg"),
        (["fedavg", "cdkt"], {"preset": "none"}, "leaves no proxy set"),
        (["fedavg", "nix"], {}, "--algo=nix: expected one of"),
        (["fedavg"], {"preset": "pflib"}, "--preset=pflib: .* did you mean pfllib"),
        (["fedavg"], {"preset": ["none"]}, "--preset=.*: expected one of"),
        ({"a": {"client_lr": 0.1}}, {}, "expected options with an algo for 'a'"),
        ({"a/b": {"algo": "local"}}, {}, "'a/b' cannot be the name of a folder"),
        ({"a" * 300: {"algo": "local"}}, {}, "cannot be the name of a folder"),
        ({"a": {"algo": "fedavg", "nix": 1}}, {}, "nix"),
        (["fedavg"], {"folder": "x"}, "of none of fedavg; did you mean --workdir"),
        (["fedavg"], {"control": "x"}, r"as compare\(...\).table\(control=...\)"),
    ],
)
def test_what_cannot_be_compared(algos, more, part):
    """One line."""
    with pytest.raises(ValueError, match=part):
        build.compare(algos, run=False, **more)


def test_others_clients_are_no_comparison(arrays, monkeypatch):
    """Two experiments whose clients have other rows."""
    seeds = iter((1, 2))
    original = build.experiment

    def other(**given):
        return original(**given | {"partition_seed": next(seeds)})

    monkeypatch.setattr("launch.compare.experiment", other)
    with pytest.raises(ValueError, match="local would have other clients than fedavg"):
        build.compare(["fedavg", "local"], run=False, dataset=arrays, **SMALL)


def test_an_interrupted_comparison_goes_on(arrays, capsys):
    """It returns what is done."""

    def interrupt(record):
        if record["algo"] == "fedavg" and record["round"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    compared = build.compare(
        ["fedavg", "local"],
        dataset=arrays,
        model="narrow",
        progress=False,
        on_record=interrupt,
        rounds=3,
        **SMALL,
    )
    assert "run() continues" in capsys.readouterr().out
    assert not compared["local"].metrics and compared["fedavg"].round < 3
    assert list(compared.summary(control="fedavg").index) == ["fedavg", "local"]
    assert compared.plot("curves")
    assert "2 of 2 results are not finished." in str(compared.table())
    compared.run(progress=False)
    assert [one.round for one in compared.values()] == [3, 3]


@pytest.mark.parametrize(
    "change, part",
    [
        ({"model": nn.Dense(3)}, "gives float32\\[2, 8, 8, 3\\] for 2 examples"),
        ({"model": [Body(), nn.Dense(3)]}, "expected logits float32\\[2, 4\\]"),
        ({"model": nn.Embed(3, 4)}, "own_Embed cannot take examples f32"),
        ({"model": MODULES, "model_width": 2.0}, "--model_width=2 has no effect"),
        ({"model": 3.5}, "model: expected a name, a flax linen module"),
        ({"client_model": nn.Dense(3)}, "client_model: own_Dense gives"),
    ],
)
def test_modules_that_do_not_fit(arrays, change, part):
    """One line."""
    with pytest.raises(ValueError, match=part) as error:
        made(arrays, **{"algo": "local"} | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "given, part",
    [
        ((np.zeros((5, 2)), np.zeros(4, int)), "y must be labels \\[5\\]"),
        ((np.zeros((5, 2)),), "expected a name, arrays"),
        (
            ([np.ones((5, 2)), np.ones((3, 2))], np.arange(5)),
            "x must be one array, got ragged ones; give test",
        ),
        (
            ((np.ones((5, 2)), np.ones((5, 3))), np.arange(5)),
            "x must be one array, got 2 arrays of .5, 2. and .5, 3., and an example is "
            "one array; join them, as by np.concatenate",
        ),
        (
            {"a": ((np.ones((5, 2)), np.ones((5, 3))), np.arange(5))},
            "a: got 2 arrays of .5, 2. and .5, 3., and an example is one",
        ),
        (
            {"a": {"x": (np.ones((5, 2)), np.ones((5, 3))), "y": np.arange(5)}},
            "a: got 2 arrays of .5, 2. and .5, 3., and an example is one",
        ),
        (([np.ones((8, 8)), np.ones((8, 9))], [0, 1]), "x must be one array, got rag"),
        (
            ((np.ones((5, 2)), np.ones((5, 2))), np.arange(5)),
            "x must be one array, got 2 arrays of .5, 2. and .5, 2., and an example",
        ),
        (
            {"a": np.ones((5, 2)), "b": np.ones((5, 3)), "y": np.arange(5)},
            "a, b hold an array for each row; .* join several, as by np.concatenate",
        ),
    ],
)
def test_arrays_that_do_not_fit(given, part):
    """One line."""
    with pytest.raises(ValueError, match=f"^dataset: .*{part}|^dataset: {part}"):
        build.experiment(algo="fedavg", dataset=given)


class Act(nn.Module):
    """One layer and a function."""

    act: Any = nn.relu

    @nn.compact
    def __call__(self, x):
        return self.act(nn.Dense(4)(x.reshape(len(x), -1)))


class Sown(nn.Module):
    """Adds to a collection at every call."""

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        self.sow("losses", "size", x.sum())
        return nn.Dense(4)(x)


class Counting(nn.Module):
    """Counts its steps."""

    @nn.compact
    def __call__(self, x, train):
        count = self.variable("batch_stats", "count", lambda: np.int32(0))
        if train:
            count.value += 1
        return nn.Dense(4)(x.reshape(len(x), -1))


class Noisy(nn.Module):
    """Asks for random numbers in eval mode, which has none."""

    @nn.compact
    def __call__(self, x):
        noise = jax.random.normal(self.make_rng("noise"), (4,))
        return nn.Dense(4)(x.reshape(len(x), -1)) + noise


class Pair(nn.Module):
    """Gives its features too."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x.reshape(len(x), -1)), x


class Named(nn.Module):
    """Has an argument for the mode that nobody gives."""

    @nn.compact
    def __call__(self, x, is_testing):
        return nn.Dense(4)(x.reshape(len(x), -1))


@pytest.mark.parametrize(
    "module, part",
    [
        (Sown(), "collections grow in train mode"),
        (Noisy(), "noise"),
        (Pair(), "it gives a tuple, expected logits"),
        (Named(), "'is_testing'.*takes `train`, `training`, `is_training`"),
    ],
)
def test_modules_that_do_not_train(arrays, module, part):
    """Found before a run, in one line."""
    with pytest.raises(ValueError, match=f"cannot take examples .*{part}") as error:
        made(arrays, algo="fedavg", model=module)
    assert "\n" not in str(error.value)


def test_a_counter_of_integers(arrays):
    """Has no mean."""
    with pytest.raises(ValueError, match="trunk/batch_stats/count of int32, and"):
        made(arrays, algo="fedavg", model=Counting())


@pytest.mark.parametrize("suffix", ["msgpack", "npz"])
def test_stages_keep_their_order_in_a_file(arrays, tmp_path, suffix):
    """Whatever their names are; also those without parameters."""
    names = ("stem", "body", "top")
    stages = [Act(), nn.relu, nn.Dense(4)]
    stages[1] = nn.Dropout(0.0, deterministic=True)
    chain = list(zip(names, stages, strict=True))
    first = made(arrays, algo="fedavg", model=chain, seed=3)
    path = first.save_model(tmp_path / f"model.{suffix}")
    if suffix == "msgpack":
        saved = serialization.msgpack_restore(path.read_bytes())
        assert tuple(saved["stages"]) == names
    second = made(arrays, algo="fedavg", model=chain, init_from=path)
    assert jax.tree.all(jax.tree.map(np.array_equal, first.params(0), second.params(0)))


def test_two_models_of_one_class(arrays):
    """The server's is not lost."""
    small, large = own_net(4), own_net(32)
    options = SMALL | {"dataset": arrays, "rounds": 1, "proxy_fraction": 0.1}
    made_of = build.experiment(algo="local", model=large, client_model=small, **options)
    task = made_of.task
    assert task.server_model.name != task.client_models[0].name
    wide = jax.tree.leaves(made_of.client_model().variables.params)[0]
    narrow = jax.tree.leaves(made_of.params(0))[0]
    assert wide.shape[-1] == 32 and narrow.shape[-1] == 4


def own_net(width):
    return [
        nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(width)]),
        nn.Dense(4),
    ]


def test_an_edited_module_is_another_run(arrays, tmp_path):
    """Not the old results under a new model."""
    options = {"algo": "fedavg", "workdir": tmp_path / "run", "rounds": 1}
    made(arrays, model=Act(nn.relu), **options).run(progress=False)
    with pytest.raises(ValueError, match="holds a run with --computed_sha256="):
        build.load(tmp_path / "run", dataset=arrays, model=Act(nn.tanh))
    with pytest.raises(ValueError, match="--model=own_Act was a custom module"):
        build.load(tmp_path / "run", dataset=arrays)
    same = build.load(tmp_path / "run", dataset=arrays, model=Act(nn.relu))
    assert same.round == 1


def test_an_algorithm_with_a_name_of_ours(arrays, tmp_path):
    """It is known as one's own, and asked for when the folder is opened."""

    def make(hparams, task):
        return fedavg.make(hparams, task)

    mine = SimpleNamespace(HParams=fedavg.HParams, make=make, __name__="fedavg")
    options = {"algo": mine, "workdir": tmp_path / "run", "rounds": 1}
    made(arrays, **options).run(progress=False)
    with pytest.raises(ValueError, match="--algo=own_fedavg was a custom algorithm"):
        build.load(tmp_path / "run", dataset=arrays)
    assert build.load(tmp_path / "run", dataset=arrays, algo=mine).round == 1


@dataclasses.dataclass  # and so without a hash
class Kept:
    """An algorithm that keeps its options on itself, and is its own round."""

    HParams = fedavg.HParams
    made: Any = None
    weight: Any = 0.0

    def make(self, hparams, task):
        self.made, self.weight = fedavg.make(hparams, task), hparams.client_lr
        return self.made._replace(round=self)

    def __call__(self, state, cohort, data):
        state, metrics, sent = self.made.round(state, cohort, data)
        return state, metrics | {"weight": (self.weight, 1)}, sent


def test_options_that_an_object_keeps(arrays):
    """Each experiment has its own, whatever was traced before."""
    algo = Kept()
    for epochs, rate in ((1, 0.25), (1, 0.5), (2, 0.5)):
        options = {"local_epochs": epochs, "client_lr": rate}
        simulation = made(arrays, algo=algo, rounds=1, **options).simulation
        simulation.advance_to(1)
        assert simulation.metrics["weight"] == ([rate], [1])


def test_a_finished_folder_stays_as_it_is(arrays, tmp_path, monkeypatch, capsys):
    """Opened and run again: nothing is written; without a checkpoint it is refused."""
    folder = tmp_path / "run"
    made(arrays, workdir=folder).run(progress=False)
    before = {
        path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
    }
    monkeypatch.setattr("platform.python_version", lambda: "9.9")
    again = build.load(folder, dataset=arrays)
    again.run()
    again.run(progress=False)
    assert "holds this finished run" in capsys.readouterr().out
    after = {
        path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
    }
    assert before == after
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint"):
        build.load(folder, dataset=arrays)
    with pytest.raises(ValueError, match="has no checkpoint"):
        made(arrays, workdir=folder).run(progress=False)


def test_a_folder_that_another_has_finished_since(arrays, tmp_path):
    """What was loaded before takes over its end, and changes nothing."""
    folder = tmp_path / "run"
    made(arrays, workdir=folder, rounds=3).run(until=1, progress=False)
    given = {"dataset": arrays}
    early = build.load(folder, **given)
    done = build.load(folder, **given).run(progress=False)
    before = (folder / "metrics.jsonl").read_bytes()
    found = early.run(progress=False)
    assert early.round == 3 and found["parameters_sha256"] == done["parameters_sha256"]
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert record.read(folder).summary["rounds"] == 3


def test_a_restore_that_failed_can_be_tried_again(arrays, tmp_path):
    """The reason is the same each time, and the run's once it is gone."""
    folder = tmp_path / "run"
    made(arrays, workdir=folder, rounds=2).run(progress=False)
    (folder / "checkpoints").rename(tmp_path / "away")
    again = made(arrays, workdir=folder, rounds=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="has no checkpoint"):
            again.run(progress=False)
    (tmp_path / "away").rename(folder / "checkpoints")
    assert again.run(progress=False)["rounds"] == 2


def test_a_folder_does_not_export_again(arrays, tmp_path):
    """The file of its rows may have been edited since."""
    rows = tmp_path / "rows.npz"
    made(arrays, workdir=tmp_path / "run", export_partition=rows).run(progress=False)
    rows.unlink()
    build.load(tmp_path / "run", dataset=arrays)
    assert not rows.exists()
    with pytest.raises(OSError, match="--export_partition=.* cannot be written"):
        made(arrays, export_partition=tmp_path)


def test_files_wanted_later(arrays, tmp_path):
    """TensorBoard's of a run that is finished already."""
    made(arrays, workdir=tmp_path / "run").run(progress=False)
    options = {"dataset": arrays, "tensorboard": True, "csv": True}
    build.load(tmp_path / "run", **options).run(progress=False)
    found = [path.name for path in (tmp_path / "run").rglob("*")]
    assert "metrics.csv" in found and any(name.startswith("events") for name in found)


@pytest.mark.parametrize("algo", ["splitmix", "majority"])
def test_what_serves_may_be_no_single_model(blobs, tmp_path, algo):
    """It predicts, but is not written."""
    options = {"dataset": blobs, "model": "narrow", "num_clients": 4, "rounds": 1}
    options["devices"] = 1
    made_of = build.experiment(algo=algo, test_split="client_share", **options)
    client = 0 if algo == "majority" else None
    image = np.asarray(made_of.data.image[:3])
    assert made_of.predict(client, image).shape == (3, 4)
    with pytest.raises(ValueError, match="which is not a single model"):
        made_of.save_model(tmp_path / "model.npz", client)
    assert not (tmp_path / "model.npz").exists()


def test_other_train_rows_are_no_comparison():
    """Though the test rows are the same."""
    gen = np.random.default_rng(0)
    data = gen.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    rows = {"whole": {"algo": "fedavg"}, "half": {"algo": "fedavg", "train_share": 0.5}}
    given = {"dataset": data, "model": "narrow", "num_clients": 4, "rounds": 1}
    with pytest.raises(ValueError, match="half would have other clients than whole"):
        build.compare(rows, run=False, **given)
