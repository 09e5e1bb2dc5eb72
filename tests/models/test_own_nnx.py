"""A user's own nnx modules as a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from models import own, own_checks


class Net(nnx.Module):
    """With statistics, dropout, a list of modules and a constant."""

    def __init__(self, rngs, rate=0.5):
        self.layers = nnx.List([nnx.Linear(4, 5, rngs=rngs)])
        self.norm = nnx.BatchNorm(5, momentum=0.5, rngs=rngs)
        self.drops = nnx.List([nnx.Dropout(rate, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(5, 3, rngs=rngs)
        self.factor = jnp.array([1.0, 2.0, 3.0])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        for drop in self.drops:
            x = drop(x)
        for _ in range(2):
            self.sow(nnx.Intermediate, "seen", x)
        return self.head(x) * self.factor


class Twin(nn.Module):
    """The same net in linen, without dropout."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(5, name="first")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5, name="norm")(x)
        return nn.Dense(3, name="head")(x) * jnp.array([1.0, 2.0, 3.0])


def examples(count=6):
    return np.random.default_rng(1).normal(size=(count, 4)).astype(np.float32)


def test_it_is_the_module_linen_has():
    """Outputs, statistics and gradients, with padding, in both modes."""
    mine = own.chain(Net(nnx.Rngs(0), rate=0.0))
    theirs = own.chain(Twin())
    x, key = examples(), jax.random.key(2)
    params, stats = jax.jit(mine.init)(key, x)
    held = params[0]["trunk"]
    assert set(held) == {"layers", "norm", "head"} and set(held["layers"]) == {"0"}
    same = {"first": held["layers"]["0"], "norm": held["norm"], "head": held["head"]}
    same_stats = {"batch_stats": {"norm": stats[0]["trunk"]["norm"]}}
    mask = np.arange(6) < 4
    for train in (True, False):
        mode = {"train": train, "key": key, "sample_mask": mask}

        def loss(params, stats, model, mode=mode):
            out, new = model.forward(({"trunk": params},), stats, x, **mode)
            return (out[:4] ** 2).sum(), (out, new)

        slope = jax.jit(jax.grad(loss, has_aux=True), static_argnames="model")
        grad, (out, new) = slope(held, stats, mine)
        wanted, (expected, moved) = slope(same, ({"trunk": same_stats},), theirs)
        np.testing.assert_allclose(out[:4], expected[:4], atol=1e-6)
        np.testing.assert_allclose(
            grad["layers"]["0"]["kernel"], wanted["first"]["kernel"], atol=1e-5
        )
        moved = moved[0]["trunk"]["batch_stats"]["norm"]
        for name, leaf in new[0]["trunk"]["norm"].items():
            np.testing.assert_allclose(leaf, moved[name], atol=1e-6)
            assert np.array_equal(leaf, stats[0]["trunk"]["norm"][name]) != train


def test_a_module_is_where_all_seeds_start():
    """A class is drawn by seed. Nothing that was given is changed."""
    module = Net(nnx.Rngs(0))
    before = str(nnx.state(module))
    model, x = own.chain(module), examples()
    one, other = (model.init(jax.random.key(k), x) for k in (0, 1))
    assert jax.tree.all(jax.tree.map(np.array_equal, one, other))
    np.testing.assert_array_equal(
        one[0][0]["trunk"]["head"]["kernel"], module.head.kernel[...]
    )
    model.forward(*one, x, train=True, key=jax.random.key(2))
    assert str(nnx.state(module)) == before and type(module.norm) is nnx.BatchNorm
    assert module.norm.use_running_average is False

    drawn = own.chain(Net)
    one, other = (drawn.init(jax.random.key(k), x) for k in (0, 1))
    kernels = [params[0]["trunk"]["head"]["kernel"] for params, _ in (one, other)]
    assert not np.array_equal(*kernels)
    assert own.chain(Net) is drawn and own.chain(module) is model
    assert own.chain(lambda rngs: Net(rngs, rate=0.1)) is not drawn
    module.head.bias[...] += 1.0
    assert own.chain(module) is not model


def test_draws_are_by_key_and_place():
    """Each dropout draws its own, an example's draws do not depend on padding."""
    model, x = own.chain(Net), examples(4)
    variables = jax.jit(model.init)(jax.random.key(0), x)

    @jax.jit
    def train(x, key, mask=None):
        key = jax.random.key(key)
        return model.forward(*variables, x, train=True, key=key, sample_mask=mask)[0]

    assert np.array_equal(train(x, 0), train(x, 0))
    assert not np.array_equal(train(x, 0), train(x, 1))
    padded = np.concatenate([x, x])
    mask = np.arange(8) < 4
    np.testing.assert_allclose(train(padded, 0, mask)[:4], train(x, 0), atol=1e-5)
    # Of two dropouts with the same draws the second would drop nothing more.
    stage = own._stage(lambda rngs: nnx.Sequential(*Net(rngs).drops))
    ones = jnp.ones((40, 100))
    rngs = {"dropout": jax.random.key(0)}
    out, _ = stage.apply(
        {"params": {}}, ones, sample_mask=None, train=True, rngs=rngs, mutable=()
    )
    assert abs((out > 0).mean() - 0.25) < 0.05


