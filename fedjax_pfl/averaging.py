"""The rounds of FedAvg's family: the server sends its model and averages what returns.

This is Algorithm 1 of McMahan et al. (https://arxiv.org/abs/1602.05629), "Server
executes". An algorithm of the family defines what clients do with the model and keep.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    aggregate,
    boundary,
    each_client,
    local_training,
    optimizer,
    options,
    rng,
    server_optimizer,
    shapes,
    stacked,
    traffic,
    types,
)


@dataclasses.dataclass(frozen=True)
class Averaging(server_optimizer.ServerOptimizer, local_training.LocalTraining):
    """Options of algorithms with a server that averages its clients' models."""

    aggregation: str = options.option(
        "examples", "weights of the server's mean", choices=("examples", "uniform")
    )


def make(
    hparams: Averaging,
    task: types.Task,
    client_update: Callable[[each_client.Client, types.Variables], Any],
    *,
    own: Callable[[types.Variables], Any] | None = None,
    sent: boundary.Division | None = None,
    upload: Callable[[each_client.Client, types.Variables, Any], Any] | None = None,
    upload_bytes: int = 0,
    step: Callable[[types.Variables, Any, jax.Array], types.Variables] | None = None,
    build: Callable[[types.Variables, Any], types.Variables] | None = None,
    serving: Callable[..., tuple[types.Serving, ...]] | None = None,
    opt_state: Callable[..., Any] | None = None,
    adapt: Callable[..., each_client.Trained] | None = None,
) -> types.Algorithm:
    """An algorithm of the family as pure functions.

    `state.server` is its model, or with a `--server_optimizer` {"model": the model,
    "moments": the optimizer's state}, which the functions given here do not see.

    Args:
        client_update: `(client, server) -> Trained`, the model to average. With `own`
            it returns `(Trained, the client's new private row)`, the row like
            `client.own` in structure, shapes and dtypes.
        own: From the first model to each client's private row before round 0, which
            arrives as `client.own`. None = clients keep nothing.
        sent: What of the model travels and is averaged; None = all. The server's other
            parts stay as the first model has them. With `own` clients are meant to keep
            them, so that there is no model of the server alone.
        upload: `(client, server, trained) -> ` a pytree of numbers that the client
            sends in the place of its model, such as a clipped change of it. The server
            gets the weighted mean of these. It goes with `step` and without `sent`.
        upload_bytes: The bytes of an upload, as it is coded; 0 = those of the model,
            and a ValueError if that is not its size.
        step: `(server, mean, key) -> ` the server's next model, from the mean of what
            clients sent; None = the mean itself. `key` is that of this round, for
            noise. A `--server_optimizer` takes its own step towards this model.
        build: From the server's model and a client's private row to the model that
            serves the client; None = `serving`.
        serving, opt_state: As in `types.Algorithm`; without `build` and `serving` the
            server's model serves all clients.
        adapt: As in `types.Algorithm`, with the server's model as `shared`.

    Examples:
        >>> from types import SimpleNamespace
        >>> from launch import build
        >>> def fedavg(hparams, task):
        ...     loss_fn = local_training.cross_entropy_loss(task.model)
        ...     def client_update(client, server):
        ...         return local_training.train(hparams, loss_fn, server, client)
        ...     return make(hparams, task, client_update)
        >>> algo = SimpleNamespace(HParams=Averaging, make=fedavg)
        >>> label = jax.numpy.arange(40) % 2
        >>> data = jax.nn.one_hot(label, 2), label
        >>> options = {"algo": algo, "dataset": data, "num_clients": 4, "rounds": 5}
        >>> experiment = build.experiment(**options, preset="none")
        >>> experiment.run(progress=False)["metrics"]["global_accuracy"]["mean"]
        1.0
    """
    options.check_extends(hparams, Averaging, "averaging.make")
    if upload is not None and (step is None or sent is not None):
        raise ValueError("averaging.make(upload=) needs step= and excludes sent=")
    if upload_bytes != 0 and (upload is None or not _is_size(upload_bytes)):
        raise ValueError(
            f"averaging.make(upload_bytes={upload_bytes!r}): expected how many bytes "
            "upload= sends, a whole number above 0"
        )
    model, tx = task.model, server_optimizer.make(hparams)
    messages = _messages(task, sent, upload_bytes)

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        server = task.init(model, key)
        rows = () if own is None else stacked.repeat(own(server), task.num_rows)
        if tx is not None:
            noise = rng.stream(key, "averaging.optimizer")
            moments = optimizer.seeded(tx.init(server.params), noise)
            server = {"model": server, "moments": moments}
        return types.RoundState.first(server, rows, key)

    def update(client: each_client.Client, server: types.Variables):
        out = client_update(client, server)
        trained, row = _checked(out, own is not None)
        rest, variables = trained.split()
        if upload is not None:
            out = jax.tree.map(aggregate.as_float, upload(client, server, trained))
            size, wanted = shapes.tree_bytes(out), messages[1].num_bytes
            if not upload_bytes and size != wanted:
                raise ValueError(
                    f"averaging.make(upload=) sends {size} bytes, and the model has "
                    f"{wanted}; give upload_bytes={size}, or what its code takes"
                )
            return (rest, row), out
        return (rest, row), variables if sent is None else sent.sent(variables)

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        here, old = each_client.Round(task, state, cohort, data), model_of(state.server)
        weight = here.weights(hparams.aggregation)
        (trained, rows), mean, here = here.update(update, shared=old, reduce=weight)
        if sent is not None:
            pairs = zip(mean, sent.sent(old), strict=True)
            mean = [one.astype(before.dtype) for one, before in pairs]
            mean = sent.joined(mean, sent.kept(old))
        if step is not None:
            key = rng.stream(state.key, "averaging.step", state.round)
            mean = of_sent(step(old, mean, key), old)
        server = mean
        if tx is not None:
            moments = state.server["moments"]
            new, moments = server_optimizer.step(tx, moments, old, mean)
            # An own optimizer may decay what has no gradient.
            server = {"model": of_sent(new, old), "moments": moments}
        state = here.after(rows, server=server)
        return state, trained.metrics(cohort), {"model down": 1, "model up": 1}

    def of_sent(new: types.Variables, old: types.Variables) -> types.Variables:
        """The new model, of which what clients do not send stays as it was."""
        return new if sent is None else sent.joined(sent.sent(new), sent.kept(old))

    def model_of(server: Any) -> types.Variables:
        return server if tx is None else server["model"]

    def global_model(state: types.RoundState, data: types.Data):
        return {"global": (model, model_of(state.server))}

    def served(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        server = model_of(state.server)
        if build is None:
            return serving(state.replace(server=server), cohort, data)
        return (types.Serving.each(model, state.clients, shared=server, build=build),)

    def adapted(client: each_client.Client, start: types.Variables, server: Any):
        return adapt(client, start, model_of(server))

    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        messages=messages,
        init=init,
        round=round,
        server=global_model if own is None or sent is None else None,
        serving=served if build or serving else None,
        opt_state=opt_state,
        # Its source is that of `adapt`, by which a changed one is recognised.
        adapt=adapt and functools.wraps(adapt)(adapted),
    )


