"""Capacity levels: how much of a model each client can hold, 1 = the least.

An algorithm defines a level as the first stages of a model with exits, a width, or a
number of models. The planner, not a method, decides which client has which level, so
that all methods see the same clients at the same levels.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import (
    aggregate,
    boundary,
    each_client,
    local_training,
    options,
    rng,
    shapes,
    stacked,
    traffic,
    types,
)
from fedjax_pfl.rows import exchange

option = options.option


@dataclasses.dataclass(frozen=True)
class Levels:
    """Options of algorithms with clients that hold submodels.

    With `is_nested` only clients of the largest level train a part of the model.
    `taught_by` is the option by which a level learns from the next one, "" = none.
    """

    is_nested: ClassVar[bool] = True
    taught_by: ClassVar[str] = ""

    levels: str = option(
        "fixed",
        "what a client can hold: always the same, drawn in each round, or all of it",
        choices=("fixed", "dynamic", "maximum"),
    )
    level_mix: str = option(
        "1:1:1:1",
        "clients of each level in proportion, the smallest level first: blocks of "
        "clients in the order of their ids, or chances (dynamic)",
    )
    max_level: int = option(
        0,
        "level of the global model, 0 = the largest; no client trains a larger one",
        minimum=0,
    )
    exclusive: bool = option(
        False,
        "leave out clients that cannot hold the global model",
        needs={"levels": ("fixed",)},
    )


def mix(hparams: Levels) -> np.ndarray:
    """The proportions int[L] of the levels.

    Raises ValueError if `--level_mix` is not a list of proportions, or all of them are
    0.
    """
    text = hparams.level_mix
    parts = text.split(":")
    if not all(p.isascii() and p.isdecimal() and len(p) < 7 for p in parts):
        raise ValueError(
            f"--level_mix={text}: expected whole numbers below a million with colons "
            "between them, such as 1:1:1:1"
        )
    found = np.array([int(part) for part in parts])
    if not found.any():
        raise ValueError(f"--level_mix={text} gives no client a level; raise one")
    return found


def top(hparams: Levels) -> int:
    """The level of the global model, 1..L; ValueError if there is no such level."""
    count = len(mix(hparams))
    why = f"the levels of --level_mix={hparams.level_mix}"
    options.check_at_most("max_level", hparams.max_level, count, why)
    return hparams.max_level or count


def _drawn(share: np.ndarray, largest: int) -> Callable[..., np.ndarray]:
    """`(seed, round, client int[C]) -> levels int[C]`, drawn by the proportions."""
    bounds = np.cumsum(share) / share.sum()

    def draw(seed: int, round: int, client: np.ndarray) -> np.ndarray:
        chance = rng.uniform(seed, "levels.level", round, client)
        return np.minimum(1 + np.searchsorted(bounds[:-1], chance, "right"), largest)

    return draw


def capability(hparams: Levels, num_clients: int) -> np.ndarray:
    """int[K]: the level that each client can hold where levels are fixed; 1..L.

    Client k of K has level 1 + #{l: (m_1 + .. + m_l) / m <= k / K} of a mix m.

    Examples:
        >>> capability(Levels(level_mix="2:1:1"), 8).tolist()
        [1, 1, 1, 1, 2, 2, 3, 3]
        >>> capability(Levels(levels="maximum", level_mix="2:1:1"), 4).tolist()
        [3, 3, 3, 3]
    """
    share = mix(hparams)
    if hparams.levels == "maximum":
        return np.full(num_clients, len(share))
    ends = np.cumsum(share) * num_clients
    return 1 + np.searchsorted(ends[:-1], np.arange(num_clients) * share.sum(), "right")


def possible(hparams: Levels, num_clients: int) -> np.ndarray:
    """int[n]: the levels at which clients may train, in order."""
    largest, able = top(hparams), _able(hparams, num_clients)
    if hparams.exclusive:
        able = able[able >= largest]
    return np.unique(np.minimum(able, largest))


def between(held: np.ndarray) -> int:
    """The least level that the ascending ones int[n] skip, 0 = none."""
    before = held[:-1][np.diff(held) > 1]
    return int(before[0]) + 1 if len(before) else 0


def _able(hparams: Levels, num_clients: int) -> np.ndarray:
    """int[n]: what each client can hold, or where levels are drawn what one may."""
    if hparams.levels == "dynamic":
        return 1 + np.flatnonzero(mix(hparams))
    return capability(hparams, num_clients)


def assigned(hparams: Levels, num_clients: int) -> tuple:
    """The levels of the clients and the clients that may be drawn, for `plan.Planner`.

    Levels are int[K], or a function of the round where they are drawn. The clients are
    bool[K], or None for all. Raises ValueError if options contradict each other.
    """
    largest, able = top(hparams), _able(hparams, num_clients)
    if able.max() < largest:
        raise ValueError(
            f"--level_mix={hparams.level_mix} gives none of --num_clients="
            f"{num_clients} level {largest}; change it, or give --max_level="
            f"{able.max()}"
        )
    if hparams.levels == "dynamic":
        return _drawn(mix(hparams), largest), None
    return np.minimum(able, largest), able >= largest if hparams.exclusive else None


def eligible(hparams: Any, num_clients: int) -> np.ndarray:
    """bool[K]: the clients that may be drawn, all where `hparams` are no `Levels`.

    Raises ValueError as `assigned` does.
    """
    found = None
    if isinstance(hparams, Levels):
        _, found = assigned(hparams, num_clients)
    return np.ones(num_clients, bool) if found is None else found


def eligible_rows(
    hparams: Levels, train: types.ClientRows
) -> tuple[jax.Array, jax.Array]:
    """The train rows of clients that may be drawn, followed by -1, and their number."""
    _, eligible = assigned(hparams, train.start.shape[0])
    if eligible is None:
        return train.row, train.count.sum()
    takes_part = jnp.append(jnp.asarray(eligible), False)[train.owner()]
    rows = jnp.where(takes_part, train.row, -1)
    return rows[jnp.argsort(~takes_part)], takes_part.sum()


def num_capable(hparams: Levels, num_clients: int, may_train: Any = True) -> Any:
    """int[top]: how many clients that may be drawn can hold each level.

    Where levels are drawn, all clients can hold each. Those that never train are False
    in `may_train` bool[K].
    """
    largest, able = top(hparams), capability(hparams, num_clients)
    if hparams.levels == "dynamic":
        able = np.full(num_clients, largest)
    if hparams.exclusive:
        able = np.where(able >= largest, able, 0)
    return ((able >= np.arange(1, largest + 1)[:, None]) & may_train).sum(1)


# The end of messages about a model with one exit
WITH_EXITS = (
    "a model with an exit at every stage, such as depth_convnet or, for texts, "
    "depth_masked_lm (your own: model=[('one', Body(), Exit()), ...])"
)


def truncated(hparams: Levels, model: types.Model) -> types.Model:
    """The global model: the chain up to `--max_level` of a model with exits.

    A model with one exit has one level, the whole model. Raises ValueError if the
    number of levels is not the model's, or if a model of one gets options of several.
    """
    count = len(model.stage_names) if model.has_exits else 1
    given = len(mix(hparams))
    if count == 1 < given:
        raise ValueError(
            f"--model={model.name} has one exit, --level_mix={hparams.level_mix} has "
            f"{given} levels; take {WITH_EXITS}"
        )
    if given != count:
        raise ValueError(
            f"--level_mix={hparams.level_mix} has {given} levels, --model={model.name} "
            f"has {count}; give as many parts as the model has exits"
        )
    if count == 1 and (hparams.levels == "dynamic" or hparams.exclusive):
        given = "--exclusive" if hparams.exclusive else "--levels=dynamic"
        raise ValueError(
            f"{given}: --model={model.name} has one level, which all clients hold; "
            "omit it, or take a model with an exit at every stage"
        )
    return types.truncated(model, top(hparams)) if model.has_exits else model


def held(level: jax.Array, model: types.Model) -> jax.Array:
    """bool[..., L]: the stages that clients of a level int32[...] hold.

    These are all stages where the model has one exit.
    """
    count = len(model.stage_names)
    if not model.has_exits:
        return jnp.ones((*level.shape, count), bool)
    return boundary.held(level, count)


class Submodel(NamedTuple):
    """The part of the server's model that a client holds.

    A whole is (parameters, statistics, optimizer state), each a tuple by stage.

    Attributes:
        cut: `(whole, client, level) -> part`, for a level of at least the client's.
        paste: `(part, whole, client, level) -> whole` with the part in its place.
        held: `(cohort, own) -> mask` of the parts that each client trains: a prefix
            pytree of `types.Variables`, bool[C, ...].
        messages: The kinds of messages that carry it, down and up.
        sent: `cohort -> ` how many of each, as `Algorithm.round` returns them.
        num_levels: L, of the global model; 0 = all clients hold all of it.
        is_among_zeros: As in `types.Algorithm`.
    """

    cut: Callable[[tuple, each_client.Client, int], tuple]
    paste: Callable[[tuple, tuple, each_client.Client, int], tuple]
    held: Callable[[types.Cohort, Any], types.Variables]
    messages: tuple[types.MessageKind, ...]
    sent: Callable[[types.Cohort], dict[str, Any]]
    num_levels: int
    is_among_zeros: bool = False


def holders(cohort: types.Cohort, model: types.Model) -> jax.Array:
    """bool[C, L]: the stages that the client of each real row holds."""
    found = held(cohort.level, model) & cohort.row_mask[:, None]
    return exchange.everywhere(found)


def first_stages(task: types.Task, model: types.Model) -> Submodel:
    """The first `level` stages of a model with exits, or all of a model with one."""

    def cut(whole: tuple, client: each_client.Client, level: int) -> tuple:
        return tuple(stages[:level] for stages in whole)

    def paste(part: tuple, whole: tuple, client: each_client.Client, level: int):
        pairs = zip(part, whole, strict=True)
        return tuple((*new, *stages[level:]) for new, stages in pairs)

    def mask(cohort: types.Cohort, own: Any) -> types.Variables:
        by_stage = boundary.by_stage(holders(cohort, model))
        return types.Variables(by_stage, by_stage)

    def sent(cohort: types.Cohort) -> dict[str, jax.Array]:
        stages = holders(cohort, model)
        return traffic.stages_sent(model, stages, stages)

    kinds = traffic.stages_both_ways(task, model)
    count = len(model.stage_names) if model.has_exits else 0
    return Submodel(cut, paste, mask, kinds, sent, count)


def make(
    hparams: local_training.LocalTraining,
    task: types.Task,
    model: types.Model,
    submodel: Submodel,
    client_update: Callable[..., each_client.Trained],
    *,
    init: Callable[[jax.Array], types.Variables] | None = None,
    own: Callable[..., Any] | None = None,
    private: Callable[[types.Variables], Any] | None = None,
    beside: Callable[[types.Variables], dict[str, Any]] | None = None,
    server_update: Callable[..., tuple[Any, Any]] | None = None,
    server: Callable[..., dict] | None = None,
    opt_state: Callable[..., Any] | None = None,
    adapt: Callable[..., each_client.Trained] | None = None,
) -> types.Algorithm:
    """An algorithm with clients that train submodels of the server's model.

    The server takes, part by part, the plain mean over the clients of the round that
    hold it. A part that none of them holds stays as it is.

    Args:
        hparams, task: As every `make` gets them.
        model, submodel: The global model, and the part of it that a client holds.
        client_update: `(client, start, level) -> Trained` of the submodel.
        init: From the run's root key to the server's first variables; None = the common
            initialisation of `model`.
        own: `(state, cohort, data) -> client.own` [C, ...]; None = the private rows.
        private: From the first model to each client's private row before round 0.
        beside: From the first model to the server's other entries. `state.server` is
            then {"model": its model, **beside}, and otherwise its model alone.
        server_update: `(server, trained, own, cohort, mean, data) -> (server, rows)`,
            where `mean` maps the clients' variables to the server's, and rows None
            means unchanged; None = the mean of the trained models.
        server, opt_state: As in `types.Algorithm`; None = those of `model`.
        adapt: As in `types.Algorithm`.
    """
    begin = init or functools.partial(task.init, model)

    def first(data: types.Data, key: jax.Array) -> types.RoundState:
        start = begin(key)
        state = start if beside is None else {"model": start, **beside(start)}
        row = () if private is None else private(start)
        return types.RoundState.first(state, stacked.repeat(row, task.num_rows), key)

    def update(client: each_client.Client, server: types.Variables, level: int = 0):
        level = level or len(server.params)
        whole = (*server, client.opt_state)
        *start, opt_state = submodel.cut(whole, client, level)
        own = client.replace(opt_state=opt_state)
        trained = client_update(own, types.Variables(*start), level)
        part = (trained.params, trained.stats, trained.opt_state)
        params, stats, opt_state = submodel.paste(part, whole, client, level)
        return trained.replace(params=params, stats=stats, opt_state=opt_state)

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        here, old = each_client.Round(task, state, cohort, data), variables_of(state)
        brought = here.rows if own is None else own(state, cohort, data)
        given = {"own": brought, "shared": old, "levels": submodel.num_levels}
        trained, here = here.update(update, **given)
        here = here.in_order()
        weight, mask = here.weights("uniform"), submodel.held(here.cohort, brought)

        def mean(variables: types.Variables) -> types.Variables:
            return aggregate.masked_mean(variables, weight, mask, old)

        finish = server_update or mean_update
        new, rows = finish(state.server, trained, brought, here.cohort, mean, data)
        state = here.after(rows, server=new)
        return state, here.metrics(trained), submodel.sent(here.cohort)

    def mean_update(server: Any, trained: each_client.Trained, own, cohort, mean, _):
        new = mean(trained.variables)
        return new if beside is None else server | {"model": new}, None

    def variables_of(state: types.RoundState) -> types.Variables:
        return state.server if beside is None else state.server["model"]

    def global_model(state: types.RoundState, data: types.Data) -> dict:
        return {"global": (model, variables_of(state))}

    def whole_state(fresh: Callable[[types.Params], Any]) -> Any:
        return fresh(shapes.variables(model, task.example_shape).params)

    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        messages=submodel.messages,
        init=first,
        round=round,
        server=server or global_model,
        opt_state=opt_state or whole_state,
        adapt=adapt,
        is_among_zeros=submodel.is_among_zeros,
    )
