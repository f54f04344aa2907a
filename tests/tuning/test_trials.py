"""Sweeps on Ray: every trial is a whole run in its own room, whatever happens to it."""

import io
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from helpers import run, simulate
from processes import descendants, named
from pydantic import PrivateAttr
from ray import tune
from ray.util.placement_group import PlacementGroup
from rich.console import Console
from rows import line
from sweeps import ROUNDS, write
from test_budget import WIDTHS, searched, shares

from rayfl.config import ConfigError, RunFailed
from rayfl.engine.checkpoints import DamagedCheckpoint, complete, read
from rayfl.engine.files import checksum
from rayfl.experiment import read_experiment
from rayfl.listeners import Listener
from rayfl.methods.dense import Dense
from rayfl.results import clients, files
from rayfl.results.console import SweepProgress
from rayfl.results.folder import RunFolder, runs
from rayfl.tuning import stages
from rayfl.tuning.load import load_sweep
from rayfl.tuning.recorder import Recorder
from rayfl.tuning.stages import check_room, run_sweep
from rayfl.tuning.trial import LINES, FederatedTrial, _past

pytestmark = pytest.mark.ray


class Watched(SweepProgress):
    """Remembers the rounds that every trial reported, and calls back at each."""

    def __init__(self, sweep, then=lambda trial, round: None):
        super().__init__(sweep.trials, ROUNDS, sweep.search.metric, sweep.mode, Console(file=io.StringIO(), width=500))
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
    """Runs a sweep, or goes on with it: (its plan, the best records, all trials, what was seen)."""

    def sweep(path, then=lambda trial, round: None, progress=None, place="runs"):
        plan = load_sweep(path)
        folder = tmp_path / place
        if RunFolder.exists(folder):
            record = RunFolder.open(folder)
        else:
            record = RunFolder.create(folder, plan.name, plan.plain(), {}, plan.facts(), kind="sweep")
        progress = progress or Watched(plan, then)
        recorder = Recorder(plan, record, progress, lambda folder: None)
        best = run_sweep(plan, record, plan.first.data.arrays(), recorder)
        return plan, best, trials_of(tmp_path, place), progress

    return sweep


def trials_of(tmp_path, place="runs"):
    return [trial for trial in runs(tmp_path / place) if trial.kind == "run"]


def is_serial(plan, trial, tmp_path, rounds=None):
    """Whether the trial's lines and final state are, to the bit, those of a serial run, or of its first rounds."""
    point = {path: trial.record()["params"][path] for path in plan.search.space}
    simulation = simulate(plan.experiment(trial.label, point, trial.config["seed"]), tmp_path / trial.id)
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in trial.rounds()]
    if lines != run(simulation, rounds):
        return False
    return checksum(read(complete(trial.path / "checkpoints")[-1]).state) == checksum(simulation.state)


@pytest.mark.slow
def test_trials_in_their_own_room_whose_servers_die(swept, tmp_path):
    """Two of the four run side by side; then others take over their processes. When one has made half of its
    rounds, every server is killed: the trials go on from their checkpoints."""
    rooms, killed, made, saved = [], [], {}, set()

    def then(trial, round):
        made[trial] = round
        if round >= ROUNDS / 2 and not killed:
            # round 1 is saved before round 2 starts; a trial still in its first round starts again from round 1
            saved.update(name for name, rounds in made.items() if rounds > 1)
            resources = ray.cluster_resources()
            groups = [name for name in resources if name.startswith("CPU_group_") and name.count("_") == 2]
            rooms.append([(resources[name], ray.available_resources().get(name, 0)) for name in groups])
            killed.extend(named(descendants(os.getpid()), "ServerActor"))
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
    assert all(progress.seen[trial].count(1) == 1 for trial in saved)
    assert "Restarting from its last checkpoint" in progress.printed
    top = {trial.label: 0.0 for trial in trials}
    for trial in trials:
        top[trial.label] = max(top[trial.label], trial.result["validation_accuracy_mean"])
    assert {record["label"]: record["validation_accuracy_mean"] for record in best} == top


