"""FedRep: a shared representation and personal heads, trained one after the other.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for
Personalized Federated Learning", ICML 2021, https://arxiv.org/abs/2102.07078
(Algorithm 1).

* The server sends the representation to the clients of the round.
* Each trains its own head with the representation fixed, then the representation
  with the head fixed.
* The representations go back; the server takes their mean.

| paper | here |
|---|---|
| phi | the server's stages, up to the boundary |
| h_i | stages of `state.clients`, from `--personal_from` on |
| tau | `--head_epochs`; `--local_epochs` counts head and representation epochs |

`fedrep_plus` is FedRep+ of the FedD2S paper (https://arxiv.org/abs/2402.10846):
`--layer_dropping` moves the boundary as in `fedper_plus`; while the head is empty all
epochs train the representation.

Differs from the paper: freezing is exact (in the released code the head still moves by
stale momentum and weight decay in the second phase), and there is no last round that
tunes the heads alone. FedD2S describes FedRep as averaging outputs of representations;
parameters are averaged here, as Collins et al. do.
"""

from __future__ import annotations

import dataclasses

import jax

from fedjax_pfl import local, options, partial, types


@dataclasses.dataclass(frozen=True)
class HParams(options.PartialSharing, options.LocalTraining):
    """FedRep's options."""

    local_epochs: int = options.option(
        4, "epochs of local training per round, those of the head included", minimum=1
    )
    head_epochs: int = options.option(
        3, "first local epochs, which train the head alone [tau]", minimum=0
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """FedRep as pure functions.

    Raises:
        ValueError: no epoch is left for the representation.
    """
    if hparams.head_epochs >= hparams.local_epochs:
        raise ValueError(
            f"--head_epochs={hparams.head_epochs} leaves none of "
            f"--local_epochs={hparams.local_epochs} for the representation; lower it"
        )

    def phase(batch: local.Batch, shared: jax.Array) -> jax.Array:
        is_body = batch.epoch >= hparams.head_epochs
        return (shared == is_body) | shared.all()

    return partial.make(hparams, task, phase)
