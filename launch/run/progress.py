"""Shows the progress of a run as a bar or as lines, and a warning."""

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tqdm

from launch.machine import processes
from launch.run.loop import Listener, Records
from launch.run.run import Run

QUIET_SECONDS = 3.0  # of compilation, before a line is printed


class Progress(Listener):
    """Shows progress as a bar on a terminal or in a notebook, elsewhere as lines.

    The estimate of the time left is from rounds only, without compilation.
    """

    def __init__(self, headline: Callable[..., dict[str, str]]):
        """Shows the metrics that `headline(records, points)` returns."""
        self._headline = headline
        self._has_shown = self._has_warned = False
        self._bar: Any = None

    def on_start(self, run: Run) -> None:
        self._begin = time.perf_counter()
        self._start, self._trained = run.round, run.totals.seconds
        kind = _bar_kind()
        if kind is not None:
            self._bar = kind(total=run.config.rounds, initial=run.round, unit="round")

    @contextlib.contextmanager
    def on_compile(self, run: Run) -> Iterator[None]:
        """Shows that something is compiled, with a running clock or in one line."""
        done, begin = threading.Event(), time.perf_counter()
        text = f"compiling {run.config.algo} (first time; cached afterwards)"

        def tick() -> None:
            while not done.wait(0.5):
                spent = time.perf_counter() - begin
                if self._bar is not None:
                    self._bar.set_description_str(f"{text} {spent:.0f} s")
                elif spent > QUIET_SECONDS and not self._has_warned:
                    self._has_warned = True
                    print(f"{text} ...", flush=True)

        clock = threading.Thread(target=tick, daemon=True)
        clock.start()
        try:
            yield
        finally:
            done.set()
            clock.join()
            if self._bar is not None:
                self._bar.set_description_str("")
                # The bar's own estimate starts here.
                self._bar.unpause()

    def on_call(self, run: Run, records: Records) -> None:
        """Shows measured metrics, and once the loss of the first rounds."""
        shown = self._headline(records, run.points) if records else _loss(run)
        # A line is printed after the first call, then after each evaluation.
        is_new = shown and (records or not self._has_shown)
        if self._bar is not None:
            self._bar.update(run.round - self._bar.n)
            if is_new:
                self._bar.set_postfix(shown)
        elif is_new:
            text = "  ".join(f"{name} {value}" for name, value in shown.items())
            print(
                f"round {run.round}/{run.config.rounds}  {text}  "
                f"({time.perf_counter() - self._begin:.0f} s{self._left(run)})",
                flush=True,
            )
        self._has_shown = self._has_shown or run.round > self._start

    def on_end(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.close()

    def _left(self, run: Run) -> str:
        """The estimated time of the remaining rounds."""
        if run.round <= self._start or run.round >= run.config.rounds:
            return ""
        spent = run.totals.seconds - self._trained
        left = spent / (run.round - self._start) * (run.config.rounds - run.round)
        return f", {left:.0f} s left"


def _loss(run: Run) -> dict[str, str]:
    """The loss of the last round."""
    total, count = run.simulation.metrics.get("train_loss", ((0.0,), (0.0,)))
    return {"loss": f"{sum(total) / sum(count):.3f}"} if sum(count) else {}


class Divergence(Listener):
    """Warns once that training has diverged, even if no progress is shown."""

    def __init__(self) -> None:
        self._has_warned = False

    def on_call(self, run: Run, records: Records) -> None:
        if run.diverged() is None or self._has_warned:
            return
        self._has_warned = True
        tqdm.tqdm.write(
            f"round {run.diverged()}: a loss or a parameter is not finite; a smaller "
            "--client_lr may help",
            file=sys.stderr,
        )


def shown(headline: Callable[..., dict[str, str]] | None) -> list[Listener]:
    """The first process's listeners: warnings, and progress if there are headlines."""
    if not processes.is_first():
        return []
    return [Divergence(), *([Progress(headline)] if headline is not None else [])]


def _bar_kind() -> Callable[..., Any] | None:
    """tqdm's bar for the present output, None = plain lines."""
    shell = sys.modules.get("IPython")
    if shell is not None and hasattr(shell.get_ipython(), "kernel"):
        with warnings.catch_warnings():
            # Without ipywidgets this is the bar of terminals, which works too.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm as bar

        return bar
    return tqdm.tqdm if sys.stderr.isatty() else None