def test_listeners_learn_the_end_of_a_trial_in_its_own_folder(monkeypatch):
    """Ray Tune changes to the next trial's folder when a process is reused."""
    told = []
    trial = object.__new__(FederatedTrial)
    trial.experiment, trial.started = object(), True
    trial.listeners = (SimpleNamespace(name="told", on_end=told.append),)
    monkeypatch.setattr(tune.Trainable, "reset", lambda self, config, storage: told.append((config, storage)))
    trial.reset({"row": "b"}, "storage")
    assert told == ["stopped", ({"row": "b"}, "storage")] and trial.listeners == ()


def test_lines_of_a_checkpoint(tmp_path):
    assert _past(tmp_path) == []
    (tmp_path / "round-000002").mkdir()
    assert _past(tmp_path) == []
    files.write_lines(tmp_path / LINES, [line(1), line(2)])
    assert [line["round"] for line in _past(tmp_path)] == [1, 2]
    text = (tmp_path / LINES).read_text()
    for torn in (text[:-5], text.splitlines(keepends=True)[1], ""):
        (tmp_path / LINES).write_text(torn)
        with pytest.raises(DamagedCheckpoint, match=LINES):
            _past(tmp_path)


@pytest.mark.slow
def test_a_scheduler_by_name_stops_trials_early(swept, tmp_path):
    space = {"training.lr": {"grid": [1e-6, 1e-5, 0.05, 0.1]}}
    options = {"grace_period": 3, "reduction_factor": 2}
    listening = {"listeners": [{"name": f"{__name__}:Stopping", "after": ROUNDS + 1, "file": "told"}]}
    path = write(tmp_path, experiment=listening, space=space, scheduler="asha", options=options)
    plan, best, trials, _ = swept(path)
    assert len(trials) == 4
    assert {trial.status for trial in trials} <= {"finished", "stopped"}
    assert all((trial.path / "told").read_text().splitlines() == ["start 0 0", trial.status] for trial in trials)
    finished = [trial for trial in trials if trial.status == "finished"]
    assert finished and all(is_serial(plan, trial, tmp_path) for trial in finished)
    assert [record["rounds"] for record in best] == [ROUNDS]


@pytest.mark.slow
def test_a_searcher_by_name_and_no_trial_outside_the_budget(swept, tmp_path):
    plan, best, trials, _ = swept(searched(tmp_path, searcher="optuna", trials=2, budget={"low": 0.5}))
    assert len(trials) == 2
    for trial in trials:
        point = {path: trial.record()["params"][path] for path in WIDTHS}
        assert all(0.5 <= share <= 1 for share in shares(plan, "nefl", point))
        assert trial.record()["macs_1"] == plan.experiment("nefl", point, 0).costs()["1"]["macs"]
        assert trial.status == "finished" and is_serial(plan, trial, tmp_path)
        assert "0.width" not in trial.path.name and "2.width" in trial.path.name
    assert best[0]["path"] in {str(trial.path) for trial in trials}
    assert best[0]["validation_accuracy_mean"] == max(t.result["validation_accuracy_mean"] for t in trials)


class Stopping(Listener):
    """Ends a run after a round, and writes down what it is told."""

    after: int
    file: str

    def on_start(self, config, folder, round):
        self._write(f"start {config['seed']} {round}")

    def on_round(self, line):
        return line["round"] == self.after

    def on_end(self, status):
        self._write(status)

    def _write(self, text):
        with Path(self.file).open("a") as file:
            file.write(f"{text}\n")