class Asks(nnx.Module):
    """Takes what its call names, and hands keys to its dropout."""

    def __init__(self, *, rngs):
        self.head = nnx.Linear(4, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x, train, sample_mask, rngs):
        x = self.drop(x, deterministic=not train, rngs=rngs)
        return self.head(x) * sample_mask[:, None]


def test_a_call_gets_what_it_names():
    """As a linen module does, and `rngs` too."""
    model, x = own.chain(Asks), examples()
    variables = jax.jit(model.init)(jax.random.key(0), x)
    mask, key = np.arange(6) < 3, jax.random.key(3)
    run = jax.jit(model.forward, static_argnames="train")
    eval_out, _ = run(*variables, x, sample_mask=mask)
    out, _ = run(*variables, x, sample_mask=mask, train=True, key=key)
    out, eval_out = np.asarray(out), np.asarray(eval_out)
    assert not out[3:].any() and not eval_out[3:].any()
    assert not np.array_equal(out[:3], eval_out[:3])


def test_many_clients_at_once():
    """Under vmap, jit and grad, each client as alone."""
    model, x = own.chain(Net), examples()

    def step(params, stats, x, key):
        def loss(params):
            out, new = model.forward(params, stats, x, train=True, key=key)
            return (out**2).mean(), new

        return jax.grad(loss, has_aux=True)(params)

    keys = jax.random.split(jax.random.key(5), 3)
    init = jax.jit(model.init)
    each = [init(key, x) for key in keys]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    xs = np.stack([x, 2 * x, -x])
    many = jax.jit(jax.vmap(step))(*stacked, xs, keys)
    alone = jax.jit(step)(*each[1], xs[1], keys[1])
    assert jax.tree.leaves(alone)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a[1], b, atol=1e-5)


class Stuck(nnx.Module):
    """Ignores the mode."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(x, use_running_average=False))


class Noisy(Stuck):
    """Drops in eval mode too."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(x, deterministic=False))


class Late(Stuck):
    """Takes the batch's mean, but only once statistics have moved."""

    def __call__(self, x):
        known = (self.norm.mean[...] != 0).any()
        return self.head(jnp.where(known, x - x.mean(0), self.norm(x)))


@pytest.mark.parametrize("made", [Stuck, Noisy, Late, lambda rngs: Late(rngs)])
def test_the_wrong_mode_is_found(made):
    """Also where initial statistics would hide it."""
    x = np.asarray(examples())
    assert "other examples" in own_checks.depends_on_neighbours(own.chain(made), x)
    assert own_checks.depends_on_neighbours(own.chain(Net), x) == ""


def test_a_fingerprint_is_of_values_and_code():
    """An edited value, rate or class is another run."""
    one = own.fingerprint(Net(nnx.Rngs(0)))
    assert one == own.fingerprint(Net(nnx.Rngs(0)))
    others = [
        Net(nnx.Rngs(1)),
        Net(nnx.Rngs(0), rate=0.4),
        Net,
        lambda rngs: Net(rngs, 0.1),
        [Net],
    ]
    prints = [one, *map(own.fingerprint, others), own.fingerprint(Net, ("head",))]
    assert len(set(prints)) == len(prints)
    assert " at 0x" not in str(prints)


class Broken(nnx.Module):
    def __init__(self, features, rngs):
        del features


@pytest.mark.parametrize(
    "given, part",
    [
        (Broken, r"Broken\(rngs\) fails \(.*argument"),
        (lambda rngs: 3, r"lambda>\(rngs\) gives a int, expected an nnx module"),
        (lambda: 3, r"lambda>\(rngs\) fails"),
        (nn.Dense, r"got the linen class Dense; give a module, Dense\(\.\.\.\)"),
    ],
)
def test_what_makes_no_module(given, part):
    """One line."""
    with pytest.raises(ValueError, match=f"^model: .*{part}") as error:
        own.chain(given)
    assert "\n" not in str(error.value)


def test_stages_share_no_variables():
    """Their copies would be trained apart."""

    def linear(outputs):
        return nnx.Linear(6, outputs, rngs=nnx.Rngs(0))

    body, head = linear(6), linear(3)
    for given, line in (
        (
            [("one", body), ("two", nnx.Sequential(nnx.tanh, body)), ("three", head)],
            "stage two has variables of stage one, and",
        ),
        (
            [("one", body, head), ("two", linear(6), head)],
            "the exit of stage two has variables of the exit of stage one",
        ),
        (
            [("one", body, nnx.Sequential(body, head)), ("two", linear(6), linear(3))],
            "the exit of stage one has variables of stage one,",
        ),
    ):
        with pytest.raises(ValueError, match=line):
            own.chain(given)
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))  # a random stream is nobody's
    first, second = (nnx.Sequential(linear(6), drop) for _ in range(2))
    assert len(own.chain([first, second, head]).stage_names) == 3
