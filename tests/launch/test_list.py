"""What a model costs, printed: the rows of DepthFL's Tables 1 and 8."""

import pytest

from launch import list as listing


@pytest.fixture
def shown(capsys):
    """Runs the command; returns its words, a list for each line."""

    def run(*arguments):
        listing.command(["list", *arguments])
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    return run


def table(lines, head):
    """The rows under a head."""
    start = 1 + next(i for i, words in enumerate(lines) if words[:1] == [head])
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    return lines[start:end]


def test_model_with_exits(shown):
    """Stages with their exits, then what a client of each level holds."""
    lines = shown("--model=depth_convnet", "--num_classes=10")
    assert lines[0][0] == "depth_convnet,"
    assert table(lines, "stage") == [
        ["stage1", "16x16x64", "31,434", "1,024", "3,462,794"],
        ["stage2", "8x8x128", "146,698", "1,536", "20,169,994"],
        ["stage3", "4x4x256", "571,914", "3,072", "20,048,394"],
        ["stage4", "4x4x512", "1,185,802", "1,024", "18,912,266"],
    ]
    assert table(lines, "level") == [
        ["1", "31,434", "1,024", "3,462,794"],
        ["2", "178,132", "2,560", "23,632,788"],
        ["3", "750,046", "5,632", "43,681,182"],
        ["4", "1,935,848", "6,656", "62,593,448"],
    ]


def test_model_with_widths(shown):
    """One level; the widths of Table 1 and, as Table 8 has them, bases of half."""
    lines = shown("--model=convnet", "--num_classes=10", "--example_shape=32,32,3")
    assert table(lines, "stage")[-1] == ["fc", "10", "5,130", "0", "5,130"]
    whole = ["1,557,066", "1,920", "58,889,226"]
    assert table(lines, "level") == [["1", *whole]]
    assert table(lines, "width") == [
        ["1/4", "98,970", "480", "4,105,482"],
        ["2/4", "391,466", "960", "15,288,842"],
        ["3/4", "877,498", "1,440", "33,550,090"],
        ["4/4", *whole],
    ]
    assert table(lines, "models") == [
        ["1", "391,466", "960", "15,288,842"],
        ["2", "782,932", "1,920", "30,577,684"],
        ["3", "1,174,398", "2,880", "45,866,526"],
        ["4", "1,565,864", "3,840", "61,155,368"],
    ]


def test_options_reach_the_model(shown):
    """Classes, shape and width; a model with one exit."""
    arguments = ("--num_classes=3", "--example_shape=5", "--model_width=0.5")
    lines = shown("--model=mlp", *arguments)
    assert lines[0] == "mlp, 3 classes, examples of 5, width 0.5".split()
    # An affine map, its bias and its relu.
    assert table(lines, "stage") == [
        ["dense1", "64", "384", "0", "448"],
        ["dense2", "32", "2,080", "0", "2,112"],
        ["dense3", "3", "99", "0", "99"],
    ]
    assert table(lines, "level") == [["1", "2,563", "0", "2,659"]]
    # It has narrower forms, a model that flattens maps has none.
    flattens = shown("--model=m1", "--example_shape=32,32,3")
    found = [["width"] in [words[:1] for words in one] for one in (lines, flattens)]
    assert found == [True, False]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model=resnet999"], ["--model=resnet999", "depth_convnet"]),
        (["--model=mlp", "--num_classes=1"], ["--num_classes=1", "at least 2"]),
        (["--model=mlp", "--num_classes=two"], ["--num_classes='two'", "integer"]),
        (["--model=mlp", "--num_classes=9999999999"], ["at most 2147483647"]),
        (["--model=mlp", "--example_shape=32x32"], ["--example_shape='32x32'"]),
        (["--model=mlp", "--example_shape=32,,3"], ["such as 32,32,3"]),
        (["--model=mlp", "--example_shape=32,0,3"], ["0 numbers"]),
        (
            ["--model=mlp", "--example_shape=99999,99999,3"],
            ["expected 1 to 2147483647"],
        ),
        (["--model=mlp", "--model_width=0"], ["--model_width=0", "more than 0"]),
        (["--model=fedavg_cnn", "--example_shape=8,8,1"], ["not fit", "[8, 8, 1];"]),
        (
            ["--model=depth_resnet18", "--example_shape=28,28,1"],
            ["28x28); give --example_shape=32,32,3", "a multiple of 8, these are"],
        ),
        (["--model=masked_lm"], ["needs rows of tokens); give --example_shape=64"]),
        (
            ["--model=masked_lm", "--example_shape=64", "--model_width=0.3"],
            ["8 heads do not divide", "; give another --model_width"],
        ),
        (["--num_classes=5"], ["--num_classes has no effect", "--model="]),
        (["--modle=mlp"], ["modle"]),
        (["resnet18"], ["'resnet18' is not a flag"]),
    ],
)
def test_bad_input_is_one_line(arguments, parts, capsys):
    """On stderr, with exit code 2, and nothing is printed."""
    with pytest.raises(SystemExit) as stop:
        listing.command(["list", *arguments])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


def test_names_fit_a_terminal(monkeypatch, capsys):
    """Texts continue below themselves there, and are one line elsewhere."""
    listing.main()
    plain = capsys.readouterr().out
    assert max(map(len, plain.splitlines())) > 80
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    listing.main()
    shown = capsys.readouterr().out
    assert plain.split() == shown.split()
    assert all(len(one) <= 80 or " " not in one.strip() for one in shown.splitlines())
