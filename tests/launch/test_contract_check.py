"""`contract.check` lets what keeps the contract pass, and names what does not."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import algorithms
import fedjax_pfl as fp
from algorithms import fedavg, fedper
from fedjax_pfl import averaging
from launch import contract
from tests import synthetic, test_contract

OPTIONS = {"model": "mlp", "num_clients": 6, "partition": "iid", "local_epochs": 1}
OPTIONS |= {"rounds": 2}


@pytest.fixture(scope="module")
def options():
    source = synthetic.blobs(120, (2, 2, 1), 3)
    return OPTIONS | {"dataset": (source.image, source.label), "batch_size": 8}


def changed(base=fedper, **by_name):
    """A method with a function of its result in the place of `round`."""

    def make(hparams, task):
        made = base.make(hparams, task)

        def round(state, cohort, data):
            out = made.round(state, cohort, data)
            return by_name["round"](out, cohort, state)

        return made._replace(round=round)

    return SimpleNamespace(HParams=base.HParams, make=make, __name__="mine")


def test_a_rate_is_of_an_optimizer_that_takes_one():
    """A transformation has its own, beside which --client_lr is refused."""
    for given, has_rate in ((optax.sgd, True), (optax.sgd(0.1), False)):
        of_fedavg = {"algo": algorithms.ALGORITHMS["fedavg"], "client_optimizer": given}
        options, _ = contract._mild(of_fedavg)
        assert ("client_lr" in options) == has_rate


def test_few_steps_by_default():
    """Many make large differences of rounding errors; own data have what they have."""
    for name, expected in (
        ("fedavg", {"model": "mlp", "local_epochs": 1}),
        ("fedper", {"examples_per_round": 40}),
        ("majority", {}),
    ):
        entry = {"algo": algorithms.ALGORITHMS[name]}
        out, _ = contract._mild(entry)
        few = {
            n: out[n]
            for n in ("model", "local_epochs", "examples_per_round")
            if n in out
        }
        assert few == expected
        assert not expected.keys() & contract._mild(entry | {"dataset": "x"})[0].keys()


@pytest.mark.slow
def test_rounding_errors_break_nothing(options):
    """A bias before a norm has no other gradient; Adam makes whole steps of it.

    Every rule, a sentence each.
    """
    net = nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(8)])
    options |= {"model": [net, nn.BatchNorm(momentum=0.5), nn.Dense(3)]}
    rules = contract.check("fedper", preset="fedd2s", **options | {"rounds": 4})
    assert len(rules) == 9 and all(rule.endswith(".") for rule in rules)


@pytest.mark.slow
def test_what_could_not_be_tested_is_not_claimed(options):
    """Where everybody is drawn nobody is absent."""
    rules = contract.check("fedper", **options, clients_per_round=6)
    assert len(rules) == 7 and not any("Absent" in rule for rule in rules)


def absent_move(out, cohort, _):
    """Everybody's private rows shrink, whoever was drawn."""
    state, metrics, sent = out
    rows = jax.tree.map(
        lambda leaf: leaf * 0.9 if leaf.dtype == jnp.float32 else leaf, state.clients
    )
    return state.replace(clients=rows), metrics, sent


def place_counts(out, cohort, _):
    """The rows' number, with padding, gets into the result."""
    state, metrics, sent = out
    factor = 1 - 0.1 * len(cohort.row)
    server = jax.tree.map(lambda leaf: leaf * factor, state.server)
    return state.replace(server=server), metrics, sent


def first_row_counts(out, cohort, before):
    """The first row of a device, whoever's it is, gets into the server's model."""
    state, metrics, sent = out
    more = max(jax.tree.leaves(before.clients), key=jnp.ndim)[0].std()
    server = jax.tree.map(lambda leaf: leaf + more, state.server)
    return state.replace(server=server), metrics, sent


def undeclared(out, cohort, _):
    """A message that nobody knows."""
    state, metrics, sent = out
    return state, metrics, sent | {"gossip": 1}


def forgotten(out, cohort, before):
    """A server that stays as it came."""
    state, metrics, sent = out
    return state.replace(server=before.server), metrics, sent


