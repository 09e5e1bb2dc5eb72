"""Models as chains of stages. `MODELS` names what `--model` may be."""

from __future__ import annotations

import functools
from collections.abc import Callable

from fedjax_pfl import types
from models import cnn, mlp

MODELS: dict[str, Callable[[int], types.Model]] = {
    "mlp": mlp.mlp,
    "fedavg_cnn": cnn.fedavg_cnn,
    "cnn_same": cnn.cnn_same,
    "cdkt_mnist": cnn.cdkt_mnist,
    "cdkt_mnist_small": cnn.cdkt_mnist_small,
    "cdkt_cifar": cnn.cdkt_cifar,
    "cdkt_cifar_small": cnn.cdkt_cifar_small,
    "m1": cnn.m1,
    "m2": cnn.m2,
}


def make(name: str, num_classes: int) -> types.Model:
    """The model `name`; the same object each time, so that programs can be shared."""
    return _made(MODELS[name], num_classes)


@functools.lru_cache(maxsize=64)
def _made(factory: Callable[[int], types.Model], num_classes: int) -> types.Model:
    return factory(num_classes)


def describe(name: str) -> str:
    """The first line of a model's docstring."""
    return MODELS[name].__doc__.splitlines()[0]
