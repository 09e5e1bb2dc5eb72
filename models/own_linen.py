"""Custom linen modules as stages: their statistics, and the mode of a call."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

from models import own_stage

MERGED = ("training", "is_training", "deterministic", "use_running_average")


@dataclasses.dataclass(frozen=True)
class Stage(own_stage.Stage):
    """Adapts a linen module.

    Collections other than `params`, such as `batch_stats`, are its statistics. A linen
    `BatchNorm` that gets no mask takes its statistics over the real samples. A slash in
    a name, as `nn.SpectralNorm` makes, becomes `|`, see `own_pair`. In train mode
    `make_rng` has a key under any name.
    """

    module: nn.Module

    def init_with_output(self, key: jax.Array, x: jax.Array) -> tuple[jax.Array, dict]:
        """Returns the output and the variables, in one call of the module."""
        keys = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        mask = own_stage.real_samples(x, None)
        modes = own_stage.modes(_modes_of(self.module), mask, False)
        out, variables = self.module.init_with_output(keys, x, **modes)
        stats = own_stage.without_slashes(variables)
        params = stats.pop("params", {})
        return out, {"params": params} | ({"stats": stats} if stats else {})

    def apply(self, variables, x, *, sample_mask, train, rngs, mutable=()):
        """Returns the output and the statistics, which eval mode does not change."""
        mask = own_stage.real_samples(x, sample_mask)
        stats = own_stage.with_slashes(variables.get("stats", {}))
        params = own_stage.with_slashes(variables["params"])
        if rngs:  # flax takes the key `params` for names that it was not given
            rngs = rngs | {"params": jax.random.fold_in(rngs["dropout"], 1)}

        def masked(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
            module = context.module
            if isinstance(module, nn.BatchNorm) and context.method_name == "__call__":
                kwargs = own_stage.over_real_samples(module, mask, args, kwargs)
            return call(*args, **kwargs)

        with nn.intercept_methods(masked):
            out, new = self.module.apply(
                {"params": params, **stats},
                x,
                **own_stage.modes(_modes_of(self.module), mask, train),
                rngs=rngs,
                mutable=list(stats) if train else [],
            )
        stats = own_stage.without_slashes({**stats, **new})
        return out, ({"stats": stats} if stats else {})


def _modes_of(module: nn.Module) -> set[str]:
    """The names of the mode that a module's `__call__` takes."""
    own_stage.check_modes(type(module).__call__)
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


def sequential(given: nn.Sequential) -> "Layers":
    """An `nn.Sequential` as `Layers`, and those directly in it too."""
    layers = (
        sequential(one) if type(one) is nn.Sequential else one for one in given.layers
    )
    return Layers(tuple(layers), name=given.name)


class Layers(nn.Module):
    """Layers first:last of an `nn.Sequential`, with the names and draws of the whole.

    Each layer gets the mode as a stage does.
    """

    layers: Sequence[Any]
    first: int = 0
    last: int | None = None

    @nn.compact
    def __call__(self, *args, sample_mask, train, **more):
        # Several arrays are one value between layers and stages.
        h = more or (args[0] if len(args) == 1 else args)
        for layer in self.layers[self.first : self.last]:
            is_module = isinstance(layer, nn.Module)
            takes = _modes_of(layer) if is_module else set()
            modes = own_stage.modes(takes, sample_mask, train)
            if isinstance(h, dict):
                h = layer(**h, **modes)
            else:
                h = layer(*(h if isinstance(h, tuple) else (h,)), **modes)
        return h
