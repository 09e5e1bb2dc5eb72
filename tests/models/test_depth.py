"""DepthFL's blocks against flax, its exits, and models at several widths."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import models
from fedjax_pfl import execution, shapes, types
from models import depth, stages

# 4, 8, 16 and 32 channels.
TINY = 1 / 16


def normal(*shape, seed=0):
    """Standard normal f32 numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def drawn(like, is_positive=False):
    """Arrays of these shapes, other numbers in each."""
    leaves, tree = jax.tree.flatten(like)
    out = [normal(*leaf.shape, seed=i) for i, leaf in enumerate(leaves)]
    out = [leaf**2 + 0.1 for leaf in out] if is_positive else out
    return jax.tree.unflatten(tree, out)


def filled(model, shape):
    """A model's parameters, and its statistics, all of which are positive."""
    params, stats = shapes.variables(model, shape)
    return drawn(params), drawn(stats, is_positive=True)


class PlainSepConv(nn.Module):
    """`SepConv` in flax's own modules."""

    features: int
    stride: int = 2

    @nn.compact
    def __call__(self, h, train):
        widths, strides = (h.shape[-1], self.features), (self.stride, 1)
        for i, (out, stride) in enumerate(zip(widths, strides, strict=True), start=1):
            width, pads = h.shape[-1], [(1, 1)] * 2
            h = nn.Conv(
                width,
                (3, 3),
                stride,
                pads,
                feature_group_count=width,
                use_bias=False,
                name=f"depthwise{i}",
            )(h)
            h = nn.Conv(out, (1, 1), use_bias=False, name=f"pointwise{i}")(h)
            norm = nn.BatchNorm(not train, epsilon=1e-5, name=f"pointwise{i}_norm")
            h = nn.relu(norm(h))
        return h


class PlainAttention(nn.Module):
    """`Attention` in flax's own modules."""

    @nn.compact
    def __call__(self, h, train):
        seen = PlainSepConv(h.shape[-1], name="sepconv")(h, train)
        norm = nn.BatchNorm(not train, epsilon=1e-5, name="norm")
        return h * nn.sigmoid(jax.image.resize(nn.relu(norm(seen)), h.shape, "linear"))


def for_flax(tree):
    """Our variables as the plain modules': each convolution's norm beside it."""
    out = {}
    for name, one in tree.items():
        if isinstance(one, dict) and "norm" in one and name.startswith("pointwise"):
            out[f"{name}_norm"] = one["norm"]
            one = {k: v for k, v in one.items() if k != "norm"}
        elif isinstance(one, dict):
            one = for_flax(one)
        out[name] = one
    return out


