"""Relations between options are declared at their fields, and hold by one check."""

import dataclasses

import jax
import pytest

import algorithms
from fedjax_pfl import options
from launch.assemble import notes
from launch.config import resolve, schema

CONFIG = schema.Config(
    **{"partition": "iid", "public_set": "none", "proxy_fraction": 0.0, "c_gen": False},
    **{"num_clients": 4, "clients_per_round": 4, "model": "mlp", "client_model": "mlp"},
)
# The options of an algorithm without a teacher that needs one
GIVEN = {"distill": {"teacher": "a"}}


def instances():
    """(name, resolved options) of every dataclass of options, by a name."""
    yield "config", CONFIG
    for name, entry in algorithms.ALGORITHMS.items():
        yield name, entry.HParams(**GIVEN.get(name, {}))


def relations(kind):
    """(name, option, other, values) of all relations that an instance can have."""
    seen = set()
    for name, values in instances():
        for field in dataclasses.fields(values):
            for other, wanted in field.metadata[kind].items():
                key = field.name, other, wanted
                if hasattr(values, other) and key not in seen:
                    seen.add(key)
                    yield pytest.param(name, *key, id=f"{name}-{field.name}-{other}")


def fields_of(values):
    return {field.name: field for field in dataclasses.fields(values)}


def possible(field):
    """Values of an option that its own range allows, those that are on last."""
    meta = field.metadata
    if meta["choices"]:
        return [one.replace("PATH", "rows.npz") for one in meta["choices"]]
    if isinstance(field.default, bool) or field.name == "c_gen":
        return [False, True]
    if isinstance(field.default, str) or meta["minimum"] is meta["above"] is None:
        return ["", "some"]
    return [0, 1, 0.5 if isinstance(field.default, float) else 2]


def on(field):
    """A value of an option that was given and switches something on."""
    last = possible(field)[::-1]
    return next(value for value in last if options.is_on(field, value))


def with_values(name, **given):
    """The options of a name with these, and with what else their relations need."""
    values = dict(instances())[name]
    for option in given:
        for other, wanted in fields_of(values)[option].metadata["needs"].items():
            if hasattr(values, other) and other not in given:
                one = (
                    on(fields_of(values)[other]) if wanted is options.ON else wanted[0]
                )
                values = dataclasses.replace(values, **{other: one})
    return dataclasses.replace(values, **given)


def lines(values, option):
    """What is said about an option, as a refusal or as a note."""
    noted = fields_of(values)[option].metadata["is_noted"]
    asked = [option] if noted else None
    return [x for x in options.conflicts(values, noted=asked) if f"--{option}" in x]


def is_among(value, wanted):
    if wanted is options.ON:
        return value not in options.OFF
    return value in wanted or ("file:PATH" in wanted and str(value).startswith("file:"))


@pytest.mark.parametrize("name, option, other, wanted", relations("needs"))
def test_needs(name, option, other, wanted):
    """One sentence beside every value without an effect, and nothing beside others."""
    fields = fields_of(dict(instances())[name])
    value, shown = on(fields[option]), options.text(on(fields[option]))
    cure = "" if wanted is options.ON else "=" + options.text(wanted[0])
    for now in possible(fields[other]):
        values = with_values(name, **{option: value, other: now})
        expected = []
        if not is_among(now, wanted):
            expected = [
                f"--{option}={shown} has no effect with --{other}={options.text(now)}; "
                f"omit it, or give --{other}{cure}"
            ]
        found = lines(values, option)
        assert len(found) == len(expected)
        assert all(map(str.startswith, found, expected))
        if found and not fields[option].metadata["is_noted"]:
            with pytest.raises(
                ValueError, match="^--.* has no effect with|^--.* needs "
            ):
                options.validate(values)


@pytest.mark.parametrize("name, option, other, refused", relations("excludes"))
def test_excludes(name, option, other, refused):
    """Both are named, in one sentence."""
    fields = fields_of(dict(instances())[name])
    for now in possible(fields[other]):
        values = with_values(name, **{option: on(fields[option]), other: now})
        expected = [
            f"--{option}={options.text(on(fields[option]))} does not go with "
            f"--{other}={options.text(now)}; omit one of them"
        ]
        assert lines(values, option) == expected * is_among(now, refused)


def ranges():
    """(name, option, a value just outside, what is expected) of every bound."""
    outside = {"minimum": -1, "maximum": 1, "above": 0, "below": 0}
    words = {"minimum": "at least", "maximum": "at most", "above": "more than"}
    seen = set()
    for name, values in instances():
        for field in dataclasses.fields(values):
            for bound, step in outside.items():
                limit = field.metadata[bound]
                if limit is not None and (field.name, bound) not in seen:
                    seen.add((field.name, bound))
                    line = f"expected {words.get(bound, 'less than')} {limit:g}"
                    yield name, field.name, limit + step, line
            if field.metadata["choices"] and (field.name, "choices") not in seen:
                seen.add((field.name, "choices"))
                yield name, field.name, "nonsense", "expected one of "


