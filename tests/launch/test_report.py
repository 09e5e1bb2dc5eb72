"""The page about runs: its numbers, its pictures, and what it may not load."""

import json
import pathlib
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import algorithms
from launch import build, report, reproduce
from launch.folder import record
from launch.show import drawn, looks, sheets, svg, words
from launch.show import page as page_lib
from tests import synthetic

OPTIONS = {
    "num_clients": 4,
    "partition": "client_dirichlet",
    "test_split": "client_share",
    "model": "mlp",
    "rounds": 2,
    "eval_every": 1,
    "num_seeds": 2,
    "summary": "last",
    "devices": 1,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three finished runs on the same clients."""
    source = synthetic.blobs(240, (8, 8, 1), 4)
    folder = tmp_path_factory.mktemp("runs")
    for algo in ("fedavg", "local", "fedper"):
        build.experiment(
            algo=algo,
            dataset=(source.image, source.label),
            workdir=str(folder / algo),
            preset="none",
            **OPTIONS,
        ).run(progress=False)
    return [folder / algo for algo in ("fedavg", "local", "fedper")]


class Page(HTMLParser):
    """The cells of a page's tables, its text, and what it would load."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.loads, self._open = [], [], []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.loads += [attrs[n] for n in ("src", "href", "data") if n in attrs]
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self._open[-3:]) and self.rows:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass


def test_numbers_are_the_summaries(folders, undrawn):
    """Means, spreads, differences to the control, bytes; the best in bold."""
    text = page_lib.page(page_lib.read(folders))
    page = Page(text)
    head = page.rows[0]
    rows = {r[0].lower(): dict(zip(head, r, strict=True)) for r in page.rows[1:4]}
    summaries = {f.name: json.loads((f / "summary.json").read_text()) for f in folders}
    name = "client_accuracy"
    base = np.array(summaries["fedavg"]["metrics"][name]["per_seed"])
    for algo, summary in summaries.items():
        one = summary["metrics"][name]
        wanted = f"{100 * one['mean']:.1f} ± {100 * one['std']:.1f}"
        assert rows[algo]["Client (UA)"] == wanted
        gap = 100 * (np.array(one["per_seed"]) - base)
        wanted = (
            "–" if algo == "fedavg" else f"{gap.mean():+.1f} ± {gap.std(ddof=1):.1f}"
        )
        assert rows[algo]["against FedAvg"] == wanted
        sent = sum(summary["metrics"][f"bytes_{way}"]["mean"] for way in ("up", "down"))
        assert rows[algo]["MB total"] == f"{sent / 1e6:,.1f}"
    best = max(summaries, key=lambda algo: summaries[algo]["metrics"][name]["mean"])
    assert f"<b>{rows[best]['Client (UA)']}</b>" in text
    assert (
        f"{algorithms.title(best)} reaches {rows[best]['Client (UA)']} %" in page.text
    )
    assert rows["local"]["Global"] == "–" and rows["local"]["MB total"] == "0.0"


def test_points_of_a_sweep_beside_another_run(folders):
    """None is the best, as test rows would choose the point."""
    first, other, _ = page_lib.read(folders)
    points = [
        first._replace(name=f"rate {x}", run=first.run._replace(point={"client_lr": x}))
        for x in (0.1, 0.2)
    ]
    assert not page_lib._has_best([*points, other])
    line = "No value is marked as the best, as rate 0.1, rate 0.2 are points of a sweep"
    assert line in page_lib._best([*points, other])
    assert page_lib._has_best([points[0], other])


def test_it_is_whole(folders):
    """Pictures inside, both schemes, nothing from the network."""
    text = page_lib.page(page_lib.read(folders))
    page = Page(text)
    assert all(part.startswith("#") for part in page.loads)
    assert not re.search(r"@import|url\((?!#)|<script|<link", text)
    # Two metrics over rounds; messages, seconds; fairness, gain; losses; the partition.
    assert text.count("<figure") == 10
    assert svg.INK not in text and "prefers-color-scheme: dark" in text
    assert "over its local model" in page.text
    # Of arrays in memory: only Python can run it again.
    assert "--algo" in page.text and "build.load(" in page.text
    assert len(text) < 3_000_000


