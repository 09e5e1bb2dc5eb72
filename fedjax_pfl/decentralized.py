"""The rounds of decentralised methods: clients pull from their peers, without a server.

In a round each client pulls what its peers had at the end of the last round, mixes it
with its own model, trains, and keeps the result, from which others pull in the next
round. Rounds are synchronous, so no client sees a peer's present round. An algorithm of
the family defines how a client mixes and how it trains.

Clients are measured at two moments. `client_accuracy` is that of the mixed model that a
client of the next round has before it trains, as UA-PDFL's released code tests it
(other clients do not mix). `trained_accuracy` is that of the model that a client's last
training left, which Algorithm 2 of that paper returns. These may differ more than
methods do.
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
from fedjax_pfl.rows import exchange

option = options.option

TOPOLOGIES = ("random", "ring", "regular", "full", "erdos_renyi", "file")


@dataclasses.dataclass(frozen=True)
class Peers:
    """Options of algorithms with peers."""

    num_peers: int = option(
        5,
        "peers of each client (random, ring, regular) [N_com]",
        minimum=1,
        needs={"topology": ("random", "ring", "regular")},
    )
    topology: str = option(
        "random",
        "graph of peers: drawn by each client, the nearest on a ring, an undirected "
        "graph of equal degrees, all others, each of them by chance, or a file",
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
    """The clients of a cohort after pulling; leaves [C, ...].

    From `model` each client starts, and it serves the client until it trains. `sent`
    are messages received, by kind: int32[C] or one number. `given` is further input of
    its update, as `client.own`, such as an anchor or a mask. `metrics` are (sum, count)
    pairs by name, beside the training loss; () = no others.
    """

    model: types.Variables
    sent: Mapping[str, Any]
    given: Any = ()
    metrics: Mapping[str, losses.Pair] | tuple[()] = ()


def weights(kind: str, cohort: types.Cohort, data: types.Data) -> jax.Array:
    """Weights f32[C, 1 + P] of each client and its peers, for `mix`.

    `kind` is `examples` (the train examples of each) or `uniform`, else a ValueError.
    """
    options.check_one_of("aggregation", kind, ("examples", "uniform"))
    source = jnp.concatenate([cohort.client_id[:, None], cohort.peer_clients], 1)
    if kind == "uniform":
        return jnp.ones(source.shape)
    return stacked.take(data.partition.train.count, source).astype(jnp.float32)


def fetch_rows(
    tree: Any, row: jax.Array, cohort: types.Cohort
) -> tuple[Any, types.Cohort]:
    """Small private rows at slots int32[C] or int32[C, n], on every device.

    `tree` has leaves [K, ...]. Returns also the cohort, with which later rows travel
    behind these (`rows.exchange`).
    """
    found = exchange.gathered(exchange.take(tree, row))
    return found, exchange.behind(cohort, found)


def mix(
    models: types.Variables,
    cohort: types.Cohort,
    cut: int,
    extractor: jax.Array,
    classifier: jax.Array,
) -> types.Variables:
    """Weighted means of clients and their peers, leaves [C, ...].

    `models` have leaves [K, ...], at the end of the last round. `cut` is the first
    stage of the classifier, 0..L, and L means that there is none. `extractor` has the
    weights of the stages below the cut and of all statistics, as in
    `aggregate.mix_peers` (with f32[C, 1] each client keeps its own), and `classifier`
    those of the other stages' parameters.
    """
    params, stats = models
    parts, weight = ((params[:cut], stats), params[cut:]), (extractor, classifier)
    mixed = aggregate.mix_peers(parts, cohort, weight)
    (below, stats), above = mixed
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
    peers: types.PeerSpec | None = None,
    private: Callable[[types.Variables], Any] | None = None,
    shares: tuple[str, ...] = (),
) -> types.Algorithm:
    """An algorithm of the family as pure functions.

    `state.clients` is {"own": the models, "private": the clients' other private rows}.

    Args:
        hparams: The options, including those of `Peers` and `LocalTraining`.
        task: As every `make` gets it.
        mixed: `(state, cohort, data) -> Mixed`, from the state after the last round.
        client_update: `(client, start) -> Trained`. With `private` it returns
            `(Trained, row)`, where `row` is the client's new private row.
        messages, peers: The kinds of messages, and the graph; None = that of `hparams`.
        private: From the first model to each client's private row before round 0. None
            = clients keep nothing but their models.
        shares: The entries of `Mixed.metrics` that are fractions.
    """
    options.check_extends(hparams, Peers, "decentralized.make")
    model, unused = task.client_model, {}
    if peers is not None and peers.draw is not None:
        names = [field.name for field in dataclasses.fields(Peers)]
        unused = dict.fromkeys(names, "as the algorithm draws a graph of its own")
        del unused["shared_init"]

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
        own = exchange.tied((pulled.model, pulled.given))
        (trained, row), here = here.update(update, own=own)
        state = here.after({"own": trained.variables, "private": row})
        return state, trained.metrics(cohort) | dict(pulled.metrics), dict(pulled.sent)

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        """The mixed models of the next round's clients, and the others' own models."""
        pulled = exchange.gathered(mixed(state, cohort, data).model)
        cohort = exchange.behind(cohort, pulled)
        # Two groups, since a put into a state that is not donated copies all clients.
        rest = jnp.ones(task.num_rows, bool).at[cohort.row].set(False, mode="drop")
        return (
            types.Serving.each(model, state.clients["own"], mask=rest),
            types.Serving.each(
                model, pulled, client_id=cohort.row, mask=cohort.row_mask
            ),
        )

    def trained(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        return (types.Serving.each(model, state.clients["own"]),)

    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        messages=messages,
        init=init,
        round=round,
        serving=serving,
        trained=trained,
        peers=peers or peer_spec(hparams),
        unused=unused,
        shares=shares,
    )
