"""Two processes as one run, as a user starts them."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import chex
import pytest

from launch import build
from launch.machine import processes
from tests import drawn

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIONS = {
    "algo": "fedper",
    "preset": "none",
    "model": "mlp",
    "test_split": "client_share",
    "partition": "iid",
    "num_clients": 8,
    "clients_per_round": 4,
    "batch_size": 8,
    "local_epochs": 1,
    "eval_every": 2000,
    "checkpoint_every": 2,
}
# As a user starts it, and where devices have room for few rows
MAIN = ["-m", "launch.main"]
FEW_ROWS = """
import sys
from fedjax_pfl.rows import hosted
from launch import main
hosted.RESIDENT_BYTES = 1
main.main(["main", *sys.argv[1:]])
"""


def free_port():
    """A port that nobody used a moment ago."""
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module", autouse=True)
def _layer_by_layer():
    """Models begin as they do in the processes."""
    with drawn.layer_by_layer():
        yield


@pytest.fixture
def together(tmp_path, blobs):
    """Starts two processes of two devices each."""
    started = []

    def run(*options, python=MAIN, **changed):
        address = f"localhost:{free_port()}"
        flags = [f"--{name}={value}" for name, value in (OPTIONS | changed).items()]
        flags += [f"--dataset={blobs}", f"--workdir={tmp_path / 'run'}", *options]
        env = os.environ | {
            "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("count=4", "count=2"),
            "JAX_PLATFORMS": "cpu",
        }
        for index in range(2):
            command = [sys.executable, *python, *flags]
            command.append(f"--distributed={address},2,{index}")
            started.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started[-2:]

    yield run
    for one in started:
        one.kill()
        one.communicate()


@pytest.mark.slow
def test_two_processes_are_one_run(together, tmp_path, blobs):
    """As one process of four devices; a signal to one stops both; others may go on."""
    for index, one in enumerate(together("--rounds=2")):
        out, error = one.communicate(timeout=100)
        assert one.returncode == 0, error
        # The first alone prints.
        assert ("Client (UA)" in out) == (index == 0)
    found = build.load(tmp_path / "run")
    alone = build.experiment(dataset=blobs, rounds=2, **OPTIONS)
    alone.run(progress=False)
    chex.assert_trees_all_close(
        (found.state.server, found.state.clients),
        (alone.state.server, alone.state.clients),
        rtol=0,
        atol=1e-6,
    )

    first, second = together("--rounds=100000", "--resume")
    begin = time.monotonic()
    while not (tmp_path / "run" / "checkpoints" / "round_00000004").exists():
        assert time.monotonic() - begin < 100 and first.poll() is None
        time.sleep(0.02)
    second.send_signal(signal.SIGTERM)
    told, others = (one.communicate(timeout=100)[1] for one in (first, second))
    assert (first.returncode, second.returncode) == (143, 143), (told, others)
    assert "continue with:" in told and "continue with:" not in others
    done = int(told.split("stopped after round ")[1].split(";")[0])
    onward = build.load(tmp_path / "run", rounds=done + 2)
    assert onward.round == done >= 4
    onward.run(progress=False)
    assert onward.round == done + 2


@pytest.mark.slow
def test_rows_of_peers_of_two_processes(together, tmp_path, blobs):
    """Also rows that differ from the start, as masks do."""
    options = OPTIONS | {"algo": "dispfl", "num_peers": 2, "rounds": 2}
    for one in together(**options):
        _, error = one.communicate(timeout=100)
        assert one.returncode == 0, error
    found = build.load(tmp_path / "run")
    alone = build.experiment(dataset=blobs, **options)
    alone.run(progress=False)
    assert alone.task.execution.shares_rows
    for one, other in zip(found.state.private, alone.state.private, strict=True):
        chex.assert_trees_all_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["host", "device"])
def test_rows_on_the_hosts_of_two_processes(together, tmp_path, blobs, kept):
    """As one process with rows on the devices, in windows, resumed from either form."""
    options = OPTIONS | {"algo": "pfedsd", "num_clients": 22}
    python = ["-c", FEW_ROWS]
    first = {"rounds": 2, "client_state": kept}
    second = {"rounds": 5, "client_state": "host"}
    for more, resume in ((first, ()), (second, ("--resume",))):
        for one in together(*resume, python=python, **options | more):
            _, error = one.communicate(timeout=200)
            assert one.returncode == 0, error
    found = build.load(tmp_path / "run", client_state="device")
    alone = build.experiment(dataset=blobs, rounds=5, **options)
    alone.run(progress=False)
    for one, other in zip(found.state.private, alone.state.private, strict=True):
        chex.assert_trees_all_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "told, expected",
    [
        ("here", "expected auto, or HOST:PORT,COUNT,INDEX"),
        ("localhost:1234,2", "expected auto, or HOST:PORT,COUNT,INDEX"),
        ("localhost:x,2,0", "expected auto, or HOST:PORT,COUNT,INDEX"),
        ("localhost:99999,2,0", "a port below 65536"),
        ("localhost:1234,2,2", "an INDEX of 0..1"),
        ("localhost:1234,0,0", "an INDEX of 0..0"),
    ],
)
def test_refused(told, expected):
    """One line, before anything is started."""
    with pytest.raises(ValueError, match=expected) as caught:
        processes.start(told)
    assert f"--distributed={told}" in str(caught.value)


def test_a_port_in_use_and_one_where_nobody_is(monkeypatch):
    """Both would keep jax's runtime waiting and end it in C++."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} cannot be used.*another"):
            processes.start(f"localhost:{port},2,0")
    monkeypatch.setattr(processes, "START_SECONDS", 0.5)
    with pytest.raises(ValueError, match=f"does not answer at localhost:{port}"):
        processes.start(f"localhost:{port},2,1")


def test_our_line_comes_first(capfd):
    """Before what jax's runtime says when it ends a process; else nothing is added."""
    code = (
        "import os, sys; from launch.machine import processes\n"
        "with processes._first_line('one') as watch: watch('error: ours')\n"
        "print('python', file=sys.stderr, flush=True)\n"
        "os.write(2, sys.argv[1].encode()); os._exit(3)"
    )
    lines = ["E coordination_service.cc] 1\n", "F client.h] Terminating process "]
    lines[1] += "because the JAX distributed service detected fatal errors\n"
    for text, expected in (
        ("".join(lines), "python\nerror: ours\n" + "".join(lines)),
        (lines[0], "python\n" + lines[0]),
        ("W other\n", "python\nW other\n"),
    ):
        command = [sys.executable, "-c", code, text]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (3, expected)


def test_alone_everything_is_its_own():
    """Without other processes nothing is gathered, and nobody is waited for."""
    assert not processes.several() and processes.is_first()
    processes.meet("nothing")
    processes.check_equal({"rate": 1}, "never said")
    assert processes.gathered({"a": 1}) == [{"a": 1}]
    assert processes.of_first(3) == 3
    with pytest.raises(OSError, match="disk"):
        processes.on_first(lambda: (_ for _ in ()).throw(OSError("disk")))
