"""A problem small enough to follow by hand: tables, clients, steps, a linear model."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import each_client, losses, optimizer, stacked, types
from tests import padded

WIDTH, NUM_CLASSES = 3, 4


def mesh_of(count):
    """A mesh over the first `count` fake devices."""
    return jax.make_mesh(
        (count,),
        ("clients",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:count],
    )


def client_rows(order, sizes, padding=0):
    """Each client owns the next `sizes[k]` rows of `order`."""
    count = np.asarray(sizes, np.int32)
    row = np.concatenate([order[: count.sum()], np.full(padding, -1)])
    start = np.cumsum(count) - count
    return types.ClientRows(*map(ints, (row, start, count)))


def ints(values):
    """An int32 array on the device, for which nothing is compiled."""
    return jnp.asarray(np.asarray(values, np.int32))


def tables(train, test=(0,), proxy=(), seed=0):
    """Random examples; clients own `train` and `test` of them, in no order."""
    gen = np.random.default_rng(seed)
    total = sum(train) + sum(test)
    order = gen.permutation(total)
    return types.Data(
        image=jnp.asarray(np.float32(gen.normal(size=(total, WIDTH)))),
        label=ints(gen.integers(NUM_CLASSES, size=total)),
        mean=jnp.asarray(np.float32(0)),
        scale=jnp.asarray(np.float32(1)),
        partition=types.Partition(
            client_rows(order, train),
            client_rows(order[sum(train) :], test, padding=2),
            ints(proxy),
        ),
    )


def plan(sizes, epochs=2, batch_size=2):
    """Every client's rows in order, again and again; short batches are kept."""
    num_steps = [epochs * -(-size // batch_size) for size in sizes]
    position = np.full((len(sizes), max(num_steps), batch_size), -1, np.int32)
    epoch = np.zeros(position.shape[:2], np.int32)
    for client, size in enumerate(sizes):
        for step in range(num_steps[client]):
            epoch[client, step], number = divmod(step, -(-size // batch_size))
            rows = np.arange(number * batch_size, size)[:batch_size]
            position[client, step, : len(rows)] = rows
    return padded.Plan(*map(ints, (position, epoch, num_steps)))


def cohort(client_id, num_clients, plans=(), level=None):
    """Clients in this order; the id K is a padding row."""
    ids, count = ints(client_id), len(client_id)
    return types.Cohort(
        client_id=ids,
        row=ids,
        row_mask=jnp.asarray(np.asarray(client_id) < num_clients),
        level=ints([1] * count if level is None else level),
        peers=ints(np.zeros((count, 0))),
        peer_mask=jnp.asarray(np.zeros((count, 0), bool)),
        plans=dict(plans),
    )


def client(data, plan, number=0, *, bound=None, own=(), opt_state=(), round=0, seed=0):
    """Client `number`, whose plan is that row of `plan`."""
    row = jax.tree.map(lambda leaf: ints(np.asarray(leaf)[number]), plan)
    return each_client.Client(
        id=ints(number),
        level=ints(1),
        own=own,
        opt_state=opt_state,
        plan=row,
        bound=row.num_steps if bound is None else ints(bound),
        data=data,
        key=jax.random.key(seed),
        round=ints(round),
    )


def opt_states(hparams, params, count):
    """Optimizer states of `count` clients before their first round, () if reset."""
    if hparams.optimizer_state == "reset":
        return ()
    return stacked.repeat(optimizer.fresh(hparams, params), count)


def regression(params, stats, batch):
    """Half the mean squared gap of x w + b to the label; counts what it saw."""
    gap = batch.image @ params[0]["w"] + params[1]["b"] - batch.label
    seen = stats[0]["seen"] + batch.mask.sum()
    new = ({"seen": seen}, {"steps": stats[1]["steps"] + 1})
    return losses.masked_mean(gap**2 / 2, batch.mask), new


def at_zero():
    """Variables of `regression` before any step."""
    width, zero = (jnp.asarray(np.zeros(n, np.float32)) for n in (WIDTH, ()))
    params = ({"w": width}, {"b": zero})
    stats = ({"seen": ints(0)}, {"steps": ints(0)})
    return types.Variables(params, stats)


def linear(name="linear", num_exits=0):
    """A classifier x W without a bias; or with exits, one matrix for each."""
    stage_names = tuple(f"s{i}" for i in range(1, max(num_exits, 1) + 1))

    def init(key, x):
        keys = jax.random.split(key, len(stage_names))
        shape = (x.shape[-1], NUM_CLASSES)
        params = tuple({"w": jax.random.normal(one, shape)} for one in keys)
        return params, ({},) * len(stage_names)

    def forward(params, stats, h, **_):
        out = tuple(h @ stage["w"] for stage in params)
        return (out if num_exits else out[0]), stats

    return types.Model(name, stage_names, init, forward, num_exits > 0)


def equations(jaxpr):
    """All equations of a jaxpr, also those inside of loops, branches and calls."""
    for equation in jaxpr.eqns:
        yield equation
        inner = jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        )
        for one in inner:
            if hasattr(one, "eqns"):
                yield from equations(getattr(one, "jaxpr", one))
