"""Variables that hold for what is called inside, such as while a check traces."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def having(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    """Sets a variable of the context for a while."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
