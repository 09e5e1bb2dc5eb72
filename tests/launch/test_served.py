"""What is saved and served is what a method says, for its unusual models too."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pyarrow
import pytest
from flax import linen as nn

from launch import build
from models import own_linen

GEN = np.random.default_rng(1)
X = GEN.normal(size=(150, 6)).astype(np.float32)
Y = GEN.integers(0, 3, 150)
COMMON = {
    **{"dataset": (X, Y), "preset": "none", "model": "mlp", "model_width": 0.05},
    **{"num_clients": 5, "rounds": 1, "test_split": "client_share", "devices": 1},
}
TWO_BASES = {"algo": "splitmix", "level_mix": "1:1", "num_bases": 2}


def made(**given):
    """A small experiment that does not run."""
    return build.experiment(**COMMON | given)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file of a whole model."""
    path = tmp_path_factory.mktemp("models") / "whole.npz"
    made(algo="fedavg").save_model(path)
    return str(path)


def test_several_models_have_no_stage():
    """Not their answers in the place of a stage's outputs."""
    with pytest.raises(ValueError, match="2 x mlp, which is not a single model of st"):
        made(**TWO_BASES).embeddings(1, "dense1")
    for algo in ("fedproto", "fedper"):
        found = made(algo=algo).embeddings(1, "dense1")
        assert found.ndim == 2 and found.shape[1] != 3


def test_rows_that_adapt_are_rows_of_the_model(tmp_path):
    """A newcomer of Per-FedAvg is served what a step on its own rows made."""
    other, found = {"algo": "fedavg", "partition_seed": 3}, {}
    run = made(algo="perfedavg", unseen_clients=2)
    new = int(np.flatnonzero(run.data.partition.is_unseen[0])[0])
    for name, client in (("of the server", None), ("adapted", new)):
        path = run.save_model(tmp_path / "model.npz", client)
        line = next(n for n in made(**other, init_from=str(path)).notes if "init" in n)
        found[name] = int(line.split(": ")[1].split()[0])
    mine = run.data.partition.adapting
    start, count = mine.start[0, new], mine.count[0, new]
    rows = set(np.asarray(mine.row[0])[start : start + count].tolist())
    part = made(**other).data.partition.test
    tested = set(np.asarray(part.row[0]).ravel().tolist())
    assert found["adapted"] - found["of the server"] == len(rows & tested) > 0


def test_one_file_is_one_beginning(whole):
    """Methods whose models begin apart note that they do not."""
    own = {"algo": "dfedavg", "shared_init": False, "num_peers": 2}
    for given, line in (
        (own, "--noshared_init has no effect"),
        (TWO_BASES, "all --num_bases=2 models begin with the same numbers"),
    ):
        with_file, without = (
            [line in note for note in made(**given, init_from=path).notes]
            for path in (whole, "")
        )
        assert sum(with_file) == 1 and not any(without)


def test_tables_of_any_kind_are_predicted():
    """As they may be given to a run, with columns in any order."""
    frame = pandas.DataFrame(X, columns=list("fedcba"))
    run = made(algo="fedper", dataset=frame.assign(label=Y))
    wanted = run.predict(0, frame)
    for table in (
        frame[list("abcdef")],
        pyarrow.table({name: frame[name].to_numpy() for name in "abcdef"}),
        {name: frame[name].to_numpy() for name in "abcdef"},
    ):
        np.testing.assert_array_equal(run.predict(0, table), wanted)


class Sliced(nn.Module):
    """A name that divides a path, and a layer of flax that makes such names."""

    @nn.compact
    def __call__(self, h, train):
        layer = nn.SpectralNorm(nn.Dense(3, name="a/b"))
        return layer(h, update_stats=train)


def test_slashes_in_names_of_modules(tmp_path):
    """The arrays come back from a file as the same tree."""
    path, given = tmp_path / "model.npz", {"algo": "fedavg", "model": Sliced()}
    run = made(**given, model_width=1)
    run.run(progress=False)
    run.save_model(path)
    again = made(**given, model_width=1, init_from=str(path))
    chex.assert_trees_all_equal(again.params(), run.params())
    assert run.params()[0]["trunk"].keys() == {"a|b"}


class Half(nn.Module):
    """Keeps parameters or statistics in few bits."""

    param: jnp.dtype = jnp.float32
    stat: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, h):
        self.variable("state", "count", jnp.zeros, (2,), self.stat)
        return nn.Dense(3, param_dtype=self.param, dtype=jnp.float32)(h)


@pytest.mark.parametrize("name", ["param", "stat"])
@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float16])
def test_numbers_in_few_bits_are_not_averaged(name, kind):
    """Sums over many clients would lose what each adds."""
    line = f"has parameters or statistics of {jnp.dtype(kind)}, .*param_dtype"
    with pytest.raises(ValueError, match=line):
        made(algo="fedavg", model=Half(**{name: kind}), model_width=1)


def test_pairs_with_lists_are_refused():
    """In a file they would be one array; a number of Python is an array."""

    def pair(extra):
        def init(key, x):
            return {"w": np.zeros((6, 3)), "more": extra}

        return init, lambda params, x: x @ params["w"]

    with pytest.raises(ValueError, match="init gives a list, expected a nested dict"):
        made(algo="fedavg", model=pair([np.zeros(3)]), model_width=1)
    run = made(algo="fedavg", model=pair(0.5), model_width=1)
    assert run.params()[0]["trunk"]["more"].shape == ()
    with pytest.raises(ValueError, match="the name a.b has a ., which stands for a sl"):
        made(algo="fedavg", model=pair({"a|b": np.zeros(3)}), model_width=1)


class Noise(nn.Module):
    """Draws from two streams in train mode."""

    @nn.compact
    def __call__(self, h, train):
        if train:
            drawn = [
                jax.random.normal(self.make_rng(name), (3,))
                for name in ("dropout", "noise")
            ]
            return jnp.stack(drawn)
        return nn.Dense(3)(h)


def test_a_stream_of_any_name():
    """It differs from that of dropout, and from step to step."""
    stage, x = own_linen.Stage(Noise()), jnp.ones((2, 6))
    _, variables = stage.init_with_output(jax.random.key(0), x)
    found = []
    for seed in (1, 2, 1):
        how = {"sample_mask": jnp.ones(2, bool), "train": True}
        out, _ = stage.apply(
            variables, x, **how, rngs={"dropout": jax.random.key(seed)}
        )
        found += list(out)
    np.testing.assert_array_equal(found[:2], found[4:])
    assert len({tuple(one.tolist()) for one in found}) == 4


def test_images_of_bytes_are_copied():
    """jax would use the memory of an array that begins at a multiple of 64 bytes."""
    room = np.zeros(150 * 64 + 64, np.uint8)
    begin = -room.ctypes.data % 64
    images = room[begin : begin + 150 * 64].reshape(150, 8, 8)
    images[:] = 3
    run = made(algo="fedavg", dataset=(images, Y), model_width=1)
    images[:] = 0
    assert (np.asarray(run.data.image) == 3).all()
