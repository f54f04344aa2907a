"""Sweeps: what is searched, and that every trial is a whole run in its own room, whatever happens to it."""

import io
import math
import os

import pytest
import ray
import yaml
from helpers import TINY, run, simulate
from processes import descendants, named
from rich.console import Console

from rayfl.checkpoints import checksum, complete, read
from rayfl.config import ConfigError
from rayfl.tracking.console import SweepProgress
from rayfl.tracking.records import Run, runs
from rayfl.tuning import Search, check_room, expected_trials, load_sweep, run_sweep

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
    rooms, killed = [], []

    def then(trial, round):
        if round >= ROUNDS / 2 and not killed:
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


@pytest.mark.parametrize("given", [{"scheduler": "ahsa"}, {"searcher": "optnua"}])
@pytest.mark.ray
def test_no_such_scheduler_or_searcher(swept, tmp_path, given):
    with pytest.raises(ConfigError, match=next(iter(given.values()))):
        swept(write(tmp_path, **given))


@pytest.mark.ray
def test_trials_that_do_not_fit(ray_cluster, tmp_path):
    with pytest.raises(ConfigError, match="run: 9 client actors of 1 CPUs and 0 GPUs do not fit"):
        check_room(load_sweep(write(tmp_path, experiment={"run": {"actors": 9}})), None)
