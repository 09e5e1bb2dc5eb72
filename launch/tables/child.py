"""Child processes of cells: JSON settings on stdin, a JSON object as last output line.

A child's stdin stays open while its parent lives. The child ends when its parent ends,
for whatever reason.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Seconds that a process has to end after it was asked to
END_SECONDS = 60


class Failed(Exception):
    """A process ended with an error, given as one line."""


def start(
    module: str,
    settings: Mapping[str, Any],
    given: Mapping[str, str] | None = None,
    is_leader: bool = False,
) -> subprocess.Popen:
    """Starts `python -m module`, which reads `settings` as JSON from its stdin.

    `given` are environment variables beside the present ones. Ctrl-C does not reach a
    process with `is_leader`, nor its children; see `stop`.
    """
    # Modules in the user's folder must not hide this project's packages.
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    one = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env | (given or {}),
        start_new_session=is_leader,
    )
    # `communicate` would close stdin and so end the child too early.
    weakref.finalize(one, os.close, os.dup(one.stdin.fileno()))
    with contextlib.suppress(BrokenPipeError):  # it has ended with a message
        one.stdin.write(f"{json.dumps(settings)}\n")
        one.stdin.close()
    one.stdin = None
    return one


def settings() -> dict[str, Any]:
    """Reads the settings that `start` wrote; this process then ends with its parent."""
    found = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return found


def _end_with_parent() -> None:
    """Waits for the end of stdin, then ends this process, which saves its run."""
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(1)


def ended(one: subprocess.Popen) -> dict[str, Any]:
    """Waits for a process and returns what it printed; raises `Failed` on an error."""
    out, error = one.communicate()
    lines = [line for line in error.splitlines() if line.strip()]
    if one.returncode:
        # Our error line, or else the last line
        ours = [line for line in lines if line.startswith("error: ")]
        reason = (ours or lines or [f"exit code {one.returncode}"])[-1]
        raise Failed(reason.removeprefix("error: "))
    try:
        return json.loads(out.splitlines()[-1])
    except (IndexError, ValueError) as wrong:
        raise Failed("it ended without a result") from wrong


def stop(one: subprocess.Popen) -> None:
    """Interrupts a process that is a leader, so that it saves and ends."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGINT)
        ignored = subprocess.TimeoutExpired, KeyboardInterrupt, ValueError
        with contextlib.suppress(*ignored):
            one.communicate(timeout=END_SECONDS)
        os.killpg(one.pid, signal.SIGKILL)
