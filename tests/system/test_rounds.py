"""Rounds on simulated devices: bits of a run without them, versions, resuming, and an independent reference."""

from collections import Counter

import pytest
import torch
from helpers import ADAPTED, Perceptron, assert_same, made_up_for, run, simulate, tiny
from pydantic import PrivateAttr

import rayfl
from rayfl.config import ConfigError
from rayfl.core.seeds import stream, torch_generator
from rayfl.reference.describe import times
from rayfl.results.tables import table
from rayfl.testing.methods import rows_of

EQUAL = {"name": "classes", "classes": [{"name": "board", "gflops": 1}]}
BUFFER = {"name": "buffered", "concurrency": 5, "buffer": 2}
PHONES = {"devices": "phones", "mode": BUFFER}
REFL = {"weight": "refl", "divide": "weights", "c": 3}
LATE = {"devices": "phones", "mode": {"name": "sync", "deadline_s": 2.5e-4, "late_rounds": 5, "staleness": REFL}}


def test_equal_devices_give_the_bits_of_a_run_without_them(tmp_path):
    plain = simulate(tiny(method="heterofl", rounds=3), tmp_path / "a")
    timed = simulate(tiny(method="heterofl", rounds=3, system={"devices": EQUAL}), tmp_path / "b")
    lines, ours = run(plain), run(timed)
    assert_same(timed.state, plain.state)
    assert [{name: one[name] for name in line} for line, one in zip(lines, ours, strict=True)] == lines


def test_a_buffer_of_the_cohort_on_equal_devices_is_fedavg(tmp_path):
    given = {"method": "fedavg", "clients": {"capacities": [1.0]}, "partition": "iid", "rounds": 4}
    system = {"devices": EQUAL, "mode": {"name": "buffered", "concurrency": 4, "buffer": 4}}
    plain = simulate(tiny(**given), tmp_path / "a")
    buffered = simulate(tiny(**given, system=system), tmp_path / "b")
    lines, ours = run(plain), run(buffered)
    assert_same(buffered.state, plain.state)
    assert [line["staleness"] for line in ours] == [0] * 4
    assert ours[-1]["accuracy_mean"] == lines[-1]["accuracy_mean"]


@pytest.mark.parametrize(("method", "system"), [("nefl", PHONES), ("heterofl", LATE)])
def test_a_run_resumes_while_clients_train(tmp_path, method, system):
    sections = {
        "nefl": {"model": {"name": "resnet18", "channels": 8}},
        "heterofl": {"model": Perceptron(hidden=(9, 8)), "data": {"shape": [1, 1, 2]}},
    }.get(method, {})
    experiment = tiny(method=method, rounds=6, system=system, **sections)
    whole = simulate(experiment, tmp_path / "whole")
    lines = run(whole)
    assert max(line["staleness"] for line in lines) > 0
    first = simulate(experiment, tmp_path / "first")
    before = run(first, 5)
    assert first.past.running and first.versions
    first.save(tmp_path / "saved")
    second = simulate(experiment, tmp_path / "second")
    assert second.restore(tmp_path / "saved") == (5, [])
    assert (second.past, set(second.versions)) == (first.past, set(first.versions))
    assert before + run(second) == lines
    assert_same(second.state, whole.state)


def test_versions_are_kept_as_long_as_a_client_trains_on_them(tmp_path):
    simulation = simulate(tiny(method="heterofl", rounds=8, system=PHONES), tmp_path)
    while not simulation.done:
        simulation.run_round()
        running = [one for one in simulation.past.running if not one.is_lost]
        assert set(simulation.versions) == {one.version for one in running}


def test_a_learning_rate_whose_updates_are_refused(tmp_path):
    """The work of a visit is counted at a small one."""
    experiment = tiny(method="heterofl", rounds=1, training={"lr": 1e30}, system={"devices": EQUAL})
    [line] = run(simulate(experiment, tmp_path))
    assert line["refused"] == 4 and line["sim_seconds"] > 0


def test_keys_and_shares_of_a_large_cohort_are_counted(tmp_path):
    """Bytes of a visit are counted in a small cohort, those of secure aggregation for the whole one."""
    sections = {
        "clients": {"count": 24, "cohort": 24, "capacities": [1.0]},
        "partition": "iid",
        "updates": {"secure_aggregation": {"bits": 16, "limit": 1}},
    }
    method = {"name": "fedavg", "weight": "uniform"}
    simulation = simulate(tiny(method=method, rounds=1, system={"devices": EQUAL}, **sections), tmp_path)
    work = simulation.schedule.fleet.work[1.0]
    line = simulation.run_round()
    assert (24 * work.bytes_down, 24 * work.bytes_up) == (line["bytes_down"], line["bytes_up"])


