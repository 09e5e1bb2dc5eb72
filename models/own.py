"""Custom models: a user's modules and functions as one stage or several."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from fedjax_pfl import options, types
from models import own_checks, own_linen, own_nnx, own_pair, own_split, stages

FORMS = (
    "a name, a flax linen module, an nnx module or a class or function that makes one "
    "of rngs, a pair of functions (init, apply), or a list of these (its stages), in "
    "which (name, module) names a stage and (name, body, exit) gives it an exit, or "
    "a function of width that makes any of these"
)


def chain(
    given: Any,
    split: Sequence[str] = (),
    example: jax.ShapeDtypeStruct | None = None,
    *,
    is_checked: bool = True,
) -> types.Model:
    """Makes a model of what a user gives.

    Args:
        given: One stage: a linen module; an nnx module, with the values where all seeds
            start; a class or function that makes an nnx module of `rngs`, drawn for
            each seed; or functions `(init, apply)`, see `own_pair`. A list of these, of
            (stage name, one of these), or of (stage name, body, exit) has the stages of
            a model; exits read the output of their body. The last stage, or every exit,
            gives logits [B, Y]. A function of `width` (0..1] returns any of these with
            every hidden width multiplied by it, see `_of_width`.
        split: Names of submodules of the one module at which a new stage begins.
        example: A shape struct of one batch. With it a Sequential becomes one stage per
            layer with parameters, `split` takes effect, and narrower forms are checked.
        is_checked: Whether the outputs of `split` are compared with the module's.

    Raises:
        ValueError: one line: it is none of these, or cannot be split.
    """
    if is_of_width(given):
        return _of_width(given, tuple(split), example)
    parts = _parts(given)
    names = [str(part[0]) for part in parts]
    if not names or len(set(names)) < len(names) or "/" in "".join(names):
        raise ValueError(
            "model: expected stages without a slash and of different names, got "
            f"{names}"
        )
    if len({len(part) for part in parts}) > 1:
        raise ValueError(
            "model: some stages have an exit and others have none; give (name, body, "
            "exit) for each of them, or for none"
        )
    _refuse_shared(parts)
    called = "_".join(_name(part[1]) for part in parts)
    label = "own_" + re.sub(r"\W", "", called)[:56]
    staged = tuple((str(name), *map(_stage, modules)) for name, *modules in parts)
    is_drawn_once = False
    is_whole = not isinstance(given, Sequence)
    if split and not is_whole:
        raise ValueError(
            f"split={list(split)} splits one module, and model= is several; omit it"
        )
    if example is not None and is_whole:
        whole = staged[0][1]
        if split:
            found = own_split.at(whole, tuple(split), example)
            if is_checked:
                own_split.check(tuple(split), whole, found, example)
        else:
            found = own_split.layers(whole, given, example)
        if found:
            staged, is_drawn_once = found, True
    try:
        return _made(label, staged, is_drawn_once)
    except TypeError:  # a module with a list as a field has no hash
        return _made.__wrapped__(label, staged, is_drawn_once)


def is_of_width(given: Any) -> bool:
    """Whether it is a function of `width`, which makes models of any width."""
    is_module = isinstance(given, (type, nn.Module, nnx.Module, Sequence))
    return not is_module and callable(given) and "width" in _arguments(given)


def fingerprint(given: Any, split: Sequence[str] = ()) -> str:
    """A text that changes with a model's code, its fields and its initial values."""
    if split:
        return f"{fingerprint(given)} {list(split)}"
    if is_of_width(given):
        return f"{source(given)} {fingerprint(_at_width(given))}"
    if isinstance(given, Sequence) and not isinstance(given, (str, nnx.Module)):
        if _is_pair(given):
            return repr([*map(source, given)])
        if len(given) == 1 and type(given[0]) is nn.Sequential:
            # Earlier versions recorded a Sequential, which was one stage, in this way.
            return fields(given[0])
        return repr([fingerprint(value) for value in given])
    if isinstance(given, nn.Module) or not own_nnx.is_source(given):
        return fields(given)
    stage, is_module = own_nnx.Stage(given), isinstance(given, nnx.Module)
    code = [*([] if is_module else [given]), *stage.kinds]
    code = [one for one in code if not one.__module__.startswith("flax.")]
    return repr([*map(source, code), fields(stage.settings), stage.digest()])


def fields(value: Any) -> str:
    """A text that changes with values, and with fields and source of linen modules."""
    if isinstance(value, Mapping):
        return repr({name: fields(one) for name, one in value.items()})
    if isinstance(value, (list, tuple)):
        return repr([fields(one) for one in value])
    if isinstance(value, nn.Module):
        mine = {
            field.name: getattr(value, field.name, None)
            for field in dataclasses.fields(value)
            if field.name not in ("parent", "name")
        }
        return f"{source(type(value))} {fields(mine)}"
    if callable(value):
        return getattr(value, "__qualname__", getattr(value, "__name__", ""))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


_getsource = functools.lru_cache(maxsize=64)(inspect.getsource)


def source(thing: Any) -> str:
    """The source of a class or function, or its name if there is no source."""
    try:
        return _getsource(thing)
    except (OSError, TypeError):
        return getattr(thing, "__qualname__", type(thing).__name__)


