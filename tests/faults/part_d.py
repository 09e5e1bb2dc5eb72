"""Faults of interpretation: folders and files of strangers.

`python -m tests.faults` runs them all.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest.mock
import warnings

import numpy as np
from PIL import Image

from data import frames, loaders, memory
from fedjax_pfl.rows import store
from launch import build, export, main, report, reproduce
from launch.folder import finished, lock
from tests.faults import given

ARRAYS = (given.X, given.y)


# What the functions below share


def _line(act, *arguments, **options) -> str:
    """The one line that a user sees: of an error, or else notes and warnings."""
    shown = io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(shown),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        try:
            act(*arguments, **options)
        except (ValueError, OSError) as error:
            return str(error)
        except SystemExit:
            pass
    said = shown.getvalue().splitlines()
    errors = [line for line in said if line.startswith("error: ")]
    notes = [line for line in said if line.startswith("note: ")]
    notes += [str(one.message) for one in warned if one.category is UserWarning]
    return "; ".join(errors or notes)


@functools.cache
def _trained() -> tempfile.TemporaryDirectory:
    """The folder of a finished run and its arrays, which is gone with the process."""
    made = tempfile.TemporaryDirectory()
    np.savez(f"{made.name}/arrays.npz", x=given.X, y=given.y)
    options = given.base | {"dataset": f"npz:{made.name}/arrays.npz"}
    build.experiment(**options, workdir=f"{made.name}/run").run(progress=False)
    return made


def _copy(folder: pathlib.Path) -> pathlib.Path:
    """A copy of the trained run."""
    return shutil.copytree(f"{_trained().name}/run", folder / "run")


def _with_flag(folder: pathlib.Path, line: str) -> pathlib.Path:
    """A copy of the trained run whose run.flags has one more line."""
    run = _copy(folder)
    with open(run / "run.flags", "a") as file:
        file.write(f"{line}\n")
    return run


def _resealed(folder: pathlib.Path, change) -> pathlib.Path:
    """A copy of the trained run whose summary is changed and sealed again."""
    run = _copy(folder)
    summary = json.loads((run / "summary.json").read_text())
    del summary["sha256"]
    summary = change(summary, run) or summary
    sealed = finished.seal(run, summary)  # the hashes of the three files
    files = summary["files_sha256"] | sealed["files_sha256"]
    sealed = {**summary, "files_sha256": files}
    text = json.dumps(sealed, sort_keys=True).encode()
    sealed["sha256"] = hashlib.sha256(text).hexdigest()
    (run / "summary.json").write_text(json.dumps(sealed))
    return run


def _reported(folder: pathlib.Path, **changes) -> str:
    """The line of `launch.report` about a summary with other values."""
    run = _resealed(folder, lambda summary, _: summary | changes)
    page = folder / "page.html"
    return _line(report.command, ["report", str(run), f"--output={page}"])


def _picture(path: pathlib.Path, width: int = 4, height: int = 4) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (width, height)).save(path)


def _of_folder(folder: pathlib.Path) -> str:
    """The line about a folder of images, or its notes after the order of classes."""
    try:
        notes = loaders.load(f"images:{folder}", "").notes
    except ValueError as error:
        return str(error)
    return "; ".join(note for note in notes if not note.startswith("labels are"))


def _with_memory(num_bytes: int):
    """A machine with so much free memory."""
    return unittest.mock.patch.object(memory, "available_bytes", lambda: num_bytes)


# X1 to X3: what a run.flags may name


def x1_load_writes_a_file_that_run_flags_names(folder) -> str:
    """Somebody loads a folder whose run.flags exports its partition over a file."""
    precious = folder / "precious.npz"
    precious.write_text("precious")
    run = _with_flag(folder, f"--export_partition={precious}")
    line = _line(build.load, run)
    assert precious.read_text() == "precious"
    return line


def x1_export_writes_a_file_that_run_flags_names(folder) -> str:
    """The same by `launch.export`."""
    precious = folder / "precious.npz"
    precious.write_text("precious")
    run = _with_flag(folder, f"--export_partition={precious}")
    line = _line(export.command, ["export", str(run), f"--output={folder}/m.npz"])
    assert precious.read_text() == "precious" and (folder / "m.npz").exists()
    return line


def x1_the_printed_way_writes_a_file_that_run_flags_names(folder) -> str:
    """The same by the command that a stopped run prints."""
    precious = folder / "precious.npz"
    precious.write_text("precious")
    run = _with_flag(folder, f"--export_partition={precious}")
    words = [f"--flagfile={run}/run.flags", f"--workdir={run}", "--resume"]
    line = _line(main.main, ["main", *words])
    assert precious.read_text() == "precious"
    return line


def x1_a_flagfile_in_run_flags_names_another(folder) -> str:
    """The same through a second flagfile, which the first names."""
    precious = folder / "precious.npz"
    precious.write_text("precious")
    (folder / "more.flags").write_text(f"--export_partition={precious}\n")
    run = _with_flag(folder, f"--flagfile={folder}/more.flags")
    words = [f"--flagfile={run}/run.flags", f"--workdir={run}", "--resume"]
    line = _line(main.main, ["main", *words])
    assert precious.read_text() == "precious"
    return line


def x2_load_connects_to_a_host_that_run_flags_names(folder) -> str:
    """Somebody loads a folder whose run.flags joins the processes of a stranger."""
    run = _with_flag(folder, "--distributed=localhost:9,2,1")
    begin = time.monotonic()
    line = _line(build.load, run)
    assert time.monotonic() - begin < 20
    return line


def x3_load_takes_programs_from_a_folder_that_run_flags_names(folder) -> str:
    """Somebody loads a folder whose run.flags names a folder of compiled programs."""
    run = _copy(folder)
    text = (run / "run.flags").read_text()
    lines = [line for line in text.splitlines() if "compile_cache" not in line]
    lines.append(f"--compile_cache={folder}/programs")
    (run / "run.flags").write_text("\n".join(lines) + "\n")
    line = _line(build.load, run)
    assert not (folder / "programs").exists()
    return line


# X4 and bombs: formats and sizes


def x4_a_program_called_png(folder) -> str:
    """A folder of images holds an EPS program whose name ends in .png."""
    program = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\nshowpage\n%%EOF\n"
    for kind in "ab":
        (folder / kind).mkdir()
        (folder / kind / "0.png").write_text(program)
    return _of_folder(folder)


def x4_very_large_images_in_small_files(folder) -> str:
    """Two images of 168 million pixels, in 0.2 MB of files."""
    _picture(folder / "a" / "0.png", 12960, 12960)
    (folder / "b").mkdir()
    shutil.copy(folder / "a" / "0.png", folder / "b" / "0.png")
    begin = time.monotonic()
    line = _of_folder(folder)
    assert time.monotonic() - begin < 0.5
    return line


def x4_many_links_to_one_large_image(folder) -> str:
    """More images than fit into the memory, by links to one file."""
    _picture(folder / "a" / "0.png", 4000, 4000)
    _picture(folder / "b" / "0.png", 4000, 4000)
    for number in range(1, 60):
        (folder / "a" / f"{number}.png").symlink_to("0.png")
    with _with_memory(1 << 30):
        return _of_folder(folder)


def x4_zeros_in_a_small_npz(folder) -> str:
    """An npz file of 0.2 MB that unpacks to 0.2 GB."""
    x = np.zeros((400, 256, 256, 8), np.uint8)
    np.savez_compressed(folder / "a.npz", x=x, y=given.y)
    with (
        _with_memory(100 << 20),
        unittest.mock.patch.object(np.lib.format, "read_array") as read,
    ):
        line = _line(loaders.load, f"npz:{folder}/a.npz", "")
    assert not read.called
    return line


def x4_a_table_of_a_million_columns(folder) -> str:
    """A CSV file of 1,000,000 columns and two rows."""
    rows = [",".join(f"c{n}" for n in range(10**6)), *["0," * (10**6 - 1) + "1"] * 2]
    (folder / "a.csv").write_text("\n".join(rows))
    return _line(frames.from_csv, str(folder / "a.csv"))


# X5: cells


def _of_cells(folder: pathlib.Path, text: str) -> str:
    """The line about a file of cells."""
    (folder / "cells.json").write_text(text)
    words = ["cdkt.table1", "--dry_run", f"--cells={folder}/cells.json"]
    return _line(reproduce.command, ["reproduce", *words])


def x5_cells_of_deep_brackets(folder) -> str:
    """A file of cells is 100,000 brackets."""
    return _of_cells(folder, "[" * 10**5)


def x5_a_cell_is_a_number(folder) -> str:
    """A file of cells has a number for a cell."""
    return _of_cells(folder, '{"fixed-cdkt_full-seed0-0": 5}')


def x5_a_cell_without_metrics(folder) -> str:
    """A file of cells has a cell without metrics."""
    return _of_cells(folder, '{"fixed-cdkt_full-seed0-0": {"options": {}}}')


def x5_a_cell_whose_metrics_are_text(folder) -> str:
    """A file of cells has a text for metrics."""
    return _of_cells(folder, '{"fixed-cdkt_full-seed0-0": {"metrics": "x"}}')


# X6: what lines show


def x6_a_class_folder_that_links_to_another_folder(folder) -> str:
    """A class of images is a link to a folder of other files, which are not named."""
    for kind in "ab":
        for number in range(2):
            _picture(folder / "images" / kind / f"{number}.png")
    (folder / "private").mkdir()
    (folder / "private" / "secret_plan.txt").write_text("secret")
    (folder / "images" / "c").symlink_to(folder / "private")
    line = _of_folder(folder / "images")
    assert "secret" not in line
    return line


def x6_run_flags_that_link_to_another_file(folder) -> str:
    """The run.flags of a folder is a link to a file whose contents are private."""
    run = _copy(folder)
    (folder / "private").write_text("secret:x:0:0\n")
    (run / "run.flags").unlink()
    (run / "run.flags").symlink_to(folder / "private")
    line = _line(build.load, run)
    assert "secret" not in line
    return line


# S13: folders of images that are not owners


def _of_top(folder: pathlib.Path, *top: str) -> str:
    for name in top:
        for kind in "ab":
            for number in range(2):
                _picture(folder / name / kind / f"{number}.png")
    return _of_folder(folder)


def s13_train_and_dev_are_not_owners(folder) -> str:
    """Images lie in Train/a, dev/a and so on."""
    return _of_top(folder, "Train", "dev")


def s13_seg_train_and_seg_test_are_not_owners(folder) -> str:
    """Images lie in seg_train/a, seg_test/a and so on."""
    return _of_top(folder, "seg_train", "seg_test")


def s13_masks_are_not_an_owner(folder) -> str:
    """Images lie in images/a, masks/a and so on."""
    return _of_top(folder, "images", "masks")


def s13_the_left_overs_of_an_archive_are_not_an_owner(folder) -> str:
    """Images lie in data/a, __MACOSX/a and so on."""
    return _of_top(folder, "data", "__MACOSX")


def s13_one_image_in_two_classes(folder) -> str:
    """An image of one class is a link to an image of another."""
    for kind in "ab":
        _picture(folder / kind / "0.png")
    (folder / "b" / "1.png").symlink_to(folder / "a" / "0.png")
    return _of_folder(folder)


def s13_one_image_twice_in_a_class(folder) -> str:
    """An image is a link to another of its class."""
    for kind in "ab":
        _picture(folder / kind / "0.png")
    (folder / "b" / "1.png").symlink_to(folder / "b" / "0.png")
    return _of_folder(folder)


# C1: summaries that were edited and sealed again, and locks


def c1_a_summary_without_metrics(folder) -> str:
    """The metrics of a resealed summary are empty."""
    return _reported(folder, metrics={})


def c1_a_last_round_that_is_a_number(folder) -> str:
    """The last round of a resealed summary is 5."""
    return _reported(folder, last_round=5)


def c1_versions_that_are_a_number(folder) -> str:
    """The versions of a resealed summary are 7."""
    return _reported(folder, versions=7)


def c1_numbers_that_are_a_number(folder) -> str:
    """The numbers of a resealed summary are 5."""
    return _reported(folder, numbers=5)


def c1_a_mean_that_is_text(folder) -> str:
    """The mean of a metric in a resealed summary is a text."""
    entry = {"mean": 0.5, "std": 0.0, "per_seed": [0.5]}
    metrics = {"bytes_up": entry, "bytes_down": entry | {"mean": "x"}}
    return _reported(folder, metrics=metrics)


def c1_metrics_that_no_record_has(folder) -> str:
    """A resealed summary has bytes alone, and the page has no accuracy to show."""
    entry = {"mean": 1.0, "std": 0.0, "per_seed": [1.0]}
    line = _reported(folder, metrics={"bytes_up": entry, "bytes_down": entry})
    text = (folder / "page.html").read_text()
    return line or text[text.index("No summary has") :].partition("<")[0]


def c1_a_summary_that_names_a_file_outside(folder) -> str:
    """A resealed summary has the hash of ../../etc/passwd."""

    def change(summary, _):
        summary["files_sha256"]["../../../etc/passwd"] = "0" * 64

    run = _resealed(folder, change)
    return _line(report.command, ["report", str(run), f"--output={folder}/page.html"])


def c1_clients_without_accuracies(folder) -> str:
    """The file of clients of a resealed summary has no accuracies."""

    def change(_, run):
        with np.load(run / "clients.npz") as file:
            held = {name: file[name] for name in file.files if name != "accuracy"}
        np.savez(run / "clients.npz", **held)

    run = _resealed(folder, change)
    return _line(report.command, ["report", str(run), f"--output={folder}/page.html"])


def _of_lock(folder: pathlib.Path, text: str) -> str:
    """The line about a lock that another process holds, with another text in it."""
    held = lock.Lock(folder)
    held.acquire()
    (folder / lock.NAME).write_text(text)
    try:
        return _line(lock.Lock(folder).acquire)
    finally:
        held.release()


def c1_a_lock_of_deep_brackets(folder) -> str:
    """A run.lock is 5,000 brackets."""
    return _of_lock(folder, "[" * 5000)


def c1_a_lock_of_an_infinite_process(folder) -> str:
    """A run.lock names the process 1e400."""
    return _of_lock(folder, '{"pid": 1e400, "host": "elsewhere"}')


def c1_a_manifest_of_deep_brackets(folder) -> str:
    """The manifest of a checkpoint is 100,000 brackets."""
    run = _copy(folder)
    for path in (run / "checkpoints").glob("*/manifest.json"):
        path.write_text("[" * 10**5)
    return _line(build.load, run)


# C2, C3, B7 and a full disk


def c2_a_chain_of_flagfiles(folder) -> str:
    """1,500 flagfiles, each of which names the next."""
    for number in range(1500):
        text = f"--flagfile={folder}/{number + 1}.flags\n"
        (folder / f"{number}.flags").write_text(text)
    return _line(main.main, ["main", f"--flagfile={folder}/0.flags"])


def c3_on_record_is_a_number(folder) -> str:
    """A number is given for a function, and nothing trains."""
    made = build.experiment(**given.base, dataset=ARRAYS)
    line = _line(made.run, progress=False, on_record=5)
    assert made.round == 0 and not made.metrics
    return line


def c3_on_record_of_a_comparison_is_a_number(folder) -> str:
    """The same in a comparison."""
    options = given.base | {"dataset": ARRAYS}
    del options["algo"]
    made = build.compare(["fedavg"], run=False, **options)
    return _line(made.run, progress=False, on_record=5)


def c3_a_long_name_in_a_comparison(folder) -> str:
    """A run of a comparison has a name of 300 characters."""
    options = given.base | {"dataset": ARRAYS, "workdir": str(folder)}
    runs = {"a" * 300: {"algo": options.pop("algo")}}
    return _line(build.compare, runs, run=False, **options)


def b7_a_file_where_a_checkpoint_is_written(folder) -> str:
    """`partial_00000007`, which a killed run leaves as a folder, is a file."""
    run = _copy(folder)
    (run / "checkpoints" / "partial_00000007").write_text("")
    made = build.load(run, rounds=5)
    line = _line(made.run, progress=False)
    assert not (run / "checkpoints" / "partial_00000007").exists()
    return line or f"round {made.round}"


def d6_a_full_disk_under_client_state(folder) -> str:
    """The disk of --client_state is full, and later it is not."""
    (folder / "rows").mkdir()
    options = given.base | {"algo": "local", "client_state": str(folder / "rows")}
    options |= {"dataset": ARRAYS, "workdir": str(folder / "run")}

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made = build.experiment(**options)
    with unittest.mock.patch.object(store.os, "posix_fallocate", full):
        line = _line(made.run, progress=False)
    with contextlib.redirect_stderr(io.StringIO()):
        again = build.experiment(**options, resume=True).run(progress=False)
    alone = build.experiment(**options | {"workdir": None}).run(progress=False)
    assert again["parameters_sha256"] == alone["parameters_sha256"]
    return line


def d7_a_study_that_is_killed(folder) -> str:
    """The process of a study is killed, and that of its cell ends too."""
    path = folder / "lock"
    path.touch()
    code = (
        "from launch.tables import child\n"
        f"settings = {{'path': {str(path)!r}}}\n"
        "one = child.start('tests.toys.waits', settings, is_leader=True)\n"
        "child.ended(one)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while not path.read_text():
            time.sleep(0.02)
        parent.send_signal(signal.SIGKILL)
    with open(path) as file:
        for _ in range(200):
            time.sleep(0.05)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return "the process of the cell has ended"
    return ""