def test_an_abandoned_round_changes_nothing(tmp_path):
    mode = {"name": "sync", "deadline_s": 1e-6}
    simulation = simulate(tiny(method="heterofl", system={"devices": EQUAL, "mode": mode}), tmp_path)
    before = simulation.state
    line = simulation.run_round()
    assert simulation.state is before and (line["abandoned"], line["sim_time"]) == (1, 1e-6)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("system", [PHONES, LATE], ids=["buffered", "refl"])
def test_rolling_windows_of_older_versions_equal_an_independent_reference(tmp_path, system):
    """Ten rounds of FedRolex in plain torch and float64: every update with the window of its version."""
    lr = 0.1
    experiment = tiny(
        method="fedrolex",
        rounds=10,
        model=Perceptron(hidden=(9, 7)),
        data={"shape": [1, 1, 2]},
        training={"lr": lr, "steps": 1, "batch_size": 1000},
        system=system,
        evaluation={"every": 10},
    )
    simulation = simulate(experiment, tmp_path)
    x = {name: t.double().clone() for name, t in simulation.state["params"].items()}
    versions, stale = {}, Counter()
    for round in range(10):
        visits = simulation.schedule.plan(simulation.past, round).visits
        versions[round] = {name: t.clone() for name, t in x.items()}
        changes = []
        for version, id in visits:
            capacity = simulation.clients.capacity(id, 0, version)
            net, start = simulation.method.net_at(capacity), versions[version]
            index = {name: _window(t.shape, net.layout.shapes[name], version) for name, t in start.items()}
            part = {name: t[index[name]] for name, t in start.items()}
            data = rows_of(simulation, id)
            trained = _one_step(net, part, data, lr, stream(0, "local", version, id))
            moved = {name: torch.zeros_like(t) for name, t in x.items()}
            cover = {name: torch.zeros_like(t) for name, t in x.items()}
            for name in x:
                # label_rows: present
                rows = data.present.double() if name.startswith("head") else torch.ones(len(part[name]))
                held = rows.view(-1, *[1] * (part[name].dim() - 1)).expand_as(part[name])
                moved[name][index[name]] += held * (trained[name] - part[name])
                cover[name][index[name]] += held
            changes.append((round - version, moved, cover))
        if system is LATE:
            weights = _refl(changes, c=3)
            divisors = weights
        else:
            weights, divisors = [(1 + tau) ** -0.5 for tau, _, _ in changes], [1.0] * len(changes)
        stale[len(changes), sum(tau > 0 for tau, _, _ in changes)] += 1
        for name, t in x.items():
            moved = sum(s * change[1][name] for s, change in zip(weights, changes, strict=True))
            cover = sum(s * change[2][name] for s, change in zip(divisors, changes, strict=True))
            x[name] = torch.where(cover > 0, t + moved / torch.where(cover > 0, cover, 1.0), t) if visits else t
        simulation.run_round()
        for name, t in simulation.state["params"].items():
            torch.testing.assert_close(t.double(), x[name], rtol=1e-9, atol=1e-10)
    assert any(late > 1 for _, late in stale)


def _refl(changes, c):
    """Return REFL's weights, with flat vectors of all coordinates."""
    flat = [
        (tau, torch.cat([t.ravel() for t in moved.values()]), torch.cat([t.ravel() for t in cover.values()]))
        for tau, moved, cover in changes
    ]
    fresh = [(moved, cover) for tau, moved, cover in flat if tau == 0]
    if not fresh:
        return []
    mean = sum(moved for moved, _ in fresh) / sum(cover for _, cover in fresh).clamp(min=1)
    distances = [((moved - mean * cover).norm() / (mean * cover).norm()) ** 2 for _, moved, cover in flat]
    most = max((r for r, (tau, _, _) in zip(distances, flat, strict=True) if tau), default=1)
    return [
        1.0 if tau == 0 else float(0.65 / (tau + 1) + 0.35 * (1 - torch.exp(-r / most) / c))
        for r, (tau, _, _) in zip(distances, flat, strict=True)
    ]


