"""Idle clients cost nothing, a cohort is never in memory as a whole, and what `rayfl scale` measures and refuses."""

import gc
import json
import sys
import tracemalloc

import pytest
import ray
from helpers import simulate, tiny

import rayfl
from rayfl.config import ConfigError
from rayfl.core.fold import Fold, Update
from rayfl.results import scaling as results
from rayfl.results.folder import RunFolder
from rayfl.results.mlflow import Reader, Store, default_uri
from rayfl.tuning import scaling
from rayfl.tuning.scaling import Point

FEW, MANY = 1_000, 100_000
ROOM = 1_000
"""Lines of Python that may differ by chance."""


def population(count, folder, **sections):
    """A simulation of so many clients with one image each."""
    sections = {
        "data": {"samples": count, "shape": [1, 4, 4]},
        "partition": "iid",
        "clients": {"count": count, "cohort": 4, "capacities": [0.1]},
        "training": {"steps": 1},
        "evaluation": {"holdout": 0, "clients": 5, "statistics_clients": 5},
    } | sections
    return simulate(tiny(**sections), folder)


# idle clients


def held(clients, folder):
    """Return the bytes that a simulation of this many clients allocated and kept, without the images."""
    population(FEW, folder / "before").train()  # what a first round imports and caches
    tracemalloc.start()
    try:
        simulation = population(clients, folder / "counted")
        simulation.train()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_an_idle_client_takes_a_few_bytes_of_the_server(tmp_path):
    """32, and 4 for each image; its image and label, 16 + 8 bytes in the arrays, are counted with it here."""
    more = (held(MANY, tmp_path / "many") - held(FEW, tmp_path / "few")) / (MANY - FEW)
    assert 30 < more - (16 + 8) <= 40


def lines_run(work, *files):
    """How many lines of Python below these paths run while `work` does, those of a comprehension once an item."""
    count = 0

    def of_line(frame, event, _):
        nonlocal count
        count += event == "line"
        return of_line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: of_line if frame.f_code.co_filename.startswith(files) else None)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_a_loop_over_clients_is_found():
    assert lines_run(lambda: [client for client in range(MANY)], __file__) >= MANY
    assert lines_run(lambda: len({id(client) for client in range(MANY)}), __file__) >= MANY


def test_nothing_loops_over_all_clients(tmp_path):
    """Neither the start, nor a round, an evaluation, or a checkpoint."""
    counts = {}
    for clients in (FEW, FEW, MANY):  # the first fills caches
        folder, made = tmp_path / str(clients), []
        counts[clients] = {
            "start": lines_run(lambda: made.append(population(clients, folder)), *rayfl.__path__),  # noqa: B023
            "round": lines_run(lambda: made[0].train(), *rayfl.__path__),  # noqa: B023
            "evaluation": lines_run(lambda: made[0].evaluate(), *rayfl.__path__),  # noqa: B023
            "checkpoint": lines_run(lambda: made[0].save(folder / "checkpoints"), *rayfl.__path__),  # noqa: B023
        }
        made.clear()
    more = {what: counts[MANY][what] - lines for what, lines in counts[FEW].items()}
    assert all(counts[FEW].values()) and max(more.values()) < ROOM, more


# a cohort


def updates_alive(cohort, folder, monkeypatch):
    """How many updates a round has in memory at most, of chunks of one client."""
    simulation = population(FEW, folder, clients={"count": FEW, "cohort": cohort, "capacities": [0.2, 0.1]})
    most, add = 0, Fold.add

    def counted(fold, selection, update):
        nonlocal most
        most = max(most, sum(type(thing) is Update for thing in gc.get_objects()))
        add(fold, selection, update)

    monkeypatch.setattr(Fold, "add", counted)
    gc.collect()
    simulation.train()
    monkeypatch.undo()
    return most


def test_updates_in_memory_grow_with_the_logarithm_of_the_cohort(tmp_path, monkeypatch):
    """A sum for each binary digit of its size, and two that are being added to their total."""
    few, many = (updates_alive(cohort, tmp_path / str(cohort), monkeypatch) for cohort in (3, 48))
    assert few <= 4 and many <= 8


# the plan