@pytest.mark.slow
def test_a_listener_ends_a_trial(swept, tmp_path):
    """A relative path of the listener's is in the trial's folder."""
    listeners = [{"name": f"{__name__}:Stopping", "after": 6, "file": "told"}]
    kept = {"chunk": 1, "actors": 1, "client_scores": "all"}
    _, best, [trial], progress = swept(write(tmp_path, experiment={"listeners": listeners, "run": kept}))
    assert (trial.status, trial.tags["ended"]) == ("finished", "after round 6")
    assert [line["round"] for line in trial.rounds()] == list(range(1, 7))
    assert [record["rounds"] for record in best] == [6]
    assert len(trial.client_scores) == 6
    tables = clients.read(trial.path, trial.facts)
    assert {round: len(table) for round, table in tables.items()} == {3: 6, 6: 6}
    assert tables[6]["accuracy"].tolist() == trial.client_scores["score"].tolist()
    assert (trial.path / "told").read_text().splitlines() == ["start 0 0", "finished"]
    assert "heterofl (seed 0): ended after round 6" in progress.printed


class Counting(Stopping):
    """Ends a run after so many rounds that it was told of."""

    _seen: int = PrivateAttr(0)

    def on_past(self, lines):
        self._seen = len(lines)
        return self._seen >= self.after

    def on_round(self, line):
        self._seen += 1
        return self._seen >= self.after


@pytest.mark.slow
@pytest.mark.parametrize("stopped_at", [3, 6])
def test_a_trial_goes_on_from_a_checkpoint_that_tune_does_not_know(swept, tmp_path, monkeypatch, stopped_at):
    """The driver stops before Tune's next snapshot, at last after the trial's end. A trial that started again would
    leave this checkpoint beside a shorter file, and could not go on after a further stop. Listeners know its past."""

    def stop(self, trial, **_):
        if trial.last_result["round"] >= stopped_at:
            raise OSError("stopped")

    told = tmp_path / "told"
    listeners = [{"name": f"{__name__}:Counting", "after": 6, "file": str(told)}]
    kept = {"chunk": 1, "actors": 1, "checkpoint_seconds": 0}
    path = write(tmp_path, experiment={"listeners": listeners, "run": kept})
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="OSError: stopped"):
        patched.setattr(Recorder, "on_trial_save", stop)
        swept(path)
    told.unlink()
    [trial] = trials_of(tmp_path)
    made = len(trial.rounds())
    assert stopped_at <= made < ROUNDS
    plan, best, [trial], progress = swept(path)
    assert [rounds[0] for rounds in progress.seen.values()] in ([], [made + 1])
    assert (trial.status, trial.tags["ended"]) == ("finished", "after round 6")
    assert is_serial(plan, trial, tmp_path, 6) and len(trial.client_scores) == 6
    assert [record["rounds"] for record in best] == [6]
    start, end = told.read_text().splitlines()
    assert (int(start.removeprefix("start 0 ")) >= stopped_at, end) == (True, "finished")
    assert [path.name for path in complete(trial.path / "checkpoints")][-1] == "round-000006"


class Failing(Dense):
    """Fails on workers or on the server, until a file is there."""

    fails: str
    until: str

    def init(self):
        if self.fails == "on the server" and not Path(self.until).exists():
            raise ConfigError("model.weights: there is no such file here; put one there")
        return super().init()

    def local_update(self, payload, visit):
        if self.fails == "at work" and not Path(self.until).exists():
            raise ArithmeticError("on purpose")
        return self.trained(payload, visit)


class Limited(Dense):
    """Fails at rates above 0.005."""

    def local_update(self, payload, visit):
        if self.task.training.lr > 0.005:
            raise ArithmeticError("on purpose")
        return self.trained(payload, visit)


def failing(tmp_path, *fails):
    rows = {how.replace(" ", "-"): {"method": {"name": f"{__name__}:Failing", "fails": how}} for how in fails}
    space = {"method.until": {"grid": [str(tmp_path / "mended")]}}
    return write(tmp_path, rows, {"rounds": 3}, space=space, max_failures=0)


