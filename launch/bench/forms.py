"""Cycles of a local step with each form of convolution: `python -m launch.bench.forms`.

It compiles one step of plain SGD, vmapped over clients, for a chip that need not be
here; see `models.forms`.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import models
from fedjax_pfl import execution, losses, options, shapes, types
from fedjax_pfl.options import option
from launch import ending
from launch.config import flags, limits, schema
from launch.machine import target
from launch.run import cost
from launch.tables import cells
from models import forms, mixed

RULE = "rule"
# Rows suit the caches of a CPU. The chips that this command compiles for have none.
FORMS = [*(form for form in forms.FORMS if form != "rows"), RULE]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of this command."""

    model: str = option("m1", "models, with commas")
    clients: str = option("8,32", "clients side by side, with commas")
    form: str = option(
        ",".join(FORMS),
        "forms of all convolutions, with commas; rule = each layer has its own",
    )
    target: str = option("tpu:v5e", " or ".join(target.TPUS))
    precision: str = option("f32", " or ".join(schema.PRECISIONS))
    batch_size: int = option(20, "examples of a client's step", minimum=1)
    image: str = option("28x28x1", "shape of an image")


def _numbers(flag: str, text: str, expected: str, sign: str, count: int) -> list[int]:
    """The positive numbers in a flag, `count` = 0 for any number of them."""
    parts = text.split(sign)
    is_right = all(part.isdecimal() and int(part) for part in parts)
    if not is_right or count not in (0, len(parts)):
        raise ValueError(f"--{flag}={limits.shown(text)}: expected {expected}")
    return list(map(int, parts))


def step_cost(
    asked: Options, model: types.Model, shape: Sequence[int], clients: int, form: str
) -> dict[str, Any]:
    """The compiler's figures for one local step of clients that train side by side.

    `shape` is that of an image, and `form` one of `FORMS`.
    """
    where = jax.sharding.SingleDeviceSharding(target.devices(asked.target)[0])

    def step(variables, image, label, key):
        def loss_fn(params):
            mode = {"train": True, "key": jax.random.wrap_key_data(key)}
            out, stats = model.forward(params, variables.stats, image, **mode)
            exits = out if model.has_exits else (out,)
            real = jnp.ones(len(label), bool)
            return sum(losses.cross_entropy(o, label, real) for o in exits), stats

        grads, stats = jax.grad(loss_fn, has_aux=True)(variables.params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, variables.params, grads)
        return types.Variables(new, stats)

    def side_by_side(*given):
        chosen = "" if form == RULE else form
        with execution.traced_in(execution.Setting("tpu", clients, chosen)):
            return jax.vmap(step)(*given)

    size = asked.batch_size
    given = (
        shapes.variables(model, tuple(shape)),
        jax.ShapeDtypeStruct((size, *shape), jnp.float32),
        jax.ShapeDtypeStruct((size,), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.uint32),
    )

    def of_clients(leaf):
        shape = (clients, *leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)

    args = jax.tree.map(of_clients, given)
    with jax.default_matmul_precision(schema.PRECISIONS[asked.precision]):
        lowered = jax.jit(side_by_side, out_shardings=where).lower(*args)
    return cost.planned(lowered).figures()


@ending.command
def command(argv: list[str]) -> None:
    """Prints a line for each model, number of clients and form."""
    with ending.refused():
        asked = flags.options_alone(argv, Options, __doc__)
        options.check_one_of("target", asked.target, target.TPUS)
        options.check_one_of("precision", asked.precision, schema.PRECISIONS)
        names = cells.chosen("model", asked.model, models.MODELS)
        chosen = cells.chosen("form", asked.form, FORMS)
        expected = "numbers above 0, with commas"
        counts = _numbers("clients", asked.clients, expected, ",", 0)
        shape = _numbers("image", asked.image, "HEIGHTxWIDTHxCHANNELS", "x", 3)
        for name, clients, form in itertools.product(names, counts, chosen):
            model = models.make(name, 10)
            if asked.precision == "bf16":
                model = mixed.in_bfloat16(model)
            found = step_cost(asked, model, shape, clients, form)
            line = {"model": name, "clients": clients, "form": form}
            print(json.dumps(line | found), flush=True)


if __name__ == "__main__":
    command()
