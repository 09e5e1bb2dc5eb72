"""DepthFL's networks: four stages with an exit after each.

Kim et al., "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023
(https://openreview.net/forum?id=pf8RIZTMU58). The submodel of level d has stages 1 to d
with their exits. The first three exits read the stage's output through an attention map
and a chain of separable convolutions. Parameter counts are for 32x32x3, 10 classes and
width 1, without running statistics, and are tested.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_pfl import execution, types
from models import forms, resnet, stages

# Kim et al. draw every convolution from N(0, 2 / fan_out).
normed = functools.partial(resnet.normed, initializer="he")


def _of_patches(kernel: jax.Array, h: jax.Array, stride: int) -> jax.Array:
    """`_depthwise` as patches x vector for each channel."""
    patches = jnp.stack([*forms.windows(h, 3, stride, "SAME")], axis=1)
    return jnp.einsum("kc,ckhwb->chwb", kernel, patches)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _depthwise(kernel: jax.Array, h: jax.Array, stride: int) -> jax.Array:
    """f32[C, H', W', B] of a kernel f32[9, C] and h f32[C, H, W, B], padded by 1."""
    # Sums of bfloat16 are taken in float32, as in a product.
    wide = kernel.astype(jnp.promote_types(h.dtype, jnp.float32))
    places = zip(wide, forms.windows(h, 3, stride, "SAME"), strict=True)
    return sum(k[:, None, None, None] * seen for k, seen in places).astype(h.dtype)


@_depthwise.defjvp
def _slope_of_depthwise(stride: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (kernel, h), (of_kernel, of_h) = primals, tangents
    # So the gradient of the kernel is one sum of stacked windows instead of nine.
    slope = _of_patches(of_kernel, h, stride)
    return _depthwise(kernel, h, stride), slope + _depthwise(kernel, of_h, stride)


class Depthwise(nn.Module):
    """Separate 3x3 convolution of each channel, padded by 1, without bias.

    Parameters are those of flax's `nn.Conv` with one group per channel. XLA's grouped
    convolution is slow on CPUs, and slower still with one kernel per client. So it is a
    sum over the places of the kernel, and on a CPU, which takes a tenth longer for
    that, patches x vector for each channel.
    """

    stride: int = 1

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        channels = h.shape[-1]
        shape = (3, 3, 1, channels)
        kernel = self.param("kernel", stages.he_normal(9 * channels), shape)
        h = stages.batch_last(h)
        kernel = kernel.reshape(9, channels).astype(h.dtype)
        is_cpu = execution.setting().platform == "cpu"
        convolved = (_of_patches if is_cpu else _depthwise)(kernel, h, self.stride)
        return stages.batch_last(convolved)

    @nn.nowrap
    def macs(self, given, out):
        return 9 * out.size


class SepConv(nn.Module):
    """Two depthwise convolutions, each followed by a pointwise one, a norm and a relu.

    The first has the stride. The channels between the two are as many as the input's.
    """

    features: int
    stride: int = 2

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        mode = {"sample_mask": sample_mask, "train": train}
        channels = h.shape[-1]
        h = Depthwise(self.stride, name="depthwise1")(h)
        h = normed(channels, 1, name="pointwise1")(h, **mode)
        h = Depthwise(name="depthwise2")(h)
        return normed(self.features, 1, name="pointwise2")(h, **mode)


class Upsample(nn.Module):
    """Bilinear x2 upsampling with clamped edges, without `align_corners`."""

    def __call__(self, h, *, sample_mask=None, train=False):
        h = stages.batch_last(h)
        for axis in (1, 2):
            size = h.shape[axis]
            part = functools.partial(jax.lax.slice_in_dim, h, axis=axis)
            before = jnp.concatenate([part(0, 1), part(0, size - 1)], axis)
            after = jnp.concatenate([part(1, size), part(size - 1, size)], axis)
            pairs = jnp.stack([0.75 * h + 0.25 * n for n in (before, after)], axis + 1)
            h = pairs.reshape(*h.shape[:axis], 2 * size, *h.shape[axis + 1 :])
        return stages.batch_last(h)

    @nn.nowrap
    def macs(self, given, out):
        return out.size


class Attention(nn.Module):
    """Multiplies a map by a sigmoid gate, which is computed at half its side."""

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        mode = {"sample_mask": sample_mask, "train": train}
        seen = SepConv(h.shape[-1], name="sepconv")(h, **mode)
        seen = nn.relu(stages.Norm(name="norm")(seen, **mode))
        return h * nn.sigmoid(Upsample()(seen))

    @nn.nowrap
    def macs(self, given, out):
        """The cost of the relu before the upsampling; sigmoid and product are free."""
        return out.size // 4


def _last(num_classes: int) -> list[nn.Module]:
    return [stages.GlobalAverage(), stages.Dense(num_classes, relu=False)]


def _chained(
    name: str,
    trunks: Sequence[Sequence[nn.Module]],
    chains: Sequence[Sequence[int]],
    num_classes: int,
    multiple: int,
    smallest: int,
    at_width: Callable[..., types.Model],
) -> types.Model:
    """Four stages with exits, for images with sides that are multiples of `multiple`.

    `chains` has the output channels of the first three exits' separable convolutions.
    Of the last exit alone, sides must be at least `smallest`.
    """
    names = [f"stage{i}" for i in range(1, 5)]
    exits = [
        [Attention(), *(SepConv(features) for features in chain), *_last(num_classes)]
        for chain in chains
    ]
    exits.append(_last(num_classes))
    model = stages.chain(
        name,
        list(zip(names, map(stages.Sequential, trunks), strict=True)),
        dict(zip(names, map(stages.Sequential, exits), strict=True)),
        at_width=at_width,
    )
    need = f"sides are at least {smallest}"
    one = stages.demanding(model.one_exit, lambda side: side >= smallest, need)
    # A map of an odd side does not come back from half of it.
    need = f"side is a multiple of {multiple}"
    model = stages.demanding(model, lambda side: side % multiple == 0, need)
    return model._replace(one_exit=one)


def _convs(width: float, rate: float = 1.0, scaler: Any = 1.0) -> list[nn.Module]:
    """The ConvNet's four convolutions, all but the last with a pool."""
    widths = map(stages.scaling(width, rate), resnet.WIDTHS)
    return [
        normed(features, 3, pool=i < 3, scaler=scaler)
        for i, features in enumerate(widths)
    ]


