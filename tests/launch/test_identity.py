"""A resumed run is the run that it resumes: edits of custom code are another run."""

import functools
import subprocess
import sys
import types
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from algorithms import fedavg
from fedjax_pfl import averaging, fingerprint, local_training
from launch import build
from launch.assemble import computed
from launch.config import flagfile
from models import own
from tests import conftest, synthetic
from tests.toys import gossip

pytestmark = pytest.mark.usefixtures("narrow")
SOURCE = synthetic.blobs(120, (8, 8, 1), 4, seed=0)
BASE = conftest.SIX | {"algo": "fedavg", "partition": "iid"}
BASE |= {"dataset": (SOURCE.image, SOURCE.label)}


class Field(nn.Module):
    """Has a function or an array as a field."""

    act: object = None
    table: object = None

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        if self.table is not None:
            x = x * jnp.asarray(self.table)[: x.shape[1]]
        x = nn.Dense(4)(x)
        return x if self.act is None else self.act(x)


K = 1.0


def helper(x):
    return K * x


class UsesHelper(nn.Module):
    """Refers to a helper and a global constant."""

    @nn.compact
    def __call__(self, x):
        return helper(nn.Dense(4)(x.reshape(len(x), -1)))


def a_global(scale):
    global K
    K = scale
    return {"model": UsesHelper()}


def a_base(scale):
    class Base(nn.Module):
        def scaled(self, x):
            return scale * x

    class Child(Base):
        @nn.compact
        def __call__(self, x):
            return self.scaled(nn.Dense(4)(x.reshape(len(x), -1)))

    return {"model": Child()}


def a_longer_base():
    class Child(nn.Module):
        @nn.compact
        def __call__(self, x):
            return 2 * nn.Dense(4)(x.reshape(len(x), -1))

    return {"model": Child()}


def a_metric(scale):
    def margin(logits, labels, mask):
        return scale * jnp.where(mask, logits.max(-1), 0).sum(), mask.sum()

    return {"eval_metrics": {"margin": margin}}


def a_partial_metric(scale):
    def margin(scale, logits, labels, mask):
        return scale * jnp.where(mask, logits.max(-1), 0).sum(), mask.sum()

    return {"eval_metrics": {"margin": functools.partial(margin, scale)}}


def an_algorithm(scale):
    def make(hparams, task):
        supervised = local_training.cross_entropy_loss(task.model)

        def loss_fn(*given):
            loss, stats = supervised(*given)
            return scale * loss, stats

        def client_update(client, server):
            return local_training.train(hparams, loss_fn, server, client)

        return averaging.make(hparams, task, client_update)

    return {"algo": SimpleNamespace(HParams=averaging.Averaging, make=make)}


class Method:
    """An algorithm whose edit is a field of an object."""

    HParams = averaging.Averaging

    def __init__(self, scale):
        self.scale = scale

    def make(self, hparams, task):
        return an_algorithm(self.scale)["algo"].make(hparams, task)


class Branching(Method):
    """Asks for the value of a float option where its round is made."""

    def make(self, hparams, task):
        assert hparams.client_lr > 0
        return super().make(hparams, task)


def test_a_branch_on_a_float_option_is_named_at_once():
    """Its round would end in a page of jax's, as it gets floats as arguments."""
    with pytest.raises(ValueError, match="needs the value of a float .* is_static=T"):
        build.experiment(**BASE | {"algo": Branching(1.0)})


def a_method(scale):
    return {"algo": Method(scale)}


def an_optimizer(scale):
    return {"client_optimizer": lambda rate: optax.sgd(scale * rate)}


EDITS = [
    a_global, a_base, a_metric, a_partial_metric, an_algorithm, a_method, an_optimizer,
]  # fmt: skip


SOME = (a_global, a_base, a_metric, a_method)