def _window(whole, part, round):
    """Return the positions of FedRolex's window, with one index per dimension."""
    places = []
    for size, count in zip(whole, part, strict=True):
        first = round % size if count < size else 0
        places.append((torch.arange(count) + first) % size)
    return torch.meshgrid(*places, indexing="ij") if len(places) > 1 else (places[0],)


def _one_step(net, params, data, lr, seed):
    module = net.build()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(params[name])
    [(images, labels)] = data.batches(1, 1000, torch_generator(seed, "batches"))
    torch.nn.functional.cross_entropy(module(images.double()) * data.present, labels).backward()
    return {name: p.detach() - lr * p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ({"devices": "phone"}, "no device table is called 'phone'. Did you mean 'phones'?"),
        (
            {"devices": {"name": "phones", "shares": [0, 0, 0]}},
            "devices: {'name': 'phones', 'shares': [0, 0, 0]} is not valid. Allowed: shares of at least 0, not all 0",
        ),
        ({"devices": {"name": "classes", "classes": [{"name": "x", "gflops": -1}]}}, "gflops: -1 is not valid"),
        ({"devices": {"name": "table", "file": "/nowhere.csv"}}, "/nowhere.csv: cannot be read"),
        (
            {"mode": {"name": "buffered", "concurrency": 7}},
            "mode.concurrency: 7 clients train at a time. Allowed: at most",
        ),
        (
            {"mode": {"name": "buffered", "concurrency": 5, "buffer": 7}},
            "mode.buffer: 7 updates of different clients are aggregated at a time. Allowed: at most clients.count = 6",
        ),
        ({"mode": {"name": "sync", "select": 2}}, "mode.select: 8 clients train at a time"),
        ({"mode": "asynchronous"}, "Allowed: a name, one of 'sync', 'buffered'"),
        ({"mode": {"deadline_s": -1}}, "mode.deadline_s: -1 is not valid. Allowed: more than 0"),
        ({"mode": {"staleness": {"weight": "refl"}}}, "divide: weights with weight: refl"),
        ({"mode": {"staleness": {"weight": "constant", "a": 1}}}, "a only with weight: polynomial or hinge; a is 1"),
        (
            {"mode": {"name": "buffered", "buffer": 1, "staleness": {"divide": "weights"}}},
            "staleness.divide: count with buffer: 1, where the weight of a single update cancels",
        ),
        ({"mode": BUFFER | {"staleness": REFL}}, "mode: sync with staleness.weight: refl"),
        ({"capacities": "time"}, "capacity_s with capacities: time, and only then"),
        ({"availability": {"name": "trace", "file": "/nowhere.csv"}}, "/nowhere.csv: cannot be read"),
    ],
)
def test_bad_input(system, expected):
    with pytest.raises(ConfigError) as error:
        tiny(method="heterofl", system=system)
    assert str(error.value).startswith("test: system") and expected in str(error.value)


@pytest.mark.parametrize("method", ["scaffold", "feddf", "flora", "fedpm", "spafl"])
def test_methods_that_cannot_mix_versions(method):
    sections = {
        "feddf": {"data": {"public": {"share": 0.3}}},
        "flora": {"model": ADAPTED, "data": made_up_for(ADAPTED)},
    }.get(method, {})
    with pytest.raises(ConfigError) as error:
        tiny(method=method, system=PHONES, **sections)
    assert f"method {method} needs updates of the current model, because" in str(error.value)


def test_a_deadline_that_nobody_meets_is_refused_before_the_run(tmp_path):
    slow = tiny(system={"devices": EQUAL, "mode": {"name": "sync", "deadline_s": 1e-6}})
    with pytest.raises(ConfigError) as error:
        rayfl.run(slow, tmp_path / "run")
    assert str(error.value).startswith("system.mode.deadline_s: no client can finish within 1e-06 seconds. Allowed: ")
    assert not (tmp_path / "run").exists()


def test_a_deadline_of_a_later_row_is_checked_too(tmp_path):
    rows = {"wait": {}, "deadline": {"system": {"mode": {"name": "sync", "deadline_s": 1e-6}}}}
    with pytest.raises(ConfigError) as error:
        rayfl.sweep(
            {"experiment": tiny(system={"devices": EQUAL}, run={"executor": "ray"}), "rows": rows}, tmp_path / "s"
        )
    assert "rows.deadline: system.mode.deadline_s: no client can finish within 1e-06 seconds" in str(error.value)
    assert not (tmp_path / "s").exists()


