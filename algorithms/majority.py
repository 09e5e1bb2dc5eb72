"""Majority: always answer the client's most frequent class, without any learning.

A personalized method that scores below this control has learnt less than the client's
label counts alone give. With class mixes ~ Dir(.1) over 10 classes it scores about 65
%. A client answers the most frequent label of its train rows, and the server, as a
client without train rows, that of all. D_(n,c) are a client's train rows of class c.

    answer_n = argmax_c abs(D_(n,c))

Its probabilities, which the loss is of, are the shares of the labels with one more row
of each class: (abs(D_(n,c)) + 1) / (abs(D_n) + Y).

Differs from the paper: no paper has it as a method.
"""

import dataclasses

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import types


@dataclasses.dataclass(frozen=True)
class HParams:
    """Majority has no options."""


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Label counts in place of a model. A round changes nothing."""

    def init_model(key, x):
        return (jnp.zeros(task.num_classes),), ({},)

    def forward(params, stats, h, **_):
        logits = jnp.log1p(params[0])
        return jnp.broadcast_to(logits, (h.shape[0], task.num_classes)), stats

    model = types.Model("majority", ("counts",), init_model, forward)

    def init(data: fp.Data, key: jax.Array) -> fp.RoundState:
        counts = data.label_counts(task.num_classes)
        own = jnp.where(counts.sum(1, keepdims=True) > 0, counts, counts.sum(0))
        return fp.RoundState.first(counts.sum(0), own, key)

    def round(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        return state.after(), {}, {}

    def global_model(state: fp.RoundState, data: fp.Data):
        return {"global": (model, fp.Variables((state.server,), ({},)))}

    def serving(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        rows = fp.Variables((state.clients,), ({},))
        return (fp.Serving.each(model, rows),)

    return fp.Algorithm(
        plans=(), init=init, round=round, server=global_model, serving=serving
    )
