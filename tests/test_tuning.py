"""Sweeps: what is searched, and that every trial is a whole run in its own room, whatever happens to it."""

import io
import math
import os
from dataclasses import replace
from itertools import islice

import pytest
import ray
import yaml
from helpers import TINY, Perceptron, run, simulate
from processes import descendants, named
from ray.tune.search import Searcher
from rich.console import Console

from rayfl import costs, tuning
from rayfl.axes import Net
from rayfl.checkpoints import checksum, complete, read
from rayfl.config import ConfigError
from rayfl.methods import Task
from rayfl.tracking.console import SweepProgress
from rayfl.tracking.records import Run, runs
from rayfl.training import Training
from rayfl.tuning import DRAWS, Budget, Search, Within, check_room, expected_trials, load_sweep, run_sweep

ROUNDS = 12


def write(tmp_path, rows=("heterofl",), experiment=None, **search):
    path = tmp_path / "small.yaml"
    given = TINY | {"rounds": ROUNDS, "evaluation": {"every": 3}, "run": {"chunk": 1}} | (experiment or {})
    path.write_text(yaml.safe_dump({"experiment": given, "rows": {r: {"method": r} for r in rows}, "search": search}))
    return path


# what is searched


def test_every_combination_of_the_grids():
    search = Search(space={"a": {"grid": [1, 2]}, "b": {"grid": [3, 4, 5]}}, trials=9)
    assert search.points(0) == [{"a": a, "b": b} for a in (1, 2) for b in (3, 4, 5)]
    assert Search().points(0) == [{}]


def test_draws_are_stratified_and_the_same_for_every_row():
    space = {
        "u": {"uniform": [1.0, 3.0]},
        "l": {"loguniform": [0.01, 100]},
        "i": {"randint": [10, 18]},
        "c": {"choice": ["x", "y"]},
    }
    points = Search(space=space, trials=8).points(0)
    assert points == Search(space=space, trials=8).points(0) != Search(space=space, trials=8).points(1)
    assert sorted(int((p["u"] - 1) * 4) for p in points) == list(range(8))
    assert sorted(int((2 + math.log10(p["l"])) * 2) for p in points) == list(range(8))
    assert sorted(p["i"] for p in points) == list(range(10, 18))
    assert sorted(p["c"] for p in points) == ["x"] * 4 + ["y"] * 4


def test_draws_for_each_combination_of_the_grids():
    points = Search(space={"g": {"grid": [1, 2]}, "u": {"uniform": [0, 1]}}, trials=3).points(0)
    assert [p["g"] for p in points] == [1, 1, 1, 2, 2, 2]
    assert [p["u"] for p in points[:3]] == [p["u"] for p in points[3:]]


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"space": {"training.lr": {"gird": [1]}}}, "training.lr: one of choice, grid, loguniform, randint, uniform"),
        ({"space": {"training.lr": {"grid": 0.1}}}, "training.lr.grid: a list of values; not 0.1"),
        ({"space": {"training.lr": {"uniform": [2, 1]}}}, r"training.lr.uniform: \[low, high\] with low < high"),
        ({"space": {"training.lr": {"loguniform": [0, 1]}}}, "training.lr.loguniform: a low above 0; not 0"),
        ({"space": {"training.lr": {"grid": [0.1, -1]}}}, "rows.heterofl: training.lr: given -1"),
        ({"space": {"training.rate": {"grid": [0.1]}}}, "rows.heterofl: training.rate: unknown key 'rate'"),
        ({"seeds": []}, "at least one seed"),
        ({"seeds": [1, 1]}, "each once"),
        ({"trails": 3}, "unknown key 'trails'; .*trials"),
        ({"trials": 0}, "trials"),
    ],
)
def test_a_search_that_is_wrong(tmp_path, search, said):
    with pytest.raises(ConfigError, match=f"small.yaml: .*{said}"):
        load_sweep(write(tmp_path, **search))


def test_rows_that_are_wrong(tmp_path):
    with pytest.raises(ConfigError, match="--rows: no row is called 'heterfl'; .*heterofl"):
        load_sweep(write(tmp_path), rows="heterfl")
    with pytest.raises(ConfigError, match="rows.hetrofl: method.name: .*heterofl"):
        load_sweep(write(tmp_path, rows=["hetrofl"]))


