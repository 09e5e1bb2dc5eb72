"""A run whose numbers are none says so, wherever its numbers are shown."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import program, types
from launch import build
from launch.folder import record
from launch.run import summaries
from launch.show import figures, table, words
from launch.show import page as page_lib
from tests import conftest
from tests.fedjax_pfl import small


def options(blobs, **more):
    """Six small clients, three a round."""
    given = {"dataset": blobs, "model": "mlp", "batch_size": 8, "rounds": 3}
    return conftest.SIX | given | more


@pytest.fixture(scope="module")
def both(blobs, tmp_path_factory):
    """(a comparison of a run that diverges and one that does not, its folder)."""
    folder = tmp_path_factory.mktemp("diverged")
    runs = {
        "bad": {"algo": "fedavg", "client_lr": 1e6},
        "good": {"algo": "fedavg", "client_lr": 0.05},
    }
    made = build.compare(
        runs, **options(blobs, workdir=str(folder), eval_every=1), progress=False
    )
    return made, folder


def test_summary_and_records_name_the_round(both):
    """The first one, counted from 1; null where there is none, in strict JSON."""
    _, folder = both

    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    text = (folder / "bad" / "summary.json").read_text()
    assert json.loads(text, parse_constant=refuse)["diverged"] == 1
    lines = (folder / "bad" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [record.get("diverged") for record in records] == [None, 1, 1, 1]
    assert records[-1]["train_loss"] is None
    assert not {"global_loss", "client_loss"} & records[-1].keys()
    summary = json.loads((folder / "good" / "summary.json").read_text())
    assert summary["diverged"] is None
    assert "diverged" not in (folder / "good" / "metrics.jsonl").read_text()


def test_a_best_round_before_it():
    """Its numbers are sound, and the line says so."""
    summary = {"diverged": 5, "metrics": {"best_round": {"per_seed": [4.0]}}}
    assert "the best round was before that" in words.meaningless(summary)
    # Another seed did not diverge, and is best later.
    several = {"diverged": 3, "metrics": {"best_round": {"per_seed": [5.0, 0.0]}}}
    assert "the best round of each seed that diverged was" in words.meaningless(several)
    for given in (summary | {"diverged": 4}, summary | {"metrics": {}}):
        assert "so the accuracies are meaningless" in words.meaningless(given)


def test_a_sweep_says_so_of_its_points(blobs):
    """The line about a run would be of all of them."""
    given = options(blobs, sweep="client_lr=0.05,1e6", summary="last")
    made = build.experiment(algo="fedavg", **given)
    made.run(progress=False)
    lines = words.table(made.summary()).splitlines()
    assert [line.partition(" ")[0] for line in lines if "diverged in" in line] == [
        "client_lr=1000000.0"
    ]
    assert not any("meaningless" in line for line in lines)


def test_a_picture_of_points_says_so(blobs):
    """A cell of a heat map has no number then."""
    sweep = "client_lr=0.05,1e6;proximal_weight=0.1,0.2"
    made = build.experiment(algo="fedprox", **options(blobs, sweep=sweep))
    made.run(progress=False)
    axes = made.plot("heatmap").axes[0]
    texts = sorted(one.get_text() for one in axes.texts)
    assert texts[2:] == ["diverged"] * 2 and all(map(float, texts[:2]))


def test_a_table_in_markdown_says_so(both):
    """Beside the name, as on the page."""
    text = page_lib.markdown(page_lib.read([both[1] / "bad", both[1] / "good"]))
    rows = [line for line in text.splitlines() if line.startswith("| FedAvg")]
    assert ["diverged" in row.split("|")[1] for row in rows] == [True, False]


def test_clients_that_diverged_in_fine_tuning_are_counted():
    """A record without them has none."""
    records = [
        {"round": 1, "seed": seed, "client_accuracy": 0.5} | more
        for seed, more in enumerate(({}, {"fine_tuned_diverged": 3}))
    ]
    found = summaries.summarize(records, [0, 1], (1,), "last", 1)
    assert found["fine_tuned_diverged"]["per_seed"] == [0, 3]
    assert "of_seeds" not in found["fine_tuned_diverged"]


def test_a_report_says_so_of_each_run(both):
    """One whose best round was before has results."""
    bad = page_lib.read([both[1] / "bad"])[0]
    records = [one | {"diverged": 3} for one in bad.run.records]
    best = bad.summary | {"diverged": 3, "metrics": {"best_round": {"per_seed": [2]}}}
    other = bad._replace(
        name="other", run=bad.run._replace(records=records, summary=best)
    )
    first, second, *_ = page_lib._notes([bad, other])
    assert first.endswith("so the accuracies are meaningless.")
    assert second.startswith("other (diverged in round 3): the best round was before")


def test_metrics_of_runs_that_diverged_are_known(both):
    """Those that no sound run has are not said to be of none."""
    bad = record.read(both[1] / "bad")
    shown = table.made({"": {"bad": bad}}, ["client_accuracy"], "", "none", 0.95)
    assert not [one for one in shown.notes if "has this metric" in one]


def test_it_is_said_where_numbers_are_shown(both, undrawn):
    """Final table, comparison, pictures and report, which also ranks without it."""
    made, folder = both
    assert "diverged in round 1" in words.table(made["bad"].summary())
    assert "diverged" not in words.table(made["good"].summary())
    frame = made.summary()
    assert frame["diverged"]["bad"] == 1 and np.isnan(frame["diverged"]["good"])
    (legend,) = made.plot().legends
    told = [text.get_text() for text in legend.get_texts()]
    assert [("diverged in round 1" in text) for text in told].count(True) == 1
    page = page_lib.page(
        page_lib.read([folder / "bad", folder / "good"], ["bad", "good"])
    )
    assert "bad (diverged in round 1): losses or parameters are not finite" in page
    assert 'class="answer">good reaches' in page
    assert "good (diverged" not in page


def test_it_is_warned_about_without_a_progress_bar(blobs, capsys):
    """Once, on stderr; a sweep tells it of its points, a resumed run remembers."""
    given = {"algo": "fedavg", "sweep": {"client_lr": [0.05, 1e6]}, "eval_every": 1}
    experiment = build.experiment(**options(blobs), **given)
    experiment.run(2, progress=False)
    assert capsys.readouterr().err.count("not finite") == 1
    summary = experiment.summary()
    assert [part["diverged"] for part in summary["sweep"]] == [None, 1]
    assert summary["diverged"] == 1
    table = words.table(summary).splitlines()
    assert "diverged in round 1" in next(line for line in table if "1000000.0" in line)
    assert "diverged" not in next(line for line in table if "=0.05" in line)
    other = build.experiment(**options(blobs), **given)
    other.load(2, *experiment.saved(), experiment.metrics)
    assert other.diverged() == 1 and other.diverged({"client_lr": 0.05}) is None
    (first, second) = record.by_point(plot_run(other, blobs))
    assert figures.named(first, "a") == "a" and "diverged" in figures.named(second, "b")


def plot_run(experiment, blobs):
    """An experiment in memory as pictures read it."""
    told = {"sweep": experiment.config.sweep, "dataset": blobs}
    return record.Record(None, told, experiment.metrics, {})


@pytest.mark.parametrize("where", ["metrics", "server", "clients", "absent", "count"])
def test_what_is_looked_at(where):
    """Metrics, the server's state and the rows of the round, floats alone."""
    state = types.RoundState.first(
        {"w": jnp.ones(3)}, {"w": jnp.ones((4, 2)), "n": jnp.ones(4, jnp.int32)}, None
    )
    cohort = small.cohort([1, 2, 4], 4)
    metrics = {"train_loss": (jnp.float32(1), jnp.int32(3))}
    if where == "metrics":
        metrics = {"train_loss": (jnp.float32(np.inf), jnp.int32(3))}
    if where == "server":
        state = state.replace(server={"w": jnp.array([1, np.nan, 1])})
    if where in ("clients", "absent"):
        row = 2 if where == "clients" else 0
        state.clients["w"] = state.clients["w"].at[row, 1].set(np.nan)
    found = bool(program._is_finite(state, metrics, cohort))
    assert found == (where in ("absent", "count"))


