"""A run: its state and its measurements, independent of how they are shown."""

import dataclasses
import functools
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from data import files
from fedjax_pfl import (
    each_client,
    measures,
    metric_kinds,
    scores,
    simulate,
    traffic,
    types,
)
from fedjax_pfl import program as program_lib
from fedjax_pfl.metric_kinds import Kind
from launch.assemble import assemble, computed, notes
from launch.config import limits, sweep
from launch.machine import devices, memory
from launch.run import history, summaries

# The metrics of clients' models before a round's training
_BEFORE = re.compile(r"client_.*|worst_decile_.*")


def _sha256(value: Any) -> str:
    """The SHA-256 of a value's `repr`."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _notes(parts: assemble.Parts) -> tuple[str, ...]:
    """Lines about how a run's options, data and models were taken."""
    settings, program = parts.settings, parts.made.program
    config, source = settings.config, settings.source
    points = parts.points if program.algorithm.unused else parts.points[:1]
    algorithms = [program.algorithm_of(program.floats | one) for one in points]
    is_on_gpu = parts.made.task.execution.platform == "gpu"
    return (
        *notes.of_options(config, settings.hparams, settings.asked, algorithms),
        *source.notes,
        *notes.of_owners(config, source, settings.dropped_owners),
        *(notes.of_gpus(config) if is_on_gpu else ()),
    )


def _num_evaluations(config: Any, window: Sequence[int], after: int = -1) -> int:
    """Counts the rounds behind `after` that are evaluated, see `Run.is_due`."""
    every, rounds = config.eval_every, config.rounds
    others = {r for r in (*window, rounds) if r > after and r % every}
    return rounds // every - after // every + len(others)


