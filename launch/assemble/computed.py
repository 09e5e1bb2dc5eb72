"""Hashes what custom code computes, so that a resumed run recognises its own code.

The hash covers the jaxprs and constants of custom models, optimizers, metrics and
algorithms (`fingerprint.of`): an edited closure, global constant, helper or base class
changes it, a comment does not. All is traced as on one device, one client at a time,
with one form of the convolutions, so that platforms, devices and chunks do not matter.
"""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

import jax
import numpy as np

import algorithms
import data
import fedjax_pfl
import models
from data import files, plan, topology
from fedjax_pfl import (
    evaluate,
    execution,
    fingerprint,
    levels,
    measures,
    optimizer,
    options,
    scores,
    shapes,
    types,
)
from fedjax_pfl import program as program_lib
from launch.assemble import returned
from launch.assemble.given import Settings

_ROWS = 8  # of a batch of an evaluation that is traced
_CLIENTS, _ROUNDS = 64, 3  # of a custom graph that are drawn
_SETTING = execution.Setting(form="patches")


@functools.cache
def versions() -> str:
    """The versions that traces depend on: jax, flax, optax and this package's code."""
    digest = hashlib.sha256()
    traced = fedjax_pfl, models, algorithms, data
    folders = [pathlib.Path(one.__file__).parent for one in traced]
    modules = [path for one in folders for path in sorted(one.rglob("*.py"))]
    for path in (*modules, pathlib.Path(__file__)):
        digest.update(path.read_bytes())
    known = [f"{name} {metadata.version(name)}" for name in ("jax", "flax", "optax")]
    return ", ".join([*known, f"code {digest.hexdigest()[:8]}"])


def of_model(model: types.Model, shape: tuple[int, ...]) -> str:
    """Hashes what a model computes on examples of a shape, and its first parameters.

    A model with narrower forms adds the hash of half its width with HeteroFL's scaler.
    """
    key = jax.eval_shape(jax.random.key, 0)
    example = model.example(2, *shape)
    first = jax.eval_shape(model.init, key, example)

    def answer(params: Any, stats: Any, x: jax.Array) -> Any:
        return model.forward(params, stats, x)

    def trained(params: Any, stats: Any, x: jax.Array, key: jax.Array) -> Any:
        return model.forward(params, stats, x, train=True, key=key)

    parts = [
        repr((model.stage_names, model.has_exits, model.takes)),
        _traced(model.init, key, example),
        _traced(answer, *first, example),
        _traced(trained, *first, example, key, gradient=True),
    ]
    if model.at_width is not None:
        parts.append(of_model(model.at_width(0.5, 0.5), shape))
    return _joined(parts)


@functools.lru_cache(maxsize=64)
def distinct(model: types.Model, digest: str) -> types.Model:
    """Copies a model, such that two copies are equal only if both compute the same.

    Equal modules may refer to objects that have changed, and the program that was
    compiled for one of them would serve the other.
    """
    return model._replace(forward=functools.partial(model.forward))


def of_measures(every: tuple[measures.Measure, ...], num_classes: int) -> str:
    """Hashes what custom metrics compute, "" if there are none."""
    kinds = ((4, num_classes), np.float32), ((4,), np.int32), ((4,), np.bool_)
    batch = [jax.ShapeDtypeStruct(*one) for one in kinds]
    own = measures.of_user(every)
    return _joined([f"{one.name} {_traced(one.sums, *batch)}" for one in own])


def optimized(
    hparams: Any, task: types.Task
) -> Iterator[tuple[optimizer.Custom, list[types.Params]]]:
    """The custom optimizers, each with the shapes of all that it optimizes in a task.

    Clients may have several models, or the first stages of one.
    """
    for tx in vars(hparams).values():
        if not isinstance(tx, optimizer.Custom):
            continue
        is_server = tx.option == "server_optimizer"
        every = (task.server_model,) if is_server else task.client_models
        found = []
        for model in every:
            params = shapes.variables(model, task.example_shape).params
            depths = np.array([len(params)])
            if isinstance(hparams, levels.Levels) and model.has_exits:
                depths = levels.possible(hparams, task.num_clients)
                depths = depths[-1:] if is_server else depths
            found += [params[:depth] for depth in depths.tolist()]
        yield tx, found


def of_others(
    settings: Settings, hparams: Any, task: types.Task, hashed: Callable[[Any], str]
) -> dict[str, str]:
    """Hashes what custom metrics, optimizer and algorithm compute, by option name.

    `hashed` is `of_algorithm` as a function of the algorithm's options. Optimizers may
    treat each layer otherwise, and are traced on the models of the task.
    """
    classes = settings.source.num_classes
    out = {"eval_metrics": of_measures(settings.measures, classes)}
    for tx, every in optimized(hparams, task):
        hashes = [_traced(tx.step, 0.1, params, params) for params in every]
        out[tx.option] = _joined(hashes)
    if not any(settings.entry is one for one in algorithms.ALGORITHMS.values()):
        # An error of its own, without JAX's note about the frames of that.
        with files.named(""):
            out["algo"] = hashed(hparams)
    return out


