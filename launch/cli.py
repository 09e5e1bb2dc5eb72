"""The command `fedjax-pfl`: every program of `launch`, from any folder.

`fedjax-pfl run --algo=cdkt` is `python -m launch.main --algo=cdkt`, but modules named
`data`, `models` or `launch` in the current folder do not affect it.
"""

import importlib
import sys

COMMANDS = {
    "run": ("launch.main", "main", "run one algorithm"),
    "list": ("launch.list", "command", "algorithms, presets, data, models, tables"),
    "reproduce": ("launch.reproduce", "command", "a paper's table, beside its numbers"),
    "contract": ("launch.contract", "command", "a check of your own algorithm"),
    "study": ("launch.study.__main__", "command", "what scales, or methods compared"),
    "plot": ("launch.plot", "command", "curves, fairness and class bubbles of runs"),
    "report": ("launch.report", "command", "one HTML page about runs"),
    "export": ("launch.export", "command", "a trained model as a file"),
    "bench": ("launch.bench.__main__", "command", "how fast rounds are"),
}


def main() -> None:
    """Runs the program that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h", "-help", "help"):
        print("fedjax-pfl COMMAND [--option=value ...]\n")
        for command, (_, _, about) in COMMANDS.items():
            print(f"  {command:<10} {about}")
        print("\nfedjax-pfl COMMAND --help lists a command's options.")
        return
    if name not in COMMANDS:
        from fedjax_pfl import options  # imports jax, which takes long

        known = f"{', '.join(COMMANDS)}{options.nearest(name, COMMANDS)}"
        print(f"error: fedjax-pfl {name}: expected one of {known}", file=sys.stderr)
        raise SystemExit(2)
    module, function, _ = COMMANDS[name]
    sys.argv = [f"fedjax-pfl {name}", *sys.argv[2:]]
    getattr(importlib.import_module(module), function)(sys.argv)
