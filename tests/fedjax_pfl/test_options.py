"""Options: checked, and split into what is compiled and what is traced."""

import dataclasses

import jax
import pytest

from fedjax_pfl import local_training, options


def test_nearest_names():
    """One that begins so comes before one that is alike."""
    known = ["client_auc", "client_accuracy_std", "client_accuracy", "emnist/byclass"]
    wanted = {"client_acc": "client_accuracy", "client_au": "client_auc"}
    wanted |= {"Client_AUK": "client_auc", "emnist": "emnist/byclass"}
    for name, near in wanted.items():
        assert options.nearest(name, known) == f"; did you mean {near}?"
    assert not options.nearest("zzzz", known)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "ValueError"),
        (" \n", "ValueError"),
        ("\nfirst\t one\r\n  second\x1b[31m", "first one second?[31m"),
        ("word " * 40, ("word " * 40).strip()),
        ("word " * 41, "word " * 39 + "..."),
        ("bad: " + "x" * 200, "bad: " + "x" * 191 + " ..."),
    ],
)
def test_an_error_in_one_line(text, reason):
    """A long line is cut between words, where it has words near its end."""
    assert options.reason(ValueError(text)) == reason
    assert len(reason) <= 200


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"client_lr": -1.0}, "--client_lr=-1.0: expected at least 0"),
        ({"client_lr": float("nan")}, "finite"),
        ({"client_optimizer": "sgdm"}, "one of sgd, adam"),
        ({"client_lr_decay": 0.0}, "more than 0"),
        ({"client_momentum": 1.5}, "at most 1"),
    ],
)
def test_options_are_validated(values, words):
    """One line with the flag, what came and what is allowed."""
    with pytest.raises(ValueError, match=words):
        options.validate(local_training.LocalTraining(**values))


def test_what_is_no_option_has_no_bounds():
    """A notebook's own dataclass."""

    @dataclasses.dataclass
    class Plain:
        scale: float = 1.0

    options.validate(Plain(-1e9))
    with pytest.raises(ValueError, match="--scale=inf: expected a finite number"):
        options.validate(Plain(float("inf")))


def test_floats_are_split_from_structure():
    """Traceable floats leave; a zero that switches code off stays."""
    hparams = local_training.LocalTraining(client_lr=0.3, clip_norm=2.0)
    structure, floats = options.split_floats(hparams)
    assert floats == {"client_lr": 0.3, "client_lr_decay": 1.0, "clip_norm": 2.0}
    assert dataclasses.replace(structure, **floats) == hparams
    other = local_training.LocalTraining(client_lr=0.7, clip_norm=5.0)
    assert options.split_floats(other)[0] == structure
    without = local_training.LocalTraining(client_lr=0.3)
    assert options.split_floats(without)[0].clip_norm == 0
    assert "clip_norm" not in options.split_floats(without)[1]


def test_a_static_float_is_structure():
    """It stays, so that what it decides is compiled for anew."""

    @dataclasses.dataclass(frozen=True)
    class Sized:
        share: float = options.option(0.5, "share", is_static=True)
        rate: float = options.option(0.1, "rate")

    structure, floats = options.split_floats(Sized(share=0.25, rate=0.2))
    assert structure == Sized(share=0.25, rate=0.0) and floats == {"rate": 0.2}


def test_off_is_a_static_zero():
    """A traced number is always on, also where it is 0."""
    assert options.is_off(0) and options.is_off(0.0) and not options.is_off(1e-9)
    seen = []
    jax.jit(lambda x: seen.append(options.is_off(x)))(0.0)
    assert seen == [False]


def test_options_without_effect_are_refused():
    """Unless they are at their default, or traced."""
    changed = local_training.LocalTraining(client_lr=0.3)
    message = "--client_lr=0.3 has no effect without clients; give --client_lr=0.05"
    with pytest.raises(ValueError, match=message):
        options.refuse(changed, ("client_lr",), "without clients")
    options.refuse(changed, ("batch_size",), "without clients")

    def traced(rate):
        values = local_training.LocalTraining(client_lr=rate)
        options.refuse(values, ("client_lr",), "without clients")
        return rate

    assert jax.jit(traced)(0.25) == 0.25


def test_points_lack_different_options():
    """An option with two needs is without effect where each point lacks one."""

    @dataclasses.dataclass(frozen=True)
    class Own:
        one: float = options.option(0.0, "help")
        two: float = options.option(0.0, "help")
        both: float = options.option(0.0, "", needs={"one": (1,), "two": (1,)})

    points = Own(1.0, 0.0, 5.0), Own(0.0, 1.0, 5.0)
    (line,) = options.conflicts(*points)
    assert line.startswith("--both=5.0 has no effect with --two=0.0; omit it")
    assert not list(options.conflicts(*points, Own(1.0, 1.0, 5.0)))


def test_a_choice_that_ends_in_a_path():
    """`file:PATH` stands for any file."""

    @dataclasses.dataclass(frozen=True)
    class Own:
        kind: str = options.option("iid", "help", choices=("iid", "file:PATH"))

    for kind in ("iid", "file:a", "file:PATH"):
        options.validate(Own(kind))
    for kind in ("file", "a", ""):
        with pytest.raises(ValueError, match="expected one of iid, file:PATH"):
            options.validate(Own(kind))


@pytest.mark.parametrize("name", ["fmnist", "FMNIST", "F-MNIST"])
def test_a_name_in_short(name):
    """The first letter of its first word stands for that."""
    found = options.nearest(name, ["mnist", "fashion_mnist", "femnist"])
    assert found == "; did you mean fashion_mnist?"
