"""FedDF: the mean of the clients' models learns what these answer on public images.

Lin, Kong, Stich, Jaggi: "Ensemble Distillation for Robust Model Fusion in Federated
Learning", NeurIPS 2020, https://arxiv.org/abs/2006.07242 (Algorithm 1, "AvgLogits").

* Clients train the server's model, and the server averages theirs, as in FedAvg.
* Then it trains the mean towards the answers of all these models together, on images
  without labels that it alone has.

    x_0 = sum_(k in S) n_k / n x_k
    x_j = x_(j-1) - eta_j grad KL(softmax(mean_(k in S) f(x_k, d)) || softmax(f(x, d)))

| paper | here |
|---|---|
| S, x_k | the round's clients, their models after training |
| n_k / n | `--aggregation=examples` |
| d | `--distill_batch_size` images of `--public_set` or `--proxy_fraction` |
| x_N | the server's model after `--distill_steps` |
| eta_j | the rate of `--distill_optimizer`, from `--distill_lr` to 0 along a cosine |

Differs from the paper: all steps are done, where the paper has up to 10,000 and stops
when the accuracy on validation rows has not risen for 1,000. No client is left out for
its accuracy, and all have one architecture. The batches of a round are one shuffle of
the images after another, and batch norms learn statistics of these images, too.
Where clients agree with their mean, Adam makes whole steps of what rounding leaves of a
gradient, so that runs on other devices or with another `--client_chunk` drift apart.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import fedjax_pfl as fp
from fedjax_pfl import (
    distances,
    losses,
    over_devices,
    proxy,
    rng,
    stacked,
    traffic,
)


@dataclasses.dataclass(frozen=True)
class HParams(fp.LocalTraining):
    aggregation: str = fp.option(
        "examples", "weights of the server's mean", choices=("examples", "uniform")
    )
    distill_steps: int = fp.option(
        200, "steps of the server on public images in a round [N]", minimum=1
    )
    distill_lr: float = fp.option(
        0.001, "learning rate of the first of these steps [eta]", minimum=0
    )
    distill_optimizer: str = fp.option(
        "adam", "optimizer of these steps", choices=("adam", "sgd")
    )
    distill_batch_size: int = fp.option(128, "images of such a step", minimum=1)


def drawn(
    hparams: HParams, key: jax.Array, num_public: int
) -> tuple[jax.Array, jax.Array]:
    """The images of a round, as places among all public ones.

    Returns:
        (int32[A], those that are drawn; int32[N, B], the places among these of the
        images of each step, one shuffle after another).
    """
    size = min(hparams.distill_batch_size, num_public)
    count = hparams.distill_steps * size
    first, *keys = jax.random.split(key, 1 + -(-count // num_public))
    chosen = jax.random.permutation(first, num_public)[:count]
    shuffled = [jax.random.permutation(one, len(chosen)) for one in keys]
    return chosen, jnp.concatenate(shuffled)[:count].reshape(-1, size)


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """FedDF as pure functions; raises ValueError if nothing is public."""
    proxy.check_public("feddf", task)
    model, supervised = task.model, fp.cross_entropy_loss(task.model)

    def client_update(client: fp.Client, shared: tuple[fp.Variables, jax.Array]):
        """x_k, and what it answers on the public images, f32[>= A, Y]."""
        server, public = shared
        trained = fp.train(hparams, supervised, server, client)
        rest, variables = trained.split()

        def forward(image: jax.Array) -> jax.Array:
            return model.forward(*variables, image)[0]

        answers = proxy.shared_outputs(forward, client, public, task.num_classes)
        return rest, (variables, answers)

    def distilled(
        start: fp.Variables, batches: jax.Array, answers: jax.Array, data: fp.Data, key
    ) -> fp.Variables:
        """x_N from x_0, on rows int32[N, B] with the mean logits f32[N, B, Y]."""

        def loss_fn(params, stats, batch):
            logits, stats = model.forward(params, stats, batch.image, **batch.mode)
            target = jax.nn.log_softmax(answers[batch.step])
            gap = distances.kl(target, jax.nn.log_softmax(logits))
            return losses.masked_mean(gap, batch.mask), stats

        rate = optax.cosine_decay_schedule(hparams.distill_lr, len(batches))
        tx = {"adam": optax.adam, "sgd": optax.sgd}[hparams.distill_optimizer](rate)
        given = {"data": data, "batches": batches, "epochs": 1, "key": key}
        return proxy.fit(loss_fn, tx, start, **given)

    def init(data: fp.Data, key: jax.Array) -> fp.RoundState:
        return fp.RoundState.first(task.init(model, key), (), key)

    def round(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        """Algorithm 1: local training, the mean, and its distillation."""
        here = fp.Round(task, state, cohort, data)
        key = rng.stream(state.key, "feddf.images", state.round)
        chosen, places = drawn(hparams, key, task.num_proxy)
        rows = data.partition.proxy[chosen]
        public = stacked.in_batches(rows, places.shape[1])
        weights = here.weights(hparams.aggregation), here.weights("uniform")
        trained, (mean, answers), here = here.update(
            client_update, shared=(state.server, public), reduce=weights
        )
        key = rng.stream(state.key, "feddf.server", state.round)
        given = mean, rows[places], answers[places], data, key
        server = over_devices.once(
            lambda given: distilled(*given), task.execution, given
        )
        sent = {"model down": 1, "model up": 1}
        return here.after(server=server), trained.metrics(cohort), sent

    return fp.Algorithm(
        plans=(fp.plan(hparams),),
        messages=traffic.model_both_ways(task, model),
        init=init,
        round=round,
        server=lambda state, data: {"global": (model, state.server)},
    )
