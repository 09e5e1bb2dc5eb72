"""Stages (linen modules) and the chain that makes a Model of them.

A stage is called as `stage(h, sample_mask=, train=)` and may own the collections
`params` and `stats`. Images are [B, H, W, C] between stages. Modules work with the
batch last, which makes patches contiguous copies and lets pooling vectorise. XLA
cancels the transposes between them. Parameters are f32, and a layer multiplies in the
type of its input; see `mixed`. The method `macs` of a module returns its cost; see
`counts`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_pfl import execution, stacked, types
from models import forms, kept, pooled

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
    """The initializers of a kernel and a bias; see `Conv`."""
    if name == "torch":
        return torch_uniform(fan_in), torch_uniform(fan_in)
    if name == "he":
        return he_normal(fan_out), nn.initializers.zeros
    return nn.initializers.lecun_normal(), nn.initializers.zeros


def scaling(width: float, rate: float = 1.0) -> Callable[[int], int]:
    """A function from hidden channels at width 1 to those of a model of another width.

    A narrower form of that model has the fraction `rate` of its channels, rounded up.
    """
    # The margin makes a third of three exactly one.
    return lambda features: math.ceil(rate * max(1, round(features * width)) - 1e-9)


def widths(made: Callable[..., types.Model], rate: float) -> Callable[..., types.Model]:
    """The `at_width` of a model at `rate`; `made` is `(rate, scaler) -> Model`."""
    return lambda more, scaler=1.0: made(rate * more, scaler)


def batch_last(h: jax.Array) -> jax.Array:
    """[B, H, W, C] -> [C, H, W, B], and back; [B, D] -> [D, B]."""
    return jnp.swapaxes(h, 0, -1)


class Dropout(nn.Module):
    """Inverted dropout with a mask of 16 instead of 32 random bits a value.

    The probability `rate` of 0 is rounded to a multiple of 2^-16.
    """

    rate: float

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        if not train or not self.rate:
            return h
        keep = round((1 - self.rate) * 2**16)
        # Two values share a word. An example's words do not depend on the batch size.
        width = math.prod(h.shape[1:])
        words = jax.random.bits(self.make_rng("dropout"), (len(h), -(-width // 2)))
        halves = jnp.stack([words & 0xFFFF, words >> 16], axis=-1)
        mask = (halves.reshape(len(h), -1)[:, :width] < keep).reshape(h.shape)
        return jnp.where(mask, h * (2**16 / keep), 0)


@jax.custom_jvp
def _moments(
    h: jax.Array, mask: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The mean f32[C] of h f32[C, ..., B], and the sum of squares around it.

    Both are over the examples in `mask` bool[B], which have `count` values a channel.
    One pass sums the differences from a value of the first of them, and their squares.
    Without this shift a small variance of large values would lose its digits.
    """
    axes = range(1, h.ndim)
    near = h[:, *(size // 2 for size in h.shape[1:-1])]
    near = jax.lax.dynamic_index_in_dim(near, jnp.argmax(mask), -1, keepdims=False)
    near = jnp.where(mask.any(), near, 0)
    away = jnp.where(mask, h - stacked.column(near, h), 0)
    total, squares = away.sum(axes), (away**2).sum(axes)
    offset = total / count
    return near + offset, jnp.maximum(squares - offset * total, 0)


@_moments.defjvp
def _slope_of_moments(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (h, mask, count), (slope, *_) = primals, tangents
    axes, (mean, squares) = range(1, h.ndim), _moments(h, mask, count)
    # Padding may have any values, also nan.
    away = jnp.where(mask, h - stacked.column(mean, h), 0)
    slope = jnp.where(mask, slope, 0)
    # The mean moves the sum of squares by nothing, as what is around it sums to 0.
    slopes = slope.sum(axes) / count, (2 * away * slope).sum(axes)
    return (mean, squares), slopes


class Norm(nn.Module):
    """Batch norm with running statistics, over the real samples of a batch.

    Train mode normalises by the batch, eval mode by the running mean and variance.
    These move by a tenth towards the batch's (with unbiased variance, as PyTorch's do
    with a momentum of .1), unless there are fewer than two values a channel. Rows of
    padding samples become the bias, so that their values are not amplified.
    """

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        channels = h.shape[-1]
        running_mean = self.variable("stats", "mean", jnp.zeros, channels)
        running_var = self.variable("stats", "var", jnp.ones, channels)
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))

        h = batch_last(h)
        dtype = h.dtype
        h = h.astype(jnp.promote_types(dtype, scale.dtype))
        column = (channels, *[1] * (h.ndim - 1))
        if train:
            mask = jnp.ones(h.shape[-1], bool) if sample_mask is None else sample_mask
            count = mask.sum() * math.prod(h.shape[1:-1])
            values = jnp.maximum(count, 1)
            mean, square = _moments(h, mask, values)
            centred = jnp.where(mask, h - mean.reshape(column), 0)
            var = square / values
            rate = types.STATS_MOMENTUM
            is_known, unbiased = count > 1, square / jnp.maximum(count - 1, 1)
            for running, batch in ((running_mean, mean), (running_var, unbiased)):
                moved = (1 - rate) * running.value + rate * batch
                running.value = jnp.where(is_known, moved, running.value)
        else:
            centred = h - running_mean.value.reshape(column)
            var = running_var.value
        factor = scale * jax.lax.rsqrt(var + NORM_EPSILON)
        h = centred * factor.reshape(column) + bias.reshape(column)
        return batch_last(kept.kept(h.astype(dtype)))

    @nn.nowrap
    def macs(self, given, out):
        return 2 * out.size


class Conv(nn.Module):
    """Convolution with optional batch norm, 2x2 max-pool, relu and dropout.

    Parameters are those of flax's `nn.Conv`, and `forms.chosen` picks the computation.
    Pooling before the relu is the same function with a quarter of the relu.

    Attributes:
        features, kernel, stride: Output channels, side of the kernel, and its stride.
        padding: `SAME` or `VALID`; see `forms.windows`.
        pool, dropout: Whether to max-pool 2x2/2; the rate of dropout at the end.
        initializer: `torch` (uniform +-1/sqrt(fan_in)), `lecun` (normal of variance
            1/fan_in) or `he` (2/fan_out), the last two with zero bias.
        bias, norm, relu: Whether there is each. A norm makes a bias superfluous.
        scaler: HeteroFL's scaler, which may be traced. In train mode the output is
            divided by it before the norm.
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

        h = batch_last(h)
        dtype = h.dtype
        kernel = kernel.astype(dtype)
        # A bias is the same in a window and a relu is monotonous, so that both may
        # follow the pool. A norm may not.
        may_follow = self.pool and not self.norm and self.stride == 1
        setting = execution.setting()
        pools_first = may_follow and pooled.suits(h.shape, side, self.padding, setting)
        if pools_first:
            h = pooled.convolve(h, kernel, self.padding)
        else:
            h, form = forms.convolve(h, kernel, self.stride, self.padding)
        if self.bias:
            bias = self.param("bias", bias_init, (self.features,))
            h = (h + bias[:, None, None, None]).astype(dtype)
        if self.norm:
            if train and not (isinstance(self.scaler, float) and self.scaler == 1):
                h = (h / self.scaler).astype(dtype)
            norm = Norm(name="norm")
            h = norm(batch_last(h), sample_mask=sample_mask, train=train)
            h = batch_last(h)
        if self.pool and not pools_first:
            h = forms.pooled(h, form)
        h = batch_last(nn.relu(h) if self.relu else h)
        return Dropout(self.dropout)(h, train=train)

    @nn.nowrap
    def macs(self, given, out):
        """The cost of the layer as in papers, with the relu before the pool."""
        window = jax.eval_shape(
            lambda h: next(
                forms.windows(batch_last(h), self.kernel, self.stride, self.padding)
            ),
            given,
        )
        channels, *places = window.shape
        per_output = self.kernel**2 * channels + self.bias + self.relu + self.pool
        return per_output * self.features * math.prod(places)


class MaxPool(nn.Module):
    """Max-pool of stride 2 to a side of ceil(side / 2), which keeps a 1x1 map.

    A window of 2 is PyTorch's 2/2 with `ceil_mode`, and one of 3 its 3/2 padded by 1.
    """

    side: int = 2

    def __call__(self, h, *, sample_mask=None, train=False):
        seen = forms.windows(batch_last(h), self.side, 2, "SAME", -jnp.inf)
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
    """Flattening and an affine map, with optional relu and dropout; see `Conv`."""

    features: int
    relu: bool = True
    dropout: float = 0.0
    initializer: str = "torch"

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        h = jnp.reshape(h, (h.shape[0], -1))
        kernel_init, bias_init = _initializers(
            self.initializer, h.shape[-1], self.features
        )
        kernel = self.param("kernel", kernel_init, (h.shape[-1], self.features))
        bias = self.param("bias", bias_init, (self.features,))
        # XLA's CPU has no product of bfloat16 in float32 for some layouts of `h`.
        wide, kernel = forms.summed_in(h.dtype) or h.dtype, kernel.astype(h.dtype)
        out = jnp.matmul(h.astype(wide), kernel.astype(wide))
        h = (out + bias).astype(h.dtype)
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
    stem: nn.Module | None = None,
    at_width: Callable[..., types.Model] | None = None,
    is_drawn_once: bool = False,
) -> types.Model:
    """A Model of named stages.

    Args:
        name: The model's name.
        trunks: (stage name, module) in forward order.
        exits: Modules by stage name, each of which reads its stage's output. With
            exits, a forward pass returns the tuple of the outputs of all exits passed.
        stem: A module before the first trunk and in the same stage, such as an
            embedding, so that all trunks may have the same shapes.
        at_width: As in `types.Model`.
        is_drawn_once: Whether all stages draw from one key, as parts of one module.

    Returns:
        A Model. `params[i]` is {"trunk": ...}, with "exit" where there is one and
        "stem" in the first stage. `stats[i]` has the running statistics of these parts,
        if any. `one_exit` is the chain of the stages up to the last exit and of this,
        the stage `exit`, and draws what that chain draws.
    """
    exits = dict(exits or {})
    parts = [
        {"trunk": module} | ({"exit": exits[stage]} if stage in exits else {})
        for stage, module in trunks
    ]
    if stem is not None:
        parts[0] = {"stem": stem} | parts[0]
    # No two parts of a chain have the same number.
    number_of = {"trunk": 0, "exit": 1, "stem": 2 * len(parts)}

    def init(key: jax.Array, x: jax.Array) -> tuple[types.Params, types.Stats]:
        params, stats = [], []
        for index, stage in enumerate(parts):
            stage_key = jax.random.fold_in(key, 0 if is_drawn_once else index)
            variables = {}
            for part, module in stage.items():
                part_key = jax.random.fold_in(stage_key, number_of[part])
                out, variables[part] = module.init_with_output(part_key, x)
                x = x if part == "exit" else out
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
        mode = {"sample_mask": sample_mask, "train": train, "rngs": {}}
        mode["mutable"] = ["stats"]
        for index in range(start, len(params) if stop is None else stop):
            if held is not None:
                h = jnp.where(held[index], h, 0)
            updated = {}
            for part, module in parts[index].items():
                variables = {"params": params[index][part]}
                if part in stats[index]:
                    variables["stats"] = stats[index][part]
                if key is not None:
                    number = 2 * index + number_of[part]
                    mode["rngs"] = {"dropout": jax.random.fold_in(key, number)}
                out, new = module.apply(variables, h, **mode)
                if part in stats[index]:
                    updated[part] = new.get("stats", stats[index][part])
                if part == "exit":
                    passed.append(out)
                else:
                    h = out
            new_stats[index] = updated
        return (tuple(passed) if exits else h), tuple(new_stats)

    stage_names = tuple(stage for stage, _ in trunks)
    model = types.Model(name, stage_names, init, forward, bool(exits))
    if exits:
        alone = _with_last_exit(trunks, exits)
        one = chain(name, alone, stem=stem, is_drawn_once=is_drawn_once)
        model = model._replace(one_exit=one)
    return model if at_width is None else narrowing(model, at_width)


def _with_last_exit(
    trunks: Sequence[tuple[str, nn.Module]], exits: Mapping[str, nn.Module]
) -> list[tuple[str, nn.Module]]:
    """The trunks up to the last exit, and this as one more stage with a free name."""
    names = [stage for stage, _ in trunks]
    last, own = max(map(names.index, exits)), "exit"
    while own in names:
        own += "_"
    return [*trunks[: last + 1], (own, exits[names[last]])]


def narrowing(model: types.Model, at_width: Callable[..., types.Model]) -> types.Model:
    """The model with narrower forms, see `types.Model`, also where one exit serves."""

    def of_one_exit(rate: float, scaler: Any = 1.0) -> types.Model:
        return at_width(rate, scaler).one_exit

    one = model.one_exit and model.one_exit._replace(at_width=of_one_exit)
    return model._replace(at_width=at_width, one_exit=one)


class UnfitError(ValueError):
    """A model cannot take the examples; the text says what it needs instead."""


def demanding(
    model: types.Model, fits: Callable[[int], bool], need: str
) -> types.Model:
    """The same model with an `init` that refuses images of other sides.

    `model` takes images f32[B, H, W, C] and `fits` a side. `need` is the condition in
    words, such as `side is a multiple of 16`.
    """

    def init(key: jax.Array, x: jax.Array) -> tuple[types.Params, types.Stats]:
        if x.ndim != 4:
            raise UnfitError("needs images of a shape H, W, C")
        if not all(map(fits, x.shape[1:3])):
            sides = "x".join(map(str, x.shape[1:3]))
            raise UnfitError(f"needs images whose {need}, these are {sides}")
        return model.init(key, x)

    return model._replace(init=init)
