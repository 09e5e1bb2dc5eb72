"""An experiment in memory: a run with what notebooks ask of it; `main` wraps it."""

from __future__ import annotations

import contextlib
import functools
import numbers
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import algorithms
from fedjax_pfl import types
from launch.config import flagfile, registry
from launch.folder import workdir
from launch.run import assemble, client_model, devices, loop, processes
from launch.run import given as given_lib
from launch.run import progress as progress_lib
from launch.run import stop as stop_lib
from launch.run.run import Run
from launch.show import frames, words

if TYPE_CHECKING:
    import pandas


class Experiment(Run):
    """One configuration, ready to run; see `Run` for its attributes."""

    def run(
        self,
        until: int | None = None,
        *,
        progress: bool = True,
        on_record: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Runs and returns the summary.

        With an option `workdir` everything is written there as the command does it, and
        what is there already is continued (`resume=True`); else it stays in memory.

        Args:
            until: Rounds done in the end, None = all.
            progress: Whether to show how far it is.
            on_record: Called with each record as soon as it is there: one for every
                evaluated round and seed.

        Returns:
            See `summary`.

        Raises:
            ValueError: `until` is no number of rounds of this experiment, the folder
                belongs to another run, or files are wanted without a `workdir`.
            OSError: results cannot be written.
            KeyboardInterrupt: after SIGINT or SIGTERM, once the call in progress is
                done; `run()` goes on from there.
        """
        rounds = self.config.rounds
        until = rounds if until is None else until
        if not isinstance(until, numbers.Integral) or not 0 <= until <= rounds:
            raise ValueError(f"until={until!r}: expected 0..{rounds} rounds")
        for name in ("tensorboard", "csv"):
            if getattr(self.config, name) and not self.config.workdir:
                raise ValueError(f"{name}=True writes files; give a workdir, too")
        with contextlib.ExitStack() as entered:
            folder = None
            if self.config.workdir:
                folder = entered.enter_context(self.folder)
                if folder.open(restores=True) is not None and progress:
                    path = folder.path
                    processes.say(f"{path} holds this run, finished", flush=True)
            if progress and not self.round:
                processes.say(words.rules(self), flush=True)
            stop = entered.enter_context(stop_lib.Stop(twice_interrupts=False))
            shown = self.listeners(folder, progress, on_record)
            loop.run(self, shown, stop, until)
            if folder is not None and self.round == rounds:
                folder.finish(self.summary)
        if stop:
            raise KeyboardInterrupt(f"stopped after round {self.round}; run() goes on")
        return self.summary()

    @functools.cached_property
    def folder(self) -> workdir.Workdir:
        """The folder of the run; see `workdir.Workdir`."""
        return workdir.Workdir(self)

    def listeners(
        self,
        folder: workdir.Workdir | None,
        progress: bool = True,
        on_record: Callable[[dict[str, Any]], None] | None = None,
    ) -> list[loop.Listener]:
        """Who listens: a folder, if there is one, first, and again when all know."""
        out: list[loop.Listener] = [folder] if folder is not None else []
        out += progress_lib.shown(words.headline if progress else None)
        out += [loop.OnRecord(on_record)] if on_record is not None else []
        return out + ([workdir.Checkpoints(folder)] if folder is not None else [])

    def params(
        self,
        client_id: int,
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> types.Params:
        """The parameters that serve a client right now, a tuple of stages."""
        return self.client_model(client_id, seed, point).variables.params

    def client_model(
        self,
        client_id: int | None = None,
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> client_model.ClientModel:
        """The model that serves a client right now, with its statistics.

        Args:
            client_id: 0..K-1; None = the server's first model.
            seed: One of `seeds`; None = the first.
            point: One of `points`; None = the first.

        Raises:
            ValueError: there is no such client, seed, point or model.
        """
        return client_model.find(self, client_id, seed, point)

    def predict(
        self,
        client_id: int | None,
        images: Any,
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> np.ndarray:
        """Probabilities f32[N, Y] of the classes, by the model that serves a client.

        Args:
            client_id, seed, point: See `client_model`.
            images: As the data set has them, [N, ...]: they are fitted and normalised
                as in training.
        """
        return self.client_model(client_id, seed, point).predict(images)

    def evaluate(
        self,
        x: Any,
        y: Any,
        client_id: int | None = None,
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Accuracy (0..1) and mean cross-entropy of a model on examples of your own.

        Args:
            x: Images as the data set has them, [N, ...].
            y: Labels, integers [N].
            client_id, seed, point: See `client_model`.
        """
        return self.client_model(client_id, seed, point).evaluate(x, y)

    def save_model(
        self,
        path: Any,
        client_id: int | None = None,
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> pathlib.Path:
        """Writes the model that serves a client; see `model_files`.

        Args:
            path: Ends in `.msgpack` (flax.serialization) or `.npz` (numpy).
            client_id, seed, point: See `client_model`.
        """
        return self.client_model(client_id, seed, point).save(path)

    def to_frame(self) -> pandas.DataFrame:
        """`metrics` as a table: one line for every evaluated round, seed and point.

        The accuracies of a sweep are of test rows: choosing a point by them would be
        training on them.
        """
        return frames.of(self.metrics)

    def partition_counts(self, seed: int | None = None) -> pandas.DataFrame:
        """Train examples of each client (lines) and class; None = the first seed."""
        return frames.partition_counts(self, seed)

    def plot(self, kind: str = "curves", metric: str = "") -> Any:
        """A picture of `launch.plot`, a matplotlib figure that notebooks show.

        Args:
            kind: `curves`, `fairness`, `bubbles` or, of a sweep, `heatmap`.
            metric: Of the curves, separated by commas; empty = a usual one.
        """
        return frames.plot([self], kind, metric)

    def __repr__(self) -> str:
        return words.described(self)

    def _repr_html_(self) -> str:
        return frames.html(self)


def experiment(**given: Any) -> Experiment:
    """Builds an experiment from option names and values, as the command line does.

    `experiment(algo="fedavg", rounds=5).run()`. Names are those of the flags; None
    means the default. Four of them may be more than names:

    * `algo`: an algorithm of your own, a module or any object with a dataclass
      `HParams` and a function `make`;
    * `dataset`: arrays `(x, y)` or `(x, y, client)`, as `loaders.from_arrays` takes
      them;
    * `model`, `client_model`: a linen module (one stage), or a list of modules (its
      stages, for methods that treat layers differently);
    * `sweep`: `{"client_lr": [0.01, 0.1]}`, values of the algorithm's numbers: a run
      for every point, all in one program. Nothing here chooses the best of them: that
      takes rows of validation, which there are not yet.

    Returns:
        An `Experiment`: `run()`, `to_frame()`, `plot()`, `predict(client_id, images)`.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    return assemble.assemble(given_lib.settled(**given), kind=Experiment)


def load(path: Any, **given: Any) -> Experiment:
    """Opens the folder of a run, finished or stopped, as it stands there.

    `load("runs/mine", rounds=200).run()` goes on from its last checkpoint.

    Args:
        path: The folder, as `--workdir` named it.
        **given: Options that replace the run's own, such as a larger `rounds`; and what
            a folder does not hold: `dataset`, `model` or `algo` of your own.

    Raises:
        ValueError: one line: there is no run, or it is of other data or options.
    """
    devices.begin(given.get("distributed") or "")
    processes.meet("load")
    told_by = pathlib.Path(path) / workdir.RUN_FLAGS

    def read() -> dict[str, str]:
        if not told_by.is_file():
            raise ValueError(
                f"{told_by.parent} holds no run: there is no {told_by.name} in it"
            )
        return flagfile.RunFlags.read(told_by).options

    told = processes.on_first(read)
    algo = given.get("algo", told["algo"])
    if isinstance(algo, str) and algo not in algorithms.ALGORITHMS:
        raise ValueError(
            f"{path}: --algo={algo} was an algorithm of your own; give it: algo=..."
        )
    registry.algorithm(algo)
    try:
        options = flagfile.RunFlags(told).typed(algo)
    except ValueError as error:
        raise ValueError(f"{told_by}: {error}") from error
    if options.get("client_model") == options.get("model"):
        # The default, also of another model that is given.
        options.pop("client_model", None)
    for name in ("model", "client_model"):
        if options.get(name, "").startswith("own_") and name not in given:
            raise ValueError(
                f"{path}: --{name}={options[name]} was a module of your own; give it: "
                f"{name}=..."
            )
    # Of ways to train clients together the one that is given.
    ways = {"lanes"}, {"client_chunk", "min_chunk"}
    for mine, others in (ways, ways[::-1]):
        if mine & given.keys():
            options = {k: v for k, v in options.items() if k not in others}
    given = given | {"algo": algo, "workdir": str(path), "resume": True}
    made = experiment(**options | given)
    made.folder.reopen()
    return made
