"""The sums of an evaluation over rows, and the metrics that the host makes of them.

A `Score` is one of two kinds, `Classes` for labels and `Words` for texts. It defines
the answers of a model on a row, their sums over a batch, over a client's rows and over
the union of all test rows, and the metrics of these sums. It is hashable, and part of a
program. The device counts correct answers as integers and sums the cross-entropy in
float32. The host divides in float64.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import losses, metric_kinds, types
from fedjax_pfl import measures as measures_lib

# Metrics by name, and values of single clients f64[K] by name, such as accuracy
Metrics = tuple[dict[str, float], dict[str, np.ndarray]]


class Answers(NamedTuple):
    """The answers of a model on rows, leaves [B, ...] with zeros on padding.

    Attributes:
        exits: [B, J, ...], the counts of each exit, of their ensemble and of the served
            output; J is 1 for a model without exits.
        served: The summands of the served output, leaves [B, ...].
        differ: bool[B], whether the exits disagree.
        label: int32[B, ...], the right answers.
        is_real: bool[B], False on padding.
        logits: f32[B, Y] of the served output where measures need them, else ().
    """

    exits: jax.Array
    served: Any
    differ: jax.Array
    label: jax.Array
    is_real: jax.Array
    logits: Any = ()


def _by_owner(values: Any, owner: jax.Array, zeros: Any) -> Any:
    """Leaves [U, ...] summed by owner int32[U] into leaves like `zeros`, [K, ...]."""

    def summed(zero: jax.Array, x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x.astype(zero.dtype), owner, len(zero))

    return jax.tree.map(summed, zeros, values)


@dataclasses.dataclass(frozen=True)
class Classes:
    """Correct answers, the cross-entropy and measures of a classifier.

    Sums are `right` int32[...], `loss` f32[...] and, with measures, `measured`. For the
    measures `own_rows` is the most test rows of a client.
    """

    measures: tuple[measures_lib.Measure, ...] = ()
    own_rows: int = 0

    of_client: ClassVar[str] = metric_kinds.ACCURACY

    @property
    def without_measures(self) -> "Classes":
        """The same without measures."""
        return Classes()

    def answers(
        self,
        outputs: tuple[jax.Array, ...],
        label: jax.Array,
        is_chosen: jax.Array | None,
        is_real: jax.Array,
    ) -> Answers:
        """The answers of J outputs [B, ...] on rows, of which `is_real` bool[B].

        `is_chosen` bool[B, T] are the positions of a text that a model had to guess.
        `exits` of the result is bool[B, J].
        """
        served = outputs[-1]
        loss = losses.cross_entropies(served, label)
        loss = jnp.where(is_real, loss.astype(jnp.float32), 0)
        found = jnp.argmax(jnp.stack(outputs), -1)
        right = (found == label) & is_real
        exits = found[:-2] if len(outputs) > 1 else found
        differ = (exits != exits[0]).any(0) & is_real
        logits = served.astype(jnp.float32) if self.measures else ()
        sums = {"right": right[-1], "loss": loss}
        return Answers(right.T, sums, differ, label, is_real, logits)

    def _zeros(self, *shape: int) -> dict[str, jax.Array]:
        return {"right": jnp.zeros(shape, jnp.int32), "loss": jnp.zeros(shape)}

    def of_batch(self, found: Answers, first: jax.Array) -> dict[str, Any]:
        """Sums over a batch; `first` is its first row's place among a client's."""
        total = jax.tree.map(
            lambda zero, x: x.sum(0, dtype=zero.dtype), self._zeros(), found.served
        )
        if self.measures:
            batch = found.logits, found.label, found.is_real
            where = {"first": first, "num_rows": self.own_rows}
            total["measured"] = measures_lib.of(self.measures, *batch, **where)
        return total

    def of_each(
        self, found: Answers, rows: types.ClientRows, owner: jax.Array
    ) -> dict[str, Any]:
        """Sums over each client's rows, leaves [K, ...], of a model that they share.

        `found` are the answers on all U rows of the union. `rows` are those of each
        client among these, and `owner` int32[U] is the client of each row, K = none.
        """
        total = _by_owner(found.served, owner, self._zeros(rows.start.shape[0]))
        if self.measures:

            def one(of: tuple[jax.Array, jax.Array]) -> Any:
                start, count = of
                index = jnp.arange(self.own_rows)
                place = jnp.minimum(start + index, len(owner) - 1)
                batch = found.logits[place], found.label[place], index < count
                return measures_lib.of(self.measures, *batch, num_rows=self.own_rows)

            total["measured"] = jax.lax.map(one, (rows.start, rows.count))
        return total

    def of_union(self, found: Answers) -> dict[str, jax.Array]:
        """`server` int32[J] and `server_loss` f32[] of all rows of the union."""
        return {
            "server": found.exits.sum(0, dtype=jnp.int32),
            "server_loss": found.served["loss"].sum(),
        }

    def measured(self, found: Answers) -> Any:
        """The sums of the measures over all rows of the union, () without measures."""
        batch = found.logits, found.label, found.is_real
        return measures_lib.of(self.measures, *batch, num_rows=len(found.label))

    def metrics(
        self, counts: dict[str, Any], test_count: np.ndarray, union: int
    ) -> Metrics:
        """The metrics of one variant by name, and values of each client f64[K].

        `counts` come from `evaluate.joined`. `test_count` int[K] are the test rows of
        each client, and `union` is U, the rows in the union of all test rows.
        Accuracies are fractions 0..1. A metric is absent where there is no model or no
        row for it, or where its value is not finite. The clients' values are their
        `accuracy` and measures, nan without own test rows, and {} if no client has any.
        """
        out = _of_models(counts, union) if union else {}
        if "train" in counts:
            right, count = counts["train"]
            out["train_accuracy"] = float(right / count)
        # Without a serving model there are no sums.
        nothing = {"right": np.zeros(len(test_count)), "loss": np.zeros(1)}
        sums = counts.get("own", nothing)
        own = sums["right"].astype(np.int64)
        tested = (test_count > 0) & counts["known"]
        accuracy = np.full(len(own), np.nan)
        accuracy[tested] = own[tested] / test_count[tested]
        if tested.any():
            worst = np.sort(accuracy[tested])[: max(1, int(tested.sum()) // 10)]
            out["client_accuracy"] = float(accuracy[tested].mean())
            out["client_accuracy_pooled"] = float(own.sum() / test_count[tested].sum())
            out["worst_decile_accuracy"] = float(worst.mean())
            out["client_accuracy_std"] = float(accuracy[tested].std())
            loss = sums["loss"].astype(np.float64)
            out["client_loss"] = float((loss[tested] / test_count[tested]).mean())
            if "trained" in counts:
                trained = counts["trained"]["right"].astype(np.int64)
                of_each = trained[tested] / test_count[tested]
                out["trained_accuracy"] = float(of_each.mean())
            out |= _covered(tested, out)
        if "scored" in counts:
            out |= _of_scored(counts, own, test_count, union)
        of_each = {self.of_client: accuracy} if tested.any() else {}
        if self.measures:
            found = {"own": sums.get("measured")}
            if "measured" in counts:
                found["server"] = counts["measured"]
            values, more = measures_lib.metrics(self.measures, found, tested)
            out, of_each = out | values, of_each | more
        return _finite(out), of_each


def _covered(tested: np.ndarray, found: Iterable[str]) -> dict[str, int]:
    """The clients in the means, if these are not all bool[K]."""
    count = int(tested.sum())
    trained = [name for name in found if name.startswith("trained_")]
    names = metric_kinds.EVALUATED, *(metric_kinds.CLIENTS_IN + one for one in trained)
    return dict.fromkeys(names, count) if count < len(tested) else {}


def _of_models(counts: dict[str, Any], union: int) -> dict[str, float]:
    """Accuracies and losses of the server's models and their exits on U rows."""
    out: dict[str, float] = {}
    for name, right in counts.get("server", {}).items():
        right = right.astype(np.float64) / union
        out[f"{name}_accuracy"] = float(right[-1])
        out[f"{name}_loss"] = float(counts["server_loss"][name]) / union
        prefix = "" if name == "global" else f"{name}_"
        if len(right) == 1:
            continue
        *exits, ensemble, _ = right.tolist()
        for number, value in enumerate(exits, start=1):
            out[f"{prefix}exit{number}_accuracy"] = value
        out[f"{prefix}ensemble_accuracy"] = ensemble
        if len(exits) > 1:
            out[f"{prefix}exits_disagree"] = float(counts["differ"][name] / union)
    return out


