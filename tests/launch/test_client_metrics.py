"""The accuracies of every client in every evaluation, kept, resumed and refused."""

import numpy as np
import pytest

from launch import build
from launch.run import history
from tests.launch.test_newcomers import COMMON

pytestmark = pytest.mark.usefixtures("narrow")
GIVEN = COMMON | {"rounds": 4, "eval_every": 2, "num_seeds": 2}
EVERY = {"client_metrics": "every", "fine_tune_epochs": 1}


def ran(until=None, **given):
    """A small experiment that has run."""
    made = build.experiment(**GIVEN | given)
    made.run(until, progress=False)
    return made


def test_means_over_clients_are_the_records(tmp_path):
    """Of every evaluation and seed, in a frame and in clients.npz, also if resumed."""
    whole = ran(**EVERY, workdir=str(tmp_path / "whole"))
    ran(until=3, **EVERY, workdir=str(tmp_path / "cut"))
    cut = build.load(tmp_path / "cut", dataset=GIVEN["dataset"])
    assert {*cut.client_metrics()["round"]} == {0, 2}
    cut.run(progress=False)
    frame = build.load(tmp_path / "whole", dataset=GIVEN["dataset"]).client_metrics()
    assert frame.equals(cut.client_metrics()) and len(frame) == 3 * 2 * 10
    for record in whole.metrics:
        one = frame[
            (frame["round"] == record["round"]) & (frame.seed == record["seed"])
        ]
        for name in ("accuracy", "fine_tuned_accuracy"):
            key = name if name in record else f"client_{name}"
            np.testing.assert_allclose(one[name].mean(), record[key], atol=1e-12)
    with np.load(tmp_path / "cut" / "clients.npz") as file:
        assert file["every_round"].tolist() == [0, 2, 4]
        np.testing.assert_array_equal(file["every_accuracy"][:, -1:], file["accuracy"])
        of_frame = frame["accuracy"].to_numpy().reshape(3, 2, 10)
        np.testing.assert_array_equal(
            file["every_accuracy"], np.moveaxis(of_frame, 0, 1)
        )
    more = build.load(tmp_path / "cut", dataset=GIVEN["dataset"], rounds=6)
    more.run(progress=False)
    assert {*more.client_metrics()["round"]} == {0, 2, 4, 6}
    with pytest.raises(ValueError, match="--client_metrics=every, not summary"):
        ran(workdir=str(tmp_path / "whole"))


def test_a_variant_without_any_accuracy():
    kept = history.History((2, 3))
    one = [0.5, np.nan, 1.0]
    kept.add([None, np.array(one)])
    np.testing.assert_array_equal(kept.stacked, [[[np.nan] * 3, one]])


def test_the_most_that_is_kept():
    """A GiB of numbers of 8 bytes, and no more."""
    kept = history.History((1, 1 << 20))
    kept.check(128)
    with pytest.raises(ValueError, match="keeps .* of 129 evaluations"):
        kept.check(129)


def test_a_sweep_has_its_points():
    """Each line says of which point it is, and the run is the same without it."""
    given = {"sweep": {"client_lr": [0.001, 0.5]}, "num_seeds": 1}
    kept, plain = ran(client_metrics="every", **given), ran(**given)
    assert kept.summary()["parameters_sha256"] == plain.summary()["parameters_sha256"]
    frame = kept.client_metrics()
    for record in kept.metrics:
        is_of = (frame["round"] == record["round"]) & (
            frame.client_lr == record["client_lr"]
        )
        mean = frame["accuracy"][is_of].mean()
        np.testing.assert_allclose(mean, record["client_accuracy"], atol=1e-12)
    last = frame[frame["round"] == 4].reset_index(drop=True)
    assert plain.client_metrics().equals(last)


def test_the_best_round_of_each_seed():
    """Where the summary chooses a round, the lines are of that round."""
    best = {"val_split": 0.25, "summary": "best_validation", "eval_every": 1}
    made = build.experiment(**GIVEN | best)
    assert made.client_metrics().empty
    summary = made.run(progress=False)
    frame = made.client_metrics()
    of_seed = frame.groupby("seed")[["round", "accuracy"]].mean()
    metrics = summary["metrics"]
    assert of_seed["round"].tolist() == metrics["best_round"]["per_seed"]
    found = metrics["client_accuracy"]["per_seed"]
    np.testing.assert_allclose(of_seed["accuracy"], found, atol=1e-12)


def test_more_than_a_run_should_keep():
    """Refused in one line before it starts, and where it is extended."""
    long = {"eval_every": 1, "rounds": 10_000_000}
    with pytest.raises(ValueError, match="keeps 1.5 GiB of 10000001 .* --eval_every"):
        build.experiment(**GIVEN | long | {"client_metrics": "every"})
    made = build.experiment(**GIVEN, client_metrics="every")
    with pytest.raises(ValueError, match="--client_metrics=every keeps"):
        made.extend(2_000_000_000)
    assert made.config.rounds == 4
