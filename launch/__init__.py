"""All that a person starts: main, bench, plot, reproduce and list."""

import os
import signal
import sys


def _leave(*_: object) -> None:
    """Ends the process at once: while modules are imported there is nothing to save."""
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def imported() -> None:
    """Gives Ctrl-C back to Python; a command calls this first."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Importing jax takes seconds, and a KeyboardInterrupt in them ends in a traceback. The
# name "-m" stands there only while `python -m launch.<command>` looks for the command:
# a notebook that imports this package keeps its own handler.
if sys.argv[:1] == ["-m"]:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