def _of_scored(
    counts: dict[str, Any], own: np.ndarray, test_count: np.ndarray, union: int
) -> dict[str, float]:
    """c_spec, c_gen and c_per of the scored clients, and how many these are.

    The numbers are left out where they are all that `--eval_clients` asks for.
    """
    out: dict[str, float] = {}
    real = counts["scored"] < len(own)
    scored = counts["scored"][real]
    own_rows, tested = test_count[scored].sum(), int((test_count[scored] > 0).sum())
    if own_rows:
        out["c_spec"] = float(own[scored].sum() / own_rows)
        if tested < len(scored) or counts.get("are_sampled"):
            out[f"{metric_kinds.CLIENTS_IN}c_spec"] = tested
    # A sample of the clients may contain none of the scored ones.
    if real.any() and union:
        right = counts["cross"][real].astype(np.int64).sum()
        out["c_gen"] = float(right / (int(real.sum()) * union))
        if counts.get("are_sampled"):
            out[f"{metric_kinds.CLIENTS_IN}c_gen"] = len(scored)
    if {"c_spec", "c_gen"} <= out.keys():
        out["c_per"] = (out["c_spec"] + out["c_gen"]) / 2
    return out


@dataclasses.dataclass(frozen=True)
class Words:
    """Perplexities of a text, which has no correct answers.

    Sums are f32[..., 4]: -log p, positions, -log p at chosen positions and chosen
    positions, where p is the probability of the word that is there. A perplexity is exp
    of the mean -log p over all positions, and a masked one over the chosen positions,
    which the model had to guess. The host sums all rows of a shared model.

    `positions` is `all`, or `chosen` for masked perplexities alone: a model that was
    trained at the chosen positions has not learned to repeat visible words.
    """

    positions: str = "all"

    of_client: ClassVar[str] = metric_kinds.PERPLEXITY
    measures: ClassVar[tuple[measures_lib.Measure, ...]] = ()

    @property
    def without_measures(self) -> "Words":
        return self

    def answers(
        self,
        outputs: tuple[jax.Array, ...],
        label: jax.Array,
        is_chosen: jax.Array | None,
        is_real: jax.Array,
    ) -> Answers:
        """Like `Classes.answers`; `exits` is f32[B, J, 4]."""
        sums = [_surprise(one, label, is_chosen) for one in outputs]
        sums = jnp.where(is_real[:, None], jnp.stack(sums), 0)
        differ = jnp.zeros_like(is_real)
        return Answers(sums.swapaxes(0, 1), sums[-1], differ, label, is_real)

    def of_batch(self, found: Answers, first: jax.Array) -> jax.Array:
        return found.served.sum(0)

    def of_each(
        self, found: Answers, rows: types.ClientRows, owner: jax.Array
    ) -> jax.Array:
        return _by_owner(found.served, owner, jnp.zeros((rows.start.shape[0], 4)))

    def of_union(self, found: Answers) -> dict[str, jax.Array]:
        """`server` f32[J, U, 4], which the host sums."""
        return {"server": found.exits.swapaxes(0, 1)}

    def measured(self, found: Answers) -> Any:
        return ()

    def metrics(
        self, counts: dict[str, Any], test_count: np.ndarray, union: int
    ) -> Metrics:
        """Like `Classes.metrics`, with the `perplexity` of clients.

        With the positions `chosen` these are the masked ones. They are nan without own
        test rows, or without a position to guess.
        """
        # The first of the sums that belong to a kind
        kinds = {"perplexity": 0, "masked_perplexity": 2}
        if self.positions == "chosen":
            del kinds["perplexity"]
        kind, first = next(iter(kinds.items()))
        out = _of_text_models(counts, kinds)
        if "train" in counts:
            rows, _ = counts["train"]
            total = rows.astype(np.float64).sum(0)
            out[f"train_{kind}"] = _perplexity(total[first:])
        tested = (test_count > 0) & counts["known"]
        # Without a serving model there are no sums.
        sums = counts.get("own", np.zeros((len(test_count), 4))).astype(np.float64)
        own = sums[:, first:]
        # Few test rows may have no chosen position.
        tested[tested] = own[tested, 1] > 0
        of_client = np.full(len(tested), np.nan)
        if not tested.any():
            return _finite(out), {}
        of_client[tested] = _perplexity(own[tested].T)
        worst = np.sort(of_client[tested])[-max(1, int(tested.sum()) // 10) :]
        total = sums[tested].sum(0)
        if "perplexity" in kinds:
            out["client_perplexity"] = float(of_client[tested].mean())
            out["client_perplexity_pooled"] = _perplexity(total)
        out["client_masked_perplexity"] = _perplexity(total[2:])
        out[f"worst_decile_{kind}"] = float(worst.mean())
        out[f"client_{kind}_std"] = float(of_client[tested].std())
        if "trained" in counts:
            trained = counts["trained"].astype(np.float64)[tested, first:]
            out[f"trained_{kind}"] = float(np.mean(_perplexity(trained.T)))
        out |= _covered(tested, out)
        return _finite(out), {self.of_client: of_client}


def _of_text_models(
    counts: dict[str, Any], kinds: Mapping[str, int]
) -> dict[str, float]:
    """Perplexities of the server's models and their exits; `kinds` as above."""
    out: dict[str, float] = {}
    for name, rows in counts.get("server", {}).items():
        *exits, served = rows.astype(np.float64).sum(1)
        prefix = "" if name == "global" else f"{name}_"
        if "perplexity" in kinds:
            out[f"{name}_perplexity"] = _perplexity(served)
        out[f"{prefix}masked_perplexity"] = _perplexity(served[2:])
        for number, sums in enumerate(exits, start=1):
            exit = f"exit{number}" if number < len(exits) else "ensemble"
            for one, begin in kinds.items():
                out[f"{prefix}{exit}_{one}"] = _perplexity(sums[begin:])
    return out


Score = Classes | Words


def _finite(values: dict[str, float]) -> dict[str, float]:
    """Without what is not finite: a run that diverged has no losses or perplexities."""
    return {name: value for name, value in values.items() if np.isfinite(value)}


def _surprise(logits: jax.Array, word: jax.Array, is_chosen: jax.Array) -> jax.Array:
    """The four sums f32[B, 4] of logits f32[B, T, V] and words int32[B, T]."""
    loss = losses.cross_entropies(logits, word)
    parts = loss, jnp.ones_like(loss), jnp.where(is_chosen, loss, 0), is_chosen
    return jnp.stack([part.sum(1, dtype=jnp.float32) for part in parts], -1)


def _perplexity(sums: Sequence[Any] | np.ndarray) -> Any:
    """exp of the mean of -log p over its positions, nan without any.

    `sums` begins with the sum and their number.
    """
    with np.errstate(over="ignore"):
        out = np.exp(sums[0] / np.maximum(sums[1], 1))
    out = np.where(sums[1] > 0, out, np.nan)
    return out if out.ndim else float(out)
