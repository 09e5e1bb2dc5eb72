"""FedALA: a client learns, for each number of its upper layers, whose value to take.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: "FedALA: Adaptive Local Aggregation for
Personalized Federated Learning", AAAI 2023, https://arxiv.org/abs/2212.01197
(Algorithm 1).

* The server sends its model to the clients of the round.
* Each takes the server's lower layers. In the upper ones it goes from its own last
  value towards the server's by a weight in [0, 1], element by element. The weights take
  an epoch of steps on a share of its examples; the first time they are trained until
  their loss no longer moves.
* It trains the mixed model for E epochs. The server takes the mean of what returns.

    M_i = Theta_i^(t-1) + (Theta^(t-1) - Theta_i^(t-1)) * W_i^p
    W_i^p <- clip(W_i^p - eta grad_W F_i(M_i), 0, 1)
    Theta^t = sum_(i in S_t) n_i / n Theta_i^t

| paper | here |
|---|---|
| Theta^{t-1}, Theta_i^{t-1} | the server's model; the rows `own`, upper stages alone |
| W_i^p | the rows `weight`, 1 before the first round |
| M_i, Theta_i^t | `mixed`; M_i after E epochs of training |
| p | stages from `--adaptive_from` on |
| s % | `--adaptive_share` |
| eta | `--adaptive_lr` |
| F_i, n_i / n | the loss on a client's examples, `--aggregation=examples` |

Differs from the paper: the share of the examples are the first batches of the client's
first epoch in this round, rounded up to whole batches; the released code takes a window
of the data at random. The first time, the weights are trained until the standard
deviation of the last ten epochs' losses is below `--adaptive_threshold`, for at most
100 epochs. An epoch's loss is the mean over its examples, in the code that of the last
batch, with a threshold of .1 in PFLlib (`--preset=pfllib`) and of .01 in the paper, as
its authors say. A client is served the server's present model, mixed with its own by
the weights that it learned last, in an earlier round; the released code learns those of
a round, measures, and then trains. It rounds the share down to whole batches. A client
that never took part has the initial upper layers and weights of 1, and is served the
server's model.
"""

import dataclasses

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import averaging, boundary, losses, options, shapes

MOST_EPOCHS = 100  # of weights, the first time
SEEN = 10  # epochs whose losses tell whether they still move


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    adaptive_from: str = fp.option(
        "last",
        "first stage that is mixed element by element, by name; last = the last one, "
        "empty = the first after the last convolution [p]",
    )
    adaptive_share: float = fp.option(
        0.8,
        "share of the examples on which weights are learned [s]",
        above=0,
        maximum=1,
        needs={"adaptive_lr": options.ON},
        is_noted=True,
    )
    adaptive_lr: float = fp.option(1.0, "step size of the weights [eta]", minimum=0)
    adaptive_threshold: float = fp.option(
        0.01,
        "standard deviation of losses at which the first training ends",
        minimum=0,
        needs={"adaptive_lr": options.ON},
        is_noted=True,
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """FedALA as pure functions; ValueError without such a stage, or nothing to mix."""
    model, shape = task.model, task.example_shape
    cut = boundary.first_personal(hparams.adaptive_from, model, shape, "adaptive_from")
    if not jax.tree.leaves(shapes.variables(model, shape).params[cut:]):
        raise ValueError(
            f"--adaptive_from={hparams.adaptive_from} leaves --model={model.name} "
            "without parameters to mix; take a lower stage, or --algo=fedavg"
        )
    loss_fn = fp.cross_entropy_loss(model)
    one_epoch = fp.plan(hparams, epochs=1)
    of_weights = fp.LocalTraining(client_lr=hparams.adaptive_lr)

    def mixed(server: fp.Variables, row: dict) -> fp.Variables:
        """Theta_i + (Theta - Theta_i) W, in the upper stages."""
        upper = jax.tree.map(
            lambda mine, theirs, weight: mine + (theirs - mine) * weight,
            row["own"],
            server.params[cut:],
            row["weight"],
        )
        return fp.Variables((*server.params[:cut], *upper), server.stats)

    def shortened(num_examples: jax.Array) -> jax.Array:
        """The steps of an epoch on the share s of so many examples, rounded up."""
        whole = one_epoch.steps(num_examples)
        steps = jnp.ceil(hparams.adaptive_share * whole - 1e-4).astype(int)
        return jnp.maximum(steps, whole > 0)

    def learned(client: fp.Client, server: fp.Variables) -> dict:
        """The client's row with new weights, by gradient steps that stay in [0, 1]."""
        row, count = client.own, client.data.partition.train.count
        gap = jax.tree.map(lambda a, b: (a != b).any(), row["own"], server.params[cut:])
        some = client.fresh().at_most(shortened(count.max()))
        steps = jnp.minimum(some.plan.num_steps, shortened(count[client.id]))
        # Of a client whose time is up before its first step nothing is learned.
        differs = jnp.stack(jax.tree.leaves(gap)).any() & (steps > 0)
        some = some.replace(plan=some.plan.replace(num_steps=steps), is_tested=False)

        def mixture_loss(weight, stats, batch):
            model_of = mixed(server, row | {"weight": weight})
            return loss_fn(*model_of, batch)[0], stats

        def within(weight):
            return jax.tree.map(lambda w: jnp.clip(w, 0, 1), weight)

        objective = fp.Objective(mixture_loss, project=within)

        def epoch(carry: tuple) -> tuple:
            number, seen, weight = carry
            start = fp.Variables(weight, ({},) * len(weight))
            trained = fp.train(
                of_weights, (objective,), start, some, tag="fedala.weights"
            )
            seen = jnp.roll(seen, 1).at[0].set(losses.mean(trained.loss))
            return number + 1, seen, trained.params

        def goes_on(carry: tuple) -> jax.Array:
            """One epoch, or the first time until the losses no longer move."""
            number, seen, _ = carry
            moves = (number <= SEEN) | (seen.std() >= hparams.adaptive_threshold)
            more = ~row["has_learned"] & moves & (number < MOST_EPOCHS)
            return differs & ((number == 0) | more)

        first = jnp.int32(0), jnp.zeros(SEEN), row["weight"]
        _, _, weight = jax.lax.while_loop(goes_on, epoch, first)
        return row | {"weight": weight, "has_learned": row["has_learned"] | differs}

    def client_update(client: fp.Client, server: fp.Variables):
        """Adaptive local aggregation, then E epochs from the mixture."""
        row = learned(client, server)
        trained = fp.train(hparams, loss_fn, mixed(server, row), client)
        return trained, row | {"own": trained.params[cut:]}

    def first_row(start: fp.Variables) -> dict:
        own = start.params[cut:]
        weight = jax.tree.map(jnp.ones_like, own)
        return {"own": own, "weight": weight, "has_learned": jnp.zeros((), bool)}

    return averaging.make(hparams, task, client_update, own=first_row, build=mixed)
