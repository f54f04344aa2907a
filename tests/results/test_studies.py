"""Comparison of studies: rows, significance, and other types of machines."""

import math

import pytest
from rows import FACTS, PERSONAL

from rayfl.results.made import here
from rayfl.results.studies import (
    Study,
    apart_said,
    differences_said,
    machines_said,
    ranking_said,
    side_by_side,
    unranked_said,
)
from rayfl.results.tables import results_csv, table


def row(label, value, seed=0, lr=0.1, made=(), **more):
    params = {"method.name": label, "training.lr": str(lr), "seed": str(seed)} | more
    facts, made = FACTS, [one.model_dump(mode="json") for one in made]
    return {"label": label, "title": label, "seed": seed, "params": params, "facts": facts, "made": made} | {
        "status": "finished",
        "accuracy_mean": value,
        "loss_mean": 1 - value,
    }


def sweep(label, *runs, facts=FACTS, experiment="runs", **params):
    about = {"label": label, "experiment": experiment, "params": {"search.metric": "accuracy_mean"} | params}
    return Study(about | {"facts": facts | {"tuned": ["training.lr"]}}, runs)


def test_labels_of_several_studies_begin_with_the_studys():
    one = sweep("one", row("a", 0.8), row("a", 0.9, lr=0.2), row("b", 0.5))
    best, judge, _ = side_by_side([one])
    assert [(run["label"], run["accuracy_mean"]) for run in best] == [
        ("a", 0.9),
        ("b", 0.5),
    ] and judge == "accuracy_mean"
    best, _, _ = side_by_side([one, sweep("one", row("a", 0.7)), sweep("two", row("a", 0.6))])
    assert [run["label"] for run in best] == ["one/a", "one/b", "one (2)/a", "two/a"]
    # of one file, in several folders
    best, _, _ = side_by_side([sweep("one", row("a", 0.7), experiment=name) for name in ("one", "other")])
    assert [run["label"] for run in best] == ["one/a", "other/a"]
    assert side_by_side([one], "loss_mean")[1] == "loss_mean"
    assert str(side_by_side([one])[2]["a"].settings[0]) == "0.2 (2 of 2) ↑"
    # judged by different numbers: the first that all rows have
    assert side_by_side([sweep("x", row("a", 0.1), facts=PERSONAL), one])[1] == "accuracy_mean"


def test_a_note_on_rows_without_a_ranked_trial():
    failed, diverged = row("b", 0.5) | {"status": "failed"}, row("c", math.nan)
    one, two = sweep("one", row("a", 0.8), failed, diverged), sweep("two", row("a", 0.6))
    why = "not ranked, because no finished trial has a finite accuracy_mean"
    assert unranked_said([one]) == [f"b: {why}", f"c: {why}"]
    assert unranked_said([two, one]) == [f"one/b: {why}", f"one/c: {why}"]


def test_a_note_on_studies_that_do_not_compare():
    one, two = sweep("one", row("a", 0.8)), sweep("two", row("a", 0.6), row("b", 0.6))
    assert ranking_said([one, two], "accuracy_mean") == ranking_said([one], "accuracy_mean") == []
    rows = [row("a", 0.6, seed) | {"local_accuracy_mean": 0.7} for seed in (0, 1)]
    other = sweep("own", *rows, facts=PERSONAL | {"rounds": 2})
    text = "ranked by accuracy_mean; own is judged by local_accuracy_mean; seeds differ: [0], [0, 1]"
    assert ranking_said([one, other], "accuracy_mean") == [text]
    personal = sweep("one", row("a", 0.8) | {"local_accuracy_mean": 0.9})
    assert ranking_said([personal, other], "accuracy_mean") == [f"{text}. Hint: --metric local_accuracy_mean"]
    assert ranking_said([one, other], "accuracy_mean", is_chosen=True) == [
        "ranked by accuracy_mean; seeds differ: [0], [0, 1]"
    ]


def on(alpha, label, value, **more):
    """Three seeds on a Dirichlet partition."""
    data = {"data.name": "digits", "partition.name": "dirichlet", "partition.alpha": alpha}
    return [row(label, value + seed / 1000, seed, **data | more) for seed in range(3)]


