"""FedBN: FedAvg whose clients keep their batch norms.

Li, Jiang, Zhang, Kamp, Dou: "FedBN: Federated Learning on Non-IID Features via Local
Batch Normalization", ICLR 2021, https://arxiv.org/abs/2102.07623 (Algorithm 1).

* The server sends all but the batch norms to the clients of the round.
* Each trains them with its own batch norms for E epochs.
* The server takes the mean of what returns. Batch norms never travel.

A batch norm is a module that has running statistics. They stay with the client, and so
do the parameters of that very module: scale and bias.

    w_l^(t+1) = 1 / K sum_k w_(l,k)^(t+1)  (layer l is no batch norm)

| paper | here |
|---|---|
| w_l, 1 / K | the server's model, `--aggregation=uniform` |
| w_(l,k) of batch norms | rows of `state.clients` |

Differs from the paper: the mean is weighted by examples by default, as in the other
methods here and in PFLlib, where the paper and its released code have 1 / K. A client
is served the server's present model with its own batch norms; one that never took part
has the initial ones. PFLlib knows a batch norm by its name, so that those of a ResNet's
shortcuts travel there. A model without batch norm is refused, where PFLlib runs FedAvg
under this name.
"""

from typing import Any

import jax

import fedjax_pfl as fp
from fedjax_pfl import averaging, boundary, shapes, types

HParams = averaging.Averaging


def without_norms(model: types.Model, shape: tuple[int, ...]) -> boundary.Division:
    """All but a model's batch norms travel; ValueError if it has none."""
    like = shapes.variables(model, shape)

    def modules(tree: Any) -> list[tuple]:
        """The module of each leaf: its stage, and the names above the leaf's own."""
        paths = [path[:-1] for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        return [tuple(map(jax.tree_util.keystr, zip(path))) for path in paths]

    moving = set(modules(like.stats))
    if not moving:
        such = ", such as resnet18" if len(shape) == 3 else " (your own)"
        raise ValueError(
            f"--algo=fedbn: --model={model.name} has no batch norm, so that nothing "
            f"would stay with a client; take a model that has one{such}, or "
            "--algo=fedavg"
        )
    # Statistics of own linen modules are below the name of their collection.
    moving |= {(*one[:2], *one[3:]) for one in moving if "['batch_stats']" in one}
    is_sent = [one not in moving for one in modules(like.params)]
    is_sent += [False] * len(modules(like.stats))
    return boundary.Division(like, tuple(is_sent))


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """FedBN as pure functions; ValueError for a model without batch norm."""
    rest = without_norms(task.model, task.example_shape)
    return averaging.partial(hparams, task, rest)
