"""Schedules of three clients, computed by hand: client 0 needs 1 second, client 1 needs 2, client 2 needs 4."""

import json
from dataclasses import replace

import numpy as np
import pytest
from pydantic import TypeAdapter

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.system import Fleet, Past, System, Timed, Work

WORK = {1.0: Work(flops=1e9, bytes_down=0, bytes_up=0)}


def timed(tmp_path, mode, cohort=3, work=WORK, **settings):
    table = tmp_path / "devices.csv"
    table.write_text("name,gflops\nfast,1\nmedium,0.5\nslow,0.25\n")
    system = System(devices={"name": "table", "file": str(table)}, mode=mode, **settings)
    population = Population(count=3, cohort=cohort)
    return Timed(Fleet(system, population, 0, work, lambda id: (1, 1), lambda id: 1))


def planned(schedule, rounds):
    """Return (end, visits, seconds and counts) per round."""
    past, found = Past(), []
    for round in range(rounds):
        plan = schedule.plan(past, round)
        # what a checkpoint stores
        past = TypeAdapter(Past).validate_python(json.loads(json.dumps(plan.past.plain())))
        assert past == plan.past
        found.append((past.seconds, plan.visits, plan))
    return found


def test_the_server_waits_for_all(tmp_path):
    found = planned(timed(tmp_path, "sync", round_s=0.5), 2)
    assert [(end, visits) for end, visits, _ in found] == [
        (4.5, [(0, 0), (0, 1), (0, 2)]),
        (9.0, [(1, 0), (1, 1), (1, 2)]),
    ]
    assert found[1][2].metrics["sim_seconds"] == 4.5 and found[1][2].metrics["sim_time"] == 9.0


def test_over_selection_keeps_the_first(tmp_path):
    [(end, visits, plan)] = planned(timed(tmp_path, {"name": "sync", "select": 1.5}, cohort=2), 1)
    assert (end, visits) == (2, [(0, 0), (0, 1)])
    assert {name: plan.metrics[name] for name in ("asked", "late", "lost", "wasted_flops")} == {
        "asked": 3,
        "late": 1,
        "lost": 0,
        # client 2 stops after 2 of 4 seconds
        "wasted_flops": 0.5e9,
    }


@pytest.mark.parametrize(
    "mode", [{"name": "sync", "select": 2}, {"name": "buffered", "concurrency": 20, "buffer": 10, "max_staleness": 0}]
)
def test_of_equal_devices_none_is_preferred(mode):
    classes = [{"name": "board", "gflops": 1}]
    system = System(devices={"name": "classes", "classes": classes}, mode=mode)
    schedule = Timed(Fleet(system, Population(count=30, cohort=10), 0, WORK, lambda id: (1, 1), lambda id: 1))
    ids = [id for *_, plan in planned(schedule, 300) for _, id in plan.visits]
    # 3,000 updates of 30 clients, 100 each: 5 standard deviations are 50
    assert all(abs(count - 100) < 50 for count in np.bincount(ids, minlength=30))


def test_many_clients_at_a_time_fill_a_buffer_of_one():
    system = System(devices="phones", mode={"name": "buffered", "concurrency": 1001, "buffer": 1})
    schedule = Timed(Fleet(system, Population(count=1001, cohort=1), 0, WORK, lambda id: (1, 1), lambda id: 1))
    assert len(schedule.plan(Past(), 0).visits) == 1


@pytest.mark.parametrize("count", [900, 2000, 2500, 3000, 9001])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_some_clients_have_the_shares_of_classes_in_turn(count, classes):
    named = [{"name": str(i), "gflops": i + 1} for i in range(classes)]
    system = System(devices={"name": "classes", "classes": named, "assignment": "turns"})
    some = Fleet(system, Population(count=count, cohort=1), 0, WORK, lambda id: (1, 1), lambda id: 1).some
    assert 800 <= len(set(some)) == len(some) <= 1000 and 0 <= min(some) and max(some) < count
    found = np.bincount([id % classes for id in some], minlength=classes)
    assert max(found) - min(found) <= 10


def test_a_deadline_drops_the_late(tmp_path):
    found = planned(timed(tmp_path, {"name": "sync", "deadline_s": 3}), 2)
    assert [(end, visits) for end, visits, _ in found] == [(3, [(0, 0), (0, 1)]), (6, [(1, 0), (1, 1)])]


