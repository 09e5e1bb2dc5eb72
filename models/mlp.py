"""A multilayer perceptron for flat inputs, toy studies and fast tests."""

import functools
from typing import Any

from fedjax_pfl import types
from models import stages


def mlp(
    num_classes: int, width: float = 1.0, rate: float = 1.0, scaler: Any = 1.0
) -> types.Model:
    """MLP with hidden widths 128 and 64; takes images and vectors.

    `rate` and `scaler` are those of `at_width` in `types.Model`.
    """
    wide = stages.scaling(width, rate)
    return stages.chain(
        "mlp",
        [
            ("dense1", stages.Dense(wide(128))),
            ("dense2", stages.Dense(wide(64))),
            ("dense3", stages.Dense(num_classes, relu=False)),
        ],
        # Only examples are flattened, and these are never sliced.
        at_width=stages.widths(functools.partial(mlp, num_classes, width), rate),
    )
