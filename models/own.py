"""Custom linen modules as models: one stage, or a chain of stages."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from fedjax_pfl import types
from models import stages

MERGED = ("training", "deterministic", "use_running_average")


class Stage:
    """Adapts a linen module to the calls of `stages.chain`.

    Collections other than `params`, such as `batch_stats`, are its statistics.
    `sample_mask` bool[B], the real samples, and `train` are passed to a `__call__` that
    names them, and so are other names of the mode: `training`, `deterministic` and
    `use_running_average`. A linen `BatchNorm` inside takes its statistics over the real
    samples, unless it is given a mask. The first axis of its input must be the batch or
    a multiple of it, as in `x.reshape(B * T, ...)`.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        takes = inspect.signature(type(module).__call__).parameters
        fields = {field.name for field in dataclasses.fields(module)}
        self._takes = {
            name
            for name, parameter in takes.items()
            # `nn.merge_param` refuses an argument that the constructor was given too.
            if name not in MERGED
            or parameter.default is not None
            or name not in fields
            or getattr(module, name) is None
        }

    def _modes(self, sample_mask: jax.Array, train: bool) -> dict[str, Any]:
        modes = {
            "sample_mask": sample_mask,
            "train": train,
            "training": train,
            "deterministic": not train,
            "use_running_average": not train,
        }
        return {name: value for name, value in modes.items() if name in self._takes}

    def init_with_output(self, key: jax.Array, x: jax.Array) -> tuple[jax.Array, dict]:
        """Returns the output and the variables: "params", and "stats" if any."""
        keys = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        out, variables = self._module.init_with_output(
            keys, x, **self._modes(jnp.ones(len(x), bool), False)
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
            out, new = self._module.apply(
                {"params": variables["params"], **stats},
                x,
                **self._modes(mask, train),
                rngs=rngs,
                mutable=list(stats) if train else [],
            )
        return out, ({"stats": {**stats, **new}} if stats else {})


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


def gives_nan(model: types.Model, x: np.ndarray) -> bool:
    """Whether a model's first output for some examples [B, ...] is not finite."""
    variables = types.Variables(*model.init(jax.random.key(0), x))
    return not np.isfinite(model.forward(*variables, x)[0]).all()


def depends_on_neighbours(model: types.Model, x: np.ndarray) -> str:
    """Checks whether a model's output for an example depends on the other examples.

    The check is in eval mode with slightly changed initial variables, because a last
    layer that is initially zero would hide everything.

    Args:
        model: A model from `chain`.
        x: A few normalised examples [B, ...].

    Returns:
        A description of the problem, "" if there is none.
    """

    @jax.jit
    def moved(x: jax.Array) -> types.Variables:
        key = jax.random.key(0)
        params, stats = model.init(key, x)
        leaves, structure = jax.tree.flatten(params)
        leaves = [
            leaf + 0.1 * jax.random.normal(jax.random.fold_in(key, n), leaf.shape)
            for n, leaf in enumerate(leaves)
        ]
        return types.Variables(jax.tree.unflatten(structure, leaves), stats)

    variables, forward = moved(x[:1]), jax.jit(model.forward)
    # Both batches have the same size, since other shapes may be rounded differently.
    # Every place of `alone` counts: dropout with a fixed key differs between places.
    alone = np.asarray(forward(*variables, np.repeat(x[:1], len(x), 0))[0])
    among = np.asarray(forward(*variables, x)[0][:1])
    # A model may give nan for an example, which then must be nan in both batches.
    size = max(np.abs(np.nan_to_num(among)).max(), 1.0)
    if np.allclose(alone, among, rtol=0, atol=1e-3 * size, equal_nan=True):
        return ""
    return "depends in eval mode on the other examples of the batch"


def chain(given: Any) -> types.Model:
    """Makes a model of a linen module (one stage) or a list of modules (its stages).

    Args:
        given: A linen module, or a list of modules or of (stage name, module). The last
            module gives logits [B, Y].

    Raises:
        ValueError: it is none of these.
    """
    parts = list(given) if isinstance(given, Sequence) else [given]
    named = [
        tuple(part) if isinstance(part, tuple) else (f"stage{number}", part)
        for number, part in enumerate(parts, start=1)
    ]
    for pair in named:
        if len(pair) != 2 or not isinstance(pair[1], nn.Module):
            raise ValueError(
                "model: expected a name, a flax linen module, or a list of modules "
                f"(its stages), got a {type(pair[-1]).__name__}"
            )
    names = [name for name, _ in named]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"model: expected stages of different names, got {names}")
    if any("/" in str(name) for name in names):
        raise ValueError(f"model: expected stages without a slash, got {names}")
    stages_of = tuple((str(name), module) for name, module in named)
    try:
        return _made(stages_of)
    except TypeError:  # a module with a list as a field has no hash
        return _made.__wrapped__(stages_of)


def fingerprint(given: Any) -> str:
    """A text that changes with the fields or the source of modules."""
    if isinstance(given, Mapping):
        return repr({name: fingerprint(value) for name, value in given.items()})
    if isinstance(given, (list, tuple)):
        return repr([fingerprint(value) for value in given])
    if isinstance(given, nn.Module):
        fields = {
            field.name: getattr(given, field.name, None)
            for field in dataclasses.fields(given)
            if field.name not in ("parent", "name")
        }
        return f"{source(type(given))} {fingerprint(fields)}"
    if callable(given):
        return getattr(given, "__qualname__", getattr(given, "__name__", ""))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(given))


_getsource = functools.lru_cache(maxsize=64)(inspect.getsource)


def source(thing: Any) -> str:
    """The source of a class or function, or its name if there is no source."""
    try:
        return _getsource(thing)
    except (OSError, TypeError):
        return getattr(thing, "__qualname__", type(thing).__name__)


@functools.lru_cache(maxsize=64)
def _made(named: tuple[tuple[str, nn.Module], ...]) -> types.Model:
    """The same object for equal modules, so that programs can be shared."""
    name = "own_" + "_".join(type(module).__name__ for _, module in named)
    return stages.chain(name[:60], [(stage, Stage(module)) for stage, module in named])
