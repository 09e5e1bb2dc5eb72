"""Stages (linen modules) and the chain that makes a Model of them.

A stage is called as `stage(h, sample_mask=, train=)` and may own the collections
`params` and `stats`. Images travel between stages as [B, H, W, C]; inside, a
convolution works with the batch last, where patches are contiguous copies and pooling
vectorises, and XLA cancels the transposes between neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_pfl import types


def torch_uniform(fan_in: int) -> nn.initializers.Initializer:
    """PyTorch's default for weights and biases: uniform in +-1 / sqrt(fan_in)."""
    bound = fan_in**-0.5

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def _initializers(name: str, fan_in: int):
    if name == "torch":
        return torch_uniform(fan_in), torch_uniform(fan_in)
    return nn.initializers.lecun_normal(), nn.initializers.zeros


class Dropout(nn.Module):
    """Inverted dropout whose mask takes 16 random bits a value instead of 32.

    Attributes:
        rate: Probability of 0, a multiple of 2^-16 after rounding.
    """

    rate: float

    @nn.compact
    def __call__(self, h, *, train=False):
        if not train or not self.rate:
            return h
        keep = round((1 - self.rate) * 2**16)
        # One word for two values; an example's words never depend on the batch size.
        width = math.prod(h.shape[1:])
        words = jax.random.bits(self.make_rng("dropout"), (len(h), -(-width // 2)))
        halves = jnp.stack([words & 0xFFFF, words >> 16], axis=-1)
        mask = (halves.reshape(len(h), -1)[:, :width] < keep).reshape(h.shape)
        return jnp.where(mask, h * (2**16 / keep), 0)


class Conv(nn.Module):
    """Convolution, 2x2 max-pool and relu; parameters as flax's `nn.Conv`.

    Computed as patches x matmul: XLA's CPU convolution is slow inside loops and slower
    still with one kernel per client. Pooling comes before the relu: the same function,
    a quarter of the relu.

    Attributes:
        features: Output channels.
        kernel: Side of the kernel.
        padding: `SAME` or `VALID`.
        pool: Whether to max-pool 2x2 with stride 2.
        dropout: Rate after the relu.
        initializer: `torch` (uniform +-1/sqrt(fan_in)) or `lecun` (normal, zero bias).
    """

    features: int
    kernel: int
    padding: str = "SAME"
    pool: bool = True
    dropout: float = 0.0
    initializer: str = "torch"

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        side, channels = self.kernel, h.shape[-1]
        kernel_init, bias_init = _initializers(self.initializer, side * side * channels)
        shape = (side, side, channels, self.features)
        kernel = self.param("kernel", kernel_init, shape)
        bias = self.param("bias", bias_init, (self.features,))

        h = jnp.transpose(h, (3, 1, 2, 0))
        if self.padding == "SAME":
            low, high = (side - 1) // 2, side // 2
            h = jnp.pad(h, ((0, 0), (low, high), (low, high), (0, 0)))
        height, width, batch = h.shape[1] - side + 1, h.shape[2] - side + 1, h.shape[3]
        patches = jnp.concatenate(
            [
                h[:, i : i + height, j : j + width]
                for i in range(side)
                for j in range(side)
            ]
        )
        out = jax.lax.dot_general(
            kernel.reshape(-1, self.features),
            patches.reshape(side * side * channels, -1),
            (((0,), (0,)), ((), ())),
        )
        h = out.reshape(self.features, height, width, batch)
        h = h + bias[:, None, None, None]
        if self.pool:
            h = h[:, : height // 2 * 2, : width // 2 * 2]
            h = h.reshape(self.features, height // 2, 2, width // 2, 2, batch)
            h = h.max((2, 4))
        h = jnp.transpose(nn.relu(h), (3, 1, 2, 0))
        return Dropout(self.dropout)(h, train=train)


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
        kernel_init, bias_init = _initializers(self.initializer, h.shape[-1])
        kernel = self.param("kernel", kernel_init, (h.shape[-1], self.features))
        h = h @ kernel + self.param("bias", bias_init, (self.features,))
        if self.relu:
            h = nn.relu(h)
        return Dropout(self.dropout)(h, train=train)


def chain(
    name: str,
    trunks: Sequence[tuple[str, nn.Module]],
    exits: Mapping[str, nn.Module] | None = None,
) -> types.Model:
    """A Model of named stages.

    Args:
        name: The model's name.
        trunks: (stage name, module) in forward order.
        exits: Modules by stage name; each reads its stage's output. With exits, the
            output of a forward pass is the tuple of all exits passed.

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
    ) -> tuple[Any, types.Stats]:
        new_stats, passed = list(stats), []
        for index in range(start, len(parts) if stop is None else stop):
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
    return types.Model(name, stage_names, init, forward, bool(exits))