@pytest.mark.parametrize("name, option, value, line", ranges())
def test_ranges(name, option, value, line):
    """Every bound and every list of choices is checked, in one sentence."""
    values = dict(instances())[name]
    with pytest.raises(ValueError) as error:
        options.validate(dataclasses.replace(values, **{option: value}))
    assert str(error.value).startswith(f"--{option}={value}: {line}")


NEEDED = [
    (name, field)
    for name, values in instances()
    for field in dataclasses.fields(values)
    if field.metadata.get("is_needed")
]


@pytest.mark.parametrize("name, field", NEEDED[:1] + NEEDED[-1:] + NEEDED[1:2])
def test_needed(name, field):
    """An option that another one's values require."""
    ((other, wanted),) = field.metadata["needs"].items()
    values = dict(instances())[name]
    for now in wanted:
        bare = dataclasses.replace(values, **{field.name: "", other: now})
        with pytest.raises(
            ValueError, match=f"^--{other}={now} needs --{field.name}: "
        ):
            options.validate(bare)


def declared():
    """Every relation as a line: `option needs other=values`, noted or refused."""
    lines = set()
    for _, values in instances():
        for name, field in fields_of(values).items():
            meta = field.metadata
            for kind in ("needs", "excludes"):
                for other, of in meta[kind].items():
                    shown = "/".join(map(options.text, of)) or "on"
                    verb = "notes" if meta["is_noted"] else kind
                    lines.add(
                        f"{name} {verb} {other}={shown}{' !' * meta['is_needed']}"
                    )
            if meta.get("only"):
                lines.add(f"{name} only {meta['only']}")
    return sorted(lines)


DECLARED = """
adaptive_share notes adaptive_lr=on
adaptive_threshold notes adaptive_lr=on
adjacency needs topology=file !
anchor notes layer_personalization=true
anchor notes proximal_weight=on
augment only images
c_gen only images
choose_by only images
classes_per_client notes partition=pathological/pfllib_pathological/cdkt/cdkt_code/cdkt_paper
client_classes needs partition=classes !
client_distance notes client_distill_weight=on
difference needs hessian_free=true
drop_every notes layer_dropping=true
edge_probability needs topology=erdos_renyi
ensemble notes server_distill_weight=on
eval_clients notes c_gen=true
eval_metrics only images
eval_model excludes server_optimizer=sgd/adam/adagrad/yogi
eval_moments only images
examples_per_client excludes partition=natural/file:PATH/cdkt/cdkt_code/cdkt_paper
exclusive needs levels=fixed
first_layer needs layer_dropping=true
fixed_graph needs topology=random/regular/erdos_renyi
h_denominator needs feddyn_alpha=on
image_channels only images
image_size only images
keep_best needs summary=best_validation/best
label only tables
labels only coarse labels
layout only arrays
masked_loss only texts
min_layer needs drop_every=on
min_layer needs layer_dropping=true
min_owner_examples needs partition=natural
min_owner_examples only images
normalization only images
num_peers needs topology=random/ring/regular
owner only tables
owners only owned texts
partition_alpha notes partition=client_dirichlet/dirichlet/pfllib_dirichlet
partition_draw notes partition=client_dirichlet/pathological
personal_from excludes layer_dropping=on
prior_temperature notes distill_weight=on
prototype_loss notes prototype_weight=on
proximal notes layer_personalization=true
proximal notes proximal_weight=on
proximal_weight needs layer_personalization=true
proxy_fraction only images
prune_rounds needs prune_rate=on
public_set excludes proxy_fraction=on
public_set only images
ramp_rounds notes self_distill_weight=on
regrow notes prune_rate=on
rotate_classes excludes layout=ntc
rotate_classes excludes partition=cdkt/cdkt_code/cdkt_paper
rotate_classes only images
server_distance notes server_distill_weight=on
server_epochs notes distill_weight=on
server_lr needs server_optimizer=sgd/adam/adagrad/yogi
server_momentum needs server_optimizer=sgd/adam/adagrad/yogi
smoothing needs distill_target=ls
smoothing needs distill_weight=on
teacher needs distill_target=kd/pt/sim/pt_sim !
teacher_level needs distill_target=kd/pt/sim/pt_sim
teacher_mode notes server_distill_weight=on
teacher_model needs distill_target=kd/pt/sim/pt_sim
teacher_width needs distill_target=kd/pt/sim/pt_sim
temperature needs transfer=head
temperature notes contrastive_weight=on
temperature notes distill_weight=on
temperature notes self_distill_weight=on
text_length only texts
train_share only images
unseen_clients excludes eval_sample=on
unseen_names excludes eval_sample=on
unseen_names excludes unseen_clients=on
warm_rounds notes client_distill_weight=on
"""  # noqa: E501