@pytest.mark.parametrize(
    "edit",
    [pytest.param(one, marks=[pytest.mark.slow] * (one not in SOME)) for one in EDITS],
)
def test_an_edit_is_another_run(edit, tmp_path):
    """Refused in one line with another value, and continued with the same."""
    options = BASE | {"workdir": str(tmp_path)}
    build.experiment(**options | edit(1.0)).run(1, progress=False)
    with pytest.raises(ValueError, match="holds a run with --computed_sha256=") as told:
        build.experiment(**options | edit(3.0), resume=True).run(progress=False)
    assert "\n" not in str(told.value)
    again = build.experiment(**options | edit(1.0), resume=True)
    assert again.run(progress=False)["rounds"] == 2


class OfGlobal:
    """An algorithm, an optimizer and a metric that refer to a global constant."""

    HParams = averaging.Averaging

    def make(hparams, task):
        supervised = local_training.cross_entropy_loss(task.model)

        def loss_fn(*given):
            loss, stats = supervised(*given)
            return helper(loss), stats

        def client_update(client, server):
            return local_training.train(hparams, loss_fn, server, client)

        return averaging.make(hparams, task, client_update)

    def optimizer(rate):
        return optax.sgd(helper(rate))

    def late(rate):
        def is_last(params):
            return tuple(n + 1 == len(params) for n in range(len(params)))

        scaled = optax.masked(optax.scale(helper(1.0)), is_last)
        return optax.chain(scaled, optax.sgd(rate))

    def margin(logits, labels, mask):
        return helper(jnp.where(mask, logits.max(-1), 0).sum()), mask.sum()


class Adapts:
    """FedAvg whose fine-tuning refers to a global constant."""

    HParams = averaging.Averaging

    def make(hparams, task):
        made, supervised = fedavg.make(fedavg.HParams(), task), task.model

        def loss_fn(*given):
            plain = local_training.cross_entropy_loss(supervised)
            loss, stats = plain(*given)
            return helper(loss), stats

        def adapt(client, start, shared):
            return local_training.train(hparams, loss_fn, start, client)

        return made._replace(adapt=adapt)


@pytest.mark.parametrize(
    "given",
    [
        {"model": UsesHelper()},
        {"algo": OfGlobal},
        {"client_optimizer": OfGlobal.optimizer},
        {"server_optimizer": OfGlobal.optimizer, "server_lr": 0.5},
        {"client_optimizer": OfGlobal.late},
        {"algo": Adapts, "fine_tune_epochs": 1},
        {"eval_metrics": {"margin": OfGlobal.margin}},
    ],
    ids=["model", "algo", "client_optimizer", "server_optimizer", "late", "adapt"]
    + ["eval_metrics"],
)
def test_an_edited_global_is_trained_and_not_a_cached_program(given):
    """An equal object that computes something else is compiled again."""
    found = {}
    for scale in (1.0, 7.0, 1.0):
        a_global(scale)
        experiment = build.experiment(**BASE | given)
        experiment.run(progress=False)
        last = experiment.metrics[-1] | {"seconds": 0}
        found.setdefault(scale, []).append((experiment.simulation.digest(), last))
    assert found[1.0][0] == found[1.0][1] != found[7.0][0]


def test_a_graph_is_known_by_its_code():
    """Wherever the function is in memory, and with what it holds."""

    def drawn(shift):
        return lambda seed, round, client, n, p: (client[:, None] + shift) % n

    hashes = [fingerprint.of_python(drawn(shift)) for shift in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]

    class Other:
        HParams = gossip.HParams

        def make(hparams, task):
            made, graph = gossip.make(hparams, task), gossip.graph
            own = types.FunctionType(graph.__code__, graph.__globals__)
            return made._replace(peers=made.peers._replace(draw=own))

    given = BASE | {"algo": "dfedavg"}
    found = [
        build.experiment(**given | {"algo": algo}).hashes["computed_sha256"]
        for algo in (gossip, Other, Other)
    ]
    assert len(set(found)) == 1


HOPS = {"by": 1}


def hops(client):
    return client[:, None] + HOPS["by"]


class Hopping:
    """Its graph has a helper and a global, and is made anew by each `make`."""

    HParams = gossip.HParams

    def make(hparams, task):
        def draw(seed, round, client, num_clients, num_peers):
            found = np.repeat(hops(client) % num_clients, num_peers, 1)
            return found, np.ones(found.shape, bool)

        made = gossip.make(hparams, task)
        return made._replace(peers=made.peers._replace(draw=draw))


