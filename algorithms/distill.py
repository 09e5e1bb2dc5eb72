"""Distillation: training on labels and towards the answers of a fixed teacher.

Kim, Yu, Kim, Moon: "DepthFL: Depthwise Federated Learning for Heterogeneous Clients",
ICLR 2023, https://openreview.net/forum?id=pf8RIZTMU58 (Table 6, Appendix A.6), with the
partial targets of Tang et al., "Understanding and Improving Knowledge Distillation",
https://arxiv.org/abs/2002.03532.

* The teacher is a trained model from a file, in eval mode, and never changes.
* A client trains the server's model on cross-entropy plus the KL distance from a target
  distribution to its own, at temperature 1. The rounds are FedAvg's.
* The paper's setting is central, which is `--num_clients=1`. The gain is measured
  against `--algo=fedavg` on the same rows (`--train_share`).

    loss = CE(z, y) + KL(t || q)
    t_c = (1 - e) [c = y] + e / Y  (LS)
    t_y = p_y,  t_c = (1 - p_y) / (Y - 1)  (KD-pt)
    t = softmax(relu(w_y W^T)^.3 / .3)  (KD-sim)

| paper | here, `--distill_target` |
|---|---|
| z, q | logits of the model in training, their softmax |
| [c = y], Y | 1 for the label's class and 0 for others; the number of classes |
| KD | `kd`: t is the teacher's distribution p |
| LS | `ls`: e = `--smoothing`; no teacher |
| KD-pt | `pt`: p_y on the label, the rest spread evenly |
| KD-sim | `sim`: W are the unit vectors of the classes |
| KD-pt+sim | `pt_sim`: the mean of the last two |
| PKD, LKD | `kd` with a teacher of less data, or of the first level |

The rows of W are the columns of the kernel of the teacher's last layer, each divided by
its norm, and w_y is that of the label.

Differs from the paper: it gives no weights of the two terms. Here both have the weight
1, so their sum doubles the step of the cross-entropy alone (the paper's Base) at the
same learning rate, and LS with e = .1 is twice the usual label smoothing with e = .05.
`--label_weight=0.5 --distill_weight=0.5` is the mean of both terms instead, and the
control of their sum is Base at twice the learning rate. Several clients share one
teacher, which the paper does not try.
"""

import dataclasses

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import averaging, distances, local_training, losses, options, teacher

# The power of similarities and their temperature [alpha, beta]
POWER, SCALE = 0.3, 0.3


@dataclasses.dataclass(frozen=True)
class HParams(teacher.Taught, averaging.Averaging):
    distill_target: str = fp.option(
        "kd",
        "the distribution that the model is trained towards besides the labels: the "
        "teacher's (kd), its probability of the label (pt), its similarity of classes "
        "(sim), the mean of these two, or smooth labels (ls)",
        choices=("kd", "ls", "pt", "sim", "pt_sim"),
    )
    distill_weight: float = fp.option(
        1.0, "weight of the distance to the target", minimum=0, zero_is_off=True
    )
    label_weight: float = fp.option(
        1.0,
        "weight of the cross-entropy on the labels; with --distill_weight=0.5 a half "
        "makes the loss a mean of both",
        minimum=0,
        is_static=True,
    )
    smoothing: float = fp.option(
        0.1,
        "what ls spreads over all classes",
        minimum=0,
        maximum=1,
        needs={"distill_target": ("ls",), "distill_weight": options.ON},
    )


def smooth(label: jax.Array, on_label: jax.Array, num_classes: int) -> jax.Array:
    """f32[B, Y]: `on_label` f32[B] on the labels int32[B], the rest spread evenly."""
    is_label = jax.nn.one_hot(label, num_classes, dtype=bool)
    elsewhere = (1 - on_label) / (num_classes - 1)
    return jnp.where(is_label, on_label[:, None], elsewhere[:, None])


def similar(label: jax.Array, vectors: jax.Array) -> jax.Array:
    """f32[B, Y]: each class's similarity to the class of `label` int32[B].

    `vectors` f32[D, Y] has the teacher's vector of each class.
    """
    unit = vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=0), 1e-12)
    alike = jax.nn.relu(unit.T @ unit) ** POWER
    return jax.nn.softmax(alike / SCALE)[label]


def target(
    hparams: HParams, task: fp.Task, data: fp.Data, batch: local_training.Batch
) -> jax.Array:
    """The distribution f32[B, Y] that the model is trained towards."""
    kind, num_classes = hparams.distill_target, task.num_classes
    if kind == "ls":
        on_label = 1 - hparams.smoothing * (1 - 1 / num_classes)
        on_label = jnp.full(len(batch.label), on_label)
        return smooth(batch.label, on_label, num_classes)
    if "sim" in kind:
        alike = similar(batch.label, teacher.class_vectors(data, num_classes))
    if kind == "sim":
        return alike
    answer = jax.nn.softmax(teacher.logits(task, data, batch.image))
    if kind == "kd":
        return answer
    on_label = jnp.take_along_axis(answer, batch.label[:, None], 1)[:, 0]
    partial = smooth(batch.label, on_label, num_classes)
    return partial if kind == "pt" else (partial + alike) / 2


def distillation(
    hparams: HParams, task: fp.Task, data: fp.Data
) -> local_training.LossFn:
    """Weighted cross-entropy plus `--distill_weight` times KL(target || model)."""

    def on_labels(logits, batch):
        loss = losses.cross_entropy(logits, batch.label, batch.mask)
        return loss if hparams.label_weight == 1 else hparams.label_weight * loss

    def loss_fn(params, stats, batch):
        logits, stats = task.model.forward(params, stats, batch.image, **batch.mode)
        if options.is_off(hparams.distill_weight):
            return on_labels(logits, batch), stats
        wanted = target(hparams, task, data, batch)
        gaps = distances.kl(jnp.log(wanted), jax.nn.log_softmax(logits))
        supervised = on_labels(logits, batch)
        gap = losses.masked_mean(gaps, batch.mask)
        return supervised + hparams.distill_weight * gap, stats

    return loss_fn


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Distillation as pure functions."""

    def client_update(client: fp.Client, server: fp.Variables):
        """Trains the server's model on its labels and the teacher's targets."""
        loss_fn = distillation(hparams, task, client.data)
        return fp.train(hparams, loss_fn, server, client)

    return averaging.make(hparams, task, client_update)
