"""The masked language models: sizes, a forward pass in numpy, dropout, refusals."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from fedjax_pfl import shapes, types
from models import counts, mixed, stages, text
from tests.algorithms import plain

V, D, T = 11, 16, 5


@pytest.fixture(scope="module")
def net():
    return text.with_exits(V, D, 2)


@pytest.fixture(scope="module")
def words():
    """int32[3, T] with the mask among them."""
    return jnp.array(np.random.default_rng(0).integers(0, V + 1, (3, T)), jnp.int32)


@pytest.fixture(scope="module")
def variables(net, words):
    """Numbers of which none is zero or one."""
    made = types.Variables(*net.init(jax.random.key(0), words))
    return plain.perturbed(made, size=0.2)


@pytest.mark.parametrize(
    "words, length, width, levels",
    [
        (33_279, 64, 1.0, (35_986_943, 54_900_734, 73_814_525, 92_728_316)),
        (3_577, 32, 0.25, (1_040_121, 1_617_906, 2_195_691, 2_773_476)),
    ],
)
def test_parameters_by_level(words, length, width, levels):
    """Section 3.5, and a quarter of the width."""
    found = counts.levels(models.make("depth_masked_lm", words, width), (length,))
    assert tuple(level.parameters for level in found) == levels
    assert not any(level.buffers for level in found)


def test_parameters_with_one_exit():
    """The embedding is a stage by itself, and so is the last layer."""
    found = counts.stages(models.make("masked_lm", 33_279), (64,))
    parameters = [stage.count.parameters for stage in found]
    layers = [1_577_984] * 4
    assert parameters == [17_073_152, *layers, 263_680 + 17_072_127]
    assert sum(parameters) == 40_720_895


def test_macs():
    """Affine maps, products of attention and norms by hand, for T words."""
    found = counts.stages(text.with_exits(V, D, 2), (T,))
    norm, affine = 2 * T * D, T * (D * D + D)
    layer = 6 * affine + 2 * T * T * D + 2 * norm
    head = affine + norm + T * (D * V + V)
    assert found[1].count.macs == layer + head
    assert found[0].count.macs == layer + head + norm + T * D
    assert [stage.output for stage in found] == [(T, D)] * 2


def norm(h, p):
    centred = h - h.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(h.var(-1, keepdims=True) + 1e-5)
    return scaled * p["scale"] + p["bias"]


def affine(h, p):
    return h @ p["kernel"] + p["bias"]


gelu = np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2)


def attention(h, p):
    """Eight heads, each a weighted mean of its values."""

    def heads(name):
        return (
            np.einsum("btd,dhk->bhtk", h, p[name]["kernel"]) + p[name]["bias"][:, None]
        )

    query, key, value = map(heads, ("query", "key", "value"))
    weight = plain.softmax(
        np.einsum("bhtk,bhsk->bhts", query, key) / math.sqrt(query.shape[-1])
    )
    seen = np.einsum("bhts,bhsk->bthk", weight, value)
    return np.einsum("bthk,hkd->btd", seen, p["out"]["kernel"]) + p["out"]["bias"]


def encoder(h, p):
    h = norm(h + attention(h, p["attention"]), p["norm1"])
    return norm(h + affine(gelu(affine(h, p["dense1"])), p["dense2"]), p["norm2"])


def head(h, p):
    return affine(norm(gelu(affine(h, p["dense"])), p["norm"]), p["words"])


def test_a_forward_pass_by_hand(net, variables, words):
    """Embedding, layers and exits of the specification's 3.5 in float64."""
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, variables.params)
        out, stats = jax.jit(net.forward)(params, variables.stats, words)
        stem = params[0]["stem"]
        h = norm(stem["words"][np.asarray(words)] + stem["positions"], stem["norm"])
        for stage, logits in zip(params, out, strict=True):
            h = encoder(h, stage["trunk"])
            np.testing.assert_allclose(logits, head(h, stage["exit"]), atol=1e-9)
    assert stats == ({}, {})


def test_every_dropout_differs(net, variables, words):
    """In a layer, between layers and in the embedding; none without `train`."""
    key = jax.random.key(1)

    def run(**mode):
        return net.forward(*variables, words, **mode)[0]

    still, moved = run(), run(train=True, key=key)
    assert plain.differs(still, moved) and not plain.differs(
        moved, run(train=True, key=key)
    )
    assert plain.differs(moved, run(train=True, key=jax.random.key(2)))
    chained = text.with_exits(V, D, 3)
    assert chained.stage_names == ("stage1", "stage2", "stage3")
    # A truncated model draws what the whole one draws, whatever rows follow.
    cut = variables.params[:1], variables.stats[:1]
    (first,), _ = types.truncated(net, 1).forward(*cut, words[:2], train=True, key=key)
    np.testing.assert_allclose(first, moved[0][:2], atol=1e-5)


def test_layers_have_keys_of_their_own():
    """The numbers of parts do not meet: of the first exit, of the second trunk."""
    seen = []

    class Note(stages.nn.Module):
        @stages.nn.compact
        def __call__(self, h, *, sample_mask=None, train=False):
            self.param("w", lambda key: jnp.zeros(()))
            seen.append(jax.random.key_data(self.make_rng("dropout")).tolist())
            return h

    names = ("a", "b")
    net = stages.chain(
        "keys", [(n, Note()) for n in names], {n: Note() for n in names}, stem=Note()
    )
    like = tuple(
        {part: {"w": jnp.zeros(())} for part in stage}
        for stage in ({"stem", "trunk", "exit"}, {"trunk", "exit"})
    )
    net.forward(like, ({}, {}), jnp.ones((1, 1)), train=True, key=jax.random.key(0))
    assert len(seen) == 5 == len({tuple(one) for one in seen})


def test_in_bfloat16(net, variables, words):
    """Layers compute in bfloat16, what comes out is float32 and nearly the same."""
    lowered = mixed.in_bfloat16(net, rounds=True)
    out, _ = lowered.forward(*variables, words)
    exact, _ = net.forward(*variables, words)
    assert {one.dtype for one in out} == {jnp.dtype("float32")}
    apart = max(float(abs(a - b).max()) for a, b in zip(out, exact, strict=True))
    assert 1e-4 < apart < 0.3


@pytest.mark.parametrize(
    "width, shape, words",
    [(0.3, (T,), "8 heads"), (1.0, (4, 4, 1), "rows of tokens")],
)
def test_refused(width, shape, words):
    assert models.OF_TEXT
    for name in models.OF_TEXT:
        model = models.make(name, V, width)
        with pytest.raises(stages.UnfitError, match=words):
            shapes.variables(model, shape)
