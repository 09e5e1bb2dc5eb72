"""One call of a program: the variants that it runs, their state and their counters.

A variant is a seed at a point of a sweep, or just a seed where there is no sweep.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl import each_client, execution, metric_kinds, stacked, traffic, types
from fedjax_pfl.variants import Variants

# (sums, counts) of the last round by name, a float for each variant.
Metrics = Mapping[str, tuple[list[float], list[float]]]


@dataclasses.dataclass
class Totals:
    """The host's counters, which survive a resume through the checkpoint.

    `messages` is int64[variants, kinds]. `diverged` int64[variants] is the first round,
    counted from 1, after which a metric or a parameter was not finite, 0 = none.
    `clock` f64[variants] are the simulated seconds of all rounds, None = there is no
    clock. `seconds` are those of training. `samples` and local `steps` are those of the
    plans, `executed` and `executed_steps` include padding.
    """

    messages: np.ndarray
    diverged: np.ndarray
    clock: np.ndarray | None = None
    seconds: float = 0.0
    client_updates: int = 0
    samples: int = 0
    executed: int = 0
    steps: int = 0
    executed_steps: int = 0

    @property
    def padding_efficiency(self) -> float:
        """Real samples over executed ones, which include padding and idle steps."""
        return self.samples / max(self.executed, 1)

    @property
    def step_efficiency(self) -> float:
        """Real local steps over executed ones: a chunk runs to its longest client.

        All plans count in full, in the chunks of the run, including FedICT's on the
        server and CDKT's where the proxy set truncates them. A run that began in an
        earlier version counts from where it was resumed.
        """
        return self.steps / max(self.executed_steps, 1)


class Work(NamedTuple):
    """The cost of rounds, int64[rounds] each, with the names of `Totals`."""

    client_updates: np.ndarray
    samples: np.ndarray
    executed: np.ndarray
    steps: np.ndarray
    executed_steps: np.ndarray


class Pending(NamedTuple):
    """The results of a call's rounds that are not yet accounted for.

    Attributes:
        metrics: (sums, counts) f32[variants] of the last round by name.
        messages: int32[variants, T, kinds], those of each round of the window.
        diverged: int32[variants], the first round, counted from 1, after which
            something was not finite, 0 = none.
        seconds: f32[variants, T], the simulated seconds, () without a clock.
        work: The cost of the rounds.
    """

    metrics: Any
    messages: jax.Array
    diverged: jax.Array
    seconds: Any
    work: Work


@dataclasses.dataclass
class Call:
    """The variants that one call of the program runs.

    Attributes:
        variants: Indices into the run's variants, in order: all points of each seed.
        seeds, values: Their seeds, each once, as indices and as uint32[seeds].
        pairs: Each of its variants with the index of its seed.
        floats: Their float options by name, each f64[variants], or one that they share.
        partition: The data of their seeds, which are its leading axis.
        state: Stacked RoundState, None before the start.
        round: Rounds done.
        pending: The results that `settle` has not yet counted, None = nothing.
        evaluated: What was dispatched to evaluate the present state, None = nothing.
        launched: (results, the round after them, work) of rounds that were dispatched
            and took the present state's memory, None = nothing. See `land`.
        free_since: When the devices became free for these, by `time.perf_counter()`.
        metrics: (sums, counts) of the last round by name, a float for each variant.
    """

    variants: range
    seeds: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    values: np.ndarray
    floats: dict[str, float | np.ndarray]
    partition: types.Partition
    state: types.RoundState | None = None
    round: int = 0
    pending: Pending | None = None
    evaluated: Any = None
    launched: tuple[Any, int, Work] | None = None
    free_since: float = 0.0
    metrics: Metrics = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> slice:
        """The position of its variants in the run's."""
        return slice(self.variants.start, self.variants.stop)

    def init_args(self, data: types.Data) -> tuple[Any, ...]:
        """Arguments of `Program.init`; `data` without its partition."""
        return self.floats, data, self.partition, self.values

    def round_args(
        self, data: types.Data, cohorts: types.Cohort, first: int, count: int
    ) -> tuple[Any, ...]:
        """Arguments of `Program.rounds` for some of the rounds of a window."""
        rounds = np.int32(first), np.int32(count)
        return self.floats, self.state, cohorts, *rounds, data, self.partition

    def load(self, round: int, state: types.RoundState, metrics: Metrics) -> None:
        """Continues from the state of all variants after `round` rounds."""
        self.state, self.round, self.pending = state, round, None
        self.evaluated = self.launched = None
        self.metrics = {
            name: (sums[self.rows], counts[self.rows])
            for name, (sums, counts) in metrics.items()
        }

    def launch(self, executable: Callable, args: tuple, until: int, work: Work) -> None:
        """Dispatches rounds up to `until`; all else stays as it is until `land`."""
        self.free_since = time.perf_counter()
        # The call takes the old state's buffers: no function may be called before
        # the new state is stored, or an interrupt could lose both.
        self.launched = executable(*args), until, work

    @property
    def has_ended(self) -> bool:
        """Whether launched rounds are no longer computing."""
        if self.launched is None:
            return False
        (_, *measured), _, _ = self.launched
        return all(one.is_ready() for one in jax.tree.leaves(measured))

    def land(self) -> None:
        """Goes on to the launched rounds. What they measured pends until `settle`."""
        (state, *measured), until, work = self.launched
        pending = Pending(*measured, work)
        self.state, self.round, self.pending = state, until, pending
        self.evaluated = self.launched = None
        execution.read_soon(measured)

    def settle(self, totals: Totals) -> None:
        """Waits for the pending call of the program and adds its counts, once."""
        if self.pending is None:
            return
        jax.block_until_ready(self.state)
        found = self.pending
        self.metrics = {
            name: tuple(np.asarray(part, np.float64).tolist() for part in pair)
            for name, pair in found.metrics.items()
        }
        totals.messages[self.rows] += np.asarray(found.messages, np.int64).sum(1)
        before, new = totals.diverged[self.rows], np.asarray(found.diverged)
        totals.diverged[self.rows] = np.where(before, before, new)
        if totals.clock is not None:
            # One after another, so that the length of calls does not matter.
            for lasted in np.asarray(found.seconds, np.float64).T:
                totals.clock[self.rows] += lasted
        for name, counts in found.work._asdict().items():
            setattr(totals, name, getattr(totals, name) + int(counts.sum()))
        self.pending = None

    def of_rounds(
        self, totals: Totals, algorithm: types.Algorithm
    ) -> list[dict[str, float]]:
        """The last round's own metrics and the bytes so far, of each variant.

        A metric with a count of 0 is absent, as `TRAINED` where no client of the round
        has test rows. `clients_in_trained_accuracy` is their number if not all have.
        """
        every, num_clients = [], self.partition.test.count.shape[1]
        for slot, (variant, _) in enumerate(self.pairs):
            values = {
                name: total[slot] / number[slot]
                for name, (total, number) in self.metrics.items()
                if number[slot]
            }
            if each_client.TRAINED in values:
                count = int(self.metrics[each_client.TRAINED][1][slot])
                if count < num_clients:
                    values[metric_kinds.CLIENTS_IN + each_client.TRAINED] = count
            sent = traffic.cumulative(totals.messages[variant], algorithm.messages)
            if totals.clock is not None:
                sent["clock"] = float(totals.clock[variant])
            every.append(values | sent)
        return every


def make_calls(
    index: Variants,
    vmaps: Mapping[str, bool],
    partition: types.Partition,
    seeds: Sequence[int],
    values: Sequence[Mapping[str, float]],
    how: execution.Execution,
) -> list[Call]:
    """The calls of a run. Calls of the same seeds share a placed partition.

    `vmaps` are arguments of `Variants.calls`, `partition` is on the host with a leading
    axis of seeds, and `values` are the float options of each point of a sweep by name.
    """
    calls, placed = [], {}
    for mine in index.calls(**vmaps):
        pairs = tuple((variant, index.seed(variant)) for variant in mine)
        of_call = tuple(dict.fromkeys(seed for _, seed in pairs))
        if of_call not in placed:
            part = stacked.at(partition, np.array(of_call))
            placed[of_call] = execution.place_tables(part, how)
        of_each = [values[index.point(variant)] for variant in mine]
        floats = of_each[0]  # also of seeds that are vmapped
        if len(mine) > 1 and index.num_points > 1:
            floats = {name: np.array([one[name] for one in of_each]) for name in floats}
        chosen = np.asarray([seeds[seed] for seed in of_call], np.uint32)
        calls.append(Call(mine, of_call, pairs, chosen, floats, placed[of_call]))
    return calls
