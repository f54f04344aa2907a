"""Tables by hand: best trials, ranking, cells, costs and the Pareto front."""

import csv
import io
import math

import pytest
from matplotlib.axis import Axis
from rich.console import Console
from rows import FACTS, PERSONAL, folder, line

from rayfl.results import cells, tables
from rayfl.results.cells import as_csv
from rayfl.results.folder import records
from rayfl.results.pareto import Offer, candidates, front, offers, pareto_front, write_pareto
from rayfl.results.rows import best_trials, by_label, capacities, judge_of, judged, titles_of
from rayfl.results.tables import best_csv, best_table, results_csv, table, write_tables
from rayfl.results.tuned import tuned

COSTS = {"bytes_down": 2_000_000, "bytes_up": 1_500, "train_flops": 1.234e12, "seconds": 185.2, "rounds": 3}
LOCAL = "local_accuracy_mean"


def record(label, seed=0, accuracy=None, lr=0.1, status="finished", facts=FACTS, **more):
    row = {"id": "x", "label": label, "title": label, "seed": seed, "status": status, "facts": facts}
    row["params"] = {"training.lr": lr, "seed": seed}
    if accuracy is not None:
        row |= {"accuracy_mean": accuracy, "accuracy_worst": accuracy - 0.1}
        row |= {"accuracy_1": accuracy + 0.1, "accuracy_0.125": accuracy - 0.1} | COSTS
    return row | more


def personal(label, local, **more):
    """A row of a method whose server has no network."""
    return record(label, facts=PERSONAL, **COSTS, **{LOCAL: local}, **more)


ROWS = [record("fedavg", 1, 0.5), record("heterofl", 0, 0.75), record("fedavg", 0, 0.7)]


# which rows


def test_the_best_point_is_that_of_the_best_mean_over_seeds():
    rows = [
        record("a", 0, 0.9, lr=0.1),
        record("a", 1, 0.1, lr=0.1),
        record("a", 0, 0.6, lr=0.03),
        record("a", 1, 0.5, lr=0.03),
        record("a", 0, float("nan"), lr=1.0),
        record("a", 0, None, lr=3.0, status="failed"),
        record("b", 0, 0.2, lr=3.0),
    ]
    assert best_trials(rows) == best_trials(rows, "accuracy_mean") == [rows[2], rows[3], rows[6]]
    assert best_trials(rows, "accuracy_mean", "min") == [rows[0], rows[1], rows[6]]


def test_ties_do_not_depend_on_the_order_of_the_rows():
    """MLflow gives the newest first, a folder the paths in order."""
    rows = [record("a", seed, 0.5, lr=lr) for lr in (0.1, 0.3) for seed in (0, 1)]
    for given in (rows, rows[::-1], [*rows[2:], *rows[:2]]):
        assert {row["params"]["training.lr"] for row in best_trials(given)} == {0.1}


def test_a_point_drawn_twice_on_a_seed_counts_once():
    """Ranked by seeds, not by rows, and the first row of a seed is kept."""
    drawn = [record("a", 0, 0.5, lr=0.1), record("a", 0, 0.6, lr=1.0), record("a", 0, 0.7, lr=0.1)]
    assert best_trials(drawn) == [drawn[1]]
    confirmed = [*drawn, record("a", 1, 0.25, lr=0.1)]
    best = best_trials(confirmed)
    assert best == [drawn[0], confirmed[3]]
    assert table(best).rows[0][:3] == ["a", "2", "37.50 ± 17.68"]
    assert best_trials([record("a", 0, float("nan"), lr=0.1), drawn[2]]) == [drawn[2]]


def test_each_label_is_chosen_by_its_judge_metric():
    alone = [personal("alone", 0.5, lr=0.1), personal("alone", 0.75, lr=0.3)]
    words = FACTS | {"judge": "perplexity_mean", "scores": {"perplexity": "min"}}
    texts = [record("text", facts=words, lr=lr, perplexity_mean=p) for lr, p in ((0.1, 9.0), (0.3, 7.0), (1.0, 8.0))]
    assert best_trials([*alone, *texts, ROWS[1]]) == [alone[1], texts[1], ROWS[1]]
    assert best_trials(texts, "perplexity_mean") == [texts[1]]
    assert best_trials(texts, "perplexity_mean", "max") == [texts[0]]


