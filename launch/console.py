"""What a person sees on the console while a run goes on and when it is done."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tqdm

from launch import processes
from launch.show import words

if TYPE_CHECKING:
    from launch.experiment import Experiment

QUIET_SECONDS = 3.0  # of compiling, before a line says so


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, records: Sequence[dict[str, Any]]) -> None:
        """After a call."""


class Progress(Silent):
    """How far a run is: a bar on a terminal or in a notebook, plain lines elsewhere.

    The time that is left counts rounds alone, not what was compiled before.
    """

    def __init__(self, experiment: Experiment):
        self._experiment, self._begin = experiment, time.perf_counter()
        self._start, self._trained = experiment.round, experiment.totals.seconds
        self._bar = None
        self._has_shown = self._has_told = False
        kind = _bar_kind()
        if kind is not None:
            self._bar = kind(
                total=experiment.config.rounds, initial=self._start, unit="round"
            )

    def __enter__(self) -> Progress:
        self._experiment.simulation.while_compiling = self._compiling
        return self

    def __exit__(self, *_: object) -> None:
        self._experiment.simulation.while_compiling = contextlib.nullcontext
        if self._bar is not None:
            self._bar.close()

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        """Says so while something is compiled: a running clock, or once a line."""
        done, begin = threading.Event(), time.perf_counter()
        text = (
            f"compiling {self._experiment.config.algo} (first time; cached afterwards)"
        )

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

    def update(self, records: Sequence[dict[str, Any]]) -> None:
        """After a call: what was measured, if anything was."""
        done, rounds = self._experiment.round, self._experiment.config.rounds
        points = self._experiment.points
        shown = words.headline(records, points) if records else self._loss()
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if shown and (records or not self._has_shown):
                self._bar.set_postfix(shown)
        # Not every call: one line after the first round, then where it was evaluated.
        elif shown and (records or not self._has_shown):
            text = "  ".join(f"{name} {value}" for name, value in shown.items())
            now = time.perf_counter() - self._begin
            print(
                f"round {done}/{rounds}  {text}  ({now:.0f} s{self._left(done)})",
                flush=True,
            )
        self._has_shown = self._has_shown or done > self._start

    def _loss(self) -> dict[str, str]:
        """The loss of the last round."""
        metrics = self._experiment.simulation.metrics
        total, count = metrics.get("train_loss", ((0.0,), (0.0,)))
        return {"loss": f"{sum(total) / sum(count):.3f}"} if sum(count) else {}

    def _left(self, done: int) -> str:
        """How long the rounds that are left take, as the ones before did."""
        rounds = self._experiment.config.rounds
        spent = self._experiment.totals.seconds - self._trained
        if done <= self._start or done >= rounds:
            return ""
        return f", {spent / (done - self._start) * (rounds - done):.0f} s left"


def warn_diverged(experiment: Experiment) -> None:
    """Says that training has diverged, also where no progress is shown."""
    if processes.is_first():
        tqdm.tqdm.write(
            f"round {experiment.diverged()}: a loss or a parameter is no finite "
            "number; a smaller --client_lr may help",
            file=sys.stderr,
        )


def shown(experiment: Experiment) -> Silent:
    """The progress of a run, in the first of several processes."""
    return Progress(experiment) if processes.is_first() else Silent()


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
