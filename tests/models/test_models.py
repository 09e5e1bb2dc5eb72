"""Parameter counts, stages against flax, composition, exits and dropout."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import models
from fedjax_pfl import shapes, types
from models import stages

MNIST, CIFAR = (28, 28, 1), (32, 32, 3)


@pytest.mark.parametrize(
    ("name", "shape", "num_classes", "expected"),
    [
        ("fedavg_cnn", MNIST, 10, 582_026),
        ("lenet5", MNIST, 10, 44_426),
        ("lenet5", CIFAR, 10, 62_006),
        ("cnn_same", MNIST, 10, 1_663_370),
        ("cdkt_mnist", MNIST, 10, 834_922),
        ("cdkt_mnist_small", MNIST, 10, 3_217_738),
        ("cdkt_cifar", CIFAR, 10, 581_866),
        ("cdkt_cifar", CIFAR, 100, 587_716),
        ("cdkt_cifar_small", CIFAR, 10, 59_386),
        ("cdkt_cifar_small", CIFAR, 100, 65_236),
        ("m1", CIFAR, 10, 23_146),
        ("m2", CIFAR, 100, 353_284),
        ("mlp", (8, 8, 1), 4, 64 * 128 + 128 + 128 * 64 + 64 + 64 * 4 + 4),
        ("uapdfl_cnn", CIFAR, 10, 8_413_642),
        ("resnet18", CIFAR, 10, 11_173_962),
        ("resnet18_7x7", CIFAR, 10, 11_181_642),
        ("resnet34", CIFAR, 10, 21_282_122),
        ("resnet101", CIFAR, 10, 42_512_970),
        ("resnet101", CIFAR, 100, 42_697_380),
        ("convnet", CIFAR, 10, 1_557_066),
        ("depth_convnet", CIFAR, 10, 1_935_848),
        ("depth_resnet18", CIFAR, 10, 12_098_664),
        ("depth_resnet34", CIFAR, 10, 22_206_824),
        ("vgg11", CIFAR, 10, 9_753_674),
        ("vgg11_4096", CIFAR, 10, 28_146_762),
    ],
)
def test_number_of_parameters(name, shape, num_classes, expected):
    """Section 3 and test 33: the networks have the papers' sizes."""
    assert sum(sizes(models.make(name, num_classes), shape).values()) == expected


def sizes(model, shape):
    """Stage -> number of parameters."""
    params, _ = shapes.variables(model, shape)
    return dict(zip(model.stage_names, numbers(params), strict=True))


def numbers(params):
    """How many parameters each stage has."""
    return [
        sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(stage))
        for stage in params
    ]


def test_stages_of_uapdfl_cnn():
    """Test 9: extractor and classifier on both sides of the two cuts."""
    counts = sizes(models.make("uapdfl_cnn", 10), CIFAR)
    assert list(counts) == ["conv1", "conv2", "dense1", "dense2"]
    conv, dense = counts["conv1"] + counts["conv2"], counts["dense1"]
    assert (conv + dense, counts["dense2"]) == (8_408_512, 5_130)
    assert (conv, dense + counts["dense2"]) == (19_392, 8_394_250)


def test_stages_of_the_deep_nets():
    """Names that a boundary may have; an embedding of 512 before the last stage."""
    names = {name: models.make(name, 10).stage_names for name in ("resnet18", "vgg11")}
    assert names["resnet18"] == ("stem", "stage1", "stage2", "stage3", "stage4", "fc")
    dense = ("dense1", "dense2", "dense3")
    assert names["vgg11"] == (*(f"conv{i}" for i in range(1, 9)), *dense)
    for name, shape in (("resnet18", CIFAR), ("resnet18_7x7", MNIST), ("vgg11", MNIST)):
        assert shapes.embedding_width(models.make(name, 10), shape) == 512


@pytest.mark.parametrize("shape", [CIFAR, (9, 13, 2)])
def test_maps_of_vgg11(shape):
    """Five pools that round up: 1x1 is left of 32x32 and of whatever is smaller."""
    model = models.make("vgg11", 10)
    params, stats = shapes.variables(model, shape)
    image = jax.ShapeDtypeStruct((1, *shape), np.float32)
    out, _ = jax.eval_shape(
        lambda p, s, x: model.forward(p, s, x, stop=8), params, stats, image
    )
    assert out.shape == (1, 1, 1, 512)


