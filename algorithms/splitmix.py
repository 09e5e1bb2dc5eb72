"""Split-Mix: a wide model as several narrow ones, clients train as many as they can.

Hong, Wang, Wang, Zhou: "Efficient Split-Mix Federated Learning for On-Demand and
In-Situ Customization", ICLR 2022, https://arxiv.org/abs/2203.09747, as DepthFL compares
with it (Appendix A.2 of https://openreview.net/forum?id=pf8RIZTMU58).

* The server has N base models, which together are as large as the whole one.
* A client of level d gets d of them. The first comes from a shuffled queue of all bases
  that the clients share, the others are drawn from the rest.
* It trains each base on the same batches, on the base's own cross-entropy.
* The server takes the mean of each base over the clients that trained it.
* A budget of n answers with the mean of the logits of the first n bases.

    w_(b,k) <- w_(b,k) - eta grad CE(f(x; w_(b,k)), y)
    w_b <- mean_(k in S_b) w_(b,k)
    f_n(x) = mean_(b = 1)^n f(x; w_b)

| paper | here |
|---|---|
| base networks w_b | `state.server["model"]`, leaves [N, ...], N = `--num_bases` |
| place of the queue | `state.server["queued"]`, the bases popped so far |
| S_b, f_n | the clients that train base b; the model of budget n |
| f, eta | the logits of a base, `--client_lr` |
| budget of a client | `cohort.level` (`--levels`, `--level_mix`) |
| r: width of a base | N^-1/2, so that N bases have the whole model's weights |

Differs from the paper: means are without weights, and outputs of convolutions are not
rescaled. Norms have running statistics, averaged over the clients that trained the
base. A budget n is reported as `exit<n>_accuracy`, as DepthFL's exits are. All N bases
are served, also where `--max_level` lets clients train fewer.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import levels, local_training, rng, shapes, stacked, traffic, widths


@dataclasses.dataclass(frozen=True)
class HParams(levels.Levels, fp.LocalTraining):
    is_nested = False  # a level is how many bases a client trains, each of them in turn
    num_bases: int = fp.option(
        4, "base models, as many as there are levels", minimum=1, maximum=64
    )


def first_bases(key: jax.Array, place: jax.Array, num_bases: int) -> jax.Array:
    """The bases int32[C] at places int32[C] of a queue of shuffles of all bases."""

    def one(place: jax.Array) -> jax.Array:
        own = rng.stream(key, "levels.queue", place // num_bases)
        return jax.random.permutation(own, num_bases)[place % num_bases]

    return jax.vmap(one)(place)


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Makes Split-Mix; raises ValueError without narrower forms or a base per level."""
    local_training.refuse_moments(task.tests_trained)
    num_bases, parts = hparams.num_bases, len(levels.mix(hparams))
    if parts != num_bases:
        raise ValueError(
            f"--level_mix={hparams.level_mix} has {parts} levels, --num_bases="
            f"{num_bases}; they must agree"
        )
    base = widths.narrower(task.model, num_bases**-0.5)
    shape = shapes.variables(base, task.example_shape)
    loss_fn = fp.cross_entropy_loss(base)

    def picked(state: fp.RoundState, cohort: fp.Cohort, _: Any) -> jax.Array:
        """The bases of each client in the order of its training, int32[C, N]."""
        # Places in the queue follow the ids, so that padding and order do not matter.
        is_before = cohort.client_id < cohort.client_id[:, None]
        place = (is_before & cohort.row_mask).sum(1)
        place += state.server["queued"]
        key = rng.stream(state.key, "levels.queue")
        first = first_bases(key, place, num_bases)

        def order(client_id: jax.Array, first: jax.Array) -> jax.Array:
            own = rng.stream(state.key, "levels.bases", state.round, client_id)
            rank = jax.random.permutation(own, num_bases)
            return jnp.argsort(rank.at[first].set(-1))

        return jax.vmap(order)(cohort.client_id, first)

    def cut(whole: tuple, client: fp.Client, level: int) -> tuple:
        return stacked.take(whole, client.own[:level])

    def paste(part: tuple, whole: tuple, client: fp.Client, level: int):
        return stacked.put(whole, client.own[:level], part)

    def held(cohort: fp.Cohort, pick: jax.Array) -> fp.Variables:
        """The bases that each client trains, bool[C, N] for every leaf [N, ...]."""
        rank = jnp.argsort(pick)
        has = (rank < cohort.level[:, None]) & cohort.row_mask[:, None]
        return jax.tree.map(
            lambda leaf: has.reshape(*has.shape, *(1,) * leaf.ndim), shape
        )

    def client_update(client: fp.Client, start: fp.Variables, level: int):
        """Trains the first `level` of its bases, one after another."""

        def one(base: tuple[fp.Variables, tuple]) -> fp.Trained:
            start, opt_state = base
            own = client.replace(opt_state=opt_state)
            return fp.train(hparams, loss_fn, start, own)

        trained = jax.lax.map(one, (start, client.opt_state))
        is_own = jnp.arange(level) < client.level
        kept = stacked.where(is_own, trained.opt_state, client.opt_state)
        loss = tuple(jnp.where(is_own, part, 0).sum() for part in trained.loss)
        return trained.replace(opt_state=kept, loss=loss)

    def init(key: jax.Array) -> fp.Variables:
        keys = [rng.stream(key, "levels.bases", number) for number in range(num_bases)]
        bases = [task.init(base, own) for own in keys]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *bases)

    def server_update(server: Any, trained: Any, own: Any, cohort: Any, mean: Any, _):
        """The mean of each base; the queue goes on behind the round's clients."""
        queued = server["queued"] + cohort.row_mask.sum(dtype=jnp.int32)
        return {"model": mean(trained.variables), "queued": queued}, None

    def budget(state: fp.RoundState, count: int):
        """The first `count` bases as one model: the mean of their logits."""

        def forward(params, stats, h, **mode):
            def one(params, stats):
                return base.forward(params, stats, h, **mode)

            out, stats = jax.vmap(one)(params, stats)
            return out.mean(0), stats

        model = base._replace(name=f"{count} x {base.name}", forward=forward)
        return model, jax.tree.map(lambda leaf: leaf[:count], state.server["model"])

    def server(state: fp.RoundState, data: fp.Data):
        """Every budget, the largest first."""
        found = {f"exit{n}": budget(state, n) for n in range(1, num_bases + 1)}
        return {"global": found[f"exit{num_bases}"]} | found

    def sent(cohort: fp.Cohort) -> dict[str, jax.Array]:
        return {kind.name: cohort.level for kind in kinds}

    kinds = traffic.both_ways("base", shapes.tree_bytes(shape))
    part = levels.Submodel(cut, paste, held, kinds, sent, levels.top(hparams))
    return levels.make(
        hparams,
        task,
        base,
        part,
        client_update,
        init=init,
        own=picked,
        beside=lambda _: {"queued": jnp.int32(0)},
        server_update=server_update,
        server=server,
        opt_state=lambda fresh: stacked.repeat(fresh(shape.params), num_bases),
    )
