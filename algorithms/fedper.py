"""FedPer: a shared base and personal last layers, trained jointly.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization
Layers", https://arxiv.org/abs/1912.00818 (Algorithms 1 and 2).

* The server sends the base layers to the clients of the round.
* Each trains base and its own personal layers together for E epochs.
* The base layers go back; the server takes their weighted mean.

| paper | here |
|---|---|
| W_B | the server's stages, up to the boundary |
| W_P | stages of `state.clients`, from `--personal_from` on |
| gamma_j | `--aggregation=examples` |

`fedper_plus` is FedPer+ of the FedD2S paper (https://arxiv.org/abs/2402.10846):
`--layer_dropping` moves the boundary from the last layer to `--min_layer`, one layer
every `--drop_every` participations; each layer is averaged over those that share it.

Differs from the paper: a sample of the clients takes part in a round, not all; a client
is served the mean base with its own last layers, never its copy from before the mean.
FedD2S gives FedPer+ two sentences; the definition is ours (a client that never took
part is served the server's model).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from fedjax_pfl import options, partial, types


@dataclasses.dataclass(frozen=True)
class HParams(options.PartialSharing, options.LocalTraining):
    """FedPer's options."""


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """FedPer as pure functions: every step trains all stages."""
    return partial.make(hparams, task, lambda batch, shared: jnp.ones_like(shared))
