"""How images lie in a user's arrays, and owners of few rows."""

import numpy as np
import pytest

from data import arrays, dataset

GEN = np.random.default_rng(0)
Y = np.arange(6) % 2


def numbers(*shape):
    """Examples uint8 [6, ...]."""
    return GEN.integers(0, 256, (6, *shape), np.uint8)


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
@pytest.mark.parametrize(
    "shape, layout, axes, taken",
    [
        ((8,), "auto", None, ""),
        ((8, 8, 3), "auto", None, "NHWC: H 8, W 8, C 3; --layout=nchw if not"),
        ((3, 4, 4), "auto", None, "NHWC: H 3, W 4, C 4; --layout=nchw if not"),
        ((3, 8, 3), "auto", None, "NHWC: H 3, W 8, C 3"),
        ((2, 8, 8), "auto", None, "NHWC: H 2, W 8, C 8; --layout=nchw if not"),
        ((3, 8, 6), "auto", (0, 2, 3, 1), "NCHW: H 8, W 6, C 3; --layout=nhwc if not"),
        ((1, 5, 5), "auto", (0, 2, 3, 1), "NCHW: H 5, W 5, C 1"),
        ((3, 8, 6), "nhwc", None, ""),
        ((2, 4, 3), "nchw", (0, 2, 3, 1), ""),
        ((8, 6), "auto", (0, 1, 2, None), "gray images; --layout=ntc if"),
        ((8, 6), "nhw", (0, 1, 2, None), ""),
        ((8, 6), "ntc", None, ""),
    ],
)
def test_layouts(dtype, shape, layout, axes, taken):
    """The same numbers in the order of the rooms; what `auto` decides is said."""
    x = numbers(*shape).astype(dtype)
    found = arrays.from_arrays(x, Y, layout=layout)
    wanted = x
    if axes == (0, 2, 3, 1):
        wanted = np.moveaxis(x, 1, -1)
    elif axes is not None:
        wanted = np.expand_dims(x, -1)
    np.testing.assert_array_equal(found.image, wanted.astype(found.image.dtype))
    assert found.image.flags.c_contiguous
    assert len(found.notes) == bool(taken) and taken in "".join(found.notes)


@pytest.mark.parametrize(
    "shape, layout, axes",
    [((8,), "nhwc", 4), ((8, 8), "nchw", 4), ((8,), "ntc", 3), ((8, 8, 1), "nhw", 3)],
)
def test_layouts_of_other_axes(shape, layout, axes):
    """One line with the flag and the shape."""
    with pytest.raises(ValueError, match=f"--layout={layout} is of {axes} axes, x has"):
        arrays.from_arrays(numbers(*shape), Y, layout=layout)


def test_masked_examples():
    """Masked values are refused, and a mask without any is not."""
    x = np.ma.array(numbers(4).astype(float))
    np.testing.assert_array_equal(arrays.from_arrays(x, Y).image, x.data)
    x[2, 1] = np.ma.masked
    with pytest.raises(ValueError, match="x is a masked array with 1 masked values"):
        arrays.from_arrays(x, Y)


def test_names_reach_the_data_set():
    """In the order of the numbers, with a line about it; 0..Y-1 have none."""
    plain = arrays.from_arrays(numbers(4), Y, Y)
    assert plain.classes is plain.owners is None and plain.notes == ()
    words = np.array(["dog", "ant"])
    named = arrays.from_arrays(numbers(4), words[Y], words[1 - Y])
    assert named.classes == named.owners == ("ant", "dog")
    np.testing.assert_array_equal(named.label, 1 - Y)
    np.testing.assert_array_equal(named.client, Y)
    (note,) = named.notes
    assert note == "labels are numbered 0 to 1 in this order: ant, dog"
    turned = dataset.rotated(named._replace(image=numbers(4, 4)), 2)
    assert turned.classes[2:] == ("ant, 90 degrees", "dog, 90 degrees")


def test_small_owners_are_dropped_by_name():
    """Their rows, and how many each has; the others are numbered again."""
    client = np.array(["a", "c", "b", "c", "b", "c"])
    given = arrays.from_arrays(numbers(4), Y, client)
    found, dropped = dataset.with_large_owners(given, 2)
    assert dropped == {"a": 1} and found.owners == ("b", "c")
    np.testing.assert_array_equal(found.client, [1, 0, 1, 0, 1])
    np.testing.assert_array_equal(found.image, given.image[1:])
    found, dropped = dataset.with_large_owners(given, 3)
    assert dropped == {"a": 1, "b": 2} and found.owners == ("c",)
    for least in (0, 1):
        assert dataset.with_large_owners(given, least) == (given, {})
