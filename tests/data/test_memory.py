"""Free memory: what a machine and its cgroups say, on made-up trees of files."""

import pytest

from data import memory

MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\n"}
SECOND = {
    "proc/self/cgroup": "0::/user/me\n",
    "sys/fs/cgroup/user/memory.max": "3000000\n",
    "sys/fs/cgroup/user/memory.current": "1500000\n",
    "sys/fs/cgroup/user/memory.stat": "anon 7\ninactive_file 500000\n",
    "sys/fs/cgroup/user/me/memory.max": "max\n",
    "sys/fs/cgroup/user/me/memory.current": "1400000\n",
}
FIRST = {
    "proc/self/cgroup": "4:memory:/box\n0::/\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "900000\n",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1000000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}
CONTAINER = {
    "proc/self/cgroup": "4:memory:/docker/1f\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "700000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "200000\n",
}


def test_what_does_not_fit_is_said(monkeypatch):
    """A forecast in one phrase; nothing where the free memory is not known."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**30)
    memory.check(2**30, "its arrays")
    expected = "its arrays need 3.0 GiB of memory at least, and 1.0 GiB are free"
    with pytest.raises(ValueError, match=expected):
        memory.check(3 * 2**30, "its arrays")
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    memory.check(2**60, "its arrays")


@pytest.mark.parametrize(
    "files, expected",
    [
        (MACHINE, 4000 * 1024),
        (MACHINE | SECOND, 2_000_000),
        (MACHINE | FIRST, 0),
        (MACHINE | CONTAINER, 500_000),
    ],
    ids=["machine", "cgroup 2", "cgroup 1, full", "cgroup 1 in a container"],
)
def test_the_least_counts(tmp_path, files, expected):
    """Cached files are free; a group above the process binds it too."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory.available_bytes(tmp_path) == expected


def test_without_proc_all_of_the_memory_counts(tmp_path):
    """Where no file tells: what the system says it has, more than is free now."""
    assert memory.available_bytes(tmp_path) >= memory.available_bytes()
