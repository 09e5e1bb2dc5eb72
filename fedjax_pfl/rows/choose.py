"""Which home the private rows of a run have."""

from collections.abc import Callable

import jax

from fedjax_pfl import execution, types
from fedjax_pfl.rows import slots
from fedjax_pfl.rows.hosted import Hosted
from fedjax_pfl.rows.kinds import Replicated, Rows, Sharded


def make_rows(
    num_clients: int,
    how: execution.Execution,
    template: Callable[[], types.RoundState],
    rows_in: str | None = None,
) -> Rows:
    """The rows of a run, by where they are.

    `template` returns the shapes of the devices' state. `rows_in` is that of
    `simulate.Simulation`.
    """
    if rows_in is None:
        return (Sharded if how.shares_rows else Replicated)(num_clients, how)
    state, devices = template(), how.num_devices if how.shares_rows else 1
    most = jax.tree.leaves(state.private)[0].shape[1] // devices
    return Hosted(slots.Layout(num_clients, devices, most), how, state, rows_in)
