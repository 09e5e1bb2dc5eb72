"""FedProx: FedAvg whose clients are pulled towards the server's model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous
Networks", MLSys 2020, https://arxiv.org/abs/1812.06127 (Algorithm 2).

* Each client of the round trains on h_k. The rest is FedAvg.

    h_k(w) = F_k(w) + mu / 2 ||w - w^t||^2
    w^(t+1) = sum_(k in S_t) n_k / n w_k

| paper | here |
|---|---|
| w^t, w_k | `state.server`, from it trained on h_k |
| mu | `--proximal_weight` |
| F_k, S_t | the loss on a client's examples, the clients of the round |
| n_k / n | `--aggregation=examples` |

Differs from the paper: a few epochs stand for the gamma-inexact solution, clients are
drawn uniformly, and by default the mean is weighted by examples.
"""

import dataclasses

import fedjax_pfl as fp
from fedjax_pfl import averaging


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    proximal_weight: float = fp.option(
        0.01, "pull to the server [mu]", minimum=0, zero_is="fedavg"
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """FedProx as pure functions."""
    loss_fn = fp.cross_entropy_loss(task.model)

    def client_update(client: fp.Client, server: fp.Variables):
        """A few epochs on h_k, from w^t."""
        pull = fp.proximal(hparams.proximal_weight, server.params)
        objective = fp.Objective(loss_fn, adjust=pull)
        return fp.train(hparams, (objective,), server, client)

    return averaging.make(hparams, task, client_update)
