"""Clients of equal size with class mixes drawn from Dir(alpha).

The mixes rarely match the supply of each class. `DRAWS` are the ways to resolve that.
"""

import numpy as np

from data.partitions import parts

DRAWS = {
    "ipf": "scale all mixes to sizes and supply by iterative proportional fitting",
    "interleaved": "clients in random turn take one example at a time (FedDyn's code)",
    "sequential": "clients one after another; the last get the remaining examples",
    "overlap": "independent draws; an example may belong to several clients",
}
# Many turns are taken at once while no class runs out, and few after one did.
MIN_TURNS, MAX_TURNS = 16, 4096


def ipf(
    mixes: np.ndarray, size: int, supply: np.ndarray, gen: np.random.Generator
) -> np.ndarray:
    """Scales mixes by Sinkhorn, rounds down, and gives the rest by largest fraction."""
    want = mixes + 1e-12
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
            best = int(np.where(left > 0, fraction[client], -1.0).argmax())
            amount[client, best] += 1
            left[best] -= 1
            # The class is now behind all classes that have not been taken.
            fraction[client, best] -= 1e-6 + fraction[client, best]
    return amount


def _sure(take: np.ndarray, is_stuck: np.ndarray, left: np.ndarray) -> int:
    """Counts the turns to take at once: up to the one that empties a class.

    `take` bool[T, Y] has the classes of each turn, `is_stuck` bool[T] the turns that
    need another rule, and `left` int[Y] the remaining examples of each class.
    """
    if not is_stuck.any() and (take.sum(0) < left)[left > 0].all():
        return len(take)
    empties = ((take.cumsum(0) >= left) & (left > 0)).any(1)
    is_last = empties | is_stuck
    first = int(is_last.argmax())
    return first if is_stuck[first] else first + 1


def interleaved(
    mixes: np.ndarray, size: int, supply: np.ndarray, gen: np.random.Generator
) -> np.ndarray:
    """Gives a random client one example at a time, by its mix of remaining classes."""
    amount, left = np.zeros(mixes.shape, int), supply.copy()
    clients = gen.permutation(np.repeat(np.arange(len(mixes)), size))
    draws = gen.random(len(clients))
    begin, width = 0, MIN_TURNS
    while begin < len(clients):
        turns = slice(begin, begin + width)
        chosen, is_stuck = _pick(mixes[clients[turns]], left, draws[turns])
        take = chosen[:, None] == np.arange(len(supply))
        sure = _sure(take, is_stuck, left)
        if not sure:
            # No class of this mix is left, so the supply decides.
            chosen, _ = _pick(left[None].astype(float), left, draws[begin : begin + 1])
            sure = 1
        np.add.at(amount, (clients[begin : begin + sure], chosen[:sure]), 1)
        left -= np.bincount(chosen[:sure], minlength=len(left))
        begin += sure
        width = min(2 * width, MAX_TURNS) if sure == len(take) else MIN_TURNS
    return amount


def _pick(
    mix: np.ndarray, left: np.ndarray, draw: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draws (class int[T], is_stuck bool[T]) from mixes of the remaining classes.

    `mix` f64[T, Y] has fractions of the classes, `left` int[Y] the remaining examples,
    and `draw` f64[T] is in [0, 1). A class without examples is not picked.
    """
    share = np.where(left > 0, mix, 0)
    total = np.cumsum(share, axis=1)
    index = (total <= (draw * total[:, -1])[:, None]).sum(1)
    # Rounding may point past the last remaining class.
    last = mix.shape[1] - 1 - (share[:, ::-1] > 0).argmax(1)
    return np.minimum(index, last), total[:, -1] <= 0


def _fill(
    mix: np.ndarray, size: int, left: np.ndarray, gen: np.random.Generator
) -> np.ndarray:
    """Draws one client's amounts: multinomial, capped by the remaining examples."""
    amount = np.zeros(len(mix), int)
    while (missing := size - amount.sum()) > 0:
        share = np.where(left > amount, mix, 0)
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
) -> parts.Parts:
    """Returns positions of the examples of K clients, N // K for each.

    `labels` is int[N], `alpha` the concentration of the mixes, and `draw` in `DRAWS`.
    """
    classes, supply = np.unique(labels, return_counts=True)
    mixes = gen.dirichlet(np.full(len(classes), alpha), num_clients)
    # A tiny alpha gives 0 / 0, which becomes a client without preferences.
    mixes = np.where(np.isfinite(mixes), mixes, 0)
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
    if draw == "overlap":
        return _independent(amount, pools, gen)
    clients = np.arange(num_clients)
    owner = np.concatenate([np.repeat(clients, column) for column in amount.T])
    used = [pool[:n] for pool, n in zip(pools, amount.sum(0), strict=True)]
    drawn = parts.collect(np.concatenate(used), owner, num_clients)
    return parts.shuffled(drawn, gen)


def _independent(
    amount: np.ndarray, pools: list[np.ndarray], gen: np.random.Generator
) -> parts.Parts:
    """Draws each client's examples from all examples, without replacement."""
    out = []
    for own in amount:
        pieces = [gen.choice(pools[c], own[c], replace=False) for c in own.nonzero()[0]]
        out.append(gen.permutation(np.concatenate(pieces)))
    return parts.Parts(np.concatenate(out), amount.sum(1))
