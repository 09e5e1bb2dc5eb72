"""Lists algorithms, presets, data sets, models and tables: `python -m launch.list`.

`--model=NAME` prints the costs of that model: parameters, buffers (running statistics)
and multiply-accumulates of one example by stage, by the level of a submodel, and at
other widths if the model has them. `--algo=NAME --target=tpu:v5e` prints what a round
costs on that chip as its compiler estimates it, without having one.
"""

import dataclasses
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import algorithms
import models
from data import loaders, own_files, partitions, texts
from fedjax_pfl import options, types
from fedjax_pfl.options import option
from launch import ending, experiment
from launch.assemble import fit
from launch.config import flags, limits, presets
from launch.machine import target
from launch.run import cost
from launch.tables import cells
from models import counts

WIDTHS = BASES = 4


@dataclasses.dataclass(frozen=True)
class Asked:
    """The options of this command."""

    algo: str = option("", "the algorithm to compile with its defaults for --target")
    target: str = option(
        "", "compile for a chip without having one", choices=("", *target.CHIPS)
    )
    model: str = option("", "the model to count")
    num_classes: int = option(10, "classes of its exits", minimum=2)
    example_shape: str = option("32,32,3", "shape of one example, such as 28,28,1")
    model_width: float = option(
        1.0, "factor on its hidden channels and widths", above=0, maximum=1000
    )


def main() -> None:
    """Prints algorithms, presets, data sets, models, partitions and papers' tables."""
    sections = {
        "algorithms (--algo), with their default presets": {
            name: f"{entry.preset:<7} {algorithms.describe(name)}"
            for name, entry in algorithms.ALGORITHMS.items()
        },
        "presets (--preset), with the options that they set by default": {
            name: presets.describe(name) for name in presets.PRESETS
        },
        "data sets (--dataset)": {
            name: entry.help for name, entry in (loaders.DATASETS | texts.TEXTS).items()
        }
        | own_files.FILES,
        "models (--model, --client_model), hidden channels x --model_width": {
            name: models.describe(name) for name in models.MODELS
        },
        "partitions (--partition)": partitions.PARTITIONS,
        "tables of the papers (python -m launch.reproduce NAME)": {
            name: table["title"] for name, table in cells.papers().items()
        },
        "studies (python -m launch.study NAME)": {
            name: study["title"] for name, study in cells.studies().items()
        },
    }
    for section, entries in sections.items():
        print(section)
        for name, text in entries.items():
            print(_wrapped(f"  {name:<18} ", text))


def _wrapped(name: str, text: str) -> str:
    """A name and a text, which continues below itself in a terminal.

    Elsewhere it is one line, which can be searched.
    """
    if not sys.stdout.isatty():
        return name + text
    below = " " * min(len(name), 21)
    given = {"break_long_words": False, "break_on_hyphens": False}
    given |= {"width": shutil.get_terminal_size().columns, "subsequent_indent": below}
    return textwrap.fill(name + text, **given)


def _shape(text: str) -> tuple[int, ...]:
    """The shape of an example, one to four positive numbers."""
    flag = f"--example_shape={limits.shown(text)}"
    if not re.fullmatch(r"[0-9]{1,10}(,[0-9]{1,10}){0,3}", text):
        raise ValueError(f"{flag}: expected one to four numbers, such as 32,32,3")
    shape = tuple(map(int, text.split(",")))
    if not 0 < math.prod(shape) <= limits.INT_LIMIT:
        raise ValueError(
            f"{flag} is {math.prod(shape)} numbers; expected 1 to {limits.INT_LIMIT}"
        )
    return shape


def _print_table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints a blank line, then columns under their heads, the first to the left."""
    table = [[*heads, "parameters", "buffers", "MACs"]]
    table += [[f"{n:,}" if isinstance(n, int) else n for n in row] for row in rows]
    sizes = [max(map(len, column)) for column in zip(*table, strict=True)]
    print()
    for first, *others in table:
        line = "  ".join(t.rjust(n) for t, n in zip(others, sizes[1:], strict=True))
        print(f"  {first.ljust(sizes[0])}  {line}")


def _print_counts(model: types.Model, shape: tuple[int, ...]) -> None:
    """Prints a model by stages, levels and widths."""
    _print_table(
        ["stage", "output"],
        [
            (stage.name, "x".join(map(str, stage.output)), *stage.count)
            for stage in counts.stages(model, shape)
        ],
    )
    levels = enumerate(counts.levels(model, shape), start=1)
    _print_table(["level"], [(f"{level}", *count) for level, count in levels])
    model = model.one_exit or model
    if model.at_width is None:
        return
    by_width = {
        n: counts.whole(model.at_width(n / WIDTHS), shape) for n in range(1, WIDTHS + 1)
    }
    rows = [(f"{n}/{WIDTHS}", *count) for n, count in by_width.items()]
    _print_table(["width"], rows)
    base = by_width[WIDTHS // 2]
    rows = [(f"{n}", *counts.total([base] * n)) for n in range(1, BASES + 1)]
    _print_table(["models of width 1/2"], rows)


@ending.command
def command(argv: list[str]) -> None:
    """Lists all names, or prints the costs of a model."""
    with ending.refused():
        asked, rest, given = flags.asked(argv, Asked, __doc__)
        if rest:
            line = f"{limits.shown(rest[0])} is not a flag"
            raise ValueError(f"{line}; options are written --name=value")
        if given & {"algo", "target"}:
            if given != {"algo", "target"} or not asked.target:
                raise ValueError(
                    "--algo=NAME and --target=CHIP go together, alone; the options of "
                    "a method are in python -m launch.main --algo=NAME --help"
                )
            made = experiment.experiment(algo=asked.algo, target=asked.target)
            print(cost.in_words({"algo": asked.algo} | made.cost_analysis()))
            return
        if "model" not in given:
            if given:
                raise ValueError(f"--{min(given)} has no effect without --model=NAME")
            main()
            return
        options.check_one_of("model", asked.model, models.MODELS)
        shape = _shape(asked.example_shape)
        model = models.make(asked.model, asked.num_classes, asked.model_width)
        try:
            fit.check_model("model", model, shape, takes=model.takes)
        except ValueError as error:
            # What a run would change is no option here.
            line, _, _ = str(error).replace(" (--layout=ntc)", "").rpartition("; ")
            cure = "64" if model.takes == "tokens" else "32,32,3"
            cure = f"give --example_shape={cure}"
            if "--model_width" in line:
                cure = "give another --model_width"
            raise ValueError(f"{line}; {cure}") from error
    print(
        f"{asked.model}, {asked.num_classes} classes, examples of "
        f"{'x'.join(map(str, shape))}, width {asked.model_width:g}"
    )
    _print_counts(model, shape)


if __name__ == "__main__":
    command()
