"""Does each fault of interpretation get a line? `python -m tests.faults [NAME ...]`.

Each function of the modules beside this one does what a user may do by mistake, and
returns the line that he sees. Its name and that line are printed, and a fault without a
line is called silent; the exit status is then 1.
"""

import contextlib
import importlib
import io
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator

HERE = pathlib.Path(__file__).parent


def found() -> Iterator[tuple[str, Callable[[pathlib.Path], str]]]:
    """(name, function) of every fault, whose name begins with a label such as s3_."""
    for path in sorted(HERE.glob("part_*.py")):
        module = importlib.import_module(f"tests.faults.{path.stem}")
        for name, one in list(vars(module).items()):
            if re.match(r"[a-z]+\d+_", name) and callable(one):
                yield f"{path.stem.removeprefix('part_')}.{name}", one


def line(one: Callable[[pathlib.Path], str]) -> str:
    """The line that a user sees, "" if there is none."""
    quiet = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            return " ".join(one(pathlib.Path(folder)).split())


def main(wanted: list[str]) -> int:
    """Prints each fault with its line; returns the number of silent ones."""
    silent = 0
    for name, one in found():
        if wanted and not any(text in name for text in wanted):
            continue
        text = line(one)
        silent += not text
        print(f"{name}: {text or 'SILENT'}", flush=True)
    print(f"{silent} silent")
    return silent


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
