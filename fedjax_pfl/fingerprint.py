"""Hashes of what a function computes: its jaxpr with all constants, not its text.

A closure's value, a global constant, a helper or a base class changes the hash, and a
comment or a new name does not. Versions of jax may trace the same function differently.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Addresses, and names of functions that were traced
_NOT_COMPUTED = re.compile(r" at 0x[0-9a-f]+|\bname=[^\s\]]+")


def of(fn: Callable[..., Any], *args: Any, gradient: bool = False) -> str:
    """The SHA-256 of what a function computes, 64 hexadecimal digits.

    Args:
        fn: A function of arrays that jax can trace.
        *args: Arrays or shape structs.
        gradient: Whether the gradient of the sum of its floats in the first argument is
            part of it, as a function may have a gradient of its own (`jax.custom_vjp`).
            Of a callback to Python its code and the numbers that it holds count.

    Example:
        >>> def times(factor):
        ...     return lambda x: factor * x
        >>> of(times(2.0), np.ones(3)) == of(times(2.0), np.ones(3))
        True
        >>> of(times(2.0), np.ones(3)) == of(times(3.0), np.ones(3))
        False
    """
    # A new function, since jax would not trace one that it knows again.
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
            # Not its buffer, which numbers such as bfloat16 do not have.
            digest.update(constant.tobytes())
    return digest.hexdigest()


def _constants(jaxpr: core.ClosedJaxpr) -> Iterator[np.ndarray]:
    """The arrays that a jaxpr holds, those of inner jaxprs too."""
    for constant in jaxpr.consts:
        if jax.dtypes.issubdtype(constant.dtype, jax.dtypes.prng_key):
            constant = jax.random.key_data(constant)
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


def _of_python(fn: Any, known: tuple[int, ...] = ()) -> Iterator[np.ndarray]:
    """The code of a callback to Python, and the numbers and arrays that it refers to.

    These are in closures, defaults, partial functions and attributes of objects, and
    not in globals. `known` are the ids of what is being read.
    """
    if id(fn) in known:
        return
    known += (id(fn),)
    code = fn if isinstance(fn, CodeType) else getattr(fn, "__code__", None)
    if code is not None:
        plain = [one for one in code.co_consts if not isinstance(one, CodeType)]
        yield np.frombuffer(code.co_code + repr(plain).encode(), np.uint8)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from _of_python(inner, known)
    for value in _referred(fn):
        if callable(value):
            yield from _of_python(value, known)
        elif isinstance(value, (bool, int, float, str, np.ndarray, jax.Array)):
            yield np.frombuffer(np.asarray(value).tobytes(), np.uint8)


def _referred(fn: Any) -> list[Any]:
    """What a Python function, method, partial function or callable object holds."""
    if isinstance(fn, (type, CodeType)):
        return []
    if isinstance(fn, functools.partial):
        return [fn.func, *fn.args, *fn.keywords.values()]
    if isinstance(fn, MethodType):
        return [fn.__func__, *getattr(fn.__self__, "__dict__", {}).values()]
    if not isinstance(fn, FunctionType):
        # Of a compiled function, such as numpy's, the name says what it computes.
        names = type(fn).__name__, getattr(fn, "__name__", "")
        return [*names, type(fn).__call__, *getattr(fn, "__dict__", {}).values()]
    cells = [one.cell_contents for one in fn.__closure__ or ()]
    return [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
