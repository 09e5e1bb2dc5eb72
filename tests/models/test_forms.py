"""The forms of a convolution are one function, of which shapes choose one."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import execution
from models import forms, pooled, rows, stages


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(("side", "size"), [(1, 5), (2, 6), (3, 7), (4, 5), (5, 6)])
def test_forms_agree(padding, stride, side, size):
    """Outputs and both gradients, for odd and even sides of maps and kernels."""
    gen = np.random.default_rng(side)
    with jax.enable_x64(True):
        h = jnp.asarray(gen.normal(size=(2, size, size + 1, 4)))
        kernel = jnp.asarray(gen.normal(size=(side, side, 2, 3)))

        @jax.jit
        def all_of(h, kernel):
            found = []
            for form in forms.FORMS.values():
                fn = functools.partial(form, stride=stride, padding=padding)
                out, pull = jax.vjp(fn, h, kernel)
                weight = jnp.cos(jnp.arange(out.size).reshape(out.shape))
                found.append((out, *pull(weight.astype(out.dtype))))
            return found

        first, *others = all_of(h, kernel)
        assert first[0].dtype == jnp.float64
        for other in others:
            chex.assert_trees_all_close(other, first, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("channels", "features", "side", "models", "form"),
    [
        (1, 8, 3, 8, "direct"),  # all groups fit into one block
        (1, 32, 5, 8, "flat"),
        (1, 8, 3, 1, "flat"),  # the compiler takes too long on a direct one
        (32, 64, 5, 1, "flat"),
        (32, 64, 5, 8, "direct"),  # a group is a good part of a block
        (32, 64, 5, 100, "direct"),
        (16, 32, 3, 32, "direct"),
        (16, 32, 3, 100, "patches"),
        (1, 8, 3, 100, "patches"),
        (64, 64, 1, 8, "patches"),  # a product without windows
    ],
)
def test_the_rule(channels, features, side, models, form):
    """It depends on shapes; other platforms than a TPU have patches."""
    shapes = (channels, 9, 9, 20), (side, side, channels, features)
    on_tpu = execution.Setting("tpu", models)
    assert forms.chosen(*shapes, on_tpu) == form
    # A batch that fills the lanes
    wide = (channels, 9, 9, 128), *shapes[1:]
    assert forms.chosen(*wide, on_tpu) == {"flat": "patches"}.get(form, form)
    for platform in ("cpu", "gpu"):
        setting = on_tpu._replace(platform=platform)
        assert forms.chosen(*shapes, setting) == "patches"
    assert forms.chosen(*shapes, on_tpu._replace(form="flat")) == "flat"


@pytest.mark.parametrize(
    ("batch", "side", "stride", "one_core", "form"),
    [
        (64, 3, 1, True, "rows"),
        (64, 3, 1, False, "patches"),  # all cores work on one product
        (8, 3, 1, True, "patches"),  # 1.2 MB of patches
        (64, 3, 2, True, "rows"),
        (25, 3, 2, True, "patches"),  # .9 MB, a quarter of those at all places
        (512, 1, 1, True, "patches"),  # the map itself
    ],
)
def test_large_patches_go_by_rows_on_one_core(batch, side, stride, one_core, form):
    """Of a convolution without a pool: 16x16 maps of 16 channels."""
    given, kernel = (16, 16, 16, batch), (side, side, 16, 8)
    setting = execution.Setting("cpu", one_core=one_core)
    assert forms.chosen(given, kernel, setting, stride) == form


def test_rows_have_enough_columns():
    """Not fewer than the kernel has features, and none where no window fits."""
    setting = execution.Setting("cpu", one_core=True)
    few, many = (512, 4, 4, 16), (512, 4, 4, 128)
    assert forms.chosen(few, (3, 3, 512, 64), setting) == "rows"
    assert forms.chosen(few, (3, 3, 512, 65), setting) == "patches"
    assert forms.chosen(many, (3, 3, 512, 512), setting) == "rows"
    assert forms.chosen((16, 4, 4, 1024), (5, 5, 16, 4), setting) == "rows"
    layer, x = stages.Conv(4, 5, padding="VALID", pool=False), jnp.ones((1024, 4, 4, 9))
    with execution.traced_in(setting):
        shape = jax.eval_shape(layer.init_with_output, jax.random.key(0), x)[0].shape
    assert shape == (1024, 0, 0, 4)


@pytest.mark.parametrize(
    ("padding", "stride", "pool", "shape"),
    [
        ("SAME", 1, 1, (1, 2, 9, 10 * 4)),
        ("SAME", 2, 1, (4, 2, 5, 5 * 4)),
        ("VALID", 2, 1, (4, 2, 4, 4 * 4)),
        ("VALID", 1, 2, (4, 2, 3, 4 * 4)),
    ],
)
def test_maps_are_split_without_more_than_the_windows_need(
    padding, stride, pool, shape
):
    """7x8 maps of 2 channels and a batch of 4, and kernels of 3x3."""
    maps, layout, _ = forms.split(jnp.ones((2, 7, 8, 4)), 3, padding, stride, pool)
    assert maps.shape == shape
    last = np.max(layout.places, (0, 1))
    np.testing.assert_array_equal(last[1:] + layout.size, shape[2:])


@pytest.mark.parametrize("form", forms.FORMS)
@pytest.mark.parametrize("size", [(6, 4), (5, 7)])
def test_pools_agree(form, size):
    """On a TPU too: values, and the gradient that equal values share."""
    gen = np.random.default_rng(0)
    h = jnp.asarray(gen.integers(-2, 3, (3, *size, 2)), jnp.float32)

    def both(setting):
        @jax.jit
        def run(h):
            out, pull = jax.vjp(lambda h: forms.pooled(h, form), h)
            return out, *pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

        with execution.traced_in(setting):
            return run(h)

    here = both(execution.Setting())
    chex.assert_trees_all_close(both(execution.Setting("tpu", 2)), here, rtol=1e-6)
    assert here[0].shape == (3, size[0] // 2, size[1] // 2, 2)
    h = h.at[0].set(jnp.inf).at[1].set(-jnp.inf)
    chex.assert_trees_all_equal(
        both(execution.Setting("tpu", 2))[0], both(execution.Setting())[0]
    )


@pytest.mark.parametrize(("length", "columns"), [(24, 4), (26, 13), (23, 23), (7, 7)])
def test_pieces_of_a_row(length, columns, monkeypatch):
    """Some number of them that divides a row, of at least so many columns."""
    monkeypatch.setattr(rows, "COLUMNS", 4)
    layout = rows.Layout((((0, 1, 0), (0, 1, 2)), ((1, 0, 0), (1, 0, 2))), (3, length))
    num_bytes = 4 * 5 * 2 * length
    monkeypatch.setattr(rows, "ROW_BYTES", num_bytes)
    assert layout.windows(5)[1] == length  # small enough
    monkeypatch.setattr(rows, "ROW_BYTES", num_bytes - 1)
    windows, size = layout.windows(5)
    assert size == columns and windows.dtype == np.int32
    expected = [
        [(one, row + at, begin + place) for one, at, place in part]
        for part in layout.places
        for row in range(3)
        for begin in range(0, length, columns)
    ]
    np.testing.assert_array_equal(windows, expected)


@pytest.mark.parametrize(("side", "stride"), [(1, 1), (3, 1), (3, 2)])
def test_pieces_of_rows_agree(side, stride, monkeypatch):
    """Outputs and both gradients, of kernels of several clients."""
    monkeypatch.setattr(rows, "ROW_BYTES", 0)
    monkeypatch.setattr(rows, "COLUMNS", 3)
    gen = np.random.default_rng(0)
    h = jnp.asarray(gen.normal(size=(3, 2, 8, 8, 3)), jnp.float32)
    kernel = jnp.asarray(gen.normal(size=(3, side, side, 2, 5)), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def all_of(form, h, kernel):
        fn = jax.vmap(functools.partial(form, stride=stride, padding="SAME"))
        out, pull = jax.vjp(fn, h, kernel)
        return out, *pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    found = all_of(forms.by_rows, h, kernel)
    chex.assert_trees_all_close(
        found, all_of(forms.patches, h, kernel), rtol=0, atol=1e-4
    )


# Patches at once or row after row, so that each two of side, padding and way meet.
WAYS = ((6, 9), False), ((8, 7), True)


@pytest.mark.parametrize(
    ("padding", "side", "size", "is_by_row"),
    [
        (padding, side, *WAYS[(side + place) % 2])
        for place, padding in enumerate(("SAME", "VALID"))
        for side in (2, 3, 4, 5)
    ],
)
def test_a_pool_in_one_layout_agrees(padding, side, size, is_by_row, monkeypatch):
    """Values and derivatives in both directions, of kernels of several clients.

    Of patches at once, and row after row.
    """
    monkeypatch.setattr(rows, "suits", lambda *_: is_by_row)
    gen = np.random.default_rng(side)
    with jax.enable_x64(True):
        h = jnp.asarray(gen.normal(size=(3, 2, *size, 4)))
        kernel = jnp.asarray(gen.normal(size=(3, side, side, 2, 5)))
        slopes = jnp.sin(h), jnp.cos(kernel)

        def apart(h, kernel):
            out = forms.patches(h, kernel, 1, padding)
            return forms.pooled(out, "patches")

        @functools.partial(jax.jit, static_argnums=0)
        def all_of(fn, h, kernel):
            fn = jax.vmap(fn)
            out, slope = jax.jvp(fn, (h, kernel), slopes)
            weight = jnp.cos(jnp.arange(out.size).reshape(out.shape))

            def total(h, kernel):
                return (weight * fn(h, kernel) ** 2).sum()

            found = jax.jvp(jax.grad(total, (0, 1)), (h, kernel), slopes)
            return out, slope, found

        both = [
            all_of(fn, h, kernel)
            for fn in (lambda h, k: pooled.convolve(h, k, padding), apart)
        ]
        assert both[0][0].dtype == jnp.float64 and both[0][0].size
        chex.assert_trees_all_close(*both, rtol=0, atol=1e-10)
        one = pooled.convolve(h[0], kernel[0], padding)  # outside of any program
        chex.assert_trees_all_close(one, both[0][0][0], rtol=0, atol=1e-10)


def test_equal_values_share_the_gradient_in_one_layout():
    """As those of `forms.pooled`."""
    gen = np.random.default_rng(0)
    h = jnp.asarray(gen.integers(-2, 3, (2, 6, 6, 3)), jnp.float32)
    kernel = jnp.zeros((3, 3, 2, 2), jnp.float32).at[1, 1].set(jnp.eye(2))
    found = []
    for fn in (
        lambda h: pooled.convolve(h, kernel, "SAME"),
        lambda h: forms.pooled(forms.patches(h, kernel, 1, "SAME"), "patches"),
    ):

        @jax.jit
        def run(h, fn=fn):
            out, pull = jax.vjp(fn, h)
            return out, *pull(1.0 + jnp.arange(out.size).reshape(out.shape))

        found.append(run(h))
    chex.assert_trees_all_close(*found, rtol=1e-6)


@pytest.mark.parametrize(
    ("more", "platform", "form", "is_used"),
    [
        ({}, "cpu", "", True),
        ({}, "tpu", "", False),
        ({}, "gpu", "", False),
        ({}, "cpu", "direct", False),
        ({"norm": True}, "cpu", "", False),
        ({"stride": 2}, "cpu", "", False),
        ({"kernel": 1}, "cpu", "", False),
        ({"pool": False}, "cpu", "", False),
        ({"kernel": 5, "padding": "VALID"}, "cpu", "", False),  # a map of one number
    ],
)
def test_where_a_pool_comes_first(more, platform, form, is_used):
    """On a CPU alone, of convolutions that are pooled before all but the bias."""
    layer = stages.Conv(**{"features": 2, "kernel": 3} | more)
    x = jnp.ones((2, 5, 5, 1))
    with execution.traced_in(execution.Setting(platform, form=form)):
        text = str(jax.make_jaxpr(layer.init)(jax.random.key(0), x))
    assert ("cut_windows" in text) == is_used


def test_a_batch_of_none_has_a_shape():
    out = pooled.convolve(jnp.ones((2, 8, 6, 0)), jnp.ones((3, 3, 2, 4)), "SAME")
    assert out.shape == (4, 4, 3, 0)


@pytest.mark.parametrize(
    ("batch", "features", "one_core", "is_by_row"),
    [
        (40, 32, True, True),
        (40, 32, False, False),
        (2, 32, True, False),
        (4, 28, True, True),
        (4, 29, True, False),  # a row has 28 columns
    ],
)
def test_large_layers_go_by_rows_on_one_core(batch, features, one_core, is_by_row):
    """14x14 maps of 32 channels have 627 KB of patches an image."""
    layer, x = stages.Conv(features, 5), jnp.ones((batch, 14, 14, 32))
    with execution.traced_in(execution.Setting("cpu", one_core=one_core)):
        text = str(jax.make_jaxpr(layer.init)(jax.random.key(0), x))
    assert ("rows_times_kernel" in text) == is_by_row
