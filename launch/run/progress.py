"""Shows the progress of a run as a bar or as lines, and a warning."""

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tqdm

from launch.machine import processes
from launch.run.loop import Listener, Records
from launch.run.run import Run

QUIET_SECONDS = 3.0  # of compilation, before a line is printed
LONG_SECONDS = 30.0  # of a run that says after its first rounds what it will take
STEADY_SECONDS = 2.0  # of rounds, before they say how long others take
SILENT_SECONDS = 60.0  # between lines, before one is printed without an evaluation


class Progress(Listener):
    """Shows progress as a bar on a terminal or in a notebook, elsewhere as lines.

    The time left is that of the rounds and evaluations to come, which are taken to be
    as long as those of this process so far, without compilation.
    """

    def __init__(
        self, headline: Callable[..., dict[str, str]], until: int | None = None
    ):
        """Shows the metrics that `headline(records, points)` returns.

        `until` is the round to stop after, None = the last.
        """
        self._headline, self._until = headline, until
        self._has_shown = self._has_warned = self._has_foretold = False
        self._bar: Any = None

    def on_start(self, run: Run) -> None:
        self._begin = self._said = time.perf_counter()
        self._start, self._trained = run.round, run.totals.seconds
        self._evaluated = run.evaluation_seconds
        self._evaluations = 0
        kind = _bar_kind()
        if kind is not None:
            self._bar = kind(total=self._end(run), initial=run.round, unit="round")

    def _end(self, run: Run) -> int:
        return run.config.rounds if self._until is None else self._until

    @contextlib.contextmanager
    def on_compile(self, run: Run) -> Iterator[None]:
        """Shows that something is compiled, with a running clock or in one line."""
        done, begin = threading.Event(), time.perf_counter()
        text = f"compiling {run.config.algo} (or reading what is compiled already)"

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
        """Shows measured metrics, or the loss of the first rounds and after silence."""
        self._evaluations += bool(records)
        self._foretell(run)
        shown = self._headline(records, run.points) if records else _loss(run)
        is_new = bool(shown) and (bool(records) or not self._has_shown)
        is_new = is_new or self._is_silent()
        if self._bar is not None:
            self._bar.update(run.round - self._bar.n)
            if is_new:
                self._bar.set_postfix(shown)
        elif is_new:
            text = "".join(f"{name} {value}  " for name, value in shown.items())
            print(
                f"round {run.round}/{run.config.rounds}  {text}"
                f"({time.perf_counter() - self._begin:.0f} s{self._left(run)})",
                flush=True,
            )
            self._said = time.perf_counter()
        self._has_shown = self._has_shown or run.round > self._start

    def on_end(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.close()

    def _is_silent(self) -> bool:
        """Whether no line was printed for long. A bar moves with every call."""
        silent = time.perf_counter() - self._said
        return self._bar is None and silent > SILENT_SECONDS

    def _foretell(self, run: Run) -> None:
        """Says once what a long run will take, as soon as rounds have been timed."""
        if self._has_foretold or not self._is_timed(run):
            return
        self._has_foretold = True
        rounds, evaluations, seconds = self._to_come(run)
        if seconds < LONG_SECONDS:
            return
        of_round, of_evaluation = self._costs(run)
        line = f"about {duration(seconds)} left: {rounds} rounds of {of_round:.2g} s"
        if of_evaluation:
            line += f" and {evaluations} evaluations of {of_evaluation:.2g} s"
        if run.config.early_stop:
            line += ", if validation does not end them before"
        tqdm.tqdm.write(line, file=sys.stderr if self._bar is not None else sys.stdout)

    def _costs(self, run: Run) -> tuple[float, float]:
        """Seconds of a round and of an evaluation of this process, 0 without any."""
        rounds, every = max(run.round - self._start, 1), max(self._evaluations, 1)
        trained = run.totals.seconds - self._trained
        return trained / rounds, (run.evaluation_seconds - self._evaluated) / every

    def _is_timed(self, run: Run) -> bool:
        """Whether rounds took long enough, as the first may take longer than others."""
        return run.totals.seconds - self._trained >= STEADY_SECONDS

    def _to_come(self, run: Run) -> tuple[int, int, float]:
        """How many rounds and evaluations are to come, and their seconds."""
        rounds = self._end(run) - run.round
        evaluations = run.evaluations_after(run.round, self._until)
        of_round, of_evaluation = self._costs(run)
        seconds = rounds * of_round + evaluations * of_evaluation
        return rounds, evaluations, seconds

    def _left(self, run: Run) -> str:
        """The estimated time that is left."""
        if not self._is_timed(run) or run.round >= self._end(run):
            return ""
        return f", {duration(self._to_come(run)[2])} left"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def _loss(run: Run) -> dict[str, str]:
    """The loss of the last round."""
    total, count = run.simulation.metrics.get("train_loss", ((0.0,), (0.0,)))
    return {"loss": f"{sum(total) / sum(count):.3f}"} if sum(count) else {}


def of_several(number: int, count: int, taken: Sequence[float]) -> str:
    """Which of several runs begins, and what is left by the seconds of earlier ones."""
    left = (count - number + 1) * sum(taken) / max(len(taken), 1)
    if left < LONG_SECONDS:
        return f"{number} of {count}"
    return f"{number} of {count}; {duration(left)} left if each takes as long"


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


def shown(
    headline: Callable[..., dict[str, str]] | None, until: int | None = None
) -> list[Listener]:
    """The first process's listeners: warnings, and progress if there are headlines."""
    if not processes.is_first():
        return []
    shows = [] if headline is None else [Progress(headline, until)]
    return [Divergence(), *shows]


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