# under a budget

NEFL = {"method": {"name": "nefl", "submodels": [{"capacity": 1}, {"capacity": 0.5}, {"capacity": 0.2}]}}
WIDTHS = {f"method.submodels.{i}.width": {"uniform": [0.3, 0.8]} for i in (1, 2)}


def searched(tmp_path, rows=None, experiment=None, **search):
    """A sweep over the widths of NeFL's submodels."""
    given = TINY | {
        "rounds": 2,
        "run": {"chunk": 1},
        "clients": {"count": 6, "cohort": 4, "capacities": [1, 0.5, 0.2], "metric": "params"},
    }
    path = tmp_path / "budget.yaml"
    plan = {"experiment": given | (experiment or {}), "rows": rows or {"nefl": NEFL}}
    path.write_text(yaml.safe_dump(plan | {"search": {"space": WIDTHS, "budget": {}, "trials": 3} | search}))
    return path


def shares(plan, row, point, cost=costs.parameters):
    """What networks of the widths of a point cost, as shares of their capacities'."""
    model = plan.example(row).model
    widths = [point[path] for path in WIDTHS]
    return [cost(model, Net(w)) / (c * cost(model, Net())) for w, c in zip(widths, (0.5, 0.2), strict=True)]


def test_a_budget_by_hand():
    """n of 8 hidden units are 7 n + 4 parameters (2 n weights and n biases below, 4 n and 4 above), and 6 n
    multiply-adds."""
    nets = {1.0: Net(), 0.5: Net(0.5), 0.25: Net(0.125)}
    task = Task(Perceptron(hidden=(8,)), Training(), nets, 1.0, clients=1)
    assert Budget(low=0.7, high=1.0).excess(task) == (pytest.approx(32 / 30 - 1), 0.5, 32 / 30)
    assert Budget(low=0.9, high=1.07).excess(task) == (pytest.approx(0.9 - 11 / 15), 0.25, 11 / 15)
    assert Budget(low=11 / 15, high=32 / 30).excess(task).by == 0
    assert Budget(metric="flops", low=0.5, high=1.0).excess(task).by == 0
    assert Budget(metric="flops", low=0.6, high=1.0).excess(task) == (pytest.approx(0.1), 0.25, 0.5)
    assert Budget(low=0.99).excess(replace(task, nets={1.0: Net()})).by == 0
    assert Budget(low=0.4, high=0.5).excess(replace(task, nets={0.25: Net(0.125)}, server_capacity=0.25)).by > 0


def test_draws_go_on_until_enough_are_within(tmp_path):
    path = searched(tmp_path, rows={"nefl": NEFL, "again": NEFL}, trials=3, budget={"low": 0.8})
    plan = load_sweep(path)
    draws = islice(plan.search.draws(0), DRAWS)
    within = (p for p in draws if all(0.8 <= share <= 1 for share in shares(plan, "nefl", p)))
    found = list(islice(within, 3))
    assert plan.points == load_sweep(path).points == {"nefl": found, "again": found}
    assert next(plan.search.draws(0)) != found[0]
    assert expected_trials(plan) == 6
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
    assert expected_trials(plan) == 1
    assert load_sweep(searched(tmp_path)).left_out("nefl") == []


@pytest.mark.parametrize(
    ("search", "said"),
    [
        (
            {"space": {"method.submodels.2.width": {"grid": [0.3, 0.6]}}},
            "rows.nefl: search.budget: given 0.9 to 1 of the params; 0 points found, then none in 2. The nearest "
            r"\(method.submodels.2.width=0.3\) gives capacity 0.2 a network of 0.[45]\d+ times its share; widen",
        ),
        ({"budget": {"low": 1, "high": 0.9}}, "search.budget: .*low of at most high; 1 and 0.9"),
        ({"budget": {"metric": "bytes"}}, "search.budget.metric: given 'bytes'; allowed: 'params' or 'flops'"),
        (
            {"space": {"method.submodels.3.width": {"grid": [1]}}},
            "rows.nefl: search.space: method.submodels.3.width: method.submodels is a list, given its entry '3'; "
            "allowed: 0 to 2",
        ),
    ],
)
def test_a_budget_that_is_wrong(tmp_path, search, said):
    with pytest.raises(ConfigError, match=f"budget.yaml: {said}"):
        load_sweep(searched(tmp_path, **search))


