"""Custom models of several stages, with exits, of any width, and of two functions."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from models import own, own_checks, stages

EXAMPLE = jax.ShapeDtypeStruct((2, 4), jnp.float32)
KEY = jax.random.key(0)


def examples(count=6):
    return jax.random.normal(jax.random.key(1), (count, 4))


def both(whole, parts, train=False):
    """Outputs of two models with initial values of one key, and whether these agree."""
    x, mode = examples(), {"train": train, "key": jax.random.key(2)}
    one, other = (jax.jit(model.init)(KEY, x) for model in (whole, parts))
    trees = [
        {k: v for stage in params for k, v in stage["trunk"].items()}
        for params, _ in (one, other)
    ]
    is_same = jax.tree.all(jax.tree.map(np.array_equal, *trees))
    outs = [m.forward(*v, x, **mode)[0] for m, v in ((whole, one), (parts, other))]
    return *outs, is_same


def test_a_sequential_becomes_stages():
    """One for each layer with parameters, drawn as the whole is."""
    seq = nn.Sequential(
        [jnp.sin, nn.Dense(5), nn.relu, nn.Dense(6), jnp.cos, nn.Dense(3)]
    )
    whole, parts = own.chain(seq), own.chain(seq, (), EXAMPLE)
    assert whole.stage_names == ("stage1",)
    assert parts.stage_names == ("stage1", "stage2", "stage3")
    assert parts is own.chain(nn.Sequential(seq.layers), (), EXAMPLE)
    assert parts.name == whole.name == "own_Sequential"
    expected, out, is_same = both(whole, parts)
    np.testing.assert_array_equal(out, expected)
    # As linen itself draws and computes
    key = jax.random.fold_in(jax.random.fold_in(KEY, 0), 0)
    theirs, _ = seq.init_with_output(key, examples())
    assert is_same and np.array_equal(theirs, expected)


def test_layers_get_the_mode():
    """Batch norms and dropouts of a Sequential are in the mode of the call."""
    layers = [nn.Dense(5), nn.BatchNorm(), nn.Dropout(0.5), nn.Dense(3)]
    parts = own.chain(nn.Sequential(layers), (), EXAMPLE)
    assert len(parts.stage_names) == 3
    params, stats = parts.init(KEY, examples())
    out, new = parts.forward(params, stats, examples(), train=True, key=KEY)
    assert not np.array_equal(out, parts.forward(params, stats, examples())[0])
    mean = new[1]["trunk"]["batch_stats"]["layers_1"]["mean"]
    assert new[0] == {} and np.abs(mean).max() > 0


class Told(nn.Module):
    """Adds 1 in train mode, which it takes for false unless it is told."""

    @nn.compact
    def __call__(self, h, is_training=False):
        return h + is_training


def nested(last):
    inner = nn.Sequential([nn.Dense(5), nn.Sequential([last, nn.relu])])
    return nn.Sequential([inner, last, nn.Dense(3)])


def test_layers_of_a_sequential_in_a_sequential_get_the_mode():
    """As deep as they are; names and draws are those of linen."""
    parts = own.chain(nested(Told()), (), EXAMPLE)
    assert len(parts.stage_names) == 2
    params, _ = given = parts.init(KEY, examples())
    key = jax.random.fold_in(jax.random.fold_in(KEY, 0), 0)
    variables = nested(Told()).init(key, examples())
    both = {name: one for part in params for name, one in part["trunk"].items()}
    chex.assert_trees_all_equal(both, variables["params"])
    for train in (False, True):
        out, _ = parts.forward(*given, examples(), train=train, key=KEY)
        wanted = nested(lambda h, n=int(train): h + n).apply(variables, examples())
        np.testing.assert_allclose(out, wanted, rtol=1e-6)


class Pair(nn.Module):
    """Gives two arrays, as a tuple or by name."""

    is_named: bool

    @nn.compact
    def __call__(self, h):
        return {"a": h, "b": 2 * h} if self.is_named else (h, 2 * h)


class Sum(nn.Module):
    """Takes two arrays, and the mode, which its field may fix."""

    is_training: bool | None = None

    @nn.compact
    def __call__(self, a, b, is_training=None):
        fixed = self.is_training, is_training
        return nn.Dense(3)(a + b) * nn.merge_param("is_training", *fixed)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_sequential_in_a_sequential_takes_several_arrays(is_named):
    """As in linen."""
    layers = [Pair(is_named), nn.Sequential([Sum(True), nn.relu])]
    model, plain = own.chain(nn.Sequential(layers)), nn.Sequential(layers)
    (params,), _ = variables = model.init(KEY, examples())
    found, _ = model.forward(*variables, examples())
    wanted = plain.apply({"params": params["trunk"]}, examples())
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    split = own.chain(
        nn.Sequential([nn.Dense(6), *layers, nn.Sequential([])]), (), EXAMPLE
    )
    assert len(split.stage_names) == 2
    assert split.forward(*split.init(KEY, examples()), examples())[0].shape == (6, 3)
    told = own.chain(nn.Sequential([Pair(is_named), nn.Sequential([Sum()])]))
    assert not told.forward(*told.init(KEY, examples()), examples())[0].any()


def test_what_stays_one_stage():
    """One layer with parameters, a Sequential in a list, and shared layers."""
    dense = nn.Dense(4)
    for given in (
        nn.Sequential([jnp.sin, nn.Dense(3)]),
        [nn.Sequential([dense, nn.Dense(3)])],
        nn.Sequential([dense, nn.relu, dense]),
        nn.Dense(3),
    ):
        assert own.chain(given, (), EXAMPLE).stage_names == ("stage1",)


@pytest.mark.parametrize("is_drawn", [True, False])
def test_a_sequential_of_nnx(is_drawn):
    """Drawn anew, or with the values of the module."""

    def make(rngs):
        layers = nnx.Linear(4, 5, rngs=rngs), nnx.relu, nnx.Dropout(0.5, rngs=rngs)
        return nnx.Sequential(*layers, nnx.Linear(5, 3, rngs=rngs))

    given = make if is_drawn else make(nnx.Rngs(0))
    whole, parts = own.chain(given), own.chain(given, (), EXAMPLE)
    assert parts.stage_names == ("stage1", "stage2")
    x = examples()
    outs = [m.forward(*m.init(KEY, x), x)[0] for m in (whole, parts)]
    np.testing.assert_array_equal(*outs)


class Net(nn.Module):
    """A chain with batch norm and dropout, in which functions stand between modules."""

    def setup(self):
        self.body, self.neck = nn.Dense(5), nn.Dense(4)
        self.norm, self.drop = nn.BatchNorm(momentum=0.5), nn.Dropout(0.5)
        self.head = nn.Dense(3)

    def __call__(self, x, train):
        x = self.norm(nn.relu(self.body(x)), use_running_average=not train)
        x = self.neck(self.drop(x, deterministic=not train))
        return self.head(nn.relu(x))


class Net2(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs):
        self.body, self.neck = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 4, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = self.neck(self.drop(self.norm(nnx.relu(self.body(x)))))
        return self.head(nnx.relu(x))


@pytest.mark.parametrize("given", [Net(), Net2])
def test_split_at_submodules(given):
    """The stages are the module: initial values, outputs, statistics, gradients."""
    whole = own.chain(given)
    parts = own.chain(given, ("head", "neck"), EXAMPLE)
    assert parts.stage_names == ("body", "neck", "head")
    expected, out, is_same = both(whole, parts)
    np.testing.assert_array_equal(out, expected)
    assert is_same
    params, stats = parts.init(KEY, examples())
    assert [set(one["trunk"]) for one in params] == [
        {"body", "norm"},
        {"neck"},
        {"head"},
    ]
    assert stats[0]["trunk"] and not stats[1] and not stats[2]

    def loss(params):
        out, new = parts.forward(params, stats, examples(), train=True, key=KEY)
        return (out**2).sum(), new

    grad, new = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((grad, new)))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grad[2]))
    assert jax.tree.structure(new) == jax.tree.structure(stats)


class Around(nn.Module):
    """Not a chain: a value passes beside the last module."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(3)(x)
        return nn.Dense(3)(jnp.sin(h)) + h


