"""Records signals that ask a run to stop, until the call in progress is done."""

from __future__ import annotations

import signal
import sys
import threading

from launch.machine import processes


class Stop:
    """Records SIGINT and SIGTERM inside its context.

    An exception during a call would lose the state, whose buffers are donated to the
    call. The loop therefore checks `signal` after every call.
    """

    def __init__(self, twice_interrupts: bool = True) -> None:
        """`twice_interrupts`: whether a second SIGINT interrupts at once."""
        self.signal: int | None = None
        self._noted = 0
        self.twice_interrupts = twice_interrupts

    def __enter__(self) -> Stop:
        self.before = {}
        # Only the main thread can set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def agree(self) -> None:
        """Shares a signal that one of several processes got with all of them."""
        self.signal = max(processes.gathered(self._noted)) or None

    def ask(self, number: int) -> None:
        """Asks the run to stop after this call, unless a signal did."""
        self._noted = self._noted or number

    def __bool__(self) -> bool:
        return self.signal is not None

    def _note(self, number: int, _: object) -> None:
        if self._noted and number == signal.SIGINT and self.twice_interrupts:
            raise KeyboardInterrupt
        self._noted = number
        # Several processes stop together, see `agree`.
        if not processes.several():
            self.signal = number
        print("\nstopping after this call ...", file=sys.stderr, flush=True)
