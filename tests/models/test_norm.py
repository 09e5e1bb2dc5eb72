"""Batch norm over real samples, and the blocks that have it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_pfl import shapes
from models import resnet, stages


def normal(*shape, seed=0):
    """Standard normal f32 numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def norm_variables(channels):
    """Parameters and statistics that are no defaults."""
    return {
        "params": {"scale": 1 + normal(channels), "bias": normal(channels, seed=1)},
        "stats": {
            "mean": normal(channels, seed=2),
            "var": normal(channels, seed=3) ** 2 + 0.1,
        },
    }


def apply_norm(variables, h, sample_mask=None, train=True):
    """(output, statistics) of a `Norm`."""
    mode = {"sample_mask": sample_mask, "train": train}
    out, new = stages.Norm().apply(variables, h, mutable=["stats"], **mode)
    return out, new["stats"]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("shape", [(4, 3, 2, 5), (7, 3)])
def test_norm_by_hand(shape, jit):
    """Batch mean and variance; a tenth of them, the variance unbiased, is kept."""
    h, variables = 3 * normal(*shape) + 2, norm_variables(shape[-1])
    fn = jax.jit(apply_norm) if jit else apply_norm
    out, stats = fn(variables, h)
    rows = h.astype(np.float64).reshape(-1, shape[-1])
    expected = (h - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5)
    params, old = variables["params"], variables["stats"]
    chex.assert_trees_all_close(
        out, (expected * params["scale"] + params["bias"]).astype("f4"), atol=1e-5
    )
    moved = {
        "mean": 0.9 * old["mean"] + 0.1 * rows.mean(0),
        "var": 0.9 * old["var"] + 0.1 * rows.var(0, ddof=1),
    }
    chex.assert_trees_all_close(dict(stats), moved, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [0, 2])
def test_norm_of_a_small_variance(first):
    """A variance of a millionth of the squared mean keeps its digits."""
    h, mask = 1000 + normal(6, 3, 2, 4), np.arange(6) >= first
    out, stats = jax.jit(apply_norm)(norm_variables(4), h, mask)
    out, h = out[mask], h[mask]
    rows = h.astype(np.float64).reshape(-1, 4)
    params, old = norm_variables(4).values()
    expected = (h - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5)
    expected = expected * params["scale"] + params["bias"]
    chex.assert_trees_all_close(out, expected.astype("f4"), atol=5e-4)
    moved = 0.9 * old["var"] + 0.1 * rows.var(0, ddof=1)
    chex.assert_trees_all_close(np.asarray(stats["var"]), moved, rtol=1e-5)


def test_slopes_of_the_norm():
    """First and second derivatives are those of mean and variance in two passes.

    Padding changes neither, also where it is nan.
    """
    h, mask, params = 2 + normal(7, 3), np.arange(7) != 4, norm_variables(3)["params"]
    weight, way = normal(7, 3, seed=4), normal(7, 3, seed=5)

    def plain(params, h):
        real = h[mask]
        out = (h - real.mean(0)) / jnp.sqrt(real.var(0) + 1e-5)
        return out * params["scale"] + params["bias"]

    def ours(params, h):
        return apply_norm(norm_variables(3) | {"params": params}, h, mask)[0]

    def slopes(fn, h):
        def loss_fn(params, h):
            return jnp.where(mask[:, None], jnp.sin(fn(params, h)) * weight, 0).sum()

        grad = jax.grad(loss_fn, (0, 1))
        return jax.jit(lambda h: jax.jvp(lambda h: grad(params, h), (h,), (way,)))(h)

    expected, padded = slopes(plain, h), np.where(mask[:, None], h, np.nan)
    for given in (h, padded):
        chex.assert_trees_all_close(slopes(ours, given), expected, rtol=1e-4, atol=1e-5)


def test_norm_in_eval_mode():
    """By the running statistics, which stay; a mask of samples changes nothing."""
    h, variables = normal(4, 2, 2, 3), norm_variables(3)
    out, stats = apply_norm(variables, h, np.arange(4) < 2, train=False)
    params, old = variables["params"], variables["stats"]
    expected = (h - old["mean"]) / np.sqrt(old["var"] + 1e-5)
    chex.assert_trees_all_close(
        out, expected * params["scale"] + params["bias"], rtol=1e-5, atol=1e-5
    )
    chex.assert_trees_all_equal(dict(stats), old)


def test_norm_of_clients_together():
    """vmap over parameters, statistics, batches and masks is one after another."""
    h = normal(3, 5, 2, 2, 4)
    mask = np.array([[1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]], bool)
    each = [norm_variables(4) for _ in range(3)]
    each = [jax.tree.map(lambda leaf, s=i: leaf + s, one) for i, one in enumerate(each)]
    together = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    out, stats = jax.jit(jax.vmap(apply_norm))(together, h, mask)
    alone = jax.jit(apply_norm)
    for i, one in enumerate(each):
        mine = jax.tree.map(lambda leaf, s=i: leaf[s], (out, stats))
        chex.assert_trees_all_close(mine, alone(one, h[i], mask[i]), atol=1e-5)


# Two blocks, one whose shortcut has a convolution, on a map of odd sides.
NET = stages.chain(
    "net",
    [
        ("stem", stages.Sequential([resnet.normed(4, 3), stages.MaxPool(3)])),
        ("stage1", stages.Sequential([resnet.Residual(6, 2), resnet.Residual(6)])),
        ("last", stages.Sequential([stages.GlobalAverage(), stages.Dense(3, False)])),
    ],
)


