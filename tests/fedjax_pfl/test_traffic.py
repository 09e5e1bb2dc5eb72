"""Messages: what counts, and their bytes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import boundary, shapes, traffic, types
from models import stages

MODEL = stages.chain("two", [("a", stages.Dense(3)), ("b", stages.Dense(2, False))])
TASK = types.Task(MODEL, (MODEL,), np.zeros(1), 1, 2, 0, 1, 1, (4,))
KINDS = (types.MessageKind("a", "up", 10**9), types.MessageKind("b", "down", 7))


def test_bytes_are_counted_in_int64():
    """More of them than int32 holds; those of a direction add up."""
    kinds = (*KINDS, types.MessageKind("c", "up", 5))
    total = traffic.cumulative(np.array([5000, 3, 2], np.int32), kinds)
    assert total == {"bytes_up": 5 * 10**12 + 10, "bytes_down": 21}
    assert traffic.cumulative(np.zeros(0), ()) == {"bytes_up": 0, "bytes_down": 0}


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (("a", "down", 7), "two of its messages are called 'a'"),
        (("c", "upload", 7), "message 'c' has the direction 'upload'"),
        (("c", "up", 12.5), "message 'c' has 12.5 bytes"),
        (("c", "up", -1), "message 'c' has -1 bytes"),
    ],
)
def test_kinds_that_cannot_be_counted(kind, line):
    """One line about an algorithm's declaration."""
    traffic.check(KINDS)
    with pytest.raises(ValueError, match=line):
        traffic.check((*KINDS, types.MessageKind(*kind)))


def test_messages_and_bytes_of_each_kind():
    """In Python's integers, however many there are."""
    found = traffic.by_kind(np.array([5000, 3], np.int32), KINDS)
    assert found == {"a": (5000, 5 * 10**12), "b": (3, 21)}
    assert traffic.by_kind(np.zeros(0), ()) == {}


@pytest.mark.parametrize("jit", [False, True])
def test_messages_of_real_rows_count(jit):
    """Per row, or one number for all; in the order of the kinds, others not at all."""
    mask = jnp.array([True, False, True, True])

    def count(mask):
        sent = {
            "b": jnp.array([True, True, False, True]),
            "other": jnp.array([9, 9, 9, 9]),
            "a": jnp.array([4, 100, 0, 1]),
            "every": 2,
        }
        kinds = (*KINDS, types.MessageKind("every", "up", 1))
        return traffic.counted(sent, kinds, mask)

    found = (jax.jit(count) if jit else count)(mask)
    np.testing.assert_array_equal(found, [5, 2, 6])
    assert found.dtype == jnp.int32


def test_large_messages_take_their_time():
    """Beyond int32 too, which numbers of bytes would be in a program."""
    kinds = types.MessageKind("a", "up", 3 * 2**30), types.MessageKind("b", "down", 7)

    @jax.jit
    def lasting(seconds):
        cohort = SimpleNamespace(seconds=seconds, row_mask=True, deadline=np.inf)
        return traffic.lasting({"a": jnp.array([1, 2]), "b": 1}, kinds, cohort)

    found = lasting(jnp.array([5.0, 0.0]))
    np.testing.assert_allclose(found, (2 * 3 * 2**30 + 7) / 1e6, rtol=1e-6)


def test_no_kinds_no_messages():
    """An algorithm that sends nothing."""
    assert traffic.counted({"a": 1}, (), jnp.ones(3, bool)).shape == (0,)


def test_a_kind_that_is_never_sent_is_an_error():
    """Its bytes would be missing without a word."""
    kinds = (types.MessageKind("a", "up", 8),)
    with pytest.raises(ValueError, match="counts a in float32: .* whole numbers"):
        traffic.counted({"a": jnp.array([0.5, 1.0])}, kinds, jnp.ones(2, bool))
    with pytest.raises(ValueError, match="counts no b, which"):
        traffic.counted({"a": 1}, KINDS, jnp.ones(3, bool))


def test_a_whole_model_both_ways():
    """Its bytes down and up."""
    size = shapes.model_bytes(MODEL, (4,))
    assert traffic.model_both_ways(TASK, MODEL) == (
        ("model down", "down", size),
        ("model up", "up", size),
    )


def test_stages_both_ways():
    """Counts and kinds have the same names; bytes of each stage's own."""
    kinds = traffic.stages_both_ways(TASK, MODEL)
    first, second = shapes.stage_bytes(MODEL, (4,))
    assert first != second
    down = boundary.held(jnp.array([2, 1, 0, 2]), 2)
    up = boundary.held(jnp.array([1, 0, 0, 2]), 2)
    sent = traffic.stages_sent(MODEL, down, up)
    assert {kind.name for kind in kinds} == set(sent)
    mask = jnp.array([True, True, True, False])
    total = traffic.cumulative(traffic.counted(sent, kinds, mask), kinds)
    assert total == {"bytes_down": 2 * first + second, "bytes_up": first}