def test_parameters_read_back_as_text_are_the_same_points():
    rows = [record("a", 0, 0.4, lr=0.1), record("a", 1, 0.6, lr="0.1"), record("a", 0, 0.45, lr=1)]
    assert best_trials(rows, "accuracy_mean") == rows[:2]


def test_labels_are_ranked_and_seeds_in_order():
    groups = by_label([*ROWS, record("spafl", status="failed")])
    assert list(groups) == ["heterofl", "fedavg", "spafl"]
    assert [row["seed"] for row in groups["fedavg"]] == [0, 1]
    losses = [record(name, loss_mean=loss) for name, loss in (("a", 2.0), ("b", 1.0))]
    assert list(by_label([*losses, record("c")], "loss_mean")) == ["b", "a", "c"]


def test_the_metric_that_compares_rows():
    """The first judge metric that all of them have."""
    both = record("fedavg", 0, 0.5, **{LOCAL: 0.5})
    assert judge_of([both]) == "accuracy_mean"
    assert judge_of([both, personal("alone", 0.5)]) == judge_of([personal("alone", 0.5), both]) == LOCAL
    assert judge_of([both, record("x", status="failed")]) == judge_of([record("x")]) == "accuracy_mean"
    # nothing is in all of them
    assert judge_of([ROWS[0], personal("alone", 0.5)]) == "accuracy_mean"
    assert judged([both, record("x"), personal("alone", 0.5)]) == [both, personal("alone", 0.5)]


def test_capacities_are_those_that_were_judged_largest_first():
    rows = [
        {"accuracy_0.5": 1, "facts": FACTS | {"capacities": [1.0, 0.5, 0.25]}},
        {"accuracy_1e-05": 1, "local_accuracy_0.25": 1, "accuracy_1": 1, "facts": FACTS | {"capacities": [1.0, 1e-5]}},
    ]
    assert capacities(rows) == [1.0, 0.5, 1e-5]


# tables


def test_table_as_markdown():
    failed = record("spafl", status="failed")
    assert table([*ROWS, failed]).markdown() == (
        "| method | seeds | accuracy % | @1 | @0.125 | worst | down | up | FLOPs | time |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| heterofl | 1 | **75.00** | **85.00** | **65.00** | **65.00** | 2 MB | 1.5 kB | 1.23 T | 3 min 05 s |\n"
        "| fedavg | 2 | *60.00 ± 14.14* | *70.00 ± 14.14* | *50.00 ± 14.14* | *50.00 ± 14.14* "
        "| 2 MB | 1.5 kB | 1.23 T | 3 min 05 s |\n"
        "| spafl | 1 | failed | – | – | – | – | – | – | – |\n"
    )
    assert table([record("a|b", 0, 0.5)]).markdown().splitlines()[2].startswith(r"| a\|b | 1 | 50.00 |")
    assert table([record("a\nb", 0, 0.5)]).markdown().splitlines()[2].startswith("| a b | 1 | 50.00 |")
    assert "\na b & 1 & " in table([record("a\nb", 0, 0.5)]).latex()


def test_personal_networks_have_dashes_for_server_scores():
    """Beside others, and alone; LG-FedAvg's server has a network."""
    rows = [record("fedavg", 0, 0.5, **{LOCAL: 0.625}), personal("alone", 0.75)]
    lg = record("lg", 0, 0.25, facts=PERSONAL, **{LOCAL: 0.5})
    found = table([*rows, lg], judge_of(rows))
    assert found.header[:7] == ["method", "seeds", "local %", "accuracy %", "@1", "@0.125", "worst"]
    assert [row[0:1] + row[2:7] for row in found.rows] == [
        ["alone", "75.00", "–", "–", "–", "–"],
        ["fedavg", "62.50", "50.00", "60.00", "40.00", "40.00"],
        ["lg", "50.00", "25.00", "35.00", "15.00", "15.00"],
    ]
    only = table(rows[1:], LOCAL)
    assert only.header == ["method", "seeds", "local %", "down", "up", "FLOPs", "time"]
    assert only.rows == [["alone", "1", "75.00", "2 MB", "1.5 kB", "1.23 T", "3 min 05 s"]]
    text = results_csv(rows, LOCAL)
    assert text.splitlines()[1:] == [
        "alone,alone,0,0.75,,,,,2000000,1500,1234000000000.0,185.2,best",
        "fedavg,fedavg,0,0.625,0.5,0.4,0.6,0.4,2000000,1500,1234000000000.0,185.2,",
    ]


