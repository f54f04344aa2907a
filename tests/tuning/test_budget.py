"""Searches under a budget of networks."""

from dataclasses import replace
from itertools import islice

import pytest
from helpers import Perceptron
from ray.tune.search import Searcher
from sweeps import refused, write

from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.methods.base import Task
from rayfl.training.settings import Training
from rayfl.tuning import sweep as sweeps
from rayfl.tuning import within as searchers
from rayfl.tuning.load import load_sweep
from rayfl.tuning.space import Budget
from rayfl.tuning.sweep import DRAWS
from rayfl.tuning.within import Within

NEFL = {"method": {"name": "nefl", "submodels": [{"capacity": 1}, {"capacity": 0.5}, {"capacity": 0.2}]}}
WIDTHS = {f"method.submodels.{i}.width": {"uniform": [0.3, 0.8]} for i in (1, 2)}


def searched(tmp_path, rows=None, **search):
    """A sweep over the widths of NeFL's submodels."""
    experiment = {"rounds": 2, "clients": {"count": 6, "cohort": 4, "capacities": [1, 0.5, 0.2], "metric": "params"}}
    search = {"space": WIDTHS, "budget": {}, "trials": 3} | search
    return write(tmp_path, rows or {"nefl": NEFL}, experiment, **search)


def shares(plan, row, point):
    """How many parameters networks of the widths of a point have, as shares of their capacities'."""
    whole = Net(plan.example(row).model)
    widths = [point[path] for path in WIDTHS]
    found = [replace(whole, width=width).parameters for width in widths]
    return [count / (c * whole.parameters) for count, c in zip(found, (0.5, 0.2), strict=True)]


def test_a_budget_by_hand():
    """n of 8 hidden units are 7 n + 4 parameters (2 n weights and n biases below, 4 n and 4 above), and 6 n
    multiply-adds."""
    model = Perceptron(hidden=(8,))
    nets = {1.0: Net(model), 0.5: Net(model, 0.5), 0.25: Net(model, 0.125)}
    task = Task(model, Training(), nets, 1.0, clients=1)
    assert Budget(low=0.7, high=1.0).excess(task) == (pytest.approx(32 / 30 - 1), 0.5, 32 / 30)
    assert Budget(low=0.9, high=1.07).excess(task) == (pytest.approx(0.9 - 11 / 15), 0.25, 11 / 15)
    assert Budget(low=11 / 15, high=32 / 30).excess(task).by == 0
    assert Budget(metric="flops", low=0.5, high=1.0).excess(task).by == 0
    assert Budget(metric="flops", low=0.6, high=1.0).excess(task) == (pytest.approx(0.1), 0.25, 0.5)
    assert Budget(low=0.99).excess(replace(task, nets={1.0: Net(model)})).by == 0
    small = replace(task, nets={0.25: Net(model, 0.125)}, server_capacity=0.25)
    assert Budget(low=0.4, high=0.5).excess(small).by > 0


def test_draws_go_on_until_enough_are_within(tmp_path):
    path = searched(tmp_path, rows={"nefl": NEFL, "again": NEFL}, trials=3, budget={"low": 0.8})
    plan = load_sweep(path)
    draws = islice(plan.search.draws(0), DRAWS)
    within = (p for p in draws if all(0.8 <= share <= 1 for share in shares(plan, "nefl", p)))
    found = list(islice(within, 3))
    assert plan.points == load_sweep(path).points == {"nefl": found, "again": found}
    assert next(plan.search.draws(0)) != found[0]
    assert plan.trials == 6
    assert plan.example("nefl").method.submodels[1].width == found[0]["method.submodels.1.width"]


def test_grids_outside_the_budget_are_left_out(tmp_path):
    paths = list(WIDTHS)
    space = {paths[0]: {"grid": [0.4, 0.69]}, paths[1]: {"grid": [0.42, 0.8]}}
    plan = load_sweep(searched(tmp_path, space=space))
    assert plan.points == {"nefl": [{paths[0]: 0.69, paths[1]: 0.42}]}
    assert plan.left_out("nefl") == [
        {paths[0]: 0.4, paths[1]: 0.42},
        {paths[0]: 0.4, paths[1]: 0.8},
        {paths[0]: 0.69, paths[1]: 0.8},
    ]
    assert plan.trials == 1
    assert load_sweep(searched(tmp_path)).left_out("nefl") == []


