"""Hashes the computation of a function: its jaxpr with all constants, not its text.

A closure's value, a global constant, a helper or a base class changes the hash, and a
comment or a new name does not. Versions of jax may trace the same function differently.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np
from jax.extend import core

from fedjax_pfl.rows import views

# Addresses, and names of functions that were traced
_NOT_COMPUTED = re.compile(r" at 0x[0-9a-f]+|\bname=[^\s\]]+")


def of(fn: Callable[..., Any], *args: Any, gradient: bool = False) -> str:
    """The SHA-256 of the computation of a function, 64 hexadecimal digits.

    `fn` takes the arrays or shape structs `args`, and jax can trace it. With `gradient`
    the hash includes the gradient of the sum of its floats in the first argument, since
    a function may define its own gradient (`jax.custom_vjp`). For a callback to Python
    the code and all values that it holds count, except globals.

    Examples:
        >>> def times(factor):
        ...     return lambda x: factor * x
        >>> of(times(2.0), np.ones(3)) == of(times(2.0), np.ones(3))
        True
        >>> of(times(2.0), np.ones(3)) == of(times(3.0), np.ones(3))
        False
    """
    # A new function, since jax would not trace the same one again.
    traced = [jax.make_jaxpr(lambda *given: fn(*given), return_shape=True)(*args)]
    if gradient:

        def total(*given: Any) -> jax.Array:
            leaves = jax.tree.leaves(fn(*given))
            floats = [x for x in leaves if jax.numpy.issubdtype(x.dtype, np.floating)]
            return sum((x.sum() for x in floats), jax.numpy.zeros(()))

        wrt = jax.grad(total, allow_int=True)
        traced.append(jax.make_jaxpr(wrt, return_shape=True)(*args))
    digest = hashlib.sha256()
    for jaxpr, shapes in traced:
        text = f"{jaxpr} {jax.tree.structure(shapes)} {jax.tree.structure(args)}"
        digest.update(_NOT_COMPUTED.sub("", text).encode())
        for constant in _constants(jaxpr):
            digest.update(f"{constant.dtype}{constant.shape}".encode())
            # Not its buffer, which types such as bfloat16 do not have.
            digest.update(constant.tobytes())
    return digest.hexdigest()


def of_python(value: Any) -> str:
    """The SHA-256 of a function of Python, such as one that runs on the host.

    Its code and all values that it holds count, except globals.
    """
    digest = hashlib.sha256()
    for part in _of_python(value):
        digest.update(part.tobytes())
    return digest.hexdigest()


def _constants(jaxpr: core.ClosedJaxpr) -> Iterator[np.ndarray]:
    """The arrays in a jaxpr, including those of inner jaxprs."""
    for constant in jaxpr.consts:
        constant = views.numbers(constant)
        yield np.asarray(constant)
    yield from _inner(jaxpr.jaxpr)


def _inner(jaxpr: core.Jaxpr) -> Iterator[np.ndarray]:
    for eqn in jaxpr.eqns:
        for operand in eqn.invars:
            if isinstance(operand, core.Literal):
                yield np.asarray(operand.val)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if isinstance(value, core.ClosedJaxpr):
                yield from _constants(value)
            elif isinstance(value, core.Jaxpr):
                yield from _inner(value)
            elif isinstance(value, (np.ndarray, jax.Array)):
                yield np.asarray(value)
            elif hasattr(value, "callback_func"):
                yield from _of_python(value.callback_func)


def _of_python(value: Any, known: tuple[int, ...] = ()) -> Iterator[np.ndarray]:
    """The code of a callback to Python, and all values that it holds, as bytes.

    They are held in closures, defaults, partial functions, containers and attributes,
    and not in globals. `known` are the ids of the values being read.
    """
    if id(value) in known:
        return
    if isinstance(value, jax.Array):
        value = views.numbers(value)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(value)
        yield np.frombuffer(f"{array.dtype}{array.shape}".encode(), np.uint8)
        yield np.frombuffer(array.tobytes(), np.uint8)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield np.frombuffer(repr(value).encode(), np.uint8)
    else:
        for one in _held(value):
            yield from _of_python(one, (*known, id(value)))


def _held(value: Any) -> list[Any]:
    """The values in a container, a piece of code, a function or an object."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, dict):
        return [one for pair in value.items() for one in pair]
    if isinstance(value, (list, tuple)):
        return [*value]
    if isinstance(value, CodeType):
        return [value.co_code, value.co_names, value.co_consts]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType):
        cells = [one.cell_contents for one in value.__closure__ or ()]
        return [value.__code__, cells, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, (type, ModuleType)):
        return [value.__name__]
    # A compiled function, such as numpy's, is identified by its name.
    names = type(value).__name__, getattr(value, "__name__", "")
    classes = [vars(one) for one in type(value).__mro__]
    methods = [
        one
        for of_class in classes
        for name, one in sorted(of_class.items())
        if isinstance(one, FunctionType) or not (name.startswith("__") or callable(one))
    ]
    slots = [
        getattr(value, one.__name__, None)
        for one in methods
        if isinstance(one, MemberDescriptorType)
    ]
    methods = [one for one in methods if not isinstance(one, MemberDescriptorType)]
    return [names, methods, getattr(value, "__dict__", {}), slots]


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
