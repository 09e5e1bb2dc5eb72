"""What is installed: the wheel has every file, and works beside files of its names."""

import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("algorithms", "data", "fedjax_pfl", "launch", "models")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the tracked files, made without a network, and unpacked."""
    pytest.importorskip("setuptools", minversion="77")  # pyproject's licence
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "out"))
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps"]
    command += ["--no-build-isolation", f"--wheel-dir={out}", str(source)]
    subprocess.run(command, check=True)
    (file,) = out.glob("*.whl")
    zipfile.ZipFile(file).extractall(out)
    return out


def tracked(*folders):
    """The files under version control, by their paths."""
    command = ["git", "ls-files", *folders]
    return subprocess.check_output(command, cwd=ROOT, text=True).splitlines()


def test_every_file_is_in_it(wheel):
    """Also sheets, flagfiles, templates and marks of types."""
    assert not [name for name in tracked(*PACKAGES) if not (wheel / name).exists()]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["list"], "fedala"),
        (["reproduce", "cdkt.table1", "--dataset=mnist_5k", "--dry_run"], "missing"),
        (["study", "scaling_small", "--dry_run"], "to run"),
    ],
)
def test_commands_beside_own_files(wheel, tmp_path, monkeypatch, command, shown):
    """The installed command does not read a `models.py` and a `data/` of the user."""
    monkeypatch.setenv("PYTHONPATH", str(wheel))
    (tmp_path / "models.py").write_text("raise ValueError")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/__init__.py").write_text("raise ValueError")
    # -P: an installed command has its own folder on the path, and not the current one.
    start = [sys.executable, "-P", "-c", "from launch import cli; cli.main()"]
    done = subprocess.run(
        [*start, *command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shown in done.stdout
