"""One process at a time in a run's folder."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket

from data import labels
from fedjax_pfl import json_text

NAME = "run.lock"


class Held(ValueError):
    """Another process holds the lock."""


class Lock:
    """A file that names its owner by process id and host.

    The kernel's lock on the file decides between processes of one machine. It ends with
    its owner, so that the lock of a dead process can be taken. Between machines that
    share a disk it may not work, so there the name decides.
    """

    def __init__(self, folder: pathlib.Path):
        self.path = folder / NAME
        self._file: int | None = None  # its descriptor, while the lock is held

    def acquire(self) -> None:
        """Takes the lock and creates the folder; `Held` names its holder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while self._file is None:
            file = self._opened()
            try:
                self._file = self._lock(file)
            finally:
                if self._file is None:
                    os.close(file)
        os.ftruncate(self._file, 0)
        owner = {"pid": os.getpid(), "host": socket.gethostname()}
        os.pwrite(self._file, json.dumps(owner).encode(), 0)

    def _opened(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ValueError(
                f"{self.path} is a link, which would be overwritten; remove it"
            ) from error

    def release(self) -> None:
        """Releases the lock, if it is held, and removes the file."""
        if self._file is not None:
            # It is removed first, so that a waiting process sees that it is gone.
            with contextlib.suppress(OSError):
                if self._is_there(self._file):
                    self.path.unlink()
            os.close(self._file)
            self._file = None

    def check(self) -> None:
        """Raises an OSError if the file of a held lock is no longer in the folder."""
        if self._file is not None and not self._is_there(self._file):
            raise OSError(f"{self.path.parent} was moved or removed during the run")

    def _is_there(self, file: int) -> bool:
        """Whether an open file is the one at the path."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(file))
        except FileNotFoundError:
            return False

    def _lock(self, file: int) -> int | None:
        """Locks and returns `file`, or None if it is no longer the one at the path."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Held(self._refusal(_owner(file))) from None
        if not self._is_there(file):  # its owner may have removed it meanwhile
            return None
        owner = _owner(file)
        if owner is not None and owner["host"] != socket.gethostname():
            raise Held(
                f"{self._refusal(owner)}; if that process is dead, remove {self.path}"
            )
        return file

    def _refusal(self, owner: dict | None) -> str:
        name = owner and f"process {owner['pid']} on {labels.limited(owner['host'])}"
        return f"--workdir={self.path.parent} is in use by {name or 'another process'}"


def _owner(file: int) -> dict | None:
    """Returns the owner that a lock names, None if it is not written completely."""
    try:
        return json_text.read(os.pread(file, 1000, 0), {"pid": int, "host": str})
    except ValueError:
        return None
