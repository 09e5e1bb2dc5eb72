"""More tries in the spirit of the faults: names of methods, columns, edits of code.

`python -m tests.faults.more [SEED]` makes about 200 of them, prints the silent ones and
their share. A try is silent if no error, note or warning names what was mistaken.
"""

import functools
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
from flax import nnx

import algorithms
from fedjax_pfl import averaging, local_training, losses
from launch import build
from tests.faults import __main__ as faults
from tests.faults.given import X, base, xv, y
from tests.faults.part_ab import said

Try = tuple[str, Callable[[pathlib.Path], str]]
SMALL = base | {"rounds": 2, "devices": 1}


def names() -> Iterator[Try]:
    """A method that is given what makes another one of it, in three ways."""
    image = np.tile(X, (1, 2, 2, 1))
    rest = {k: v for k, v in SMALL.items() if k not in ("algo", "model", "preset")}
    options = rest | {"dataset": (image, y), "partition": "iid", "local_epochs": 4}
    for name, entry in algorithms.ALGORITHMS.items():
        if not entry.fixed:
            continue
        family = [n for n, e in algorithms.ALGORITHMS.items() if e.make is entry.make]
        models = {"heterofl": "convnet", "depthfl": "depth_convnet"}
        options["model"] = models.get(family[0], "fedavg_cnn")
        usual = vars(algorithms.ALGORITHMS[family[0]].HParams())
        for other in family:
            theirs = algorithms.ALGORITHMS[other].fixed
            if other != name and not theirs.keys() - entry.fixed.keys():
                more = options | entry.fixed | {"algo": other}
                yield (
                    f"{other} with what makes {name}",
                    functools.partial(noted, "is the method", more),
                )
        plain = options | {option: usual[option] for option in entry.fixed}
        more = plain | {"algo": name}
        yield (
            f"{name} without what makes it",
            functools.partial(noted, "is the method", more),
        )
        yield (
            f"{family[0]} beside {name}, both with its options",
            functools.partial(beside, (family[0], name), options | entry.fixed),
        )


def noted(word: str, options: dict, _: pathlib.Path) -> str:
    """What a run says before it begins about its method, or an option's effect."""
    return _lines(
        lambda: build.experiment(preset="none", **options).notes, word, "has no effect"
    )


def beside(rows: tuple[str, ...], options: dict, _: pathlib.Path) -> str:
    """What a comparison says before it begins."""
    return _lines(
        lambda: build.compare(rows, preset="none", run=False, **options).notes,
        f"makes {rows[0]} the method",
    )


def _lines(notes: Callable, *words: str) -> str:
    """The notes, or the error, that have one of some words."""
    try:
        found = list(notes())
    except ValueError as error:
        found = [str(error)]
    return " ".join(line for line in found if any(word in line for word in words))


def columns(gen: np.random.Generator) -> Iterator[Try]:
    """Tables with one more column that is no measurement."""
    plain = pandas.DataFrame(xv[:, :4], columns=list("abcd")).assign(label=y)
    owner = np.arange(400) // 50
    pool = {
        "Client ID": owner, "userid": owner, "USER": owner, "patient": owner,
        "participant_no": owner, "hospital": owner, "site": owner, "speaker": owner,
        "session": owner, "Subject": owner, "device_id": owner, "writer": owner,
        "index": np.arange(400), "row": np.arange(1, 401), "nr": np.arange(400)[::-1],
        "id": gen.permutation(400), "step2": 2 * np.arange(400),
        "label_code": y, "target2": 10 * y, "y": y + 1, "Class": 3 - y,
        "survived": y == 2, "one_hot": (y == 1).astype(int), "fold": owner % 5,
        "is_train": (np.arange(400) < 300).astype(int), "split": owner % 2,
        "time": 1.7e9 + np.arange(400), "ms": 1.7e12 + np.arange(400.0),
        "account": 16777216 + np.arange(400), "date": 20260101 + np.arange(400),
        "zip": 80000 + owner, "weight": np.ones(400), "prediction": y + 0.0,
    }  # fmt: skip
    for name, values in pool.items():
        place = int(gen.integers(0, 6))
        frame = plain.copy()
        frame.insert(min(place, 5), name, values)

        def of(_: pathlib.Path, frame: pandas.DataFrame = frame, name: str = name):
            made = functools.partial(build.experiment, **SMALL | {"dataset": frame})
            return _lines(lambda: made().notes, name)

        yield f"a column {name!r}", of


