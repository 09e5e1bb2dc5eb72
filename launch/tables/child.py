"""Processes of cells: settings as JSON on their input, a JSON object as last line.

The input stays open as long as the process that started them lives, and they end when
it does, however it ended.
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
# Seconds until a process that was asked to end must have ended
END_SECONDS = 60


class Failed(Exception):
    """One line of a process that ended with an error."""


def start(
    module: str,
    settings: Mapping[str, Any],
    given: Mapping[str, str] | None = None,
    is_leader: bool = False,
) -> subprocess.Popen:
    """Starts a module of this project.

    Args:
        module: Its name.
        settings: What it reads from its input.
        given: Variables of its environment beside the present ones.
        is_leader: Whether Ctrl-C does not reach it and its own processes, see `stop`.
    """
    # A folder in which a user works must not hide this project's packages.
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
    # `communicate` would close the input, whose end is the end of this process.
    weakref.finalize(one, os.close, os.dup(one.stdin.fileno()))
    with contextlib.suppress(BrokenPipeError):  # it has ended, and said why
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
    """Waits for the end of the input, and ends this process; a run is saved."""
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(1)


def ended(one: subprocess.Popen) -> dict[str, Any]:
    """Waits for a process, and returns what it printed.

    Raises:
        Failed: it ended with an error.
    """
    out, error = one.communicate()
    lines = [line for line in error.splitlines() if line.strip()]
    if one.returncode:
        # Our own line about it, or else the last one
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
        try:
            one.communicate(timeout=END_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt, ValueError):
            pass
        os.killpg(one.pid, signal.SIGKILL)
