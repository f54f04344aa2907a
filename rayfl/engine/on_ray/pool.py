"""The Ray executor: client actors in a placement group, and the supervisor that outlives them.

Jobs are sent in the order of falling cost, two in flight per actor. A message that jobs share is put into the object
store once per key. An actor that dies, or does not answer in time, is removed; its jobs return to the front of the
queue and run on the other actors, and a replacement joins when it has loaded the run. Other actors of its node get no
new jobs until they have given a sign of life: the node may have died. Answers are returned in the order of the jobs, so
results are equal bit for bit for any number of actors and after any fault.
"""

import itertools
import math
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
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

from rayfl.config import ConfigError, RunFailed
from rayfl.core.tensors import pack, unpack
from rayfl.engine.jobs import Executor, Job, Verb
from rayfl.engine.on_ray import memory
from rayfl.engine.on_ray.actors import Crew, Place
from rayfl.engine.on_ray.branches import Branches, Sum

LOST = (RayActorError, OutOfMemoryError, WorkerCrashedError, NodeDiedError, ObjectLostError, GetTimeoutError)
"""Errors of a worker, not of its job. OutOfMemoryError is not a RayActorError, and a dead node first appears as an
ActorUnavailableError."""

IN_FLIGHT = 2
ATTEMPTS = 3
LOOK_SECONDS = 5.0
"""Seconds between two looks at the deadlines of silent actors."""
START_FAILURES = 3
START_SECONDS = 300.0
PATIENCE = 10
"""Limit of a job's time, as a multiple of the slowest job of its kind so far."""
FIRST_SPEED = 1e8
"""Multiply-adds per second, a tenth of the speed of one slow core: its time at this speed is the limit of a job before
the first answer of its kind."""
BEAT_SECONDS = 15.0
"""Seconds of silence after which an actor's process is asked for a sign of life."""
SILENT_SECONDS = 30.0
"""Seconds that the process may take to answer that."""
ANSI = re.compile(r"\x1b\[\d+m")
"""Terminal colours in Ray's tracebacks."""
LOG_LINES = 15
"""Last lines of a dead actor's log in an error."""


class JobFailed(RunFailed):
    """A job kept failing. The message names its clients, their data's size, and the reason."""


@dataclass
class _Slot:
    """A place for one actor, or for its replacement."""

    bundle: int
    actor: Any
    """The handle; None once the pool is closed."""
    loading: Any = None
    """The call that loads a run, until it is answered."""
    ready: bool = False
    place: Place = Place()
    """Location of the actor, once it is ready."""
    running: deque[int] = field(default_factory=deque)
    """Its jobs; it works on the first."""
    since: float = 0.0
    """Start of that job."""
    beat: Any = None
    """The call that asks for a sign of life, until it is answered."""
    heard: float = 0.0
    """Time of the last sign of life, or of the request for the next one."""
    failures: int = 0
    doubted: bool = False
    """True from the loss of another actor of its node until its next sign of life: it gets no new jobs."""