def test_curves_that_move_come_first(folders, undrawn):
    """A constant metric is named and not drawn; a single run has no legend."""
    entry = page_lib.read(folders[:1])[0]
    section = drawn.sections([entry], words.metric("client_accuracy"))[0]
    titles = [one["caption"] for one in section["figures"]]
    assert titles == ["Client (UA).", "Global."] and not section["note"]
    records = [row | {"client_accuracy": 0.5} for row in entry.run.records]
    still = entry._replace(run=entry.run._replace(records=records))
    section, *others = drawn.sections([still], words.metric("client_accuracy"))
    assert [one["caption"] for one in section["figures"]] == ["Global."]
    assert section["note"] == "Not drawn, as they hardly change: Client (UA)."
    assert not any("over messages" in one["title"] for one in others)
    text = page_lib.page([entry])
    assert text.index("Over the rounds") < text.index("Results")
    assert '<div class="legend">' not in text and "is bold" not in text


def test_which_runs_have_the_same_clients(folders):
    """By their rows, which may differ where counts do not; availability is no row."""
    one, other = (page_lib.Entry("", None, record.read(path)) for path in folders[:2])
    assert drawn.is_same(one, other)
    run = one.run
    changed = run._replace(hashes=run.hashes | {"split_sha256": "of other rows"})
    assert not drawn.is_same(one._replace(run=changed), other)
    changed = changed._replace(flags=run.flags | {"availability": "0.5"})
    assert drawn.is_same(one._replace(run=changed), other)
    flags = run.flags | {"dataset": "another"}
    changed = run._replace(flags=flags, hashes=run.hashes | {"data_sha256": "of it"})
    assert not drawn.is_same(one._replace(run=changed), other)


def test_samples_of_clients_are_not_ranked_beside_all(folders, undrawn):
    """No value is marked, and a sentence says why."""
    first, other = page_lib.read([folders[0], folders[2]])
    flags = other.run.flags | {"eval_sample": "2"}
    text = Page(
        page_lib.page([first, other._replace(run=other.run._replace(flags=flags))])
    )
    assert "as the runs differ in clients measured" in text.text


def test_columns_of_one_value(folders, undrawn):
    """They are a sentence below the table, and machines are lines if they differ."""
    first, second = page_lib.read([folders[0], folders[2]])
    same = second._replace(run=second.run._replace(summary=first.summary))
    page = Page(page_lib.page([first, same]))
    head = page.rows[0]
    assert head == ["run", "Client (UA)", "against FedAvg"]
    assert "In all runs: Global " in page.text and "MB total" in page.text
    assert "Finished 20" in page.text and "Ran on" not in page.text
    elsewhere = first.summary | {"cpu": "Another", "cores": 64}
    other = second._replace(run=second.run._replace(summary=elsewhere))
    page = Page(page_lib.page([first, other]))
    assert "on 2 machines or versions." in page.text
    assert "FedPer: 1 device (cpu), Another with 64 cores" in page.text


def test_colours_on_a_dark_page():
    """All lines contrast with a card of the dark page."""

    def luminance(color):
        parts = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return np.dot([0.2126, 0.7152, 0.0722], linear)

    assert len(set(looks.ON_DARK)) == len(looks.COLORS)
    for color in looks.ON_DARK:
        assert (luminance(color) + 0.05) / (luminance("#1c2127") + 0.05) > 3
    dark = svg.line(looks.looks(["a"])["a"])
    assert f"var(--c0, {looks.COLORS[0]})" in dark


def test_sheets_side_by_side():
    """A row for each method and a column for each value; unknown ones are notes."""
    grids = [
        sheets.Grid(
            "A", "sizes", ["ms", "MB"], [("1", ["5", "–"]), ("2", ["6", "no"])]
        ),
        sheets.Grid("B", "sizes", ["ms"], [("2", ["7"])]),
    ]
    found = sheets.side_by_side(sheets.Sheet("T", ["n"], grids))
    rows = [("A", ["5", "6"]), ("B", ["–", "7"])]
    assert found.grids == [sheets.Grid("", "ms, by sizes", ["1", "2"], rows)]
    assert found.notes == ["n", "MB: no."]