def test_a_late_update_counts_in_a_later_round(tmp_path):
    found = planned(timed(tmp_path, {"name": "sync", "deadline_s": 3, "late_rounds": 1}), 3)
    # client 2 finishes at 4, inside the second round, for which it is busy
    assert [(end, visits) for end, visits, _ in found] == [
        (3, [(0, 0), (0, 1)]),
        (5, [(0, 2), (1, 0), (1, 1)]),
        (8, [(2, 0), (2, 1)]),
    ]
    assert [plan.metrics["staleness"] for *_, plan in found] == [0, 1 / 3, 0]
    assert [plan.past.versions for *_, plan in found] == [{0}, set(), {2}]


def test_devices_waste_no_more_than_they_can_do(tmp_path):
    """Client 0 is in time. The others, of 0.5 and 0.25 GFLOP/s, work and stop in every round of 1.5 seconds."""
    found = planned(timed(tmp_path, {"name": "sync", "deadline_s": 1.5}), 20)
    assert found[-1][0] == 30
    assert sum(plan.metrics["wasted_flops"] for *_, plan in found) == pytest.approx(30 * 0.75e9)


def test_a_visit_is_spent_phase_by_phase(tmp_path):
    """Client 1 downloads for one second, trains for two and sends for four."""
    device = {"name": "x", "gflops": 1, "down_mbps": 8, "up_mbps": 2}
    system = System(devices={"name": "classes", "classes": [device]})
    work = {1.0: Work(flops=2e9, bytes_down=1e6, bytes_up=1e6)}
    visit = Fleet(system, Population(count=1, cohort=1), 0, work, lambda id: (1, 1), lambda id: 1).dispatch(
        0, 0, 5.0, 1
    )
    assert [visit.spent(5 + time) for time in (0, 0.5, 1, 2, 3, 4, 7, 9)] == [
        (0, 0),
        (0, 0.5e6),
        (0, 1e6),
        (1e9, 1e6),
        (2e9, 1e6),
        (2e9, 1.25e6),
        (2e9, 2e6),
        (2e9, 2e6),
    ]
    assert replace(visit, finish=7.0).spent(9) == (1e9, 1e6), "it left"


def test_a_minimum_counts_late_updates(tmp_path):
    """With a slow server no update is in time. Those of round 0 arrive in rounds 1 to 3, when no client is free."""
    late = {"name": "sync", "deadline_s": 0.9, "late_rounds": 5}
    found = planned(timed(tmp_path, late), 5)
    assert [visits for _, visits, _ in found] == [[], [(0, 0)], [(0, 1)], [(2, 0)], [(0, 2)]]
    found = planned(timed(tmp_path, late | {"minimum": 0.5}), 3)
    assert [visits for _, visits, _ in found] == [[], [], [(0, 0), (0, 1)]]


def test_clients_that_have_finished_are_asked_after_an_abandoned_round(tmp_path):
    """Client 0 finishes in each of the rounds, which are abandoned without a second update; its newest one counts."""
    mode = {"name": "sync", "deadline_s": 1.2, "minimum": 0.5, "late_rounds": 9}
    found = planned(timed(tmp_path, mode), 2)
    assert [visits for _, visits, _ in found] == [[], [(0, 1), (1, 0)]]
    assert [(plan.metrics["asked"], plan.metrics["late"]) for *_, plan in found] == [(3, 0), (1, 1)]


def test_a_client_is_not_free_before_its_loss(tmp_path):
    """Its update will be lost, which the server learns at its end."""
    mode = {"name": "sync", "deadline_s": 1.5, "late_rounds": 9}
    schedule = timed(tmp_path, mode, dropout=0.9)
    plans = [plan for *_, plan in planned(schedule, 40)]
    asked, lost, used = (sum(plan.metrics[name] for plan in plans) for name in ("asked", "lost", "late"))
    assert lost > 40 and used == 0 and any(one.is_lost for plan in plans for one in plan.past.running)
    assert asked == lost + sum(len(plan.visits) for plan in plans) + len(plans[-1].past.running)
    for plan in plans:
        clients = [one.client for one in plan.past.running]
        assert len(set(clients)) == len(clients)


def test_too_few_updates_abandon_a_round(tmp_path):
    [(end, visits, plan)] = planned(timed(tmp_path, {"name": "sync", "deadline_s": 3, "minimum": 0.9}), 1)
    assert (end, visits, plan.metrics["abandoned"], plan.metrics["late"]) == (3, [], 1, 3)


