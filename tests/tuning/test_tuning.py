"""Sweeps, as far as they need no Ray: what is searched, under which budget, and what is refused."""

import errno
import io
import math
import pickle
import time
from types import SimpleNamespace

import pytest
import yaml
from helpers import TINY
from ray.tune.experiment import Trial
from rich.console import Console
from rows import folder, line
from sweeps import LR, ROUNDS, refused, write

from rayfl.config import ConfigError, parse
from rayfl.config.plain import short
from rayfl.engine.plugins import packed
from rayfl.methods.dense import Dense
from rayfl.results import files
from rayfl.results.console import SweepProgress
from rayfl.results.folder import RunFolder
from rayfl.tuning import check as checks
from rayfl.tuning import comparison
from rayfl.tuning import sweep as sweeps
from rayfl.tuning.load import load_sweep
from rayfl.tuning.recorder import Recorder, folder_name
from rayfl.tuning.search import scheduler_of, searcher_of, trial_config
from rayfl.tuning.space import Search, text_of
from rayfl.tuning.stages import have_ended

# what is searched


def points(search, seed=0):
    return parse(Search, search, "search").points(seed)


def test_every_combination_of_the_grids():
    space = {"a": {"grid": [1, 2]}, "b": {"grid": [3, 4, 5]}}
    assert points({"space": space, "trials": 9}) == [{"a": a, "b": b} for a in (1, 2) for b in (3, 4, 5)]
    assert points({}) == [{}]


def test_a_point_is_tried_once():
    space = {"a": {"randint": [4, 7]}, "b": {"grid": [1, True]}}
    assert len(points({"space": space, "trials": 9})) == 6
    assert points({"space": {"a": {"choice": [1, 1.0001]}}, "trials": 4}) in (
        [{"a": 1}, {"a": 1.0001}],
        [{"a": 1.0001}, {"a": 1}],
    )


def test_draws_are_stratified_and_the_same_for_every_row():
    space = {
        "u": {"uniform": [1.0, 3.0]},
        "l": {"loguniform": [0.01, 100]},
        "i": {"randint": [10, 18]},
        "n": {"randint": [-4, 4]},
        "c": {"choice": ["x", "y"]},
    }
    search = {"space": space, "trials": 8}
    drawn = points(search)
    assert drawn == points(search) != points(search, seed=1)
    assert sorted(int((p["u"] - 1) * 4) for p in drawn) == list(range(8))
    assert sorted(int((2 + math.log10(p["l"])) * 2) for p in drawn) == list(range(8))
    assert sorted(p["i"] for p in drawn) == list(range(10, 18))
    assert sorted(p["n"] for p in drawn) == list(range(-4, 4))
    assert sorted(p["c"] for p in drawn) == ["x"] * 4 + ["y"] * 4


def test_draws_for_each_combination_of_the_grids():
    drawn = points({"space": {"g": {"grid": [1, 2]}, "u": {"uniform": [0, 1]}}, "trials": 3})
    assert [p["g"] for p in drawn] == [1, 1, 1, 2, 2, 2]
    assert [p["u"] for p in drawn[:3]] == [p["u"] for p in drawn[3:]]


@pytest.mark.parametrize(
    ("domain", "said"),
    [
        ({"gird": [1]}, ".gird: unknown key 'gird'. Did you mean 'grid'?"),
        ({"grid": 0.1}, ".grid: 0.1 is not valid. Allowed: a list"),
        ({"grid": None}, ".grid: None is not valid. Allowed: a list"),
        ({"grid": []}, ".grid: [] is not valid. Allowed: a length of at least 1"),
        ({"grid": [{"a": 1}]}, ".grid: [{'a': 1}] is not valid. Allowed: single values; sections that differ are rows"),
        ({"grid": [0.1, 1, 1.0]}, ".grid: [0.1, 1, 1.0] is not valid. Allowed: every value once"),
        ({"choice": ["a", "a"]}, ".choice: ['a', 'a'] is not valid. Allowed: every value once"),
        ({"uniform": [2, 1]}, ".uniform: [2, 1] is not valid. Allowed: [low, high] with low < high"),
        ({"uniform": [1]}, ".uniform: [1] is not valid. Allowed: a length of at least 2"),
        ({"uniform": [False, 1]}, ".uniform.0: False is not valid. Allowed: a number"),
        ({"loguniform": [0, 1]}, ".loguniform: [0, 1] is not valid. Allowed: [low, high] with a low above 0"),
        ({"randint": [0, 1.5]}, ".randint.1: 1.5 is not valid. Allowed: a whole number"),
        ([0.1, 1], ": [0.1, 1] is not valid. Allowed: {grid: [0.1, 1]}, or choice, uniform, loguniform or randint in"),
        ({}, ": {} is not valid. Allowed: exactly one of grid, choice, uniform, loguniform, randint"),
        ({"grid": [1], "choice": [1]}, ": {'grid': [1], 'choice': [1]} is not valid. Allowed: exactly one of grid"),
    ],
)
def test_a_domain_that_is_wrong(tmp_path, domain, said):
    assert refused(write(tmp_path, space={"training.lr": domain})).startswith(f"search.space.training.lr{said}")


