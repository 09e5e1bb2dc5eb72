"""Checks that models and points of a sweep fit their run."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

import algorithms
import models
from fedjax_pfl import optimizer, options, shapes, types
from launch.assemble import computed
from launch.config import schema, sweep
from models import own_checks, stages


def check_model(
    flag: str, model: types.Model, shape: tuple[int, ...], *, takes: str = "numbers"
) -> None:
    """Refuses a built-in model that cannot take the examples (ValueError)."""
    is_text = takes == "tokens"
    if takes != model.takes:
        what = "rows of tokens" if is_text else f"examples of shape {list(shape)}"
        fitting = models.OF_TEXT if is_text else ("mlp", "depth_convnet")
        cure = f"take another model, for instance {' or '.join(fitting)}"
        if takes == "labelled tokens":
            what = f"rows of {shape[0]} tokens with a label"
            cure = "give a custom model (model=...), or x.astype(np.float32)"
        raise ValueError(
            f"--{flag}={model.name} takes {model.takes} and not {what}; {cure}"
        )
    if len(shape) == 2 and not is_text:
        raise ValueError(
            f"--{flag}={model.name} takes images or vectors, and the examples are "
            f"series {list(shape)} (--layout=ntc); give a custom model (model=...), or "
            "omit --layout=ntc for gray images"
        )
    try:
        shapes.variables(model, shape)
    except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        # Other errors are in terms of jax and flax.
        cause, cure = "", "take another model, for instance mlp"
        if isinstance(error, stages.UnfitError):
            cause = f" ({options.reason(error)})"
            if is_text:
                cure = "take another model or width"
            elif len(shape) == 3:
                cure = "change --image_size, or take another model"
        raise ValueError(
            f"--{flag}={model.name} does not fit examples of shape {list(shape)}"
            f"{cause}; {cure}"
        ) from error


def check_optimizers(points: Sequence[Any], task: types.Task) -> None:
    """Refuses (ValueError) a custom optimizer that does not fit the models.

    `points` are the options at each point of a sweep.
    """
    for tx, every in computed.optimized(points[0], task):
        for params in every:
            optimizer.try_step(tx, params)
            if tx.option == "client_optimizer":
                for hparams in points:
                    optimizer.check(hparams, params)


_STANDS_STILL = (
    "has statistics that train mode does not change; if they should, a linen module "
    "learns the mode as `train`, `training`, `is_training`, `deterministic` or "
    "`use_running_average` of its __call__"
)
_IS_NORMALISED = (
    "gives numbers that sum to 1 for each example, as a softmax does; the loss takes "
    "logits, so leave it out"
)


def check_own(
    flag: str, model: types.Model, num_classes: int, width: float, examples: np.ndarray
) -> tuple[str, tuple[str, ...]]:
    """Refuses a custom model that does not give logits of all classes (ValueError).

    `examples` are a few normalised examples. The results are `computed.of_model`'s
    hash, and what of the model is probably not meant, as ends of sentences about it.
    """
    shape = examples.shape[1:]
    if width != 1:
        line = f"--model_width={width:g} has no effect on a custom model"
        raise ValueError(f"{line}; omit it")
    forms = [model] if model.at_width is None else [model, model.at_width(0.5)]
    for one in forms:
        _check_logits(flag, one._replace(takes=model.takes), num_classes, shape)
    digest = computed.of_model(model, shape)
    hashable = shape, examples.dtype, examples.tobytes()
    return digest, _ask(flag, tuple(forms), digest, *hashable)


@functools.lru_cache(maxsize=16)
def _ask(
    flag: str,
    forms: tuple[types.Model, ...],
    digest: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    buffer: bytes,
) -> tuple[str, ...]:
    """Makes the checks of `check_own` that compile programs, once for the same model.

    Equal modules may refer to objects that have changed, and then differ in `digest`.
    """
    model, examples = forms[0], np.frombuffer(buffer, dtype).reshape(-1, *shape)
    of_words = model.takes != "numbers"
    last = examples.max() if of_words else 0  # of a text the word for hidden ones
    if of_words and own_checks.gives_nan(model, examples):
        raise ValueError(
            f"{flag}: {model.name} gives nan for tokens up to {last}, which are in the "
            f"data; it needs an embedding of {last + 1} words, or as each place has"
        )
    clamps = of_words and own_checks.reads_another_row(model, examples)
    if clamps and model.takes == "tokens":
        raise ValueError(
            f"{flag}: {model.name} reads word {last}, which stands for hidden ones, as "
            f"word {last - 1}; its embedding needs {last + 1} words"
        )
    is_map = len(shape) > 1 and not of_words
    if len(forms) > 1 and is_map and own_checks.flattens_maps(*forms, examples):
        raise ValueError(
            f"{flag}: {model.name} flattens a map, so that no narrower form is a slice "
            "of it; average the map before the affine layer"
        )
    reason = own_checks.depends_on_neighbours(model, examples)
    if reason:
        raise ValueError(
            f"{flag}: {model.name} {reason}, probably because a module stays in train "
            "mode; a linen module names `train`, `deterministic` or "
            "`use_running_average` in its __call__, and an nnx module is given as it "
            "is, without a bridge, and leaves the mode to eval()"
        )
    depends_on_padding, stands_still = own_checks.of_training(model, examples)
    if depends_on_padding:
        raise ValueError(
            f"{flag}: {model.name} computes in train mode with examples that only fill "
            "a batch; a module that mixes examples, such as a norm over the batch, "
            "names `sample_mask` bool[B], the real ones, in its __call__"
        )
    odd = {_STANDS_STILL: stands_still}
    odd[_IS_NORMALISED] = own_checks.sums_to_one(model, examples)
    # Rare words may be one on purpose.
    odd[f"reads token {last} as {last - 1}; one for each needs {last + 1}"] = clamps
    return tuple(words for words, is_so in odd.items() if is_so)


def _check_logits(
    flag: str, model: types.Model, num_classes: int, shape: tuple[int, ...]
) -> None:
    """Refuses a custom model that fails or does not give logits (ValueError)."""
    variables, found = _traced(flag, model, shape)
    _check_variables(flag, model, variables)
    wanted = (2, *(shape if model.takes == "tokens" else ()), num_classes)
    for shape_of, dtype in found:
        if (shape_of, dtype) != (wanted, np.float32):
            last = "its exits" if model.has_exits else "its last module"
            raise ValueError(
                f"{flag}: {model.name} gives {dtype}{list(shape_of)} for 2 examples, "
                f"expected logits float32{list(wanted)}, one for each class; change "
                f"{last}"
            )


def _traced(
    flag: str, model: types.Model, shape: tuple[int, ...]
) -> tuple[types.Variables, list[tuple[tuple[int, ...], Any]]]:
    """Shapes of a custom model's variables, and (shape, dtype) of each exit for two."""
    try:
        variables = shapes.variables(model, shape)
        example = model.example(2, *shape)
        logits, _ = jax.eval_shape(model.forward, *variables, example)
        every = logits if model.has_exits else (logits,)
        if odd := [one for one in every if not hasattr(one, "shape")]:
            raise ValueError(f"it gives a {type(odd[0]).__name__}, expected logits")
        found = [(tuple(one.shape), one.dtype) for one in every]
        train = functools.partial(model.forward, train=True)
        key = jax.eval_shape(jax.random.key, 0)
        _, moved = jax.eval_shape(train, *variables, example, key=key)
        if jax.tree.structure(moved) != jax.tree.structure(variables.stats):
            raise ValueError("its collections grow in train mode; sow nothing")
    except Exception as error:  # a custom module may raise anything
        reason = options.reason(error)
        kind = "f32" if model.takes == "numbers" else "int32"
        cure = "change its modules"
        if "required positional argument" in str(error):
            cure = "a linen module takes `train`, `training`, `is_training`, "
            cure += "`deterministic` or `use_running_average`; give other arguments a "
            cure += "default"
        raise ValueError(
            f"{flag}: {model.name} cannot take examples {kind}[2, "
            f"{', '.join(map(str, shape))}] ({reason}); {cure}"
        ) from error
    return variables, found