def test_draws_have_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "DRAWS", 5)
    with pytest.raises(ConfigError, match=r"0 points found, then none in 5\. The nearest"):
        load_sweep(searched(tmp_path, budget={"low": 0.999}))


def test_a_row_decides_nothing_that_is_searched(tmp_path):
    parts = [{"capacity": 1}, {"capacity": 0.5, "width": 0.7}, {"capacity": 0.2}]
    with pytest.raises(ConfigError, match="rows.nefl: method.submodels.1.width is in search.space, which decides it"):
        load_sweep(searched(tmp_path, rows={"nefl": {"method": {"name": "nefl", "submodels": parts}}}))


def test_a_setting_reaches_into_a_list_of_a_row(tmp_path):
    path = searched(tmp_path, space={}, budget=None)
    plan = load_sweep(path, ["method.submodels.1.width=0.625"])
    assert plan.example("nefl").method.submodels[1].width == 0.625
    with pytest.raises(ConfigError, match="method.submodels.3.width: method.submodels is a list, given its entry '3'"):
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
    assert len(plan.points["nefl"]) == 1 and expected_trials(plan) == 3
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
    monkeypatch.setattr(tuning, "DRAWS", 2)
    with pytest.raises(ConfigError, match=r"0 points found, then none in 2\. .*width=0.5\) gives capacity 0.2"):
        Within(Listed(0.5, 0.6), plan, "nefl").suggest("a")


def test_how_many_trials_there_will_be(tmp_path):
    space = {"training.lr": {"grid": [0.1, 0.2]}, "training.momentum": {"uniform": [0, 0.9]}}
    path = write(tmp_path, ["heterofl", "fedrolex"], space=space, trials=3, seeds=[0, 1, 2])
    assert expected_trials(load_sweep(path)) == 2 * (2 * 3 + 2)
    path = write(tmp_path, space=space, trials=3, searcher="optuna")
    assert expected_trials(load_sweep(path)) == 3


# trials


class Watched(SweepProgress):
    """Remembers the rounds that every trial reported, and calls back at each."""

    def __init__(self, sweep, then=lambda trial, round: None):
        super().__init__(expected_trials(sweep), ROUNDS, sweep.search.metric, Console(file=io.StringIO()))
        self.seen, self.then = {}, then

    def update(self, trial_id, round, metrics):
        super().update(trial_id, round, metrics)
        self.seen.setdefault(trial_id, []).append(round)
        self.then(trial_id, round)

    @property
    def printed(self):
        return self.console.file.getvalue()


@pytest.fixture
def swept(ray_cluster, tmp_path):
    """Runs a sweep: (its plan, the best records, all trials, what was seen)."""

    def sweep(path, then=lambda trial, round: None):
        plan = load_sweep(path)
        folder = tmp_path / "runs"
        record = Run.create(folder, plan.name, plan.plain(), {}, kind="sweep")
        progress = Watched(plan, then)
        data = plan.experiment(next(iter(plan.rows)), {}, 0).data.load()
        best = run_sweep(plan, record, data, progress, lambda folder: None)
        return plan, best, [r for r in runs(folder) if r.kind == "run"], progress

    return sweep


def is_serial(plan, trial, tmp_path):
    """Whether the trial's lines and final state are, to the bit, those of a serial run."""
    point = {path: trial.record()["params"][path] for path in plan.search.space}
    simulation = simulate(plan.experiment(trial.label, point, trial.config["seed"]), tmp_path / trial.id)
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in trial.rounds()]
    if lines != run(simulation):
        return False
    _, _, state, _ = read(complete(trial.path / "checkpoints")[-1])
    return checksum(state) == checksum(simulation.state)