def test_a_graph_is_known_by_what_it_draws(monkeypatch):
    """An edited global or helper is another graph, and a sweep has one."""
    given = BASE | {"algo": Hopping}
    first = build.experiment(**given).computed_sha256
    assert build.experiment(**given).computed_sha256 == first
    assert len(build.experiment(**given, sweep="client_lr=0.1,0.2").points) == 2
    monkeypatch.setitem(HOPS, "by", 2)
    assert build.experiment(**given).computed_sha256 != first


def test_a_comment_is_not_an_edit():
    """Text and names of functions do not count."""

    def one(x):
        return x + 1  # a comment

    def other(given):
        return given + 1

    x = np.ones(3, np.float32)
    assert fingerprint.of(one, x) == fingerprint.of(other, x)
    assert fingerprint.of(one, x) != fingerprint.of(lambda x: x + 2, x)


def scaled(scale):
    """A net of widths whose use of HeteroFL's scaler is edited."""

    def net(width, scaler):
        def act(x):
            return x / (scaler if scale == 1 else scaler**2)

        return nn.Sequential([nn.Dense(int(8 * width)), Field(act)])

    return net


def test_the_use_of_a_scaler_counts():
    """With the scaler 1 both nets compute the same."""
    shape = (64,)
    example = jax.ShapeDtypeStruct((2, *shape), np.float32)
    made = [own.chain(scaled(scale), (), example) for scale in (1, 1, 2)]
    one, same, other = (computed.of_model(model, shape) for model in made)
    assert one == same != other


def test_a_gradient_of_its_own_counts():
    """`custom_vjp` computes the same forward."""

    def of(factor):
        @jax.custom_vjp
        def double(x):
            return 2 * x

        double.defvjp(lambda x: (double(x), None), lambda _, g: (factor * g,))
        return double

    x = np.ones(3, np.float32)
    assert fingerprint.of(of(1.0), x) == fingerprint.of(of(2.0), x)
    hashes = {fingerprint.of(of(f), x, gradient=True) for f in (1.0, 1.0, 2.0)}
    assert len(hashes) == 2


KS = np.arange(1.0, 3, dtype=np.float32)


class Drops(nn.Module):
    """Drops some of its inputs in train mode."""

    rate: float

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(4)(nn.Dropout(self.rate, deterministic=not train)(x))


def started(k):
    """An nnx module whose first parameters were edited."""
    net = nnx.Linear(64, 4, rngs=nnx.Rngs(0))
    net.bias = nnx.Param(k * jnp.ones(4))
    return net


@pytest.mark.parametrize(
    "of",
    [
        lambda k: nn.Dense(4, kernel_init=nn.initializers.normal(k)),
        lambda k: nn.Dense(4, bias_init=nn.initializers.constant(k)),
        lambda k: nn.Dense(4, dtype=jnp.bfloat16 if k > 1 else jnp.float32),
        lambda k: Field(lambda x: x ** int(k)),
        lambda k: Field(lambda x: nn.leaky_relu(x, k / 10)),
        lambda k: Field(lambda x: nn.relu(x) if k > 1 else x),
        lambda k: Field(lambda x: x + jax.random.normal(jax.random.key(int(k)), (4,))),
        lambda k: Field(lambda x: jax.lax.fori_loop(0, int(k), lambda _, z: 2 * z, x)),
        lambda k: Field(lambda x: jax.lax.scan(lambda c, s: (c * s, 0), x, KS * k)[0]),
        lambda k: Field(functools.partial(jnp.multiply, k)),
        lambda k: Field(table=np.where(np.arange(3000) == 50, k, 1)),  # few in its repr
        lambda k: (lambda *_: {"w": jnp.ones((64, 4))}, lambda p, x: k * x @ p["w"]),
        lambda k: Field(jax.jit(lambda x: k * x)),
        lambda k: Field(jax.vmap(lambda x: k * x)),
        lambda k: nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4), Times(k)]),
        lambda k: [("a", nn.Dense(8)), ("b", nn.Sequential([nn.Dense(4), Times(k)]))],
        lambda k: Drops(k / 10),
        started,
        lambda k: lambda width: [nn.Dense(int(8 * width)), Field(Times(k))],
    ],
)
def test_what_a_model_computes_counts(of):
    """Starts, types, draws, loops and branches, of one stage or several."""
    example = jax.ShapeDtypeStruct((2, 64), np.float32)
    made = [own.chain(of(k), (), example) for k in (1.0, 1.0, 7.0)]
    one, same, other = (computed.of_model(model, (64,)) for model in made)
    assert one == same != other


