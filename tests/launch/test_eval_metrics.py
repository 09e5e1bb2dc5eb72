"""`eval_metrics`, and the test loss that every run has."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import evaluate
from launch import build, compare, report
from launch.folder import record
from launch.show import significance, words

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


SINGLE = ["macro_f1", "auc", "margin"]  # of the fixture's, what single clients have


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
    frame = run.client_metrics()
    assert [*frame] == ["round", "seed", "client", "accuracy", *SINGLE]
    np.testing.assert_allclose(frame["macro_f1"], f1, atol=1e-6)
    np.testing.assert_allclose(frame["margin"].mean(), last["client_margin"])
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
    for name in SINGLE:
        values = record.client_values(found, f"client_{name}")
        np.testing.assert_allclose(values[0], run.client_metrics()[name])
    assert record.client_values(found, "client_class0_accuracy") is None
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


def test_single_clients_after_an_interruption(tmp_path):
    """Their values go on, also beside fine-tuned ones and in every evaluation."""
    given = {"eval_metrics": "macro_f1,ece", "fine_tune_epochs": 1, "num_seeds": 2}
    given |= {"algo": "fedavg", "client_metrics": "every", "eval_every": 1}
    whole, cut = made(**given), made(**given, workdir=tmp_path)
    whole.run(progress=False)
    cut.run(1, progress=False)
    again = build.load(tmp_path, dataset=COMMON["dataset"])
    again.run(progress=False)
    frame = again.client_metrics()
    assert frame.equals(whole.client_metrics()) and len(frame) == 3 * 2 * 6
    names = ["accuracy", "fine_tuned_accuracy", "macro_f1", "ece"]
    assert [*frame][-4:] == names
    with np.load(tmp_path / "clients.npz") as file:
        for name in names:
            np.testing.assert_array_equal(
                file[name], file[f"every_{name}"][:, -1:], strict=True
            )


def test_checkpoints_of_an_earlier_version_have_no_measures():
    """The run goes on with the accuracies alone, and says nothing of the others."""
    given = {"eval_metrics": "macro_f1", "client_metrics": "every"}
    ran, later = made(**given), made(**given)
    ran.run(1, progress=False)
    arrays, host = ran.saved()
    accuracies = arrays.pop("of_clients")[:, :, 0]
    before = {"accuracies": accuracies, "history": arrays.pop("history")[:, :, 0]}
    forms = later.saved_templates()
    assert any(form.keys() == {"state", *before} for form in forms)
    later.load(1, arrays | before, host, list(ran.metrics))
    later.run(progress=False)
    whole = made(**given)
    whole.run(progress=False)
    expected = whole.client_metrics().drop(columns="macro_f1")
    assert later.client_metrics().equals(expected)
    assert later.metrics[-1]["client_macro_f1"] == whole.metrics[-1]["client_macro_f1"]


def test_tables_test_them(tmp_path):
    """Clients are paired, and a number of which neither way is better has no mark."""
    given = {name: one for name, one in COMMON.items() if name != "rounds"}
    given |= {"eval_metrics": {"macro_f1": "macro_f1", "margin": margin}}
    given |= {"num_seeds": 8, "rounds": 8, "client_lr": 0.5}
    found = compare.compare(["local", "fedavg"], **given, progress=False)
    names = ["client_macro_f1", "client_margin"]
    table = found.table(names, control="local")
    frames = {name: one.client_metrics() for name, one in found.items()}
    for column, name in zip(table.columns, names, strict=True):
        values = [
            frames[row][name.removeprefix("client_")].to_numpy().reshape(8, 6)
            for row in ("fedavg", "local")
        ]
        p, _ = significance.wilcoxon(*values)
        assert column.values[1].p == pytest.approx(p) and p < 0.05
    assert table.columns[0].values[1].mark and not table.columns[1].values[1].mark


def test_single_clients_of_the_points_of_a_sweep(tmp_path):
    """Each point has its own, and one point is tested as a run without a sweep."""
    given = {"eval_metrics": "macro_f1", "num_seeds": 2, "summary": "mean_last10"}
    given |= {"rounds": 12, "algo": "fedavg"}
    swept = made(**given, sweep={"client_lr": [0.1, 0.5]}, workdir=tmp_path)
    swept.run(progress=False)
    frame = swept.client_metrics()
    for run in record.by_point(record.read(tmp_path)):
        mine = frame[frame["client_lr"] == run.point["client_lr"]]
        expected = mine.groupby(["seed", "client"])["macro_f1"].mean()
        found = record.client_values(run, "client_macro_f1")
        np.testing.assert_allclose(found.ravel(), expected)
        mean = run.summary["metrics"]["client_macro_f1"]["mean"]
        assert found.mean() == pytest.approx(mean)


def test_names_that_single_clients_have(tmp_path):
    """Those of other columns and of a sweep's numbers."""
    for name in ("unseen", "rounds", "fine_tuned_f1", "file", "allow_pickle", "algo"):
        with pytest.raises(ValueError, match=f"{name}.* is not a name for a metric"):
            made(eval_metrics={name: margin})
    for name in ("lr", "client_lr"):
        with pytest.raises(ValueError, match="client_lr: one of eval_metrics has that"):
            made(eval_metrics={name: margin}, sweep={"client_lr": [0.1, 0.2]})


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