@pytest.mark.slow
def test_a_trial_keeps_its_best_round_and_ends_when_patience_is_up(swept, tmp_path):
    """With the bits of a serial run. The second trial takes over the processes of the first, and not its best round."""
    run = {"chunk": 1, "actors": 1, "cpus": 4, "checkpoint": "best", "patience": 1, "checkpoint_seconds": 0}
    experiment = {"run": run, "evaluation": {"every": 1}}
    path = write(tmp_path, ["heterofl"], experiment, space={"training.lr": {"grid": [0.2, 0.05]}})
    plan, _, trials, _ = swept(path)
    assert len(trials) == 2 and min(len(trial.rounds()) for trial in trials) < ROUNDS
    for trial in trials:
        values = [line["validation_accuracy_mean"] for line in trial.rounds()]
        ends = [i for i in range(1, len(values)) if values[i] <= max(values[:i])]
        assert ends in ([], [len(values) - 1]) and trial.status == "finished"
        [best] = complete(trial.path / "checkpoints" / "best")
        simulation = simulate(read_experiment(trial.config, "trial"), tmp_path / trial.id)
        for _ in range(1 + values.index(max(values))):
            simulation.run_round()
        found = read(best)
        assert found.round == simulation.round and checksum(found.state) == checksum(simulation.state)


@pytest.mark.slow
def test_a_trial_that_fails_is_said_in_one_sentence_and_tried_again(swept, tmp_path, caplog, capfd):
    path = failing(tmp_path, "at work", "never")
    point = f"method.until={tmp_path / 'mended'}"
    progress = Watched(load_sweep(path))
    with pytest.raises(RuntimeError) as error:
        swept(path, progress=progress)
    bad, good = sorted(trials_of(tmp_path), key=lambda trial: trial.label)
    lines = [line.partition("JobFailed: ")[2] for line in (bad.error or "").splitlines()]
    reason = next(filter(None, lines))
    assert "local_update, client " in reason and "ArithmeticError: on purpose (round 1" in reason
    assert str(error.value) == (
        "1 of 2 trials failed. Run the same command with --resume to retry them. The first: "
        f"at-work ({point}, seed 0): {reason}. See {bad.path / 'run.json'} for the full error"
    )
    # a value with slashes is no path
    assert bad.path.parent == good.path.parent == tmp_path / "runs" / "trials"
    assert (bad.status, good.status) == ("failed", "finished")
    assert bad.error is not None and "in local_update" in bad.error and "\x1b" not in bad.error
    printed = capfd.readouterr()
    assert "Traceback" not in caplog.text + printed.out + printed.err + progress.printed
    assert f"at-work ({point}, seed 0) failed: {reason}" in progress.printed

    (tmp_path / "mended").touch()
    plan, best, trials, _ = swept(path)
    assert {trial.id for trial in trials} == {bad.id, good.id} and len(best) == 2
    assert all(trial.status == "finished" and is_serial(plan, trial, tmp_path) for trial in trials)


def test_listeners_learn_of_the_rounds_before_a_trial_diverged():
    told = []
    listener = SimpleNamespace(name="told", on_round=lambda line: told.append(line["round"]), on_end=told.append)
    trial = FederatedTrial.__new__(FederatedTrial)
    trial.listeners, trial.started, trial.round = (listener,), True, 0
    trial.experiment, trial.sweep = object(), SimpleNamespace(mode="max", search=SimpleNamespace(metric="accuracy"))
    result = trial._diverged(RuntimeError("not finite"), [line(1), line(2)])
    assert told == [1, 2, "failed"] and result["round"] == 2


@pytest.mark.slow
def test_a_point_that_diverges_counts_as_tried(swept, tmp_path):
    """It is not started again, and the row goes on with its other points. A row whose points all diverge is named."""
    rows = {"some": {"method": "heterofl"}, "all": {"method": "heterofl"}}
    experiment = {"rounds": 2, "server": {"optimizer": "yogi"}}
    search = {"space": {"server.lr": {"grid": [0.01, 1e39]}}, "seeds": [0, 1]}
    search["spaces"] = {"all": {"server.lr": {"grid": [1e39, 2e39]}}}
    plan, best, trials, progress = swept(write(tmp_path, rows, experiment, **search))
    assert [(row["label"], row["seed"], row["params"]["server.lr"]) for row in best] == [
        ("some", 0, 0.01),
        ("some", 1, 0.01),
    ]
    assert Counter((trial.label, trial.status) for trial in trials) == {
        ("some", "finished"): 2,
        ("some", "failed"): 1,
        ("all", "failed"): 2,
    }
    failed = next(trial for trial in trials if trial.label == "some" and trial.status == "failed")
    assert (failed.error or "").startswith("round 1: the server's state is not finite after the step, in params/")
    assert "Restarting" not in progress.printed
    assert f"some (server.lr=1e+39, seed 0) diverged: {failed.error}" in progress.printed
    assert f"all: not ranked, because no trial has a finite {plan.search.metric}" in progress.printed
    # all stages are done
    _, again, same, _ = swept(write(tmp_path, rows, experiment, **search))
    assert len(again) == 2 and {trial.id for trial in same} == {trial.id for trial in trials}
    with pytest.raises(RuntimeError, match=r"no trial has a finite .*, so that no row can be ranked"):
        swept(write(tmp_path, {"all": rows["all"]}, experiment, **search), place="none")