def test_names_are_text(folders, undrawn):
    """Whatever a title holds."""
    text = page_lib.page(page_lib.read(folders[:1]), title="<b>&</b>")
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in text
    assert "to see the gain of each client" in text


def test_runs_of_two_data_sets(folders, undrawn, tmp_path):
    """No difference between their accuracies is told; differing rules are."""
    source = synthetic.blobs(240, (8, 8, 1), 4)
    np.savez(tmp_path / "other.npz", x=source.image[::-1], y=source.label)
    options = OPTIONS | {"summary": "mean_last10", "workdir": str(tmp_path / "run")}
    options["dataset"] = f"npz:{tmp_path / 'other.npz'}"
    build.experiment(algo="fedavg", preset="none", **options).run(progress=False)
    page = Page(page_lib.page(page_lib.read([folders[0], tmp_path / "run"])))
    assert "has another data set." in page.text and "points against" not in page.text
    assert "summaries differ: last or mean_last10 (--summary)" in page.text
    assert f"--dataset=npz:{tmp_path}/other.npz" in page.text
    assert "best on arrays, npz:other.npz?" in page.text
    assert f"build.load('{folders[0]}', dataset=...).run()" in page.text


def test_a_table_of_a_paper(folders, undrawn):
    """Its notes, titles and numbers, as they are in Markdown."""
    grids = [
        sheets.Grid("IID", "1 seed(s)", ["A", "B"], [("x", ["1.25", "2"])]),
        sheets.Grid("", "Minus x", ["A"], [("y", ["3 ± 1"])]),
    ]
    sheet = sheets.Sheet("T", ["Data set: `d`.", "A note."], grids)
    page = Page(page_lib.page(page_lib.read(folders[:1]), tables=[sheet]))
    for text in ("Data set: d.", "A note.", "IID, 1 seed(s)", "Minus x"):
        assert text in page.text
    at = page.rows.index(["", "A", "B"])
    assert page.rows[at + 1] == ["x", "1.25", "2"]
    assert page.rows[at + 2 : at + 4] == [["", "A"], ["y", "3 ± 1"]]
    assert sheets.lines(["a|b"], [("c|d", ["1"])])[::2] == [
        r"| | a\|b |",
        r"| c\|d | 1 |",
    ]
    assert sheets.markdown(sheet) == (
        "### T\n\nData set: `d`.\nA note.\n\n**IID**, 1 seed(s)\n\n| | A | B |\n"
        "|---|---|---|\n| x | 1.25 | 2 |\n\nMinus x\n\n| | A |\n|---|---|\n"
        "| y | 3 ± 1 |\n"
    )


def test_the_command(folders, undrawn, tmp_path, capsys):
    """A page, or one line."""
    (tmp_path / ".html").mkdir()
    path = tmp_path / "deep" / "page.html"
    argv = ["report", *map(str, folders), f"--output={path}"]
    report.command([*argv, "--control=fedper"])
    assert capsys.readouterr().out.split() == [str(path)]
    assert "against FedPer" in path.read_text()
    table = path.with_suffix(".md")
    report.command([*argv, "--control=fedper", f"--output={table}"])
    assert capsys.readouterr().out.split() == [str(table)]
    head, line, *rows, _, _ = table.read_text().replace("**", "").splitlines()[:7]
    cells = [row.strip("| ").split(" | ") for row in (head, *rows)]
    assert [["run", *cells[0]], *cells[1:]] == Page(path.read_text()).rows[:4]
    assert set(line) == set("|-") and "**" in table.read_text()
    for more, code, part in (
        (["--control=nix"], 2, "--control=nix: expected one of FedAvg"),
        ([str(tmp_path)], 2, "holds no run that has measured"),
        (["--output=t.md", "--title=T"], 2, "--title=T has no effect with --output="),
        (["--output=t.pdf"], 2, "--output=t.pdf: expected a name that ends in .html"),
        ([f"--output={tmp_path}/.html"], 1, f"--output={tmp_path}/.html"),
    ):
        with pytest.raises(SystemExit) as stop:
            report.command([*argv, *more])
        error = capsys.readouterr().err
        assert stop.value.code == code and part in error and error.count("\n") == 1
    with pytest.raises(SystemExit):
        report.command(["report"])


