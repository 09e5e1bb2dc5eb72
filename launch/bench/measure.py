"""Runs a work round by round and takes its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from launch import build
from launch.bench import machine, masking, mixing, references
from launch.run import devices


def bench(given: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Runs a work and returns its figures.

    Args:
        given: Option -> value, as for `build.experiment`.
        rounds: How many; the first one warms up, unless it is alone.
    """
    given = given | {"rounds": rounds, "eval_every": rounds}
    if callable(given["dataset"]):
        given["dataset"] = given["dataset"]()
    experiment = build.experiment(**given)
    seconds = []
    config = experiment.config
    plain_loop = references.PLAIN_LOOPS.get(config.algo)
    reference = plain_loop(experiment) if plain_loop else None
    reference_seconds = []
    masked, masked_seconds = masking.rounds(experiment, given), []
    experiment.measure()
    for round in range(rounds):
        before = experiment.totals.seconds
        experiment.simulation.advance_to(round + 1)
        seconds.append(experiment.totals.seconds - before)
        if reference is not None:
            reference_seconds.append(reference(round))
        if masked is not None:
            masked_seconds.append(masked(round))
    experiment.measure()
    record = experiment.metrics[-1]
    totals, model = experiment.totals, experiment.task.client_models[0]
    rate = totals.samples / sum(seconds)
    out = {
        "algo": config.algo,
        "rounds": rounds,
        "seconds_per_round": _median(seconds),
        "client_updates_per_second": totals.client_updates / sum(seconds),
        "samples_per_second": rate,
        "step_efficiency": totals.step_efficiency,
        "padding_efficiency": totals.padding_efficiency,
        "plan_bytes_per_round": experiment.simulation.plan_bytes(),
        "compile_seconds": experiment.compile_seconds,
        "peak_memory_bytes": devices.peak_memory_bytes(),
        "accuracy": record.get("global_accuracy"),
        "client_accuracy": record.get("client_accuracy"),
        "client_chunk": experiment.task.execution.chunk,
        "lanes": experiment.task.execution.lanes,
        "backend": jax.default_backend(),
        "device": devices.name(),
    }
    if config.algo in references.PLAIN_STEPS:
        flops = machine.train_flops(model, experiment.task.example_shape)
        out["gflops"] = rate * flops / 1e9
        out["matmul_peak_gflops"] = machine.matmul_peak()
        out["share_of_matmul_peak"] = out["gflops"] / out["matmul_peak_gflops"]
    out["mixing_seconds"] = mixing.seconds(experiment)
    if out["mixing_seconds"] is not None:
        out["mixing_over_round"] = out["mixing_seconds"] / out["seconds_per_round"]
    if reference is not None:
        out["reference_seconds_per_round"] = _median(reference_seconds)
        out["round_over_reference"] = _ratio(seconds, reference_seconds)
    if masked is not None:
        out["masked_seconds_per_round"] = _median(masked_seconds)
        out["masked_over_bucketed"] = _ratio(masked_seconds, seconds)
    return {name: value for name, value in out.items() if value is not None}


def _median(values: Sequence[float]) -> float:
    """Of all but the first, which warms up, unless it is alone."""
    return float(np.median(values[1:] or values))


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over the rounds, each of which is timed in both ways in turn."""
    return _median([a / b for a, b in zip(above, below, strict=True)])
