"""Metrics beside accuracy: against scikit-learn, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import measures

GEN = np.random.default_rng(0)
Y = 4
LABELS = GEN.choice(Y, size=600, p=[0.6, 0.25, 0.15, 0.0]).astype(np.int32)
LOGITS = (GEN.normal(size=(600, Y)) + 1.5 * np.eye(Y)[LABELS]).astype(np.float32)
MASK = GEN.random(600) < 0.9


def value_of(name, batches=4):
    """The value of a measure, summed over batches."""
    measure = measures.NAMES[name]
    parts = zip(
        *(np.split(one, batches) for one in (LOGITS, LABELS, MASK)), strict=True
    )
    size = len(LABELS) // batches
    of = functools.partial(measures.of, (measure,), num_rows=len(LABELS) + 7)
    sums = [jax.jit(of)(*part, first=size * n)[0] for n, part in enumerate(parts)]
    total = jax.tree.map(lambda *leaves: np.sum(leaves, 0, np.float64), *sums)
    found = measure.finish(jax.tree.map(lambda leaf: leaf[None], total))
    return {name: value for name, (value,) in found.items()}


def real():
    """(labels, answers, probabilities) of the rows that count."""
    p = np.asarray(jax.nn.softmax(LOGITS))[MASK]
    return LABELS[MASK], p.argmax(1), p


def test_f1_and_balanced_accuracy_equal_scikit_learn():
    """A class without rows counts in F1 where it is answered, and never in recall."""
    from sklearn import metrics as sklearn_metrics

    labels, answers, _ = real()
    assert 3 in answers and 3 not in labels
    f1 = sklearn_metrics.f1_score(labels, answers, average="macro")
    assert value_of("macro_f1") == {"macro_f1": pytest.approx(f1)}
    recalls = [(answers[labels == one] == one).mean() for one in range(3)]
    found = value_of("balanced_accuracy")
    assert found == {"balanced_accuracy": pytest.approx(np.mean(recalls))}
    by_class = value_of("per_class")
    np.testing.assert_allclose(
        [by_class[f"class{n}_accuracy"] for n in (0, 1, 2)], recalls
    )
    assert np.isnan(by_class["class3_accuracy"])


def test_auc_is_scikit_learns():
    """By ranks, whatever the scale of the logits."""
    from sklearn import metrics as sklearn_metrics

    labels, _, p = real()
    exact = [
        sklearn_metrics.roc_auc_score(labels == one, p[:, one]) for one in range(3)
    ]
    assert value_of("auc")["auc"] == pytest.approx(np.mean(exact), abs=1e-5)


def test_auc_of_answers_without_information():
    """Ties count one half; one class alone has no area."""
    measure = measures.NAMES["auc"]
    labels = np.array([[1, 2, 1, 2, 0, 0], [1, 1, 1, 0, 0, 0]])
    found = measure.finish({"logits": np.zeros((2, 6, 2)), "label": labels})["auc"]
    np.testing.assert_array_equal(found, [0.5, np.nan])


def test_calibration_error_by_hand():
    """The gap of each of 15 bins, weighted by its rows."""
    labels, answers, p = real()
    confidence = p.max(1)
    bins = np.minimum(np.ceil(confidence * 15).astype(int) - 1, 14)
    gaps = [
        abs((answers == labels)[bins == b].mean() - confidence[bins == b].mean())
        * (bins == b).mean()
        for b in np.unique(bins)
    ]
    assert value_of("ece")["ece"] == pytest.approx(sum(gaps), abs=1e-5)


def test_a_confidence_between_two_bins_is_in_the_lower_one():
    """Of five classes: 3/15 exactly and right, and little more and wrong."""
    measure, logits = measures.NAMES["ece"], jnp.zeros((2, 5)).at[1, 0].set(0.1)
    sums = measure.sums(logits, jnp.array([0, 1]), jnp.ones(2, bool))
    assert sums[0].tolist() == [0, 0, 1, 1, *[0] * 11]


def right(logits, labels, mask):
    """Right answers and rows."""
    return jnp.where(mask, logits.argmax(1) == labels, 0).sum(), mask.sum()


def test_metrics_of_clients_and_the_server():
    """The server's, that of all clients' rows, and the mean where it is defined."""
    chosen = measures.chosen(["macro_f1", right, "per_class", "auc", "ece"])
    batches = [(LOGITS[:40], LABELS[:40]), (LOGITS[40:45], LABELS[40:45])]
    batches.append((LOGITS[:0], LABELS[:0]))
    sums = [
        measures.of(chosen, z, y, jnp.ones(len(y), bool), num_rows=40)
        for z, y in batches
    ]
    own = jax.tree.map(lambda *leaves: np.stack(leaves), *sums)
    known = np.array([True, True, False])
    found = {"server": sums[0], "own": own}
    values, of_each = measures.metrics(chosen, found, known)
    hits = [(z.argmax(1) == y) for z, y in batches[:2]]
    assert values["global_right"] == pytest.approx(hits[0].mean())
    assert values["client_right"] == pytest.approx(np.mean([h.mean() for h in hits]))
    both = [np.concatenate(one) for one in zip(*batches, strict=True)]
    together = measures.of(chosen, *both, jnp.ones(45, bool), num_rows=45)[3]
    together = jax.tree.map(lambda leaf: np.asarray(leaf)[None], together)
    (auc,) = chosen[3].finish(together)["auc"]
    assert values["client_auc_pooled"] == pytest.approx(auc)
    pooled = np.concatenate(hits).mean()
    assert values["client_right_pooled"] == pytest.approx(pooled)
    gaps = [measures.NAMES["ece"].finish(one[4][None])["ece"][0] for one in sums[:2]]
    assert values["client_ece"] == pytest.approx(np.mean(gaps), rel=1e-5)
    assert "client_class0_accuracy" not in values
    assert "client_class0_accuracy_pooled" in values
    assert "global_class3_accuracy" not in values  # it does not occur
    names = measures.custom_names(chosen)
    assert names == {"global_right", "client_right", "client_right_pooled"}
    assert set(of_each) == {"macro_f1", "right", "auc", "ece"}
    expected = [*(h.mean() for h in hits), np.nan]
    np.testing.assert_allclose(of_each["right"], expected, rtol=1e-6)
    assert measures.metrics(chosen, {"own": own}, known & False) == ({}, {})


def test_functions_may_name_the_number_of_classes():
    """They are tried with that of the data."""

    def sums(z, y, m):
        return (m[:, None] * (z - jnp.eye(5)[y]) ** 2).sum(), m.sum()

    brier = measures.chosen(measures.listed({"brier": sums}))
    measures.check(brier, 5)
    with pytest.raises(ValueError, match=r"brier fails on logits \[B, 4\]"):
        measures.check(brier, 4)


def test_forms():
    """A text, a list, a function, functions by name."""
    assert measures.chosen("") == ()
    assert [one.name for one in measures.chosen("auc, ece")] == ["auc", "ece"]
    by_name = measures.listed({"hits": right})
    assert [one.name for one in measures.chosen(by_name)] == ["hits"]
    assert [one.name for one in measures.chosen(measures.listed(right))] == ["right"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (5, "expected names, or functions .* got a int"),
        (["f1"], "--eval_metrics=f1: expected one of macro_f1"),
        (["auc", "auc"], "names a metric twice"),
        (["auc", ("auc_pooled", right)], "auc_pooled is also what the value of auc"),
        ([lambda *batch: 1], "is not a name for a metric"),
        ({"auc": right}, "'?auc'? is not a name for a metric"),
        ({"accuracy": right}, "is not a name for a metric .it is that of another"),
        ({"class0_accuracy": right}, "it is that of another"),
        ({1: right}, "1 is not a name for a metric"),
        (["auc", {"a": right}], "expected names, or functions .* got a list"),
        ({"hits": lambda logits: 1}, "hits fails on logits"),
        (
            {"hits": lambda z, y, m: (z.sum(1), m.sum())},
            r"arrays of shapes \[4\], \[\]",
        ),
        ({"hits": lambda z, y, m: z.sum()}, "hits fails on logits"),
        ({"hits": lambda z, y, m: (z.sum(), y.size)}, "counts rows whose mask is F"),
        ({"hits": lambda z, y, m: (z.mean() * m.sum(), m.sum())}, "False beside other"),
        ({"hits": lambda z, y, m: ((z.argmax(-1) == y).sum(), m.sum())}, "are pad"),
    ],
)
def test_what_is_no_metric(given, reason):
    """One line each."""
    with pytest.raises(ValueError, match=reason) as error:
        measures.check(measures.chosen(measures.listed(given)), 5)
    assert "\n" not in str(error.value)
