"""Runs of custom models in the forms that people have."""

import math

import chex
import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from algorithms import fedper
from launch import build, contract


def data():
    """Examples of six numbers, of four owners."""
    x = np.random.default_rng(0).normal(size=(72, 6)).astype(np.float32)
    owner = np.repeat(np.arange(4), 18)
    return x, (x[:, 0] * x[:, 1] > 0).astype(np.int32), owner


def made(**given):
    rules = {"preset": "none", "rounds": 2, "batch_size": 8, "client_lr": 0.1}
    rules["devices"] = 1
    return build.experiment(**{"dataset": data(), **rules, **given})


class Net(nnx.Module):
    """With batch norm and dropout, as flax teaches."""

    def __init__(self, rngs):
        self.body = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(nnx.relu(self.norm(self.body(x)))))


class Twin(nn.Module):
    """The same net in linen, from the same weights and with the same draws."""

    start: object

    @nn.compact
    def __call__(self, x, train):
        def dense(name, features):
            given = getattr(self.start, name)
            init = {
                f"{part}_init": lambda *_, part=part: getattr(given, part)[...]
                for part in ("kernel", "bias")
            }
            return nn.Dense(features, name=name, **init)

        h = dense("body", 8)(x)
        h = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(h)
        key = jax.random.key(0)
        if train:
            key = self.scope.rngs["dropout"].rng
        # The first stream, its first place, and its first draw
        for number in (0, 0, 0):
            key = jax.random.fold_in(key, number)
        h = nn.Dropout(0.5, deterministic=not train)(nn.relu(h), rng=key)
        return dense("head", 2)(h)


def test_nnx_and_linen_learn_the_same():
    """From the same weights, with batch norm and dropout, to 1e-6."""
    module = Net(nnx.Rngs(0))
    runs = [made(algo="fedavg", model=one) for one in (module, Twin(module))]
    one, other = (run.run(progress=False)["metrics"] for run in runs)
    for name, value in one.items():
        if "accuracy" in name:
            np.testing.assert_allclose(
                value["per_seed"], other[name]["per_seed"], atol=1e-6
            )
    x = data()[0]
    probabilities = [run.predict(0, x) for run in runs]
    np.testing.assert_allclose(*probabilities, atol=1e-6)
    assert (
        np.abs(probabilities[0] - made(algo="fedavg", model=module).predict(0, x)).max()
        > 0.01
    )


def test_a_class_is_drawn_by_seed(tmp_path):
    """Each seed has its own start, two runs the same bits, and a file its arrays."""
    run = made(algo="fedavg", model=Net, num_seeds=2)
    starts = [run.client_model(seed=seed).variables.params for seed in (0, 1)]
    assert not jax.tree.all(jax.tree.map(np.array_equal, *starts))
    run.simulation.advance_to(2)
    path = run.save_model(tmp_path / "net.npz")
    again = made(algo="fedavg", model=Net, init_from=str(path))
    found = again.client_model().variables
    assert jax.tree.all(
        jax.tree.map(np.array_equal, found, run.client_model().variables)
    )
    # The file's arrays are those of the module by path.
    module = Net(nnx.Rngs(7))
    saved = {"params": found.params[0]["trunk"], "stats": found.stats[0]["trunk"]}
    for tree in saved.values():
        nnx.update(module, nnx.State(jax.tree.map(lambda leaf: leaf, tree)))
    module.eval()
    normal = run.data.normalised(data()[0])
    wanted = jax.nn.softmax(module(normal))
    np.testing.assert_allclose(run.predict(None, data()[0]), wanted, atol=1e-5)


def test_a_sequential_keeps_its_numbers():
    """As stages, what FedAvg makes of it is what it makes of one stage."""
    seq = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)])
    whole, parts = (made(algo="fedavg", model=given) for given in ([seq], seq))
    assert len(whole.task.model.stage_names) == 1
    assert len(parts.task.model.stage_names) == 2
    one, other = (run.run(progress=False)["metrics"] for run in (whole, parts))
    assert one["global_accuracy"] == other["global_accuracy"]
    np.testing.assert_array_equal(*(r.predict(0, data()[0]) for r in (whole, parts)))


