"""Plans: from a round number to its cohort, a table of integers.

A cohort is a pure function of (seed, round); it never depends on the method, so that
all methods see the same clients, and never on history, so that a run can resume. What
a client draws is named by (seed, round, client), never by its place among others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from data import shuffle, topology
from fedjax_pfl import execution as execution_lib
from fedjax_pfl import rng, shapes, types

# Examples in one step of a chunk that keep an accelerator busy.
STEP_EXAMPLES = 4096


def max_steps(num_rows: np.ndarray, spec: types.PlanSpec) -> int:
    """S: the steps of the largest client."""
    return spec.epochs * -(-int(np.max(num_rows)) // spec.batch_size)


def batches(
    seed: int,
    round: int | np.ndarray,
    client: np.ndarray,
    num_rows: np.ndarray,
    spec: types.PlanSpec,
    steps: int,
) -> types.Plan:
    """Shuffled epochs of many clients; the last short batch of an epoch is kept.

    Args:
        seed: The run's.
        round: int or int[C].
        client: int[C].
        num_rows: int[C], train rows of each; 0 = a row without any step.
        spec: Epochs, batch size, and the name that tells its shuffles from others'.
        steps: S, at least the steps of the largest client.

    Returns:
        position int32[C, S, B], epoch int32[C, S] and num_steps int32[C].
    """
    epochs, size = spec.epochs, spec.batch_size
    round = np.broadcast_to(round, client.shape)
    per_epoch = -(-num_rows // size)
    num_steps = epochs * per_epoch
    position = np.full((len(client), steps, size), -1, np.int32)
    name = zlib.crc32(spec.name.encode())
    for part in shuffle.alike(num_rows, epochs):
        longest = int(num_rows[part].max())
        words = rng.hashed(
            seed,
            rng.Tag.BATCHES,
            round[part, None, None],
            client[part, None, None],
            name,
            np.arange(epochs)[:, None],
            np.arange(longest),
        )
        # [clients, epochs, batches, B]; a client's own epochs may have fewer batches.
        width = -(-longest // size)
        order = np.full((len(part), epochs, width * size), -1, np.int32)
        order[..., :longest] = shuffle.positions(words, num_rows[part, None])
        order = order.reshape(len(part), epochs * width, size)
        # Then a client's epochs follow one another without a gap.
        step = np.arange(epochs * width)
        own = np.maximum(per_epoch[part, None], 1)
        source = np.minimum(step // own, epochs - 1) * width + step % own
        real = step < num_steps[part, None]
        order = np.take_along_axis(order, source[..., None], axis=1)
        position[part, : epochs * width] = np.where(real[..., None], order, -1)[
            :, :steps
        ]
    step = np.arange(steps)
    epoch = np.where(
        step < num_steps[:, None], step // np.maximum(per_epoch, 1)[:, None], 0
    )
    return types.Plan(position, epoch.astype(np.int32), num_steps.astype(np.int32))


class Planner:
    """Cohorts as numpy arrays, one or many rounds at a time.

    Attributes:
        longest: S of each plan for the largest client of all seeds, by name.
        graph: The graph of peers, None where the algorithm has none.
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
    ):
        """Keeps what every draw needs.

        Args:
            seeds: The seeds of the run.
            num_rows: int[seeds, K], train examples of each client.
            client_group: int[K], clients of one architecture.
            level_of: int[K], the largest depth that each client holds; or a function
                `(seed, round, client int[C]) -> int[C]` where it changes.
            clients_per_round: Clients drawn without replacement.
            specs: The algorithm's plans.
            execution: Rows are sorted by group, level and steps, dealt to the devices
                and padded to whole chunks, so that chunks are of equal length.
            eligible: bool[K], clients that may be drawn at all; None = everybody. A
                client that is never drawn may still be a peer.
            peers: Peers of each row, None = the algorithm has none.

        Raises:
            ValueError: there are fewer clients than are to be drawn, or no such graph
                of peers.
        """
        self._seeds, self._num_rows = list(seeds), np.asarray(num_rows)
        self._num_clients = num_clients = self._num_rows.shape[1]
        self._group, self._level_of = np.asarray(client_group), level_of
        # Private rows are stacked by group: a client's slot is its place among them.
        self._slot = np.zeros(num_clients, np.int32)
        for group in np.unique(self._group):
            members = np.flatnonzero(self._group == group)
            self._slot[members] = np.arange(len(members))
        self._clients_per_round, self._execution = clients_per_round, execution
        most = int(self._num_rows.max())
        self._specs = tuple(
            spec._replace(batch_size=shapes.capped(spec.batch_size, most))
            for spec in specs
        )
        self.graph = topology.make(peers, num_clients) if peers else None
        self._candidates = None
        if eligible is not None and not np.all(eligible):
            self._candidates = np.flatnonzero(eligible)
        self.longest = {spec.name: max_steps(num_rows, spec) for spec in self._specs}
        present = num_clients if self._candidates is None else len(self._candidates)
        if clients_per_round > present:
            raise ValueError(
                f"--clients_per_round={clients_per_round}: {present} of "
                f"{num_clients} clients may be drawn (--exclusive); lower it"
            )

    def cohort(self, seed_index: int, round: int) -> types.Cohort:
        """One round with its plans, whose shapes are those of every round.

        Args:
            seed_index: Position among the seeds.
            round: 0, 1, ...
        """
        one = self.drawn(seed_index, round)
        return one.replace(
            plans={
                spec.name: self._plan(
                    seed_index, round, one, spec, self.longest[spec.name]
                )
                for spec in self._specs
            }
        )

    def drawn(self, seed_index: int, round: int) -> types.Cohort:
        """One round without plans: who takes part, where, at which level."""
        seed, num_clients = self._seeds[seed_index], self._num_clients
        chosen = self._choose(seed, round)
        levels = self._levels(seed, round, chosen)
        owned = self._num_rows[seed_index, chosen]
        order = np.lexsort((chosen, owned, levels, self._group[chosen]))
        # Padding rows first: they fill the chunk of the smallest clients.
        size = execution_lib.padded_size(len(chosen), self._execution)
        index = np.full(size, -1)
        index[size - len(chosen) :] = order
        # Like cards, one row to each device in turn: all get large and small clients.
        devices = self._execution.mesh.size if self._execution.mesh else 1
        index = index.reshape(-1, devices).T.reshape(-1)
        real = index >= 0
        client = np.where(real, chosen[index], num_clients).astype(np.int32)
        # The largest level of a chunk decides what is run: padding must not raise it.
        chunk = min(self._execution.chunk, size // devices)
        smallest = real.reshape(-1, chunk).argmax(1) + np.arange(0, size, chunk)
        like = np.where(real, np.arange(size), np.repeat(smallest, chunk))
        # A chunk of padding alone takes the smallest client of all.
        level = levels[np.where(real[like], index[like], order[0])]
        peers, peer_mask = self._draw_peers(seed, round, client, real)
        return types.Cohort(
            client_id=client,
            row=np.where(real, self._slot[np.where(real, client, 0)], num_clients),
            row_mask=real,
            depth=level.astype(np.int32),
            peers=peers,
            peer_mask=peer_mask,
            plans={},
        )

    def window(
        self,
        seed_index: int,
        first_round: int,
        num_rounds: int,
        length: int,
        min_steps: Mapping[str, int] | None = None,
    ) -> types.Cohort:
        """Several rounds with their plans, padded to `length` rounds.

        Args:
            seed_index: Position among the seeds.
            first_round, num_rounds: The rounds `first_round, ...`, at least one.
            length: Leading axis of all leaves; later rounds are zero, without a client.
            min_steps: At least this S by name of the plan (so that windows of several
                seeds, or one after another, have one shape).

        Returns:
            A cohort of leaves [length, ...]. S is that of the window's largest client,
            rounded up to a power of two.
        """
        drawn = [
            self.drawn(seed_index, first_round + index) for index in range(num_rounds)
        ]
        many = jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)
        round = first_round + np.arange(num_rounds)[:, None]
        owned = self._owned(seed_index, many.client_id)
        plans = {}
        for spec in self._specs:
            steps = shapes.rounded_up(max_steps(owned, spec))
            steps = max(steps, (min_steps or {}).get(spec.name, 0))
            plans[spec.name] = self._plan(seed_index, round, many, spec, steps)

        def pad(leaf: np.ndarray) -> np.ndarray:
            if length == num_rounds:
                return leaf
            out = np.zeros((length, *leaf.shape[1:]), leaf.dtype)
            out[:num_rounds] = leaf
            return out

        return jax.tree.map(pad, many.replace(plans=plans))

    def _choose(self, seed: int, round: int) -> np.ndarray:
        """int[C], without padding."""
        wanted = self._clients_per_round
        gen = rng.generator(seed, rng.Tag.COHORT, round)
        if self._candidates is None:
            if wanted == self._num_clients:
                return np.arange(wanted)
            return gen.choice(self._num_clients, wanted, replace=False)
        return self._candidates[gen.choice(len(self._candidates), wanted, False)]

    def _levels(self, seed: int, round: int, client: np.ndarray) -> np.ndarray:
        if callable(self._level_of):
            return np.asarray(self._level_of(seed, round, client))
        return np.asarray(self._level_of)[client]

    def _draw_peers(
        self, seed: int, round: int, client: np.ndarray, real: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(peers int32[C, P], mask bool[C, P]) of all rows, padding rows without."""
        num_peers = self.graph.num_peers if self.graph else 0
        peers = np.zeros((len(client), num_peers), np.int32)
        mask = np.zeros(peers.shape, bool)
        if num_peers:
            found, found_mask = self.graph.draw(seed, round, client[real])
            mask[real] = found_mask
            peers[real] = np.where(found_mask, found, 0)
            # A gather on the device would take the nearest slot without a word.
            if peers.min() < 0 or peers.max() >= self._num_clients:
                raise ValueError(
                    f"PeerSpec.draw gave peers {peers.min()}..{peers.max()}; expected "
                    f"slots 0..{self._num_clients - 1}"
                )
        return peers, mask

    def _owned(self, seed_index: int, client: np.ndarray) -> np.ndarray:
        """int[...]: train rows, 0 on padding rows."""
        owned = self._num_rows[seed_index]
        real = client < len(owned)
        return np.where(real, owned[np.where(real, client, 0)], 0)

    def _plan(
        self,
        seed_index: int,
        round: int | np.ndarray,
        cohort: types.Cohort,
        spec: types.PlanSpec,
        steps: int,
    ) -> types.Plan:
        """The plan of one round, or of several (`round` int[R, 1], leaves [R, C])."""
        client = cohort.client_id
        plan = batches(
            self._seeds[seed_index],
            np.broadcast_to(round, client.shape).reshape(-1),
            client.reshape(-1),
            self._owned(seed_index, client).reshape(-1),
            spec,
            steps,
        )
        return jax.tree.map(
            lambda leaf: leaf.reshape(*client.shape, *leaf.shape[1:]), plan
        )


def choose_chunk(
    num_steps: np.ndarray, *, batch_size: int, min_chunk: int = 0, devices: int = 1
) -> tuple[int, float]:
    """The chunk that computes the fewest steps for cohorts like these.

    Args:
        num_steps: int[T, C], steps of the clients of T typical cohorts, without padding
            rows; taken as sorted by steps alone.
        batch_size: Examples of a client's step.
        min_chunk: The least chunk; 0 = what makes about `STEP_EXAMPLES` a step.
        devices: Devices that share the rows.

    Returns:
        (chunk, predicted share of the executed steps that are real); of chunks that
        compute equally much, the largest.
    """
    steps = np.sort(num_steps, axis=-1)
    num_rows = steps.shape[-1]
    per_device = -(-num_rows // devices)
    least = min_chunk or max(1, round(STEP_EXAMPLES / batch_size))

    def executed(chunk: int) -> int:
        num_chunks = -(-per_device // chunk)
        # Ends of chunks, dealt to the devices, padding rows first: as `Planner.drawn`.
        last = (np.arange(1, num_chunks + 1) * chunk - 1)[:, None] * devices
        index = last + np.arange(devices) - (num_chunks * chunk * devices - num_rows)
        return int(steps[..., index[index >= 0]].sum()) * chunk

    candidates = range(min(least, per_device), per_device + 1)
    best = min(candidates, key=lambda chunk: (executed(chunk), -chunk))
    return best, float(steps.sum() / max(executed(best), 1))