@pytest.mark.slow
def test_a_sweep_outside_the_main_thread_and_a_corrected_title(swept, tmp_path):
    def titled(title):
        return write(tmp_path, {"row": {"method": "heterofl", "title": title}}, {"rounds": 3})

    with ThreadPoolExecutor(1) as pool:
        _, best, [trial], _ = pool.submit(swept, titled("Hetero")).result()
    assert (trial.status, trial.title, [record["title"] for record in best]) == ("finished", "Hetero", ["Hetero"])
    _, best, [again], _ = swept(titled("HeteroFL"))
    assert (again.id, again.title, [record["title"] for record in best]) == (trial.id, "HeteroFL", ["HeteroFL"])


@pytest.mark.slow
def test_a_row_is_confirmed_once_its_search_has_ended(swept, tmp_path):
    """In the processes of its search, and not while a trial of it has failed; then after --resume, in a folder that was
    moved, where it tries further values first."""
    rows = {
        "fails": {"method": {"name": f"{__name__}:Failing", "fails": "at work", "until": str(tmp_path / "mended")}},
        "well": {"method": "heterofl"},
    }
    search = {"space": {"training.lr": {"grid": [0.0005, 0.002]}}, "widen": 1, "metric": "validation_loss_mean"}
    path = write(tmp_path, rows, {"rounds": 3}, **search, seeds=[0, 1], max_failures=0)
    with pytest.raises(RuntimeError, match="^2 of 6 trials failed"):
        swept(path)
    first = {trial.id for trial in trials_of(tmp_path)}
    assert sorted((t.label, t.config["seed"], t.status) for t in trials_of(tmp_path)) == [
        *[("fails", 0, "failed")] * 2,
        *[("well", 0, "finished")] * 3,
        ("well", 1, "finished"),
    ]
    (tmp_path / "mended").touch()
    (tmp_path / "runs").rename(tmp_path / "moved")
    plan, best, trials, _ = swept(path, place="moved")
    assert first < {trial.id for trial in trials} and len(trials) == 8 and not (tmp_path / "runs").exists()
    assert sorted((record["label"], record["seed"]) for record in best) == [(r, s) for r in rows for s in (0, 1)]
    for row in rows:
        tuned = [t.config["training"]["lr"] for t in trials if (t.label, t.config["seed"]) == (row, 0)]
        assert sorted(tuned) == [0.0005, 0.002, 0.008]
        assert {record["params"]["training.lr"] for record in best if record["label"] == row} == {0.008}
    assert all(trial.status == "finished" and is_serial(plan, trial, tmp_path) for trial in trials)


