"""The clients' optimizers by name and as objects, masked, against plain optax."""

import functools
import types as python_types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl import local_training, optimizer

PARAMS = (
    {"kernel": jnp.linspace(-1, 1, 6).reshape(2, 3), "bias": jnp.ones(3)},
    {"kernel": jnp.linspace(2, 3, 3)},
)


def grads_at(params):
    """Gradients of a bowl with another curvature for each entry."""
    return jax.tree.map(
        lambda leaf: leaf * jnp.linspace(0.1, 2, leaf.size).reshape(leaf.shape), params
    )


def hparams_of(**given):
    """Options of local training."""
    return local_training.LocalTraining(client_lr=0.05, **given)


@functools.lru_cache(maxsize=1)
def compiled(hparams):
    """(our optimizer, its step `(state, params, mask)`), one for tests in a row."""
    tx = optimizer.make(hparams, hparams.client_lr)

    @jax.jit
    def step(state, params, mask):
        return optimizer.apply_gradients(tx, grads_at(params), state, params, mask)

    return tx, step


def steps(hparams, masks):
    """Parameters after a step for each mask, by our optimizer."""
    tx, step = compiled(hparams)
    state, params = optimizer.init(tx, PARAMS), PARAMS
    for mask in masks:
        params, state = step(state, params, mask)
    return params


def plain(tx, count, params=PARAMS):
    """Parameters after optax's own loop."""
    state = tx.init(params)
    for _ in range(count):
        update, state = tx.update(grads_at(params), state, params)
        params = optax.apply_updates(params, update)
    return params


def all_of(value):
    """A mask of both stages."""
    return (jnp.bool_(value), jnp.bool_(value))


def equal(found, wanted, **given):
    """Compares two trees."""
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, **given)


@pytest.mark.parametrize("name", optimizer.NAMES)
def test_names_equal_optax(name):
    """Three steps; a mask that holds one stage keeps its parameters and moments."""
    made = {"adam": optax.adam, "sgd": optax.sgd}.get(name) or getattr(optax, name)
    more = {"weight_decay": 0.0} if name in ("adamw", "nadamw", "lion", "adan") else {}
    more |= {"weight_decay": 0.0} if name in ("adamaxw", "lamb", "lars") else {}
    more |= {"momentum": 0.0} if name in ("rmsprop", "lars") else {}
    tx, hparams = made(0.05, **more), hparams_of(client_optimizer=name)
    equal(steps(hparams, [all_of(True)] * 3), plain(tx, 3), rtol=1e-5, atol=1e-7)
    first = (jnp.bool_(True), jnp.bool_(False))
    held = steps(hparams, [all_of(True), first, all_of(True)])
    np.testing.assert_array_equal(
        steps(hparams, [first] * 2)[1]["kernel"], PARAMS[1]["kernel"]
    )
    equal(held[1], plain(tx, 2, PARAMS[1:])[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("given", [{}, {"client_momentum": 0.5, "weight_decay": 0.1}])
def test_flags_reach_optax(given):
    """Decay is decoupled where optax has it, and momentum is that of the flag."""
    decay, momentum = given.get("weight_decay", 0.0), given.get("client_momentum", 0.0)
    pairs = {
        "adamw": optax.adamw(0.05, weight_decay=decay),
        "rmsprop": optax.chain(
            optax.add_decayed_weights(decay), optax.rmsprop(0.05, momentum=momentum)
        ),
    }
    for name, tx in pairs.items():
        found = steps(hparams_of(client_optimizer=name, **given), [all_of(True)] * 3)
        equal(found, plain(tx, 3), rtol=1e-5)


def test_options():
    """Numbers and switches reach the function; others are refused in one line."""
    text = "b1=0.8, eps=1e-2,nesterov=true"
    given = hparams_of(client_optimizer="adamw", client_optimizer_options=text)
    tx = optax.adamw(0.05, b1=0.8, eps=1e-2, nesterov=True, weight_decay=0.0)
    equal(steps(given, [all_of(True)] * 3), plain(tx, 3), rtol=1e-5)
    given = hparams_of(client_optimizer="adam", client_optimizer_options="b2=0.9")
    equal(
        steps(given, [all_of(True)] * 3), plain(optax.adam(0.05, b2=0.9), 3), rtol=1e-5
    )


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "lars"])
def test_nesterov_needs_momentum(name):
    given = {"client_optimizer": name, "client_optimizer_options": "nesterov=true"}
    with pytest.raises(ValueError, match="nesterov has no effect without --client_m"):
        optimizer.check(hparams_of(**given))
    optimizer.check(hparams_of(**given, client_momentum=0.5))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("b3=1", "adamw has no option b3, expected one of b1, b2, eps"),
        ("b1", "expected pairs such as"),
        ("b1=0.5,b1=0.6", "names b1 twice"),
        ("b1=x", "b1 is x, expected a finite number"),
        ("b1=nan", "expected a finite number"),
        ("weight_decay=1", "give --weight_decay"),
        ("mask=1", "adamw has no option mask"),
    ],
)
def test_other_options_are_refused(text, reason):
    """One line says which there are."""
    given = hparams_of(client_optimizer="adamw", client_optimizer_options=text)
    with pytest.raises(ValueError, match=f"^--client_optimizer_options={text}.*"):
        optimizer.check(given)
    with pytest.raises(ValueError, match=reason):
        optimizer.check(given)


