"""The chunk of an accelerator is halved until the compiler's plan fits its memory."""

import flax.linen as nn
import jax
import pytest

from launch import build
from launch.machine import memory
from launch.run import narrow

COMMON = {
    "algo": "fedavg",
    "model": "mlp",
    "preset": "none",
    "clients_per_round": 4,
    "rounds": 2,
    "eval_every": 2,
    "batch_size": 4,
    "devices": 1,
    "emulate": "accelerator",
}


@pytest.fixture(autouse=True)
def _four(monkeypatch):
    """The cheapest chunk is the cohort."""
    monkeypatch.setattr("data.deal.choose_chunk", lambda *_, **__: (4, 1.0))


def make(dataset, **given):
    return build.experiment(dataset=dataset, **COMMON | given)


def planned(dataset, **given):
    return memory.planned_bytes(make(dataset, **given).simulation.ahead("rounds"))


@pytest.fixture
def limited(monkeypatch):
    """A function that sets the memory of a device."""

    def limit(count):
        monkeypatch.setattr(memory, "device_bytes", lambda target="": count)

    return limit


def test_what_fits_is_compiled_once(unequal, limited):
    """The program that was read is the one that runs."""
    made = make(unequal)
    limited(1 << 40)
    before = len(made.program.rounds.executables)
    assert made.task.execution.chunk == 4
    assert narrow.fit(made) == ""
    assert len(made.program.rounds.executables) <= before + 1
    functions = made.program.rounds, made.program.of_clients
    known = [len(one.executables) for one in functions]
    made.run(progress=False)
    assert [len(one.executables) for one in functions] == known
    assert made.summary()["client_chunk"] == 4


def test_it_is_halved(unequal, limited, capsys):
    """One line says so, and the run's results are those of such a chunk."""
    needed = {chunk: planned(unequal, client_chunk=chunk) for chunk in (4, 2)}
    assert needed[2] < needed[4]
    limited((needed[4] + needed[2]) // 2)
    made = make(unequal)
    made.run(progress=False)
    assert made.summary()["client_chunk"] == made.task.execution.chunk == 2
    (line,) = [s for s in capsys.readouterr().err.splitlines() if "note: the" in s]
    assert "with 4 clients side by side" in line and "--client_chunk=2" in line
    alone = make(unequal, client_chunk=2)
    alone.run(progress=False)
    assert made.simulation.digest() == alone.simulation.digest()
    accuracies = [one.metrics[-1]["global_accuracy"] for one in (made, alone)]
    assert accuracies[0] == accuracies[1]


@pytest.mark.parametrize("client_state", ["device", "host"])
def test_an_evaluation_fits_too(unequal, limited, client_state, monkeypatch):
    """The model that each client has is measured in chunks as well."""
    monkeypatch.setattr("fedjax_pfl.rows.hosted.RESIDENT_BYTES", 1)
    given = {"algo": "local", "client_state": client_state}
    made = make(unequal, **given)
    needed = {
        name: memory.planned_bytes(made.simulation.ahead(name))
        for name in ("rounds", "of_clients")
    }
    real = memory.planned_bytes

    def more(compiled):
        """An evaluation of four needs more than is there."""
        is_large = real(compiled) == needed["of_clients"] != needed["rounds"]
        return 1 << 50 if is_large else real(compiled)

    limited(1 << 40)
    monkeypatch.setattr(memory, "planned_bytes", more)
    line = narrow.fit(made)
    assert "for an evaluation with 4 clients" in line and "\n" not in line
    assert made.task.execution.chunk < 4
    functions = made.program.rounds, made.program.of_clients
    known = [len(one.executables) for one in functions]
    assert min(known) > 0
    made.run(progress=False)
    assert [len(one.executables) for one in functions] == known


def test_what_halving_does_not_help(unequal, limited, monkeypatch):
    """Refused at once, with what would help an evaluation."""
    monkeypatch.setattr(memory, "planned_bytes", lambda compiled: 1 << 50)
    monkeypatch.setitem(narrow.PROGRAMS, "rounds", narrow.PROGRAMS["of_clients"])
    limited(1 << 40)
    made = make(unequal)
    with pytest.raises(ValueError, match="for 2 side by side.*smaller --model") as no:
        narrow.fit(made)
    assert "batch_size" not in str(no.value)


def test_rows_of_a_round_are_there_while_others_are_measured(unequal, monkeypatch):
    """Where an evaluation goes by blocks of rows."""
    monkeypatch.setattr("fedjax_pfl.rows.hosted.RESIDENT_BYTES", 1)
    given = {"algo": "local", "client_chunk": 2}
    here, there = (make(unequal, client_state=s, **given) for s in ("device", "host"))
    extra = [
        memory.planned(one.simulation, one.task.execution, "of_clients")
        - memory.planned_bytes(one.simulation.ahead("of_clients"))
        for one in (here, there)
    ]
    rows = there.simulation.template().clients
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(rows))
    assert extra[0] == 0 and extra[1] >= size > 0


