"""What it costs to pull and mix the peers' models, without any training."""

from __future__ import annotations

import time

import jax
import numpy as np

from launch.config import registry
from launch.experiment import Experiment

REPEATS = 5


def seconds(experiment: Experiment) -> float | None:
    """Median seconds of mixing one round's models, after a warm-up call.

    That is what serves the clients of a decentralised algorithm: `Algorithm.serving`
    of the state as it is, with the peers of the next rounds.

    Returns:
        None for algorithms without peers, and for several seeds.
    """
    algorithm = registry.algorithm(experiment.config.algo).make(
        experiment.hparams, experiment.task
    )
    if algorithm.peers is None or experiment.config.num_seeds > 1:
        return None

    @jax.jit
    def mixed(state, cohort, data):
        partition = jax.tree.map(lambda leaf: leaf[0], data.partition)
        state = jax.tree.map(lambda leaf: leaf[0], state)
        served = algorithm.serving(state, cohort, data.replace(partition=partition))
        return [one.own for one in served]

    taken = []
    for index in range(REPEATS + 1):
        cohort = experiment.planner.cohort(0, experiment.round + index)
        cohort = jax.device_put(cohort.replace(plans={}))
        begin = time.perf_counter()
        jax.block_until_ready(mixed(experiment.state, cohort, experiment.data))
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken[1:]))
