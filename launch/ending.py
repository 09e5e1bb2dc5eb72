"""How every command ends: with its exit code, and one line if something was wrong."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import jax

import launch
from launch.config import flagfile, flags
from launch.run import processes


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turns what may happen to a command into one line and an exit code.

    Bad input is 2; what the machine refuses, such as memory or a full disk, is 1;
    Ctrl-C is 130. A reader that goes away (`... | head`) is not worth a line.
    """
    launch.imported()
    with processes.ended(), _reported():
        yield


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """`reported`, by SystemExit."""
    try:
        try:
            with processes.reaching():
                yield
        finally:
            # What is still buffered fails here or, with a traceback, at exit.
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except flagfile.UsageError as error:
        flags.fail(error)
    except processes.Lost as error:
        flags.fail(error, 1)
    except KeyboardInterrupt:
        flags.fail("interrupted; what was saved stays (--resume goes on)", 130)
    except BrokenPipeError:
        _drop_output()
        raise SystemExit(141) from None
    except OSError as error:
        _drop_output()
        flags.fail(error, 1)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXH" not in str(error):
            raise
        flags.fail(
            "out of memory; lower --batch_size, --client_chunk (or --lanes) or "
            "--num_clients, or take a smaller --model",
            1,
        )


def _drop_output() -> None:
    """Lets go of output that cannot be written: Python would try again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
