"""The types that the engine, the algorithms, the models and the data share.

Dimension letters of all docstrings, others are said where they are used:

    K clients           C rows of a cohort (padded)   B batch
    N rows of a table   L stages                      Y classes
    M served models     U rows of the union of all clients' test rows
    P proxy rows, or the peers of a client
    D devices, or the width of an embedding
    T tokens of a text, or the rounds of a window
    R private rows on the devices, or the positions of a plan

Parameters are a tuple with one pytree per stage, in forward order, so that a boundary
between layers is an index. Statistics (running means and the like) are a tuple of the
same length, in which a stage without any has an empty dict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fedjax_pfl import augment, execution, metric_kinds, rng, stacked
from fedjax_pfl.execution import Execution
from fedjax_pfl.rows import exchange, tiled

# In train mode running statistics move by this fraction towards those of the batch.
STATS_MOMENTUM = 0.1

Params = tuple[Any, ...]
Stats = tuple[Any, ...]


class Variables(NamedTuple):
    """A model's arrays by stage, or those of many models along a leading axis."""

    params: Params
    stats: Stats


class Model(NamedTuple):
    """A chain of named stages.

    Attributes:
        name, stage_names: The value of `--model`, and one name per stage, length L.
        init: `(key, x) -> (params, stats)`. Of `x` [B, ...] only the shape matters.
        forward: `(params, stats, h, *, sample_mask=None, start=0, stop=None,
            train=False, key=None, held=None) -> (out, stats)`. Runs the stages
            `start..stop-1` on `h`, the output of stage `start - 1`. `out` is the output
            of the last stage that runs or, for a model with exits, the tuple of the
            outputs of all exits passed. `sample_mask` bool[B] marks the real samples
            (for statistics). `key` is needed if `train` and the model has dropout.
            `held` bool[L]: a stage that is not held gets zeros, so that nothing of it,
            not even nan, reaches the stages below.
        has_exits: Whether stages carry exits (`params[i]["exit"]`).
        answer: Which output serves, for a model with exits: `ensemble` (the mean of all
            exits' logits) or `last`.
        at_width: `(rate, scaler=1.0) -> Model`, the same model with every hidden width
            times `rate`, rounded up, and as many classes. Its parameters and statistics
            have the shapes of leading slices of this one's. None = there is no such
            form. `scaler` is HeteroFL's, a number that may be traced: in train mode the
            input of a convolution's norm is divided by it, except in the convolutions
            of shortcuts. In eval mode nothing is divided.
        takes: The kind of examples: `numbers` f32[B, ...], `tokens` int32[B, T] with
            logits f32[B, T, Y], or `labelled tokens` int32[B, T] with logits f32[B, Y].
        one_exit: The same stages with the last exit alone, which is one more stage.
            Methods without exits run it, and `launch` chooses. None = there are none.
    """

    name: str
    stage_names: tuple[str, ...]
    init: Callable[[jax.Array, jax.Array], tuple[Params, Stats]]
    forward: Callable[..., tuple[Any, Stats]]
    has_exits: bool = False
    answer: str = "ensemble"
    at_width: Callable[..., Model] | None = None
    takes: str = "numbers"
    one_exit: Model | None = None

    def example(self, *shape: int) -> jax.ShapeDtypeStruct:
        """An array of the type of examples."""
        kind = jnp.float32 if self.takes == "numbers" else jnp.int32
        return jax.ShapeDtypeStruct(shape, kind)


def truncated(model: Model, level: int) -> Model:
    """The chain up to a level: the first `level` stages of a model with exits, 1..L.

    It starts from the same parameters as the whole model does.
    """
    if level == len(model.stage_names):
        return model

    def init(key: jax.Array, x: jax.Array) -> tuple[Params, Stats]:
        params, stats = model.init(key, x)
        return params[:level], stats[:level]

    names = model.stage_names[:level]
    return model._replace(stage_names=names, init=init, one_exit=None)


