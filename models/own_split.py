"""One custom module as several stages: by its layers, or at named submodules.

Checks ensure that the stages together have exactly the module's parameters and give its
outputs. Initial values are those of the whole module.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx, traverse_util

from fedjax_pfl import context, options
from models import own_checks, own_linen, own_nnx, own_stage, stages

Staged = tuple[tuple[str, Any], ...]


def layers(whole: Any, given: Any, example: jax.ShapeDtypeStruct) -> Staged:
    """The stages of an `nn.Sequential` or `nnx.Sequential` as (name, stage) pairs.

    Each layer with parameters begins a stage, and the others join the one before. The
    result is () for other modules, and for one that has only one layer with parameters,
    shares parameters between layers, or does not fit the example batch. `whole` is the
    module as one stage, and `given` the module or what makes it.
    """
    is_nnx = isinstance(whole, own_nnx.Stage) and whole.kind is nnx.Sequential
    module = getattr(whole, "module", None)
    if not (is_nnx or isinstance(module, own_linen.Layers)):
        return ()
    try:
        variables = _shapes(whole, example)
    except Exception:  # a custom module may raise anything; checks of a model say it
        return ()
    held = traverse_util.flatten_dict(dict(variables.get("params", {})))
    if is_nnx:
        starts = sorted({int(path[1]) for path in held})
    else:
        names = {path[0] for path in held}
        starts = [
            place
            for place, layer in enumerate(module.layers)
            if (getattr(layer, "name", None) or f"layers_{place}") in names
        ]
    if len(starts) < 2:
        return ()
    parts = [
        own_nnx.Stage(given, ends)
        if is_nnx
        else own_linen.Stage(own_linen.Layers(module.layers, *ends))
        for ends in itertools.pairwise([0, *starts[1:], None])
    ]
    staged = tuple((f"stage{n}", one) for n, one in enumerate(parts, start=1))
    model = stages.chain("parts", staged, is_drawn_once=True)
    found = jax.eval_shape(model.init, jax.eval_shape(jax.random.key, 0), example)
    count = len(jax.tree.leaves(found))
    return staged if count == len(jax.tree.leaves(variables)) else ()


def _shapes(stage: Any, example: jax.ShapeDtypeStruct) -> dict[str, Any]:
    key = jax.eval_shape(jax.random.key, 0)
    return jax.eval_shape(stage.init_with_output, key, example)[1]


@dataclasses.dataclass(frozen=True)
class Part(own_stage.Stage):
    """The stage of a module from one submodule up to another.

    The whole module is called on arrays of nan. Where it calls `start`, that gets the
    stage's input instead, and what it passes to `stop` is the stage's output. The
    compiler drops the rest, and anything else that reaches the output makes it nan.

    Attributes:
        whole: The module as one stage.
        start, stop: Submodules where it begins ("" = examples) and ends ("" = logits).
        owned: The submodules whose variables it has.
        example: One batch of examples.
    """

    whole: Any
    start: str
    stop: str
    owned: frozenset[str]
    example: jax.ShapeDtypeStruct

    @functools.cached_property
    def _all(self) -> dict[str, Any]:
        """The variables of the whole module as shape structs."""
        return _shapes(self.whole, self.example)

    def own(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The stage's part of the whole module's variables."""
        owned = {
            path: leaf
            for path, leaf in traverse_util.flatten_dict(dict(variables)).items()
            if self._submodule(path) in self.owned
        }
        return {"params": {}} | traverse_util.unflatten_dict(owned)

    def _submodule(self, path: tuple[str, ...]) -> str:
        """The submodule that has the variable of a path."""
        # linen's statistics are by collection first.
        is_by_collection = isinstance(self.whole, own_linen.Stage)
        return path[2 if path[0] == "stats" and is_by_collection else 1]

    def drawn(self, key: jax.Array, x: jax.Array) -> dict[str, Any]:
        """The stage's part of the whole module's variables, drawn with `key`."""
        x = jnp.zeros(self.example.shape, self.example.dtype)
        return self.own(self.whole.init_with_output(key, x)[1])

    def apply(
        self, variables: Mapping[str, Any], h: jax.Array, **mode: Any
    ) -> tuple[jax.Array, dict]:
        """Returns the output and the statistics, which eval mode does not change."""
        given = traverse_util.flatten_dict(dict(variables))
        every = {
            path: given[path] if path in given else _nothing(leaf)
            for path, leaf in traverse_util.flatten_dict(self._all).items()
        }
        x, passed = h, []
        if self.start:
            shape = len(h), *self.example.shape[1:]
            x = _nothing(jax.ShapeDtypeStruct(shape, self.example.dtype))

        def watch(name: str, call: Any, args: tuple, kwargs: dict) -> Any:
            if name == self.stop:
                passed.append(args[0])
            if name == self.start:
                args = (h, *args[1:])
            return call(*args, **kwargs)

        with _watched(self.whole, watch):
            variables = {"params": {}} | traverse_util.unflatten_dict(every)
            out, new = self.whole.apply(variables, x, **{"mutable": (), **mode})
        new = self.own(new)
        return (passed[0] if self.stop else out), {"stats": new.get("stats", {})}


