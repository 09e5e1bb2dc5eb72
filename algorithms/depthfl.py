"""DepthFL: clients hold the first stages of a model, exits distil into one another.

Kim, Yu, Kim, Moon: "DepthFL: Depthwise Federated Learning for Heterogeneous Clients",
ICLR 2023, https://openreview.net/forum?id=pf8RIZTMU58 (Algorithm 1, Eq. 1), with
FedDyn: Acar et al., ICLR 2021, https://arxiv.org/abs/2111.04263.

* The server sends each client of the round the first stages of its model, as many as
  the client can hold. Every stage has an exit.
* A client trains them on the cross-entropy of all its exits, and every exit learns from
  the outputs of the others.
* FedDyn: each client sums up its drift. The sum, and a pull to the server's model,
  correct the gradient of its loss.
* The server takes, stage by stage, the mean over the clients that hold it, and adds a
  step along the sum of all drifts.

    loss_k = sum_i CE(z_i, y) + rho / (d_k - 1) sum_i sum_(j != i) KL(p_j || p_i)
    rho = exp(-5 (1 - min(t / R, 1))^2)
    gradient = grad(loss_k) - g_k + alpha (w - W)
    g_k <- g_k - alpha (W_k - W)
    h <- h - alpha n / M (mean_k W_k - W)
    W <- mean_k W_k - h / alpha

| paper | here |
|---|---|
| W, L_k: model, classifiers | stages and exits of `--model` |
| z_i, p_i | logits of exit i, their softmax (fixed where it teaches) |
| w, W_k | the client's parameters during and after its training |
| n, M | clients of the round that hold a stage, `--h_denominator` |
| loss_k, rho | Eq. 1, over exits 1 to d_k; rho is times `--self_distill_weight` |
| d_k: local depth | `cohort.level` (`--levels`, `--level_mix`, `--max_level`) |
| alpha of FedDyn, g_k, h | `--feddyn_alpha`, private rows, `state.server["h"]` |
| R: rounds until the full weight (Table 13) | `--ramp_rounds` |
| DepthFL (FedAvg) | `--feddyn_alpha=0 --self_distill_weight=0` |
| exclusive learning | `--max_level=s --exclusive` |

Differs from the paper: the distillation's weight grows as exp(-5 (1 - t/R)^2), which
only Table 13 and the author's code have. No 1e-7 is added inside the KL. An exit that
teaches gets no gradient from it, as in the code (the paper does not say). h is a mean
over all clients that may be drawn, as in the code, or over those that hold the level
(`--h_denominator=capable`). A stage that no client of the round holds keeps its values
and its h. Running statistics are averaged over the holders, without h. Where N/K is not
an integer, the first clients of `--partition=iid` get one example more, while the code
drops these examples. For a text, Appendix B describes BERT's masks (of 15 % of the
words 80 % hidden, 10 % random). BERT's loss is over the chosen 15 % alone. Here the
masks are these, but the loss and the perplexities are over all positions, as in
HeteroFL's released code, which hides all of the 15 %. `--masked_loss=chosen` is BERT's
loss.
"""

import dataclasses

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import boundary, levels, losses, options, stacked, types


@dataclasses.dataclass(frozen=True)
class HParams(levels.Levels, fp.LocalTraining):
    feddyn_alpha: float = fp.option(
        0.1, "FedDyn's penalty [alpha], 0 = FedAvg", minimum=0, zero_is_off=True
    )
    self_distill_weight: float = fp.option(
        1.0, "mutual distillation of exits, 0 = none", minimum=0, zero_is_off=True
    )
    ramp_rounds: int = fp.option(
        300,
        "rounds until this weight is reached, a third of all or (texts) more [R]",
        minimum=1,
        needs={"self_distill_weight": options.ON},
        is_noted=True,
        is_in_rounds=True,
    )
    h_denominator: str = fp.option(
        "all",
        "FedDyn's h is a mean over all clients, or over those that can hold the level",
        choices=("all", "capable"),
        needs={"feddyn_alpha": options.ON},
    )


def ramp(round: jax.Array, ramp_rounds: int) -> jax.Array:
    """exp(-5 (1 - t/R)^2) f32[] up to round R, then 1."""
    left = 1 - jnp.minimum(round / ramp_rounds, 1)
    return jnp.exp(-5 * left**2)