class Twice(nn.Module):
    """Its first module is called again at the end."""

    def setup(self):
        self.first, self.second = nn.Dense(4), nn.Dense(4)

    def __call__(self, x):
        return self.first(self.second(self.first(x)))


class Bare(nn.Module):
    """Has a parameter outside its submodules."""

    @nn.compact
    def __call__(self, x):
        bias = self.param("bias", nn.initializers.zeros, (3,))
        return nn.Dense(3)(nn.Dense(5)(x)) + bias


@pytest.mark.parametrize(
    "given, split, part",
    [
        (Around(), ("Dense_1",), "is not a chain there"),
        (Twice(), ("second",), "some parameters belong to two of the stages"),
        (Bare(), ("Dense_0",), "or to no submodule"),
        (Net(), ("tail",), "of body, norm, drop, neck, head"),
        (
            Net(),
            ("body",),
            "leaves one stage; name a submodule that is called",
        ),
        (Net2, ("tail",), "of body, norm, drop, neck, head"),
        ([nn.Dense(3)], ("Dense_0",), "splits one module, and model= is several"),
    ],
)
def test_what_cannot_be_split(given, split, part):
    """One line, with the way out."""
    with pytest.raises(ValueError, match=f"^split=.*{part}") as error:
        own.chain(given, split, EXAMPLE)
    assert "\n" not in str(error.value)


