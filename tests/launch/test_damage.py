"""Random damage to the folder of a run: one line or a right outcome, nothing lost.

`python -m tests.launch.test_damage 500` makes as many attempts, which other seeds than
those of the tests choose.
"""

import contextlib
import faulthandler
import io
import os
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import pytest

from launch import build, export, main, plot, report
from tests import conftest, synthetic


def _run(folder, arrays, rounds, *more):
    words = ["--algo=fedper", "--preset=none", "--eval_every=1", f"--rounds={rounds}"]
    words += [f"--dataset=npz:{arrays}", f"--workdir={folder}"]
    main.main(["main", *conftest.FLAGS, *words, *more])


def folders(where):
    """(arrays, a finished run of two rounds, one stopped after two of four)."""
    arrays = where / "blobs.npz"
    source = synthetic.blobs(120, (6, 6, 1), 3, seed=0)
    np.savez(arrays, x=source.image, y=source.label)
    done, stopped = where / "done", where / "stopped"
    with contextlib.redirect_stdout(io.StringIO()):
        _run(done, arrays, 2, "--checkpoint_every=1")
    experiment = build.load(done, rounds=4, workdir=None)
    assert experiment.round == 2
    shutil.copytree(done, stopped)
    flags = (stopped / "run.flags").read_text().replace("--rounds=2", "--rounds=4")
    (stopped / "run.flags").write_text(flags)
    for name in ("summary.json", "clients.npz"):
        (stopped / name).unlink()
    return arrays, done, stopped


def _cut(path, gen):
    raw = path.read_bytes()
    path.write_bytes(raw[: gen.integers(len(raw) + 1)])


def _flip(path, gen):
    raw = bytearray(path.read_bytes())
    for place in gen.integers(max(len(raw), 1), size=gen.integers(1, 9)):
        if raw:
            raw[place] ^= 1 << gen.integers(8)
    path.write_bytes(raw)


def _noise(path, gen):
    path.write_bytes(gen.bytes(gen.integers(200)))


def _added(path, gen):
    extra = (b"\n5\n", b'{"seed": 0}\n', b"[" * 9999, b"\x00" * 50, b"--seed=1\n")
    path.write_bytes(path.read_bytes() + extra[gen.integers(len(extra))])


def _swapped(path, gen):
    """Another value where a number or a word stood."""
    raw = path.read_bytes()
    old = (b"1", b"0.", b"true", b"mean", b"seed", b"round", b"e")[gen.integers(7)]
    new = (b"null", b"-1", b"1e999", b"[]", b'"', b"99999999999999999999")
    path.write_bytes(raw.replace(old, new[gen.integers(6)], int(gen.integers(1, 3))))


def _gone(path, gen):
    path.unlink()


def _folder(path, gen):
    path.unlink()
    path.mkdir()


def _link(path, gen):
    path.unlink()
    path.symlink_to(path.parent / "nowhere" if gen.integers(2) else "/dev/null")


def _fifo(path, gen):
    path.unlink()
    os.mkfifo(path)


def _unreadable(path, gen):
    path.write_bytes(b"")


DAMAGES = (_cut, _flip, _noise, _added, _swapped, _gone, _folder, _link, _fifo)
DAMAGES += (_unreadable,)


def _commands(folder, arrays, out):
    """What somebody may do with a folder, by name."""
    return {
        "resume": lambda: _run(folder, arrays, 4, "--resume"),
        "again": lambda: _run(folder, arrays, 2),
        "plot": lambda: plot.command(["plot", str(folder), f"--output={out}"]),
        "report": lambda: report.command(
            ["report", str(folder), f"--output={out}/page.html"]
        ),
        "export": lambda: export.command(
            ["export", str(folder), f"--output={out}/model.msgpack"]
        ),
        "load": lambda: build.load(folder),
        "go on": lambda: build.load(folder, rounds=5).run(progress=False),
    }


def _contents(folder):
    """The bytes of regular files, without the lock and what is being written."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.name != "run.lock"
        if "partial" not in path.name
    }


def attempt(seed, sources, made):
    """Damages a copy of a folder and uses it; returns what was done and its line.

    Raises:
        AssertionError: a traceback, several lines, or a file that was lost.
    """
    gen = np.random.default_rng(seed)
    arrays, *runs = sources
    folder = pathlib.Path(made) / f"run{seed}"
    shutil.copytree(runs[gen.integers(len(runs))], folder)
    out = pathlib.Path(made) / f"out{seed}"
    out.mkdir()
    done = []
    for _ in range(gen.integers(1, 3)):
        # Most files are parts of checkpoints, so the others are chosen as often.
        where = folder.glob("*") if gen.integers(2) else folder.rglob("*")
        files = sorted(p for p in where if p.is_file() and p.name != "run.lock")
        path = files[gen.integers(len(files))]
        damage = DAMAGES[gen.integers(len(DAMAGES))]
        damage(path, gen)
        done.append(f"{damage.__name__} {path.relative_to(folder)}")
    commands = _commands(folder, arrays, out)
    name = list(commands)[gen.integers(len(commands))]
    done = f"{seed}: {', '.join(done)}; {name}"
    before, said = _contents(folder), io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            commands[name]()
        return f"{done}: fine"
    except SystemExit as end:
        assert end.code in (1, 2), f"{done}: exit {end.code}"
        errors = [x for x in said.getvalue().splitlines() if x.startswith("error: ")]
        assert len(errors) == 1, f"{done}: {said.getvalue()}"
        line = errors[0]
    except (ValueError, OSError) as error:
        line = str(error)
    except BaseException as error:
        raise AssertionError(f"{done}: {type(error).__name__}: {error}") from error
    assert line and "\n" not in line, f"{done}: {line}"
    assert "Traceback" not in said.getvalue(), f"{done}: {said.getvalue()}"
    after = _contents(folder)
    # A run that goes on writes its flags again and has no summary before its end.
    again = {"run.flags", "summary.json"} if name in ("resume", "go on") else set()
    lost = [
        path
        for path, raw in before.items()
        if after.get(path) != raw and path.name not in again
    ]
    assert not lost, f"{done}: lost {lost}: {line}"
    return f"{done}: {line}"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The arrays and the two runs."""
    return folders(tmp_path_factory.mktemp("damage"))


@pytest.mark.parametrize("block", range(6))
def test_sixty_attempts(sources, tmp_path, block):
    """Ten in a test, chosen by their seeds."""
    lines = [attempt(10 * block + n, sources, tmp_path) for n in range(10)]
    assert any(not line.endswith(": fine") for line in lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        made_sources, failed = folders(pathlib.Path(made)), 0
        for number in range(1000, 1000 + int(sys.argv[1])):
            faulthandler.dump_traceback_later(60, exit=True)  # one that waits forever
            try:
                print(attempt(number, made_sources, made), flush=True)
            except AssertionError as error:
                failed += 1
                print("FAILED", error)
            shutil.rmtree(pathlib.Path(made) / f"run{number}", ignore_errors=True)
        print(f"{sys.argv[1]} attempts, {failed} failed")