def test_a_round_with_exactly_the_minimum_counts():
    """0.55 * 100 is 55.00000000000001 in floating point."""
    classes = [{"name": "fast", "gflops": 1, "share": 55}, {"name": "slow", "gflops": 0.1, "share": 45}]
    devices = {"name": "classes", "classes": classes, "assignment": "turns"}

    def visits(minimum):
        system = System(devices=devices, mode={"name": "sync", "deadline_s": 3, "minimum": minimum})
        fleet = Fleet(system, Population(count=100, cohort=100), 0, WORK, lambda id: (1, 1), lambda id: 1)
        return len(Timed(fleet).plan(Past(), 0).visits)

    assert [visits(minimum) for minimum in (0.54, 0.55, 0.551)] == [55, 55, 0]


def test_a_buffer_of_two(tmp_path):
    found = planned(timed(tmp_path, {"name": "buffered", "concurrency": 3, "buffer": 2}), 4)
    # at 4, clients 1 (version 1) and 2 (version 0) arrive, and the buffer has one free place, which 2 is drawn for
    assert [(end, visits) for end, visits, _ in found] == [
        (2, [(0, 0), (0, 1)]),
        (4, [(0, 2), (1, 0)]),
        (5, [(1, 1), (2, 0)]),
        (7, [(3, 0), (3, 1)]),
    ]
    assert [plan.metrics["staleness"] for *_, plan in found] == [0, 0.5, 0.5, 0]


def test_old_updates_are_dropped(tmp_path):
    mode = {"name": "buffered", "concurrency": 3, "buffer": 2, "max_staleness": 0}
    found = planned(timed(tmp_path, mode), 3)
    # at 4 the update of client 2, one version old, is dropped
    assert found[1][:2] == (4, [(1, 0), (1, 1)])
    assert [plan.metrics["late"] for *_, plan in found] == [0, 1, 0]


def test_fedscales_formula(tmp_path):
    """3 x 20 samples x 5 steps x 100 ms, and 10 Mbit each way at 1 Mbit/s: 30 + 20 seconds."""
    device = {"name": "x", "gflops": 1, "down_mbps": 1, "up_mbps": 1}
    system = System(devices={"name": "classes", "classes": [device]})
    work = {1.0: Work(flops=3 * 0.1e9, bytes_down=10e6 / 8, bytes_up=10e6 / 8)}
    fleet = Fleet(system, Population(count=1, cohort=1), 0, work, lambda id: (100, 5), lambda id: 100)
    assert fleet.dispatch(0, 0, 7.0, 1).finish == pytest.approx(57.0)


def test_fixed_operations_take_time_and_are_wasted(tmp_path):
    """Two samples of 1e9 operations and 1e9 per visit, three seconds at 1 GFLOP/s; the slow ones stop after four: 2e9
    operations at 0.5 GFLOP/s, and 1e9 at 0.25."""
    work = {1.0: Work(flops=1e9, bytes_down=0, bytes_up=0, fixed_flops=1e9)}
    schedule = timed(tmp_path, {"name": "sync", "deadline_s": 4}, work=work)
    fleet = replace(schedule.fleet, samples=lambda id: (2, 1))
    assert [sum(fleet.seconds(id)) for id in range(3)] == [3, 6, 12]
    plan = replace(schedule, fleet=fleet).plan(Past(), 0)
    assert (plan.visits, plan.durations, plan.metrics["wasted_flops"]) == ([(0, 0)], {0: 3}, 3e9)


@pytest.mark.parametrize("way", ["down", "up"])
def test_the_servers_bandwidth_is_shared(tmp_path, way):
    work = {1.0: Work(**{"flops": 0, "bytes_down": 0, "bytes_up": 0, f"bytes_{way}": 1e6})}
    schedule = timed(tmp_path, "sync", work=work, **{f"server_{way}_mbps": 2.0})
    assert schedule.plan(Past(), 0).past.seconds == pytest.approx(8 / (2 / 3))


@pytest.mark.parametrize(
    ("mode", "ends"),
    [
        # client 0 finishes at 1.2, then client 1 is asked
        ({"name": "buffered", "concurrency": 2, "buffer": 2}, [3.4]),
        # the first round is abandoned at 3; in the second one client 2 trains until 4.2, and the others are asked
        ({"name": "sync", "deadline_s": 3, "minimum": 1, "late_rounds": 1}, [3, 5.3]),
    ],
)
def test_clients_that_have_finished_leave_the_bandwidth_to_others(tmp_path, mode, ends):
    """0.1 Mbit and 1 Mbit/s of the server: 0.2 seconds for two clients, of which one has begun earlier."""
    work = {1.0: Work(flops=1e9, bytes_down=0.1e6 / 8, bytes_up=0)}
    schedule = timed(tmp_path, mode, cohort=2, work=work, server_down_mbps=1.0)
    assert [end for end, *_ in planned(schedule, len(ends))] == pytest.approx(ends)