def test_rows_under_different_conditions_are_listed_and_not_tested():
    here, there = sweep("here", *on("0.3", "a", 0.9), *on("0.3", "b", 0.9)), sweep("there", *on("1.0", "a", 0.9))
    best, judge, _ = side_by_side([here, there])
    assert apart_said([here, there]) == [
        "Studies differ in partition: alpha 0.3 (here), 1.0 (there)",
        "Rows of studies that differ in partition are not tested, and no row is emphasised",
    ]
    # neither with the third row, nor in the table
    [said] = differences_said(best, judge)
    assert said.startswith("No significant difference between here/a and here/b: 0.00 points over 3 seeds, p = 1")
    assert table(best, judge).marks == {} and "like the best" not in results_csv(best, judge)
    # the same rows in one study, where a tie is a tie
    best, judge, _ = side_by_side([here])
    assert apart_said([here]) == [] and "like the best" in results_csv(best, judge)
    assert list(table(best, judge).marks.values()) == ["best", "like the best"] * (len(table(best, judge).marks) // 2)


def test_conditions_are_all_that_does_not_belong_to_a_row():
    def said(one, other, **params):
        return apart_said([sweep("one", *one), sweep("two", *other, **params)])

    mine = on("0.3", "a", 0.9)
    # method, tuned settings, hardware, folders of data
    own = {"method.mu": "1", "run.actors": "8", "listeners.0.name": "wandb", "data.root": "elsewhere"}
    assert said(mine, on("0.3", "b", 0.9, lr=0.5, **own)) == []
    # a row's changes in the sweep's file, of a setting or of a section with another class
    for changed in ("rows.b.partition.alpha", "rows.b.partition.name", "rows.b.partition"):
        assert said(mine, on("1.0", "b", 0.9), **{changed: "x"}) == []
    assert said(mine, on("1.0", "b", 0.9), **{"rows.other.partition": "x"})
    # a class differs: its settings are not compared; sections without a value
    assert said(mine, on("0.3", "b", 0.9, **{"partition.name": "iid", "privacy.noise": "1"}))[:-1] == [
        "Studies differ in partition: dirichlet (one), iid (two)",
        "Studies differ in privacy: noise – (one), 1 (two)",
    ]
    longer = [run | {"facts": FACTS | {"rounds": 9}} for run in mine]
    assert said(mine, longer)[0] == "Studies differ in rounds: 3 (one), 9 (two)"
    # another search ranks other points, but its runs compare
    assert said(mine, mine, **{"search.trials": "5", "search.seeds": "[0]"}) == [
        "Studies differ in search: trials – (one), 5 (two)"
    ]


def test_notes_on_significance_are_in_points():
    def seeds(label, *values):
        return [row(label, value, seed) for seed, value in enumerate(values)]

    rows = [*seeds("a", 0.90, 0.92, 0.94), *seeds("b", 0.91, 0.90, 0.92), *seeds("c", 0.70, 0.72, 0.73)]
    # differences -1, 2, 2 points: their mean over their deviation is 1 / sqrt(3), so t = 1
    assert differences_said(rows, "accuracy_mean") == [
        "No significant difference between a and b: 1.00 points over 3 seeds, p = 0.42 (paired t-test)"
    ]
    assert differences_said([*seeds("a", 0.90, 0.94), *seeds("b", 0.91, 0.92)], "accuracy_mean") == [
        "No significant difference between a and b: 0.50 points, p = 0.83 (t-test)"
    ]
    [said] = differences_said([*seeds("a", 0.90), *seeds("b", 0.1)], "accuracy_mean")
    assert said.startswith("Differences between rows with one seed each cannot be tested")
    assert differences_said([*seeds("a", 0.90), *seeds("b", 0.90)], "accuracy_mean") == [
        "No significant difference between a and b: results are equal"
    ]
    assert ": 0.01 over 3 seeds" in differences_said(rows, "loss_mean")[-1]
    assert differences_said([], "accuracy_mean") == []


def test_notes_on_types_of_machines():
    home, away = here(), here().model_copy(update={"cpu": "Another 9000"})
    assert machines_said([row("a", 0.9, made=[home]), row("b", 0.8, made=[home])], "accuracy_mean") == []
    runs = [row("a", 0.90, made=[home]), row("b", 0.80, made=[away]), row("c", 0.1)]
    [said] = machines_said(runs, "accuracy_mean")
    assert said.startswith("Runs used 2 types of machines, so bits may differ: ") and "Another 9000" in said
    # the same run there, with other actors, and with other settings
    repeated = [row("a", 0.91, made=[away], **{"run.actors": "4"}), row("a", 0.5, lr=0.2, made=[away])]
    said = machines_said([*runs, *repeated], "accuracy_mean")[1]
    assert said == "accuracy_mean of runs repeated on another type of machine differs by at most 1.00 points"


@pytest.mark.parametrize("metric", ["accuracy_mean", "loss_mean"])
def test_one_row_has_nothing_to_differ_from(metric):
    assert differences_said([row("a", 0.9), row("a", 0.8, seed=1)], metric) == []
