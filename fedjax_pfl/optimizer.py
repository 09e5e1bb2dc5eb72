"""The clients' optimizer, masked: untrained parts keep their parameters and moments.

`hparams` are options of `local_training.LocalTraining`. `--client_optimizer` names one
of `NAMES`, and in Python it may be any optax transformation, see `custom`.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl import boundary, options, shapes, stacked, types
from fedjax_pfl import fingerprint as fingerprint_lib
from fedjax_pfl.rows import views

# Optimizers of optax that need only a learning rate and gradients, and treat each entry
# or each array separately, so that each stage may have its own state
_OF_OPTAX = (
    *("adabelief", "adadelta", "adagrad", "adamax", "adamaxw", "adamw", "adan"),
    *("amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "radam"),
    *("rmsprop", "rprop", "sign_sgd", "yogi"),
)
NAMES = ("sgd", "adam", *_OF_OPTAX)
# Their names without weight decay, which is the only difference
DECOUPLED = {"adamw": "adam", "adamaxw": "adamax", "nadamw": "nadam"}
# Those that take the sign of a gradient alone
OF_SIGNS = "rprop", "sign_sgd"
# Arguments of optax's functions that are options of a run
_AS_FLAGS = {
    "learning_rate": "client_lr",
    "weight_decay": "weight_decay",
    "momentum": "client_momentum",
}
# The range of arguments of optax's functions, in words and as a condition
_NOT_NEGATIVE = "a finite number of at least 0", lambda x: x >= 0
_RANGES = dict.fromkeys(
    ("b1", "b3", "decay", "rho", "eta_minus"),
    ("a finite number from 0 to below 1", lambda x: 0 <= x < 1),
)
_RANGES["b2"] = "a finite number between 0 and 1", lambda x: 0 < x < 1
_RANGES["eta_plus"] = "a finite number of at least 1", lambda x: x >= 1


@dataclasses.dataclass(frozen=True)
class Custom:
    """An optimizer that was given as an object, as the value of an `option`.

    `name` is its name in records. `given` is a transformation, or with `has_rate` a
    function of the learning rate that makes one.
    """

    name: str
    given: Any
    has_rate: bool
    option: str = "client_optimizer"

    def __str__(self) -> str:
        return self.name

    def make(self, learning_rate: Any) -> optax.GradientTransformation:
        return self.given(learning_rate) if self.has_rate else self.given

    def step(self, learning_rate: Any, grads: Any, params: Any) -> Any:
        """Its first state, and (updates, state) of its first step."""
        tx = self.make(learning_rate)
        state = tx.init(params)
        return state, tx.update(grads, state, params)


class _Joint(optax.GradientTransformation):
    """A transformation of all stages at once, such as a clip by their global norm."""


class Joined(NamedTuple):
    """An optimizer state of all stages together."""

    state: Any


def make(
    hparams: Any, learning_rate: float | jax.Array
) -> optax.GradientTransformation:
    """The clients' optimizer.

    `--weight_decay` is L2 on the gradient, as in PyTorch, except for those of optax
    that take it as an argument. It is decoupled in most of these, L2 too in adadelta
    and lars, and inside the trust ratio in lamb. Raises ValueError for an
    entry of `--client_optimizer_options` that the optimizer lacks.
    """
    name = hparams.client_optimizer
    if isinstance(name, Custom):
        return _Joint(*name.make(learning_rate))
    more, steps = parsed(hparams), []
    takes = _taken(name)
    if "weight_decay" not in takes and not options.is_off(hparams.weight_decay):
        steps.append(optax.add_decayed_weights(hparams.weight_decay))
    if name in _OF_OPTAX:
        flags = {of: flag for of, flag in _AS_FLAGS.items() if of in takes}
        del flags["learning_rate"]
        given = {of: getattr(hparams, flag) for of, flag in flags.items()}
        return optax.chain(*steps, getattr(optax, name)(learning_rate, **given, **more))
    if name == "adam":
        steps.append(optax.scale_by_adam(**more))
    elif not options.is_off(hparams.client_momentum):
        steps.append(optax.trace(decay=hparams.client_momentum, **more))
    return optax.chain(*steps, optax.scale_by_learning_rate(learning_rate))


def _taken(name: str) -> Mapping[str, Any]:
    """The arguments of optax's function; none for optimizers that are chained here."""
    if name in ("sgd", "adam"):
        return {}
    return inspect.signature(getattr(optax, name)).parameters