@pytest.mark.parametrize(
    ("ours", "plain", "size"),
    [
        (depth.SepConv(5), PlainSepConv(5), (7, 4)),
        (depth.SepConv(3, 1), PlainSepConv(3, 1), (4, 5)),
        (depth.Attention(), PlainAttention(), (6, 4)),
    ],
    ids=["sepconv", "sepconv1", "attention"],
)
def test_block_equals_flax(ours, plain, size):
    """Grouped convolutions, norms and the upsampling, in both modes."""
    image = normal(3, *size, 4)
    like = jax.eval_shape(ours.init, jax.random.key(0), image)
    variables = {part: drawn(like[part], part == "stats") for part in like}
    theirs = {
        "params": for_flax(variables["params"]),
        "batch_stats": for_flax(variables["stats"]),
    }

    @jax.jit
    def run(variables, theirs, image):
        return [
            (
                ours.apply(variables, image, train=train, mutable=["stats"])[0],
                plain.apply(theirs, image, train, mutable=["batch_stats"])[0],
            )
            for train in (False, True)
        ]

    for mine, other in run(variables, theirs, image):
        assert np.abs(other).max() > 0.1
        chex.assert_trees_all_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_slopes_of_a_depthwise_convolution(stride, platform):
    """The gradients of kernel and map, and their slopes, are those of XLA's."""
    h, kernel = normal(2, 5, 4, 3), normal(3, 3, 1, 3, seed=1)
    ways = normal(2, 5, 4, 3, seed=2), normal(3, 3, 1, 3, seed=3)

    def plain(kernel, h):
        return jax.lax.conv_general_dilated(
            h,
            kernel,
            (stride, stride),
            [(1, 1)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=3,
        )

    def ours(kernel, h):
        with execution.traced_in(execution.Setting(platform)):
            return depth.Depthwise(stride).apply({"params": {"kernel": kernel}}, h)

    def slopes(fn):
        grad = jax.grad(lambda h, kernel: jnp.sin(fn(kernel, h)).sum(), (0, 1))
        return jax.jit(lambda *given: jax.jvp(grad, given, ways))(h, kernel)

    chex.assert_trees_all_close(slopes(ours), slopes(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (4, 5)])
def test_upsampling_equals_jax(size):
    """Linear, edges clamped."""
    image = normal(2, *size, 3)
    expected = jax.image.resize(image, (2, 2 * size[0], 2 * size[1], 3), "linear")
    chex.assert_trees_all_close(depth.Upsample().apply({}, image), expected, atol=1e-6)


def test_upsampling_by_hand():
    """Three quarters of the nearer number and one of the next."""
    row = jnp.array([0.0, 4.0, 12.0]).reshape(1, 1, 3, 1)
    out = depth.Upsample().apply({}, row)[0, :, :, 0]
    np.testing.assert_allclose(out, [[0, 1, 3, 6, 10, 12]] * 2)


def test_initialisation_is_kaimings():
    """Normal of variance 2 / (outputs * side^2); depthwise 2 / (channels * 9)."""
    modules = {"conv": depth.normed(64, 3), "sepconv": depth.SepConv(40)}

    @jax.jit
    def init(key, h):
        return {name: module.init(key, h) for name, module in modules.items()}

    made = init(jax.random.key(0), jnp.zeros((1, 2, 2, 30)))
    conv, sepconv = (made[name]["params"] for name in modules)
    for kernel, fan_out in (
        (conv["kernel"], 9 * 64),
        (sepconv["depthwise1"]["kernel"], 9 * 30),
        (sepconv["pointwise2"]["kernel"], 40),
    ):
        scaled = np.asarray(kernel) * (fan_out / 2) ** 0.5
        # Four standard deviations of the standard deviation of so many numbers.
        assert abs(scaled.std() - 1) < 4 / (2 * scaled.size) ** 0.5
        # A uniform one would end at 1.73.
        assert np.abs(scaled).max() > 2.2


@pytest.mark.parametrize(
    ("name", "initializer"),
    [
        ("convnet", "he"),
        ("depth_convnet", "he"),
        ("depth_resnet18", "he"),
        ("resnet18", "torch"),
        ("resnet18_7x7", "torch"),
    ],
)
def test_who_starts_from_which_initializer(name, initializer):
    """All convolutions of the new nets as DepthFL's, those of the old as they were."""
    found = []

    def note(call, args, kwargs, context):
        if isinstance(context.module, stages.Conv):
            found.append(context.module.initializer)
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        shapes.variables(models.MODELS[name](5, TINY), (16, 16, 3))
    assert set(found) == {initializer}


def test_exits_belong_to_their_stages():
    """Four stages of both; a ResNet's chains widen to the last stage's channels."""
    for name, chains in {
        "depth_convnet": [(4, 4), (8,), (16,), ()],
        "depth_resnet18": [(8, 16, 32), (16, 32), (32,), ()],
    }.items():
        model = models.make(name, 10, TINY)
        params, _ = shapes.variables(model, (16, 16, 3))
        assert model.stage_names == ("stage1", "stage2", "stage3", "stage4")
        assert model.has_exits and all({"trunk", "exit"} == set(p) for p in params)
        found = [
            tuple(
                layer["pointwise2"]["kernel"].shape[-1]
                for layer in stage["exit"].values()
                if "pointwise2" in layer
            )
            for stage in params
        ]
        assert found == chains


@pytest.fixture(scope="module")
def tiny():
    """A tiny depth ConvNet: model, parameters, statistics and three images."""
    model = models.make("depth_convnet", 5, TINY)
    return model, *filled(model, (16, 16, 3)), normal(3, 16, 16, 3)


def test_truncated_net_gives_the_first_exits(tiny):
    """And moves the statistics of its own stages as the whole net does."""
    model, params, stats, image = tiny

    @jax.jit
    def run(params, stats):
        return [
            types.truncated(model, level).forward(
                params[:level], stats[:level], image, train=True
            )
            for level in (1, 2, 3, 4)
        ]

    *parts, (whole, moved) = run(params, stats)
    assert len(whole) == 4
    assert min(np.abs(whole[i] - whole[i + 1]).max() for i in range(3)) > 0.1
    for level, (out, new) in enumerate(parts, start=1):
        chex.assert_trees_all_close(out, whole[:level], rtol=1e-5, atol=1e-5)
        chex.assert_trees_all_close(new, moved[:level], rtol=1e-5, atol=1e-5)


def test_stages_that_are_not_held_leave_no_trace(tiny):
    """nan in stages 3 and 4: stages 1 and 2 get the truncated net's gradient."""
    model, params, stats, image = tiny
    held = np.array([True, True, False, False])
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), params[2:])

    def loss_fn(params, model, chosen, **mode):
        out, _ = model.forward(params, stats, image, train=True, **mode)
        logits = jnp.where(chosen[:, None, None], jnp.stack(out), 0)
        return jnp.where(chosen, nn.log_softmax(logits)[:, :, 0].sum(1), 0).sum()

    @jax.jit
    def run(params, broken):
        all_four, part = (*params[:2], *broken), types.truncated(model, 2)
        return (
            jax.grad(loss_fn)(all_four, model, held, held=held)[:2],
            jax.grad(loss_fn)(params[:2], part, held[:2]),
        )

    grads, expected = run(params, broken)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-6
    chex.assert_trees_all_close(grads, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("depth_convnet", (28, 28, 1), "a multiple of 16, these are 28x28"),
        ("depth_convnet", (16, 24, 1), "a multiple of 16, these are 16x24"),
        ("depth_resnet18", (28, 28, 1), "a multiple of 8, these are 28x28"),
        ("depth_resnet34", (64,), "of a shape H, W, C"),
        ("convnet", (7, 9, 1), "at least 8, these are 7x9"),
    ],
)
def test_sides_that_do_not_fit(name, shape, message):
    """Maps that do not come back from half their side, or from three pools."""
    with pytest.raises(ValueError, match=f"needs images .*{message}"):
        shapes.variables(models.make(name, 10, TINY), shape)


