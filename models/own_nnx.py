"""Custom nnx modules as stages: arrays as nested dicts, and the mode of a call."""

import contextvars
import functools
import hashlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from fedjax_pfl import context, options
from models import own_stage


class Group(NamedTuple):
    """The variables of one kind in a module: their names, structure and shapes.

    A name is a path of attributes, in which a place in a list is a string too.
    """

    names: tuple[tuple[str, ...], ...]
    tree: Any
    shapes: tuple[tuple[tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, state: nnx.State) -> "Group":
        """The group of a state, whose leaves may be shape structs."""
        leaves, tree = jax.tree.flatten(state)
        names = tuple(tuple(map(str, path)) for path, _ in nnx.to_flat_state(state))
        if len(names) != len(leaves):
            raise ValueError("a variable holds several arrays; give each its own")
        return cls(names, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))

    def nested(self, leaves: Iterable[Any]) -> dict[str, Any]:
        """The arrays as a nested dict with string keys."""
        named = dict(zip(self.names, leaves, strict=True))
        return traverse_util.unflatten_dict(named)

    def state(self, nested: Mapping[str, Any]) -> nnx.State:
        """The inverse of `nested`."""
        flat = traverse_util.flatten_dict(dict(nested))
        return jax.tree.unflatten(self.tree, [flat[name] for name in self.names])


def _split(module: nnx.Module) -> tuple[Any, ...]:
    """(graph, parameters, statistics, random streams, constant arrays)."""
    kinds = nnx.Param, nnx.RngState, nnx.Variable
    graph, params, streams, stats, constants = nnx.split(module, *kinds, ...)
    return graph, params, stats, streams, constants


class Stage(own_stage.Stage):
    """Adapts an nnx module.

    Each call merges a new module from the graph and the arrays and sets its mode by
    `train()` or `eval()`, so that no given module changes. Parameters are its
    `nnx.Param`s, statistics all other variables, and constants all other arrays. Random
    streams start again in every call, from the key of the step, and `rngs` are passed
    to a `__call__` that names them. An `nnx.BatchNorm` that gets no mask takes its
    statistics over the real samples.

    Attributes:
        kind, kinds: The classes of the module, and of all modules in it and itself.
        settings: Its numbers, texts and functions by path, such as a dropout's rate.
    """

    def __init__(self, given: Any, layers: tuple[int, int | None] | None = None):
        """Takes a module, where all seeds start, or what draws one for each seed.

        `given` is a module, or a class or function of `nnx.Rngs` that makes one.
        `layers` is the range of layers of an `nnx.Sequential` in the stage, None = all.

        Raises:
            ValueError: one line: there is no module, or it cannot be made.
        """
        is_drawn = not isinstance(given, nnx.Module)
        self._source = (given, layers) if is_drawn else None
        if is_drawn:
            module, graph, *states = _any_draw(given, layers)
        else:
            module = _picked(given, layers)
            graph, *states = _split(module)
        self.kind = type(module)
        self.kinds = tuple(dict.fromkeys(type(m) for _, m in nnx.iter_modules(module)))
        self.settings = {
            "/".join(map(str, path)): value
            for path, value in nnx.iter_graph(module)
            if isinstance(value, (int, float, str, tuple, type(None)))
            or inspect.isroutine(value)
            if not any(str(part).startswith("_pytree__") for part in path)
        }
        own_stage.check_modes(type(module).__call__)
        self._takes = own_stage.takes(type(module).__call__)
        self._graph = graph
        self._groups = tuple(map(Group.of, states))
        # Numpy's arrays, since those of jax belong to a device.
        kept = [states[-1]] if is_drawn else [states[0], states[1], states[-1]]
        self._values = [list(map(np.array, jax.tree.leaves(one))) for one in kept]

    def digest(self) -> str:
        """The SHA-256 of names, shapes, constants and, of a module, initial values."""
        named = [(group.names, group.shapes) for group in self._groups]
        out = hashlib.sha256(repr(named).encode())
        for leaf in (leaf for leaves in self._values for leaf in leaves):
            out.update(leaf.tobytes())
        return out.hexdigest()

    def _facts(self) -> tuple:
        return self._source, self._graph, self._groups, self.digest()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Stage) and self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self._facts())

    def drawn(self, key: jax.Array, x: jax.Array) -> dict[str, Any]:
        """The variables: "params", and "stats" if any."""
        if self._source is None:
            leaves = self._values[:2]
        else:
            _, *states = _split(_drawn(*self._source, nnx.Rngs(key)))
            leaves = [jax.tree.leaves(state) for state in states[:2]]
        params, stats = (
            group.nested(map(jnp.array, values))
            for group, values in zip(self._groups, leaves, strict=False)
        )
        return {"params": params} | ({"stats": stats} if stats else {})

    def apply(self, variables, x, *, sample_mask, train, rngs, mutable=()):
        """Returns the output and the statistics, which eval mode does not change."""
        old, mask = variables.get("stats", {}), own_stage.real_samples(x, sample_mask)
        key = rngs["dropout"] if "dropout" in rngs else jax.random.key(0)
        module, more = self.merged(variables, key), {}
        module.train() if train else module.eval()
        if "rngs" in self._takes:
            more = {"rngs": nnx.Rngs(jax.random.fold_in(key, 1))}
        with _hooked_calls(module, mask):
            out = module(x, **own_stage.modes(self._takes, mask, train, **more))
        if not (train and old):
            return out, {"stats": old} if old else {}
        found = {
            tuple(map(str, path)): jax.tree.leaves(variable)
            for path, variable in nnx.to_flat_state(_split(module)[2])
        }
        # What a call adds, such as sown values, is left out.
        group = self._groups[1]
        return out, {"stats": group.nested(found[name][0] for name in group.names)}

    def merged(self, variables: Mapping[str, Any], key: jax.Array) -> nnx.Module:
        """A new module with these variables, whose random streams start from a key."""
        params, stats, streams, constants = self._groups
        draws, number = [], 0
        for shape, dtype in streams.shapes:
            if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
                draws.append(jnp.zeros(shape, dtype))  # how often it has drawn
                continue
            own = jax.random.fold_in(jax.random.fold_in(key, 0), number)
            draws.append(jax.random.split(own, shape) if shape else own)
            number += 1
        return nnx.merge(
            self._graph,
            params.state(variables["params"]),
            jax.tree.unflatten(streams.tree, draws),
            stats.state(variables.get("stats", {})),
            jax.tree.unflatten(constants.tree, map(jnp.asarray, self._values[-1])),
        )