@pytest.fixture(scope="module")
def net():
    """Variables of `NET`, and what a step computes of it.

    The step is `(params, image, mask, stats) -> (gradients, statistics, logits)`, of
    the sum over real rows of a function of the logits.
    """
    params, stats = jax.tree.map(
        lambda leaf: normal(*leaf.shape), shapes.variables(NET, (7, 9, 2))
    )

    @jax.jit
    def step(params, image, mask, stats):
        def loss_fn(params, image):
            mode = {"sample_mask": mask, "train": True}
            out, new = NET.forward(params, stats, image, **mode)
            return jnp.where(mask, jnp.sin(out).sum(1), 0).sum(), (new, out)

        grads, (new, out) = jax.grad(loss_fn, (0, 1), has_aux=True)(params, image)
        return grads, new, out

    return params, stats, step


def test_padding_changes_nothing(net):
    """Gradients, statistics and logits of three rows, alone and beside junk."""
    params, stats, step = net
    image = normal(3, 7, 9, 2)
    grads, new, out = step(params, image, np.ones(3, bool), stats)
    padded = np.concatenate([image[:1], np.full((2, 7, 9, 2), 1e15, "f4"), image[1:]])
    mask = np.array([1, 0, 0, 1, 1], bool)
    (padded_grads, image_grads), padded_new, padded_out = step(
        params, padded, mask, stats
    )
    chex.assert_trees_all_close(padded_grads, grads[0], rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(image_grads[mask], grads[1], rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(image_grads[~mask], np.zeros((2, 7, 9, 2), "f4"))
    chex.assert_trees_all_close(padded_new, new, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(padded_out[mask], out, rtol=1e-5, atol=1e-6)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), new, stats)
    assert min(jax.tree.leaves(moved)) > 1e-4


def test_batch_without_a_real_sample(net):
    """Statistics stay bit for bit; the logits are finite, the gradients 0."""
    params, stats, step = net
    grads, new, out = step(params, normal(3, 7, 9, 2), np.zeros(3, bool), stats)
    chex.assert_trees_all_equal(new, stats)
    assert np.isfinite(out).all()
    chex.assert_trees_all_equal(grads, jax.tree.map(np.zeros_like, grads))


def test_fewer_than_two_values_a_channel():
    """Ten norms in a row: the bias comes out finite, and the statistics stay."""
    shape = (2, 1, 1, 5)
    deep = stages.chain("deep", [("all", stages.Sequential([stages.Norm()] * 10))])
    params, stats = deep.init(jax.random.key(0), jnp.zeros(shape))
    params = jax.tree.map(lambda leaf: leaf + 0.5, params)
    image = normal(*shape) * 1e3

    def loss_fn(params, image, mask):
        mode = {"sample_mask": mask, "train": True}
        out, new = deep.forward(params, stats, image, **mode)
        return out[0].sum(), (out, new)

    step = jax.jit(jax.grad(loss_fn, (0, 1), has_aux=True))
    for real in (0, 1):
        grads, (out, new) = step(params, image, np.arange(2) < real)
        chex.assert_tree_all_finite(grads)
        np.testing.assert_allclose(out, 0.5)
        chex.assert_trees_all_equal(new, stats)


class PlainResidual(nn.Module):
    """A residual block in flax's own modules."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, h, train):
        def normed(h, side, name, stride=1):
            pad = (side - 1) // 2
            conv = nn.Conv(
                self.features,
                (side, side),
                stride,
                [(pad, pad)] * 2,
                use_bias=False,
                name=name,
            )
            norm = nn.BatchNorm(not train, epsilon=1e-5, name=f"{name}_norm")
            return norm(conv(h))

        out = nn.relu(normed(h, 3, "conv1", self.stride))
        out = normed(out, 3, "conv2")
        return nn.relu(out + normed(h, 1, "shortcut", self.stride))


def test_residual_block_equals_flax():
    """Convolutions, norms and the shortcut, with the same numbers, in both modes."""
    image, block, plain = normal(3, 5, 6, 2), resnet.Residual(4, 2), PlainResidual(4, 2)
    like = jax.eval_shape(block.init, jax.random.key(0), image)
    ours = jax.tree.map(lambda leaf: np.abs(normal(*leaf.shape)) + 0.1, like)
    params, stats = {}, {}
    for name, one in ours["params"].items():
        params |= {name: {"kernel": one["kernel"]}, f"{name}_norm": one["norm"]}
        stats[f"{name}_norm"] = ours["stats"][name]["norm"]
    theirs = {"params": params, "batch_stats": stats}

    @jax.jit
    def run(ours, theirs, image):
        return [
            (
                block.apply(ours, image, train=train, mutable=["stats"])[0],
                plain.apply(theirs, image, train, mutable=["batch_stats"])[0],
            )
            for train in (False, True)
        ]

    for mine, other in run(ours, theirs, image):
        chex.assert_trees_all_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("side", "size"), [(2, (7, 4)), (2, (1, 1)), (3, (6, 5))])
def test_max_pool_equals_flax(side, size):
    """Stride 2, padded to ceil(size / 2); also where everything is negative."""
    image = normal(2, *size, 3) - 5
    low, high = (side - 1) // 2, side // 2
    expected = nn.max_pool(image, (side, side), (2, 2), [(low, high)] * 2)
    chex.assert_trees_all_equal(stages.MaxPool(side).apply({}, image), expected)
    assert expected.shape[1:3] == tuple(-(-n // 2) for n in size)
