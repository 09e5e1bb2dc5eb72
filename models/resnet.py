"""ResNet-18 with batch norm: stem, stage1 to stage4 and fc.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, Table 1
(https://arxiv.org/abs/1512.03385). stage4 ends with the mean over the map, so that what
comes before fc is as wide as its channels. Counts of parameters are for 32x32x3, 10
classes and width 1, without running statistics; a test checks them.
"""

from __future__ import annotations

import functools

from flax import linen as nn

from fedjax_pfl import types
from models import stages

WIDTHS = (64, 128, 256, 512)

# Batch norm in the place of a bias.
normed = functools.partial(stages.Conv, pool=False, bias=False, norm=True)


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is 1x1 where the shape changes.

    Attributes:
        features: Output channels.
        stride: Of the first convolution and the shortcut.
    """

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        mode = {"sample_mask": sample_mask, "train": train}
        first = normed(self.features, 3, stride=self.stride, name="conv1")
        second = normed(self.features, 3, relu=False, name="conv2")
        out = second(first(h, **mode), **mode)
        if self.stride > 1 or h.shape[-1] != self.features:
            shortcut = normed(
                self.features, 1, stride=self.stride, relu=False, name="shortcut"
            )
            h = shortcut(h, **mode)
        return nn.relu(out + h)


def residual_stage(features: int, num_blocks: int, stride: int) -> list[nn.Module]:
    """Residual blocks in a row, the first with `stride`."""
    return [Residual(features, stride if i == 0 else 1) for i in range(num_blocks)]


def _resnet18(
    name: str, stem: list[nn.Module], num_classes: int, widths: list[int]
) -> types.Model:
    blocks = [
        residual_stage(features, 2, 1 if i == 0 else 2)
        for i, features in enumerate(widths)
    ]
    blocks[-1].append(stages.GlobalAverage())
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
    )


def resnet18(num_classes: int, width: float = 1.0) -> types.Model:
    """ResNet-18 for small images, 3x3 stem without a pool: 11,173,962 parameters."""
    widths = [stages.scaling(width)(features) for features in WIDTHS]
    return _resnet18("resnet18", [normed(widths[0], 3)], num_classes, widths)


def resnet18_7x7(num_classes: int, width: float = 1.0) -> types.Model:
    """ResNet-18 with the 7x7/2 stem and 3x3/2 max-pool: 11,181,642 parameters."""
    widths = [stages.scaling(width)(features) for features in WIDTHS]
    stem = [normed(widths[0], 7, stride=2), stages.MaxPool(3)]
    return _resnet18("resnet18_7x7", stem, num_classes, widths)
