"""The Ray executor: client actors in a placement group, and the supervisor that outlives them.

Jobs go out longest expected first, two in flight an actor; what they share is put into the object store once a
key. An actor that dies, or does not answer in time, is taken out at once; its jobs go to the front of the queue
and run again on the others, and a replacement is admitted when it has loaded the run. Answers come back in the order
of the jobs, so the result is the same to the bit however many actors there are and whatever happened to them.
"""

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from rayfl.config import ConfigError
from rayfl.core.tensors import pack, unpack
from rayfl.engine.jobs import Executor, Job, Verb
from rayfl.engine.on_ray.actors import Crew, Place
from rayfl.engine.on_ray.branches import Branches, Sum

LOST = (RayActorError, OutOfMemoryError, WorkerCrashedError, NodeDiedError, ObjectLostError, GetTimeoutError)
"""The worker is at fault, not the job. OutOfMemoryError is not a RayActorError, and a dead node shows first
as ActorUnavailableError."""

IN_FLIGHT = 2
ATTEMPTS = 3
START_FAILURES = 3
START_SECONDS = 300.0
PATIENCE = 10
"""How many times longer than any of its kind before a job may take."""
FIRST_SECONDS = 3600.0
FIRST_SPEED = 1e8
"""What a job may take while no answer of its kind is known: an hour, or its cost at so many multiply-adds a second,
which is a tenth of what one slow core does."""


class JobFailed(RuntimeError):
    """A job kept failing: says which clients, how much data, and the original traceback."""


@dataclass
class _Slot:
    """A place for one actor; a dead actor's place is taken by its replacement."""

    bundle: int
    actor: Any
    """The handle; None once the pool is closed."""
    loading: Any = None
    """The call that takes up a run, until it is answered."""
    ready: bool = False
    place: Place = Place()
    """Where the actor is, once it is ready."""
    running: deque[int] = field(default_factory=deque)
    """Its jobs; it works on the first."""
    since: float = 0.0
    """When it began with that one."""
    failures: int = 0


class RayPool(Executor):
    def __init__(self, refs: list[ray.ObjectRef], crew: Crew, actors: Sequence[Any], *, deadline: float = 120.0):
        """`actors`: the crew's, already started. `deadline`: seconds that every job may take (`limit`)."""
        self.refs, self.crew, self.deadline = refs, crew, deadline
        self.slots = [_Slot(bundle, actor) for bundle, actor in zip(crew.bundles, actors, strict=True)]
        self.slowest: dict[str, tuple[float, float]] = {}
        """Of the run's answers: the longest time, and the highest cost."""
        self.here = ray.get_runtime_context().get_node_id()
        self.deaths = 0
        self.idle_since = time.monotonic()
        for slot in self.slots:
            self._load(slot)

    def map(self, verb: Verb, jobs: Sequence[Job], shared: Callable[[Hashable], Any]) -> Iterator[Any]:
        batch = _Batch(self, verb, jobs, shared)
        try:
            yield from batch.answers()
        finally:
            for slot in self.slots:
                slot.running.clear()

    @property
    def workers(self) -> int:
        return len(self.slots)

    @property
    def is_spread(self) -> bool:
        """Whether an actor is on another node than this process."""
        return any(slot.place.node != self.here for slot in self.slots if slot.ready)

    def close(self) -> None:
        """Ends the actors."""
        for slot in self.slots:
            if slot.actor is not None:
                ray.kill(slot.actor)
                slot.actor = None

    def load(self, refs: list[ray.ObjectRef]) -> None:
        """Another run for the same actors: what they imported and built stays."""
        self.refs, self.slowest = refs, {}
        for slot in self.slots:
            self._load(slot)

    def limit(self, verb: str, cost: float) -> float:
        """Seconds after which a job is given to somebody else."""
        if verb not in self.slowest:
            return max(self.deadline, FIRST_SECONDS, cost / FIRST_SPEED)
        seconds, known = self.slowest[verb]
        return max(self.deadline, PATIENCE * seconds * max(1.0, cost / known))

    def _answered(self, verb: str, cost: float, seconds: float) -> None:
        longest, highest = self.slowest.get(verb, (0.0, 1.0))
        self.slowest[verb] = max(longest, seconds), max(highest, cost)

    def _start(self, slot: _Slot) -> None:
        slot.actor = self.crew.start(slot.bundle)
        self._load(slot)

    def _load(self, slot: _Slot) -> None:
        """The actor is admitted when it has loaded the run."""
        slot.loading, slot.ready = slot.actor.load.remote(self.refs), False

    def _replace(self, slot: _Slot, error: Exception) -> None:
        """Takes a slot's actor out and starts another."""
        self.deaths += 1
        slot.failures += not slot.ready
        if slot.failures >= START_FAILURES:
            raise JobFailed(
                f"a client actor failed to start {START_FAILURES} times in a row; the last time: {_said(error)}"
            )
        ray.kill(slot.actor)
        self._start(slot)


