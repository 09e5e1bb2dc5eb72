"""Plans as tables of steps: easy to read and to change, and an oracle of the engine's.

The engine takes them as it takes its own, which hold the same without padding.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class Plan:
    """`position` int32[C, S, B], -1 = padding; `epoch` int32[C, S]; `num_steps`.

    Real steps come first. A client's own is a row of it.
    """

    position: jax.Array
    epoch: jax.Array
    num_steps: jax.Array

    def split(self):
        """All of it goes with the rows."""
        return self, ()

    def joined(self, _):
        """A row is whole."""
        return self

    def known_everywhere(self, _):
        """It is."""
        return self

    def of_row(self, row):
        """One row of the cohort."""
        return jax.tree.map(lambda leaf: jnp.take(leaf, row, axis=0), self)

    def step(self, index):
        """(positions int32[B], epoch int32[]) of one client's step."""
        position = jnp.where(index < self.num_steps, self.position[index], -1)
        return position, self.epoch[index]


def table(plan, num_steps=0):
    """A `types.Plan` of a cohort as a table, S at least `num_steps`."""
    first, rows, steps = map(np.asarray, (plan.first, plan.num_rows, plan.num_steps))
    size = plan.batch_size
    longest = max(int(steps.max(initial=0)), num_steps)
    position = np.full((len(steps), longest, size), -1, np.int32)
    epoch = np.zeros(position.shape[:2], np.int32)
    per_device = len(steps) // len(plan.position)
    for index, count in enumerate(rows):
        line = np.asarray(plan.position)[index // per_device]
        per_epoch = -(-count // size)
        for step in range(int(steps[index])):
            number, batch = divmod(step, per_epoch)
            order = line[first[index] + number * count :][:count]
            real = order[batch * size :][:size]
            position[index, step, : len(real)] = real
            epoch[index, step] = number
    return Plan(position, epoch, steps.astype(np.int32))


def cohort(planner, seed_index, round):
    """A round of a planner; S is the same in all rounds, that of the largest client."""
    one = planner.cohort(seed_index, round)
    longest = planner.num_steps(seed_index, np.arange(planner.num_clients))
    return one.replace(
        plans={
            name: table(plan, int(longest[name].max()))
            for name, plan in one.plans.items()
        }
    )
