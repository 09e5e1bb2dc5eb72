"""What of validation rows chooses rounds, points and a study's options."""

import numpy as np
import pytest

from launch import build
from launch.run import summaries
from launch.show import page, words
from launch.tables import tuning

pytestmark = pytest.mark.usefixtures("narrow")
GEN = np.random.default_rng(0)
Y = (GEN.random(480) < 0.25).astype(int) + (GEN.random(480) < 0.1)
X = (GEN.normal(size=(480, 6)) + Y[:, None]).astype("f")
COMMON = {
    **{"dataset": (X, Y), "model": "narrow", "num_clients": 6, "preset": "none"},
    **{"rounds": 4, "eval_every": 1, "local_epochs": 1, "batch_size": 8, "devices": 1},
    **{"val_split": 0.2, "eval_metrics": ["macro_f1", "auc"]},
}


def made(**given):
    return build.experiment(**COMMON | {"algo": "fedper"} | given)


@pytest.mark.parametrize("choose_by", ["loss", "macro_f1", "auc"])
def test_the_best_round(choose_by, tmp_path):
    """Is that of the metric, and its name stands in the summary's rule."""
    given = {"summary": "best_validation", "choose_by": choose_by, "client_lr": 0.3}
    run = made(**given, num_seeds=2, workdir=str(tmp_path))
    found = run.run(progress=False)
    sign = -1 if choose_by == "loss" else 1
    for seed in (0, 1):
        curve = [r for r in run.metrics if r["seed"] == seed]
        values = [sign * one[f"val_client_{choose_by}"] for one in curve]
        assert run.best_rounds()[seed] == (int(np.argmax(values)),)
    rule = f"round with the best validation {choose_by.replace('_', ' ')}"
    assert (found["summary_of"], found["choose_by"]) == (rule, choose_by)
    assert build.load(str(tmp_path), dataset=(X, Y)).best_rounds() == run.best_rounds()
    other = made(**given | {"choose_by": ""}, num_seeds=2, workdir=str(tmp_path))
    with pytest.raises(ValueError, match=f"holds a run with --choose_by={choose_by}"):
        other.run(progress=False)


def test_rounds_that_differ():
    """A record is best by its own metric alone, and perplexities and losses are low."""
    names = summaries.choosing(choose_by="macro_f1")
    records = [
        {"round": 0, "val_client_accuracy": 0.9, "val_global_macro_f1": 0.9},
        {"round": 1, "val_client_accuracy": 0.8, "val_client_macro_f1": 0.2},
        {"round": 2, "val_client_accuracy": 0.7, "val_client_macro_f1": 0.4},
        {"round": 3, "val_client_loss": 0.1, "diverged": 3},
        {"round": 3, "val_client_loss": 0.5, "val_client_perplexity": 2.0},
        {"round": 4, "val_client_loss": 0.4, "val_client_perplexity": 1.0},
    ]
    assert summaries.best_round(records) == 0
    assert summaries.best_round(records, names) == 2
    assert summaries.best_round(records[:1], names) == 0
    assert summaries.best_round(records[3:], summaries.choosing(choose_by="loss")) == 4
    assert summaries.best_round(records[4:]) == 4


def test_early_stop():
    """By the loss of a rate so high that it never falls after round 0."""
    run = made(early_stop=2, choose_by="loss", client_lr=1e3, client_optimizer="sgd")
    found = run.run(progress=False)
    assert found["stopped_early"] and found["rounds"] == 2
    assert run.best_rounds() == {0: (0,)}


def test_a_point_of_a_sweep(tmp_path):
    """Also of a page, and whatever rounds the summary is of."""
    run = made(sweep={"client_lr": [0.3, 1e-4]}, choose_by="auc", workdir=str(tmp_path))
    found = run.run(progress=False)
    values = [one["metrics"]["val_client_auc"]["mean"] for one in found["sweep"]]
    best = ["client_lr=0.3", "client_lr=0.0001"][int(np.argmax(values))]
    line = words.chosen(found["sweep"], found["choose_by"])
    value = f"{100 * max(values):.2f}"
    assert line == f"best by validation rows: {best} (Val: Client AUC {value})"
    assert line in words.table(found)
    assert line[1:] in page.page(page.read([tmp_path]))  # a sentence there