def test_losses_are_shown_as_they_are():
    facts = FACTS | {"judge": "perplexity_mean", "scores": {"perplexity": "min", "f1": "max"}}
    some = {"a": (31.25, 32.25), "b": (20.125,)}
    rows = [
        record(name, seed, facts=facts, perplexity_mean=value, **{"perplexity_1": value, "f1_mean": 0.5})
        for name, values in some.items()
        for seed, value in enumerate(values)
    ]
    found = table(rows, "perplexity_mean")
    assert found.header[:4] == ["method", "seeds", "perplexity", "@1"]
    assert [row[:4] for row in found.rows] == [
        ["b", "1", "20.12", "20.12"],
        ["a", "2", "31.75 ± 0.7071", "31.75 ± 0.7071"],
    ]
    header, first, *_ = csv.reader(io.StringIO(results_csv(rows, "perplexity_mean")))
    assert header[:6] == ["method", "title", "seed", "perplexity_mean", "perplexity_1", "f1_mean"]
    assert first[:6] == ["b", "b", "0", "20.125", "20.125", "0.5"]


@pytest.mark.parametrize(
    ("metric", "value", "title", "cell"),
    [
        ("train_loss", 0.125, "train loss", "0.125"),
        ("best_accuracy_mean", 0.8125, "best accuracy mean %", "81.25"),
        ("loss_mean", 1.5, "loss mean", "1.5"),
        ("rounds", 3, "rounds", "3"),
    ],
)
def test_the_metric_that_ranks_rows_is_a_column(metric, value, title, cell):
    rows = [record("a", 0, 0.5) | {metric: value}, record("b", 0, 0.75)]
    found = table(rows, metric)
    assert found.header[:4] == ["method", "seeds", title, "accuracy %"]
    assert [row[2:4] for row in found.rows if row[0] == "a"] == [[cell, "50.00"]]
    header, first, *_ = csv.reader(io.StringIO(results_csv(rows, metric)))
    assert header.count(metric) == 1 and first[header.index(metric)] == str(value)
    # others already are
    assert table(rows, "bytes_up").header == table(rows).header


def test_table_as_latex():
    rows = [record("a_b", 0, 0.5), record("a_b", 1, 0.5)]
    for row in rows:
        del row["accuracy_1"], row["accuracy_0.125"]
    assert table(rows).latex() == (
        "\\begin{tabular}{lrrrrrrr}\n"
        "\\toprule\n"
        "method & seeds & accuracy \\% & worst & down & up & FLOPs & time \\\\\n"
        "\\midrule\n"
        "a\\_b & 2 & 50.00 $\\pm$ 0.00 & 40.00 $\\pm$ 0.00 & 2 MB & 1.5 kB & 1.23 T "
        "& 3 min 05 s \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
    )
    assert tables.Table(["x"], [["a{$^~\\"]]).latex().splitlines()[4] == (
        r"a\{\$\textasciicircum{}\textasciitilde{}\textbackslash{} \\"
    )


def printed(given, width):
    """Its lines on a terminal of so many columns."""
    console = Console(file=io.StringIO(), width=width)
    console.print(given)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def test_a_narrow_terminal_lists_columns_that_do_not_fit():
    given = table([*ROWS, record("[bold]x[/bold]", 0, 0.25)]).rich()
    header, _, *rows, note = printed(given, 64)
    assert header.split() == ["method", "seeds", "accuracy", "%", "@1", "@0.125", "worst"]
    assert note == "not shown: down, up, FLOPs, time (see results.csv)"
    assert rows[1].split() == ["fedavg", "2", "60.00", "±", "14.14", "70.00", "50.00", "50.00"]
    assert rows[2].split()[0] == "[bold]x[/bold]"
    assert max(map(len, (header, *rows, note))) <= 64
    assert printed(given, 140)[0].endswith("time") and "without" not in "".join(printed(given, 140))
    # never fewer than two, however long a name is
    header, *_, note = printed(table([record("x" * 90, 0, 0.5), ROWS[0]]).rich(), 40)
    assert header.split() == ["method", "seeds"]


