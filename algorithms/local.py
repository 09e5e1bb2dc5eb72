"""Local training without any exchange: the control row of every table.

"No Transfer" of Nguyen et al., "CDKT-FL", https://arxiv.org/abs/2204.01542 (Tables 1 to
3), and the Local row of personalized federated learning.

* Each client of the round trains its own model on its own examples.
* If there is a proxy set, the server trains a separate model on it, as in the CDKT
  paper's row. No client learns from this model.

| paper | here |
|---|---|
| w_n | rows of `state.clients` |
| w_s | `state.server`, only with a proxy set |
| K, R | `--local_epochs`, `--server_epochs` |

Differs from the paper: it does not describe this row's server, which here is trained on
the proxy set, as in the released code.
"""

import dataclasses

import jax

from fedjax_pfl import each_client, local_training, proxy, stacked, types


@dataclasses.dataclass(frozen=True)
class HParams(proxy.ServerTraining, local_training.LocalTraining):
    """Options of local training."""


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """Local training as pure functions."""
    server_model, client_model = task.server_model, task.client_model
    loss_fn = local_training.cross_entropy_loss(client_model)
    has_server = task.num_proxy > 0

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        start = task.init(client_model, key)
        clients = stacked.repeat(start, task.num_rows)
        server = task.init(server_model, key) if has_server else ()
        return types.RoundState.first(server, clients, key)

    def client_update(client: each_client.Client, _) -> each_client.Trained:
        return local_training.train(hparams, loss_fn, client.own, client)

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        here = each_client.Round(task, state, cohort, data)
        trained, here = here.update(client_update)
        server = ()
        if has_server:
            supervised = local_training.cross_entropy_loss(server_model)
            server = proxy.train_server(hparams, supervised, task, state, data)
        state = here.after(trained.variables, server=server)
        return state, trained.metrics(cohort), {}

    def global_model(state: types.RoundState, data: types.Data):
        return {"global": (server_model, state.server)}

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        return (types.Serving.each(client_model, state.clients),)

    of_server = dataclasses.fields(proxy.ServerTraining)
    reasons = {field.name: "without a proxy set" for field in of_server}
    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        init=init,
        round=round,
        server=global_model if has_server else None,
        serving=serving,
        trained=serving,
        unused={} if has_server else reasons,
    )
