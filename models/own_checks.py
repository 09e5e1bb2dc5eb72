"""Checks of custom models, on a few examples before a run."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import types, widths


def moved(tree: Any) -> Any:
    """Slightly changes arrays, because a last layer of zeros would hide everything."""
    leaves, structure = jax.tree.flatten(tree)
    key = jax.random.key(0)
    leaves = [
        leaf + 0.1 * jax.random.normal(jax.random.fold_in(key, n), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else leaf
        for n, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, leaves)


def is_close(one: Any, other: Any) -> bool:
    """Whether all arrays of two equal structures agree up to rounding, nan included."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(_agree(np.asarray(a), np.asarray(b)) for a, b in pairs)


def _agree(
    a: np.ndarray, b: np.ndarray, share: float = 1e-3, least: float = 1.0
) -> bool:
    """Whether they differ by at most a share of the largest number, or of `least`."""
    size = max(np.abs(np.nan_to_num(a)).max(initial=0), least)
    return np.allclose(a, b, rtol=0, atol=share * size, equal_nan=True)


def is_drawn(model: types.Model, x: np.ndarray) -> bool:
    """Whether first parameters depend on the key; those of a given module do not."""
    one, other = (model.init(jax.random.key(n), x[:1])[0] for n in (0, 1))
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any((np.asarray(a) != np.asarray(b)).any() for a, b in pairs)


def gives_nan(model: types.Model, x: np.ndarray) -> bool:
    """Whether a model's first output for some examples [B, ...] is not finite."""
    variables = types.Variables(*model.init(jax.random.key(0), x))
    out, _ = model.forward(*variables, x)
    return not all(np.isfinite(one).all() for one in jax.tree.leaves(out))


def sums_to_one(model: types.Model, x: np.ndarray) -> bool:
    """Whether outputs are no logits: none below 0, and those of an example sum to 1."""
    params, stats = model.init(jax.random.key(0), x)
    out, _ = model.forward(moved(params), stats, x)
    every = [np.asarray(one, np.float32) for one in jax.tree.leaves(out)]
    return all(
        one.shape[-1] > 1
        and (one >= 0).all()
        and np.allclose(one.sum(-1), 1, atol=1e-3)
        for one in every
    )


def reads_another_row(model: types.Model, x: np.ndarray) -> bool:
    """Whether the last word of rows int[B, T] is taken for the one before it.

    So is an index behind the end of an array, which JAX clamps. A model that tells no
    words apart is none of these. A place has no larger words than the first row there.
    """
    params, stats = model.init(jax.random.key(0), x)
    variables, last = types.Variables(moved(params), stats), int(x.max())
    most = x[:1] if model.takes == "labelled tokens" else np.full_like(x[:1], last)

    def of(word: int) -> np.ndarray:
        out, _ = model.forward(*variables, np.minimum(most, word))
        return np.concatenate([np.ravel(one) for one in jax.tree.leaves(out)])

    before = of(last - 1)
    return bool((of(last) == before).all() and (of(0) != before).any())


def depends_on_neighbours(model: types.Model, x: np.ndarray) -> str:
    """Describes how an example's output depends on the rest of its batch, or gives "".

    Calls a model of `own.chain` in eval mode on normalised examples [B, ...], with
    slightly changed initial parameters and the statistics of one step in train mode.
    """

    @jax.jit
    def changed(x: jax.Array, key: jax.Array) -> types.Variables:
        params, stats = model.init(key, x[:1])
        params = moved(params)
        _, stats = model.forward(params, stats, x, train=True, key=key)
        return types.Variables(params, stats)

    variables = changed(x, jax.random.key(0))
    # A new function, because jax would reuse the trace of the same one.
    forward = jax.jit(lambda *given: model.forward(*given))
    # Both batches have the same size, since other shapes may be rounded differently.
    # Every place of `alone` counts: dropout with a fixed key differs between places.
    alone = forward(*variables, np.repeat(x[:1], len(x), 0))[0]
    among = jax.tree.map(lambda out: out[:1], forward(*variables, x)[0])
    among = jax.tree.map(lambda out: np.repeat(out, len(x), 0), among)
    # A model may give nan for an example, which then must be nan in both batches.
    if is_close(among, alone):
        return ""
    return "depends in eval mode on the other examples of the batch"