class _Batch:
    """One call of `map`."""

    def __init__(self, pool: RayPool, verb: Verb, jobs: Sequence[Job], shared: Callable[[Hashable], Any]):
        self.pool, self.verb, self.jobs, self.make_shared = pool, verb, jobs, shared
        self.queue = deque(sorted(range(len(jobs)), key=lambda i: -jobs[i].cost))
        self.left = Counter(job.key for job in jobs)
        self.shared: dict[Hashable, ray.ObjectRef] = {}
        self.flying: dict[ray.ObjectRef, tuple[int, _Slot]] = {}
        self.done: dict[int, Any] = {}
        pool.idle_since = time.monotonic()
        self.attempts: Counter[Hashable] = Counter()
        self.raised_in: dict[int, Any] = {}
        self.updates: dict[int, ray.ObjectRef] = {}
        """Where those of training jobs are."""
        self.branches = Branches(jobs) if verb == "train" and pool.is_spread else None
        self.sums: dict[int, Sum] = {}
        """Those that actors make, numbered behind the jobs."""
        self.numbers = itertools.count(len(jobs))

    def answers(self) -> Iterator[Any]:
        for index in range(len(self.jobs)):
            self._dispatch()
            while index not in self.done:
                self._wait()
                self._dispatch()
            yield self.done.pop(index)

    def _dispatch(self) -> None:
        """Keeps every ready actor at `IN_FLIGHT` jobs, the emptiest first. A job that raised goes to another."""
        while (found := self._next()) is not None:
            index, slot = found
            self.queue.remove(index)
            job = self.jobs[index]
            if job.key not in self.shared:
                self.shared[job.key] = ray.put(pack(self.make_shared(job.key)))
            message = self.shared[job.key], pack(job.make())
            if self.verb == "train":
                ref, self.updates[index] = slot.actor.train.remote(*message)
            else:
                ref = slot.actor.run.remote(self.verb, *message)
            self._flies(ref, index, slot)

    def _next(self) -> tuple[int, _Slot] | None:
        ready = [slot for slot in self.pool.slots if slot.ready]
        free = [slot for slot in ready if len(slot.running) < IN_FLIGHT]
        for slot in sorted(free, key=lambda slot: len(slot.running)):
            waiting = (i for i in self.queue if len(ready) == 1 or self.raised_in.get(i) is not slot.actor)
            index = self.branches.choose(waiting, slot.place.node) if self.branches else next(waiting, None)
            if index is not None:
                return index, slot
        return None

    def _flies(self, ref: ray.ObjectRef, index: int, slot: _Slot) -> None:
        self.flying[ref] = (index, slot)
        if not slot.running:
            slot.since = time.monotonic()
        slot.running.append(index)

    def _wait(self) -> None:
        loading = {slot.loading: slot for slot in self.pool.slots if slot.loading is not None}
        ready, _ = ray.wait([*loading, *self.flying], timeout=5.0)
        if not ready:
            self._check_deadlines()
        for ref in ready:
            if ref in loading:
                self._admit(loading[ref])
            elif ref in self.flying:
                self._receive(ref)

    def _admit(self, slot: _Slot) -> None:
        loading, slot.loading = slot.loading, None
        try:
            slot.place = ray.get(loading)
            slot.ready, slot.failures = True, 0
        except (*LOST, RayTaskError) as error:
            self.pool._replace(slot, error)

    def _receive(self, ref: ray.ObjectRef) -> None:
        index, slot = self.flying[ref]
        try:
            answer = unpack(ray.get(ref))
            if self.verb == "train" and self.branches is None:
                answer = replace(answer, update=unpack(ray.get(self.updates.pop(index))))
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise ConfigError(str(error.cause)) from None
            self._landed(ref)
            if index in self.sums:
                self._work_again(self.sums.pop(index), str(error.cause))
                return
            self.raised_in[index] = slot.actor
            self._retry(index, str(error.cause), attempts=2)
            return
        except LOST as error:
            self._lose(slot, error)
            return
        self.pool._answered(*self._kind(index), self._landed(ref))
        if index in self.sums:
            self._close(self.sums.pop(index), [answer])
            return
        if self.branches is None:
            self.done[index] = answer
        elif (parts := self.branches.answered(index, answer, self.updates.pop(index), slot.place.node)) is not None:
            self._add_up(parts)
        key = self.jobs[index].key
        self.left[key] -= 1
        if not self.left[key]:
            self.shared.pop(key, None)

    def _kind(self, index: int) -> tuple[str, float]:
        """The verb, and the expected cost."""
        return ("add", 0.0) if index in self.sums else (self.verb, self.jobs[index].cost)

    def _landed(self, ref: ray.ObjectRef) -> float:
        """A job is no longer in flight: how long it took. Its actor has begun with its next one."""
        index, slot = self.flying.pop(ref)
        slot.running.remove(index)
        began, slot.since = slot.since, time.monotonic()
        self.pool.idle_since = slot.since
        return slot.since - began

    # sums

    def _add_up(self, parts: Sum) -> None:
        """On the node where most parts are, unless that is this one."""
        slots = [slot for slot in self.pool.slots if slot.ready and slot.place.node == parts.node]
        if len(parts.parts) > 1 and parts.node != self.pool.here and slots:
            slot = min(slots, key=lambda slot: len(slot.running))
            index = next(self.numbers)
            self.sums[index] = parts
            self._flies(slot.actor.add.remote(parts.sizes, *parts.parts), index, slot)
            return
        try:
            updates = [unpack(ray.get(part)) for part in parts.parts]
        except LOST as error:
            self._work_again(parts, _said(error))
            return
        self._close(parts, updates)

    def _close(self, parts: Sum, updates: list[Any]) -> None:
        assert self.branches is not None
        self.done |= self.branches.close(parts, updates)

    def _work_again(self, parts: Sum, reason: str) -> None:
        """A node took answers with it: the jobs of the branch run again."""
        assert self.branches is not None
        members = self.branches.forget(parts.branch)
        self._count(("sum", parts.branch), f"{self.jobs[members[0]].about} and its branch", reason, ATTEMPTS)
        for index in members:
            self.left[self.jobs[index].key] += 1
        self.queue.extendleft(reversed(members))

    # what goes wrong

    def _lose(self, slot: _Slot, error: Exception) -> None:
        """Everything that the slot's actor had runs again; only what it was working on counts as failed."""
        lost = list(slot.running)
        self.flying = {ref: flight for ref, flight in self.flying.items() if flight[1] is not slot}
        slot.running.clear()
        self.pool._replace(slot, error)
        sums = [self.sums.pop(index) for index in lost if index in self.sums]
        jobs = [index for index in lost if index < len(self.jobs)]
        self.queue.extendleft(reversed(jobs[1:]))
        if jobs:
            self._retry(jobs[0], _said(error), attempts=ATTEMPTS)
        for parts in sums:
            self._work_again(parts, _said(error))

    def _retry(self, index: int, reason: str, attempts: int) -> None:
        self._count(index, self.jobs[index].about, reason, attempts)
        self.queue.appendleft(index)

    def _count(self, what: Hashable, about: str, reason: str, attempts: int) -> None:
        self.attempts[what] += 1
        if self.attempts[what] >= attempts:
            raise JobFailed(f"{self.verb}: {about}: failed {attempts} times; the last time:\n{reason}")

    def _check_deadlines(self) -> None:
        if not self.flying and time.monotonic() - self.pool.idle_since > START_SECONDS:
            raise JobFailed(f"no client actor could be started within {START_SECONDS:.0f} s")
        for slot in self.pool.slots:
            if slot.running:
                limit = self.pool.limit(*self._kind(slot.running[0]))
                if time.monotonic() - slot.since > limit:
                    self._lose(slot, GetTimeoutError(f"no answer within {limit:.0f} s"))


def _said(error: Exception) -> str:
    """What happened, without Ray's traceback."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"{type(cause).__name__}: {cause}"
