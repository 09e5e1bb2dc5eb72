"""A multilayer perceptron for flat inputs, toy studies and fast tests."""

from fedjax_pfl import types
from models import stages


def mlp(num_classes: int, width: float = 1.0) -> types.Model:
    """MLP with hidden widths 128 and 64; takes examples of any shape."""
    wide = stages.scaling(width)
    return stages.chain(
        "mlp",
        [
            ("dense1", stages.Dense(wide(128))),
            ("dense2", stages.Dense(wide(64))),
            ("dense3", stages.Dense(num_classes, relu=False)),
        ],
        # Only the examples are flattened, which are never sliced.
        at_width=stages.widths(lambda wide, _: mlp(num_classes, wide), width),
    )
