"""HeteroFL and SHeteroFL against numpy, and their properties (tests 13 and 14)."""

from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import algorithms
from algorithms import heterofl
from fedjax_pfl import shapes, types, widths
from launch import build
from models import own as own_lib
from models import stages
from tests.algorithms import conftest, plain
from tests.fedjax_pfl import small

SHAPE = (8, 8, 1)
FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.8, "weight_decay": 0.02}
STRUCTURES = {
    "heterofl": {},
    "sheterofl": {},
    "masked": {"masked_cross_entropy": True},
    "three of four": {"max_level": 3},
    "momentum": {"client_momentum": 0.5, "optimizer_state": "persist"},
}
DEPTHS = ([1, 2, 4], [3, 1, 2], [4, 4, 1])


def algo_of(name):
    return "sheterofl" if name == "sheterofl" else "heterofl"


def make(problem, algo="heterofl", model="sliced", chunk=3, **given):
    hparams = algorithms.ALGORITHMS[algo].HParams(batch_size=5, **given)
    return heterofl.make(hparams, problem.task_of(model, chunk=chunk))


def slice_of(layers, level):
    """The leading slice of a level: 2, 4, 6 or 8 units in both hidden layers."""
    width = 2 * level
    (k1, b1), (k2, b2), (k3, b3) = layers
    return [
        [k1[:, :width], b1[:width]],
        [k2[:width, :width], b2[:width]],
        [k3[:width], b3],
    ]


def put(part, layers):
    """The layers with a leading slice replaced."""
    out = [[np.array(a) for a in layer] for layer in layers]
    for layer, slices in zip(out, part, strict=True):
        for full, values in zip(layer, slices, strict=True):
            full[tuple(slice(n) for n in values.shape)] = values
    return out


def trained(one, start, tx, level, name):
    """A client's slice after its plan."""
    params, table = slice_of(start, level), one.table
    present = np.isin(np.arange(4), table.label[table.owned(one.number)])

    def of_logits(label):
        def slopes(z):
            if name != "masked":
                return plain.cross_entropy(label)(z)
            return np.where(present, plain.cross_entropy(label)(z * present), 0)

        return slopes

    for _, rows, _ in one.steps():
        x, label = table.images(rows), table.label[rows]
        zeros = [[np.zeros_like(a) for a in layer] for layer in params]
        widths = range(1, level + 1) if name == "sheterofl" else [level]
        terms = [
            put(plain.gradients(slice_of(params, n), x, of_logits(label)), zeros)
            for n in widths
        ]
        params = tx.step(params, plain.total(*terms))
    return params, present


def with_missing_classes(data):
    """The same data, in which client k has no example of class k modulo 4."""
    label, table = np.array(data.label), plain.Table(data)
    for number in range(5):
        rows, gone = table.owned(number), number % 4
        label[rows] = np.where(label[rows] == gone, (gone + 1) % 4, label[rows])
    return data.replace(label=jnp.asarray(label))


