"""Stages (linen modules) and the chain that makes a Model of them.

A stage is called as `stage(h, sample_mask=, train=)` and may own the collections
`params` and `stats`. Images travel between stages as [B, H, W, C]; inside, modules work
with the batch last, where patches are contiguous copies, pooling vectorises and a
channel's values are neighbours, and XLA cancels the transposes between them. A module
that computes says in `macs` what it costs itself; see `counts`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_pfl import types

NORM_EPSILON = 1e-5


def torch_uniform(fan_in: int) -> nn.initializers.Initializer:
    """PyTorch's default for weights and biases: uniform in +-1 / sqrt(fan_in)."""
    bound = fan_in**-0.5

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def he_normal(fan_out: int) -> nn.initializers.Initializer:
    """Normal of variance 2 / fan_out."""
    return nn.initializers.normal((2 / fan_out) ** 0.5)


def _initializers(name: str, fan_in: int, fan_out: int):
    """Of a kernel and a bias; see `Conv`."""
    if name == "torch":
        return torch_uniform(fan_in), torch_uniform(fan_in)
    if name == "he":
        return he_normal(fan_out), nn.initializers.zeros
    return nn.initializers.lecun_normal(), nn.initializers.zeros


def scaling(width: float, rate: float = 1.0) -> Callable[[int], int]:
    """Hidden channels of a model of `--model_width` from those of width 1.

    Args:
        width: `--model_width`.
        rate: Of a narrower form: so much of the model's channels, rounded up.
    """
    # Thirds of three are one, whatever floats say.
    return lambda features: math.ceil(rate * max(1, round(features * width)) - 1e-9)


def widths(made: Callable[..., types.Model], rate: float) -> Callable[..., types.Model]:
    """The `at_width` of a model; see `types.Model`.

    Args:
        made: `(rate, scaler) -> Model`.
        rate: Of the model that is to have it.
    """

    def at_width(more: float, scaler: Any = 1.0) -> types.Model:
        return made(rate * more, scaler)

    return at_width


def batch_last(h: jax.Array) -> jax.Array:
    """[B, H, W, C] -> [C, H, W, B], and back; [B, D] -> [D, B]."""
    return jnp.swapaxes(h, 0, -1)


