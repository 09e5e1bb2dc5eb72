"""Plans: from a round number to its cohort, a table of integers.

A cohort is a pure function of (seed, round); it never depends on the method, so that
all methods see the same clients, and never on history, so that a run can resume.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from fedjax_pfl import execution as rows
from fedjax_pfl import rng, types


def batches(
    gen: np.random.Generator, num_rows: int, epochs: int, batch_size: int, steps: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Shuffled epochs of one client: position int32[S, B], epoch int32[S], num_steps.

    The last short batch of an epoch is kept and padded with -1.
    """
    per_epoch = -(-num_rows // batch_size)
    position = np.full((steps, batch_size), -1, np.int32)
    epoch = np.zeros(steps, np.int32)
    for number in range(epochs):
        filled = np.full(per_epoch * batch_size, -1, np.int32)
        filled[:num_rows] = gen.permutation(num_rows)
        part = slice(number * per_epoch, (number + 1) * per_epoch)
        position[part] = filled.reshape(per_epoch, batch_size)
        epoch[part] = number
    return position, epoch, epochs * per_epoch


def max_steps(num_rows: np.ndarray, spec: types.PlanSpec) -> int:
    """S: the steps of the largest client."""
    return spec.epochs * -(-int(np.max(num_rows)) // spec.batch_size)


def planner(
    *,
    seeds: Sequence[int],
    num_rows: np.ndarray,
    client_depth: np.ndarray,
    client_group: np.ndarray,
    clients_per_round: int,
    specs: Sequence[types.PlanSpec],
    num_peers: int,
    execution: types.Execution,
) -> Callable[[int, int], types.Cohort]:
    """Returns `(seed index, round) -> Cohort` of numpy arrays.

    Args:
        seeds: The seeds of the run.
        num_rows: int[seeds, K], train examples of each client.
        client_depth, client_group: int[K].
        clients_per_round: Clients drawn without replacement.
        specs: The algorithm's plans.
        num_peers: Peers of each row, drawn without replacement, self excluded.
        execution: Rows are sorted by group, depth and steps, dealt to the devices and
            padded to whole chunks, so that chunks are of equal length.
    """
    num_clients = num_rows.shape[1]
    steps = {spec.name: max_steps(num_rows, spec) for spec in specs}
    size = rows.padded_size(clients_per_round, execution)
    devices = execution.mesh.size if execution.mesh else 1

    def cohort(seed_index: int, round: int) -> types.Cohort:
        seed, owned = seeds[seed_index], num_rows[seed_index]
        gen = rng.generator(seed, rng.Tag.COHORT, round)
        chosen = np.arange(num_clients)
        if clients_per_round < num_clients:
            chosen = gen.choice(num_clients, clients_per_round, replace=False)
        keys = (chosen, owned[chosen], client_depth[chosen], client_group[chosen])
        chosen = chosen[np.lexsort(keys)]
        # Padding rows first: they fill the chunk of the smallest clients.
        dealt = np.full(size, num_clients)
        dealt[size - len(chosen) :] = chosen
        dealt = dealt.reshape(-1, devices).T.reshape(-1)
        real = dealt < num_clients
        safe = np.minimum(dealt, num_clients - 1)

        peers = np.zeros((size, num_peers), np.int32)
        if num_peers:
            for index in np.flatnonzero(real):
                gen = rng.generator(seed, rng.Tag.PEERS, round, int(dealt[index]))
                peer = gen.choice(num_clients - 1, num_peers, replace=False)
                peers[index] = peer + (peer >= dealt[index])

        plans = {}
        for spec in specs:
            shape = (size, steps[spec.name], spec.batch_size)
            position = np.full(shape, -1, np.int32)
            epoch = np.zeros(shape[:2], np.int32)
            num_steps = np.zeros(size, np.int32)
            stream = zlib.crc32(spec.name.encode())
            for index in np.flatnonzero(real):
                client = int(dealt[index])
                gen = rng.generator(seed, rng.Tag.BATCHES, round, client, stream)
                position[index], epoch[index], num_steps[index] = batches(
                    gen, int(owned[client]), spec.epochs, spec.batch_size, shape[1]
                )
            plans[spec.name] = types.Plan(position, epoch, num_steps)
        return types.Cohort(
            client_id=dealt.astype(np.int32),
            row=dealt.astype(np.int32),
            row_mask=real,
            depth=client_depth[safe].astype(np.int32),
            peers=peers,
            peer_mask=np.ones_like(peers, bool),
            plans=plans,
        )

    return cohort
