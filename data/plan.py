"""Plans: the cohort of each round, as a table of integers.

A cohort is a pure function of (seed, round). It does not depend on history, so that a
run can resume, nor on the method, so that all methods get the same clients. Only with a
deadline does the method matter, since clients miss it by how long the method takes. A
client's draws are named by (seed, round, client), not by its place in the cohort.
"""

import concurrent.futures
import os
import zlib
from collections.abc import Callable, Sequence

import jax
import numpy as np

from data import deal, participation, shuffle, topology
from fedjax_pfl import execution as execution_lib
from fedjax_pfl import rng, shapes, types
from fedjax_pfl.rows import slots

# Rounds that serve to estimate the capacity of a window's plans
SEEN_ROUNDS = 16
# The most clients of a round that one device has follow from at most so many first
# rounds and so many clients that are looked at in them.
OWNED_ROUNDS, OWNED_DRAWS = 1024, 1 << 20
# With peers, whose draws take long. A later round may need more (`Rows.grow`).
PEERS_ROUNDS = 4


def orders(
    seed: int,
    round: int | np.ndarray,
    client: np.ndarray,
    num_rows: np.ndarray,
    spec: types.PlanSpec,
) -> np.ndarray:
    """Shuffles the epochs of many clients, one after another.

    Args:
        round, client: int[M]; one round may be an int.
        num_rows: int[M], train rows of each client, 0 = no step.
        spec: The plan. Its name makes its shuffles differ from those of others.

    Returns:
        int32[sum(epochs * spec.rows(num_rows))]: the positions of each client's rows,
        epoch after epoch, for one client after another.
    """
    num_rows = np.asarray(num_rows, np.int64)
    round, used = np.broadcast_to(round, client.shape), spec.rows(num_rows)
    end = np.cumsum(spec.epochs * used)
    first, total = end - spec.epochs * used, int(end[-1]) if len(end) else 0
    # What is left out of an epoch goes behind the end.
    out = np.zeros(total + 1, np.int32)
    name, epoch = zlib.crc32(spec.name.encode()), np.arange(spec.epochs)[:, None]

    def draw(part: np.ndarray) -> None:
        place = np.arange(int(num_rows[part].max()))
        who = round[part, None, None], client[part, None, None]
        words = rng.hashed(seed, "engine.batches", *who, name, epoch, place)
        order = shuffle.positions(words, num_rows[part, None])
        begin, size = first[part[0]], used[part, None, None]
        if end[part[-1]] - begin == order.size and (size == len(place)).all():
            out[begin : begin + order.size] = order.reshape(-1)
        else:
            index = first[part, None, None] + epoch * size + place
            out[np.where(place < size, index, total)] = order

    parts = list(shuffle.alike(num_rows, spec.epochs))
    if total < shuffle.BLOCK_WORDS:
        for part in parts:
            draw(part)
    else:
        # Numpy computes a block without the interpreter's lock.
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(draw, parts))
    return out[:total]


