"""Flags: names, order, flagfiles, help and the Python entry."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

import algorithms
from data import partitions
from launch import build, main
from launch.config import flagfile, flags, registry, resolve, schema
from launch.folder import workdir
from launch.run import summaries


def parse(*arguments):
    """Names and values from a command line."""
    return flags.parse(["main", *arguments])


@pytest.fixture
def in_file(tmp_path):
    """A function that writes a flagfile and returns its argument."""

    def write(*lines, name="some.flags"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return f"--flagfile={tmp_path / name}"

    return write


def test_every_shipped_flagfile_is_a_configuration():
    """It parses, its options exist, and its first lines name the command."""
    folder = pathlib.Path(main.__file__).parent / "flagfiles"
    for path in folder.glob("*.flags"):
        config, _ = resolve.configure(parse(f"--flagfile={path}"))
        assert path.name.startswith(f"{config.algo}.")
        assert f"--flagfile=launch/flagfiles/{path.name}" in path.read_text()


def test_a_blank_before_the_sign(in_file):
    """The line names the flag as it is to be written."""
    with pytest.raises(flagfile.UsageError, match="write --rounds=value"):
        parse(in_file("--algo=fedavg", "--rounds = 2"))


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


def test_command_line_after_the_flagfile_wins(in_file):
    """The later one counts, whichever it is."""
    file = in_file("--algo=fedavg", "--rounds=5", "--client_lr=0.5")
    assert parse(file, "--rounds=9") == {
        "algo": "fedavg",
        "rounds": 9,
        "client_lr": 0.5,
    }
    assert parse("--rounds=9", file)["rounds"] == 5


def test_later_flagfile_wins(in_file):
    """Two flagfiles: the second overrides."""
    first = in_file("--rounds=1", "--seed=4", name="a.flags")
    second = in_file("--rounds=2", name="b.flags")
    assert parse(first, second) == {"algo": "cdkt", "rounds": 2, "seed": 4}


def test_flagfile_comments_and_nesting(in_file):
    """# and empty lines are skipped; a flagfile may name another."""
    inner = in_file("--algo=local", "--seed=3", name="inner.flags")
    outer = in_file("# expected: 97.5 %", "", inner, "--rounds=2", name="outer.flags")
    assert parse(outer) == {"algo": "local", "seed": 3, "rounds": 2}


def write(tmp_path, raw, name="some.flags"):
    """Writes bytes; returns the path."""
    (tmp_path / name).write_bytes(raw)
    return tmp_path / name


def test_flagfile_in_every_spelling(tmp_path, monkeypatch):
    """One dash or two, after a space, from the home folder, with a mark, with CR LF."""
    path = write(tmp_path, b"\xef\xbb\xbf--algo=local\r\n--rounds=2\r\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for spelling in (
        [f"-flagfile={path}"],
        ["--flagfile", f"{path}"],
        ["--flagfile=~/some.flags"],
    ):
        assert parse(*spelling) == {"algo": "local", "rounds": 2}
    assert flagfile.expand(["main", "--", f"--flagfile={path}"])[2].endswith(f"{path}")


