"""The finished cells of a study: a folder with a small JSON file for each."""

import contextlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_pfl import json_text
from launch.folder import finished
from launch.studies import tables

STUDY = "study.json"
# The parts of a cell's file
_PARTS = {
    "settings": dict,
    "figures": dict,
    "versions": {str: str},
    "machine": {"cpu": str, "cores": int, "device": str, "devices": int},
    "cell_seconds": json_text.NUMBER,
}


def is_study(folder: pathlib.Path) -> bool:
    """Whether a folder is that of a study."""
    return (folder / STUDY).is_file()


class Folder:
    """The folder of a study."""

    def __init__(self, path: pathlib.Path, name: str = ""):
        """Opens a folder, which need not exist yet.

        Args:
            path: The folder.
            name: The name of its study, empty = it must hold one.

        Raises:
            ValueError: one line: it holds something else, or another study.
        """
        self.path = path
        held = self._held()
        if not held and not name:
            raise ValueError(f"{path} holds no study: there is no {STUDY} in it")
        if held and name and held != name:
            raise ValueError(
                f"--folder={path} holds the study {held}, not {name}; give another"
            )
        if not held and path.exists() and (path.is_file() or any(path.iterdir())):
            raise ValueError(
                f"--folder={path} holds something else than a study; give a new folder"
            )
        self.name = name or held

    def _held(self) -> str:
        """The name of the study that it holds, "" if there is none."""
        path = self.path / STUDY
        if not is_study(self.path):
            return ""
        try:
            return json_text.read(path.read_bytes(), {"study": str})["study"]
        except ValueError as error:
            raise ValueError(f"{path} is damaged: it names no study") from error

    def begin(self) -> None:
        """Makes the folder, before a cell runs in it.

        Raises:
            OSError: it cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not is_study(self.path):
            text = json.dumps({"study": self.name})
            finished.write_text(self.path / STUDY, f"{text}\n")

    def file(self, cell: tables.Cell) -> pathlib.Path:
        """The file of a cell."""
        return self.path / f"{cell.name}.json"

    def get(self, cell: tables.Cell) -> dict[str, Any] | None:
        """A finished cell, None if it has not run, or has run with other settings.

        Raises:
            ValueError: one line: the file of the cell is damaged.
        """
        path = self.file(cell)
        try:
            done = json_text.read(path.read_bytes(), _PARTS)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged: {error}; remove it, and its cell runs again"
            ) from error
        return done if done["settings"] == cell.settings else None

    def like(
        self, cell: tables.Cell, others: Sequence[tables.Cell]
    ) -> dict[str, Any] | None:
        """The result of another finished cell with the same settings, if any.

        A damaged file is no result; it is named where its own cell is asked for.
        """
        for one in others:
            if one.settings == cell.settings and one != cell:
                with contextlib.suppress(ValueError):
                    if done := self.get(one):
                        return done
        return None

    def put(self, cell: tables.Cell, done: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps the result of a cell, in one step.

        Raises:
            OSError: it cannot be written.
        """
        entry = {"settings": cell.settings} | {
            name: done[name] for name in _PARTS if name != "settings"
        }
        path = self.file(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finished.finite(entry), indent=1, sort_keys=True)
        finished.write_text(path, f"{text}\n")
        return entry
