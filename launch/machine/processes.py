"""Joins several processes into one run, and makes them agree on values.

Every process runs the same program on the same plans, and XLA's collectives move the
data. Only process 0 prints and accesses the run's folder. Decisions that depend on a
clock, a signal or a disk are made in process 0, or by all together, and sent to all.
"""

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_pfl import options
from fedjax_pfl.rows import views

# Seconds until all processes must have joined, until a dead one is noticed, until all
# must have ended, and until all must have called a function that needs all of them.
START_SECONDS = 30
HEARTBEAT_SECONDS = 20
END_SECONDS = 10
MEET_SECONDS = 120

# jax's runtime ends a process in C++ when another one is gone, with messages on stderr.
# This program copies that stderr to ours, and prints our line before those messages.
_FIRST_LINE = """
import os, select, sys
held, is_fatal = b"", False
while True:
    if held and not select.select([0], [], [], 1.0)[0]:
        os.write(2, held)
        held = b""
    got = os.read(0, 65536)
    held += got
    if not is_fatal and b"Terminating process because the JAX" in held:
        is_fatal = True
        os.write(2, sys.argv[1].encode() + b"\\n")
    if not got or is_fatal or b"oordination" not in held:
        os.write(2, held)
        held = b""
    if not got:
        break
"""


class Lost(Exception):
    """One line about another process that has ended or cannot be reached."""


def several() -> bool:
    """Whether this process is one of several."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process writes and prints."""
    return not several() or jax.process_index() == 0


def say(*args: Any, **options: Any) -> None:
    """Prints in process 0."""
    if is_first():
        print(*args, **options)


def start(given: str) -> None:
    """Joins the processes of a run, once and before anything is computed.

    `given` is `--distributed`: empty = one process, `auto` = as the cluster says (TPU
    pods, SLURM, Open MPI, ...), or `HOST:PORT,COUNT,INDEX`.

    Raises:
        ValueError: one line: it is none of these, or process 0 does not answer.
    """
    if not given or jax.distributed.is_initialized():
        return
    flag = f"--distributed={given}"
    joined: tuple[Any, ...] = ()
    if given != "auto":
        found = _parsed(given)
        joined = f"{found.host}:{found.port}", found.count, found.index
        if found.count == 1:
            return
        _probe(flag, found.host, found.port, found.index)
        _as_many_threads(found.count)
    # This service would replace our handler of SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    missing = (
        f"error: {flag}: the processes did not join within {START_SECONDS} s; start "
        "each once, with its own INDEX, and check that all can reach process 0"
    )
    with _first_line(missing) as watch:
        try:
            jax.distributed.initialize(
                *joined,
                initialization_timeout=START_SECONDS,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=END_SECONDS,
            )
        except (RuntimeError, ValueError, TypeError) as error:
            hint = "give HOST:PORT,COUNT,INDEX" if given == "auto" else "start again"
            raise ValueError(f"{flag}: {options.reason(error)}; {hint}") from error
        watch(f"error: {_lost()}")


class _Address(NamedTuple):
    """The address of process 0, the number of processes, and which one this is."""

    host: str
    port: int
    count: int
    index: int


def _parsed(given: str) -> _Address:
    """Parses a `--distributed` other than auto; ValueError if it is not valid."""
    address, *numbers = given.split(",")
    host, _, port = address.rpartition(":")
    texts = (port, *numbers)
    if not host or len(numbers) != 2 or not all(t.isdecimal() for t in texts):
        raise ValueError(
            f"--distributed={given}: expected auto, or HOST:PORT,COUNT,INDEX, such as "
            "10.0.0.1:1234,2,0 for the first of two processes"
        )
    port, count, index = map(int, texts)
    if not 0 < port < 65536 or not 0 <= index < count:
        raise ValueError(
            f"--distributed={given}: expected a port below 65536 and an INDEX of "
            f"0..{max(count - 1, 0)}"
        )
    return _Address(host, port, count, index)