def test_stages_with_exits():
    """(name, body, exit): all exits are given, as of a built-in model."""
    stages = [("one", nn.Dense(5), nn.Dense(3)), ("two", nn.Dense(6), nn.Dense(3))]
    model, x = own.chain(stages), examples()
    assert model.has_exits and model.stage_names == ("one", "two")
    params, stats = model.init(KEY, x)
    assert [set(one) for one in params] == [{"trunk", "exit"}] * 2
    (first, second), _ = model.forward(params, stats, x)
    h = nn.Dense(5).apply({"params": params[0]["trunk"]}, x)
    np.testing.assert_allclose(first, h @ params[0]["exit"]["kernel"], atol=1e-5)
    assert second.shape == (6, 3)
    with pytest.raises(
        ValueError, match="some stages have an exit and others have none"
    ):
        own.chain([*stages, ("three", nn.Dense(3))])


def net(width, scaler=1.0):
    """Two layers, the first of them of any width."""
    hidden = math.ceil(8 * width)
    return [lambda rngs: nnx.Linear(4, hidden, rngs=rngs), nn.Dense(3)]


def test_a_function_of_the_width():
    """Narrower forms have leading slices."""
    model = own.chain(net, (), EXAMPLE)
    assert own.chain(net, (), EXAMPLE).name == model.name == "own_lambda_Dense"
    narrow = model.at_width(0.25, 0.5)
    shapes = [
        jax.tree.map(jnp.shape, one.init(KEY, examples())[0][1]["trunk"])
        for one in (model, narrow)
    ]
    assert shapes == [{"bias": (3,), "kernel": (n, 3)} for n in (8, 2)]


@pytest.mark.parametrize(
    "factory, part",
    [
        (lambda width: nn.Dense(int(4 / width)), r"the shape \[8\], expected at most"),
        (
            lambda width: [nn.Dense(3)] * (1 if width < 1 else 2),
            "makes other layers than at width=1",
        ),
        (lambda width: nn.Sequential([nn.Dense(8), nn.Dense(3)]), "nothing narrower"),
    ],
)
def test_what_is_no_narrower_form(factory, part):
    """Refused where it is made."""
    model = own.chain(factory, (), EXAMPLE)
    with pytest.raises(ValueError, match=f"^model: at width=0.5 .*{part}"):
        model.at_width(0.5)