def test_a_number_of_400_digits(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(f"experiment: {{}}\nsearch:\n  space: {{training.lr: {{randint: [0, {10**400}]}}}}\n")
    assert refused(path).startswith("search.space.training.lr.randint.1 (line 3): '1000")


@pytest.mark.parametrize(
    ("search", "said"),
    [
        (
            {"space": {"training.lr": {"grid": [0.1, -1]}}},
            "search.space: training.lr: -1 is not valid. Allowed: more than 0",
        ),
        (
            {"space": {"training.lr": {"grid": [True, 0.1]}}},
            "search.space: training.lr: True is not valid. Allowed: a number",
        ),
        ({"space": {"training.lr": {"uniform": [-1, 1]}}}, "search.space: training.lr: -0.66"),
        ({"space": {"training.rate": {"grid": [0.1]}}}, "search.space: training.rate: unknown key 'rate'"),
        ({"space": {"seed": {"grid": [1, 2]}}}, "search.space: {'seed': {'grid': [1, 2]}} is not valid"),
        ({"seeds": []}, "search.seeds: [] is not valid. Allowed: a length of at least 1"),
        ({"seeds": [1, 1]}, "search.seeds: [1, 1] is not valid. Allowed: every seed once"),
        ({"trails": 3}, "search.trails: unknown key 'trails'. Did you mean 'trials'?"),
        ({"trials": 0}, "search.trials: 0 is not valid. Allowed: at least 1"),
        ({"trials": 10**9}, "search.trials: 1000000000 is not valid. Allowed: at most 10000"),
        (
            {"space": {"training.lr": {"grid": [rate / 1000 for rate in range(1, 10002)]}}, "trials": 2},
            "search: space: the grids and `trials` give 10001 points per row. Allowed: at most 10000",
        ),
        ({"trials": True}, "search.trials: True is not valid. Allowed: a whole number"),
        (
            {"space": LR | {"training.momentum": {"uniform": [0, 1]}}, "trials": 6000},
            "search: space: the grids and `trials` give 12000 points per row. Allowed: at most 10000",
        ),
        (
            {"options": {"grace_period": 3}},
            "search: options: {'grace_period': 3} are not used by scheduler fifo, which stops no trials",
        ),
        ({"scheduler": "asha", "options": {"grace": 3}}, "search.options.grace: unknown key 'grace'. Did you mean"),
        (
            {"scheduler": "asha", "options": {"brackets": 10**9}},
            "search.options.brackets: 1000000000 is not valid. Allowed: at",
        ),
        (
            {"scheduler": "asha", "options": {"reduction_factor": 1}},
            "search.options.reduction_factor: 1 is not valid. Allowed",
        ),
        (
            {"scheduler": "asha", "options": {"grace_period": 13}},
            "search.options.grace_period: 13 is not valid. Allowed: at most the run's 12 rounds",
        ),
        ({"scheduler": "hyperband", "options": {"brackets": 2}}, "search.options.brackets: unknown key 'brackets'"),
        ({"scheduler": "ahsa"}, "search.scheduler: 'ahsa' is not valid. Allowed: one of fifo, asha, hyperband, median"),
        ({"searcher": "optnua"}, "search.searcher: no searcher is called 'optnua'. Did you mean 'optuna'?"),
        ({"searcher": "variant_generator"}, "search.searcher: no searcher is called 'variant_generator'"),
        ({"searcher": "zoopt"}, "search.searcher: Ray Tune cannot make 'zoopt' (ZOOpt not found"),
        ({"space": {"data.samples": {"grid": [80, 60]}}}, "rows.heterofl (data.samples=60): data: {"),
        ({"space": {"run.threads": {"grid": [1, 2]}}}, "rows.heterofl (run.threads=2): run: {"),
        (
            {"space": {"rounds": {"grid": [2, 4]}}, "scheduler": "asha"},
            "search.scheduler: asha compares trials at equal rounds, and rounds is tuned with rows.heterofl",
        ),
    ],
)
def test_a_search_that_is_wrong(tmp_path, search, said):
    assert refused(write(tmp_path, **search)).startswith(said)


def test_the_upper_end_of_a_range_is_not_drawn(tmp_path):
    """There are 6 clients."""
    spaces = {"clients.cohort": {"randint": [1, 7]}, "training.momentum": {"uniform": [0, 1]}}
    assert load_sweep(write(tmp_path, space=spaces)).points
    assert "a cohort of at most count = 6" in refused(write(tmp_path, space={"clients.cohort": {"randint": [1, 8]}}))


def test_every_known_scheduler_and_searcher_can_be_made(tmp_path):
    for name in ("asha", "hyperband", "median"):
        assert scheduler_of(Search(scheduler=name), ROUNDS, "here") is not None
    assert scheduler_of(Search(), ROUNDS, "here") is None
    assert searcher_of(Search(searcher="optuna"), "max", "here").metric == "validation_accuracy_mean"
    assert searcher_of(Search(), "max", "here") is None


def test_hyperband_does_not_wait_for_trials_that_ended_before_a_resume():
    """Tune adds them again, and they have no further result."""
    scheduler = scheduler_of(Search(scheduler="hyperband"), 9, "here")
    scheduler.set_search_properties("accuracy", "max")
    trials = [Trial("any", stub=True) for _ in range(3)]
    trials[1].status = Trial.TERMINATED
    for trial in trials:
        scheduler.on_trial_add(None, trial)
    assert list(scheduler._trial_info) == [trials[0], trials[2]]


def test_a_searcher_draws_from_grids_of_any_size(tmp_path):
    """Only examples of its points are made."""
    grid = {"grid": [i / 1000 for i in range(1, 301)]}
    space = {f"training.{setting}": grid for setting in ("lr", "momentum", "weight_decay")}
    assert refused(write(tmp_path, space=space)).startswith("search: space: the grids and `trials` give 27000000 poi")
    plan = load_sweep(write(tmp_path, space=space, searcher="optuna", trials=4))
    assert plan.trials == 4 and len(plan.points["heterofl"]) < 1000


def test_rows_that_are_wrong(tmp_path):
    said = refused(write(tmp_path, {"a": {"training.lr": 0.5}}))
    assert said.startswith("rows.a: unknown key 'training.lr'. Did you mean 'training'?")
    said = refused(write(tmp_path), rows="heterfl")
    assert said == "--rows: no row is called 'heterfl'. Did you mean 'heterofl'? Allowed: heterofl"
    assert refused(write(tmp_path, rows=["hetrofl"])).startswith("rows.hetrofl: method.name: no method is called")
    assert refused(write(tmp_path, rows={"../up": {}})).startswith(
        "rows: '../up' is not valid. Allowed: the name of a folder"
    )
    assert refused(write(tmp_path, rows={"..": {}})).startswith(
        "rows: '..' is not valid. Allowed: the name of a folder"
    )
    assert refused(write(tmp_path, rows={"a b": {}})).startswith("rows: 'a b' is not valid. Allowed: letters, digits")
    assert refused(write(tmp_path, rows={"a": [1]})) == "rows.a: [1] is not valid. Allowed: sections of the experiment"
    assert (
        refused(write(tmp_path, rows={"a": {"seed": 1}}))
        == "rows.a.seed: 1 is not valid. Allowed: search.seeds instead"
    )
    serial = refused(write(tmp_path, experiment={"run": {"executor": "serial"}}))
    assert (
        serial
        == "rows.heterofl: run.executor: 'serial' is not valid. Allowed: 'ray', because trials of a sweep run on Ray"
    )
    path = tmp_path / "small.yaml"
    for key in ("5", "~", "true"):
        path.write_text(f"experiment: {{}}\nrows:\n  {key}: {{}}\n")
        assert refused(path) == f'rows (line 3): the key {key} is not text. Allowed: text, e.g. "{key}" in quotes'


def test_a_row_with_domains_of_its_own(tmp_path):
    """They are combined with the common space, or replace a domain of it; other rows are unchanged."""
    prox = {"method.mu": {"grid": [0.01, 0.1, 1]}, "training.lr": {"grid": [0.3]}}
    path = write(tmp_path, ("fedavg", "fedprox"), space=LR, spaces={"fedprox": prox}, seeds=[0, 1])
    sweep = load_sweep(path)
    assert sweep.points == {
        "fedavg": [{"training.lr": 0.1}, {"training.lr": 0.2}],
        "fedprox": [{"training.lr": 0.3, "method.mu": mu} for mu in (0.01, 0.1, 1)],
    }
    assert sweep.facts()["tuned"] == ["training.lr", "method.mu"] and sweep.trials == 2 + 3 + 2
    for row in sweep.rows:
        point = sweep.points[row][-1]
        assert sweep.point(row, sweep.experiment(row, point, 0).plain()) == point
    assert load_sweep(path, rows="fedavg").facts()["tuned"] == ["training.lr"]
    assert load_sweep(path, ["search.spaces={}"]).points["fedprox"] == sweep.points["fedavg"]
    fewer = load_sweep(path, ["search.space.training.lr.grid=[0.7]", "search.spaces.fedprox.method.mu.grid=[2]"])
    assert fewer.points == {"fedavg": [{"training.lr": 0.7}], "fedprox": [{"training.lr": 0.3, "method.mu": 2}]}
    dotted = {"heterofl.mean": {"method": "heterofl"}, "heterofl": {"method": "heterofl"}}
    path_of_dots = write(tmp_path, dotted, space=LR, spaces={"heterofl.mean": {"training.lr": {"grid": [0.3]}}})
    for setting in ("search.spaces.heterofl.mean.training.lr.grid=[2]", "search.spaces.heterofl.mean={}"):
        points = load_sweep(path_of_dots, [setting]).points
        assert points["heterofl.mean"] == (points["heterofl"] if "{}" in setting else [{"training.lr": 2}])
    path = write(tmp_path, ("fedavg", "fedprox"), space=LR, spaces={"fedprox": prox}, seeds=[0, 1])
    said = refused(path, ["method.mu=5"])
    assert said.startswith(
        "--set method.mu: the setting is in search.spaces.fedprox, which decides it. Hint: --set search.sp"
    )


@pytest.mark.parametrize(
    ("spaces", "said"),
    [
        ({"fedprix": LR}, "search.spaces: no row is called 'fedprix'"),
        ({"fedprox": {"method.nu": {"grid": [1, 2]}}}, "search.spaces.fedprox: method.nu: unknown key"),
        ({"fedprox": {"seed": {"grid": [1, 2]}}}, "search.spaces: "),
        ({"fedprox": {"method.mu": {"grid": list(range(6000))}}}, "search: space: the grids and `trials` give 12000"),
        ({"fedprox": {"method": {"choice": ["fedavg"]}}}, "rows.fedprox.method: 'fedprox' is in search.space too"),
    ],
)
def test_domains_of_a_row_that_are_wrong(tmp_path, spaces, said):
    assert refused(write(tmp_path, ("fedavg", "fedprox"), space=LR, spaces=spaces)).startswith(said)


def test_a_row_changes_single_settings_as_a_setting_of_the_command_line_does(tmp_path):
    weights = {"name": "fedprox", "weight": "uniform"}
    experiment = {"updates": {"secure_aggregation": {"limit": 4.0}}, "method": weights}
    row = {"updates": {"secure_aggregation": {"bits": 12}}}
    plan = load_sweep(
        write(tmp_path, {"a": {}, "b": row, "c": {"method": {"name": "fedavg", "weight": "uniform"}}}, experiment)
    )
    changed = load_sweep(write(tmp_path, {"b": {}}, experiment), ["updates.secure_aggregation.bits=12"])
    assert plan.example("b").plain() == changed.example("b").plain() != plan.example("a").plain()
    assert plan.example("c").method.name == "fedavg"
    plan = load_sweep(write(tmp_path, {"a": {"method": {"mu": 0.5}}}, {"method": "fedprox"}))
    assert (plan.example("a").method.name, plan.example("a").method.mu) == ("fedprox", 0.5)


def test_the_default_section_can_be_changed(tmp_path):
    path = write(tmp_path, {"a": {}})
    given = yaml.safe_load(path.read_text())
    given["experiment"].pop("method", None)
    path.write_text(yaml.safe_dump(given))
    method = load_sweep(path, ["method.size=smallest"]).example("a").method
    assert (method.name, method.size) == ("fedavg", "smallest")


def test_a_section_and_its_settings_are_tuned_in_any_order(tmp_path):
    named, mu = {"method": {"grid": ["fedprox"]}}, {"method.mu": {"grid": [0.1, 0.5]}}
    for space in (named | mu, mu | named):
        plan = load_sweep(write(tmp_path, {"any": {}}, space=space))
        assert [plan.experiment("any", point, 0).method.mu for point in plan.points["any"]] == [0.1, 0.5]


def test_a_row_decides_nothing_that_is_searched(tmp_path):
    rows = {"slow": {"training": {"lr": 0.1}}}
    said = "rows.slow.training.lr: 0.1 is in search.space too. Allowed: one of both"
    assert refused(write(tmp_path, rows, space=LR)) == said
    whole = {"training": {"choice": ["slow", "fast"]}}
    assert refused(write(tmp_path, rows, space=whole)) == said
    assert refused(write(tmp_path, space=LR), ["training.lr=1"]) == (
        "--set training.lr: the setting is in search.space, which decides it. Hint: --set search.space={} "
        "searches "
        "nothing"
    )
    said = "--set training: the setting is in search.space, which decides it."
    assert refused(write(tmp_path, space=LR), ["training={lr: 1}"]).startswith(said)
    named = {"method": {"grid": ["fedprox", "fedavg"]}}
    said = "--set method.mu: the setting is in search.space, which decides it."
    assert refused(write(tmp_path, {"any": {}}, space=named), ["method.mu=0.7"]).startswith(said)
    mu = {"method.mu": {"grid": [0.1, 0.5]}}
    assert load_sweep(write(tmp_path, {"any": {}}, space=mu), ["method=fedprox"]).trials == 2


@pytest.mark.parametrize("search", [{"space": 5}, {"spaces": [1]}, {"spaces": {"heterofl": 5}}])
def test_a_search_that_is_no_section_is_refused_with_settings_too(tmp_path, search):
    assert refused(write(tmp_path, **search), ["training.lr=1"]).startswith("search.space")


def test_the_setting_of_a_seed_is_search_seeds(tmp_path):
    said = "--set seed: 3 is not valid. Allowed: search.seeds, as in --set search.seeds=[3]"
    assert refused(write(tmp_path), ["seed=3"]) == said
    assert load_sweep(write(tmp_path), ["search.seeds=[3]"]).search.seeds == (3,)


def test_of_a_large_search_few_experiments_are_made(tmp_path, monkeypatch):
    space = {"training.lr": {"grid": [i / 100 for i in range(1, 101)]}, "training.momentum": {"uniform": [0, 0.9]}}
    made = []
    whole = sweeps.Sweep.experiment
    monkeypatch.setattr(sweeps.Sweep, "experiment", lambda *given: made.append(given) or whole(*given))
    plan = load_sweep(write(tmp_path, space=space, trials=100))
    assert plan.trials == 10_000 and checks.CHECKED <= len(made) <= checks.CHECKED + 5


def test_what_combinations_show(tmp_path):
    """Alone each value is right; together 6 clients are too few."""
    space = {"clients.cohort": {"grid": [4, 6]}, "clients.count": {"grid": [6, 5]}}
    assert "a cohort of at most count = 5 clients; cohort is 6" in refused(write(tmp_path, space=space))


# by what


LOCAL = {"standalone": {"method": "standalone"}}


@pytest.mark.parametrize(
    ("rows", "search", "said"),
    [
        (
            ["heterofl"],
            {"metric": "accuracy_worst"},
            "'accuracy_worst' uses test data. Allowed for tuning: validation_accuracy_worst (with "
            "evaluation.holdout), or any metric with search.allow_test: true",
        ),
        (
            ["heterofl"],
            {"metric": "local_loss_mean"},
            "'local_loss_mean' uses test data. Allowed for tuning: local_validation_loss_mean (with "
            "evaluation.local_holdout)",
        ),
        (["heterofl"], {"metric": "accuracy"}, "no metric is called 'accuracy'. Did you mean 'accuracy_mean'?"),
        (
            LOCAL,
            {},
            "'validation_accuracy_mean' does not fit rows.standalone, whose clients have personal networks. Allowed: "
            "local_validation_accuracy_mean (with evaluation.local_holdout) or another of local_*",
        ),
        (LOCAL, {"metric": "local_accuracy_mean"}, "'local_accuracy_mean' uses test data"),
        (
            LOCAL,
            {"metric": "local_validation_accuracy_mean"},
            "'local_validation_accuracy_mean' needs validation data with rows.standalone. Allowed: "
            "evaluation.local_holdout above 0",
        ),
    ],
)
def test_a_metric_that_is_wrong(tmp_path, rows, search, said):
    assert refused(write(tmp_path, rows, space=LR, **search)).startswith(f"search.metric: {said}")


@pytest.mark.parametrize(
    ("experiment", "search", "metric"),
    [
        ({"listeners": [{"name": "early_stopping", "metric": "accuracy_mean"}]}, {}, "accuracy_mean"),
        # without validation data, patience goes by test data
        ({"run": {"chunk": 1, "patience": 1}, "evaluation": {"every": 1, "holdout": 0}}, {"metric": "train_loss"}, ""),
    ],
)
def test_test_data_do_not_end_what_is_tuned(tmp_path, experiment, search, metric):
    given = {"experiment": experiment, "space": LR, **search}
    assert refused(write(tmp_path, **given)).startswith(
        f"early stopping with rows.heterofl: '{metric or 'accuracy_mean'}' uses test data. Allowed for tuning: "
        "validation_accuracy_mean (with evaluation.holdout)"
    )
    load_sweep(write(tmp_path, **given, allow_test=True))
    load_sweep(write(tmp_path, **given | {"space": {}}))


def test_an_entry_of_a_list_of_values_is_not_tuned_alone(tmp_path):
    """No table could show it."""
    space = {"training.milestones.0": {"grid": [1, 2]}}
    assert refused(write(tmp_path, experiment={"training": {"lr": 0.1, "milestones": [2]}}, space=space)) == (
        "search.space.training.milestones.0: [1] is a list of values, which are not tuned one by one. Allowed: "
        "training.milestones with whole lists"
    )


def test_what_is_tuned_by(tmp_path):
    plan = load_sweep(write(tmp_path, space=LR, metric="accuracy_mean", allow_test=True))
    assert (plan.mode, plan.facts()["judge"]) == ("max", "accuracy_mean")
    assert load_sweep(write(tmp_path, metric="accuracy_mean")).trials == 1, "nothing is chosen by it"
    plan = load_sweep(write(tmp_path, metric="train_loss", space=LR))
    assert (plan.mode, plan.facts()["judge"]) == ("min", "accuracy_mean")
    assert load_sweep(write(tmp_path, metric="train_loss", mode="max", space=LR)).mode == "max"
    held = {"evaluation": {"every": 3, "local_holdout": 0.2}}
    plan = load_sweep(write(tmp_path, LOCAL, held, metric="local_validation_loss_mean", space=LR))
    assert (plan.mode, plan.facts()["judge"]) == ("min", "local_accuracy_mean")


def test_the_facts_of_a_sweep(tmp_path):
    rows = {"few": {"clients": {"capacities": [1, 0.25], "weights": [0, 1]}}, "many": {}}
    assert load_sweep(write(tmp_path, rows, space=LR)).facts() == {
        "tuned": ["training.lr"],
        "judge": "accuracy_mean",
        "capacities": [1, 0.3, 0.25, 0.2, 0.1],
        "trained": [0.3, 0.25, 0.2, 0.1],
        "scores": {"accuracy": "max", "loss": "min"},
        "clients": 6,
        "rounds": ROUNDS,
    }


def test_what_is_for_people_is_no_part_of_the_experiment(tmp_path):
    path = write(tmp_path, {"few": {"title": "Few\n clients", "rounds": 3}, "many": {}})
    path.write_text("question: |\n  Is more\n  better?\n" + path.read_text())
    plan = load_sweep(path)
    assert (plan.question, plan.titles) == ("Is more better?", {"few": "Few clients"})
    assert plan.example("few").rounds == 3
    assert {key: plan.plain()[key] for key in ("question", "titles")} == {
        "question": "Is more better?",
        "titles": {"few": "Few clients"},
    }
    assert load_sweep(path, rows="many").titles == {}
    assert refused(write(tmp_path, {"few": {"title": 3}})) == "rows.few: title: 3 is not valid. Allowed: text"


# trials


def test_a_resumed_sweep_has_the_published_numbers_of_its_file(tmp_path):
    path = write(tmp_path)
    for accuracy in (90, 91):
        given = yaml.safe_load(path.read_text())
        numbers = {"best_accuracy_mean": {"heterofl": accuracy}}
        path.write_text(yaml.safe_dump(given | {"published": {"source": "a table", "numbers": numbers}}))
        record = comparison._open_sweep(tmp_path / "runs", load_sweep(path), {})
        record.finish("stopped")
        assert str(accuracy) in RunFolder.open(record.path).config["published"]


def test_settings_change_a_published_sweep_whose_space_supplies_what_is_required(tmp_path):
    path = write(tmp_path, {"any": {}}, space={"model": {"grid": ["digits_cnn"]}})
    given = yaml.safe_load(path.read_text())
    del given["experiment"]["model"]
    numbers = {"best_accuracy_mean": {"any": 90}}
    path.write_text(yaml.safe_dump(given | {"published": {"source": "a table", "numbers": numbers}}))
    assert load_sweep(path, ["rounds=3"]).changed == (f"rounds: {ROUNDS} -> 3",)


def test_how_many_trials_there_will_be(tmp_path):
    space = {"training.lr": {"grid": [0.1, 0.2]}, "training.momentum": {"uniform": [0, 0.9]}}
    path = write(tmp_path, ["heterofl", "fedrolex"], space=space, trials=3, seeds=[0, 1, 2])
    assert load_sweep(path).trials == 2 * (2 * 3 + 2)
    path = write(tmp_path, space=space, trials=3, searcher="optuna")
    assert load_sweep(path).trials == 3


def test_the_point_of_a_configuration(tmp_path):
    space = {
        "method": {"grid": ["heterofl", "fedrolex"]},
        "training.lr": {"uniform": [0.1, 0.2]},
        "clients.capacities": {"choice": [[0.3, 0.2], [0.3, 0.1]]},
        "clients.participation": {"grid": ["fixed", "poisson"]},
    }
    plan = load_sweep(write(tmp_path, {"any": {}}, space=space, trials=2))
    assert len(plan.points["any"]) == 8
    for point in plan.points["any"]:
        assert plan.point("any", plan.experiment("any", point, 0).plain()) == point


def test_a_trials_folder_is_one_component_of_a_path():
    name = folder_name("a.b", {"data.root": "../../etc/x y\n\0", "method.parts.0.width": 0.123456}, 3, "12ab_00001")
    assert name == "a.b-root=.._.._etc_x_y__-0.width=0.123-s3-12ab_00001"
    name = folder_name("ä" * 75, {"x": "é" * 500}, 3, "12ab_00001")
    assert len(name.encode()) <= 150 and name.endswith("-12ab_00001")


def recording(tmp_path):
    """A recorder of a running sweep, and its trial, which has started."""
    run = folder(tmp_path / "sweep", kind="sweep", status="running")
    recorder = Recorder(load_sweep(write(tmp_path)), run, SweepProgress(1, ROUNDS), lambda path: None)
    trial = SimpleNamespace(trial_id="a", config=trial_config("heterofl", 0, {}), checkpoint=None)
    recorder.on_trial_start(0, [trial], trial)
    return recorder, trial


def test_a_trial_has_ended_when_its_record_has(tmp_path):
    recorder, trial = recording(tmp_path)
    run = recorder.run
    assert not have_ended(run.path, run.id, {"a", "b"}) and have_ended(run.path, run.id, {"b"})
    assert have_ended(run.path, "another sweep", {"a"})
    recorder.on_trial_result(0, [trial], trial, {"lines": [line(1)]})
    recorder.on_trial_complete(0, [trial], trial)
    assert have_ended(run.path, run.id, {"a", "b"})


def test_a_trial_goes_on_only_if_it_has_a_line_for_every_round_before(tmp_path):
    """A run that restores an older checkpoint makes rounds again; one without a line would leave a hole."""
    recorder, trial = recording(tmp_path)
    record = recorder.trials["a"]

    def told(*rounds):
        recorder.on_trial_result(0, [trial], trial, {"lines": [line(round) for round in rounds]})
        return [line["round"] for line in record.rounds()]

    assert told(1, 2, 3, 4, 5) == [1, 2, 3, 4, 5]
    assert told(4, 5, 6) == [1, 2, 3, 4, 5, 6]
    file = record.path / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(
        ConfigError, match="the line is of round 2. Allowed: round 1, but the run resumes after round 6"
    ):
        told(7)
    assert recorder.refusal is not None


def test_what_a_killed_process_left_is_marked_as_stopped(tmp_path):
    """Ray Tune may not know such a trial any more, and run its point as another one."""
    plan = load_sweep(write(tmp_path))
    run = folder(tmp_path / "sweep", kind="sweep", status="running")
    for name, status, sweep in (("a", "running", run.id), ("b", "finished", run.id), ("c", "running", "another")):
        config = {"seed": 0, "rounds": 1}
        trial = folder(run.path / "trials" / f"x-{name}", lines=[line(1)], sweep=sweep, status="running", config=config)
        trial.tags["point"] = ""
        trial.status = status
        trial.save()
    followed = []
    progress = SweepProgress(1, ROUNDS, console=Console(file=io.StringIO()))
    Recorder(plan, run, progress, lambda path: followed.append(path.name)).recall()
    found = {path.name: RunFolder.open(path).status for path in (run.path / "trials").iterdir()}
    assert found == {"x-a": "stopped", "x-b": "finished", "x-c": "running"}
    assert followed == ["x-a", "x-b"]


def test_a_trial_restored_at_its_last_round_reports_its_last_metrics(tmp_path):
    """Searchers need their metric in the last result; a file that is too short is refused here too."""
    recorder, trial = recording(tmp_path)
    recorder.on_trial_result(0, [trial], trial, {"lines": [line(1), line(2, accuracy_mean=0.5)]})
    result = {"lines": [], "round": 2, "done": True}
    recorder.on_trial_result(0, [trial], trial, result)
    assert result["accuracy_mean"] == 0.5 and result["done"] is True and len(recorder.trials["a"].rounds()) == 2
    with pytest.raises(ConfigError, match="the file ends after round 2, but the run resumes after round 3"):
        recorder.on_trial_result(0, [trial], trial, {"lines": [], "round": 3, "done": True})
    assert recorder.refusal is not None


def test_lines_that_a_full_disk_refused_outlive_a_restart_of_their_trial(tmp_path, monkeypatch):
    recorder, trial = recording(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(files, "append_lines", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        recorder.on_trial_result(0, [trial], trial, {"lines": [line(1)]})
    recorder.on_trial_start(0, [trial], trial)
    recorder.on_trial_result(0, [trial], trial, {"lines": [line(2)]})
    assert [line["round"] for line in RunFolder.open(recorder.trials["a"].path).rounds()] == [1, 2]


def test_a_sweeps_hours_are_saved_when_a_trial_ends(tmp_path, monkeypatch):
    """So that a killed sweep loses little of them."""
    recorder, trial = recording(tmp_path)
    run = recorder.run
    recorder.on_trial_result(0, [trial], trial, {"lines": [line(1)]})
    assert run.counted is not None
    now = run.counted + 3600
    monkeypatch.setattr(time, "monotonic", lambda: now)
    recorder.on_trial_complete(0, [trial], trial)
    assert RunFolder.open(run.path).seconds == pytest.approx(3600)


def test_a_point_as_text():
    assert text_of({"training.lr": 0.012345, "method": "a/b", "x.0.y": [1, 2]}) == (
        "training.lr=0.0123, method=a/b, x.0.y=[1, 2]"
    )
    assert len(short([1] * 1000)) < 300


class Own(Dense):
    """A method of a user's package."""


def test_a_sweep_travels_as_what_its_file_says(tmp_path):
    """Classes of a user's package are found by name on the other side, and its files are shipped."""
    own = f"{__name__}:Own"
    plan = load_sweep(write(tmp_path, {"own": {"method": own}, "data": {"data": TINY["data"]}}, space=LR))
    assert plan.first.method.name == own
    sent = pickle.dumps(plan.described())
    assert b"Own" in sent and Own.__name__ == "Own" and len(sent) < 10_000
    arrived = pickle.loads(sent)
    assert "first" not in vars(arrived) and arrived.search == plan.search
    for row in plan.rows:
        theirs, ours = (s.experiment(row, {"training.lr": 0.1}, 0) for s in (arrived, plan))
        assert theirs.plain() == ours.plain()
    assert packed([plan, plan.first])
