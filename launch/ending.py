"""Turns the end of every command into an exit code, and one line after an error."""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
from absl import flags as absl_flags
from absl import logging as absl_logging

import launch
from launch.config import flagfile, flags
from launch.machine import processes


def command(
    body: Callable[[list[str]], None],
) -> Callable[[Sequence[str] | None], None]:
    """Turns a function of an argv into a command, whose default is `sys.argv`."""

    @functools.wraps(body)
    def run(argv: Sequence[str] | None = None) -> None:
        # The libraries' own messages would hide ours.
        absl_logging.set_verbosity(absl_logging.ERROR)
        logging.getLogger("orbax").setLevel(logging.ERROR)
        with reported():
            body(list(sys.argv if argv is None else argv))

    return run


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Ends a command with one line about a bad request."""
    try:
        yield
    except (ValueError, absl_flags.Error) as error:
        flags.fail(error)


@contextlib.contextmanager
def writing(flag: str, path: object) -> Iterator[None]:
    """Ends a command with one line if the file of a flag cannot be written."""
    try:
        yield
    except OSError as error:
        flags.fail(f"--{flag}={path}: {error}", 1)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turns the errors of a command into one line and an exit code.

    The code is 2 for bad input, 1 for what the machine refuses, such as memory or disk
    space, and 130 for Ctrl-C. A closed pipe (`... | head`) prints no line.
    """
    launch.imported()
    with processes.ended(), _reported():
        yield


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Does so for one process, by raising SystemExit."""
    try:
        try:
            with processes.reaching():
                yield
        finally:
            # Buffered output fails here, or else at exit with a traceback.
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except flagfile.UsageError as error:
        flags.fail(error)
    except processes.Lost as error:
        flags.fail(error, 1)
    except KeyboardInterrupt:
        flags.fail("interrupted; what was saved is kept", 130)
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
            "out of memory; lower --batch_size, --client_chunk, "
            "--num_clients or --image_size, or take a smaller --model",
            1,
        )


def _drop_output() -> None:
    """Drops output that cannot be written, which Python would retry at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
