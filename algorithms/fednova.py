"""FedNova: FedAvg of changes per step, as clients take unequal numbers of steps.

Wang, Liu, Liang, Joshi, Poor: "Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization", NeurIPS 2020, https://arxiv.org/abs/2007.07481
(Algorithm 1, Equations 7 and 8, and Section 4 for momentum).

* A client that takes more steps than others pulls FedAvg's mean towards its own
  optimum. Here each sends its change per step, and the server goes as far along their
  mean as clients have gone on average.

    d_i = (x - y_i) / norm(a_i)_1
    x <- x - tau_eff sum_i p_i d_i,    tau_eff = sum_i p_i norm(a_i)_1

* norm(a_i)_1 is how often the gradients of the client's tau_i steps are in its change:
  tau_i with SGD, and with momentum rho

    norm(a_i)_1 = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho)

| paper | here |
|---|---|
| x, y_i | `state.server`, a client's model after training |
| tau_i, rho | a client's steps in the round, `--client_momentum` |
| p_i | `--aggregation=examples` |
| eta d_i | the first part of an upload, whose second is norm(a_i)_1 |
| slow momentum of the server | `--server_optimizer=sgd --server_momentum` |

Differs from the paper: p_i are those of the round's clients. A client that takes no
step (`--drop_last`) counts as one that has gone nowhere, and one with few steps
(`--interrupted`) as one that has gone on in its direction. Statistics of batch norms
are averaged as in FedAvg. Other optimizers than SGD are refused.
"""

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import averaging, options, shapes, traffic

HParams = averaging.Averaging


def steps_in_change(num_steps: jax.Array, momentum: float | jax.Array) -> jax.Array:
    """norm(a)_1 f32[] of SGD with a momentum in [0, 1) for int32[] steps.

    Examples:
        >>> float(steps_in_change(jnp.int32(3), 0.0))
        3.0
        >>> round(float(steps_in_change(jnp.int32(2), 0.5)), 6)  # 1.5 + 1
        2.5
    """
    if options.is_off(momentum):
        return num_steps.astype(jnp.float32)
    left = 1 - momentum
    # 1 - rho^tau, without a loss of digits where rho is close to 1
    forgotten = -jnp.expm1(num_steps * jnp.log1p(-left))
    size = (num_steps - momentum * forgotten / left) / left
    return jnp.where(num_steps > 0, size, 0.0)


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """FedNova as pure functions; ValueError for an optimizer other than SGD."""
    others = "client_optimizer", "client_optimizer_options", "optimizer_state"
    options.refuse(hparams, others, "with fednova, which counts the steps of SGD")
    momentum = hparams.client_momentum
    if not isinstance(momentum, jax.Array) and momentum == 1:
        raise ValueError(
            "--client_momentum=1: fednova's count of steps in a change needs less than "
            "1; lower it"
        )
    loss_fn = fp.cross_entropy_loss(task.model)

    def client_update(client: fp.Client, server: fp.Variables):
        return fp.train(hparams, loss_fn, server, client)

    def upload(client: fp.Client, server: fp.Variables, trained: fp.Trained):
        """eta d_i, norm(a_i)_1 and the statistics."""
        size = steps_in_change(client.plan.num_steps, momentum)
        by = jnp.where(size > 0, size, 1)
        change = jax.tree.map(lambda x, y: (x - y) / by, server.params, trained.params)
        return change, size, trained.stats

    def step(server: fp.Variables, mean: tuple, key: jax.Array) -> fp.Variables:
        """x - tau_eff sum_i p_i eta d_i."""
        change, size, stats = mean
        params = jax.tree.map(lambda x, d: x - size * d, server.params, change)
        return fp.Variables(params, stats)

    whole = shapes.model_bytes(task.model, task.example_shape)
    sent = {"upload": upload, "upload_bytes": whole + traffic.FLOAT_BYTES}
    return averaging.make(hparams, task, client_update, **sent, step=step)
