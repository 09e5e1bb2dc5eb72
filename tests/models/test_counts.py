"""Parameters, buffers and MACs: DepthFL's Table 1 and layers counted by hand."""

import pytest
from flax import linen as nn

import models
from fedjax_pfl import types
from models import counts

MNIST, CIFAR = (28, 28, 1), (32, 32, 3)


@pytest.mark.parametrize(
    ("name", "num_classes", "parameters", "buffers", "macs"),
    [
        (
            "depth_convnet",
            10,
            (31_434, 178_132, 750_046, 1_935_848),
            (1_024, 2_560, 5_632, 6_656),
            (3_462_794, 23_632_788, 43_681_182, 62_593_448),
        ),
        (
            "depth_resnet18",
            100,
            (479_652, 1_347_336, 3_838_316, 12_283_344),
            (3_712, 8_064, 13_696, 18_816),
            (166_623_332, 310_333_640, 450_320_684, 584_712_592),
        ),
        (
            "depth_resnet34",
            200,
            (604_936, 2_114_768, 9_379_736, 22_596_704),
            (3_968, 9_344, 19_072, 26_240),
            (242_565_320, 537_715_088, 980_136_536, 1_190_126_368),
        ),
    ],
)
def test_levels_of_depthfl(name, num_classes, parameters, buffers, macs):
    """Table 1's depth rows and what a client of each level sends, as integers."""
    found = counts.levels(models.make(name, num_classes), CIFAR)
    assert tuple(zip(*found, strict=True)) == (parameters, buffers, macs)


@pytest.mark.parametrize(
    ("name", "num_classes", "parameters", "macs"),
    [
        (
            "convnet",
            10,
            (98_970, 391_466, 877_498, 1_557_066),
            (4_105_482, 15_288_842, 33_550_090, 58_889_226),
        ),
        (
            "resnet34",
            200,
            (1_359_128, 5_375_336, 12_048_824, 21_379_592),
            (73_575_624, 291_854_536, 654_836_936, 1_162_522_824),
        ),
        (
            "resnet18",
            100,
            (713_076, 2_820_740, 6_323_092, 11_220_132),
            (35_506_788, 140_219_492, 314_138_212, 557_262_948),
        ),
    ],
)
def test_widths_of_heterofl(name, num_classes, parameters, macs):
    """Table 1's width rows."""
    model = models.make(name, num_classes)
    found = [counts.whole(model.at_width(n / 4), CIFAR) for n in (1, 2, 3, 4)]
    assert tuple(count.parameters for count in found) == parameters
    assert tuple(count.macs for count in found) == macs


def test_layers_by_hand():
    """A bias, a relu and a pool, valid padding, and affine maps."""
    found = counts.stages(models.make("fedavg_cnn", 10), MNIST)
    assert [stage.name for stage in found] == ["conv1", "conv2", "dense1", "dense2"]
    assert [stage.output for stage in found] == [
        (12, 12, 32),
        (4, 4, 64),
        (512,),
        (10,),
    ]
    assert [stage.count for stage in found] == [
        (25 * 32 + 32, 0, 24 * 24 * 32 * (25 + 1 + 1 + 1)),
        (25 * 32 * 64 + 64, 0, 8 * 8 * 64 * (25 * 32 + 1 + 1 + 1)),
        (1024 * 512 + 512, 0, 1024 * 512 + 512 + 512),
        (512 * 10 + 10, 0, 512 * 10 + 10),
    ]


def test_stem_and_pools_by_hand():
    """A stride, a norm without bias, and pools that overlap or round up."""
    stem, *_ = counts.stages(models.make("resnet18_7x7", 10), MNIST)
    conv = 14 * 14 * 64 * (49 + 2 + 1)
    assert stem == ("stem", (7, 7, 64), (49 * 64 + 128, 128, conv + 14 * 14 * 64))
    found = counts.stages(models.make("vgg11", 10), MNIST)[3]
    conv = 7 * 7 * 256 * (9 * 256 + 2 + 1)
    assert found.output == (4, 4, 256)
    assert found.count.macs == conv + 7 * 7 * 256


def test_a_level_is_the_truncated_model():
    """The parameters, statistics and work of `types.truncated`."""
    model = models.make("depth_convnet", 10, 1 / 16)
    one, two, three, four = counts.levels(model, (16, 16, 3))
    assert counts.whole(types.truncated(model, 2), (16, 16, 3)) == two
    assert one < two < three < four


def test_a_model_can_be_counted_again():
    """Also where jax remembers the trace."""
    model = models.make("mlp", 10, 1 / 16)
    first = counts.whole(model, (8, 8, 1))
    assert first.macs > 0
    assert counts.whole(model, (8, 8, 1)) == first


# Modules that only call others, or cost nothing by the convention.
FREE = {"Dropout", "SepConv", "Sequential"}
# The ResNets-34 differ from the others in numbers only; they are above. Those of texts
# are counted by layers, of which flax's modules are parts (`test_text_models`).
SMALLER = [
    name
    for name in models.MODELS
    if not name.endswith("34") and name not in models.OF_TEXT
]


@pytest.mark.parametrize("name", SMALLER)
def test_no_module_is_forgotten(name):
    """Whatever a model calls says its cost; each parameter is worth one at least."""
    called = set()

    def note(call, args, kwargs, context):
        called.add(type(context.module))
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        found = counts.stages(models.make(name, 10, 1 / 16), CIFAR)
    assert {kind.__name__ for kind in called if not hasattr(kind, "macs")} <= FREE
    assert min(stage.count.parameters for stage in found) > 0
    assert all(stage.count.macs >= stage.count.parameters for stage in found)
