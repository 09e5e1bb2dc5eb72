"""What a metric is decides how it is shown: percent or a number, and what is best."""

import pathlib

import numpy as np
import pytest

from fedjax_pfl import metric_kinds
from launch.folder import record
from launch.run import summaries
from launch.show import figures, table, words
from launch.show import page as page_lib


def run(metrics, numbers=(), **more):
    """A run that measured these metrics after one round."""
    entry = {
        name: {"mean": value, "std": 0.0, "per_seed": [value]}
        for name, value in metrics.items()
    }
    summary = {"metrics": entry, "numbers": list(numbers), "summary": "last"}
    return record.Record(
        pathlib.Path("run"),
        {"algo": "mine", "dataset": "d", "partition": "iid"},
        [{"round": 1, "seed": 0, **metrics}],
        {"seeds": np.zeros(1)},
        summary,
        kinds=summaries.kinds(summary),
        **more,
    )


@pytest.mark.parametrize(
    "metric, numbers, title, value",
    [
        ("dropped", (), "last round, %", "25.0"),
        ("critical", (), "last round, %", "25.0"),
        ("share_of_mine", (), "last round, %", "25.0"),
        ("dropped", ("dropped",), "last round", "0.25"),
        ("mean_layer", ("mean_layer",), "last round", "0.25"),
    ],
)
def test_a_fraction_is_percent_in_curves_as_in_tables(metric, numbers, title, value):
    """Whoever declared it: the run's own word counts before the table of metrics."""
    (legend,) = figures.picture(
        "curves", [run({metric: 0.25}, numbers)], metric
    ).legends
    assert legend.get_title().get_text() == title
    assert [text.get_text().split()[-1] for text in legend.get_texts()] == [value]


def test_of_an_unfinished_run_the_table_of_metrics_tells():
    """There is no summary that could."""
    known = {"dropped", "critical", "exits_disagree", "client_accuracy", "c_gen"}
    for name in (*known, "exit3_accuracy", "client_accuracy_mlp"):
        assert words.metric(name).unit, name
    for name in ("train_loss", "mean_layer", "mb_later"):
        assert not words.metric(name).unit, name


def test_only_what_is_better_is_bold():
    """The most clients dropped are not the best; the least spread is."""
    values = {
        "client_accuracy": (0.9, 0.8),
        "client_accuracy_std": (0.2, 0.1),
        "dropped": (0.1, 0.4),
        "global_brier": (0.9, 0.7),
        "global_top3_accuracy": (0.9, 0.7),
    }
    entries = [
        page_lib.Entry(name, "", run({key: pair[i] for key, pair in values.items()}))
        for i, name in enumerate(("one", "other"))
    ]
    bold = {
        n: [cell.is_best for cell in page_lib._cells(entries, words.metric(n))]
        for n in values
    }
    assert bold == {
        "client_accuracy": [True, False],
        "client_accuracy_std": [False, True],
        "dropped": [False, False],
        "global_brier": [False, False],  # a custom function, of which nobody knows
        "global_top3_accuracy": [True, False],
    }


def test_declared_fractions_are_better_if_higher():
    known = {"agreement": metric_kinds.Kind.FRACTION}
    assert words.metric("agreement", known).better == "higher"


def test_a_difference_that_is_no_number_is_not_marked():
    """As that of two infinite perplexities, whatever a test says about clients."""
    how = words.metric("client_perplexity")
    assert table.mark(how, -1.0, 0.01, -1) == "better"
    assert table.mark(how, float("nan"), 0.01, -1) == ""


def test_headlines_are_few():
    """C-Per says of the clients what their accuracy would."""
    record = {"c_gen": 0.5, "c_per": 0.6, "client_accuracy": 0.7, "global_accuracy": 1}
    assert words.headline([record]) == {
        "Global": "100.0",
        "C-Gen": "50.0",
        "C-Per": "60.0",
    }
    del record["c_gen"]
    assert list(words.headline([record])) == ["Global", "C-Per", "Client (UA)"]


def test_bytes_are_megabytes_and_fewer_are_better():
    how = words.metric("bytes_up")
    entry = {"mean": 21_747_200.0, "std": 1e5, "per_seed": [21_647_200.0] * 2}
    assert (how.title, how.better) == ("MB up", "lower")
    assert how.text(entry) == "21.7 ± 0.1"


def test_zero_has_no_sign():
    entry = {"mean": -0.0004, "std": 0.0, "per_seed": [-0.0004]}
    assert words.mean_and_std(entry, 100, 1) == "0.0"
    assert words.paired(np.array([-0.04])) == "+0.0"


def test_the_last_round_may_be_of_fewer_seeds():
    both = {"mean": 2.0, "std": 0.1, "per_seed": [1.9, 2.1]}
    alone = {"mean": 3.0, "std": 0.0, "per_seed": [3.0], "seeds": [1], "of_seeds": 2}
    summary = {"metrics": {"global_loss": both}, "last_round": {"global_loss": alone}}
    summary |= {"summary": "best_validation", "numbers": ["global_loss"]}
    (line,) = [one for one in words._lines(summary) if "loss" in one]
    assert line.endswith("3.000  (last round: 1 of 2 seeds)")


def test_a_proxy_set_is_in_no_other_bytes():
    entry = {"mean": 1e5, "std": 0.0, "per_seed": [1e5]}
    summary = {"metrics": {"bytes_down": entry}, "setup_bytes_down": 1_758_400}
    lines = words._lines(summary | {"summary": "last"})
    assert [one[:24].strip() for one in lines] == [
        "MB down            0.100",
        "MB at first        1.8",
    ]
    best = words._lines(summary | {"summary": "best_validation", "summary_of": ""})
    assert best[0] == "MB down            0.100  (all rounds)"


def test_the_best_point_has_the_lowest_perplexity():
    """By validation rows, of a text."""
    parts = [
        {"metrics": {"val_client_perplexity": {"mean": value}}, "point": {"a": value}}
        for value in (9.0, 7.0, 8.0)
    ]
    line = words.chosen(parts)
    assert line.startswith("best by validation rows: a=7.0 (")
    assert "equal" not in line
    again = {"metrics": parts[1]["metrics"], "point": {"a": 6.0}}
    assert words.chosen([*parts, again]).endswith(", the first of 2 that are equal)")


def test_megabytes_of_small_messages():
    """A few kilobytes have digits, too; nothing at all is 0.0."""
    known = {0: "0.0", 1291: "0.00129", 31_200: "0.0312", 5e5: "0.500", 1e6: "1.0"}
    assert {size: words.megabytes(size) for size in known} == known
    assert words.megabytes(1_234_567_890) == "1,234.6"
    entry = {"mean": 1291.0, "std": 12.0, "per_seed": [1, 2]}
    assert words.metric("bytes_up").text(entry) == "0.00129 ± 0.00001"
    assert words.metric("client_loss").text({"mean": 1e-5, "per_seed": [1]}) == "0.000"


def test_a_frame_has_the_numbers_of_its_heads():
    how = words.metric("bytes_up")
    values = [table.Value("2.5 ± 0.1", 2.5e6, 1e5), table.Value("–")]
    made = table.Table(["a", "b"], [table.Column("", how, values)], [])
    mean = made.to_frame()["MB up", "mean"]
    assert mean.iloc[0] == 2.5 and np.isnan(mean.iloc[1])