def _as_many_threads(count: int) -> None:
    """Gives a process as many threads as one process for all devices would have.

    XLA compiles loops for the number of threads, at least one per device, and another
    number rounds differently. NPROC is not changed if it is set.
    """
    flag = r"--xla_force_host_platform_device_count=(\d+)"
    if found := re.search(flag, os.environ.get("XLA_FLAGS", "")):
        threads = max(os.cpu_count() or 1, count * int(found[1]))
        os.environ.setdefault("NPROC", str(threads))


def _probe(flag: str, host: str, port: int, index: int) -> None:
    """Refuses a port at which process 0 cannot listen or does not answer."""
    if index == 0:
        try:
            socket.create_server(("", port)).close()
            return
        except OSError as error:
            line = f"{flag}: port {port} cannot be used here ({error.strerror})"
            raise ValueError(f"{line}; take another") from error
    until, reason = time.monotonic() + START_SECONDS, ""
    while time.monotonic() < until:
        try:
            socket.create_connection((host.strip("[]"), port), timeout=5).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.2)
    raise ValueError(
        f"{flag}: process 0 does not answer at {host}:{port} within {START_SECONDS} s "
        f"({reason}); is it started, with the same HOST:PORT?"
    )


@contextlib.contextmanager
def _first_line(line: str) -> Iterator[Callable[[str], None]]:
    """Prints `line` before the messages of jax's runtime when it ends this process.

    It yields a function that replaces the line, also after the context.
    """
    ours = os.dup(2)
    # A notebook's stderr has no descriptor.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.fileno() == 2:
            sys.stderr = os.fdopen(os.dup(ours), "w", buffering=1)

    def watch(line: str) -> None:
        read, write = os.pipe()
        command = [sys.executable, "-S", "-c", _FIRST_LINE, line]
        # A session of its own keeps Ctrl-C from it.
        subprocess.Popen(command, stdin=read, stderr=ours, start_new_session=True)
        os.dup2(write, 2)
        for one in (read, write):
            os.close(one)

    watch(line)
    try:
        yield watch
    except BaseException:
        os.dup2(ours, 2)
        raise


def _lost(reason: str = "") -> str:
    """The line about a process that is gone."""
    return (
        "another process of this run has ended, or cannot be reached"
        f"{reason and f' ({reason})'}; everything saved is kept, --resume continues"
    )


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """Ends each of several processes with its exit code.

    Processes that succeed wait for one another. One that refuses something waits
    `END_SECONDS` for others that do. One that was interrupted, or has lost another,
    does not wait.
    """
    try:
        yield
    except SystemExit as error:
        if not jax.distributed.is_initialized():
            raise
        code = error.code if isinstance(error.code, int) else 1
        _leave(code, waits=not isinstance(error.__context__, (Lost, KeyboardInterrupt)))
    if jax.distributed.is_initialized():
        _leave(0, waits=True)


def _leave(code: int, waits: bool) -> NoReturn:
    """Ends the process without its exit handlers, which would wait for the others."""
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            file.flush()
    if waits:
        with contextlib.suppress(Exception):  # others may have ended already
            if code in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM):
                # Another may still work alone, for instance at a report.
                gathered(code)
            jax.distributed.shutdown()
    os._exit(code)