def chained(learning_rate):
    """A clip of all stages together, and a rate that falls within a round."""
    schedule = optax.cosine_decay_schedule(1.0, 5)
    return optax.chain(
        optax.clip_by_global_norm(0.7),
        optax.sgd(learning_rate, momentum=0.9),
        optax.scale_by_schedule(schedule),
    )


@pytest.mark.parametrize("given", [chained, chained(0.05)])
def test_a_custom_one_sees_all_stages(given):
    """Its clip is by the norm of all of them, so that it equals optax's own loop."""
    hparams = hparams_of(client_optimizer=optimizer.custom(given))
    found = steps(hparams, [all_of(True)] * 4)
    equal(found, plain(chained(0.05), 4), rtol=1e-5)
    apart = [plain(chained(0.05), 4, PARAMS[n : n + 1])[0] for n in (0, 1)]
    assert not np.allclose(apart[1]["kernel"], found[1]["kernel"], rtol=1e-3)


def test_a_custom_one_is_masked():
    """What is frozen keeps its values and moments, and is left out of the norm."""
    hparams = hparams_of(client_optimizer=optimizer.custom(chained))
    first = (jnp.bool_(True), jnp.bool_(False))
    found = steps(hparams, [first] * 3)
    np.testing.assert_array_equal(found[1]["kernel"], PARAMS[1]["kernel"])
    equal(found[0], plain(chained(0.05), 3, PARAMS[:1])[0], rtol=1e-5)
    none = steps(hparams, [all_of(False)] * 2 + [all_of(True)] * 2)
    equal(none, plain(chained(0.05), 2), rtol=1e-5)


@pytest.mark.parametrize("key", [3, jax.random.key(3)], ids=["number", "key"])
def test_noise_differs(key):
    """Between clients, rounds and seeds, with the key that the optimizer was given."""

    def noisy(learning_rate):
        return optax.chain(optax.add_noise(1.0, 0.0, key), optax.sgd(learning_rate))

    own = optimizer.custom(noisy)
    hparams = hparams_of(client_optimizer=own, optimizer_state="persist")
    optimizer.check(hparams)
    assert optimizer.fingerprint(own) == optimizer.fingerprint(optimizer.custom(noisy))
    state = optimizer.fresh(hparams, PARAMS)
    stream = jax.random.key(0)
    every = [optimizer.seeded(state, jax.random.fold_in(stream, n)) for n in (0, 1, 1)]
    one, other, again = (
        np.concatenate([jax.random.key_data(k).ravel() for k in keys_of(found)])
        for found in every
    )
    assert (one != other).all() and (other == again).all()
    other_key = keys_of(optimizer.seeded(jax.tree.map(moved, state), stream))
    assert all(a != b for a, b in zip(keys_of(every[0]), other_key, strict=True))
    plain_state = optimizer.fresh(hparams_of(client_optimizer="adam"), PARAMS)
    chex.assert_trees_all_equal(optimizer.seeded(plain_state, stream), plain_state)


def keys_of(state):
    """Its random keys, typed."""
    leaves = jax.tree.leaves(state)
    return [x for x in leaves if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]