def averaged(mean):
    """FedAvg whose own loss is `mean` of the cross-entropies and the mask."""

    def make(hparams, task):
        def loss_fn(params, stats, batch):
            logits, stats = task.model.forward(params, stats, batch.image, **batch.mode)
            log_p = jax.nn.log_softmax(logits)
            each = -jnp.take_along_axis(log_p, batch.label[:, None], 1)[:, 0]
            return mean(each, batch.mask), stats

        def client_update(client, server):
            return fp.train(hparams, loss_fn, server, client)

        return averaging.make(hparams, task, client_update)

    return make


def test_a_server_that_stays(options):
    """A round that forgets its server ends as it began, which no other rule sees."""
    words = "server's state changes in rounds. after 2 rounds it is what it was"
    with pytest.raises(contract.BrokenError, match=words):
        contract.check(changed(fedavg, round=forgotten), **options)


def test_a_state_that_stays_without_a_server_s_model(options):
    """Such as of a network that makes the clients' models."""

    def make(hparams, task):
        made = fedper.make(hparams, task)

        def init(data, key):
            state = made.init(data, key)
            return state.replace(server={"model": state.server, "own": jnp.ones(3)})

        def round(state, cohort, data):
            inner = state.replace(server=state.server["model"])
            after, *more = made.round(inner, cohort, data)
            return after.replace(server=state.server), *more

        def serving(state, cohort, data):
            return made.serving(
                state.replace(server=state.server["model"]), cohort, data
            )

        changed = {"init": init, "round": round, "serving": serving, "server": None}
        return made._replace(**changed)

    mine = SimpleNamespace(HParams=fedper.HParams, make=make, __name__="mine")
    with pytest.raises(contract.BrokenError, match="server's state changes in rounds"):
        contract.check(mine, **options)


@pytest.mark.parametrize("count", [3, 6])
def test_a_mean_that_counts_padding(options, count):
    """Also where three clients at a time leave no padding."""

    def make(hparams, task):
        def update(client, server):
            return fp.train(hparams, fp.cross_entropy_loss(task.model), server, client)

        def round(state, cohort, data):
            here = fp.Round(task, state, cohort, data)
            trained, here = here.update(update, shared=state.server)
            mean = jax.tree.map(lambda leaf: leaf.mean(0), trained.variables)
            sent = {"model down": 1, "model up": 1}
            return here.after(server=mean), trained.metrics(cohort), sent

        return averaging.make(hparams, task, update)._replace(round=round)

    mine = SimpleNamespace(HParams=averaging.Averaging, make=make, __name__="mine")
    with pytest.raises(contract.BrokenError, match="How many clients are computed tog"):
        contract.check(mine, **options, clients_per_round=count)


def test_padding_that_is_less_than_rounding(options):
    """Its numbers are seen where other chunks would differ by rounding alone."""

    def make(hparams, task):
        loss_fn = fp.cross_entropy_loss(task.model)

        def update(client, server):
            return fp.train(hparams, loss_fn, server, client)

        def round(state, cohort, data):
            here = fp.Round(task, state, cohort, data)
            trained, here = here.update(update, shared=state.server)
            weight = here.weights("examples")

            def mean(leaf):
                return jnp.tensordot(weight, leaf, 1) + 1e-6 * leaf.sum(0)

            new = jax.tree.map(mean, trained.variables)
            sent = {"model down": 1, "model up": 1}
            return here.after(server=new), trained.metrics(cohort), sent

        return averaging.make(hparams, task, update)._replace(round=round)

    mine = SimpleNamespace(HParams=averaging.Averaging, make=make, __name__="mine")
    with pytest.raises(contract.BrokenError, match="What is in padding rows does not"):
        contract.check(mine, **options, clients_per_round=4)


@pytest.mark.parametrize(
    "mean",
    [
        lambda each, mask: each.mean(),
        lambda each, mask: jnp.where(mask, each, 0).mean(),
    ],
    ids=["of all rows", "over the length"],
)
def test_a_loss_that_counts_padding(options, mean):
    """Rounds with other batches end elsewhere, and the line names the mask."""
    mine = {"HParams": averaging.Averaging, "make": averaged(mean), "__name__": "mine"}
    with pytest.raises(contract.BrokenError, match="What fills .* rows in batch.mask"):
        contract.check(SimpleNamespace(**mine), **options)


