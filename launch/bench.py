"""Speed of one round: `python -m launch.bench --work=w1 [--algo=fedavg] [--json]`.

Times one round per call after a warm-up, evaluation excluded, and prints one JSON
object last. Works, on Fashion-MNIST's 60,000 train images, partition seed 0:

* w1: 100 clients, per-class Dirichlet 0.5, 10 a round, 2 epochs, SGD 0.05, batch 20,
  `fedavg_cnn`.
* w2: 50 clients, Dirichlet 0.1, 10 a round, 4 epochs, Adam 0.01, batch 128, `m1`.
* w3: 1,000 clients of 60 samples, 100 a round, 1 epoch, Adam 0.01, batch 20, `m1`.

With `--algo=fedd2s` each round is timed beside a reference, a plain loop of the same
distillation and supervised steps on the same batches, one client at a time, first layer
included, teacher passes and everything else excluded. GFLOP/s are printed for `fedavg`
only, whose steps are one forward and backward pass.
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
import optax
from absl import flags as absl_flags

from fedjax_pfl import traffic, types
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
    """`round -> seconds` of FedD2S's optimizer steps alone, after one warm-up call.

    A plain loop of its own, client after client: on each batch of the server's plan a
    distillation and a supervised step of the layers behind the first (whose forward
    pass is needed), on each batch of the local plan both steps of all layers.
    """
    task, hparams = experiment.task, experiment.hparams
    model, tx = task.model, optax.adam(hparams.client_lr)
    data = experiment.data.replace(
        partition=jax.tree.map(lambda leaf: leaf[0], experiment.data.partition)
    )
    example = jnp.zeros((1, *task.example_shape))
    start, stats = model.init(jax.random.key(0), example)
    shape = (task.num_examples + hparams.batch_size, task.num_classes)
    teacher = jax.nn.softmax(jax.random.normal(jax.random.key(1), shape))

    def steps_of(plan, first, cohort, data, start, teacher):
        """All steps of one plan; stages below `first` are frozen."""
        owned = data.partition.train

        def client(row):
            client_id, position, num_steps = row
            begin = owned.start[client_id]

            def step(index, carry):
                at = position[index]
                mask = at >= 0
                image, label = data.gather(owned.row[begin + jnp.maximum(at, 0)])
                target, count = teacher[at], jnp.maximum(mask.sum(), 1)

                def log_prob(deep):
                    h, _ = model.forward(start, stats, image, stop=first)
                    out, _ = model.forward(
                        (*start[:first], *deep), stats, h, start=first
                    )
                    return jax.nn.log_softmax(out)

                def distil(deep):
                    return -jnp.where(mask, (target * log_prob(deep)).sum(-1), 0).sum()

                def supervised(deep):
                    chosen = jnp.take_along_axis(log_prob(deep), label[:, None], 1)
                    return -jnp.where(mask, chosen[:, 0], 0).sum()

                deep, opt_state = carry
                for loss in (distil, supervised):
                    grads = jax.grad(lambda d, f=loss: f(d) / count)(deep)
                    updates, opt_state = tx.update(grads, opt_state)
                    deep = optax.apply_updates(deep, updates)
                return deep, opt_state

            deep = start[first:]
            return jax.lax.fori_loop(0, num_steps, step, (deep, tx.init(deep)))[0]

        return jax.lax.map(client, (cohort.client_id, plan.position, plan.num_steps))

    @jax.jit
    def steps(cohort, data, start, teacher):
        tables = (cohort, data, start, teacher)
        return (
            steps_of(cohort.plans["server"], 1, *tables),
            steps_of(cohort.plans["local"], 0, *tables),
        )

    def timed(round: int) -> float:
        cohort = jax.tree.map(jnp.asarray, experiment.cohorts(0, round))
        begin = time.perf_counter()
        jax.block_until_ready(steps(cohort, data, start, teacher))
        return time.perf_counter() - begin

    timed(0)
    return timed


def bench(given: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Runs a work and returns its figures."""
    experiment = build.experiment(**given, rounds=rounds, eval_every=rounds)
    seconds = []
    reference = None
    config, hparams = experiment.config, experiment.hparams
    if (
        config.algo == "fedd2s"
        and config.num_seeds == 1
        and (hparams.transfer, hparams.updates) == ("head", "sequential")
        and hparams.client_optimizer == "adam"
    ):
        reference = two_step_reference(experiment)
    reference_seconds = []
    records = experiment.evaluate()
    for round in range(rounds):
        before = experiment.totals.seconds
        experiment.simulation.advance_to(round + 1)
        seconds.append(experiment.totals.seconds - before)
        if reference is not None:
            reference_seconds.append(reference(round))
        records = experiment.evaluate() or records
    accuracy = records[-1].get("global_accuracy")
    client_accuracy = records[-1].get("client_accuracy")
    totals, model = experiment.totals, experiment.task.client_models[0]
    timed = seconds[1:] or seconds
    rate = totals.samples / sum(seconds)
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
        "client_chunk": experiment.task.execution.chunk,
        "backend": jax.default_backend(),
        "device": devices.name(),
    }
    if config.algo == "fedavg":
        out["gflops"] = rate * train_flops(model, experiment.task.example_shape) / 1e9
        out["matmul_peak_gflops"] = matmul_peak()
        out["share_of_matmul_peak"] = out["gflops"] / out["matmul_peak_gflops"]
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
            f"{out['samples_per_second']:,.0f} samples/s"
        )
        if "gflops" in out:
            print(
                f"{out['gflops']:.0f} GFLOP/s = "
                f"{100 * out['share_of_matmul_peak']:.0f} % of this machine's matmul "
                "peak"
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
