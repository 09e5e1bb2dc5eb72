"""Graphs of peers: the clients from which each client pulls in a round.

A graph is a pure function of (seed, round), independent of the method and the cohort.
It is directed: row i has the clients from which client i pulls. Each client's draws are
named by (seed, round, client), so that only the rows of the cohort are drawn. Only
`regular` draws all rows at once, and only `file` reads a table of all pairs.
"""

import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from data import files, npz
from fedjax_pfl import options, rng, types

# The probability below which erdos_renyi rows are not made longer
NEVER = 1e-12
# For regular graphs: rounds of swapping all edges in pairs, and cached graphs
SWEEPS = 5
KEPT_GRAPHS = 16
# Entries of all clients' tables of others that are shuffled at once
TABLE_SIZE = 1 << 22


class Graph(NamedTuple):
    """The peers of any client in any round.

    Attributes:
        num_peers: P.
        draw: `(seed, round, client int[C]) -> (peers int[C, P], mask bool[C, P])`.
        table: bool[K, K] of a user's graph, None for drawn graphs.
    """

    num_peers: int
    draw: Callable[[int, int, np.ndarray], tuple[np.ndarray, np.ndarray]]
    table: np.ndarray | None = None


def make(spec: types.PeerSpec, num_clients: int) -> Graph:
    """Makes the graph for K clients; a ValueError names the flag to change."""
    if spec.draw is not None:
        return _custom(spec, num_clients)
    if num_clients < 2:
        raise ValueError("--num_clients=1 leaves a client without peers; raise it")
    graph = KINDS[spec.topology](spec, num_clients)
    if not spec.is_fixed:
        return graph
    return graph._replace(draw=lambda seed, _, client: graph.draw(seed, 0, client))


def _custom(spec: types.PeerSpec, num_clients: int) -> Graph:
    """A graph of `spec.draw`, each draw of which is checked."""

    def draw(seed: int, round: int, client: np.ndarray):
        drawn = spec.draw(seed, round, client, num_clients, spec.num_peers)
        if not isinstance(drawn, Sequence) or len(drawn) != 2:
            raise ValueError(
                f"PeerSpec.draw gave {type(drawn).__name__}; expected (peers, mask)"
            )
        peers, mask = map(np.asarray, drawn)
        if peers.dtype.kind not in "iu":
            raise ValueError(f"PeerSpec.draw gave peers {peers.dtype}; expected int")
        wanted = len(client), spec.num_peers
        if peers.shape != wanted or mask.shape != wanted:
            raise ValueError(
                f"PeerSpec.draw gave peers {list(peers.shape)} and a mask "
                f"{list(mask.shape)}; expected {list(wanted)} of both, clients of the "
                "round by num_peers"
            )
        # A gather on the device would silently take the nearest slot.
        valid = np.where(mask, peers, 0)
        if valid.size and (valid.min() < 0 or valid.max() >= num_clients):
            raise ValueError(
                f"PeerSpec.draw gave peers {valid.min()}..{valid.max()}; expected "
                f"clients 0..{num_clients - 1}"
            )
        return peers, mask

    return Graph(spec.num_peers, draw)


def _check_degree(spec: types.PeerSpec, num_clients: int) -> None:
    most, why = num_clients - 1, f"the others of --num_clients={num_clients}"
    options.check_at_most("num_peers", spec.num_peers, most, why)


