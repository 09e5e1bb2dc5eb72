"""The memory that is available to this process on its machine and in its cgroups."""

import functools
import os
import pathlib
from collections.abc import Iterator

# For cgroup 2 and 1: (mount, file of the limit, file of the use, line of the cache)
_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def available_bytes(root: pathlib.Path = pathlib.Path("/")) -> int | None:
    """Returns the bytes that can be allocated before the kernel kills or swaps.

    This is the minimum over the machine and every cgroup above the process, None if
    unknown. `root` is the folder of `proc` and `sys`.
    """
    found = [*_machine(root), *_cgroups(root)]
    return min(found, default=None)


def check(num_bytes: int, what: str) -> None:
    """Refuses to read what needs at least `num_bytes` of memory, if less is available.

    Raises ValueError, whose message is a phrase that begins with `what`, a plural.
    """
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise ValueError(
            f"{what} need {in_words(num_bytes)} of memory at least, and "
            f"{in_words(available)} are free"
        )


def in_words(num_bytes: float) -> str:
    """Formats a number of bytes as GiB."""
    return f"{num_bytes / 2**30:,.1f} GiB"


def _machine(root: pathlib.Path) -> Iterator[int]:
    table = _pairs(root / "proc/meminfo")
    if "MemAvailable:" in table:
        yield 1024 * table["MemAvailable:"]
        return
    try:
        # On macOS and old kernels the total memory is better than no bound.
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return


def _cgroups(root: pathlib.Path) -> Iterator[int]:
    for folder, limit_name, use_name, cache_name in _limits(root):
        limit = _number(folder / limit_name)
        if limit is None:
            continue
        # Cached files count as used, but can be reclaimed.
        cache = _pairs(folder / "memory.stat").get(cache_name, 0)
        used = (_number(folder / use_name) or 0) - cache
        yield max(limit - max(used, 0), 0)


@functools.lru_cache(1)
def _limits(root: pathlib.Path) -> list[tuple[pathlib.Path, str, str, str]]:
    """The folders of groups that may have a limit, each with the names of its files.

    Those of a process stay, and looking for them takes longer than reading them.
    """
    lines = _text(root / "proc/self/cgroup").splitlines()
    paths = [line.split(":", 2)[2] for line in lines if line.count(":") >= 2]
    found: dict[tuple[pathlib.Path, str, str, str], None] = {}
    for mount, *names in _CGROUPS:
        for path in paths:
            # In a container the root of the mount may be the process's own group.
            below = pathlib.PurePosixPath(path.lstrip("/"))
            for level in (below, *below.parents):
                found[root / mount / level, *names] = None
    return [one for one in found if (one[0] / one[1]).is_file()]


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _number(path: pathlib.Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _pairs(path: pathlib.Path) -> dict[str, int]:
    """Maps the first word to the number of every line `name number [unit]`."""
    words = (line.split() for line in _text(path).splitlines())
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdecimal()}
