"""Tables by hand: which trial is best, how methods rank, what a cell says."""

import csv
import io

import numpy as np
import pytest
from rich.console import Console

from rayfl import report
from rayfl.report import (
    Offer,
    best_trials,
    by_label,
    capacities,
    offers,
    pareto,
    results_csv,
    table,
    write_pareto,
    write_report,
)
from rayfl.tracking.records import Run, records, summary

COSTS = {"bytes_down": 2_000_000, "bytes_up": 1_500, "train_flops": 1.234e12, "seconds": 185.2}


def record(label, seed=0, accuracy=None, lr=0.1, status="finished", **more):
    row = {"id": "x", "label": label, "seed": seed, "status": status}
    row["params"] = {"training.lr": lr, "seed": seed}
    if accuracy is not None:
        row |= {"accuracy_mean": accuracy, "accuracy_worst": accuracy - 0.1}
        row |= {"accuracy_1": accuracy + 0.1, "accuracy_0.125": accuracy - 0.1} | COSTS
    return row | more


ROWS = [
    record("fedavg", 1, 0.5),
    record("heterofl", 0, 0.75),
    record("fedavg", 0, 0.7),
]


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
    assert best_trials(rows, "accuracy_mean") == [rows[2], rows[3], rows[6]]
    assert best_trials(rows, "accuracy_mean", "min") == [rows[0], rows[1], rows[6]]


def test_parameters_read_back_as_text_are_the_same_points():
    rows = [record("a", 0, 0.4, lr=0.1), record("a", 1, 0.6, lr="0.1"), record("a", 0, 0.45, lr=1)]
    assert best_trials(rows, "accuracy_mean") == rows[:2]


def test_labels_are_ranked_and_seeds_in_order():
    groups = by_label([*ROWS, record("spafl", status="failed")])
    assert list(groups) == ["heterofl", "fedavg", "spafl"]
    assert [row["seed"] for row in groups["fedavg"]] == [0, 1]


def test_capacities_are_read_from_the_rows_largest_first():
    rows = [{"accuracy_0.5": 1, "accuracy_1": 1}, {"accuracy_1e-05": 1, "accuracy_mean": 1}]
    rows += [{"local_accuracy_0.25": 1, "validation_accuracy_0.125": 1}]
    assert capacities(rows) == [1.0, 0.5, 1e-5]


def test_table_as_markdown():
    failed = record("spafl", status="failed")
    assert table([*ROWS, failed]).markdown() == (
        "| method | seeds | accuracy % | @1 | @0.125 | worst | down | up | FLOPs | time |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| heterofl | 1 | 75.00 | 85.00 | 65.00 | 65.00 | 2 MB | 1.5 kB | 1.23 T | 3 min 05 s |\n"
        "| fedavg | 2 | 60.00 ± 14.14 | 70.00 ± 14.14 | 50.00 ± 14.14 | 50.00 ± 14.14 "
        "| 2 MB | 1.5 kB | 1.23 T | 3 min 05 s |\n"
        "| spafl | 1 | failed | – | – | – | – | – | – | – |\n"
    )


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


def test_table_on_the_terminal_cuts_whole_columns_only():
    console = Console(file=io.StringIO(), width=60)
    console.print(table(ROWS).rich())
    shown = console.file.getvalue()
    assert "fedavg" in shown and "60.00 ± 14.14" in shown
    assert shown.index("heterofl") < shown.index("fedavg")
    assert "…" not in shown


def test_csv_has_exactly_the_named_columns():
    text = results_csv([*ROWS, record("spafl", status="failed")])
    header, *lines = csv.reader(io.StringIO(text))
    assert ", ".join(header) == (
        "method, seed, accuracy_mean, accuracy_worst, accuracy_1, accuracy_0.125, "
        "bytes_down, bytes_up, train_flops, seconds"
    )
    assert [line[:3] for line in lines] == [
        ["heterofl", "0", "0.75"],
        ["fedavg", "0", "0.7"],
        ["fedavg", "1", "0.5"],
    ]
    assert lines[0][-4:] == ["2000000", "1500", "1234000000000.0", "185.2"]


@pytest.mark.parametrize(
    ("function", "amount", "text"),
    [
        (report.human_bytes, 0, "0 B"),
        (report.human_bytes, 999, "999 B"),
        (report.human_bytes, 999.6e6, "1 GB"),
        (report.human_bytes, 1.234e9, "1.23 GB"),
        (report.human_flops, 45.6, "45.6"),
        (report.human_flops, 3.2e22, "3.2e+04 E"),
        (report.human_time, 9.46, "9.5 s"),
        (report.human_time, 59.99, "1 min 00 s"),
        (report.human_time, 3599.7, "1 h 00 min"),
        (report.human_time, 7625, "2 h 07 min"),
    ],
)
def test_human_units(function, amount, text):
    assert function(amount) == text


