"""Tables by hand: which trial is best, how methods rank, what a cell says."""

import csv
import io

import numpy as np
import pytest
from matplotlib.axes import Axes
from rich.console import Console

from rayfl import report
from rayfl.published import Published, markdown
from rayfl.published import table as beside
from rayfl.report import (
    Offer,
    best_csv,
    best_table,
    best_trials,
    by_label,
    capacities,
    judged_by,
    offers,
    pareto,
    results_csv,
    table,
    write_pareto,
    write_report,
)
from rayfl.tracking.records import Run, amounts, records, summaries, summary

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


def test_what_judges():
    """A sweep says it; else the method, where clients are evaluated."""
    alone = {"method.name": "standalone", "evaluation.clients": True}
    assert judged_by({"search.metric": "local_accuracy_worst"}) == judged_by(alone) == "local_accuracy_mean"
    others = [{}, {"method.name": "fedavg"}, alone | {"evaluation.clients": False}]
    others += [alone | {"search.metric": "validation_accuracy_mean"}]
    assert {judged_by(params) for params in others} == {"accuracy_mean"}


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
    clients = {"count": 8, "cohort": 4, "capacities": [1, 0.5, 0.1], "weights": [1, 1, 0]}
    for label in ("fedavg", "heterofl"):
        for seed in (0, 1):
            run = Run.create(tmp_path / f"{label}{seed}", label, {"seed": seed, "clients": clients}, {"seed": seed})
            run.append(
                [
                    {"round": r, "seconds": 1.0, "accuracy_mean": r / 4, "accuracy_1": 0.5, "accuracy_0.1": 0.125}
                    | {"accuracy_0.5": (r + seed) / 4, "accuracy_worst": 0.25, "bytes_up": SENT[label]}
                    for r in (1, 2, 3)
                ]
            )
            run.finish("finished", summary(run.rounds(), label, seed))
    out, plots = tmp_path / "out", tmp_path / "out" / "plots"
    write_report(out, records(tmp_path))
    drawn = ("accuracy_by_capacity", "accuracy_by_traffic", "curves_by_capacity", "learning_curves")
    tables = [f"{name}.{end}" for name in ("best", "results") for end in ("csv", "md", "tex")]
    assert sorted(file.name for file in out.iterdir()) == sorted([*tables, "plots"])
    assert sorted(file.name for file in plots.iterdir()) == [
        f"{name}.{end}" for name in drawn for end in ("csv", "png")
    ]
    assert (out / "results.csv").read_text().count("\n") == 5
    # beside every plot its numbers
    assert (plots / "learning_curves.csv").read_text() == (
        "round,fedavg,fedavg std,heterofl,heterofl std\n1,0.25,0.0,0.25,0.0\n2,0.5,0.0,0.5,0.0\n3,0.75,0.0,0.75,0.0\n"
    )
    assert (plots / "accuracy_by_traffic.csv").read_text() == (
        "method,round,gbit,accuracy_mean\n"
        "fedavg,1,2.0,0.25\nfedavg,2,4.0,0.5\nfedavg,3,6.0,0.75\n"
        "heterofl,1,0.125,0.25\nheterofl,2,0.25,0.5\nheterofl,3,0.375,0.75\n"
    )
    # no client has capacity 0.1
    header, *rows = csv.reader((plots / "accuracy_by_capacity.csv").read_text().splitlines())
    assert header == ["method", "capacity", "accuracy", "std", "trained"]
    assert [row[:3] + row[4:] for row in rows[:3]] == [
        ["fedavg", "1.0", "0.5", "1"],
        ["fedavg", "0.5", "0.875", "1"],
        ["fedavg", "0.1", "0.125", "0"],
    ]
    header, *rows = csv.reader((plots / "curves_by_capacity.csv").read_text().splitlines())
    assert header == ["capacity", "round", "fedavg", "fedavg std", "heterofl", "heterofl std"]
    assert [row[:3] for row in rows] == [["1.0", str(r), "0.5"] for r in (1, 2, 3)] + [
        ["0.5", str(r), str((r + 0.5) / 4)] for r in (1, 2, 3)
    ]