@pytest.mark.parametrize("name", ["convnet", "resnet18_7x7"])
def test_narrow_models_are_leading_slices(name):
    """Every axis of every array; classes and the name stay, hidden channels shrink."""
    wide = models.make(name, 7, 4 * TINY)
    narrow = wide.at_width(0.5).at_width(0.5)
    like, part = (shapes.variables(m, (8, 8, 3)) for m in (wide, narrow))
    chex.assert_trees_all_equal_structs(part, like)
    pairs = zip(jax.tree.leaves(part), jax.tree.leaves(like), strict=True)
    for few, many in pairs:
        for n, m in zip(few.shape, many.shape, strict=True):
            assert n == m if m < 16 else 4 * n == m
    assert part.params[-1]["trunk"]["kernel"].shape == (32, 7)
    assert (narrow.name, narrow.stage_names) == (wide.name, wide.stage_names)
    chex.assert_trees_all_equal_shapes(
        part, shapes.variables(models.make(name, 7, TINY), (8, 8, 3))
    )


@pytest.mark.parametrize("name", models.MODELS)
def test_who_has_widths(name):
    """Models that average their last map, or never have one; so with the last exit."""
    resnets = ("resnet18", "resnet18_he", "resnet18_7x7", "resnet34", "resnet101")
    deep = ("depth_convnet", "depth_resnet18", "depth_resnet34")
    model = models.make(name, 10)
    for one in filter(None, (model, model.one_exit)):
        assert (one.at_width is not None) == (
            name in ("convnet", "mlp", *resnets, *deep)
        )