def _check_variables(flag: str, model: types.Model, variables: types.Variables) -> None:
    """Refuses variables that cannot be trained, averaged or stored."""
    named = jax.tree_util.tree_leaves_with_path(tuple(variables))
    names = {str(k.key) for path, _ in named for k in path if hasattr(k, "key")}
    if odd := sorted(name for name in names if "/" in name):
        raise ValueError(
            f"{flag}: {model.name} has the name {odd[0]}, and a slash divides "
            "paths in a model's file; give its modules other names"
        )
    if not jax.tree.leaves(variables.params):
        raise ValueError(
            f"{flag}: {model.name} has no parameters to train; in an nnx module these "
            "are nnx.Param, and other variables are statistics"
        )
    odd = {str(leaf.dtype) for leaf in jax.tree.leaves(variables.params)}
    odd = sorted(kind for kind in odd if "float" not in kind)
    if odd:
        raise ValueError(
            f"{flag}: {model.name} has parameters of {odd[0]}, which cannot be "
            "trained; keep a constant as a plain array"
        )
    kinds = {leaf.dtype for leaf in jax.tree.leaves(variables)}
    small = {str(kind) for kind in kinds if kind.itemsize < 4}
    if odd := sorted(kind for kind in small if "float" in kind):
        raise ValueError(
            f"{flag}: {model.name} has parameters or statistics of {odd[0]}, in which "
            "a mean over clients loses its digits; keep them in float32 (param_dtype), "
            "and compute in lower precision by dtype or --precision=bf16"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables.stats):
        if "float" not in str(leaf.dtype):
            where = own_checks.name_at(path)
            raise ValueError(
                f"{flag}: {model.name} has the statistic {where} of {leaf.dtype}, and "
                "means are taken of statistics; keep a counter as float32, and a "
                "constant as a plain array"
            )


