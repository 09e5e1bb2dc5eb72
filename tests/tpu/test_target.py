"""What runs on a TPU compiles for one: its compiler says so without a TPU.

These tests need libtpu (`pip install -e '.[test,tpu]'`) and are skipped without it.
"""

import functools
import re

import jax
import pytest

import algorithms
import models
from fedjax_pfl import shapes
from launch import build
from launch.bench import forms
from launch.machine import target
from launch.run import cost, narrow
from launch.tables import examples
from tests import conftest, targeted, test_contract

pytest.importorskip("libtpu")

CHIP = "tpu:v5e"
compiled_for = functools.partial(targeted.experiment, CHIP)


@pytest.fixture(autouse=True)
def _toys(monkeypatch):
    test_contract.register_toys(monkeypatch)


def check(lowered):
    """No callback to a host, no float64, and it fits."""
    return checked(lowered)[0]


def checked(lowered):
    """`check`, and the optimised program."""
    text = lowered.as_text()
    assert "callback" not in text and "f64" not in text
    made = lowered.compile()
    plan = cost.read(made, 0)
    assert 0 <= plan.needed_bytes < target.chip(CHIP).memory
    return plan, made.as_text()


@pytest.fixture(scope="session")
def many(tmp_path_factory):
    """`--dataset` with a thousand clients of eight images."""
    path = tmp_path_factory.mktemp("data") / "many.npz"
    return conftest.write_npz(path, 8000, clients=[8] * 1000)


# Still copied: what the optimizers of parts of a model keep for a client's next round.
COPIED = ("heterofl", "splitmix", *test_contract.ON_TEXT)  # texts have 7 clients


def copied_rows(made, text):
    """(operation, shape) by which a program moves the rows of all clients as a whole.

    They go to another form or to other devices. Lists of a number for each client do
    not count, nor what is read ahead into a chip's fast memory (`copy-start`).
    """
    state = made.simulation.template()
    counts = {leaf.shape[1] for leaf in jax.tree.leaves(state.private)}
    found = []
    for shape, operation in re.findall(r"= \(?\w+\[([\d,]*)\]\S* ([\w-]+)\(", text):
        sizes = [int(size) for size in shape.split(",") if size not in ("", "1")]
        is_move = operation in ("copy", "transpose") or operation.startswith("all-")
        if is_move and sizes[1:]:
            found += [(operation, shape)] if counts & {*sizes} else []
    return found


@pytest.mark.parametrize(
    "name", [*sorted(algorithms.ALGORITHMS), *test_contract.ON_TEXT]
)
def test_it_compiles(name, many):
    """Every program. Rounds and evaluations copy no rows of all clients."""
    made = compiled_for(name, many)
    plans = {}
    for program, one in made.simulation.lowered().items():
        plans[program], text = checked(one)
        is_free = program == "init" or name in COPIED
        assert is_free or not copied_rows(made, text)
    # A program without models that clients share computes nothing.
    assert min(plans[name].needed_bytes for name in ("init", "rounds")) > 0
    assert bool(plans["rounds"].step_cycles) == bool(made.program.algorithm.plans)


@pytest.mark.parametrize("name", ["uapdfl", "pfedsd"])
def test_a_cpu_copies_no_rows(name, many):
    made = compiled_for(name, many, target=None, client_chunk=1)
    for program in ("rounds", "of_clients"):
        text = made.simulation.lowered()[program].compile().as_text()
        assert not copied_rows(made, text)


@pytest.mark.parametrize("name", ["fedavg", "fedper"])
@pytest.mark.parametrize("more", [{"num_seeds": 2}, {"sweep": "client_lr=0.1,0.2"}])
def test_several_runs_in_one_program(name, more, unequal):
    """They are one call, whose step costs less than two."""
    one = check(compiled_for(name, unequal).simulation.lowered()["rounds"])
    made = compiled_for(name, unequal, **more)
    assert len(made.simulation.calls) == 1
    two = check(made.simulation.lowered()["rounds"])
    assert one.step_cycles < two.step_cycles < 2 * one.step_cycles


def test_layers_know_the_chip(unequal):
    """The convolution of a few clients is XLA's."""
    made = compiled_for("fedavg", unequal, model="cdkt_mnist")
    text = made.simulation.lowered()["rounds"].as_text()
    assert "stablehlo.convolution" in text


def test_cycles_of_a_form():
    """The command that compares forms."""
    asked = forms.Options(batch_size=4)
    found = forms.step_cost(asked, models.make("m1", 10), (8, 8, 1), 2, "flat")
    assert found["cycles"] > 0


