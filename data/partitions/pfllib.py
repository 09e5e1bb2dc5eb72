"""The clients of PFLlib's tables (github.com/TsingZ0/PFLlib), row by row.

Its script seeds numpy's legacy generator once, and draws from it first the rows of each
client and then which of them train. So does this file: with `--partition_seed=1
--test_split=merged` and 20 clients, clients have the rows that the authors' have.
"""

import numpy as np

from data.partitions import parts
from fedjax_pfl import options

KINDS = ("pfllib_dirichlet", "pfllib_pathological")
MAX_TRIES = 200
# batch / (1 - train share): PFLlib lets a client have its last batch in its test rows.
LEAST = 40


def dirichlet(
    labels: np.ndarray,
    *,
    num_clients: int,
    alpha: float,
    min_examples: int,
    gen: np.random.RandomState,
) -> parts.Parts:
    """Splits each class by Dir(alpha) fractions over clients with less than N / K.

    All is drawn again while a client has fewer than min(40, N / K / 2) rows, or than
    `min_examples`. Returns positions 0..N-1 of labels int[N], of each client class by
    class. Raises ValueError if some client has too few in each of `MAX_TRIES` draws.
    """
    full = len(labels) / num_clients
    least = max(int(min(LEAST, full / 2)), min_examples)
    classes = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    for _ in range(MAX_TRIES):
        size, owner, members = np.zeros(num_clients, int), [], []
        for positions in classes:
            members.append(gen.permutation(positions))
            share = gen.dirichlet(np.full(num_clients, alpha))
            share = np.where(size < full, share, 0)
            if not 0 < share.sum() < np.inf:  # an alpha that float64 does not hold
                break
            cuts = (np.cumsum(share / share.sum()) * len(positions)).astype(int)
            # The last client has what rounding leaves.
            count = np.diff(cuts[:-1], prepend=0, append=len(positions))
            owner.append(np.repeat(np.arange(num_clients), count))
            size += count
        if size.min() >= least and len(owner) == len(classes):
            row = np.concatenate(members)
            return parts.collect(row, np.concatenate(owner), num_clients)
    raise ValueError(
        f"--partition_alpha={alpha:g} leaves clients with fewer than {least} examples "
        f"in {MAX_TRIES} draws of --partition=pfllib_dirichlet; raise it or lower "
        "--num_clients"
    )


def pathological(
    labels: np.ndarray,
    *,
    num_clients: int,
    classes_per_client: int,
    gen: np.random.RandomState,
) -> parts.Parts:
    """Gives clients k = `classes_per_client` classes of the C, in runs of rows.

    Class by class, the first ceil(K k / C) clients that lack a class share it. All but
    the last draw their size between a tenth of an equal share (at least 40 / C) and an
    equal share, and the last has the rest. As classes or clients run out, the last
    clients have fewer than k classes, or the last classes no client. Returns positions
    0..N-1 of labels int[N].

    Raises:
        ValueError: there are fewer than k classes, or too few rows of one.
    """
    classes = np.unique(labels)
    why = "the classes of the data"
    options.check_at_most("classes_per_client", classes_per_client, len(classes), why)
    least = int(min(LEAST, len(labels) / num_clients / 2))
    lacks = np.full(num_clients, classes_per_client)
    most = int(np.ceil(num_clients / len(classes) * classes_per_client))
    owner, members = [], []
    for c in classes:
        chosen, positions = np.flatnonzero(lacks)[:most], np.flatnonzero(labels == c)
        if not len(chosen):  # all clients have their classes
            break
        equal = len(positions) / len(chosen)
        low, high = int(max(equal / 10, least / len(classes))), int(equal)
        if low >= high and len(chosen) > 1:
            raise ValueError(
                f"--partition=pfllib_pathological: {len(chosen)} clients share the "
                f"{len(positions)} rows of a class, too few to draw sizes; lower "
                "--num_clients"
            )
        count = gen.randint(low, max(high, low + 1), len(chosen) - 1)
        count = np.append(count, len(positions) - count.sum())
        owner.append(np.repeat(chosen, count))
        members.append(positions)
        lacks[chosen] -= 1
    return parts.collect(np.concatenate(members), np.concatenate(owner), num_clients)


def divided(
    owned: parts.Parts, gen: np.random.RandomState
) -> tuple[parts.Parts, parts.Parts]:
    """Splits the rows of each client into (floor(3 n / 4) train rows, test rows).

    As scikit-learn's `train_test_split` without a seed, it goes on with the stream from
    which the clients were drawn, and the first rows of a permutation are test rows.
    """
    num_train = 3 * owned.count // 4
    row = np.concatenate([gen.permutation(rows) for rows in owned.by_client()])
    test, train = owned._replace(row=row).divided(
        owned.place < np.repeat(owned.count - num_train, owned.count)
    )
    return train, test
