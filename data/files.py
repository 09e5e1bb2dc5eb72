"""Opens files at paths that a user gives, and at no other place."""

import contextlib
import functools
import gzip
import os
import pathlib
import re
import stat
import tarfile
from collections.abc import Callable, Collection, Iterator
from typing import Any, BinaryIO

from fedjax_pfl import options

# What the parts of a data set may be called; any after the second validates
SPLITS = ("train", "test", "validation", "valid", "val", "dev")
# Words in the names of the parts of a download
_WORDS = {
    *("train", "training", "trainset", "test", "testing", "testset", "dev"),
    *("val", "valid", "validation", "eval", "evaluation", "holdout", "pred"),
}


def are_splits(names: Collection[str], strictly: bool = False) -> bool:
    """Whether all names have words of splits, and not all the same ones.

    Such as seg_train and seg_test, but not test_01 and test_02. `strictly` all else in
    the names is the same, unlike in train and test_tube.
    """
    parts = [re.findall("[a-z]+|[^a-z]+", name.lower()) for name in names]
    words = {frozenset(_WORDS.intersection(one)) for one in parts}
    others = {"".join(x for x in one if x not in _WORDS) for one in parts}
    return all(words) and len(words) > 1 and not (strictly and len(others) > 1)


def is_split(name: str) -> bool:
    """Whether a name is a word of splits alone."""
    return name.lower() in _WORDS


@contextlib.contextmanager
def named(where: str, *kinds: type[Exception], joint: str = ": ") -> Iterator[None]:
    """A context that puts `where`, the name of an input, before its ValueErrors.

    Errors of other `kinds` become such; `joint` is between the two.
    """
    try:
        yield
    except (ValueError, *kinds) as error:
        raise ValueError(f"{where}{joint if where else ''}{error}") from error


def naming(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds an argument `where`, the name with which the function's errors begin."""

    @functools.wraps(function)
    def called(*args: Any, where: str = "dataset", **kwargs: Any) -> Any:
        with named(where):
            return function(*args, **kwargs)

    return called


def check(path: pathlib.Path, expected: str) -> None:
    """Refuses a path that is not a regular file; `expected` is such as `an npz file`.

    Raises a ValueError without the path for a folder, a pipe or a device, and OSError
    if the file is missing or cannot be accessed.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise ValueError(f"is a folder, {expected} is expected")
    if not stat.S_ISREG(mode):
        # Opening a pipe waits for a writer, perhaps forever.
        raise ValueError(f"is a pipe or a device, {expected} is expected")


def reason(error: BaseException) -> str:
    """Why a file that the message names cannot be read, in one line."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return options.reason(error)


def given(path: Any, what: str) -> pathlib.Path:
    """Returns a path given in Python; for other types, a ValueError names `what`."""
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"{what}: expected a path, got a {type(path).__name__}")
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:  # a user whose home is not known
        raise ValueError(f"{what}: {path}: {error}") from error


def here() -> pathlib.Path | None:
    """The folder that relative paths begin in, None if it was deleted."""
    with contextlib.suppress(OSError):
        return pathlib.Path.cwd()
    return None


def since(home: pathlib.Path | None, path: pathlib.Path) -> pathlib.Path:
    """A path that was given in the folder `home`, if the process has moved since."""
    has_moved = home and not path.is_absolute() and here() != home
    return home / path if has_moved else path


@contextlib.contextmanager
def tar_stream(
    path: pathlib.Path, is_packed: bool, mode: str = "r|"
) -> Iterator[tarfile.TarFile]:
    """Opens a tar archive, gzipped or not, whose checksum is compared at the end."""
    with (gzip.open if is_packed else open)(path, "rb") as whole:
        with tarfile.open(fileobj=whole, mode=mode) as archive:
            yield archive
        while whole.read(1 << 20):
            pass


def created(path: pathlib.Path) -> BinaryIO:
    """Creates a file (OSError) in place of what is there, never at a link's target."""
    path.unlink(missing_ok=True)
    return open(path, "xb")


def appended(path: pathlib.Path) -> BinaryIO:
    """Opens a file for appending, created if missing; a link raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o644), "ab")
