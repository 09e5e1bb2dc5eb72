"""What a person sees on the console while a run goes on and when it is done."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tqdm

from launch import presets, processes, settings, sweep

if TYPE_CHECKING:
    from launch.experiment import Experiment

TITLES = {
    "global_accuracy": "Global",
    "c_spec": "C-Spec",
    "c_gen": "C-Gen",
    "c_per": "C-Per",
    "client_accuracy": "Client (UA)",
    "trained_accuracy": "Trained",
    "train_accuracy": "Global, train rows",
    "exits_disagree": "Exits disagree",
    "dropped_later": "Dropped after round 0",
    "mb_later": "MB after round 0",
    "client_accuracy_pooled": "Client, pooled",
    "worst_decile_accuracy": "Worst decile",
    "client_accuracy_std": "Std over clients",
    "ensemble_accuracy": "Ensemble",
}
QUIET_SECONDS = 3.0  # of compiling, before a line says so
HEADLINES = ("global_accuracy", "c_spec", "c_gen", "c_per")


def title(name: str) -> str:
    """A metric's name for people."""
    exit = re.fullmatch(r"exit(\d+)_accuracy", name)
    if exit:
        return f"Exit {exit[1]}"
    return TITLES.get(name, name.replace("_", " "))


def is_number(summary: Mapping[str, Any], name: str) -> bool:
    """Whether a metric of a run's summary is no share, and so not shown in percent."""
    return name in summary.get("numbers", ())


