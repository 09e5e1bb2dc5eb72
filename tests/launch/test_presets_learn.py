"""Every preset of every paper learns the embedded digits in a few rounds."""

import pytest

import models
from launch import build
from launch.config import presets
from tests import drawn
from tests.toys import model

pytestmark = pytest.mark.slow  # nine short reproductions

SMALL = {"num_clients": 4, "clients_per_round": 4, "rounds": 3, "devices": 1}
CNN = {"algo": "uapdfl", "examples_per_client": 100, "num_peers": 2}
CNN |= {"model_width": 0.25}
# What is not a preset's business: sizes, and nets that compile soon. Its models,
# optimizers, weights and epochs stay; UA-PDFL's need features to weigh.
OPTIONS = {
    "cdkt": {"algo": "cdkt", "model": "mlp", "rounds": 1, "devices": 1},
    "cdkt_code": {"algo": "cdkt", "model": "mlp", "rounds": 1, "devices": 1},
    "fedd2s": SMALL
    | {"algo": "fedd2s", "model": "mlp", "partition": "iid"}
    | {"examples_per_client": 400, "rounds": 4},
    "depthfl": SMALL
    | {"algo": "depthfl", "model": "with_exits", "level_mix": "1:1:1"}
    | {"image_size": 0, "image_channels": 0, "ramp_rounds": 1, "rounds": 4}
    | {"examples_per_client": 400},
    "pfllib": SMALL
    | {"algo": "fedavg", "model": "mlp", "partition": "iid", "rounds": 8},
    "uapdfl": SMALL | CNN,
    "uapdfl_code": SMALL | CNN,
    "uapdfl_paper": SMALL | CNN,
}


@pytest.fixture(scope="module", autouse=True)
def _layer_by_layer():
    """Models begin as they do in a run."""
    with drawn.layer_by_layer():
        yield


def accuracy(preset, **more):
    """Of the server's model, or else of the clients'; both moments count."""
    options = OPTIONS[preset] | more
    experiment = build.experiment(
        preset=preset, eval_every=options["rounds"], **options
    )
    found = experiment.run(progress=False)["last_round"]
    names = ("global_accuracy", "client_accuracy", "trained_accuracy")
    return min(found[name]["mean"] for name in names if name in found)


@pytest.mark.parametrize("preset", sorted(set(presets.PRESETS) - {"none"}))
def test_it_learns(preset, monkeypatch):
    """More than twice the largest of ten classes: no scale is off by its features."""
    monkeypatch.setitem(models.MODELS, "with_exits", model.with_exits)
    assert accuracy(preset) > 0.25


def test_a_weight_of_the_mean_does_not_do_for_the_sum():
    """What the test above is there for: Eq. 12 with the code's mu."""
    assert accuracy("uapdfl_paper", proximal_weight=0.1) < 0.25