def windows(
    h: jax.Array, side: int, stride: int, padding: str, fill: float = 0.0
) -> Iterator[jax.Array]:
    """What each place of a `side` x `side` window sees, [C, H', W', B] each.

    `SAME` is PyTorch's padding (side - 1) // 2 for odd sides, also with a stride; an
    even side has one more at the end.

    Args:
        h: f32[C, H, W, B].
        side: Of the window.
        stride: Between windows.
        padding: `SAME` or `VALID`.
        fill: What the padding holds.
    """
    if padding == "SAME":
        pads = ((side - 1) // 2, side // 2)
        h = jnp.pad(h, ((0, 0), pads, pads, (0, 0)), constant_values=fill)
    height, width = h.shape[1] - side + 1, h.shape[2] - side + 1
    for i in range(side):
        for j in range(side):
            yield h[:, i : i + height : stride, j : j + width : stride]


class Dropout(nn.Module):
    """Inverted dropout whose mask takes 16 random bits a value instead of 32.

    Attributes:
        rate: Probability of 0, a multiple of 2^-16 after rounding.
    """

    rate: float

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        if not train or not self.rate:
            return h
        keep = round((1 - self.rate) * 2**16)
        # One word for two values; an example's words never depend on the batch size.
        width = math.prod(h.shape[1:])
        words = jax.random.bits(self.make_rng("dropout"), (len(h), -(-width // 2)))
        halves = jnp.stack([words & 0xFFFF, words >> 16], axis=-1)
        mask = (halves.reshape(len(h), -1)[:, :width] < keep).reshape(h.shape)
        return jnp.where(mask, h * (2**16 / keep), 0)


class Norm(nn.Module):
    """Batch norm with running statistics, over the real samples of a batch.

    Train mode normalises by the batch, eval mode by the running mean and variance. The
    running ones move by a tenth towards the batch's, the variance unbiased, as
    PyTorch's with its momentum of .1; fewer than two values a channel leave them. The
    rows of padding samples become the bias: whatever they held is not amplified.
    """

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        channels = h.shape[-1]
        running_mean = self.variable("stats", "mean", jnp.zeros, channels)
        running_var = self.variable("stats", "var", jnp.ones, channels)
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))

        h = batch_last(h)
        column = (channels, *[1] * (h.ndim - 1))
        if train:
            axes = tuple(range(1, h.ndim))
            mask = jnp.ones(h.shape[-1], bool) if sample_mask is None else sample_mask
            count = mask.sum() * math.prod(h.shape[1:-1])
            values = jnp.maximum(count, 1)
            mean = jnp.where(mask, h, 0).sum(axes) / values
            centred = jnp.where(mask, h - mean.reshape(column), 0)
            square = (centred**2).sum(axes)
            var = square / values
            share = types.STATS_MOMENTUM
            is_known, unbiased = count > 1, square / jnp.maximum(count - 1, 1)
            for running, batch in ((running_mean, mean), (running_var, unbiased)):
                moved = (1 - share) * running.value + share * batch
                running.value = jnp.where(is_known, moved, running.value)
        else:
            centred = h - running_mean.value.reshape(column)
            var = running_var.value
        factor = scale * jax.lax.rsqrt(var + NORM_EPSILON)
        return batch_last(centred * factor.reshape(column) + bias.reshape(column))

    @nn.nowrap
    def macs(self, given, out):
        return 2 * out.size


class Conv(nn.Module):
    """Convolution, batch norm, 2x2 max-pool, relu and dropout, each of them optional.

    Parameters as flax's `nn.Conv`. Computed as patches x matmul: XLA's CPU convolution
    is slow inside loops and slower still with one kernel per client. Pooling comes
    before the relu: the same function, a quarter of the relu.

    Attributes:
        features: Output channels.
        kernel: Side of the kernel.
        padding: `SAME` or `VALID`; see `windows`.
        pool: Whether to max-pool 2x2 with stride 2.
        dropout: Rate at the end.
        initializer: `torch` (uniform +-1/sqrt(fan_in)), `lecun` (normal of variance
            1/fan_in) or `he` (2/fan_out), both of them with zero bias.
        stride: Of the kernel.
        bias: Whether there is one; a norm makes it needless.
        norm: Whether a `Norm` follows the convolution.
        relu: Whether a relu follows.
        scaler: HeteroFL's: in train mode the norm gets the output divided by this
            number, which may be traced.
    """

    features: int
    kernel: int
    padding: str = "SAME"
    pool: bool = True
    dropout: float = 0.0
    initializer: str = "torch"
    stride: int = 1
    bias: bool = True
    norm: bool = False
    relu: bool = True
    scaler: Any = 1.0

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        side, channels = self.kernel, h.shape[-1]
        kernel_init, bias_init = _initializers(
            self.initializer, side * side * channels, side * side * self.features
        )
        shape = (side, side, channels, self.features)
        kernel = self.param("kernel", kernel_init, shape)

        seen = windows(batch_last(h), side, self.stride, self.padding)
        patches = jnp.concatenate([*seen])
        height, width, batch = patches.shape[1:]
        out = jax.lax.dot_general(
            kernel.reshape(-1, self.features),
            patches.reshape(side * side * channels, -1),
            (((0,), (0,)), ((), ())),
        )
        h = out.reshape(self.features, height, width, batch)
        if self.bias:
            bias = self.param("bias", bias_init, (self.features,))
            h = h + bias[:, None, None, None]
        if self.norm:
            if train and not (isinstance(self.scaler, float) and self.scaler == 1):
                h = h / self.scaler
            norm = Norm(name="norm")
            h = norm(batch_last(h), sample_mask=sample_mask, train=train)
            h = batch_last(h)
        if self.pool:
            h = h[:, : height // 2 * 2, : width // 2 * 2]
            h = h.reshape(self.features, height // 2, 2, width // 2, 2, batch)
            h = h.max((2, 4))
        h = batch_last(nn.relu(h) if self.relu else h)
        return Dropout(self.dropout)(h, train=train)

    @nn.nowrap
    def macs(self, given, out):
        """Of the layer as papers write it: relu, then pool."""
        window = jax.eval_shape(
            lambda h: next(
                windows(batch_last(h), self.kernel, self.stride, self.padding)
            ),
            given,
        )
        channels, *places = window.shape
        per_output = self.kernel**2 * channels + self.bias + self.relu + self.pool
        return per_output * self.features * math.prod(places)


class MaxPool(nn.Module):
    """Max-pool of stride 2 that leaves ceil(side / 2), so of a 1x1 map a 1x1 map.

    Attributes:
        side: Of the window: 2 is PyTorch's 2/2 with `ceil_mode`, 3 its 3/2 padded by 1.
    """

    side: int = 2

    def __call__(self, h, *, sample_mask=None, train=False):
        seen = windows(batch_last(h), self.side, 2, "SAME", -jnp.inf)
        return batch_last(functools.reduce(jnp.maximum, seen))

    @nn.nowrap
    def macs(self, given, out):
        return given.size


class GlobalAverage(nn.Module):
    """Mean over the map, [B, H, W, C] -> [B, C]."""

    def __call__(self, h, *, sample_mask=None, train=False):
        return h.mean((1, 2))

    @nn.nowrap
    def macs(self, given, out):
        return given.size


class Dense(nn.Module):
    """Flatten, affine map, and relu and dropout unless it is the last stage.

    Attributes:
        features: Output width.
        relu: Whether a relu follows.
        dropout: Rate after the relu.
        initializer: As in `Conv`.
    """

    features: int
    relu: bool = True
    dropout: float = 0.0
    initializer: str = "torch"

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        h = h.reshape(h.shape[0], -1)
        kernel_init, bias_init = _initializers(
            self.initializer, h.shape[-1], self.features
        )
        kernel = self.param("kernel", kernel_init, (h.shape[-1], self.features))
        h = h @ kernel + self.param("bias", bias_init, (self.features,))
        if self.relu:
            h = nn.relu(h)
        return Dropout(self.dropout)(h, train=train)

    @nn.nowrap
    def macs(self, given, out):
        return given.size * self.features + (1 + self.relu) * out.size


class Sequential(nn.Module):
    """Several modules in a row as one stage."""

    layers: Sequence[nn.Module]

    def __call__(self, h, *, sample_mask=None, train=False):
        for layer in self.layers:
            h = layer(h, sample_mask=sample_mask, train=train)
        return h


def chain(
    name: str,
    trunks: Sequence[tuple[str, nn.Module]],
    exits: Mapping[str, nn.Module] | None = None,
    *,
    at_width: Callable[..., types.Model] | None = None,
) -> types.Model:
    """A Model of named stages.

    Args:
        name: The model's name.
        trunks: (stage name, module) in forward order.
        exits: Modules by stage name; each reads its stage's output. With exits, the
            output of a forward pass is the tuple of all exits passed.
        at_width: As in `types.Model`.

    Returns:
        A Model whose `params[i]` is {"trunk": ...} or {"trunk": ..., "exit": ...}, and
        whose `stats[i]` holds the running statistics of the same parts (or nothing).
    """
    exits = dict(exits or {})
    parts = [
        {"trunk": module} | ({"exit": exits[stage]} if stage in exits else {})
        for stage, module in trunks
    ]

    def init(key: jax.Array, x: jax.Array) -> tuple[types.Params, types.Stats]:
        params, stats = [], []
        for index, stage in enumerate(parts):
            stage_key = jax.random.fold_in(key, index)
            variables = {}
            h, variables["trunk"] = stage["trunk"].init_with_output(
                jax.random.fold_in(stage_key, 0), x
            )
            if "exit" in stage:
                exit_key = jax.random.fold_in(stage_key, 1)
                variables["exit"] = stage["exit"].init(exit_key, h)
            x = h
            params.append({p: dict(v.get("params", {})) for p, v in variables.items()})
            stats.append(
                {p: dict(v["stats"]) for p, v in variables.items() if "stats" in v}
            )
        return tuple(params), tuple(stats)

    def forward(
        params: types.Params,
        stats: types.Stats,
        h: jax.Array,
        *,
        sample_mask: jax.Array | None = None,
        start: int = 0,
        stop: int | None = None,
        train: bool = False,
        key: jax.Array | None = None,
        held: jax.Array | None = None,
    ) -> tuple[Any, types.Stats]:
        new_stats, passed = list(stats), []
        for index in range(start, len(params) if stop is None else stop):
            if held is not None:
                h = jnp.where(held[index], h, 0)
            source, updated = h, {}
            for number, (part, module) in enumerate(parts[index].items()):
                variables = {"params": params[index][part]}
                if part in stats[index]:
                    variables["stats"] = stats[index][part]
                rngs = {}
                if key is not None:
                    rngs["dropout"] = jax.random.fold_in(key, 2 * index + number)
                out, new = module.apply(
                    variables,
                    source,
                    sample_mask=sample_mask,
                    train=train,
                    rngs=rngs,
                    mutable=["stats"],
                )
                if part in stats[index]:
                    updated[part] = new.get("stats", stats[index][part])
                if part == "trunk":
                    h = source = out
                else:
                    passed.append(out)
            new_stats[index] = updated
        return (tuple(passed) if exits else h), tuple(new_stats)

    stage_names = tuple(stage for stage, _ in trunks)
    return types.Model(name, stage_names, init, forward, bool(exits), at_width=at_width)


class UnfitError(ValueError):
    """Examples that a model cannot take; the text is what it needs instead."""


def demanding(
    model: types.Model, fits: Callable[[int], bool], need: str
) -> types.Model:
    """The same model; its `init` refuses images of other sides.

    Args:
        model: Of images, f32[B, H, W, C].
        fits: Whether a side does.
        need: Words for it, such as `side is a multiple of 16`.
    """

    def init(key: jax.Array, x: jax.Array) -> tuple[types.Params, types.Stats]:
        if x.ndim != 4:
            raise UnfitError("needs images of a shape H, W, C")
        if not all(map(fits, x.shape[1:3])):
            sides = "x".join(map(str, x.shape[1:3] if x.ndim == 4 else x.shape[1:]))
            raise UnfitError(f"needs images whose {need}, these are {sides}")
        return model.init(key, x)

    return model._replace(init=init)