def test_rows_are_shown_by_their_titles():
    rows = [ROWS[0] | {"title": "FedAvg"}, ROWS[2] | {"title": "FedAvg"}, ROWS[1] | {"title": "HeteroFL"}]
    assert titles_of(rows) == {"fedavg": "FedAvg", "heterofl": "HeteroFL"}
    assert [row[0] for row in table(rows).rows] == ["HeteroFL", "FedAvg"]
    assert [line.split(",")[:2] for line in results_csv(rows).splitlines()[1:]] == [
        ["heterofl", "HeteroFL"],
        ["fedavg", "FedAvg"],
        ["fedavg", "FedAvg"],
    ]
    # two rows of one name keep their labels
    assert titles_of([*rows, record("other", 0, 0.5) | {"title": "FedAvg"}])["other"] == "FedAvg (other)"


def test_emphasis():
    """In every column the best mean, and what the seeds cannot tell from it: here by the paired test."""
    ahead, behind, noisy = (0.75, 0.8, 0.85), (0.45, 0.5, 0.55), (0.55, 0.9, 0.74)
    rows = [
        record(name, seed, value)
        for name, values in (("ahead", ahead), ("behind", behind), ("noisy", noisy))
        for seed, value in enumerate(values)
    ]
    found = table(rows)
    assert [row[0] for row in found.rows] == ["ahead", "noisy", "behind"]
    assert {place: mark for place, mark in found.marks.items() if place[1] == 2} == {
        (0, 2): "best",
        (1, 2): "like the best",
    }
    lines = found.latex().splitlines()
    assert r"ahead & 3 & \textbf{80.00 $\pm$ 5.00} & \textbf{" in lines[4]
    assert r"noisy & 3 & \underline{73.00 $\pm$ 17.52}" in lines[5] and "text" not in lines[6]
    assert "| behind | 3 | 50.00 ± 5.00 |" in found.markdown()
    # equal on one seed
    assert table([record("a", 0, 0.5), record("b", 0, 0.5)]).marks[1, 2] == "like the best"
    # alone, nothing does
    assert table(rows[:3]).marks == {}


def test_rows_without_a_finite_mean_are_last_and_not_marked():
    """Perplexities: one row diverged on all seeds, one on the second seed, one to infinity."""
    facts = FACTS | {"judge": "perplexity_mean", "scores": {"perplexity": "min"}}
    values = {"a": (math.nan, math.nan), "b": (9.0, 9.5), "c": (math.inf, 7.0), "d": (7.0, 7.5), "e": (6.0, math.nan)}
    rows = [
        record(name, seed, facts=facts, perplexity_mean=value)
        for name, some in values.items()
        for seed, value in enumerate(some)
    ]
    assert list(by_label(rows, "perplexity_mean")) == ["d", "b", "a", "c", "e"]
    assert list(by_label([record("a", 0, math.nan), record("b", 0, 0.25), record("c", 0, 0.5)])) == ["c", "b", "a"]
    found = table(rows, "perplexity_mean")
    assert [row[2] for row in found.rows[:2]] == ["7.25 ± 0.3536", "9.25 ± 0.3536"]
    assert [row[2] for row in found.rows[2:]] == ["nan ± nan", "inf ± nan", "nan ± nan"]
    assert found.marks == {(0, 2): "best"}