def _nothing(like: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of nan, or of zeros for integers."""
    is_float = jnp.issubdtype(like.dtype, jnp.floating)
    return jnp.full(like.shape, jnp.nan if is_float else 0, like.dtype)


def _watched(whole: Any, watch: Callable[..., Any]) -> Any:
    """A context in which `watch` is called in the place of each direct submodule."""
    if isinstance(whole, own_nnx.Stage):
        return context.having(own_nnx.WATCH, watch)

    def intercept(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
        path = context.module.path
        if context.method_name == "__call__" and len(path) == 1:
            return watch(path[0], call, args, kwargs)
        return call(*args, **kwargs)

    return nn.intercept_methods(intercept)


def at(whole: Any, names: tuple[str, ...], example: jax.ShapeDtypeStruct) -> Staged:
    """The stages of a module that begin at submodules of these names.

    Raises:
        ValueError: one line: no such submodules, or the module is not a chain there.
    """
    line = f"split={list(names)}"
    cure = "give a list of modules instead, such as model=[Body(), Head()]"
    if not isinstance(whole, (own_linen.Stage, own_nnx.Stage)):
        raise ValueError(f"{line} needs a flax module; {cure}")
    calls: list[str] = []

    def note(name: str, call: Any, args: tuple, kwargs: dict) -> Any:
        calls.append(name)
        return call(*args, **kwargs)

    try:
        with _watched(whole, note):
            variables = _shapes(whole, example)
    except ValueError:
        raise
    except Exception as error:  # a custom module may raise anything
        raise ValueError(
            f"{line}: the module fails ({options.reason(error)})"
        ) from error
    known = list(dict.fromkeys(calls))
    for name in names:
        if calls.count(name) != 1:
            raise ValueError(
                f"{line}: expected names of submodules that are called once, of "
                f"{', '.join(known) or 'which there are none'}; {cure}"
            )
    later = sorted({*names} - {calls[0]}, key=calls.index)
    if not later:
        raise ValueError(
            f"{line} leaves one stage; name a submodule that is called after "
            f"{calls[0]}. Layers in a list are not found by name; {cure}"
        )
    bounds = itertools.pairwise([0, *map(calls.index, later), len(calls)])
    parts = [
        Part(whole, start, stop, frozenset(calls[slice(*ends)]), example)
        for start, stop, ends in zip(["", *later], [*later, ""], bounds, strict=True)
    ]
    count = sum(len(jax.tree.leaves(part.own(variables))) for part in parts)
    if count != len(jax.tree.leaves(variables)):
        raise ValueError(
            f"{line}: some parameters belong to two of the stages, or to no submodule "
            f"that is called; {cure}"
        )
    return tuple(zip([calls[0], *later], parts, strict=True))


def check(
    names: tuple[str, ...], whole: Any, staged: Staged, example: jax.ShapeDtypeStruct
) -> None:
    """Raises ValueError unless the stages equal the module in eval and train mode."""

    @functools.partial(jax.jit, static_argnames="train")
    def both(x: jax.Array, key: jax.Array, *, train: bool) -> Any:
        variables = own_checks.moved(whole.init_with_output(key, x)[1])
        mode = {"train": train, "rngs": {"dropout": key}}
        mode["sample_mask"] = jnp.arange(len(x)) > 0
        expected, stats = whole.apply(variables, x, mutable=(), **mode)
        h, found = x, []
        for _, part in staged:
            h, new = part.apply(part.own(variables), h, **mode)
            found.append(new["stats"])
        wanted = [part.own(stats).get("stats", {}) for _, part in staged]
        return (expected, wanted), (h, found)

    key = jax.random.key(0)
    shape = 4, *example.shape[1:]
    if jnp.issubdtype(example.dtype, jnp.floating):
        x = jax.random.normal(key, shape, example.dtype)
    else:
        x = jax.random.randint(key, shape, 0, 4, example.dtype)
    try:
        results = [both(x, key, train=train) for train in (False, True)]
        is_same = own_checks.is_close(*zip(*results, strict=True))
    except Exception as error:  # a custom module may raise anything
        raise ValueError(
            f"split={list(names)}: its stages cannot be called one after another "
            f"({options.reason(error)}); give model=[Body(), Head()]"
        ) from error
    if not is_same:
        raise ValueError(
            f"split={list(names)}: the module is not a chain there, as its stages one "
            "after another give other logits than the module; give a list of modules "
            "instead, such as model=[Body(), Head()]"
        )
