"""The mode of a call and the mask of batch norms, for all custom stages."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp


def _mode(train: bool) -> dict[str, bool]:
    """The mode under all names by which a call may ask for it."""
    return {
        "train": train,
        "training": train,
        "is_training": train,
        "deterministic": not train,
        "use_running_average": not train,
    }


MODES = tuple(_mode(train=True))
_LIKE_MODE = re.compile(r"(is_|in_)?(train|training|eval|evaluation|inference)(_mode)?")


class Stage:
    """Adapts a user's module or functions to the calls of `stages.chain`.

    The callee gets those parts of the mode that it names: `train` (also `training`,
    `is_training`, `deterministic` or `use_running_average`), and `sample_mask` bool[B],
    the real samples. A stage has `drawn(key, x)`, its variables ("params", and "stats"
    if any), and `apply`, which returns the output and the statistics.
    """

    def init_with_output(self, key: jax.Array, x: jax.Array) -> tuple[jax.Array, dict]:
        """Returns the output in eval mode and the variables."""
        variables = self.drawn(key, x)
        out, _ = self.apply(variables, x, sample_mask=None, train=False, rngs={})
        return out, variables


@functools.lru_cache(maxsize=64)
def takes(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's arguments."""
    return frozenset(inspect.signature(function).parameters)


def modes(
    names: Collection[str], sample_mask: jax.Array, train: bool, **more: Any
) -> dict[str, Any]:
    """The mode and `more` as named arguments, restricted to `names`."""
    values = {"sample_mask": sample_mask, **_mode(train), **more}
    return {name: value for name, value in values.items() if name in names}


def check_modes(function: Callable[..., Any]) -> None:
    """Refuses an argument that looks like the mode, and whose name is not passed.

    Its default would be the mode of training and of tests. Raises a ValueError.
    """
    given = getattr(function, "keywords", {})  # of a functools.partial
    for name, parameter in inspect.signature(function).parameters.items():
        is_mode = _LIKE_MODE.fullmatch(name) and name not in (*MODES, *given)
        if is_mode and isinstance(parameter.default, (bool, type(None))):
            raise ValueError(
                f"nothing passes its argument {name}; the mode has the name "
                f"{', '.join(MODES[:-1])} or {MODES[-1]}"
            )


def without_slashes(tree: Any) -> Any:
    """The nested dict with `|` for slashes in names, which divide a file's paths.

    Raises a ValueError for a name that has a `|`.
    """
    if not isinstance(tree, Mapping):
        return tree
    if odd := [name for name in tree if "|" in str(name)]:
        raise ValueError(f"the name {odd[0]} has a |, which stands for a slash")
    return {_with(n, "/", "|"): without_slashes(v) for n, v in tree.items()}


def with_slashes(tree: Any) -> Any:
    """The nested dict with the names that `without_slashes` got."""
    if not isinstance(tree, Mapping):
        return tree
    return {_with(n, "|", "/"): with_slashes(v) for n, v in tree.items()}


def _with(name: Any, old: str, new: str) -> Any:
    return name.replace(old, new) if isinstance(name, str) else name


def real_samples(x: jax.Array, sample_mask: jax.Array | None) -> jax.Array:
    """bool[B], all True if no sample is real, because the result is then not used."""
    if sample_mask is None:
        return jnp.ones(len(x), bool)
    return sample_mask | ~sample_mask.any()


def over_real_samples(
    norm: Any, sample_mask: jax.Array, args: tuple, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The named arguments of a batch norm's call, with the mask of real samples.

    They do not change if a mask is given, or if the first axis of the input is neither
    the batch nor a multiple of it, as in `x.reshape(B * T, ...)`.
    """
    if "mask" not in takes(type(norm).__call__) or kwargs.get("mask") is not None:
        return kwargs
    x = args[0] if args else kwargs["x"]
    if x.ndim < 2 or len(x) % len(sample_mask):
        return kwargs
    mask = jnp.repeat(sample_mask, len(x) // len(sample_mask))
    mask = mask.reshape(-1, *[1] * (x.ndim - 1))
    return {**kwargs, "mask": jnp.broadcast_to(mask, x.shape)}
