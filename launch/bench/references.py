"""Plain loops that the rounds of some algorithms are compared with."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from launch.experiment import Experiment


def fedd2s(experiment: Experiment) -> Callable[[int], float] | None:
    """`round -> seconds` of the optimizer steps alone, after one warm-up call.

    It makes the same steps on the same batches, one client at a time, without teacher
    passes and means. Each batch of the server's plan takes a forward pass of the first
    layer, and a distillation and a supervised step of those behind it. Each batch of
    the local plan takes both steps of all layers. None for options with other steps.
    """
    task, hparams = experiment.task, experiment.hparams
    one_seed = experiment.config.num_seeds == 1
    if not one_seed or (hparams.transfer, hparams.client_optimizer) != ("head", "adam"):
        return None
    model, tx = task.model, optax.adam(hparams.client_lr)
    partition = jax.tree.map(lambda leaf: leaf[0], experiment.data.partition)
    # On one device, which uses all cores of a CPU
    data = jax.tree.map(np.asarray, experiment.data.replace(partition=None))
    data = jax.tree.map(jnp.asarray, data.replace(partition=partition))
    example = jnp.zeros((1, *task.example_shape))
    start, stats = model.init(jax.random.key(0), example)
    shape = (task.num_examples + hparams.batch_size, task.num_classes)
    teacher = jax.nn.softmax(jax.random.normal(jax.random.key(1), shape))

    def steps_of(plan, first, cohort, data, start, teacher):
        """Makes all steps of one plan; stages below `first` are frozen."""
        owned = data.partition.train

        def client(row):
            client_id, place = row
            steps = plan.of_row(place)
            begin = owned.start[client_id]

            def step(index, carry):
                at, _ = steps.step(index)
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
            first_carry = (deep, tx.init(deep))
            return jax.lax.fori_loop(0, steps.num_steps, step, first_carry)[0]

        every = jnp.arange(len(cohort.client_id))
        return jax.lax.map(client, (cohort.client_id, every))

    @jax.jit
    def steps(cohort, data, start, teacher):
        tables = (cohort, data, start, teacher)
        return (
            steps_of(cohort.plans["server"], 1, *tables),
            steps_of(cohort.plans["local"], 0, *tables),
        )

    def timed(round: int) -> float:
        cohort = jax.tree.map(jnp.asarray, experiment.planner.cohort(0, round))
        begin = time.perf_counter()
        jax.block_until_ready(steps(cohort, data, start, teacher))
        return time.perf_counter() - begin

    timed(0)
    return timed


# `experiment -> (round -> seconds of the plain loop)`, or None if it does not apply
PLAIN_LOOPS = {"fedd2s": fedd2s}
# Algorithms with one forward and one backward pass per step, so GFLOP/s are known
PLAIN_STEPS = ("fedavg",)
