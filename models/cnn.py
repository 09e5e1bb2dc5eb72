"""The convolutional networks of the papers, one stage per layer.

Parameter counts are for the given input, 10 classes and width 1, and are tested.
`width` is `--model_width`, which scales hidden layers but not the classes.
"""

from collections.abc import Sequence

from fedjax_pfl import types
from models import stages


def _cnn(
    name: str,
    convs: Sequence[stages.Conv],
    denses: Sequence[stages.Dense],
    num_classes: int,
    width: float,
    *,
    names: tuple[str, str] = ("conv", "dense"),
    initializer: str = "torch",
) -> types.Model:
    """Hidden layers with features scaled by `width`, and an affine map to classes."""
    wide = stages.scaling(width)
    chain = [
        (
            f"{kind}{number}",
            layer.clone(features=wide(layer.features), initializer=initializer),
        )
        for kind, layers in zip(names, (convs, denses), strict=True)
        for number, layer in enumerate(layers, start=1)
    ]
    last = stages.Dense(num_classes, relu=False, initializer=initializer)
    return stages.chain(name, [*chain, (f"{names[1]}{len(denses) + 1}", last)])


def fedavg_cnn(num_classes: int, width: float = 1.0) -> types.Model:
    """FedAvg's CNN, valid padding, as PFLlib has it: 582,026 parameters on 28x28x1."""
    convs = [stages.Conv(32, 5, "VALID"), stages.Conv(64, 5, "VALID")]
    return _cnn("fedavg_cnn", convs, [stages.Dense(512)], num_classes, width)


def cnn_same(num_classes: int, width: float = 1.0) -> types.Model:
    """FedAvg's CNN with same padding: 1,663,370 parameters on 28x28x1."""
    convs = [stages.Conv(32, 5), stages.Conv(64, 5)]
    return _cnn("cnn_same", convs, [stages.Dense(512)], num_classes, width)


def lenet5(num_classes: int, width: float = 1.0) -> types.Model:
    """LeNet-5 with ReLU, as in Flower's niid_bench: 44,426 parameters on 28x28x1."""
    convs = [stages.Conv(6, 5, "VALID"), stages.Conv(16, 5, "VALID")]
    denses = [stages.Dense(120), stages.Dense(84)]
    return _cnn("lenet5", convs, denses, num_classes, width)


def cdkt_mnist(num_classes: int, width: float = 1.0) -> types.Model:
    """CDKT's server and client CNN for (F-)MNIST: 834,922 parameters on 28x28x1."""
    convs = [stages.Conv(32, 5, dropout=0.4)] * 2
    return _cnn("cdkt_mnist", convs, [stages.Dense(512)], num_classes, width)


def cdkt_mnist_small(num_classes: int, width: float = 1.0) -> types.Model:
    """CDKT's heterogeneous (F-)MNIST client, one layer fewer: 3,217,738 parameters."""
    convs = [stages.Conv(32, 5, dropout=0.4)]
    return _cnn("cdkt_mnist_small", convs, [stages.Dense(512)], num_classes, width)


def cdkt_cifar(num_classes: int, width: float = 1.0) -> types.Model:
    """CDKT's server and client CNN for CIFAR: 581,866 parameters on 32x32x3."""
    convs = [stages.Conv(features, 3) for features in (16, 32, 64)]
    denses = [stages.Dense(512), stages.Dense(64, dropout=0.5)]
    return _cnn("cdkt_cifar", convs, denses, num_classes, width)


def cdkt_cifar_small(num_classes: int, width: float = 1.0) -> types.Model:
    """CDKT's heterogeneous CIFAR client: 59,386 parameters on 32x32x3."""
    convs = [stages.Conv(6, 5, "VALID"), stages.Conv(16, 5, "VALID")]
    denses = [stages.Dense(120, dropout=0.5), stages.Dense(64)]
    return _cnn("cdkt_cifar_small", convs, denses, num_classes, width)


def uapdfl_cnn(num_classes: int, width: float = 1.0) -> types.Model:
    """UA-PDFL's CNN: 8,413,642 parameters on 32x32x3."""
    wide = stages.scaling(width)
    # Dropout belongs to the last stage, so that the extractor's output is without it.
    last = [stages.Dropout(0.5), stages.Dense(num_classes, relu=False)]
    return stages.chain(
        "uapdfl_cnn",
        [
            ("conv1", stages.Conv(wide(32), 3, pool=False)),
            ("conv2", stages.Conv(wide(64), 3, dropout=0.25)),
            ("dense1", stages.Dense(wide(512))),
            ("dense2", stages.Sequential(last)),
        ],
    )


def _fedd2s(
    name: str, conv: tuple, dense: tuple, num_classes: int, width: float
) -> types.Model:
    convs = [stages.Conv(features, 3) for features in conv]
    names, denses = ("C", "F"), [*map(stages.Dense, dense)]
    return _cnn(
        *(name, convs, denses, num_classes, width), names=names, initializer="lecun"
    )


def m1(num_classes: int, width: float = 1.0) -> types.Model:
    """FedD2S's M1 (C 8,16,32; F 32,16,Y): 23,146 parameters on 32x32x3."""
    return _fedd2s("m1", (8, 16, 32), (32, 16), num_classes, width)


def m2(num_classes: int, width: float = 1.0) -> types.Model:
    """FedD2S's M2 (C 16,64,128; F 128,32,Y): 353,284 on 32x32x3, 100 classes."""
    return _fedd2s("m2", (16, 64, 128), (128, 32), num_classes, width)