def test_tuning():
    """The chosen metric decides, and points that are equally good are counted."""
    points = [
        ({"client_lr": rate}, {"diverged": None, "metrics": metrics})
        for rate, accuracy, f1 in ((0.1, 0.9, 0.2), (0.2, 0.8, 0.4), (0.3, 0.7, 0.4))
        for metrics in [
            {
                "val_client_accuracy": summaries.spread([accuracy]),
                "val_client_macro_f1": summaries.spread([f1]),
            }
        ]
    ]
    tune = {"client_lr": [0.1, 0.2, 0.3]}
    usual = tuning.best(points, tune, False)
    assert (usual.options, usual.num_equal) == ({"client_lr": 0.1}, 1)
    found = tuning.best(points, tune, False, "macro_f1")
    assert found.metric == "val_client_macro_f1" and found.num_equal == 2
    assert found.options == {"client_lr": 0.2} and found.edges == ()
    epochs = [
        (one | {"fine_tune_epochs": n}, part) for n in (1, 2) for one, part in points
    ]
    tune |= {"fine_tune_epochs": [1, 2]}
    assert tuning.best(epochs, tune, False).num_equal == 1
    assert tuning.best(epochs, tune, True).num_equal == 2


def test_a_study(tmp_path):
    """Its methods are tuned by it, and equal points are said."""
    options = COMMON | {"choose_by": "macro_f1", "tune": {"client_lr": [0.0, 0.0001]}}
    study = build.study(["fedper"], **options, seeds=1, folder=tmp_path)
    study.run(progress=False)
    ((_, _, chosen),) = study.choices()
    assert chosen.metric == "val_client_macro_f1"
    ties = [n for n in study.notes if "points have the best val_client_macro_f1" in n]
    assert bool(ties) == (chosen.num_equal == 2)
    with pytest.raises(ValueError, match="choose_by=macro_f1 is not measured of fine-"):
        build.study(["fedper", "fedper+ft"], **options, fine_tune_epochs=1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"choose_by": "f1"}, "expected one of loss, macro_f1, balanced_accuracy, auc"),
        (
            {"choose_by": "balanced_accuracy"},
            "is not measured; give --eval_metrics=macro_f1,auc,balanced_accuracy",
        ),
        ({"choose_by": "loss", "val_split": 0.0}, "--choose_by=loss needs validation"),
    ],
)
def test_refusals(given, words):
    with pytest.raises(ValueError, match=words):
        made(**given)


def test_what_validation_rows_cannot_measure():
    """An AUC of clients that have one class each, before any round is computed."""
    owner = Y  # each client has one class
    given = {"dataset": (X, Y, owner), "num_clients": None, "eval_metrics": ["auc"]}
    run = made(**given, choose_by="auc", summary="best_validation")
    with pytest.raises(ValueError, match="the validation rows have no val_client_auc"):
        run.run(progress=False)
    assert run.round == 0
    names = summaries.choosing(choose_by="auc")
    records = [{"seed": 3, names[0]: 0.5}, {"seed": 4}]
    with pytest.raises(ValueError, match="or val_global_auc; omit it"):
        run._check_chooses(records)
    run._check_chooses([one | {names[1]: 0.5} for one in records])


def test_points_without_a_value():
    """They are not the best, and do not hide what the others have."""
    part = {"val_client_loss": summaries.spread([0.5])}
    parts = [
        {"point": {"client_lr": 0.5}, "metrics": {}},
        {"point": {"client_lr": 0.1}, "metrics": part},
    ]
    line = words.chosen(parts, "loss")
    assert line == "best by validation rows: client_lr=0.1 (Val: Client, loss 0.500)"
    assert words.chosen(parts[:1], "loss") == ""


def test_a_choice_without_an_effect_is_said():
    """No round is chosen, and the metrics that choose are not called useless."""
    (line,) = (n for n in made(choose_by="loss").notes if "choose_by" in n)
    assert line.startswith(
        "--choose_by=loss chooses no round with --summary=last; give"
    )
    given = {"summary": "best_validation", "choose_by": "macro_f1"}
    notes = "".join(made(**given, eval_moments="after").notes)
    assert "choose_by" not in notes and "eval_metrics" not in notes


def test_runs_that_choose_otherwise(tmp_path):
    """A page says so, whatever else differs."""
    for name, more in {"a": {"choose_by": "loss", "rounds": 3}, "b": {}}.items():
        given = {"summary": "best_validation", "workdir": str(tmp_path / name)}
        made(**given | more).run(progress=False)
    text = page.page(page.read([tmp_path / "a", tmp_path / "b"]))
    assert "the two differ in rounds, summary" in text
    rules = "round with the best validation loss or round with the best validation."
    assert f"Percent, {rules}" in text
