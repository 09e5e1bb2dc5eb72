"""ResNet-18, -34 and -101 with batch norm: stem, stage1 to stage4 and fc.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, Table 1
(https://arxiv.org/abs/1512.03385). stage4 ends with the mean over the map, so that fc's
input is as wide as its channels. Parameter counts are for 32x32x3, 10 classes and width
1, without running statistics, and are tested.
"""

import functools
from collections.abc import Sequence
from typing import Any

from flax import linen as nn

from fedjax_pfl import types
from models import kept, stages

WIDTHS = (64, 128, 256, 512)
# The number of blocks of each stage
BLOCKS18, BLOCKS34, BLOCKS101 = (2, 2, 2, 2), (3, 4, 6, 3), (3, 4, 23, 3)
# Output channels of a bottleneck for each of its inner ones
EXPANSION = 4

# A convolution with batch norm instead of a bias
normed = functools.partial(stages.Conv, pool=False, bias=False, norm=True)


class Block(nn.Module):
    """The attributes and the shortcut that `Residual` and `Bottleneck` share.

    `features` counts the first convolution's channels. `stride` is also the shortcut's.
    `initializer` and `scaler` are as in `stages.Conv`, but the shortcut has no scaler.
    """

    features: int
    stride: int = 1
    initializer: str = "torch"
    scaler: Any = 1.0

    @nn.nowrap
    def conv(self, features, size, **options):
        shared = {"initializer": self.initializer, "scaler": self.scaler}
        return normed(features, size, **shared, **options)

    @nn.nowrap
    def joined(self, h, out, mode):
        """Adds the block's input, through a 1x1 convolution if the shape changes."""
        features = out.shape[-1]
        if self.stride > 1 or h.shape[-1] != features:
            options = {"stride": self.stride, "initializer": self.initializer}
            h = normed(features, 1, relu=False, name="shortcut", **options)(h, **mode)
        return stages.batch_last(kept.kept(stages.batch_last(nn.relu(out + h))))

    @nn.nowrap
    def macs(self, given, out):
        return out.size


class Residual(Block):
    """Two 3x3 convolutions beside a shortcut; the first has the stride."""

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        mode = {"sample_mask": sample_mask, "train": train}
        first = self.conv(self.features, 3, stride=self.stride, name="conv1")
        second = self.conv(self.features, 3, relu=False, name="conv2")
        return self.joined(h, second(first(h, **mode), **mode), mode)


class Bottleneck(Block):
    """Convolutions of 1x1, 3x3 and 1x1 beside a shortcut; the 3x3 has the stride.

    The last has `EXPANSION` times as many channels as the others.
    """

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        mode = {"sample_mask": sample_mask, "train": train}
        first = self.conv(self.features, 1, name="conv1")
        second = self.conv(self.features, 3, stride=self.stride, name="conv2")
        third = self.conv(EXPANSION * self.features, 1, relu=False, name="conv3")
        out = third(second(first(h, **mode), **mode), **mode)
        return self.joined(h, out, mode)


def residual_stages(
    widths: Sequence[int],
    num_blocks: Sequence[int],
    initializer: str = "torch",
    scaler: Any = 1.0,
    block: type[nn.Module] = Residual,
) -> list[list[nn.Module]]:
    """The blocks of each stage. The first block of a later stage halves the map."""
    return [
        [
            block(features, 2 if stage and not place else 1, initializer, scaler)
            for place in range(count)
        ]
        for stage, (features, count) in enumerate(zip(widths, num_blocks, strict=True))
    ]


def _resnet(
    name: str,
    kernel: int,
    num_blocks: Sequence[int],
    initializer: str,
    num_classes: int,
    width: float,
    rate: float = 1.0,
    scaler: Any = 1.0,
    *,
    block: type[nn.Module] = Residual,
) -> types.Model:
    """A ResNet with a 3x3 stem, or with a 7x7 stem of stride 2 and a pool."""
    widths = [stages.scaling(width, rate)(features) for features in WIDTHS]
    options = {"initializer": initializer, "scaler": scaler}
    stem = [normed(widths[0], kernel, stride=1 if kernel == 3 else 2, **options)]
    if kernel == 7:
        stem.append(stages.MaxPool(3))
    blocks = residual_stages(widths, num_blocks, initializer, scaler, block)
    blocks[-1].append(stages.GlobalAverage())
    made = functools.partial(
        *(_resnet, name, kernel, num_blocks, initializer, num_classes, width),
        block=block,
    )
    return stages.chain(
        name,
        [
            ("stem", stages.Sequential(stem)),
            *(
                (f"stage{i}", stages.Sequential(layers))
                for i, layers in enumerate(blocks, start=1)
            ),
            ("fc", stages.Dense(num_classes, relu=False)),
        ],
        at_width=stages.widths(made, rate),
    )


def resnet18(num_classes: int, width: float = 1.0) -> types.Model:
    """ResNet-18 for small images, 3x3 stem without a pool: 11,173,962 parameters."""
    return _resnet("resnet18", 3, BLOCKS18, "torch", num_classes, width)


def resnet18_he(num_classes: int, width: float = 1.0) -> types.Model:
    """ResNet-18 with DepthFL's initialization, normal of variance 2 / fan_out."""
    return _resnet("resnet18_he", 3, BLOCKS18, "he", num_classes, width)


def resnet18_7x7(num_classes: int, width: float = 1.0) -> types.Model:
    """ResNet-18 with the 7x7/2 stem and 3x3/2 max-pool: 11,181,642 parameters."""
    return _resnet("resnet18_7x7", 7, BLOCKS18, "torch", num_classes, width)


def resnet34(num_classes: int, width: float = 1.0) -> types.Model:
    """ResNet-34 for small images, 3x3 stem without a pool: 21,282,122 parameters."""
    return _resnet("resnet34", 3, BLOCKS34, "he", num_classes, width)


def resnet101(num_classes: int, width: float = 1.0) -> types.Model:
    """ResNet-101 for small images, 3x3 stem without a pool: 42,512,970 parameters."""
    given = "resnet101", 3, BLOCKS101, "he", num_classes, width
    return _resnet(*given, block=Bottleneck)
