"""One process a folder: refused by name, taken over from the dead."""

import json
import os
import socket
import subprocess
import sys

import pytest

from launch.folder import lock

HOLD = """
import os, pathlib, signal, sys
from launch.folder import lock
held = lock.Lock(pathlib.Path(sys.argv[1]))
held.acquire()
print(os.getpid(), flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_held_and_given_back(tmp_path):
    """The owner's name is inside; the file goes; it can be taken again."""
    one, other = lock.Lock(tmp_path), lock.Lock(tmp_path)
    for taken, refused in ((one, other), (other, one)):
        taken.acquire()
        owner = json.loads((tmp_path / lock.NAME).read_text())
        assert owner == {"pid": os.getpid(), "host": socket.gethostname()}
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"):
            refused.acquire()
        refused.release()  # gives back nothing that it does not hold
        assert (tmp_path / lock.NAME).exists()
        taken.release()
        assert not list(tmp_path.iterdir())


def test_another_process_is_named_until_it_is_dead(tmp_path):
    """Killed without a chance to give back: the lock is taken over."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        pid = int(process.stdout.readline())
        ours = lock.Lock(tmp_path)
        with pytest.raises(
            ValueError, match=f"process {pid} on {socket.gethostname()}"
        ):
            ours.acquire()
        process.communicate("\n")
    assert (tmp_path / lock.NAME).exists()
    ours.acquire()
    assert json.loads((tmp_path / lock.NAME).read_text())["pid"] == os.getpid()
    ours.release()


def test_another_host_is_named(tmp_path):
    """Whether it lives cannot be seen from here: the user is told what to remove."""
    path = tmp_path / lock.NAME
    path.write_text('{"pid": 7, "host": "elsewhere"}')
    with pytest.raises(ValueError, match=f"process 7 on elsewhere.*remove {path}"):
        lock.Lock(tmp_path).acquire()
    assert path.read_text() == '{"pid": 7, "host": "elsewhere"}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"pid": 7, "ho',
        "5",
        '{"pid": "x"}',
        '{"pid": 1e400, "host": "elsewhere"}',
        "[" * 5000,
    ],
)
def test_an_unreadable_lock_is_taken_over(tmp_path, text):
    """Killed between making the file and writing its name."""
    (tmp_path / lock.NAME).write_text(text)
    ours = lock.Lock(tmp_path)
    ours.acquire()
    assert json.loads((tmp_path / lock.NAME).read_text())["pid"] == os.getpid()
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"):
        lock.Lock(tmp_path).acquire()
    ours.release()


def test_a_lock_removed_while_waiting_is_not_ours(tmp_path, monkeypatch):
    """Opened before its owner removed it: the next one is made and locked."""
    first, second = lock.Lock(tmp_path), lock.Lock(tmp_path)
    first.acquire()
    flock, calls = lock.fcntl.flock, []

    def late(*args):
        calls.append(args)
        first.release()
        flock(*args)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    second.acquire()
    assert len(calls) == 2 and (tmp_path / lock.NAME).exists()
    second.release()
