"""Tables that have labels alone, and who owns which of their rows."""

import numpy as np

from data import dataset


def table(counts, num_train=None, client=None):
    """One-pixel images with `counts` rows per class, classes mixed."""
    label = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    label = np.random.default_rng(7).permutation(label)
    num_train = len(label) if num_train is None else num_train
    image = np.zeros((len(label), 1), np.uint8)
    return dataset.Dataset(image, label, num_train, len(counts), client)


def by_client(split):
    """(train, test) rows of each client."""
    pairs = list(zip(split.train.by_client(), split.test.by_client(), strict=True))
    assert pairs, "a loop over no clients compares nothing"
    return pairs


def owned(split):
    """All rows of each client, train and test together."""
    return [np.concatenate(both) for both in by_client(split)]


def all_owned(split):
    """All rows of all clients, sorted."""
    return np.sort(np.concatenate(owned(split)))


def histogram(split, source):
    """int[K, Y]: rows of each class on each client."""
    size = source.num_classes
    return np.stack(
        [np.bincount(source.label[r], minlength=size) for r in owned(split)]
    )
