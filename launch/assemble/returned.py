"""Checks what the functions of a custom algorithm return, while they are traced.

Each is refused with a ValueError of one line that begins with "algo: " and says what
came and what `types.Algorithm` expects.
"""

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from fedjax_pfl import each_client, metric_kinds, types


class Check:
    """Checks an algorithm each time it is made, and all that it returned together.

    A metric of its rounds may not have the name of what an evaluation measures of its
    servers' models, whichever is traced first.
    """

    def __init__(self, floats: Collection[str], kinds: Collection[str]):
        """Takes the names of its float options, and what servers' models measure."""
        self._floats, self._kinds = floats, kinds
        self._metrics: set[str] = set()
        self._servers: set[str] = set()

    def of(self, method: types.Algorithm) -> types.Algorithm:
        """The same algorithm, whose functions say what is wrong in what they return."""
        checked = {
            "init": self._init,
            "round": self._round,
            "server": self._server,
            "adapt": self._adapt,
            "serving": functools.partial(self._served, "serving"),
            "trained": functools.partial(self._served, "trained"),
        }
        has = {name: getattr(method, name) for name in checked}
        every = {
            name: functools.partial(checked[name], fn) for name, fn in has.items() if fn
        }
        return method._replace(**every)

    def _init(self, init: Callable[..., Any], *given: Any) -> types.RoundState:
        state = init(*given)
        _expect("init", state, isinstance(state, types.RoundState), "a RoundState")
        return state

    def _round(self, round: Callable[..., Any], state: Any, *given: Any) -> Any:
        out = round(state, *given)
        is_right = _is_of(out, types.RoundState, Mapping, Mapping)
        wanted = "(RoundState, {metric: (sum, count)}, {message: count})"
        _expect("round", out, is_right, wanted)
        for name, pair in out[1].items():
            _expect_metric(name, pair, self._floats)
        self._metrics.update(out[1])
        self._expect_no_name_twice()
        for name in ("server", "clients"):
            _expect_form(name, getattr(state, name), getattr(out[0], name))
        return out

    def _server(self, server: Callable[..., Any], *given: Any) -> Any:
        out = server(*given)
        is_right = isinstance(out, Mapping) and len(out) > 0
        is_right = is_right and all(
            _is_of(one, types.Model, types.Variables) for one in out.values()
        )
        _expect("server", out, is_right, "{name: (model, Variables)}")
        for name in out:
            _expect_server(name, self._kinds)
        self._servers.update(out)
        self._expect_no_name_twice()
        return out

    def _adapt(self, adapt: Callable[..., Any], *given: Any) -> each_client.Trained:
        out = adapt(*given)
        _expect("adapt", out, isinstance(out, each_client.Trained), "what train gives")
        return out

    def _served(
        self, name: str, serving: Callable[..., Any], *given: Any
    ) -> tuple[types.Serving, ...]:
        out = serving(*given)
        is_right = isinstance(out, (tuple, list)) and len(out) > 0
        is_right = is_right and all(isinstance(x, types.Serving) for x in out)
        _expect(name, out, is_right, "a tuple of Serving")
        return tuple(one.replace(build=_checked_build(name, one)) for one in out)

    def _expect_no_name_twice(self) -> None:
        """Refuses a round's metric with the name of what a server's model measures."""
        names = {f"{name}_{kind}" for name in self._servers for kind in self._kinds}
        names |= {metric_kinds.VALIDATION + name for name in names}
        if both := self._metrics & names:
            raise ValueError(
                f"algo: its round returned the metric {min(both)}, which is what an "
                "evaluation of its server's model gives; give it another name"
            )


def _checked_build(
    name: str, group: types.Serving
) -> Callable[[Any, Any], types.Variables] | None:
    """The group's `build`, which says what it returns; None if it has none."""
    if group.own is None or group.build is None:
        served = group.shared if group.own is None else group.own
        is_right = isinstance(served, types.Variables)
        _expect(f"{name}'s model", served, is_right, "Variables")
        return group.build

    def build(shared: Any, row: Any) -> types.Variables:
        out = group.build(shared, row)
        is_right = isinstance(out, types.Variables)
        _expect(f"{name}'s build", out, is_right, "Variables")
        return out

    return build


def _expect_form(name: str, before: Any, after: Any) -> None:
    """Refuses a part of the state with other shapes or containers after a round."""
    was, now = _form(before), _form(after)
    if was != now:
        places = [k for k in {**was, **now} if was.get(k) != now.get(k)]
        kinds = [one.get(places[0], "nothing") for one in (was, now)]
        raise ValueError(
            f"algo: its round changes the form of state.{name}{places[0]}: "
            f"{kinds[0]} before it, {kinds[1]} after it; keep one form"
        )
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ValueError(
            f"algo: its round changes the kinds of containers in state.{name}; "
            "keep them"
        )


def _is_of(value: Any, *kinds: type) -> bool:
    """Whether it is a tuple or a list of such things."""
    is_tuple = isinstance(value, (tuple, list)) and len(value) == len(kinds)
    return is_tuple and all(map(isinstance, value, kinds))


def _expect(name: str, value: Any, is_right: bool, wanted: str) -> None:
    """Refuses (ValueError) what a function of an algorithm returned."""
    if not is_right:
        kinds = [type(value)]
        if type(value) is tuple:
            kinds = list(map(type, value))
        elif isinstance(value, Mapping):
            kinds = list(map(type, value.values()))
        given = ", ".join(kind.__name__ for kind in kinds) or "nothing"
        form = {tuple: "({})", dict: "a dict of {}"}.get(type(value), "a {}")
        raise ValueError(
            f"algo: its {name} returned {form.format(given)}, expected {wanted}"
        )


def _expect_metric(name: Any, value: Any, floats: Collection[str]) -> None:
    """Refuses (ValueError) what is no metric of a round, or has another's name.

    Records of a sweep have its points under the names of the algorithm's `floats`.
    """
    shapes = [
        list(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(lambda: value))
    ]
    is_pair = isinstance(name, str) and _is_of(value, object, object)
    if not is_pair or shapes != [[], []]:
        raise ValueError(
            f"algo: its round returned the metric {name!r} of shapes {shapes}, and a "
            "pair of scalars (sum, count) by name is expected"
        )
    if metric_kinds.is_measured(name):
        raise ValueError(
            f"algo: its round returned the metric {name}, which is the name of what an "
            "evaluation or a record has; give it another"
        )
    if name in floats:
        raise ValueError(
            f"algo: its round returned the metric {name}, which is the name of its "
            "option, by which records of a sweep are told apart; give it another"
        )


def _expect_server(name: Any, kinds: Collection[str]) -> None:
    """Refuses (ValueError) a model's name whose metrics an evaluation gives to others.

    Those of exits are such names too.
    """
    if re.fullmatch(r"global|(\w+_)?(exit\d+|ensemble)", str(name)):
        return
    metric = f"{name}_{next(iter(kinds))}"
    is_taken = metric_kinds.is_measured(metric) or metric == each_client.TRAINED
    if is_taken or metric.startswith(metric_kinds.VALIDATION):
        raise ValueError(
            f"algo: its server returned the model {name!r}, whose metric {metric} is "
            "the name of what an evaluation has otherwise; call it global, or give it "
            "another name"
        )


def _form(tree: Any) -> dict[str, str]:
    """Shapes and dtypes by their path in a tree."""
    # A number of Python becomes an array.
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda: tree))
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype} {list(leaf.shape)}"
        for path, leaf in leaves
    }