class Task(NamedTuple):
    """Everything that an algorithm may use of the problem, without the data set's name.

    Attributes:
        server_model, client_models: The server's architecture and one per client group.
        group_of_client: int32[K], index into `client_models`.
        num_clients, num_classes, num_proxy: K, Y, P.
        num_eligible: Clients that may be drawn, at most K.
        num_examples: At least the train rows of each client, for tables aligned by
            sample.
        example_shape: Shape of one example, such as (28, 28, 1).
        num_levels: Capacity levels of the clients; 1 = all hold the whole model.
        num_residents: Private rows of the state where these are not one for each
            client: those that are on the device at once (`rows.store`), or all with
            empty ones at the end of some devices (`rows.slots`); 0 = one for each.
        teacher: The model with the variables `Data.teacher`, or None; see `teacher`.
        tests_trained: Whether a round measures the models that its training leaves.
        fixed_steps: (plan, steps) for each plan in which all clients take as many;
            a GPU then does not ask after each of them whether it was the last.
        may_stop: Whether clients may stop before the last step of a plan.
    """

    server_model: Model
    client_models: tuple[Model, ...]
    group_of_client: Any
    num_clients: int
    num_classes: int
    num_proxy: int
    num_eligible: int
    num_examples: int
    example_shape: tuple[int, ...]
    execution: Execution = Execution()
    num_levels: int = 1
    num_residents: int = 0
    teacher: Model | None = None
    tests_trained: bool = False
    fixed_steps: tuple[tuple[str, int], ...] = ()
    may_stop: bool = False

    @property
    def num_rows(self) -> int:
        """The private rows that a state has: one for each client that it may hold."""
        return self.num_residents or self.num_clients

    @property
    def client_model(self) -> Model:
        """The one architecture of all clients, a ValueError if there are several."""
        if len(self.client_models) > 1:
            names = ",".join(model.name for model in self.client_models)
            raise ValueError(
                f"--client_model={names}: this algorithm gives all clients one "
                "architecture; name one"
            )
        return self.client_models[0]

    @property
    def model(self) -> Model:
        """The one architecture of server and clients, a ValueError if they differ."""
        if self.client_model.name != self.server_model.name:
            raise ValueError(
                f"--client_model={self.client_model.name}: this algorithm shares one "
                f"model, --model={self.server_model.name}; omit --client_model"
            )
        return self.server_model

    def init(self, model: Model, key: jax.Array) -> Variables:
        """The initialisation common to all holders of a model, from the root key."""
        like = model.example(1, *self.example_shape)
        example = jnp.zeros(like.shape, like.dtype)
        return Variables(*model.init(rng.stream(key, "engine.init"), example))

    def members(self, group: int) -> np.ndarray:
        """int[K_g]: the clients of a group, in the order of their private rows.

        Where all have one architecture, these are the slots of all rows.
        """
        if len(self.client_models) == 1:
            return np.arange(self.num_rows)
        return np.flatnonzero(np.asarray(self.group_of_client) == group)