def check_points(
    line: str, entry: Any, hparams: Any, points: list[sweep.Point], task: types.Task
) -> None:
    """Refuses a sweep with an invalid point or with several programs (ValueError)."""
    if not line:
        return
    every = [entry.make(dataclasses.replace(hparams, **one), task) for one in points]
    facts = [(made.plans, computed.graph(made.peers), made.messages) for made in every]
    if any(one != facts[0] for one in facts):
        raise ValueError(
            f"--sweep={line}: its points differ in plans, peers or messages; from "
            "Python build.compare({...}) runs any settings side by side"
        )


def check_swept(
    line: str,
    hparams: Any,
    points: list[sweep.Point],
    hashed: Callable[[Any], str],
    usual: str | None,
) -> None:
    """Refuses a sweep of an option that has no effect (ValueError).

    `hparams` are those of the first point, `hashed` is `computed.of_algorithm` as a
    function of such options, and `usual` is its hash of `hparams` where it is known.
    """
    for name, value in points[0].items():
        other = next((one[name] for one in points if one[name] != value), value)
        if other == value:
            continue
        usual = usual or hashed(hparams)
        if hashed(dataclasses.replace(hparams, **{name: other})) == usual:
            raise ValueError(
                f"--sweep={line}: {name} has no effect here, so that points would be "
                "equal; omit it"
            )


def refuse_need(config: schema.Config, need: str, what: str) -> NoReturn:
    """Refuses what the algorithm does not use (ValueError), and names those that do.

    `need` is the fact of `algorithms.Entry` that it lacks, `what` the option and its
    kind.
    """
    entries = algorithms.ALGORITHMS.items()
    able = ", ".join(name for name, one in entries if getattr(one, need))
    raise ValueError(
        f"{what}, which --algo={config.algo} does not use; give another, or one of the "
        f"algorithms {able}"
    )