def test_of_a_reproduced_table(folders, undrawn, tmp_path, monkeypatch, capsys):
    """Cells that are done, under their names; without one there is no page."""
    monkeypatch.chdir(tmp_path)
    argv = ["reproduce", "cdkt.table1", "--dataset=mnist_5k", "--row=FedAvg"]
    with pytest.raises(SystemExit):
        reproduce.command([*argv, "--dry_run", "--report=page.html"])
    assert "no cell is finished" in capsys.readouterr().err
    entries = page_lib.read(folders[:2], ["one, IID", "two, IID"])
    grid = sheets.Grid("", "1 seed(s)", ["A"], [("x", ["99.5 / 98.0 / -1.5"])])
    sheet = sheets.Sheet("T", [], [grid])
    page = Page(page_lib.page(entries, tables=[sheet], title=sheet.title))
    assert "99.5 / 98.0 / -1.5" in page.text
    first = [row[0] for row in page.rows]
    assert first[:2] == ["", "x"]  # the paper's table before that of the runs
    assert first[2:5] == ["run", "one, IID", "two, IID"]


def entry(name, values, kind="accuracy"):
    """A finished run with a client's value f64[seeds, clients], by name."""
    values = np.array(values, float)
    means = values.mean(1)
    of = {"mean": means.mean(), "std": 1.0, "per_seed": list(means)}
    flags = {"algo": name, "rounds": "4", "eval_sample": "0", "num_clients": "2"}
    flags["dataset"] = "arrays"
    summary = {"metrics": {f"client_{kind}": of}, "summary": "last"}
    seeds = np.arange(len(values))
    rows = [{"round": 4, "seed": int(seed)} for seed in seeds]
    clients = {kind: values[:, None], "seeds": seeds, "rounds": np.array([4])}
    run = record.Record(pathlib.Path(name), flags, rows, clients, summary)
    return page_lib.Entry(name, looks.looks([name])[name], run)


def test_runs_that_diverged_are_not_ranked():
    """Neither bold nor ahead, and no legend says so."""
    metric = words.metric("client_accuracy")
    pair = [entry(n, [[0.2, 0.4]]) for n in ("fedavg", "local")]
    alone = [one.run._replace(records=[{"round": 4, "diverged": 2}]) for one in pair]
    both = [one._replace(run=run) for one, run in zip(pair, alone, strict=True)]
    assert page_lib._answer(both, metric, both[0]) == "All runs diverged."
    for entries in (both, [both[0], pair[1]]):
        assert not any(cell.is_best for cell in page_lib._cells(entries, metric))
        assert not page_lib._best(entries)
    assert page_lib._best(pair) == " The best value of a metric is bold."


def test_rounds_of_runs_that_stopped_early():
    pair = [entry(n, [[0.2, 0.4]]) for n in ("fedavg", "local")]
    assert page_lib._rounds(pair) == "4 rounds"
    pair[1].summary.update(rounds=3, stopped_early=True)
    assert page_lib._rounds(pair) == "4 or 3 of 4 rounds (stopped early)"


def test_values_without_a_common_seed():
    pair = [entry(n, [[0.2, 0.4]]) for n in ("fedavg", "local")]
    for number, one in enumerate(pair):
        of = one.summary["metrics"]["client_accuracy"]
        of |= {"seeds": [number], "of_seeds": 2}
    text = page_lib._answer(pair, words.metric("client_accuracy"), pair[1])
    assert text.endswith("has no value of the same seed.")


