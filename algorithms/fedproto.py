"""FedProto: clients of any architecture agree on the mean representation of a class.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: Federated Prototype Learning across
Heterogeneous Clients", AAAI 2022, https://arxiv.org/abs/2105.00243 (Algorithm 1);
released code yuetan031/FedProto.

* The server sends its prototypes C, one for each class that any client had.
* A client trains its own model on cross-entropy, and on how far its representations
  are from the prototypes of their classes.
* It sends the mean of its representations of each class. The server takes the mean
  over the clients N_j that have the class. Models never leave.
* A client is served its own body and the prototypes: the answer is the class whose C
  is nearest in L2 to an example's representation.

    L_i = CE(w_i; x, y) + lambda L_R  (Eq. 7)
    L_R = mean_(x,y) 1 / d ||f(phi_i; x) - C^y||^2
    C_i^j = mean_(x in D_i, y = j) f(phi_i; x)  (Eq. 3)
    C^j = mean_(i in N_j) C_i^j  (Eq. 6)

| paper | here |
|---|---|
| w_i (omega_i), C | rows of `state.clients`, `state.server` |
| f(phi_i; x), d | the input of the last stage, its width |
| mean over N_j | weighted by examples of the class (`--aggregation`) |
| lambda | `--prototype_weight` |

Clients may differ in architecture: `--client_model=m1,m2,...` gives client k the k-th
name, cyclically. Their representations have one width.

Differs from the paper: L_R there is sum_j ||C_i^j - C^j||, in each minibatch over its
classes (`--prototype_loss=means`). By default it is the mean square of differences
between examples and their prototypes, as in the released code and PFLlib, because the
published results are made with it. In both, a class without a prototype adds nothing.
Eq. 6 has the mean weighted by |D_ij| and divided once more by the number of clients,
which would shrink prototypes; that division is left out. `--aggregation=uniform` is the
mean of both codes, and of `--preset=pfllib`. They gather C_i in passing, while the
model trains; here it is that of the trained model in eval mode, as Eq. 3 has it. A
class that no client of a round has keeps its prototype, which PFLlib forgets. Before
there is any, the first class answers. Right after training there are no new prototypes
yet: `--eval_moments` other than `before` is refused.
"""

import dataclasses

import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import (
    distances,
    losses,
    options,
    prototypes,
    proxy,
    shapes,
    stacked,
    traffic,
)


@dataclasses.dataclass(frozen=True)
class HParams(fp.LocalTraining):
    prototype_weight: float = fp.option(
        1.0, "weight of the distance to prototypes [lambda]", minimum=0
    )
    prototype_loss: str = fp.option(
        "examples",
        "distance to prototypes: mean square over examples, or L2 of a batch's means",
        choices=("examples", "means"),
        needs={"prototype_weight": options.ON},
        is_noted=True,
    )
    aggregation: str = fp.option(
        "examples", "weights of a class's mean", choices=("examples", "uniform")
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Makes FedProto.

    Raises ValueError if representations differ in width, or if trained models are to be
    measured alone, because no client is served by its own last stage.
    """
    if task.tests_trained:
        raise ValueError(
            "--eval_moments: clients are served by the server's prototypes, "
            "which are there after the round; omit it"
        )
    models, num_classes = task.client_models, task.num_classes
    width, served = shapes.one_width(task), tuple(map(prototypes.nearest, models))
    members = [task.members(group) for group in range(len(models))]

    def regularizer(h, batch, server: prototypes.Prototypes):
        """L_R of representations f32[B, D]."""
        if hparams.prototype_loss == "examples":
            gaps = ((h - server.mean[batch.label]) ** 2).mean(1)
            gaps = jnp.where(server.is_known[batch.label], gaps, 0)
            return losses.masked_mean(gaps, batch.mask)
        mean, rows = prototypes.means(h, batch.label, batch.mask, num_classes)
        gaps = distances.safe_sqrt(((mean - server.mean) ** 2).sum(1))
        return jnp.where(server.is_known & (rows > 0), gaps, 0).sum()

    def local_update(client: fp.Client, model, server: prototypes.Prototypes):
        """The client's own model on L_S + lambda L_R."""

        def loss_fn(params, stats, batch):
            logits, h, stats = proxy.of_batch(model, params, stats, batch)
            supervised = losses.cross_entropy(logits, batch.label, batch.mask)
            gap = regularizer(h, batch, server)
            return supervised + hparams.prototype_weight * gap, stats

        return fp.train(hparams, loss_fn, client.own, client)

    def client_update(client: fp.Client, server: prototypes.Prototypes):
        """LocalUpdate, then C_i; the server sums them by class."""
        trained = local_update(client, client.model, server)
        size = shapes.capped(hparams.batch_size, task.num_examples)
        given = trained.variables, num_classes, size
        mean, rows = prototypes.of_client(client, *given)
        weight = rows if hparams.aggregation == "examples" else jnp.sign(rows)
        return (trained, (rows > 0).sum()), (weight[:, None] * mean, weight)

    def init(data: fp.Data, key) -> fp.RoundState:
        pairs = zip(models, members, strict=True)
        clients = (stacked.repeat(task.init(m, key), len(ids)) for m, ids in pairs)
        none = prototypes.Prototypes.none(num_classes, width)
        return fp.RoundState.first(none, tuple(clients), key)

    def round(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        here = fp.Round(task, state, cohort, data, by_architecture=True)
        old, is_real = state.server, cohort.row_mask.astype(jnp.float32)
        every, sums, here = here.update(client_update, shared=old, reduce=is_real)
        trained, counts = zip(*every, strict=True)
        pairs = zip(here.groups, counts, strict=True)
        up = sum(jnp.where(one.cohort.row_mask, count, 0) for one, count in pairs)
        sent = {"prototypes up": up, "prototypes down": old.is_known.sum()}
        rows = [one.variables for one in trained]
        return here.after(rows, server=old.after(*sums)), here.metrics(trained), sent

    def build(server: prototypes.Prototypes, own: fp.Variables) -> fp.Variables:
        return own._replace(params=(*own.params[:-1], server))

    def serving(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        given = {"shared": state.server, "build": build}
        return fp.Serving.by_architecture(task, state.clients, served, **given)

    def adapt(client: fp.Client, start: fp.Variables, server: prototypes.Prototypes):
        """A round's epochs of the client's own model."""
        trained = local_update(client, models[served.index(client.model)], server)
        return trained.replace(params=build(server, trained.variables).params)

    label, kind = traffic.label_bytes(num_classes), fp.MessageKind
    size = traffic.FLOAT_BYTES * width + label
    counted = traffic.FLOAT_BYTES * (hparams.aggregation == "examples")  # |D_ij|
    return fp.Algorithm(
        plans=(fp.plan(hparams),),
        messages=(
            kind("prototypes up", "up", size + counted),
            kind("prototypes down", "down", size),
        ),
        init=init,
        round=round,
        serving=serving,
        adapt=adapt,
        by_architecture=True,
    )