def of_training(model: types.Model, x: np.ndarray) -> tuple[bool, bool]:
    """Whether a step in train mode depends on what fills a batch, and moves nothing.

    `x` are a few normalised examples [B, ...], of which the first half are real. Where
    others stand for the padding, outputs of the real ones and statistics should not
    differ. The second is whether the model has statistics, and all stay.
    """
    size = max(len(x) // 2, 1)
    real = np.arange(len(x)) < size

    @jax.jit
    def step(x: jax.Array, key: jax.Array) -> Any:
        params, stats = model.init(key, x[:1])
        mode = {"train": True, "key": key, "sample_mask": jnp.asarray(real)}
        out, new = model.forward(moved(params), stats, x, **mode)
        pairs = zip(*map(jax.tree.leaves, (new, stats)), strict=True)
        stays = [jnp.array_equal(a, b, equal_nan=True) for a, b in pairs]
        return (jax.tree.map(lambda one: one[:size], out), new), stays

    padded = np.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, x[:1])
    (one, stays), (other, _) = (step(rows, jax.random.key(0)) for rows in (x, padded))
    return not is_close(one, other), bool(stays) and all(map(bool, stays))


def name_at(path: tuple[Any, ...]) -> str:
    """The names of a path in a tree, with slashes between them."""
    return "/".join(str(key.key) for key in path if hasattr(key, "key"))


def check_narrower(
    model: types.Model, narrow: types.Model, rate: float, example: jax.ShapeDtypeStruct
) -> None:
    """Refuses a narrower form unless its arrays are leading slices of the model's.

    `narrow` is the form at `rate` in (0, 1], and `example` one batch.

    Raises:
        ValueError: one line.
    """
    line = f"model: at width={rate:g} the function of the width"
    key = jax.eval_shape(jax.random.key, 0)
    wide, small = (jax.eval_shape(one.init, key, example) for one in (model, narrow))
    if jax.tree.structure(wide) != jax.tree.structure(small):
        raise ValueError(
            f"{line} makes other layers than at width=1; only hidden widths may change"
        )
    paths = jax.tree_util.tree_leaves_with_path(wide)
    shapes = [[leaf.shape for leaf in jax.tree.leaves(one)] for one in (wide, small)]
    if rate <= 0.5 and shapes[0] and shapes[0] == shapes[1]:
        raise ValueError(
            f"{line} makes nothing narrower than at width=1; multiply hidden widths by "
            "it"
        )
    for (path, a), b in zip(paths, jax.tree.leaves(small), strict=True):
        if len(a.shape) != len(b.shape) or any(map(operator.gt, b.shape, a.shape)):
            raise ValueError(
                f"{line} gives {name_at(path)} the shape {list(b.shape)}, expected at "
                f"most {list(a.shape)}, as at width=1; multiply hidden widths by it"
            )


def is_same_among_zeros(model: types.Model, narrow: types.Model, x: np.ndarray) -> bool:
    """Whether a narrower form's parameters with zeros around them compute the same.

    That is not so where a norm takes a mean over channels, or where a concatenation
    moves them. `narrow` has leading slices of `model`. `x` is a few normalised examples
    [B, ...].
    """

    @jax.jit
    def outputs(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        variables, whole = _among_zeros(model, narrow, x)
        pair = (narrow, variables), (model, whole)
        # In eval mode, because dropout draws other numbers for other widths.
        alone, among = (one.forward(*given, x)[0] for one, given in pair)
        return alone, among

    pairs = zip(*map(jax.tree.leaves, outputs(x)), strict=True)
    # Rounding in bfloat16 is below a hundredth.
    share = {"share": 0.03, "least": 0.0}
    return all(_agree(np.asarray(a), np.asarray(b), **share) for a, b in pairs)


def _among_zeros(
    model: types.Model, narrow: types.Model, x: jax.Array
) -> tuple[types.Variables, types.Variables]:
    """A narrower form's variables, and the model's with these among zeros."""
    key = jax.random.key(0)
    params, stats = narrow.init(key, x)
    params, (wide, wide_stats) = moved(params), model.init(key, x)
    padded = widths.widened(params, jax.tree.map(jnp.zeros_like, wide))
    return types.Variables(params, stats), types.Variables(padded, wide_stats)


def flattens_maps(model: types.Model, narrow: types.Model, x: np.ndarray) -> bool:
    """Whether a narrower form has other places of a map where the model has channels.

    That is so where a map [H, W, C] or [T, C] is flattened: a leading slice of the next
    kernel then holds some places instead of some channels. The narrower form's
    parameters, with zeros around them, read less of an example in the model than in the
    form, unless a place has read all of it. `narrow` has leading slices of `model`. `x`
    is a few normalised examples.
    """

    def read(one: types.Model, variables: types.Variables) -> jax.Array:
        """The number of values in the images that have an effect."""

        def answers(x: jax.Array) -> jax.Array:
            out = jnp.stack(jax.tree.leaves(one.forward(*variables, x)[0]))
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum()

        return (jax.grad(answers)(x) != 0).sum()

    @jax.jit
    def counts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        variables, whole = _among_zeros(model, narrow, x)
        return read(narrow, variables), read(model, whole)

    in_narrow, in_wide = counts(x)
    return bool(in_wide < 0.9 * in_narrow)