@pytest.mark.parametrize(
    "round, part",
    [
        (absent_move, "mine breaks: Absent clients keep their private rows"),
        (
            place_counts,
            "mine breaks: How many .* With 3 clients at a time",
        ),
        (undeclared, "declared kind. add a MessageKind for gossip"),
    ],
)
def test_what_breaks_it(options, round, part):
    """One line that says which rule, and what to look for."""
    options = options | {"clients_per_round": 4}
    with pytest.raises(contract.BrokenError, match=part) as error:
        contract.check(changed(round=round), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shares_rows", [True, False])
@pytest.mark.slow
def test_rows_of_no_cohort_are_read(options, shares_rows):
    """Where a device has those of a round alone; nobody else promises otherwise."""
    mine = changed(round=first_row_counts)
    mine.shares_rows = shares_rows
    given = options | {"rounds": 4, "clients_per_round": 2}
    if not shares_rows:
        assert not any(
            "private rows a" in rule for rule in contract.check(mine, **given)
        )
        return
    with pytest.raises(contract.BrokenError, match="=host a number ends .*here.rows"):
        contract.check(mine, **given)


@pytest.mark.slow
def test_rows_that_begin_unequal_stay_on_the_device(options):
    """They cannot be elsewhere, and the rule is not claimed."""
    given = options | {"clients_per_round": 3, "num_peers": 2, "shared_init": False}
    rules = contract.check("dfedavg", **given)
    assert not any("private rows a device" in rule for rule in rules)


def test_what_only_one_process_knows(options):
    """A counter beside the state: another run, or a resumed one, is not the same."""
    seen = []

    def make(hparams, task):
        made = fedper.make(hparams, task)

        def init(data, key):
            seen.append(1)
            state = made.init(data, key)
            shift = 0.01 * len(seen)
            server = jax.tree.map(lambda leaf: leaf + shift, state.server)
            return state.replace(server=server)

        return made._replace(init=init)

    mine = SimpleNamespace(HParams=fedper.HParams, make=make, __name__="mine")
    with pytest.raises(contract.BrokenError, match="The same seed gives the same bits"):
        contract.check(mine, **options)


def test_too_few_rounds(options):
    """A stop needs a round on each side."""
    with pytest.raises(ValueError, match="rounds=1: expected at least 2"):
        contract.check("fedper", **options | {"rounds": 1})


@pytest.mark.slow
def test_the_whole_entry_is_checked(options, monkeypatch):
    """An algorithm that says that it takes texts is checked on a text."""
    test_contract.register_toys(monkeypatch)
    seen = []

    class Mine:
        """FedPer, which declares that it takes texts."""

        HParams, preset, text = fedper.HParams, "none", True

        def make(hparams, task):
            return fedper.make(hparams, task)

    monkeypatch.setattr(contract, "_resumed", lambda fresh: fresh())
    monkeypatch.setattr(contract, "_difference", lambda one, other: 0.0)
    monkeypatch.setattr(
        contract, "_absent_stay", lambda made: seen.append(made) or True
    )
    given = {"dataset": "small", "partition": "natural", "model": "one_layer"}
    # FedPer's entry also says that its rows may be shared out.
    for algo, count in ((Mine, 8), ("fedper", 9)):
        assert len(contract.check(algo, **given, rounds=2)) == count
    assert seen[0].task.num_classes == seen[0].data.num_words == 8
    assert [one.config.algo for one in seen] == ["Mine", "own_fedper"]


@pytest.mark.parametrize(
    "one, other, far",
    [
        ([np.inf, np.nan, 0.5], [np.inf, np.nan, 1.0], 0.5),
        ([3.0, 200.0], [3.0, 100.0], 1.0),
        ([1.0, np.nan], [1.0, 2.0], np.inf),
        ([1, 2], [1, 2], 0.0),
    ],
)
def test_how_far_numbers_are_apart(one, other, far):
    """Equal ones, finite or not, are not; above 1 it is a share of the second."""
    assert contract._apart(np.array(one), np.array(other)) == far