def test_a_file_of_one_stage_opens_as_stages(tmp_path):
    """A run of a whole module, and one that divides it, start from one file."""
    seq = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)])
    whole = made(algo="fedavg", model=[seq])
    path = str(whole.save_model(tmp_path / "whole.msgpack"))
    parts = made(algo="fedper", model=seq, init_from=path)
    np.testing.assert_array_equal(
        *(run.predict(0, data()[0]) for run in (whole, parts))
    )
    assert whole.own_sha256 == parts.own_sha256
    with pytest.raises(ValueError, match="holds another model than --model=own_Seq"):
        other = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3), nn.Dense(2)])
        made(algo="fedper", model=other, init_from=path)


def exits():
    """Two stages with an exit each, the second in nnx."""
    return [
        ("one", nn.Dense(8), nn.Dense(2)),
        ("two", lambda rngs: nnx.Linear(8, 8, rngs=rngs), nn.Dense(2)),
    ]


def of_width(width):
    """A net whose hidden width is a factor of eight."""
    return nn.Sequential([nn.Dense(math.ceil(8 * width)), nn.relu, nn.Dense(2)])


@pytest.mark.parametrize(
    "given, names",
    [
        ({"algo": "fedper", "model": Net, "split": "head"}, ("body", "head")),
        ({"algo": "depthfl", "model": exits(), "level_mix": "1:1"}, ("one", "two")),
        (
            {"algo": "heterofl", "model": of_width, "level_mix": "1:1"},
            ("stage1", "stage2"),
        ),
    ],
)
def test_methods_that_divide_a_model(given, names):
    """They take a custom model in parts, and learn."""
    run = made(**given)
    assert run.task.model.stage_names == names
    before = run.params(0)
    run.run(progress=False)
    after = run.params(0)
    assert all(
        np.isfinite(b).all() and not np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)
    )


def exits_of_width(width):
    """`exits` with all hidden widths times `width`, the second exit in two layers."""
    count = math.ceil(8 * width)
    second = nn.Sequential([nn.Dense(count), nn.relu, nn.Dense(2)])
    return [
        ("one", nn.Sequential([nn.Dense(count), nn.relu]), nn.Dense(2)),
        ("two", lambda rngs: nnx.Linear(count, count, rngs=rngs), second),
    ]


def alone(width):
    """`exits_of_width` as a user writes it with the last exit only."""
    (one, first, _), (two, second, last) = exits_of_width(width)
    return [(one, first), (two, second), ("exit", last)]


@pytest.mark.parametrize(
    "given",
    [
        {"algo": "fedavg"},
        {"algo": "fedper"},
        {"algo": "heterofl", "level_mix": "1:1"},
        {"algo": "feddyn"},
    ],
    ids=lambda given: given["algo"],
)
def test_the_last_exit_is_what_one_would_write(given):
    """To the bit, with the same bytes, and a line says which exit serves."""
    whole, written = (made(model=one, **given) for one in (exits_of_width, alone))
    assert whole.task.model.stage_names == ("one", "two", "exit")
    (line,) = [one for one in whole.notes if "exit" in one]
    assert f"algo={given['algo']} has the last alone: stage exit, after two" in line
    one, other = (run.run(progress=False)["metrics"] for run in (whole, written))
    assert one == other
    assert "bytes_up" in one
    for client in range(4):
        chex.assert_trees_all_equal(whole.params(client), written.params(client))


def test_a_line_says_which_exit_serves():
    """Before anything runs."""
    whole = made(model=exits_of_width, algo="fedavg")
    assert whole.task.model.stage_names == ("one", "two", "exit")
    (line,) = [one for one in whole.notes if "exit" in one]
    assert "algo=fedavg has the last alone: stage exit, after two" in line


def test_a_comparison_of_one_net():
    """One net for a whole model, for widths and for depths."""
    rules = {"preset": "none", "rounds": 1, "dataset": data(), "level_mix": "1:1"}
    rules["devices"] = 1
    algos = ["fedavg", "heterofl", "depthfl"]
    made = build.compare(algos, model=exits_of_width, progress=False, **rules)
    names = [one.task.model.stage_names for one in made.values()]
    assert names == [("one", "two", "exit")] * 2 + [("one", "two")]
    found = made.summary()["global_accuracy"]
    assert list(found.index) == algos and np.isfinite(found).all()


class Stuck(Net):
    """Normalises by the batch in eval mode too."""

    def __call__(self, x):
        return self.head(self.norm(self.body(x), use_running_average=False))


def bridged():
    """nnx through flax's bridge, which does not pass the mode."""
    return nnx.bridge.to_linen(Net)


