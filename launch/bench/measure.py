"""Runs a work round by round and measures it."""

import pathlib
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import execution, shapes, stacked, types
from launch import build
from launch.machine import devices
from launch.run import narrow
from launch.tables import cells, examples

REPEATS = 5
WORKS = cells.read(pathlib.Path(__file__).with_name("works.json"))["sheets"]["works"]


# What a bench decides itself, or would not do
_NOT_TAKEN = ("eval_every", "workdir", "resume", "csv", "tensorboard", "wandb")
_NOT_TAKEN += ("keep_best", "checkpoint_every", "summary", "early_stop")


def check(given: Mapping[str, Any]) -> None:
    """Refuses (ValueError) options that have no effect on what a bench times."""
    if odd := [name for name in _NOT_TAKEN if given.get(name)]:
        raise ValueError(
            f"--{odd[0]}: a bench decides when it evaluates, and keeps nothing; omit it"
        )


def options_of(work: str, rounds: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a work with its data, evaluated once; `given` ones win."""
    part = cells.merged("works", WORKS["common"], WORKS["values"][work])
    if "data" in part and "dataset" not in given:
        given = {**given, "dataset": examples.lognormal(**part["data"])}
    return part["options"] | given | {"rounds": rounds, "eval_every": rounds}


def compiled(given: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a chip's compiler for the work; see `cost.estimate`."""
    experiment = build.experiment(**given)
    return {"algo": experiment.config.algo} | experiment.cost_analysis()


def bench(given: Mapping[str, Any]) -> dict[str, Any]:
    """Measures a run of these options, whose first of several rounds warms up."""
    experiment = build.experiment(**given)
    narrow.fit(experiment)
    config, task, rounds = experiment.config, experiment.task, given["rounds"]
    timed = {"round": _rounds(experiment)}
    if task.num_levels > 1 and task.execution.is_bucketed:
        # The same rounds with whole models and masks
        masked = given | {"bucketed": False, "client_chunk": task.execution.chunk}
        timed["masked"] = _rounds(build.experiment(**masked))
    taken: dict[str, list[float]] = {name: [] for name in timed}
    experiment.measure()
    for round in range(rounds):
        for name, seconds_of in timed.items():
            taken[name].append(seconds_of(round))
    experiment.measure()
    seconds, record = taken["round"], experiment.metrics[-1]
    totals = experiment.totals
    rate = totals.samples / sum(seconds)
    out = {
        "algo": config.algo,
        "rounds": rounds,
        "seconds_per_round": _median(seconds),
        "client_updates_per_second": totals.client_updates / sum(seconds),
        "samples_per_second": rate,
        "step_efficiency": totals.step_efficiency,
        "padding_efficiency": totals.padding_efficiency,
        "plan_bytes_per_round": experiment.simulation.windows.plan_bytes(),
        "compile_seconds": experiment.compile_seconds,
        "peak_memory_bytes": devices.peak_memory_bytes(),
        "accuracy": record.get("global_accuracy"),
        "client_accuracy": record.get("client_accuracy"),
        "client_chunk": task.execution.chunk,
        "backend": jax.default_backend(),
        "device": devices.name(),
        "num_devices": task.execution.num_devices,
    }
    if config.algo == "fedavg":  # one forward and one backward pass a step
        flops = _flops(task.client_models[0], task.example_shape)
        out["gflops"] = rate * flops / 1e9
        out["matmul_peak_gflops"] = _matmul_peak()
        out["share_of_matmul_peak"] = out["gflops"] / out["matmul_peak_gflops"]
    out["mixing_seconds"] = _mixing(experiment)
    if out["mixing_seconds"] is not None:
        out["mixing_over_round"] = out["mixing_seconds"] / out["seconds_per_round"]
    if "masked" in taken:
        out["masked_seconds_per_round"] = _median(taken["masked"])
        out["masked_over_bucketed"] = _ratio(taken["masked"], seconds)
    return {name: value for name, value in out.items() if value is not None}


def _median(values: Sequence[float]) -> float:
    """The median without the first value, which warms up, unless it is the only one."""
    return float(np.median(values[1:] or values))


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median ratio over the rounds, each of which is timed in both ways."""
    return _median([a / b for a, b in zip(above, below, strict=True)])


def _rounds(experiment: build.Experiment) -> Callable[[int], float]:
    """A function from a round to its seconds."""

    def seconds(round: int) -> float:
        before = experiment.totals.seconds
        experiment.simulation.advance_to(round + 1)
        return experiment.totals.seconds - before

    return seconds


def _mixing(experiment: build.Experiment) -> float | None:
    """Median seconds of pulling and mixing one round's models, after a warm-up call.

    Times `Algorithm.serving` of the present state with the peers of the next rounds.
    None without peers, for several seeds, and if the device does not hold all models.
    """
    algorithm = experiment.program.algorithm
    if algorithm.peers is None or experiment.config.num_seeds > 1:
        return None
    if experiment.simulation.rows.goes_by_block(algorithm):
        return None

    @jax.jit
    def mixed(state, cohort, data):
        state = stacked.at(state, 0)
        with execution.over_devices(experiment.task.execution):
            given = state, cohort, data.of_seed(0)
            return [one.own for one in algorithm.serving(*given)]

    taken = []
    for index in range(REPEATS + 1):
        cohort = experiment.planner.cohort(0, experiment.round + index)
        cohort = jax.device_put(cohort.replace(plans={}))
        begin = time.perf_counter()
        state = experiment.simulation.calls[0].state
        jax.block_until_ready(mixed(state, cohort, experiment.data))
        taken.append(time.perf_counter() - begin)
    return _median(taken)


def _matmul_peak() -> float:
    """GFLOP/s of the best of a few f32 matrix products on the default device."""
    product, a = jax.jit(lambda a, b: a @ b), jnp.ones((2048, 2048))
    product(a, a).block_until_ready()
    once = timeit.Timer(lambda: product(a, a).block_until_ready())
    return 2 * len(a) ** 3 / min(once.repeat(REPEATS, number=1)) / 1e9


def _flops(model: types.Model, example_shape: tuple[int, ...]) -> float:
    """Floating-point operations of forward and backward for one example, per XLA."""
    params, stats = shapes.variables(model, example_shape)
    image = jax.ShapeDtypeStruct((32, *example_shape), jnp.float32)

    def loss(params, stats, image):
        return model.forward(params, stats, image)[0].sum()

    # XLA counts a loop's body only once, and no product of this form is in a loop.
    with execution.traced_in(execution.Setting(form="patches")):
        lowered = jax.jit(jax.grad(loss)).lower(params, stats, image)
    return float(lowered.cost_analysis()["flops"]) / 32
