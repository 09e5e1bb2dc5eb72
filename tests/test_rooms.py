"""The rooms of `launch` and their imports, drawn in docs/how_it_is_built.md."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
ROOMS = (
    "config",
    "machine",
    "assemble",
    "run",
    "models_out",
    "folder",
    "show",
    "faces",
    "tables",
    "commands",
)
FACES = ("compare", "contract", "ending", "experiment", "main")
INNER = [name for name in ROOMS if name not in ("faces", "commands")]


def room(module):
    """The room of `launch.<...>`."""
    first = module.split(".")[1] if "." in module else ""
    return first if first in INNER else "faces" if first in FACES else "commands"


def imports():
    """Module -> the modules of `launch` that it imports, at its top or inside."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "launch").rglob("*.py")
        if path.name != "__init__.py"
    }
    assert paths
    found = {}
    for module, path in paths.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        found[module] = names & paths.keys()
    return found


def drawing():
    """The rooms with their files, from the ground up, and the imports between them."""
    found = imports()
    lines = ["```mermaid", "flowchart BT"]
    for name in ROOMS:
        files = sorted({m.split(".")[-1] for m in found if room(m) == name})
        if name == "commands":
            files = sorted({m.split(".")[1] for m in found if room(m) == name}, key=str)
        lines.append(f'  {name}["<b>{name}</b><br>{", ".join(files)}"]')
    arrows = {(room(a), room(b)) for a, seen in found.items() for b in seen}
    for one in ROOMS:
        below = [other for other in ROOMS if (one, other) in arrows - {(one, one)}]
        # An arrow that others imply is not drawn.
        drawn = [
            other
            for other in below
            if not any(
                (between, other) in arrows for between in below if between != other
            )
        ]
        lines += [f"  {other} --> {one}" for other in drawn]
    return "\n".join([*lines, "```"])


def test_rooms_stand_on_one_another():
    """Rooms import only rooms that precede them in `ROOMS`."""
    for module, seen in imports().items():
        for other in seen:
            assert ROOMS.index(room(other)) <= ROOMS.index(room(module)), (
                module,
                other,
            )


def test_no_circle():
    """Files can be put in an order in which each imports only what stands before it."""
    left = imports()
    while left:
        free = [module for module, seen in left.items() if not seen & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        left = {module: seen for module, seen in left.items() if module not in free}


def test_the_drawing_is_of_the_code():
    """The page's is what `python -m tests.test_rooms` prints."""
    assert drawing() in (ROOT / "docs" / "how_it_is_built.md").read_text()


def test_a_room_s_init_is_empty():
    """Nothing is hidden in one."""
    for name in INNER:
        assert not (ROOT / "launch" / name / "__init__.py").read_text()


if __name__ == "__main__":
    print(drawing())
