"""What is saved and served is what a method says, for its unusual models too."""

import numpy as np
import pandas
import pyarrow
import pytest
from flax import linen as nn

from launch import build

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
    """A module whose name divides a path."""

    @nn.compact
    def __call__(self, h):
        return nn.Dense(3, name="a/b")(h)


def test_names_of_modules_have_no_slash():
    """Their arrays would come back from a file as another tree."""
    with pytest.raises(ValueError, match="own_Sliced has the name a/b, and a slash"):
        made(algo="fedavg", model=Sliced(), model_width=1)