def _messages(
    task: types.Task, sent: boundary.Division | None, upload_bytes: int
) -> tuple[types.MessageKind, ...]:
    """The model's messages down and up, with what travels of it; see `make`."""
    down, up = traffic.model_both_ways(task, task.model)
    if sent is not None:
        size = shapes.tree_bytes(sent.sent(sent.like))
        down, up = traffic.both_ways("model", size)
    return down, up._replace(num_bytes=upload_bytes) if upload_bytes else up


def partial(
    hparams: Averaging, task: types.Task, division: boundary.Division
) -> types.Algorithm:
    """An algorithm whose clients keep a part of the model, and average the other.

    A client trains both parts together, from the server's `division.sent` and its own
    `division.kept`, and is served the server's present part with its own:

        (u_k, v_k) <- (u, v_k) - eta grad F_k(u, v_k)
        u <- sum_k n_k / n u_k  (`--aggregation`)

    This is FedSim of Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao: "Federated
    Learning with Partial Model Personalization", ICML 2022,
    https://arxiv.org/abs/2204.03809, where clients have several epochs of it.
    """
    loss_fn = local_training.cross_entropy_loss(task.model)

    def whole(server: types.Variables, own: tuple) -> types.Variables:
        return division.joined(division.sent(server), own)

    def client_update(client: each_client.Client, server: types.Variables):
        start = whole(server, client.own)
        trained = local_training.train(hparams, loss_fn, start, client)
        return trained, division.kept(trained.variables)

    return make(
        hparams, task, client_update, own=division.kept, sent=division, build=whole
    )


def without_own(start: types.Variables) -> dict[str, Any]:
    """For `own` of `make`: the row of a client that has no model of its own yet."""
    return {"own": start, "has_own": jnp.zeros((), bool)}


def own_or_server(
    model: types.Model, state: types.RoundState, has_own: jax.Array
) -> tuple[types.Serving, ...]:
    """For `serving` of `make`: a client's own model, or the server's.

    `state.clients["own"]` serves where `has_own` bool[K], and `state.server` elsewhere.
    """
    return (
        types.Serving.one(model, state.server, ~has_own),
        types.Serving.each(model, state.clients["own"], mask=has_own),
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and value > 0


def _checked(out: Any, has_row: bool) -> tuple[each_client.Trained, Any]:
    """A client update's result and row; a ValueError says what it should return."""
    wanted, pair = "Trained", (out, ())
    if has_row:
        wanted, pair = "(Trained, the client's new private row)", out
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not is_pair or not isinstance(pair[0], each_client.Trained):
        raise ValueError(
            f"client_update returned a {type(out).__name__}, expected {wanted}, where "
            "Trained is what local_training.train returns"
        )
    return pair[0], jax.tree.map(jnp.asarray, pair[1])
