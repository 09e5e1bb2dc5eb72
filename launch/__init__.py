"""The commands and the Python interface of fedjax_pfl."""

import importlib.util
import os
import signal
import sys


def _leave(*_: object) -> None:
    """Ends the process at once, since there is nothing to save during the imports."""
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def imported() -> None:
    """Restores Python's own Ctrl-C handler; a command calls this first."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _check_siblings() -> None:
    """Refuses to start if a user's own file hides one of this project's packages.

    Raises ImportError with the name of the file, or SystemExit(2) in a command.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in ("fedjax_pfl", "algorithms", "models", "data"):
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        where = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
        if os.path.realpath(where).startswith(os.path.realpath(root) + os.sep):
            continue
        line = (
            f"{where} hides this project's package `{name}`; rename it, work in "
            "another folder, or use the command fedjax-pfl, which is not affected"
        )
        if sys.argv[:1] == ["-m"]:
            os.write(2, f"error: {line}\n".encode())
            raise SystemExit(2)
        raise ImportError(line)


_check_siblings()

# Importing jax takes seconds, and a KeyboardInterrupt meanwhile ends in a traceback.
# `sys.argv` is ["-m"] only while `python -m launch.<command>` looks for the command, so
# a notebook that imports this package keeps its own handler.
if sys.argv[:1] == ["-m"]:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
