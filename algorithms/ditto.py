"""Ditto: a personal model beside FedAvg's, pulled towards it.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, https://arxiv.org/abs/2012.04221 (Algorithm 1).

* The server's model is FedAvg's.
* Each client of the round also trains its personal model on its examples, pulled
  towards the server's model as it was sent. The personal model serves the client.

| paper | here |
|---|---|
| w^t, v_k | `state.server`, rows of `state.clients` |
| lambda | `--proximal_weight` |
| s | the steps of `--local_epochs`, for both models |

Differs from the paper: the mean is weighted by examples by default. Both models see the
same batches. The personal one starts from the common initialisation, with a fresh
optimizer in each round (`--optimizer_state=persist` applies only to the other).
"""

import dataclasses

from fedjax_pfl import averaging, each_client, local_training, options, types


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    proximal_weight: float = options.option(
        0.1, "pull of the personal model to the server's [lambda]", minimum=0
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """Ditto as pure functions."""
    model = task.model
    loss_fn = local_training.cross_entropy_loss(model)

    def client_update(client: each_client.Client, server: types.Variables):
        """UPDATE_GLOBAL from w^t, then v_k along F_k + lambda / 2 ||v - w^t||^2."""
        trained = local_training.train(hparams, loss_fn, server, client)
        pull = local_training.proximal(hparams.proximal_weight, server.params)
        objectives = (local_training.Objective(loss_fn, adjust=pull),)
        personal = local_training.train(
            hparams, objectives, client.own, client.fresh(), tag="engine.personal"
        )
        return trained, personal.variables

    def adapt(
        client: each_client.Client, start: types.Variables, server: types.Variables
    ):
        """The personal model's steps, from it and towards w^t."""
        pull = local_training.proximal(hparams.proximal_weight, server.params)
        objectives = (local_training.Objective(loss_fn, adjust=pull),)
        adapting = local_training.ADAPTING
        return local_training.train(hparams, objectives, start, client, tag=adapting)

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        return (types.Serving.each(model, state.clients),)

    given = {"own": lambda start: start, "serving": serving, "adapt": adapt}
    return averaging.make(hparams, task, client_update, **given)