def test_several_chips(unequal):
    """The clients are shared out, and means are taken over the chips."""
    made = compiled_for("fedavg", unequal, devices=2, client_chunk=3)
    lowered = made.simulation.lowered()["rounds"]
    assert "all-reduce" in lowered.compile().as_text()


@pytest.mark.parametrize("name", ["pfedsd", "dispfl"])
def test_rows_of_clients_stay_on_their_chips(name, unequal):
    """Those of a round travel, none is gathered, and a chip has half of the models."""
    one, two = (
        compiled_for(name, unequal, devices=n, client_chunk=2).simulation
        for n in (1, 2)
    )
    compiled = two.lowered()["rounds"].compile()
    text = compiled.as_text()
    assert "all-gather" not in text and "ragged-all-to-all" in text
    alone = one.lowered()["rounds"].compile().memory_analysis()
    found = compiled.memory_analysis().argument_size_in_bytes
    assert found < 0.7 * alone.argument_size_in_bytes


def test_the_figures(unequal):
    """Five clients cost less together than one after another."""
    made = compiled_for("fedavg", unequal)
    found = made.cost_analysis()
    assert found["fits"] and found["clients_side_by_side"] == 5
    step = found["cycles_per_step"]
    assert found["cycles_per_example"] == step / (5 * 16)
    assert found["over_one_by_one"] > 1
    assert found["programs"]["rounds"]["cycles"] == step + found["cycles_outside_steps"]
    assert found["argument_bytes"] > shapes.model_bytes(
        made.task.server_model, (8, 8, 1)
    )
    assert cost.in_words({"algo": "fedavg"} | found).startswith("fedavg for tpu:v5e: ")


def test_a_chip_alone_and_three(unequal):
    """Some of a slice's chips, too."""
    made = compiled_for("fedavg", unequal, devices=3, client_chunk=2)
    assert made.cost_analysis()["clients_side_by_side"] == 2


def test_it_does_not_run(unequal):
    made = compiled_for("fedavg", unequal)
    with pytest.raises(ValueError, match="without target it runs here"):
        made.run(progress=False)
    with pytest.raises(ValueError, match="without target it runs here"):
        made.summary()


def test_a_chip_that_is_too_small(unequal, monkeypatch):
    """Refused before it is compiled, as on the chip itself."""
    small = target.CHIPS[CHIP]._replace(memory=10_000)
    monkeypatch.setitem(target.CHIPS, CHIP, small)
    with pytest.raises(ValueError, match="are free"):
        compiled_for("fedavg", unequal)


def test_a_chunk_that_does_not_fit(unequal, monkeypatch):
    """What was chosen is halved until the compiler's plan fits, in one line."""
    monkeypatch.setattr("data.deal.choose_chunk", lambda *_, **__: (4, 1.0))
    # An evaluation of so few examples needs more than their round.
    monkeypatch.delitem(narrow.PROGRAMS, "of_shared")
    monkeypatch.delitem(narrow.PROGRAMS, "of_clients")
    # A smaller model needs no less for two clients by jax 0.12's compiler.
    model = {"model": "mlp", "model_width": 2.0}
    options = {"client_chunk": 0, "clients_per_round": 4} | model
    whole = compiled_for("fedavg", unequal, **options).cost_analysis()
    half = compiled_for("fedavg", unequal, **options | {"client_chunk": 2})
    needed = [
        one["programs"]["rounds"]["needed_bytes"]
        for one in (whole, half.cost_analysis())
    ]
    assert whole["note"] == "" and needed[1] < needed[0]
    small = target.CHIPS[CHIP]._replace(memory=sum(needed) // 2)
    monkeypatch.setitem(target.CHIPS, CHIP, small)
    found = compiled_for("fedavg", unequal, **options).cost_analysis()
    assert found["clients_side_by_side"] == 2 and "client_chunk=2" in found["note"]
    assert "\nnote: the compiler" in cost.in_words({"algo": "fedavg"} | found)


def test_an_evaluation_copies_no_rows():
    """It takes the rows of a chunk from where they are."""
    data = examples.draw(5000, 3)
    options = {"partition": "natural", "test_split": "pool", "preset": "none"}
    made = build.experiment(
        algo="pfedsd",
        dataset=data,
        target=CHIP,
        model="mlp",
        client_chunk=20,
        **options,
    )
    plan = check(made.simulation.lowered()["of_clients"])
    assert plan.temporary_bytes < plan.argument_bytes / 4