@pytest.mark.parametrize("name", STRUCTURES)
def test_rounds_equal_a_numpy_reference(name, compiled, start, problem):
    """Slices are trained and averaged entry by entry, all levels in one chunk."""
    structure, top = STRUCTURES[name], 3 if name == "three of four" else 4
    run = compiled(algo_of(name), "sliced", **structure)
    made = make(problem, algo_of(name), **structure, weight_decay=0.02)
    state = start("sliced", round=0).replace(clients=())
    server = state.server
    if top == 3:
        server = jax.tree.map(np.asarray, widths.narrowed(
            types.Variables(*server), shapes.variables(conftest.sliced(0.75), SHAPE)
        ))  # fmt: skip
    hparams = heterofl.HParams(**structure, weight_decay=0.02)
    kept = small.opt_states(hparams, server.params, 5)
    state = state.replace(server=server, opt_state=kept)
    data = with_missing_classes(problem.data) if name == "masked" else problem.data
    table = plain.Table(data)
    layers = plain.layers(server.params)
    momentum = structure.get("client_momentum", 0.0)
    txs = plain.Optimizers(
        lambda rate: plain.Sgd(rate, momentum, decay=0.02), bool(momentum)
    )
    for round, depth in enumerate(DEPTHS):
        # The buffers of momentum are of one slice: everybody is always as wide.
        depth = np.full(3, 2) if momentum else np.minimum(depth, top)
        cohort = plain.at_levels(problem.cohort(round), depth)
        sums = [[np.zeros_like(a) for a in layer] for layer in layers]
        counts = [[np.zeros_like(a) for a in layer] for layer in layers]
        for one in plain.clients(state, cohort, table):
            tx = txs.of(one.number, one.rate(FLOATS))
            mine, present = trained(one, layers, tx, depth[one.row], name)
            ones = [[np.ones_like(a) for a in layer] for layer in mine]
            if name == "masked":
                ones[-1] = [a * present for a in ones[-1]]
                mine[-1] = [a * present for a in mine[-1]]
            empty = [[np.zeros_like(a) for a in layer] for layer in layers]
            sums = plain.total(sums, put(mine, empty))
            counts = plain.total(counts, put(ones, empty))
        layers = jax.tree.map(
            lambda s, n, a: np.where(n > 0, s / np.maximum(n, 1), a),
            sums,
            counts,
            layers,
        )
        before, (state, _, sent) = state, run(state, cohort, data, **FLOATS)
        chex.assert_trees_all_close(
            plain.layers(state.server.params), layers, rtol=1e-5, atol=1e-5
        )
        # Test 13, bit for bit, although the weights decay: what nobody has stays.
        most = 2 * max(depth)
        kernel, old = (
            np.asarray(one.server.params[1]["trunk"]["kernel"])
            for one in (state, before)
        )
        np.testing.assert_array_equal(kernel[most:], old[most:])
        np.testing.assert_array_equal(kernel[:, most:], old[:, most:])
        assert (kernel[:most, :most] != old[:most, :most]).all()
        for row, bytes_ in enumerate(plain.sent_bytes(made, sent, 3)):
            own = shapes.variables(conftest.sliced(depth[row] / 4), SHAPE)
            assert bytes_ == dict.fromkeys(
                ("bytes_up", "bytes_down"), shapes.tree_bytes(own.params)
            )


def normed(rate=1.0, scaler=1.0):
    """A small net with batch norm that has narrower forms."""
    width = round(8 * rate)
    layers = [
        ("conv", stages.Conv(width, 3, bias=False, norm=True, scaler=scaler)),
        ("mean", stages.GlobalAverage()),
        ("last", stages.Dense(4, False)),
    ]
    return stages.chain(
        "normed", layers, at_width=lambda r, scaler=1.0: normed(rate * r, scaler)
    )


