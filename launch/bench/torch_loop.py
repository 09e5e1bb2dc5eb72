"""w1, w2 or w3 as a plain PyTorch loop: `python -m launch.bench.torch_loop`.

It is the loop that one would write: one client after another on all threads of the
machine, or on a GPU, a model, an optimizer, and the mean of the clients' models. It
makes as many steps on the same batches as `python -m launch.bench --work=...`, from
parameters that PyTorch draws. The package `torch` must be installed.
"""

import dataclasses
import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import options, shapes
from fedjax_pfl.options import option
from launch import build, ending
from launch.bench import measure
from launch.config import flags
from launch.tables import loops

# The works, and the padding of their nets
PADDING = {"w1": "valid", "w2": "same", "w3": "same"}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of this command."""

    work: str = option("w1", " or ".join(PADDING))
    rounds: int = option(6, "timed rounds, after one that warms up", minimum=1)
    data_dir: str = option("", "the folder of the data set")
    torch_device: str = option("cpu", "where PyTorch computes, such as cpu or cuda")


def timed(
    torch: Any, work: str, rounds: int, given: dict[str, Any], where: Any
) -> list[Any]:
    """(seconds, samples) of each round of a work, after one that warms up.

    `where` is PyTorch's device.
    """
    given |= {"algo": "fedavg", "devices": 1}
    experiment = build.experiment(**measure.options_of(work, rounds + 1, given))
    task, hparams, data = experiment.task, experiment.hparams, experiment.data
    image, label = data.gather(jnp.arange(len(data.label)))
    image = torch.tensor(np.asarray(image)).movedim(-1, 1).contiguous()
    label = torch.tensor(np.asarray(label, np.int64))
    images = image.to(where), label.to(where)
    params = shapes.variables(task.model, task.example_shape).params
    nets = [loops.torch_net(torch, params, PADDING[work]).to(where) for _ in range(2)]
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    kind = functools.partial(kinds[hparams.client_optimizer], lr=hparams.client_lr)
    cohorts, found = loops.planned(experiment, 0, rounds + 1), []
    for clients in cohorts.values():
        begin = time.perf_counter()
        loops.torch_round(torch, *nets, clients, images, kind)
        if where.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        found.append((seconds, sum((one.rows >= 0).sum() for one in clients)))
    return found[1:]


def _device(torch: Any, asked: Options) -> Any:
    """PyTorch's device of the options; a ValueError says that it has none like it."""
    try:
        return torch.empty(0, device=asked.torch_device).device
    except (RuntimeError, AssertionError) as error:
        line = f"--torch_device={asked.torch_device}: {options.reason(error)}"
        raise ValueError(line) from error


@ending.command
def command(argv: list[str]) -> None:
    """Times the loop, and prints a JSON object."""
    with ending.refused():
        asked = flags.options_alone(argv, Options, __doc__)
        options.check_one_of("work", asked.work, PADDING)
        torch = loops.imported_torch()
        given = {"data_dir": asked.data_dir} if asked.data_dir else {}
        found = timed(torch, asked.work, asked.rounds, given, _device(torch, asked))
    seconds, samples = map(sum, zip(*found, strict=True))
    out = {
        "work": asked.work,
        "seconds_per_round": float(np.median([one for one, _ in found])),
        "samples_per_second": float(samples / seconds),
        "threads": torch.get_num_threads(),
        "torch_device": asked.torch_device,
        "torch": torch.__version__,
        "jax": jax.__version__,
    }
    print(json.dumps(out))


if __name__ == "__main__":
    command()