def takes_momentum(name: str | Custom) -> bool:
    """Whether an optimizer has a `--client_momentum`."""
    if isinstance(name, Custom):
        return False
    return name == "sgd" or "momentum" in _taken(name)


def parsed(hparams: Any) -> dict[str, float | bool]:
    """`--client_optimizer_options` as arguments of the optimizer.

    Raises ValueError, in one line, if it is not such a list, or if the optimizer lacks
    one.
    """
    text, name = hparams.client_optimizer_options, hparams.client_optimizer
    if not text:
        return {}
    line = f"--client_optimizer_options={text}"
    made = {"sgd": optax.trace, "adam": optax.scale_by_adam}.get(name)
    takes = inspect.signature(made or getattr(optax, name)).parameters.values()
    known = {
        one.name: one.default
        for one in takes
        if isinstance(one.default, (bool, int, float)) and one.name not in _AS_FLAGS
    }
    out: dict[str, float | bool] = {}
    for part in text.split(","):
        option, equals, value = (one.strip() for one in part.partition("="))
        if option in out:
            raise ValueError(f"{line} names {option} twice")
        if not equals:
            raise ValueError(f"{line}: expected pairs such as b1=0.8,eps=1e-6")
        if option not in known:
            flag = _AS_FLAGS.get(option)
            hint = f"; give --{flag}" if flag else ""
            raise ValueError(
                f"{line}: {name} has no option {option}, expected one of "
                f"{', '.join(sorted(known))}{hint}"
            )
        if isinstance(known[option], bool):
            wanted, is_right = "true or false", value.lower() in ("true", "false")
            out[option] = value.lower() == "true"
        else:
            wanted, holds = _RANGES.get(option, _NOT_NEGATIVE)
            out[option] = _number(value)
            is_right = np.isfinite(out[option]) and holds(out[option])
        if not is_right:
            raise ValueError(f"{line}: {option} is {value}, expected {wanted}")
    is_off = takes_momentum(name) and options.is_off(hparams.client_momentum)
    if is_off and out.get("nesterov"):
        raise ValueError(
            f"{line}: nesterov has no effect without --client_momentum; give both"
        )
    return out


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def custom(given: Any, option: str = "client_optimizer") -> Custom:
    """The value of `client_optimizer` or `server_optimizer` for an object.

    `given` is an `optax.GradientTransformation`, or a function of the learning rate
    (which may be a tracer) that makes one, such as `optax.adamw`. Raises ValueError, in
    one line, for anything else.
    """
    if isinstance(given, optax.GradientTransformation):
        return Custom("own_transformation", given, False, option)
    made = None
    if callable(given):
        try:
            made = given(0.1)
        except Exception as error:  # whatever the user's function raises
            raise ValueError(
                f"{option}: expected a function of the learning rate that makes an "
                f"optax.GradientTransformation, but it fails ({options.reason(error)})"
            ) from error
    if not isinstance(made, optax.GradientTransformation):
        odd = given if made is None else made
        cure = ""
        if hasattr(odd, "gradient_transformation"):  # optax.MultiSteps
            cure = "; give what its gradient_transformation() returns"
        raise ValueError(
            f"{option}: expected a name, an optax.GradientTransformation or a function "
            f"of the learning rate that makes one, got a {type(odd).__name__}{cure}"
        )
    name = getattr(given, "__name__", type(given).__name__)
    name = re.sub(r"\W+", "", name) or "lambda"
    return Custom(f"own_{name}", given, True, option)


def try_step(own: Custom, params: types.Params) -> None:
    """Traces a step of a custom optimizer on a model's parameters, or their shapes.

    Raises ValueError if it needs more than gradients and parameters, if it does not fit
    this model, or if the state of a client's cannot be masked.
    """

    def trained(learning_rate: Any, params: Any) -> Any:
        if own.option != "client_optimizer":
            state, (update, after) = own.step(learning_rate, params, params)
            return (params, state), (optax.apply_updates(params, update), after)
        tx = _Joint(*own.make(learning_rate))
        mask, state = tuple(jnp.ones((), bool) for _ in params), init(tx, params)
        return (params, state), apply_gradients(tx, params, state, params, mask)

    try:
        # The learning rate is a tracer in every run, so that it may be swept.
        before, after = jax.eval_shape(trained, 0.1, params)
    except Exception as error:  # whatever the user's functions raise
        raise ValueError(
            f"{own.option}: {own} fails on gradients and parameters alone, with the "
            f"{len(params)} stages of this model, or on a learning rate that is traced "
            f"({options.reason(error)})"
        ) from error
    if _kinds(before) != _kinds(after):
        raise ValueError(
            f"{own.option}: {own} changes the shapes or types of parameters or of its "
            "state in a step"
        )