def test_no_later_round_is_the_best():
    """Whatever its record says."""
    record = {"val_client_accuracy": 0.5, "round": 1}
    later = {"val_client_accuracy": 0.9, "round": 2, "diverged": 2}
    assert summaries.best_round([record, later]) == 1


def test_beside_a_control(both):
    """A row that diverged has no gain, and one that is not over neither."""
    made, _ = both
    frame = made.summary(control="good")
    assert frame["gain"].isna().tolist() == [True, False]
    assert "gain" not in made.summary(control="bad")


@pytest.mark.parametrize("sweep", ["", "client_lr=0.1,3000"])
def test_a_text_that_diverged_ends(tmp_path, sweep):
    """It has no perplexities, and its folder is read again."""
    given = {"sweep": sweep} if sweep else {"client_lr": 3000.0}
    given |= {"dataset": "python_topics", "num_clients": 3, "clients_per_round": 2}
    given |= {"model": "masked_lm", "model_width": 0.125, "text_length": 8, "rounds": 2}
    given |= {"examples_per_client": 8, "eval_every": 1, "workdir": str(tmp_path / "a")}
    summary = build.experiment(algo="fedavg", **given).run(progress=False)
    *whole, bad = summary.get("sweep", [summary])
    assert bad["diverged"] and "global_perplexity" not in bad["metrics"]
    assert "diverged" in words.table(summary)
    again = record.read(tmp_path / "a").summary
    assert words.table(again) == words.table(summary)
    assert all("global_perplexity" in one["metrics"] for one in whole)


def test_a_run_diverged_when_its_first_seed_did():
    lines = [{"round": 4}, {"round": 4, "diverged": 3}, {"round": 4, "diverged": 1}]
    assert record.diverged(record.Record(None, {}, lines, {})) == 1
    assert record.diverged(record.Record(None, {}, lines[:1], {})) is None
