"""Finished cells: a folder with a small JSON file for each, or one file with all."""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from data import files
from fedjax_pfl import json_text
from launch.folder import finished
from launch.tables.cells import Cell

Object = Mapping[str, Any]  # of JSON
STUDY = "study.json"
# The forms of a cell in a study's folder, and in a file of a paper's cells
MEASURED = {
    "settings": dict,
    "figures": dict,
    "versions": {str: str},
    "machine": {"cpu": str, "cores": int, "device": str, "devices": int},
    "cell_seconds": json_text.NUMBER,
}
SUMMARY = {"options?": dict, "rules?": dict, "records?": [finished.CURVE]}
SUMMARY |= finished.PART


class File:
    """Finished runs by name in the file `--cells`, which may outlive their folders."""

    def __init__(self, path: str):
        """Reads the file if there is one, or raises a ValueError; "" stores nothing."""
        self._path = pathlib.Path(path) if path else None
        self._done = self._read()

    def _read(self) -> dict[str, Any]:
        if self._path is None or not self._path.exists():
            return {}
        with files.named(f"--cells={self._path} is not a file of cells", OSError):
            files.check(self._path, "a file of cells")
            return json_text.read(self._path.read_bytes(), {str: SUMMARY})

    def get(self, name: str, options: Object, rules: Object) -> dict[str, Any] | None:
        """The run of this name, if it has these options, and rules if it has any.

        `rules` are all its options but those of execution, also those that a preset
        decides. Runs of earlier versions have none.
        """
        found = self._done.get(self._place(name, options, rules), {})
        return found if found.get("options") == options else None

    def put(self, name: str, options: Object, rules: Object, done: Object) -> None:
        """Stores a run atomically, or raises an OSError.

        Runs of one name may be of several tables, data sets or options, and all stay.
        """
        if self._path is None:
            return
        # Another command may have written to the file meanwhile.
        self._done = self._read()
        place = self._place(name, options, rules)
        self._done[place] = {**done, "options": dict(options), "rules": dict(rules)}
        lines = [
            f"{json.dumps(key)}: {json.dumps(one, sort_keys=True)}"
            for key, one in sorted(self._done.items())
        ]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        finished.write_text(self._path, text, is_shared=True)

    def _place(self, name: str, options: Object, rules: Object) -> str:
        """The name, with a hash if the file has it for a run of other options."""

        def is_free(place: str) -> bool:
            held = self._done.get(place, {})
            known = held.get("rules", {})
            return _fits(known, rules) and held.get("options", options) == options

        with_rules = {"options": options, "rules": rules}
        every = name, beside(name, options), beside(name, with_rules)
        return next(filter(is_free, every), every[-1])


def _fits(known: Object, rules: Object) -> bool:
    """Whether known rules are equal, as far as a version that wrote them had them."""
    return all(
        _fits(known[name], value) if isinstance(value, dict) else known[name] == value
        for name, value in rules.items()
        if name in known
    )


def beside(name: str, key: Object) -> str:
    """A name with a hash of what a run has, for one beside another of this name."""
    text = json.dumps(key, sort_keys=True)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def is_taken(path: pathlib.Path) -> bool:
    """Whether a path is anything but a new or empty folder.

    Another process may write the study's file there.
    """
    if not path.is_dir():
        return path.exists()
    return not all(finished.is_partial(one, STUDY) for one in path.iterdir())


def is_study(folder: pathlib.Path) -> bool:
    """Whether a folder is that of a study."""
    return (folder / STUDY).is_file()


def read(path: pathlib.Path, kind: Any, cure: str) -> dict[str, Any] | None:
    """A finished cell's file, None without one.

    `cure` is what its ValueError promises for a damaged file that one removes.
    """
    try:
        return json_text.read(path.read_bytes(), kind)
    except FileNotFoundError:
        return None
    except ValueError as error:
        line = f"{path} is damaged: {error}; remove it, and its {cure}"
        raise ValueError(line) from error


def write(path: pathlib.Path, cell: Object) -> None:
    """Stores a finished cell atomically, or raises an OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(cell, indent=1, sort_keys=True) + "\n"
    finished.write_text(path, text, is_shared=True)


class Folder:
    """The folder of a study, with a file for each finished cell."""

    def __init__(self, path: pathlib.Path, name: str = ""):
        """Opens a folder, which need not exist yet, for the study `name`.

        An empty `name` means the study that it holds. Raises a ValueError if it holds
        something else, or another study.
        """
        held, file = "", path / STUDY
        if is_study(path):
            try:
                held = json_text.read(file.read_bytes(), {"study": str})["study"]
            except ValueError as error:
                raise ValueError(f"{file} is damaged: it names no study") from error
        elif not name:
            raise ValueError(f"{path} holds no study: there is no {STUDY} in it")
        elif is_taken(path):
            raise ValueError(
                f"--folder={path} holds something else than a study; give a new folder"
            )
        if held and name not in ("", held):
            raise ValueError(
                f"--folder={path} holds the study {held}, not {name}; give another"
            )
        self.path, self.name = path, name or held

    def begin(self) -> None:
        """Makes the folder before a cell runs in it, or raises an OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not is_study(self.path):
            text = json.dumps({"study": self.name})
            finished.write_text(self.path / STUDY, f"{text}\n", is_shared=True)

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a cell, None if it is not finished with its settings."""
        done = read(self.path / f"{cell.name}.json", MEASURED, "cell runs again")
        return done if done and done["settings"] == cell.settings else None

    def put(self, cell: Cell, done: Object) -> None:
        """Stores the result of a cell, see `write`."""
        known = {part: done.get(part) for part in MEASURED}
        entry = finished.finite(known | {"settings": cell.settings})
        write(self.path / f"{cell.name}.json", entry)