def test_tuned_settings_are_in_every_table():
    trials = [record("a", 0, value, lr=lr) for lr, value in ((0.1, 0.5), (0.3, 0.75), (1.0, 0.25))]
    trials += [record("b", 0, value, lr=lr) for lr, value in ((0.1, 0.9), (0.3, 0.8), (1.0, 0.25))]
    best = best_trials(trials)
    chosen = tuned(best, trials, ["training.lr"])
    found = table(best, tuned=chosen)
    assert found.header[:5] == ["method", "seeds", "accuracy %", "lr", "@1"]
    assert [row[3] for row in found.rows] == ["0.1 (1 of 3) ↓", "0.3 (2 of 3)"]
    note = "b: best lr 0.1 is at the edge of the values tried (0.1 to 1); try smaller values"
    assert found.notes == [note] and found.markdown().endswith(f"\n\n{note}\n")
    assert found.latex().startswith(f"% {note}\n") and r"0.1 (1 of 3) $\downarrow$" in found.latex()
    assert printed(found.rich(), 80)[-1] == note
    header, first, second = csv.reader(io.StringIO(results_csv(best, tuned=chosen)))
    assert header[-3:] == ["training.lr", "training.lr place", "doubts"]
    assert first[-3:] == ["0.1", "1 of 3", note.removeprefix("b: ")] and second[-3:] == ["0.3", "2 of 3", ""]


def test_costs_of_some_rows_are_columns_only_where_a_row_has_them():
    none = {"bytes_public": 0, "server_flops": 0}
    rows = [record("dsfl", accuracy_mean=0.7, bytes_public=118_000_000, server_flops=0)]
    rows += [record("fedavg", accuracy_mean=0.6, **none), record("old", accuracy_mean=0.5)]
    found = table(rows)
    place = found.header.index("public data")
    assert found.header[place - 1 : place + 2] == ["up", "public data", "FLOPs"] and "server FLOPs" not in found.header
    assert {row[0]: row[place] for row in found.rows} == {"dsfl": "118 MB", "fedavg": "0 B", "old": "–"}
    header, *lines = csv.reader(io.StringIO(results_csv(rows)))
    assert {line[0]: line[header.index("bytes_public")] for line in lines} == {
        "dsfl": "118000000",
        "fedavg": "0",
        "old": "",
    }
    assert "public data" not in table(rows[1:]).header and "server_flops" not in header


def test_epsilon_is_a_column_where_a_row_has_one():
    rows = [record("private", accuracy_mean=0.7, epsilon=5.7012), record("open", accuracy_mean=0.8)]
    rows.append(record("deployed", accuracy_mean=0.75, simulated_epsilon=4.8587))
    found = table(rows)
    places = [found.header.index(title) for title in ("epsilon", "simulated epsilon")]
    assert {row[0]: [row[place] for place in places] for row in found.rows} == {
        "open": ["–", "–"],
        "deployed": ["–", "4.86"],
        "private": ["5.7", "–"],
    }
    assert "epsilon" in results_csv(rows).partition("\n")[0] and "epsilon" not in table(rows[1:2]).header


def test_a_csv_file_has_no_formulas():
    given = ["=HYPERLINK(1)", "+1+2", "-1-2", "@A1", "\tx", "@0.25", "-2.5", "+3", "-inf", "a=1", -2.5, None, "–"]
    [row] = csv.reader(io.StringIO(as_csv(given, [])))
    assert row == ["'=HYPERLINK(1)", "'+1+2", "'-1-2", "'@A1", "'\tx", *map(str, given[5:11]), "", "–"]


def test_csv_has_exactly_the_named_columns():
    text = results_csv([*ROWS, record("spafl", status="failed")])
    header, *lines = csv.reader(io.StringIO(text))
    assert ", ".join(header) == (
        "method, title, seed, accuracy_mean, accuracy_worst, accuracy_1, accuracy_0.125, "
        "bytes_down, bytes_up, train_flops, seconds, standing"
    )
    assert [line[:4] for line in lines] == [
        ["heterofl", "heterofl", "0", "0.75"],
        ["fedavg", "fedavg", "0", "0.7"],
        ["fedavg", "fedavg", "1", "0.5"],
    ]
    assert lines[0][-5:] == ["2000000", "1500", "1234000000000.0", "185.2", "best"]
    assert [line[-1] for line in lines[1:]] == ["like the best"] * 2