class Run:
    """One configuration, ready to run, and its state.

    Attributes:
        config, hparams: The resolved options.
        simulation: State, round and counters, and methods that advance and evaluate.
        points: The points of a sweep as numbers by name, [{}] without a sweep.
        metrics: A dict per evaluated round and variant, which is a seed at a point.
        window: The rounds of the summary, with a best round the last one.
        kept: The values of single clients, by variant: all points of the first seed
            come first, then those of the second, ...
        target: The chip for which it is compiled without running, "" = it runs here.
        settings: What it was assembled from, if there is a target.
        classes: Names in the order of `predict`'s columns, None if they are 0..Y-1.
        owners: With the partition natural the name of each client's owner, None if
            they are 0..K-1.
        dropped_owners: Numbers of rows of owners that were dropped as too small, by
            owner.
        notes: Lines about how options, data and models were taken. A run shows them
            once, with its progress or, without progress, as Python warnings.
        columns: The columns of a table, None of other data.
        num_examples: Rows of the data set, without public images.
        row_numbers: int[num_examples], the rows' numbers before owners were dropped,
            None if none were.
        trained_before: Rows that the models from files, from which this run starts or
            learns, were trained on, None = unknown.
        evaluation_seconds: Seconds of this process's evaluations, without compilation.
        parts_with: `Execution -> (task, program, planner)` for another chunk than the
            chosen one, None = the chunk must not change.
    """

    def __init__(self, parts: assemble.Parts):
        """Takes a run's parts; ValueError if its state does not fit the memory."""
        settings, made = parts.settings, parts.made
        config, source, program = settings.config, settings.source, made.program
        self.config, self.hparams = config, settings.hparams
        self.home = files.here()  # a relative folder stays there
        self.task, self.planner, how = made.task, made.planner, made.task.execution
        self.data, self.seeds, self.target = parts.data, parts.seeds, parts.target
        self.parts_with = made.parts_with
        self.window = summaries.window(config.summary, config.rounds)
        self.settings = settings if parts.target else None
        self.data_sha256, self.split_sha256, self.teacher_sha256 = parts.hashes
        self.own_sha256 = settings.own_sha256
        self.computed_sha256 = parts.computed_sha256
        self.classes, self.columns = source.classes, source.columns
        self.files_layout = source.layout
        self.num_examples, self.row_numbers = len(source.label), source.row
        self.trained_before = tuple(parts.trained_before)
        owners = source.owners if config.partition == "natural" else None
        self.owners = owners and owners[: config.num_clients]
        self.names_sha256 = _sha256((self.classes, self.owners))
        self.columns_sha256 = self.columns and _sha256(self.columns)
        self.dropped_owners = settings.dropped_owners
        self.notes = _notes(parts)
        self.examples_sha256 = settings.identity.data_sha256
        self.points = [dict(point) for point in parts.points]
        self.metrics: list[dict[str, Any]] = []
        self._best: dict[tuple[int, int | None], summaries.Best] = {}
        self.evaluation_seconds = 0.0
        self.kept = self._made_kept(program.scoring.score)
        self.simulation = simulate.Simulation(
            program=program,
            data=self.data,
            planner=self.planner,
            seeds=self.seeds,
            execution=how,
            rounds=config.rounds,
            points=parts.points,
            rows_in=made.rows_in,
            with_rows=made.with_rows,
        )
        self._check_memory(rows_in=made.rows_in)

    def _made_kept(self, score: scores.Score) -> history.Kept:
        """What is kept of single clients, nothing yet.

        Raises ValueError if it is too much, or if a measure has the name of a number of
        the sweep.
        """
        config, measured = self.config, measures.of_single(score.measures)
        every = {*measured, *(f"client_{name}" for name in measured)}
        if taken := every & self.points[0].keys():
            raise ValueError(
                f"--sweep={min(taken)}: one of eval_metrics has that name; rename it"
            )
        moments = ["", metric_kinds.FINE_TUNED] if config.fine_tune_epochs else [""]
        kept = history.Kept(
            [moment + score.of_client for moment in moments],
            measured,
            len(self.seeds) * len(self.points),
            config.num_clients,
            functools.partial(history.BestRound, config.eval_every)
            if self.chooses_round
            else functools.partial(history.LastRounds, self.window),
            has_every=config.client_metrics == "every",
        )
        if kept.every is not None:
            kept.every.check(_num_evaluations(config, self.window))
        return kept

    def _check_memory(self, rows_in: str | None) -> None:
        """Refuses (ValueError) a state that is too large, also one on the host."""
        options, simulation = vars(self.config) | vars(self.hparams), self.simulation
        how = self.task.execution
        kept = [memory.kept(options, simulation.template(), how)]
        if rows_in == "":
            count, chance = simulation.variants.count, self.planner.drawn_chance
            kept.append(memory.on_host(options, simulation.rows, count, chance))
        memory.refuse(kept, options, self.target)

    def compute(self, how: types.Execution) -> None:
        """Continues with clients in other chunks, see `parts_with`."""
        self.task, program, self.planner = self.parts_with(how)
        self.simulation.compute(program, self.planner, how)

    @property
    def program(self) -> program_lib.Program:
        """The compiled programs, which change if the devices hold more rows."""
        return self.simulation.program

    @property
    def can_choose(self) -> bool:
        """Whether validation rows measure it, see `assemble.can_choose`."""
        return assemble.can_choose(self.program.algorithm, self.data.partition)

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of data and code by name, which identify the run with its options.

        The shape of the examples is among them, as hashes are of their bytes.
        `own_sha256` is of the text of custom code, and `computed_sha256` of what it
        computes, as the versions in `computed_by` trace it.
        """
        every = {
            "data_sha256": self.data_sha256,
            "examples_sha256": self.examples_sha256,
            "split_sha256": self.split_sha256,
            "own_sha256": self.own_sha256,
            "computed_sha256": self.computed_sha256,
            "computed_by": computed.versions() if self.computed_sha256 else "",
            "names_sha256": self.names_sha256,
            "columns_sha256": self.columns_sha256,
            "example_shape": "x".join(map(str, self.task.example_shape)),
            "teacher_sha256": self.teacher_sha256,
        }
        return {name: value for name, value in every.items() if value}

    @property
    def round(self) -> int:
        """The number of finished rounds."""
        return self.simulation.round

    @property
    def state(self) -> types.RoundState | None:
        """The stacked RoundState (leading axis: variants), None before the start."""
        return self.simulation.state

    @property
    def totals(self) -> simulate.Totals:
        """The counters so far."""
        return self.simulation.totals

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of what rounds and custom functions measure, by metric."""
        custom = measures.custom_names(self.program.scoring.score.measures)
        names = [*self.simulation.metrics, *custom]
        fractions = *self.program.algorithm.shares, each_client.TRAINED
        return metric_kinds.declared(names, fractions)

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation so far."""
        return self.simulation.compile_seconds

    def start(self) -> None:
        """Creates the state before the first round, once; see `check_target`."""
        self.check_target()
        self.simulation.start()

    def check_target(self) -> None:
        """Raises ValueError if the run is compiled for a chip that is not there."""
        if self.target:
            raise ValueError(
                f"target={self.target!r}: this experiment is compiled and cannot run; "
                "cost_analysis() has its figures, and without target it runs here"
            )

    def is_due(self, round: int) -> bool:
        """Whether to evaluate after `round` rounds, by the window or `eval_every`."""
        if self.metrics and self.metrics[-1]["round"] >= round:
            return False
        regular = round % self.config.eval_every == 0
        return regular or round in self.window or round == self.config.rounds

    def evaluations_after(self, round: int, until: int | None = None) -> int:
        """Counts the rounds behind `round`, -1 = the start's too, that are evaluated.

        They are those of `is_due`, without a look at each, up to `until`, None = the
        last.
        """
        found = _num_evaluations(self.config, self.window, round)
        if until is None:
            return found
        return found - _num_evaluations(self.config, self.window, max(round, until))

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done, or validation has ended the run."""
        return self.round >= self.config.rounds or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        """Whether no variant's validation has become better for `early_stop` rounds."""
        patience = self.config.early_stop
        is_regular = self.round % self.config.eval_every == 0
        if not patience or not is_regular or self.round >= self.config.rounds:
            return False
        if not self.metrics or self.metrics[-1]["round"] < self.round:
            return False
        every = range(self.simulation.variants.count)
        return all(self.round - self.best_round(one) >= patience for one in every)

    def best_round(self, index: int, *, is_regular: bool = False) -> int:
        """The round of a variant that is the best so far, by `--summary`.

        Without any, as after a divergence, the present one counts. With `is_regular` it
        is one of `eval_every`, as if the run went on from its end.
        """
        every, count = self.config.eval_every, self.simulation.variants.count
        last = None if is_regular else self.config.rounds

        def may_be(round: int) -> bool:
            # The end of a shorter run, from which this one goes on, is no candidate
            # between two evaluations.
            return round % every == 0 or round == last

        if (index, last) not in self._best:
            self._best[index, last] = summaries.Best(self._choosing, may_be)
        best = self._best[index, last]
        # Each evaluation has a record of every variant, in order.
        best.read(self.metrics[index + count * best.num_read :: count])
        return self.round if best.round is None else best.round

    def next_stop(self, every: int = 0) -> int:
        """The next round after which to evaluate or save; now if an evaluation is due.

        `every` is the number of rounds between checkpoints, 0 = any.
        """
        return self.round if self.is_due(self.round) else self._stop_after(every)

    def _stop_after(self, every: int) -> int:
        """`next_stop` once the present round has been evaluated."""
        now = self.round
        steps = [step for step in (self.config.eval_every, every) if step]
        wanted = [(now // step + 1) * step for step in steps]
        wanted += [later for later in self.window if later > now]
        return min(*wanted, self.config.rounds)

    @property
    def is_launched(self) -> bool:
        """Whether the next rounds are computing, and have taken the state's memory."""
        return self.simulation.is_launched

    def launch(self, every: int, until: int) -> None:
        """Lets the devices continue, not beyond `until`, before `measure` is called.

        `every` is that of `next_stop`. An evaluation may end a run with `early_stop`.
        """
        if self.round < until and not self.config.early_stop:
            self.simulation.launch(min(self._stop_after(every), until))

    def land(self) -> None:
        """Makes the state whole again if an exception came after `launch`."""
        if self.is_launched:
            self.measure()
            self.simulation.advance(self.round + 1)

    def measure(self) -> list[dict[str, Any]]:
        """Evaluates the state if that is due; returns the new entries of `metrics`."""
        if not self.is_due(self.round):
            return []
        records = []
        begin, compiled = time.perf_counter(), self.compile_seconds
        results = self.simulation.evaluate()
        compiling = self.compile_seconds - compiled
        self.evaluation_seconds += time.perf_counter() - begin - compiling
        variants = self.simulation.variants
        for index, (values, of_clients) in enumerate(results):
            values = values | self._by_architecture(of_clients, variants.seed(index))
            if self.config.eval_moments == "after":
                of_round = self.simulation.metrics.keys()
                values = {
                    name: value
                    for name, value in values.items()
                    if name in of_round or not _BEFORE.fullmatch(name)
                }
            record = {"round": self.round, "seed": self.seeds[variants.seed(index)]}
            record |= {**self.points[variants.point(index)], **values}
            if self.totals.diverged[index]:
                record["diverged"] = int(self.totals.diverged[index])
            records.append(record | {"seconds": round(self.totals.seconds, 3)})
        if self.config.choose_by and not self.metrics:
            self._check_chooses(records)
        self.metrics += records
        self.kept.add(self.round, [one for _, one in results], self._best_of_each())
        return records

    def _check_chooses(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Refuses (ValueError) to choose by what first records show to be undefined."""
        names = summaries.choosing(choose_by=self.config.choose_by)
        if summaries.of_every(names, records):
            return
        odd = [one["seed"] for one in records if one.keys().isdisjoint(names)]
        seed = f" with seed {odd[0]}" if odd and len(self.seeds) > 1 else ""
        raise ValueError(
            f"--choose_by={self.config.choose_by}: the validation rows have no "
            f"{' or '.join(names)}{seed}; omit it, or give more validation rows"
        )

    def extend(self, rounds: int) -> Self:
        """Extends the run to a total of `rounds`, keeps its state, and returns itself.

        Raises ValueError for fewer rounds, or if the longer run's summary needs an
        evaluation of a round that has passed.
        """
        before = self.config.rounds
        if not limits.is_whole(rounds) or rounds < max(before, 1):
            raise ValueError(f"rounds={rounds!r}: expected {before} or more")
        rounds = int(rounds)
        if rounds > limits.INT_LIMIT:
            raise ValueError(f"rounds={rounds}: expected at most {limits.INT_LIMIT}")
        window = summaries.window(self.config.summary, rounds)
        if passed := summaries.passed(window, self.round, self.window):
            given = self.config.summary, rounds, self.round, self.window
            enough = summaries.enough_rounds(*given)
            raise ValueError(
                f"rounds={rounds} needs accuracies of clients after round "
                f"{min(passed)}, which were not kept; give {enough} or more"
            )
        config = dataclasses.replace(self.config, rounds=rounds)
        if self.kept.every is not None:
            self.kept.every.check(_num_evaluations(config, window))
        self.config, self.window = config, window
        self.kept.summary = self.kept.summary.extended(window)
        self.simulation.rounds = rounds
        return self

    def _by_architecture(
        self, of_clients: Mapping[str, np.ndarray], seed: int
    ) -> dict[str, float]:
        """`client_accuracy_<model>`, or a perplexity, if there are several models."""
        models, accuracies = self.task.client_models, of_clients.get(self.kept.names[0])
        if len(models) == 1 or accuracies is None:
            return {}
        unseen = self.data.partition.is_unseen[seed]
        group = np.where(unseen, -1, np.asarray(self.task.group_of_client))
        kind = "perplexity" if self.data.num_words else "accuracy"
        if self.data.masked_loss == "chosen":
            kind = "masked_perplexity"
        out: dict[str, float] = {}
        for number, model in enumerate(models):
            known = accuracies[(group == number) & np.isfinite(accuracies)]
            if len(known):
                name = f"client_{kind}_{model.name}"
                out[name] = float(known.mean())
                out[metric_kinds.CLIENTS_IN + name] = len(known)
        return out

    def saved(self) -> tuple[Any, dict[str, Any]]:
        """The (arrays, host counters) of a checkpoint, valid until the next round."""
        simulation, clock = self.simulation, self.totals.clock
        arrays = {"state": simulation.saved, **self.kept.saved()}
        host = dataclasses.asdict(simulation.totals) | {
            "messages": simulation.totals.messages.tolist(),
            "diverged": simulation.totals.diverged.tolist(),
            "clock": None if clock is None else clock.tolist(),
            "compile_seconds": simulation.compile_seconds,
            "window": list(self.window),
            "last_round": simulation.metrics,
            "has_last": True,
            "client_chunk": self.task.execution.chunk,
        }
        return arrays, host

    def saved_templates(self) -> list[Any]:
        """The shapes of the arrays of `saved`, and other shapes that `load` accepts."""
        simulation = self.simulation
        forms = simulation.rows.templates(simulation.template())
        kept = self.kept.templates()
        return [{"state": state, **one} for one in kept for state in forms]

    def load(
        self, round: int, arrays: Any, host: dict[str, Any], metrics: list[dict]
    ) -> None:
        """Loads what `saved` returned after `round` rounds, with leaves as in views."""
        host, how = dict(host), self.task.execution
        # Earlier versions saved (chunk, lanes), and had no chunks beside lanes.
        before, lanes = host.pop("side_by_side", (how.chunk, 0))
        chunk = host.pop("client_chunk", how.chunk if lanes else before)
        # Keeps a chunk that was chosen to fit the memory, as it gives the same bits.
        if self.parts_with and chunk != how.chunk:
            self.compute(how._replace(chunk=chunk))
        self.metrics, self._best = list(metrics), {}
        has_last = host.pop("has_last", False)
        mended = (lambda values: values) if has_last else self._with_last
        self.kept.load(host.pop("window"), arrays, mended)
        compile_seconds, last = host.pop("compile_seconds"), host.pop("last_round")
        counts = self.totals.messages
        host["messages"] = np.asarray(host["messages"], np.int64).reshape(counts.shape)
        # Earlier versions did not save it.
        diverged = host.get("diverged", self.totals.diverged)
        if self.totals.clock is not None:
            host["clock"] = np.asarray(host["clock"], np.float64)
        totals = simulate.Totals(**host | {"diverged": np.asarray(diverged, np.int64)})
        self.simulation.load(round, arrays["state"], totals, compile_seconds, last)

    def _with_last(self, accuracies: np.ndarray) -> np.ndarray:
        """Accuracies of an earlier version, which kept those of the best round alone.

        Raises ValueError if that is no candidate of this longer run.
        """
        rule, count = self.config.summary, self.simulation.variants.count
        if not self.chooses_round:
            return accuracies
        accuracies = np.array(accuracies)
        for index in range(count):
            names = summaries.choosing(rule)
            best = summaries.best_round(self.metrics[index::count], names) or 0
            if best % self.config.eval_every == 0:
                continue
            if best != self.config.rounds:
                raise ValueError(
                    f"--rounds={self.config.rounds}: the checkpoint is of an earlier "
                    f"version, which kept the clients' accuracies after round {best} "
                    f"alone, and that is not in --eval_every={self.config.eval_every}; "
                    "choose another --workdir"
                )
            accuracies[index, 1], accuracies[index, 0] = accuracies[index, 0], np.nan
        return accuracies

    @property
    def chooses_round(self) -> bool:
        """Whether the summary is of a best round."""
        return self.config.summary in summaries.CHOSEN_BY

    @property
    def _choosing(self) -> tuple[str, ...]:
        """The metrics by which the summary chooses a round.

        With `--choose_by` it is the first that all variants have.
        """
        rule, choose_by = self.config.summary, self.config.choose_by
        names = summaries.choosing(rule, choose_by)
        if not choose_by or rule != summaries.BEST or not self.metrics:
            return names
        first = self.metrics[: self.simulation.variants.count]
        return summaries.of_every(names, first)[:1] or names

    def _best_of_each(self) -> list[int]:
        """Each variant's best round so far; the present one if none is chosen."""
        every = range(self.simulation.variants.count)
        return [self.best_round(n) if self.chooses_round else self.round for n in every]

    @property
    def summary_of_clients(self) -> np.ndarray:
        """Clients' values behind the summary, [variants, window, ...] as in `kept`."""
        return self.kept.summary.of_summary(self._best_of_each())

    def kept_of_clients(self) -> tuple[np.ndarray, np.ndarray]:
        """The evaluations of clients that are kept: those of the summary, or all.

        Returns:
            (the round int64[E, variants] of each evaluation, the clients' values
            f64[E, variants, K], of several names f64[E, variants, Q, K]).
        """
        count = self.simulation.variants.count
        done = list(dict.fromkeys(record["round"] for record in self.metrics))
        if self.kept.every is not None:
            rounds, found = done, self.kept.every.stacked
        elif self.chooses_round:
            several = slice(0, min(len(done), 1))
            found = self.summary_of_clients[:, several]
            return np.array([self._best_of_each()])[several], np.moveaxis(found, 1, 0)
        else:
            slots = [slot for slot, one in enumerate(self.window) if one in done]
            rounds = [self.window[slot] for slot in slots]
            found = np.moveaxis(self.summary_of_clients[:, slots], 1, 0)
        each = np.repeat(np.array(rounds, int)[:, None], count, axis=1)
        return each, found

    def variant(self, seed: int | None, point: Mapping[str, float] | None) -> int:
        """The index of a seed, None = the first, at a point, which a sweep needs.

        Raises ValueError if there is none.
        """
        if point is None and len(self.points) == 1:
            point = self.points[0]
        if point is not None and not isinstance(point, Mapping):
            example = self.points[0] or {"client_lr": 0.1}
            raise ValueError(f"point={point!r}: expected a mapping, such as {example}")
        point = point and dict(point)
        if point not in self.points:
            more = ["..."] * (len(self.points) > 4)
            known = ", ".join([*map(str, self.points[:4]), *more])
            raise ValueError(f"point={point}: expected one of the sweep's, {known}")
        variants = self.simulation.variants
        return variants.index(self.seed_index(seed), self.points.index(point))

    def algorithm_at(self, variant: int) -> types.Algorithm:
        """The algorithm with the numbers of a variant's point."""
        point = self.points[self.simulation.variants.point(variant)]
        return self.program.algorithm_of(self.program.floats | point)

    def seed_index(self, seed: int | None) -> int:
        """The index of a seed, None = the first; ValueError if unknown."""
        if seed is not None and not (limits.is_whole(seed) and seed in self.seeds):
            raise ValueError(f"seed={seed}: expected one of {self.seeds}")
        return 0 if seed is None else self.seeds.index(seed)

    def results(self) -> dict[str, Any]:
        """Metrics by the summary rule, and the rule.

        Before the last round the metrics are those of the last evaluation, and
        `summary_of` says so if it was of an earlier round.
        """
        self.start()
        window, rule = self.window, self.config.summary
        is_early = self.round < self.config.rounds and not self.chooses_round
        if is_early and self.metrics:
            window, rule = (self.metrics[-1]["round"],), "last"
        parts = [self._numbers_of(point, window, rule) for point in self.points]
        choose_by = self.config.choose_by
        in_words = summaries.in_words(rule, window, choose_by)
        if rule == "last" and window[-1] < self.round:
            in_words = f"last evaluation, after round {window[-1]}"
        return {
            # A sweep has a summary for each point, as a mean over them is meaningless.
            **({"metrics": {}, "sweep": parts} if self.config.sweep else parts[0]),
            "diverged": self.diverged(),
            "rounds": self.round,
            **({"stopped_early": True} if self.stopped_early else {}),
            "summary": rule,
            **({"choose_by": choose_by} if choose_by else {}),
            "summary_of": in_words,
            "setup_bytes_down": self.setup_bytes(),
        }

    def summary(self) -> dict[str, Any]:
        """The results, then speed, a hash of all parameters, and versions."""
        results = self.results()
        totals, seconds = self.totals, max(self.totals.seconds, 1e-9)
        how = self.task.execution
        return {
            **results,
            "client_updates_per_second": totals.client_updates / seconds,
            "samples_per_second": totals.samples / seconds,
            "step_efficiency": totals.step_efficiency,
            "padding_efficiency": totals.padding_efficiency,
            "device_balance": self.planner.balance,
            "compile_seconds": self.compile_seconds,
            "peak_memory_bytes": devices.peak_memory_bytes(),
            "parameters_sha256": self.simulation.digest(),
            "versions": devices.versions(),
            "backend": jax.default_backend(),
            "device": devices.name(),
            "num_devices": how.num_devices,
            "client_chunk": how.chunk,
        }

    def _numbers_of(
        self, point: sweep.Point, window: Sequence[int], rule: str
    ) -> dict[str, Any]:
        """The part of a summary about one point of a sweep."""
        found = sweep.of_point(self.metrics, point), self.seeds
        if rule in summaries.CHOSEN_BY:
            window = self.best_rounds(point)
        metrics = summaries.summarize(*found, window, rule, self.round)
        if rule in summaries.CHOSEN_BY and metrics:
            rounds = [float(one) for (one,) in window.values()]
            metrics["best_round"] = summaries.spread(rounds)
        last = summaries.summarize(*found, (self.round,), "last", self.round)
        kinds, shown = self.kinds, metrics.keys() - set(summaries.COUNTERS)
        numbers = [n for n in shown if metric_kinds.of(n, kinds) is not Kind.FRACTION]
        own = [m.name for m in measures.of_user(self.program.scoring.score.measures)]
        names = {name: {f"global_{name}", f"client_{name}_pooled"} for name in own}
        has_server = self.program.algorithm.server is not None
        if self.config.eval_moments == "after" and not has_server:
            own = []  # they are left out, as a note says
        undefined = [name for name in own if metrics and not names[name] & set(metrics)]
        out = {
            "metrics": metrics,
            "diverged": self.diverged(point),
            "last_round": last,
            "numbers": sorted(numbers),
            **({"undefined": undefined} if undefined else {}),
            "traffic": self._traffic(self.points.index(point)),
        }
        return {"point": point, **out} if point else out

    def best_rounds(
        self, point: Mapping[str, float] | None = None
    ) -> dict[int, tuple[int]]:
        """The best round so far of each seed by `--summary`; a sweep needs the point.

        Raises ValueError if the summary is of other rounds, or there is no such point.
        """
        if not self.chooses_round:
            given, rules = self.config.summary, " or ".join(summaries.CHOSEN_BY)
            raise ValueError(f"--summary={given} chooses no round; give {rules}")
        every = [self.variant(seed, point) for seed in self.seeds]
        found = zip(self.seeds, map(self.best_round, every), strict=True)
        return {seed: (round,) for seed, round in found}

    def diverged(self, point: Mapping[str, float] | None = None) -> int | None:
        """The first round, counted from 1, with a loss or parameter that is not finite.

        None if all are finite. Later accuracies are those of the class that the argmax
        of nan gives. `point` is a point of a sweep, None = any.
        """
        rounds = self.totals.diverged
        if point is not None:
            index = self.points.index(dict(point))
            rounds = rounds[self.simulation.variants.at_point(index)]
        return int(rounds[rounds > 0].min()) if rounds.any() else None

    def _traffic(self, point: int) -> dict[str, dict[str, Any]]:
        """Messages and their bytes so far: {kind: {direction, messages, bytes}}."""
        kinds = self.program.algorithm.messages
        counts = self.totals.messages[self.simulation.variants.at_point(point)]
        seeds = [traffic.by_kind(one, kinds) for one in counts]
        return {
            kind.name: {
                "direction": kind.direction,
                "messages": summaries.spread([one[kind.name][0] for one in seeds]),
                "bytes": summaries.spread([one[kind.name][1] for one in seeds]),
            }
            for kind in kinds
        }

    def setup_bytes(self) -> int:
        """Bytes of sending the proxy set, with its labels, to all clients once."""
        ships = self.program.algorithm.ships_proxy
        if not ships:
            return 0
        example = np.prod(self.task.example_shape) * self.data.image.dtype.itemsize
        if ships == "labelled":
            example += traffic.label_bytes(self.task.num_classes)
        return int(self.task.num_proxy * example * self.config.num_clients)
