"""What a person sees of a run that goes on: a bar or lines, and a warning."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tqdm

from launch.run import processes
from launch.run.loop import Listener, Records
from launch.run.run import Run

QUIET_SECONDS = 3.0  # of compiling, before a line says so


class Progress(Listener):
    """How far a run is: a bar on a terminal or in a notebook, plain lines elsewhere.

    The time that is left counts rounds alone, not what was compiled before.
    """

    def __init__(self, headline: Callable[..., dict[str, str]]):
        """Shows what `headline(records, points)` makes of what was measured."""
        self._headline = headline
        self._has_shown = self._has_told = False
        self._bar: Any = None

    def on_start(self, run: Run) -> None:
        self._begin = time.perf_counter()
        self._start, self._trained = run.round, run.totals.seconds
        kind = _bar_kind()
        if kind is not None:
            self._bar = kind(total=run.config.rounds, initial=run.round, unit="round")

    @contextlib.contextmanager
    def on_compile(self, run: Run) -> Iterator[None]:
        """Says so while something is compiled: a running clock, or once a line."""
        done, begin = threading.Event(), time.perf_counter()
        text = f"compiling {run.config.algo} (first time; cached afterwards)"

        def tick() -> None:
            while not done.wait(0.5):
                spent = time.perf_counter() - begin
                if self._bar is not None:
                    self._bar.set_description_str(f"{text} {spent:.0f} s")
                elif spent > QUIET_SECONDS and not self._has_told:
                    self._has_told = True
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
                # The bar's own estimate counts from here.
                self._bar.unpause()

    def on_call(self, run: Run, records: Records) -> None:
        """What was measured, if anything was; once the loss of the first rounds."""
        shown = self._headline(records, run.points) if records else _loss(run)
        # Not every call: one line after the first round, then where it was evaluated.
        is_new = shown and (records or not self._has_shown)
        if self._bar is not None:
            self._bar.update(run.round - self._bar.n)
            if is_new:
                self._bar.set_postfix(shown)
        elif is_new:
            text = "  ".join(f"{name} {value}" for name, value in shown.items())
            now = time.perf_counter() - self._begin
            print(
                f"round {run.round}/{run.config.rounds}  {text}  "
                f"({now:.0f} s{self._left(run)})",
                flush=True,
            )
        self._has_shown = self._has_shown or run.round > self._start

    def on_end(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.close()

    def _left(self, run: Run) -> str:
        """How long the rounds that are left take, as the ones before did."""
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
    """Says once that training has diverged, also where no progress is shown."""

    def __init__(self) -> None:
        self._has_warned = False

    def on_call(self, run: Run, records: Records) -> None:
        if run.diverged() is None or self._has_warned:
            return
        self._has_warned = True
        tqdm.tqdm.write(
            f"round {run.diverged()}: a loss or a parameter is no finite number; a "
            "smaller --client_lr may help",
            file=sys.stderr,
        )


def shown(headline: Callable[..., dict[str, str]] | None) -> list[Listener]:
    """Warnings, and progress if it has headlines: in the first of several processes."""
    if not processes.is_first():
        return []
    return [Divergence(), *([Progress(headline)] if headline is not None else [])]


def _bar_kind() -> Callable[..., Any] | None:
    """tqdm's bar for where the output goes; None = plain lines."""
    shell = sys.modules.get("IPython")
    if shell is not None and hasattr(shell.get_ipython(), "kernel"):
        with warnings.catch_warnings():
            # Without ipywidgets it is the bar of terminals, which does too.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm as bar

        return bar
    return tqdm.tqdm if sys.stderr.isatty() else None
