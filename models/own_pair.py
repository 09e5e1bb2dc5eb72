"""A pair of functions `(init, apply)` as a stage, the form of models in FedJAX."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Names of an argument of `apply` that gets the step's key, or None in eval mode
KEYS = ("rng", "key")


@dataclasses.dataclass(frozen=True)
class Stage:
    """Adapts two functions to the calls of `stages.chain`.

    Attributes:
        init: `(key, x) -> params`, or `key -> params`: a nested dict of arrays. A slash
            in a name becomes `|`, since names are paths in a model's file.
        function: `(params, x) -> out`. `train` (also named `training`, `is_training` or
            `deterministic`), `sample_mask` bool[B], the real samples, and `rng` or
            `key` (None in eval mode) are passed to a function that names them.
    """

    init: Callable[..., Any]
    function: Callable[..., Any]

    def init_with_output(self, key: jax.Array, x: jax.Array) -> tuple[jax.Array, dict]:
        """Returns the output and the variables: "params"."""
        params = self.init(*((key, x) if _takes_examples(self.init) else (key,)))
        if not isinstance(params, Mapping):
            kind = type(params).__name__
            raise ValueError(f"init gives a {kind}, expected a nested dict of arrays")
        variables = {"params": _renamed(params, "/", "|")}
        out, _ = self.apply(variables, x, sample_mask=None, train=False, rngs={})
        return out, variables

    def apply(
        self,
        variables: Mapping[str, Any],
        x: jax.Array,
        *,
        sample_mask: jax.Array | None,
        train: bool,
        rngs: Mapping[str, jax.Array],
        mutable: Sequence[str] = (),
    ) -> tuple[jax.Array, dict]:
        """Returns the output, and no statistics."""
        mask = jnp.ones(len(x), bool) if sample_mask is None else sample_mask
        key = rngs.get("dropout") if train else None
        modes = {
            "sample_mask": mask,
            "train": train,
            "training": train,
            "is_training": train,
            "deterministic": not train,
        } | dict.fromkeys(KEYS, key)
        takes = _takes(self.function)
        modes = {name: value for name, value in modes.items() if name in takes}
        params = _renamed(variables["params"], "|", "/")
        return self.function(params, x, **modes), {}


def _renamed(tree: Any, old: str, new: str) -> Any:
    """The same nested dict with another sign in its names."""
    if not isinstance(tree, Mapping):
        return tree
    return {
        str(name).replace(old, new): _renamed(value, old, new)
        for name, value in tree.items()
    }


@functools.lru_cache(maxsize=64)
def _takes(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _takes_examples(init: Callable[..., Any]) -> bool:
    """Whether a function takes two positional arguments."""
    try:
        inspect.signature(init).bind(None, None)
    except TypeError:
        return False
    return True
