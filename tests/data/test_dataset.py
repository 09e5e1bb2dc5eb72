"""Images with a black margin, and gray ones in several channels."""

import numpy as np
import pytest

from data import dataset


def source(*shape, dtype=np.uint8, num_rows=3):
    """A data set without a black pixel."""
    image = 1 + np.arange(num_rows * np.prod(shape)).reshape(num_rows, *shape) % 255
    return dataset.Dataset(
        image.astype(dtype), np.arange(num_rows), num_rows - 1, 4, np.arange(num_rows)
    )


@pytest.mark.parametrize(
    "shape, size, before",
    [
        ((28, 28), 32, (2, 2)),
        # Of an odd number the larger half comes behind.
        ((5, 5), 8, (1, 1)),
        ((4, 7), 8, (2, 0)),
        ((7, 4), 9, (1, 2)),
        ((6, 6), 6, (0, 0)),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_images_lie_in_the_middle_of_black(shape, size, before, channels):
    """Every pixel where it was, moved by half of what is missing; 0 around it."""
    given = source(*shape, channels)
    found = dataset.fitted(given, size, 0)
    assert found.image.shape == (3, size, size, channels)
    assert found.image.dtype == np.uint8
    top, left = before
    inside = found.image[:, top : top + shape[0], left : left + shape[1]]
    np.testing.assert_array_equal(inside, given.image)
    assert (found.image > 0).sum() == given.image.size
    behind = size - top - shape[0], size - left - shape[1]
    assert all(0 <= b - a <= 1 for a, b in zip(before, behind, strict=True))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_gray_images_in_several_channels(dtype):
    """The same number in each, also of padded ones; type, labels and owners stay."""
    given = source(5, 4, 1, dtype=dtype)
    found = dataset.fitted(given, 0, 3)
    assert found.image.shape == (3, 5, 4, 3) and found.image.dtype == dtype
    for channel in range(3):
        np.testing.assert_array_equal(found.image[..., channel], given.image[..., 0])
    for size, channels in ((8, 3), (8, 0), (0, 3)):
        both = dataset.fitted(given, size, channels)
        for name in ("label", "num_train", "num_classes", "client"):
            assert getattr(both, name) is getattr(given, name)
    both = dataset.fitted(given, 8, 3).image
    assert both.shape == (3, 8, 8, 3)
    np.testing.assert_array_equal(both[:, 1:6, 2:6], found.image)


def test_what_is_left_as_it_is():
    """Nothing asked for, or nothing to do: colours in as many channels."""
    for given in (source(5, 4, 1), source(7)):
        assert dataset.fitted(given, 0, 0) is given
    for shape, size, channels in (((5, 5, 3), 0, 3), ((6, 6, 1), 6, 1)):
        given = source(*shape)
        found = dataset.fitted(given, size, channels)
        np.testing.assert_array_equal(found.image, given.image)


@pytest.mark.parametrize(
    "shape, size, channels, words",
    [
        ((8, 6, 1), 7, 0, r"--image_size=7 is smaller .*\[8, 6, 1\]; .* 8, or 0"),
        ((6, 8, 1), 7, 0, r"--image_size=7 is smaller .*\[6, 8, 1\]; .* 8, or 0"),
        ((8, 8, 3), 0, 1, "--image_channels=1: the images have 3, only gray"),
        ((8, 8, 2), 9, 3, "--image_channels=3: the images have 2, only gray"),
        ((16,), 32, 0, r"^--image_size=32: .*\[16\]; omit it"),
        ((4, 4), 0, 3, r"^--image_channels=3: .*\[4, 4\]; omit it"),
    ],
)
def test_refused(shape, size, channels, words):
    """One line with the flag, what came and what to change."""
    with pytest.raises(ValueError, match=words):
        dataset.fitted(source(*shape), size, channels)


@pytest.mark.parametrize("kind, most", [("channel", 1e-7), ("pixel", 1e-3)])
def test_columns_in_small_units_are_counted(kind, most):
    """Those that become nearly 0; a constant is none of them."""
    column = np.random.default_rng(0).normal(size=(500, 1))
    units = np.array([most / 9, most / 2, 9 * most, 1, 0])
    _, scale = dataset.normalization(units * column, kind)
    assert dataset.num_hidden(units * column, kind, scale) == 2
    assert ((column.std() * units * scale)[:2] < 0.5).all()
    assert dataset.num_hidden(np.zeros((2, 5), np.uint8), kind, scale) == 0
    assert dataset.num_hidden(column, "none", np.float32(1)) == 0


def test_constants_of_numbers_far_from_zero():
    """The deviation of a rare step on a large number, whose squares have no digit."""
    column = np.full((20_000, 1), 1.6e9)
    column[::1000] += 128
    mean, scale = dataset.normalization(column, "channel")
    assert 1 / scale == pytest.approx([column.std()], rel=1e-4)
    assert mean == pytest.approx([column.mean()])


def test_owners_with_few_train_rows_go_with_all_their_rows():
    """Rows of nobody stay, and the three parts keep their sizes' sense."""
    client = np.array([0, 0, 1, 2, 2, 3] + [3, 3, -1] + [-1, 1], np.int32)
    numbers, label = np.arange(11)[:, None] / 1, np.zeros(11, np.int32)
    source = dataset.Dataset(numbers, label, 6, 1, client, num_val=2)
    found, dropped = dataset.with_large_owners(source, 2)
    assert dropped == {"1": 1, "3": 1} and found.owners == ("0", "2")
    assert found.row.tolist() == found.image[:, 0].tolist() == [0, 1, 3, 4, 8, 9]
    assert found.client.tolist() == [0, 0, 1, 1, -1, -1]
    assert (found.num_train, found.num_test, found.num_val) == (4, 1, 1)
