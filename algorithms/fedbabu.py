"""FedBABU: rounds train and average the body alone; the head moves in fine-tuning.

Oh, Kim, Yun: "FedBABU: Towards Enhanced Representation for Federated Image
Classification", ICLR 2022, https://arxiv.org/abs/2106.06042 (Algorithm 1).

* The server sends the body to the clients of the round.
* Each trains the body for E epochs under the head of the common initialisation, which
  never moves and never travels.
* The server takes the mean of the bodies, weighted by examples.
* After training, each client fine-tunes its copy on its own examples:
  `--fine_tune_epochs=5` [tau_f] adds the accuracy of the paper's tables.

    theta_ext^k <- theta_ext^k - eta grad F_k(theta_ext^k, theta_cls)
    theta_ext = sum_(k in S_t) n_k / n theta_ext^k

| paper | here |
|---|---|
| theta_ext, theta_cls | stages before and from `--personal_from` on |
| tau, eta | `--local_epochs`, `--client_lr` |
| n_k / n | `--aggregation=examples` |
| F_k, S_t | the loss on a client's examples, the clients of the round |

Differs from the paper: a client is served the server's model as it is, with the first
head, and its fine-tuned model is a measurement beside it. Fine-tuning trains body and
head, as the paper's main tables do, with the rate of the rounds. The paper has FedAvg's
weights; PFLlib, too. PFLlib fine-tunes once, after the last round, for ten epochs,
without short batches, and from each client's own body before the last mean.
"""

import dataclasses

import fedjax_pfl as fp
from fedjax_pfl import averaging, boundary


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    personal_from: str = fp.option(
        "last",
        "first stage of the head, by name; last = the last one, empty = the first "
        "after the last convolution",
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """FedBABU as pure functions; ValueError if there is no such stage, or no body."""
    model = task.model
    cut = boundary.middle(hparams.personal_from, model, task.example_shape)
    is_body = [stage < cut for stage in range(len(model.stage_names))]
    objective = fp.Objective(fp.cross_entropy_loss(model), trainable=tuple(is_body))

    def client_update(client: fp.Client, server: fp.Variables):
        """ClientBodyUpdate: the head's learning rate is zero."""
        return fp.train(hparams, (objective,), server, client)

    body = boundary.divided(is_body, model, task.example_shape)
    return averaging.make(hparams, task, client_update, sent=body)
