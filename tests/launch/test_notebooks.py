"""The notebooks run from top to bottom, and are committed with what they show."""

import pathlib

import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parent.parent.parent / "launch" / "notebooks"
NAMES = ("quickstart", "your_own", "many_clients_on_tpu")


def test_these_are_all():
    """A new one is tested too."""
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_from_top_to_bottom(name, tmp_path):
    """In a folder of its own; an exception in a cell is one here."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=180, resources=where).execute()
    if name == "your_own":
        told = [
            output["text"]
            for cell in notebook.cells
            for output in cell.get("outputs", [])
            if output.get("text", "").startswith("largest difference:")
        ]
        assert len(told) == 1 and float(told[0].split(":")[1]) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_committed_with_outputs(name):
    """Every cell was run, in order, without an error."""
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1))
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert "error" not in kinds and kinds & {"execute_result", "display_data"}