def test_the_server_s_network_is_not_drawn_where_clients_have_their_own(tmp_path, monkeypatch):
    """Beside others only theirs, in the colours of the other plots; of such a run nothing by capacity."""
    drawn = {}
    plot = Axes.plot

    def remembered(self, *args, label="", **options):
        drawn.setdefault(label, set()).add(options.get("color"))
        return plot(self, *args, label=label, **options)

    monkeypatch.setattr(Axes, "plot", remembered)
    for label, method in (("alone", "standalone"), ("b", "fedavg"), ("c", "heterofl")):
        config = {"method": {"name": method}, "clients": {"count": 4, "cohort": 4, "capacities": [1, 0.5]}}
        run = Run.create(tmp_path / label, label, config, {"seed": 0}, costs={"macs_1": 9, "macs_0.5": 3})
        run.costs |= {"parameters_1": 9, "parameters_0.5": 3}
        run.append([personal(1, 0.75, **{"accuracy_1": 0.5, "accuracy_0.5": 0.25, "accuracy_worst": 0.25})])
        run.finish("finished", summary(run.rounds(), label, 0))
    out = tmp_path / "out"
    write_report(out, records(tmp_path), "local_accuracy_mean")
    write_pareto(out, records(tmp_path))
    read = {f: (out / f"{f}.csv").read_text() for f in ("plots/accuracy_by_capacity", "plots/curves_by_capacity")}
    assert read["plots/curves_by_capacity"].startswith("capacity,round,b,c\n")
    assert all("alone" not in text for text in [*read.values(), (out / "pareto.csv").read_text()])
    assert "alone" in (out / "plots" / "learning_curves.csv").read_text()
    assert drawn["b"] == {report.COLORS[1]}
    one = tmp_path / "one"
    write_report(one, records(tmp_path / "alone"), "local_accuracy_mean")
    assert [file.name for file in sorted((one / "plots").iterdir())] == ["learning_curves.csv", "learning_curves.png"]


SENT = {"fedavg": 250_000_000, "heterofl": 15_625_000}
"""Bytes a round: 2 and 1/8 Gbit."""


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


def test_of_a_masked_network_only_what_is_there_costs(tmp_path):
    """Its seeds' masks differ; what is not masked, as b, costs all of it."""
    shares = {"density_1": 1.0, "macs_share_1": 1.0, "density_0.125": 0.5}
    rows = [record("a", seed, 0.5, **NETWORKS, **shares, **{"macs_share_0.125": s}) for seed, s in ((0, 0.5), (1, 0.7))]
    found = {(o.label, o.capacity): (o.parameters, o.macs) for o in offers([*rows, record("b", 0, 0.5, **NETWORKS)])}
    assert found == {("a", 1.0): (100, 1000), ("a", 0.125): (6, 78), ("b", 1.0): (100, 1000), ("b", 0.125): (12, 130)}


# SpaFL's columns


def personal(round, local, density=None, **more):
    """A line of an evaluated round of masked networks that are clients' own."""
    own = {} if density is None else {"local_density": density, "local_density_conv": density}
    sent = {"bytes_down": 2320, "bytes_up": 2320, "train_flops": 12e9, "seconds": 1.0}
    return {"round": round, "accuracy_mean": 0.125, "local_accuracy_mean": local} | own | sent | more


LINES = [personal(1, 0.5, 0.75), personal(2, 0.875, 0.5), personal(3, 0.625, 0.25, density_1=0.375, macs_share_1=0.75)]


def run_of(label, lines, seed=0, clients=4):
    return {"label": label, "seed": seed, "status": "finished", "params": {"clients.count": str(clients)}} | summary(
        lines, label, seed
    )


def test_densities_of_a_run():
    """That of the best round, and the last ones."""
    result = summary(LINES, "spafl", 0)
    assert (result["local_density_at_best"], result["local_density"]) == (0.5, 0.25)
    assert (result["density_1"], result["macs_share_1"]) == (0.375, 0.75)
    assert "macs_1" not in result and "local_density_conv" not in result
    assert not [key for key in summary([personal(1, 0.5)], "fedavg", 0) if "density" in key or "macs" in key]


def test_amounts_are_spafl_s():
    """LeNet-5-Caffe in its table 1: 580 thresholds, 5000 client-rounds; FedAvg's FLOPs are 5 epochs of 600 samples
    in 50 rounds of every client, 2,293,000 multiply-adds forward, twice that backward."""
    sent = 5000 * 580 * 4
    row = {"rounds": 500, "params": {"clients.count": 100}, "bytes_down": sent, "bytes_up": sent}
    row["train_flops"] = 3 * 2 * 2_293_000 * 5 * 600 * 5000
    assert amounts(row) == {"gbit": pytest.approx(0.1856), "client_macs": pytest.approx(10.3185e11)}
    assert amounts(row | {"rounds": 0}) == {}