def test_what_was_given_stays(unequal, limited):
    limited(1)
    for given in ({"client_chunk": 2}, {"emulate": ""}):
        assert narrow.fit(make(unequal, **given)) == ""


def test_one_client_is_too_much(unequal, limited):
    """One line with what is planned, and what there is."""
    limited(1)
    with pytest.raises(ValueError, match="as the compiler plans it for 1 side") as no:
        narrow.fit(make(unequal))
    assert "\n" not in str(no.value)
    with pytest.raises(ValueError, match="as the compiler plans it for 3 side"):
        narrow.fit(make(unequal, min_chunk=3))


def test_a_compiler_that_finds_no_plan(unequal, limited, monkeypatch):
    """It counts as too much."""
    made, ahead = make(unequal), type(make(unequal).simulation).ahead
    limited(1 << 40)

    def refusing(simulation, name):
        if simulation.execution.chunk > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory")
        return ahead(simulation, name)

    monkeypatch.setattr(type(made.simulation), "ahead", refusing)
    assert "plans too much for a round with 4" in narrow.fit(made)
    assert made.task.execution.chunk == 2


def test_a_narrowed_run_goes_on_as_it_was(unequal, limited, tmp_path):
    """Also where more memory is free now, and when it is finished."""
    limited(planned(unequal, client_chunk=2))
    folder = str(tmp_path / "run")
    first = make(unequal, workdir=folder, rounds=1, eval_every=1)
    first.run(progress=False)
    chunk = first.task.execution.chunk
    assert chunk < 4
    limited(1 << 40)
    again = make(unequal, workdir=folder, rounds=2, eval_every=1, resume=True)
    assert again.run(progress=False)["client_chunk"] == chunk
    finished = make(unequal, workdir=folder, rounds=2, eval_every=1, resume=True)
    assert finished.run(progress=False)["client_chunk"] == chunk


def test_states_that_wait_count(unequal):
    """Of a sweep with several seeds each seed is a call, whose state is there too."""
    given = {"sweep": "client_lr=0.01,0.1"}
    one, three = (make(unequal, num_seeds=n, **given) for n in (1, 3))
    assert len(three.simulation.calls) == 3
    more, least = (
        memory.planned(n.simulation, n.task.execution, "rounds") for n in (three, one)
    )
    more -= least
    state = one.simulation.template()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.server))
    assert more >= 2 * size


class Recurrent(nn.Module):
    """A model of a user's whose parts return tuples."""

    @nn.compact
    def __call__(self, x, train=False):
        h = nn.RNN(nn.GRUCell(4))(x.reshape(len(x), 8, -1))
        return nn.Dense(4)(h[:, -1])


def test_models_whose_size_is_not_counted(unequal):
    """The cost of a step then comes from their parameters."""
    made = make(unequal, model=Recurrent())
    assert made.task.execution.chunk == 4


def test_the_least_chunk_is_one_of_levels_too(unequal):
    """Fewer clients side by side are enough where each level runs alone."""
    given = {"algo": "heterofl", "clients_per_round": 4}
    chunk = make(unequal, **given).task.execution.chunk
    assert chunk < 3 and make(unequal, min_chunk=3, **given).task.execution.chunk == 3


def test_states_of_other_calls_wait(unequal):
    """Those of other seeds, where each is a program of its own."""
    made = make(unequal, algo="heterofl", num_seeds=3)
    simulation, how = made.simulation, made.task.execution
    every = memory.state_bytes(simulation.template(), how)
    assert len(simulation.calls) == 3
    assert memory.waiting_bytes(simulation, how, "rounds") == every * 2 // 3 > 0