def uniform_peers(
    seed: int, round: int, client: np.ndarray, num_clients: int, num_peers: int
) -> np.ndarray:
    """Draws P < K different other clients for each client in random order, int[C, P].

    They are the beginning of a shuffle of all others. The first n of P peers are
    therefore those of a draw of n.
    """
    own, step = client[:, None], np.arange(num_peers)
    words = rng.hashed(seed, "engine.peers", round, own, 0, step)
    places = step + (words % (num_clients - 1 - step).astype(np.uint64)).astype(int)
    if num_peers**2 < num_clients:
        peers = _few_shuffled(places)
    else:
        size = max(1, TABLE_SIZE // num_clients)
        blocks = [places[at : at + size] for at in range(0, max(1, len(places)), size)]
        peers = np.concatenate([_shuffled(one, num_clients - 1) for one in blocks])
    return peers + (peers >= own)


def _shuffled(places: np.ndarray, count: int) -> np.ndarray:
    """The first P of 0 to count - 1 where step i swaps the entries i and places[:, i].

    `places` is int[C, P]. It takes C * (count + P) steps.
    """
    every, row = np.tile(np.arange(count), (len(places), 1)), np.arange(len(places))
    for step, place in enumerate(places.T):
        every[row, place], every[:, step] = every[:, step].copy(), every[row, place]
    return every[:, : places.shape[1]]


def _few_shuffled(places: np.ndarray) -> np.ndarray:
    """`_shuffled` of any count, which takes C * P**2 steps."""
    # At step i the entry i is moved to `places[:, i]`, where it is `moved[:, i]`.
    moved, peers = np.zeros_like(places), np.zeros_like(places)

    def entry(place: np.ndarray, step: int) -> np.ndarray:
        hits = (places[:, :step] == place[:, None]) * np.arange(1, step + 1)
        last = hits.max(1, initial=0)
        found = np.take_along_axis(moved, np.maximum(last - 1, 0)[:, None], axis=1)
        return np.where(last > 0, found[:, 0], place)

    for step, place in enumerate(places.T):
        peers[:, step] = entry(place, step)
        moved[:, step] = entry(np.full(len(places), step), step)
    return peers


def _random(spec: types.PeerSpec, num_clients: int) -> Graph:
    """Draws `num_peers` different other clients for each client, all equally likely."""
    _check_degree(spec, num_clients)

    def draw(seed: int, round: int, client: np.ndarray):
        return _all(uniform_peers(seed, round, client, num_clients, spec.num_peers))

    return Graph(spec.num_peers, draw)


def _ring(spec: types.PeerSpec, num_clients: int) -> Graph:
    """The `num_peers` nearest clients on a ring: 1 ahead, 1 behind, 2 ahead, ..."""
    _check_degree(spec, num_clients)
    step = np.arange(spec.num_peers)
    return _shifted((step // 2 + 1) * np.where(step % 2, -1, 1), num_clients)


def _full(spec: types.PeerSpec, num_clients: int) -> Graph:
    """All other clients."""
    return _shifted(np.arange(1, num_clients), num_clients)


def _shifted(offset: np.ndarray, num_clients: int) -> Graph:
    """The clients at distances int[P] from each client."""

    def draw(seed: int, round: int, client: np.ndarray):
        return _all((client[:, None] + offset) % num_clients)

    return Graph(len(offset), draw)


def _all(peers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return peers, np.ones(peers.shape, bool)


def _erdos_renyi(spec: types.PeerSpec, num_clients: int) -> Graph:
    """Every client pulls from every other with `edge_probability`, independently.

    A binomial draw gives the number of peers, and all sets of that size are equally
    likely.
    """
    others, probability = num_clients - 1, spec.edge_probability
    # By Bernstein's inequality, more peers have a probability below NEVER.
    mean, rest = others * probability, -math.log(NEVER)
    spread = 2 * mean * (1 - probability) * rest
    most = min(others, math.ceil(mean + rest / 3 + math.sqrt(rest**2 / 9 + spread)))
    at_most = _binomial(others, probability, most)

    def draw(seed: int, round: int, client: np.ndarray):
        chance = rng.uniform(seed, "engine.peers", round, client, 1)
        degree = np.searchsorted(at_most, chance, "right")
        peers = uniform_peers(seed, round, client, num_clients, most)
        return peers, np.arange(most) < degree[:, None]

    return Graph(most, draw)


def _binomial(trials: int, probability: float, most: int) -> np.ndarray:
    """Returns P(X <= n) of a binomial X for n = 0..most - 1, f64[most]."""
    if probability == 1:
        return np.zeros(most)
    number = np.arange(1, most)
    ratio = (trials - number + 1) / number * (probability / (1 - probability))
    first = trials * math.log1p(-probability)
    return np.exp(first + np.cumsum(np.log(np.append(1.0, ratio))[:most])).cumsum()


def _regular(spec: types.PeerSpec, num_clients: int) -> Graph:
    """A random undirected graph in which each client has `num_peers` peers."""
    _check_degree(spec, num_clients)
    if spec.num_peers * num_clients % 2:
        raise ValueError(
            f"--num_peers={spec.num_peers}: there is no such regular graph of "
            f"--num_clients={num_clients}, as one of the two must be even; change one, "
            "or take --topology=random"
        )

    def draw(seed: int, round: int, client: np.ndarray):
        return _all(regular_graph(seed, round, num_clients, spec.num_peers)[client])

    return Graph(spec.num_peers, draw)


@functools.lru_cache(maxsize=KEPT_GRAPHS)
def regular_graph(
    seed: int, round: int, num_clients: int, num_peers: int
) -> np.ndarray:
    """Draws the peers of all clients in a random regular graph, int[K, P].

    The graph begins as a ring of shuffled clients with their nearest neighbours. Its
    edges are then swapped in pairs, several times each. No draw is rejected. P is below
    K, and one of the two is even.
    """
    gen = rng.generator(seed, "engine.peers", round)
    place, half = np.arange(num_clients), num_clients // 2
    steps = [(place + step) % num_clients for step in range(1, num_peers // 2 + 1)]
    edges = [np.stack([place, ahead], 1) for ahead in steps]
    if num_peers % 2:
        edges.append(np.stack([place[:half], place[half:]], 1))
    edges = gen.permutation(num_clients)[np.concatenate(edges)]
    for _ in range(SWEEPS):
        edges = _swapped(edges, num_clients, gen)
    ends = np.concatenate([edges, edges[:, ::-1]])
    neighbours = ends[np.argsort(ends[:, 0], kind="stable"), 1]
    neighbours = neighbours.reshape(num_clients, num_peers)
    neighbours.setflags(write=False)
    return neighbours


def _swapped(
    edges: np.ndarray, num_clients: int, gen: np.random.Generator
) -> np.ndarray:
    """Swaps edges a-b and c-d to a-d and c-b in random pairs, which keeps degrees.

    A pair is not swapped if that makes a loop, an existing edge, or an edge that
    another pair makes. `edges` is int[E, 2] without loops and duplicates.
    """

    def name(ends: np.ndarray) -> np.ndarray:
        return ends.min(-1) * num_clients + ends.max(-1)

    is_turned = gen.integers(2, size=(len(edges), 1)) > 0
    edges = np.where(is_turned, edges[:, ::-1], edges)
    pairs = gen.permutation(len(edges))[: len(edges) // 2 * 2].reshape(2, -1)
    new = edges[pairs]  # [2, pairs, 2]
    new[..., 1] = new[::-1, :, 1]
    _, index, count = np.unique(name(new), return_inverse=True, return_counts=True)
    is_alone = count[index].reshape(pairs.shape) == 1
    is_new = ~np.isin(name(new), name(edges))
    is_fine = (is_alone & is_new & (new[..., 0] != new[..., 1])).all(0)
    edges[pairs[:, is_fine]] = new[:, is_fine]
    return edges


def _file(spec: types.PeerSpec, num_clients: int) -> Graph:
    """Reads a user's graph, which is the same in every round."""
    table = read(spec.adjacency, num_clients)
    degree = table.sum(1)
    most = int(degree.max())
    client, peer = np.nonzero(table)
    peers = np.zeros((num_clients, most), int)
    peers[client, np.arange(len(peer)) - (np.cumsum(degree) - degree)[client]] = peer
    mask = np.arange(most) < degree[:, None]
    return Graph(most, lambda seed, round, client: (peers[client], mask[client]), table)


def read(path: str, num_clients: int) -> np.ndarray:
    """Reads the adjacency matrix bool[K, K] in a file; row i has the peers of client i.

    The file is an npz file with the array `adjacency`, or text with a line for each
    client, in which 0s and 1s are separated by spaces or commas. A ValueError that
    names the file says that it is missing, has another size or an entry that is not 0
    or 1, or that a client is its own peer or has none.
    """
    try:
        if path.endswith(".npz"):
            array = npz.read(pathlib.Path(path), ["adjacency"])["adjacency"]
        else:
            array = _text(pathlib.Path(path), num_clients)
        if wrong := _wrong(array, num_clients):
            raise ValueError(wrong)
        return np.ascontiguousarray(array, dtype=bool)
    except (OSError, ValueError) as error:
        is_read = isinstance(error, ValueError)
        reason = error if is_read else f"cannot be read: {error.strerror}"
        raise ValueError(f"--adjacency={path} {reason}") from error


def _text(path: pathlib.Path, num_clients: int) -> np.ndarray:
    """Reads the entries of a text file; errors are phrases without the path."""
    files.check(path, "an npz or text file")
    size, limit = path.stat().st_size, 2**16 + 8 * num_clients**2
    if size > limit:
        raise ValueError(
            f"has {size} bytes, a graph of --num_clients={num_clients} at most {limit}"
        )
    try:
        lines = path.read_text("utf-8-sig").replace(",", " ").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError("is not text; the name of an npz file ends in .npz") from error
    rows = [line.split() for line in lines if line.strip()]
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"has {len(row)} entries in row {number}, {len(rows[0])} in row 0; "
                f"give {num_clients} in each"
            )
        if odd := [entry for entry in row if entry not in ("0", "1")]:
            raise ValueError(_odd(odd[0][:20], number))
    return np.array(rows, dtype="U1") == "1"


def _odd(entry: object, row: int) -> str:
    return f"has the entry {entry} in row {row}; write 1 for a peer and 0 for none"


def _wrong(array: np.ndarray, num_clients: int) -> str:
    """Describes what is wrong with a matrix, as a phrase, or ""."""
    if array.shape != (num_clients, num_clients):
        return (
            f"is of shape {list(array.shape)[:8]}; --num_clients={num_clients} needs "
            f"[{num_clients}, {num_clients}]"
        )
    if array.dtype.kind not in "biuf":
        return f"holds {array.dtype}; numbers 0 and 1 are needed"
    for row, column in np.argwhere(~np.isin(array, (0, 1)))[:1]:
        return _odd(array[row, column], row)
    for own in np.flatnonzero(array.diagonal())[:1]:
        return f"makes client {own} its own peer; the diagonal must be 0"
    for alone in np.flatnonzero(~array.any(1))[:1]:
        return f"gives client {alone} no peer; set a 1 in row {alone}"
    return ""


KINDS: dict[str, Callable[[types.PeerSpec, int], Graph]] = {
    "random": _random,
    "ring": _ring,
    "regular": _regular,
    "full": _full,
    "erdos_renyi": _erdos_renyi,
    "file": _file,
}
