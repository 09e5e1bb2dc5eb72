"""Results that would be wrong without anybody noticing: one line instead."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import checkpoint
from launch import build
from launch.assemble import model_files
from launch.run import summaries
from launch.show import page as page_lib
from launch.show import words
from models import own, own_checks
from tests import conftest, synthetic

pytestmark = pytest.mark.usefixtures("narrow")


def arrays(seed=0):
    """120 small images in 4 classes."""
    source = synthetic.blobs(120, (8, 8, 1), 4, seed=seed)
    return source.image, source.label


def options(**more):
    """Six small clients, three a round."""
    return conftest.SIX | {"dataset": arrays(), "batch_size": 8} | more


def test_compare_wants_one_number_of_seeds():
    """Two names of one option."""
    with pytest.raises(ValueError, match="seeds=2 and num_seeds=3"):
        build.compare(["fedavg"], seeds=2, num_seeds=3, run=False, **options())
    made = build.compare(["fedavg"], num_seeds=2, run=False, **options())
    assert made["fedavg"].seeds == [0, 1]


def test_a_report_tells_of_fewer_seeds(undrawn, tmp_path):
    """One seed beside two; and which rounds the numbers are of."""
    for name, seeds in (("a", 2), ("b", 1)):
        build.experiment(
            algo="fedavg",
            workdir=str(tmp_path / name),
            **options(num_seeds=seeds, summary="mean_last10", rounds=8),
        ).run(progress=False)
    entries = page_lib.read([tmp_path / "a", tmp_path / "b"], ["a", "b"])
    page = page_lib.page(entries)
    assert "Fewer seeds: b 1; differences" in page
    assert "mean of rounds 7 to 8" in page and "in the last round" in page
    assert "Fewer seeds" not in page_lib.page(entries[:1])


def test_short_runs_have_short_windows():
    """Two of eight rounds, said in words, the last round beside it."""
    experiment = build.experiment(
        algo="fedavg", **options(summary="mean_last10", rounds=8, eval_every=1)
    )
    experiment.run(progress=False)
    assert experiment.window == (7, 8)
    assert "(mean of rounds 7 to 8)  last round" in words.table(experiment.summary())
    curve = [record["client_accuracy"] for record in experiment.metrics]
    frame = build.Comparison({"a": experiment}).summary()
    assert frame["client_accuracy"]["a"] == pytest.approx(np.mean(curve[-2:]))
    assert frame["client_accuracy last round"]["a"] == pytest.approx(curve[-1])
    losses = [record["global_loss"] for record in experiment.metrics]
    assert frame["global_loss"]["a"] == pytest.approx(np.mean(losses[-2:]))
    assert frame["global_loss last round"]["a"] == losses[-1] != losses[-2]
    assert frame["summary"]["a"] == "mean of rounds 7 to 8"
    assert summaries.in_words("median_last10", (5,)) == "median of round 5"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model's file of a run, in both formats, and its experiment."""
    folder = tmp_path_factory.mktemp("models")
    experiment = build.experiment(algo="fedavg", **options())
    experiment.run(1, progress=False)
    for suffix in model_files.SUFFIXES:
        experiment.save_model(folder / f"one{suffix}")
    return folder, experiment


@pytest.mark.parametrize("suffix", model_files.SUFFIXES)
def test_a_model_s_file_has_a_checksum(saved, tmp_path, suffix):
    """Any flipped bit of an array is found; files without a checksum are read."""
    folder, _ = saved
    tree = model_files.read(folder / f"one{suffix}")
    assert "sha256" not in tree
    whole = (folder / f"one{suffix}").read_bytes()
    (tmp_path / f"same{suffix}").write_bytes(whole)
    build.experiment(
        algo="fedavg", **options(init_from=str(tmp_path / f"same{suffix}"))
    )
    gen = np.random.default_rng(0)
    for number in range(8):
        damaged = bytearray(whole)
        for place in gen.integers(len(whole) // 4, 3 * len(whole) // 4, 3):
            damaged[place] ^= 1 << int(gen.integers(8))
        path = tmp_path / f"damaged{number}{suffix}"
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not a model's file"):
            model_files.read(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda leaf: np.full_like(leaf, np.nan), "holds nan or infinity"),
        (lambda leaf: np.full_like(leaf, -np.inf), "holds nan or infinity"),
        (lambda leaf: leaf.astype(np.int32), "is int32, expected float32"),
        (lambda leaf: leaf.astype(np.complex64), "is complex64, expected float32"),
    ],
)
def test_weights_to_start_from_are_finite_floats(saved, tmp_path, change, words):
    """Of a file that somebody made, without a checksum."""
    folder, _ = saved
    with np.load(folder / "one.npz") as file:
        flat = {name: file[name] for name in file.files if name != "sha256"}
    name = next(n for n in flat if n.endswith("kernel"))
    np.savez(tmp_path / "mine.npz", **flat)
    build.experiment(algo="fedavg", **options(init_from=str(tmp_path / "mine.npz")))
    np.savez(tmp_path / "mine.npz", **flat | {name: change(flat[name])})
    with pytest.raises(ValueError, match=f"^--init_from=.*{name} {words}"):
        build.experiment(algo="fedavg", **options(init_from=str(tmp_path / "mine.npz")))


def test_a_model_starts_on_images_that_it_knows(saved):
    """The run's own normalisation, or one line."""
    folder, experiment = saved
    for name in ("none", "half"):
        with pytest.raises(ValueError, match="another normalisation"):
            build.experiment(
                algo="fedavg",
                **options(init_from=str(folder / "one.npz"), normalization=name),
            )
    # Half of the images have nearly the same constants.
    images, labels = arrays()
    build.experiment(
        algo="fedavg",
        **options(
            init_from=str(folder / "one.npz"), dataset=(images[:60], labels[:60])
        ),
    )
    assert experiment.config.normalization not in ("none", "half")


class OverBatch(nn.Module):
    """Takes the batch's own mean, also in eval mode."""

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        return nn.Dense(4, kernel_init=nn.initializers.zeros)(x - x.mean(0))


class Logs(nn.Module):
    """Has no number for what is below -1."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(jnp.log1p(2 * x.reshape(len(x), -1)))


class Drops(nn.Module):
    """Drops the same numbers of each place in a batch, also in eval mode."""

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
        return nn.Dense(4)(jnp.where(keep, x, 0))


class Fine(nn.Module):
    """Knows the mode."""

    @nn.compact
    def __call__(self, x, train=False):
        x = x.reshape(len(x), -1)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=not train)(x))


def test_an_own_model_answers_for_itself():
    """Refused at once where an answer depends on what else is in the batch."""
    for module in (OverBatch(), Drops()):
        with pytest.raises(
            ValueError, match="on the other examples of the batch"
        ) as told:
            build.experiment(algo="fedavg", **options(model=module))
        assert "\n" not in str(told.value)
    for module in (Fine(), Logs()):
        x = np.random.default_rng(0).uniform(-1, 1, (4, 8, 8, 1)).astype(np.float32)
        assert own_checks.depends_on_neighbours(own.chain(module), x) == ""
    build.experiment(algo="fedavg", **options(model=Fine()))


def test_a_file_s_checksum_is_of_its_arrays(saved):
    """Not of their order; a name, a type or a shape is part of it."""
    folder, _ = saved
    tree = model_files.read(folder / "one.msgpack")
    del tree["model"]
    assert checkpoint.digest(tree) == checkpoint.digest(dict(reversed(tree.items())))
    other = dict(tree, more=np.zeros(1))
    assert checkpoint.digest(other) != checkpoint.digest(tree)
