"""Work shared out over the devices of a mesh: rows of clients, batches, server steps.

Functions communicate only at their end. Without a mesh the one device computes all.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_pfl import execution, stacked
from fedjax_pfl.rows import views

_MINE, _ALL = PartitionSpec("clients"), PartitionSpec()


def rows(
    on_device: Callable[[Any, Any, Any], Any],
    how: execution.Execution,
    *,
    is_summed: bool,
) -> Callable[[Any, Any, Any], Any]:
    """Maps a function of a device's rows over all devices.

    `on_device` is `(mine, shared, local) -> out`, leaves [C / D, ...] (of `local`
    [...]), and with `is_summed` `out` is `(kept, part of a sum)`. Returns `(every,
    shared, local) -> out` with `every` and `out` leaves [C, ...] (a sum [...]) and
    `local` [D, ...]. D are the devices of `how`.
    """
    mesh, stays = how.mesh, how.shares_rows

    def one(every: Any, shared: Any, local: Any) -> Any:
        mine = every if mesh is None or stays else _part_of_device(every, mesh)
        local = stacked.at(local, 0)
        out = on_device(mine, shared, local)
        if mesh is None:
            return out
        kept = out[0] if is_summed else out
        if not stays:
            kept = jax.lax.all_gather(kept, "clients", tiled=True)
        return (kept, _summed(out[1], mesh)) if is_summed else kept

    if mesh is None:
        return one
    of_rows = _MINE if stays else _ALL
    of_out = (of_rows, _ALL) if is_summed else of_rows
    return mapped(one, mesh=mesh, in_specs=(of_rows, _ALL, _MINE), out_specs=of_out)


def batches(
    one: Callable[[jax.Array], Any],
    size: int,
    how: execution.Execution,
    count: jax.Array | None = None,
) -> Any:
    """`one` of each index 0..`size` - 1, like `jax.lax.map`, in turn over the devices.

    `one` maps int32[] to leaves [...], such as a forward pass of a batch. With a traced
    `count` int32[] only so many are computed, and the others are 0. Returns leaves [n,
    ...].
    """
    devices, mesh = how.num_devices, how.mesh
    if mesh is None and count is None:
        return jax.lax.map(one, jnp.arange(size))
    each = -(-size // devices)
    like = jax.eval_shape(one, jnp.int32(0))
    count = jnp.int32(size) if count is None else count

    def on_device(count: jax.Array) -> Any:
        place = 0 if mesh is None else jax.lax.axis_index("clients")

        def step(index: jax.Array, out: Any) -> Any:
            found = one(index * devices + place)
            return jax.tree.map(lambda every, x: every.at[index].set(x), out, found)

        num_steps = (count - place + devices - 1) // devices
        out = jax.lax.fori_loop(0, num_steps, step, stacked.zeros(like, each))
        if mesh is None:
            return out
        every = jax.lax.all_gather(out, "clients", axis=1)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:size], every)

    if mesh is None:
        return on_device(count)
    return mapped(on_device, mesh=mesh, in_specs=(_ALL,), out_specs=_ALL)(count)


def once(fn: Callable[[Any], Any], how: execution.Execution, given: Any) -> Any:
    """`fn(given)` for successive steps, such as those of the server.

    The devices of a CPU are its cores. There the first computes it and the others wait,
    which leaves it the caches and the memory. Devices of other kinds each compute it.
    """
    mesh = how.mesh
    if mesh is None or how.platform != "cpu" or jax.process_count() > 1:
        return fn(given)

    def first(given: Any) -> Any:
        return jax.tree.map(_as_numbers, fn(given))

    def on_device(given: Any) -> Any:
        like = jax.eval_shape(fn, given)
        sent = jax.eval_shape(first, given)

        is_first = jax.lax.axis_index("clients") == 0
        mine = jax.lax.cond(is_first, first, lambda _: stacked.zeros(sent), given)
        out = jax.lax.psum(mine, "clients")
        return jax.tree.map(_as_it_was, out, like)

    return mapped(on_device, mesh=mesh, in_specs=(_ALL,), out_specs=_ALL)(given)


def _as_numbers(leaf: jax.Array) -> jax.Array:
    """A leaf that can be summed: keys become their data, and bools integers."""
    leaf = views.numbers(leaf)
    return leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf


def _as_it_was(leaf: jax.Array, like: Any) -> jax.Array:
    """The inverse of `_as_numbers`."""
    if views.is_key(like):
        impl = jax.random.key_impl(jnp.zeros(like.shape, like.dtype))
        return jax.random.wrap_key_data(leaf, impl=impl)
    return leaf.astype(like.dtype)


def _part_of_device(rows: Any, mesh: jax.sharding.Mesh) -> Any:
    """This device's rows of leaves [C, ...]."""
    index = jax.lax.axis_index("clients")

    def part(leaf: jax.Array) -> jax.Array:
        size = leaf.shape[0] // mesh.size
        return jax.lax.dynamic_slice_in_dim(leaf, index * size, size)

    return jax.tree.map(part, rows)


def _summed(parts: Any, mesh: jax.sharding.Mesh) -> Any:
    """The sum over devices, on CPUs in their order, whichever processes have them.

    On the CPUs of several processes the order of `psum` would depend on how these are
    connected. Sums over rows that stay on their devices have XLA's order.
    """
    if mesh.devices.flat[0].platform != "cpu" or jax.process_count() == 1:
        return jax.lax.psum(parts, "clients")
    every = jax.lax.all_gather(parts, "clients")
    return jax.tree.map(lambda leaf: leaf.sum(0), every)


def mapped(
    fn: Callable[..., Any], mesh: jax.sharding.Mesh, in_specs: tuple, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` with a spec for each argument.

    Arrays without elements, such as the proxy set of a run that has none, are made anew
    on each device, since the compiler of jaxlib 0.11 crashes if a loop has one of the
    arguments.
    """

    def over(*args: Any) -> Any:
        trees = zip(args, in_specs, strict=True)
        specs = [spec for tree, spec in trees for _ in jax.tree.leaves(tree)]
        leaves, structure = jax.tree.flatten(args)
        full = [place for place, leaf in enumerate(leaves) if jnp.size(leaf)]

        def part(place: int) -> jax.Array:
            shape = NamedSharding(mesh, specs[place]).shard_shape(leaves[place].shape)
            return jnp.zeros(shape, leaves[place].dtype)

        def on_device(*given: jax.Array) -> Any:
            known = dict(zip(full, given, strict=True))
            every = [known[n] if n in known else part(n) for n in range(len(leaves))]
            return fn(*structure.unflatten(every))

        of_full = tuple(specs[place] for place in full)
        given = {"in_specs": of_full, "out_specs": out_specs, "check_vma": False}
        return jax.shard_map(on_device, mesh=mesh, **given)(*(leaves[n] for n in full))

    return over
