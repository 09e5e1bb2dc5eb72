"""Flags: names, order, flagfiles, help and the Python entry."""

import dataclasses

import pytest

import algorithms
from data import partitions
from launch import build, config, flags, main, settings, workdir


def parse(*arguments):
    """Names and values from a command line."""
    return flags.parse(["main", *arguments])


@pytest.fixture
def flagfile(tmp_path):
    """A function that writes a flagfile and returns its argument."""

    def write(*lines, name="some.flags"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return f"--flagfile={tmp_path / name}"

    return write


def test_given_flags_only_and_their_types():
    """Values have their fields' types; what was not given is absent."""
    given = parse(
        "--algo=fedavg", "--rounds=7", "--client_lr=1", "--c_gen", "--model=m1"
    )
    assert given == {
        "algo": "fedavg",
        "rounds": 7,
        "client_lr": 1.0,
        "c_gen": True,
        "model": "m1",
    }
    assert isinstance(given["client_lr"], float)


def test_value_after_a_space():
    """`--algo local --rounds 3` is the same as with equal signs."""
    assert parse("--algo", "local", "--rounds", "3") == parse(
        "--algo=local", "--rounds=3"
    )


@pytest.mark.parametrize(
    "text, value", [("--c_gen", True), ("--noc_gen", False), ("--c_gen=false", False)]
)
def test_switches(text, value):
    """A switch can be turned off in two ways."""
    assert parse(text)["c_gen"] is value


def test_default_algorithm():
    """Without --algo it is CDKT."""
    assert parse() == {"algo": "cdkt"}


def test_command_line_after_the_flagfile_wins(flagfile):
    """The later one counts, whichever it is."""
    file = flagfile("--algo=fedavg", "--rounds=5", "--client_lr=0.5")
    assert parse(file, "--rounds=9") == {
        "algo": "fedavg",
        "rounds": 9,
        "client_lr": 0.5,
    }
    assert parse("--rounds=9", file)["rounds"] == 5


def test_later_flagfile_wins(flagfile):
    """Two flagfiles: the second overrides."""
    first = flagfile("--rounds=1", "--seed=4", name="a.flags")
    second = flagfile("--rounds=2", name="b.flags")
    assert parse(first, second) == {"algo": "cdkt", "rounds": 2, "seed": 4}


def test_flagfile_comments_and_nesting(flagfile):
    """# and empty lines are skipped; a flagfile may name another."""
    inner = flagfile("--algo=local", "--seed=3", name="inner.flags")
    outer = flagfile("# expected: 97.5 %", "", inner, "--rounds=2", name="outer.flags")
    assert parse(outer) == {"algo": "local", "seed": 3, "rounds": 2}


def test_same_algo_twice_is_fine(flagfile):
    """Only two different ones are refused."""
    assert parse(flagfile("--algo=local"), "--algo=local")["algo"] == "local"


@pytest.mark.parametrize("algo", list(algorithms.ALGORITHMS))
def test_help_shows_every_field(algo, capsys):
    """`--algo=NAME --help`: every option with its help text, exit 0."""
    with pytest.raises(SystemExit) as stop:
        main.main(["main", f"--algo={algo}", "--help"])
    assert stop.value.code in (0, None)
    text = capsys.readouterr().out
    fields = settings.fields_of(algo)
    own = {f.name for f in dataclasses.fields(algorithms.ALGORITHMS[algo].HParams)}
    assert own <= fields.keys()
    for name, field in fields.items():
        assert f"--{name}=" in text
        assert field.metadata["help"] and field.metadata["help"] in text


def test_help_of_the_default_and_in_any_place(capsys, flagfile):
    """`--help` alone is CDKT's; --algo may stand in a flagfile."""
    with pytest.raises(SystemExit):
        main.main(["main", "--help"])
    assert "--label_mix=" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main.main(["main", "--help", flagfile("--algo=fedavg")])
    assert "--label_mix=" not in capsys.readouterr().out


def test_contract_names_exist():
    """The names in architecture.md's list are options of every or some algorithm."""
    common = """algo preset dataset data_dir model client_model partition
        partition_alpha partition_seed classes_per_client test_split num_clients
        clients_per_round rounds local_epochs batch_size client_lr client_lr_decay
        client_optimizer client_momentum weight_decay clip_norm seed num_seeds
        eval_every checkpoint_every workdir resume client_chunk devices
        precision""".split()
    for algo in set(algorithms.ALGORITHMS) - {"majority"}:  # which trains nothing
        assert set(common) <= settings.fields_of(algo).keys(), algo
    assert "optimizer_state" in settings.fields_of("fedd2s")
    assert "personal_from" in settings.fields_of("fedper")
    cdkt = """client_distill_weight server_distill_weight label_mix temperature
        server_lr server_epochs transfer server_distance client_distance""".split()
    assert set(cdkt) <= settings.fields_of("cdkt").keys()


def test_experiment_refuses_unknown_keywords():
    """The Python entry has the command line's names and no others."""
    with pytest.raises(ValueError, match="--round is not.*did you mean --rounds"):
        build.experiment(algo="fedavg", round=3)
    with pytest.raises(ValueError, match="--label_mix belongs to cdkt"):
        build.experiment(algo="fedavg", label_mix=0.5)
    with pytest.raises(ValueError, match="--algo=feddavg"):
        build.experiment(algo="feddavg")


@pytest.mark.parametrize(
    "option",
    [
        {"rounds": "3"},
        {"rounds": 2.5},
        {"client_lr": "fast"},
        {"c_gen": 1},
        {"seed": True},
        {"partition": "fair"},
        {"client_lr": float("nan")},
        {"client_lr": -0.1},
    ],
)
def test_experiment_refuses_wrong_values(option):
    """Wrong type or range: ValueError with the option's name."""
    (name,) = option
    with pytest.raises(ValueError, match=f"--{name}="):
        build.experiment(algo="fedavg", **option)


def test_experiment_takes_the_flags_names(blobs):
    """An int for a float is fine, None means the default."""
    made = build.experiment(
        algo="fedavg",
        dataset=blobs,
        model="mlp",
        rounds=3,
        client_lr=1,
        num_clients=4,
        devices=1,
        partition=None,
    )
    assert made.config.rounds == 3
    assert made.hparams.client_lr == 1.0
    assert made.config.partition == "client_dirichlet"
    assert made.metrics == [] and made.round == 0


def test_natural_partition_is_chosen_where_data_have_owners(unequal):
    """`client` in the file: its seven owners are the clients."""
    made = build.experiment(
        algo="fedavg", dataset=unequal, model="mlp", rounds=1, devices=1
    )
    assert made.config.partition == "natural"
    assert made.config.num_clients == 7


def test_lines_replay_a_configuration(blobs):
    """flags.lines -> parse -> the same resolved options."""
    made = build.experiment(
        algo="cdkt",
        dataset=blobs,
        model="mlp",
        rounds=2,
        devices=1,
        num_clients=4,
        clients_per_round=2,
        label_mix=0.1 + 0.2,
    )
    again = build.experiment(**parse(*flags.lines(made.config, made.hparams)))
    assert again.config == made.config
    assert again.hparams == made.hparams


def test_workdir_names(blobs):
    """runs/<algo>-<dataset>-seed<seed>[-<last seed>]."""

    def name(**values):
        return workdir.default_name(config.Config(**values))

    assert name(algo="local", dataset="mnist_5k") == "runs/local-mnist_5k-seed0"
    assert name(algo="cdkt", dataset="emnist/byclass", seed=2, num_seeds=3) == (
        "runs/cdkt-emnist_byclass-seed2-4"
    )
    assert name(algo="fedavg", dataset=blobs) == "runs/fedavg-blobs-seed0"


@pytest.mark.parametrize(
    "summary, rounds, window",
    [
        ("last", 30, (30,)),
        ("mean_last10", 30, tuple(range(21, 31))),
        ("mean_last10", 4, (1, 2, 3, 4)),
        ("median_last10", 100, tuple(range(90, 100))),
        ("median_last10", 3, (1, 2)),
        ("median_last10", 1, (1,)),
    ],
)
def test_summary_window(summary, rounds, window):
    """Indices 90..99 of 100 for the median: the states that rounds begin with."""
    assert build.summary_window(summary, rounds) == window


def test_every_choice_has_help():
    """Choices of --partition are the partitions there are."""
    field = settings.fields_of("fedavg")["partition"]
    assert set(field.metadata["choices"]) == set(partitions.PARTITIONS)
