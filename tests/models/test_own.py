"""A user's own linen modules as a model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from models import own, own_linen


class Body(nn.Module):
    """With statistics in flax's own collection, and dropout."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(5)(x.reshape(len(x), -1))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dropout(0.5, deterministic=not train)(nn.relu(x))


class Masked(nn.Module):
    """Takes the mask of the real samples."""

    @nn.compact
    def __call__(self, x, sample_mask=None):
        mask = jnp.ones(len(x), bool) if sample_mask is None else sample_mask
        return nn.Dense(2)(x) * mask[:, None]


def test_stages_are_the_modules():
    """Parameters, statistics and outputs are those of the modules themselves."""
    body, head = Body(), nn.Dense(3)
    model = own.chain([("body", body), ("head", head)])
    assert model.stage_names == ("body", "head") and not model.has_exits
    x = jax.random.normal(jax.random.key(1), (4, 2, 2, 1))
    params, stats = model.init(jax.random.key(0), x)
    out, same = model.forward(params, stats, x)
    variables = {"params": params[0]["trunk"], **stats[0]["trunk"]}
    h = body.apply(variables, x, train=False)
    expected = head.apply({"params": params[1]["trunk"]}, h)
    np.testing.assert_array_equal(out, expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, same, stats))

    key = jax.random.key(2)
    trained, moved = model.forward(params, stats, x, train=True, key=key)
    assert jax.tree.structure(moved) == jax.tree.structure(stats)
    before, after = (
        one[0]["trunk"]["batch_stats"]["BatchNorm_0"]["mean"] for one in (stats, moved)
    )
    batch = nn.Dense(5).apply(
        {"params": params[0]["trunk"]["Dense_0"]}, x.reshape(4, -1)
    )
    np.testing.assert_allclose(after, (before + batch.mean(0)) / 2, rtol=1e-5)
    other, _ = model.forward(params, stats, x, train=True, key=jax.random.key(3))
    assert not np.array_equal(trained, other)


def test_what_a_module_names_it_gets():
    """`sample_mask` here; `nn.Dense` takes neither it nor `train`."""
    model = own.chain([Masked(), nn.Dense(2, use_bias=False)])
    x, mask = jnp.ones((3, 4)), jnp.array([True, False, True])
    variables = model.init(jax.random.key(0), x)
    out, _ = model.forward(*variables, x, sample_mask=mask)
    assert not out[1].any() and out[0].any()


@pytest.mark.parametrize(
    "module", [nn.Dropout(0.5), nn.BatchNorm(), nn.BatchNorm(use_running_average=True)]
)
def test_modes_of_other_names(module):
    """linen's own layers as stages, told once, by the constructor or by us."""
    model = own.chain([module, nn.Dense(2)])
    x = jax.random.normal(jax.random.key(1), (3, 4))
    variables = model.init(jax.random.key(0), x)
    first, _ = model.forward(*variables, x)
    out, _ = model.forward(*variables, x, train=True, key=jax.random.key(2))
    is_fixed = getattr(module, "use_running_average", None) is True
    assert np.array_equal(first, out) == is_fixed


class Kept(nn.BatchNorm):
    """A batch norm of one's own, whose calls are left as they are."""

    @nn.compact
    def __call__(self, x, train=False):
        return x + self.param("shift", nn.initializers.ones, x.shape[-1:])


class Normed(nn.Module):
    """Batch norm as flax has it, of vectors and of maps, one of them masked by hand."""

    @nn.compact
    def __call__(self, x, train, sample_mask):
        norm = {"use_running_average": not train, "momentum": 0.5}
        rows = nn.BatchNorm(**norm)(x.reshape(-1, *x.shape[2:]))
        h = Kept()(nn.BatchNorm(**norm)(nn.Conv(3, (2, 2))(rows.reshape(x.shape))))
        h = nn.Dense(5)(h.reshape(len(h), -1))
        h = nn.BatchNorm(**norm)(h, mask=sample_mask[:, None])
        return nn.Dense(2)(nn.BatchNorm(**norm)(h))


def test_batch_norm_counts_real_samples():
    """Padding moves neither what real samples get nor the running statistics."""
    model = own.chain(Normed())
    x = np.random.default_rng(1).normal(size=(5, 4, 4, 1)).astype(np.float32)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    train = jax.jit(functools.partial(model.forward, *variables, train=True))
    out, stats = train(x, key=jax.random.key(2))
    padded = np.concatenate([x, 100 * x[:3]])
    more, same = train(padded, sample_mask=jnp.arange(8) < 5, key=jax.random.key(2))
    np.testing.assert_allclose(more[:5], out, atol=1e-5)
    for a, b in zip(jax.tree.leaves(stats), jax.tree.leaves(same), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    nobody, _ = train(padded, sample_mask=jnp.zeros(8, bool), key=jax.random.key(2))
    assert np.isfinite(nobody).all()


class Fields(nn.Module):
    """A field and a method of a mode's name are no answer of the constructor's."""

    train: bool = True
    deterministic: bool = True

    def training(self):
        """Something else."""

    @nn.compact
    def __call__(self, x, deterministic, training, train=None):
        modes = jnp.array([deterministic, training, train], x.dtype)
        return nn.Dense(2)(x), modes


def test_fields_of_a_modes_name():
    """What `__call__` names is passed."""
    stage, x = own_linen.Stage(Fields()), jnp.ones((3, 4))
    _, variables = stage.init_with_output(jax.random.key(0), x)
    for train in (False, True):
        given = {"sample_mask": jnp.ones(3, bool), "train": train, "rngs": {}}
        (_, modes), _ = stage.apply(variables, x, **given)
        assert modes.tolist() == [not train, train, train]


def test_equal_modules_are_one_model():
    """So that programs are shared; a module that holds a list has no hash."""
    assert own.chain(nn.Dense(3)) is own.chain(nn.Dense(3))
    assert own.chain(nn.Dense(3)) is not own.chain(nn.Dense(4))
    assert own.chain(nn.Sequential([nn.Dense(3)])).stage_names == ("stage1",)


@pytest.mark.parametrize(
    "given, part",
    [
        (3, "got a int"),
        ([nn.Dense(3), "mlp"], "got a str"),
        ([], "different names, got \\[\\]"),
        ([("a", nn.Dense(3)), ("a", nn.Dense(3))], "different names"),
        ([("a", "b", nn.Dense(3))], "got a str"),
    ],
)
def test_what_is_no_model(given, part):
    """One line."""
    with pytest.raises(ValueError, match=f"^model: expected .*{part}"):
        own.chain(given)
