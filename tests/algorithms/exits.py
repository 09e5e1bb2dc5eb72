"""A network with exits and batch norm; its outputs and gradients by hand, in float64.

Only real rows, loops over stages, no mask anywhere: what the algorithms with levels are
compared with.
"""

import numpy as np
from flax import linen as nn

from models import stages

EPSILON, KEPT = 1e-5, 0.9


class Block(nn.Module):
    """Dense layer without a bias, batch norm, relu."""

    features: int

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        h = h.reshape(len(h), -1)
        h = nn.Dense(self.features, use_bias=False, name="dense")(h)
        norm = stages.Norm(name="norm")
        return nn.relu(norm(h, sample_mask=sample_mask, train=train))


def network(widths=(8, 7, 6), num_classes=4):
    """As many stages as widths, an exit after each."""
    trunks = [(f"s{i}", Block(width)) for i, width in enumerate(widths, start=1)]
    exits = {name: stages.Dense(num_classes, relu=False) for name, _ in trunks}
    return stages.chain("stacked", trunks, exits)


def forward(params, stats, x):
    """Train mode: (logits of every exit, statistics after it, what `backward` needs).

    As many stages as there are parameters; `x` f64[N, D].
    """
    logits, moved, kept = [], [], []
    for stage, running in zip(params, stats, strict=True):
        dense, norm = stage["trunk"]["dense"], stage["trunk"]["norm"]
        h = x @ dense["kernel"]
        size = np.sqrt(h.var(0) + EPSILON)
        unit = (h - h.mean(0)) / size
        out = np.maximum(unit * norm["scale"] + norm["bias"], 0)
        logits.append(out @ stage["exit"]["kernel"] + stage["exit"]["bias"])
        old = running["trunk"]["norm"]
        if len(x) > 1:
            new = {"mean": h.mean(0), "var": h.var(0, ddof=1)}
            old = {k: KEPT * old[k] + (1 - KEPT) * new[k] for k in old}
        moved.append({"trunk": {"norm": old}})
        kept.append((x, size, unit, out))
        x = out
    return logits, tuple(moved), kept


def backward(params, kept, slopes):
    """Gradients of all stages from those to every exit's logits."""
    grads, back = [], 0.0
    for stage, (x, size, unit, out), slope in zip(
        reversed(params), reversed(kept), reversed(slopes), strict=True
    ):
        dense, norm = stage["trunk"]["dense"], stage["trunk"]["norm"]
        back = (back + slope @ stage["exit"]["kernel"].T) * (out > 0)
        of_unit = back * norm["scale"]
        of_h = of_unit - of_unit.mean(0) - unit * (of_unit * unit).mean(0)
        of_h = of_h / size
        trunk = {
            "dense": {"kernel": x.T @ of_h},
            "norm": {"scale": (back * unit).sum(0), "bias": back.sum(0)},
        }
        leave = {"kernel": out.T @ slope, "bias": slope.sum(0)}
        grads.insert(0, {"trunk": trunk, "exit": leave})
        back = of_h @ dense["kernel"].T
    return tuple(grads)