class Times:
    """A callable object, and its method."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return self.scale * x

    def times(self, x):
        return self.scale * x


class Held:
    """Calls a method that uses a slot."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def __call__(self, x):
        return self.helper(x)

    def helper(self, x):
        return x


@pytest.mark.parametrize(
    "made",
    [
        lambda scale: lambda x: scale * x,
        lambda scale: lambda x, by=scale: by * x,
        lambda scale: lambda x, *, by=scale: by * x,
        lambda scale: functools.partial(np.multiply, np.float32(scale)),
        lambda scale: Times(scale),
        lambda scale: Times(scale).times,
        lambda scale: [lambda x: np.sin(x), lambda x: np.cos(x)][int(scale) - 1],
        lambda scale: lambda x, by=[{"of": (scale,)}]: by[0]["of"][0] * x,
        lambda scale: Held(np.float32(scale)),
        lambda scale: Held(Times(scale)),
        lambda scale: Held(jax.random.key(int(scale))),
    ],
)
def test_callbacks_to_python_count(made):
    """Numbers that they hold, wherever they do."""
    x = jax.ShapeDtypeStruct((3,), np.float32)

    def called(scale):
        callback = made(scale)
        return lambda x: jax.pure_callback(callback, x, x)

    one, same, other = (fingerprint.of(called(scale), x) for scale in (1.0, 1.0, 2.0))
    assert one == same != other


@pytest.mark.slow
def test_hashes_are_the_same_in_another_process(tmp_path):
    """Whatever the seed of Python's own hashes."""
    code = (
        "from tests.launch import test_identity as t\n"
        "from launch import build\n"
        "mlp = {'model': 'mlp'}\n"
        "for edit in (t.a_base, t.a_metric, t.an_algorithm):\n"
        "    print(build.experiment(**t.BASE | mlp | edit(1.0)).computed_sha256)\n"
    )
    found = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PATH": ""},
        )
        found.add(done.stdout)
    assert len(found) == 1 and len(set(found.pop().split())) == 3


def test_how_it_is_executed_does_not_matter():
    """Chunks, devices and the place of rows leave the hash."""
    ways = {}, {"client_chunk": 3}, {"devices": 2}
    found = {build.experiment(**BASE | a_method(1.0) | w).computed_sha256 for w in ways}
    assert len(found) == 1


def test_older_folders_resume_with_a_note(tmp_path, capsys):
    """With the text alone, or traced by another version; an edited text is refused."""
    options, mine = BASE | {"workdir": str(tmp_path)}, a_base(1.0)
    build.experiment(**options | mine).run(1, progress=False)
    path = tmp_path / "run.flags"
    now = path.read_text()
    lines = [line for line in now.splitlines() if "--computed_" not in line]
    other = now.replace("computed_by=jax ", "computed_by=jax 0.")
    other = other.replace("computed_sha256=", "computed_sha256=0")
    for text in ("\n".join(lines) + "\n", other):
        path.write_text(text)
        again = build.experiment(**options | mine, resume=True)
        again.run(1, progress=False)
        assert "custom code was compared by its text" in capsys.readouterr().err
        path.write_text(text)
        with pytest.raises(ValueError, match="holds a run with --own_sha256="):
            build.experiment(**options | a_longer_base(), resume=True).run()
    path.write_text(now)
    again = build.experiment(**options | mine, resume=True)
    again.run(progress=False)
    assert "by its text" not in capsys.readouterr().err


