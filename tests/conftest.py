"""Four fake CPU devices, and small data that every test may use."""

import functools
import gc
import os
import pathlib

import jaxlib.version

# XLA's pool has a thread for each fake device, in which a collective waits for others.
# Several that do not depend on one another may run at once, and would wait for ever.
os.environ.setdefault("PJRT_NPROC", "16")
# Nothing here is big enough to gain by optimised code; compiling it takes longer.
# Each stands once: workers inherit them, and kept programs are found by them.
os.environ["XLA_FLAGS"] = " ".join(
    dict.fromkeys(
        (
            *os.environ.get("XLA_FLAGS", "").split(),
            "--xla_force_host_platform_device_count=4",
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_parallel_codegen_split_count=1",  # the tests use all cores
            # An unknown flag ends the process, and later versions do not know this one.
            *["--xla_cpu_use_fusion_emitters=false"]
            * (jaxlib.version.__version_info__ < (0, 11)),
        )
    )
)

import jax
import numpy as np
import pytest

import models
from fedjax_pfl import program
from launch.machine import devices
from tests import drawn, synthetic
from tests.toys import model as toy

# Nobody reads where an operation came from, and to note it takes a part of every trace.
jax.config.update("jax_traceback_in_locations_limit", 0)
# Traces are many small objects without cycles: to look for some takes a tenth of a run.
gc.set_threshold(200_000, 20, 50)
drawn.use()
# A run keeps few programs; here some dozen small ones of a file take turns.
program._jitted = functools.lru_cache(maxsize=64)(program._jitted.__wrapped__)
# A tiny run by the command: two of four clients a round
FLAGS = """--model=mlp --devices=1 --num_clients=4 --clients_per_round=2
    --local_epochs=1 --batch_size=16 --partition=dirichlet""".split()
# A tiny run in memory, with the fixture `narrow`: three of six clients a round
SIX = {"preset": "none", "model": "narrow", "devices": 1, "rounds": 2}
SIX |= {"num_clients": 6, "clients_per_round": 3, "local_epochs": 1}
# Above so many bytes a worker forgets the programs that its tests compiled.
MEMORY = 800_000_000
FOUND = pytest.StashKey[set[str]]()


@pytest.fixture(scope="session")
def _cache_folder(request, tmp_path_factory):
    """Of all workers and of the next run; also for programs that tests start.

    It is pytest's own: `pytest --cache-clear` empties it.
    """
    kept = getattr(request.config, "cache", None)  # none with -p no:cacheprovider
    folder = kept.mkdir("compiled") if kept else tmp_path_factory.getbasetemp().parent
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return str(devices.user_cache())


@pytest.fixture(scope="module", autouse=True)
def _compilation_cache(_cache_folder):
    """Equal programs are compiled once, whatever folder another file's tests chose."""
    devices.keep_compiled(_cache_folder)
    # Also what compiles in a moment: there are thousands of such programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    statm = pathlib.Path("/proc/self/statm")  # sizes in pages; on Linux only
    used = int(statm.read_text().split()[1]) * 4096 if statm.is_file() else MEMORY
    if used >= MEMORY:
        program.forget()
        jax.clear_caches()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(config, items):
    """Cases that slow.txt names are slow."""
    config.stash[FOUND] = {item.nodeid for item in items}
    lines = (pathlib.Path(__file__).parent / "slow.txt").read_text().splitlines()
    slow = {f"tests/{line}" for line in lines if not line.startswith("#")}
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def found(pytestconfig):
    """The names of all cases of a run's files, also of those that it leaves out."""
    if any("::" in one for one in pytestconfig.args) or pytestconfig.getoption("lf", 0):
        pytest.skip("other cases of these files were not collected")
    return pytestconfig.stash[FOUND]


def write_npz(path, num_rows=240, shape=(8, 8, 1), num_classes=4, clients=None, seed=0):
    """Writes blobs as a user's npz file; `clients` are sizes of a natural partition."""
    source = synthetic.blobs(num_rows, shape, num_classes, seed=seed)
    arrays = {"x": source.image, "y": source.label}
    if clients is not None:
        arrays["client"] = np.repeat(np.arange(len(clients)), clients)
    np.savez(path, **arrays)
    return f"npz:{path}"


@pytest.fixture(scope="module")
def narrow():
    """`--model=narrow` for a file to which the model does not matter.

    It has two layers where mlp has three, and so its programs are made faster.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.MODELS, "narrow", toy.narrow)
        yield


@pytest.fixture
def undrawn(monkeypatch):
    """Pages have their pictures' places and captions, and no time to draw is spent."""

    def shown(figure, caption):
        return {"svg": "<svg></svg>", "caption": caption}

    monkeypatch.setattr("launch.show.svg.shown", shown)


@pytest.fixture(scope="session")
def blobs(tmp_path_factory):
    """`--dataset` of 240 small images in 4 classes, no owners."""
    return write_npz(tmp_path_factory.mktemp("data") / "blobs.npz")


@pytest.fixture(scope="session")
def unequal(tmp_path_factory):
    """`--dataset` with seven clients of quite different sizes."""
    sizes = [10, 15, 20, 25, 40, 50, 80]
    path = tmp_path_factory.mktemp("data") / "unequal.npz"
    return write_npz(path, sum(sizes), clients=sizes)