@pytest.mark.parametrize(
    ("function", "amount", "text"),
    [
        (cells.human_bytes, 0, "0 B"),
        (cells.human_bytes, 999, "999 B"),
        (cells.human_bytes, 999.6e6, "1 GB"),
        (cells.human_bytes, 1.234e9, "1.23 GB"),
        (cells.human_flops, 45.6, "45.6"),
        (cells.human_flops, 3.2e22, "3.2e+04 E"),
        (cells.human_time, 9.46, "9.5 s"),
        (cells.human_time, 59.99, "1 min 00 s"),
        (cells.human_time, 3599.7, "1 h 00 min"),
        (cells.human_time, 7625, "2 h 07 min"),
    ],
)
def test_human_units(function, amount, text):
    assert function(amount) == text


# SpaFL's columns


def masked(round, local, density=None, **more):
    """A line of masked networks that are clients' own."""
    own = {} if density is None else {"local_density": density, "local_density_conv": density}
    sent = {"bytes_down": 2320, "bytes_up": 2320, "train_flops": 12e9}
    return line(round, **{LOCAL: local}) | own | sent | more


def test_best_rounds_and_amounts_by_hand(tmp_path):
    lines = [masked(1, 0.5, 0.75), masked(2, 0.875, 0.5), masked(3, 0.625, 0.25)]
    folder(tmp_path / "1", "spafl", lines, facts=PERSONAL)
    folder(tmp_path / "2", "fedavg", [masked(1, 0.75, accuracy_mean=0.125)])
    rows = records(tmp_path)
    assert best_table(rows, LOCAL).markdown() == (
        "| method | seeds | best local % | best % | local density % | Gbit | MACs per client |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| spafl | 1 | **87.50** | – | 50.00 | 0.0001114 | 4.5 G |\n"
        "| fedavg | 1 | 75.00 | 12.50 | – | 3.712e-05 | 1.5 G |\n"
    )
    assert best_csv(rows, LOCAL) == (
        "method,title,seed,best_local_accuracy_mean,best_accuracy_mean,local_density_at_best,gbit,client_macs\n"
        "spafl,spafl,0,0.875,,0.5,0.00011136,4500000000.0\n"
        "fedavg,fedavg,0,0.75,0.125,,3.712e-05,1500000000.0\n"
    )
    # by results that have no best round
    for metric in ("best_local_accuracy_mean", "train_flops"):
        for text in (best_table(rows[::-1], metric).markdown(), best_csv(rows[::-1], metric)):
            assert (text.index("spafl") < text.index("fedavg")) == (metric != "train_flops")
    # nothing is masked, and one has failed
    dense = best_table([rows[1], record("x", status="failed")])
    assert dense.header == ["method", "seeds", "best local %", "best %", "Gbit", "MACs per client"]
    assert dense.rows[1] == ["x", "1", "–", "–", "–", "–"]


def test_the_files_of_a_comparison(tmp_path):
    write_tables(tmp_path / "out", ROWS)
    names = sorted(f"{name}.{end}" for name in ("best", "results") for end in ("csv", "md", "tex"))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == names
    assert (tmp_path / "out" / "results.csv").read_text().count("\n") == 4


# what accuracy costs


def offer(macs, value, label="a", capacity=1.0):
    return Offer(label, "", capacity, 10 * macs, macs, value)


def test_the_front():
    best, cheap, rest = offer(100, 0.9), offer(10, 0.5), [offer(100, 0.8), offer(50, 0.5), offer(200, 0.9)]
    assert front([rest[0], best, cheap, *rest]) == [cheap, best]
    assert front([offer(10, 0.5, "b"), offer(10, 0.5, "c")]) == [offer(10, 0.5, "b")]
    assert front([best, cheap, *rest, offer(200, 0.25)], "min") == [cheap, offer(200, 0.25)]
    assert front([]) == []


NETWORKS = {"parameters_1": 100, "macs_1": 1000, "parameters_0.125": 12, "macs_0.125": 130}


