"""DFedAvg: decentralised FedAvg, a client averages itself and its peers, then trains.

The FedAvg and FedPer rows of Zhu, Fan, Xie: "UA-PDFL: A Personalized Approach for
Decentralized Federated Learning", https://arxiv.org/abs/2412.11674, in rounds without a
server.

* Each client of the round pulls the models that its peers had after the last round, and
  takes the mean of these and its own, weighted by examples.
* It trains the mean for E epochs on its own examples.

    w_i <- mean_(j in i, Q_i) w_j
    w_i <- w_i - eta grad F_i(w_i)

| paper | here |
|---|---|
| w_i | rows of `state.clients["own"]` |
| Q_i, N_com of them | peers (`--num_peers`, `--topology`, `--fixed_graph`) |
| mean_j | weighted by abs(D_j) (`--aggregation=examples`) |
| F_i, eta | the loss on a client's examples, `--client_lr` |
| g, h: extractor and classifier | stages before and from `--personal_from` on |

`dfedper` keeps the last layer private (`--personal_from=last`). `dfedavgm` is DFedAvgM
(Sun, Li, Wang: "Decentralized Federated Averaging", IEEE TPAMI 2023,
https://arxiv.org/abs/2104.11375, Algorithm 1): equal weights, and a `--client_momentum`
[theta] that restarts in each round. With one learning rate per round, this is its heavy
ball y_{k+1} = y_k - eta g + theta (y_k - y_{k-1}).

Differs from the paper: rounds are synchronous, and a round begins with the mean where
DFedAvgM's ends with it, which cuts the same sequence elsewhere. UA-PDFL neither
describes nor releases its baselines, so the weights and FedPer's cut (it only says
personal layers) are ours. All clients start from one model (`--noshared_init`: each
from its own). Statistics of batch norm are shared, also those of personal stages.
Clients outside the round do not change, and their peers still pull from them.
DFedAvgM's mixing matrix is symmetric with equal rows and columns, as in
`--topology=regular` but not random peers. Nothing is quantised.
"""

import dataclasses

import fedjax_pfl as fp
from fedjax_pfl import boundary, decentralized


@dataclasses.dataclass(frozen=True)
class HParams(decentralized.Peers, fp.LocalTraining):
    aggregation: str = fp.option(
        "examples",
        "weights of a client's mean of itself and its peers",
        choices=("examples", "uniform"),
    )
    personal_from: str = fp.option(
        "none",
        "first stage that is not shared, by name; last = the last one, none = all are "
        "shared, empty = the first after the last convolution",
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Decentralised FedAvg and FedPer as pure functions.

    Raises:
        ValueError: there is no such stage or graph, or nothing is shared.
    """
    model = task.client_model
    cut = boundary.some_shared(hparams.personal_from, model, task.example_shape)
    loss_fn = fp.cross_entropy_loss(model)
    kind = fp.MessageKind(
        "whole model" if cut == len(model.stage_names) else "extractor",
        "down",
        decentralized.part_bytes(task, cut)[0],
    )

    def mixed(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        """w_i <- sum_j |D_j| w_j / sum_j |D_j| over the client and its peers."""
        weight = decentralized.weights(hparams.aggregation, cohort, data)
        own = weight[:, :1]
        return decentralized.Mixed(
            decentralized.mix(state.clients["own"], cohort, cut, weight, own),
            sent={kind.name: cohort.peer_mask.sum(1)},
        )

    def client_update(client: fp.Client, start: fp.Variables):
        """E epochs of minibatches, from the mean."""
        return fp.train(hparams, loss_fn, start, client)

    return decentralized.make(hparams, task, mixed, client_update, messages=(kind,))
