"""Experiments in memory: a run with the methods that notebooks use."""

from __future__ import annotations

import contextlib
import functools
import html
import numbers
import pathlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from data import files
from fedjax_pfl import types
from launch.assemble import assemble, custom
from launch.assemble import given as given_lib
from launch.config import flagfile, registry
from launch.folder import tracking, workdir
from launch.machine import devices, processes, residence, target
from launch.models_out import client_model, inside
from launch.run import cost, loop, narrow
from launch.run import progress as progress_lib
from launch.run import stop as stop_lib
from launch.run.run import Run
from launch.show import frames, words

if TYPE_CHECKING:
    import pandas


class Experiment(Run):
    """One configuration, ready to run; see `Run` for its attributes."""

    _has_shown_notes = False
    said: set[str] | None = None  # lines of a comparison's other rows, None = alone

    def run(
        self,
        until: int | None = None,
        *,
        progress: bool = True,
        on_record: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Runs and returns the summary.

        With an option `workdir` everything is written there as by the command, and
        `resume=True` continues the run that is there. Without it all stays in memory.

        Args:
            until: The round to stop after, None = the last.
            progress: Whether to show progress. Without it `notes` are Python warnings.
            on_record: Called at once with each record, of one evaluated round and seed.

        Raises:
            ValueError: `until` is not a round of this experiment, `on_record` is not a
                function, the folder belongs to another run, or an option writes files
                but there is no `workdir`.
            OSError: results cannot be written.
            KeyboardInterrupt: after SIGINT or SIGTERM, once the call in progress is
                done. `run()` continues from there.
        """
        self.check_target()
        rounds = self.config.rounds
        until = rounds if until is None else until
        if not isinstance(until, numbers.Integral) or not 0 <= until <= rounds:
            raise ValueError(
                f"until={until!r}: expected 0..{rounds} rounds; extend(...) adds rounds"
            )
        records = [loop.OnRecord(on_record)] if on_record is not None else []
        for name in ("tensorboard", "csv", "wandb", "keep_best"):
            if getattr(self.config, name) and not self.config.workdir:
                raise ValueError(f"{name} writes files; give a workdir too")
        stop = stop_lib.Stop(twice_interrupts=False)
        with self.folder if self.config.workdir else contextlib.nullcontext() as folder:
            done = folder and folder.open(restores=True)
            if done is not None and progress:
                processes.say(f"{folder.path} holds this finished run", flush=True)
            self._show_notes(progress)
            self.train(stop, folder, until, progress=progress, others=records)
        if progress and self.stopped_early and self.round < until:
            processes.say(words.early_stop(self.config, self.round), flush=True)
        if stop:
            raise KeyboardInterrupt(
                f"stopped after round {self.round}; run() continues"
            )
        return self.summary()

    def _show_notes(self, progress: bool) -> None:
        """Shows rules and notes once; without progress the notes, as warnings."""
        if self._has_shown_notes or not processes.is_first():
            return
        self._has_shown_notes = True
        if progress:
            lines = words.rules(self, is_alone=self.said is None)
            if not self.config.workdir:
                line = "without a workdir this run is gone with the process"
                lines.append(f"note: {line}")
            said = set() if self.said is None else self.said
            for line in lines:
                if line not in said:
                    processes.say(line, flush=True)
            said.update(lines)
            return
        for note in self.notes:
            warnings.warn(f"note: {note}", stacklevel=3)

    @functools.cached_property
    def folder(self) -> workdir.Workdir:
        """The folder of the run; see `workdir.Workdir`."""
        return workdir.Workdir(self)

    def train(
        self,
        stop: stop_lib.Stop,
        folder: workdir.Workdir | None = None,
        until: int | None = None,
        *,
        progress: bool = True,
        others: Sequence[loop.Listener] = (),
    ) -> None:
        """Trains until a round or a signal, as `run` and the command do.

        `stop` records signals meanwhile. An opened `folder` is the first listener; its
        checkpoints are the last, which also write its summary after the last round.
        `until` is the round to stop after, None = the last. `others` come after the
        progress.
        """
        until = self.config.rounds if until is None else until
        shown = progress_lib.shown(words.headline if progress else None, until)
        every = [*shown, *others, narrow.Narrow(until)]
        if folder is not None:
            if self.config.wandb:
                every.append(tracking.Wandb(self.config.wandb, str(folder.path)))
            if self.config.tensorboard:
                every = [tracking.TensorBoard(folder.path), *every]
            best = [workdir.Best(folder)] if self.config.keep_best else []
            every = [folder, *every, *best, workdir.Checkpoints(folder)]
        with stop:
            loop.run(self, every, stop, until)

    def params(
        self,
        client_id: int | str | None = None,
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> types.Params:
        """A tuple of stages: a client's personalized model's, None = the server's."""
        return self.client_model(client_id, seed, point).variables.params

    def client_model(
        self,
        client_id: int | str | None = None,
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> client_model.ClientModel:
        """The present personalized model of a client, or the server's model.

        `client_id` is 0..K-1 or an owner's name, None = the server's first model.
        `seed` is one of `seeds`, None = the first. A sweep needs one of `points`.
        Raises ValueError if there is no such client, seed, point or model.
        """
        return client_model.find(self, client_id, seed, point)

    def predict(
        self,
        client_id: int | str | None,
        images: Any,
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> np.ndarray:
        """Probabilities f32[N, Y] of the classes by a model, see `client_model`.

        The images [N, ...] are as in the data set, and are laid out, fitted and
        normalised here. The columns are in the order of `classes`.
        """
        return self.client_model(client_id, seed, point).predict(images)

    def evaluate(
        self,
        x: Any,
        y: Any,
        client_id: int | str | None = None,
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Accuracy (0..1) and mean cross-entropy of a model, see `client_model`.

        `x` are images [N, ...] and `y` their labels [N], both as in the data set.
        """
        return self.client_model(client_id, seed, point).evaluate(x, y)

    def rows(
        self, client_id: int | str, split: str = "test", seed: int | None = None
    ) -> np.ndarray:
        """The numbers of a client's rows in the data set, int[n].

        `split` is `train`, `val` or `test`; None is the first seed.
        """
        return inside.rows(self, client_id, split, seed)

    def predictions(
        self,
        client_id: int | str,
        split: str = "test",
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> pandas.DataFrame:
        """A line for each of a client's rows: row, label, predicted, probability.

        The answers are those of the model that serves the client, see `client_model`.
        """
        return inside.predictions(self, client_id, split, seed, point)

    def confusion(
        self,
        client_id: int | str,
        split: str = "test",
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> pandas.DataFrame:
        """Numbers of a client's rows by label (lines) and answer (columns)."""
        return inside.confusion(self, client_id, split, seed, point)

    def embeddings(
        self,
        client_id: int | str,
        stage: int | str,
        split: str = "test",
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> np.ndarray:
        """The output f32[n, ...] of a stage, by name or index, on a client's rows.

        Of a stage with an exit it is the exit's. The model is that of `client_model`.
        """
        return inside.embeddings(self, stage, client_id, split, seed, point)

    def save_model(
        self,
        path: Any,
        client_id: int | str | None = None,
        seed: int | None = None,
        point: Mapping[str, float] | None = None,
    ) -> pathlib.Path:
        """Writes a model, see `client_model`, to a file; `ClientModel.save`."""
        return self.client_model(client_id, seed, point).save(path)

    def cost_analysis(self) -> dict[str, Any]:
        """The result of `cost.estimate` for `target`; ValueError if there is none."""
        if not self.target:
            raise ValueError("cost_analysis(): give a target to build.experiment")
        return cost.estimate(self)

    def to_frame(self) -> pandas.DataFrame:
        """`metrics` as a table: one line for every evaluated round, seed and point."""
        return frames.of(self.metrics)

    def client_metrics(self) -> pandas.DataFrame:
        """Clients' own accuracies and `eval_metrics`, for each round, seed and point.

        The rounds are those of the summary, without a line before the first of them, or
        with `client_metrics="every"` all that were evaluated. A text has perplexities.
        """
        return frames.client_metrics(self)

    def partition_counts(self, seed: int | None = None) -> pandas.DataFrame:
        """Train examples of each client (lines) and class; None = the first seed.

        Classes have their names, and `owners` has those of the clients.
        """
        return frames.partition_counts(self, seed)

    def plot(self, kind: str = "curves", metric: str = "", **how: str) -> Any:
        """A picture of `launch.plot` as a matplotlib figure.

        `kind` is `curves`, `ecdf`, `fairness`, `bubbles` or, for a sweep, `heatmap`.
        `metric` names metrics of the curves, separated by commas; empty = a usual one.
        They are drawn over `x`: `rounds`, `bytes`, `seconds` or `clock`. A `width` of
        `column` or `page` is a paper's, with its fonts and without a title.
        """
        return frames.plot([self], kind, metric=metric, **how)

    def __repr__(self) -> str:
        return words.described(self)

    def _repr_html_(self) -> str:
        head, _, rest = repr(self).partition("\n")
        body = f"<pre>{html.escape(rest)}</pre>" if rest else ""
        return f"<b>{html.escape(head)}</b>{body}"


def experiment(**given: Any) -> Experiment:
    """Builds an experiment from option names and values, as the command line does.

    Examples:
        >>> import numpy as np
        >>> x = np.random.default_rng(0).normal(size=(40, 6))
        >>> y, client = np.arange(40) % 2, np.arange(40) // 10
        >>> data = {"dataset": (x, y, client), "preset": "none"}
        >>> made = experiment(algo="fedper", rounds=2, **data)
        >>> made
        fedper on arrays (natural): 4 clients, 4 a round, mlp, round 0 of 2, rules: none
        >>> "bytes_up" in made.run(progress=False)["metrics"]
        True
        >>> made.predict(3, x).shape
        (40, 2)

    Names are those of the flags, and None means the default. Some options take more
    than text and numbers:

    * `algo`: a custom algorithm, a module or any object with a dataclass `HParams` and
      a function `make`, or the path of a Python file with these, `mine.py`;
    * `dataset`: arrays `(x, y)` or `(x, y, client)`, see `arrays.from_arrays`, a pandas
      or polars DataFrame or a dict with the columns `label=` and `owner=`, a data set
      of torch or Hugging Face, or a dict of these by client or by `train` and `test`,
      see `doors`;
    * `test`, `val`: official test and validation rows beside such a `dataset`, such as
      `(x, y)` or `(x, y, client)`;
    * `public_set`: an array of examples without labels, or what `dataset` may be;
    * `model`, `client_model`: a flax linen or nnx module, a class or function that
      makes an nnx module of `rngs`, a pair of functions `(init, apply)`, a list of
      these (its stages, for methods that treat layers differently), or a function of
      `width` that returns any of them, see `models.own.chain`; `client_model` also a
      dict of such models by name, for clients of several architectures;
    * `split`: names of submodules of the one module `model`, such as `("head",)`, at
      which a new stage begins;
    * `client_optimizer`, `server_optimizer`: an `optax.GradientTransformation`, or a
      function of the learning rate that makes one, such as `optax.adamw`;
    * `eval_metrics`: names, or functions `(logits, labels, mask) -> (sum, count)`, as a
      list or by name;
    * `sweep`: `{"client_lr": [0.01, 0.1]}`, values of the algorithm's float options.
      Runs of all points are trained in one program, and without validation rows none
      is called the best;
    * `target`: a chip, such as `tpu:v5e`, for which the programs are compiled without
      running, see `Experiment.cost_analysis`.

    Returns:
        An `Experiment`: `run()`, `to_frame()`, `plot()`, `predict(client_id, images)`.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    chosen = given.pop("target", None)
    if chosen is not None:
        target.chip(chosen)
        devices.keep_compiled("off")  # for a chip that is not there
        target.devices(chosen)  # before jax looks for chips that are there
    settings = given_lib.settled(**given)
    return Experiment(assemble.assemble(settings, target=chosen or ""))


def load(path: Any, *, round: int | None = None, **given: Any) -> Experiment:
    """Opens the folder of a run, finished or stopped, perhaps a stranger's.

    Options that runs do not record (`export_partition`, `distributed`, `compile_cache`
    and others that act outside of the folder) are not taken from it.

    Args:
        path: The folder, as `--workdir` named it.
        round: The finished rounds after which models and records are wanted, None = the
            last that were saved. `keep_best` keeps those of the best round, which
            `best_rounds()` names. `run()` goes on from the last ones in any case.
        **given: Options that replace the recorded ones, such as a larger `rounds`, and
            what a folder does not hold: a custom `dataset`, `model` or `algo`.

    Raises:
        ValueError: one line: there is no run, no state after `round`, a file cannot be
            read, or it has other data or options.
    """
    given = {name: value for name, value in given.items() if value is not None}
    devices.begin(given.get("distributed", ""))
    processes.meet("load")
    flags_path = files.given(path, "load") / workdir.RUN_FLAGS

    def read() -> dict[str, str]:
        if not flags_path.is_file():
            raise ValueError(
                f"{path} holds no run: there is no {flags_path.name} in it"
            )
        with files.named("", OSError):
            found = flagfile.RunFlags.read(flags_path)
        if note := found.note(flags_path):
            print(note, file=sys.stderr, flush=True)
        return found.options

    recorded = processes.on_first(read)
    algo = given.get("algo", recorded["algo"])
    if "algo" not in given and not registry.is_ours(algo):
        raise ValueError(
            f"{path}: --algo={algo} was a custom algorithm; give its file, as "
            "--algo=FILE.py, or in Python build.load(..., algo=...)"
        )
    registry.algorithm(algo)
    with files.named(str(flags_path)):
        options = flagfile.RunFlags(recorded).typed(algo)
        if "client_state" in options:
            options["client_state"] = residence.recorded(options["client_state"])
    if options.get("client_model") == options.get("model"):
        # The clients' model follows the server's, also if another model is given.
        options.pop("client_model", None)
    options = custom.given_again(options, given, path)
    own = {"workdir": str(flags_path.parent), "resume": True}
    for name, value in own.items():
        if str(given.get(name, value)) != str(value):
            raise ValueError(
                f"load: {name}={given[name]!r}: a run continues in its folder, {path}; "
                "omit it, or copy the folder and load the copy"
            )
    given = given | {"algo": algo} | own
    made = experiment(**options | given)
    with files.named("", OSError):
        made.folder.reopen(round)
    return made
