"""FedDF against numpy, and what of the public images matters."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from algorithms import feddf
from fedjax_pfl import rng, shapes
from launch import build
from launch.folder import record
from launch.show import origin
from tests.algorithms import plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5, "distill_lr": 0.02}
# 12 public images: in two shuffles and a part of a third, or 8 of them in one
KINDS = {
    "all": {"distill_steps": 7, "distill_batch_size": 4},
    "some": {
        **{"distill_steps": 2, "distill_batch_size": 4},
        **{"aggregation": "uniform", "distill_optimizer": "sgd"},
    },
}


def images(state, table, values):
    """Rows of the images of each step."""
    hparams = feddf.HParams(**{name: values[name] for name in KINDS["all"]})
    key = rng.stream(state.key, "feddf.images", jnp.asarray(state.round))
    chosen, places = feddf.drawn(hparams, key, len(table.proxy))
    return table.proxy[np.asarray(chosen)][np.asarray(places)]


def reference(state, cohort, table, values):
    """The mean of the clients' models, and steps towards their mean logits."""
    members = plain.clients(state, cohort, table)
    start = plain.server_layers(state)
    trained = {one.number: one.train(start, one.sgd(values)) for one in members}
    mean = plain.averaged(trained, table, values.get("aggregation") == "uniform")
    is_adam = values.get("distill_optimizer", "adam") == "adam"
    steps, tx = values["distill_steps"], (plain.Adam if is_adam else plain.Sgd)(0)
    for number, rows in enumerate(images(state, table, values)):
        x = table.images(rows)
        answers = [plain.logits(one, x) for one in trained.values()]
        target = np.mean(answers, 0) if values.get("by_logits", True) else answers[0]

        def of_logits(z, target=target):
            return plain.of_divergence(z, target, 1)

        share = (1 + np.cos(np.pi * number / steps)) / 2
        tx.rate = values["distill_lr"] * share
        mean = tx.step(mean, plain.gradients(mean, x, of_logits))
    return mean, None


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_equal_a_numpy_reference(kind, compiled, start, problem):
    """Every option matters, and all clients' answers; bytes are the model's."""
    floats = FLOATS | ({} if kind == "all" else {"distill_lr": 0.5})
    run = compiled("feddf", floats=floats, **KINDS[kind])
    values = floats | KINDS[kind]
    changes = dict.fromkeys(FLOATS, 0.3) | {"by_logits": False}
    changes |= {"distill_batch_size": 5, "distill_steps": 3}
    other = {"examples": "uniform", "uniform": "examples"}
    changes["distill_optimizer"] = {"all": "sgd", "some": "adam"}[kind]
    changes["aggregation"] = other[values.get("aggregation", "examples")]
    close = {"rtol": 1e-3, "atol": 5e-5}  # Adam divides by roots that may be small.
    state = start().replace(clients=())
    steps = plain.follow(
        run, reference, state, problem, values, changes=changes, **close
    )
    made = feddf.make(feddf.HParams(), problem.task_of())
    size = shapes.tree_bytes(plain.server(steps[-1].after))
    plain.assert_both_ways(made, steps[-1].sent, size)
    assert not made.ships_proxy  # the server alone has it


@pytest.mark.parametrize(
    ("steps", "size", "num_public", "wanted"),
    [(7, 4, 12, (7, 4)), (2, 4, 12, (2, 4)), (3, 50, 12, (3, 12)), (1, 5, 5, (1, 5))],
)
def test_images_of_the_steps(steps, size, num_public, wanted):
    """Each shuffle has all that are drawn once; no more are drawn than are used."""
    hparams = feddf.HParams(distill_steps=steps, distill_batch_size=size)
    chosen, places = feddf.drawn(hparams, jax.random.key(1), num_public)
    count = min(num_public, wanted[0] * wanted[1])
    assert places.shape == wanted and len(set(chosen.tolist())) == count
    flat = places.ravel().tolist()
    for begin in range(0, len(flat), count):
        shuffle = flat[begin : begin + count]
        assert len(set(shuffle)) == len(shuffle) and set(shuffle) <= set(range(count))
    if len(flat) > count:
        assert flat[:count] != flat[count : 2 * count]
    again, _ = feddf.drawn(hparams, jax.random.key(2), num_public)
    assert count < 5 or again.tolist() != chosen.tolist()


