"""Local: training without any exchange, the control row of every table.

"No Transfer" of Le et al., "CDKT-FL", https://arxiv.org/abs/2204.01542 (Tables 1 to
3), and the Local row of personalized federated learning.

* Each client of the round trains its own model on its own examples.
* If there is a proxy set, the server trains a separate model on it, as in the CDKT
  paper's row. No client learns from this model.
* Clients may differ in architecture, as in FedMD: `--client_model=m1,m2,...`.

    w_n <- w_n - eta grad F_n(w_n)

| paper | here |
|---|---|
| w_n, F_n | rows of `state.clients` (of several architectures a tuple), the loss |
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
    server_model, models = task.server_model, task.client_models
    has_server, is_mixed = task.num_proxy > 0, len(models) > 1
    members = [task.members(group) for group in range(len(models))]

    def init(data: fp.Data, key: jax.Array) -> fp.RoundState:
        pairs = zip(models, members, strict=True)
        groups = [stacked.repeat(task.init(m, key), len(ids)) for m, ids in pairs]
        server = task.init(server_model, key) if has_server else ()
        clients = tuple(groups) if is_mixed else groups[0]
        return fp.RoundState.first(server, clients, key)

    def client_update(client: fp.Client, _) -> fp.Trained:
        loss_fn = fp.cross_entropy_loss(client.model)
        return fp.train(hparams, loss_fn, client.own, client)

    def round(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        here = fp.Round(task, state, cohort, data, by_architecture=is_mixed)
        trained, here = here.update(client_update)
        server = ()
        if has_server:
            supervised = fp.cross_entropy_loss(server_model)
            server = proxy.train_server(hparams, supervised, task, state, data)
        rows = [x.variables for x in trained] if is_mixed else trained.variables
        return here.after(rows, server=server), here.metrics(trained), {}

    def global_model(state: fp.RoundState, data: fp.Data):
        return {"global": (server_model, state.server)}

    def serving(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        own = state.clients if is_mixed else [state.clients]
        return fp.Serving.by_architecture(task, own)

    of_server = dataclasses.fields(proxy.ServerTraining)
    reasons = {field.name: "without a proxy set" for field in of_server}
    return fp.Algorithm(
        plans=(fp.plan(hparams),),
        init=init,
        round=round,
        server=global_model if has_server else None,
        serving=serving,
        trained=serving,
        by_architecture=is_mixed,
        unused={} if has_server else reasons,
    )
