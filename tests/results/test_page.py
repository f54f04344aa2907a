"""The HTML page of a report: numbers, escaping, no external resources, and rendering in a browser."""

import csv
import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser

import numpy as np
import pytest
from rows import FACTS, folder, line

from rayfl.metrics import CLIENT_SCORES
from rayfl.results import published
from rayfl.results.findings import findings, found_in
from rayfl.results.folder import RunFolder, records
from rayfl.results.page import page, write_page
from rayfl.results.page.contents import contents_of, parsed
from rayfl.results.page.series import COARSE
from rayfl.results.rows import best_trials
from rayfl.results.tables import table, write_tables

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
ROUNDS = 60
EVIL = "</script><script>alert(1)</script><b>"


@pytest.fixture
def study(tmp_path):
    """A sweep's folder: two rows, three learning rates, the best one on two seeds; who holds which classes."""
    path = tmp_path / "study"
    facts = FACTS | {"tuned": ["training.lr"]}
    paper = published.Published(source="Table 9", numbers={"accuracy_mean": {"fedavg": 60.0}})
    config = {
        "question": f"Is it better? {EVIL}",
        "search": {"metric": "validation_accuracy_mean"},
        "published": published.in_config(paper, ["rounds: 200 -> 60"]),
    }
    sweep = RunFolder.create(path, "study", config, {}, facts, kind="sweep")
    costs = {"1": {"parameters": 900, "macs": 9000}, "0.125": {"parameters": 30, "macs": 300}}
    for name, title in (("fedavg", "FedAvg, smallest"), ("heterofl", f"HeteroFL {EVIL}")):
        for lr, seed in ((0.1, 0), (0.3, 0), (1.0, 0), (0.3, 1)):
            reached = 0.6 + 0.1 * (name == "heterofl") - abs(lr - 0.3) / 10 + 0.01 * seed
            lines = [
                line(r, accuracy_mean=reached * r / ROUNDS, validation_accuracy_mean=reached * r / ROUNDS)
                | {"accuracy_1": 0.5, "accuracy_0.125": 0.25, "accuracy_worst": 0.25, "train_loss": 1 / r}
                | {"validation_accuracy_1": 0.5, "validation_accuracy_0.125": 0.25}
                | {"bytes_down": 1000, "bytes_up": 1000, "train_flops": 1e6}
                for r in range(1, ROUNDS + 1)
            ]
            run = folder(
                path / "trials" / f"{name}-{lr}-{seed}",
                name,
                lines,
                seed=seed,
                title=title,
                costs=costs,
                sweep=sweep.id,
                config={"training": {"lr": lr}, "method": {"name": name}, "seed": seed},
            )
            run.save_clients(np.array([(i, 0.25 * i) for i in range(4)], CLIENT_SCORES))
    (path / "plots").mkdir()
    (path / "plots" / "labels.csv").write_text("client,0,1\n0,3,0\n1,0,4\n2,1,1\n3,2,2\n")
    sweep.finish("finished")
    return path


class Tables(HTMLParser):
    """Caption -> lines of cells, what stands out in bold or underlined among them, and all elements by name."""

    def __init__(self, text: str):
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict]] = []
        self.caption, self.inside = "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside.append(tag)
        if tag == "tr":
            self.tables.setdefault(self.caption, []).append([])
        elif tag in ("th", "td"):
            self.tables[self.caption][-1].append("")

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if "caption" in self.inside:
            self.caption = data
        elif {"th", "td"} & set(self.inside):
            self.tables[self.caption][-1][-1] += data


def data_of(text: str) -> dict:
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(data)


def body_of(text: str) -> str:
    """Without what the page brings along."""
    return text.partition("<script>")[0]


