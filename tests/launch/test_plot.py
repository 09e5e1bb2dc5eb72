"""Pictures: what is drawn is what the runs left behind."""

import json
import shutil

import numpy as np
import pytest

import algorithms
from launch import build, main, plot
from launch.config import registry
from launch.folder import record
from launch.show import curves, figures, looks
from tests import conftest

pytestmark = pytest.mark.usefixtures("narrow")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, blobs):
    """Folders of three short runs, two of one algorithm and two seeds each."""
    root = tmp_path_factory.mktemp("runs")
    common = {"dataset": blobs, "model": "narrow", "rounds": 2, "num_clients": 5}
    common |= {
        "preset": "none",
        "clients_per_round": 4,
        "num_seeds": 2,
        "devices": 1,
        "eval_every": 1,
    }
    for name, own in {
        "majority": {"algo": "majority"},
        "low": {"algo": "fedavg", "client_lr": 0.01},
        "high": {"algo": "fedavg", "client_lr": 0.2},
    }.items():
        given = common | own | {"workdir": str(root / name)}
        known = registry.fields_of(own["algo"])
        main.execute({key: value for key, value in given.items() if key in known})
    return [root / name for name in ("majority", "low", "high")]


def read(folders):
    """Runs and labels, as the command makes them."""
    found = [record.read(folder) for folder in folders]
    return found, record.labels(found)


