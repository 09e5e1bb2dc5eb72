"""VGG-11 with batch norm, one stage per layer: conv1 to conv8 and dense1 to dense3.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
Recognition", ICLR 2015, configuration A (https://arxiv.org/abs/1409.1556), with a
classifier for small images: five pools reduce images of up to 32x32 to 1x1. A pool
rounds an odd side up (28x28 becomes 14, 7, 4, 2 and 1). Parameter counts are for
32x32x3, 10 classes and width 1, without running statistics, and are tested.
"""

from fedjax_pfl import types
from models import stages

WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
POOLED = (1, 2, 4, 6, 8)


def _vgg11(name: str, hidden: int, num_classes: int, width: float) -> types.Model:
    wide = stages.scaling(width)
    chain = []
    for i, features in enumerate(WIDTHS, start=1):
        layer = stages.Conv(wide(features), 3, pool=False, bias=False, norm=True)
        pool = [stages.MaxPool()] if i in POOLED else []
        chain.append((f"conv{i}", stages.Sequential([layer, *pool])))
    return stages.chain(
        name,
        [
            *chain,
            ("dense1", stages.Dense(wide(hidden), dropout=0.5)),
            ("dense2", stages.Dense(wide(hidden), dropout=0.5)),
            ("dense3", stages.Dense(num_classes, relu=False)),
        ],
    )


def vgg11(num_classes: int, width: float = 1.0) -> types.Model:
    """VGG-11 with batch norm, 512-wide classifier: 9,753,674 parameters on 32x32x3."""
    return _vgg11("vgg11", 512, num_classes, width)


def vgg11_4096(num_classes: int, width: float = 1.0) -> types.Model:
    """VGG-11 with batch norm, 4096-wide classifier: 28,146,762 on 32x32x3."""
    return _vgg11("vgg11_4096", 4096, num_classes, width)
