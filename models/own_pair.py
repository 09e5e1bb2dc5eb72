"""A pair of functions `(init, apply)` as a stage, the form of models in FedJAX."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from models import own_stage

# Names of an argument of `apply` that gets the step's key, or None in eval mode
KEYS = ("rng", "key")
ARRAYS = (jax.Array, np.ndarray, np.generic, int, float, type(None))


@dataclasses.dataclass(frozen=True)
class Stage(own_stage.Stage):
    """Adapts two functions.

    `init` is `(key, x) -> params` or `key -> params`, a nested dict of arrays. A slash
    in a name becomes `|`, because names are paths in a model's file. `function` is
    `(params, x) -> out`. It may also name `is_training`, and `rng` or `key`, None in
    eval mode.
    """

    init: Callable[..., Any]
    function: Callable[..., Any]

    def drawn(self, key: jax.Array, x: jax.Array) -> dict[str, Any]:
        """The parameters that `init` gives, or a ValueError if they are not a dict."""
        own_stage.check_modes(self.function)
        if isinstance(getattr(self.init, "__self__", None), nn.Module):
            raise ValueError("init is a flax module's; give the module itself")
        params = self.init(*((key, x) if _takes_examples(self.init) else (key,)))
        if kind := _odd(params):
            line = "expected a nested dict of arrays, with texts as names"
            raise ValueError(f"init gives a {kind}, {line}")
        params = jax.tree.map(jnp.asarray, own_stage.without_slashes(params))
        return {"params": params}

    def apply(self, variables, x, *, sample_mask, train, rngs, mutable=()):
        """Returns the output, and no statistics."""
        if sample_mask is None:
            sample_mask = own_stage.real_samples(x, None)
        more = dict.fromkeys(KEYS, rngs.get("dropout") if train else None)
        names = own_stage.takes(self.function)
        modes = own_stage.modes(names, sample_mask, train, **more)
        params = own_stage.with_slashes(variables["params"])
        return self.function(params, x, **modes), {}


def _odd(tree: Any, arrays: tuple[type, ...] = ()) -> str:
    """The type of what is neither a dict nor one of `arrays`, "" if there is none.

    A list, for instance, would not be one in a model's file.
    """
    if isinstance(tree, Mapping):
        if odd := [name for name in tree if not isinstance(name, str)]:
            return f"dict with the name {odd[0]!r}"
        return next(filter(None, (_odd(one, ARRAYS) for one in tree.values())), "")
    return "" if isinstance(tree, arrays) else type(tree).__name__


def _takes_examples(init: Callable[..., Any]) -> bool:
    """Whether a function takes two positional arguments."""
    try:
        inspect.signature(init).bind(None, None)
    except TypeError:
        return False
    return True