def test_best_rounds_and_amounts_by_hand():
    rows = [run_of("fedavg", [personal(1, 0.75)]), run_of("spafl", LINES)]
    assert best_table(rows, "local_accuracy_mean").markdown() == (
        "| method | seeds | best local % | best % | local density % | Gbit | MACs a client |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| spafl | 1 | 87.50 | 12.50 | 50.00 | 0.0001114 | 4.5 G |\n"
        "| fedavg | 1 | 75.00 | 12.50 | – | 3.712e-05 | 1.5 G |\n"
    )
    assert best_csv(rows, "local_accuracy_mean") == (
        "method,seed,best_local_accuracy_mean,best_accuracy_mean,local_density_at_best,gbit,client_macs\n"
        "spafl,0,0.875,0.125,0.5,0.00011136,4500000000.0\n"
        "fedavg,0,0.75,0.125,,3.712e-05,1500000000.0\n"
    )
    # nothing is masked, and one has failed
    dense = best_table([rows[0], {"label": "x", "seed": 0, "status": "failed", "params": {}}])
    assert dense.header == ["method", "seeds", "best local %", "best %", "Gbit", "MACs a client"]
    assert dense.rows[1] == ["x", "1", "–", "–", "–", "–"]


def test_published_amounts_are_in_their_own_units():
    """A difference is then in per cent of what was published; of nothing there is none."""
    accuracy = {"spafl": (85.0, 2.0)}
    numbers = {"best_local_accuracy_mean": accuracy, "gbit": {"spafl": 1e-4, "local": 0}, "client_macs": {"spafl": 9e9}}
    published = Published(source="Table 1", numbers=numbers)
    rows = [run_of("spafl", LINES), run_of("local", [personal(1, 0.5, bytes_down=0, bytes_up=0)])]
    found = beside(published, rows)
    assert found.header == ["method", "metric", "published", "ours", "difference", "in stds", "seeds", "rounds"]
    assert found.rows == [
        ["spafl", "best_local_accuracy_mean %", "85.00 ± 2.00", "87.50", "+2.50", "+1.2", "1", "3"],
        ["spafl", "gbit", "0.0001", "0.00011136", "+11.36%", "–", "1", "3"],
        ["spafl", "client_macs", "9e+09", "4.5e+09", "-50.00%", "–", "1", "3"],
        ["local", "gbit", "0", "0", "–", "–", "1", "1"],
    ]
    only = Published(source="Table 1", numbers={"gbit": {"spafl": 1e-4}})
    assert "| spafl | gbit | 0.0001 |" in markdown(only, [], rows)
    # a sweep's file may name them
    assert {"gbit", "client_macs", "local_density_at_best"} < set(summaries(["local_accuracy_mean"]))


# plots


def test_traffic_is_drawn_where_it_differs(tmp_path):
    lines = [personal(1, 0.5), personal(2, 0.75)]
    silent = [line | {"bytes_down": 0, "bytes_up": 0} for line in lines]
    report.accuracy_by_traffic(tmp_path / "same.png", {"a": [lines], "b": [lines, lines], "c": [[{"round": 1}]]})
    report.accuracy_by_traffic(tmp_path / "none.png", {"a": [silent], "b": [silent]})
    assert list(tmp_path.iterdir()) == []
    report.accuracy_by_traffic(tmp_path / "one.png", {"a": [lines], "local": [silent]}, "local_accuracy_mean")
    assert (tmp_path / "one.csv").read_text() == (
        "method,round,gbit,local_accuracy_mean\n"
        "a,1,3.712e-05,0.5\na,2,7.424e-05,0.75\nlocal,1,0.0,0.5\nlocal,2,0.0,0.75\n"
    )


def test_capacities_on_an_axis_are_apart():
    sizes = [1, 0.99, 0.9, 0.8, 0.64, 0.5, 0.36, 0.25, 0.125, 1 / 16, 0.04, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert report._apart([1, 1 / 4, 1 / 16, 1 / 64, *sizes]) == [
        1,
        1 / 4,
        1 / 16,
        1 / 64,
        0.64,
        0.125,
        0.04,
        1 / 128,
        1 / 256,
    ]
    assert report._apart([0.5]) == [0.5]


def test_plots_are_pngs(tmp_path):
    counts = np.arange(12).reshape(4, 3)
    report.label_distribution(tmp_path / "labels.png", counts)
    report.accuracy_histogram(tmp_path / "clients.png", {"a": [[0.1, 1.0]], "b": [[0.52, 0.5], [0.52, 0.9]]})
    report.learning_curves(tmp_path / "curves.png", {"a": [[{"round": 1}]]})
    for file in ("labels.png", "clients.png", "curves.png"):
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")
    header, *rows = csv.reader((tmp_path / "clients.csv").read_text().splitlines())
    assert [{edge: n for edge, n in zip(header, row, strict=True) if n != "0"} for row in rows] == [
        {"method": "a", "0.10": "1", "0.95": "1"},
        {"method": "b", "0.50": "1.5", "0.90": "0.5"},
    ]
    assert (tmp_path / "curves.csv").read_text() == "round,a\n"
