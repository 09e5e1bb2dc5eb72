"""Models as chains of stages. `MODELS` has the values of `--model`."""

import functools
from collections.abc import Callable

from fedjax_pfl import types
from models import cnn, depth, mlp, resnet, text, vgg

# Each factory takes the number of classes and the factor on hidden channels.
MODELS: dict[str, Callable[[int, float], types.Model]] = {
    "mlp": mlp.mlp,
    "fedavg_cnn": cnn.fedavg_cnn,
    "cnn_same": cnn.cnn_same,
    "lenet5": cnn.lenet5,
    "cdkt_mnist": cnn.cdkt_mnist,
    "cdkt_mnist_small": cnn.cdkt_mnist_small,
    "cdkt_cifar": cnn.cdkt_cifar,
    "cdkt_cifar_small": cnn.cdkt_cifar_small,
    "m1": cnn.m1,
    "m2": cnn.m2,
    "uapdfl_cnn": cnn.uapdfl_cnn,
    "convnet": depth.convnet,
    "depth_convnet": depth.depth_convnet,
    "depth_resnet18": depth.depth_resnet18,
    "depth_resnet34": depth.depth_resnet34,
    "resnet18": resnet.resnet18,
    "resnet18_he": resnet.resnet18_he,
    "resnet18_7x7": resnet.resnet18_7x7,
    "resnet34": resnet.resnet34,
    "resnet101": resnet.resnet101,
    "vgg11": vgg.vgg11,
    "vgg11_4096": vgg.vgg11_4096,
    "masked_lm": text.masked_lm,
    "depth_masked_lm": text.depth_masked_lm,
}
# Models of rows of tokens
OF_TEXT = ("masked_lm", "depth_masked_lm")


def make(
    name: str, num_classes: int, width: float = 1.0, level: int = 0
) -> types.Model:
    """The model `name`, the same object each time, so that programs can be shared.

    `width` is `--model_width`, the factor on hidden channels and widths. A model with
    exits keeps its first `level` stages, 0 = all, and one more than all is its last
    exit alone (`one_exit` in `types.Model`).
    """
    return _made(MODELS[name], num_classes, float(width), level)


@functools.lru_cache(maxsize=64)
def _made(
    factory: Callable[[int, float], types.Model],
    num_classes: int,
    width: float,
    level: int,
) -> types.Model:
    if not level:
        return factory(num_classes, width)
    whole = _made(factory, num_classes, width, 0)
    if whole.has_exits and level == len(whole.one_exit.stage_names):
        return whole.one_exit
    return types.truncated(whole, level)


def describe(name: str) -> str:
    """The first line of a model's docstring."""
    return MODELS[name].__doc__.splitlines()[0]