def test_names_belong_to_the_data(tmp_path):
    """Classes and owners that are called otherwise are other data (S11)."""
    rows = SOURCE.image, np.array(list("abcd"))[SOURCE.label], np.arange(120) // 20
    options = BASE | {"workdir": str(tmp_path), "partition": "natural"}
    build.experiment(**options | {"dataset": rows}).run(1, progress=False)
    renamed = np.array(list("wxyz"))[SOURCE.label]
    owned = np.array([f"o{one}" for one in rows[2]])
    for data in ((rows[0], renamed, rows[2]), (rows[0], rows[1], owned)):
        with pytest.raises(ValueError, match="holds a run with --names_sha256="):
            build.experiment(**options | {"dataset": data}, resume=True).run()
    again = build.experiment(**options | {"dataset": rows}, resume=True)
    assert again.run(progress=False)["rounds"] == 2
    assert "names_sha256" in flagfile.RunFlags.read(tmp_path / "run.flags").hashes


class InBfloat16(nn.Module):
    """Has products and constants in bfloat16."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8, dtype=jnp.bfloat16)(x.reshape(len(x), -1)))
        return nn.Dense(4)((x * jnp.bfloat16(2)).astype(jnp.float32))


def in_bfloat16(logits, labels, mask):
    """A metric with a constant in bfloat16."""
    z = (logits.astype(jnp.bfloat16) * jnp.bfloat16(2)).astype(jnp.float32)
    return jnp.where(mask, z.max(-1), 0).sum(), mask.sum()


@pytest.mark.parametrize(
    "given",
    [
        {"model": InBfloat16()},
        {"eval_metrics": {"mine": in_bfloat16}},
        {"algo": Method(1.0), "precision": "bf16"},
        {"precision": "bf16", "sweep": "client_lr=0.01,0.1"},
    ],
    ids=["model", "metric", "algorithm", "sweep"],
)
def test_numbers_of_lower_precision_have_a_hash(given):
    """Numpy has no buffer of bfloat16."""
    made = build.experiment(**BASE | given)
    assert len(made.computed_sha256) == 64 * ("sweep" not in given)


def _goes_on_without(name, folder, given):
    """A run goes on whose run.flags is of an earlier version, without a line."""
    path = folder / "run.flags"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(one for one in lines if name not in one) + "\n")
    again = build.experiment(**given, resume=True)
    assert again.run(progress=False)["rounds"] == 2


def test_the_shape_of_examples_belongs_to_the_data(tmp_path):
    """The same bytes are images with one mean, or vectors with one for each number."""
    x = SOURCE.image.astype(np.float32)
    options = BASE | {"workdir": str(tmp_path), "model": "mlp"}
    given = options | {"dataset": (x, SOURCE.label)}
    build.experiment(**given).run(1, progress=False)
    flat = x.reshape(len(x), -1), SOURCE.label
    line = "holds a run with --example_shape=.* .the same numbers in examples of anoth"
    with pytest.raises(ValueError, match=line):
        build.experiment(**options | {"dataset": flat}, resume=True).run()
    _goes_on_without("example_shape", tmp_path, given)


def test_names_that_come_later_are_other_data(tmp_path):
    """Numbers that a resume would call otherwise, as names that become numbers."""
    options = BASE | {"workdir": str(tmp_path), "algo": "fedavg"}
    build.experiment(**options).run(1, progress=False)
    named = SOURCE.image, np.array(list("abcd"))[SOURCE.label]
    with pytest.raises(ValueError, match="holds a run with --names_sha256="):
        build.experiment(**options | {"dataset": named}, resume=True).run()
    _goes_on_without("names_sha256", tmp_path, options)


def test_other_floats_share_a_program():
    """Of an own algorithm too, as its rates are arguments of what is compiled."""
    given = BASE | {"algo": OfGlobal, "client_optimizer": "sgd"}
    a_global(1.0)
    one, other = (
        build.experiment(**given, client_lr=rate).simulation.program
        for rate in (0.1, 0.2)
    )
    assert one.rounds is other.rounds and one.floats != other.floats
    a_global(2.0)
    third = build.experiment(**given, client_lr=0.1).simulation.program
    assert third.rounds is not one.rounds
