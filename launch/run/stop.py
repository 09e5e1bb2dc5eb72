"""Signals that ask a run to stop: remembered until the call in progress is done."""

from __future__ import annotations

import signal
import sys
import threading

from launch.run import processes


class Stop:
    """Remembers SIGINT and SIGTERM while it is entered.

    An exception in the middle of a call would lose the state, whose buffers the call
    has taken; so the loop asks `signal` after every call.
    """

    def __init__(self, twice_interrupts: bool = True) -> None:
        """Where the process ends with it a second SIGINT may interrupt at once."""
        self.signal: int | None = None
        self._noted = 0
        self.twice_interrupts = twice_interrupts

    def __enter__(self) -> Stop:
        self.before = {}
        # Python lets only the main thread have handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def agree(self) -> None:
        """With several processes: a signal that one of them got is everybody's now."""
        self.signal = max(processes.gathered(self._noted)) or None

    def __bool__(self) -> bool:
        return self.signal is not None

    def _note(self, number: int, _: object) -> None:
        again = self._noted and number == signal.SIGINT
        if again and self.twice_interrupts:
            raise KeyboardInterrupt
        self._noted = number
        # One of several stops when all have heard of it: `agree`.
        if not processes.several():
            self.signal = number
        print("\nstopping after this call ...", file=sys.stderr, flush=True)