def mutual_gap(
    logits: jax.Array,
    reached: jax.Array,
    mask: jax.Array,
    chosen: jax.Array | None = None,
) -> jax.Array:
    """sum_i sum_{j != i} KL(sg p_j || p_i) / (d - 1), f32[]; Eq. 1, second sum.

    The sum over j precedes the product with log p_i, so that nothing is as large as all
    pairs. `logits` f32[E, B, ..., Y] are finite, `reached` bool[E] has the d exits that
    the client holds, and `mask` bool[B] the real samples. `chosen` has the positions of
    a text that count, as in `losses.batch_mean`.
    """
    log_p = jax.nn.log_softmax(logits)
    fixed, is_held = jax.lax.stop_gradient(log_p), stacked.column(reached, log_p)
    p = jnp.where(is_held, jnp.exp(fixed), 0)
    negentropy = jnp.where(p > 0, p * fixed, 0).sum(-1)
    others, of_others = p.sum(0) - p, negentropy.sum(0) - negentropy
    cross = jnp.where(others > 0, others * log_p, 0).sum(-1)
    gaps = jnp.where(is_held[..., 0], of_others - cross, 0)
    gap = losses.batch_mean(gaps.sum(0), mask, chosen)
    return gap / jnp.maximum(reached.sum() - 1, 1)


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Makes DepthFL.

    Raises ValueError if the levels are not the model's, or if an option has no effect.
    """
    model = levels.truncated(hparams, task.model)
    alpha = hparams.feddyn_alpha
    distils = model.has_exits and not options.is_off(hparams.self_distill_weight)
    is_dyn = not options.is_off(alpha)
    if not model.has_exits:
        options.refuse(hparams, ("self_distill_weight",), "on a model with one exit")

    def sharers(data: fp.Data) -> int | jax.Array:
        """The clients of which FedDyn's h is a mean, or those that can hold a stage."""
        if hparams.h_denominator == "all":
            return task.num_eligible
        owned = data.partition
        may_train = owned.unseen.count == 0 if owned.has_unseen else True
        return levels.num_capable(hparams, task.num_clients, may_train)

    def objective(client: fp.Client, level: int) -> fp.Objective:
        """Eq. 1 on those of the stages 1..level that the client holds."""
        held = levels.held(client.level, model)[:level]
        reached = held if model.has_exits else held[-1:]

        def loss_fn(params, stats, batch):
            """Eq. 1: every exit's cross-entropy, and what it learns from the others."""
            out, stats = model.forward(
                params, stats, batch.image, held=held, **batch.mode
            )
            exits = jnp.stack(out) if model.has_exits else out[None]
            # Masked before any softmax, since exits that are not held are arbitrary.
            exits = jnp.where(stacked.column(reached, exits), exits, 0)
            which = batch.mask, batch.chosen
            label = jnp.broadcast_to(batch.label, exits.shape[:-1])
            hard = losses.cross_entropies(exits, label)
            hard = jnp.where(stacked.column(reached, hard), hard, 0).sum(0)
            loss = losses.batch_mean(hard, *which)
            if distils:
                weight = ramp(client.round, hparams.ramp_rounds)
                weight *= hparams.self_distill_weight
                loss += weight * mutual_gap(exits, reached, *which)
            return loss, stats

        return fp.Objective(loss_fn, held)

    def client_update(client: fp.Client, server: fp.Variables, level: int):
        """Algorithm 1, client: trains stages 1..level; those it does not hold stay."""

        def feddyn_pull(params, grads):
            """Adds the gradient of -<g, theta> + alpha / 2 ||theta - theta^t||^2."""
            return jax.tree.map(
                lambda d, g, new, old: d - g + alpha * (new - old),
                *(grads, client.own[:level], params, server.params),
            )

        steps = objective(client, level)
        steps = steps._replace(adjust=feddyn_pull) if is_dyn else steps
        return fp.train(hparams, (steps,), server, client)

    def adapt(client: fp.Client, start: fp.Variables, _):
        """The client's steps without FedDyn, whose terms are of its own rounds."""
        steps = objective(client, len(start.params))
        return fp.train(hparams, (steps,), start, client)

    def zeros(start: fp.Variables) -> types.Params:
        return jax.tree.map(jnp.zeros_like, start.params) if is_dyn else ()

    def server_update(server, trained, own, cohort, mean, data):
        """The mean of what clients hold, and FedDyn's sums of drifts."""
        new, held = mean(trained.variables), levels.holders(cohort, model)
        if not is_dyn:
            return {"model": new}, None
        drift = feddyn_client(own, trained.params, server["model"].params, held)
        return feddyn_server(server, new, held, sharers(data)), drift

    def feddyn_client(own, params, old, held):
        """g_k - alpha (theta_k - theta^t). What was not trained keeps its g."""
        drift = jax.tree.map(lambda g, new, o: g - alpha * (new - o), own, params, old)
        return tuple(map(stacked.where, boundary.by_stage(held), drift, own))

    def feddyn_server(server, mean, held, sharers):
        """h - alpha n / M (mean - theta^t), then theta^(t+1) = mean - h / alpha."""
        old, share = server["model"].params, boundary.by_stage(held.sum(0) / sharers)
        h = tuple(
            jax.tree.map(lambda a, m, o, s=s: a - alpha * s * (m - o), *stage)
            for s, *stage in zip(share, server["h"], mean.params, old, strict=True)
        )
        ahead = jax.tree.map(lambda m, a: m - a / alpha, mean.params, h)
        is_held = boundary.by_stage(held.any(0))
        h = boundary.select(is_held, h, server["h"])
        params = boundary.select(is_held, ahead, old)
        return {"model": fp.Variables(params, mean.stats), "h": h}

    def beside(start: fp.Variables) -> dict[str, types.Params]:
        return {"h": zeros(start)} if is_dyn else {}

    made = levels.make(
        hparams,
        task,
        model,
        levels.first_stages(task, model),
        client_update,
        private=zeros,
        beside=beside,
        server_update=server_update,
        adapt=adapt,
    )
    unused = {}
    if not model.has_exits or levels.top(hparams) == 1:
        names = ("self_distill_weight", "ramp_rounds")
        unused = dict.fromkeys(names, "as no client holds more than one exit")
    are_able = hparams.levels == "dynamic"  # so that each can hold every level
    if are_able or len(levels.possible(hparams, task.num_clients)) == 1:
        same = "as all clients that take part can hold the same stages"
        unused["h_denominator"] = same
    return made._replace(unused=unused)