@pytest.mark.slow
def test_a_row_whose_best_value_is_the_outermost_tries_further_ones(swept, tmp_path):
    """By the loss, rates that are too small by far: a larger one. The second row's best rate is between others. The
    third row fails at a larger rate, which is none of the sweep's failures."""
    spaces = {"well": {"training.lr": {"grid": [0.002, 0.008, 1000]}}}
    rows = {"small": {"method": "heterofl"}, "well": {"method": "heterofl"}, "fails": {"method": f"{__name__}:Limited"}}
    space = {"training.lr": {"grid": [0.0005, 0.002]}}
    search = {"space": space, "spaces": spaces, "seeds": [0, 1], "widen": 1, "metric": "validation_loss_mean"}
    plan, best, trials, progress = swept(write(tmp_path, rows, {"rounds": 3}, **search, max_failures=0))
    tried = {row: [t for t in trials if t.label == row and t.config["seed"] == 0] for row in rows}
    rates = {row: sorted(t.config["training"]["lr"] for t in some) for row, some in tried.items()}
    wider = [0.0005, 0.002, 0.008]
    assert rates == {"small": wider, "well": [0.002, 0.008, 1000], "fails": wider}
    assert [t.config["training"]["lr"] for t in trials if t.status != "finished"] == [0.008]
    found = {(record["label"], record["seed"], record["params"]["training.lr"]) for record in best}
    chosen = {"small": 0.008, "well": 0.008, "fails": 0.002}
    assert found == {(row, seed, rate) for row, rate in chosen.items() for seed in (0, 1)}
    assert plan.trials == len(trials) - 2 == 7 + 3
    assert f"[{len(trials)}/{len(trials)}]" in progress.printed
    assert "small: the best value is the outermost; also trying training.lr=0.008" in progress.printed
    assert "fails (training.lr=0.008, seed 0) failed: " in progress.printed


@pytest.mark.slow
def test_a_config_error_in_an_actor_is_one_of_the_sweep(swept, tmp_path, capfd):
    path = failing(tmp_path, "on the server")
    with pytest.raises(ConfigError) as error:
        swept(path)
    assert str(error.value) == (
        f"on-the-server (method.until={tmp_path / 'mended'}, seed 0): model.weights: there is no such file here; put "
        "one there"
    )
    [trial] = trials_of(tmp_path)
    assert trial.status == "failed" and trial.error is not None and "in init" in trial.error
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out + printed.err
    (tmp_path / "mended").touch()
    _, best, [again], _ = swept(path)
    assert (again.id, again.status, again.error, len(best)) == (trial.id, "finished", None, 1)


@pytest.mark.slow
def test_what_stopped_tune_is_said_and_not_what_followed(swept, tmp_path):
    """An actor that Ray cannot start is unknown to Tune's clean-up, which fails in turn."""
    path = write(tmp_path, {"only": {"method": "heterofl"}}, {"rounds": 2})

    def stopped_by(error):
        def fails(self, entities):
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ray.air.execution.resources.request.AcquiredResources.annotate_remote_entities", fails)
            with pytest.raises(Exception) as stopped:
                swept(path)
        # the rooms of actors that never started stay until the driver ends
        for group in ray.util.placement_group_table():
            ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group))))
        return stopped.value

    found = stopped_by(OSError("the disk is full"))
    first, _, rest = str(found).partition("\n")
    assert type(found) is RunFailed
    assert first == "Ray Tune stopped: OSError: the disk is full. Run the same command with --resume to continue"
    assert rest.startswith("Traceback ") and "Tracked actor is not managed" in rest.splitlines()[-1]
    invalid = ConfigError("method: invalid")
    assert stopped_by(invalid) is invalid


@pytest.mark.parametrize(
    ("cpus", "actors", "clients"),
    [
        (8, "auto", [{"CPU": 1, "GPU": 0.5}] * 2),
        (16, "auto", [{"CPU": 1, "GPU": 0.25}] * 4),
        (0, "auto", [{"CPU": 1, "GPU": 0.25}]),
        (8, 2, [{"CPU": 1, "GPU": 0.25}] * 2),
    ],
)
def test_the_trials_that_run_at_once_share_all_gpus(tmp_path, monkeypatch, cpus, actors, clients):
    """Four trials on four GPUs."""
    monkeypatch.setattr(stages.resources, "_nodes", lambda: [{"CPU": cpus, "GPU": 4}])
    experiment = {"run": {"chunk": 1, "gpus": 0.25, "actors": actors}}
    space = {"training.lr": {"grid": [0.02, 0.05, 0.1, 0.2]}}
    assert stages._clients(load_sweep(write(tmp_path, experiment=experiment, space=space))) == clients


