"""One process at a time in a run's folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import socket

NAME = "run.lock"


class Lock:
    """A file that names its owner: process id and host.

    The kernel's lock on it decides between processes of one machine: it ends with its
    owner, however that ends, so a dead owner's is taken over and nobody can be first
    twice. Between machines that share a disk it may not reach; there the name decides.
    """

    def __init__(self, folder: pathlib.Path):
        self.path = folder / NAME
        self._file: int | None = None  # its descriptor, while the lock is held

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            ValueError: another process has it; names the process and its host.
        """
        while self._file is None:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._file = self._lock(file)
            finally:
                if self._file is None:
                    os.close(file)
        os.ftruncate(self._file, 0)
        owner = {"pid": os.getpid(), "host": socket.gethostname()}
        os.pwrite(self._file, json.dumps(owner).encode(), 0)

    def release(self) -> None:
        """Gives it back and removes the file; nothing if it is not held."""
        if self._file is not None:
            # First removed, then unlocked: whoever waits sees that its file is gone.
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self._file)
            self._file = None

    def _lock(self, file: int) -> int | None:
        """`file`, if it is ours now; None if it is no longer the one at our path."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(self._refusal(_owner(file))) from None
        # Its owner may have removed it between our opening and our locking.
        try:
            if not os.path.samestat(os.stat(self.path), os.fstat(file)):
                return None
        except FileNotFoundError:
            return None
        owner = _owner(file)
        if owner is not None and owner["host"] != socket.gethostname():
            raise ValueError(
                f"{self._refusal(owner)}; if that one is dead, remove {self.path}"
            )
        return file

    def _refusal(self, owner: dict | None) -> str:
        who = "another process"
        if owner is not None:
            who = f"process {owner['pid']} on {owner['host']}"
        return f"--workdir={self.path.parent} is in use by {who}"


def _owner(file: int) -> dict | None:
    """Who wrote the lock; None if it has not been written whole."""
    try:
        owner = json.loads(os.pread(file, 1000, 0))
        return {"pid": int(owner["pid"]), "host": str(owner["host"])}
    except (ValueError, KeyError, TypeError):
        return None
