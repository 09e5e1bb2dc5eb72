"""The host's side of evaluations: they are dispatched for a call, and read later.

What the devices compute is in `evaluate`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_pfl import evaluate, execution, metric_kinds, scores, stacked, types
from fedjax_pfl.call import Call, Totals
from fedjax_pfl.program import Compiled, Program
from fedjax_pfl.rows import kinds
from fedjax_pfl.windows import Windows, placed

# The means over clients that are taken apart for those that never train
_MEANS = "accuracy", "loss", "perplexity", "masked_perplexity"
_POOLED = "accuracy_pooled", "perplexity_pooled"

# `of_shared` and [(clients of a block, their `of_clients`)], both by the names of
# `Partition.measured`
Found = tuple[dict[str, Any], dict[str, list]]


@dataclasses.dataclass
class Evaluations:
    """Evaluates the states of calls with one program.

    Attributes:
        program, execution, data, rows, windows: Those of the simulation.
        has_evaluated: Whether there was one, so that the next compiles nothing.
        samples: bool[S, K] by a call's seeds, the clients to measure.
    """

    program: Program
    execution: types.Execution
    data: types.Data
    rows: kinds.Rows
    windows: Windows
    has_evaluated: bool = False
    samples: dict[tuple[int, ...], jax.Array] = dataclasses.field(default_factory=dict)

    @property
    def goes_ahead(self) -> bool:
        """Whether an evaluation can be dispatched before its rounds are done.

        It cannot where the host has rows, and should not if it has to be compiled. It
        is not on a GPU, whose loops the host takes part in, nor on several devices of a
        CPU: there dispatching lasts about as long as computing, and the time of rounds
        would be that of evaluations.
        """
        how = self.execution
        if how.platform == "gpu" or (how.platform == "cpu" and how.num_devices > 1):
            return False
        adapts = self.program.scoring.adapts is not None
        goes_by_block = self.rows.goes_by_block(self.program.algorithm)
        return self.has_evaluated and not adapts and not goes_by_block

    def dispatch(self, call: Call, compiled_fn: Callable[..., Callable]) -> Found:
        """Dispatches an evaluation of a call's state, without waiting for results.

        `compiled_fn(function, args)` returns the executable of one of the programs.
        """
        program, shared, found = self.program, {}, {}

        def dispatched(function: Compiled, args: tuple) -> Any:
            out = compiled_fn(function, args)(*args)
            execution.read_soon(out)
            return out

        for block in self._blocks(call):
            members = self._members(call, block)
            for name, partition in call.partition.measured().items():
                args = self._args(call, block, partition)
                if name not in shared:
                    shared[name] = dispatched(program.of_shared, args[:-2])
                of_clients = dispatched(program.of_clients, args)
                if members is not None:
                    args = *args[:-2], members, args[-1]
                    of_clients["adapted"] = dispatched(program.of_adapted, args)
                found.setdefault(name, []).append((block.ids, of_clients))
            if self.rows.goes_by_block(program.algorithm):
                jax.block_until_ready(found)
            del block, args  # their memory is free before the next
        return shared, found

    def read(self, call: Call, found: Found, totals: Totals) -> list[scores.Metrics]:
        """What `Simulation.evaluate` returns of a call, from results as numpy."""
        out, (shared, blocks) = [], found
        of_rounds = call.of_rounds(totals, self.program.algorithm)
        for slot, (_, seed) in enumerate(call.pairs):
            values, of_clients, place = {}, [], call.seeds.index(seed)
            for prefix, partition in call.partition.measured().items():
                mine = [
                    (ids[place % len(ids)], stacked.at(measured, slot))
                    for ids, measured in blocks[prefix]
                ]
                given = stacked.at(shared[prefix], slot), mine
                one, own = self._measured(partition, place, *given)
                values |= metric_kinds.prefixed(prefix, one) if prefix else one
                of_clients.append(own)
            if both := values.keys() & of_rounds[slot].keys():
                raise ValueError(
                    f"algo: its round returned the metric {min(both)}, which is what "
                    "an evaluation gave; give it another name"
                )
            out.append((values | of_rounds[slot], of_clients[0]))
        return out

    def _measured(
        self,
        partition: types.Partition,
        place: int,
        shared: dict[str, Any],
        blocks: Sequence[tuple[np.ndarray, dict[str, Any]]],
    ) -> scores.Metrics:
        """The metrics of one variant on the test rows of a partition.

        `place` is that of its seed in the call. `blocks` have clients int[R] and the
        variant's results for these.
        """
        test = jax.tree.map(lambda leaf: np.asarray(leaf)[place], partition.test)
        count, unseen = test.count, partition.is_unseen[place]
        union, score = int((test.row >= 0).sum()), self.program.scoring.score
        has_trained = self.program.algorithm.trained is not None
        counts = evaluate.joined(shared, blocks, len(count), has_trained)
        counts["are_sampled"] = self.program.scoring.num_sampled > 0
        values, of_clients = _split_metrics(score, counts, count, union, unseen)
        adapted = [(ids, one["adapted"]) for ids, one in blocks if "adapted" in one]
        if adapted:
            counts = evaluate.joined({"serving": ()}, adapted, len(count))
            alone = score.without_measures, counts, count, 0, unseen
            found, tuned = _split_metrics(*alone)
            values |= _fine_tuned(found)
            has_diverged = _have_diverged(counts)
            if has_diverged.any():
                values["fine_tuned_diverged"] = int(has_diverged.sum())
            of_clients |= {
                metric_kinds.FINE_TUNED + name: np.where(has_diverged, np.nan, one)
                for name, one in tuned.items()
            }
        return values, of_clients

    def first_args(self, name: str, call: Call) -> tuple[Any, ...]:
        """Arguments of one of the programs for the first block of a call."""
        block = next(self._blocks(call))
        args = self._args(call, block, call.partition.measured()[""])
        if name == "of_adapted":
            return *args[:-2], self._members(call, block), args[-1]
        return args if name == "of_clients" else args[:-2]

    def _blocks(self, call: Call) -> Iterator[kinds.Block]:
        """The clients of a call in blocks, with the next round's cohorts."""
        drawn = [self.windows.planner.drawn(seed, call.round) for seed in call.seeds]

        def sampled(place: int) -> np.ndarray | None:
            if isinstance(call.state.round, jax.ShapeDtypeStruct):
                return None
            sample = self._sample(call)
            return np.asarray(sample)[place] if len(sample) else None

        return self.rows.blocks(call, self.program.algorithm, drawn, sampled)

    def _sample(self, call: Call) -> Any:
        """bool[S, K], the clients of each seed of a call to measure, () = all.

        They are drawn once, by the seed, whatever a round does to the state's key.
        """
        count, num_clients = self.program.scoring.num_sampled, self.rows.num_clients
        if count and call.seeds not in self.samples:
            drawn = [
                evaluate.sampled_clients(jax.random.key(seed), num_clients, count)
                for seed in np.asarray(call.values)
            ]
            sample = np.stack(list(map(np.asarray, drawn)))
            everywhere = execution.replicated(self.execution)
            self.samples[call.seeds] = execution.place(sample, everywhere)
        return self.samples[call.seeds] if count else ()

    def _members(self, call: Call, block: kinds.Block) -> types.Cohort | None:
        """The clients of a block, [S, ...], with the plan by which they adapt."""
        spec = self.program.scoring.adapts
        if spec is None:
            return None
        ids = np.broadcast_to(block.ids, (len(call.seeds), block.ids.shape[-1]))
        counts = np.asarray(call.partition.adapting.count)
        planner = self.windows.planner
        every = [
            planner.members(seed, call.round, *mine, spec)
            for seed, *mine in zip(call.seeds, ids, counts, strict=True)
        ]
        longest = max(one.plans["adapt"].position.shape[1] for one in every)

        def padded(one: types.Cohort) -> types.Cohort:
            plan = one.plans["adapt"]
            short = longest - plan.position.shape[1]
            position = np.pad(plan.position, ((0, 0), (0, short)))
            return one.replace(plans={"adapt": plan.replace(position=position)})

        members = jax.tree.map(lambda *x: np.stack(x), *map(padded, every))
        return placed(members, self.execution)

    def _args(
        self, call: Call, block: kinds.Block, partition: types.Partition
    ) -> tuple[Any, ...]:
        """Arguments of `Program.of_clients`; without the last two, of `of_shared`."""
        everywhere = execution.replicated(self.execution)
        cohort, ids = execution.place((block.cohort, block.ids), everywhere)
        sample = self._sample(call)
        return call.floats, block.state, cohort, self.data, partition, ids, sample