def _kinds(tree: Any) -> list[tuple[Any, Any]]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def check(hparams: Any, params: types.Params | None = None) -> None:
    """Checks the optimizer's options before anything is compiled.

    With the shapes of a model's `params` a custom one's first state is checked too.
    Raises ValueError for an option that the optimizer lacks, and for a state that
    persists although it depends on the parameters, which do not exist yet, or on a
    learning rate that decays.
    """
    tx = make(hparams, 0.1)
    is_kept = getattr(hparams, "optimizer_state", "reset") == "persist"
    if params is None or not is_kept or not isinstance(tx, _Joint):
        return
    zeros, ones = (
        jax.tree.map(lambda x, fill=fill: np.full(x.shape, fill, x.dtype), params)
        for fill in (0, 1)
    )

    def differ(one: optax.GradientTransformation, others: Any) -> bool:
        """Whether it begins with another state than `tx` with zeros."""
        pair = ((tx, zeros), (one, others))
        begun = [jax.tree.map(jnp.asarray, made.init(given)) for made, given in pair]
        states = (jax.tree.map(views.numbers, state) for state in begun)
        return not jax.tree.all(jax.tree.map(np.array_equal, *states))

    reason = ""
    if differ(tx, ones):
        reason = f"the first state of {hparams.client_optimizer} depends on the "
        reason += "parameters"
    elif hparams.client_lr_decay != 1 and differ(make(hparams, 0.2), zeros):
        reason = f"the state of {hparams.client_optimizer} has the rate of round 0, on "
        reason += f"which --client_lr_decay={hparams.client_lr_decay:g} has no effect"
    if reason:
        raise ValueError(f"--optimizer_state=persist: {reason}; give reset")


# What stands for a model where none is known
PROBE = ({"kernel": np.zeros((2, 3), np.float32)}, {"bias": np.zeros(3, np.float32)})


def fingerprint(given: Custom) -> str:
    """The hash of a custom optimizer's computation on two arrays.

    If it fails on these, as one that needs a whole model, its code is hashed instead.
    """
    try:
        return fingerprint_lib.of(given.step, 0.1, PROBE, PROBE)
    except Exception:  # whatever the user's functions raise
        return fingerprint_lib.of_python(given.given)


def learning_rate(hparams: Any, round: jax.Array) -> jax.Array:
    """client_lr * client_lr_decay ** round, f32[]; zero-based, constant in a round."""
    return hparams.client_lr * hparams.client_lr_decay ** round.astype(jnp.float32)


def init(tx: optax.GradientTransformation, params: types.Params) -> tuple:
    """One independent optimizer state per stage, so that masks can freeze a stage.

    A custom optimizer has one state of all stages, since it may couple them.
    """
    if isinstance(tx, _Joint):
        return Joined(tx.init(params))
    return tuple(tx.init(stage) for stage in params)


def seeded(opt_state: Any, key: jax.Array) -> Any:
    """The state with `key` folded into its random keys, so that noise differs.

    These are typed keys, as in `optax.add_noise`, and all leaves uint32[2], which are
    taken for raw keys of jax's default kind. Other leaves stay as they are.
    """

    def one(number: int, leaf: Any) -> Any:
        array = jnp.asarray(leaf)  # a state may hold Python's numbers
        is_raw = array.dtype == jnp.uint32 and array.shape == (2,)
        if not (is_raw or views.is_key(array)):
            return leaf
        given = jax.random.wrap_key_data(leaf) if is_raw else leaf
        # Others fold in numbers from 0, such as those of steps.
        own = jax.random.fold_in(key, (1 << 31) + number)
        for part in jax.random.bits(own, (2,)):
            given = jax.random.fold_in(given, part)
        return jax.random.key_data(given) if is_raw else given

    leaves, structure = jax.tree.flatten(opt_state)
    return structure.unflatten(one(n, leaf) for n, leaf in enumerate(leaves))


def fresh(hparams: Any, params: types.Params) -> tuple:
    """The optimizer state of one client before its first step."""
    return init(make(hparams, hparams.client_lr), params)