class Mean(nn.Module):
    """A norm of its own over the batch, which asks for the real examples or not."""

    is_masked: bool = False

    @nn.compact
    def __call__(self, x, train, sample_mask):
        h, size = nn.Dense(5)(x), len(x)
        mean = self.variable("batch_stats", "mean", lambda: np.zeros(5, np.float32))
        weight = sample_mask[:, None] if self.is_masked else np.ones((size, 1))
        if train:
            mean.value = (h * weight).sum(0) / weight.sum()
        return nn.Dense(2)(h - mean.value)


class Late(nn.Module):
    """Asks for the mode under a name of its own."""

    @nn.compact
    def __call__(self, x, is_train=False):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not is_train)(x))


class Tardy(Net):
    """The same in nnx."""

    def __call__(self, x, is_train=None):
        return self.head(self.drop(self.body(x), deterministic=not is_train))


class Deaf(nn.Module):
    """Hands on what it is called with, which is nothing."""

    @nn.compact
    def __call__(self, x, **mode):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=True)(x))


class Id(nn.Module):
    """A stage without parameters."""

    def __call__(self, x):
        return x


TWIN = Twin(Net(nnx.Rngs(0)))


def test_a_norm_over_the_real_examples():
    """It is taken, and a client's statistics are those of its rows alone."""
    run = made(model=Mean(is_masked=True), algo="local", batch_size=32, client_lr=1e-9)
    run.run(progress=False)
    for client in range(4):
        model = run.client_model(client)
        (params, *_), (stats, *_) = model.variables
        own = run.data.normalised(data()[0][run.rows(client, "train")])
        first = params["own_Mean"] if "own_Mean" in params else params
        dense = next(one for one in jax.tree.leaves(first) if one.shape == (6, 5))
        wanted = (own @ dense).mean(0)
        np.testing.assert_allclose(*jax.tree.leaves(stats), wanted, atol=1e-5)


def test_a_module_s_values_are_those_of_all_clients():
    """A module that is given draws nothing, and a line says so; its class does."""
    given = {"algo": "dfedavg", "num_peers": 2, "clients_per_round": 4}
    for kept, noted in ((True, 0), (False, 1)):
        run = made(model=Net(nnx.Rngs(0)), shared_init=kept, **given)
        assert sum("begin with the same numbers" in one for one in run.notes) == noted
    run = made(model=Net, shared_init=False, **given)
    assert not any("begin with the same numbers" in one for one in run.notes)


@pytest.mark.parametrize("last, is_odd", [(nn.softmax, 1), (nn.log_softmax, 0)])
def test_a_softmax_at_the_end_is_noted(last, is_odd):
    """The loss would take that of it again; of a log softmax it is the same."""
    given = nn.Sequential([nn.Dense(2), last])
    lines = made(model=given, algo="fedavg").notes
    assert sum("leave it out" in one for one in lines) == is_odd


def test_statistics_that_no_mode_moves_are_noted():
    """The run begins all the same, as a frozen norm may be meant."""
    (line,) = [one for one in made(model=Deaf(), algo="fedavg").notes if "train" in one]
    assert "has statistics that train mode does not change" in line
    quiet = made(model=TWIN, algo="fedavg").notes
    assert not [one for one in quiet if "statistics" in one]


def of_tokens(most):
    """Rows of four tokens with a label, and a test row with the token `most`."""
    x = np.random.default_rng(0).integers(0, 50, (72, 4))
    test = np.full((4, 4), most)
    given = {"dataset": (x, x[:, 0] % 2), "test": (test, test[:, 0] % 2)}
    return given | {"partition": "iid", "num_clients": 4, "test_split": "official"}


class Words(nn.Module):
    """A mean of 50 embeddings."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.Embed(50, 4)(x).mean(1))


def test_tokens_of_test_rows_have_an_embedding():
    """One that has none would be answered from nan."""
    assert made(model=Words(), algo="fedavg", **of_tokens(49)).round == 0
    with pytest.raises(ValueError, match="nan for tokens up to 50, .* of 51 words"):
        made(model=Words(), algo="fedavg", **of_tokens(50))


class Clamped(nn.Module):
    """A mean of 50 embeddings that JAX's index finds, which clamps others."""

    @nn.compact
    def __call__(self, x):
        table = self.param("table", nn.initializers.normal(), (50, 4))
        return nn.Dense(2)(table[x].mean(1))