def test_what_is_declared():
    """The list of all relations, so that none gets lost; ! = it must be given."""
    assert declared() == DECLARED.strip().splitlines()


def test_every_relation_is_one_of_two_options():
    """Some dataclass has both, so that none is misspelt."""
    together = [fields_of(values).keys() for _, values in instances()]
    for _, values in instances():
        for field in dataclasses.fields(values):
            for other in field.metadata["needs"] | field.metadata["excludes"]:
                assert any({field.name, other} <= names for names in together)


def test_what_passes():
    """Defaults, what is off or unresolved, missing options and traced numbers."""
    for _, values in instances():
        options.validate(values)
        assert list(options.conflicts(values)) == []
    for name in ("public_set", "normalization", "augment"):
        given = {name: "none", "proxy_fraction": 0.1}
        options.validate(dataclasses.replace(CONFIG, **given))
        resolve.check_data(schema.Config(dataset="kjv", **{name: "none"}))
    options.validate(dataclasses.replace(CONFIG, partition=None, min_owner_examples=3))
    fedavg = algorithms.ALGORITHMS["fedavg"].HParams

    def traced(rate):
        assert list(options.conflicts(fedavg(server_lr=rate))) == []
        return rate

    assert jax.jit(traced)(0.5) == 0.5


def test_none_is_a_stage_and_not_off():
    """`--personal_from=none` shares all, which layers that drop would not."""
    made = algorithms.ALGORITHMS["fedper_plus"].HParams(personal_from="none")
    with pytest.raises(ValueError, match="--personal_from=none .*; omit one of them"):
        options.validate(made)


def test_what_is_noted_was_asked_for():
    """A paper's rules may set it for all methods; a user is told."""
    made = algorithms.ALGORITHMS["fedper"].HParams(drop_every=5)
    line = "--drop_every=5 has no effect with --layer_dropping=false; omit it"
    config = dataclasses.replace(CONFIG, algo="fedper", rounds=5)
    assert notes.of_options(config, made) == []
    (found,) = notes.of_options(config, made, ["drop_every"])
    assert found.startswith(line)


def test_only_the_number_of_levels_counts_where_all_hold_the_whole_model():
    """Proportions that are asked for and not used have a line."""
    config = dataclasses.replace(CONFIG, algo="heterofl", rounds=5)
    lines = [
        notes.of_options(
            config,
            algorithms.ALGORITHMS["heterofl"].HParams(levels=levels, level_mix=mix),
            ["level_mix"],
        )
        for levels, mix in (("maximum", "1:2"), ("maximum", "1:1"), ("fixed", "1:2"))
    ]
    assert lines[0][0].startswith("--level_mix=1:2 has no effect with --levels=maximum")
    assert lines[1:] == [[], []]


# A data set of each kind, and one that is not
OF_KIND = {
    "texts": ("kjv", "mnist"),
    "owned texts": ("kjv", "python_topics"),
    "images": ("npz:a.npz", "wikitext2"),
    "tables": ("csv:a.csv", "npz:a.npz"),
    "arrays": ("npz:a.npz", "csv:a.csv"),
    "coarse labels": ("cifar100", "cifar10"),
}
ONLY = [field for field in dataclasses.fields(schema.Config) if field.metadata["only"]]


@pytest.mark.parametrize("field", ONLY, ids=lambda field: field.name)
def test_only(field):
    """An option of a kind of data on others, which also may be in memory."""
    given, only = {field.name: on(field)}, field.metadata["only"]
    config = dataclasses.replace(schema.Config(), **given)
    mine, other = (dataclasses.replace(config, dataset=d) for d in OF_KIND[only])
    resolve.check_data(mine)
    with pytest.raises(ValueError) as error:
        resolve.check_data(other)
    assert str(error.value) == (
        f"--{field.name}={options.text(on(field))} has no effect with --dataset="
        f"{other.dataset}; omit it, or give {schema.DATA[only]}"
    )
    arrays = dataclasses.replace(config, dataset="arrays")
    if only in ("arrays", "tables"):
        resolve.check_data(arrays, has_axes=only == "arrays", has_columns=True)


def test_partitions_of_a_text():
    """Those by labels are refused, and that by owners where there are none."""
    for name, kinds in {"kjv": ("natural", "iid"), "wikitext2": ("iid",)}.items():
        for kind in (*kinds, "contiguous", "file:a.npz", None):
            resolve.check_data(schema.Config(dataset=name, partition=kind))
    for name, kind in (("kjv", "dirichlet"), ("wikitext2", "natural")):
        line = f"--partition={kind}: expected one of .*iid.* or file:PATH for a text"
        with pytest.raises(ValueError, match=line):
            resolve.check_data(schema.Config(dataset=name, partition=kind))
