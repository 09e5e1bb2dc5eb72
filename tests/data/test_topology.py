"""Graphs of peers: named draws, degrees, and a user's own graph."""

import numpy as np
import pytest

from data import topology
from fedjax_pfl import decentralized, types

K = 12
EVERY = np.arange(K)


def graph(kind, num_peers=4, num_clients=K, **more):
    """A graph of `num_clients`."""
    return topology.make(types.PeerSpec(num_peers, kind, **more), num_clients)


def matrix(made, seed=0, round=0, num_clients=K):
    """bool[K, K] of a round; no peer twice."""
    peers, mask = made.draw(seed, round, np.arange(num_clients))
    assert peers.shape == mask.shape == (num_clients, made.num_peers)
    out = np.zeros((num_clients, num_clients), int)
    client, place = np.nonzero(mask)
    np.add.at(out, (client, peers[client, place]), 1)
    assert out.max(initial=0) <= 1
    return out.astype(bool)


@pytest.fixture
def own(tmp_path):
    """Writes a graph as text and returns its path."""

    def write(table, name="graph.txt", separator=" "):
        path = tmp_path / name
        lines = [separator.join(map(str, row)) for row in table]
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


def star(num_clients=K):
    """Client 0 pulls from all, all from client 0."""
    table = np.zeros((num_clients, num_clients), int)
    table[0, 1:] = table[1:, 0] = 1
    return table


def test_every_kind_has_a_function():
    """What `--topology` offers is what there is."""
    assert set(topology.KINDS) == set(decentralized.TOPOLOGIES)


DRAWN = {
    "random": {},
    "regular": {},
    "erdos_renyi": {"edge_probability": 0.3},
}


@pytest.mark.parametrize("kind", [*DRAWN, "ring", "full"])
def test_draws_are_named_by_seed_round_and_client(kind):
    """The same for a few clients as for all; nobody is its own peer."""
    made = graph(kind, **DRAWN.get(kind, {}))
    whole = matrix(made, seed=3, round=5)
    assert not whole.diagonal().any()
    peers, mask = made.draw(3, 5, np.array([7, 2]))
    for row, client in enumerate((7, 2)):
        assert set(peers[row][mask[row]]) == set(np.flatnonzero(whole[client]))
    other = [matrix(made, 3, 6), matrix(made, 4, 5)]
    assert kind not in DRAWN or not any(np.array_equal(whole, one) for one in other)


@pytest.mark.parametrize("kind", DRAWN)
def test_a_fixed_graph_is_that_of_the_first_round(kind):
    """Another seed has another."""
    fixed = graph(kind, is_fixed=True, **DRAWN[kind])
    first = matrix(graph(kind, **DRAWN[kind]), seed=1, round=0)
    np.testing.assert_array_equal(matrix(fixed, 1, 9), first)
    assert not np.array_equal(matrix(fixed, 2, 9), first)


def test_fewer_random_peers_are_the_first_of_more():
    """So that who uses a part of its peers has those that others drew."""
    client = np.arange(50)
    many = topology.uniform_peers(0, 2, client, 50, 49)
    assert (np.sort(many, 1) == np.stack([np.delete(client, k) for k in client])).all()
    for count in (1, 5, 21):
        few = topology.uniform_peers(0, 2, client, 50, count)
        np.testing.assert_array_equal(few, many[:, :count])


def test_both_ways_to_shuffle():
    """A table of all entries, and the moved ones alone."""
    gen = np.random.default_rng(0)
    for count, steps, clients in ((6, 6, 5), (40, 7, 3), (9, 1, 1), (5, 3, 0)):
        places = gen.integers(np.arange(steps), count, (clients, steps))
        table = topology._shuffled(places, count)
        np.testing.assert_array_equal(table, topology._few_shuffled(places))
        assert all(len({*row}) == steps for row in table.tolist())


def test_random_peers_are_uniform():
    """Test 2: k each, and every ordered pair of places equally likely (chi-square)."""
    rounds = 2000
    drawn = np.stack(
        [topology.uniform_peers(0, r, np.array([2]), 7, 3)[0] for r in range(rounds)]
    )
    others = [k for k in range(7) if k != 2]
    for place in range(3):
        count = np.array([(drawn[:, place] == k).sum() for k in others])
        # 5 degrees of freedom: 20.5 is passed once in a thousand.
        assert ((count - rounds / 6) ** 2).sum() / (rounds / 6) < 20.5
    pairs = np.array(
        [
            ((drawn[:, 0] == a) & (drawn[:, 2] == b)).sum()
            for a in others
            for b in others
            if a != b
        ]
    )
    # 29 degrees of freedom: 58.3.
    assert ((pairs - rounds / 30) ** 2).sum() / (rounds / 30) < 58.3


