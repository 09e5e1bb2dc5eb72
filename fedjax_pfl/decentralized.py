"""The rounds of decentralised methods: no server, clients pull from their peers.

A client of the round pulls what its peers had at the end of the last round, mixes it
with its own, trains, and keeps the result, from which others pull in the next round.
Rounds are synchronous, so no client sees a peer's present round. An algorithm of the
family defines how a client mixes and how it trains.

A client is measured at two moments. `client_accuracy` is that of the model that a
client of the next round has mixed and not yet trained, as UA-PDFL's released code tests
it (the other clients do not mix). `trained_accuracy` is that of the model that its last
training left, which Algorithm 2 of that paper returns. These two may differ by more
than methods do.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    aggregate,
    each_client,
    local_training,
    losses,
    options,
    rng,
    shapes,
    stacked,
    types,
)

option = options.option

TOPOLOGIES = ("random", "ring", "regular", "full", "erdos_renyi", "file")


@dataclasses.dataclass(frozen=True)
class Peers:
    """Options of every algorithm whose clients have peers."""

    num_peers: int = option(
        5,
        "peers of each client (random, ring, regular) [N_com]",
        minimum=1,
        needs={"topology": ("random", "ring", "regular")},
    )
    topology: str = option(
        "random",
        "graph of peers: drawn by each client, the nearest on a ring, an undirected "
        "graph of equal degrees, all others, each pair by chance, or a file",
        choices=TOPOLOGIES,
    )
    edge_probability: float = option(
        0.2,
        "chance of each peer (erdos_renyi)",
        above=0,
        maximum=1,
        needs={"topology": ("erdos_renyi",)},
    )
    adjacency: str = option(
        "",
        "npz file with an array `adjacency`, or text, of K x K entries 0 or 1: row i "
        "has the peers of client i (file)",
        needs={"topology": ("file",)},
        is_needed=True,
    )
    fixed_graph: bool = option(
        False,
        "draw the graph once, not in every round (random, regular, erdos_renyi)",
        needs={"topology": ("random", "regular", "erdos_renyi")},
    )
    shared_init: bool = option(
        True, "start all clients from one model instead of each from its own"
    )


def peer_spec(hparams: Peers) -> types.PeerSpec:
    """The graph that the options specify."""
    return types.PeerSpec(
        num_peers=hparams.num_peers,
        topology=hparams.topology,
        edge_probability=hparams.edge_probability,
        adjacency=hparams.adjacency,
        is_fixed=hparams.fixed_graph,
    )


class Mixed(NamedTuple):
    """What the clients of a cohort hold after pulling; leaves [C, ...].

    Attributes:
        model: The model from which each starts, and which serves it until it has
            trained.
        sent: Messages received, by kind: int32[C] or one number.
        given: What else its update gets, as `client.own`, such as an anchor or a mask.
        metrics: (sum, count) pairs by name, beside the training loss; () = no others.
    """

    model: types.Variables
    sent: Mapping[str, Any]
    given: Any = ()
    metrics: Mapping[str, losses.Pair] | tuple[()] = ()


def weights(kind: str, cohort: types.Cohort, data: types.Data) -> jax.Array:
    """Weights f32[C, 1 + P] of each client itself and its peers, for `mix`.

    Args:
        kind: `examples` (the train examples of each) or `uniform`.
        cohort: The clients and their peers.
        data: The tables.
    """
    source = jnp.concatenate([cohort.client_id[:, None], cohort.peer_clients], 1)
    if kind == "uniform":
        return jnp.ones(source.shape)
    return stacked.take(data.partition.train.count, source).astype(jnp.float32)


def mix(
    models: types.Variables,
    cohort: types.Cohort,
    cut: int,
    extractor: jax.Array,
    classifier: jax.Array,
) -> types.Variables:
    """Weighted means of clients and their peers, leaves [C, ...].

    Args:
        models: Leaves [K, ...], at the end of the last round.
        cohort: The clients and their peers.
        cut: The first stage of the classifier, 0..L; L = there is none.
        extractor: Weights of the stages below the cut and of all statistics, as in
            `aggregate.mix_peers`: with f32[C, 1] each client keeps its own.
        classifier: Weights of the other stages' parameters.
    """
    params, stats = models
    below, stats = aggregate.mix_peers((params[:cut], stats), cohort, extractor)
    above = aggregate.mix_peers(params[cut:], cohort, classifier)
    return types.Variables((*below, *above), stats)


def part_bytes(task: types.Task, cut: int) -> tuple[int, int]:
    """Bytes of the extractor with all statistics, and of the classifier."""
    params, stats = shapes.variables(task.client_model, task.example_shape)
    return shapes.tree_bytes((params[:cut], stats)), shapes.tree_bytes(params[cut:])


def make(
    hparams: Any,
    task: types.Task,
    mixed: Callable[[types.RoundState, types.Cohort, types.Data], Mixed],
    client_update: Callable[[each_client.Client, types.Variables], Any],
    *,
    messages: tuple[types.MessageKind, ...],
    peers: types.PeerSpec,
    private: Callable[[types.Variables], Any] | None = None,
    shares: tuple[str, ...] = (),
) -> types.Algorithm:
    """An algorithm of the family as pure functions.

    `state.clients` is {"own": the models, "private": what else each client keeps}.

    Args:
        hparams: The algorithm's options, including those of `Peers` and
            `LocalTraining`.
        task: What the algorithm may use.
        mixed: `(state, cohort, data) -> Mixed`, from the state at the end of the last
            round.
        client_update: `(client, start) -> Trained`. With `private` it returns
            `(Trained, row)`, where `row` is the client's new private row.
        messages: The kinds of messages.
        peers: The graph.
        private: From the first model to the private row of each client before round 0.
            None = clients keep nothing but their models.
        shares: The entries of `Mixed.metrics` that are fractions.
    """
    model = task.client_model

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        def first(key: jax.Array) -> dict[str, Any]:
            start = task.init(model, key)
            return {"own": start, "private": () if private is None else private(start)}

        one = first(key)
        rows = stacked.repeat(one, task.num_rows)
        if not hparams.shared_init:
            ids = jnp.arange(task.num_rows)
            own_key = functools.partial(rng.stream, key, "decentralized.own_init")
            rows = jax.lax.map(lambda number: first(own_key(number)), ids)
        return types.RoundState.first((), rows, key)

    def update(client: each_client.Client, _: Any):
        start, given = client.own
        out = client_update(client.replace(own=given), start)
        return (out, ()) if private is None else out

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        here = each_client.Round(task, state, cohort, data)
        pulled = mixed(state, cohort, data)
        (trained, row), here = here.update(update, own=(pulled.model, pulled.given))
        state = here.after({"own": trained.variables, "private": row})
        return state, trained.metrics(cohort) | dict(pulled.metrics), dict(pulled.sent)

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        """The mixed models of the next round's clients, and the others' own models."""
        pulled = mixed(state, cohort, data).model
        # Two groups, since a put into a state that is not donated copies all clients.
        rest = jnp.ones(task.num_rows, bool).at[cohort.row].set(False, mode="drop")
        return (
            types.Serving.each(model, state.clients["own"], mask=rest),
            types.Serving.each(
                model, pulled, client_id=cohort.row, mask=cohort.row_mask
            ),
        )

    def trained(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        """The models that each client's last training left."""
        return (types.Serving.each(model, state.clients["own"]),)

    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        messages=messages,
        init=init,
        round=round,
        serving=serving,
        trained=trained,
        peers=peers,
        shares=shares,
    )