def _split_metrics(
    score: scores.Score,
    counts: dict[str, Any],
    count: np.ndarray,
    union: int,
    unseen: np.ndarray,
) -> scores.Metrics:
    """`Classes.metrics` of the clients that may train, and the means of the others.

    The mean over `unseen` bool[K] has the name of that over the others with `unseen` in
    the place of `client`. Models of the server are measured on the rows of both.
    """
    if not unseen.any():
        return score.metrics(counts, count, union)

    def only(which: np.ndarray) -> dict[str, Any]:
        """What is known of some clients, with sums of 0 for the others."""
        own = {name: counts[name] for name in ("own", "trained") if name in counts}

        def masked(leaf: np.ndarray) -> np.ndarray:
            return np.where(stacked.column(which, leaf), leaf, np.zeros_like(leaf))

        own = jax.tree.map(masked, own)
        return own | {"known": counts["known"] & which}

    seen = counts | only(~unseen)
    if "scored" in counts:
        is_unseen = np.append(unseen, False)[counts["scored"]]
        seen["scored"] = np.where(is_unseen, len(count), counts["scored"])
    values, of_clients = score.metrics(seen, count, union)
    newcomers = {n: x for n, x in only(unseen).items() if n != "trained"}
    found, others = score.metrics(newcomers, count, 0)
    names = [name for name in _MEANS if f"client_{name}" in found]
    values |= {f"unseen_{name}": found[f"client_{name}"] for name in names}
    if names and (count_of := found[metric_kinds.EVALUATED]) < unseen.sum():
        values |= {f"{metric_kinds.CLIENTS_IN}unseen_{n}": count_of for n in names}
    nowhere = np.full(len(count), np.nan)
    return values, {
        name: np.where(
            unseen, *(one.get(name, nowhere) for one in (others, of_clients))
        )
        for name in of_clients | others
    }


def _fine_tuned(found: Mapping[str, float]) -> dict[str, float]:
    """Renames the means of `_split_metrics`, and the pooled ones, to fine-tuned ones.

    An accuracy without a loss is left out: it would count answers of nan.
    """
    pairs = {"client": "fine_tuned", "unseen": "unseen_fine_tuned"}
    return {
        f"{of}{new}_{name}": found[f"{of}{old}_{name}"]
        for of in ("", metric_kinds.CLIENTS_IN)
        for old, new in pairs.items()
        for name in (*_MEANS, *_POOLED)
        if f"{of}{old}_{name}" in found
        if "accuracy" not in name or f"{old}_loss" in found
    }


def _have_diverged(counts: Mapping[str, Any]) -> np.ndarray:
    """bool[K]: the clients to which fine-tuning gave answers that are not finite."""
    bad = [
        ~np.isfinite(leaf.reshape(len(leaf), -1)).all(1)
        for leaf in jax.tree.leaves(counts["own"])
    ]
    return np.any(bad, axis=0) & counts["known"]