@pytest.mark.parametrize(
    ("name", "shape", "width", "expected"),
    [
        ("uapdfl_cnn", MNIST, 0.25, {"conv1": 80, "conv2": 1168}),
        ("m1", CIFAR, 0.25, {"C1": 3 * 9 * 2 + 2, "F3": 4 * 10 + 10}),
        ("mlp", (6,), 0.001, {"dense1": 7, "dense2": 2, "dense3": 20}),
        ("mlp", (6,), 1.5, {"dense1": 7 * 192, "dense2": 193 * 96, "dense3": 970}),
        ("vgg11_4096", CIFAR, 0.5, {"dense2": 2049 * 2048, "dense3": 20_490}),
        ("resnet18", CIFAR, 0.5, {"stem": 27 * 32 + 64, "fc": 2570}),
    ],
)
def test_width_scales_what_is_hidden(name, shape, width, expected):
    """max(1, round(width * n)) channels, and as many classes as ever."""
    model = models.make(name, 10, width)
    counts = sizes(model, shape)
    assert {stage: counts[stage] for stage in expected} == expected
    assert model.name == name


def test_size_of_the_small_uapdfl_cnn():
    """8 and 16 channels, 128 wide on 28x28: the net of CPU-sized tables."""
    assert sum(sizes(models.make("uapdfl_cnn", 10, 0.25), MNIST).values()) == 404_074


def test_a_model_is_made_once():
    """Programs are shared by the identity of the model."""
    one = models.make("mlp", 5, 0.5)
    assert models.make("mlp", 5, 0.5) is one
    assert models.make("mlp", 5, 1) is models.make("mlp", 5)
    assert models.make("mlp", 5) is not one


@pytest.mark.parametrize("name", [n for n in models.MODELS if n not in models.OF_TEXT])
def test_one_parameter_tree_per_stage(name):
    """Section 3: `params`, `stats` and names align, every exit gives Y logits.

    At half the width every stage is smaller, and still there are Y logits.
    """
    is_cifars = name in ("m1", "m2") or "cifar" in name or "depth" in name
    shape = CIFAR if is_cifars else MNIST
    whole, model = sizes(models.MODELS[name](7), shape), models.make(name, 7, 0.5)
    params, stats = shapes.variables(model, shape)
    counts = numbers(params)
    assert all(half < whole[n] for n, half in zip(whole, counts, strict=True))
    assert model.name == name
    assert len(params) == len(stats) == len(model.stage_names)
    assert len(set(model.stage_names)) == len(model.stage_names)
    example = jax.ShapeDtypeStruct((3, *shape), np.float32)
    out, _ = jax.eval_shape(model.forward, params, stats, example)
    outs = out if model.has_exits else (out,)
    assert {one.shape for one in outs} == {(3, 7)}


NOISY = {
    "cdkt_mnist": ["conv1", "conv2"],
    "cdkt_cifar": ["dense2"],
    "cdkt_cifar_small": ["dense1"],
    "uapdfl_cnn": ["conv2", "dense2"],
    "vgg11": ["dense1", "dense2"],
}