@pytest.mark.parametrize(
    "raw, reason",
    [
        (b"--workdir=caf\xe9\n", "some.flags is not UTF-8 .byte 0xe9 at 13."),
        ("--rounds=3\n".encode("utf-16"), "some.flags is not UTF-8"),
        (b"--rounds=3\0\n", "--rounds="),
        (b"--workdir=a\0b\n", r"--workdir='a\\x00b' holds"),
        (b"--flagfile\n", "--flagfile= names no file"),
        (b"--flagfile=\n", "--flagfile= names no file"),
        (b"--flagfile=./some.flags\n", "--flagfile=./some.flags includes itself"),
        (b"--flagfile=other.flags\n", "--flagfile=some.flags includes itself"),
    ],
)
def test_flagfile_that_is_refused(tmp_path, monkeypatch, raw, reason):
    """What it is and what was found, in one line."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, raw)
    write(tmp_path, b"--flagfile=some.flags\n", "other.flags")
    with pytest.raises(flagfile.UsageError, match=reason) as error:
        parse("--flagfile=some.flags")
    assert "\n" not in str(error.value)


def test_flagfile_that_is_no_file(tmp_path):
    """A pipe is not waited for; a folder and a missing file are named."""
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "pipe", "is a pipe or a device"),
        (tmp_path, "is a folder"),
        (tmp_path / "nowhere", "there is no such file"),
        ("x" * 5000, "cannot be read: File name too long"),
    ):
        with pytest.raises(flagfile.UsageError, match=reason):
            parse(f"--flagfile={path}")


def test_read_returns_what_lines_wrote(tmp_path):
    """Texts by name, also those with spaces, equal signs and odd separators."""
    options = schema.Config(
        dataset="npz:a b=c#.npz", init_from="naïve \u3000x", c_gen=True, rounds=3
    )
    hparams, hashes = resolve.configure({})[1], {"data_sha256": "12"}
    told = flagfile.RunFlags.of(options, hparams, hashes=hashes)
    path = write(tmp_path, "\n".join([*told.lines(), ""]).encode())
    found = flagfile.RunFlags.read(path)
    assert found == told and found.hashes == hashes
    got = found.options
    assert got["dataset"] == options.dataset and got["init_from"] == options.init_from
    assert (got["c_gen"], got["rounds"], got["algo"]) == ("true", "3", "cdkt")
    assert "resume" not in got and "workdir" not in got
    typed = found.typed("cdkt")
    assert (typed["c_gen"], typed["rounds"], typed["partition_alpha"]) == (True, 3, 0.5)


@pytest.mark.parametrize(
    "raw, reason",
    [
        (b"--algo=cdkt\n--rounds\n", "line 2 is not --name=value"),
        (b"--algo=cdkt\nrounds=3\n", "line 2 is not --name=value"),
        (b"--algo=cdkt\n--ro", "line 2 is not --name=value"),
        (b"\0" * 100, "line 1 is not --name=value"),
        (b"--algo=cdkt\n--seed=1\n--seed=2\n", "line 3: --seed has two values"),
        (b"--rounds=3\n", "names no --algo"),
        (b"", "names no --algo"),
        (b"--algo=\xff\n", "is not UTF-8 .byte 0xff at 7."),
    ],
)
def test_read_names_a_damaged_file(tmp_path, raw, reason):
    """Its name and the line, but no contents: it may be a link to another file."""
    with pytest.raises(ValueError, match=f"some.flags.*{reason}") as error:
        flagfile.RunFlags.read(write(tmp_path, raw))
    assert "\n" not in str(error.value)


STRANGE = ("--export_partition=x", "--distributed=h:9,2,1", "--compile_cache=/programs")


def test_what_no_run_records_is_not_taken(tmp_path):
    """Each is named in a note, unless it has its default as in older files."""
    text = "\n".join(("--algo=cdkt", "--rounds=3", *STRANGE, "--flagfile=more.flags"))
    path = write(tmp_path, text.encode())
    found = flagfile.RunFlags.read(path)
    assert found.options == {"algo": "cdkt", "rounds": "3"}
    assert found.note(path).startswith(
        f"note: {path}: --export_partition, --distributed, --compile_cache, --flagfile "
    )
    older = write(tmp_path, b"--algo=cdkt\n--compile_cache=\n--resume=false\n")
    assert flagfile.RunFlags.read(older).note(older) == ""


def test_a_record_names_less_than_a_flagfile(in_file, tmp_path, capsys):
    """What a user's own file may name, `run.flags` may not, also by another file."""
    lines = ("--algo=cdkt", *STRANGE, f"--workdir={tmp_path}")
    got = parse(in_file(*lines))
    assert (got["export_partition"], got["workdir"]) == ("x", str(tmp_path))
    assert capsys.readouterr().err == ""
    record = in_file(*lines, name="run.flags")
    for argument in (record, in_file(record, name="mine.flags")):
        assert parse(argument, "--rounds=3") == {"algo": "cdkt", "rounds": 3}
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("note: ") and "--export_partition" in line
    assert parse(record, "--workdir=a")["workdir"] == "a"


def test_a_file_called_run_flags_that_no_run_wrote(in_file):
    """One line says how to use it."""
    with pytest.raises(flagfile.UsageError, match="names no --algo.*; rename it if"):
        parse("--algo=cdkt", in_file("--rounds=3", name="run.flags"))


