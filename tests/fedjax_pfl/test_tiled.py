"""Private rows in the form of a TPU's tiles, on a CPU that takes them in any form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Layout

from fedjax_pfl import checkpoint, execution, program
from fedjax_pfl.rows import tiled
from launch import build
from tests import synthetic

pytestmark = pytest.mark.usefixtures("narrow")


@pytest.fixture
def tiles(monkeypatch):
    """All that is compiled in between is for tiles."""

    def begin():
        program.forget()
        monkeypatch.setattr(tiled, "TILED", ("cpu",))

    yield begin
    program.forget()


def experiment(**more):
    source = synthetic.blobs(60, (2, 2, 1), 3)
    options = {"dataset": (source.image, source.label), "model": "narrow"}
    options |= {
        "rounds": 2,
        "num_clients": 6,
        "clients_per_round": 2,
        "partition": "iid",
    }
    return build.experiment(preset="none", batch_size=8, **options | more)


@pytest.mark.parametrize(
    "more",
    [
        {"algo": "uapdfl", "num_peers": 1},
        {"algo": "pfedsd", "devices": 2, "client_state": "host"},
    ],
)
def test_a_run_goes_on_in_tiles(more, tiles, tmp_path):
    """It is evaluated, saved and loaded, with the numbers of a run without tiles."""
    plain = experiment(**more)
    plain.simulation.advance_to(2)
    tiles()
    made = experiment(**more)
    made.simulation.advance_to(1)
    arrays, host = made.saved()
    checkpoint.save(tmp_path, 1, arrays, host)
    again = experiment(**more)
    found = checkpoint.restore(tmp_path, *again.saved_templates())
    again.load(*found, list(made.metrics))
    again.run(progress=False)
    assert again.simulation.digest() == plain.simulation.digest()
    rows = again.simulation.calls[0].state.clients
    forms = {leaf.format.layout.major_to_minor for leaf in jax.tree.leaves(rows)}
    assert (0, 1, 3, 2) in forms


@pytest.mark.parametrize(
    "shape, form",
    [
        ((2, 9), (0, 1)),
        ((2, 9, 128, 64), (0, 1, 3, 2)),
        ((2, 9, 64, 128), (0, 1, 2, 3)),
        ((2, 9, 3, 3, 200, 8), (0, 1, 2, 3, 5, 4)),
        ((2, 9, 1024, 128), (0, 1, 2, 3)),
    ],
)
def test_the_form_with_fewer_tiles(shape, form):
    assert tiled._form(shape, 2) == Layout(form)


def test_rows_are_placed_and_taken_in_their_form(monkeypatch):
    """Keys have none, as the numbers of each have an axis that no shape shows."""
    monkeypatch.setattr(tiled, "TILED", ("cpu",))
    how, keys = execution.Execution(), jax.random.split(jax.random.key(0), (1, 4))
    rows = {"key": keys, "tall": np.arange(4.0 * 64 * 8).reshape(1, 4, 64, 8)}
    rows["flat"] = np.ones((1, 4, 3))
    placed = tiled.place(rows, how)
    where = tiled.of_rows(rows, how)
    for found in placed, jax.jit(lambda rows: rows, out_shardings=where)(placed):
        assert found["tall"].format.layout.major_to_minor == (0, 1, 3, 2)
        np.testing.assert_array_equal(found["tall"], rows["tall"])
        assert (found["key"] == keys).all()

    def take(tree, row):
        with execution.over_devices(how):
            return tiled.take(tree, row)

    first = {name: leaf[0] for name, leaf in rows.items()}
    many = jnp.arange(200) % 3
    for row, *forms in (many, (0, 1), (0, 2, 1)), (jnp.int32(3), (0,), (1, 0)):
        lines = jax.make_jaxpr(take)(first, row).eqns
        asked = [one for one in lines if one.primitive.name == "layout_constraint"]
        assert [one.params["layout"] for one in asked] == list(map(Layout, forms))
    found = jax.jit(take)(first, many)
    np.testing.assert_array_equal(found["tall"], first["tall"][many])
    assert (found["key"] == first["key"][many]).all()
