"""pFedMe: personal models near the server's, which learns from where they end.

T. Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS
2020, https://arxiv.org/abs/2006.08848 (Algorithm 1); released code
CharlieDinh/pFedMe.

* A client goes through its minibatches D. On each it takes K gradient steps of theta_i
  near w_i, then w_i takes one along the gradient of F_i.
* w_i is sent, and the server moves towards the mean. theta_i stays.

    F_i(w) = min_theta f_i(theta) + lambda / 2 ||theta - w||^2  (Eq. 2)
    theta_i <- theta_i - eta_p (grad f_i(theta_i) + lambda (theta_i - w_i))  (K times)
    w_i <- w_i - eta lambda (w_i - theta_i)  (Eq. 4)
    w^(t+1) = (1 - beta) w^t + beta mean_(i in S_t) w_i

| paper | here |
|---|---|
| w^t, theta_i | `state.server`, rows `own` of `state.clients`, once `has_own` |
| lambda, K | `--proximal_weight`, `--personal_steps` |
| eta, eta_p | `--client_lr`, with its optimizer; `--personal_lr` |
| beta | `--server_lr` with `--server_optimizer=sgd`; 1 without |
| R | the steps of `--local_epochs` |

The paper measures both models: theta_i (PM) as a client's, w (GM) as the global one. A
client is served the theta_i that its last round left, and w^t before its first.

Differs from the paper: the mean is weighted by examples by default. The paper stops at
an accuracy nu and does not say where theta_i begins: as in the released code and in
PFLlib there are always K steps, of rate `--personal_lr`, and theta_i is w^t at the
beginning of a round and goes on from minibatch to minibatch. Only the clients of a
round train, as in PFLlib, where the released code trains all. PFLlib adds .001 theta to
the gradient of theta, which is left out, as it is not in the paper. PFLlib means to
measure theta_i and has overwritten it by then: with w_i where it measures after
training, as it did at first, which `--eval_model=local` does, and with w^t where it
measures before, as it does now. The default is the paper's. Running statistics are
theta_i's. The loss of a round is F_i's, with f_i before the last step. Steps of theta_i
have no momentum, decay of weights or clipping, and `--client_lr_decay` is of eta alone.
"""

import dataclasses

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import averaging


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    proximal_weight: float = fp.option(
        15.0, "pull between the personal and the local model [lambda]", minimum=0
    )
    personal_steps: int = fp.option(
        5, "steps of the personal model on each batch [K]", minimum=1
    )
    personal_lr: float = fp.option(
        0.01, "learning rate of the personal model", minimum=0
    )
    eval_model: str = fp.option(
        "personal",
        "model that serves a client: theta_i, or w_i as it was sent (local)",
        choices=("personal", "local"),
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """pFedMe as pure functions."""
    model, weight = task.model, hparams.proximal_weight
    gradient = jax.value_and_grad(fp.cross_entropy_loss(model), has_aux=True)

    def by_stage(own: fp.Variables) -> tuple:
        return tuple(zip(*own, strict=True))

    def envelope(params, kept, batch):
        """F_i(w) on a batch, whose gradient is lambda (w - theta); the new theta."""
        towards = fp.proximal(weight, jax.lax.stop_gradient(params))

        def step(_, carry):
            (theta, stats), _ = carry
            (loss, stats), grads = gradient(theta, stats, batch)
            grads = towards(theta, grads)
            moved = jax.tree.map(lambda t, g: t - hparams.personal_lr * g, theta, grads)
            return fp.Variables(moved, stats), loss

        first = fp.Variables(*zip(*kept, strict=True)), jnp.zeros(())
        own, loss = jax.lax.fori_loop(0, hparams.personal_steps, step, first)
        own, loss = jax.lax.stop_gradient((own, loss))
        gaps = jax.tree.map(lambda w, t: ((w - t) ** 2).sum(), params, own.params)
        return loss + weight / 2 * sum(jax.tree.leaves(gaps)), by_stage(own)

    def client_update(client: fp.Client, server: fp.Variables):
        """R steps of w_i; theta_i, which takes no gradient, is among its statistics."""
        start = server._replace(stats=by_stage(server))
        trained = fp.train(hparams, envelope, start, client)
        own = fp.Variables(*zip(*trained.stats, strict=True))
        trained = trained.replace(stats=own.stats)
        own = trained.variables if hparams.eval_model == "local" else own
        return trained, {"own": own, "has_own": jnp.ones((), bool)}

    def serving(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        return averaging.own_or_server(model, state, state.clients["has_own"])

    given = {"own": averaging.without_own, "serving": serving}
    return averaging.make(hparams, task, client_update, **given)