def test_a_chain_of_flagfiles_has_an_end(in_file, tmp_path):
    """Fifty are read, and more are one line."""
    for number in range(2000):
        in_file(f"--flagfile={tmp_path / str(number + 1)}", name=str(number))
    with pytest.raises(flagfile.UsageError, match="/50 is the end of a long chain"):
        parse(f"--flagfile={tmp_path / '0'}")
    in_file("--rounds=3", name="50")
    assert parse(f"--flagfile={tmp_path / '1'}")["rounds"] == 3


def test_read_of_a_file_that_is_not_there(tmp_path):
    """An OSError: callers may ask whether there is a run at all."""
    with pytest.raises(FileNotFoundError):
        flagfile.RunFlags.read(tmp_path / "run.flags")


@pytest.mark.parametrize("text", ["a\n--seed=7", "a\u2028b"])
def test_a_value_cannot_write_a_second_flag(text):
    """Neither through the Python entry nor past it."""
    with pytest.raises(ValueError, match="--data_dir=.* holds"):
        resolve.configure({"algo": "fedavg", "data_dir": text})
    options = schema.Config(data_dir=text)
    with pytest.raises(ValueError, match="--data_dir=.* holds"):
        flagfile.RunFlags.of(options)


@pytest.mark.parametrize(
    "argument, line",
    [
        ("--rounds=2.5", "--rounds='2.5': expected an integer"),
        ("--rounds=" + "9" * 5000, "--rounds='99"),
        ("--client_lr=a:b", "--client_lr='a:b': expected a number"),
        ("--client_lr=1e39", "--client_lr=1e+39: expected at most 3.402823466e+38"),
        ("--c_gen=2", "--c_gen='2': expected true or false"),
        ("--norounds", "--norounds: --rounds is not a switch; write --rounds=value"),
        ("--noc_gen=3", "--noc_gen=3 does not take an argument"),
        ("", "'' is not a flag"),
    ],
)
def test_values_in_plain_words(argument, line):
    """What came and what was expected, without Python's own words."""
    with pytest.raises(flagfile.UsageError) as error:
        parse("--algo=fedavg", argument)
    assert str(error.value).startswith(line)


def test_a_line_is_never_longer_than_a_page(capsys):
    """The beginning and the end of a long one are printed."""
    with pytest.raises(SystemExit):
        flags.fail("begin " + "x" * 10**6 + " end")
    line = capsys.readouterr().err
    assert line.startswith("error: begin x") and line.endswith("x end\n")
    assert len(line) < 1000


@pytest.mark.parametrize(
    "before, after, expected",
    [
        ("['-m']", "pass", (130, "error: interrupted\n")),
        ("['-m']", "launch.imported()", (-signal.SIGINT, "KeyboardInterrupt\n")),
        ("['notebook']", "pass", (-signal.SIGINT, "KeyboardInterrupt\n")),
    ],
    ids=["while a command is imported", "in the command", "in a notebook"],
)
def test_interrupt_during_imports(before, after, expected):
    """`python -m launch.X` has "-m" for its name until X begins."""
    # pytest started by `nohup` or behind `&` hands down that interrupts are ignored.
    code = (
        "import os, signal, sys; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.argv = {before}; import launch; {after}; "
        "os.kill(os.getpid(), signal.SIGINT)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == expected[0]
    assert done.stderr.endswith(expected[1])
    assert ("Traceback" in done.stderr) == (expected[0] < 0)


def test_same_algo_twice_is_fine(in_file):
    """Only two different ones are refused."""
    assert parse(in_file("--algo=local"), "--algo=local")["algo"] == "local"
    with pytest.raises(flagfile.UsageError, match="two different --algo in one comm"):
        parse("--algo=local", "--algo=fedavg")


def test_a_second_sweep_is_refused(in_file):
    """It replaced the first without a word; one beside a flagfile's is meant."""
    given = "--sweep=client_lr=0.1,0.2", "--sweep=weight_decay=0.1"
    for first in (given[:1], ("--sweep", "client_lr=0.1,0.2")):
        with pytest.raises(flagfile.UsageError, match="--sweep='.*0.2;weight_decay"):
            parse(*first, given[1])
    with pytest.raises(flagfile.UsageError, match="--sweep='client_lr=0.1,0.2,0.3'"):
        parse(given[0], "--sweep= --client_lr=0.20,0.3;")
    assert parse(in_file(given[0]), given[1])["sweep"] == "weight_decay=0.1"
    assert parse(given[0], given[0])["sweep"] == "client_lr=0.1,0.2"


def test_help_of_the_default_and_in_any_place(capsys, in_file):
    """`--help` alone is CDKT's; --algo may stand in a flagfile."""
    with pytest.raises(SystemExit):
        main.main(["main", "--help"])
    assert "--label_mix=" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main.main(["main", "--help", in_file("--algo=fedavg")])
    assert "--label_mix=" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "form", ["--preset=pfllib", "--preset pfllib", "-preset=pfllib"]
)
def test_help_has_the_presets_defaults_in_any_form(form, capsys):
    """As absl takes options."""
    with pytest.raises(SystemExit):
        main.main(["main", "--algo=fedavg", *form.split(), "--help"])
    assert "(--preset=pfllib)" in capsys.readouterr().out