class RayPool(Executor):
    def __init__(self, refs: list[ray.ObjectRef], crew: Crew, actors: Sequence[Any], *, deadline: float = 60.0):
        """`actors`: the crew's, already started. `deadline`: least limit of a job's time, in seconds."""
        self.refs, self.crew, self.deadline = refs, crew, deadline
        self.slots = [_Slot(bundle, actor) for bundle, actor in zip(crew.bundles, actors, strict=True)]
        self.slowest: dict[str, tuple[float, float]] = {}
        """Verb -> the longest time and the highest cost of the run's jobs so far."""
        self.here = ray.get_runtime_context().get_node_id()
        self.deaths = 0
        self.watch = memory.Watch()
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
        """True if an actor is on another node than this process."""
        return any(slot.place.node != self.here for slot in self.slots if slot.ready)

    @property
    def processes(self) -> dict[int, str]:
        """Processes of this node: id -> command."""
        here = [slot.place.process for slot in self.slots if slot.place.node == self.here]
        return {os.getpid(): "ray::ServerActor"} | dict.fromkeys(here, "ray::ClientActor")

    def close(self) -> None:
        """End the actors."""
        for slot in self.slots:
            if slot.actor is not None:
                ray.kill(slot.actor)
                slot.actor = None

    def load(self, refs: list[ray.ObjectRef]) -> None:
        """Load another run into the same actors."""
        self.refs, self.slowest = refs, {}
        for slot in self.slots:
            self._load(slot)

    def limit(self, verb: str, cost: float) -> float:
        """Return the seconds after which a job is given to another actor."""
        if verb not in self.slowest:
            return max(self.deadline, cost / FIRST_SPEED)
        seconds, known = self.slowest[verb]
        return max(self.deadline, PATIENCE * seconds * max(1.0, cost / known))

    def _answered(self, verb: str, cost: float, seconds: float) -> None:
        longest, highest = self.slowest.get(verb, (0.0, 1.0))
        self.slowest[verb] = max(longest, seconds), max(highest, cost)

    def _start(self, slot: _Slot) -> None:
        slot.actor = self.crew.start(slot.bundle)
        self._load(slot)

    def _load(self, slot: _Slot) -> None:
        """Load the run; the actor gets jobs once it has done so."""
        slot.loading, slot.ready, slot.doubted = slot.actor.load.remote(self.refs), False, False

    def _replace(self, slot: _Slot, error: Exception) -> None:
        """Replace a slot's actor."""
        self.deaths += 1
        slot.failures += not slot.ready
        if slot.failures >= START_FAILURES:
            raise JobFailed(f"a client actor failed to start {START_FAILURES} times. The last error: {_message(error)}")
        ray.kill(slot.actor)
        slot.beat = None
        self._start(slot)

    def _doubt(self, node: str) -> None:
        """Ask all actors of a node for a sign of life."""
        for slot in self.slots:
            if slot.ready and slot.place.node == node:
                slot.doubted, slot.beat, slot.heard = True, slot.actor.beat.remote(), time.monotonic()


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
        """Training job -> reference to its update."""
        self.branches = Branches(jobs) if verb == "train" and pool.is_spread else None
        self.sums: dict[int, Sum] = {}
        """Partial sums that actors compute, numbered after the jobs."""
        self.numbers = itertools.count(len(jobs))

    def answers(self) -> Iterator[Any]:
        for index in range(len(self.jobs)):
            self._dispatch()
            while index not in self.done:
                self._wait()
                self._dispatch()
            yield self.done.pop(index)

    def _dispatch(self) -> None:
        """Keep every ready actor at `IN_FLIGHT` jobs, at one while others start: a second job would wait for the first
        and its answer come late. A job that raised an error is sent to another actor."""
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
        most = IN_FLIGHT if len(ready) == len(self.pool.slots) else 1
        free = [slot for slot in ready if len(slot.running) < most and not slot.doubted]
        for slot in sorted(free, key=lambda slot: len(slot.running)):
            waiting = (i for i in self.queue if len(ready) == 1 or self.raised_in.get(i) is not slot.actor)
            index = self.branches.choose(waiting, slot.place.node) if self.branches else next(waiting, None)
            if index is not None:
                return index, slot
        return None

    def _flies(self, ref: ray.ObjectRef, index: int, slot: _Slot) -> None:
        self.flying[ref] = (index, slot)
        if not slot.running:
            slot.since = slot.heard = time.monotonic()
        slot.running.append(index)

    def _wait(self) -> None:
        loading = {slot.loading: slot for slot in self.pool.slots if slot.loading is not None}
        beats = {slot.beat: slot for slot in self.pool.slots if slot.beat is not None}
        ready, _ = ray.wait([*loading, *beats, *self.flying], timeout=LOOK_SECONDS)
        self.pool.watch.look(self.pool.processes)
        if not ready:
            self._check_deadlines()
        for ref in ready:
            if ref in loading:
                self._admit(loading[ref])
            elif ref in beats:
                self._hear(beats[ref])
            elif ref in self.flying:
                self._receive(ref)

    def _admit(self, slot: _Slot) -> None:
        loading, slot.loading = slot.loading, None
        try:
            slot.place = _get(loading)
            slot.ready, slot.failures = True, 0
        except (*LOST, RayTaskError) as error:
            self.pool._replace(slot, error)

    def _hear(self, slot: _Slot) -> None:
        beat, slot.beat = slot.beat, None
        try:
            ray.get(beat)
            slot.heard, slot.doubted = time.monotonic(), False
        except LOST as error:
            self._lose(slot, error)

    def _receive(self, ref: ray.ObjectRef) -> None:
        index, slot = self.flying[ref]
        try:
            answer = unpack(_get(ref))
            if self.verb == "train" and self.branches is None:
                answer = replace(answer, update=unpack(ray.get(self.updates.pop(index))))
        except RayTaskError as error:
            self._landed(ref)
            if index in self.sums:
                self._work_again(self.sums.pop(index), raised(error))
                return
            self.raised_in[index] = slot.actor
            self._retry(index, raised(error), attempts=2)
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
        """Return the verb and the expected cost of a job."""
        return ("add", 0.0) if index in self.sums else (self.verb, self.jobs[index].cost)

    def _landed(self, ref: ray.ObjectRef) -> float:
        """Remove a job from those in flight, and return the seconds it took. Its actor has begun the next one."""
        index, slot = self.flying.pop(ref)
        slot.running.remove(index)
        began = slot.since
        slot.since = slot.heard = time.monotonic()
        self.pool.idle_since = slot.since
        return slot.since - began

    # sums

    def _add_up(self, parts: Sum) -> None:
        """Add parts on the node that has most of them, unless that is this one."""
        slots = [slot for slot in self.pool.slots if slot.ready and not slot.doubted and slot.place.node == parts.node]
        if len(parts.parts) > 1 and parts.node != self.pool.here and slots:
            slot = min(slots, key=lambda slot: len(slot.running))
            index = next(self.numbers)
            self.sums[index] = parts
            self._flies(slot.actor.add.remote(parts.sizes, *parts.parts), index, slot)
            return
        try:
            updates = [unpack(ray.get(part)) for part in parts.parts]
        except LOST as error:
            self._work_again(parts, _message(error))
            return
        self._close(parts, updates)

    def _close(self, parts: Sum, updates: list[Any]) -> None:
        assert self.branches is not None
        self.done |= self.branches.close(parts, updates)

    def _work_again(self, parts: Sum, reason: str) -> None:
        """Run the jobs of a branch again whose answers were lost with a node."""
        assert self.branches is not None
        members = self.branches.forget(parts.branch)
        self._count(("sum", parts.branch), f"{self.jobs[members[0]].about} and its branch", reason, ATTEMPTS)
        for index in members:
            self.left[self.jobs[index].key] += 1
        self.queue.extendleft(reversed(members))

    # faults

    def _lose(self, slot: _Slot, error: Exception) -> None:
        """Replace a slot's actor and run its jobs again; only the job that it worked on counts as failed."""
        killed = None
        if not isinstance(error, GetTimeoutError):
            of_system = self.pool.watch.by_system(slot.place.process, self.pool.processes)
            killed = memory.by_ray(str(error)) or of_system
        lost, reason = list(slot.running), killed or _death(slot.place, error)
        self.flying = {ref: flight for ref, flight in self.flying.items() if flight[1] is not slot}
        slot.running.clear()
        self.pool._replace(slot, error)
        self.pool._doubt(slot.place.node)
        sums = [self.sums.pop(index) for index in lost if index in self.sums]
        jobs = [index for index in lost if index < len(self.jobs)]
        self.queue.extendleft(reversed(jobs[1:]))
        if jobs:
            self._retry(jobs[0], reason, attempts=ATTEMPTS)
        for parts in sums:
            self._work_again(parts, reason)

    def _retry(self, index: int, reason: str, attempts: int) -> None:
        self._count(index, self.jobs[index].about, reason, attempts)
        self.queue.appendleft(index)

    def _count(self, what: Hashable, about: str, reason: str, attempts: int) -> None:
        self.attempts[what] += 1
        if self.attempts[what] >= attempts:
            first, _, more = reason.partition("\n")
            raise JobFailed(f"{first} (in all {attempts} attempts at: {self.verb}, {about})\n{more}".rstrip())

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if not self.flying and now - self.pool.idle_since > START_SECONDS:
            raise JobFailed(f"no client actor started within {START_SECONDS:.0f} s")
        for slot in self.pool.slots:
            if not slot.running and not slot.doubted:
                continue
            limit = self.pool.limit(*self._kind(slot.running[0])) if slot.running else math.inf
            if now - slot.since > limit:
                self._lose(slot, GetTimeoutError(f"no answer to a job within {limit:.0f} s"))
            elif slot.beat is not None and now - slot.heard > SILENT_SECONDS:
                self._lose(slot, GetTimeoutError(f"no sign of life within {SILENT_SECONDS:.0f} s"))
            elif slot.beat is None and now - slot.heard > BEAT_SECONDS:
                slot.beat, slot.heard = slot.actor.beat.remote(), now


def _death(place: Place, error: Exception) -> str:
    """Describe the loss of an actor: a sentence, the end of its log, and Ray's words."""
    if isinstance(error, GetTimeoutError):
        return f"a client actor gave {error}"
    lines = [
        f"a client actor died; its log is {place.log} on node {place.node[:8]}" if place.log else "a client actor died"
    ]
    with suppress(OSError):
        end = Path(place.log).read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
        lines += ["The log ends with:", *(f"  {line}" for line in end)] if end else []
    return "\n".join([*lines, f"Ray reports: {_message(error)}"])


def _get(ref: ray.ObjectRef) -> Any:
    """Return an actor's answer. A ConfigError of the actor is raised as one."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise ConfigError(str(error.cause)) from None
        raise


def raised(error: RayTaskError) -> str:
    """Describe an error of a job: a sentence and its traceback, which a RunFailed has in its message."""
    if isinstance(error.cause, RunFailed):
        return str(error.cause)
    return f"{_message(error)}\n{ANSI.sub('', str(error))}"


def _message(error: Exception) -> str:
    """Return an error's message without Ray's traceback."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"{type(cause).__name__}: {cause}".removesuffix(": ")
