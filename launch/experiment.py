"""An experiment in memory: what notebooks hold and `main` wraps."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import jax
import numpy as np

from data import plan
from fedjax_pfl import checkpoint, simulate, traffic, types
from fedjax_pfl import program as program_lib
from launch import devices
from launch import stop as stop_lib

COUNTERS = (
    "round",
    "seed",
    "train_loss",
    "bytes_up",
    "bytes_down",
    "seconds",
    "clients_evaluated",
)


class Experiment:
    """One configuration, ready to run.

    Attributes:
        config, hparams: The resolved options.
        simulation: State, round and counters; what advances and evaluates them.
        metrics: A list of dicts, one per evaluated round and seed.
        client_accuracies: f64[seeds, window, K], nan where not evaluated.
    """

    def __init__(
        self,
        *,
        config: Any,
        hparams: Any,
        task: types.Task,
        program: program_lib.Program,
        data: types.Data,
        planner: plan.Planner,
        seeds: list[int],
        window: tuple[int, ...],
        data_sha256: str,
    ):
        self.config, self.hparams, self.task = config, hparams, task
        self.program, self.data, self.planner = program, data, planner
        self.seeds, self.window = seeds, window
        self.data_sha256 = data_sha256
        self.metrics: list[dict[str, Any]] = []
        # Shape fixed by the rule, not by `rounds`, so that a longer run can resume.
        self.client_accuracies = np.full(
            (len(seeds), max(len(window), 10), config.num_clients), np.nan
        )
        self.simulation = simulate.Simulation(
            program, data, planner, seeds, task.execution, config.rounds
        )

    @property
    def round(self) -> int:
        """Rounds done."""
        return self.simulation.round

    @property
    def state(self) -> types.RoundState | None:
        """The stacked RoundState (leading axis: seeds), None before the start."""
        return self.simulation.state

    @property
    def totals(self) -> simulate.Totals:
        """The counters so far."""
        return self.simulation.totals

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return self.simulation.compile_seconds

    def start(self) -> None:
        """Makes the state before the first round, once."""
        self.simulation.start()

    def is_due(self, round: int) -> bool:
        """Whether the state after `round` rounds is to be evaluated and is not yet.

        The summary window is forced whatever `eval_every` says.
        """
        if self.metrics and self.metrics[-1]["round"] >= round:
            return False
        regular = round % self.config.eval_every == 0
        return regular or round in self.window or round == self.config.rounds

    def next_stop(self, every: int = 0) -> int:
        """The next round after which to evaluate or save.

        The present one as long as its evaluation is due.

        Args:
            every: Rounds between checkpoints, 0 = none of their own.
        """
        if self.is_due(self.round):
            return self.round
        now = self.round
        steps = [step for step in (self.config.eval_every, every) if step]
        wanted = [(now // step + 1) * step for step in steps]
        wanted += [later for later in self.window if later > now]
        return min(*wanted, self.config.rounds)

    def evaluate(self) -> list[dict[str, Any]]:
        """Evaluates the present state if that is due; the new entries of `metrics`."""
        if not self.is_due(self.round):
            return []
        records = []
        results = self.simulation.evaluate()
        for index, (values, accuracies) in enumerate(results):
            values = values | self._by_architecture(accuracies)
            record = {"round": self.round, "seed": self.seeds[index], **values}
            records.append(record | {"seconds": round(self.totals.seconds, 3)})
            if accuracies is not None and self.round in self.window:
                self.client_accuracies[index, self.window.index(self.round)] = (
                    accuracies
                )
        self.metrics += records
        return records

    def run(self, until: int | None = None) -> dict[str, Any]:
        """Runs in memory and returns the summary.

        Args:
            until: Rounds done in the end, None = all.

        Returns:
            See `summary`.

        Raises:
            ValueError: `until` is no number of rounds of this experiment.
            KeyboardInterrupt: after SIGINT or SIGTERM, once the call in progress is
                done; `run()` goes on from there.
        """
        rounds = self.config.rounds
        until = rounds if until is None else until
        if not isinstance(until, int) or not 0 <= until <= rounds:
            raise ValueError(f"until={until!r}: expected 0..{rounds} rounds")
        with stop_lib.Stop(twice_interrupts=False) as stop:
            while not stop and (self.round < until or self.is_due(self.round)):
                self.simulation.advance(min(self.next_stop(), until))
                self.evaluate()
        if stop:
            raise KeyboardInterrupt(f"stopped after round {self.round}; run() goes on")
        return self.summary()

    def _by_architecture(self, accuracies: np.ndarray | None) -> dict[str, float]:
        """`client_accuracy_<model>` where the clients have several models."""
        models = self.task.client_models
        if len(models) == 1 or accuracies is None:
            return {}
        group = np.asarray(self.task.group_of_client)
        return {
            f"client_accuracy_{model.name}": float(np.nanmean(accuracies[group == g]))
            for g, model in enumerate(models)
            if np.isfinite(accuracies[group == g]).any()
        }

    def saved(self) -> tuple[Any, dict[str, Any]]:
        """(arrays, host counters): everything that a checkpoint holds."""
        simulation = self.simulation
        arrays = {"state": self.state, "accuracies": self.client_accuracies}
        host = dataclasses.asdict(simulation.totals) | {
            "messages": simulation.totals.messages.tolist(),
            "compile_seconds": simulation.compile_seconds,
            "window": list(self.window),
            "last_round": simulation.metrics,
        }
        return arrays, host

    def saved_template(self) -> Any:
        """Shapes of the arrays of `saved`."""
        return {
            "state": self.simulation.template(),
            "accuracies": self.client_accuracies,
        }

    def load(
        self, round: int, arrays: Any, host: dict[str, Any], metrics: list[dict]
    ) -> None:
        """Continues from what `saved` returned after `round` rounds."""
        host = dict(host)
        self.metrics = list(metrics)
        # A longer run has another window: rounds in both keep their accuracies.
        for slot, done in enumerate(host.pop("window")):
            if done in self.window:
                new = self.window.index(done)
                self.client_accuracies[:, new] = arrays["accuracies"][:, slot]
        messages = np.asarray(host.pop("messages"), np.int64)
        compile_seconds, last = host.pop("compile_seconds"), host.pop("last_round")
        totals = simulate.Totals(
            messages=messages.reshape(self.totals.messages.shape), **host
        )
        self.simulation.load(round, arrays["state"], totals, compile_seconds, last)

    def params(self, client_id: int, seed: int | None = None) -> types.Params:
        """The parameters that serve a client right now, as a tuple of stages.

        Args:
            client_id: 0..K-1.
            seed: One of `seeds`; None = the first.
        """
        if not 0 <= client_id < self.config.num_clients:
            raise ValueError(
                f"client_id={client_id}: expected 0..{self.config.num_clients - 1}"
            )
        self.start()
        if seed is not None and seed not in self.seeds:
            raise ValueError(f"seed={seed}: expected one of {self.seeds}")
        index = self.seeds.index(self.seeds[0] if seed is None else seed)
        state = jax.tree.map(lambda leaf: leaf[index], self.state)
        part = jax.tree.map(lambda leaf: leaf[index], self.data.partition)
        cohort = self.planner.drawn(index, self.round)
        data = self.data.replace(partition=part)
        for group in self.program.algorithm.served(
            state, cohort, data, self.config.num_clients
        ):
            served = np.asarray(group.mask) & (np.asarray(group.client_id) == client_id)
            if served.any():
                slot = int(np.flatnonzero(served)[0])
                row = jax.tree.map(lambda leaf, s=slot: leaf[s], group.own)
                return group.variables(row).params
        raise ValueError(f"client_id={client_id} is served by no model")

    def summary(self) -> dict[str, Any]:
        """The run as numbers: metrics by the summary rule, then speed and versions.

        Before the last round the metrics are those of the last evaluation.
        """
        window, rule = self.window, self.config.summary
        if self.round < self.config.rounds and self.metrics:
            window, rule = (self.metrics[-1]["round"],), "last"
        metrics = summarize(self.metrics, self.seeds, window, rule, self.round)
        totals, seconds = self.totals, max(self.totals.seconds, 1e-9)
        return {
            "metrics": metrics,
            "numbers": sorted(self._numbers() & metrics.keys()),
            "traffic": self._traffic(),
            "rounds": self.round,
            "summary": rule,
            "client_updates_per_second": totals.client_updates / seconds,
            "samples_per_second": totals.samples / seconds,
            "padding_efficiency": totals.samples / max(totals.executed, 1),
            "compile_seconds": self.compile_seconds,
            "peak_memory_bytes": devices.peak_memory_bytes(),
            "setup_bytes_down": self.setup_bytes(),
            "parameters_sha256": checkpoint.digest(
                (self.state.server, self.state.clients)
            ),
            "versions": {
                "python": platform.python_version(),
                "jax": jax.__version__,
                "numpy": np.__version__,
            },
            "backend": jax.default_backend(),
            "device": devices.name(),
            "num_devices": self.task.execution.mesh.size
            if self.task.execution.mesh
            else 1,
            "client_chunk": self.task.execution.chunk,
        }

    def _numbers(self) -> set[str]:
        """Metrics that are no shares: what rounds measure, unless declared as such."""
        return self.simulation.metrics.keys() - set(self.program.algorithm.shares)

    def _traffic(self) -> dict[str, dict[str, Any]]:
        """Messages and their bytes so far: {kind: {direction, messages, bytes}}."""
        kinds = self.program.algorithm.messages
        seeds = [traffic.by_kind(counts, kinds) for counts in self.totals.messages]
        return {
            kind.name: {
                "direction": kind.direction,
                "messages": _spread([one[kind.name][0] for one in seeds]),
                "bytes": _spread([one[kind.name][1] for one in seeds]),
            }
            for kind in kinds
        }

    def setup_bytes(self) -> int:
        """One-off bytes of shipping the proxy set to all; a label has one byte."""
        ships = self.program.algorithm.ships_proxy
        if not ships:
            return 0
        example = np.prod(self.task.example_shape) * self.data.image.dtype.itemsize
        example += ships == "labelled"
        return int(self.task.num_proxy * example * self.config.num_clients)


def summarize(
    records: list[dict[str, Any]],
    seeds: list[int],
    window: tuple[int, ...],
    rule_name: str,
    rounds: int,
) -> dict[str, Any]:
    """Metrics by the summary rule: {name: {mean, std, per_seed}}.

    Args:
        records: One dict per evaluated round and seed.
        seeds: The seeds, in order.
        window: Rounds behind the summary.
        rule_name: `median_last10`, `mean_last10` or `last`.
        rounds: Rounds done; the bytes are those of the last record.
    """
    by_seed: dict[int, dict[str, list[float]]] = {s: {} for s in seeds}
    for record in records:
        if record["round"] in window:
            for name, value in record.items():
                if name not in COUNTERS:
                    by_seed[record["seed"]].setdefault(name, []).append(value)
    rule = np.median if rule_name.startswith("median") else np.mean
    metrics = {}
    shared = set.intersection(*(set(one) for one in by_seed.values()))
    for name in (n for n in by_seed[seeds[0]] if n in shared):
        values = [float(rule(by_seed[seed][name])) for seed in seeds]
        metrics[name] = _spread(values)
    if {"c_spec", "c_gen"} <= metrics.keys():
        # The mean of the two summaries, not the summary of the means.
        spec, gen = metrics["c_spec"]["per_seed"], metrics["c_gen"]["per_seed"]
        means = [(a + b) / 2 for a, b in zip(spec, gen, strict=True)]
        metrics["c_per"] = _spread(means)
    for name in ("bytes_up", "bytes_down"):
        last = [r[name] for r in records if r["round"] == rounds]
        if last:
            metrics[name] = _spread(last)
    return metrics


def _spread(values: list[float]) -> dict[str, Any]:
    """Mean and sample standard deviation (ddof=1) over seeds."""
    std = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "std": std, "per_seed": list(values)}
