"""Ditto: a personal model beside FedAvg's, pulled towards it.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, https://arxiv.org/abs/2012.04221 (Algorithm 1).

* The server's model is FedAvg's.
* Each client of the round also trains its personal model on its examples, pulled
  towards the server's model as it was sent. The personal model serves the client.

    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t))
    w^(t+1) = sum_(k in S_t) n_k / n w_k

| paper | here |
|---|---|
| w^t, w_k, v_k | `state.server`, from it trained on F_k, rows of `state.clients` |
| lambda, eta | `--proximal_weight`, `--client_lr` |
| F_k, S_t | the loss on a client's examples, the clients of the round |
| n_k / n | `--aggregation=examples` |
| s | the steps of `--local_epochs`, for both models |

Differs from the paper: the mean is weighted by examples by default. Both models see the
same rows in each batch, with draws of `--augment` or of hidden words of their own. The
personal one starts from the common initialisation, with a fresh optimizer in each round
(`--optimizer_state=persist` applies only to the other). A client that never took part
is served that initialisation.
"""

import dataclasses

import fedjax_pfl as fp
from fedjax_pfl import averaging


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    proximal_weight: float = fp.option(
        0.1,
        "pull of the personal model to the server's [lambda]",
        minimum=0,
        zero_is="local (--optimizer_state=reset) but for messages and a server's model",
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Ditto as pure functions."""
    loss_fn = fp.cross_entropy_loss(task.model)

    def towards(server: fp.Variables) -> tuple[fp.Objective]:
        pull = fp.proximal(hparams.proximal_weight, server.params)
        return (fp.Objective(loss_fn, adjust=pull),)

    def client_update(client: fp.Client, server: fp.Variables):
        """UPDATE_GLOBAL from w^t, then v_k along F_k + lambda / 2 ||v - w^t||^2."""
        trained = fp.train(hparams, loss_fn, server, client)
        personal = fp.train(
            hparams, towards(server), client.own, client.fresh(), tag="engine.personal"
        )
        return trained.replace(tested=personal.tested), personal.variables

    def adapt(client: fp.Client, start: fp.Variables, server: fp.Variables):
        """The steps of v_k towards w^t, from the model that serves the client."""
        return fp.train(hparams, towards(server), start, client)

    return averaging.make(
        hparams,
        task,
        client_update,
        own=lambda start: start,
        serving=lambda state, *_: (fp.Serving.each(task.model, state.clients),),
        adapt=adapt,
    )