def of_algorithm(
    make: Callable[[Any, types.Task], types.Algorithm],
    hparams: Any,
    task: types.Task,
    data: types.Data,
    planner_of: Callable[[types.Algorithm, types.Execution], plan.Planner],
    adapts: types.PlanSpec | None = None,
    is_for_all_floats: bool = False,
) -> str:
    """Hashes what a custom algorithm computes: first state, round and evaluation.

    The execution of `task` does not matter. `data` has the partitions of all seeds, and
    `planner_of` makes the planner of the rounds, and `adapts` is the plan of
    fine-tuning, if any. A hash for all floats is that of the computation in which the
    float options are arguments. Raises a ValueError of one line for a function that
    returns something else than `types.Algorithm` says.
    """
    how = execution.Execution()
    task = task._replace(execution=how, num_residents=0)
    structure, floats = options.split_floats(hparams)

    kinds = ("perplexity", "masked_perplexity")
    kinds = kinds if data.num_words else ("accuracy", "loss")
    check = returned.Check(floats, kinds)

    def method_of(values: dict[str, Any]) -> tuple[Any, types.Algorithm]:
        given = dataclasses.replace(structure, **values)
        return given, check.of(program_lib.make_algorithm(make, given, task))

    method = program_lib.make_algorithm(make, hparams, task)
    planner = planner_of(method, how)
    tables = data.of_seed(0)
    kind = scores.Words() if data.num_words else scores.Classes()
    scoring = evaluate.Scoring(batch_size=_ROWS, own_batch_size=_ROWS, score=kind)
    ids = np.arange(task.num_clients)
    key = jax.eval_shape(jax.random.key, 0)

    def first(values: dict, tables: types.Data, key: jax.Array) -> types.RoundState:
        given, method = method_of(values)
        return program_lib.first_state(method, given, task, tables, key)

    def round(values: dict, *given: Any) -> Any:
        return method_of(values)[1].round(*given)

    def score(values: dict, state: Any, cohort: types.Cohort, tables: types.Data):
        given = method_of(values)[1], state, cohort, tables, scoring, how
        return evaluate.of_shared(*given), evaluate.of_clients(*given, ids)

    def adapted(values: dict, *given: Any) -> Any:
        *before, members = given
        found = method_of(values)[1], *before, scoring, how, members
        return evaluate.of_adapted(*found)

    def traced(fn: Callable[..., Any], *given: Any) -> str:
        if is_for_all_floats:
            return _traced(fn, dict.fromkeys(floats, np.float32(0)), *given)
        return _traced(functools.partial(fn, floats), *given)

    state = jax.eval_shape(functools.partial(first, floats), tables, key)
    peers, code = graph(method.peers)
    parts = [
        repr((method.plans, peers, method.messages, method.ships_proxy)),
        *([code, _drawn(method.peers, task.num_clients)] if code else []),
        traced(first, tables, key),
        traced(round, state, planner.cohort(0, 0), tables),
        traced(score, state, planner.drawn(0, 1), tables),
    ]
    if method.adapt is not None:
        from models import own  # imports nnx, which takes long

        parts.append(own.source(method.adapt))
        if adapts is not None:
            counts = np.asarray(tables.partition.adapting.count)
            members = planner.members(0, 0, ids, counts, adapts)
            given = state, planner.drawn(0, 1), tables, members
            parts.append(traced(adapted, *given))
    return _joined(parts)


def graph(peers: types.PeerSpec | None) -> tuple[types.PeerSpec | None, str]:
    """A graph as something that is equal for equal ones, with the hash of its code.

    Each call of an algorithm's `make` may define the function anew.
    """
    if peers is None or peers.draw is None:
        return peers, ""
    return peers._replace(draw=None), fingerprint.of_python(peers.draw)


def _drawn(peers: types.PeerSpec, num_clients: int) -> str:
    """What a custom graph draws for some clients in its first rounds, as text.

    The hash of its code follows no helper and no global.
    """
    some = np.arange(min(num_clients, _CLIENTS))
    draw = topology.make(peers, num_clients).draw
    every = [draw(0, round, some) for round in range(_ROUNDS)]
    return repr([[np.asarray(part).tolist() for part in one] for one in every])


def sha256(parts: Mapping[str, str]) -> str:
    """Hashes the hashes of custom objects by option name, "" if there are none."""
    found = {name: value for name, value in sorted(parts.items()) if value}
    return _joined([repr(found)]) if found else ""


def _traced(*given: Any, **kwargs: Any) -> str:
    """Calls `fingerprint.of` such that all platforms give the same hash."""
    with execution.traced_in(_SETTING):
        return fingerprint.of(*given, **kwargs)


def _joined(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest() if texts else ""
