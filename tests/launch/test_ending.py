"""How a command ends: signals, exit codes and lines."""

import os
import signal
import subprocess
import sys

import jax
import pytest

from launch import ending
from launch.config import flagfile
from launch.machine import processes
from launch.run import stop

EXHAUSTED = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")


@pytest.mark.parametrize(
    "error, code, line",
    [
        (flagfile.UsageError("--x=1: expected 2"), 2, "error: --x=1: expected 2\n"),
        (OSError(28, "No space left"), 1, "error: [Errno 28] No space left\n"),
        (KeyboardInterrupt(), 130, "error: interrupted; what was saved is kept"),
        (MemoryError(), 1, "error: out of memory; lower --batch_size"),
        (EXHAUSTED, 1, "error: out of memory; lower --batch_size"),
        (BrokenPipeError(), 141, ""),
        (SystemExit(143), 143, ""),
    ],
)
def test_codes_and_lines(capsys, error, code, line):
    """One line at most; what ends the process on purpose is left alone."""
    with pytest.raises(SystemExit) as stop, ending.reported():
        raise error
    assert stop.value.code == code
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == (line != "")


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), jax.errors.JaxRuntimeError("INTERNAL: a bug")]
)
def test_bugs_keep_their_traceback(error):
    """Only what a user can do something about becomes a line."""
    with pytest.raises(type(error), match="a bug"), ending.reported():
        raise error


@pytest.mark.parametrize("is_full", [True, False], ids=["full disk", "no reader"])
def test_output_that_cannot_be_written(is_full):
    """Found out when the buffer is flushed; nothing more is said at exit."""
    code = "from launch import ending\nwith ending.reported(): print('x' * 100)"
    read, write = os.pipe()
    os.close(read)
    target = os.open("/dev/full", os.O_WRONLY) if is_full else os.dup(write)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=target, stderr=subprocess.PIPE, text=True
    )
    os.close(target)
    os.close(write)
    expected = (1, "error: [Errno 28] No space left on device\n") if is_full else None
    assert (done.returncode, done.stderr) == (expected or (141, ""))


NUMBERS = signal.SIGINT, signal.SIGTERM


@pytest.fixture
def sent():
    """Sends a signal, and says whether it interrupts; unnoted ones do nothing."""

    def one(number):
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            return True
        return False

    before = [signal.signal(number, lambda *_: None) for number in NUMBERS]
    yield one
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


def test_a_second_interrupt_does_not_wait(sent):
    """The first of any kind waits for the call, and another SIGTERM changes nothing."""
    before = [signal.getsignal(number) for number in NUMBERS]
    for number in NUMBERS:
        with stop.Stop() as asked:
            assert not asked
            assert not sent(number) and asked.signal == number
            assert not sent(signal.SIGTERM) and sent(signal.SIGINT)
        assert [signal.getsignal(one) for one in NUMBERS] == before
    with stop.Stop(twice_interrupts=False) as asked:
        assert not sent(signal.SIGINT) and not sent(signal.SIGINT)
    assert asked.signal == signal.SIGINT


def test_a_signal_comes_before_a_time_that_is_over(sent):
    """Whichever was first; nothing is agreed on where neither was."""
    with stop.Stop(twice_interrupts=False) as asked:
        asked.agree()
        assert not asked
        asked.ask(signal.SIGALRM)
        assert not asked  # until all agree
        asked.agree()
        assert asked.signal == signal.SIGALRM
        assert not sent(signal.SIGINT)
        asked.ask(signal.SIGALRM)
        asked.agree()
        assert asked.signal == signal.SIGINT


def test_processes_stop_together(sent, monkeypatch):
    """One that got a signal waits until all know of it."""
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(processes, "gathered", lambda mine: [mine, 0])
    with stop.Stop() as asked:
        assert not sent(signal.SIGTERM) and not asked
        asked.agree()
    assert asked.signal == signal.SIGTERM