def moved(leaf):
    """The leaf, or another key."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.fold_in(leaf, 0) if is_key else leaf


def entry_mask():
    """One that trains single entries."""
    every = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, bool), PARAMS)
    every[0]["kernel"] = every[0]["kernel"].at[0].set(False)
    return every


def test_single_entries():
    """Masks may be for single entries of a parameter."""
    hparams = hparams_of(client_optimizer=optimizer.custom(chained))
    found = steps(hparams, [entry_mask()] * 2)[0]["kernel"]
    np.testing.assert_array_equal(found[0], PARAMS[0]["kernel"][0])
    assert (np.asarray(found[1]) != PARAMS[0]["kernel"][1]).all()


def labels_of(params):
    """Kernels and others."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "kernel" if path[-1].key == "kernel" else "bias", params
    )


@pytest.mark.parametrize(
    "given",
    [
        lambda rate: optax.multi_transform(
            {"kernel": optax.adam(rate), "bias": optax.sgd(rate, 0.9)}, labels_of
        ),
        lambda rate: optax.masked(
            optax.adam(rate), lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p)
        ),
        optax.adafactor,
        optax.contrib.muon,
    ],
    ids=["multi_transform", "masked", "adafactor", "muon"],
)
def test_states_of_a_part_of_the_parameters(given):
    """They equal optax's own loop, and what is frozen keeps its moments."""
    hparams = hparams_of(client_optimizer=optimizer.custom(given))
    found = steps(hparams, [all_of(True)] * 3)
    equal(found, plain(given(0.05), 3), rtol=1e-4, atol=1e-6)
    first = (jnp.bool_(True), jnp.bool_(False))
    held = steps(hparams, [first] * 2)
    np.testing.assert_array_equal(held[1]["kernel"], PARAMS[1]["kernel"])
    equal(held[0], plain(given(0.05), 2, PARAMS[:1])[0], rtol=1e-4, atol=1e-6)
    none = steps(hparams, [all_of(False)] * 2 + [all_of(True)] * 2)
    equal(none, plain(given(0.05), 2), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (5, "got a int"),
        (lambda rate: 3, "got a int"),
        (
            optax.MultiSteps(optax.sgd(0.1), 2),
            r"got a MultiSteps; give what its gradient_transformation\(\) returns",
        ),
        (lambda: optax.sgd(0.1), "expected a function of the learning rate"),
        (lambda rate: {}["no"], "but it fails .'no'"),
        (lambda rate: optax.adam(float(rate)), "a learning rate that is traced"),
        (optax.lbfgs(), "fails on gradients and parameters alone.*value"),
        (
            optax.stateless(lambda g, p: jax.tree.map(lambda x: x[None], g)),
            "changes the shapes",
        ),
    ],
)
def test_what_is_no_optimizer(given, reason):
    """One line says what came and what was expected."""
    with pytest.raises(ValueError, match=f"^client_optimizer: .*{reason}"):
        optimizer.try_step(optimizer.custom(given), PARAMS)


def test_fingerprints():
    """Equal functions have one text, other numbers another, arrays count too."""

    def made(decay, scale=1.0):
        return optimizer.custom(
            lambda rate: optax.chain(
                optax.adamw(rate, b1=decay),
                optax.stateless(lambda g, p: jax.tree.map(lambda x: x * scale, g)),
            )
        )

    texts = [optimizer.fingerprint(made(decay)) for decay in (0.9, 0.9, 0.8)]
    assert texts[0] == texts[1] != texts[2]
    for dtype in (jnp.float32, jnp.bfloat16):
        arrays = (jnp.full(3, x, dtype) for x in (1, 2))
        one, other = (optimizer.fingerprint(made(0.9, array)) for array in arrays)
        assert one != other


def test_a_fingerprint_is_of_inner_programs():
    """Of the arrays that a compiled function inside an optimizer holds."""

    def made(numbers):
        inner = jax.jit(lambda x: x * jnp.asarray(numbers).sum())
        return optimizer.custom(optax.stateless(lambda g, p: jax.tree.map(inner, g)))

    arrays = [np.arange(n, n + 3, dtype=np.float32) for n in (0, 0, 1)]
    texts = [optimizer.fingerprint(made(numbers)) for numbers in arrays]
    assert texts[0] == texts[1] != texts[2]


