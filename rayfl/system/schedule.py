"""The schedule: the clients trained in a round, the versions of the model that they start from, and the round's end.

A plan is a pure function of the configuration and of the past. Only clients whose updates count are trained at all, and
only when they are aggregated, each from the version that it was sent.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.seeds import stream
from rayfl.metrics import UPDATES
from rayfl.system import checked
from rayfl.system.availability import Always
from rayfl.system.fleet import Dispatch, Fleet
from rayfl.system.samplers import Memory, Visited
from rayfl.system.settings import Buffered, Sync
from rayfl.system.staleness import Staleness

IDLE_S = 600.0
"""Seconds until the server asks again if fewer clients are available than it wants."""
MOST_IDLE_S = 30 * 86_400.0
"""Seconds without an available client after which a run is given up."""
WEEK, PROBE_S = 7 * 86_400, 170 * 60
"""Seconds of the first week, in which available clients are counted before a run, and seconds between two counts, which
come at other times every day."""
MOST_WASTED = 1000
"""Lost or too old updates per update of a buffer after which a run is given up."""


@dataclass(frozen=True)
class Past:
    """State of a schedule between rounds."""

    seconds: float = 0.0
    """Simulated time since the start of the run."""
    running: tuple[Dispatch, ...] = ()
    """Visits that have not ended for the server: of clients that are training, and updates that arrived and wait."""
    memory: Memory = field(default_factory=dict)
    """The sampler's memory."""

    @property
    def versions(self) -> set[int]:
        """Versions of the model that these visits were sent."""
        return {one.version for one in self.running}

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """One round."""

    visits: Sequence[tuple[int, int]]
    """(version, client) of the updates to aggregate, ascending. Empty: the model does not change."""
    past: Past = Past()
    """After the round."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    staleness: Staleness = Staleness()
    durations: Mapping[int, float] = field(default_factory=dict)
    """Client -> seconds of its visit."""


class Schedule(Protocol):
    """Interface of schedules."""

    def plan(self, past: Past, round: int) -> Plan:
        """Return the plan of a round."""
        ...

    def learned(self, plan: Plan, round: int, losses: Mapping[int, float]) -> Past:
        """Return the past after a round. `losses`: client -> mean training loss, of aggregated updates."""
        return plan.past

    def needed(self, past: Past, round: int) -> set[int]:
        """Return the versions of the model whose updates can be aggregated in a round or later."""
        return past.versions

    def check(self) -> None:
        """Raise a ConfigError if no round could have an update."""

    def capacities(self, ids: np.ndarray, round: int) -> np.ndarray:
        """Return the capacities [n] of clients [n] in a round."""
        ...


@dataclass(frozen=True)
class Untimed(Schedule):
    """Rounds without a clock: every client of the cohort is trained."""

    population: Population
    seed: int

    def plan(self, past: Past, round: int) -> Plan:
        return Plan([(round, id) for id in self.population.sample(self.seed, round)])

    def capacities(self, ids: np.ndarray, round: int) -> np.ndarray:
        return self.population.capacities_of(ids, self.seed, round)


@dataclass(frozen=True)
class Timed(Schedule):
    """Rounds on simulated devices."""

    fleet: Fleet

    def plan(self, past: Past, round: int) -> Plan:
        mode = self.fleet.system.mode
        return self._buffered(mode, past, round) if isinstance(mode, Buffered) else self._sync(mode, past, round)

    def check(self) -> None:
        fleet, mode, cohort = self.fleet, self.fleet.system.mode, self.fleet.population.cohort
        if not isinstance(mode, Sync):
            return
        if mode.deadline_s is not None:
            # of fewer available clients, each has more of the server's bandwidth
            transfers = mode.asked(cohort) if isinstance(fleet.system.availability, Always) else 1
            fastest = min(sum(fleet.seconds(id, transfers=transfers)) for id in fleet.some)
            if fastest > mode.deadline_s:
                raise ConfigError(
                    f"system.mode.deadline_s: no client can finish within {mode.deadline_s:g} seconds. Allowed: more "
                    f"than {fastest:.3g}, the fastest visit of {len(fleet.some)} clients"
                )
        most = 0
        for time in range(0, WEEK, PROBE_S):
            found = sum(fleet.is_available(id, float(time)) for id in fleet.some)
            most = max(most, found * fleet.population.count // len(fleet.some))
            if most >= cohort:
                return
        raise ConfigError(
            f"clients.cohort: {cohort} is not valid, because at most about {most} clients are available at a time in "
            "the first week (system.availability). Allowed: at most as many"
        )

    def learned(self, plan: Plan, round: int, losses: Mapping[int, float]) -> Past:
        visits = [
            Visited(id, self.fleet.samples(id)[0], losses[id], plan.durations[id])
            for id in sorted(losses)
            if math.isfinite(losses[id])
        ]
        if not visits:
            return plan.past
        return replace(plan.past, memory=checked.learned(self.fleet.system.sampler, plan.past.memory, round, visits))

    def needed(self, past: Past, round: int) -> set[int]:
        mode = self.fleet.system.mode
        most = mode.max_staleness if isinstance(mode, Buffered) and mode.max_staleness is not None else round
        return {one.version for one in past.running if not one.is_lost and round - one.version <= most}

    def capacities(self, ids: np.ndarray, round: int) -> np.ndarray:
        return np.array([self.fleet.capacity(id, round) for id in ids.tolist()], dtype=np.float64)

    def _sync(self, mode: Sync, past: Past, round: int) -> Plan:
        cohort, start, draw = self.fleet.population.cohort, past.seconds, 0
        wanted = self.fleet.system.asked(cohort)
        busy = [one for one in past.running if one.finish > start]
        new, past = self._dispatched(past, wanted, round, draw, start, busy, [])
        while not new and not busy and not self.fleet.has_available(start):
            start, draw = self._later(past, start), draw + 1
            new, past = self._dispatched(past, wanted, round, draw, start, [], [])
        end = max((one.finish for one in new), default=start + IDLE_S)
        if mode.deadline_s is not None:
            end = min(end, start + mode.deadline_s)
        in_time = sorted((one for one in new if not one.is_lost and one.finish <= end), key=self._order)[:cohort]
        if len(in_time) == cohort:
            end = in_time[-1].finish
        visits = [*past.running, *new]
        # of two updates of a client, the newer counts
        newest = {one.client: one for one in visits if not one.is_lost and one.finish <= end}
        late = [one for one in past.running if newest.get(one.client) is one]
        kept = [*in_time, *late]
        if len(kept) < max(mode.least(cohort), 1):
            kept = []
        used = {one.visit for one in kept}
        left = [one for one in visits if one.visit not in used]

        def goes_on(one: Dispatch) -> bool:
            waits = one.finish > end or newest.get(one.client) is one
            return waits and round - one.version < mode.late_rounds

        running, wasted = [one for one in left if goes_on(one)], [one for one in left if not goes_on(one)]
        return self._plan(past, round, end, kept, running, new, wasted, mode.staleness)

    def _buffered(self, mode: Buffered, past: Past, round: int) -> Plan:
        now, kept = past.seconds, []
        running = [(self._order(one), one) for one in past.running]
        heapq.heapify(running)
        new, wasted, draw = [], [], 0
        while True:
            busy = [*(one for _, one in running), *kept]
            started, past = self._dispatched(past, mode.concurrency - len(running), round, draw, now, busy, new)
            draw += 1
            new += started
            for one in started:
                heapq.heappush(running, (self._order(one), one))
            if len(wasted) > MOST_WASTED * mode.buffer:
                raise ConfigError(
                    f"system: no update arrived from {len(wasted)} clients. Allowed: clients that stay available until "
                    "they have finished"
                )
            if not running:
                now = self._later(past, now)
                continue
            if len(running) < mode.concurrency and running[0][1].finish > now + IDLE_S:
                now += IDLE_S
                continue
            now = max(now, running[0][1].finish)
            while running and running[0][1].finish <= now and len(kept) < mode.buffer:
                _, one = heapq.heappop(running)
                is_old = mode.max_staleness is not None and round - one.version > mode.max_staleness
                (wasted if one.is_lost or is_old else kept).append(one)
            if len(kept) == mode.buffer:
                left = [one for _, one in sorted(running)]
                return self._plan(past, round, now, kept, left, new, wasted, mode.staleness)

    def _later(self, past: Past, now: float) -> float:
        """Return the time at which the server asks again. Raise a ConfigError if it has waited for too long."""
        if now > past.seconds + MOST_IDLE_S:
            raise ConfigError("system.availability: no client was available for 30 days. Allowed: some clients")
        return now + IDLE_S

    def _dispatched(
        self,
        past: Past,
        wanted: int,
        round: int,
        draw: int,
        start: float,
        busy: Sequence[Dispatch],
        earlier: Sequence[Dispatch],
    ) -> tuple[list[Dispatch], Past]:
        """Ask clients and send them the model. `busy`: visits of clients that are not asked. `earlier`: visits that
        began in this round."""
        if not wanted:
            return [], past
        sampler = self.fleet.system.sampler
        free = self.fleet.candidates(round, draw, start, {one.client for one in busy})
        ids, memory = checked.chosen(sampler, wanted, free, round, past.memory)
        transfers = sum(one.finish > start for one in busy) + len(ids)
        visits = Counter(one.client for one in earlier)
        sent = [self.fleet.dispatch(id, round, start, transfers, visits[id]) for id in ids]
        return sent, replace(past, memory=memory)

    def _plan(
        self,
        past: Past,
        round: int,
        end: float,
        kept: Sequence[Dispatch],
        running: Sequence[Dispatch],
        new: Sequence[Dispatch],
        wasted: Sequence[Dispatch],
        staleness: Staleness,
    ) -> Plan:
        closed, end = end, end + self.fleet.system.round_s
        kinds = Counter(one.kind for one in kept)
        lost = sum(one.is_lost and one.finish <= closed for one in wasted)
        spent = [one.spent(closed) for one in wasted]
        metrics = {
            "sim_seconds": end - past.seconds,
            "sim_time": end,
            "asked": len(new),
            "lost": lost,
            "late": len(wasted) - lost,
            "abandoned": int(not kept),
            "wasted_flops": sum(flops for flops, _ in spent),
            "wasted_bytes": sum(bytes for _, bytes in spent),
            "staleness": sum(round - one.version for one in kept) / max(len(kept), 1),
        }
        metrics |= {f"{UPDATES}{kind}": kinds[kind] for kind in sorted(kinds)}
        visits, durations = sorted(one.visit for one in kept), {one.client: one.finish - one.start for one in kept}
        return Plan(visits, replace(past, seconds=end, running=tuple(running)), metrics, staleness, durations)

    def _order(self, one: Dispatch) -> tuple[float, int]:
        """Return the key of the order in which updates arrive, which is random among those of one time."""
        return one.finish, stream(self.fleet.seed, "visit", one.version, one.client, "order")
