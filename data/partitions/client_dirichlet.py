"""Clients of equal size whose class mixes are drawn from Dir(alpha).

The mixes rarely fit the supply of each class, so a rule must give in: `DRAWS`.
"""

from __future__ import annotations

import numpy as np

DRAWS = {
    "ipf": "scale all mixes to sizes and supply by iterative proportional fitting",
    "interleaved": "clients in random turn take one example at a time (FedDyn's code)",
    "sequential": "clients one after another; the last get what is left",
    "overlap": "independent draws; an example may belong to several clients",
}


def ipf(
    mixes: np.ndarray, size: int, supply: np.ndarray, gen: np.random.Generator
) -> np.ndarray:
    """Sinkhorn scaling, floored, and the rest given by largest fraction."""
    want = np.where(np.isfinite(mixes), mixes, 0) + 1e-12
    supply_share = supply * (size * len(mixes) / supply.sum())
    for _ in range(500):
        want *= size / want.sum(1, keepdims=True)
        want *= supply_share / want.sum(0)
    want *= size / want.sum(1, keepdims=True)
    amount = np.floor(want).astype(int)
    # Flooring after the last row scaling may overdraw a class by a row or two.
    while (excess := amount.sum(0) - supply).max() > 0:
        full = int(excess.argmax())
        amount[int(amount[:, full].argmax()), full] -= 1
    left = supply - amount.sum(0)
    fraction = want - np.floor(want)
    for client in gen.permutation(len(mixes)):
        while amount[client].sum() < size:
            wish = np.where(left > 0, fraction[client], -1.0)
            best = int(wish.argmax())
            amount[client, best] += 1
            left[best] -= 1
            fraction[client, best] -= 1e-6 + fraction[client, best]
    return amount


def interleaved(
    mixes: np.ndarray, size: int, supply: np.ndarray, gen: np.random.Generator
) -> np.ndarray:
    """One example at a time for a random client, from its mix over what is left."""
    amount, left = np.zeros(mixes.shape, int), supply.copy()
    turns = gen.permutation(np.repeat(np.arange(len(mixes)), size))
    for client, draw in zip(turns, gen.random(len(turns)), strict=True):
        chosen = _pick(mixes[client], left, draw)
        amount[client, chosen] += 1
        left[chosen] -= 1
    return amount


def _pick(mix: np.ndarray, left: np.ndarray, draw: float) -> int:
    """A class by its share of the mix among those left, else by what is left."""
    share = np.where(left > 0, np.nan_to_num(mix), 0)
    if share.sum() <= 0:
        share = left.astype(float)
    total = np.cumsum(share)
    index = int(np.searchsorted(total, draw * total[-1], side="right"))
    # Rounding may point past the last class that is left.
    return min(index, int(np.flatnonzero(share)[-1]))


def _fill(
    mix: np.ndarray, size: int, left: np.ndarray, gen: np.random.Generator
) -> np.ndarray:
    """One client's amounts: multinomial draws, capped by what is left of a class."""
    amount = np.zeros(len(mix), int)
    while (missing := size - amount.sum()) > 0:
        share = np.where(left > amount, np.nan_to_num(mix), 0)
        if share.sum() <= 0:
            share = (left - amount).astype(float)
        drawn = gen.multinomial(missing, share / share.sum())
        amount = np.minimum(amount + drawn, left)
    return amount


def split(
    labels: np.ndarray,
    *,
    num_clients: int,
    alpha: float,
    draw: str,
    gen: np.random.Generator,
) -> list[np.ndarray]:
    """Positions of each client's examples, all of the same number.

    Args:
        labels: int[N].
        num_clients: K; a client gets N // K examples.
        alpha: Concentration of the class mixes.
        draw: One of `DRAWS`.
        gen: The partition's generator.
    """
    classes, supply = np.unique(labels, return_counts=True)
    mixes = gen.dirichlet(np.full(len(classes), alpha), num_clients)
    size = len(labels) // num_clients
    pools = [gen.permutation(np.flatnonzero(labels == c)) for c in classes]
    if draw in ("ipf", "interleaved"):
        rule = ipf if draw == "ipf" else interleaved
        amount = rule(mixes, size, supply, gen)
    else:
        left, amount = supply.copy(), np.zeros(mixes.shape, int)
        for client in range(num_clients):
            amount[client] = _fill(mixes[client], size, left, gen)
            if draw == "sequential":
                left = left - amount[client]
    parts = []
    taken = np.zeros(len(classes), int)
    for client in range(num_clients):
        pieces = []
        for c, count in enumerate(amount[client]):
            if draw == "overlap":
                pieces.append(gen.choice(pools[c], count, replace=False))
            else:
                pieces.append(pools[c][taken[c] : taken[c] + count])
        taken += amount[client]
        parts.append(gen.permutation(np.concatenate(pieces)))
    return parts