@pytest.mark.parametrize("rate", [1, 0.5])
def test_the_last_exit_alone_is_the_convnet(rate):
    """Of any width: with the same numbers it gives the same logits and statistics."""
    deep, plain = (models.make(n, 7, TINY) for n in ("depth_convnet", "convnet"))
    assert models.make("depth_convnet", 7, TINY, level=5) is deep.one_exit
    alone, plain = (one.at_width(rate, 0.5) for one in (deep.one_exit, plain))
    assert alone.stage_names == ("stage1", "stage2", "stage3", "stage4", "exit")
    # Its demand is the convnet's too, not that of the exits before.
    shape, image = (9, 8, 3), normal(3, 9, 8, 3)
    params, stats = filled(plain, shape)
    convs = [one["trunk"] for one in params[:3]] + [params[3]["trunk"]["layers_0"]]
    norms = [one["trunk"] for one in stats[:3]] + [stats[3]["trunk"]["layers_0"]]
    mine = types.Variables(
        (
            *({"trunk": {"layers_0": conv}} for conv in convs),
            {"trunk": {"layers_1": params[4]["trunk"]}},
        ),
        (*({"trunk": {"layers_0": norm}} for norm in norms), {}),
    )
    chex.assert_trees_all_equal_shapes(mine, shapes.variables(alone, shape))
    for train in (False, True):
        run = functools.partial(jax.jit, static_argnames="train")
        out, moved = run(alone.forward)(*mine, image, train=train)
        expected, wanted = run(plain.forward)(params, stats, image, train=train)
        np.testing.assert_array_equal(out, expected)
        chex.assert_trees_all_equal(jax.tree.leaves(moved), jax.tree.leaves(wanted))


def test_whole_width_is_the_model_itself():
    """The same start and the same computations."""
    model, image = models.make("convnet", 5, TINY), normal(2, 8, 8, 3)
    key = jax.random.key(0)

    def traced(model):
        params, stats = jax.eval_shape(model.init, key, image)
        run = functools.partial(model.forward, train=True)
        return [
            str(jax.make_jaxpr(model.init)(key, image)),
            str(jax.make_jaxpr(run)(params, stats, image)),
        ]

    assert traced(model.at_width(1)) == traced(model)


def mean_of(stats, *path):
    """The running mean of a norm inside a stage's trunk."""
    return functools.reduce(lambda tree, key: tree[key], path, stats["trunk"])["mean"]


@pytest.mark.parametrize(
    ("name", "stop", "scaled", "unscaled"),
    [
        ("convnet", None, [(0, "norm"), (1, "norm"), (3, "layers_0", "norm")], []),
        (
            "resnet18",
            3,
            [
                (0, "layers_0", "norm"),
                (2, "layers_0", "conv1", "norm"),
                (2, "layers_1", "conv2", "norm"),
            ],
            [(2, "layers_0", "shortcut", "norm")],
        ),
    ],
)
def test_scaler_of_heterofl(name, stop, scaled, unscaled):
    """Norms get the output of their convolutions / rate, those of shortcuts do not.

    They make good for it, but for their epsilon; in eval mode nothing is divided.
    """
    wide, image = models.make(name, 5, 2 * TINY), normal(4, 8, 8, 3)
    without, with_it = (wide.at_width(0.5, scaler) for scaler in (1.0, 0.5))
    params, stats = filled(without, (8, 8, 3))

    @jax.jit
    def run(params, stats):
        mode = {"stop": stop, "train": True}
        return [m.forward(params, stats, image, **mode) for m in (without, with_it)]

    (out, moved), (other, divided) = run(params, stats)
    assert np.abs(out).max() > 0.1
    chex.assert_trees_all_close(other, out, rtol=1e-3, atol=1e-3)
    for places, factor in ((scaled, 2), (unscaled, 1)):
        for stage, *path in places:
            old, one, two = (mean_of(s[stage], *path) for s in (stats, moved, divided))
            kept = 0.9 * old
            assert np.abs(one - kept).max() > 0.01
            chex.assert_trees_all_close(
                two - kept, factor * (one - kept), rtol=1e-2, atol=1e-3
            )
    plain, also = (
        str(jax.make_jaxpr(m.forward)(params, stats, image)) for m in (without, with_it)
    )
    assert plain == also