def persistent(hparams: Any, task: types.Task, algorithm: types.Algorithm) -> Any:
    """All clients' optimizer states before the first round, () if none persists.

    They have leaves [K, ...], or with `Algorithm.by_architecture` are a tuple of such.
    None persists without an option `optimizer_state`.
    """
    if getattr(hparams, "optimizer_state", "reset") == "reset":
        return ()

    def begin(params: types.Params) -> tuple:
        # The first state of these optimizers depends on shapes alone.
        return fresh(hparams, stacked.zeros(params))

    def of(model: types.Model) -> tuple:
        return begin(shapes.variables(model, task.example_shape).params)

    if algorithm.by_architecture:
        groups = enumerate(task.client_models)
        return tuple(
            stacked.repeat(of(one), len(task.members(number))) for number, one in groups
        )
    own = algorithm.opt_state
    one = of(task.client_model) if own is None else own(begin)
    return stacked.repeat(one, task.num_rows)


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: types.Params,
    opt_state: tuple,
    params: types.Params,
    mask: Any,
) -> tuple[types.Params, tuple]:
    """One optimizer step where `mask` is True. Elsewhere the old values stay bitwise.

    Moments and counts are selected with the parameters, because with momentum a zero
    gradient would still move a weight. `opt_state` is one state per stage, so that a
    frozen stage's count stays too, or `Joined`, where counts move if anything is
    trained. `mask` is a prefix pytree of `params` with one entry per stage.
    """
    if isinstance(opt_state, Joined):
        # Frozen entries count in no norm.
        grads = boundary.select(mask, grads, jax.tree.map(jnp.zeros_like, grads))
        new, state = _step(tx, grads, opt_state.state, params, mask)
        return new, Joined(state)
    new_params, new_state = [], []
    for grad, state, stage, part in zip(grads, opt_state, params, mask, strict=True):
        stage, state = _step(tx, grad, state, stage, part)
        new_params.append(stage)
        new_state.append(state)
    return tuple(new_params), tuple(new_state)


def fits(opt_state: Any, num_stages: int) -> bool:
    """Whether a state is one for each of so many stages, or of a whole model."""
    return isinstance(opt_state, Joined) or len(opt_state) == num_stages


def _step(
    tx: optax.GradientTransformation, grads: Any, state: Any, params: Any, mask: Any
) -> tuple[Any, Any]:
    """(parameters, state) of one stage, or of all, after a step where `mask` is."""
    update, moved = tx.update(grads, state, params)
    new = optax.apply_updates(params, update)
    state_mask = _of_state(mask, params, state)
    return boundary.select(mask, new, params), boundary.select(state_mask, moved, state)


def _of_state(mask: Any, params: Any, state: Any) -> Any:
    """The mask of a state: moments follow parameters, counts move with any of them.

    A moment is found by the end of its path. Some parameters may have no moments there
    (`optax.masked`). A moment of another shape than its parameter, as those of
    `optax.adafactor` by rows and columns, moves with any entry of that.
    """
    if isinstance(mask, jax.Array) and not mask.ndim:
        return mask
    by_path = dict(jax.tree_util.tree_leaves_with_path(_entries(mask, params)))
    moves = any_of(mask)

    def of(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        ends = (by_path.get(path[first:]) for first in range(len(path)))
        found = next((one for one in ends if one is not None), moves)
        return found if found.shape == leaf.shape else found.any()

    return jax.tree_util.tree_map_with_path(of, state)


def _entries(mask: Any, params: Any) -> Any:
    """A mask with an entry for each parameter, bool leaves in the shapes of these."""
    whole = jax.tree.broadcast(mask, params)
    return jax.tree.map(lambda m, x: jnp.broadcast_to(m, x.shape), whole, params)


def any_of(mask: Any) -> jax.Array:
    """bool[]: whether any entry of a mask is True."""
    parts = (m.any() if m.ndim else m for m in jax.tree.leaves(mask))
    return functools.reduce(jnp.logical_or, parts, jnp.zeros((), bool))


def clip(grads: types.Params, norm: float | jax.Array, mask: Any) -> types.Params:
    """Scales gradients to global norm `norm` where they exceed it; 0 (static) = never.

    The norm is that of the entries in `mask`.
    """
    if options.is_off(norm):
        return grads
    grads = boundary.select(mask, grads, jax.tree.map(jnp.zeros_like, grads))
    size = jnp.maximum(optax.global_norm(grads), 1e-12)
    return jax.tree.map(lambda leaf: leaf * jnp.minimum(1, norm / size), grads)
