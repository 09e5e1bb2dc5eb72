"""Every type that the engine, the algorithms, the models and the data share.

Dimension letters used in all docstrings:

    K clients           C rows of a cohort (padded)   S local steps    B batch
    N rows of a table   P proxy rows                  L stages         Y classes
    M served models     U rows of the union of all clients' test rows
    D embedding width

Parameters are a tuple with one pytree per stage, in forward order, so that a
boundary between layers is an index. Statistics (running means and the like) are
a tuple of the same length; a stage without any has an empty dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pfl import rng

Params = tuple[Any, ...]
Stats = tuple[Any, ...]


class Model(NamedTuple):
    """A chain of named stages.

    Attributes:
        name: What a user types for `--model`.
        stage_names: One name per stage, length L.
        init: `(key, x) -> (params, stats)`; `x` is f32[B, ...], only its shape
            matters.
        forward: `(params, stats, h, *, sample_mask=None, start=0, stop=None,
            train=False, key=None) -> (out, stats)`. Runs the stages
            `start..stop-1` on `h`, the output of stage `start - 1`. `out` is the
            output of the last stage run, or, for a model with exits, the tuple of
            the outputs of all exits passed. `sample_mask` bool[B] marks the real
            samples (for statistics); `key` is needed if `train` and the model has
            dropout.
        has_exits: Whether stages carry exits (`params[i]["exit"]`).
    """

    name: str
    stage_names: tuple[str, ...]
    init: Callable[[jax.Array, jax.Array], tuple[Params, Stats]]
    forward: Callable[..., tuple[Any, Stats]]
    has_exits: bool = False


class Execution(NamedTuple):
    """How client rows are computed; never changes what is computed.

    Attributes:
        chunk: Rows that are vmapped together on one device; 1 = one by one.
        mesh: A mesh with the axis `clients`, or None for a single device.
    """

    chunk: int = 1
    mesh: jax.sharding.Mesh | None = None


class Task(NamedTuple):
    """All that an algorithm may know of the problem; never the data set's name.

    Attributes:
        server_model: The architecture of the server's model.
        client_models: One architecture per group of clients.
        group_of_client: int32[K], index into `client_models`.
        client_depth: int32[K], stages that a client holds (L = all).
        num_clients, num_classes, num_proxy: K, Y, P.
        num_examples: Train rows of the largest client, for tables aligned by sample.
        example_shape: Shape of one example, such as (28, 28, 1).
        execution: See `Execution`.
    """

    server_model: Model
    client_models: tuple[Model, ...]
    group_of_client: Any
    client_depth: Any
    num_clients: int
    num_classes: int
    num_proxy: int
    num_examples: int
    example_shape: tuple[int, ...]
    execution: Execution = Execution()

    @property
    def client_model(self) -> Model:
        """The one architecture of all clients.

        Raises:
            ValueError: there are several.
        """
        if len(self.client_models) > 1:
            names = ",".join(model.name for model in self.client_models)
            raise ValueError(
                f"--client_model={names}: this algorithm gives all clients one "
                "architecture; name one (fedmd takes several)"
            )
        return self.client_models[0]

    @property
    def model(self) -> Model:
        """The one architecture of server and clients.

        Raises:
            ValueError: they differ.
        """
        if self.client_model.name != self.server_model.name:
            raise ValueError(
                f"--client_model={self.client_model.name}: this algorithm shares one "
                f"model, --model={self.server_model.name}; leave --client_model away"
            )
        return self.server_model

    def initial(self, model: Model, key: jax.Array) -> tuple[Params, Stats]:
        """The common initialisation: whoever has `model` starts from this."""
        example = jnp.zeros((1, *self.example_shape))
        return model.init(rng.stream(key, rng.Tag.INIT), example)

    def serve(
        self,
        model: Model,
        params: Any,
        stats: Any,
        *,
        mask: jax.Array | None = None,
        shared: bool = False,
    ) -> Served:
        """A group with an entry for every client; `mask` bool[K] switches some off."""
        mask = jnp.ones(self.num_clients, bool) if mask is None else mask
        everyone = jnp.arange(self.num_clients)
        return Served(params, stats, everyone, mask, model, shared)


@struct.dataclass
class ClientRows:
    """Rows of the example table in client order, flat: costs what its rows cost.

    `row` int32[N] (-1 = padding), `start` and `count` int32[K]: client k owns
    `row[start[k] : start[k] + count[k]]`.
    """

    row: jax.Array
    start: jax.Array
    count: jax.Array

    def owner(self) -> jax.Array:
        """int32[N]: the client of each row; K where no client owns it."""
        index = jnp.arange(self.row.shape[0])
        owner = jnp.searchsorted(self.start, index, side="right") - 1
        owned = index < jnp.take(self.start + self.count, owner, mode="clip")
        return jnp.where(owned, owner, self.start.shape[0])

    def of(self, client_id: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """From positions among a client's rows to rows of the example table."""
        start = jnp.take(self.start, client_id, mode="clip")
        return lambda position: jnp.take(self.row, start + position, mode="clip")


