"""Data sets from a user's arrays: the layout of images and the owners of rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data import dataset, files, labels

# The order of the axes of `x`: examples, height, width, channels; time
LAYOUTS = ("auto", "nhwc", "nchw", "nhw", "ntc")


@files.naming
def from_arrays(
    x: Any,
    y: Any,
    client: Any = None,
    *,
    layout: str = "auto",
    least_classes: int = 2,
    names: tuple[str, str] = ("y", "client"),
    columns: Mapping[str, np.ndarray] | None = None,
    test: tuple[Any, ...] | None = None,
    val: tuple[Any, ...] | None = None,
) -> dataset.Dataset:
    """Makes a data set from a user's arrays.

    Args:
        x: uint8 or float [N, H, W, C], [N, H, W] or [N, D]; in other layouts [N, C, H,
            W] (nchw) or a series [N, T, C] (ntc). Other non-negative integers [N, T]
            are tokens.
        y: Labels [N]: text, bools, integers or whole floats.
        client: The owner of each row [N], of the same types, or None.
        layout: One of `LAYOUTS`; see `laid_out`.
        least_classes: The least number of different labels.
        names: The names of labels and owners in errors.
        columns: The columns of a table's `x` [N, D] by name, as given.
        test, val: Official test and validation rows, (x, y) or (x, y, client) of the
            same kind. Without `client` they belong to no owner.
        where: The name of the arrays in errors, by default `dataset`, "" = none.

    Raises:
        ValueError: one line: what came, what was expected.
    """
    if parts := labels.several(x, y):
        raise ValueError(f"x must be one array, got {parts}")
    x = labels.unmasked(x, "x")
    num_train = len(x) if x.ndim else 0
    has_owner = np.ones(num_train, bool)
    for name, more in (("test", test), ("val", val)):
        if more is not None:
            x, y, client = _with_more(x, y, client, more, name)
            is_new = np.full(len(x) - len(has_owner), len(more) == 3)
            has_owner = np.append(has_owner, is_new)
    _check_kind(x)
    known = labels.classes(y, len(x), names[0], least_classes)
    owned = None if client is None else labels.owners(client, len(x), names[1])
    x, note = laid_out(x, layout)
    image, of_tokens = _converted(x)
    notes = [note, of_tokens]
    if known.names:
        notes.append(
            f"labels are numbered 0 to {known.count - 1} in this order: "
            f"{labels.listed(known.names)}"
        )
    notes += [labels.alike(known.names, "labels")]
    notes += [labels.alike(owned and owned.names, "owners")]
    if x.dtype.kind == "f" and x.dtype.itemsize > 4:
        notes.append(merged(_columns(x) if columns is None else columns))
    made = dataset.Dataset(
        image,
        known.number,
        len(x),
        known.count,
        None if owned is None else owned.number,
        classes=known.names,
        owners=None if owned is None else owned.names,
        notes=tuple(filter(None, notes)),
        columns=None if columns is None else tuple(columns),
    )
    num_val = 0 if val is None else len(val[0])
    return divided(made, num_train, num_val, has_owner)


def _are_tokens(x: np.ndarray) -> bool:
    """Whether whole numbers [N, T] are tokens."""
    if x.dtype.kind not in "iu" or x.dtype == np.uint8 or x.ndim != 2:
        return False
    return not x.size or bool(x.min() >= 0 and x.max() < 2**31)


def _check_kind(x: np.ndarray) -> None:
    """Raises a one-line ValueError for examples of another type or shape."""
    has_axes = x.ndim in (2, 3, 4)
    is_number = x.dtype == np.uint8 or x.dtype.kind == "f" or _are_tokens(x)
    if has_axes and is_number and 0 not in x.shape[1:]:
        return
    is_whole = x.dtype.kind in "biu" and has_axes and x.size
    cure = "; give x.astype(np.float32)" if is_whole else ""
    raise ValueError(
        "x must be uint8 or float of shape [N, H, W, C], [N, H, W] or [N, D] with no "
        f"axis of 0, got {x.dtype} {list(x.shape)}{cure}"
    )


def _converted(x: np.ndarray) -> tuple[np.ndarray, str]:
    """Copies examples as uint8, int32 (tokens) or f32, with a note about tokens."""
    if _are_tokens(x):
        return x.astype(np.int32, order="C"), (
            f"x {x.dtype} {list(x.shape)} is taken as tokens 0 to {x.max()}; give "
            "x.astype(np.float32) if they are numbers"
        )
    if x.dtype == np.uint8:
        # On a CPU jax may use the memory of an array, and a user may write to it.
        return np.array(x, order="C"), ""
    return as_float32(x, "x"), ""


def _columns(x: np.ndarray) -> dict[str, np.ndarray]:
    """The features or channels of examples by name."""
    name = "x[:, {}]" if x.ndim == 2 else "channel {} of x"
    return {name.format(j): x[..., j] for j in range(x.shape[-1])}


def divided(
    made: dataset.Dataset, num_train: int, num_val: int, has_owner: np.ndarray
) -> dataset.Dataset:
    """Tells train, official test and validation rows apart, which follow one another.

    Rows without an owner, of bool[N] `has_owner`, have the client -1 afterwards. Raises
    ValueError for an owner of none but test and validation rows.
    """
    client, notes = made.client, made.notes
    kind = "test or validation" if num_val else "test"
    number = made.label
    untrained = np.setdiff1d(number, number[:num_train]).tolist()
    if untrained:
        names = made.classes or tuple(map(str, range(made.num_classes)))
        only = labels.listed([names[one] for one in untrained])
        notes += (f"labels that only {kind} rows have: {only}",)
    if client is not None:
        owned = np.setdiff1d(client[has_owner], client[:num_train]).tolist()
        if owned:
            names = dataset.owner_names(made)
            only = labels.listed([names[one] for one in owned])
            raise ValueError(
                f"owners that only {kind} rows have: {only}; give them train rows, or "
                "these rows without an owner"
            )
        client = np.where(has_owner, client, -1).astype(np.int32)
    return made._replace(
        num_train=num_train, client=client, notes=notes, num_val=num_val
    )


def _with_more(
    x: np.ndarray, y: Any, client: Any, more: tuple[Any, ...], name: str
) -> tuple[np.ndarray, Any, Any]:
    """Appends official rows `more`, of the argument `name`, to (x, y, client)."""
    both = [x, labels.as_array(y, "y")]
    pair = (*more, *more)[:2]
    if parts := labels.several(*pair):
        raise ValueError(f"{name}: x must be one array, got {parts}")
    others = [labels.unmasked(pair[0], name), labels.as_array(pair[1], name)]
    for what, (one, other) in (("the train rows", both), (name, others)):
        # Joined with other rows they could have the right number together.
        if one.shape[:1] != other.shape[:1]:
            raise ValueError(
                f"{what}: x has the shape {list(one.shape)}, y {list(other.shape)}; "
                "give one label for each row"
            )
    most = 2 if client is None else 3
    for part, one, other in zip("xy", both, others, strict=True):
        is_like = part == "y" or one.dtype.kind == other.dtype.kind
        is_like = is_like and one.shape[1:] == other.shape[1:] and len(other) > 0
        if not 2 <= len(more) <= most or not is_like:
            form = "(x, y)" if client is None else "(x, y) or (x, y, client)"
            raise ValueError(
                f"{name} must be {form} like the train rows, whose {part} is "
                f"{one.dtype} {list(one.shape)}; got {len(more)} arrays with "
                f"{other.dtype} {list(other.shape)}"
            )
    both[1], others[1] = alike(both[1], others[1])
    if client is not None:
        client = labels.as_array(client, "client")
        # Rows without an owner are told apart in `divided`.
        owner = np.repeat(client[:1], len(others[0]))
        if len(more) == 3:
            owner = labels.as_array(more[2], f"{name}, client")
            if owner.shape != others[1].shape:
                raise ValueError(
                    f"{name}: client has the shape {list(owner.shape)}, y "
                    f"{list(others[1].shape)}; give one owner for each row"
                )
        client = np.concatenate(alike(client, owner))
    return *map(np.concatenate, zip(both, others, strict=True)), client


def alike(*every: np.ndarray) -> tuple[np.ndarray, ...]:
    """All as objects if they differ in kind, as numpy would make text of numbers."""
    if len({one.dtype.kind for one in every if one.size}) < 2:
        return every
    return tuple(one.astype(object) for one in every)


def merged(columns: Mapping[str, np.ndarray]) -> str:
    """Describes the columns [N] in which float32 makes different numbers equal, or "".

    Only columns far from zero relative to their range are compared, because among many
    fractions some become equal by chance.
    """
    found = []
    for name, column in columns.items():
        if column.dtype.kind != "O" and column.dtype.itemsize < 3:
            continue
        numbers = column.astype(np.float64)
        low, high = float(numbers.min()), float(numbers.max())
        largest = max(high, -low)
        step = float(np.spacing(np.float32(min(largest, 1e38))))
        if step >= 2 or step > 1e-5 * (high - low):
            before = len(np.unique(column))
            after = len(np.unique(column.astype(np.float32)))
            if after < before:
                found.append(f"{labels.limited(name)} ({before} become {after})")
    if not found:
        return ""
    shown = labels.joined(found[: labels.SHOWN], len(found))
    return (
        f"float32 makes different numbers equal in {shown}; subtract the least, or "
        "scale them"
    )


def taken_as(layout: str, shape: Sequence[int]) -> str:
    """The line about the axes [N, ...] of images, taken as nchw or nhwc."""
    size = dict(zip(layout, shape, strict=True))
    other = "nhwc" if layout == "nchw" else "nchw"
    return (
        f"x {list(shape)} is taken as {layout.upper()}: H {size['h']}, W {size['w']}, "
        f"C {size['c']}; --layout={other} if not"
    )


def laid_out(x: np.ndarray, layout: str) -> tuple[np.ndarray, str]:
    """Converts examples to [N, H, W, C], [N, D], or [N, T, C] for the layout `ntc`.

    With `auto`, [N, H, W] are gray images, and [N, 1, H, W] and [N, 3, H, W] with more
    than four rows and columns are NCHW. The text returned says what `auto` chose, or is
    "". Raises ValueError if the layout has another number of axes.
    """
    shape = list(x.shape)
    if layout == "auto" and x.ndim == 3:
        taken = f"x {shape} is taken as gray images; --layout=ntc if it is a series"
        return x[..., None], taken
    if layout == "auto" and x.ndim == 4:
        is_nchw = shape[1] in (1, 3) and min(shape[2:]) > 4
        note = taken_as("nchw" if is_nchw else "nhwc", shape)
        return x.transpose(0, 2, 3, 1) if is_nchw else x, note
    if layout == "auto":
        return x, ""
    wanted = len(layout)
    if x.ndim != wanted:
        raise ValueError(
            f"--layout={layout} is of {wanted} axes, x has the "
            f"shape {shape}; omit it, or take another"
        )
    if layout == "nchw":
        return x.transpose(0, 2, 3, 1), ""
    return (x[..., None] if layout == "nhw" else x), ""


def squares(x: np.ndarray, layout: str) -> np.ndarray:
    """Returns flat rows [N, D] as square images in a layout, or raises a ValueError."""
    deep = 1 if layout == "nhw" else 3
    side = math.isqrt(x.shape[1] // deep)
    shape = {"nhw": (side, side), "nhwc": (side, side, 3), "nchw": (3, side, side)}
    if side**2 * deep != x.shape[1]:
        raise ValueError(
            f"--layout={layout}: rows of {x.shape[1]} numbers are not square images of "
            f"{deep} channel{'s' * (deep > 1)}; omit it"
        )
    return x.reshape(-1, *shape[layout])


def as_float32(x: np.ndarray, what: str) -> np.ndarray:
    """Converts floats to f32 so that any two have a finite difference.

    Raises a one-line ValueError that begins with `what` for nan, infinity and numbers
    beyond float32's range.
    """
    largest = max(float(x.max()), -float(x.min()))
    if not largest <= float(np.finfo(np.float32).max) / 4:
        odd = f"{largest:.3g}, which is beyond the range of float32; scale it"
        if not np.isfinite(largest):
            odd = "nan or infinity; fill or drop such values"
        raise ValueError(f"{what} holds {odd}")
    return x.astype(np.float32, order="C")
