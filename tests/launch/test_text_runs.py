"""Runs on texts: what they leave behind and show, what they refuse."""

import pathlib
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from flax import linen as nn

import algorithms
from algorithms import fedavg
from fedjax_pfl import local_training, losses, rng
from launch import build, main, plot, report
from launch.folder import record
from launch.show import derived, figures, words
from tests import test_contract, texts

SMALL = {
    "dataset": "small",
    "partition": "natural",
    "preset": "none",
    "model": "one_layer",
    "clients_per_round": 3,
    "rounds": 2,
    "eval_every": 1,
    "devices": 1,
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    test_contract.register_toys(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Finished runs of two seeds: FedPer at two rates, which share a program."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        test_contract.register_toys(patch)
        for name, rate in (("fedper", 0.1), ("slow", 0.01)):
            given = SMALL | {"client_lr": rate, "workdir": str(folder / name)}
            made = build.experiment(algo="fedper", num_seeds=2, **given)
            made.run(progress=False)
    return folder


@pytest.mark.parametrize(
    "algo", [n for n, e in algorithms.ALGORITHMS.items() if e.text]
)
def test_every_such_method_is_assembled(algo):
    """With models of words, and nothing that belongs to images."""
    entry = algorithms.ALGORITHMS[algo]
    options = {"min_layer": 1} if algo.endswith("_plus") else {}
    if entry.exits and algo != "feddyn":
        options |= {"level_mix": "1:1", "model": "two_layers"}
    if algo == "scaffold":
        options |= {"client_optimizer": "sgd"}
    made = build.experiment(algo=algo, **SMALL | {"rounds": 1} | options)
    assert made.simulation.program.algorithm.plans
    assert made.task.num_classes == made.data.num_words == 8
    assert made.config.normalization == made.config.augment == "none"


SLOW = [pytest.param(algo, marks=pytest.mark.slow) for algo in ("ditto", "inclusivefl")]


@pytest.mark.parametrize("algo", ["scaffold", *SLOW])
def test_two_corrected_models_and_momentum(algo):
    """They learn: two objectives, control variates, movements between layers."""
    options = {
        "ditto": {},
        "scaffold": {"client_optimizer": "sgd"},
        "inclusivefl": {
            "model": "two_layers",
            "level_mix": "1:1",
            "momentum_distill_weight": 0.2,
        },
    }[algo]
    made = build.experiment(algo=algo, **SMALL | options)
    made.run(progress=False)
    first, last = made.metrics[0], made.metrics[-1]
    assert last["client_perplexity"] < first["client_perplexity"]


def test_the_loss_at_chosen_positions(tmp_path):
    """Another model, whose tables, pictures and lines have masked perplexities."""
    given = SMALL | {"algo": "fedavg"}
    plain = build.experiment(**given)
    plain.run(progress=False)
    made = build.experiment(**given, masked_loss="chosen", workdir=str(tmp_path))
    summary = made.run(progress=False)
    before, after = made.metrics[0], made.metrics[-1]
    assert after["masked_perplexity"] < before["masked_perplexity"]
    assert after["train_loss"] != plain.metrics[-1]["train_loss"]
    assert plain.metrics[0]["masked_perplexity"] == before["masked_perplexity"]
    names = {name for name in summary["metrics"] if "perplexity" in name}
    assert names and all("masked" in name for name in names)
    run = record.read(tmp_path)
    assert run.flags["masked_loss"] == "chosen"
    assert figures.metrics_of([run], "") == ["client_masked_perplexity"]
    shown = words.headline(run.records[-1:])
    assert list(shown) == ["Global, masked", "Client, pooled, masked", "loss"]
    both = words.headline(plain.metrics[-1:])
    assert list(both) == ["Global", "Client", "loss"]
    mine = SimpleNamespace(HParams=fedavg.HParams, make=fedavg.make, text=True)
    noted = build.experiment(**SMALL | {"algo": mine}, masked_loss="chosen").notes
    assert "a loss of a custom algorithm gets the positions" in " ".join(noted)


def test_one_step_at_chosen_positions():
    """Per-FedAvg's adapting step weighs the positions of all batches equally."""
    rate = 0.3
    given = SMALL | {"algo": "perfedavg", "inner_lr": rate, "batch_size": 2}
    made = build.experiment(**given, masked_loss="chosen")
    made.start()
    state = jax.tree.map(lambda leaf: leaf[0], made.state)
    data, model = made.data.of_seed(0), made.task.model

    def summed(batch):
        def total(params):
            given = params, state.server.stats, batch.image
            out, _ = model.forward(*given, **batch.mode)
            values = losses.cross_entropies(out, batch.label)
            return losses.masked_sum(values, batch.chosen & batch.mask[:, None])

        slope, count = jax.grad(total, has_aux=True)(state.server.params)
        return count, slope

    of_key = rng.stream(state.key, "perfedavg.adapt", 1)
    count, slope = local_training.sum_over_rows(summed, data, 1, 2, of_key)
    expected = jax.tree.map(
        lambda w, g: w - rate / count * g, state.server.params, slope
    )
    group, *_ = made.program.algorithm.serving(state, None, data)
    chex.assert_trees_all_close(group.variables(1).params, expected, atol=1e-6)


def test_rows_from_a_file(tmp_path):
    """The rows of a run's clients are those of another run."""
    path = tmp_path / "rows.npz"
    given = SMALL | {"algo": "local"}
    one = build.experiment(**given, export_partition=str(path))
    other = build.experiment(**given | {"partition": f"file:{path}"})
    for a, b in zip(
        jax.tree.leaves(one.data.partition),
        jax.tree.leaves(other.data.partition),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_what_a_run_leaves(folders, capsys):
    """Numbers of two digits in records, tables and arrays; no classes."""
    run = record.read(folders / "fedper")
    last = [row for row in run.records if row["round"] == 2]
    assert not [name for name in last[0] if "accuracy" in name]
    assert {"client_perplexity", "client_masked_perplexity"} <= last[0].keys()
    assert "class_counts" not in run.clients and "accuracy" not in run.clients
    assert run.clients["perplexity"].shape == (2, 1, 7)
    means = np.nanmean(record.of_clients(run), 1)
    np.testing.assert_allclose(means, [row["client_perplexity"] for row in last])
    first = [row["client_perplexity"] for row in run.records if row["round"] == 0]
    assert (means < first).all()
    assert "client_perplexity" in run.summary["numbers"]
    main.main(
        ["main", f"--workdir={folders / 'fedper'}", "--algo=fedper", "--client_lr=0.1"]
        + [f"--{name}={value}" for name, value in SMALL.items()]
        + ["--num_seeds=2"]
    )
    line = next(one for one in capsys.readouterr().out.splitlines() if "Client " in one)
    assert f"{means.mean():.2f} +- " in line


def test_pictures_and_page(folders, tmp_path, capsys, undrawn):
    """Curves and a page with their numbers; there are no bubbles to draw."""
    names = [str(folders / name) for name in ("fedper", "slow")]
    plot.command(["plot", *names, f"--output={tmp_path}"])
    drawn = [line.rpartition("/")[2] for line in capsys.readouterr().out.splitlines()]
    assert drawn == ["curves.png", "ecdf.png", "fairness.png"]
    with pytest.raises(SystemExit):
        plot.command(["plot", names[0], "--kind=bubbles", f"--output={tmp_path}"])
    assert "texts have no classes" in capsys.readouterr().err
    runs = [record.read(pathlib.Path(name)) for name in names]
    (line, _) = figures.picture("ecdf", runs).axes[0].lines
    assert line.get_ydata()[-1] == 100 and line.get_drawstyle() == "steps-post"
    panels = figures.picture("fairness", runs).axes
    edges = [sorted(p.get_x() for p in one.patches) for one in panels]
    assert edges[0] == edges[1]
    limits = panels[0].get_xlim()
    for run, one in zip(runs, panels, strict=True):
        values = record.of_clients(run)
        assert limits[0] <= values.min() and values.max() <= limits[1]
        bars = sum(patch.get_height() for patch in one.patches)
        assert bars == pytest.approx(7)
    page = tmp_path / "page.html"
    report.command(["report", *names, f"--output={page}"])
    text = page.read_text()
    best = min(runs, key=lambda run: record.of_clients(run).mean())
    assert f"fedper client_lr={best.flags['client_lr']} reaches " in text.lower()
    assert "A text has no classes." in text and "accuracy" not in text.lower()


def test_texts_beside_images(folders, blobs, tmp_path):
    """They share no measure, and one line says so."""
    made = build.experiment(
        algo="local",
        dataset=blobs,
        preset="none",
        model="mlp",
        rounds=1,
        num_clients=4,
        workdir=str(tmp_path / "images"),
    )
    made.run(progress=False)
    runs = [record.read(path) for path in (folders / "slow", tmp_path / "images")]
    for kind in ("curves", "fairness"):
        with pytest.raises(ValueError, match="others of images; give one kind"):
            figures.picture(kind, runs)


def test_frames(folders):
    """Train rows in place of classes."""
    made = build.load(str(folders / "fedper"))
    frame = made.partition_counts()
    assert list(frame.columns) == ["no classes"] and len(frame) == 7
    sizes = np.array([10, 15, 20, 25, 40, 50, 80])
    assert frame["no classes"].tolist() == (sizes * 9 // 10).tolist()


def test_small_owners_are_left_out():
    """One line says how many, and the others are numbered again."""
    made = build.experiment(algo="local", **SMALL, min_examples=22)
    assert made.config.num_clients == 4 and len(made.dropped_owners) == 3
    assert np.asarray(made.data.partition.train.count)[0].tolist() == [22, 36, 45, 72]


@pytest.mark.slow
def test_rows_on_the_host_and_several_devices():
    """The run on one device bit for bit, or to rounding."""
    given = SMALL | {"algo": "fedper", "rounds": 1}
    runs = [
        build.experiment(**given | more)
        for more in ({}, {"client_state": "host"}, {"devices": 3})
    ]
    one, host, three = (run.run(progress=False)["metrics"] for run in runs)
    assert one == host
    for name, entry in one.items():
        assert three[name]["mean"] == pytest.approx(entry["mean"], rel=1e-5), name


def test_models_of_clients(folders, tmp_path):
    """Probabilities of words, also from a file; hidden words have the number V."""
    made = build.load(str(folders / "fedper"))
    model = made.client_model(3)
    words = np.asarray(made.data.label[:4])
    p = model.predict(words)
    assert p.shape == (4, 5, 8)
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-5)
    hidden = np.where(np.arange(5) == 2, 8, words)
    assert np.abs(model.predict(hidden) - p).max() > 1e-3
    measured = model.evaluate(hidden, words)
    mine = np.take_along_axis(model.predict(hidden), words[..., None], -1)
    assert measured["loss"] == pytest.approx(-np.log(mine).mean(), rel=1e-5)
    for x, y, line in (
        (words + 20, words, "from 0 to 8"),
        (words, words[:, 0], "y must be integers"),
        (words[:, :3], words[:, :3], "expected"),
    ):
        with pytest.raises(ValueError, match=line):
            model.evaluate(x, y)
    path = model.save(tmp_path / "model.npz")
    again = build.experiment(
        algo="fedavg", **SMALL | {"init_from": str(path), "rounds": 1}
    )
    np.testing.assert_allclose(again.client_model(None).predict(words), p, rtol=1e-5)


def test_the_last_exit_alone(tmp_path):
    """Of a model with an embedding and exits; a file has all of it."""
    given = SMALL | {"algo": "fedavg", "model": "two_layers"}
    made = build.experiment(**given)
    assert made.task.model.stage_names == ("stage1", "stage2", "exit")
    words = np.asarray(made.data.label[:4])
    path = made.save_model(tmp_path / "model.npz")
    other = build.experiment(**given | {"init_from": str(path), "seed": 1})
    np.testing.assert_array_equal(*(m.predict(0, words) for m in (made, other)))


class Words(nn.Module):
    """Logits from the word itself; there are eight, and the hidden one."""

    num_inputs: int = 9

    @nn.compact
    def __call__(self, words):
        return nn.Dense(8)(nn.Embed(self.num_inputs, 4)(words))


def test_a_model_of_ones_own():
    """It gets tokens and gives logits for each."""
    given = SMALL | {"model": Words(), "rounds": 1}
    made = build.experiment(algo="fedavg", **given)
    assert made.task.model.takes == "tokens"
    metrics = made.run(progress=False)["metrics"]
    assert metrics["global_perplexity"]["mean"] < 10
    with pytest.raises(ValueError, match="needs an embedding of 9 words"):
        build.experiment(algo="fedavg", **given | {"model": Words(8)})


class Unigram(nn.Module):
    """Logits that are the same for all words."""

    @nn.compact
    def __call__(self, words):
        bias = self.param("bias", nn.initializers.normal(), (8,))
        return jax.numpy.broadcast_to(bias, (*words.shape, 8))


class First(nn.Module):
    """A learned vector in place of the first word, as for a class of the row."""

    @nn.compact
    def __call__(self, words):
        first = self.param("first", nn.initializers.normal(), (4,))
        h = nn.Embed(9, 4)(words).at[:, 0].set(first)
        return nn.Dense(8)(h + h.mean(1, keepdims=True))


@pytest.mark.parametrize("model", [Unigram(), First()])
def test_models_that_tell_some_words_apart(model):
    """None reads the hidden word as another one."""
    build.experiment(algo="fedavg", **SMALL | {"model": model})


def table_of(num_words):
    """A model as functions, which reads rows of an array by their numbers."""

    def init(key, words):
        return {"table": jax.random.normal(key, (num_words, 8))}

    return init, lambda params, words: params["table"][words]


def test_an_index_behind_the_end_of_a_table():
    """It reads the last row, where `nn.Embed` gives nan; refused as well."""
    build.experiment(algo="fedavg", **SMALL | {"model": table_of(9)})
    line = "reads word 8, .* its embedding needs 9 words"
    with pytest.raises(ValueError, match=line):
        build.experiment(algo="fedavg", **SMALL | {"model": table_of(8)})


class Mean(nn.Module):
    """Logits of two classes from the mean of ten words."""

    @nn.compact
    def __call__(self, words):
        return nn.Dense(2)(nn.Embed(10, 4)(words).mean(1))


def test_words_without_an_embedding():
    """No class is the answer to nan."""
    x = np.random.default_rng(0).integers(0, 10, (80, 6))
    given = {"dataset": (x, np.arange(80) % 2), "model": Mean(), "num_clients": 4}
    made = build.experiment(algo="fedavg", preset="none", devices=1, **given)
    known, unknown = x[:2], np.where(np.arange(6) == 0, 10, x[:2])
    assert np.isfinite(made.predict(None, known)).all()
    line = "gives nan for tokens up to 10; it has no embedding"
    with pytest.raises(ValueError, match=line):
        made.predict(None, unknown)
    with pytest.raises(ValueError, match=line):
        made.evaluate(unknown, np.zeros(2, int), client_id=None)


@pytest.mark.parametrize("has_own_tests", [True, False])
def test_a_file_decides_whose_test_rows_there_are(has_own_tests, tmp_path):
    """Also of a text, whose run opens again with the options that it wrote."""
    texts.write(tmp_path)
    given = {"algo": "fedavg", "dataset": "wikitext2", "data_dir": str(tmp_path)}
    given |= {"preset": "none", "model": "one_layer", "text_length": 5, "devices": 1}
    given |= {"num_clients": 4, "rounds": 1, "clients_per_round": 2}
    wanted = "client_share" if has_own_tests else "official"
    path, folder = str(tmp_path / "rows.npz"), tmp_path / "run"
    build.experiment(**given, test_split=wanted, export_partition=path)
    given |= {"partition": f"file:{path}", "num_clients": None}
    made = build.experiment(**given, workdir=str(folder))
    made.run(progress=False)
    again = build.load(folder, data_dir=str(tmp_path))
    assert made.config.test_split == again.config.test_split == wanted
    assert bool(made.data.partition.test.count.any()) == has_own_tests


def test_the_loss_of_chosen_positions_is_theirs():
    """Whatever batches hold, of which some have none."""
    given = SMALL | {"algo": "fedavg", "rounds": 1, "masked_loss": "chosen"}
    given |= {"client_lr": 0.0, "local_epochs": 3}
    found = []
    for size in (1, 20):
        made = build.experiment(**given, batch_size=size)
        made.run(progress=False)
        found.append(made.metrics[-1]["train_loss"])
    np.testing.assert_allclose(*found, rtol=0.05)


def test_single_clients_of_chosen_positions(tmp_path):
    """Their perplexities are compared as those of all positions are."""
    runs = {}
    for algo in ("local", "fedavg"):
        given = SMALL | {"algo": algo, "rounds": 1, "masked_loss": "chosen"}
        made = build.experiment(**given, workdir=str(tmp_path / algo))
        made.run(progress=False)
        runs[algo] = record.read(tmp_path / algo)
    values = [one.clients["perplexity"][0].mean(0) for one in runs.values()]
    local, fedavg = np.array(values)[:, np.isfinite(values[0])]
    assert 1 < len(local) < len(values[0])  # where no position was chosen
    expected = {
        "hurt": (local > fedavg).mean(),
        "gain": (local - fedavg).mean(),
        "bottom_decile": local.max(),
    }
    for name, value in expected.items():
        found = derived.of(name, runs["local"], runs["fedavg"], derived.Goal())
        assert found["mean"] == pytest.approx(value)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"model": "mlp"}, ["--model=mlp", "masked_lm"]),
        ({"algo": "cdkt"}, ["--dataset=small", "--algo=cdkt", "fedavg"]),
        ({"min_examples": 1000}, ["--min_examples=1000", "lower it"]),
        ({"model": "masked_lm", "model_width": 0.3}, ["--model=masked_lm", "8 heads"]),
        ({"algo": fedavg}, ["is a text", "--dataset=small"]),
    ],
)
def test_refused_on_a_text(given, words):
    with pytest.raises(ValueError) as error:
        build.experiment(**{"algo": "fedavg"} | SMALL | given)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_refused_on_images(blobs):
    given = {"dataset": blobs, "preset": "none", "model": "depth_masked_lm"}
    with pytest.raises(ValueError, match="^--model=depth_masked_lm takes tokens .*"):
        build.experiment(algo="depthfl", **given)


def test_a_row_is_no_longer_than_the_text(tmp_path):
    folder = texts.write(tmp_path)
    with pytest.raises(ValueError, match="--text_length=5000: expected at most 720"):
        build.experiment(
            algo="fedavg", dataset="wikitext2", data_dir=str(folder), text_length=5000
        )
