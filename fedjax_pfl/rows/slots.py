"""Private rows shared out over devices: client k is on device k mod D.

A device has the rows of its own clients in consecutive slots, a D-th of all rows, and
computes their evaluation. In a round they train wherever the planner has dealt them,
and their rows travel (`rows.exchange`).
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fedjax_pfl.rows import views


class Layout(NamedTuple):
    """Where the rows of clients are on the devices.

    `num_clients` is K and `devices` is D. `most` are the slots of a device that does
    not have the rows of all its clients at once, 0 = it has them.
    """

    num_clients: int
    devices: int
    most: int = 0

    @property
    def rows_per_device(self) -> int:
        """Slots of a device, of which the last may be empty."""
        return self.most or -(-self.num_clients // self.devices)

    @property
    def num_rows(self) -> int:
        """Slots of all devices."""
        return self.devices * self.rows_per_device

    @property
    def slots(self) -> np.ndarray:
        """int32[K]: the slot of each client, where all have one."""
        return self.slots_of(np.arange(self.num_clients))

    @property
    def clients(self) -> np.ndarray:
        """int32[num_rows]: the client of each slot, K = none, where all have one."""
        return self.clients_of(np.arange(self.num_clients))

    def slots_of(self, ids: np.ndarray) -> np.ndarray:
        """int32[n]: slots for clients int[n], consecutive on each device."""
        device, counts = self.device_of(ids), self.counts(ids)
        order = np.argsort(device, kind="stable")
        first = np.cumsum(counts) - counts
        place = np.empty(len(ids), np.int64)
        place[order] = np.arange(len(ids)) - first[device[order]]
        return (device * self.rows_per_device + place).astype(np.int32)

    def slots_of_device(self, device: int) -> slice:
        """The slots of a device, which follow one another."""
        first = device * self.rows_per_device
        return slice(first, first + self.rows_per_device)

    def places(self, ids: np.ndarray) -> list[np.ndarray]:
        """int64[n] for each device: the places of its own among clients int[n]."""
        device = self.device_of(ids)
        return [np.flatnonzero(device == one) for one in range(self.devices)]

    def clients_of(self, ids: np.ndarray) -> np.ndarray:
        """int32[num_rows]: which of clients int[n] has each slot, K = none."""
        out = np.full(self.num_rows, self.num_clients, np.int32)
        out[self.slots_of(ids)] = ids
        return out

    def device_of(self, client: np.ndarray) -> np.ndarray:
        """int[...]: the device that has the rows of clients int[...]."""
        return client % self.devices

    def counts(self, ids: np.ndarray) -> np.ndarray:
        """int[D]: how many of clients int[n] each device has."""
        return np.bincount(self.device_of(ids), minlength=self.devices)

    def fullest(self, ids: np.ndarray) -> int:
        """The slots that clients int[n] need on the device that has most of them."""
        return int(self.counts(ids).max())

    def dealt(self, rows: Any, where: Any) -> Any:
        """Rows on the devices, leaves [variants, num_rows, ...], in their slots.

        Row k is that of client k, for all K clients. `where` has where each leaf is.
        """
        client = np.minimum(self.clients, self.num_clients - 1)  # no slot is empty

        def one(leaf: jax.Array, where: Any) -> jax.Array:
            # Leaf by leaf, as a device may get all rows for a moment.
            return jax.jit(lambda x: x[:, client], out_shardings=where)(leaf)

        return jax.tree.map(one, rows, where)

    def by_client(self, rows: Any) -> Any:
        """Leaves [variants, num_rows, ...] in the order of clients, [variants, K, ...].

        `rows` has leaves of `views`, joined from several calls. The result is never
        whole in memory. If several processes have the rows, all must go through its
        pieces together.
        """

        def one(leaf: views.Joined) -> views.Streamed:
            count, _, *shape = leaf.shape

            def pieces() -> Iterator[np.ndarray]:
                for part in leaf.parts:
                    yield from self._pieces(part)

            whole = (count, self.num_clients, *shape)
            return views.Streamed(whole, np.dtype(leaf.dtype), pieces)

        return jax.tree.map(one, rows)

    def _pieces(self, leaf: jax.Array) -> Iterator[np.ndarray]:
        """The rows of one array in the order of clients, in parts of bounded size."""
        size = leaf.dtype.itemsize * math.prod(leaf.shape[2:]) * self.devices
        step = max(views.PIECE_BYTES // max(size, 1), 1)
        for variant in range(leaf.shape[0]):
            for first in range(0, self.rows_per_device, step):
                end = min(first + step, self.rows_per_device)
                parts = _of_each_device(leaf, variant, first, end)
                # The last slots of some devices are empty.
                many = min(end * self.devices, self.num_clients) - first * self.devices
                rows = np.stack(parts, 1).reshape(-1, *leaf.shape[2:])[:many]
                yield np.ascontiguousarray(rows).reshape(-1)


def _of_each_device(
    leaf: jax.Array, variant: int, first: int, end: int
) -> Sequence[np.ndarray]:
    """Rows `first..end - 1` of each device, of one variant."""
    if leaf.is_fully_addressable:
        shards = sorted(leaf.addressable_shards, key=lambda one: one.index[1].start)
        return [np.asarray(one.data[variant, first:end]) for one in shards]
    gathered = _gathered(leaf.sharding.mesh, end - first)(leaf, variant, first)
    return np.asarray(gathered.addressable_data(0))


@functools.lru_cache(maxsize=8)
def _gathered(mesh: jax.sharding.Mesh, count: int) -> Callable[..., jax.Array]:
    """`(leaf, variant, first) -> [devices, count, ...]`, on every device."""

    def one(leaf: jax.Array, variant: jax.Array, first: jax.Array) -> jax.Array:
        own = jax.lax.dynamic_slice_in_dim(leaf[variant], first, count)
        return jax.lax.all_gather(own, "clients")

    own, everywhere = PartitionSpec(None, "clients"), PartitionSpec()
    specs = own, everywhere, everywhere
    return jax.jit(
        jax.shard_map(
            one, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False
        )
    )


@jax.jit
def are_equal(rows: Any) -> jax.Array:
    """bool[]: whether rows [variants, R, ...] have the same bits in every leaf."""

    def in_bits(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        bits = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(leaf, bits)

    every = map(in_bits, jax.tree.leaves(rows))
    return jnp.stack([(leaf == leaf[:, :1]).all() for leaf in every]).all()
