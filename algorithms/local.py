"""Local: training without any exchange, the control row of every table.

"No Transfer" of Le et al., "CDKT-FL", https://arxiv.org/abs/2204.01542 (Tables 1 to
3), and the Local row of personalized federated learning.

* Each client of the round trains its own model on its own examples.
* If there is a proxy set, the server trains a separate model on it, as in the CDKT
  paper's row. No client learns from this model.

    w_n <- w_n - eta grad F_n(w_n)

| paper | here |
|---|---|
| w_n, F_n | rows of `state.clients`, the loss on the client's examples |
| w_s | `state.server`, only with a proxy set |
| eta, K, R | `--client_lr`, `--local_epochs`, `--server_epochs` |

Differs from the paper: it does not describe this row's server, which here is trained on
the proxy set, as in the released code.
"""

import dataclasses

import jax

import fedjax_pfl as fp
from fedjax_pfl import proxy, stacked


@dataclasses.dataclass(frozen=True)
class HParams(proxy.ServerTraining, fp.LocalTraining):
    """Options of local training."""


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Local training as pure functions."""
    server_model, client_model = task.server_model, task.client_model
    loss_fn = fp.cross_entropy_loss(client_model)
    has_server = task.num_proxy > 0

    def init(data: fp.Data, key: jax.Array) -> fp.RoundState:
        clients = stacked.repeat(task.init(client_model, key), task.num_rows)
        server = task.init(server_model, key) if has_server else ()
        return fp.RoundState.first(server, clients, key)

    def client_update(client: fp.Client, _) -> fp.Trained:
        return fp.train(hparams, loss_fn, client.own, client)

    def round(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        here = fp.Round(task, state, cohort, data)
        trained, here = here.update(client_update)
        server = ()
        if has_server:
            supervised = fp.cross_entropy_loss(server_model)
            server = proxy.train_server(hparams, supervised, task, state, data)
        state = here.after(trained.variables, server=server)
        return state, trained.metrics(cohort), {}

    def global_model(state: fp.RoundState, data: fp.Data):
        return {"global": (server_model, state.server)}

    def serving(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        return (fp.Serving.each(client_model, state.clients),)

    of_server = dataclasses.fields(proxy.ServerTraining)
    reasons = {field.name: "without a proxy set" for field in of_server}
    return fp.Algorithm(
        plans=(fp.plan(hparams),),
        init=init,
        round=round,
        server=global_model if has_server else None,
        serving=serving,
        trained=serving,
        unused={} if has_server else reasons,
    )
