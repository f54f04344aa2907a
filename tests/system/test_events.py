"""Synchronous and buffered rounds against an independent simulation, event by event in the order of time.

Only two things are asked of rayfl: which clients the sampler draws, and how long the parts of a visit take.
"""

import itertools
import math

import numpy as np
import pytest

from rayfl.clients import Population
from rayfl.system import Fleet, Past, System, Timed, Work

CLASSES = [
    {"name": "fast", "gflops": 3, "down_mbps": 20, "up_mbps": 8, "sigma": 0.3},
    {"name": "slow", "gflops": 0.4, "down_mbps": 5, "up_mbps": 1, "sigma": 0.3},
]
WORK = {1.0: Work(flops=2e9, bytes_down=3e6, bytes_up=2e6, fixed_flops=1e9)}
COUNT, COHORT, ROUNDS, POLL = 20, 6, 25, 600.0
AVAILABILITIES = ["always", {"name": "onoff", "on_s": 250, "off_s": 350}, {"name": "bernoulli", "p": 0.7, "slot_s": 9}]


class Visit:
    def __init__(self, fleet: Fleet, client: int, version: int, now: float, others: int, earlier: int):
        one = fleet.dispatch(client, version, now, others, earlier)
        self.client, self.version, self.one, self.state = client, version, one, "at work"
        self.phases = [one.start, one.trains, one.sends, one.arrives]
        stays = fleet.system.availability.until(client, now, fleet.seed)
        self.end = min(one.arrives, stays)
        self.fails = one.is_lost

    def used(self, now: float) -> np.ndarray:
        """Operations and bytes so far."""
        work, now = WORK[1.0], min(now, self.end)
        all_operations = work.fixed_flops + 2 * work.flops
        operations = np.interp(now, self.phases, [0, 0, all_operations, all_operations])
        return np.array([operations, np.interp(now, self.phases, [0, 3e6, 3e6, 5e6])])


class World:
    """The server's view: it learns of an arrival or a loss when it happens."""

    def __init__(self, fleet: Fleet):
        self.fleet, self.now = fleet, 0.0
        self.visits: list[Visit] = []
        self.wasted, self.counts = np.zeros(2), dict.fromkeys(("asked", "lost", "late"), 0)

    def some(self, state: str) -> list[Visit]:
        return [one for one in self.visits if one.state == state]

    def ask(self, wanted: int, version: int, draw: int, waiting: list[Visit]) -> None:
        if wanted <= 0:
            return
        busy = {one.client for one in [*self.some("at work"), *waiting]}
        free = self.fleet.candidates(version, draw, self.now, busy)
        ids, _ = self.fleet.system.sampler.choose(wanted, free, version, {})
        others = sum(one.end > self.now for one in self.some("at work")) + len(ids)
        for id in ids:
            earlier = sum((one.client, one.version) == (id, version) for one in self.visits)
            self.visits.append(Visit(self.fleet, id, version, self.now, others, earlier))
        self.counts["asked"] += len(ids)

    def let_pass(self, until: float) -> None:
        """Everything that happens until then, and at that time."""
        self.now = until
        for one in self.some("at work"):
            if one.end <= until:
                if one.fails:
                    self.waste(one, "lost")
                else:
                    one.state = "arrived"

    def waste(self, one: Visit, why: str) -> None:
        one.state = "over"
        self.counts[why] += 1
        self.wasted += one.used(self.now)

    def next(self) -> float:
        return min((one.end for one in self.some("at work")), default=math.inf)


def sync(world: World, round: int, mode) -> list[Visit]:
    fleet = world.fleet
    world.let_pass(world.now)
    for draw in itertools.count():
        world.ask(mode.asked(COHORT), round, draw, [])
        if world.some("at work") or any(fleet.is_available(id, world.now) for id in range(COUNT)):
            break
        world.let_pass(world.now + POLL)
    start = world.now
    limit = start + (mode.deadline_s or math.inf)
    own = [one for one in world.visits if one.version == round]

    def first() -> list[Visit]:
        return [one for one in sorted(own, key=lambda one: one.end) if one.state == "arrived"][:COHORT]

    if not own:
        limit = min(limit, start + POLL)
    while world.now < limit and len(first()) < COHORT and (not own or any(one.state == "at work" for one in own)):
        world.let_pass(min(world.next(), limit))
    in_time = first()
    for old in world.some("arrived"):
        if any(new.client == old.client and new.version > old.version for new in world.some("arrived")):
            world.waste(old, "late")
    counted = in_time + [one for one in world.some("arrived") if one.version < round]
    if len(counted) < max(mode.least(COHORT), 1):
        counted = []
    for one in counted:
        one.state = "over"
    for one in world.some("at work") + world.some("arrived"):
        if round - one.version >= mode.late_rounds:
            world.waste(one, "late")
    return counted


def buffered(world: World, round: int, mode) -> list[Visit]:
    buffer: list[Visit] = []
    for draw in itertools.count():
        world.ask(mode.concurrency - len(world.some("at work")), round, draw, buffer)
        fewer = len(world.some("at work")) < mode.concurrency
        world.now = max(world.now, min(world.next(), world.now + POLL if fewer else math.inf))
        for one in sorted(world.some("at work"), key=lambda one: one.end):
            if one.end <= world.now and len(buffer) < mode.buffer:
                if one.fails:
                    world.waste(one, "lost")
                elif mode.max_staleness is not None and round - one.version > mode.max_staleness:
                    world.waste(one, "late")
                else:
                    one.state = "over"
                    buffer.append(one)
        if len(buffer) == mode.buffer:
            return buffer
    raise AssertionError


def modes():
    for select, deadline, minimum, late in itertools.product((1, 1.7), (None, 12), (0, 0.5), (0, 1, 4)):
        yield {"name": "sync", "select": select, "deadline_s": deadline, "minimum": minimum, "late_rounds": late}
    for most in (None, 1):
        yield {"name": "buffered", "concurrency": 8, "buffer": 3, "max_staleness": most}


MODES = list(modes())


@pytest.mark.parametrize("number", range(len(MODES)), ids=["-".join(map(str, mode.values())) for mode in MODES])
def test_rounds_are_those_of_an_event_simulation(number):
    """Availability, drop-out and the server's bandwidth vary with the case."""
    mode = MODES[number]
    system = System(
        devices={"name": "classes", "classes": CLASSES},
        mode=mode,
        availability=AVAILABILITIES[number % 3],
        dropout=(0, 0.2)[number % 2],
        server_down_mbps=(None, 30)[number // 2 % 2],
        round_s=0.5,
    )
    fleet = Fleet(system, Population(count=COUNT, cohort=COHORT), number, WORK, lambda id: (2, 1), lambda id: 2)
    schedule, past, world = Timed(fleet), Past(), World(fleet)
    for round in range(ROUNDS):
        plan = schedule.plan(past, round)
        visits = (buffered if mode["name"] == "buffered" else sync)(world, round, system.mode)
        assert plan.visits == sorted((one.version, one.client) for one in visits), round
        assert {name: plan.metrics[name] for name in world.counts} == world.counts, round
        assert plan.metrics["abandoned"] == (not visits)
        assert [plan.metrics["wasted_flops"], plan.metrics["wasted_bytes"]] == pytest.approx(world.wasted, rel=1e-9)
        world.wasted, world.counts = np.zeros(2), dict.fromkeys(world.counts, 0)
        world.now += system.round_s
        assert plan.past.seconds == pytest.approx(world.now, rel=1e-12), round
        past = plan.past
