"""What is hidden in train and test batches of a text, and its perplexities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import augment, evaluate, scores, types
from tests import counted

V = 50


def data_of(words):
    words = jnp.asarray(np.asarray(words, np.int32))
    rows = types.ClientRows(*map(np.int32, (np.arange(2), [0], [2])))
    parts = types.Partition(rows, rows, ())
    return types.Data(words, words, 0.0, 1.0, parts, num_words=V)


@jax.jit
def of_test(data, rows):
    """`test_batch`, as one program."""
    return data.test_batch(rows)


@jax.jit
def of_train(data, rows, place, key):
    """`train_batch`, as one program."""
    return data.train_batch(rows, place, key)


@pytest.fixture(scope="module")
def data():
    return data_of(np.random.default_rng(0).integers(0, V, (1600, 64)))


def test_how_many_words_are_hidden(data):
    """Of 10^5 positions 15 % are chosen; of these 80, 10 and 10 %."""
    image, label, chosen = map(np.asarray, of_test(data, np.arange(1600)))
    assert abs(float(chosen.mean()) - 0.15) < 0.005
    seen, was = np.asarray(image[chosen]), np.asarray(label[chosen])
    masked, same = seen == V, seen == was
    # A random word is the right one now and then.
    assert abs(masked.mean() - 0.8) < 0.02
    assert abs((~masked & ~same).mean() - 0.1 * (1 - 1 / V)) < 0.02
    assert abs(same.mean() - 0.1 * (1 + 1 / V)) < 0.02
    np.testing.assert_array_equal(image[~chosen], label[~chosen])
    np.testing.assert_array_equal(label, data.label)


def test_test_rows_are_always_the_same(data):
    """By the row alone: not by its place, nor by anything of a run."""
    whole = of_test(data, np.arange(20))
    some = of_test(data, np.array([-1, 7, 3]))
    for one, other in zip(whole, some, strict=True):
        np.testing.assert_array_equal(np.asarray(one)[[7, 3]], np.asarray(other)[1:])


def test_train_rows_are_named_by_position(data):
    """A step's draws differ from the next one's, and not with the batch."""
    rows, place = np.array([5, 9, 2]), np.array([0, 4, 1])
    key, other = jax.random.split(jax.random.key(1))
    image, label = map(np.asarray, of_train(data, rows, place, key)[:2])
    words = np.asarray(data.label)
    np.testing.assert_array_equal(label, words[rows])
    alone, *_ = of_train(data, rows[1:2], place[1:2], key)
    np.testing.assert_array_equal(image[1:2], alone)
    assert (image != np.asarray(of_train(data, rows, place, other)[0])).any()
    assert (image != np.asarray(of_train(data, rows, place[::-1], key)[0])).any()
    np.testing.assert_array_equal(data.gather(rows)[0], words[rows])


def test_chosen_positions_of_train_rows(data):
    """The same hidden words, and with `chosen` where they may be."""
    rows, place, key = np.arange(6), np.arange(6), jax.random.key(1)
    image, _, every = of_train(data, rows, place, key)
    assert every is None
    at_chosen = data.replace(masked_loss="chosen")
    guessed, label, chosen = map(np.asarray, of_train(at_chosen, rows, place, key))
    np.testing.assert_array_equal(image, guessed)
    assert chosen.any() and not chosen.all()
    assert not ((guessed != label) & ~chosen).any()


def test_a_mask_is_no_word():
    """Nor is it drawn as one: four fifths of the chosen positions are hidden."""
    words = np.zeros(100_000, np.int32)
    mask_words = jax.jit(augment.mask_words, static_argnums=2)
    hidden, chosen = map(np.asarray, mask_words(words, jax.random.key(0), 3))
    assert set(hidden.tolist()) == {0, 1, 2, 3}
    assert not hidden[~chosen].any()
    assert (hidden[chosen] == 3).mean() == pytest.approx(0.8, abs=0.012)


def fixed(logits, num_exits):
    """A model that answers every word with the same logits, or an exit with its own."""

    def forward(params, stats, h, *, start=0, stop=None, **mode):
        out = [jnp.broadcast_to(z, (*h.shape, V)) for z in logits]
        return (tuple(out) if num_exits > 1 else out[0]), stats

    names = tuple(f"s{n}" for n in range(num_exits))
    model = types.Model("fixed", names, lambda key, x: ((), ()), forward)
    return model._replace(has_exits=num_exits > 1, takes="tokens")


@pytest.mark.parametrize("num_exits", [1, 3])
def test_perplexities_by_hand(num_exits):
    """exp of a mean over positions, of the ensemble of logits and of each client."""
    gen = np.random.default_rng(0)
    words, logits = gen.integers(0, V, (9, 5)), gen.normal(size=(num_exits, V))
    data = data_of(words)
    test = types.ClientRows(
        np.int32([4, 1, 7, 0, 8, -1, -1, -1]),
        np.int32([0, 3, 4]),
        np.int32([3, 1, 0]),
    )
    data = data.replace(partition=types.Partition(test, test, ()))
    model, empty = fixed(jnp.asarray(logits), num_exits), types.Variables((), ())
    algorithm = types.Algorithm(
        plans=(),
        init=None,
        round=None,
        server=lambda state, data: {"global": (model, empty)},
    )
    state = types.RoundState((), (), jax.random.key(5), np.int32(0))
    words_of = scores.Words()
    scoring = evaluate.Scoring(2, 2, has_train=True, score=words_of)
    given = state, None, data, scoring, types.Execution(1)
    counts = counted.both(algorithm, *given)
    found, of_clients = words_of.metrics(counts, np.array([3, 1, 0]), 5)
    of_client = of_clients["perplexity"]
    _, _, chosen = map(np.asarray, of_test(data, np.arange(9)))

    def surprise(z):
        log_p = z - np.log(np.exp(z).sum())
        return -log_p[words]

    def perplexity(z, rows, where=slice(None)):
        return np.exp(surprise(z)[rows][where].mean())

    union, mean = [4, 1, 7, 0, 8], logits.mean(0)
    expected = {
        "global_perplexity": perplexity(mean, union),
        "masked_perplexity": perplexity(mean, union, chosen[union]),
        "train_perplexity": perplexity(mean, union),
        "client_perplexity": np.mean(
            [perplexity(mean, [4, 1, 7]), perplexity(mean, [0])]
        ),
        "client_perplexity_pooled": perplexity(mean, [4, 1, 7, 0]),
        "client_masked_perplexity": perplexity(
            mean, [4, 1, 7, 0], chosen[[4, 1, 7, 0]]
        ),
        "worst_decile_perplexity": max(
            perplexity(mean, [4, 1, 7]), perplexity(mean, [0])
        ),
        "client_perplexity_std": np.std(
            [perplexity(mean, [4, 1, 7]), perplexity(mean, [0])]
        ),
        "clients_evaluated": 2,
    }
    if num_exits > 1:
        expected["ensemble_perplexity"] = expected["global_perplexity"]
        expected["ensemble_masked_perplexity"] = expected["masked_perplexity"]
        for number, z in enumerate(logits, start=1):
            expected[f"exit{number}_perplexity"] = perplexity(z, union)
            name = f"exit{number}_masked_perplexity"
            expected[name] = perplexity(z, union, chosen[union])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(of_client[0], perplexity(mean, [4, 1, 7]), rtol=1e-5)
    assert np.isnan(of_client[2])

    # At the chosen positions alone
    own = [perplexity(mean, rows, chosen[rows]) for rows in ([4, 1, 7], [0])]
    alone = {name: one for name, one in expected.items() if "masked" in name}
    alone |= {"train_masked_perplexity": expected["masked_perplexity"]}
    alone |= {"worst_decile_masked_perplexity": max(own)}
    alone |= {"client_masked_perplexity_std": np.std(own), "clients_evaluated": 2}
    given, chosen_alone = (np.array([3, 1, 0]), 5), scores.Words("chosen")
    found, of_clients = chosen_alone.metrics(counts, *given)
    of_client = of_clients["perplexity"]
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(of_client, [*own, np.nan], rtol=1e-5)
    # A client without a chosen position has no masked perplexity.
    counts["own"] = counts["own"] * np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])
    found, of_clients = chosen_alone.metrics(counts, *given)
    of_client = of_clients["perplexity"]
    np.testing.assert_allclose(of_client, [own[0], np.nan, np.nan], rtol=1e-5)
    assert found["client_masked_perplexity"] == pytest.approx(own[0], rel=1e-5)
    assert found["clients_evaluated"] == 1


def test_trained_perplexities_are_at_the_chosen_positions():
    """Where those alone are measured."""
    own = np.array([[6.0, 3, 2, 1], [4.0, 2, 3, 1]])
    counts = {"own": own, "trained": own / 2, "known": np.ones(2, bool)}
    for positions, kind, first in (("all", "", 0), ("chosen", "masked_", 2)):
        found, _ = scores.Words(positions).metrics(counts, np.ones(2, int), 2)
        half = own[:, first : first + 2] / 2
        wanted = np.exp(half[:, 0] / np.maximum(half[:, 1], 1)).mean()
        assert found[f"trained_{kind}perplexity"] == pytest.approx(wanted)


def test_without_a_chosen_position_nothing_is_perfect():
    """Of rows so short that none was chosen there is no masked perplexity."""
    own = np.array([[20.0, 10, 0, 0]])
    counts = {"own": own, "known": np.ones(1, bool), "server": {"global": own[None]}}
    found, _ = scores.Words().metrics(counts, np.ones(1, int), 1)
    assert found["client_perplexity"] == pytest.approx(np.exp(2))
    assert not [name for name in found if "masked" in name]


def test_the_worst_tenth_of_perplexities_is_rounded_down():
    surprise = np.linspace(1, 2, 29)
    own = surprise[:, None] * [3, 0, 1, 0] + [0, 3, 0, 1]
    counts = {"own": own, "known": np.ones(29, bool)}
    found, of_client = scores.Words().metrics(counts, np.ones(29, int), 29)
    np.testing.assert_allclose(of_client["perplexity"], np.exp(surprise))
    worst = found["worst_decile_perplexity"]
    assert worst == pytest.approx(np.exp(surprise[-2:]).mean())