def test_its_numbers_are_those_of_the_tables(study):
    found = found_in(study)
    write_tables(study, found.best, found.judge, found.tuned)
    read = Tables(body_of(page(found))).tables
    [shown] = [cells for caption, cells in read.items() if caption.startswith("Mean")]
    results = table(found.best, found.judge, found.tuned)
    assert shown == [results.header, *results.rows]
    # and those of the CSV
    with (study / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    for title, seeds, accuracy, lr in (row[:4] for row in shown[1:]):
        own = [row for row in rows if row["title"] == title]
        values = [100 * float(row["accuracy_mean"]) for row in own]
        assert len(own) == int(seeds) and accuracy.split(" ±")[0] == f"{np.mean(values):.2f}"
        assert lr.split(" (")[0] == own[0]["training.lr"] == "0.3"
    [beside] = [cells for caption, cells in read.items() if caption.startswith("Published")]
    assert beside[1][:4] == ["FedAvg, smallest", "60.00", "60.50 ± 0.71", "+0.50"]
    [runs] = [cells for caption, cells in read.items() if caption.startswith("Every run")]
    assert len(runs) == 1 + 8 and [row[1] for row in runs[1:]].count("–") == 8


def test_every_run_has_each_metric_in_its_own_form(study):
    shown = contents_of(found_in(study, "train_loss"))["trials"]
    assert shown.header[5:7] == ["validation accuracy mean %", "train loss"]
    [row] = [row for row in shown.rows if row[0] == "FedAvg, smallest" and row[5] == "61.00"]
    assert row[6] == "0.01667"


def test_it_names_the_setup_of_every_row(study):
    """Here of two that differ in data, partition and cohort."""
    found = found_in(study)
    alike, other = found.best[0], found.best[-1]
    params = {"data.name": "digits", "partition.name": "iid", "clients.cohort": 3, "model.name": "digits_cnn"}
    alike["params"] |= params
    other["params"] |= params | {"partition.name": "dirichlet", "clients.cohort": 1000}
    for record in found.best[1:-1]:
        record["params"] |= params
    other["facts"] |= {"clients": 2000, "trained": [0.5]}
    about = dict(contents_of(found)["about"])
    assert (about["data"], about["model"], about["partition"]) == ("digits", "digits_cnn", "iid; dirichlet")
    assert about["per round"] == "3 clients; 1,000 clients"
    assert about["clients"].endswith("; 2,000") and about["capacities"].endswith("; 0.5")


def test_its_curves_are_those_of_the_runs(study):
    found = found_in(study)
    curves = data_of(page(found))["plot-curves"]
    heterofl, fedavg = curves["metrics"]["accuracy %"]
    assert (heterofl["x"], fedavg["name"]) == (list(range(1, ROUNDS + 1)), "FedAvg, smallest")
    assert fedavg["y"] == pytest.approx([100 * 0.605 * r / ROUNDS for r in range(1, ROUNDS + 1)], rel=1e-4)
    assert fedavg["std"][-1] == pytest.approx(100 * np.std([0.6, 0.61], ddof=1), rel=1e-4)
    assert fedavg["gbit"][-1] == pytest.approx(8 * 2000 * ROUNDS / 1e9)
    assert list(curves["metrics"])[1] == curves["chosen"] == "validation accuracy %"
    # the other trials are coarser, up to their last round
    assert len(curves["others"]) == 4
    for other in curves["others"]:
        assert len(other["x"]) == COARSE and (other["x"][0], other["x"][-1]) == (1, ROUNDS)


def test_its_plots_have_what_the_runs_have(study):
    charts = data_of(page(found_in(study)))
    assert set(charts) == {
        *("plot-curves", "plot-capacities", "plot-pareto", "plot-clients"),
        *("plot-tuned-training.lr", "plot-labels"),
    }
    assert charts["plot-labels"]["traces"][0]["z"] == [[3, 0, 1, 2], [0, 4, 1, 2]]
    tuned = {trace["name"]: trace["y"] for trace in charts["plot-tuned-training.lr"]["traces"]}
    assert tuned["FedAvg, smallest"] == pytest.approx([58, 60, 53])
    assert charts["plot-clients"]["traces"][0]["x"] == [0, 25, 50, 75] * 2


def test_it_loads_nothing_and_escapes_texts(study):
    """Texts of files are escaped; the links to papers are the only addresses."""
    text = page(found_in(study))
    tags = Tables(body_of(text)).tags
    loading = [(tag, value) for tag, given in tags for key, value in given.items() if key in ("src", "href")]
    assert all(tag == "a" or value == "data:," for tag, value in loading)
    assert EVIL not in text and "&lt;script&gt;alert(1)" in text
    [policy] = [given["content"] for tag, given in tags if given.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';") and "http" not in policy


def test_it_has_departures_and_provenance(study):
    text = body_of(page(found_in(study)))
    assert "arxiv.org/abs/2010.01264" in text and "attention is cut within each head" in text
    assert "rounds: 200 -&gt; 60" in text and "Compared with Table 9" in text
    assert "commit of rayfl" in text and "torch 2" in text


def test_departures_are_read_from_a_methods_documentation():
    document = """One thing: another.

Paper: A and B, "C",
https://arxiv.org/abs/1.

Symbols: x.

Departures:
1. First, on
   two lines.
2. Second, 3. not an item.
"""
    assert parsed(document) == {
        "what": "One thing: another.",
        "paper": 'Paper: A and B, "C", https://arxiv.org/abs/1.',
        "departures": ["First, on two lines.", "Second, 3. not an item."],
    }
    assert parsed("") == {"what": "", "paper": "", "departures": []}


def test_a_single_run_and_a_folder_of_runs_have_a_page_too(study, tmp_path):
    run = next(iter(sorted((study / "trials").iterdir())))
    rows = [RunFolder.open(run).record()]
    assert "All 8 runs" not in page(findings(run, rows, rows))
    trials = records(study / "trials")
    found = findings(study / "trials", best_trials(trials), trials)
    assert found.run is None and "FedAvg, smallest" in page(found)


# in a browser


def shown(path, tmp_path, width=1200):
    """Return the document and the console messages of a headless browser."""
    options = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking dump-dom"
    options += " disable-component-update disable-sync enable-logging=stderr virtual-time-budget=20000"
    command = [BROWSER, *(f"--{option}" for option in options.split()), f"--window-size={width},900"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout, [text for text in done.stderr.splitlines() if "CONSOLE" in text]


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome is installed")
def test_a_browser_shows_it_without_messages(study, tmp_path):
    path = write_page(found_in(study))
    document, said = shown(path, tmp_path)
    assert said == []
    assert f'data-drawn="{len(data_of(path.read_text()))}"' in document
    assert document.count('class="main-svg"') >= 6 and "validation accuracy %" in document
    # such a check can fail
    broken = tmp_path / "broken.html"
    broken.write_text(path.read_text().replace('"use strict";\nconst data', '"use strict";\nnothing();\nconst data'))
    document, [said] = shown(broken, tmp_path)
    assert "nothing is not defined" in said and "data-drawn" not in document.partition("<body")[0]


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome is installed")
def test_all_columns_fit_or_a_scroll_bar_is_visible(study, tmp_path):
    path, measured = write_page(found_in(study)), {}
    script = (
        "const box = document.querySelector('#results .wide');const sizes = [box.scrollWidth - box.clientWidth, "
        "box.offsetHeight - box.clientHeight];document.documentElement.dataset.box = sizes;"
    )
    usual = path.read_text().replace(f" {escape(EVIL)}", "")
    path.write_text(usual.replace("</body>", f"<script>{script}</script></body>"))
    for width in (1280, 600):
        document, _ = shown(path, tmp_path, width)
        measured[width] = [int(size) for size in re.findall(r'data-box="(-?\d+),(\d+)"', document)[0]]
    hidden, bar = measured[600]
    assert measured[1280] == [0, 0] and hidden > 0 and bar > 5
