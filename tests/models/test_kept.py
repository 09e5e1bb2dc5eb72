"""What a CPU keeps is the same function, and is not computed again."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from fedjax_pfl import execution
from models import kept, resnet


def _total(h, keep):
    """A chain of four residual blocks, in which a product reads each sum."""
    matrix = jnp.eye(len(h)) + 0.1
    for factor in (0.5, 0.7, 0.9, 1.1):
        h = keep(jax.nn.relu(jnp.tensordot(factor * matrix, h, 1) + h))
    return (h**3).sum()


def test_a_kept_chain_is_not_computed_again():
    """XLA's own program has a relu more often than the chain has, that one once."""
    h = jnp.ones((4, 8, 8, 300))
    assert h.nbytes >= kept.BYTES

    def maxima(keep):
        lowered = jax.jit(jax.grad(lambda h: _total(h, keep))).lower(h)
        return lowered.compile().as_text().count(" maximum(")

    assert maxima(kept.kept) <= 4 < maxima(lambda h: h)


def test_kept_is_the_identity(monkeypatch):
    """With its derivatives in both directions, also of several clients."""
    monkeypatch.setattr(kept, "BYTES", 0)
    h = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 4, 5)), jnp.float32)

    def all_of(keep):
        def one(h, slope):
            moved = jax.jvp(lambda h: _total(h, keep), (h,), (slope,))
            return moved, jax.jvp(jax.grad(lambda h: _total(h, keep)), (h,), (slope,))

        return jax.jit(jax.vmap(one))(h, jnp.cos(h))

    chex.assert_trees_all_close(all_of(kept.kept), all_of(lambda h: h), rtol=1e-6)
    np.testing.assert_array_equal(kept.kept(h), h)  # outside of any program


@pytest.mark.parametrize(
    ("platform", "batch", "keeps"),
    [("cpu", 16, True), ("cpu", 15, False), ("gpu", 16, False)],
)
def test_large_blocks_are_kept_on_a_cpu(platform, batch, keeps):
    """And their gradients: 8x8 maps of 64 channels have 16 KiB an image."""
    block, x = resnet.Residual(64), jnp.ones((batch, 8, 8, 64))
    assert kept.BYTES == 16 * 64 * 8 * 8 * 4

    def total(x):
        return block.init_with_output(jax.random.key(0), x)[0].sum()

    with execution.traced_in(execution.Setting(platform)):
        forward, both = (
            str(jax.make_jaxpr(fn)(x)).count("= kept")
            for fn in (total, jax.grad(total))
        )
    assert forward == 3 * keeps  # two norms and the block
    assert both == 2 * forward


def test_a_resnet_is_exported_for_any_batch():
    """By a program for one core too, where patches go by rows."""
    model = resnet.resnet18(10, 0.25)
    (batch,) = export.symbolic_shape("batch")
    image = jax.ShapeDtypeStruct((batch, 8, 8, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 8, 8, 3)))

    def answers(params, stats, image):
        with execution.traced_in(execution.Setting("cpu", one_core=True)):
            return model.forward(params, stats, image)[0]

    made = export.export(jax.jit(answers))(*variables, image)
    assert made.out_avals[0].shape == (batch, 10)