@struct.dataclass
class Partition:
    """Who owns what. The only part of the data that differs between seeds.

    `test.row` is the union of all test rows; with the official split no client
    owns any of it (`test.count == 0`). `proxy` is int32[P], -1 = padding.
    """

    train: ClientRows
    test: ClientRows
    proxy: jax.Array


@struct.dataclass
class Data:
    """Device tables; an argument of every round, never a closure.

    `image` [N, ...] stays uint8 (or the user's float) on the device and is
    normalised when gathered: `(image - mean) * scale`. `label` is int32[N].
    """

    image: jax.Array
    label: jax.Array
    mean: jax.Array
    scale: jax.Array
    partition: Partition

    def gather(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Normalised images f32[..., *example_shape] and labels int32[...].

        Negative rows (padding) give row 0; mask them.
        """
        rows = jnp.maximum(rows, 0)
        image = jnp.take(self.image, rows, axis=0, mode="clip").astype(jnp.float32)
        label = jnp.take(self.label, rows, axis=0, mode="clip")
        return (image - self.mean) * self.scale, label

    def label_counts(self, num_classes: int) -> jax.Array:
        """Train rows of each client and class, f32[K, Y]."""
        train = self.partition.train
        label = jnp.take(self.label, jnp.maximum(train.row, 0), mode="clip")
        counts = jnp.zeros((train.start.shape[0], num_classes))
        return counts.at[train.owner(), label].add(1, mode="drop")


class PlanSpec(NamedTuple):
    """A step plan that an algorithm wants: epochs over the client's train rows."""

    name: str
    epochs: int
    batch_size: int


class PeerSpec(NamedTuple):
    """The peers that an algorithm wants for each row of a cohort, drawn on the host.

    Attributes:
        num_peers: P, the most peers of a client.
        draw: `(seed, round, client int[C], num_clients, num_peers) -> (peers int[C, P],
            mask bool[C, P])`, a pure function that names its draws by seed, round and
            client. Peers are slots of `RoundState.clients`, the same numbers as client
            ids; a client may have none. None = P different others, all equally likely.
    """

    num_peers: int
    draw: Callable | None = None


@struct.dataclass
class Plan:
    """Which samples in which step: small integers made on the host.

    `position` int32[C, S, B] indexes the client's own rows, -1 = padding; real
    steps come first. `epoch` int32[C, S]. `num_steps` int32[C].
    """

    position: jax.Array
    epoch: jax.Array
    num_steps: jax.Array


@struct.dataclass
class Cohort:
    """The clients of one round: a table of integers.

    `client_id` int32[C] (K on padding rows), `row` int32[C] (slot in
    `RoundState.clients`, K on padding rows), `row_mask` bool[C], `depth` int32[C],
    `peers` int32[C, num_peers] (slots, as `row`), `peer_mask` bool[C, num_peers] (all
    False for a client without any), `plans` by name.
    """

    client_id: jax.Array
    row: jax.Array
    row_mask: jax.Array
    depth: jax.Array
    peers: jax.Array
    peer_mask: jax.Array
    plans: Mapping[str, Plan]


@struct.dataclass
class RoundState:
    """Everything a resumed run needs; saved whole.

    `server` is any pytree, `clients` has leaves [K, ...] and holds only what stays
    private between rounds, `key` is the root key, `round` int32[] counts rounds done.
    """

    server: Any
    clients: Any
    key: jax.Array
    round: jax.Array


@struct.dataclass
class Served:
    """One group of served models: who serves whom right now.

    `params` and `stats` have leaves [M, ...], one row per entry of `client_id`
    int32[M]; or, if `shared`, leaves [...]: one model that serves them all. `mask`
    bool[M] switches entries off. `model` and `shared` are static.
    """

    params: Any
    stats: Any
    client_id: jax.Array
    mask: jax.Array
    model: Model = struct.field(pytree_node=False)
    shared: bool = struct.field(pytree_node=False, default=False)


class MessageKind(NamedTuple):
    """A kind of message: its direction (`up` or `down`) and its size in bytes."""

    name: str
    direction: str
    num_bytes: int


class Algorithm(NamedTuple):
    """A federated algorithm as pure functions.

    Attributes:
        plans: The step plans it wants.
        messages: The kinds of messages it sends, in the order of `round`'s counts.
        init: `(data, key) -> RoundState`; no buffer is used twice (donation).
        round: `(state, cohort, data) -> (state, metrics, counts)`; metrics are
            (sum, count) pairs of scalars, counts is int32[C, kinds].
        serving: `(state, cohort, data) -> tuple[Served, ...]`; `cohort` is the next
            round's.
        server_params: `state -> (model, params, stats)` or None.
        num_peers: Peers drawn for each row of a cohort (decentralised methods).
        ships_proxy: Whether every client gets the proxy set, once: empty = no,
            `labelled` or `unlabelled`.
    """

    plans: tuple[PlanSpec, ...]
    messages: tuple[MessageKind, ...]
    init: Callable[[Data, jax.Array], RoundState]
    round: Callable[[RoundState, Cohort, Data], tuple[RoundState, dict, jax.Array]]
    serving: Callable[[RoundState, Cohort, Data], tuple[Served, ...]]
    server_params: Callable[[RoundState], tuple[Model, Params, Stats] | None]
    num_peers: int = 0
    ships_proxy: str = ""
