"""`eval_metrics`, and the test loss that every run has."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import evaluate
from launch import build, report
from launch.folder import record
from launch.show import words

pytestmark = pytest.mark.usefixtures("narrow")
GEN = np.random.default_rng(1)
X = GEN.normal(size=(90, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)
COMMON = {
    "dataset": (X, Y, np.arange(90) // 15),
    "preset": "none",
    "rounds": 2,
    "batch_size": 5,
    "model": "narrow",
    "devices": 1,
}


def margin(logits, labels, mask):
    """The gap between the two largest logits."""
    top = jax.lax.top_k(logits, 2)[0]
    return jnp.where(mask, top[:, 0] - top[:, 1], 0).sum(), mask.sum()


def made(**given):
    """A small experiment."""
    return build.experiment(**{"algo": "pfedsd"} | COMMON | given)


def own_rows(experiment, client):
    """(images, labels) of a client's test rows."""
    test = jax.tree.map(np.asarray, experiment.data.partition.test)
    start = test.start[0, client]
    rows = test.row[0, start : start + test.count[0, client]]
    return X[rows], Y[rows]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with a folder."""
    names = ["macro_f1", "auc", "per_class", margin]
    folder = str(tmp_path_factory.mktemp("measured") / "run")
    experiment = made(eval_metrics=names, workdir=folder)
    experiment.run(progress=False)
    return experiment


def test_values_are_those_of_the_served_models(run):
    """The mean over clients of what scikit-learn says, and evaluate's loss."""
    from sklearn import metrics as sklearn_metrics

    last = run.metrics[-1]
    rows = [own_rows(run, k) for k in range(6)]
    p = [run.predict(k, x) for k, (x, _) in enumerate(rows)]
    f1 = [
        sklearn_metrics.f1_score(y, found.argmax(1), average="macro")
        for found, (_, y) in zip(p, rows, strict=True)
    ]
    assert last["client_macro_f1"] == pytest.approx(np.mean(f1), abs=1e-6)
    labels = np.concatenate([y for _, y in rows])
    answers = np.concatenate([found.argmax(1) for found in p])
    f1 = sklearn_metrics.f1_score(labels, answers, average="macro")
    assert last["client_macro_f1_pooled"] == pytest.approx(f1, abs=1e-6)
    losses = [run.evaluate(*own_rows(run, k), client_id=k)["loss"] for k in range(6)]
    assert last["client_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    x = np.concatenate([one for one, _ in rows])
    loss = run.evaluate(x, labels)["loss"]
    assert last["global_loss"] == pytest.approx(loss, rel=1e-5)
    recall = (run.predict(None, x).argmax(1) == labels)[labels == 1].mean()
    assert last["global_class1_accuracy"] == pytest.approx(recall)


def test_summary_report_and_folder_have_them(run, undrawn, tmp_path):
    """Numbers and percent apart; a curve can be drawn; a folder can be opened."""
    numbers = run.summary()["numbers"]
    assert {"global_loss", "client_loss", "client_margin"} <= set(numbers)
    assert "client_macro_f1" not in numbers
    page = tmp_path / "report.html"
    report.command(["report", run.config.workdir, f"--output={page}"])
    text = page.read_text()
    for title in ("Client macro F1", "Client, test loss", "Global, class 1"):
        assert title in text
    found = record.read(pathlib.Path(run.config.workdir))
    assert found.records[-1]["global_margin"] > 0
    assert run.plot(metric="client_auc,client_macro_f1") is not None
    with pytest.raises(ValueError, match="margin was a custom function; give eval_"):
        build.load(run.config.workdir, dataset=COMMON["dataset"])
    given = {"dataset": COMMON["dataset"]}
    given |= {"eval_metrics": ["macro_f1", "auc", "per_class", margin]}
    assert build.load(run.config.workdir, **given).round == 2


@pytest.mark.parametrize(
    "more", [{"devices": 2}, {"num_seeds": 2}, {"client_chunk": 4}]
)
def test_other_ways_of_computing(run, more):
    """Devices, seeds and chunks give the same values."""
    other = made(eval_metrics="macro_f1,auc", **more)
    other.run(progress=False)
    first = next(one for one in other.metrics if (one["round"], one["seed"]) == (2, 0))
    for name, value in run.metrics[-1].items():
        if name in first and name not in ("seconds",):
            assert first[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_sample_of_clients(monkeypatch):
    """Of sampled clients alone, who are drawn once for each seed."""
    drawn, draw = [], evaluate.sampled_clients

    def noted(*given):
        drawn.append(given)
        return draw(*given)

    monkeypatch.setattr(evaluate, "sampled_clients", noted)
    experiment = made(eval_sample=2, eval_metrics="ece", algo="fedavg")
    experiment.run(progress=False)
    assert len(drawn) == len(experiment.seeds) < len(experiment.metrics)
    last = experiment.metrics[-1]
    assert {"global_ece", "client_ece", "client_ece_pooled"} <= last.keys()
    assert last["clients_evaluated"] == 2
    found = experiment.summary()["metrics"]
    assert {name for name, one in found.items() if one.get("clients") == 2} == {
        name for name in found if re.match("client_|worst_decile_", name)
    }
    assert "(2 clients)" in words.table(experiment.summary())


def test_models_that_training_left_are_those_that_serve():
    """`local` says so, and has both metrics."""
    found = made(algo="local").run(progress=False)["metrics"]
    assert found["trained_accuracy"] == found["client_accuracy"]


def test_bad_input():
    """The line lists the metrics."""
    with pytest.raises(ValueError, match="--eval_metrics=f1: expected one of macro_f1"):
        made(eval_metrics="f1")


def test_a_list_of_names_is_no_code(tmp_path):
    """Its run is opened like that of the same names as a text."""
    made(eval_metrics=["macro_f1", "auc"], workdir=tmp_path).run(progress=False)
    assert "own_sha256" not in (tmp_path / "run.flags").read_text()
    # An earlier version counted it.
    with (tmp_path / "run.flags").open("a") as file:
        file.write("#--own_sha256=ea461469ff9b\n")
    found = build.load(tmp_path, dataset=COMMON["dataset"])
    assert "client_macro_f1" in found.metrics[-1]