def test_labels_of_public_images_are_not_used(problem, compiled, start):
    """Other labels give the same bits, and other images do not."""
    run = compiled("feddf", floats=FLOATS, **KINDS["all"])
    state, rows = start().replace(clients=()), problem.data.partition.proxy
    label = problem.data.label.at[rows].set((problem.data.label[rows] + 1) % 4)
    first, _, _ = run(state)
    second, _, _ = run(state, data=problem.data.replace(label=label))
    chex.assert_trees_all_equal(first.server, second.server)
    image = problem.data.image.at[rows].set(255 - problem.data.image[rows])
    third, _, _ = run(state, data=problem.data.replace(image=image))
    assert plain.differs(first.server, third.server, 1e-4)


def test_public_images_are_needed(problem):
    with pytest.raises(ValueError, match=r"feddf has no public images; .*--proxy_fr"):
        feddf.make(feddf.HParams(), problem.task_of(num_proxy=0))


def test_public_images_in_memory(tmp_path):
    """An array of examples, or a frame by its columns; given again, or refused."""
    gen = np.random.default_rng(0)
    x, others = (gen.normal(size=(n, 4)).astype(np.float32) for n in (60, 20))
    frame = pd.DataFrame(x, columns=list("abcd")).assign(y=np.arange(60) % 3)
    given = {"algo": "feddf", "preset": "none", "rounds": 1, "distill_steps": 2}
    given |= {"model": "mlp", "num_clients": 3}
    folder = tmp_path / "run"
    data = {"dataset": (x, frame["y"].to_numpy())}
    made = build.experiment(**given, **data, public_set=others, workdir=folder)
    made.run(progress=False)
    np.testing.assert_array_equal(np.asarray(made.data.image)[60:80], others)
    mixed = pd.DataFrame(others[:, ::-1], columns=list("dcba"))
    table = build.experiment(**given, dataset=frame, label="y", public_set=mixed)
    np.testing.assert_array_equal(np.asarray(table.data.image)[60:80], others)
    for same in ((others, None), {"train": others}, [others, np.full(20, np.nan)]):
        found = build.experiment(**given, **data, public_set=same)
        assert found.data_sha256 == made.data_sha256
    again = build.load(folder, **data, public_set=others)
    assert again.round == 1 and again.task.num_proxy == 20
    with pytest.raises(ValueError, match="=arrays were in memory; give public_set="):
        build.load(folder, **data)
    with pytest.raises(ValueError, match="data_sha256"):
        build.load(folder, **data, public_set=others + 1)
    with pytest.raises(ValueError, match=r"images of shape \[3\], .* they must agree"):
        build.experiment(**given, **data, public_set=others[:, :3])
    with pytest.raises(ValueError, match="^public_set: there is no example"):
        build.experiment(**given, **data, public_set=others[:0])
    with pytest.raises(ValueError, match="^public_set: .* got a int"):
        build.experiment(**given, **data, public_set=3)
    line = origin.command(record.read(folder))
    assert line.endswith("dataset=..., public_set=...).run()  # in Python")


def test_a_comparison_gives_them_to_who_learns_from_them():
    """A line says who does not, and shows no numbers."""
    gen = np.random.default_rng(0)
    x, others = (gen.normal(size=(n, 4)).astype(np.float32) for n in (60, 20))
    given = {"dataset": (x, np.arange(60) % 3), "num_clients": 3, "model": "mlp"}
    given |= {"preset": "none", "rounds": 1, "public_set": others, "run": False}
    found = build.compare(["local", "fedmd", "feddf"], **given)
    assert [one.task.num_proxy for one in found.values()] == [0, 20, 20]
    (line,) = [one for one in found.notes if one.startswith("public_set=")]
    assert "=<ndarray [20, 4]> has no effect where local has no use of pub" in line
    assert line.endswith("so that only fedmd, feddf get it")
    with pytest.raises(ValueError, match="which --algo=local does not use"):
        build.compare(["local", "fedavg"], **given)


def test_images_of_another_set(unequal, tmp_path):
    """Their own labels play no part, and no client is sent them."""
    given = {"dataset": unequal, "algo": "feddf", "preset": "none", "rounds": 1}
    given |= {"num_clients": 4, "distill_steps": 3, "model": "mlp"}
    x = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 1), dtype=np.uint8)
    np.savez(tmp_path / "others.npz", x=x)
    public = f"npz:{tmp_path / 'others.npz'}"
    made = build.experiment(**given, public_set=public)
    made.run(progress=False)
    assert made.task.num_proxy == 30 and made.setup_bytes() == 0
    with pytest.raises(ValueError, match="which --algo=fedavg does not use; .*feddf"):
        del given["distill_steps"]
        build.experiment(**given | {"algo": "fedavg"}, public_set=public)