def test_a_method_keeps_its_colour_when_the_ranking_changes():
    one, two = report.styles_of(["b", "a", "c"]), report.styles_of(["c", "b", "a"])
    assert one == two
    many = report.styles_of([f"m{i}" for i in range(20)])
    assert len({(s["color"], s["linestyle"]) for s in many.values()}) == 20


def test_curves_use_the_rounds_that_all_seeds_have():
    runs = [
        [{"round": 1, "a": 0.1}, {"round": 2}, {"round": 3, "a": 0.3}],
        [{"round": 3, "a": 0.5}, {"round": 5, "a": 0.7}],
    ]
    rounds, values = report._common(runs, "a")
    assert rounds == [3]
    np.testing.assert_array_equal(values, [[0.3], [0.5]])


def test_a_report_of_run_folders(tmp_path):
    for label in ("fedavg", "heterofl"):
        for seed in (0, 1):
            run = Run.create(tmp_path / f"{label}{seed}", label, {"seed": seed}, {"seed": seed})
            run.append(
                [
                    {"round": r, "seconds": 1.0, "accuracy_mean": r / 4, "accuracy_1": 0.5}
                    | {"accuracy_0.5": 0.25, "accuracy_worst": 0.25}
                    for r in (1, 2, 3)
                ]
            )
            run.finish("finished", summary(run.rounds(), label, seed))
    write_report(tmp_path / "out", records(tmp_path))
    files = {str(f.relative_to(tmp_path / "out")) for f in (tmp_path / "out").rglob("*.*")}
    assert files == {
        "results.csv",
        "results.md",
        "results.tex",
        "plots/learning_curves.png",
        "plots/accuracy_by_capacity.png",
    }
    assert (tmp_path / "out" / "results.csv").read_text().count("\n") == 5


# what accuracy costs


def offer(macs, accuracy, label="a", capacity=1.0):
    return Offer(label, "", capacity, 10 * macs, macs, accuracy)


def test_what_nothing_dominates():
    best, cheap, rest = offer(100, 0.9), offer(10, 0.5), [offer(100, 0.8), offer(50, 0.5), offer(200, 0.9)]
    assert pareto([rest[0], best, cheap, *rest]) == [cheap, best]
    assert pareto([offer(10, 0.5, "b"), offer(10, 0.5, "c")]) == [offer(10, 0.5, "b")]
    assert pareto([]) == []


NETWORKS = {"parameters_1": 100, "macs_1": 1000, "parameters_0.125": 12, "macs_0.125": 130}


def test_offers_are_means_over_seeds_of_one_point():
    rows = [
        record("a", 0, 0.5, point="lr=0.1", **NETWORKS),
        record("a", 1, 0.25, point="lr=0.1", **NETWORKS),
        record("a", 0, 0.375, lr=0.2, point="lr=0.2", **NETWORKS),
        record("a", 0, None, lr=0.3, status="failed", **NETWORKS),
        record("b", 0, 0.5),
    ]
    assert offers(rows) == [
        Offer("a", "lr=0.1", 1.0, 100, 1000, pytest.approx(0.475)),
        Offer("a", "lr=0.1", 0.125, 12, 130, pytest.approx(0.275)),
        Offer("a", "lr=0.2", 1.0, 100, 1000, 0.475),
        Offer("a", "lr=0.2", 0.125, 12, 130, 0.275),
    ]
    assert offers(rows, "validation_accuracy") == []


def test_the_front_of_a_sweep_is_by_what_it_is_tuned_by(tmp_path):
    rows = [
        record("a", 0, 0.5, **NETWORKS, **{"validation_accuracy_1": 0.75, "validation_accuracy_0.125": 0.25}),
        record(
            "b", 0, 0.7, point="x=1", **NETWORKS, **{"validation_accuracy_1": 0.5, "validation_accuracy_0.125": 0.375}
        ),
    ]
    write_pareto(tmp_path, rows, "validation_accuracy_mean")
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


def test_networks_of_one_cost_have_no_front(tmp_path):
    write_pareto(tmp_path, [record("a", 0, 0.5, parameters_1=1, macs_1=10)])
    assert list(tmp_path.iterdir()) == []


def test_what_networks_cost_is_in_a_run_s_result(tmp_path):
    run = Run.create(tmp_path, "a", {"method": {"submodels": [{"width": 1}]}}, {"point": "lr=1"}, costs={"macs_1": 7})
    run.finish("finished", summary([], "a", 0))
    [row] = records(tmp_path)
    assert (row["macs_1"], row["point"], row["params"]) == (7, "lr=1", {"method.submodels.0.width": 1})
    assert Run.open(tmp_path).result["macs_1"] == 7


def test_plots_are_pngs(tmp_path):
    counts = np.arange(12).reshape(4, 3)
    report.label_distribution(tmp_path / "labels.png", counts)
    report.accuracy_histogram(tmp_path / "clients.png", {"a": np.array([0.1, 1.0])})
    report.learning_curves(tmp_path / "curves.png", {"a": [[{"round": 1}]]})
    for file in ("labels.png", "clients.png", "curves.png"):
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")
