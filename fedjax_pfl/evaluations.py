"""The host's side of evaluations: they are dispatched for a call, and read later.

What the devices compute is in `evaluate`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from fedjax_pfl import evaluate, execution, metric_kinds, scores, types
from fedjax_pfl.call import Call
from fedjax_pfl.program import Compiled, Program
from fedjax_pfl.rows import kinds
from fedjax_pfl.windows import Windows


@dataclasses.dataclass
class Evaluations:
    """Evaluates the states of calls with one program.

    Attributes:
        program, execution, data, rows, windows: Those of the simulation.
        has_evaluated: Whether there was one, so that the next compiles nothing.
    """

    program: Program
    execution: types.Execution
    data: types.Data
    rows: kinds.Rows
    windows: Windows
    has_evaluated: bool = False

    @property
    def goes_ahead(self) -> bool:
        """Whether an evaluation can be dispatched before its rounds are done.

        It cannot where the host has rows, and should not if it has to be compiled.
        """
        adapts = self.program.scoring.adapts is not None
        goes_by_block = self.rows.goes_by_block(self.program.algorithm)
        return self.has_evaluated and not adapts and not goes_by_block

    def dispatch(
        self, call: Call, compiled_fn: Callable[[Compiled, tuple], Callable]
    ) -> tuple[dict[str, Any], dict[str, list]]:
        """Dispatches an evaluation of a call's state, without waiting for results.

        `compiled_fn` returns the executable of a function for its arguments. Returns
        (`of_shared`, [(clients of a block, their `of_clients`)]), both by the names of
        `Partition.measured`.
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
                    shared[name] = dispatched(program.of_shared, args[:-1])
                of_clients = dispatched(program.of_clients, args)
                if members is not None:
                    args = *args[:-1], members
                    of_clients["adapted"] = dispatched(program.of_adapted, args)
                found.setdefault(name, []).append((block.ids, of_clients))
            if self.rows.goes_by_block(program.algorithm):
                jax.block_until_ready(found)
            del block, args  # their memory is free before the next
        return shared, found

    def read(
        self, call: Call, shared: dict[str, Any], found: dict[str, list]
    ) -> list[scores.Metrics]:
        """The metrics of a call's variants, from the results of `dispatch` as numpy."""
        parts = call.partition.measured()
        what = self.program.algorithm, self.program.scoring.score
        measured = [
            call.measured(partition, shared[name], found[name], *what)
            for name, partition in parts.items()
        ]
        out = []
        for (values, accuracies), *others in zip(*measured, strict=True):
            for prefix, (one, _) in zip([*parts][1:], others, strict=True):
                values = values | metric_kinds.prefixed(prefix, one)
            out.append((values, accuracies))
        return out

    def first_args(self, name: str, call: Call) -> tuple[Any, ...]:
        """Arguments of one of the programs for the first block of a call."""
        block = next(self._blocks(call))
        args = self._args(call, block, call.partition.measured()[""])
        if name == "of_adapted":
            return *args[:-1], self._members(call, block)
        return args if name == "of_clients" else args[:-1]

    def _blocks(self, call: Call) -> Iterator[kinds.Block]:
        """The clients of a call in blocks, with the next round's cohorts."""
        drawn = [self.windows.planner.drawn(seed, call.round) for seed in call.seeds]

        def sampled(place: int) -> np.ndarray | None:
            count = self.program.scoring.num_sampled
            if not count or isinstance(call.state.round, jax.ShapeDtypeStruct):
                return None
            key = call.state.key[place * (len(call.pairs) // len(call.seeds))]
            return np.asarray(
                evaluate.sampled_clients(key, self.rows.num_clients, count)
            )

        return self.rows.blocks(call, self.program.algorithm, drawn, sampled)

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
        return execution.place(members, execution.replicated(self.execution))

    def _args(
        self, call: Call, block: kinds.Block, partition: types.Partition
    ) -> tuple[Any, ...]:
        """Arguments of `Program.of_clients`; without the last, of `of_shared`."""
        everywhere = execution.replicated(self.execution)
        cohort, ids = execution.place((block.cohort, block.ids), everywhere)
        return call.floats, block.state, cohort, self.data, partition, ids
