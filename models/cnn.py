"""The convolutional networks of the papers, one stage per layer.

Parameter counts are for the given input, 10 classes and width 1, and are tested.
`width` is `--model_width`, which scales hidden layers but not the classes.
"""

from fedjax_pfl import types
from models import stages


def fedavg_cnn(num_classes: int, width: float = 1.0) -> types.Model:
    """FedAvg's CNN, valid padding: 582,026 parameters on 28x28x1."""
    wide = stages.scaling(width)
    return stages.chain(
        "fedavg_cnn",
        [
            ("conv1", stages.Conv(wide(32), 5, "VALID")),
            ("conv2", stages.Conv(wide(64), 5, "VALID")),
            ("dense1", stages.Dense(wide(512))),
            ("dense2", stages.Dense(num_classes, relu=False)),
        ],
    )


def cnn_same(num_classes: int, width: float = 1.0) -> types.Model:
    """FedAvg's CNN with same padding: 1,663,370 parameters on 28x28x1."""
    wide = stages.scaling(width)
    return stages.chain(
        "cnn_same",
        [
            ("conv1", stages.Conv(wide(32), 5)),
            ("conv2", stages.Conv(wide(64), 5)),
            ("dense1", stages.Dense(wide(512))),
            ("dense2", stages.Dense(num_classes, relu=False)),
        ],
    )


def cdkt_mnist(num_classes: int, width: float = 1.0) -> types.Model:
    """CDKT's server and client CNN for (F-)MNIST: 834,922 parameters on 28x28x1."""
    wide = stages.scaling(width)
    return stages.chain(
        "cdkt_mnist",
        [
            ("conv1", stages.Conv(wide(32), 5, dropout=0.4)),
            ("conv2", stages.Conv(wide(32), 5, dropout=0.4)),
            ("dense1", stages.Dense(wide(512))),
            ("dense2", stages.Dense(num_classes, relu=False)),
        ],
    )


def cdkt_mnist_small(num_classes: int, width: float = 1.0) -> types.Model:
    """CDKT's heterogeneous (F-)MNIST client, one layer fewer: 3,217,738 parameters."""
    wide = stages.scaling(width)
    return stages.chain(
        "cdkt_mnist_small",
        [
            ("conv1", stages.Conv(wide(32), 5, dropout=0.4)),
            ("dense1", stages.Dense(wide(512))),
            ("dense2", stages.Dense(num_classes, relu=False)),
        ],
    )


def cdkt_cifar(num_classes: int, width: float = 1.0) -> types.Model:
    """CDKT's server and client CNN for CIFAR: 581,866 parameters on 32x32x3."""
    wide = stages.scaling(width)
    return stages.chain(
        "cdkt_cifar",
        [
            ("conv1", stages.Conv(wide(16), 3)),
            ("conv2", stages.Conv(wide(32), 3)),
            ("conv3", stages.Conv(wide(64), 3)),
            ("dense1", stages.Dense(wide(512))),
            ("dense2", stages.Dense(wide(64), dropout=0.5)),
            ("dense3", stages.Dense(num_classes, relu=False)),
        ],
    )


def cdkt_cifar_small(num_classes: int, width: float = 1.0) -> types.Model:
    """CDKT's heterogeneous CIFAR client: 59,386 parameters on 32x32x3."""
    wide = stages.scaling(width)
    return stages.chain(
        "cdkt_cifar_small",
        [
            ("conv1", stages.Conv(wide(6), 5, "VALID")),
            ("conv2", stages.Conv(wide(16), 5, "VALID")),
            ("dense1", stages.Dense(wide(120), dropout=0.5)),
            ("dense2", stages.Dense(wide(64))),
            ("dense3", stages.Dense(num_classes, relu=False)),
        ],
    )


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
    wide = stages.scaling(width)
    layers = [
        (f"C{i}", stages.Conv(wide(features), 3, initializer="lecun"))
        for i, features in enumerate(conv, start=1)
    ]
    layers += [
        (f"F{i}", stages.Dense(wide(features), initializer="lecun"))
        for i, features in enumerate(dense, start=1)
    ]
    layers.append(("F3", stages.Dense(num_classes, relu=False, initializer="lecun")))
    return stages.chain(name, layers)


def m1(num_classes: int, width: float = 1.0) -> types.Model:
    """FedD2S's M1 (C 8,16,32; F 32,16,Y): 23,146 parameters on 32x32x3."""
    return _fedd2s("m1", (8, 16, 32), (32, 16), num_classes, width)


def m2(num_classes: int, width: float = 1.0) -> types.Model:
    """FedD2S's M2 (C 16,64,128; F 128,32,Y): 353,284 on 32x32x3, 100 classes."""
    return _fedd2s("m2", (16, 64, 128), (128, 32), num_classes, width)
