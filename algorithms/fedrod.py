"""FedRoD: a generic head, trained as if classes were balanced, and a personal one.

Chen, Chao: "On Bridging Generic and Personalized Federated Learning for Image
Classification", ICLR 2022, https://arxiv.org/abs/2107.00778 (Algorithm 1, linear
heads).

* The server sends extractor and generic head to the clients of the round.
* Each trains them for E epochs on the balanced softmax loss, which adds the logarithm
  of the client's class counts to the logits. At the same steps its personal head learns
  what the generic one's answers lack, on the usual loss, behind a fixed extractor.
* Extractor and generic head are sent back, and the server takes their weighted mean.
* Both heads together serve the client: their logits are added.

    L_m^BSM = CE(h^G(z) + log(c_m), y),  z = f(x; theta)
    theta_m, psi_m <- (theta_m, psi_m) - eta grad L_m^BSM
    phi_m <- phi_m - eta grad CE(h^G(z) + h^P(z), y)
    theta, psi <- sum_(m in S_t) n_m / n (theta_m, psi_m)

| paper | here |
|---|---|
| theta, psi | `state.server`: all stages but the last, and the last |
| phi_m | rows of `state.clients`, of the last stage's shapes |
| z, c_m | the input of the last stage, a client's examples by class |
| eta, n_m / n | `--client_lr`, `--aggregation=examples` |
| L^BSM, gamma = 1 | `losses.cross_entropy(logits + log_counts, ...)` |
| h^G(z) + h^P(z) | the last stage's parameters, added: it is one affine layer |

Differs from the paper: the personal head is stored, and a hypernetwork that makes it
from class counts is not here. It starts at zero, so that a client that never took part
is served the generic model; in PFLlib it starts as a copy of the generic head. Both
losses see the model before the step, as in PFLlib, and `train_loss` is their sum.
`--clip_norm` is of the gradients of both together, so that with it the personal head
has an effect on the generic model's steps. The global accuracy is that of the generic
model. PFLlib counts a client's classes without the rows that `--drop_last` drops.
"""

from typing import Any

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import averaging, boundary, local_training, losses, shapes

HParams = averaging.Averaging


def log_counts(client: fp.Client, num_classes: int, batch_size: int) -> jax.Array:
    """Logarithms f32[Y] of a client's train rows by class, -inf where it has none."""

    def count(batch: local_training.Batch) -> jax.Array:
        return jnp.zeros(num_classes).at[batch.label].add(batch.mask)

    rows = client.data, client.id, batch_size, client.stream("fedrod.counts")
    return jnp.log(local_training.sum_over_rows(count, *rows))


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """FedRoD as pure functions.

    Raises:
        ValueError: the model has one stage, or its last is not one affine layer.
    """
    model = task.model
    start = shapes.variables(model, task.example_shape)
    _check(task, start)
    last = len(model.stage_names) - 1

    def loss_of(client: fp.Client) -> local_training.LossFn:
        size = shapes.capped(hparams.batch_size, task.num_examples)
        prior = log_counts(client, task.num_classes, size)

        def loss_fn(params, stats, batch):
            """L^BSM of the generic model, and the loss of both heads at fixed g(z)."""
            (*body, generic, own), stats = params, stats[:-1]
            h, mode = batch.image, batch.mode
            z, stats = model.forward((*body, generic), stats, h, stop=last, **mode)

            def head(layer: Any, z: jax.Array) -> jax.Array:
                return model.forward((*body, layer), stats, z, start=last, **mode)[0]

            logits = head(generic, z)
            fixed_z, fixed = jax.lax.stop_gradient((z, logits))
            answers = logits + prior, fixed + head(own, fixed_z)
            both = (losses.cross_entropy(x, batch.label, batch.mask) for x in answers)
            return sum(both), (*stats, {})

        return loss_fn

    def joined(server: fp.Variables, own: Any) -> fp.Variables:
        return fp.Variables((*server.params, own), (*server.stats, {}))

    def client_update(client: fp.Client, server: fp.Variables):
        """theta and psi along L^BSM, phi_m along the loss of both heads."""
        begin = joined(server, client.own)
        trained = fp.train(hparams, loss_of(client), begin, client)
        (*params, own), (*stats, _) = trained.variables
        return trained.replace(params=tuple(params), stats=tuple(stats)), own

    def both_heads(server: fp.Variables, own: Any) -> fp.Variables:
        *body, generic = server.params
        added = jax.tree.map(jnp.add, generic, own)
        return fp.Variables((*body, added), server.stats)

    def adapt(client: fp.Client, start: fp.Variables, server: fp.Variables):
        """The personal head alone, of both heads as one."""
        is_head = tuple(stage == last for stage in range(last + 1))
        objective = fp.Objective(fp.cross_entropy_loss(model), trainable=is_head)
        return fp.train(hparams, (objective,), start, client)

    def first_head(server: fp.Variables) -> Any:
        return jax.tree.map(jnp.zeros_like, server.params[-1])

    return averaging.make(
        hparams,
        task,
        client_update,
        own=first_head,
        build=both_heads,
        adapt=adapt,
        opt_state=lambda fresh: fresh((*start.params, start.params[-1])),
    )


def _check(task: fp.Task, start: fp.Variables) -> None:
    """Refuses a last stage with more than a kernel [D, Y] and a bias [Y]."""
    model = task.model
    boundary.check_several(model)
    if not boundary.ends_in_one_layer(start.params, task.num_classes):
        raise ValueError(
            f"--model={model.name} ends in {model.stage_names[-1]}, which is more than "
            "one dense layer; FedRoD adds a personal one to it, so take a model whose "
            "last stage is that layer alone"
        )
