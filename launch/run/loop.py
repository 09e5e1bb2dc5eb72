"""The loop of a run and its listeners.

Everything beside training and evaluation is done by listeners:

    on_start                    before the first call
        on_compile              around compilations
        reads_state, on_call    after a call of about ten seconds, with its measurements
    on_done                     after the last call, also if a signal ended the run
    on_end                      at the end, also after an error
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from launch.config import limits
from launch.machine import processes
from launch.run.run import Run
from launch.run.stop import Stop

Records = Sequence[dict[str, Any]]


class Listener:
    """A listener that does nothing, the base of all others; each process has its own.

    Calls must end at multiples of `every` rounds, 0 = anywhere.
    """

    every = 0

    def on_start(self, run: Run) -> None:
        """Called before the first call."""

    def on_compile(self, run: Run) -> contextlib.AbstractContextManager:
        """A context that is entered while something is compiled."""
        return contextlib.nullcontext()

    def reads_state(self, run: Run) -> bool:
        """Asked once before `on_call`, whether this reads the state.

        Otherwise the next rounds may be computing, which have taken its memory.
        """
        return False

    def on_call(self, run: Run, records: Records) -> None:
        """Called after a call; `records` are empty if no evaluation was due."""

    def on_done(self, run: Run) -> None:
        """Called after the last call or a signal, unless an error ended the run."""

    def on_end(self, run: Run) -> None:
        """Called at the end, also after an error."""


class OnRecord(Listener):
    """Calls a function with every record, in the first of several processes."""

    def __init__(self, act: Callable[[dict[str, Any]], None]):
        """Raises ValueError if `act` is not a function."""
        if not callable(act):
            raise ValueError(
                f"on_record={limits.shown(act)}: expected a function of a record"
            )
        self.act = act

    def reads_state(self, run: Run) -> bool:
        return True  # the function may look at the models

    def on_call(self, run: Run, records: Records) -> None:
        for record in records if processes.is_first() else ():
            self.act(dict(record))


def run(run: Run, listeners: Sequence[Listener], stop: Stop, until: int) -> None:
    """Trains and evaluates until a round or a signal.

    Listeners are called in their order, and `stop` is checked after every call.
    """
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
        while run.is_launched or (
            not stop
            and ((run.round < until and not run.is_over) or run.is_due(run.round))
        ):
            # A call is ended early by an evaluation or a checkpoint.
            run.simulation.advance(min(run.next_stop(every), until), run.is_due)
            stop.agree()
            reads = [one.reads_state(run) for one in listeners]
            if not stop and not any(reads):
                run.launch(every, until)
            records = run.measure()
            for one in listeners:
                one.on_call(run, records)
        for one in listeners:
            one.on_done(run)
    finally:
        run.simulation.while_compiling = contextlib.nullcontext
        for one in listeners:
            one.on_end(run)
        with contextlib.suppress(Exception):  # the error that came first says more
            run.land()
    stop.agree()
