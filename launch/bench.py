"""Speed of one round: `python -m launch.bench --work=w1 [--algo=fedavg] [--json]`.

Times one round per call after a warm-up, evaluation excluded, and prints one JSON
object last. Works, on Fashion-MNIST's 60,000 train images, partition seed 0:

* w1: 100 clients, per-class Dirichlet 0.5, 10 a round, 2 epochs, SGD 0.05, batch 20,
  `fedavg_cnn`.
* w2: 50 clients, Dirichlet 0.1, 10 a round, 4 epochs, Adam 0.01, batch 128, `m1`.
* w3: 1,000 clients of 60 samples, 100 a round, 1 epoch, Adam 0.01, batch 20, `m1`.

With `--algo=fedd2s` each round is timed beside a reference: the same distillation and
supervised steps on the same batches, one client at a time, first layer included,
teacher passes and everything else excluded.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags as absl_flags

from fedjax_pfl import distill, local, losses, rng, rows, traffic, types
from launch import build, devices, flags, main
from launch.experiment import Experiment

_COMMON = {
    "dataset": "fashion_mnist",
    "test_split": "official",
    "partition_seed": 0,
    "summary": "last",
}
WORKS: dict[str, dict[str, Any]] = {
    "w1": {
        "num_clients": 100,
        "partition": "dirichlet",
        "partition_alpha": 0.5,
        "clients_per_round": 10,
        "local_epochs": 2,
        "client_optimizer": "sgd",
        "client_lr": 0.05,
        "batch_size": 20,
        "model": "fedavg_cnn",
    },
    "w2": {
        "num_clients": 50,
        "partition": "dirichlet",
        "partition_alpha": 0.1,
        "clients_per_round": 10,
        "local_epochs": 4,
        "client_optimizer": "adam",
        "client_lr": 0.01,
        "batch_size": 128,
        "model": "m1",
    },
    "w3": {
        "num_clients": 1000,
        "partition": "client_dirichlet",
        "partition_alpha": 0.5,
        "clients_per_round": 100,
        "local_epochs": 1,
        "client_optimizer": "adam",
        "client_lr": 0.01,
        "batch_size": 20,
        "model": "m1",
    },
}


def matmul_peak(size: int = 2048, repeats: int = 5) -> float:
    """GFLOP/s of the best of a few f32 matrix products on the default device."""
    product = jax.jit(lambda a, b: a @ b)
    a = jnp.ones((size, size))
    product(a, a).block_until_ready()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        product(a, a).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / min(times) / 1e9


def train_flops(model: types.Model, example_shape: tuple[int, ...]) -> float:
    """Floating-point operations of forward and backward for one example, per XLA."""
    params, stats = traffic.shapes(model, example_shape)
    image = jax.ShapeDtypeStruct((32, *example_shape), jnp.float32)

    def loss(params, stats, image):
        return model.forward(params, stats, image)[0].sum()

    lowered = jax.jit(jax.grad(loss)).lower(params, stats, image)
    return float(lowered.cost_analysis()["flops"]) / 32


def two_step_reference(experiment: Experiment) -> Callable[[int], float]:
    """`round -> seconds` of FedD2S's optimizer steps alone, after one warm-up call."""
    task, hparams, index = experiment.task, experiment.hparams, 0
    model = task.model
    data = experiment.data.replace(
        partition=jax.tree.map(lambda leaf: leaf[index], experiment.data.partition)
    )
    example = jnp.zeros((1, *task.example_shape))
    start = model.init(rng.stream(jax.random.key(0), rng.Tag.INIT), example)
    teacher = jax.random.normal(
        jax.random.key(1), (task.num_examples + hparams.batch_size, task.num_classes)
    )

    def client_update(row, shared, bound):
        client_id, plan = row
        data, (params, stats), teacher, key, round = shared

        def distil(params, stats, batch):
            logits, stats = model.forward(params, stats, batch.image)
            gap = distill.kl(
                jax.nn.log_softmax(teacher[batch.position]), jax.nn.log_softmax(logits)
            )
            return losses.masked_mean(gap, batch.mask), stats

        return local.train(
            hparams,
            (
                local.Objective(distil),
                local.Objective(local.cross_entropy_loss(model)),
            ),
            params,
            stats,
            data=data,
            client_id=client_id,
            plan=plan,
            bound=bound,
            key=key,
            round=round,
        ).params

    @jax.jit
    def steps(cohort, data, start, teacher, key, round):
        one_by_one = rows.over_clients(client_update, types.Execution(1))
        return [
            one_by_one(
                (cohort.client_id, plan),
                (data, start, teacher, key, round),
                plan.num_steps,
            )
            for plan in cohort.plans.values()
        ]

    def timed(round: int) -> float:
        cohort = jax.tree.map(jnp.asarray, experiment.cohorts(index, round))
        args = (cohort, data, start, teacher, jax.random.key(2), jnp.int32(round))
        begin = time.perf_counter()
        jax.block_until_ready(steps(*args))
        return time.perf_counter() - begin

    timed(0)
    return timed


