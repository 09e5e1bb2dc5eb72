"""w1, w2 or w3 as a plain PyTorch loop: `python -m launch.bench.torch_loop`.

It is the loop that one would write: one client after another on all threads of the
machine, a model, an optimizer, and the mean of the clients' models. It makes as many
steps on the same batches as `python -m launch.bench --work=...`, from parameters that
PyTorch draws. The package `torch` must be installed.
"""

import dataclasses
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import shapes
from fedjax_pfl.options import option
from launch import build, ending
from launch.bench import works
from launch.config import flags, limits
from launch.study import loops

# The works, and the padding of their nets
PADDING = {"w1": "valid", "w2": "same", "w3": "same"}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of this command."""

    work: str = option("w1", " or ".join(PADDING))
    rounds: int = option(6, "timed rounds, after one that warms up", minimum=1)
    data_dir: str = option("", "the folder of the data set")


def net(torch: Any, params: tuple[Any, ...], padding: str) -> Any:
    """Convolutions with a 2x2 pool, then affine layers, in the shapes of `params`."""
    kernels = [stage["trunk"]["kernel"].shape for stage in params]
    layers: list[Any] = []
    for shape in kernels:
        if len(shape) == 4:
            side, _, channels, features = shape
            layers += [
                torch.nn.Conv2d(channels, features, side, padding=padding),
                torch.nn.ReLU(),
                torch.nn.MaxPool2d(2),
            ]
            continue
        if isinstance(layers[-3], torch.nn.Conv2d):
            layers.append(torch.nn.Flatten())
        layers += [torch.nn.Linear(*shape), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def timed(torch: Any, given: dict[str, Any], padding: str, rounds: int) -> list[Any]:
    """(seconds, samples) of each round, the first of which warms up."""
    given |= {"rounds": rounds + 1, "eval_every": rounds + 1, "devices": 1}
    experiment = build.experiment(**given)
    hparams, data = experiment.hparams, experiment.data
    image, label = data.gather(jnp.arange(len(data.label)))
    image = torch.tensor(np.asarray(image)).movedim(-1, 1).contiguous()
    label = torch.tensor(np.asarray(label, np.int64))
    task = experiment.task
    params = shapes.variables(task.model, task.example_shape).params
    server, client = net(torch, params, padding), net(torch, params, padding)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    cohorts, found = loops.planned(experiment, 0, rounds + 1), []
    for round in range(rounds + 1):
        begin = time.perf_counter()
        state = {k: v.clone() for k, v in server.state_dict().items()}
        total = {k: torch.zeros_like(v) for k, v in state.items()}
        weights = samples = 0
        for one in cohorts[0, round]:
            client.load_state_dict(state)
            kind = kinds[hparams.client_optimizer]
            tx = kind(client.parameters(), lr=hparams.client_lr)
            for rows in one.rows:
                chosen = torch.from_numpy(rows[rows >= 0])
                tx.zero_grad()
                loss = torch.nn.functional.cross_entropy(
                    client(image[chosen]), label[chosen]
                )
                loss.backward()
                tx.step()
                samples += len(chosen)
            for name, value in client.state_dict().items():
                total[name] += one.weight * value
            weights += one.weight
        server.load_state_dict({k: v / weights for k, v in total.items()})
        found.append((time.perf_counter() - begin, samples))
    return found


@ending.command
def command(argv: list[str]) -> None:
    """Times the loop, and prints a JSON object."""
    with ending.refused():
        asked, rest, _ = flags.asked(argv, Options, __doc__)
        if rest:
            raise ValueError(
                f"{limits.shown(rest[0])} is not an option of this command"
            )
        limits.check_one_of("work", asked.work, PADDING)
        try:
            import torch
        except ImportError as error:
            raise ValueError(f"torch is not installed ({error})") from error
        given = works.COMMON | works.WORKS[asked.work] | {"algo": works.ALGORITHM}
        if asked.data_dir:
            given["data_dir"] = asked.data_dir
        found = timed(torch, given, PADDING[asked.work], asked.rounds)[1:]
    seconds, samples = map(sum, zip(*found, strict=True))
    out = {
        "work": asked.work,
        "seconds_per_round": float(np.median([one for one, _ in found])),
        "samples_per_second": samples / seconds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "jax": jax.__version__,
    }
    print(json.dumps(out))


if __name__ == "__main__":
    command()
