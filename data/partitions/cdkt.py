"""The users of the CDKT paper, by the generator of its released code.

Its behaviour is reimplemented: 50 users with consecutive labels get ten images per
(user, label) first, then a log-normal amount. The draws use numpy's legacy generator
and Python's `random`, as the released splits do.

Differs from the code: `cdkt` shuffles the data first, so that each seed has other users
and proxy images. `cdkt_code` takes the order of the files, as the code does, and then
the proxy images are the last ones of each class. From those of MNIST's files a net
learns far less than from others (`launch/papers/RESULTS.md`).
"""

import random
from typing import NamedTuple

import numpy as np

from data.partitions import parts
from fedjax_pfl import options

NUM_USERS = 50
KINDS = ("cdkt", "cdkt_code", "cdkt_paper")


class Protocol(NamedTuple):
    """The settings that differ between the paper's data sets.

    Attributes:
        seed: Seed of the draws. The released splits have 1.
        labels_per_user: L.
        stride: The first label of user u is `stride * u mod Y`.
        sigma: Standard deviation of the logarithms of the amounts.
        reserve: Number subtracted from a class's size before it is distributed.
        scale: Factor on the amounts (MNIST types).
        factor, addend: Ranges of the random factor and addend (CIFAR types), or None.
        constant: A second addend, which is not random.
        overlap: Whether first-stage slices share one image with the next (CIFAR-100).
        sort_as_text: Whether users are ordered by their names as text: 0, 1, 10, ...
        random_labels: Whether classes are drawn at random, as in the paper.
        class_sizes: Class sizes that set the amounts, None = those of the pool.
    """

    seed: int = 1
    labels_per_user: int = 2
    stride: int = 1
    sigma: float = 1.0
    reserve: int = 100
    scale: float = 0.4
    factor: tuple[int, int] | None = None
    addend: tuple[int, int] | None = None
    constant: int = 0
    overlap: bool = False
    sort_as_text: bool = False
    random_labels: bool = False
    class_sizes: tuple[int, ...] | None = None


# Images per class of all 70,000 MNIST images, without the proxy fraction of 0.5 %
MNIST_SIZES = (6868, 7837, 6955, 7105, 6789, 6281, 6841, 7256, 6790, 6923)
_CIFAR = Protocol(sigma=2.0, reserve=50, scale=1.0)
PROTOCOLS = {
    "mnist": Protocol(sort_as_text=True),
    "mnist_5k": Protocol(sort_as_text=True, class_sizes=MNIST_SIZES),
    "fashion_mnist": Protocol(scale=0.55),
    "cifar10": _CIFAR._replace(
        labels_per_user=3, factor=(1, 10), addend=(10, 200), constant=200
    ),
    "cifar100": _CIFAR._replace(
        labels_per_user=30, stride=10, factor=(1, 5), addend=(5, 50), overlap=True
    ),
}


def user_labels(protocol: Protocol, num_classes: int) -> np.ndarray:
    """Returns the classes of each user, int[50, L]."""
    users, steps = np.arange(NUM_USERS)[:, None], np.arange(protocol.labels_per_user)
    if not protocol.random_labels:
        return (protocol.stride * users + steps) % num_classes
    gen = np.random.RandomState(protocol.seed)
    drawn = [gen.permutation(num_classes)[: len(steps)] for _ in range(NUM_USERS)]
    return np.stack(drawn)


def slices(class_sizes: np.ndarray, protocol: Protocol) -> list[list[tuple]]:
    """Returns each user's (class, begin, end) slices of each class's images.

    `class_sizes` int[Y] has the images of each class without the proxy rows.
    """
    num_classes = len(class_sizes)
    labels = user_labels(protocol, num_classes).tolist()
    gen, dice = np.random.RandomState(protocol.seed), random.Random(protocol.seed)
    shape = num_classes, NUM_USERS, protocol.labels_per_user
    amounts = gen.lognormal(0, protocol.sigma, shape)
    total = amounts.sum((1, 2), keepdims=True)
    scale_sizes = np.asarray(protocol.class_sizes or class_sizes)
    amounts *= (scale_sizes - protocol.reserve)[:, None, None] / total
    begin = [0] * num_classes
    out: list[list[tuple]] = [[] for _ in range(NUM_USERS)]
    for user in range(NUM_USERS):
        for label in labels[user]:
            end = begin[label] + 10 + protocol.overlap
            out[user].append((label, begin[label], end))
            begin[label] += 10
    for user in range(NUM_USERS):
        for step, label in enumerate(labels[user]):
            # As in the code, // 5 uses only ten of the fifty rows of draws.
            amount = int(amounts[label, user // 5, step])
            if protocol.factor is not None:
                addend = dice.randint(*protocol.addend)
                amount = amount * dice.randint(*protocol.factor) + addend
                amount += protocol.constant
            else:
                amount = int(protocol.scale * amount)
            if begin[label] + amount < class_sizes[label]:
                out[user].append((label, begin[label], begin[label] + amount))
                begin[label] += amount
    return out


def order(protocol: Protocol) -> list[int]:
    """Orders users as the released files do; scenario 1 takes the first ten."""
    users = list(range(NUM_USERS))
    return sorted(users, key=str) if protocol.sort_as_text else users


def split(labels: np.ndarray, protocol: Protocol, num_clients: int) -> parts.Parts:
    """Returns positions in `labels` int[N] of the first `num_clients` users' images."""
    why = "the users of --partition=cdkt"
    options.check_at_most("num_clients", num_clients, NUM_USERS, why)
    num_classes, wanted = int(labels.max()) + 1, protocol.labels_per_user
    why = "the classes of the data"
    options.check_at_most("classes_per_client", wanted, num_classes, why)
    members = [np.flatnonzero(labels == c) for c in range(num_classes)]
    sizes = np.array([len(m) for m in members])
    users = np.bincount(user_labels(protocol, num_classes).ravel(), None, num_classes)
    needed = 10 * users + 1
    if protocol.class_sizes is None:  # amounts are of what is above the reserve
        needed = np.maximum(needed, protocol.reserve)
    if len(short := np.flatnonzero((users > 0) & (sizes < needed))):
        c, kind = short[0], "cdkt_paper" if protocol.random_labels else "cdkt"
        raise ValueError(
            f"--partition={kind} needs {needed[c]} images of class {c}, which has "
            f"{sizes[c]}; take another --partition"
        )
    cuts = slices(sizes, protocol)
    owned = [
        np.concatenate([members[c][begin:end] for c, begin, end in cuts[user]])
        for user in order(protocol)[:num_clients]
    ]
    return parts.Parts(np.concatenate(owned), np.array([len(one) for one in owned]))