def test_offers_are_means_over_seeds_of_one_point():
    rows = [
        record("a", 0, 0.5, point="lr=0.1", **NETWORKS),
        record("a", 1, 0.25, point="lr=0.1", **NETWORKS | {"macs_0.125": 150, "parameters_0.125": 13}),
        record("a", 0, 0.375, lr=0.2, point="lr=0.2", **NETWORKS),
        record("a", 0, None, lr=0.3, status="failed", **NETWORKS),
        record("b", 0, 0.5),
    ]
    assert offers(rows) == [
        Offer("a", "lr=0.1", 1.0, 100, 1000, pytest.approx(0.475)),
        # what masks leave differs between seeds
        Offer("a", "lr=0.1", 0.125, 12, 140, pytest.approx(0.275)),
        Offer("a", "lr=0.2", 1.0, 100, 1000, 0.475),
        Offer("a", "lr=0.2", 0.125, 12, 130, 0.275),
    ]
    assert offers(rows, "validation") == []


def test_points_that_only_trained_worse_are_not_offered():
    """Points with other networks are offered: a search over networks has many."""
    other = NETWORKS | {"macs_1": 800, "macs_0.125": 100}
    # half of a wider network's 2000 multiply-adds are masked: the network is the same as at another density
    masked = [NETWORKS | {"macs_1": 1000, "macs_share_1": 0.5}, NETWORKS | {"macs_1": 500, "macs_share_1": 0.25}]
    best = [record("a", 0, 0.75, **NETWORKS), record("m", 0, 0.5, **masked[0])]
    trials = [
        *best,
        record("a", 0, 0.25, lr=1.0, **NETWORKS),
        record("a", 0, 0.5, lr=2.0, **other),
        record("m", 0, 0.25, lr=1.0, **masked[1]),
        record("gone", 0, 0.25, **NETWORKS),
    ]
    assert candidates(best, trials) == [*best, trials[3]]


def test_the_plot_of_a_front_has_every_network():
    found = [offer(10, 0.8), offer(100, 0.9), offer(50, 0.75, "b"), offer(60, 0.1, "b")]
    styles = {name: {"color": "#000000", "marker": "o", "linestyle": "-"} for name in ("A", "B")}
    titles = {"a": "A", "b": "B"}
    axes = pareto_front(found, front(found), "accuracy %", titles, styles).figure.axes[0]
    drawn = {tuple(point) for points in axes.collections for point in points.get_offsets()}
    assert drawn == {(o.macs, o.value) for o in found}
    low, high = axes.get_ylim()
    assert low < 0.1 and high > 0.9
    legend = axes.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["A", "B"]
    assert [text.get_text() for text in axes.texts] == ["100 parameters", "1 k parameters"]
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not boxes[0].overlaps(boxes[1])


def test_the_front_of_a_sweep_is_by_its_metric(tmp_path, monkeypatch):
    labels = []
    monkeypatch.setattr(Axis, "set_label_text", lambda self, text, *_, **look: labels.append(text))
    rows = [
        record("a", 0, 0.5, **NETWORKS, **{"validation_accuracy_1": 0.75, "validation_accuracy_0.125": 0.25}),
        record(
            "b", 0, 0.7, point="x=1", **NETWORKS, **{"validation_accuracy_1": 0.5, "validation_accuracy_0.125": 0.375}
        ),
    ]
    write_pareto(tmp_path, rows, rows, "validation_accuracy_mean")
    assert (tmp_path / "pareto.csv").read_text() == (
        "method,point,capacity,parameters,macs,validation_accuracy,front\n"
        "b,x=1,0.125,12,130,0.375,1\n"
        "a,,0.125,12,130,0.25,0\n"
        "a,,1.0,100,1000,0.75,1\n"
        "b,x=1,1.0,100,1000,0.5,0\n"
    )
    assert (tmp_path / "pareto.md").read_text() == (
        "| method | point | capacity | parameters | MACs | validation accuracy % |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| b | x=1 | 0.125 | 12 | 130 | 37.50 |\n"
        "| a | – | 1 | 100 | 1,000 | 75.00 |\n"
    )
    assert (tmp_path / "plots" / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert labels == ["multiply-adds of one sample", "validation accuracy %"]


def test_networks_of_one_cost_or_without_scores_have_no_front(tmp_path):
    for rows, metric in (
        ([record("a", 0, 0.5, parameters_1=1, macs_1=10)], "accuracy_mean"),
        ([personal("alone", 0.5, **NETWORKS)], LOCAL),
    ):
        write_pareto(tmp_path, rows, rows, metric)
    assert list(tmp_path.iterdir()) == []