class Planner:
    """Draws cohorts as numpy arrays, for one or many rounds at a time.

    `num_clients` is K, and `graph` the graph of peers, None if there is none.
    """

    def __init__(
        self,
        *,
        seeds: Sequence[int],
        num_rows: np.ndarray,
        client_group: np.ndarray,
        level_of: np.ndarray | Callable[[int, int, np.ndarray], np.ndarray],
        clients_per_round: int,
        specs: Sequence[types.PlanSpec],
        execution: types.Execution,
        eligible: np.ndarray | None = None,
        peers: types.PeerSpec | None = None,
        who: participation.Participation | None = None,
        most_rows: int = 0,
    ):
        """Stores the constants of all draws.

        Args:
            num_rows: int[seeds, K], train examples of each client.
            client_group: int[K], the group of clients of one architecture.
            level_of: int[K], the largest level of each client, or a function `(seed,
                round, client int[C]) -> int[C]` if it changes.
            clients_per_round: Clients drawn without replacement.
            execution: Rows are sorted by group, level and steps, dealt to the devices
                and padded to whole chunks, so that chunks have equal lengths. Where
                devices share out private rows, clients of equal work train where their
                rows are, as far as that is even.
            eligible: bool[K], or bool[seeds, K] with equal counts: clients that may be
                drawn, None = all. Others may still be peers.
            peers: Peers of each row, None = the algorithm has none.
            who: Who takes part, and for how long; None = all, for all their steps.
            most_rows: The most train rows of a client that may only be a member.

        Raises:
            ValueError: too few clients can be drawn, there is no such graph, no client
                fills a batch, or none does a step before the deadline of a round.
        """
        self._seeds, self._num_rows = list(seeds), np.asarray(num_rows)
        self.num_clients = num_clients = self._num_rows.shape[1]
        self._group, self._level_of = np.asarray(client_group), level_of
        if not callable(level_of):
            levels = np.asarray(level_of)
            self._level_of = lambda seed, round, client: levels[client]
        # Private rows are stacked by group; a client's slot is its place in its group.
        self._slot = np.zeros(num_clients, np.int32)
        for group in np.unique(self._group):
            members = np.flatnonzero(self._group == group)
            self._slot[members] = np.arange(len(members))
        self._clients_per_round, self._execution = clients_per_round, execution
        self._who, self.has_clock = who, who is not None and who.speed is not None
        self._are_available = who is None or bool((who.chance >= 1).all())
        self._levels_are_fixed = not callable(level_of)
        # Clients in time, by seed, where those of all rounds are the same
        self._timely = {}
        self._devices = execution.num_devices
        self._padding = num_clients
        self._owners: slots.Layout | None = None
        if execution.shares_rows:
            self._owners = slots.Layout(num_clients, self._devices)
            self._slot, self._padding = self._owners.slots, self._owners.num_rows
        most = int(self._num_rows.max())
        self._most_rows = max(most, most_rows)
        for spec in specs:
            if spec.drop_last and not (spec.rows(self._num_rows) > 0).any(1).all():
                raise ValueError(
                    f"--drop_last: no client fills the {spec.batch_size} rows of a "
                    f"step, as they have at most {most} train rows or "
                    "--examples_per_round; lower --batch_size"
                )
        self._specs = tuple(
            spec._replace(batch_size=shapes.capped(spec.batch_size, most))
            for spec in specs
        )
        self.graph = topology.make(peers, num_clients) if peers else None
        eligible = np.ones(num_clients, bool) if eligible is None else eligible
        every = np.broadcast_to(eligible, self._num_rows.shape)
        self._candidates = np.stack([np.flatnonzero(one) for one in every])
        self._check_candidates()

    def _check_candidates(self) -> None:
        """Refuses (ValueError) too few clients to draw, or none before the deadline."""
        present, wanted = self._candidates.shape[1], self._clients_per_round
        if wanted > present:
            raise ValueError(
                f"--clients_per_round={wanted}: {present} of {self.num_clients} "
                "clients may be drawn (--exclusive, --unseen_clients); lower it"
            )
        if self._who is None or self._who.round_seconds == np.inf:
            return
        for seed in self._seeds:
            if not any(len(self._in_time(seed, n)) for n in range(SEEN_ROUNDS)):
                raise ValueError(
                    f"--round_seconds={self._who.round_seconds:g}: no client does a "
                    "local step and sends its messages in this time; raise it"
                )

    def cohort(self, seed_index: int, round: int) -> types.Cohort:
        """Draws round 0, 1, ... with its plans, for the seed at `seed_index`."""
        one = self.window(seed_index, round, 1, 1, 0)
        return jax.tree.map(np.asarray, one.of_round(0, self._num_rows[seed_index]))

    def drawn(self, seed_index: int, round: int) -> types.Cohort:
        """Draws one round without plans: its clients, their slots, levels and peers."""
        seed = self._seeds[seed_index]
        client, real, level = self._placed(seed_index, round)
        peers, peer_mask = self._draw_peers(seed, round, client, real)
        peer_id: np.ndarray | tuple = ()
        if self._owners is not None and self.graph is not None:
            # Like padding, a peer that is none has no row that could travel.
            slot = np.where(peer_mask, self._slot[peers], self._padding)
            peers, peer_id = slot.astype(np.int32), peers
        return types.Cohort(
            client_id=client,
            row=np.where(real, self._slot[np.where(real, client, 0)], self._padding),
            row_mask=real,
            level=level,
            peers=peers,
            peer_mask=peer_mask,
            plans={},
            peer_id=peer_id,
        )

    def _placed(
        self, seed_index: int, round: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (client int32[C], is real bool[C], level int32[C]) of each row."""
        seed, num_clients = self._seeds[seed_index], self.num_clients
        chosen = self._choose(seed, round)
        levels = np.asarray(self._level_of(seed, round, chosen))
        owned = self._num_rows[seed_index, chosen]
        order = np.lexsort((chosen, owned, levels, self._group[chosen]))
        # Padding rows come first, where they fill the chunk of the smallest clients.
        size = execution_lib.padded_size(self._clients_per_round, self._execution)
        index = np.full(size, -1)
        index[size - len(chosen) :] = order
        if self._execution.chunk == 1:
            # A client of a higher level computes more of the model in each step.
            index = deal.by_work(index, (owned * levels)[index], self._devices)
        else:
            # In turn, so that the chunks of all devices end together.
            index = index.reshape(-1, self._devices).T.reshape(-1)
        if self._owners is not None:
            alike = np.stack([self._group[chosen], levels, owned])
            home = self._owners.device_of(chosen)
            index = deal.at_home(index, home, alike, self._devices)
        real = index >= 0
        client = np.where(real, chosen[index], num_clients).astype(np.int32)
        # A chunk runs its largest level, which padding must not raise.
        chunk = min(self._execution.chunk, size // self._devices)
        smallest = real.reshape(-1, chunk).argmax(1) + np.arange(0, size, chunk)
        like = np.where(real, np.arange(size), np.repeat(smallest, chunk))
        # A chunk of only padding takes the level of the smallest client.
        level = levels[np.where(real[like], index[like], order[0])]
        return client, real, level.astype(np.int32)

    def members(
        self,
        seed_index: int,
        round: int,
        ids: np.ndarray,
        num_rows: np.ndarray,
        spec: types.PlanSpec,
    ) -> types.Cohort:
        """The clients of private rows with a plan of their own, on every device.

        Args:
            seed_index: Position among the seeds.
            round: By which the shuffles are named.
            ids: int[R], the client of each row, K = none.
            num_rows: int[K], the train rows of each client in it.
            spec: The plan, which is stored under its name.
        """
        seed, real = self._seeds[seed_index], ids < self.num_clients
        client = np.where(real, ids, 0)
        owned = np.where(real, num_rows[client], 0)
        size = shapes.capped(spec.batch_size, self._most_rows)
        spec = spec._replace(batch_size=size)
        used = spec.rows(owned)
        flat = orders(seed, round, client, owned, spec)
        # As long for other blocks of so many clients, so that they share a program.
        length = shapes.rounded_up_finely(max(len(flat), 1))
        position = np.zeros((self._devices, length), np.int32)
        position[:, : len(flat)] = flat
        count = spec.epochs * used
        plan = types.Plan(
            position=position,
            first=(np.cumsum(count) - count).astype(np.int32),
            num_rows=used.astype(np.int32),
            num_steps=spec.steps(owned).astype(np.int32),
            batch_size=spec.batch_size,
        )
        none = np.zeros((len(ids), 0), np.int32)
        return types.Cohort(
            client_id=ids.astype(np.int32),
            row=np.arange(len(ids), dtype=np.int32),
            row_mask=real,
            level=np.asarray(self._level_of(seed, round, client), np.int32),
            peers=none,
            peer_mask=none.astype(bool),
            plans={spec.name: plan},
        )

    @property
    def chance(self) -> np.ndarray:
        """f64[K, R], of each client to be available in rounds that repeat."""
        return self._who.chance if self._who else np.ones((len(self._slot), 1))

    @property
    def drawn_chance(self) -> np.ndarray:
        """f64[K], of each client to be in a round, by all rounds of the first seed."""
        may = np.zeros(self.num_clients, bool)
        may[self._candidates[0]] = True
        there = self.chance.mean(1) * (may & self.in_time)
        return there * min(self._clients_per_round / max(there.sum(), 1), 1)

    @property
    def in_time(self) -> np.ndarray:
        """bool[K], whether each does a step before the deadline in an early round.

        It is that of the first seed.
        """
        out = np.ones(self.num_clients, bool)
        if self._who is not None and self._who.round_seconds < np.inf:
            early = [self._in_time(self._seeds[0], n) for n in range(SEEN_ROUNDS)]
            out[np.setdiff1d(self._candidates[0], np.concatenate(early))] = False
        return out

    @property
    def most_owned(self) -> int:
        """The most clients of one of the first rounds whose rows one device has.

        Their peers count too.
        """
        seen = self._clients_per_round if self._who is None else self.num_clients
        rounds = min(max(OWNED_DRAWS // seen, 64), OWNED_ROUNDS)
        if self.graph is not None:
            rounds = PEERS_ROUNDS
        return max(
            self._owners.fullest(self._needed(index, round))
            for index in range(len(self._seeds))
            for round in range(rounds)
        )

    def _needed(self, seed_index: int, round: int) -> np.ndarray:
        """int[n]: the clients of a round and their peers, each once."""
        if self.graph is None:
            return self._choose(self._seeds[seed_index], round)
        return self.drawn(seed_index, round).needed

    @property
    def balance(self) -> float:
        """The real work of first rounds over what the devices could do meanwhile.

        Each device waits for the one that executes most. Work is counted in local steps
        times levels, and a chunk runs to its longest client, padding rows included.
        """
        if self._devices == 1:
            return 1.0
        alone, real, waited = self._execution._replace(mesh=None), 0, 0
        for round in range(SEEN_ROUNDS):
            client, _, level = self._placed(0, round)
            work = sum(self.num_steps(0, client).values()) * level
            executed = execution_lib.executed_steps(
                work.reshape(self._devices, -1), alone
            )
            real, waited = real + work.sum(), waited + executed.max() * self._devices
        return float(real / waited) if waited else 1.0

    @property
    def round_examples(self) -> float:
        """Mean train rows of all clients of a round, for the seed with the most."""
        rows = np.take_along_axis(self._num_rows, self._candidates, 1)
        return float(rows.mean(1).max() * self._clients_per_round)

    def examples(self, seed_index: int, round: int) -> np.ndarray:
        """Counts train rows of a round's clients by device, int[D]."""
        client, _, _ = self._placed(seed_index, round)
        return self.owned(seed_index, client).reshape(self._devices, -1).sum(1)

    def capacity(self, num_rounds: int) -> int:
        """Returns the room for a device's examples in a number of rounds of any seed.

        It is the average, since a window takes as many rounds as fit, and at least the
        size of the largest of the first rounds.
        """
        every = [(i, r) for i in range(len(self._seeds)) for r in range(SEEN_ROUNDS)]
        by_device = np.stack([self.examples(*one) for one in every])
        share = by_device.sum(0).max() / max(by_device.sum(), 1)
        average = int(np.ceil(self.round_examples * num_rounds * share))
        return shapes.rounded_up_finely(max(average, int(by_device.max()), 1))

    def positions(
        self, seed_index: int, first_round: int, drawn: Sequence[types.Cohort]
    ) -> dict[str, list[np.ndarray]]:
        """The `orders` int32[n] of each device by plan, in consecutive rounds.

        `drawn` are these rounds as `drawn` returns them.
        """
        every = np.stack([one.client_id for one in drawn])
        place = self._by_device(*every.shape)
        client, round = every.reshape(-1)[place], first_round + place // every.shape[1]
        owned, seed = self.owned(seed_index, client), self._seeds[seed_index]
        found = {}
        for spec in self._specs:
            flat = orders(seed, round.ravel(), client.ravel(), owned.ravel(), spec)
            ends = np.cumsum(spec.epochs * spec.rows(owned).sum(1))[:-1]
            found[spec.name] = np.split(flat, ends)
        return found

    def _by_device(self, num_rounds: int, size: int) -> np.ndarray:
        """int[D, n]: the places of each device's rows in rounds of `size` rows."""
        place = np.arange(num_rounds * size).reshape(num_rounds, self._devices, -1)
        return place.swapaxes(0, 1).reshape(self._devices, -1)

    def window(
        self,
        seed_index: int,
        first_round: int,
        num_rounds: int,
        length: int,
        capacity: int,
        drawn: Sequence[types.Cohort] = (),
        positions: Sequence[dict[str, list[np.ndarray]]] = (),
    ) -> types.Cohort:
        """Draws several rounds with their plans, padded to `length` rounds.

        Args:
            num_rounds: Rounds from `first_round` on, at least one.
            length: Leading axis of all leaves but the plans' positions. Padding rounds
                are zero and have no clients.
            capacity: Room for the examples of a device in an epoch of all these rounds,
                raised if they have more.
            drawn: These rounds as `drawn` returns them, empty = draw them now.
            positions: Parts of these and perhaps later rounds, one after another, as
                `positions` returns them, empty = draw them now.

        Returns:
            A cohort of leaves [length, ...], with each plan as a `types.WindowPlan`.
        """
        rounds = range(first_round, first_round + num_rounds)
        drawn = drawn or [self.drawn(seed_index, one) for one in rounds]
        many = jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)
        positions = positions or [self.positions(seed_index, first_round, drawn)]
        # The rows of one device in all rounds come before those of the next device.
        place = self._by_device(*many.client_id.shape)
        owned = self.owned(seed_index, many.client_id.reshape(-1)[place])
        capacity = max(capacity, int(owned.sum(1).max()), 1)
        taken, many = self._cut(seed_index, first_round, many)

        def pad(leaf: np.ndarray) -> np.ndarray:
            if length == num_rounds:
                return leaf
            out = np.zeros((length, *leaf.shape[1:]), leaf.dtype)
            out[:num_rounds] = leaf
            return out

        plans = {}
        for spec in self._specs:
            count = spec.epochs * spec.rows(owned)
            position = np.zeros((self._devices, spec.epochs * capacity), np.int32)
            for device, size in enumerate(count.sum(1)):
                rest = position[device, :size]
                for part in positions:
                    flat = part[spec.name][device][: len(rest)]
                    rest[: len(flat)] = flat
                    rest = rest[len(flat) :]
            first = np.zeros(many.client_id.size, np.int32)
            first[place] = np.cumsum(count, 1) - count
            first = pad(first.reshape(many.client_id.shape))
            num_steps = jax.tree.map(pad, taken.get(spec.name, ()))
            plans[spec.name] = types.WindowPlan(position, first, spec, num_steps)
        return jax.tree.map(pad, many).replace(plans=plans)

    def _cut(
        self, seed_index: int, first_round: int, many: types.Cohort
    ) -> tuple[dict[str, np.ndarray], types.Cohort]:
        """(steps int32[T, C] by plan where they may be cut, rounds with a clock)."""
        who, taken, examples = self._who, {}, 0
        if who is None:
            return taken, many
        client = np.where(many.row_mask, many.client_id, 0)
        owned = self.owned(seed_index, many.client_id)
        named = self._seeds[seed_index], first_round + np.arange(len(client))[:, None]
        most = who.in_time(self._specs, owned, seed_index, client, many.level)
        for spec, within in zip(self._specs, most, strict=True):
            steps = spec.steps(owned)
            if not spec.at_server:
                steps = who.taken(*named, client, steps)
            taken[spec.name] = np.minimum(steps, within).astype(np.int32)
            # A client that the deadline stops has worked until then.
            examples += spec.clients_examples(owned, steps)
        if not self.has_clock:
            return taken, many
        seconds = examples * who.per_example(seed_index, client, many.level)
        seconds = np.minimum(seconds, who.seconds_to_train(many.level))
        deadline = np.full(len(client), who.round_seconds, np.float32)
        return taken, many.replace(seconds=np.float32(seconds), deadline=deadline)

    def _choose(self, seed: int, round: int) -> np.ndarray:
        """Draws the clients of a round, int[C] without padding, at least one."""
        wanted, who = self._clients_per_round, self._who
        if who is None and wanted == self.num_clients:
            return np.arange(wanted)
        candidates = self._candidates[self._seeds.index(seed)]
        if who is not None and who.round_seconds < np.inf:
            in_time = self._in_time(seed, round)
            # Levels that are drawn may leave none. Then one takes part without a step.
            candidates, wanted = (in_time, wanted) if len(in_time) else (candidates, 1)
        if who is not None:
            present = candidates
            if not self._are_available:
                present = who.available(seed, round, candidates)
            # In a round without any, one of the others takes part.
            wanted = min(wanted, max(len(present), 1))
            candidates = present if len(present) else candidates
            if wanted == self.num_clients:
                return candidates
        gen = rng.generator(seed, "engine.cohort", round)
        return candidates[gen.choice(len(candidates), wanted, replace=False)]

    def _in_time(self, seed: int, round: int) -> np.ndarray:
        """The clients int[C] that do a local step in a round before the deadline."""
        if (known := self._timely.get(seed)) is not None:
            return known
        seed_index = self._seeds.index(seed)
        candidates = self._candidates[seed_index]
        level = np.asarray(self._level_of(seed, round, candidates))
        owned = self.owned(seed_index, candidates)
        steps = self._who.in_time(self._specs, owned, seed_index, candidates, level)
        found = candidates[np.all([*steps, level > 0], axis=0)]
        if self._levels_are_fixed:
            self._timely[seed] = found
        return found

    def _draw_peers(
        self, seed: int, round: int, client: np.ndarray, real: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws all rows' peers int32[C, P] and mask bool[C, P]; none for padding."""
        num_peers = self.graph.num_peers if self.graph else 0
        peers = np.zeros((len(client), num_peers), np.int32)
        mask = np.zeros(peers.shape, bool)
        if num_peers:
            found, mask[real] = self.graph.draw(seed, round, client[real])
            peers[real] = np.where(mask[real], found, 0)
        return peers, mask

    def owned(self, seed_index: int, client: np.ndarray) -> np.ndarray:
        """Returns the train rows of clients int[...], 0 on padding rows."""
        owned = self._num_rows[seed_index]
        last = len(owned) - 1
        return np.where(client > last, 0, owned[np.minimum(client, last)])

    def num_steps(self, seed_index: int, client: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the steps int[...] of clients int[...] in each plan, by its name."""
        owned = self.owned(seed_index, client)
        return {spec.name: spec.steps(owned) for spec in self._specs}