@pytest.mark.ray
def test_trials_in_their_own_room_whose_servers_die(swept, tmp_path):
    """Two of the four run side by side; then others take over their processes. When one has made half of its
    rounds, every server is killed: the trials go on from their checkpoints."""
    rooms, killed, made = [], [], {}

    def then(trial, round):
        made[trial] = round
        # a first round is saved before the second is made: until then there is nothing to go on from
        if round >= ROUNDS / 2 and min(made.values()) > 1 and not killed:
            resources = ray.cluster_resources()
            groups = [name for name in resources if name.startswith("CPU_group_") and name.count("_") == 2]
            rooms.append([(resources[name], ray.available_resources().get(name, 0)) for name in groups])
            killed.extend(named(descendants(os.getpid()), "ray::ServerActor"))
            for pid in killed:
                os.kill(pid, 9)

    search = {"space": {"training.lr": {"grid": [0.02, 0.2]}}}
    experiment = {"run": {"chunk": 1, "actors": 2, "checkpoint_seconds": 0}}
    plan, best, trials, progress = swept(write(tmp_path, ["heterofl", "fedrolex"], experiment, **search), then)
    assert killed
    # both clients of a trial take their CPUs from its placement group
    assert [room for room in rooms[0] if room[0] == 2] and all(free == 0 for _, free in rooms[0])
    assert len(trials) == 4
    assert all(trial.status == "finished" and is_serial(plan, trial, tmp_path) for trial in trials)
    assert [rounds[0] for rounds in progress.seen.values()] == [1] * 4
    assert all(rounds.count(1) == 1 for rounds in progress.seen.values())
    top = {trial.label: 0.0 for trial in trials}
    for trial in trials:
        top[trial.label] = max(top[trial.label], trial.result["validation_accuracy_mean"])
    assert {record["label"]: record["validation_accuracy_mean"] for record in best} == top


@pytest.mark.ray
def test_a_scheduler_by_name_stops_trials_early(swept, tmp_path):
    space = {"training.lr": {"grid": [1e-6, 1e-5, 0.05, 0.1]}}
    options = {"grace_period": 3, "reduction_factor": 2}
    path = write(tmp_path, space=space, scheduler="asha", options=options)
    plan, best, trials, _ = swept(path)
    assert len(trials) == 4
    assert {trial.status for trial in trials} <= {"finished", "stopped"}
    finished = [trial for trial in trials if trial.status == "finished"]
    assert finished and all(is_serial(plan, trial, tmp_path) for trial in finished)
    assert [record["rounds"] for record in best] == [ROUNDS]


@pytest.mark.ray
def test_a_searcher_by_name(swept, tmp_path):
    space = {"training.lr": {"loguniform": [0.01, 0.5]}}
    path = write(tmp_path, space=space, searcher="optuna", trials=3, experiment={"rounds": 3})
    plan, best, trials, _ = swept(path)
    assert len({trial.config["training"]["lr"] for trial in trials}) == 3
    assert all(trial.status == "finished" and is_serial(plan, trial, tmp_path) for trial in trials)
    assert best[0]["validation_accuracy_mean"] == max(t.result["validation_accuracy_mean"] for t in trials)


@pytest.mark.ray
def test_no_trial_starts_outside_the_budget(swept, tmp_path):
    path = searched(tmp_path, searcher="optuna", trials=2, budget={"low": 0.5})
    plan, best, trials, progress = swept(path)
    assert len(trials) == 2
    for trial in trials:
        point = {path: trial.record()["params"][path] for path in WIDTHS}
        assert all(0.5 <= share <= 1 for share in shares(plan, "nefl", point))
        assert trial.record()["macs_1"] == costs.flops(plan.experiment("nefl", point, 0).model, Net())
    assert all("0.width" not in trial.path.name and "2.width" in trial.path.name for trial in trials)
    assert best[0]["path"] in {str(trial.path) for trial in trials}


@pytest.mark.parametrize("given", [{"scheduler": "ahsa"}, {"searcher": "optnua"}])
@pytest.mark.ray
def test_no_such_scheduler_or_searcher(swept, tmp_path, given):
    with pytest.raises(ConfigError, match=next(iter(given.values()))):
        swept(write(tmp_path, **given))


@pytest.mark.ray
def test_trials_that_do_not_fit(ray_cluster, tmp_path):
    with pytest.raises(ConfigError, match="run: 9 client actors of 1 CPUs and 0 GPUs do not fit"):
        check_room(load_sweep(write(tmp_path, experiment={"run": {"actors": 9}})), None)