def bench(given: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Runs a work and returns its figures."""
    experiment = build.experiment(**given, rounds=rounds, eval_every=rounds)
    seconds, accuracy, client_accuracy = [], None, None
    reference = None
    if experiment.config.algo == "fedd2s":
        reference = two_step_reference(experiment)
    reference_seconds = []
    for event, records in experiment.advance(rounds_per_call=1):
        if event.call_rounds:
            seconds.append(event.call_seconds)
            if reference is not None:
                reference_seconds.append(reference(event.round - 1))
        for record in records:
            accuracy = record.get("global_accuracy")
            client_accuracy = record.get("client_accuracy")
    totals, model = experiment.totals, experiment.task.client_models[0]
    timed = seconds[1:] or seconds
    rate = totals.samples / sum(seconds)
    flops = train_flops(model, experiment.task.example_shape)
    peak = matmul_peak()
    out = {
        "algo": experiment.config.algo,
        "rounds": rounds,
        "seconds_per_round": float(np.median(timed)),
        "client_updates_per_second": totals.client_updates / sum(seconds),
        "samples_per_second": rate,
        "padding_efficiency": totals.samples / max(totals.executed, 1),
        "compile_seconds": experiment.compile_seconds,
        "peak_memory_bytes": devices.peak_memory_bytes(),
        "accuracy": accuracy,
        "client_accuracy": client_accuracy,
        "gflops": rate * flops / 1e9,
        "matmul_peak_gflops": peak,
        "share_of_matmul_peak": rate * flops / 1e9 / peak,
        "client_chunk": experiment.task.execution.chunk,
        "backend": jax.default_backend(),
        "device": devices.name(),
    }
    if reference is not None:
        pairs = zip(seconds, reference_seconds, strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        out["reference_seconds_per_round"] = float(
            np.median(reference_seconds[1:] or reference_seconds)
        )
        out["round_over_reference"] = float(np.median(ratios[1:] or ratios))
    return {name: value for name, value in out.items() if value is not None}


def command(argv: Sequence[str] | None = None) -> None:
    """The command."""
    main.quiet()

    def extra(values: absl_flags.FlagValues) -> None:
        absl_flags.DEFINE_string("work", "w1", "w1, w2 or w3", flag_values=values)
        absl_flags.DEFINE_boolean(
            "json", False, "print the JSON object only", flag_values=values
        )

    argv = list(sys.argv if argv is None else argv)
    if not any(a.partition("=")[0].lstrip("-") == "algo" for a in argv):
        argv.append("--algo=fedavg")
    try:
        given = flags.parse(argv, extra)
        work, only_json = given.pop("work", "w1"), given.pop("json", False)
        if work not in WORKS:
            raise ValueError(f"--work={work}: expected one of {', '.join(WORKS)}")
        rounds = given.pop("rounds", 20)
        out = {"work": work} | bench(_COMMON | WORKS[work] | given, rounds)
    except ValueError as error:
        flags.fail(error)
    if not only_json:
        print(
            f"{work} {out['algo']}: {out['seconds_per_round']:.3f} s a round, "
            f"{out['samples_per_second']:,.0f} samples/s, "
            f"{out['gflops']:.0f} GFLOP/s = {100 * out['share_of_matmul_peak']:.0f} % "
            f"of this machine's matmul peak"
        )
        if "round_over_reference" in out:
            print(
                f"the optimizer steps alone, one client at a time: "
                f"{out['reference_seconds_per_round']:.3f} s; the round costs "
                f"{out['round_over_reference']:.2f}x that"
            )
    print(json.dumps(out))


if __name__ == "__main__":
    command()