def test_a_visit_has_the_capacity_of_its_round(tmp_path):
    work = {1.0: Work(1e9, 0, 0), 0.5: Work(0.25e9, 0, 0)}
    population = Population(count=3, cohort=3, capacities=[1, 0.5], assignment="dynamic")
    fleet = replace(timed(tmp_path, "sync", work=work).fleet, population=population)
    visits = [(id, version, fleet.dispatch(id, version, 0.0, 1)) for id in range(3) for version in range(8)]
    drawn = {(id, version): population.capacity(id, 0, version) for id, version, _ in visits}
    assert len({drawn[0, version] for version in range(8)}) == 2
    assert all(visit.flops == work[drawn[id, version]].flops for id, version, visit in visits)
    assert all(visit.finish == visit.flops / 1e9 * 2**id for id, _, visit in visits)


def test_capacities_that_fit_the_device(tmp_path):
    table = tmp_path / "devices.csv"
    table.write_text("name,gflops,memory_mb\na,1,100\nb,0.5,30\nc,0.1,1\n")
    work = {1.0: Work(1e9, 0, 0, 80), 0.5: Work(0.25e9, 0, 0, 20), 0.25: Work(0.06e9, 0, 0, 5)}
    population = Population(count=3, cohort=3, capacities=(1.0, 0.5, 0.25))
    devices = {"name": "table", "file": str(table)}

    def capacities(**settings):
        fleet = Fleet(System(devices=devices, **settings), population, 0, work, lambda id: (1, 1), lambda id: 1)
        return Timed(fleet).capacities(np.arange(3), 0).tolist()

    assert capacities(capacities="memory") == [1.0, 0.5, 0.25]
    assert capacities(capacities="time", capacity_s=1.5) == [1.0, 0.5, 0.25]
    assert capacities(capacities="time", capacity_s=0.7) == [0.5, 0.5, 0.25]
    # weight 0: the server's network, which no client has
    population = Population(count=3, cohort=3, capacities=(1.0, 0.5, 0.25), weights=(0, 1, 1))
    assert capacities(capacities="memory") == [0.5, 0.5, 0.25]
    population = Population(count=3, cohort=3, capacities=(1.0, 0.5, 0.25), weights=(1, 1, 0))
    assert capacities(capacities="memory") == [1.0, 0.5, 0.5]


