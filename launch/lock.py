"""One process at a time in a run's folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import socket
from typing import IO

NAME = "run.lock"


class Lock:
    """A file that names its owner: process id and host.

    The kernel's lock on it decides between processes of one machine: it ends with its
    owner, however that ends, so a dead owner's is taken over and nobody can be first
    twice. Between machines that share a disk it may not reach; there the name decides.
    """

    def __init__(self, folder: pathlib.Path):
        self.path = folder / NAME
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            ValueError: another process has it; names the process and its host.
        """
        while self._file is None:
            file = open(self.path, "a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    raise ValueError(self._refusal(_owner(file))) from None
            # Its owner may have removed it between our opening and our locking.
            if not self._is_current(file):
                file.close()
                continue
            owner = _owner(file)
            if owner is not None and owner["host"] != socket.gethostname():
                with file:
                    raise ValueError(
                        f"{self._refusal(owner)}; if that one is dead, remove "
                        f"{self.path}"
                    )
            self._file = file
        self._file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, self._file)
        self._file.flush()

    def release(self) -> None:
        """Gives it back and removes the file; nothing if it is not held."""
        if self._file is not None:
            # First removed, then unlocked: whoever waits sees that its file is gone.
            with contextlib.suppress(OSError):
                self.path.unlink()
            self._file.close()
            self._file = None

    def _is_current(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def _refusal(self, owner: dict | None) -> str:
        who = "another process"
        if owner is not None:
            who = f"process {owner['pid']} on {owner['host']}"
        return f"--workdir={self.path.parent} is in use by {who}"


def _owner(file: IO[str]) -> dict | None:
    """Who wrote the lock; None if it has not been written whole."""
    file.seek(0)
    try:
        owner = json.loads(file.read())
        return {"pid": int(owner["pid"]), "host": str(owner["host"])}
    except (ValueError, KeyError, TypeError):
        return None