def test_contract_names_exist():
    """The names in architecture.md's list are options of every or some algorithm."""
    common = """algo preset dataset data_dir model client_model partition
        partition_alpha partition_seed classes_per_client test_split num_clients
        clients_per_round rounds local_epochs batch_size client_lr client_lr_decay
        client_optimizer client_momentum weight_decay clip_norm seed num_seeds
        eval_every checkpoint_every workdir resume client_chunk devices
        precision""".split()
    for algo in set(algorithms.ALGORITHMS) - {"majority"}:  # which trains nothing
        assert set(common) <= registry.fields_of(algo).keys(), algo
    assert "optimizer_state" in registry.fields_of("fedd2s")
    assert "personal_from" in registry.fields_of("fedper")
    cdkt = """client_distill_weight server_distill_weight label_mix temperature
        server_lr server_epochs transfer server_distance client_distance""".split()
    assert set(cdkt) <= registry.fields_of("cdkt").keys()


def test_experiment_refuses_unknown_keywords():
    """The Python entry has the command line's names and no others."""
    with pytest.raises(ValueError, match="--round is not.*did you mean --rounds"):
        build.experiment(algo="fedavg", round=3)
    with pytest.raises(ValueError, match="--label_mix belongs to cdkt"):
        build.experiment(algo="fedavg", label_mix=0.5)
    with pytest.raises(ValueError, match="--algo=feddavg"):
        build.experiment(algo="feddavg")


def test_lines_replay_a_configuration(blobs):
    """RunFlags.lines -> parse -> the same resolved options."""
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
    told = flagfile.RunFlags.of(made.config, made.hparams)
    again = build.experiment(**parse(*told.lines()))
    assert again.config == made.config
    assert again.hparams == made.hparams


def test_workdir_names(blobs):
    """runs/<algo>-<dataset>-seed<seed>[-<last seed>]."""

    def name(**values):
        return workdir.default_name(schema.Config(**values))

    assert name(algo="local", dataset="mnist_5k") == "runs/local-mnist_5k-seed0"
    assert name(algo="cdkt", dataset="emnist/byclass", seed=2, num_seeds=3) == (
        "runs/cdkt-emnist_byclass-seed2-4"
    )
    assert name(algo="fedavg", dataset=blobs) == "runs/fedavg-blobs-seed0"


@pytest.mark.parametrize(
    "summary, rounds, window",
    [
        ("last", 30, (30,)),
        ("mean_last10", 40, tuple(range(31, 41))),
        ("mean_last10", 30, tuple(range(24, 31))),
        ("mean_last10", 12, (10, 11, 12)),
        ("mean_last10", 3, (3,)),
        ("median_last10", 100, tuple(range(90, 100))),
        ("median_last10", 12, (9, 10, 11)),
        ("median_last10", 3, (2,)),
        ("median_last10", 1, (1,)),
    ],
)
def test_summary_window(summary, rounds, window):
    """Indices 90..99 of 100 for the median: the states that rounds begin with.

    Of short runs a quarter: ten of twelve rounds would be nearly the whole curve.
    """
    assert summaries.window(summary, rounds) == window


def test_every_choice_has_help():
    """Choices of --partition are the partitions there are."""
    field = registry.fields_of("fedavg")["partition"]
    assert set(field.metadata["choices"]) == set(partitions.PARTITIONS)