def depth_convnet(
    num_classes: int, width: float = 1.0, rate: float = 1.0, scaler: Any = 1.0
) -> types.Model:
    """DepthFL's ConvNet with an exit at each stage: 1,935,848 parameters.

    `rate` and `scaler` are those of `at_width` in `types.Model`. Exits have no scaler.
    """
    one, two, three, _ = map(stages.scaling(width, rate), resnet.WIDTHS)
    trunks = [[conv] for conv in _convs(width, rate, scaler)]
    # Unlike those of the ResNets, these do not widen to the last stage's channels.
    chains = [(one, one), (two,), (three,)]
    made = functools.partial(depth_convnet, num_classes, width)
    about = num_classes, 16, 8, stages.widths(made, rate)
    return _chained("depth_convnet", trunks, chains, *about)


def convnet(
    num_classes: int, width: float = 1.0, rate: float = 1.0, scaler: Any = 1.0
) -> types.Model:
    """DepthFL's ConvNet with one exit: 1,557,066 parameters.

    `rate` and `scaler` are those of `at_width` in `types.Model`.
    """
    *pooled, last = _convs(width, rate, scaler)
    model = stages.chain(
        "convnet",
        [
            *((f"conv{i}", layer) for i, layer in enumerate(pooled, start=1)),
            ("conv4", stages.Sequential([last, stages.GlobalAverage()])),
            ("fc", stages.Dense(num_classes, relu=False)),
        ],
        at_width=stages.widths(functools.partial(convnet, num_classes, width), rate),
    )
    # Three pools must leave at least 1x1.
    return stages.demanding(model, lambda side: side >= 8, "sides are at least 8")


def _resnet(
    name: str,
    num_blocks: Sequence[int],
    num_classes: int,
    width: float,
    rate: float = 1.0,
    scaler: Any = 1.0,
) -> types.Model:
    widths = [stages.scaling(width, rate)(features) for features in resnet.WIDTHS]
    trunks = resnet.residual_stages(widths, num_blocks, "he", scaler)
    trunks[0].insert(0, normed(widths[0], 3, scaler=scaler))
    chains = [widths[i:] for i in (1, 2, 3)]
    made = functools.partial(_resnet, name, num_blocks, num_classes, width)
    about = num_classes, 8, 1, stages.widths(made, rate)
    return _chained(name, trunks, chains, *about)


def depth_resnet18(num_classes: int, width: float = 1.0) -> types.Model:
    """DepthFL's ResNet-18 with an exit at each stage: 12,098,664 parameters."""
    return _resnet("depth_resnet18", resnet.BLOCKS18, num_classes, width)


def depth_resnet34(num_classes: int, width: float = 1.0) -> types.Model:
    """DepthFL's ResNet-34 with an exit at each stage: 22,206,824 parameters."""
    return _resnet("depth_resnet34", resnet.BLOCKS34, num_classes, width)