def test_command_writes_four_pictures(runs, tmp_path, capsys):
    """curves, ecdf, fairness and bubbles as PNG."""
    out = tmp_path / "pictures"
    plot.command(["plot", *map(str, runs), f"--output={out}"])
    assert len(capsys.readouterr().out.splitlines()) == 4
    for kind in figures.KINDS:
        assert (out / f"{kind}.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize("kind, head", [("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_other_formats(runs, tmp_path, kind, head):
    """For papers."""
    argv = ["plot", str(runs[0]), f"--output={tmp_path}", f"--format={kind}"]
    plot.command(argv)
    for name in figures.KINDS:
        assert (tmp_path / f"{name}.{kind}").read_bytes().startswith(head)


def test_runs_that_are_not_finished(runs, tmp_path, capsys):
    """Their curves, with a note of how far they are; other pictures are refused."""
    half = tmp_path / "half"
    shutil.copytree(runs[1], half)
    lines = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
    (half / "metrics.jsonl").write_text("".join(lines[:4]))
    (half / "summary.json").unlink()
    found, names = read([half, runs[2]])
    assert names[0] == "fedavg client_lr=0.01 (round 1 of 2)"
    assert names[1] == "fedavg client_lr=0.2"
    plot.command(["plot", str(half), str(runs[2]), f"--output={tmp_path / 'out'}"])
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["curves.png"]
    with pytest.raises(SystemExit):
        plot.command(["plot", str(half), "--kind=fairness"])
    assert "half is not finished; omit it" in capsys.readouterr().err


def test_runs_without_clients(runs, tmp_path):
    """No empty panel: the picture is left out, or refused where it was asked for."""
    alone = tmp_path / "alone"
    shutil.copytree(runs[1], alone)
    found = record.read(alone)
    unknown = np.full_like(found.clients["accuracy"], np.nan)
    bare = found._replace(clients=found.clients | {"accuracy": unknown})
    after = found._replace(flags=found.flags | {"eval_moments": "after"})
    assert record.has_clients(found)
    for one in (bare, after):
        assert not record.has_clients(one)
        with pytest.raises(ValueError, match="has no accuracies of single clients"):
            figures.picture("fairness", [found, one])


def test_a_dollar_is_no_formula(runs):
    """In a path, for instance."""
    found = record.read(runs[1])
    odd = found._replace(flags=found.flags | {"dataset": "npz:$x_{$"})
    figure = figures.picture("curves", [odd, found], "client_accuracy")
    figure.canvas.draw()


def test_how_many_seeds_a_curve_has(runs, tmp_path):
    """Said where they differ."""
    found, names = read(runs[:2])
    few = found[0]._replace(records=[r for r in found[0].records if r["seed"] == 0])
    texts = [
        [text.get_text() for text in figures.curves(some, names, ["client_accuracy"])
         .legends[0].get_texts()]
        for some in (found, [few, found[1]])
    ]  # fmt: skip
    assert not any("n=" in text for text in texts[0])
    assert sorted(text[-3:] for text in texts[1]) == ["n=1", "n=2"]


def test_the_legend_has_the_numbers_of_the_table(tmp_path, blobs):
    """Those of the summary rule; of the last round if that is not one for all runs."""
    given = conftest.SIX | {"num_seeds": 2, "rounds": 8, "summary": "mean_last10"}
    given |= {"dataset": blobs, "workdir": str(tmp_path / "a")}
    ran = build.experiment(algo="fedavg", **given)
    ran.run(progress=False)
    value = 100 * ran.summary()["metrics"]["client_accuracy"]["mean"]
    found = record.read(tmp_path / "a")
    for figure in (ran.plot(), figures.picture("curves", [found])):
        (legend,) = figure.legends
        assert legend.get_title().get_text() == "mean of rounds 7 to 8, %"
        assert legend.get_texts()[0].get_text().endswith(f"  {value:.1f}")
    mixed = [found, found._replace(summary=None)]
    (legend,) = figures.picture("curves", mixed, names=["a", "b"]).legends
    last = 100 * np.mean([one["client_accuracy"] for one in found.records[-2:]])
    assert legend.get_title().get_text() == "last round, %"
    assert [text.get_text()[1:] for text in legend.get_texts()] == [f"  {last:.1f}"] * 2


def test_curves_show_means_over_seeds(runs):
    """Each line is the mean of the seeds in percent, by round; the axes are named."""
    found, names = read(runs)
    axes = figures.curves(found, names, ["client_accuracy"]).axes[0]
    for folder, name in zip(runs, names, strict=True):
        records = [json.loads(r) for r in open(folder / "metrics.jsonl")]
        line = next(one for one in axes.lines if one.get_label() == name)
        rounds = sorted({r["round"] for r in records})
        np.testing.assert_array_equal(line.get_xdata(), rounds)
        expected = [
            100 * np.mean([r["client_accuracy"] for r in records if r["round"] == one])
            for one in rounds
        ]
        np.testing.assert_allclose(line.get_ydata(), expected)
    assert axes.get_xlabel() == "finished rounds"
    assert axes.get_ylabel() == "mean accuracy of clients (%)"


def test_a_curve_has_the_means_and_the_spread_of_seeds():
    """Also of where it is, in megabytes; the spread is that of a sample."""
    pairs = enumerate(((0.2, 1e6), (0.4, 3e6), (0.9, 8e6)))
    records = [
        {"seed": seed, "round": 1, "client_accuracy": value}
        | {"bytes_up": size, "bytes_down": 0}
        for seed, (value, size) in pairs
    ]
    given = record.Record(None, {}, records, {}), "client_accuracy", 100
    where, mean, spread = record.over_seeds(*given, curves.megabytes)
    assert where == [4.0] and mean == pytest.approx([50])
    assert spread == pytest.approx([np.std([20, 40, 90], ddof=1)])


def test_a_curve_without_numbers(runs):
    """Of a run that diverged in its first round: its name alone is drawn."""
    found = record.read(runs[1])
    rows = [row | {"client_accuracy": np.nan} for row in found.records]
    figure = figures.picture("curves", [found._replace(records=rows), found])
    assert len(figure.legends[0].get_texts()) == 2


def test_curves_over_messages(runs, tmp_path, capsys):
    """Megabytes of both directions; a clock is refused where records have none."""
    found, names = read(runs[1:])
    axes = figures.curves(found, names, ["client_accuracy"], "bytes").axes[0]
    rows = [row for row in found[0].records if row["seed"] == 0]
    sent = [(row["bytes_up"] + row["bytes_down"]) / 1e6 for row in rows]
    np.testing.assert_allclose(axes.lines[0].get_xdata(), sent)
    assert axes.get_xlabel() == "MB sent in both directions"
    argv = ["plot", str(runs[1]), "--kind=curves", f"--output={tmp_path}"]
    with pytest.raises(SystemExit):
        plot.command([*argv, "--x=clock"])
    assert "--x=clock: the records of FedAvg have no clock" in capsys.readouterr().err
    plot.command([*argv, "--x=bytes", "--width=column", "--format=pdf"])
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")


def test_ecdf_is_the_share_of_clients(runs):
    """With at least an accuracy, at every accuracy that a client has."""
    found = record.read(runs[0])
    accuracy = np.zeros((2, 1, 5))
    accuracy[:] = [0.0, 0.5, 0.5, 0.75, 1.0]
    run = found._replace(clients=found.clients | {"accuracy": accuracy})
    (axes,) = figures.picture("ecdf", [run, run], names=["a", "b"]).axes
    x, share = axes.lines[0].get_data()
    assert len(x) == 10 and share[0] == 100 and share[-1] == 10
    for value in np.unique(x):
        wanted = 100 * (accuracy.ravel() * 100 >= value).mean()
        assert share[x == value].max() == pytest.approx(wanted)
    assert axes.lines[0].get_drawstyle() == "steps-pre"


def test_looks_and_names():
    """16 methods differ also in grey; the names are those of papers."""
    some = looks.looks(list("abcdefghijklmnop"))
    assert len({(one.marker, one.dashes) for one in some.values()}) == 16
    assert len({(one.color, one.marker) for one in some.values()}) == 16
    assert some["c"] == looks.looks(["x", "y", "c"])["c"]
    known = {
        "fedper_plus": "FedPer+",
        "pfedsd+ft": "pFedSD + FT",
        "cdkt": "CDKT-FL",
        "fedavg client_lr=0.1": "FedAvg client_lr=0.1",
        "my own": "my own",
    }
    assert {name: looks.title(name) for name in known} == known
    titles = [algorithms.title(name) for name in algorithms.ALGORITHMS]
    assert len({*titles}) == len(titles) and max(map(len, titles)) < 13


def test_curves_of_several_metrics(runs):
    """A line for each run and metric, named by both; shares in percent."""
    found, names = read(runs)
    wanted = figures.metrics_of(found, "client_accuracy,worst_decile_accuracy")
    figure = figures.curves(found, names, wanted)
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == [
        f"{name} {title}" for name in names for title in ("Client (UA)", "Worst decile")
    ]
    last = found[0].records[-2:]  # of both seeds
    worst = 100 * np.mean([record["worst_decile_accuracy"] for record in last])
    assert figure.axes[0].lines[1].get_ydata()[-1] == pytest.approx(worst)
    assert figure.axes[0].get_ylabel() == "%"


def test_numbers_are_drawn_as_they_are(runs):
    """Not in percent; what rounds measure begins with the first round."""
    found, names = read(runs[1:])
    wanted = figures.metrics_of(found, "train_loss")
    (axes,) = figures.curves(found, names, wanted).axes
    line, records = axes.lines[0], found[0].records
    losses = [r["train_loss"] for r in records if r["round"] == 1]
    assert list(line.get_xdata()) == [1, 2]
    assert line.get_ydata()[0] == pytest.approx(np.mean(losses))
    assert axes.get_ylabel() == "train loss"


def test_fairness_counts_clients(runs):
    """Bars of a panel add up to the clients; a client with 100 % is in the last bin."""
    found, names = read(runs)
    accuracy = np.zeros((2, 1, 5))
    accuracy[:] = [0.0, 0.05, 0.55, 1.0, 1.0]
    made = found[0].clients | {"accuracy": accuracy}
    run = found[0]._replace(clients=made)
    axes = figures.fairness([run], names[:1]).axes[0]
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == [2, 0, 0, 0, 0, 1, 0, 0, 0, 2]
    assert "2.0 clients reach 80 %" in axes.get_title()


def test_bubbles_are_class_counts(runs):
    """One panel, as the runs share a partition; areas are proportional to counts."""
    found, names = read(runs)
    figure = figures.bubbles(found, names)
    assert len(figure.axes) == 1
    counts = found[0].clients["class_counts"][0]
    drawn = figure.axes[0].collections[0]
    client, label = np.nonzero(counts)
    np.testing.assert_array_equal(drawn.get_offsets(), np.stack([client, label], 1))
    sizes, count = drawn.get_sizes(), counts[client, label]
    large = sizes > figures.DOT
    np.testing.assert_allclose(sizes[large] / count[large], 160 / counts.max())
    assert large.any() and (sizes >= figures.DOT).all()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give the folders"),
        (["/nowhere"], "/nowhere: there is no such folder"),
        (["RUN", "--kind=pie"], "--kind=pie: expected one of"),
        (["RUN", "--metric=c_gen"], "--metric=c_gen: the runs share"),
        (["RUN", "--metric=client_accuracy,c_gen"], "the runs share"),
        (["RUN", "--metric=client_accuracy,bytes_up"], "a picture each"),
    ],
)
def test_bad_input_is_one_line(runs, capsys, argv, words):
    """Exit code 2 and one line."""
    argv = [str(runs[0]) if one == "RUN" else one for one in argv]
    with pytest.raises(SystemExit) as stop:
        plot.command(["plot", *argv])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def of_clients(**arrays):
    """A record with arrays of two clients in two rounds."""
    return record.Record(
        None, {}, [], {n: np.array([one]) for n, one in arrays.items()}
    )


def test_values_of_clients_are_means_over_rounds():
    """Over the rounds in which a client was measured."""
    run = of_clients(accuracy=[[0.2, np.nan], [0.6, 0.5]])
    np.testing.assert_allclose(
        record.client_values(run, "client_accuracy"), [[0.4, 0.5]]
    )


def test_values_of_clients_that_never_train_are_apart():
    """Before and after fine-tuning."""
    values = {"accuracy": [[0.2, 0.4]], "fine_tuned_accuracy": [[0.3, 0.6]]}
    run = of_clients(**values, unseen=[0, 1])
    for name, expected in {
        "client_accuracy": [[0.2, np.nan]],
        "unseen_accuracy": [[np.nan, 0.4]],
        "fine_tuned_accuracy": [[0.3, np.nan]],
        "unseen_fine_tuned_accuracy": [[np.nan, 0.6]],
    }.items():
        np.testing.assert_allclose(record.client_values(run, name), expected)
