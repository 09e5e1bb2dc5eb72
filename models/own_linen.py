"""Custom linen modules as stages: their statistics, and the mode of a call."""

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

MERGED = ("training", "deterministic", "use_running_average")


class Stage:
    """Adapts a linen module to the calls of `stages.chain`.

    Collections other than `params`, such as `batch_stats`, are its statistics.
    `sample_mask` bool[B], the real samples, and `train` are passed to a `__call__` that
    names them, and so are other names of the mode: `training`, `deterministic` and
    `use_running_average`. A linen `BatchNorm` inside takes its statistics over the real
    samples, unless it is given a mask. The first axis of its input must be the batch or
    a multiple of it, as in `x.reshape(B * T, ...)`.

    Attributes:
        module: The module.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self._takes = _modes_of(module)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Stage) and self.module == other.module

    def __hash__(self) -> int:
        return hash(self.module)

    def init_with_output(self, key: jax.Array, x: jax.Array) -> tuple[jax.Array, dict]:
        """Returns the output and the variables: "params", and "stats" if any."""
        keys = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        out, variables = self.module.init_with_output(
            keys, x, **_given(self._takes, jnp.ones(len(x), bool), False)
        )
        params, stats = variables.get("params", {}), dict(variables)
        stats.pop("params", None)
        return out, {"params": params} | ({"stats": stats} if stats else {})

    def apply(
        self,
        variables: Mapping[str, Any],
        x: jax.Array,
        *,
        sample_mask: jax.Array | None,
        train: bool,
        rngs: Mapping[str, jax.Array],
        mutable: Sequence[str],
    ) -> tuple[jax.Array, dict]:
        """Returns the output and the statistics, which eval mode does not change."""
        stats = variables.get("stats", {})
        mask = jnp.ones(len(x), bool)
        if sample_mask is not None:
            # Without real samples all count, since the result is not used.
            mask = sample_mask | ~sample_mask.any()
        with nn.intercept_methods(functools.partial(_over_real_samples, mask)):
            out, new = self.module.apply(
                {"params": variables["params"], **stats},
                x,
                **_given(self._takes, mask, train),
                rngs=rngs,
                mutable=list(stats) if train else [],
            )
        return out, ({"stats": {**stats, **new}} if stats else {})


def _modes_of(module: nn.Module) -> set[str]:
    """The names of the mode that a module's `__call__` takes."""
    takes = inspect.signature(type(module).__call__).parameters
    fields = {field.name for field in dataclasses.fields(module)}
    return {
        name
        for name, parameter in takes.items()
        # `nn.merge_param` refuses an argument that the constructor was given too.
        if name not in MERGED
        or parameter.default is not None
        or name not in fields
        or getattr(module, name) is None
    }


def _given(takes: set[str], sample_mask: jax.Array, train: bool) -> dict[str, Any]:
    """The mode by those names that a `__call__` takes."""
    modes = {
        "sample_mask": sample_mask,
        "train": train,
        "training": train,
        "deterministic": not train,
        "use_running_average": not train,
    }
    return {name: value for name, value in modes.items() if name in takes}


class Layers(nn.Module):
    """Some layers of an `nn.Sequential`, with the names and draws of the whole.

    Each layer gets the mode as a stage does.

    Attributes:
        layers: All layers.
        first, last: Those from `first` up to but without `last` are called, None = all.
    """

    layers: Sequence[Any]
    first: int = 0
    last: int | None = None

    @nn.compact
    def __call__(self, h, *, sample_mask, train):
        for layer in self.layers[self.first : self.last]:
            is_module = isinstance(layer, nn.Module)
            takes = _modes_of(layer) if is_module else set()
            modes = _given(takes, sample_mask, train)
            if isinstance(h, dict):
                h = layer(**h, **modes)
            else:
                h = layer(*(h if isinstance(h, tuple) else (h,)), **modes)
        return h


def _over_real_samples(
    sample_mask: jax.Array,
    call: Any,
    args: tuple,
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
) -> Any:
    """Gives a linen BatchNorm the mask of real samples, so that padding is excluded."""
    is_norm = isinstance(context.module, nn.BatchNorm)
    if is_norm and context.method_name == "__call__" and kwargs.get("mask") is None:
        x = args[0] if args else kwargs["x"]
        takes = inspect.signature(type(context.module).__call__).parameters
        if "mask" in takes and x.ndim > 1 and len(x) % len(sample_mask) == 0:
            mask = jnp.repeat(sample_mask, len(x) // len(sample_mask))
            mask = mask.reshape(-1, *[1] * (x.ndim - 1))
            kwargs = {**kwargs, "mask": jnp.broadcast_to(mask, x.shape)}
    return call(*args, **kwargs)