@contextlib.contextmanager
def reaching() -> Iterator[None]:
    """Turns the error that XLA raises when a process is gone into `Lost`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not jax.distributed.is_initialized() or "RESOURCE_EXH" in str(error):
            raise
        raise Lost(_lost(options.reason(error))) from error


def meet(what: str) -> None:
    """Waits until all processes have called it; ValueError after `MEET_SECONDS`."""
    if not several():
        return
    from orbax.checkpoint import multihost  # takes a second

    wait = multihost.get_barrier_sync_fn()
    try:
        wait(key=f"fedjax_pfl {what}", timeout_ms=1000 * MEET_SECONDS)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"{what} needs all {jax.process_count()} processes, and the others did not "
            f"call it within {MEET_SECONDS} s; call it in all of them"
        ) from error


def gathered(value: Any) -> list[Any]:
    """Sends a JSON-able value of each process to all, and returns all values."""
    if not several():
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    # A JSON text may end in blanks.
    padded = np.full(int(sizes.max()), ord(" "), np.uint8)
    padded[: len(text)] = text
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(one.tobytes()) for one in texts]


def of_first(value: Any) -> Any:
    """Sends a JSON-able value of process 0 to all, and returns it."""
    return gathered(value if is_first() else None)[0]


def on_first(act: Callable[[], Any]) -> Any:
    """Calls `act` in process 0 and returns its result in all.

    A ValueError or OSError of `act` is raised in all, too.
    """
    if not several():
        return act()
    done, is_value, line = None, False, ""
    try:
        done = act() if is_first() else None
    except (ValueError, OSError) as error:
        is_value, line = isinstance(error, ValueError), str(error) or "an error"
    done, is_value, line = of_first((done, is_value, line))
    if line:
        raise (ValueError if is_value else OSError)(line)
    return done


def arrays_of_first(arrays: Any, templates: Sequence[Any]) -> Any:
    """Sends a pytree of process 0 to all, whose leaves are as in `checkpoint.restore`.

    `templates` are its shapes in each form that it may have. Leaves but keys are sent
    piece by piece when they are read, and all processes read them in the same order.
    """
    if not several():
        return arrays

    def found() -> list[Any]:
        forms = [jax.tree.structure(one) for one in templates]
        sizes = [list(leaf.shape) for leaf in jax.tree.leaves(arrays)]
        return [forms.index(jax.tree.structure(arrays)), sizes]

    form, sizes = on_first(found)
    like, structure = jax.tree.flatten(templates[form])
    sent = jax.tree.leaves(arrays) if is_first() else [None] * len(like)

    def one(leaf: Any, like: Any, shape: list[int]) -> Any:
        if not views.is_key(like):
            return _streamed_by_first(leaf, tuple(shape), np.dtype(like.dtype))
        data = jax.eval_shape(jax.random.key_data, like)
        if is_first():
            leaf = np.asarray(jax.random.key_data(leaf))
        data = _streamed_by_first(leaf, data.shape, np.dtype(data.dtype))
        return jax.random.wrap_key_data(views.materialised(data))

    return structure.unflatten(map(one, sent, like, sizes))


def _streamed_by_first(
    leaf: Any, shape: tuple[int, ...], dtype: np.dtype
) -> views.Streamed:
    """An array of process 0, None in others, whose pieces it sends to all."""

    def pieces() -> Iterator[np.ndarray]:
        found = views.pieces_of(leaf) if is_first() else iter(())
        piece, left = np.zeros(0, dtype), math.prod(shape)

        def read() -> int:
            nonlocal piece
            piece = next(found)
            return piece.size

        while left:
            size = on_first(read)
            if not is_first():
                piece = np.zeros(size, dtype)
            # Sent as bytes, since jax may not have 64-bit numbers.
            bits = multihost_utils.broadcast_one_to_all(piece.view(np.uint8))
            yield np.asarray(bits).view(dtype)
            left -= size

    return views.Streamed(shape, dtype, pieces)


def check_equal(values: Mapping[str, Any], hint: str) -> None:
    """Refuses different values in processes of one run, with one ValueError in all."""
    if not several():
        return
    every = gathered({name: str(value) for name, value in values.items()})
    for index, other in enumerate(every):
        for name in sorted(other.keys() | every[0].keys()):
            first, mine = every[0].get(name, "unset"), other.get(name, "unset")
            if first != mine:
                raise ValueError(
                    f"--{name} is {mine[:80]} in process {index}, {first[:80]} in "
                    f"process 0; {hint}"
                )