@pytest.mark.parametrize(("trials", "notes"), [({}, 1), ({"a": "a trial"}, 0)])
def test_a_sweep_whose_trials_do_not_start_says_what_they_need(tmp_path, monkeypatch, trials, notes):
    timers, said = [], []

    class Timer:
        def __init__(self, seconds, function):
            self.begin, self.cancelled = function, False
            timers.append(self)

        def start(self):
            self.begin()

        def cancel(self):
            self.cancelled = True

    monkeypatch.setattr(stages, "Timer", Timer)
    monkeypatch.setattr(stages.resources, "_nodes", lambda: [{"CPU": 4}, {"CPU": 2, "GPU": 1}])
    monkeypatch.setattr(stages._Stages, "_tuner", lambda *_: SimpleNamespace(fit=list))
    monkeypatch.setattr(stages.trust, "make", lambda path, id: path.mkdir(parents=True))
    monkeypatch.setattr(stages.trust, "forget", lambda path, id: None)
    experiment = {"run": {"chunk": 1, "gpus": 0.5, "actors": 4, "server_cpus": 1}}
    recorder = SimpleNamespace(
        trials=trials, failures=[], leave=lambda: None, progress=SimpleNamespace(note=lambda text: said.append(text))
    )
    run = SimpleNamespace(path=tmp_path, id="id")
    stages._Stages(load_sweep(write(tmp_path, experiment=experiment)), run, None, recorder).listed("search", [])
    assert [timer.cancelled for timer in timers] == [True]
    assert said == notes * [
        "no trial has started within 60 s: each needs 4 client actors of 1 CPUs and 0.5 GPUs and a server of 1 CPUs; "
        "the cluster has room for 2 (6 CPUs, 1 GPUs). Waiting for its processes to start, for other jobs to "
        "end, or for more nodes"
    ]


def test_trials_that_do_not_fit(ray_cluster, tmp_path):
    with pytest.raises(ConfigError, match="run: 9 client actors of 1 CPUs and 0 GPUs do not fit"):
        check_room(load_sweep(write(tmp_path, experiment={"run": {"actors": 9}})), None)


@pytest.mark.slow
def test_relative_paths_are_those_of_the_driver(swept, tmp_path, monkeypatch):
    """Also in a process that has made another trial, in that one's folder."""
    monkeypatch.chdir(tmp_path)
    Path("devices.csv").write_text("name,gflops\n" + "a,1\nb,2\n" * 3)
    system = {"devices": {"name": "table", "file": "devices.csv"}}
    path = write(tmp_path, experiment={"system": system, "run": {"cpus": 4, "actors": 1}}, seeds=[0, 1])
    plan, _, trials, _ = swept(path)
    assert len(trials) == 2 and all(is_serial(plan, trial, tmp_path) for trial in trials)


@pytest.mark.slow
def test_a_sweep_without_a_search_runs_all_seeds_at_once(swept, tmp_path, monkeypatch):
    """A trial of seed 1 starts while those of seed 0 run, where there is room, or after a failure of its row."""
    monkeypatch.setattr("rayfl.tuning.stages.Following", lambda *_: pytest.fail("seed 1 waits for seed 0"))
    rows = {
        "fails": {"method": {"name": f"{__name__}:Failing", "fails": "at work", "until": str(tmp_path / "mended")}},
        "well": {"method": "heterofl"},
    }
    path = write(tmp_path, rows, {"rounds": 3}, space={"training.lr": {"grid": [0.1]}}, seeds=[0, 1], max_failures=0)
    progress = Watched(load_sweep(path))
    with pytest.raises(RuntimeError, match="^2 of 4 trials failed"):
        swept(path, progress=progress)
    assert "training" in progress.printed and "searching" not in progress.printed
    assert sorted((t.label, t.config["seed"], t.status) for t in trials_of(tmp_path)) == [
        ("fails", 0, "failed"),
        ("fails", 1, "failed"),
        ("well", 0, "finished"),
        ("well", 1, "finished"),
    ]
