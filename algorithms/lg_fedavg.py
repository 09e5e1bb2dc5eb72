"""LG-FedAvg: clients keep the lower layers and average the upper ones.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: "Think Locally, Act
Globally: Federated Learning with Local and Global Representations",
https://arxiv.org/abs/2001.01523 (Algorithm 1).

* The server sends the upper layers to the clients of the round.
* Each trains them together with its own lower layers for E epochs.
* The upper layers are sent back, and the server takes their weighted mean.

    theta_m^l, theta_m^g <- (theta_m^l, theta_m^g) - eta grad F_m(theta_m^l, theta_m^g)
    theta^g <- sum_(m in S_t) N_m / N theta_m^g

| paper | here |
|---|---|
| l_m, theta_m^l | a client's own stages, before `--shared_from` |
| g, theta^g | the server's stages, from `--shared_from` on |
| N_m / N | `--aggregation=examples` |
| F_m, eta | the loss on a client's examples, `--client_lr` |

Differs from the paper: there is no auxiliary or adversarial loss on the representation.
All start from one initialisation, where the released code starts from a model that
FedAvg has trained. A client is served its own lower layers with the server's present
upper ones, as PFLlib has it. One that never took part has the initial lower layers; the
paper's "new test", an ensemble of all clients' models, is not here.
"""

import dataclasses

import fedjax_pfl as fp
from fedjax_pfl import averaging, boundary


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    shared_from: str = fp.option(
        "last",
        "first shared stage, by name; last = the last one, empty = the first after the "
        "last convolution",
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """LG-FedAvg as pure functions; ValueError without such a stage, or a lower one."""
    model, shape = task.model, task.example_shape
    cut = boundary.middle(hparams.shared_from, model, shape, "shared_from")
    is_upper = [stage >= cut for stage in range(len(model.stage_names))]
    upper = boundary.divided(is_upper, model, shape)
    return averaging.partial(hparams, task, upper)