def test_an_index_that_is_clamped_is_noted():
    """Its last row answers for others, which may be meant."""
    for most, is_noted in ((49, False), (55, True)):
        lines = made(model=Clamped(), algo="fedavg", **of_tokens(most)).notes
        line = f"reads token {most} as {most - 1}; one for each needs {most + 1}"
        assert any(line in one for one in lines) == is_noted


@pytest.mark.parametrize("algo", ["fedavg", "heterofl"])
def test_tokens_at_every_width(algo):
    """Narrower forms take tokens, too."""

    def words(width):
        parts = [nn.Embed(50, math.ceil(8 * width)), lambda h: h.mean(1), nn.Dense(2)]
        return nn.Sequential(parts)

    run = made(model=words, algo=algo, **of_tokens(49))
    assert run.run(progress=False)["metrics"]["global_loss"]["mean"] > 0


def test_a_series_that_is_flattened_has_no_narrower_forms():
    """A slice of the next kernel holds places, and not channels."""

    def flat(width):
        first = nn.Conv(math.ceil(64 * width), (3,))
        return nn.Sequential([first, lambda h: h.reshape(len(h), -1), nn.Dense(2)])

    def mean(width):
        first = nn.Conv(math.ceil(64 * width), (3,))
        return nn.Sequential([first, lambda h: h.mean(1), nn.Dense(2)])

    x, y, owner = data()
    series = np.stack([x, -x, x * x], 2)
    given = {"algo": "heterofl", "dataset": (series, y, owner), "layout": "ntc"}
    given["client_chunk"] = 1
    assert made(model=mean, **given).round == 0
    with pytest.raises(ValueError, match="flattens a map, so that no narrower"):
        made(model=flat, **given)