def test_a_client_that_leaves_loses_its_update(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("client,start_s,end_s\n0,0,100\n1,0,1.5\n2,50,100\n")
    schedule = timed(tmp_path, "sync", availability={"name": "trace", "file": str(trace), "period_s": 100})
    [(end, visits, plan)] = planned(schedule, 1)
    assert (end, visits) == (1.5, [(0, 0)])
    assert (plan.metrics["asked"], plan.metrics["lost"]) == (2, 1)


def test_a_client_that_leaves_has_done_a_part_of_its_work(tmp_path):
    """Client 1 leaves after 1.5 of 2 seconds."""
    trace = tmp_path / "trace.csv"
    trace.write_text("client,start_s,end_s\n0,0,100\n1,0,1.5\n2,50,100\n")
    work = {1.0: Work(flops=1e9, bytes_down=100, bytes_up=300)}
    availability = {"name": "trace", "file": str(trace), "period_s": 100}
    [(*_, plan)] = planned(timed(tmp_path, "sync", work=work, availability=availability), 1)
    assert plan.metrics["wasted_flops"] == pytest.approx(0.75e9, rel=1e-3)
    assert plan.metrics["wasted_bytes"] == 100, "it has not begun to send"


LATER = "client,start_s,end_s\n0,{0},100000\n1,{1},100000\n2,{2},100000\n"


@pytest.mark.parametrize("mode", ["sync", {"name": "sync", "deadline_s": 60}, {"name": "buffered", "buffer": 1}])
def test_a_round_begins_when_a_client_is_available(tmp_path, mode):
    """Nobody is available for two hours."""
    trace = tmp_path / "trace.csv"
    trace.write_text(LATER.format(7200, 7200, 7200))
    mode = mode if mode == "sync" or mode["name"] == "sync" else {**mode, "concurrency": 3}
    availability = {"name": "trace", "file": str(trace), "period_s": 100_000}
    (end, visits, plan), *_ = planned(timed(tmp_path, mode, availability=availability), 2)
    assert visits[0] == (0, 0) and 7200 < end <= 7204 and plan.metrics["sim_seconds"] == end


def test_free_places_are_filled_while_others_train(tmp_path):
    """Client 0 trains for 10,000 seconds; the others are available after 1,000, and are asked within 600 more."""
    trace = tmp_path / "trace.csv"
    trace.write_text(LATER.format(0, 1000, 1000))
    table = tmp_path / "slow.csv"
    table.write_text("name,gflops\nslow,0.0001\nfast,1\nfast,1\n")
    mode = {"name": "buffered", "concurrency": 3, "buffer": 2}
    availability = {"name": "trace", "file": str(trace), "period_s": 100_000}
    schedule = timed(tmp_path, mode, availability=availability)
    system = schedule.fleet.system.model_copy(
        update={"devices": System(devices={"name": "table", "file": str(table)}).devices}
    )
    [(end, visits, _)] = planned(replace(schedule, fleet=replace(schedule.fleet, system=system)), 1)
    assert ([client for _, client in visits], end) == ([1, 2], 1201)


def test_versions_are_needed_for_updates_that_can_come(tmp_path):
    """Every second update is lost, and client 2 trains for as long as client 0 four times."""
    mode = {"name": "buffered", "concurrency": 3, "buffer": 1, "max_staleness": 1}
    schedule = timed(tmp_path, mode, dropout=0.5)
    plans = [plan for *_, plan in planned(schedule, 100)]
    needed = [schedule.needed(plan.past, round + 1) for round, plan in enumerate(plans)]
    for round, plan in enumerate(plans):
        running = [one for one in plan.past.running if not one.is_lost]
        assert needed[round] == {one.version for one in running if one.version in (round, round + 1)}
        assert {version for version, _ in plan.visits} <= {round, *(needed[round - 1] if round else ())}
    assert any(of != plan.past.versions for of, plan in zip(needed, plans, strict=True))


def test_clients_of_short_windows_are_found_before_the_run(tmp_path):
    """One hour a day, between the multiples of three hours."""
    trace = tmp_path / "trace.csv"
    trace.write_text(LATER.format(4000, 4000, 4000).replace("100000", "7600"))
    availability = {"name": "trace", "file": str(trace), "period_s": 86_400}
    timed(tmp_path, "sync", availability=availability).check()


def test_a_deadline_that_the_servers_bandwidth_cannot_meet_is_refused(tmp_path):
    """8 Mbit for each of three clients, at 1 Mbit/s: 24 seconds."""
    work = {1.0: Work(flops=0, bytes_down=0, bytes_up=1e6)}
    for deadline, is_met in ((23, False), (25, True)):
        mode = {"name": "sync", "deadline_s": deadline}
        schedule = timed(tmp_path, mode, work=work, server_up_mbps=1.0)
        if is_met:
            schedule.check()
            continue
        with pytest.raises(ConfigError, match="no client can finish within 23 seconds. Allowed: more than 24, "):
            schedule.check()


def test_samplers_see_the_capacity_of_the_round(tmp_path):
    work = {1.0: Work(1e9, 0, 0), 0.5: Work(0.25e9, 0, 0)}
    population = Population(count=3, cohort=3, capacities=[1, 0.5], assignment="dynamic")
    fleet = replace(timed(tmp_path, "sync", work=work).fleet, population=population)
    for version in range(8):
        seconds = fleet.candidates(version, 0, 0.0, set()).seconds
        assert [seconds(id) for id in range(3)] == [
            work[population.capacity(id, 0, version)].flops / 1e9 * 2**id for id in range(3)
        ]


def test_weights_of_late_updates_without_late_rounds_are_refused():
    with pytest.raises(ValueError, match="staleness only with late_rounds"):
        System(mode={"name": "sync", "staleness": {"weight": "hinge", "a": 3}})


def test_dropout(tmp_path):
    schedule = timed(tmp_path, "sync", dropout=0.5)
    plans = [plan for *_, plan in planned(schedule, 200)]
    lost = sum(plan.metrics["lost"] for plan in plans)
    # 600 independent draws: 5 standard deviations are 61
    assert abs(lost - 300) < 61
    assert sum(plan.metrics["abandoned"] for plan in plans) > 0


def test_a_lost_client_that_is_asked_again_has_another_draw(tmp_path):
    """Three clients and a buffer of three: a lost client is the only one that can be asked."""
    mode = {"name": "buffered", "concurrency": 3, "buffer": 3}
    plans = [plan for *_, plan in planned(timed(tmp_path, mode, dropout=0.5), 200)]
    assert all([id for _, id in plan.visits] == [0, 1, 2] for plan in plans)
    # on average one loss per update, with variance 2: 5 standard deviations of 600 are 174
    lost = sum(plan.metrics["lost"] for plan in plans)
    assert abs(lost - 600) < 174
    assert sum(plan.metrics["asked"] for plan in plans) == 600 + lost