def _arguments(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The arguments of a function, none for a builtin one."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _is_function(given: Any) -> bool:
    modules = (type, nn.Module, nnx.Module)
    return callable(given) and not isinstance(given, modules)


def _is_pair(given: Any) -> bool:
    """Whether it is a pair `(init, apply)`."""
    is_tuple = isinstance(given, tuple) and len(given) == 2
    return is_tuple and all(map(_is_function, given))


def _parts(given: Any) -> list[tuple[Any, ...]]:
    """(name, body) or (name, body, exit) of each stage; ValueError for other forms."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    each = list(given) if is_list and not _is_pair(given) else [given]
    parts = [
        tuple(one)
        if isinstance(one, tuple) and not _is_pair(one)
        else (f"stage{number}", one)
        for number, one in enumerate(each, start=1)
    ]
    for part in parts:
        modules = part[1:] if isinstance(part[0] if part else 0, str) else ()
        got = ""
        if len(part) not in (2, 3) or not modules:
            kinds = ", ".join(type(one).__name__ for one in part) or "nothing"
            got = f"a tuple of {kinds}"
        for one in modules:
            is_module = isinstance(one, nn.Module) or own_nnx.is_source(one)
            if isinstance(one, type) and issubclass(one, nn.Module):
                kind = one.__name__
                got = f"the linen class {kind}; give a module, {kind}(...)"
            elif not (is_module or _is_pair(one)):
                got = f"a {type(one).__name__}"
        if got:
            raise ValueError(f"model: expected {FORMS}, got {got}")
    return parts


def _refuse_shared(parts: list[tuple[Any, ...]]) -> None:
    """Refuses nnx modules that share variables (ValueError): stages are apart."""
    owner: dict[int, str] = {}
    for name, *modules in parts:
        places = f"stage {name}", f"the exit of stage {name}"
        for place, one in zip(places, modules, strict=False):
            if not isinstance(one, nnx.Module):
                continue
            # Each call makes its random streams anew.
            mine = {
                id(node)
                for _, node in nnx.iter_graph(one)
                if isinstance(node, nnx.Variable) and not isinstance(node, nnx.RngState)
            }
            if other := next((owner[n] for n in mine if n in owner), ""):
                raise ValueError(
                    f"model: {place} has variables of {other}, and each would train "
                    "its own; give it others, or make one stage of both"
                )
            owner |= dict.fromkeys(mine, place)


def _name(given: Any) -> str:
    """The name of a module's class or of a function."""
    if isinstance(given, nn.Module):
        return type(given).__name__
    return own_nnx.name(given[1] if _is_pair(given) else given)


def _stage(given: Any) -> Any:
    """What `stages.chain` calls."""
    if isinstance(given, nn.Module):
        if type(given) is nn.Sequential:
            return own_linen.Stage(own_linen.sequential(given))
        return own_linen.Stage(given)
    return own_pair.Stage(*given) if _is_pair(given) else own_nnx.Stage(given)


@functools.lru_cache(maxsize=64)
def _made(
    label: str, staged: tuple[tuple[Any, ...], ...], is_drawn_once: bool
) -> types.Model:
    """The same object for equal stages, so that programs can be shared."""
    trunks = [part[:2] for part in staged]
    exits = {part[0]: part[2] for part in staged if len(part) == 3}
    return stages.chain(label, trunks, exits, is_drawn_once=is_drawn_once)


def _of_width(
    factory: Callable[..., Any],
    split: tuple[str, ...],
    example: jax.ShapeDtypeStruct | None,
    rate: float = 1.0,
    scaler: Any = 1.0,
) -> types.Model:
    """The model that a function of the width makes, with its narrower forms.

    `factory` is `(width) -> ` one of the forms of `chain`. It multiplies every number
    of hidden channels by `width`, rounded up, but not the number of classes. If it
    names `scaler`, it gets HeteroFL's (`types.Model.at_width`, may be traced), by which
    it should divide in train mode what its convolutions pass to norms. Otherwise the
    model trains without it.

    Raises:
        ValueError: one line: it makes no model, or a narrower form does not fit.
    """
    given = _at_width(factory, rate, scaler)
    is_widest = rate == 1 and isinstance(scaler, float) and scaler == 1
    model = chain(given, split, example, is_checked=is_widest)
    return _narrowing(model, factory, split, example) if is_widest else model


def _at_width(factory: Callable[..., Any], rate: float = 1.0, scaler: Any = 1.0) -> Any:
    """What a function of the width makes, or a ValueError of one line if it fails."""
    given = {"width": rate}
    if "scaler" in _arguments(factory):
        given["scaler"] = scaler
    try:
        return factory(**given)
    except Exception as error:  # a custom function may raise anything
        raise ValueError(
            f"model: {own_nnx.name(factory)}(width={rate:g}) fails "
            f"({options.reason(error)}); expected a function of width alone, or of "
            "width and scaler"
        ) from error


@functools.lru_cache(maxsize=64)
def _narrowing(
    model: types.Model,
    factory: Callable[..., Any],
    split: tuple[str, ...],
    example: jax.ShapeDtypeStruct | None,
) -> types.Model:
    """The model with its narrower forms, the same object for equal arguments."""

    def at_width(rate: float, scaler: Any = 1.0) -> types.Model:
        narrow = _of_width(factory, split, example, rate, scaler)
        if example is not None:
            own_checks.check_narrower(model, narrow, rate, example)
        return narrow

    return stages.narrowing(model, at_width)