def test_ring():
    """The nearest, first ahead, then behind; of an odd number one more ahead."""
    peers, mask = graph("ring", num_peers=3).draw(0, 0, np.array([0, 11]))
    assert peers.tolist() == [[1, 11, 2], [0, 10, 1]] and mask.all()
    for count in (1, 2, 6, 11):
        assert (matrix(graph("ring", count)).sum(1) == count).all()


def test_full():
    """All others, whatever the number of peers."""
    np.testing.assert_array_equal(matrix(graph("full")), ~np.eye(K, dtype=bool))


@pytest.mark.parametrize("num_peers", [1, 2, 5, 10, 11])
def test_regular_graphs_are_symmetric_with_equal_degrees(num_peers):
    """Also where there is only one such graph, or hardly any."""
    for round in range(20):
        table = matrix(graph("regular", num_peers), round=round)
        np.testing.assert_array_equal(table, table.T)
        assert (table.sum(1) == num_peers).all()


def test_regular_graphs_are_not_all_rings():
    """All pairs are equally likely, and triangles as rare as in a random graph."""
    made, met, triangles = graph("regular", 4, 30), np.zeros((30, 30)), []
    for round in range(200):
        table = matrix(made, round=round, num_clients=30).astype(int)
        met += table
        triangles.append(np.trace(table @ table @ table) / 6)
    others = met[~np.eye(30, dtype=bool)]
    # Binomial with p = 4/29 over 200 rounds: 27.6 and a standard deviation of 4.9.
    assert np.abs(others - 27.6).max() < 25
    # (k - 1)^3 / 6 = 4.5 in a random regular graph, 30 in a ring of neighbours.
    assert np.mean(triangles) == pytest.approx(4.5, abs=1)


def test_erdos_renyi_degrees_are_binomial():
    """Mean and spread of the degrees, isolated clients, and pairs alike."""
    made = graph("erdos_renyi", edge_probability=0.2)
    tables = np.stack([matrix(made, round=r) for r in range(300)])
    degree = tables.sum(2)
    # 11 others: mean 2.2, variance 1.76, and 0.8^11 = 8.6 % have no peer.
    assert degree.mean() == pytest.approx(2.2, abs=0.1)
    assert degree.var() == pytest.approx(1.76, abs=0.15)
    assert (degree == 0).mean() == pytest.approx(0.0859, abs=0.02)
    share = tables.mean(0)[~np.eye(K, dtype=bool)]
    assert np.abs(share - 0.2).max() < 5 * np.sqrt(0.16 / 300)


def test_erdos_renyi_from_hardly_any_to_all():
    """A row has as many places as it will ever need."""
    everyone = graph("erdos_renyi", edge_probability=1.0)
    np.testing.assert_array_equal(matrix(everyone), ~np.eye(K, dtype=bool))
    sparse = graph("erdos_renyi", num_clients=2000, edge_probability=0.005)
    assert sparse.num_peers < 60
    _, mask = sparse.draw(0, 0, np.arange(2000))
    assert mask.sum(1).mean() == pytest.approx(10, abs=0.4)
    assert mask.sum(1).max() < 40


@pytest.mark.parametrize("kind", ["random", "ring", "regular"])
def test_many_clients_cost_no_table_of_pairs(kind):
    """A row each, where a table would have 4 * 10^8 entries."""
    peers, mask = graph(kind, 4, 20_000).draw(0, 0, np.arange(20_000))
    assert peers.shape == mask.shape == (20_000, 4)
    assert (np.sort(peers, 1)[:, 1:] > np.sort(peers, 1)[:, :-1]).all()


@pytest.mark.parametrize("separator", [" ", ",", " , "])
def test_a_graph_of_text(own, separator):
    """Rows of 0 and 1; in every round the same."""
    path = own(star(), separator=separator)
    made = graph("file", adjacency=path)
    assert made.num_peers == K - 1
    for round in (0, 3):
        np.testing.assert_array_equal(matrix(made, round=round), star().astype(bool))
    np.testing.assert_array_equal(made.table, star().astype(bool))


@pytest.mark.parametrize("dtype", [bool, int, float])
def test_a_graph_of_npz(tmp_path, dtype):
    """The array `adjacency` of numbers."""
    path = str(tmp_path / "graph.npz")
    np.savez(path, adjacency=np.asfortranarray(star(), dtype), other=np.zeros(3))
    made = graph("file", adjacency=path)
    np.testing.assert_array_equal(matrix(made), star().astype(bool))


def changed(row, column, value):
    table = star()
    table[row, column] = value
    return table


