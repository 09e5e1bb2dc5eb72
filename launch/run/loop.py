"""The loop of a run, and those who listen to it.

Nobody but a listener knows what the loop does, and the loop knows nothing of them:

    on_start                    before the first call
        on_compile              around what is compiled
        on_call                 after a call of about ten seconds, with what it measured
    on_done                     after the last call, also where a signal asked for that
    on_end                      at the end, whatever ended it
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from launch.run import processes
from launch.run.run import Run
from launch.run.stop import Stop

Records = Sequence[dict[str, Any]]


class Listener:
    """Listens to a run, and does nothing; others do one thing of their own.

    Of several processes each has its own listeners.

    Attributes:
        every: Rounds between the calls that it wants to end, 0 = it does not care.
    """

    every = 0

    def on_start(self, run: Run) -> None:
        """Before the first call."""

    def on_compile(self, run: Run) -> contextlib.AbstractContextManager:
        """Gives what is entered while something is compiled."""
        return contextlib.nullcontext()

    def on_call(self, run: Run, records: Records) -> None:
        """After a call; `records` are empty where nothing was due to be measured."""

    def on_done(self, run: Run) -> None:
        """After the last call, unless an error ended it."""

    def on_end(self, run: Run) -> None:
        """At the end, also where an error came."""


class OnRecord(Listener):
    """Calls a function with every record, in the first of several processes."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]):
        self._tell = tell

    def on_call(self, run: Run, records: Records) -> None:
        for record in records if processes.is_first() else ():
            self._tell(dict(record))


def run(
    run: Run, listeners: Sequence[Listener], stop: Stop, until: int | None = None
) -> bool:
    """Advances, measures and tells, until a round or a signal; whether it came there.

    Listeners are told in their order, and `stop` is asked after every call.
    """
    until = run.config.rounds if until is None else until
    every = max((one.every for one in listeners), default=0)

    @contextlib.contextmanager
    def compiling() -> Iterator[None]:
        with contextlib.ExitStack() as entered:
            for one in listeners:
                entered.enter_context(one.on_compile(run))
            yield

    run.simulation.while_compiling = compiling
    try:
        for one in listeners:
            one.on_start(run)
        while not stop and (run.round < until or run.is_due(run.round)):
            # A call is ended early by an evaluation or a checkpoint.
            run.simulation.advance(min(run.next_stop(every), until))
            stop.agree()
            records = run.measure()
            for one in listeners:
                one.on_call(run, records)
        for one in listeners:
            one.on_done(run)
    finally:
        run.simulation.while_compiling = contextlib.nullcontext
        for one in listeners:
            one.on_end(run)
    stop.agree()
    return run.round >= until