def edits() -> Iterator[Try]:
    """Custom code in which a 1 becomes a 7, and the run is resumed."""
    flat = functools.partial(jnp.reshape, shape=(-1, 64))

    def module(body: Callable[[nn.Module, jax.Array], jax.Array]) -> nn.Module:
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return body(self, flat(x))

        return Net()

    table = np.ones(5000, np.float32)

    def with_table(k: float) -> np.ndarray:
        out = table.copy()
        out[2500] = k
        return out

    class Holder:
        """Has a method and a field."""

        def __init__(self, k: float):
            self.k = k

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.k * x

    def static(k: float) -> nn.Module:
        class Net(nn.Module):
            scale = k

            @staticmethod
            def helper(x):
                return Net.scale * x

            @nn.compact
            def __call__(self, x):
                return self.helper(nn.Dense(4)(flat(x)))

        return Net()

    def with_default(k: float) -> nn.Module:
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x, scale=k):
                return scale * nn.Dense(4)(flat(x))

        return Net()

    def own_gradient(k: float) -> nn.Module:
        @jax.custom_vjp
        def same(x):
            return x

        same.defvjp(lambda x: (x, None), lambda _, g: (k * g,))
        return module(lambda _, x: same(nn.Dense(4)(x)))

    def own_nnx(k: float, of_init: bool = False) -> Callable:
        class Net(nnx.Module):
            def __init__(self, rngs: nnx.Rngs):
                self.layer = nnx.Linear(64, 4, rngs=rngs)
                self.scale = k if of_init else 1.0

            def __call__(self, x):
                return (self.scale if of_init else k) * self.layer(flat(x))

        return Net

    def started(k: float) -> nnx.Module:
        net = own_nnx(1.0)(nnx.Rngs(0))
        net.layer.bias = nnx.Param(k * jnp.ones(4))
        return net

    def pair(in_init: float, in_apply: float) -> tuple[Callable, Callable]:
        def init(key, x):
            return {"w": in_init * jax.random.normal(key, (64, 4))}

        return init, lambda params, x: in_apply * flat(x) @ params["w"]

    def of_width(k: float) -> Callable:
        def net(width):
            size = int(-(-8 * width // 1))
            return [nn.Sequential([flat, nn.Dense(size), Holder(k)]), nn.Dense(4)]

        return net

    def nested(k: float) -> Callable:
        def helper(x):
            def inner(z):
                return k * z

            return inner(x)

        return helper

    models = {
        "closure": lambda k: module(lambda _, x: k * nn.Dense(4)(x)),
        "helper of a helper": lambda k: module(lambda _, x: nested(k)(nn.Dense(4)(x))),
        "a power": lambda k: module(lambda _, x: nn.Dense(4)(x) ** int(k)),
        "array": lambda k: module(lambda _, x: nn.Dense(4)(x * with_table(k).sum())),
        "array's middle": lambda k: module(
            lambda _, x: nn.Dense(4)(x) + jnp.asarray(with_table(k)).sum()
        ),
        "initialiser": lambda k: module(
            lambda _, x: nn.Dense(4, kernel_init=nn.initializers.normal(k))(x)
        ),
        "constant initialiser": lambda k: module(
            lambda _, x: nn.Dense(4, bias_init=nn.initializers.constant(k))(x)
        ),
        "dtype": lambda k: module(
            lambda _, x: nn.Dense(4, dtype=(jnp.bfloat16 if k > 1 else jnp.float32))(
                x
            ).astype(jnp.float32)
        ),
        "slope": lambda k: module(lambda _, x: nn.leaky_relu(nn.Dense(4)(x), k / 10)),
        "branch": lambda k: module(
            lambda _, x: nn.relu(nn.Dense(4)(x)) if k > 1 else nn.Dense(4)(x)
        ),
        "random key": lambda k: module(
            lambda _, x: (
                nn.Dense(4)(x) + jax.random.normal(jax.random.key(int(k)), (4,))
            )
        ),
        "loop": lambda k: module(
            lambda _, x: jax.lax.fori_loop(
                0, int(k), lambda _, z: z * 1.1, nn.Dense(4)(x)
            )
        ),
        "jitted": lambda k: module(
            lambda _, x: jax.jit(lambda z: k * z)(nn.Dense(4)(x))
        ),
        "vmapped": lambda k: module(
            lambda _, x: jax.vmap(lambda z: k * z)(nn.Dense(4)(x))
        ),
        "scan": lambda k: module(
            lambda _, x: jax.lax.scan(
                lambda c, s: (c * s, None), nn.Dense(4)(x), jnp.array([1.0, k])
            )[0]
        ),
        "object": lambda k: nn.Sequential([flat, nn.Dense(4), Holder(k)]),
        "partial": lambda k: nn.Sequential(
            [flat, nn.Dense(4), functools.partial(jnp.multiply, k)]
        ),
        "lambda in a Sequential": lambda k: nn.Sequential(
            [flat, nn.Dense(4), lambda x: k * x]
        ),
        "class attribute": static,
        "default argument": with_default,
        "custom gradient": own_gradient,
        "nnx call": own_nnx,
        "nnx field": functools.partial(own_nnx, of_init=True),
        "nnx start": started,
        "pair's init": lambda k: pair(k, 1.0),
        "pair's apply": lambda k: pair(1.0, k),
        "function of width": of_width,
        "second stage": lambda k: [
            ("a", nn.Sequential([flat, nn.Dense(8)])),
            ("b", nn.Sequential([nn.Dense(4), Holder(k)])),
        ],
        "dropout": lambda k: Dropped(k / 10),
        "a callback": lambda k: module(
            lambda _, x: jax.pure_callback(
                lambda z: np.float32(k) * z,
                jax.ShapeDtypeStruct((*x.shape[:-1], 4), jnp.float32),
                jax.lax.stop_gradient(nn.Dense(4)(x)),
                vmap_method="expand_dims",
            )
        ),
    }
    for name, of in models.items():
        yield f"an edited model: {name}", functools.partial(resumed, "model", of)

    def metric(k: float, body: Callable) -> dict[str, Callable]:
        return {"mine": lambda logits, labels, mask: body(k, logits, labels, mask)}

    bodies = {
        "sum": lambda k, z, t, m: (k * jnp.where(m, z.max(-1), 0).sum(), m.sum()),
        "count": lambda k, z, t, m: (jnp.where(m, z.max(-1), 0).sum(), k * m.sum()),
        "threshold": lambda k, z, t, m: (
            (m & (z.max(-1) > k / 10)).sum() * 1.0,
            m.sum(),
        ),
        "class": lambda k, z, t, m: ((m & (t == int(k) % 4)).sum() * 1.0, m.sum()),
        "table": lambda k, z, t, m: ((m * with_table(k)[2500]).sum(), m.sum()),
    }
    for name, body in bodies.items():
        yield (
            f"an edited metric: {name}",
            functools.partial(
                resumed, "eval_metrics", functools.partial(metric, body=body)
            ),
        )
    optimizers = {
        "a factor": lambda k: lambda rate: optax.sgd(k * rate),
        "momentum": lambda k: lambda rate: optax.sgd(rate, momentum=k / 10),
        "a clip": lambda k: lambda rate: optax.chain(optax.clip(k), optax.sgd(rate)),
        "decay": lambda k: lambda rate: optax.adamw(rate, weight_decay=k / 100),
        "a transformation": lambda k: optax.sgd(k / 100),
    }
    for name, of in optimizers.items():
        yield (
            f"an edited optimizer: {name}",
            functools.partial(resumed, "client_optimizer", of),
        )

    def algorithm(k: float, where: str) -> SimpleNamespace:
        def make(hparams, task):
            factor = {where: k}

            def loss_fn(params, stats, batch):
                out, stats = task.model.forward(
                    params, stats, batch.image, **batch.mode
                )
                loss = losses.cross_entropy(out, batch.label, batch.mask)
                return factor.get("loss", 1.0) * loss, stats

            def client_update(client, server):
                start = jax.tree.map(
                    lambda leaf: leaf * factor.get("start", 1.0), server
                )
                return local_training.train(hparams, loss_fn, start, client)

            made = averaging.make(hparams, task, client_update)
            if where == "served":
                return made._replace(
                    server=lambda state, data: {
                        "global": (
                            task.model,
                            jax.tree.map(lambda leaf: k * leaf, state.server),
                        )
                    }
                )
            if where == "init":

                def init(data, key):
                    state = made.init(data, key)
                    server = jax.tree.map(lambda leaf: k * leaf, state.server)
                    return state.replace(server=server)

                return made._replace(init=init)
            return made

        return SimpleNamespace(HParams=averaging.Averaging, make=make, __name__="mine")

    for where in ("loss", "start", "served", "init"):
        yield (
            f"an edited algorithm: {where}",
            functools.partial(
                resumed, "algo", functools.partial(algorithm, where=where)
            ),
        )


class Dropped(nn.Module):
    """Drops some of its inputs in train mode."""

    rate: float

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(self.rate, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(4)(x)


def resumed(name: str, of: Callable, folder: pathlib.Path) -> str:
    """Resumes a run with another value in what `of` makes."""
    options = SMALL | {"dataset": (X, y), "workdir": str(folder), "partition": "iid"}
    build.experiment(**options | {name: of(1.0)}).run(1, progress=False)
    again = options | {name: of(7.0), "resume": True}
    continued = functools.partial(build.experiment, **again)
    return said(lambda: continued().run(progress=False), "computes something")


def arrays(gen: np.random.Generator) -> Iterator[Try]:
    """Arrays in other layouts, names that look alike, and what a model has not seen."""
    sides = (4, 16, 16), (2, 8, 8), (12, 10, 10), (3, 5, 64), (3, 4, 4), (8, 8, 6)
    for side in (*sides, (16, 4, 16), (1, 3, 3), (9, 1, 9)):
        x = gen.normal(size=(400, *side)).astype("f")
        yield f"images {side}", lambda _, x=x: with_data((x, y), "H ")
    for length, width in ((20, 6), (3, 30), (8, 8)):
        x = gen.normal(size=(400, length, width)).astype("f")
        yield f"series {length} x {width}", lambda _, x=x: with_data((x, y), "gray")
    pairs = [
        ("1e3", "10e2"), ("7", "7.0"), ("\u00e9", "e\u0301"), ("Bern", "bern"),
        ("a", "a "), ("1_0", "1 0"), ("0x10", "0X10"), ("1.50", "1.5"),
    ]  # fmt: skip
    for one, other in pairs:
        names = np.array([one, other, "c", "d"], object)[np.arange(400) % 4]
        data = pandas.DataFrame(xv[:, :4], columns=list("abcd")).assign(label=y)
        for column, values in (("client", names), ("label", names)):
            frame = data.assign(**{column: values})
            yield (
                f"{column} {one!r} and {other!r}",
                lambda _, f=frame: with_data(f, "look alike"),
            )
    odd = {
        "uint8": (X * 20).clip(0, 255).astype(np.uint8), "nan": X * np.nan,
        "infinity": X + np.inf, "int64": X.astype(np.int64), "bool": X > 0,
    }  # fmt: skip
    for name, x in odd.items():
        yield f"predict of {name}", lambda _, x=x: predicted(x, 0)
    for client in (True, 1.0, "0", -1, 8, np.float32(2), None.__class__):
        yield f"predict by {client!r}", lambda _, c=client: predicted(X, c)
    for names in (list("wxyz"), list("bcda"), list("abce"), ["A", "B", "C", "D"]):
        yield f"a start from other classes {names}", functools.partial(started, names)


def with_data(data, word: str) -> str:
    """The notes of a run on data that have a word."""
    few = {"num_clients": 4, "clients_per_round": 2, "dataset": data}
    return _lines(lambda: build.experiment(**SMALL | few).notes, word)


@functools.cache
def trained():
    """An experiment after a round."""
    made = build.experiment(**SMALL | {"dataset": (X, y)})
    made.run(1, progress=False)
    return made


def predicted(x: np.ndarray, client: object) -> str:
    """The line of a prediction that cannot be right."""
    words = "expected", "holds nan"
    return _lines(lambda: trained().predict(client, x[:4])[:0], *words)


def started(names: list[str], folder: pathlib.Path) -> str:
    """The line of a run that starts from a model of other classes."""
    first = SMALL | {"dataset": (X, np.array(list("abcd"))[y])}
    made = build.experiment(**first)
    made.run(1, progress=False)
    made.save_model(folder / "one.npz")
    options = SMALL | {"dataset": (X, np.array(names)[y])}
    again = options | {"init_from": str(folder / "one.npz")}
    return _lines(lambda: build.experiment(**again).notes, "classes", "train rows")


def main(seed: int = 0) -> None:
    """Prints the silent tries and their share."""
    gen = np.random.default_rng(seed)
    tries = [*names(), *columns(gen), *edits(), *arrays(gen)]
    silent = []
    for name, one in tries:
        line = faults.line(one)
        if not line:
            silent.append(name)
        print(f"{name}: {line[:150] or 'SILENT'}", flush=True)
    share = len(silent) / len(tries)
    print(f"{len(silent)} of {len(tries)} silent ({100 * share:.0f} %): {silent}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