@pytest.mark.parametrize("name", NOISY)
def test_dropout_sits_where_the_paper_has_it(name):
    """Section 3: stages whose train-mode forward needs a key."""
    model = models.MODELS[name](10)
    shape = MNIST if name == "cdkt_mnist" else CIFAR
    params, stats = shapes.variables(model, shape)
    noisy, h = [], jax.ShapeDtypeStruct((1, *shape), np.float32)
    for index, stage in enumerate(model.stage_names):

        def run(p, s, h, train, index=index):
            return model.forward(p, s, h, start=index, stop=index + 1, train=train)[0]

        try:
            jax.eval_shape(lambda *args, f=run: f(*args, True), params, stats, h)
        except Exception as error:
            assert "dropout" in str(error)
            noisy.append(stage)
        h = jax.eval_shape(lambda *args, f=run: f(*args, False), params, stats, h)
    assert noisy == NOISY[name]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("padding", "kernel", "size", "pool", "stride"),
    [
        ("SAME", 5, (7, 9), True, 1),
        ("SAME", 4, (6, 5), True, 1),
        ("VALID", 3, (9, 8), True, 1),
        ("SAME", 3, (5, 4), False, 1),
        ("SAME", 3, (5, 4), False, 2),
        ("SAME", 1, (5, 4), False, 2),
        ("SAME", 4, (9, 6), False, 3),
        ("VALID", 2, (7, 9), True, 2),
    ],
)
def test_convolution_equals_flax(padding, kernel, size, pool, stride, jit):
    """Conv, ReLU, 2x2 max-pool of stride 2, with flax's parameters and padding."""
    gen = np.random.default_rng(0)
    params = {
        "kernel": jnp.asarray(gen.normal(size=(kernel, kernel, 3, 4)), jnp.float32),
        "bias": jnp.asarray(gen.normal(size=4), jnp.float32),
    }
    image = jnp.asarray(gen.normal(size=(2, *size, 3)), jnp.float32)
    stage = stages.Conv(4, kernel, padding, pool, stride=stride)
    # With a stride flax's own SAME pads by the size of the map.
    pads = ((kernel - 1) // 2, kernel // 2)
    padding = [pads, pads] if padding == "SAME" else padding

    def ours(params, image):
        return stage.apply({"params": params}, image)

    def theirs(params, image):
        module = nn.Conv(4, (kernel, kernel), stride, padding)
        h = nn.relu(module.apply({"params": params}, image))
        return nn.max_pool(h, (2, 2), (2, 2)) if pool else h

    wrap = jax.jit if jit else lambda fn: fn
    chex.assert_trees_all_close(
        wrap(ours)(params, image), wrap(theirs)(params, image), rtol=1e-4, atol=1e-4
    )


@pytest.fixture(scope="module")
def small():
    """Three stages with dropout after both hidden ones: model, params, stats, image."""
    model = stages.chain(
        "small",
        [
            ("conv", stages.Conv(3, 3, dropout=0.3)),
            ("hidden", stages.Dense(6, dropout=0.5)),
            ("last", stages.Dense(4, relu=False)),
        ],
    )
    gen = np.random.default_rng(0)
    params, stats = jax.tree.map(
        lambda leaf: gen.normal(size=leaf.shape).astype(leaf.dtype),
        shapes.variables(model, (6, 6, 2)),
    )
    image = gen.normal(size=(3, 6, 6, 2)).astype(np.float32)
    return model, params, stats, image


@pytest.mark.parametrize("train", [False, True])
def test_composed_parts_equal_the_whole(train, small):
    """forward(stop=i) then forward(start=i) is forward, at every boundary."""
    model, params, stats, image = small
    mode = {"train": train, "key": jax.random.key(2) if train else None}

    def split(params, image, boundary):
        h, _ = model.forward(params, stats, image, stop=boundary, **mode)
        return model.forward(params, stats, h, start=boundary, **mode)[0]

    @jax.jit
    def run(params, image):
        whole, _ = model.forward(params, stats, image, **mode)
        return whole, [split(params, image, boundary) for boundary in range(4)]

    whole, parts = run(params, image)
    assert np.abs(whole).max() > 0.1
    for part in parts:
        chex.assert_trees_all_close(part, whole, rtol=1e-5, atol=1e-5)


class Counting(nn.Module):
    """A dense stage that counts the real samples of train mode."""

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        seen = self.variable("stats", "seen", jnp.zeros, (), jnp.int32)
        if train:
            seen.value += sample_mask.sum()
        return h @ self.param("kernel", nn.initializers.normal(), (h.shape[-1], 4))


@pytest.fixture(scope="module")
def with_exits():
    """Three stages, exits after the first and the last, statistics in the second."""
    trunks = [
        ("first", stages.Dense(5)),
        ("second", Counting()),
        ("third", stages.Dense(6)),
    ]
    exits = {"first": stages.Dense(2, False), "third": Counting()}
    model = stages.chain("with_exits", trunks, exits)
    params, stats = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 3)))
    image = np.random.default_rng(1).normal(size=(7, 3)).astype(np.float32)
    return model, params, stats, image


def test_exits_read_their_stages_output(with_exits):
    """A forward pass gives the outputs of all exits passed, against numpy."""
    model, params, stats, image = with_exits
    assert model.has_exits
    assert [set(stage) for stage in params] == [
        {"trunk", "exit"},
        {"trunk"},
        {"trunk", "exit"},
    ]

    def dense(stage, h):
        return h @ stage["kernel"] + stage["bias"]

    first = np.maximum(dense(params[0]["trunk"], np.asarray(image)), 0)
    second = first @ params[1]["trunk"]["kernel"]
    third = np.maximum(dense(params[2]["trunk"], second), 0)
    expected = (
        dense(params[0]["exit"], first),
        third @ params[2]["exit"]["kernel"],
    )
    out, _ = model.forward(params, stats, image)
    chex.assert_trees_all_close(out, expected, rtol=1e-5, atol=1e-6)
    for stop, passed in ((1, 1), (2, 1), (3, 2)):
        out, _ = model.forward(params, stats, image, stop=stop)
        chex.assert_trees_all_close(out, expected[:passed], rtol=1e-5, atol=1e-6)


