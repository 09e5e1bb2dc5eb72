"""The registry of algorithms: one file for each, and one line here.

A line has what `launch` needs before an algorithm is made for a task: its default
preset, and whether it uses public images, exits or texts.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from algorithms import (
    apfl,
    cdkt,
    criticalfl,
    depthfl,
    dfedavg,
    dispfl,
    distill,
    ditto,
    fedala,
    fedavg,
    fedbabu,
    fedbn,
    fedd2s,
    feddf,
    fedict,
    fedmd,
    fednova,
    fedper,
    fedproto,
    fedprox,
    fedrod,
    heterofl,
    inclusivefl,
    lg_fedavg,
    local,
    majority,
    moon,
    perfedavg,
    pfedme,
    pfedsd,
    scaffold,
    splitmix,
    uapdfl,
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """An algorithm as `launch` sees it.

    Attributes:
        HParams, make: The dataclass of its options; `(hparams, task) ->
            types.Algorithm`.
        about: Its description, with the first line for lists, which begins with the
            name that papers write, and a colon.
        name: The name of a custom algorithm in records. Others have their key.
        preset: Name of the paper's rules for options that are not given.
        public_images: Whether it learns from unlabelled images, which all clients get
            (`Algorithm.ships_proxy`) or the server alone has. A default set is chosen
            where none is given.
        exits: Whether it uses models with an exit at every stage.
        text: Whether an example may be a row of tokens with a label at each position,
            as its losses are means of cross-entropies.
        shares_rows: Whether several devices may share out its private rows. It then
            reads and writes them with `state.rows` and `state.after` alone (those of
            peers with `rows.exchange.take`, as `aggregate.mix_peers` does), and what
            its `serving` gives by client has `task.num_rows` entries, in the order of
            `state.clients`.
        fixed: Option -> value that makes a variant another method than its base.
    """

    HParams: type
    make: Callable[[Any, Any], Any]
    about: str
    name: str
    preset: str = "none"
    public_images: bool = False
    exits: bool = False
    text: bool = False
    shares_rows: bool = False
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)


def entry(module: Any, *, shares_rows: bool = True, **facts: Any) -> Entry:
    """The entry of a module with `HParams`, `make` and a docstring, and other facts."""
    made = module.HParams, module.make, module.__doc__, "custom"
    return Entry(*made, shares_rows=shares_rows, **facts)


def custom(algo: Any) -> Entry:
    """The entry of an object with `HParams` and `make`, and any facts of `Entry`."""
    name = getattr(algo, "__name__", "custom").rpartition(".")[2].strip("_")
    facts = {
        one.name: getattr(algo, one.name, one.default)
        for one in dataclasses.fields(Entry)
        if one.default is not dataclasses.MISSING
    }
    return Entry(algo.HParams, algo.make, algo.__doc__ or "", name, **facts)


def variant(
    base: Entry, summary: str, *, fixed: tuple[str, ...] = (), **defaults: Any
) -> Entry:
    """A second name for an entry, with other defaults for some of its options.

    Args:
        base: The entry.
        summary: One sentence, its description in lists.
        fixed: Options among `defaults` that make it another method than `base`. A run
            with other values of these is not what its name says. A number counts as
            equal if both are 0 or neither is, and `personal_from` if both are `none` or
            neither is, see `registry.departure`.
        **defaults: Option -> default.
    """
    fields = []
    for one in dataclasses.fields(base.HParams):
        if one.name in defaults:
            own = dataclasses.field(default=defaults[one.name], metadata=one.metadata)
            fields.append((one.name, one.type, own))
    hparams = dataclasses.make_dataclass(
        "HParams", fields, bases=(base.HParams,), frozen=True
    )
    is_fixed = {name: defaults[name] for name in fixed}
    return dataclasses.replace(
        base, HParams=hparams, about=summary, fixed=base.fixed | is_fixed
    )


_FEDAVG = entry(fedavg, text=True)
_ADAPTIVE = functools.partial(
    variant, _FEDAVG, fixed=("server_optimizer",), server_lr=0.01
)
_FEDPER = entry(fedper, preset="fedd2s", text=True)
_FEDREP = variant(
    _FEDPER,
    "FedRep: a shared base and personal heads, trained one after the other.",
    fixed=("head_epochs",),
    local_epochs=4,
    head_epochs=3,
)
_PLUS = functools.partial(variant, fixed=("layer_dropping",), layer_dropping=True)
_DEPTHFL = entry(depthfl, preset="depthfl", exits=True, text=True)
_HETEROFL = entry(heterofl, preset="depthfl")
_DFEDAVG = entry(dfedavg, preset="uapdfl")
ALGORITHMS = {
    "local": entry(local, text=True),
    "majority": entry(majority, preset="fedd2s"),
    "fedavg": _FEDAVG,
    "fedavgm": variant(
        _FEDAVG,
        "FedAvgM: FedAvg with momentum at the server.",
        fixed=("server_optimizer", "server_momentum"),
        server_optimizer="sgd",
        server_momentum=0.9,
    ),
    "fedadam": _ADAPTIVE(
        "FedAdam: FedAvg with an adaptive server (Reddi et al., 2021).",
        server_optimizer="adam",
        server_momentum=0.9,
    ),
    "fedyogi": _ADAPTIVE(
        "FedYogi: FedAdam whose second moment moves by its sign.",
        server_optimizer="yogi",
        server_momentum=0.9,
    ),
    "fedadagrad": _ADAPTIVE(
        "FedAdagrad: FedAdam whose second moment is a sum.", server_optimizer="adagrad"
    ),
    "fedprox": entry(fedprox, text=True),
    "fednova": entry(fednova, text=True),
    "scaffold": entry(scaffold, text=True),
    "moon": entry(moon, text=True),
    "ditto": entry(ditto, text=True),
    "apfl": entry(apfl, text=True),
    "fedala": entry(fedala, text=True),
    "fedbabu": entry(fedbabu, text=True),
    "fedbn": entry(fedbn),
    "fedrod": entry(fedrod),
    "lg_fedavg": entry(lg_fedavg, text=True),
    "pfedme": entry(pfedme, text=True),
    "perfedavg": entry(perfedavg, text=True, shares_rows=False),
    "cdkt": entry(cdkt, preset="cdkt"),
    "fedd2s": entry(fedd2s, preset="fedd2s"),
    "fedper": _FEDPER,
    "fedrep": _FEDREP,
    "fedper_plus": _PLUS(_FEDPER, "FedPer+: FedPer with FedD2S's layer dropping."),
    "fedrep_plus": _PLUS(_FEDREP, "FedRep+: FedRep with FedD2S's layer dropping."),
    "fedmd": entry(fedmd, preset="fedd2s", public_images=True),
    "feddf": entry(feddf, public_images=True),
    "fedproto": entry(fedproto),
    "fedict": entry(fedict, preset="fedd2s"),
    "pfedsd": entry(pfedsd, preset="fedd2s"),
    "uapdfl": entry(uapdfl, preset="uapdfl"),
    "dfedavg": _DFEDAVG,
    "dfedper": variant(
        _DFEDAVG,
        "DFedPer: decentralised FedPer, peers share all layers but the last.",
        fixed=("personal_from",),
        personal_from="last",
    ),
    "dfedavgm": variant(
        _DFEDAVG,
        "DFedAvgM: equal weights among peers; any momentum restarts in every round.",
        fixed=("aggregation", "optimizer_state"),
        aggregation="uniform",
        optimizer_state="reset",
    ),
    "criticalfl": entry(criticalfl, preset="uapdfl"),
    "dispfl": entry(dispfl, preset="uapdfl"),
    "depthfl": _DEPTHFL,
    "inclusivefl": entry(inclusivefl, preset="depthfl", exits=True, text=True),
    "heterofl": _HETEROFL,
    "sheterofl": variant(
        _HETEROFL,
        "SHeteroFL: HeteroFL in which clients train every smaller width too.",
        fixed=("all_widths",),
        all_widths=True,
    ),
    "splitmix": entry(splitmix, preset="depthfl"),
    "distill": entry(distill, preset="depthfl"),
    "feddyn": variant(
        _DEPTHFL,
        "FedDyn: local losses corrected by the clients' drifts, on one whole model.",
        fixed=("level_mix", "self_distill_weight", "feddyn_alpha"),
        feddyn_alpha=0.1,
        level_mix="1",
        self_distill_weight=0.0,
    ),
}


def title(name: str) -> str:
    """An algorithm's name as papers write it, such as `FedPer+`."""
    return describe(name).partition(":")[0]


def describe(name: str) -> str:
    """The first line of an algorithm's module docstring."""
    return ALGORITHMS[name].about.splitlines()[0]
