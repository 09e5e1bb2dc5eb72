"""A small text for tests: lines of words with an order to learn, as in WikiText."""

import pathlib
import zipfile

import numpy as np

from data import dataset, texts

SUBJECTS, VERBS = ("cat", "dog", "bird"), ("sees", "hears", "eats")


def lines(count, seed=0):
    """Lines of five words that follow one another, `the cat sees a bird`."""
    gen = np.random.default_rng(seed)
    return [
        f"the {gen.choice(SUBJECTS)} {gen.choice(VERBS)} a {gen.choice(SUBJECTS)} \n"
        for _ in range(count)
    ]


def write(folder, train=120, test=20):
    """The files of `--dataset=wikitext2` in a folder; 9 words and an unknown one."""
    folder = pathlib.Path(folder)
    for name, count, seed in zip(
        texts.WIKITEXT_FILES, (train, test), (0, 1), strict=True
    ):
        (folder / name).write_text("".join(lines(count, seed)))
    return folder


def pack(folder, archive):
    """The same in the official archive's form."""
    with zipfile.ZipFile(archive, "w") as file:
        for name in texts.WIKITEXT_FILES:
            file.write(folder / name, f"wikitext-2/{name}")


def load(data_dir, length, owners):
    """Seven owners of unequal size, all of whose lines follow one order."""
    sizes = [10, 15, 20, 25, 40, 50, 80]
    words = [line.split() for line in lines(sum(sizes))]
    number = {
        word: n for n, word in enumerate(sorted({w for one in words for w in one}))
    }
    rows = np.array([[number[w] for w in one] for one in words], np.int32)
    client = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return dataset.Dataset(rows, rows, len(rows), len(number), client)


# To be put into `texts.TEXTS`
SMALL = texts.Text(load, 5, "a small text of seven owners", has_owners=True)
