"""The fleet: devices of the clients, their availability, and the times of visits.

Time of a visit with submodel S on device k, in seconds:

    down     8e-6 bytes_down(S) / down_mbps
    compute  (fixed_flops(S) + samples flops(S)) / (1e9 gflops) + steps step_ms / 1000
    up       8e-6 bytes_up(S) / up_mbps

Every draw has an address, so times are a function of the configuration: they depend on nothing that was learned, and on
no measurement of the machine that simulates.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from rayfl.clients import Population
from rayfl.core.seeds import numpy_generator
from rayfl.system import checked
from rayfl.system.devices import Device, Speed
from rayfl.system.samplers import Candidates
from rayfl.system.settings import System

MOST_PROFILED = 1000
"""Clients whose visits are timed before a run, at most."""


@dataclass(frozen=True)
class Work:
    """Work of a visit at one capacity."""

    flops: float
    """Floating point operations per training sample."""
    bytes_down: float
    bytes_up: float
    memory_mb: float = 0.0
    """Memory for training, in MB of 2^20 bytes."""
    fixed_flops: float = 0.0
    """Floating point operations per visit that do not depend on `training.steps` and `training.epochs`."""

    def operations(self, samples: int) -> float:
        """Return the floating point operations of a visit with this many training samples."""
        return self.fixed_flops + samples * self.flops


@dataclass(frozen=True)
class Dispatch:
    """A client that was sent a version of the model, and the times of its visit, which are known at once."""

    client: int
    version: int
    """Round whose server state it was sent."""
    start: float
    """Simulated seconds since the start of the run, like all times here. It downloads."""
    trains: float
    """Time at which training begins."""
    sends: float
    """Time at which the upload begins."""
    arrives: float
    """Time at which the upload ends, if the client stays."""
    finish: float
    """Time at which its update arrives or, if it is lost, at which the server learns of the loss."""
    is_lost: bool
    kind: str
    """Class of its device."""
    flops: float
    """Operations of the whole visit."""
    bytes_down: float
    bytes_up: float

    def spent(self, time: float) -> tuple[float, float]:
        """Return the operations and the bytes of the visit until a time after its start."""
        until = min(time, self.finish)

        def share(begin: float, end: float) -> float:
            if begin < until < end:
                return (until - begin) / (end - begin)
            return float(end <= until)

        down, compute = share(self.start, self.trains), share(self.trains, self.sends)
        return compute * self.flops, down * self.bytes_down + share(self.sends, self.arrives) * self.bytes_up

    @property
    def visit(self) -> tuple[int, int]:
        """(version, client), unique among the updates of a run."""
        return self.version, self.client


@dataclass(frozen=True)
class Fleet:
    """Clients with their devices."""

    system: System
    population: Population
    seed: int
    work: Mapping[float, Work]
    """Capacity -> work of a visit."""
    samples: Callable[[int], tuple[int, int]]
    """Function of a client that returns its training samples and steps per visit."""
    size: Callable[[int], int]
    """Function of a client: its number of training samples."""

    def device(self, client: int) -> Device:
        return checked.device(self.system.devices, client, self.seed)

    def capacity(self, client: int, round: int) -> float:
        """Return the client's capacity: the population's, or the largest one that its device can train."""
        if not self.system.gives_capacities:
            return self.population.capacity(client, self.seed, round)
        device = self.device(client)
        for capacity in self.population.own_capacities:
            if self._fits(client, device, self.work[capacity]):
                return capacity
        return self.population.own_capacities[-1]

    def _fits(self, client: int, device: Device, work: Work) -> bool:
        if self.system.capacities == "memory":
            return work.memory_mb <= device.memory_mb
        return self.system.capacity_s is not None and sum(self._seconds(client, work, device)) <= self.system.capacity_s

    def _seconds(self, client: int, work: Work, device: Device) -> tuple[float, float, float]:
        """Return the seconds of download, training and upload at the device's mean speeds."""
        samples, steps = self.samples(client)
        compute = work.operations(samples) / (1e9 * device.gflops.mean) + steps * self.system.step_ms / 1000
        return 8e-6 * work.bytes_down / device.down.mean, compute, 8e-6 * work.bytes_up / device.up.mean

    def dispatch(self, client: int, version: int, start: float, transfers: int, earlier: int = 0) -> Dispatch:
        """Return the visit of a client that starts now. `transfers`: clients that share the server's bandwidth.
        `earlier`: number of the client's earlier visits with this version, which were lost."""
        system, device = self.system, self.device(client)
        work = self.work[self.capacity(client, version)]
        draws = numpy_generator(self.seed, "visit", version, client, *([earlier] if earlier else []))
        gflops, down, up = (speed.draw(draws) for speed in (device.gflops, device.down, device.up))
        today = replace(device, gflops=Speed(gflops), down=Speed(down), up=Speed(up))
        down_s, compute_s, up_s = self._seconds(client, work, self._shared(today, transfers))
        arrives = start + (down_s + compute_s + up_s)
        leaves = checked.until(system.availability, client, start, self.seed)
        is_lost = leaves < arrives or draws.random() < system.dropout
        return Dispatch(
            client,
            version,
            start,
            start + down_s,
            start + (down_s + compute_s),
            arrives,
            min(arrives, leaves),
            is_lost,
            device.kind,
            work.operations(self.samples(client)[0]),
            work.bytes_down,
            work.bytes_up,
        )

    def _shared(self, device: Device, transfers: int) -> Device:
        """Return a device with the server's bandwidth as the limit of its mean speeds. `transfers`: clients that share
        it."""
        down, up = (
            min(speed.mean, (limit or math.inf) / transfers)
            for speed, limit in ((device.down, self.system.server_down_mbps), (device.up, self.system.server_up_mbps))
        )
        return replace(device, down=Speed(down), up=Speed(up))

    def candidates(self, version: int, draw: int, seconds: float, busy: Collection[int]) -> Candidates:
        """Return the clients that can be asked now. `draw`: number of the draw for this version."""
        return Candidates(
            self.population.count,
            numpy_generator(self.seed, "asked", version, draw),
            lambda id: id not in busy and self.is_available(id, seconds),
            self.size,
            lambda id: self.samples(id)[0],
            lambda id: sum(self.seconds(id, version)),
            lambda: self.profile,
            None if draw or busy else partial(self.population.sample, self.seed, version),
        )

    def is_available(self, client: int, seconds: float) -> bool:
        return checked.is_available(self.system.availability, client, seconds, self.seed)

    def has_available(self, seconds: float) -> bool:
        """Return whether any client is available."""
        return any(self.is_available(id, seconds) for id in range(self.population.count))

    @cached_property
    def profile(self) -> np.ndarray:
        """Ascending seconds of the visits of `some` clients."""
        return np.sort([sum(self.seconds(id)) for id in self.some])

    @cached_property
    def some(self) -> list[int]:
        """At most 1,000 clients, one per block of ids: the first, then the second of the next block, and so on, so that
        classes that are assigned in turn keep their shares."""
        count = self.population.count
        step = -(-count // MOST_PROFILED)
        return [id for i in range(-(-count // step)) if (id := i * step + i % step) < count]

    def seconds(self, client: int, round: int = 0, transfers: int = 1) -> tuple[float, float, float]:
        """Return the seconds of a client's download, training and upload at mean speeds, with its capacity in a round.
        `transfers`: clients that share the server's bandwidth."""
        device = self._shared(self.device(client), transfers)
        return self._seconds(client, self.work[self.capacity(client, round)], device)