@pytest.mark.parametrize(
    ("search", "said"),
    [
        (
            {"space": {"method.submodels.2.width": {"grid": [0.3, 0.6]}}},
            "rows.nefl: search.budget: 0.9 to 1 of the params is too small; 0 points found, then none in 2. The "
            "nearest (method.submodels.2.width=0.3) gives capacity 0.2 a network of 0.",
        ),
        (
            {"budget": {"low": 1, "high": 0.9}},
            "search.budget: {'low': 1, 'high': 0.9} is not valid. Allowed: low at most",
        ),
        ({"budget": {"metric": "bytes"}}, "search.budget.metric: 'bytes' is not valid. Allowed: one of params, flops"),
        (
            {"space": {"method.submodels.3.width": {"grid": [1]}}},
            "rows.nefl: search.space: method.submodels.3.width: method.submodels is a list without the entry '3'. "
            "Allowed: 0 to 2",
        ),
    ],
)
def test_a_budget_that_is_wrong(tmp_path, search, said):
    assert refused(searched(tmp_path, **search)).startswith(said)


def test_draws_have_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "DRAWS", 5)
    said = refused(searched(tmp_path, budget={"low": 0.999}))
    assert "0 points found, then none in 5. The nearest" in said
    monkeypatch.setattr(sweeps, "MOST_TRIED", 4)
    assert refused(searched(tmp_path, budget={"low": 0.999})) == (
        "rows.nefl: search.budget: only 0 points are within 0.999 to 1 of the params, of the first 4 networks. "
        "Hint: widen search.budget, or lower search.trials or the grids"
    )


def test_a_network_is_compared_with_the_budget_once(tmp_path, monkeypatch):
    """Draws of a learning rate change no network: a combination outside is left out at its first, and points that are
    equal are tried once, as without a budget."""
    made, whole = [], sweeps.Sweep.excess
    monkeypatch.setattr(sweeps.Sweep, "excess", lambda *given: made.append(given) or whole(*given))
    first, second = WIDTHS
    space = {first: {"grid": [0.4, 0.69]}, second: {"grid": [0.42, 0.8]}, "training.lr": {"loguniform": [0.01, 1]}}
    plan = load_sweep(searched(tmp_path, space=space, trials=3))
    assert len(plan.points["nefl"]) == 3 and len(plan.left_out("nefl")) == 3 and len(made) == 4
    assert load_sweep(searched(tmp_path, space=space, searcher="optuna")).points["nefl"][0].keys() == space.keys()
    space = {first: {"grid": [0.69]}, second: {"grid": [0.42]}, "training.lr": {"choice": [0.1, 0.2]}}
    points = [load_sweep(searched(tmp_path, space=space, budget=budget, trials=6)).points for budget in ({}, None)]
    assert points[0] == points[1] and len(points[0]["nefl"]) == 2


def test_a_setting_reaches_into_a_list_of_a_row(tmp_path):
    path = searched(tmp_path, space={}, budget=None)
    plan = load_sweep(path, ["method.submodels.1.width=0.625"])
    assert plan.example("nefl").method.submodels[1].width == 0.625
    with pytest.raises(ConfigError, match="method.submodels.3.width: method.submodels is a list without the entry '3'"):
        load_sweep(path, ["method.submodels.3.width=1"])


class Listed(Searcher):
    """Suggests the widths of a list, one after another."""

    def __init__(self, *widths):
        super().__init__("validation_accuracy_mean", "max")
        self.widths, self.heard = list(widths), []

    def suggest(self, trial_id):
        self.heard.append(("asked", trial_id))
        if not self.widths:
            return Searcher.FINISHED
        width = self.widths.pop(0)
        return None if width is None else {"point:method.submodels.2.width": width}

    def on_trial_result(self, trial_id, result):
        self.heard.append(("result", trial_id, result))

    def on_trial_complete(self, trial_id, result=None, error=False):
        self.heard.append(("failed" if error else "done", trial_id, result))


def test_a_searcher_is_asked_until_it_is_within(tmp_path, monkeypatch):
    plan = load_sweep(
        searched(tmp_path, space={"method.submodels.2.width": {"uniform": [0.3, 0.8]}}, searcher="optuna")
    )
    assert len(plan.points["nefl"]) == 1 and plan.trials == 3
    inner = Listed(0.7, 0.3, 0.42, None, 0.7)
    searcher = Within(inner, plan, "nefl")
    assert searcher.suggest("a") == {"point:method.submodels.2.width": 0.42}
    assert inner.heard == [
        *(("asked", "a.0"), ("failed", "a.0", None)),
        *(("asked", "a.1"), ("failed", "a.1", None)),
        ("asked", "a.2"),
    ]
    assert searcher.suggest("b") is None and searcher.suggest("c") == Searcher.FINISHED
    inner.heard.clear()
    again = Within(inner, plan, "nefl")
    again.set_state(searcher.get_state())
    again.on_trial_result("a", {"x": 1})
    again.on_trial_complete("a", {"x": 2})
    assert inner.heard == [("result", "a.2", {"x": 1}), ("done", "a.2", {"x": 2})]
    monkeypatch.setattr(searchers, "DRAWS", 2)
    with pytest.raises(ConfigError, match=r"0 points found, then none in 2\. .*width=0.5\) gives capacity 0.2"):
        Within(Listed(0.5, 0.6), plan, "nefl").suggest("a")