def test_the_clock_of_stages_that_flax_does_not_see():
    """A multiply-accumulate for each parameter, by level."""

    class Wide(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(6, 6, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.dense(x)

    class End(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(6, 2, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.dense(x)

    model = [("one", Wide, End), ("two", Wide, End)]
    given = {"level_mix": "1:1", "client_speed": "lognormal:0.5"}
    run = made(model=model, algo="depthfl", **given)
    assert run.planner._who.macs[0].tolist() == [48, 96]


class Columns(nn.Module):
    """A place of few words beside one of many, and arguments that are no mode."""

    @nn.compact
    def __call__(self, x, train_backbone=False, constrained=True):
        return nn.Dense(2)(nn.Embed(3, 4)(x[:, 0]) + nn.Embed(1000, 4)(x[:, 1]))


def test_tokens_of_each_place():
    """An embedding has the words of its own place."""
    gen, given = np.random.default_rng(0), {"partition": "iid", "num_clients": 4}
    x = np.stack([gen.integers(0, 3, 72), gen.integers(0, 1000, 72)], 1)
    run = made(model=Columns(), algo="fedavg", dataset=(x, x[:, 0] % 2), **given)
    assert run.run(progress=False)["metrics"]["global_loss"]["mean"] > 0


@pytest.mark.parametrize(
    "given, part",
    [
        ({"model": Mean()}, "examples that only fill a batch; .* `sample_mask`"),
        ({"model": Late()}, "nothing passes its argument is_train; the mode has"),
        ({"model": nn.Sequential([Late(), nn.Dense(2)])}, "passes its argument is_tra"),
        ({"model": Tardy}, "nothing passes its argument is_train; the mode has"),
        ({"model": (TWIN.init, TWIN.apply)}, "init is a flax module's; give the mod"),
        (
            {"model": (lambda key: {0: np.ones((6, 2))}, lambda p, x: x @ p[0])},
            "a dict with the name 0, expected a nested dict of arrays, with texts",
        ),
        (
            {"model": [nn.Dense(2), Id()], "algo": "fedper", "personal_from": "last"},
            "no parameters from --personal_from=last on .*, so nothing would be per",
        ),
        (
            {"model": [nn.Dense(3), nn.Dense(2), Id()], "algo": "fedrep"},
            "so nothing would be personal",
        ),
        ({"model": Stuck}, "own_Stuck depends in eval mode on the other examples"),
        ({"model": [("one", bridged())]}, "depends in eval mode on the other examples"),
        ({"model": Net, "algo": "fedper"}, r"Body\(\), Head\(\).*Sequential.*split="),
        ({"model": Net, "algo": "heterofl"}, "your own: a function of width"),
        ({"model": Net, "algo": "depthfl"}, "your own: .*Body.., Exit"),
        ({"model": exits(), "algo": "heterofl"}, "has one width; take .* a function"),
        ({"model": exits(), "algo": "inclusivefl", "level_mix": "1"}, "has 1 levels"),
        ({"model": Net, "split": 3}, "split=3: expected names of submodules"),
        ({"split": "head"}, "give it as model="),
        ({"model": lambda rngs: nnx.Linear(6, 3, rngs=rngs)}, r"float32\[2, 3\] for"),
        ({"model": lambda rngs: nnx.Linear(5, 2, rngs=rngs)}, "cannot take examples"),
        (
            {"model": lambda width: nn.Dense(math.ceil(2 * width))},
            r"gives float32\[2, 1\] for 2 examples",
        ),
    ],
)
def test_one_line(given, part):
    """What came, what was expected, what to change."""
    with pytest.raises(ValueError, match=part) as error:
        made(**{"algo": "fedavg"} | given)
    assert "\n" not in str(error.value)


CLASSES = 2
NEIGHBOURS = False


class Global(nn.Module):
    """A notebook's module, which refers to what another cell may change."""

    @nn.compact
    def __call__(self, x):
        if NEIGHBOURS:
            x = x - x.mean(0)
        return nn.Dense(CLASSES)(x)


@pytest.mark.parametrize(
    "name, value, part",
    [("CLASSES", 3, "cannot take examples"), ("NEIGHBOURS", True, "other examples")],
)
def test_a_module_is_asked_again(name, value, part, monkeypatch):
    """It is equal to the one before, and computes something else."""
    made(algo="fedavg", model=Global())
    monkeypatch.setitem(globals(), name, value)
    with pytest.raises(ValueError, match=part):
        made(algo="fedavg", model=Global())


class Small(nn.Module):
    """A layer, wider with `more`."""

    more: int = 0

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(4 + self.more)(x)))


def test_clients_with_own_models_of_several_forms(tmp_path):
    """A dict names them, in the order of clients; each is as if all had it."""
    own = {"small": Small(), "net": Net}
    given = {"algo": "local", "num_seeds": 2, "optimizer_state": "persist"}
    mixed = made(**given, client_model=own, workdir=tmp_path / "run")
    mixed.run(progress=False)
    assert mixed.config.client_model == "own_small,own_net"
    assert mixed.metrics[-1]["clients_in_client_accuracy_own_net"] == 2
    for number, model in enumerate(own.values()):
        alone = made(**given, model=model)
        alone.run(progress=False)
        for client in (number, number + 2):
            for seed in (0, 1):
                pair = (e.client_model(client, seed).variables for e in (mixed, alone))
                chex.assert_trees_all_close(*pair, rtol=1e-5, atol=1e-6)
    again = build.load(tmp_path / "run", dataset=data(), client_model=own)
    assert again.round == 2
    for other, line in (
        ({}, "own_small,own_net was a custom module; give client_model="),
        ({"client_model": own | {"small": Small(1)}}, "computes something else"),
        ({"client_model": dict(reversed(own.items()))}, "not own_net,own_small"),
    ):
        with pytest.raises(ValueError, match=line):
            build.load(tmp_path / "run", dataset=data(), **other)


@pytest.mark.parametrize(
    ("several", "line"),
    [
        ({}, "client_model: the dict has no model"),
        ({"a b": Small()}, "client_model: 'a b' is no name of a model"),
        ({"a": 3}, "client_model: a: model: expected .* got a int"),
    ],
)
def test_dicts_that_are_no_models(several, line):
    with pytest.raises(ValueError, match=line):
        made(algo="local", client_model=several)


def test_a_comparison_takes_split():
    """All its runs have the stages."""
    rules = {"preset": "none", "rounds": 1, "dataset": data(), "run": False}
    compared = build.compare(["fedavg", "fedper"], model=Net, split=["head"], **rules)
    assert [len(run.task.model.stage_names) for run in compared.values()] == [2, 2]


@pytest.mark.slow
def test_the_contract_of_nnx():
    """Chunks, devices, a stop: the same for an nnx module in stages."""
    rules = {"dataset": data(), "preset": "none", "rounds": 4, "batch_size": 8}
    contract.check(fedper, model=Net, split="head", **rules)