@struct.dataclass
class ClientRows:
    """Rows of the example table in client order, flat: memory is that of the rows.

    `row` int32[N] (-1 = padding), `start` and `count` int32[K]: client k owns
    `row[start[k] : start[k] + count[k]]`.
    """

    row: jax.Array
    start: jax.Array
    count: jax.Array

    def owner(self) -> jax.Array:
        """int32[N]: the client of each row, or K for unowned rows."""
        index = jnp.arange(self.row.shape[0])
        # Among the rows that adapt models, those of unseen clients come last. Clients
        # without rows may begin where another one does.
        order = jnp.lexsort((self.count, self.start))
        place = jnp.searchsorted(self.start[order], index, side="right") - 1
        owner = jnp.take(order, place, mode="clip")
        owned = index < jnp.take(self.start + self.count, owner, mode="clip")
        return jnp.where(owned, owner, self.start.shape[0])

    def of(self, client_id: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """The function from positions among a client's rows to rows of the table."""
        start = jnp.take(self.start, client_id, mode="clip")
        return lambda position: jnp.take(self.row, start + position, mode="clip")


@struct.dataclass
class Partition:
    """The rows of each client. Only this part of the data differs between seeds.

    `test.row` is the union of all test rows. With the official split no client owns any
    of it (`test.count == 0`). `proxy` is int32[P], -1 = padding. `val` has the rows
    that validate, () = none. Clients that never train own no row of `train`. Theirs are
    in `unseen`, of which the other clients have none; () = all may train.
    """

    train: ClientRows
    test: ClientRows
    proxy: jax.Array
    val: Any = ()
    unseen: Any = ()

    @property
    def has_val(self) -> bool:
        """Whether there are validation rows."""
        return not isinstance(self.val, tuple)

    @property
    def has_unseen(self) -> bool:
        """Whether there are clients that never train."""
        return not isinstance(self.unseen, tuple)

    @property
    def adapting(self) -> ClientRows:
        """The rows on which each client's model is adapted, the unseen ones' too."""
        if not self.has_unseen:
            return self.train
        train, others = self.train, self.unseen
        return ClientRows(
            row=jnp.concatenate([train.row, others.row], -1),
            start=jnp.where(
                others.count > 0, train.row.shape[-1] + others.start, train.start
            ),
            count=train.count + others.count,
        )

    @property
    def is_unseen(self) -> np.ndarray:
        """bool[K] on the host: the clients that never train."""
        if not self.has_unseen:
            return np.zeros(self.train.count.shape, bool)
        return np.asarray(self.unseen.count) > 0

    def measured(self) -> dict[str, Partition]:
        """What an evaluation measures by the prefix of its metrics.

        Each has the measured rows as its test rows.
        """
        alone = self.replace(val=())
        if not self.has_val:
            return {"": alone}
        return {"": alone, metric_kinds.VALIDATION: alone.replace(test=self.val)}


@struct.dataclass
class Data:
    """Tables on the device. They are an argument of every round, never a closure.

    `image` [N, ...] stays uint8 (or the user's float) on the device and is normalised
    when gathered: `(image - mean) * scale`. `label` is int32[N]. For a text both are
    the words int32[N, T]. Tokens int32, with labels or of a text, stay as they are.
    `teacher` has the variables of `Task.teacher`, () = none.

    Static are `augment`, one of `augment.KINDS`, which says how train batches differ
    from gathered ones, and `num_words`, V of a text, 0 = no text. In train and test
    batches of a text some words are hidden or random, see `augment.mask_words`, and
    `masked_loss`, one of `augment.POSITIONS`, says which positions count in the loss.
    """

    image: jax.Array
    label: jax.Array
    mean: jax.Array
    scale: jax.Array
    partition: Partition
    teacher: Any = ()
    augment: str = struct.field(pytree_node=False, default="none")
    num_words: int = struct.field(pytree_node=False, default=0)
    masked_loss: str = struct.field(pytree_node=False, default="all")

    def of_seed(self, index: int) -> Data:
        """The same with the partition of one seed, where leaves have those of all."""
        return self.replace(partition=stacked.at(self.partition, index))

    def gather(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Normalised images f32[..., *example_shape] and labels int32[...].

        Negative rows (padding) give row 0 and must be masked.
        """
        image, label = self._taken(rows)
        return self.normalised(image), label

    def train_batch(
        self, rows: jax.Array, position: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Like `gather`, the examples of a training step, changed at random.

        `rows` and `position` are int32[B]. A position, the index among the client's
        rows, names each draw under the step's `key`, so that neither padding nor a
        place in the batch matters. Returns (examples, labels, the positions bool[B, T]
        that count in the loss or None if all do).
        """
        image, label = self._taken(rows)
        if self.num_words:
            key = rng.stream(key, "words")
            image, is_chosen = self._hidden(image, position, key)
            return image, label, is_chosen if self.masked_loss == "chosen" else None
        if self.augment == "crop_flip":
            key = rng.stream(key, "augment")
            image = jax.vmap(augment.crop_flip)(image, _keys(key, position))
        return self.normalised(image), label, None

    def test_batch(
        self, rows: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Like `gather`, the examples of an evaluation.

        The chosen positions of a row of text are named by the row's number in the
        table, so that they are the same in all runs on the same rows. Returns
        (examples, labels, the chosen positions bool[..., T] of a text or None).
        """
        image, label = self._taken(rows)
        if not self.num_words:
            return self.normalised(image), label, None
        key = rng.stream(jax.random.key(0), "test words")
        image, is_chosen = self._hidden(image, rows, key)
        return image, label, is_chosen

    def _hidden(
        self, words: jax.Array, name: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Rows int32[B, T] with hidden words, each drawn by its name int32[B]."""
        hide = functools.partial(augment.mask_words, num_words=self.num_words)
        return jax.vmap(hide)(words, _keys(key, name))

    def _taken(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = jnp.maximum(rows, 0)
        image = jnp.take(self.image, rows, axis=0, mode="clip")
        return image, jnp.take(self.label, rows, axis=0, mode="clip")

    def normalised(self, image: jax.Array) -> jax.Array:
        """Raw images [..., *example_shape] in the mean's dtype; tokens as they are."""
        if self.num_words or image.dtype == jnp.int32:
            return image
        return (
            image.astype(jnp.result_type(self.mean, float)) - self.mean
        ) * self.scale

    def label_counts(self, num_classes: int) -> jax.Array:
        """Train rows of each client and class, f32[K, Y]."""
        train = self.partition.train
        label = jnp.take(self.label, jnp.maximum(train.row, 0), mode="clip")
        counts = jnp.zeros((train.start.shape[0], num_classes))
        return counts.at[train.owner(), label].add(1, mode="drop")


def _keys(key: jax.Array, names: jax.Array) -> jax.Array:
    """A key for each of some integers int32[B]."""
    return jax.vmap(lambda name: jax.random.fold_in(key, name))(names)


class PlanSpec(NamedTuple):
    """A step plan that an algorithm asks for: epochs over the client's train rows.

    With `max_rows` an epoch has at most so many, drawn again each time; 0 = all. With
    `drop_last` it has whole batches only: the rows that would make a short last one are
    left out, others in each epoch, and a client with fewer rows than B takes no step.
    Steps `at_server` are the server's on what the client sends of its rows: they take
    no time of the client's, and no deadline stops them.
    """

    name: str
    epochs: int
    batch_size: int
    max_rows: int = 0
    drop_last: bool = False
    at_server: bool = False

    def rows(self, owned: Any) -> Any:
        """int[...]: rows of an epoch of clients that own int[...]."""
        if self.max_rows:
            minimum = np.minimum if isinstance(owned, np.ndarray) else jnp.minimum
            owned = minimum(owned, self.max_rows)
        return owned - owned % self.batch_size if self.drop_last else owned

    def steps(self, owned: Any) -> Any:
        """int[...]: all steps of clients that own int[...]."""
        return self.epochs * -(-self.rows(owned) // self.batch_size)

    def examples(self, owned: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
        """int[...]: examples in the first int[...] steps; ends of epochs are short."""
        rows = self.rows(owned)
        epochs, rest = np.divmod(num_steps, np.maximum(-(-rows // self.batch_size), 1))
        return epochs * rows + np.minimum(rest * self.batch_size, rows)

    def clients_examples(self, owned: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
        """int[...]: those that take a client's time, none of steps `at_server`."""
        return (not self.at_server) * self.examples(owned, num_steps)

    def steps_within(self, owned: np.ndarray, examples: np.ndarray) -> np.ndarray:
        """int[...]: the most steps with at most int[...] `clients_examples`."""
        if self.at_server:
            return self.steps(owned)
        rows = self.rows(owned)
        epochs, rest = np.divmod(examples, np.maximum(rows, 1))
        return epochs * -(-rows // self.batch_size) + rest // self.batch_size


@struct.dataclass
class Plan:
    """The samples that are used in each step, for the clients of a cohort.

    A client goes through its rows in shuffled order, epoch after epoch. The last batch
    of an epoch may be short. `batch_size` B is static.

    Attributes:
        position: int32[D, R], for each of D devices the positions (indices among a
            client's own rows) in all epochs of all clients that it computes, one after
            another without padding. For one client: int32[R].
        first: int32[C], where a row's positions begin within those of its device.
        num_rows: int32[C], positions of one epoch; 0 on padding rows.
        num_steps: int32[C], steps to take, at most those of all epochs.
    """

    position: jax.Array
    first: jax.Array
    num_rows: jax.Array
    num_steps: jax.Array
    batch_size: int = struct.field(pytree_node=False)

    def split(self) -> tuple[Plan, jax.Array]:
        """(leaves [C, ...], leaves [D, ...]): the parts per row and per device."""
        return self.replace(position=()), self.position

    def joined(self, position: jax.Array) -> Plan:
        """The inverse of `split`, for one client or for all clients of a device."""
        return self.replace(position=position)

    def of_row(self, row: jax.Array) -> Plan:
        """The plan of one row int32[] of the cohort, whichever device computes it."""
        rows, position = self.split()
        device = row // (self.first.shape[0] // position.shape[0])
        one = jax.tree.map(lambda leaf: jnp.take(leaf, row, mode="clip"), rows)
        return one.joined(jnp.take(position, device, axis=0, mode="clip"))

    def known_everywhere(self, how: Execution) -> Plan:
        """The same plan with all positions on every device, for loops over `of_row`."""
        if how.mesh is None:
            return self
        here = execution.replicated(how)
        return self.joined(jax.lax.with_sharding_constraint(self.position, here))

    def step(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(positions int32[B], epoch int32[]) of one client's step.

        Positions are -1 where a batch is short, and in every step after the last.
        """
        per_epoch = jnp.maximum(-(-self.num_rows // self.batch_size), 1)
        epoch = index // per_epoch
        place = index % per_epoch * self.batch_size + jnp.arange(self.batch_size)
        is_real = (place < self.num_rows) & (index < self.num_steps)
        place = self.first + epoch * self.num_rows + place
        position = jnp.take(self.position, place, mode="clip")
        return jnp.where(is_real, position, -1), epoch


@struct.dataclass
class WindowPlan:
    """The plans of several rounds in the form that the host sends, without padding.

    `position` int32[D, R] as in `Plan`, of all rounds one after another; `first`
    int32[T, C]; `num_steps` int32[T, C], () = all steps of a client's epochs; `spec`,
    in which no batch is larger than a client, is static.
    """

    position: jax.Array
    first: jax.Array
    spec: PlanSpec = struct.field(pytree_node=False)
    num_steps: Any = ()

    def of_round(self, index: Any, owned: jax.Array) -> Plan:
        """The plan of one round of the window, for clients that own int32[C] rows."""
        num_rows, size = self.spec.rows(owned), self.spec.batch_size
        num_steps = self.spec.steps(owned)
        if not isinstance(self.num_steps, tuple):
            num_steps = self.num_steps[index]
        return Plan(self.position, self.first[index], num_rows, num_steps, size)


class PeerSpec(NamedTuple):
    """The peers that a decentralised algorithm asks for, for each client of a round.

    Peers are the clients from whose private rows a client pulls. They need not take
    part in the round. A graph is directed, and a client may have no peer.

    Attributes:
        num_peers: Peers of each client, at most.
        topology: The kind of graph, one of `decentralized.TOPOLOGIES`.
        edge_probability, adjacency: The chance of each edge of an `erdos_renyi` graph,
            and the path of a `file` graph.
        is_fixed: Whether the graph of round 0 is that of every round.
        draw: A custom graph instead: `(seed, round, client int[C], num_clients,
            num_peers) -> (peers int[C, P], mask bool[C, P])`, on the host, a pure
            function that names its draws by seed, round and client.
    """

    num_peers: int
    topology: str = "random"
    edge_probability: float = 0.0
    adjacency: str = ""
    is_fixed: bool = False
    draw: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None


@struct.dataclass
class Cohort:
    """The clients of one round, as a table of integers.

    `client_id` int32[C] (K on padding); `row` int32[C], the client's slot in the
    private rows of its group (on padding past the end of any group); `row_mask`
    bool[C]; `level` int32[C], the capacity level that a client holds; `peers` int32[C,
    P], slots like `row`, valid where `peer_mask` bool[C, P]; `plans` by name; `peer_id`
    int32[C, P], the peers as clients, () where these are the slots. With a clock,
    `seconds` f32[C] are those of each row's local steps without messages, and no round
    lasts longer than `deadline` f32[].

    A window of cohorts has leaves [T, ...] and a `WindowPlan` of T rounds by name.
    """

    client_id: jax.Array
    row: jax.Array
    row_mask: jax.Array
    level: jax.Array
    peers: jax.Array
    peer_mask: jax.Array
    plans: Mapping[str, Any]
    peer_id: Any = ()
    seconds: Any = ()
    deadline: Any = ()

    @property
    def peer_clients(self) -> jax.Array:
        """int32[C, P]: the peers as clients, for tables of the data."""
        return self.peers if isinstance(self.peer_id, tuple) else self.peer_id

    @property
    def needed(self) -> np.ndarray:
        """int[n]: the clients and their peers, in order, each once; on the host."""
        peers = self.peer_clients[self.peer_mask & self.row_mask[..., None]]
        return np.unique(np.concatenate([self.client_id[self.row_mask], peers]))

    def of_round(self, index: Any, num_examples: jax.Array) -> Cohort:
        """Round `index` of a window, for clients with train examples int32[K]."""
        one = exchange.everywhere(stacked.at(self.replace(plans={}), index))
        owned = jnp.take(num_examples, one.client_id, mode="clip")
        owned = jnp.where(one.row_mask, owned, 0).astype(jnp.int32)
        plans = {name: plan.of_round(index, owned) for name, plan in self.plans.items()}
        return one.replace(plans=plans)


@struct.dataclass
class RoundState:
    """Everything that a resumed run needs. It is saved whole.

    `server` is any pytree; `clients` has leaves [K, ...] (one such tree per group,
    where there are several architectures) and holds only what stays private between
    rounds; `key` is the root key; `round` int32[] counts the rounds done; `opt_state`
    holds the clients' persistent optimizer states, stacked as `clients`, or (). The
    engine creates and stores these, so that algorithms need not mention them.
    """

    server: Any
    clients: Any
    key: jax.Array
    round: jax.Array
    opt_state: Any = ()

    @classmethod
    def first(cls, server: Any, clients: Any, key: jax.Array) -> RoundState:
        """The state before round 0, in which no array may occur twice (donation)."""
        return cls(server, clients, key, jnp.zeros((), jnp.int32))

    def where(self, how: Execution) -> RoundState:
        """Where the leaves of a stack of such states are."""
        everywhere = execution.replicated(how)
        rest = jax.tree.map(lambda _: everywhere, self.with_private(((), ())))
        return rest.with_private(tiled.of_rows(self.private, how))

    @property
    def private(self) -> tuple[Any, Any]:
        """The parts of each client: its private row and its optimizer state."""
        return self.clients, self.opt_state

    def with_private(self, private: tuple[Any, Any]) -> RoundState:
        """The state with other private rows and optimizer states, as in `private`."""
        return self.replace(clients=private[0], opt_state=private[1])

    def rows(self, cohort: Cohort) -> Any:
        """The private rows of a cohort's clients, leaves [C, ...]."""
        return exchange.take(self.clients, cohort.row)

    def after(
        self, cohort: Cohort | None = None, rows: Any = None, **changed: Any
    ) -> RoundState:
        """The state one round later.

        `rows` are the present private rows of the cohort's clients, leaves [C, ...] of
        `clients`; None = no client's row has changed. `changed` are other changed
        fields: `server=`, or all of `clients=`.

        Raises ValueError if a row differs from `clients` in structure, shape or dtype.
        """
        number = exchange.behind(self.round, changed)
        if rows is not None:
            rows = stacked.checked_new(self.clients, rows, len(cohort.row))
            given = self.clients, cohort.row, rows, number
            changed["clients"], number = exchange.put(*given)
        return self.replace(round=number + 1, **changed)


@struct.dataclass
class Serving:
    """A group of models, and the clients that each of them serves.

    Entry m serves client `client_id[m]` (int32[M]) where `mask` bool[M] is True. If
    rows are shared out or on the host, `client_id` holds slots. The model is row m
    of `own` (Variables with leaves [M, ...]), or `build(shared, row)`, called where the
    model is needed so that the models never all exist at once. With `own` None the
    model `shared` serves them all. `model`, `build` and `is_by_row` are static. With
    `is_by_row` entry m is row m of the state's private rows.
    """

    own: Any
    shared: Any
    client_id: jax.Array
    mask: jax.Array
    model: Model = struct.field(pytree_node=False)
    build: Callable[[Any, Any], Variables] | None = struct.field(
        pytree_node=False, default=None
    )
    is_by_row: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def each(
        cls,
        model: Model,
        own: Any,
        *,
        client_id: Any = None,
        mask: Any = None,
        shared: Any = (),
        build: Callable[[Any, Any], Variables] | None = None,
    ) -> Serving:
        """Row k of `own` serves client k (or `client_id[k]`), where `mask` bool[K].

        With `shares_rows` these are slots, and `own` is made of `state.clients`. Raises
        ValueError if `own` has no array.
        """
        if not (leaves := jax.tree.leaves(own)):
            raise ValueError(
                "Serving.each: `own` has no array, so that nothing is personal; give "
                "the rows of a part that is, or serve with Serving.one"
            )
        count = leaves[0].shape[0]
        ids = jnp.arange(count) if client_id is None else jnp.asarray(client_id)
        mask = jnp.ones(count, bool) if mask is None else mask
        return cls(own, shared, ids, mask, model, build, client_id is None)

    @classmethod
    def by_architecture(
        cls, task: Task, own: Sequence[Any], models: Sequence[Model] = (), **given: Any
    ) -> tuple[Serving, ...]:
        """`each` of every architecture, of which `own` has the rows.

        `models` serve, () = the clients' architectures. `given` are arguments of `each`
        but for `client_id`.
        """
        models = models or task.client_models
        members = [None] if len(models) == 1 else map(task.members, range(len(models)))
        groups = zip(models, own, members, strict=True)
        return tuple(cls.each(m, x, client_id=i, **given) for m, x, i in groups)

    @classmethod
    def one(cls, model: Model, variables: Variables, mask: jax.Array) -> Serving:
        """One model serves every client of `mask` bool[K]."""
        return cls(None, variables, jnp.arange(len(mask)), mask, model)

    def variables(self, row: Any) -> Variables:
        """The model of one entry, given its row of `own`."""
        if self.own is None:
            return self.shared
        return row if self.build is None else self.build(self.shared, row)


class MessageKind(NamedTuple):
    """A kind of message: its direction (`up` or `down`) and its size in bytes."""

    name: str
    direction: str
    num_bytes: int


class Algorithm(NamedTuple):
    """A federated algorithm as pure functions.

    They are traced with the float options as tracers. Branch on strings, integers and
    `options.is_off(x)`, never on `x > 0`.

    Attributes:
        plans: The step plans that the algorithm asks for.
        init: `(data, key) -> RoundState`, in which no buffer is used twice (donation).
        round: `(state, cohort, data) -> (state, metrics, sent)`. Metrics are (sum,
            count) pairs of scalars. `sent` counts the messages that each row exchanged:
            {kind's name: int32[C] or one number}. Private rows are read and written at
            `cohort.row` only.
        messages: The kinds of messages. Others in `sent` are not counted.
        server: `(state, data) -> {name: (model, variables)}`, the server's models. Each
            gives the metric `<name>_accuracy`. None = there is none.
        serving: `(state, cohort, data) -> tuple[Serving, ...]`, the personalized
            models. `cohort` is the next round's, without plans. None = the server's
            first model serves all clients.
        trained: Like `serving`, the models as each client's last training left them,
            which give the metric `trained_accuracy`. It is for methods in which clients
            keep other models than those that serve, and for methods compared with such.
        adapt: `(client, start, shared) -> each_client.Trained`, how a client adapts the
            model `start` that serves it to its own train rows, for measurements alone.
            `client` is an `each_client.Client` whose `own` is its row of
            `Serving.own`, () if it is served by a shared model, and `shared` is
            `state.server`. None = all layers on the cross-entropy.
        peers: The peers drawn for each client of a cohort (decentralised methods).
        ships_proxy: Whether every client gets the proxy set, once: empty = no,
            `labelled` or `unlabelled`.
        shares: The metrics of `round` that are fractions and shown in percent, as
            accuracies are. The others are plain numbers.
        opt_state: `fresh -> state`, the optimizer state of one client before round 0,
            for the states that persist. `fresh(params)` makes that of parameters, using
            their shapes alone. None = that of the client's model.
        by_architecture: Whether private rows and optimizer states are tuples by
            architecture, as `each_client.Round` has them.
        unused: Options without an effect on this task, and the reason for each, such as
            `without a proxy set`. A run with one of them notes the reason.
        same_as: The method of another name that this one is on this task, and why, such
            as `fedavg, as nothing of a model is personal`. A run notes it.
        serves_adapted: Whether `serving` adapts models to the clients' own rows, also
            for clients that never train.
        is_among_zeros: Whether a chunk computes narrower clients in the form of the
            widest one, with zeros in place of the channels that they do not hold. Its
            options are `levels.Levels`.
    """

    plans: tuple[PlanSpec, ...]
    init: Callable[[Data, jax.Array], RoundState]
    round: Callable[[RoundState, Cohort, Data], tuple[RoundState, dict, dict]]
    messages: tuple[MessageKind, ...] = ()
    server: Callable[[RoundState, Data], dict[str, tuple[Model, Variables]]] | None = (
        None
    )
    serving: Callable[[RoundState, Cohort, Data], tuple[Serving, ...]] | None = None
    trained: Callable[[RoundState, Cohort, Data], tuple[Serving, ...]] | None = None
    adapt: Callable[[Any, Variables, Any], Any] | None = None
    peers: PeerSpec | None = None
    ships_proxy: str = ""
    shares: tuple[str, ...] = ()
    opt_state: Callable[[Callable[[Params], Any]], Any] | None = None
    by_architecture: bool = False
    unused: Mapping[str, str] = {}
    same_as: str = ""
    serves_adapted: bool = False
    is_among_zeros: bool = False

    def serving_groups(
        self, state: RoundState, cohort: Cohort, data: Data, num_clients: int
    ) -> tuple[Serving, ...]:
        """The `serving` groups, or one in which the server's first model serves all.

        `num_clients` are the clients (or private rows) that this one group serves.
        """
        if self.serving is not None:
            return self.serving(state, cohort, data)
        model, variables = next(iter(self.server(state, data).values()))
        return (Serving.one(model, variables, jnp.ones(num_clients, bool)),)