@pytest.mark.parametrize(
    "kind, momentum", [("average", 0.1), ("average", 0.01), ("ema", 0.1)]
)
def test_static_norm(kind, momentum, problem, monkeypatch):
    """Test 13: statistics of every width over all train rows, whatever their order.

    A custom norm may have flax's momentum, .01 of a batch.
    """
    ours = SimpleNamespace(**vars(types) | {"STATS_MOMENTUM": momentum})
    monkeypatch.setattr(stages, "types", ours)
    made = make(problem, model=normed(), static_norm=kind)
    state = jax.jit(made.init)(problem.data, jax.random.key(1))
    served = made.server(state, problem.data)
    table = problem.table
    rows = table.train.row[: table.train.count.sum()]
    assert len(rows) % 5
    for level in (1, 4):
        _, variables = served[f"exit{level}"]
        own = state.server.params[0]["trunk"]["kernel"][..., : 2 * level]
        moments = []
        for begin in range(0, len(rows), 5):
            images = table.images(rows[begin : begin + 5]).reshape(-1, 8, 8, 1)
            out = jax.lax.conv_general_dilated(
                jnp.float32(images), own, (1, 1), "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )  # fmt: skip
            flat = np.float64(out).reshape(-1, 2 * level)
            moments.append((flat.mean(0), flat.var(0, ddof=1)))
        means, variances = (np.stack(part) for part in zip(*moments, strict=True))
        if kind == "average":
            mean, var = means.mean(0), variances.mean(0)
        else:
            mean, var = np.zeros(2 * level), np.ones(2 * level)
            for one, two in zip(means, variances, strict=True):
                mean, var = 0.9 * mean + 0.1 * one, 0.9 * var + 0.1 * two
        found = variables.stats[0]["trunk"]["norm"]
        np.testing.assert_allclose(found["mean"], mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found["var"], var, rtol=1e-5, atol=1e-5)
    assert served["global"] is served["exit4"]


def test_what_a_width_holds(problem):
    """Leading entries up to the client's level; nobody's statistics are averaged."""
    hparams = heterofl.HParams(max_level=3)
    nets = widths.models(hparams, normed())
    shape_at = [shapes.variables(net, SHAPE) for net in nets]
    kernels = [one.params[0]["trunk"]["kernel"].shape for one in shape_at]
    assert kernels == [(3, 3, 1, 2), (3, 3, 1, 4), (3, 3, 1, 6)]
    part = widths.submodel(hparams, shape_at)
    cohort = plain.at_levels(problem.cohort(0), [1, 3, 2])
    held = part.held(cohort, ())
    kernel = held.params[0]["trunk"]["kernel"]
    for row, level in enumerate([1, 3, 2]):
        assert (kernel[row] == (np.arange(6) < 2 * level)).all()
    assert jax.tree.leaves(held.stats) and not any(map(np.any, held.stats))
    names = [kind.name for kind in part.messages]
    assert names[::2] == [f"width {n}/4 down" for n in (1, 2, 3)]


def test_static_examples_are_of_every_client(problem, monkeypatch):
    """Some rows of everybody, not the first client's."""
    seen = []

    def gather(data, rows):
        seen.append(np.asarray(rows))
        return jnp.zeros((len(rows), 8, 8, 1)), jnp.zeros(len(rows), jnp.int32)

    given = {"static_examples": 20, "level_mix": "1:1"}
    made = make(problem, model=divided(), **given)
    state = jax.jit(made.init)(problem.data, jax.random.key(1))
    monkeypatch.setattr(types.Data, "gather", gather)
    with jax.disable_jit():
        made.server(state, problem.data)
    # The first batch of a width tells the momentum.
    rows = np.concatenate(seen[1 : len(seen) // 2])
    owner = np.full(rows.max() + 1, -1)
    table = problem.table
    for number in range(5):
        owner[table.owned(number)[table.owned(number) <= rows.max()]] = number
    assert len(rows) == 20 == len(set(rows.tolist())) and (rows >= 0).all()
    assert set(owner[rows]) == set(range(5))


def test_moving_averages_of_fewer_rows_than_a_batch(problem):
    """Augmentations are drawn for the rows of a batch that is not full."""
    hparams = heterofl.HParams(static_norm="ema", static_examples=3, batch_size=64)
    made = heterofl.make(hparams, problem.task_of(normed()))
    data = problem.data.replace(augment="crop_flip")
    state = jax.jit(made.init)(data, jax.random.key(1))
    stats = made.server(state, data)["global"][1].stats
    assert all(map(np.any, jax.tree.leaves(stats)))


def test_a_model_that_flattens_maps_is_refused(problem):
    """Its first dense layer's rows belong to places of the map."""
    with pytest.raises(ValueError, match="--model=tiny .*no narrower form .*convnet"):
        make(problem, model="tiny")


def test_columns_of_classes_need_one_layer(problem):
    """A hidden layer behind the body would be averaged by classes."""
    flat = stages.Dense(6)
    last = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(4)])
    model = own_lib.chain([("body", flat), ("last", last)])
    model = model._replace(at_width=lambda *_: model)
    given = {"masked_cross_entropy": True, "level_mix": "1"}
    with pytest.raises(ValueError, match="--model=own.* ends in last, which is more"):
        make(problem, model=model, **given)


class Scaled(nn.Module):
    """A layer for flat examples, divided before its norm in train mode."""

    width: int
    scaler: Any
    has_norm: bool = True

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        h = nn.Dense(self.width, use_bias=False)(h.reshape(len(h), -1))
        h = h / self.scaler if train else h
        if not self.has_norm:
            return nn.relu(h)
        return nn.relu(stages.Norm()(h, sample_mask=sample_mask, train=train))


def divided(rate=1.0, scaler=1.0, has_norm=True):
    """A small net with a Scaler that has narrower forms."""
    layers = [
        ("first", Scaled(round(8 * rate), scaler, has_norm)),
        ("last", stages.Dense(4, False)),
    ]

    def at_width(share, scaler=1.0):
        return divided(rate * share, scaler, has_norm)

    return stages.chain("divided", layers, at_width=at_width)


def test_chunks_do_not_matter_with_a_scaler(problem):
    """A client's own width divides, not its chunk's."""
    found, cohort = [], plain.at_levels(problem.cohort(0), [1, 2, 4])
    for chunk in (1, 3):
        made = make(problem, model=divided(), chunk=chunk, client_lr=0.1)
        state = jax.jit(made.init)(problem.data, jax.random.key(1))
        found.append(jax.jit(made.round)(state, cohort, problem.data)[0].server)
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=3e-5)