def test_the_last_exit_alone_is_one_more_stage(with_exits):
    """With the parts of the whole model it gives its last output and statistics."""
    model, params, stats, image = with_exits
    alone = model.one_exit
    assert alone.stage_names == ("first", "second", "third", "exit")
    assert not alone.has_exits and alone.one_exit is None
    assert types.truncated(model, 2).one_exit is None
    parts = [
        (*({"trunk": one["trunk"]} if "trunk" in one else {} for one in whole),)
        + ({"trunk": whole[-1]["exit"]},)
        for whole in (params, stats)
    ]
    chex.assert_trees_all_equal_shapes(
        tuple(parts), alone.init(jax.random.key(0), image)
    )
    mode = {"train": True, "sample_mask": jnp.arange(7) < 5}
    out, moved = alone.forward(*parts, image, **mode)
    every, all_moved = model.forward(params, stats, image, **mode)
    np.testing.assert_array_equal(out, every[-1])
    chex.assert_trees_all_equal(moved[1], all_moved[1])
    chex.assert_trees_all_equal(moved[3]["trunk"], all_moved[2]["exit"])
    # A stage after the last exit is no part of it, and a name is not taken twice.
    trunks = [(name, stages.Dense(3)) for name in ("exit", "exit_", "last")]
    short = stages.chain("short", trunks, {"exit_": stages.Dense(2)}).one_exit
    assert short.stage_names == ("exit", "exit_", "exit__")


def test_statistics_move_in_the_stages_run_in_train_mode(with_exits):
    """By the real samples; those of other stages, and eval mode, stay."""
    model, params, stats, image = with_exits
    mask = jnp.arange(7) < 5
    _, same = model.forward(params, stats, image, sample_mask=mask)
    chex.assert_trees_all_equal(same, stats)
    mode = {"sample_mask": mask, "train": True}
    _, moved = model.forward(params, stats, image, **mode)
    assert jax.tree.map(int, moved) == (
        {},
        {"trunk": {"seen": 5}},
        {"exit": {"seen": 5}},
    )
    _, partly = model.forward(params, moved, image, stop=2, **mode)
    assert jax.tree.map(int, partly)[1:] == (
        {"trunk": {"seen": 10}},
        {"exit": {"seen": 5}},
    )


def test_initialisation_is_pytorchs():
    """Section 3: weights and biases uniform in +-1 / sqrt(fan_in)."""
    params, _ = jax.jit(models.MODELS["cdkt_mnist"](10).init)(
        jax.random.key(0), jnp.zeros((1, *MNIST))
    )
    for stage, fan_in in zip(params, (25, 25 * 32, 1568, 512), strict=True):
        for leaf in stage["trunk"].values():
            size = np.abs(np.asarray(leaf)) * fan_in**0.5
            assert size.max() <= 1
            assert leaf.size < 30 or size.max() > 0.85
        kernel = np.asarray(stage["trunk"]["kernel"]) * fan_in**0.5
        np.testing.assert_allclose(kernel.std(), 3**-0.5, rtol=0.05)


@pytest.mark.parametrize("rate", [0.25, 0.4, 0.5])
def test_dropout_has_its_rate_and_no_bias(rate):
    """Section 3: a share `rate` is 0, the rest is scaled so that the mean stays."""
    ones = jnp.ones((64, 1001))
    out = stages.Dropout(rate).apply(
        {}, ones, train=True, rngs={"dropout": jax.random.key(0)}
    )
    out = np.asarray(out)
    kept = out[out != 0]
    # 64,064 draws: four standard deviations of the share are .008.
    assert abs((out == 0).mean() - rate) < 0.008
    np.testing.assert_allclose(kept, 1 / (1 - rate), rtol=1e-4)
    assert abs(out.mean() - 1) < 0.008 / (1 - rate)
    # Neighbours share a word of random bits: they must still be independent.
    both = ((out[:, :-1:2] == 0) & (out[:, 1::2] == 0)).mean()
    assert abs(both - rate**2) < 0.011


def test_dropout_is_off_in_eval_mode(small):
    """Section 1A: eval mode has no noise, train mode has."""
    model, params, stats, image = small

    @jax.jit
    def run(params, image, key):
        noisy, _ = model.forward(params, stats, image, train=True, key=key)
        return model.forward(params, stats, image, key=key)[0], noisy

    first, noisy = run(params, image, jax.random.key(2))
    second, other = run(params, image, jax.random.key(3))
    chex.assert_trees_all_equal(first, second)
    assert np.abs(first - noisy).max() > 1e-3
    assert np.abs(noisy - other).max() > 1e-3


@pytest.mark.parametrize("width", [6, 7])
def test_dropout_mask_does_not_depend_on_the_batch_size(width):
    """Section 2: padding a batch changes no example's noise."""
    rngs = {"dropout": jax.random.key(4)}
    large = jnp.ones((9, width))

    @jax.jit
    def apply(h):
        return stages.Dropout(0.5).apply({}, h, train=True, rngs=rngs)

    out = apply(large)
    for size in (1, 4):
        part = apply(large[:size])
        chex.assert_trees_all_equal(part, out[:size])
    assert len(np.unique(np.asarray(out), axis=0)) > 1
