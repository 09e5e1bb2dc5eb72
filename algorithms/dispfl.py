"""DisPFL: each client trains a sparse model whose mask is its own and moves.

Dai, Shen, He, Tian, Tao: "DisPFL: Towards Communication-Efficient Personalized
Federated Learning via Decentralized Sparse Training", ICML 2022,
https://arxiv.org/abs/2206.00187; the DisPFL row of UA-PDFL,
https://arxiv.org/abs/2412.11674.

* A client of the round pulls the sparse models of its peers, with the masks that these
  were trained with.
* It takes the mean of each entry over those, itself included, that hold the entry, and
  applies its own mask.
* It trains for E epochs, and applies its mask again after each step.
* In each tensor it prunes the smallest weights and regrows as many of the entries that
  it then lacks: those of the largest gradients, or some at random.

    w_k <- m_k * (sum_(j in k, Q_k) m_j * w_j) / (sum_(j in k, Q_k) m_j)
    w_k <- m_k * (w_k - eta grad F_k(w_k))

| paper | here |
|---|---|
| w_k, m_k | `state.clients["own"]`; `["private"]`: `packed`, trained with and next |
| F_k, eta | the loss on a client's examples, `--client_lr` |
| sparsity, ERK | 1 - `--density`, `allotted` |
| pruning rate, annealed by a cosine | `rate`: `--prune_rate`, `--prune_rounds` |
| neighbours Q_k | `--num_peers`, `--topology` |
| dense gradient of a batch | `--regrow=gradient`: the first batch of the round |

Each tensor keeps its number of entries, so messages have a fixed size: the values
(`whole model`) and a bitmap of one bit per parameter (`mask`).

Differs from the paper: biases and other vectors are dense, as ERK makes them nearly
always. The mean is over the round's graph. As in the released code, the gradient that
regrows is taken in eval mode, and an entry that was just pruned may be regrown. By
default the code draws one mask for all clients, while here each draws its own. Under
`--preset=uapdfl` gradients are clipped by the norm of all entries (`--clip_norm`), as
in the released code, and learning rate, momentum (restarted in each round), batches and
graph are UA-PDFL's. `--prune_rounds` is separate from the run's number of rounds,
because extending a run must not change its past.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_pfl as fp
from fedjax_pfl import (
    aggregate,
    boundary,
    decentralized,
    losses,
    options,
    rng,
    shapes,
    sparse,
    traffic,
    types,
)
from fedjax_pfl.rows import exchange


@dataclasses.dataclass(frozen=True)
class HParams(decentralized.Peers, fp.LocalTraining):
    density: float = fp.option(
        0.5, "fraction of parameters held", above=0, maximum=1, is_static=True
    )
    prune_rate: float = fp.option(
        0.5, "fraction of entries that round 0 prunes", minimum=0, maximum=1
    )
    prune_rounds: int = fp.option(
        20,
        "rounds until none is pruned; give as many as --rounds",
        minimum=1,
        needs={"prune_rate": options.ON},
        is_in_rounds="end",
    )
    regrow: str = fp.option(
        "gradient",
        "entries that are regrown: those of the largest gradients, or random ones",
        choices=("gradient", "random"),
        needs={"prune_rate": options.ON},
        is_noted=True,
    )


def allotted(params: types.Params, density: float) -> types.Params:
    """The number of entries of each tensor that are held: Erdos-Renyi-Kernel (ERK).

    A tensor's density is proportional to the sum of its dimensions over their product
    and at most 1. Vectors are dense. `params` may be shape structs, and `density` is
    the fraction of all parameters, in (0, 1]. Each leaf becomes an int >= 1.

    Raises:
        ValueError: the dense tensors alone exceed the density.
    """
    leaves, structure = jax.tree.flatten(params)
    size = np.array([math.prod(leaf.shape) for leaf in leaves])
    raw = np.array([sum(leaf.shape) for leaf in leaves]) / np.maximum(size, 1)
    is_dense = np.array([leaf.ndim < 2 for leaf in leaves])
    share = np.ones(len(leaves))
    while not is_dense.all():
        left = density * size.sum() - size[is_dense].sum()
        if left <= 0:
            least = size[is_dense].sum() / size.sum()
            raise ValueError(
                f"--density={density:g} leaves nothing for the weights: vectors and "
                f"other dense tensors are {least:.2g} of this model; raise it"
            )
        share = np.where(is_dense, 1, raw * left / (raw * size)[~is_dense].sum())
        is_over = share > 1
        if not is_over.any():
            break
        is_dense |= is_over & (raw == raw[is_over].max())
    count = np.maximum((share * size + 1e-6).astype(int), 1)
    return jax.tree.unflatten(structure, count.tolist())


def packed(held: types.Params, mask: types.Params) -> types.Params:
    """Two masks as uint8: bit 0 is the one that was trained with, bit 1 the next.

    They share an array so that a round writes it after the peers have read it. With one
    array each, XLA would copy the first for all clients.
    """
    bits = jnp.uint8
    return jax.tree.map(lambda h, m: h.astype(bits) + 2 * m.astype(bits), held, mask)


def was_held(masks: jax.Array) -> jax.Array:
    """bool[...]: the mask that was trained with, of a leaf of `packed`."""
    return masks % 2 == 1


def is_next(masks: jax.Array) -> jax.Array:
    """bool[...]: the mask that is trained with next, of a leaf of `packed`."""
    return masks > 1


def rate(hparams: HParams, round: jax.Array) -> jax.Array:
    """prune_rate / 2 (1 + cos(pi r / prune_rounds)), f32[]; 0 from prune_rounds on."""
    passed = jnp.minimum(round / hparams.prune_rounds, 1)
    return hparams.prune_rate / 2 * (1 + jnp.cos(jnp.pi * passed))


def exchanged(
    mask: jax.Array, weight: jax.Array, score: jax.Array, count: int, rate: jax.Array
) -> jax.Array:
    """A tensor's mask with its smallest weights pruned and as many entries regrown.

    Args:
        mask: bool[...], `count` of them True.
        weight, score: f32[...]. The largest scores, not negative, are regrown among the
            entries that are not held or were just pruned.
        count: Number of entries held.
        rate: f32[], the fraction of them that is pruned, and may be regrown.
    """
    if count == mask.size:
        return mask
    number = jnp.ceil(rate * count).astype(jnp.int32)
    kept = sparse.largest(jnp.abs(weight), count - number, among=mask)
    return kept | sparse.largest(score, number, among=~kept)


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Makes DisPFL; raises ValueError for an impossible density or graph."""
    model = task.client_model
    shape = shapes.variables(model, task.example_shape)
    count = allotted(shape.params, hparams.density)
    loss_fn = fp.cross_entropy_loss(model)

    def noise(key: jax.Array) -> types.Params:
        """Random scores f32 in [0, 1) of all parameters."""
        leaves, structure = jax.tree.flatten(shape.params)
        keys = [*jax.random.split(key, len(leaves))]
        draws = [
            jax.random.uniform(k, x.shape) for k, x in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, draws)

    def first_mask(key: jax.Array) -> types.Params:
        return jax.tree.map(sparse.largest, noise(key), count)

    def gradient(client: fp.Client, own: fp.Variables) -> types.Params:
        """|g| of the round's first batch at all entries, in eval mode."""
        position, _ = client.plan.step(jnp.zeros((), jnp.int32))
        place = jnp.maximum(position, 0)
        row = client.data.partition.train.of(client.id)(place)
        key = client.stream("sparse.regrown")
        image, label, _ = client.data.train_batch(row, place, key)

        def loss(params: types.Params) -> jax.Array:
            logits, _ = model.forward(params, own.stats, image)
            return losses.cross_entropy(logits, label, position >= 0)

        return jax.tree.map(jnp.abs, jax.grad(loss)(own.params))

    def mixed(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        """w_i <- m_i * sum_j m_j w_j / sum_j m_j over the client and its peers."""
        own, masks = state.clients["own"], state.clients["private"]
        weight = decentralized.weights("uniform", cohort, data)
        mask = exchange.take(masks, cohort.row)
        total, holders = aggregate.sum_held(
            own.params, masks, cohort, weight, as_mask=was_held, known=mask
        )
        mean = jax.tree.map(lambda t, n: t / jnp.maximum(n, 1), total, holders)
        mask = jax.tree.map(is_next, mask)
        stats = aggregate.mix_peers(own.stats, cohort, weight, known=total)
        number = cohort.peer_mask.sum(1)
        return decentralized.Mixed(
            fp.Variables(sparse.only(mask, mean), stats),
            sent={"whole model": number, "mask": number},
            given=mask,
        )

    def client_update(client: fp.Client, start: fp.Variables):
        """E epochs within the mask, which is then pruned and regrown."""
        mask = client.own
        objective = fp.Objective(
            loss_fn, project=lambda params: sparse.only(mask, params)
        )
        trained = fp.train(hparams, (objective,), start, client)
        if hparams.regrow == "random":
            score = noise(client.stream("sparse.regrown"))
        else:
            score = gradient(client, trained.variables)
        now = rate(hparams, client.round)
        new = jax.tree.map(
            lambda *leaves: exchanged(*leaves, now), mask, trained.params, score, count
        )
        # Without a step there is no gradient to regrow by.
        new = boundary.select(client.plan.num_steps > 0, new, mask)
        return trained, packed(mask, new)

    messages, common = _messages(shape, count), (hparams, task, mixed, client_update)
    made = decentralized.make(*common, messages=messages, private=lambda _: ())

    def init(data: fp.Data, key: jax.Array) -> fp.RoundState:
        """The same weights for all clients, and a mask for each."""
        state = made.init(data, key)
        ids = jnp.arange(task.num_rows)
        mask = jax.lax.map(lambda k: first_mask(rng.stream(key, "sparse.mask", k)), ids)
        own = state.clients["own"]
        own = own._replace(params=sparse.only(mask, own.params))
        return state.replace(clients={"own": own, "private": packed(mask, mask)})

    reason = "with --density=1.0, where all is held"
    names = ("prune_rate", "prune_rounds", "regrow") if hparams.density == 1 else ()
    return made._replace(init=init, unused=dict.fromkeys(names, reason))


def _messages(shape: fp.Variables, count: types.Params) -> tuple:
    """What one peer sends: the values that it holds with statistics, and its mask."""
    values = traffic.FLOAT_BYTES * sum(jax.tree.leaves(count))
    size = sum(leaf.size for leaf in jax.tree.leaves(shape.params))
    values += shapes.tree_bytes(shape.stats)
    return (
        fp.MessageKind("whole model", "down", values),
        fp.MessageKind("mask", "down", sparse.bitmap_bytes(size)),
    )