def normed_over_channels(width):
    first = nn.Dense(round(8 * width))
    layers = [lambda h: h.reshape(len(h), -1), first, nn.LayerNorm(), nn.relu]
    return nn.Sequential([*layers, nn.Dense(4)])


def over_channels(problem, algo, **how):
    """A run of a model with a norm over channels, at two levels."""
    rows = problem.table
    given = {"model": normed_over_channels, "dataset": (rows.image, rows.label)}
    given |= {"level_mix": "1:1", "num_clients": 5, "clients_per_round": 4}
    given |= {"rounds": 1, "local_epochs": 1, "devices": 1, "batch_size": 5}
    return build.experiment(algo=algo, **given | how)


def test_a_norm_over_channels(problem):
    """Refused where zeros would enter its means."""
    for how, cure in (
        ({"client_chunk": 2}, "give --client_chunk=1,"),
        (
            {"client_chunk": 1, "bucketed": False},
            "give --bucketed=True --client_chunk=1,",
        ),
    ):
        with pytest.raises(
            ValueError, match=f"^--model=.* {cure} or norms within each"
        ):
            over_channels(problem, "heterofl", **how)
    over_channels(problem, "heterofl", client_chunk=1)


def test_slices_of_all_widths_are_not_among_zeros(problem):
    """So that SHeteroFL has the same models in chunks as one by one."""
    for same in ({"level_mix": "0:1"}, {"levels": "maximum"}, {"all_widths": True}):
        over_channels(problem, "heterofl", client_chunk=2, **same)
    found = []
    for chunk in (1, 2):
        made = over_channels(problem, "sheterofl", client_chunk=chunk)
        made.run(progress=False)
        found.append(made.state.server)
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=3e-5)


def test_each_width_is_divided_by_its_own_share(problem):
    """SHeteroFL's sum of losses: width n/4 divides by n/4, also in a wider client.

    Without a norm behind, which would take any factor out again.
    """
    made = make(problem, "sheterofl", divided(has_norm=False), client_lr=0.1)
    state = jax.jit(made.init)(problem.data, jax.random.key(1))
    cohort = plain.cut(plain.at_levels(problem.cohort(0), [4, 4, 4]), 1)
    after = jax.jit(made.round)(state, cohort, problem.data)[0].server

    def loss(params, image, label, own_share):
        total = 0.0
        for number in range(1, 5):
            net = divided(number / 4, number / 4 if own_share else 1.0, False)
            like = shapes.variables(net, SHAPE)
            own = widths.narrowed(types.Variables(params, state.server.stats), like)
            logits, _ = net.forward(*own, image, train=True, key=jax.random.key(0))
            log = jax.nn.log_softmax(logits)
            total -= jnp.take_along_axis(log, label[:, None], 1).mean()
        return total

    slope = jax.jit(jax.grad(loss), static_argnums=3)

    def trained(own_share):
        """The mean of the clients after one step on all that each owns."""
        out = []
        for one in plain.clients(None, cohort, problem.table):
            _, rows, _ = next(one.steps())
            image, label = problem.data.gather(jnp.asarray(rows))
            grads = slope(state.server.params, image, label, own_share)
            step = jax.tree.map(lambda p, g: p - 0.1 * g, state.server.params, grads)
            out.append(step)
        return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *out)

    expected, other = trained(True), trained(False)
    chex.assert_trees_all_close(after.params, expected, rtol=1e-4, atol=1e-6)
    gap = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), expected, other)
    assert max(jax.tree.leaves(gap)) > 1e-3


def test_static_norm_of_exclusive_learning(problem):
    """Rows of clients that take no part are not read."""
    found = []
    part = problem.data.partition.train
    # Clients 3 and 4 of five hold the third level of four.
    row = np.asarray(part.row)
    mine = np.isin(np.asarray(part.owner()), [3, 4])
    made = make(problem, model=divided(), max_level=3, exclusive=True)
    state = jax.jit(made.init)(problem.data, jax.random.key(1))
    stats = jax.jit(lambda data: made.server(state, data)["global"][1].stats)
    clean = stats(problem.data)
    for spoilt in (row[~mine & (row >= 0)], row[mine]):
        image = np.array(problem.data.image)
        image[spoilt] = 200
        data = problem.data.replace(image=jnp.asarray(image))
        after = stats(data)
        same = jax.tree.map(np.array_equal, clean, after)
        found.append(jax.tree.all(same))
    assert found == [True, False]