def test_a_cohort_of_more_clients_than_are_available_is_refused_before_the_run(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "client,start_s,end_s\n" + "".join(f"{id},{20_000 * id},{20_000 * id + 9_000}\n" for id in range(6))
    )
    system = {"availability": {"name": "trace", "file": str(trace)}, "devices": EQUAL}
    with pytest.raises(ConfigError) as error:
        rayfl.run(tiny(system=system), tmp_path / "run")
    assert str(error.value) == (
        "clients.cohort: 4 is not valid, because at most about 1 clients are available at a time in the first "
        "week (system.availability). Allowed: at most as many"
    )
    assert not (tmp_path / "run").exists()


def test_times_without_training_are_those_of_the_run(tmp_path):
    experiment = tiny(method="heterofl", rounds=4, system=PHONES)
    lines = run(simulate(experiment, tmp_path))
    notes = []
    records, facts = times(experiment, notes.append)
    assert facts["seconds"] == lines[-1]["sim_time"]
    assert facts["asked"] == sum(line["asked"] for line in lines) / 4
    assert facts["staleness"] == sum(line["staleness"] for line in lines) / 4
    assert sum(record["clients"] for record in records) == pytest.approx(1)
    counted = {
        record["device"]: sum(line.get(f"updates_{record['device']}", 0) for line in lines) for record in records
    }
    assert {record["device"]: record["updates"] for record in records} == {
        kind: count / sum(counted.values()) for kind, count in counted.items()
    }
    assert len(notes) == 1


def test_times_warn_of_abandoned_rounds():
    mode = {"name": "sync", "deadline_s": 0.01, "minimum": 1}
    notes = []
    times(tiny(method="heterofl", rounds=10, system={"devices": "phones", "mode": mode}), notes.append)
    assert notes[1].partition(" of ")[2] == (
        "10 rounds are abandoned, because fewer than 4 updates have arrived at their end. Hint: raise "
        "system.mode.deadline_s, late_rounds or select, or lower minimum"
    )


def test_a_run_ends_by_simulated_time(tmp_path):
    """At its first evaluation then or later, with the rounds of the run that goes on; also after a stop."""
    given = tiny(rounds=7, evaluation={"every": 2}, system={"devices": EQUAL})
    lines = rayfl.run(given, tmp_path / "all").lines
    until = given.with_(system={"devices": EQUAL, "until_s": lines[2]["sim_time"]})
    ended = rayfl.run(until, tmp_path / "ended")
    assert [one | {"seconds": 0} for one in ended.lines] == [one | {"seconds": 0} for one in lines[:4]]
    assert ended.summary["rounds"] == 4
    assert len(rayfl.run(until, tmp_path / "ended", resume=True).lines) == 4
    late = given.with_(system={"devices": EQUAL, "until_s": lines[-1]["sim_time"] * 1.01})
    heard = Notes()
    assert len(rayfl.run(late, tmp_path / "late", listeners=[heard]).lines) == 7
    assert [text for text in heard._texts if "until_s" in text] == [
        f"round 7: all 7 rounds took {lines[-1]['sim_time']:.3g} s, less than system.until_s = "
        f"{lines[-1]['sim_time'] * 1.01:g}"
    ]


class Notes(rayfl.Listener):
    _texts: list[str] = PrivateAttr(default_factory=list)

    def on_note(self, text):
        self._texts.append(text)


def test_results_have_the_time_to_a_target(tmp_path):
    system = {"devices": EQUAL, "time_to": [0.0, 0.2, 0.99]}
    result = rayfl.run(tiny(method="fedavg", rounds=4, evaluation={"every": 2}, system=system), tmp_path / "run")
    first, *_, last = result.lines
    evaluated = [line for line in result.lines if "accuracy_mean" in line]
    reached = next((line["sim_time"] for line in evaluated if line["accuracy_mean"] >= 0.2), None)
    assert result.summary["time_to_0"] == evaluated[0]["sim_time"] == 2 * first["sim_time"]
    assert result.summary.get("time_to_0.2") == reached
    assert "time_to_0.99" not in result.summary
    assert result.summary["sim_seconds"] == pytest.approx(last["sim_time"])
    shown = table([result.folder.record()])
    assert shown.header[-8:-4] == ["to 0 %", "to 20 %", "to 99 %", "simulated"]
    assert shown.rows[0][-6] == "–"
