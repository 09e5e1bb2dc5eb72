"""Algorithms: one file each, one line here each."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from algorithms import (
    cdkt,
    fedavg,
    fedd2s,
    fedict,
    fedmd,
    fedper,
    local,
    majority,
    pfedsd,
)


def variant(module: Any, summary: str, **defaults: Any) -> Any:
    """A second name for an algorithm, with other defaults."""
    fields = [
        (
            field.name,
            field.type,
            dataclasses.field(default=defaults[field.name], metadata=field.metadata),
        )
        for field in dataclasses.fields(module.HParams)
        if field.name in defaults
    ]
    hparams = dataclasses.make_dataclass(
        "HParams", fields, bases=(module.HParams,), frozen=True
    )
    return SimpleNamespace(HParams=hparams, make=module.make, __doc__=summary)


_FEDREP = variant(
    fedper,
    "FedRep: FedPer whose personal layers and base are trained in turn.",
    local_epochs=4,
    head_epochs=3,
)
ALGORITHMS = {
    "local": local,
    "majority": majority,
    "fedavg": fedavg,
    "cdkt": cdkt,
    "fedd2s": fedd2s,
    "fedper": fedper,
    "fedrep": _FEDREP,
    "fedper_plus": variant(
        fedper, "FedPer+: FedPer with FedD2S's layer dropping.", layer_dropping=True
    ),
    "fedrep_plus": variant(
        _FEDREP, "FedRep+: FedRep with FedD2S's layer dropping.", layer_dropping=True
    ),
    "fedmd": fedmd,
    "fedict": fedict,
    "pfedsd": pfedsd,
}


def describe(name: str) -> str:
    """The first line of an algorithm's module docstring."""
    return ALGORITHMS[name].__doc__.splitlines()[0]