def headline(
    records: Sequence[dict[str, Any]], points: Sequence[sweep.Point] = ({},)
) -> dict[str, str]:
    """The few metrics worth a line, as percent, mean over the seeds.

    Of a sweep the smallest and the largest of its points' means.
    """
    if len(points) > 1:
        lines = [
            headline([one for one in records if sweep.matches(one, point)])
            for point in points
        ]
        every = {name: [line[name] for line in lines] for name in lines[0]}
        # A point that is no number any more is the largest.
        ends = [
            (name, sorted(v, key=lambda text: (text == "nan", float(text))))
            for name, v in every.items()
        ]
        return {name: " to ".join(dict.fromkeys((v[0], v[-1]))) for name, v in ends}
    shared = set.intersection(*(set(record) for record in records))
    names = [n for n in HEADLINES if n in shared]
    if "c_gen" not in names and "client_accuracy" in shared:
        names.append("client_accuracy")
    names += [n for n in ("trained_accuracy",) if n in shared]
    out = {
        title(n): f"{100 * sum(r[n] for r in records) / len(records):.1f}"
        for n in names
    }
    if "train_loss" in shared:
        loss = sum(r["train_loss"] for r in records) / len(records)
        out["loss"] = f"{loss:.3f}"
    return out


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
        words = (
            f"compiling {self._experiment.config.algo} (first time; cached afterwards)"
        )

        def tick() -> None:
            while not done.wait(0.5):
                spent = time.perf_counter() - begin
                if self._bar is not None:
                    self._bar.set_description_str(f"{words} {spent:.0f} s")
                elif spent > QUIET_SECONDS and not self._has_told:
                    self._has_told = True
                    print(f"{words} ...", flush=True)

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
        shown = headline(records, points) if records else self._loss()
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if shown and (records or not self._has_shown):
                self._bar.set_postfix(shown)
        # Not every call: one line after the first round, then where it was evaluated.
        elif shown and (records or not self._has_shown):
            words = "  ".join(f"{name} {value}" for name, value in shown.items())
            now = time.perf_counter() - self._begin
            print(
                f"round {done}/{rounds}  {words}  ({now:.0f} s{self._left(done)})",
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


def diverged(round: int | None) -> str:
    """Words for a run whose numbers are none from a round on; "" for any other."""
    return f"diverged in round {round}" if round else ""


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


def rules(experiment: Experiment) -> str:
    """Whose rules a run follows, and what is worth knowing of its options."""
    config = experiment.config
    notes = settings.notes(config, experiment.hparams)
    return "\n".join((presets.sentence(config.preset), *notes))


def described(experiment: Experiment) -> str:
    """An experiment in a line, and its numbers so far if there are any."""
    config = experiment.config
    seeds = f", {len(experiment.seeds)} seeds" if len(experiment.seeds) > 1 else ""
    line = (
        f"{config.algo} on {config.dataset} ({config.partition}): {config.num_clients} "
        f"clients, {config.clients_per_round} a round, {config.model}, round "
        f"{experiment.round} of {config.rounds}{seeds}, rules: {config.preset}"
    )
    if not experiment.metrics:
        return line
    return f"{line}\n{table(experiment.summary())}"


def table(summary: dict[str, Any]) -> str:
    """The final table: shares in percent, then numbers; mean and std over the seeds.

    Beside the value by the summary rule stands that of the last round. A sweep has a
    line for each point.
    """
    lines = _sweep_lines(summary) if "sweep" in summary else _lines(summary)
    if summary.get("diverged"):
        lines.append(
            f"{diverged(summary['diverged'])}: losses or parameters are no finite "
            "numbers, and the accuracies say nothing"
        )
    # Runs of earlier versions did not count steps.
    steps = summary.get("step_efficiency")
    of_steps = "" if steps is None else f"of steps {steps:.2f}, "
    lines.append(
        f"{summary['samples_per_second']:,.0f} samples/s, "
        f"{summary['client_updates_per_second']:.1f} client updates/s, compiled in "
        f"{summary['compile_seconds']:.0f} s, efficiency {of_steps}of padding "
        f"{summary['padding_efficiency']:.2f}, on {summary['device']}"
    )
    return "\n".join(lines)


def _rule(summary: Mapping[str, Any]) -> str:
    """What a summary's numbers are of; earlier versions told the rule's name alone."""
    return summary.get("summary_of", summary["summary"])


def _sweep_lines(summary: dict[str, Any]) -> list[str]:
    """A line for each point of a sweep, with the shares that head a table."""
    parts = summary["sweep"]
    wanted = (*HEADLINES, "client_accuracy", "trained_accuracy")
    names = [n for n in wanted if n in parts[0]["metrics"]]
    labels = [sweep.label(part["point"]) for part in parts]
    width = max(map(len, labels))
    seeds = len(parts[0]["metrics"][names[0]]["per_seed"]) if names else 1
    spread = f" +- std over {seeds} seeds" if seeds > 1 else ""
    titles = "  ".join(f"{title(name):>16}" for name in names)
    lines = [f"{'point':<{width}}  {titles}  percent{spread} ({_rule(summary)})"]
    for label, part in zip(labels, parts, strict=True):
        cells = []
        for name in names:
            one = part["metrics"][name]
            std = f" +- {100 * one['std']:.2f}" if seeds > 1 else ""
            cells.append(f"{100 * one['mean']:.2f}{std}")
        told = [f"{c:>16}" for c in cells] + [diverged(part.get("diverged"))]
        lines.append(f"{label:<{width}}  " + "  ".join(filter(None, told)))
    lines.append(
        "of test rows: to choose a point by these would be to train on them (rows of "
        "validation come later)"
    )
    return lines


def _lines(summary: dict[str, Any]) -> list[str]:
    """The metrics of a run without a sweep."""
    seeds = len(next(iter(summary["metrics"].values()))["per_seed"])
    spread = f" +- std over {seeds} seeds" if seeds > 1 else ""
    shown = [n for n in summary["metrics"] if not n.startswith("bytes")]
    numbers = [n for n in shown if is_number(summary, n)]
    shares = [n for n in shown if n not in numbers]
    last = summary.get("last_round", {}) if summary["summary"] != "last" else {}
    lines = []
    for unit, names, scale, digits in (
        ("percent", shares, 100, 2),
        ("number", numbers, 1, 3),
    ):
        if names:
            head = f"{'metric':<18} {unit}{spread}  ({_rule(summary)})"
            lines.append(f"{head}  last round" if last else head)
        for name in names:
            entry = summary["metrics"][name]
            std = f" +- {scale * entry['std']:.{digits}f}" if seeds > 1 else ""
            line = f"{title(name):<18} {scale * entry['mean']:6.{digits}f}{std}"
            if name in last:
                value = f"{scale * last[name]['mean']:.{digits}f}"
                line = f"{line:<{len(head)}}  {value:>10}"
            lines.append(line)
    for name in ("bytes_up", "bytes_down"):
        if name in summary["metrics"]:
            value = summary["metrics"][name]["mean"] / 1e6
            lines.append(f"{'MB ' + name[6:]:<18} {value:,.1f}")
    return lines