def is_source(given: Any) -> bool:
    """Whether it is an nnx module, or a class or function that may make one."""
    if isinstance(given, type):
        return issubclass(given, nnx.Module)
    return isinstance(given, nnx.Module) or callable(given)


def name(given: Any) -> str:
    """The name of a module's class, or of the class or function that makes modules."""
    made_by = type(given) if isinstance(given, nnx.Module) else given
    made_by = getattr(made_by, "func", made_by)  # of a functools.partial
    return getattr(made_by, "__name__", type(made_by).__name__)


def _drawn(given: Any, layers: Any, rngs: nnx.Rngs) -> nnx.Module:
    """A stage's module by a class or function."""
    try:
        # The metaclass hides the arguments of a class.
        is_class = isinstance(given, type)
        names = inspect.signature(given.__init__ if is_class else given).parameters
        whole = given(rngs=rngs) if "rngs" in names else given(rngs)
    except Exception as error:  # a custom class may raise anything
        raise ValueError(
            f"model: {name(given)}(rngs) fails ({options.reason(error)}); expected "
            "an nnx module, or a class or function that makes one of nnx.Rngs alone"
        ) from error
    if not isinstance(whole, nnx.Module):
        raise ValueError(
            f"model: {name(given)}(rngs) gives a {type(whole).__name__}, expected "
            "an nnx module; to make stages, give a list of such functions"
        )
    return _picked(whole, layers)


def _picked(whole: nnx.Module, layers: Any) -> nnx.Module:
    """Those layers of a Sequential as one, or the whole module for None."""
    return nnx.Sequential(*list(whole.layers)[slice(*layers)]) if layers else whole


def _any_draw(given: Any, layers: Any) -> tuple[Any, ...]:
    """(module, graph, *states) of a draw, without its variables' values if possible."""

    def shapes() -> list[nnx.State]:
        module = _drawn(given, layers, nnx.Rngs(0))
        found.append((module, *_split(module)))
        return list(found[-1][2:])

    found: list[tuple[Any, ...]] = []
    states = jax.eval_shape(shapes)
    module, graph, *_ = found[-1]
    if any(
        isinstance(value, (jax.Array, np.ndarray))
        for _, value in nnx.iter_graph(module)
        if not isinstance(value, nnx.Variable)
    ):
        # Constants are needed as they are.
        module = _drawn(given, layers, nnx.Rngs(0))
        return module, *_split(module)
    return module, graph, *states


# Called in the place of each direct submodule: (name, call, args, kwargs) -> output
WATCH: contextvars.ContextVar[Any] = contextvars.ContextVar("watch", default=None)
# Called for each hooked module: (module, call, args, kwargs)
_HOOK: contextvars.ContextVar[Any] = contextvars.ContextVar("hook")


def _hooked_calls(module: nnx.Module, sample_mask: jax.Array) -> Any:
    """A context in which batch norms of a merged module get the mask of real samples.

    Direct submodules call what `WATCH` is, if anything.
    """
    watch = WATCH.get()
    names = {id(m): str(n) for n, m in nnx.iter_children(module)} if watch else {}
    for _, inner in list(nnx.iter_modules(module)):
        if isinstance(inner, nnx.BatchNorm) or id(inner) in names:
            object.__setattr__(inner, "__class__", _hooked(type(inner)))

    def hook(inner: nnx.Module, call: Any, args: tuple, kwargs: dict) -> Any:
        if isinstance(inner, nnx.BatchNorm):
            kwargs = own_stage.over_real_samples(inner, sample_mask, args, kwargs)
        if id(inner) in names:
            return watch(names[id(inner)], call, args, kwargs)
        return call(*args, **kwargs)

    return context.having(_HOOK, hook)


@functools.lru_cache(maxsize=64)
def _hooked(kind: type[nnx.Module]) -> type[nnx.Module]:
    """A class of modules whose calls go through the hook of the context."""

    @functools.wraps(kind.__call__)
    def through_hook(self, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(kind.__call__, self)
        return _HOOK.get()(self, call, args, kwargs)

    return type(kind.__name__, (kind,), {"__call__": through_hook})
