"""Masked language models of rows of tokens: encoders with one exit or one a layer.

DepthFL's Transformer for WikiText-2 (Kim et al., ICLR 2023, Table 13: four layers,
width 512 in and between them, eight heads, dropout .2) has the layers of HeteroFL's
code (https://openreview.net/forum?id=TNkPBBYFkXg): norms follow the sums, the
activation is GELU, positions are learned, and attention sees the whole row. The paper
has no code for the exits. Here each is HeteroFL's decoder with its own output matrix,
since an exit sees its own stage only. Initial values are PyTorch's and drawn for each
layer, while HeteroFL's layers begin as copies. Tokens are 0..V-1, and the input has V
for a hidden word (`augment.mask_words`).
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_pfl import types
from models import stages

WIDTH, HEADS, LAYERS, DROPOUT = 512, 8, 4, 0.2


def _dense(features: int, fan_in: int, name: str, dtype: jnp.dtype) -> nn.Dense:
    """An affine map of the last axis with PyTorch's initial values."""
    init = stages.torch_uniform(fan_in)
    return nn.Dense(features, kernel_init=init, bias_init=init, dtype=dtype, name=name)


def _norm(name: str, dtype: jnp.dtype) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=stages.NORM_EPSILON, dtype=dtype, name=name)


class Embedding(nn.Module):
    """Tokens int32[B, T] as f32[B, T, D]: words and learned positions, then a norm.

    `num_words` is V, and there is one more row for hidden words.
    """

    num_words: int
    width: int

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        normal = nn.initializers.normal(1.0)
        words = self.param("words", normal, (self.num_words + 1, self.width))
        positions = self.param("positions", normal, (h.shape[1], self.width))
        out = jnp.take(words, h, axis=0, mode="clip") + positions
        return stages.Dropout(DROPOUT)(_norm("norm", out.dtype)(out), train=train)

    @nn.nowrap
    def macs(self, given, out):
        return 3 * out.size


class Encoder(nn.Module):
    """A layer f32[B, T, D]: attention and two affine maps, each with sum and norm."""

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        width, dtype = h.shape[-1], h.dtype
        dropout, init = stages.Dropout(DROPOUT), stages.torch_uniform(width)
        seen = nn.MultiHeadDotProductAttention(
            HEADS,
            kernel_init=init,
            bias_init=init,
            dtype=dtype,
            force_fp32_for_softmax=dtype == jnp.bfloat16,
            name="attention",
        )(h)
        h = _norm("norm1", dtype)(h + dropout(seen, train=train))
        out = nn.gelu(_dense(width, width, "dense1", dtype)(h), approximate=False)
        out = _dense(width, width, "dense2", dtype)(dropout(out, train=train))
        return _norm("norm2", dtype)(h + dropout(out, train=train))

    @nn.nowrap
    def macs(self, given, out):
        _, length, width = out.shape
        # Six affine maps, the products of attention, and two norms
        return out.size * (6 * (width + 1) + 2 * length + 4)


class Head(nn.Module):
    """Logits f32[B, T, V]: an affine map with GELU and norm, and one to all words."""

    num_words: int

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        width, dtype = h.shape[-1], h.dtype
        h = nn.gelu(_dense(width, width, "dense", dtype)(h), approximate=False)
        h = _norm("norm", dtype)(h)
        return _dense(self.num_words, width, "words", dtype)(h)

    @nn.nowrap
    def macs(self, given, out):
        width = given.shape[-1]
        return given.size * (width + 3) + out.size * (width + 1)


def _of_tokens(model: types.Model, width: int) -> types.Model:
    """The model with an `init` that refuses other examples and other widths."""

    def init(key: jax.Array, x: jax.Array) -> tuple[types.Params, types.Stats]:
        if width % HEADS:
            raise stages.UnfitError(
                f"has a width of {width}, which {HEADS} heads do not divide; "
                "--model_width is a factor on 512"
            )
        if x.ndim != 2:
            raise stages.UnfitError("needs rows of tokens")
        return model.init(key, x)

    one = model.one_exit and _of_tokens(model.one_exit, width)
    return model._replace(init=init, takes="tokens", one_exit=one)


def depth_masked_lm(num_classes: int, width: float = 1.0) -> types.Model:
    """A masked language model with an exit after each of its four layers."""
    return with_exits(num_classes, stages.scaling(width)(WIDTH), LAYERS)


def with_exits(num_words: int, wide: int, num_layers: int) -> types.Model:
    """`depth_masked_lm` of any width D and number of layers."""
    names = [f"stage{number}" for number in range(1, num_layers + 1)]
    model = stages.chain(
        "depth_masked_lm",
        [(name, Encoder()) for name in names],
        {name: Head(num_words) for name in names},
        stem=Embedding(num_words, wide),
    )
    return _of_tokens(model, wide)


def masked_lm(num_classes: int, width: float = 1.0) -> types.Model:
    """A masked language model of four layers with one exit."""
    return with_one_exit(num_classes, stages.scaling(width)(WIDTH), LAYERS)


def with_one_exit(num_words: int, wide: int, num_layers: int) -> types.Model:
    """`masked_lm` of any width D and number of layers."""
    layers = [(f"layer{number}", Encoder()) for number in range(1, num_layers + 1)]
    embedding, head = Embedding(num_words, wide), Head(num_words)
    model = stages.chain(
        "masked_lm", [("embedding", embedding), *layers, ("head", head)]
    )
    return _of_tokens(model, wide)