def test_a_kept_state_must_not_depend_on_the_parameters():
    """It is made before they are there."""
    given = optax.contrib.schedule_free_adamw
    own = optimizer.custom(given)
    optimizer.check(hparams_of(client_optimizer=own), PARAMS)
    kept = hparams_of(client_optimizer=own, optimizer_state="persist")
    with pytest.raises(ValueError, match="^--optimizer_state=persist: .* give reset$"):
        optimizer.check(kept, PARAMS)
    for name in optimizer.NAMES:
        tx = optimizer.make(hparams_of(client_optimizer=name), 0.1)
        one, other = (
            optimizer.init(tx, jax.tree.map(lambda leaf, v=v: leaf * v, PARAMS))
            for v in (0, 1)
        )
        equal(one, other)


def test_a_kept_state_must_not_have_a_rate_that_decays():
    """That of round 0 would be that of every round."""

    def given(rate):
        return optax.inject_hyperparams(optax.sgd)(learning_rate=rate)

    kept = {"client_optimizer": optimizer.custom(given), "optimizer_state": "persist"}
    optimizer.check(hparams_of(**kept), PARAMS)
    with pytest.raises(ValueError, match="the rate of round 0, on which --client_lr_d"):
        optimizer.check(hparams_of(**kept, client_lr_decay=0.5), PARAMS)
    kept["client_optimizer"] = optimizer.custom(optax.adam)
    optimizer.check(hparams_of(**kept, client_lr_decay=0.5), PARAMS)


def test_an_optimizer_of_certain_stages():
    """It is tried on the model of the run, and has a text where two arrays are none."""
    third = (False, False, True)

    def made(scale):
        return optimizer.custom(optax.masked(optax.scale(scale), third))

    three = (*PARAMS, PARAMS[0])
    optimizer.try_step(made(2.0), three)
    with pytest.raises(ValueError, match="with the 2 stages of this model"):
        optimizer.try_step(made(2.0), three[:2])
    texts = [optimizer.fingerprint(made(scale)) for scale in (2.0, 2.0, 3.0)]
    assert texts[0] == texts[1] != texts[2]


def test_check_needs_no_other_options():
    """Algorithms without `optimizer_state` may have an optimizer, too."""
    given = {"client_optimizer": "sgd", "client_optimizer_options": ""}
    given |= {"weight_decay": 0.0, "client_momentum": 0.0}
    optimizer.check(python_types.SimpleNamespace(**given))


def test_decay_is_not_added_twice():
    """With eps=1 Adam's step depends on the scale of gradients, so a term is seen."""
    given = {"client_optimizer": "adamw", "client_optimizer_options": "eps=1"}
    found = steps(hparams_of(**given, weight_decay=0.1), [all_of(True)] * 3)
    equal(found, plain(optax.adamw(0.05, eps=1.0, weight_decay=0.1), 3), rtol=1e-5)


def test_factored_moments_wait():
    """In steps without examples they stay, as counts do."""
    given = functools.partial(optax.adafactor, min_dim_size_to_factor=1)
    hparams = hparams_of(client_optimizer=optimizer.custom(given))
    found = steps(hparams, [all_of(one) for one in (True, False, False, True)])
    equal(found, plain(given(0.05), 2), rtol=1e-4, atol=1e-6)
    # The kernel of a stage that trains its bias alone has its first moments afterwards.
    tx = optimizer.make(hparams, 0.05)
    state = optimizer.init(tx, PARAMS)
    half = tuple({n: jnp.bool_(n != "kernel") for n in one} for one in PARAMS)
    _, after = optimizer.apply_gradients(tx, PARAMS, state, PARAMS, half)
    paths = zip(*map(jax.tree_util.tree_leaves_with_path, (state, after)), strict=True)
    for (path, before), (_, now) in paths:
        if "kernel" in jax.tree_util.keystr(path):
            np.testing.assert_array_equal(before, now)


def test_a_state_of_python_numbers():
    """It is no key, and stays as it is."""
    state = {"count": 0, "scale": 1.5, "seen": jnp.zeros(2)}
    found = optimizer.seeded(state, jax.random.key(0))
    assert found["count"] == 0 and found["scale"] == 1.5
