"""Per-FedAvg: the server's model is one that a single step adapts to each client.

Fallah, Mokhtari, Ozdaglar: "Personalized Federated Learning with Theoretical
Guarantees: A Model-Agnostic Meta-Learning Approach", NeurIPS 2020,
https://arxiv.org/abs/2002.07948 (Algorithm 1).

* A client takes tau steps on F, with batches D_1, D_2, D_3 of its examples. The server
  takes the mean.
* The step has the Hessian H of f_i. FO (first-order) leaves it out, HF (Hessian-free)
  has a difference of gradients in its place.

    F(w) = mean_i f_i(w - alpha grad f_i(w))  (Eq. 3)
    g = grad f_i(w - alpha grad f_i(w; D_1); D_2)
    w <- w - beta g  (FO)
    w <- w - beta (g - alpha H_g)  (HF)
    H_g = (grad f_i(w + delta g; D_3) - grad f_i(w - delta g; D_3)) / (2 delta)

| paper | here |
|---|---|
| alpha, beta | `--inner_lr`; `--client_lr`, with its optimizer |
| delta | `--difference`, with `--hessian_free` (HF) |
| tau | the steps of `--local_epochs` |
| D, D', D'' (D_1 to D_3) | thirds (FO: halves) of a step, each of `--batch_size` |

A client is served w - alpha grad f_i(w) with the gradient on all of its train rows, as
Eq. 3 has it, the adapted model; w is the global one. A client that never trains is
served its adapted model too. Clients keep nothing, so that there are no rows to share
out over devices.

Differs from the paper: FO is the default, as in PFLlib, since a step costs two
gradients, and four in HF. The exact Hessian is left out. The mean is weighted by
examples by default. An epoch's last batch is divided too; where it has one example, g
is 0 and the loss that is reported is that of D_1, and where HF's has two, H_g is 0.
PFLlib has alpha = beta; here alpha is that of the paper's experiments. Its server calls
each client's training twice a round, for twice the epochs (`--preset=pfllib`). It
adapts on one batch, drawn for each measurement, and the paper takes a stochastic step
too; here it is all rows, so that no batch is drawn. That step has no momentum, and its
rate does not decay.
"""

import dataclasses

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import averaging, boundary, local_training, losses, rng, shapes


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    inner_lr: float = fp.option(0.01, "rate of the adapting step [alpha]", minimum=0)
    # It has an effect with inner_lr=0 too: batches have three parts instead of two.
    hessian_free: bool = fp.option(
        False, "second-order steps, by differences of gradients (HF)"
    )
    difference: float = fp.option(
        0.001,
        "step of the differences [delta]",
        above=0,
        needs={"hessian_free": (True,)},
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Per-FedAvg as pure functions.

    Raises ValueError if an epoch has fewer examples than a step has parts.
    """
    model, alpha, size = task.model, hparams.inner_lr, hparams.batch_size
    num_parts = 3 if hparams.hessian_free else 2
    if 0 < hparams.examples_per_round < num_parts:
        raise ValueError(
            f"--examples_per_round={hparams.examples_per_round}: a step of perfedavg "
            f"has {num_parts} parts, each with other examples; give {num_parts} or more"
        )
    gradient = jax.value_and_grad(fp.cross_entropy_loss(model), has_aux=True)

    def moved(params, size, along):
        return jax.tree.map(lambda w, g: w + size * g, params, along)

    def part(batch: local_training.Batch, number: int) -> local_training.Batch:
        """D, D' or D'': every second or third example, and a key of its own."""
        names = ("image", "label", "mask", "position", "chosen")
        taken = {name: getattr(batch, name) for name in names}
        taken = jax.tree.map(lambda leaf: leaf[number::num_parts], taken)
        return batch.replace(key=jax.random.fold_in(batch.key, number), **taken)

    def loss_fn(params, stats, batch):
        """f_i at the adapted model, with the gradient (I - alpha H) g."""
        w, delta = jax.lax.stop_gradient(params), hparams.difference
        second = part(batch, 1)
        (before, stats), slope = gradient(w, stats, part(batch, 0))
        (loss, new), g = gradient(moved(w, -alpha, slope), stats, second)
        # D' is empty where a batch has one example; a custom norm may not notice.
        stats = boundary.select(second.mask.any(), new, stats)
        has_second = losses.batch_count(second.mask, second.chosen) > 0
        loss = jnp.where(has_second, loss, before)
        if hparams.hessian_free:
            ends = (moved(w, delta, g), moved(w, -delta, g))
            up, down = (gradient(end, stats, part(batch, 2))[1] for end in ends)
            g = moved(g, -alpha / (2 * delta), moved(up, -1, down))
        terms = jax.tree.map(lambda g, new, old: jnp.vdot(g, new - old), g, params, w)
        return loss + sum(jax.tree.leaves(terms)), stats

    def client_update(client: fp.Client, server: fp.Variables):
        """tau steps from w."""
        return fp.train(hparams, loss_fn, server, client)

    def adapted(shared, client_id: jax.Array) -> fp.Variables:
        """w - alpha grad f_i(w), on all train rows of a client."""
        server, data, key = shared

        def weighted(batch):
            count = losses.batch_count(batch.mask, batch.chosen)
            _, slope = gradient(*server, batch)
            return count, jax.tree.map(lambda g: count * g, slope)

        own = rng.stream(key, "perfedavg.adapt", client_id)
        rows = data, client_id, shapes.capped(size, task.num_examples), own
        count, slope = local_training.sum_over_rows(weighted, *rows)
        rate = alpha / jnp.maximum(count, 1)
        return server._replace(params=moved(server.params, -rate, slope))

    def serving(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        ids, shared = jnp.arange(task.num_clients), (state.server, data, state.key)
        return (fp.Serving.each(model, ids, shared=shared, build=adapted),)

    made = averaging.make(hparams, task, client_update, serving=serving)
    plan = fp.plan(hparams)._replace(batch_size=num_parts * size)
    return made._replace(plans=(plan,), serves_adapted=True)