@pytest.mark.parametrize(
    "table, words",
    [
        (star(K - 1), r"is of shape \[11, 11\]; --num_clients=12 needs \[12, 12\]"),
        (star()[:-1], r"is of shape \[11, 12\]"),
        (changed(4, 4, 1), "makes client 4 its own peer; the diagonal must be 0"),
        (changed(5, 3, 2), "has the entry 2 in row 5; write 1 for a peer"),
        (changed(5, 3, -1), "has the entry -1 in row 5"),
        (changed(6, 0, 0), "gives client 6 no peer; set a 1 in row 6"),
    ],
)
def test_bad_graphs(own, tmp_path, table, words):
    """One line with the file, as text and as npz."""
    np.savez(tmp_path / "graph.npz", adjacency=table)
    for path in (own(table), str(tmp_path / "graph.npz")):
        with pytest.raises(ValueError, match=f"--adjacency={path} {words}"):
            graph("file", adjacency=path)


def test_bad_files(own, tmp_path):
    """Ragged, empty, too long, no text, no array, no file."""
    rows = star().tolist()
    rows[2] = rows[2][:-1]
    (tmp_path / "odd.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04")
    np.savez(tmp_path / "words.npz", adjacency=star().astype(str))
    np.savez(tmp_path / "others.npz", graph=star())
    for path, words in (
        (own(rows), "has 11 entries in row 2, 12 in row 0"),
        (own([], "empty.txt"), r"is of shape \[0"),
        (own([[0] * 40_000], "long.txt"), "has 80000 bytes, a graph of .* at most"),
        (own([["yes"]], "words.txt"), "has the entry yes in row 0"),
        (
            str(tmp_path / "odd.bin"),
            "is not text; the name of an npz file ends in .npz",
        ),
        (str(tmp_path / "cut.npz"), "cannot be read"),
        (str(tmp_path / "words.npz"), "holds <U21; numbers 0 and 1 are needed"),
        (str(tmp_path / "others.npz"), "adjacency are needed"),
        (str(tmp_path / "none.npz"), "there is no such file"),
        (str(tmp_path / "none.txt"), "cannot be read: No such file"),
        (str(tmp_path), "is a folder, an npz or text file is expected"),
    ):
        with pytest.raises(ValueError, match=f"--adjacency={path} .*{words}") as error:
            graph("file", adjacency=path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "kind, num_peers, num_clients, words",
    [
        ("random", 30, 30, "--num_peers=30: expected at most 29, .*=30; lower"),
        ("ring", 31, 30, "--num_peers=31: expected at most 29"),
        ("regular", 30, 30, "--num_peers=30: expected at most 29"),
        (
            "regular",
            5,
            15,
            "--num_peers=5: there is no such regular graph of --num_clients=15",
        ),
    ],
)
def test_graphs_that_cannot_be(kind, num_peers, num_clients, words):
    """One line with the flag to change."""
    with pytest.raises(ValueError, match=words):
        graph(kind, num_peers, num_clients)


def test_options_arrive_in_the_graph():
    """All of them, by topology."""
    spec = decentralized.peer_spec(
        decentralized.Peers(
            topology="erdos_renyi", edge_probability=0.4, fixed_graph=True
        )
    )
    assert (spec.topology, spec.edge_probability, spec.is_fixed) == (
        "erdos_renyi",
        0.4,
        True,
    )
    assert decentralized.peer_spec(decentralized.Peers(num_peers=3)).num_peers == 3


def test_a_graph_of_ones_own_code():
    """`PeerSpec.draw` instead of a kind; nobody asks whether it can be."""

    def draw(seed, round, client, num_clients, num_peers):
        peers = np.full((len(client), num_peers), seed + round)
        return peers, np.ones(peers.shape, bool)

    made = topology.make(types.PeerSpec(3, draw=draw), 3)
    peers, mask = made.draw(1, 1, np.arange(3))
    assert made.num_peers == 3 and (peers == 2).all() and mask.all()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (None, "gave NoneType; expected .peers, mask."),
        (np.zeros((2, 3, 1), int), "gave ndarray; expected"),
        ((np.zeros((3, 1)), np.ones((3, 1), bool)), "gave peers float64; expected int"),
        ((np.zeros((3, 2), int), np.ones((3, 1), bool)), r"peers .3, 2. and a mask"),
        ((np.full((3, 1), -1), np.ones((3, 1), bool)), "peers -1..-1; expected client"),
    ],
)
def test_odd_graphs_of_ones_own_code(given, line):
    """One line says what a custom graph gave."""
    spec = types.PeerSpec(1, draw=lambda *_: given)
    with pytest.raises(ValueError, match=line):
        topology.make(spec, 3).draw(0, 1, np.arange(3))