@pytest.fixture
def two_cpus(monkeypatch):
    """A machine of two CPUs and 4 GB of free memory, on which no Ray is started."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))
    monkeypatch.setattr(scaling, "room", lambda cpus, gpus, server: int(2 / cpus))
    monkeypatch.setattr(scaling, "require_room", lambda *_: None)
    monkeypatch.setattr(scaling.ray_nodes, "connected", lambda: False)
    monkeypatch.setattr(scaling.ray_nodes, "memory", lambda: (8 * 10**9, 4 * 10**9))


def on_ray(**sections):
    return tiny(**{"run": {"executor": "ray", "chunk": 1}} | sections)


def test_one_axis_moves_at_a_time(two_cpus):
    plan = scaling.planned(on_ray(), {"clients": [12, 6], "cohort": [2, 4], "actors": [1, 2], "nodes": [1, 2]})
    assert plan.axes == {
        "clients": [Point(6, 4, 2, 1), Point(12, 4, 2, 1)],
        "cohort": [Point(6, 2, 2, 1), Point(6, 4, 2, 1)],
        "actors": [Point(6, 4, 1, 1), Point(6, 4, 2, 1)],
        "nodes": [Point(6, 4, 2, 1), Point(6, 4, 2, 2)],
    }
    assert len(plan.experiments) == 5 and not plan.notes
    at = plan.experiments[Point(12, 4, 2, 1)]
    assert (at.clients.count, at.clients.cohort, at.run.actors, at.run.cpus) == (12, 4, 2, 1)
    # 80 images for 6 clients are 13 for each
    assert at.data.model_dump()["samples"] == 12 * 13


def test_the_default_number_of_actors_is_that_of_a_run(two_cpus, monkeypatch):
    """On a machine of 16 CPUs and one GPU, of which every actor takes a quarter."""
    monkeypatch.setattr(scaling, "room", lambda cpus, gpus, server: 4 if gpus else int(16 / cpus))
    run = {"executor": "ray", "chunk": 1, "gpus": 0.25}
    plan = scaling.planned(on_ray(run=run, partition="iid", clients={"count": 12, "cohort": 12}), {"clients": [12, 24]})
    assert [point.actors for point in plan.axes["clients"]] == [4, 4]


def test_a_cosine_over_the_runs_rounds_is_measured(two_cpus):
    plan = scaling.planned(on_ray(rounds=10, training={"cosine_rounds": 10}), {"clients": [6]})
    assert plan.experiments and not plan.notes


def test_actors_share_cpus_and_that_is_said(two_cpus):
    plan = scaling.planned(on_ray(), {"actors": [2, 3, 5]})
    cpus = [plan.experiments[point].run.cpus for point in plan.axes["actors"]]
    assert cpus == [1, 0.6666, 0.4]
    assert plan.notes == [
        "3 client actors share 2 CPUs: 0.6666 of one each",
        "5 client actors share 2 CPUs: 0.4 of one each",
    ]


def test_what_does_not_fit_is_left_out_with_a_reason(two_cpus):
    axes = {"cohort": [4, 50], "actors": [2, 64], "nodes": [2, 3], "clients": [6, 1797]}
    plan = scaling.planned(on_ray(data="digits", partition="iid"), axes)
    assert [list(map(str, points)) for points in plan.axes.values()] == [
        ["clients 6, cohort 4, actors 2, nodes 1"],
        ["clients 6, cohort 4, actors 2, nodes 1"],
        ["clients 6, cohort 4, actors 2, nodes 2"],
        ["clients 6, cohort 4, actors 2, nodes 1"],
    ]
    small, large, wide, many = plan.notes
    assert small.startswith("left out: clients 6, cohort 50") and "a cohort of at most count = 6 clients" in small
    assert large.endswith("needs 26.8 GB of memory. Allowed: the 4.0 GB available")
    assert "clients 1,797, cohort 4" in many and "training samples left by" in many
    assert wide.endswith("3 nodes are more than 2 actors. Allowed: at most one node per actor")


@pytest.mark.parametrize(
    ("sections", "axes", "options", "message"),
    [
        ({}, {"actors": [0]}, {}, "--actors: [0] is not valid. Allowed: whole numbers of at least 1"),
        ({}, {"cohort": []}, {}, "--cohort: [] is not valid. Allowed: whole numbers of at least 1"),
        ({}, {"colour": [1]}, {}, "'colour' is not an axis. Allowed: clients, cohort, actors, nodes"),
        ({}, {"actors": [1]}, {"rounds": 0}, "--rounds: 0 is not valid. Allowed: at least 1"),
        ({}, {"nodes": [1]}, {"address": "10.0.0.1:6379"}, "--nodes: --address is set"),
        ({}, {"cohort": [50]}, {}, "no point is left to measure"),
        (
            {"run": {"executor": "serial"}},
            {"actors": [1]},
            {},
            "run.executor: serial has no processes to measure. Allowed: ray",
        ),
    ],
)
def test_bad_input_is_refused_before_ray_starts(two_cpus, tmp_path, sections, axes, options, message):
    with pytest.raises(ConfigError) as refused:
        scaling.scale(on_ray(**sections), tmp_path / "scale", axes, **options)
    assert message in str(refused.value) and list(tmp_path.iterdir()) == []


def test_the_command_line_names_axes(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    nothing = dict.fromkeys(scaling.AXES)
    assert scaling.axes_of(nothing, None) == scaling.AXES
    assert list(scaling.axes_of(nothing, "10.0.0.1:6379")) == ["clients", "cohort", "actors"]
    assert scaling.axes_of(nothing | {"actors": "1,2,4"}, None) == {"actors": [1, 2, 4]}
    with pytest.raises(ConfigError, match="--actors 1,x is not valid. Allowed: whole numbers, such as --actors 1,2,4"):
        scaling.axes_of(nothing | {"actors": "1,x"}, None)


# what came out


def row(**changes):
    point = {"clients": 100, "cohort": 10, "actors": 1, "nodes": 1, "cpus": 1.0}
    return (
        point
        | dict.fromkeys(results.COLUMNS, 1.0)
        | {"seconds": 2.0, "driver_own": 10_000, "server_own": 500, "actor_own": 70, "data_bytes": 1_000}
        | changes
    )


def test_efficiency_is_per_cpu_that_was_given():
    rows = [
        row(clients_per_second=10.0),
        row(actors=2, clients_per_second=18.0),
        row(actors=4, cpus=0.5, clients_per_second=16.0),
    ]
    assert results.efficiency(rows) == [1.0, 0.9, 0.8]
    shown = results.table("actors", rows)
    assert shown.header[-1] == "efficiency" and [line[-1] for line in shown.rows] == ["1.00", "0.90", "0.80"]
    assert "efficiency" not in results.table("cohort", rows).header


def test_an_idle_client_is_counted_without_its_data():
    many = row(clients=1_100, driver_own=60_000, server_own=3_500, actor_own=70, data_bytes=41_000, seconds=2.1)
    many["server_cpu_seconds"] = 12.0  # and 10 of the cohort
    assert results.idle_bytes([row(), many]) == {"driver": 10.0, "server": 3.0, "client actor": 0.0}
    assert results.findings({"clients": [row(), many], "cohort": [row()]}) == [
        "Memory per additional idle client, without its data: "
        "10 B in the driver, 3 B in the server, 0 B in the client actor.",
        "With 1,100 instead of 100 clients a round takes 1.05x the time and 2.00x the CPU time.",
    ]


def test_tables_and_plots_of_every_axis_are_written(tmp_path):
    base, large = row(), row(cohort=100, server_peak=3.0)
    results.write_scaling(tmp_path, {"cohort": [base, large], "nodes": [base]})
    assert json.loads((tmp_path / "scale.json").read_text())["axes"] == {"cohort": [base, large], "nodes": [base]}
    assert (tmp_path / "scale.csv").read_text().count("\n") == 3  # a row stands once
    assert "instead of 10: server 3.00x, client actor 1.00x" in (tmp_path / "scale.md").read_text()
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        *("cohort_speed.png", "cohort_speed.csv", "cohort_memory.png", "cohort_memory.csv")
    }
    assert (tmp_path / "plots" / "cohort_speed.csv").read_text() == "cohort,seconds\n10,2.0\n100,2.0\n"


@pytest.mark.ray
@pytest.mark.slow
def test_the_command_measures_all_axes(start, tmp_path, monkeypatch):
    """Two raylets included; MLflow's metrics are over the axis."""
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    settings = ("clients.count=8", "clients.cohort=4", "data.samples=160", "data.test_samples=20", "run.actors=2")
    axes = ("--clients", "8", "--cohort", "4,9", "--actors", "1,2", "--nodes", "2")
    arguments = [option for setting in settings for option in ("--set", setting)]
    code, printed = start("scale", *arguments, *axes, "--rounds", "2", "--output", tmp_path).finish()
    assert code == 0, printed
    assert "left out: clients 8, cohort 9" in printed and "efficiency" in printed
    found = json.loads((tmp_path / "scale" / "scale.json").read_text())["axes"]
    assert {axis: [row[axis] for row in rows] for axis, rows in found.items()} == {
        "clients": [8],
        "cohort": [4],
        "actors": [1, 2],
        "nodes": [2],
    }
    for row in (row for rows in found.values() for row in rows):
        assert min(row["seconds"], row["server_peak"], row["actor_peak"], row["driver_peak"], row["store_bytes"]) > 0
        assert row["bytes_down"] == row["bytes_up"] > 0
    assert RunFolder.open(tmp_path / "scale").status == "finished"
    store = Store(default_uri(tmp_path))
    [sent] = Reader(store).read("scale")
    [found_run] = store.search(
        [store.experiments("name = 'scale'")[0].experiment_id], f"tags.`rayfl.run_id` = '{sent['id']}'"
    )
    history = store.client.get_metric_history(found_run.info.run_id, "actors/seconds")
    assert sorted((point.step, point.value) for point in history) == [
        (r["actors"], r["seconds"]) for r in found["actors"]
    ]
    assert Reader(store).read() == []