def test_a_folder_that_is_given_twice(folders, undrawn):
    """It is one run, unless both have names of their own."""
    twice = [folders[0], folders[1], folders[0].parent / "." / "fedavg"]
    assert [one.name for one in page_lib.read(twice)] == ["FedAvg", "Local"]
    named = page_lib.read(twice[::2], ["a", "b"])
    assert [one.name for one in named] == ["a", "b"]
    page_lib.page(named)


def test_a_mean_of_some_seeds_is_not_the_best():
    """As in a table: the other seeds diverged."""
    pair = [entry(n, [[x, x]] * 2) for n, x in (("fedavg", 0.5), ("local", 0.9))]
    of = pair[1].summary["metrics"]["client_accuracy"]
    of |= {"seeds": [1], "of_seeds": 2, "per_seed": [0.9]}
    metric = words.metric("client_accuracy")
    assert not page_lib._cells(pair, metric)[1].is_best
    assert page_lib._answer(pair, metric, pair[0]).startswith("fedavg reaches 50.0")


def test_a_hash_with_a_public_set_tells_nothing_of_the_data():
    """Runs of one data set are compared, also where one has public images."""
    pair = [entry(n, [[x, x]] * 2) for n, x in (("fedavg", 0.5), ("fedmd", 0.9))]
    hashes, flags = {"data_sha256": "a"}, {"public_set": "npz:public.npz"}
    flags |= pair[1].run.flags
    runs = pair[0].run._replace(hashes=hashes), pair[1].run._replace(flags=flags)
    runs = runs[0], runs[1]._replace(hashes={"data_sha256": "b"})
    pair = [one._replace(run=run) for one, run in zip(pair, runs, strict=True)]
    text = page_lib._answer(pair, words.metric("client_accuracy"), pair[0])
    assert "+40.0" in text and "another data set" not in text
    for examples, is_other in (("xx", False), ("xy", True)):
        for one, digest in zip(runs, examples, strict=True):
            one.hashes["examples_sha256"] = digest
        text = page_lib._answer(pair, words.metric("client_accuracy"), pair[0])
        assert ("has another data set" in text) == is_other


def test_classes_with_other_names():
    """Are not named by those of one run, and the page says that they differ."""
    pair = [entry(n, [[x, x]] * 2) for n, x in (("fedavg", 0.5), ("local", 0.4))]
    names = np.array(["ant", "bee"]), np.array(["cow", "dog"])
    for (one, found), is_known in (((names[0], names[0]), True), (names, False)):
        both = [
            each._replace(run=each.run._replace(clients=each.run.clients | more))
            for each, more in zip(
                pair, ({"class_names": one}, {"class_names": found}), strict=True
            )
        ]
        differ = page_lib._unlike(both)
        assert ("names of classes" in differ) != is_known


def test_names_in_markdown():
    """A tag would be dropped, and a line's end would end the row."""
    (*_, row) = sheets.lines(["a|b"], [("<c>\nd", ["1"])])
    assert row == "| &lt;c> d | 1 |"


def test_lower_perplexities_are_ahead():
    """In as many seeds as the page says."""
    given = ("fedavg", [20, 20, 32]), ("local", [25, 25, 30])
    pair = [entry(n, [[x, x] for x in one], "perplexity") for n, one in given]
    metric = words.metric("client_perplexity")
    text = page_lib._answer(pair, metric, pair[1])
    assert text.startswith("fedavg reaches") and "ahead in 2 of 3 seeds" in text


def test_gains_are_above_the_line(monkeypatch):
    """A dot has a client's local model across, and the method's up."""
    monkeypatch.setattr(svg, "shown", lambda figure, caption: figure)
    mine, alone = [[0.5, 0.6], [0.7, 0.8]], [[0.1, 0.2], [0.3, 0.4]]
    pair = [entry("fedavg", mine), entry("local", alone)]
    _, figure = drawn._clients(pair)["figures"]
    (dots,) = figure.axes[0].collections
    wanted = 100 * np.stack([np.ravel(alone), np.ravel(mine)], 1)
    np.testing.assert_allclose(dots.get_offsets(), wanted)