@pytest.mark.parametrize("norm", [None, nn.LayerNorm])
def test_a_map_must_be_averaged(norm):
    """A slice of what reads a flattened map is of places, not of channels."""

    def of_width(width, is_flat):
        pool = (
            (lambda h: h.reshape(len(h), -1)) if is_flat else (lambda h: h.mean((1, 2)))
        )
        layers = [nn.Conv(math.ceil(6 * width), (3, 3)), *([norm()] if norm else [])]
        return nn.Sequential([*layers, jnp.tanh, pool, nn.Dense(3)])

    x = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype(np.float32)
    for is_flat in (False, True):
        forms = [own.chain(of_width(width, is_flat)) for width in (1.0, 0.5)]
        assert own_checks.flattens_maps(*forms, x) == is_flat


class Beside(nn.Module):
    """Two maps side by side: a slice of the next kernel is of the first alone."""

    width: int

    @nn.compact
    def __call__(self, h):
        return jnp.concatenate([nn.Dense(self.width)(h), nn.Dense(self.width)(h)], -1)


@pytest.mark.parametrize(
    "layer, is_same",
    [
        (lambda _: nn.relu, True),
        (lambda _: stages.Norm(), True),
        (lambda _: nn.GroupNorm(num_groups=None, group_size=1), True),
        (lambda _: nn.GroupNorm(num_groups=2), False),
        (lambda _: nn.LayerNorm(), False),
        (lambda _: nn.RMSNorm(), False),
        (lambda width: Beside(math.ceil(6 * width)), False),
        (lambda _: nn.Dropout(0.5, deterministic=True), True),
    ],
)
def test_zeros_around_a_narrower_form(layer, is_same):
    """Means over channels and concatenations see them."""

    def of_width(width):
        conv = nn.Conv(math.ceil(8 * width), (3, 3))
        layers = [conv, layer(width), jnp.tanh, lambda h: h.mean((1, 2)), nn.Dense(3)]
        return nn.Sequential(layers)

    x = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype(np.float32)
    forms = [own.chain(of_width(width)) for width in (1.0, 0.5)]
    assert own_checks.is_same_among_zeros(*forms, x) == is_same


@pytest.mark.parametrize("act", [own.chain, own.fingerprint])
def test_a_function_of_the_width_may_fail(act):
    """One line."""
    line = r"lambda>\(width=1\) fails \(.*division by zero"
    with pytest.raises(ValueError, match=line):
        act(lambda width: width / 0)


def init(key, x):
    return {"mlp/linear": {"w": jax.random.normal(key, (x.shape[-1], 3))}}


def plain(params, x):
    return x @ params["mlp/linear"]["w"]


def noisy(params, x, rng=None, is_training=False):
    assert (rng is not None) == is_training
    if rng is not None:
        x = x * jax.random.bernoulli(rng, 0.5, x.shape)
    return plain(params, x)


def test_a_pair_of_functions():
    """FedJAX's form: `init` with or without examples, `apply` with or without a key."""
    x = examples()
    model = own.chain((init, plain))
    params, stats = model.init(KEY, x)
    assert set(params[0]["trunk"]) == {"mlp|linear"} and stats == ({},)
    out, _ = model.forward(params, stats, x)
    np.testing.assert_allclose(
        out, x @ params[0]["trunk"]["mlp|linear"]["w"], rtol=1e-6
    )
    assert own.chain((init, plain)) is model and model.name == "own_plain"
    noise = own.chain((lambda key: init(key, jnp.ones((1, 4))), noisy))
    same, stats = noise.init(KEY, x)
    assert jax.tree.all(jax.tree.map(np.array_equal, same, params))
    np.testing.assert_array_equal(noise.forward(same, stats, x)[0], out)
    trained, _ = noise.forward(same, stats, x, train=True, key=KEY)
    assert not np.array_equal(trained, out)
    with pytest.raises(ValueError, match="init gives a list, expected a nested dict"):
        own.chain((lambda key, x: [x], plain)).init(KEY, x)
    named = own.chain([("a", (init, plain)), ("b", nn.Dense(2))])
    assert named.stage_names == ("a", "b")
    assert own.fingerprint((init, plain)) != own.fingerprint((init, noisy))
